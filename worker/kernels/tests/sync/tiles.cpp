// Products of matrix passes in the rings of a pair of blocks, with the kernel's own headers, under ThreadSanitizer:
// each tile has the sums of its own rows and tokens, every step once, and is computed by one block; nothing is
// overwritten while it is read, by the pair's other block neither. Gate and up have double tiles, tiles that share rows
// or tokens, and one whose partner has none; o, added in quads, keeps sums in the ring. Products read B until they are
// waited for. A warp that multiplies is two lanes, those that give slots back.
// `-DLP_UNTOLD` is the negative control: blocks do not wait for the other's readers. See run.sh.
#include "emulated.h"

inline Index gridDim;
constexpr u32 kBlockShared = 232448;
#define __shared__
#define __align__(BYTES)
u8 shared_memory[1];

inline u32 thread_index() { return threadIdx.x; }
inline u32 warp_index() { return threadIdx.x >> 5; }
inline u32 shared_address(const u8*) { return blockIdx.x % 2 * kBlockShared; }
inline u32 __popc(u32 v) { return __builtin_popcount(v); }
template <int N> void lower_registers() {}
template <int N> void raise_registers() {}
inline void wait_launch_before() {}
inline void launch_dependents() {}
inline void fence_mbarrier_init() {}
inline void fence_async_global() {}

/// All lanes of a warp meet, however many there are.
inline void meet_lanes() {
  if (warp_of_lane->lanes > 1) warp_of_lane->meet.arrive_and_wait();
}
#define __syncwarp meet_lanes
inline u32 __shfl_down_sync(u32, u32 v, u32 by) { return exchanged(v, std::min(lane_index() + by, 31u)); }

/// The threads of a block, and of both.
std::barrier<>* of_block[2];
std::barrier<>* of_pair;
inline void __syncthreads() { of_block[blockIdx.x % 2]->arrive_and_wait(); }
inline void cluster_sync() { of_pair->arrive_and_wait(); }

inline u32 map_shared(u32 address, u32 rank) {
#ifdef LP_UNTOLD
  rank = blockIdx.x % 2;
#endif
  return address % kBlockShared + rank * kBlockShared;
}
inline void mbarrier_arrive_remote(u32 barrier) {
  stumble();
  mbarrier_arrive(barrier);
}
inline void bulk_load(u32 to, const u8* from, u32 bytes, u32 barrier) { bulk_load(to, from, bytes, barrier, 0); }
inline void bulk_load_pair(u32 to, const u8* from, u32 bytes, u32 barrier) {
  for (u32 rank = 0; rank < 2; rank++)
    bulk_load(to % kBlockShared + rank * kBlockShared, from, bytes, barrier % kBlockShared + rank * kBlockShared);
}
inline void store_shared_16(u32 address, const float* v) { std::memcpy(shared_bytes + address, v, 16); }

// Of the exchange of parts of K, which has no part in this.
inline void store_floats(u8*, const float*) {}
inline u32 fetch_add_release_u32(u32*, u32) { return 0; }
inline void barrier_sync(u32, u32) {}

std::atomic<u32> wrong{0};
inline void expect(bool right, const char* what) {
  if (!right && wrong++ < 5) std::fprintf(stderr, "%s\n", what);
}

constexpr u32 kTagOfA = 1u << 30, kTagOfB = 2u << 30, kTagOfTokens = 3u << 30;
inline u32 tag_of(u32 what, u32 index, u32 step) { return what | index << 16 | step; }
/// A product of a row tile and a block of tokens: a small number, so sums are exact.
inline u32 value_of(u32 tile, u32 block, u32 step) { return 1 + (tile * 31 + block * 17 + step * 7) % 13; }

/// Products that may still run.
struct Issued {
  float* sum;
  u32 a, b, add;  // tag; address
};
inline thread_local std::vector<Issued> issued;
inline thread_local std::deque<std::vector<Issued>> groups;
inline u64 wgmma_operand(u32 address) { return address; }
inline u64 wgmma_operand(u64 operand, u32 bytes) { return operand + bytes; }
inline void wgmma_fence() {}
template <int N> void pin(float*) {}
template <int N> void wgmma(float* c, const Quad& a, u64 b, u32 add) { issued.push_back({c, a.x, (u32)b, add}); }
inline void wgmma_commit() {
  groups.push_back(issued);
  issued.clear();
  lanes_met++;
  meet_lanes();
}
template <int LEFT> void wgmma_wait() {
  for (; groups.size() > LEFT; groups.pop_front())
    for (const Issued& product : groups.front()) {
      const u32 b = load_shared_u32(product.b), step = product.a & 0xffff;
      stumble();
      const bool right = product.a >> 30 == 1 && b == tag_of(kTagOfB, b >> 16 & 0x3fff, step) &&
                         load_shared_u32(product.b) == b;
      expect(right, "a product of other steps");
      *product.sum = (product.add ? *product.sum : 0) + value_of(product.a >> 16 & 0x3fff, b >> 16 & 0x3fff, step);
    }
  meet_lanes();
}

