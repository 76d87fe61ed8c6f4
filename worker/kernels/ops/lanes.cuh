// What the sampler needs of the machine: exchange words, barriers, warp collectives, IEEE arithmetic that no compiler flag
// contracts. Inline PTX, no headers. With LP_EMULATED the tests' emulate.h gives the same functions on a host's fibers.
#pragma once
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#ifdef LP_EMULATED
#include "emulate.h"
#else
#define LP_DEVICE __device__ __forceinline__
#define LP_CALL __device__ __noinline__ // off the fast path, or used often: code size and the caller's registers count

namespace sampling {

// An exchange word: one relaxed 16-byte store, one relaxed 16-byte load; `tag` says which exchange wrote it.
struct Word { u32 x, y, tag, w; };

LP_DEVICE Word ld_relaxed(const u8* p) {
  u64 a, b;
  asm volatile("{\n.reg .b128 r;\nld.relaxed.gpu.global.b128 r,[%2];\nmov.b128 {%0,%1}, r;\n}" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return Word{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
LP_DEVICE void st_relaxed(u8* p, Word v) {
  const u64 a = (u64)v.y << 32 | v.x, b = (u64)v.w << 32 | v.tag;
  asm volatile("{\n.reg .b128 r;\nmov.b128 r, {%1,%2};\nst.relaxed.gpu.global.b128 [%0], r;\n}" ::"l"(p), "l"(a), "l"(b) : "memory");
}
// To mapped host memory: orders everything this thread saw before it (system).
LP_DEVICE void st_release_sys(u64* p, u64 v) { asm volatile("st.release.sys.global.b64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
LP_DEVICE void st_relaxed_sys(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.b64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
// Orders everything the participants did before it (block).
LP_DEVICE void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory"); }
LP_DEVICE long long ticks() { return clock64(); }
LP_DEVICE void relax() {}
// Tells the host which wait failed (block, thread, site, expected, seen), then ends the launch.
LP_DEVICE void fail(u32* report, u32 block, u32 thread, u32 site, u32 expected, u32 seen) {
  volatile u32* r = report;
  r[1] = block; r[2] = thread; r[3] = site; r[4] = expected; r[5] = seen;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  r[0] = 1;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("trap;");
}

// Whole-warp collectives.
LP_DEVICE void warp_sync() { __syncwarp(); }
LP_DEVICE u32 warp_max(u32 v) { return __reduce_max_sync(~0u, v); }
LP_DEVICE u32 warp_add(u32 v) { return __reduce_add_sync(~0u, v); }
LP_DEVICE u32 ballot(bool v) { return __ballot_sync(~0u, v); }
LP_DEVICE u32 shuffle(u32 v, u32 lane) { return __shfl_sync(~0u, v, lane); }
LP_DEVICE u64 shuffle(u64 v, u32 lane) { return __shfl_sync(~0u, v, lane); }
LP_DEVICE u64 shuffle_xor(u64 v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
LP_DEVICE u64 shuffle_up(u64 v, u32 by) { return __shfl_up_sync(~0u, v, by); }

LP_DEVICE u32 bits(float v) { return __float_as_uint(v); }
LP_DEVICE float float_of(u32 v) { return __uint_as_float(v); }
LP_DEVICE u64 bits(double v) { return (u64)__double_as_longlong(v); }
LP_DEVICE double double_of(u64 v) { return __longlong_as_double((long long)v); }
LP_DEVICE u32 popc(u32 v) { return __popc(v); }
LP_DEVICE u32 lowest_bit(u32 v) { return __ffs(v) - 1; }
LP_DEVICE u32 mul_hi(u32 a, u32 b) { return __umulhi(a, b); }

LP_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
LP_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
LP_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
LP_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
LP_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
LP_DEVICE double sub(double a, double b) { return __dsub_rn(a, b); }
LP_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
LP_DEVICE double div(double a, double b) { return __ddiv_rn(a, b); }
LP_DEVICE double round_up(double a) { return ceil(a); }
LP_DEVICE double to_double(u64 v) { return __ull2double_rn(v); }
LP_DEVICE u64 to_integer(double v) { return __double2ull_rz(v); }
LP_DEVICE u64 to_integer(float v) { return (u64)__float2ll_rz(v); }

// Order-free updates.
LP_DEVICE void atomic_max(u64* p, u64 v) { atomicMax(p, v); }
LP_DEVICE void atomic_add(u64* p, u64 v) { atomicAdd(p, v); }
LP_DEVICE void atomic_add(u32* p, u32 v) { atomicAdd(p, v); }
LP_DEVICE void atomic_or(u32* p, u32 v) { atomicOr(p, v); }

}  // namespace sampling
#endif
