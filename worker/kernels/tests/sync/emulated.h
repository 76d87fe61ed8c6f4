// The machine under the kernel's headers, on a host: a thread stands for a lane, mbarriers are one atomic word, bulk
// copies are made by a thread of their own after a while. Barriers order what the GPU's order and nothing else, so that
// ThreadSanitizer sees what the protocol forgets.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
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
#define __device__
#define __noinline__
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
inline u32 lane_index() { return threadIdx.x & 31; }
inline u32 exchanged(u32 mine, int from) {
  Warp& warp = *warp_of_lane;
  if (warp.lanes == 1) return mine;
  warp.values[lane_index()] = mine;
  warp.meet.arrive_and_wait();
  const u32 value = warp.values[from];
  warp.meet.arrive_and_wait();
  return value;
}
inline u32 shuffle(u32 v, int lane) { return exchanged(v, lane); }
inline u32 shuffle_xor(u32 v, int mask) { return exchanged(v, lane_index() ^ mask); }
inline u32 __ballot_sync(u32, bool v) {
  Warp& warp = *warp_of_lane;
  if (warp.lanes == 1) return (u32)v << lane_index();
  warp.values[lane_index()] = v;
  warp.meet.arrive_and_wait();
  u32 set = 0;
  for (int lane = 0; lane < warp.lanes; lane++) set |= (u32)(warp.values[lane] != 0) << lane;
  warp.meet.arrive_and_wait();
  return set;
}
/// How often lanes have met in `any_lane`.
inline std::atomic<u32> lanes_met{0};
inline bool any_lane(bool v) {
  const bool any = __ballot_sync(kAllLanes, v) != 0;
  if (warp_of_lane->lanes > 1 && lane_index() == 0) lanes_met++;
  return any;
}
template <class T> T shuffle(T v, int) { return v; }  // of consumers, which are warps of one lane here
inline float shuffle_xor(float v, int mask) {
  return __builtin_bit_cast(float, shuffle_xor(__builtin_bit_cast(u32, v), mask));
}
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
/// Warps of all their lanes meet; what others have of a warp is ordered by its collectives alone.
inline void __syncwarp() {
  if (warp_of_lane->lanes == 32) warp_of_lane->meet.arrive_and_wait();
}
inline float __uint_as_float(u32 v) { return __builtin_bit_cast(float, v); }
inline u32 __float_as_uint(float v) { return __builtin_bit_cast(u32, v); }
inline long long clock64() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() / 40;
}
inline void fence_system() {}
/// A check of the kernel's own that failed: says which.
inline void trap(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  std::fprintf(stderr, "trapped at %s:%d\n", file, line);
  std::abort();
}
inline u64 policy_evict_first() { return 0; }
inline void nap(u32) { std::this_thread::yield(); }

/// Now and then a thread is held up.
inline void stumble() {
  static std::atomic<u32> seeds{1};
  thread_local u32 state = seeds.fetch_add(0x9e3779b9u);
  state = state * 1664525u + 1013904223u;
  if (state >> 26 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state >> 16 & 255));
}

