// The weight stream and the partials of one block, with the kernel's own headers, under ThreadSanitizer: every consumer
// warp gets the fragments that the layout says, in order, and no slot is written while it is read. `-DLP_RELEASE_EARLY`
// is the negative control: slots are given back before they are read. What full rings bring into L2 is what they were
// told to look ahead to. No more is in flight than paced rings may have; `-DLP_UNPACED`, which paces none, must show.
// Of several ranks warps without a leaf pass over chunks of others; `-DLP_UNAWAITED` lets them go on before those have
// landed. See run.sh.
#include "emulated.h"

#include "../../layout/shape.cuh"
#include "../../layout/page.cuh"
#include "../../layout/launch.cuh"
#include "../../sync/wait.cuh"
#include "../../ops/tree_sum.cuh"
#include "../../ops/weights.cuh"
#include "../../narrow/words.cuh"
#include "../../narrow/shared_memory.cuh"
#include "../../narrow/ring.cuh"
#include "../../narrow/product.cuh"

using namespace narrow;

constexpr int kRounds = 6;  // layers, of four streams each
static_assert(4 * kRounds < std::size(decltype(copies.under_way){}), "a count for each stream");

template <class P> int sets() { return (P::first_tile(blockIdx.x + 1) - P::first_tile(blockIdx.x) + 1) / 2; }

/// Whether what a ring brought into L2 is of its first leaf of the block's unit number `unit`.
template <class P> bool in_leaf(u64 at, u32 bytes, u64 offset, int unit, int ring) {
  const int tile = P::first_tile(blockIdx.x) + 2 * unit, width = tile + 1 < P::first_tile(blockIdx.x + 1) ? 2 : 1;
  const u64 begin = offset + ((u64)tile * P::steps + ring * P::leaf_steps * width) * P::fragment;
  return at >= begin && at + bytes <= begin + P::leaf_steps * width * P::fragment && at % 16 == 0 && bytes % 16 == 0;
}
/// The fragments of a product that a warp should see: the slow definition. A fragment's first word is its offset in the
/// weights, over 16.
template <class P> void expect(std::vector<u32>& all, u64 offset, int warp) {
  const int leaf = P::leaf(warp), end = P::first_tile(blockIdx.x + 1);
  if (warp >= P::workers) return;
  for (int unit = P::first_tile(blockIdx.x) + P::way(warp); unit < end; unit += P::at_a_time) {
    const int width = P::ways == 1 && unit + 1 < end ? 2 : 1;
    for (int k = leaf * P::leaf_steps; k < (leaf + 1) * P::leaf_steps; k++)
      for (int tile = 0; tile < width; tile++)
        all.push_back((u32)((offset + ((u64)unit * P::steps + k * width + tile) * P::fragment) / 16));
  }
}

#ifdef LP_UNPACED
constexpr u32 kQuarters = 1;
#else
constexpr u32 kQuarters = 4;
#endif

