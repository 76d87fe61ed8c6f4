// All inline assembly of the kernels: one function an instruction, names as in the PTX manual.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LP_DEVICE __device__ __forceinline__

// ---- shared memory ----

LP_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
/// 16 bytes: four registers of bf16 pairs or words.
struct alignas(16) Quad {
  u32 x, y, z, w;
};
LP_DEVICE Quad load_shared_16(u32 address) {
  Quad v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
/// Four 8 x 8 matrices of bf16, whose rows of 16 bytes begin at the addresses that lanes 8 i .. 8 i + 7 give for matrix
/// i. Lane 4 g + t gets elements 2t, 2t + 1 of row g of each.
LP_DEVICE Quad ldmatrix_x4(u32 address) {
  Quad v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
LP_DEVICE float load_shared_f32(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0,[%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
LP_DEVICE uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
LP_DEVICE void load_shared_8(u32 address, float* v) {
  asm volatile("ld.shared.v2.f32 {%0,%1},[%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address) : "memory");
}
LP_DEVICE u32 load_shared_u32(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
LP_DEVICE void store_shared_f32(u32 address, float v) {
  asm volatile("st.shared.f32 [%0],%1;" ::"r"(address), "f"(v) : "memory");
}
LP_DEVICE void store_shared_u32(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(address), "r"(v) : "memory");
}
LP_DEVICE void store_shared_8(u32 address, const float* v) {
  asm volatile("st.shared.v2.f32 [%0],{%1,%2};" ::"r"(address), "f"(v[0]), "f"(v[1]) : "memory");
}
LP_DEVICE void store_shared_16(u32 address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
LP_DEVICE void store_shared_16(u32 address, const Quad& v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
LP_DEVICE void store_shared_u16(u32 address, u32 v) {
  asm volatile("st.shared.u16 [%0],%1;" ::"r"(address), "h"((u16)v) : "memory");
}

// ---- barriers and bulk copies ----

LP_DEVICE void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
LP_DEVICE void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
LP_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
LP_DEVICE void mbarrier_arrive(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
LP_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
/// Does not suspend the thread, as try_wait may.
LP_DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
LP_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
LP_DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
LP_DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
/// Part of the thread's next group of copies.
LP_DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
LP_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until all groups of the thread's copies have read what they copy; have written it.
LP_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
LP_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
LP_DEVICE void bulk_prefetch_l2(const void* from, u32 bytes, u64 policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0],%1,%2;" ::"l"(from), "r"(bytes), "l"(policy)
               : "memory");
}
LP_DEVICE void bulk_prefetch_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}
LP_DEVICE u64 policy_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
LP_DEVICE u64 policy_evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
LP_DEVICE void barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts as arrived at a barrier that others wait at.
LP_DEVICE void barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
LP_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
LP_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- clusters ----

/// The address in the shared memory of block `rank` of the cluster that `address` is in this block's.
LP_DEVICE u32 map_shared(u32 address, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
/// Orders nothing: a release at cluster scope would wait for all that the block has stored (1 to 2 us under load).
LP_DEVICE void mbarrier_arrive_remote(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// From this block's shared memory to another's, whose barrier counts the bytes.
LP_DEVICE void bulk_send(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
/// The same bytes to the same place of both blocks of a pair, whose barriers count them.
LP_DEVICE void bulk_load_pair(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"((u16)3)
      : "memory");
}
LP_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int N> LP_DEVICE void raise_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> LP_DEVICE void lower_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- global memory ----

LP_DEVICE Quad load_relaxed_16(const u8* p) {
  u64 a, b;
  asm volatile("{\n.reg .b128 r;\nld.relaxed.gpu.global.b128 r,[%2];\nmov.b128 {%0,%1}, r;\n}"
               : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
LP_DEVICE void store_relaxed_16(u8* p, u32 x, u32 y, u32 z, u32 w) {
  u64 a = (u64)y << 32 | x, b = (u64)w << 32 | z;
  asm volatile("{\n.reg .b128 r;\nmov.b128 r, {%1,%2};\nst.relaxed.gpu.global.b128 [%0], r;\n}" ::"l"(p), "l"(a), "l"(b)
               : "memory");
}
/// Two words of 8 bytes.
LP_DEVICE Quad load_relaxed_8x2(const u8* p) {
  u64 a, b;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1},[%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
LP_DEVICE void store_relaxed_8(u8* p, u32 x, u32 y) {
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"((u64)y << 32 | x) : "memory");
}
/// Four words of 4 bytes.
LP_DEVICE Quad load_relaxed_4x4(const u8* p) {
  Quad v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
LP_DEVICE u32 load_acquire_u32(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
LP_DEVICE u32 load_relaxed_u32(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
LP_DEVICE u64 load_relaxed_u64(const void* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
LP_DEVICE void store_relaxed_u64(void* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
LP_DEVICE void store_relaxed_u32(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
/// Orders all that the thread did, or saw others do, before it.
LP_DEVICE void add_release_u32(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
/// The value before.
LP_DEVICE u32 fetch_add_release_u32(u32* p, u32 v) {
  u32 before;
  asm volatile("atom.release.gpu.global.add.u32 %0,[%1],%2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
LP_DEVICE void store_floats(u8* p, const float* v) {
  asm volatile("st.global.v4.f32 [%0],{%1,%2,%3,%4};" ::"l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
LP_DEVICE void store_16(u8* p, const Quad& v) {
  asm volatile("st.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
LP_DEVICE void store_f32x2(float* p, float a, float b) {
  asm volatile("st.global.v2.f32 [%0],{%1,%2};" ::"l"(p), "f"(a), "f"(b) : "memory");
}
LP_DEVICE void store_u32(u8* p, u32 v) { asm volatile("st.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
LP_DEVICE void store_u16(u8* p, u32 v) { asm volatile("st.global.u16 [%0],%1;" ::"l"(p), "h"((u16)v) : "memory"); }
LP_DEVICE float load_relaxed_f32(const float* p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
LP_DEVICE Quad load_constant_16(const void* p) {
  Quad v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
LP_DEVICE u32 load_constant_u32(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
LP_DEVICE float load_constant_f32(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0,[%1];" : "=f"(v) : "l"(p));
  return v;
}
LP_DEVICE u32 load_constant_u16(const u8* p) {
  u16 v;
  asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(v) : "l"(p));
  return v;
}
/// As load_relaxed_16 and store_relaxed_16, among GPUs.
LP_DEVICE Quad load_system_16(const u8* p) {
  u64 a, b;
  asm volatile("{\n.reg .b128 r;\nld.relaxed.sys.global.b128 r,[%2];\nmov.b128 {%0,%1}, r;\n}"
               : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
LP_DEVICE void store_system_16(u8* p, u32 x, u32 y, u32 z, u32 w) {
  u64 a = (u64)y << 32 | x, b = (u64)w << 32 | z;
  asm volatile("{\n.reg .b128 r;\nmov.b128 r, {%1,%2};\nst.relaxed.sys.global.b128 [%0], r;\n}" ::"l"(p), "l"(a), "l"(b)
               : "memory");
}
LP_DEVICE u32 load_system_u32(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
/// Orders what the writer of the value did before it, before all that the thread does next (system).
LP_DEVICE u32 load_acquire_system_u32(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
LP_DEVICE void store_system_u32(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
LP_DEVICE void store_system_u64(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
/// Orders everything this thread saw before it (system).
LP_DEVICE void store_release_system_u64(u64* p, u64 v) {
  asm volatile("st.release.sys.global.b64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
LP_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
LP_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
/// For about so many ns: up to twice as long, or not at all.
LP_DEVICE void nap(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }
LP_DEVICE u64 global_nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
LP_DEVICE u32 multiprocessor() {
  u32 id;
  asm("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}
LP_DEVICE void trap() { asm volatile("trap;"); }

// ---- launches ----

/// Lets the next launch begin where this one leaves room, if it was put in to do so.
LP_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// Waits until the launch before is complete: orders all that it wrote before what this thread reads from here on.
LP_DEVICE void wait_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- arithmetic ----

/// c += A B: A [16 rows][16 k] as `a`, B [16 k][8 columns] as b0 (k 2t, 2t+1) and b1 (k 2t+8, 2t+9) of column g, for
/// lane 4 g + t. c: (row g, columns 2t, 2t+1), (row g+8, the same).
LP_DEVICE void mma_m16n8k16(float* c, const Quad& a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
LP_DEVICE u32 bf16_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
/// Of two bf16 each, subnormal ones too, rounded once.
LP_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
LP_DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
LP_DEVICE u32 subtract_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
/// A half of a word in both halves. Instructions on pairs take either half of an operand for both of theirs, so this is
/// none of its own.
LP_DEVICE u32 low_twice(u32 word) {
  u32 r;
  asm("{.reg .b16 l,h;mov.b32 {l,h},%1;mov.b32 %0,{l,l};}" : "=r"(r) : "r"(word));
  return r;
}
LP_DEVICE u32 high_twice(u32 word) {
  u32 r;
  asm("{.reg .b16 l,h;mov.b32 {l,h},%1;mov.b32 %0,{h,h};}" : "=r"(r) : "r"(word));
  return r;
}
LP_DEVICE float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
LP_DEVICE float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}
LP_DEVICE float rsqrt_approx(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}
LP_DEVICE float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}
/// Transposes an 8 x 8 matrix of bf16 whose row g lies in lanes 4 g .. 4 g + 3, two values a lane.
LP_DEVICE u32 transpose_8x8(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(v));
  return r;
}

// ---- warp ----

constexpr u32 kAllLanes = ~0u;
// Of an index that is known throughout, the compiler keeps all that follows from it in registers throughout, too. So
// these are read anew at each call.
LP_DEVICE u32 lane_index() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
/// The same value, of which the compiler knows nothing: what follows from it is computed where it is used.
LP_DEVICE u32 unknown(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
LP_DEVICE u32 thread_index() { return unknown(threadIdx.x); }
LP_DEVICE u32 warp_index() { return thread_index() >> 5; }
template <class T> LP_DEVICE T shuffle(T v, int lane) { return __shfl_sync(kAllLanes, v, lane); }
template <class T> LP_DEVICE T shuffle_xor(T v, int mask) { return __shfl_xor_sync(kAllLanes, v, mask); }
/// True of one lane of a warp that has converged, known sooner than an index.
LP_DEVICE bool elected() {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}
LP_DEVICE bool any_lane(bool v) { return __any_sync(kAllLanes, v); }