// ---- exchange words: atomic, and ordered by nothing but fences. ThreadSanitizer knows no fences: here one makes what
// the thread has seen an acquire, and the 16-byte words that it writes next a release. ----
inline thread_local std::vector<const u64*> seen_tags;
inline thread_local bool fenced = false;
inline void fence_gpu() {
  for (const u64* tag : seen_tags) (void)__atomic_load_n(tag, __ATOMIC_ACQUIRE);
  seen_tags.clear();
  fenced = true;
}
inline u64 load_relaxed_u64(const u8* p) {
  stumble();
  return __atomic_load_n((const u64*)p, __ATOMIC_RELAXED);
}
inline u32 load_relaxed_u32(const u8* p) {
  std::this_thread::yield();
  return __atomic_load_n((const u32*)p, __ATOMIC_RELAXED);
}
inline Quad load_relaxed_16(const u8* p) {
  std::this_thread::yield();
  const u64 b = load_relaxed_u64(p + 8), a = load_relaxed_u64(p);  // the tag last written is the first read
  seen_tags.push_back((const u64*)(p + 8));
  return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
inline Quad load_relaxed_8x2(const u8* p) {
  const u64 a = load_relaxed_u64(p), b = load_relaxed_u64(p + 8);
  return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
inline Quad load_relaxed_4x4(const u8* p) {
  return Quad{load_relaxed_u32(p), load_relaxed_u32(p + 4), load_relaxed_u32(p + 8), load_relaxed_u32(p + 12)};
}
inline void store_relaxed_u32(u8* p, u32 v) {
  fenced = false;
  __atomic_store_n((u32*)p, v, __ATOMIC_RELAXED);
}
inline u32 load_acquire_u32(const u32* p) {
  stumble();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void add_release_u32(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline void store_relaxed_8(u8* p, u32 x, u32 y) {
  stumble();
  fenced = false;
  __atomic_store_n((u64*)p, (u64)y << 32 | x, __ATOMIC_RELAXED);
}
inline void store_relaxed_16(u8* p, u32 x, u32 y, u32 z, u32 w) {
  stumble();
  __atomic_store_n((u64*)p, (u64)y << 32 | x, __ATOMIC_RELAXED);
  if (fenced) __atomic_store_n((u64*)(p + 8), (u64)w << 32 | z, __ATOMIC_RELEASE);
  else __atomic_store_n((u64*)(p + 8), (u64)w << 32 | z, __ATOMIC_RELAXED);
}
/// Words of other ranks: some have no tag, so all 16 bytes are read and written at once.
inline Quad load_system_16(const u8* p) {
  stumble();
  return __builtin_bit_cast(Quad, __atomic_load_n((const unsigned __int128*)p, __ATOMIC_RELAXED));
}
inline void store_system_16(u8* p, u32 x, u32 y, u32 z, u32 w) {
  stumble();
  __atomic_store_n((unsigned __int128*)p, __builtin_bit_cast(unsigned __int128, (Quad{x, y, z, w})), __ATOMIC_RELAXED);
}
inline u32 load_system_u32(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u32 load_acquire_system_u32(const u32* p) {
  stumble();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void store_system_u32(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_system_u64(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
/// Ordinary stores: a race with whoever is not ordered behind them.
inline void store_16(u8* p, const Quad& v) {
  stumble();
  fenced = false;
  std::memcpy(p, &v, 16);
}
inline void store_u16(u8* p, u32 v) { std::memcpy(p, &v, 2); }
inline u32 load_constant_u32(const u32* p) { return *p; }
inline u32 load_constant_u16(const u8* p) {
  u16 v;
  std::memcpy(&v, p, 2);
  return v;
}

// ---- shared memory, of several blocks ----
inline u8 shared_bytes[4 * 232448];
inline Quad load_shared_16(u32 address) {
  stumble();
  Quad v;
  std::memcpy(&v, shared_bytes + address, 16);
  return v;
}
struct uint2 {
  u32 x, y;
};
inline uint2 load_shared_8(u32 address) {
  const Quad v = load_shared_16(address & ~15u);
  return address & 8 ? uint2{v.z, v.w} : uint2{v.x, v.y};
}
inline float load_shared_f32(u32 address) {
  float v;
  std::memcpy(&v, shared_bytes + address, 4);
  return v;
}
inline u32 load_shared_u32(u32 address) { return __float_as_uint(load_shared_f32(address)); }
inline void store_shared_f32(u32 address, float v) { std::memcpy(shared_bytes + address, &v, 4); }
inline void store_shared_u32(u32 address, u32 v) { std::memcpy(shared_bytes + address, &v, 4); }

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
inline void mbarrier_arrive(u32 barrier, u32 count = 1) { mbarrier_change(barrier, count, 0); }
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
    u32 bytes, barrier, asked;  // when: `lanes_met`
    u32 stream;
  };
  std::mutex lock;
  std::condition_variable more;
  std::deque<Copy> queue;
  std::atomic<u32> under_way[64] = {};  // of each stream
  bool over = false;
  void run() {
    u32 seed = 7;
    while (true) {
      Copy copy;
      {
        std::unique_lock held(lock);
        more.wait(held, [&] { return over || !queue.empty(); });
        if (queue.empty()) return;
        // They land in any order.
        seed = seed * 1664525u + 1013904223u;
        const auto next = queue.begin() + (seed >> 16) % queue.size();
        copy = *next;
        queue.erase(next);
      }
      // Not before all lanes have been where one asked for it, so what may be in flight together is; they may be
      // through with everything.
      for (int ms = 0; lanes_met == copy.asked && ms < 5; ms++)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stumble();
      std::memcpy(shared_bytes + copy.to, copy.from, copy.bytes);
      under_way[copy.stream]--;
      mbarrier_change(copy.barrier, 0, -(long long)copy.bytes);
    }
  }
};
inline Copies copies;
/// Which of the block's streams this thread is in, counted from its first.
inline thread_local u32 stream_of_lane = 0;
/// Most copies of the thread's stream that were under way when it began one. What the stream before it had is left out:
/// it may have been paced otherwise.
inline thread_local u32 most_under_way = 0;
inline void begin_stream() { stream_of_lane++, most_under_way = 0; }
inline void bulk_load(u32 to, const u8* from, u32 bytes, u32 barrier, u64) {
  std::lock_guard held(copies.lock);
  most_under_way = std::max(most_under_way, ++copies.under_way[stream_of_lane]);
  copies.queue.push_back({to, from, bytes, barrier, lanes_met, stream_of_lane});
  copies.more.notify_one();
}

inline thread_local std::vector<std::pair<const u8*, u32>>* seen_ahead = nullptr;
inline std::atomic<u32> brought_ahead{0};
inline void bulk_prefetch_l2(const void* from, u32 bytes) {
  seen_ahead->push_back({(const u8*)from, bytes});
  brought_ahead += bytes;
}

// ---- arithmetic: a product only notes which fragment it was given ----
inline void mma_m16n8k16(float*, const Quad& a, u32, u32) { seen_fragments->push_back(a.x); }
inline float load_constant_f32(const float* p) { return *p; }
// Of weights in groups, which only have to compile.
inline u32 fma_bf16x2(u32 a, u32, u32) { return a; }
inline u32 multiply_bf16x2(u32 a, u32) { return a; }
inline u32 subtract_bf16x2(u32 a, u32) { return a; }
inline u32 low_twice(u32 word) { return word; }
inline u32 high_twice(u32 word) { return word; }
inline u32 bf16_pair(float low, float high) {
  return (__float_as_uint(high) & 0xffff0000u) | __float_as_uint(low) >> 16;
}
inline float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float rsqrt_approx(float x) { return 1 / std::sqrt(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
