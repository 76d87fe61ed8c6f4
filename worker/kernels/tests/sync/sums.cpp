// Sums of o, down and (wide) qkv over warps, blocks of a pair and ranks, with the kernels' own headers, under
// ThreadSanitizer where there are 2 and 4 ranks: every output has the bits of its leaves in the one order (leaf_sum),
// however many ranks cut them. A thread is a lane. Leaves are random numbers in the place of products. Narrow: the
// epilogues of block 1 of all ranks together. Wide: a pair of one rank after the other, then what the owner of a column
// makes of all ranks' words.
// Negative control: that order is not the binary tree's.
#include "emulated.h"

#include "../../layout/shape.cuh"
#include "../../layout/page.cuh"
#include "../../layout/launch.cuh"
#include "../../layout/rows.cuh"
#include "../../layout/inbox.cuh"
#include "../../sync/wait.cuh"
#include "../../ops/ranks.cuh"
#include "../../ops/tree_sum.cuh"
#include "../../ops/values.cuh"
#include "../../ops/weights.cuh"

enum Summed : u32 { kQkvProduct, kOutProduct, kDownProduct };
/// Leaf `leaf` of the whole model's product, of one output.
float leaf_of(u32 product, u32 leaf, u32 row, u32 column) {
  u64 z = (((u64)product << 8 | leaf) << 48 | (u64)row << 16 | column) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return __uint_as_float((u32)(z >> 63) << 31 | (u32)(124 + (z >> 40 & 7)) << 23 | (u32)(z & 0x7fffff));
}
/// What a product's output has to be, and, for the negative control, what a binary tree would make of it.
struct Output {
  float quads, tree;
};
Output output_of(u32 product, u32 leaves, u32 row, u32 column) {
  const auto leaf = [&](u32 l) { return leaf_of(product, l, row, column); };
  const u32 each = leaves < 4 ? 1 : leaves / 4;
  std::vector<float> quads, tree;
  for (u32 l = 0; l < leaves; l++) {
    if (l % each == 0) quads.push_back(leaf(l));
    else quads.back() += leaf(l);
    tree.push_back(leaf(l));
  }
  for (auto* level : {&quads, &tree})
    for (; level->size() > 1; level->resize(level->size() / 2))
      for (u32 i = 0; i < level->size() / 2; i++) (*level)[i] = (*level)[2 * i] + (*level)[2 * i + 1];
  return {quads[0], tree[0]};
}
std::atomic<u32> outputs{0}, wrong{0}, unlike_tree{0};
/// Checks `got` against `before` plus the product, times the scale of its row.
void check(float got, float before, u32 product, u32 leaves, u32 row, u32 column, float scale = 1) {
  const Output output = output_of(product, leaves, row, column);
  outputs++;
  wrong += __float_as_uint(got) != __float_as_uint(before + output.quads * scale);
  unlike_tree += __float_as_uint(output.quads) != __float_as_uint(output.tree);
}
/// All lanes of `warps` warps of each block, each in a thread.
template <class F> void run(u32 blocks, u32 warps, const F& lane) {
  std::vector<std::thread> threads;
  std::deque<Warp> collectives;
  for (u32 b = 0; b < blocks; b++)
    for (u32 w = 0; w < warps; w++) {
      collectives.emplace_back(32);
      for (u32 l = 0; l < 32; l++)
        threads.emplace_back([&lane, warp = &collectives.back(), b, w, l] {
          warp_of_lane = warp;
          threadIdx.x = w * 32 + l;
          lane(b);
        });
    }
  for (std::thread& thread : threads) thread.join();
}
/// Zeroed memory, aligned as the GPU's.
struct Memory {
  explicit Memory(u64 bytes) : bytes(bytes + 128) {}
  u8* at() { return bytes.data() + (128 - (uintptr_t)bytes.data() % 128) % 128; }
  std::vector<u8> bytes;
};
u32 report[16];

#if LP_COLUMNS <= 8
#include "../../narrow/words.cuh"
#include "../../narrow/inbox.cuh"
#include "../../narrow/shared_memory.cuh"
#include "../../narrow/ring.cuh"
#include "../../narrow/turns.cuh"
#include "../../narrow/product.cuh"
#include "../../narrow/epilogue.cuh"

using namespace narrow;

