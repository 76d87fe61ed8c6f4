// Pages of attention in the ring of a wide pass, with the kernel's own headers, under ThreadSanitizer: every consumer
// warp sees the pages of its items, in order, among stages of weights; none is overwritten while it is read; nobody
// waits without an end. Items are random: of one tile of columns or of two, of 1 to 16 pages; with a window the first
// may be any. A warp that streams is two lanes, another one.
// Negative controls: with `-DLP_UNHEARD` a set does not wait until the other's pages have landed, with `-DLP_UNMET` not
// until the other has changed a page of both. See run.sh.
#include "emulated.h"

#include <chrono>
#include <map>
#include <random>

inline u32 thread_index() { return threadIdx.x; }
inline u32 warp_index() { return threadIdx.x >> 5; }
inline u32 unknown(u32 v) { return v; }
inline bool elected() { return true; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 __reduce_add_sync(u32, u32 v) { return v; }
inline u64 policy_evict_last() { return 0; }
inline void bulk_prefetch_l2(const void*, u32, u64) {}
inline void fence_async_shared() {}
inline void fence_async_global() {}
inline void store_shared_16(u32 address, const float* v) { std::memcpy(shared_bytes + address, v, 16); }
inline void store_u32(u8* p, u32 v) { __atomic_store_n((u32*)p, v, __ATOMIC_RELAXED); }

/// Named barriers: an arrival is a warp's.
struct Named {
  std::mutex lock;
  std::condition_variable more;
  u32 arrived = 0;
  u64 phase = 0;

  u64 arrive(u32 threads) {
    std::lock_guard held(lock);
    const u64 before = phase;
    if (++arrived == threads / 32) arrived = 0, phase++, more.notify_all();
    return before;
  }
};
inline Named named_barriers[16];
inline void barrier_arrive(u32 barrier, u32 threads) {
  stumble();
  named_barriers[barrier].arrive(threads);
}
/// The set that falls behind before it waits for the other: no work of its own holds it up elsewhere.
inline u32 slow_set = 0;
inline void barrier_sync(u32 barrier, u32 threads) {
  stumble();
  const bool of_turns = barrier == 4 || barrier == 5;  // sets hear of each other's pages, others meet
  if (of_turns && warp_index() / 4 == slow_set) std::this_thread::sleep_for(std::chrono::milliseconds(3));
#ifdef LP_UNMET
  if (barrier > 5) return;
#endif
  Named& named = named_barriers[barrier];
  const u64 before = named.arrive(threads);
#ifdef LP_UNHEARD
  if (of_turns) return;
#endif
  std::unique_lock held(named.lock);
  if (!named.more.wait_for(held, std::chrono::seconds(20), [&] { return named.phase != before; }))
    std::fprintf(stderr, "a warp waits at a barrier without an end\n"), trap();
}

#include "../../layout/shape.cuh"
#include "../../layout/page.cuh"
#include "../../layout/launch.cuh"
#include "../../layout/rows.cuh"
#include "../../layout/inbox.cuh"
#include "../../sync/wait.cuh"
#include "../../ops/tree_sum.cuh"
#include "../../ops/values.cuh"
#include "../../ops/weights.cuh"
inline void reached(const Launch&, u32, u32, u32, u32) {}
#define clear_outside clear_outside_of_pages
#include "../../ops/softmax.cuh"
#undef clear_outside
inline void clear_outside(u32, u32, u32) {}
#include "../../wide/geometry.cuh"
#include "../../wide/stream.cuh"
// In the place of exchange.cuh: nobody merges spans, of which no row has several.
namespace wide {
void consumers_sync() { barrier_sync(1, kConsumerThreads); }
void publish(const Launch&, u64) { consumers_sync(); }
u32 tag_of(const Launch&, u32, u32 layer) { return layer; }
template <int N, class AT> void receive_words(const Launch&, const AT&, u32, u32* x, u32* y, u32* extra, u32) {
  for (int i = 0; i < N; i++) x[i] = y[i] = extra[i] = 0;
}
}  // namespace wide
#include "../../ops/best.cuh"
#include "../../wide/attention_items.cuh"

/// What the lane has seen of stages: the number that each begins with.
inline thread_local std::vector<u32>* seen_stages = nullptr;
inline std::atomic<u32> overwritten{0};
inline void see(u32 stage) {
  lanes_met++;  // copies need not wait for more
  const u32 first = load_shared_u32(stage);
  stumble();
  overwritten += load_shared_u32(stage) != first;
  seen_stages->push_back(first);
}

namespace wide {
/// In the place of attention_share.cuh: notes what it is given. Each set changes a word of the pages that this step
/// adds to, and reads those of all sets that do.
struct Fresh {
  static constexpr u32 kTogether = 2;
  float k;

  static u32 word(u32 set) { return 16 + set * 4; }
  static void receive(const Launch&, u32, u32, u32, u32, Fresh*) {}
  void put(u32 stage, u32, u8*) const { store_shared_u32(stage + word(warp_index() / kSetWarps), warp_index()); }
};
struct Share {
  float reference[2] = {}, total[2] = {}, out[kDimTiles][4] = {};
  bool of_both;

  Share(const Launch&, const AttentionItem&, u32, u32, u32 columns, u32, Fresh&) : of_both(columns > 8) {}
  template <class SEEN> bool add_page(u32 stage, bool, const SEEN&, const float (*)[2]) {
    see(stage);
    [[maybe_unused]] volatile u32 read;  // or nothing would be read
    for (u32 set = 0; set < kSets; set++)
      if (of_both || set == warp_index() / kSetWarps) read = load_shared_u32(stage + Fresh::word(set));
    return false;
  }
};
void fetch_k_scale(const float*, u32, u32, float (*)[2]) {}
void take_k_scale(const Consumer&, u32, u32, float (*)[2]) {}
}  // namespace wide
#include "../../wide/attention.cuh"

using namespace wide;

constexpr u32 kLaunches = 60, kLayersOfOne = 4, kWeightStages = 3, kCopied = 64;

struct Plan {
  struct Item {
    u32 rows, end;  // pages begin() to end - 1
    u32 begin() const {
      const u32 position = end * kPage - 1;
      return kWindow && position + 1 > kWindow ? (position + 1 - kWindow) / kPage : 0;
    }
    u32 tiles() const { return (rows * kQueriesPerKv + 7) / 8; }
  };
  std::vector<Item> items;
  std::vector<Row> rows;
  std::vector<u32> list;

  explicit Plan(u32 seed) {
    std::minstd_rand random(seed);
    for (u32 left = random() % 12; items.size() <= left && rows.size() + kGroupRows <= kColumns;) {
      const Item item{1 + (u32)random() % kGroupRows, 1 + (u32)random() % (random() % 4 ? 3 : kSpanPages)};
      const u32 first = rows.size(), position = item.end * kPage - item.rows;
      for (u32 r = 0; r < item.rows; r++)
        rows.push_back(Row{0, position + r, 0, first, position, kRowSample, ~0u, 0});
      // A warp of one lane looks at every 32nd.
      list.resize(32 * items.size() + 1);
      list.back() = rows.size() - 1;
      items.push_back(item);
    }
  }
  /// The stage of a layer's weights, or of an item's page.
  static u32 weights(u32 layer, u32 stage) { return layer << 16 | stage; }
  static u32 page(u32 layer, u32 item, u32 page) { return layer << 16 | (item + 1) << 8 | page; }
  /// What a warp should see.
  std::vector<u32> expected(u32 warp) const {
    std::vector<u32> all;
    for (u32 layer = 0; layer < kLayersOfOne; layer++) {
      for (u32 stage = 0; stage < kWeightStages; stage++) all.push_back(weights(layer, stage));
      u32 alone = 0;
      for (u32 i = 0; i < items.size(); i++) {
        if (items[i].tiles() == 1 && alone++ % kSets != warp / kSetWarps) continue;
        for (u32 p = items[i].begin(); p < items[i].end; p++)
          if (p % kSetWarps == warp % kSetWarps) all.push_back(page(layer, i, p));
      }
    }
    return all;
  }
};

int main() {
  static u32 report[16];
  std::vector<u8> words(Words::items);
  const std::vector<u32> page_table(kSpanPages);
  // What stages are copied from: one that begins with each number.
  std::map<u32, std::vector<u32>> memory;
  for (u32 layer = 0; layer < kLayersOfOne; layer++)
    for (u32 low = 0; low < 0x1000; low++) memory[layer << 16 | low].assign(kCopied / 4, layer << 16 | low);
  std::thread copier([] { copies.run(); });
  u32 wrong = 0, pages = 0;
  for (u32 number = 0; number < kLaunches; number++) {
    const Plan plan(number + 1);
    slow_set = number % 3;  // 2: neither
    Launch launch{};
    launch.report = report, launch.words = words.data(), launch.rows = plan.rows.data();
    launch.row_count = plan.rows.size(), launch.items = plan.list.data(), launch.page_stride = kSpanPages;
    launch.page_table = page_table.data();
    init_rings(0);
    store_shared_u32(Shared::items, 0);
    store_shared_u32(Shared::items + 4, plan.list.size());
    std::vector<std::thread> threads;
    std::deque<Warp> warps;
    std::vector<std::vector<u32>> seen(kConsumers);
    for (u32 warp = 0; warp < kConsumers; warp++)
      threads.emplace_back([&, warp, of = &warps.emplace_back(1)] {
        warp_of_lane = of, threadIdx.x = 32 * warp, seen_stages = &seen[warp];
        Consumer consumer(launch, 0);
        for (u32 layer = 0; layer < kLayersOfOne; layer++) {
          for (u32 stage = 0; stage < kWeightStages; stage++) {
            see(consumer.wait());
            consumer.release();
          }
          attend(consumer, Rows{plan.rows.data(), (u32)plan.rows.size(), 0}, layer);
        }
      });
    for (const u32 lane_of_both : {2 * kStream0, 2 * kStream0 + 1, 2 * kStream1, 2 * kStream1 + 1})
      threads.emplace_back([&, warp = lane_of_both / 2, lane = lane_of_both % 2,
                            of = lane_of_both % 2 ? &warps.back() : &warps.emplace_back(2)] {
        warp_of_lane = of, threadIdx.x = 32 * warp + lane;
        Producer producer(launch, 0, warp);
        // Lane 0 of the first warp copies.
        const auto put = [&](u32 what) {
          producer.issue(lane == 0, (const u8*)memory.at(what).data(), 0, kCopied, warp == kStream0 ? kCopied : 0);
        };
        for (u32 layer = 0; layer < kLayersOfOne; layer++) {
          for (u32 stage = 0; stage < kWeightStages; stage++) put(Plan::weights(layer, stage));
          for (u32 i = 0; i < plan.items.size(); i++)
            for (u32 p = plan.items[i].begin(); p < plan.items[i].end; p++) put(Plan::page(layer, i, p));
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (u32 warp = 0; warp < kConsumers; warp++) {
      wrong += seen[warp] != plan.expected(warp);
      pages += seen[warp].size() - kLayersOfOne * kWeightStages;
    }
  }
  {
    std::lock_guard held(copies.lock);
    copies.over = true;
    copies.more.notify_one();
  }
  copier.join();
  printf("pages of attention, %u stages, a window of %u: %u seen, %u warps saw others, %u overwritten\n", kStages,
         (u32)kWindow, pages, wrong, overwritten.load());
  return wrong || overwritten ? 1 : 0;
}
