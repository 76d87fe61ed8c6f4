// What the sampler uses of ptx/ptx.cuh, sync/wait.cuh and ops/lanes.cuh, on a host: every thread of every block is a
// fiber of one host thread, warps meet at collectives. For tests of the sampler without a GPU; nothing here is fast.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#include <vector>
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#define LP_DEVICE static inline
struct alignas(16) Quad { u32 x, y, z, w; };

namespace emulated {

struct Meeting { u64 slots[2][32]; u32 arrived, generation; }; // of a warp
struct Barrier { u32 arrived, generation; };
struct Fiber {
  ucontext_t context;
  Meeting* warp;
  u32 lane;
  Barrier* barriers;
  bool done;
  const u32* wait;
  u32 wait_value;
  std::vector<char> stack;
};
inline ucontext_t scheduler;
inline Fiber* current;
inline std::function<void(u32, u32)> body;

inline void yield() { swapcontext(&current->context, &scheduler); }
inline void wait_while(const u32* p, u32 value) {
  while (*(const volatile u32*)p == value) { current->wait = p; current->wait_value = value; yield(); }
}
// All 32 values of the warp.
inline const u64* meet(u64 v) {
  Meeting& m = *current->warp;
  const u32 g = m.generation;
  m.slots[g & 1][current->lane] = v;
  if (++m.arrived == 32) { m.arrived = 0; m.generation++; } else wait_while(&m.generation, g);
  return m.slots[g & 1];
}
inline void enter(u32 block, u32 thread) { body(block, thread); current->done = true; yield(); }

// Calls f(block, thread) for all, interleaved in an order that `seed` changes.
inline void launch(u32 blocks, u32 threads, u32 seed, std::function<void(u32, u32)> f) {
  body = f;
  std::vector<Fiber> fibers(blocks * threads);
  std::vector<Meeting> warps(blocks * threads / 32);
  std::vector<Barrier> barriers(blocks * 16);
  memset((void*)warps.data(), 0, warps.size() * sizeof(Meeting));
  memset((void*)barriers.data(), 0, barriers.size() * sizeof(Barrier));
  for (u32 i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    fiber.warp = &warps[i / 32];
    fiber.lane = i % 32;
    fiber.barriers = &barriers[i / threads * 16];
    fiber.done = false;
    fiber.wait = nullptr;
    fiber.stack.resize(48 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, (void (*)())enter, 2, i / threads, i % threads);
  }
  u32 left = fibers.size(), step = 1 + 2 * (seed % 1000);
  while (step % 3 == 0 || step % 11 == 0) step += 2; // prime to the number of fibers, a product of 2, 3, 11
  for (u32 i = seed % fibers.size(); left > 0; i = (i + step) % fibers.size()) {
    Fiber& fiber = fibers[i];
    if (fiber.done || (fiber.wait && *fiber.wait == fiber.wait_value)) continue;
    fiber.wait = nullptr;
    current = &fiber;
    swapcontext(&scheduler, &fiber.context);
    left -= fiber.done;
  }
}

}  // namespace emulated

constexpr long long kWaitLimit = 1000000000;
constexpr u32 kSiteSamplerBest = 20;
LP_DEVICE Quad load_relaxed_16(const u8* p) { Quad v; memcpy(&v, p, 16); return v; }
LP_DEVICE void store_relaxed_16(u8* p, u32 x, u32 y, u32 z, u32 w) { const Quad v{x, y, z, w}; memcpy(p, &v, 16); }
LP_DEVICE void store_release_system_u64(u64* p, u64 v) { *p = v; }
LP_DEVICE void store_system_u64(u64* p, u64 v) { *p = v; }
LP_DEVICE void store_system_u32(u32* p, u32 v) { *p = v; }
LP_DEVICE u32 load_system_u32(const u32* p) { return *p; }
LP_DEVICE void barrier_sync(u32 id, u32 threads) {
  emulated::Barrier& b = emulated::current->barriers[id];
  const u32 g = b.generation;
  if (++b.arrived == threads) { b.arrived = 0; b.generation++; } else emulated::wait_while(&b.generation, g);
}
// Waits look at the clock in every round.
LP_DEVICE long long clock64() { static long long count = 0; emulated::yield(); return count++; }
template <class L> void wait_failed(const L& launch, u32 site, u32 expected, u32 seen) {
  printf("wait failed: site %u expected %u seen %u\n", site, expected, seen);
  launch.report[0] = 1;
  exit(3);
}
template <class T> T shuffle(T v, u32 lane) { return (T)emulated::meet(v)[lane % 32]; }
template <class T> T shuffle_xor(T v, u32 mask) {
  const u32 l = emulated::current->lane;
  return (T)emulated::meet(v)[l ^ mask];
}

namespace sampling {

LP_DEVICE void warp_sync() { emulated::meet(0); }
LP_DEVICE u32 warp_max(u32 v) {
  const u64* s = emulated::meet(v);
  u64 m = 0;
  for (int i = 0; i < 32; i++) m = s[i] > m ? s[i] : m;
  return (u32)m;
}
LP_DEVICE u32 warp_add(u32 v) {
  const u64* s = emulated::meet(v);
  u32 n = 0;
  for (int i = 0; i < 32; i++) n += (u32)s[i];
  return n;
}
LP_DEVICE u32 ballot(bool v) {
  const u64* s = emulated::meet(v);
  u32 n = 0;
  for (int i = 0; i < 32; i++) n |= (u32)s[i] << i;
  return n;
}
LP_DEVICE u64 shuffle_up(u64 v, u32 by) {
  const u32 l = emulated::current->lane;
  return emulated::meet(v)[l < by ? l : l - by];
}

LP_DEVICE u32 bits(float v) { u32 r; memcpy(&r, &v, 4); return r; }
LP_DEVICE float float_of(u32 v) { float r; memcpy(&r, &v, 4); return r; }
LP_DEVICE u64 bits(double v) { u64 r; memcpy(&r, &v, 8); return r; }
LP_DEVICE double double_of(u64 v) { double r; memcpy(&r, &v, 8); return r; }
LP_DEVICE u32 popc(u64 v) { return __builtin_popcountll(v); }
LP_DEVICE u32 lowest_bit(u64 v) { return __builtin_ffsll(v) - 1; }
LP_DEVICE u32 mul_hi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
template <class T> LP_DEVICE T add(T a, T b) { return a + b; }
template <class T> LP_DEVICE T sub(T a, T b) { return a - b; }
template <class T> LP_DEVICE T mul(T a, T b) { return a * b; }
template <class T> LP_DEVICE T div(T a, T b) { return a / b; }
LP_DEVICE double round_up(double a) { return ::ceil(a); }
LP_DEVICE double to_double(u64 v) { return (double)v; }
LP_DEVICE u64 to_integer(double v) { return (u64)v; }
LP_DEVICE u64 to_integer(float v) { return (u64)v; }
LP_DEVICE void atomic_max(u64* p, u64 v) { if (v > *p) *p = v; }
LP_DEVICE void atomic_add(u64* p, u64 v) { *p += v; }
LP_DEVICE void atomic_add(u32* p, u32 v) { *p += v; }
LP_DEVICE void atomic_or(u32* p, u32 v) { *p |= v; }

}  // namespace sampling