constexpr u32 kActive = (1u << kColumns) - 1, kBlock = 1;
constexpr u32 kRankBytes = (Shared::bytes - Shared::partials + 1023) / 1024 * 1024;  // of shared memory
static_assert(kRanks * kRankBytes <= sizeof(shared_bytes));
u32 shared_of(u32 rank) { return rank * kRankBytes - Shared::partials; }

/// The leaves of a rank's tiles of a product, as its consumer warps leave them.
template <class P> void put_leaves(const Launch& launch, u32& set, u32 product) {
  const u32 shared = shared_of(launch.rank);
  for (int first = P::first_tile(kBlock); first < P::first_tile(kBlock + 1); first += 2, set++) {
    const u32 buffer = set & 1;
    wait_barrier(launch, shared + Shared::partials_empty + 8 * buffer, (set >> 1 & 1) ^ 1, kSitePartialsEmpty);
    for (u32 i = 0; i < 2u * P::leaves * kColumns * 16; i++) {
      const u32 row = i % 16, column = i / 16 % kColumns, leaf = i / 16 / kColumns % P::leaves,
                tile = i / 16 / kColumns / P::leaves;
      store_shared_f32(shared + Shared::partials + buffer * kSetBytes +
                           (((tile * kWarps + leaf) * kColumns + column) * 16 + row) * 4,
                       leaf_of(product, launch.rank * P::leaves + leaf, (first + tile) * 16 + row, column));
    }
    mbarrier_arrive(shared + Shared::partials_full + 8 * buffer);
  }
}

