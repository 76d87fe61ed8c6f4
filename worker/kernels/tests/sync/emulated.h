// The machine under the kernel's headers, on a host: a thread stands for a lane, mbarriers are one atomic word, bulk copies are made by a thread of
// their own after a while. Barriers order what the GPU's order and nothing else, so that ThreadSanitizer sees what the protocol forgets.
#pragma once
#include <atomic>
#include <barrier>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define LP_DEVICE inline
struct alignas(16) Quad {
  u32 x, y, z, w;
};

/// A warp: as many lanes as take part in its collectives.
struct Warp {
  explicit Warp(int lanes) : lanes(lanes), meet(lanes), values(lanes) {}
  int lanes;
  std::barrier<> meet;
  std::vector<u32> values;
};
struct Index {
  u32 x;
};
inline thread_local Index threadIdx, blockIdx;
inline thread_local Warp* warp_of_lane = nullptr;
inline thread_local std::vector<u32>* seen_fragments = nullptr;

constexpr u32 kAllLanes = ~0u;
inline u32 exchanged(u32 mine, int from) {
  Warp& warp = *warp_of_lane;
  if (warp.lanes == 1) return mine;
  warp.values[threadIdx.x & 31] = mine;
  warp.meet.arrive_and_wait();
  const u32 value = warp.values[from];
  warp.meet.arrive_and_wait();
  return value;
}
inline u32 shuffle_xor(u32 v, int mask) { return exchanged(v, (threadIdx.x & 31) ^ mask); }
inline bool any_lane(bool v) {
  Warp& warp = *warp_of_lane;
  if (warp.lanes == 1) return v;
  warp.values[threadIdx.x & 31] = v;
  warp.meet.arrive_and_wait();
  bool any = false;
  for (int lane = 0; lane < warp.lanes; lane++) any |= warp.values[lane] != 0;
  warp.meet.arrive_and_wait();
  return any;
}
template <class T> T shuffle(T v, int) { return v; }  // of consumers, which are warps of one lane here
inline float shuffle_xor(float v, int) { return v; }
inline u32 __ballot_sync(u32, bool v) { return v; }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline void __syncwarp() {}
inline float __uint_as_float(u32 v) { return __builtin_bit_cast(float, v); }
inline u32 __float_as_uint(float v) { return __builtin_bit_cast(u32, v); }
inline long long clock64() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count() / 40;
}
inline void fence_system() {}
inline void trap() { std::abort(); }
inline u64 policy_evict_first() { return 0; }
inline Quad load_relaxed_16(const u8* p) {
  Quad v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void store_relaxed_8(u8* p, u32 x, u32 y) { std::memcpy(p, &x, 4), std::memcpy(p + 4, &y, 4); }
inline void store_relaxed_16(u8* p, u32 x, u32 y, u32 z, u32 w) { store_relaxed_8(p, x, y), store_relaxed_8(p + 8, z, w); }
inline Quad load_relaxed_8x2(const u8* p) { return load_relaxed_16(p); }
inline Quad load_relaxed_4x4(const u8* p) { return load_relaxed_16(p); }
inline u32 load_relaxed_u32(const u8* p) {
  u32 v;
  std::memcpy(&v, p, 4);
  return v;
}

/// Now and then a thread is held up.
inline void stumble() {
  static std::atomic<u32> seeds{1};
  thread_local u32 state = seeds.fetch_add(0x9e3779b9u);
  state = state * 1664525u + 1013904223u;
  if (state >> 26 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state >> 16 & 255));
}

// ---- shared memory ----
inline u8 shared_bytes[232448];
inline Quad load_shared_16(u32 address) {
  stumble();
  Quad v;
  std::memcpy(&v, shared_bytes + address, 16);
  return v;
}
inline void store_shared_f32(u32 address, float v) { std::memcpy(shared_bytes + address, &v, 4); }

// ---- mbarriers: phase << 40 | arrivals missing << 32 | bytes missing ----
struct Mbarrier {
  std::atomic<u64> state{0};
  u64 count = 0;
};
inline Mbarrier mbarriers[sizeof(shared_bytes) / 8];
inline void mbarrier_init(u32 barrier, u32 count) {
  mbarriers[barrier / 8].count = count;
  mbarriers[barrier / 8].state = (u64)count << 32;
}
inline void mbarrier_change(u32 barrier, u64 arrivals, long long bytes) {
  Mbarrier& b = mbarriers[barrier / 8];
  u64 old = b.state.load(std::memory_order_relaxed), now;
  do {
    now = old - (arrivals << 32);
    now = (now & ~0xffffffffull) | (u32)((u32)now + bytes);
    if ((now & ((1ull << 40) - 1)) == 0) now = ((now >> 40) + 1) << 40 | b.count << 32;
  } while (!b.state.compare_exchange_weak(old, now, std::memory_order_acq_rel, std::memory_order_relaxed));
}
inline void mbarrier_expect(u32 barrier, u32 bytes) { mbarrier_change(barrier, 1, bytes); }
inline void mbarrier_arrive(u32 barrier) { mbarrier_change(barrier, 1, 0); }
inline bool mbarrier_test_wait(u32 barrier, u32 parity) {
  stumble();
  return (mbarriers[barrier / 8].state.load(std::memory_order_acquire) >> 40 & 1) != parity;
}
inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
  std::this_thread::yield();
  return mbarrier_test_wait(barrier, parity);
}

// ---- bulk copies ----
struct Copies {
  struct Copy {
    u32 to;
    const u8* from;
    u32 bytes, barrier;
  };
  std::mutex lock;
  std::condition_variable more;
  std::deque<Copy> queue;
  bool over = false;
  void run() {
    while (true) {
      Copy copy;
      {
        std::unique_lock held(lock);
        more.wait(held, [&] { return over || !queue.empty(); });
        if (queue.empty()) return;
        copy = queue.front();
        queue.pop_front();
      }
      stumble();
      std::memcpy(shared_bytes + copy.to, copy.from, copy.bytes);
      mbarrier_change(copy.barrier, 0, -(long long)copy.bytes);
    }
  }
};
inline Copies copies;
inline void bulk_load(u32 to, const u8* from, u32 bytes, u32 barrier, u64) {
  std::lock_guard held(copies.lock);
  copies.queue.push_back({to, from, bytes, barrier});
  copies.more.notify_one();
}

// ---- arithmetic: a product only notes which fragment it was given ----
inline void mma_m16n8k16(float*, const Quad& a, u32, u32) { seen_fragments->push_back(a.x); }