int main() {
  static u32 report[16];
  Launch launch{};
  launch.report = report;
  std::vector<u8> weights(kLayerBytes);
  for (u64 at = 0; at < weights.size(); at += 16) {
    const u32 word = (u32)(at / 16);
    std::memcpy(weights.data() + at, &word, 4);
  }
  for (u32 i = 0; i < kRings * Shared::slots; i++) {
    mbarrier_init(Shared::full + 16 * i, 1);
    mbarrier_init(Shared::full + 16 * i + 8, 1);
    mbarrier_init(Shared::empty + 8 * i, 1);
  }
  for (u32 i = 0; i < 2; i++) {
    mbarrier_init(Shared::partials_full + 8 * i, kWarps);
    mbarrier_init(Shared::partials_empty + 8 * i, kEpilogueWarps);
  }

  const u32 block = kBlocks - 1;
  std::atomic<int> wrong{0}, crowded{0};
  std::vector<std::thread> threads;
  std::thread copier([] { copies.run(); });
  Warp producer(kRings);
  for (u32 lane = 0; lane < kRings; lane++)
    threads.emplace_back([&, lane] {
      threadIdx.x = kProducer * 32 + lane;
      blockIdx.x = block;
      warp_of_lane = &producer;
      std::vector<std::pair<const u8*, u32>> ahead;
      seen_ahead = &ahead;
      Producer stream(launch, 0);
      for (int round = 0; round < kRounds; round++) {
        stream.look_ahead<Qkv>(weights.data(), 1);
        begin_stream();
        stream.stream<Qkv, kQuarters>(weights.data());
        crowded += most_under_way > kRings / 4 * 3;
        stream.look_ahead<GateUp>(weights.data() + kGateUpOffset, 0);
        begin_stream();
        stream.stream<O, 2>(weights.data() + kOOffset);
        crowded += most_under_way > kRings / 2;
        begin_stream();
        stream.stream<GateUp, kQuarters, Shared::slots>(weights.data() + kGateUpOffset);
        begin_stream();
        stream.stream<Down>(weights.data() + kDownOffset);
      }
      for (const auto& [from, bytes] : ahead) {
        const u64 at = from - weights.data();
        if (!in_leaf<Qkv>(at, bytes, 0, 1, lane) && !in_leaf<GateUp>(at, bytes, kGateUpOffset, 0, lane)) wrong++;
      }
    });
  for (u32 warp = 0; warp < kWarps; warp++)
    threads.emplace_back([&, warp] {
      threadIdx.x = warp * 32;
      blockIdx.x = block;
      Warp alone(1);
      warp_of_lane = &alone;
      std::vector<u32> seen, expected;
      seen_fragments = &seen;
      Consumer consumer(launch, 0, warp);
      Partials partials(launch, 0);
      constexpr int kSteps = kHiddenSteps > O::leaf_steps ? kHiddenSteps : O::leaf_steps;
      u32 b[kSteps > Down::leaf_steps ? kSteps : Down::leaf_steps][2] = {};
      for (int round = 0; round < kRounds; round++) {
        // Held up as by an exchange, until full rings have looked ahead.
        for (int ms = 0; brought_ahead == 0 && ms < 10000; ms++)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        multiply<Qkv>(consumer, partials, b);
        multiply<O>(consumer, partials, b);
        multiply<GateUp>(consumer, partials, b);
        multiply<Down>(consumer, partials, b);
        expect<Qkv>(expected, 0, warp);
        expect<O>(expected, kOOffset, warp);
        expect<GateUp>(expected, kGateUpOffset, warp);
        expect<Down>(expected, kDownOffset, warp);
      }
      if (seen != expected) wrong++;
    });
  for (u32 e = 0; e < kEpilogueWarps; e++)
    threads.emplace_back([&, e] {
      threadIdx.x = (kEpilogue + e) * 32;
      blockIdx.x = block;
      Warp alone(1);
      warp_of_lane = &alone;
      const int all = kRounds * (sets<Qkv>() + sets<O>() + sets<GateUp>() + sets<Down>());
      float sum = 0;
      for (int set = 0; set < all; set++) {
        wait_barrier(launch, Shared::partials_full + 8 * (set & 1), set >> 1 & 1, kSitePartialsFull);
        for (u32 at = 0; at < kSetBytes / 2; at += 4) {
          float v;
          std::memcpy(&v, shared_bytes + Shared::partials + (set & 1) * kSetBytes + at, 4);
          sum += v;
        }
        mbarrier_arrive(Shared::partials_empty + 8 * (set & 1));
      }
      if (sum != sum) wrong++;
    });
  for (std::thread& thread : threads) thread.join();
  {
    std::lock_guard held(copies.lock);
    copies.over = true;
    copies.more.notify_all();
  }
  copier.join();
  std::printf(
      "%d rings of %u slots of %u bytes, %d rounds: %d warps saw other fragments than the layout's; %d times too many "
      "rings had chunks in flight; %u bytes brought into L2 ahead\n",
      (int)kRings, Shared::slots, kSlotBytes, kRounds, wrong.load(), crowded.load(), brought_ahead.load());
  return wrong != 0 || crowded != 0 || brought_ahead == 0;
}