#include "../../layout/shape.cuh"
#include "../../layout/launch.cuh"
#include "../../layout/page.cuh"
#include "../../ops/tree_sum.cuh"
#include "../../ops/values.cuh"
#include "../../ops/weights.cuh"
#include "../../matrix/layout.cuh"
// sync/reached.cuh: stumble() holds threads up here.
void hold_up() {}
void hold_up_lane() {}
void poison(u8*, u32) {}
#include "../../matrix/product.cuh"

using namespace matrix;

template <class P> struct Model {
  static constexpr u32 kGroups = (P::tiles + kGroupTiles - 1) / kGroupTiles;
  std::vector<u32> tiles;
  std::vector<u8> weights, vectors, tokens;
  std::vector<std::atomic<u32>> computed;  // [block of tokens][tile]

  explicit Model(u32 blocks)
      : tiles(P::tiles), weights(P::bytes + 64), vectors((u64)blocks * P::steps * kStepBytes + 64),
        tokens(blocks * kTokens * 16 + 64), computed(blocks * P::tiles) {
    for (u32 tile = 0; tile < P::tiles; tile++) {
      const u32 unit = tile / 2 * 2, pair = unit + 1 < P::tiles;
      tiles[tile] = (unit * P::steps + tile - unit) << 1 | pair;
      for (u32 step = 0; step < P::steps; step++)
        for (u32 lane = 0; lane < 2; lane++)
          put(weights, ((u64)(tiles[tile] >> 1) + (u64)step * (1 + pair)) * 512 + lane * 16,
              tag_of(kTagOfA, tile, step));
    }
    for (u32 block = 0; block < blocks; block++) {
      for (u32 step = 0; step < P::steps; step++)
        put(vectors, ((u64)block * P::steps + step) * kStepBytes, tag_of(kTagOfB, block, step));
      put(tokens, block * kTokens * 16, tag_of(kTagOfTokens, block, 0));
    }
  }
  static void put(std::vector<u8>& to, u64 at, u32 v) { std::memcpy(to.data() + at, &v, 4); }
};

/// What follows a product: it looks at its stage of the ring and at the sum.
template <class P> struct Look {
  static constexpr int stages = 1;
  Model<P>& model;

  void fetch(int, u32, u32 token, u32 to, u32 full) const {
    mbarrier_expect(full, 16);
    bulk_load(to, model.tokens.data() + token * 16, 16, full);
  }
  template <class CONSUMER> void finish(CONSUMER& consumer, u32 tile, u32 token, const float* sum) const {
    const u32 block = token / kTokens, at = consumer.wait();
    stumble();
    expect(load_shared_u32(at) == tag_of(kTagOfTokens, block, 0), "an epilogue has other tokens");
    consumer.done(false);
    if (tile >= P::tiles) return;
    u32 expected = 0;
    for (u32 step = 0; step < P::steps; step++) expected += value_of(tile, block, step);
    expect(sum[0] == (float)expected, "a tile has another sum");
    if (lane_index() == 0) model.computed[block * P::tiles + tile]++;
  }
};

/// One launch by `clusters` pairs, one after the other, of the blocks of tokens of a mask.
template <class P> void launch(u32 clusters, u32 mask) {
  const u32 blocks = 32 - __builtin_clz(mask);
  Model<P> model(blocks);
  gridDim.x = 2 * clusters;
  for (u32 cluster = 0; cluster < clusters; cluster++) {
    constexpr int kLanes[kVectors + 1] = {2, 2, 2, 2, 2, 2, 2, 2, 32, 1};
    int threads = 0;
    for (int lanes : kLanes) threads += lanes;
    std::barrier first(threads), second(threads), both(2 * threads);
    of_block[0] = &first, of_block[1] = &second, of_pair = &both;
    std::deque<Warp> warps;
    std::vector<std::thread> lanes;
    for (u32 block = 0; block < 2; block++)
      for (u32 warp = 0; warp <= kVectors; warp++) {
        warps.emplace_back(kLanes[warp]);
        for (int lane = 0; lane < kLanes[warp]; lane++)
          lanes.emplace_back([&, of = &warps.back(), block, warp, lane] {
            warp_of_lane = of;
            threadIdx.x = warp * 32 + lane, blockIdx.x = 2 * cluster + block;
            multiply<P, Cut::kPair>(model.weights.data(), model.tiles.data(), model.vectors.data(), 0, mask,
                                    Look<P>{model});
          });
      }
    for (std::thread& lane : lanes) lane.join();
  }
  for (u32 block = 0; block < blocks; block++)
    for (u32 tile = 0; tile < P::tiles; tile++)
      expect(model.computed[block * P::tiles + tile] == (mask >> block & 1), "a tile is not computed once");
}

int main() {
  std::thread engine([] { copies.run(); });
  launch<GateUp>(1, 0b111);    // double tiles, one that shares rows, and of an odd block
  launch<GateUp>(2, 0b101101);
  launch<GateUp>(3, 0b1111);   // two that could be a double tile share rows
  launch<GateUp>(1, 0b10);
  launch<O>(1, 0b111);
  {
    std::lock_guard held(copies.lock);
    copies.over = true;
  }
  copies.more.notify_all();
  engine.join();
  if (wrong) std::fprintf(stderr, "%u wrong\n", wrong.load());
  else std::printf("leaves of %d steps, %u groups: all sums as expected\n", GateUp::leaf_steps, Model<GateUp>::kGroups);
  return wrong != 0;
}