int main() {
  constexpr u32 kSteps = 3;  // of o and down each
  std::deque<Memory> inboxes, words;
  Memory gamma((2 * kLayers + 1) * kHidden * 2);
  // No powers of two, so that it shows where they are applied.
  std::vector<float> scales(Scales::layer);
  for (u32 i = 0; i < scales.size(); i++) scales[i] = kScaled ? 0.3f + (float)(i % 13) / 7 : 1;
  Launch launches[kRanks] = {};
  for (u32 r = 0; r < kRanks; r++) inboxes.emplace_back(Inbox::bytes), words.emplace_back(Words::page);
  for (u32 r = 0; r < kRanks; r++) {
    launches[r].rank = r, launches[r].words = words[r].at(), launches[r].gamma = gamma.at();
    launches[r].scales = scales.data();
    launches[r].report = report;
    for (u32 q = 0; q < kRanks; q++) launches[r].inbox[q] = inboxes[q].at();
    for (u32 i = 0; i < 2; i++) {
      mbarrier_init(shared_of(r) + Shared::partials_full + 8 * i, 1);
      mbarrier_init(shared_of(r) + Shared::partials_empty + 8 * i, kEpilogueWarps);
    }
  }
  std::vector<std::thread> consumers;
  for (const Launch& launch : launches)
    consumers.emplace_back([&launch] {
      Warp alone(1);
      warp_of_lane = &alone;
      for (u32 step = 0, set = 0; step < kSteps; step++) {
        put_leaves<O>(launch, set, kOutProduct + 4 * step);
        put_leaves<Down>(launch, set, kDownProduct + 4 * step);
      }
    });
  run(kRanks, kEpilogueWarps, [&](u32 rank) {
    blockIdx.x = kBlock;
    Epilogue epilogue(launches[rank], shared_of(rank), threadIdx.x >> 5);
    for (auto& set : epilogue.residual)
      for (float& h : set) h = 0;
    std::vector<float> before(Epilogue::kSets * kEpilogueColumns);
    const auto add = [&](auto product, u32 told, u32 number, u32 tag) {
      using P = decltype(product);
      if (!Epilogue::kSharedSets && epilogue.second()) return epilogue.skip(Epilogue::sets<P>());
      epilogue.add_residual<P>(told, 0, 1 + told, kActive, tag);
      const int first = told == kToldOut ? Scales::out : Scales::down;
      for (int s = 0; s < Epilogue::sets<P>(); s++)
        for (int c = 0; epilogue.mine(s) && c < kEpilogueColumns; c++) {
          const int tile = P::first_tile(kBlock) + 2 * s + Epilogue::half();
          if (tile >= P::first_tile(kBlock + 1)) continue;
          float& h = before[s * kEpilogueColumns + c];
          const int row = tile * 16 + Epilogue::row();
          check(epilogue.hidden(s)[c], h, number, P::leaves * kRanks, row, epilogue.column(c), scales[first + row]);
          h = epilogue.hidden(s)[c];
        }
    };
    for (u32 step = 0; step < kSteps; step++) {
      add(O{}, kToldOut, kOutProduct + 4 * step, 1 + 2 * step);
      add(Down{}, kToldDown, kDownProduct + 4 * step, 2 + 2 * step);
    }
  });
  for (std::thread& thread : consumers) thread.join();
  for (u32 r = 0; kColumns == 8 && r < kRanks; r++)
    for (u64 at = Inbox::tiles; at < Inbox::tokens; at++) wrong += inboxes[r].at()[at] != 0;

#else
inline u32 thread_index() { return threadIdx.x; }
inline u32 warp_index() { return threadIdx.x >> 5; }
inline u32 unknown(u32 v) { return v; }
constexpr u32 kBlockBytes = 232448;
inline std::barrier<>* block_barriers[2];
inline void barrier_sync(u32, u32) { block_barriers[blockIdx.x & 1]->arrive_and_wait(); }
inline void fence_async_shared() {}
inline void fence_async_global() {}
inline u32 map_shared(u32 address, u32 rank) { return address % kBlockBytes + rank * kBlockBytes; }
inline void mbarrier_arrive_remote(u32 barrier) { mbarrier_arrive(barrier); }
inline void bulk_send(u32 to, u32 from, u32 bytes, u32 barrier) {
  bulk_load(to, shared_bytes + from, bytes, barrier, 0);
}
inline void store_shared_16(u32 address, const float* v) { std::memcpy(shared_bytes + address, v, 16); }
inline u64 wgmma_operand(u32) { return 0; }
inline u64 wgmma_operand(u64, u32) { return 0; }
inline void wgmma_fence() {}
// Of products that are loaded ahead, of which these are none.
inline void wgmma_commit() {}
template <int GROUPS> void wgmma_wait() {}
template <int N> void wgmma(float*, const Quad&, u64, u32);
template <int N> void pin(float*) {}
/// The leaf that the lane's next products are of, and how many k16 steps of it have been.
struct Work {
  u32 product, leaf, row, column, leaf_steps, step;
};
thread_local Work work;
template <int N> void wgmma(float* c, const Quad&, u64) {
  if (work.step == 0)  // column 8 j + 2 t, + 1 of row g, then of row g + 8
    for (int i = 0; i < N / 2; i++)
      c[i] += leaf_of(work.product, work.leaf, work.row + (lane_index() >> 2) + 8 * (i >> 1 & 1),
                      work.column + i / 4 * 8 + (lane_index() & 3) * 2 + (i & 1));
  if (++work.step == work.leaf_steps) work.step = 0, work.leaf++;
}
namespace wide {
struct Consumer {
  u32 wait() const { return 0; }
  u32 wait_input(u32 = 0) const { return 0; }
  void release() const {}
  void release_input() const {}
};
}  // namespace wide

#include "../../wide/geometry.cuh"
#include "../../wide/product.cuh"
#include "../../wide/exchange.cuh"
#include "../../wide/ranks.cuh"

using namespace wide;

constexpr u32 kPair = LP_PAIR;

/// A product of the pair, as Team does it, up to the receive buffer.
template <class C> void sum_product(const Launch& launch, Receive& receive, u32 use, u32 product) {
  const Place place = place_of<C>();
  const u32 group = warp_index() >> 2;
  work = Work{product,
              launch.rank * (product % 4 == kQkvProduct ? 0 : C::P::leaves) + C::first_leaf() +
                  (C::split == Split::kLeaves ? group * C::leaves : 0),
              (u32)(C::first_tile() + place.tile) * 16,
              C::split == Split::kColumns ? group * C::columns : 0, (u32)C::P::leaf_steps, 0};
  Consumer consumer;
  float sum[C::parts][C::columns / 2];
  if (C::on()) sum_leaves<C>(consumer, place, sum);
  receive.exchange<C>(use, place, sum, [] {});
}

int main() {
  constexpr u32 kLayersHere = 2;
  std::deque<Memory> inboxes;
  for (u32 r = 0; r < kRanks; r++) inboxes.emplace_back(Inbox::bytes);
  std::thread copier([] { copies.run(); });
  // Own parts of (rank, layer, o or down, block of the pair, chunk, column).
  std::vector<float> own((u64)kRanks * kLayersHere * 2 * 2 * kHiddenChunks * kColumns * kParts * 8);
  const auto own_parts = [&](u32 rank, u32 product, u32 chunk, u32 column) {
    const u64 at = (((u64)rank * kLayersHere * 2 + product / 4 * 2 + product % 4 - 1) * 2 + (blockIdx.x & 1)) *
                       kHiddenChunks + chunk;
    return reinterpret_cast<float(*)[8]>(&own[(at * kColumns + column) * kParts * 8]);
  };
  const auto launch_of = [&](u32 rank) {
    Launch launch{};
    launch.rank = rank, launch.row_count = kColumns, launch.report = report;
    for (u32 q = 0; q < kRanks; q++) launch.inbox[q] = inboxes[q].at();
    return launch;
  };
  for (u32 rank = 0; rank < kRanks; rank++) {
    std::barrier<> first(kConsumerThreads), second(kConsumerThreads);
    block_barriers[0] = &first, block_barriers[1] = &second;
    for (u32 b = 0; b < 2; b++) {
      mbarrier_init(b * kBlockBytes + Shared::receive_full, kConsumers);
      mbarrier_init(b * kBlockBytes + Shared::receive_free, 2);
    }
    run(2, kConsumers, [&](u32 b) {
      blockIdx.x = kPair * 2 + b;
      const Launch launch = launch_of(rank);
      Receive receive{launch, b * kBlockBytes};
      const Ranks ranks{launch};
      const auto residual = [&](auto cut, u32 use, u32 product, u32 told) {
        using C = decltype(cut);
        sum_product<C>(launch, receive, use, product);
        for (u32 at = thread_index(); at < (u32)hidden_tiles() * 2 * kColumns; at += kConsumerThreads) {
          const u32 chunk = at / kColumns, column = at % kColumns;
          float(*parts)[8] = own_parts(rank, product, chunk, column);
          for (u32 p = 0; p < kParts; p++) {
            receive.add_rows8<C>(chunk, column, parts[p], p);
            ranks.tell_sums(told, p, chunk, column, parts[p], product + 1);
          }
        }
        consumers_sync();
        receive.end();
      };
      for (u32 layer = 0; layer < kLayersHere; layer++) {
        sum_product<QkvCut>(launch, receive, 3 * layer, kQkvProduct + 4 * layer);
        for (u32 at = thread_index(); at < (u32)QkvCut::owned(half()) * 2 * kColumns; at += kConsumerThreads) {
          float v[8] = {};
          receive.add_rows8<QkvCut>(at / kColumns, at % kColumns, v);
          for (u32 i = 0; i < 8; i++)
            check(v[i], 0, kQkvProduct + 4 * layer, kHiddenLeaves,
                  Qkv::first_tile(rank_block()) * 16 + at / kColumns * 8 + i, at % kColumns);
        }
        consumers_sync();
        receive.end();
        residual(OCut{}, 3 * layer + 1, kOutProduct + 4 * layer, kToldOut);
        residual(DownCut{}, 3 * layer + 2, kDownProduct + 4 * layer, kToldDown);
      }
    });
  }
  {
    std::lock_guard held(copies.lock);
    copies.over = true;
    copies.more.notify_one();
  }
  copier.join();
  Warp alone(1);
  warp_of_lane = &alone;
  threadIdx.x = 0;
  for (u32 b = 0; b < 2; b++)
    for (u32 column = 0; column < (u32)kColumns; column++)
      for (u32 chunk = 0; chunk < (u32)kHiddenChunks; chunk++)
        for (u32 product = 4 * (kLayersHere - 1) + 1; product % 4 != 3; product++) {
          blockIdx.x = kPair * 2 + b;
          if (chunk >= (u32)hidden_tiles() * 2) continue;
          const Launch launch = launch_of(rank_of_column(column));
          float sum[8];
          Ranks{launch}.hear_sums(product % 4 - kOutProduct, chunk, column, true,
                                  own_parts(launch.rank, product, chunk, column), sum, product + 1);
          for (u32 i = 0; i < 8; i++)
            check(sum[i], 0, product, (product % 4 == kOutProduct ? O::leaves : Down::leaves) * kRanks,
                  O::first_tile(rank_block()) * 16 + chunk * 8 + i, column);
        }
#endif
  printf("%d columns, %d ranks: %u outputs, %u wrong; %u unlike a binary tree's\n", kColumns, kRanks, outputs.load(),
         wrong.load(), unlike_tree.load());
  return wrong > 0 || unlike_tree == 0 ? 1 : 0;
}
