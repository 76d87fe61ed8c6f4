// Products of matrix passes: C [rows of weights][tokens] = A B, in tiles of 128 rows by 128 tokens, by persistent
// blocks.
//
// Cut::kPair, clusters of two: they have the same rows and neighbouring blocks of tokens, and each fetches half of A
// for both. Of an odd last block of tokens both take rows of their own, and fetch all of A.
// Cut::kQuads, clusters of four, for passes of so few tokens that blocks would idle: each sums a quarter of K of the
// same tile, one of the four groups of leaves, and finishes 32 of its tokens. They tell each other their sums.
//
// Warps 0 to 3 and 4 to 7 are two warpgroups that multiply, a warp a row tile: A in registers, B in shared memory. Warp
// 8 fills A, as early as the launch before still runs, warp 9 B and what the epilogue needs, in stages of their own
// behind those of the tile. A stage is kStageSteps k16 steps of a leaf, its last one perhaps fewer.
//
// Sums: leaves from zero, each one chain; ascending, or in quads: groups of leaves ascending, at most four, whose sums
// are added as a binary tree. A rank that has less than a group has its leaves one by one.
#pragma once

extern __shared__ __align__(1024) u8 shared_memory[];

namespace matrix {

constexpr u32 kConsumers = 8, kConsumerThreads = kConsumers * 32, kWeights = 8, kVectors = 9, kThreads = 384;
constexpr u32 kGroupTiles = 8;   // row tiles of a group: a tile's rows
constexpr int kStageSteps = 4;   // stages of two cost a quarter more
constexpr u32 kTileBytes = kStageSteps * kFragment;                    // of a row tile in a stage
constexpr u32 kStageA = kGroupTiles * kTileBytes, kStageBytes = kStageA + kStageSteps * kStepBytes;
constexpr int kAccumulators = kTokens / 2;                             // of a thread
/// A run of tokens, 4 groups of 8: what squares are summed of at a time, and what a block of four finishes.
constexpr int kRunGroups = 4, kRunTokens = 32, kRuns = kTokens / kRunTokens, kRunValues = 4 * kRunGroups;
constexpr u32 kRunBytes = kRunValues * kConsumerThreads * 4;
constexpr u32 kPartialBytes = kAccumulators * kConsumerThreads * 4;    // a tile's sums
static_assert(kPartialBytes == 2 * kStageBytes, "the residual of a tile is two stages");

/// How a cluster divides tiles.
enum class Cut { kPair, kQuads };
/// Whether a product's leaves are added in four groups; of fewer leaves than four ascending is the same.
template <class P> constexpr bool kInQuads = P::leaves == 4 * P::group;

/// Offsets in shared memory.
template <class P> struct Ring {
  static constexpr u32 stages = kInQuads<P> ? 5 : 7;
  // Sums of a thread, [8 tokens (16)][thread][4] f32: the third group of leaves; cut in quads what the other blocks
  // have summed, [block][8 tokens (4)][thread][4].
  static constexpr u32 partial = stages * kStageBytes;
  static constexpr u32 full = partial + (kInQuads<P> ? kPartialBytes : 0);  // mbarriers
  static constexpr u32 empty = full + 8 * stages;
  static constexpr u32 received = empty + 8 * stages, unread = received + 8;
  // [stage] u32: bit i if row tiles i and i + 1 have come together, [k16 step][tile].
  static constexpr u32 units = unread + 8;
  static constexpr u32 bytes = units + 4 * stages;
};
constexpr u32 kProductBytes = Ring<GateUp>::bytes;  // of any product
static_assert(Ring<GateUp>::stages == 7 && kProductBytes <= 227 * 1024, "shared memory of a block");

template <u32 STAGES> struct Turn {
  u32 slot = 0, phase = 0;
  LP_DEVICE void next() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};
LP_DEVICE void wait_phase(u32 barrier, u32 phase) {
  while (!mbarrier_try_wait(barrier, phase)) {
  }
}

/// This block among those of its cluster.
template <Cut CUT> LP_DEVICE u32 cluster_rank() { return blockIdx.x % (CUT == Cut::kPair ? 2 : 4); }

/// The tiles of this block: calls work(group of row tiles, block of tokens, whether a pair shares the rows).
template <class P, Cut CUT, class WORK> LP_DEVICE void each_tile(u32 blocks, const WORK& work) {
  constexpr u32 GROUPS = (P::tiles + kGroupTiles - 1) / kGroupTiles;
  if constexpr (CUT == Cut::kQuads) {
#pragma unroll 1
    for (u32 unit = blockIdx.x / 4; unit < GROUPS * blocks; unit += gridDim.x / 4)
      work(unit / blocks, unit % blocks, false);
    return;
  }
  const u32 rank = blockIdx.x % 2, pairs = blocks / 2, shared = GROUPS * pairs,
            units = shared + (blocks % 2 ? (GROUPS + 1) / 2 : 0);
#pragma unroll 1
  for (u32 unit = blockIdx.x / 2; unit < units; unit += gridDim.x / 2) {
    const bool paired = unit < shared;
    const u32 group = paired ? unit / pairs : (unit - shared) * 2 + rank;
    if (group < GROUPS) work(group, paired ? unit % pairs * 2 + rank : blocks - 1, paired);
  }
}
/// The stages of a tile of this block: calls work(first k16 step, steps).
template <class P, Cut CUT, class WORK> LP_DEVICE void each_stage(const WORK& work) {
  constexpr int LEAF = P::leaf_steps, RUN = CUT == Cut::kPair ? P::steps : P::steps / 4;
  const int first = CUT == Cut::kPair ? 0 : (int)cluster_rank<CUT>() * RUN;
  int left = LEAF;
#pragma unroll 1
  for (int step = first; step < first + RUN;) {
    const int steps = LEAF % kStageSteps == 0 || left > kStageSteps ? kStageSteps : left;
#ifdef LP_SWAP_LEAVES  // negative control: the second and the third
    const int leaf = step / LEAF;
    work(P::leaves < 3 || (leaf != 1 && leaf != 2) ? step : leaf == 1 ? step + LEAF : step - LEAF, steps);
#else
    work(step, steps);
#endif
    step += steps, left -= steps;
    if (left == 0) left = LEAF;
  }
}

/// A warpgroup's side of the ring.
template <class P, Cut CUT> struct Consumer {
  using R = Ring<P>;
  u32 shared, lane;
  u32 fragments, stride;  // of the warp's row tile: the lane's bytes in a stage, and from one k16 step to the next
  u32 empty;              // barriers of the block that this lane tells what has been read
  Turn<R::stages> turn;

  LP_DEVICE Consumer(u32 shared) : shared(shared), lane(lane_index()) {}
  /// Address of the next stage, once it is full.
  LP_DEVICE u32 wait() {
    wait_phase(shared + R::full + 8 * turn.slot, turn.phase);
    return shared + turn.slot * kStageBytes;
  }
  /// Both blocks of a pair wait for the readers of what either fetches; what a block fetches for itself is told twice.
  LP_DEVICE void release(u32 slot) {
    if (lane < 2) mbarrier_arrive_remote(empty + 8 * slot);
  }
  /// Before a tile.
  LP_DEVICE void begin(bool paired) {
    wait();
    const u32 units = load_shared_u32(shared + R::units + 4 * turn.slot), warp = warp_index(),
              second = units << 1 >> warp & 1;
    fragments = (warp - second) * kTileBytes + second * kFragment + lane * 16;
    stride = (units >> warp & 1) + second ? 2 * kFragment : kFragment;
    empty = map_shared(shared + R::empty, paired ? lane & 1 : cluster_rank<CUT>());
  }
  /// After a stage of the epilogue.
  LP_DEVICE void done() {
    __syncwarp();
    release(turn.slot);
    turn.next();
  }
  LP_DEVICE void fetch(Quad* a) {
    const u32 at = wait() + fragments;
#pragma unroll
    for (int i = 0; i < kStageSteps; i++) a[i] = load_shared_16(at + i * stride);
  }
  template <int STEPS> LP_DEVICE void multiply(float* sum, const Quad* a, u32 add) {
    wgmma_fence();
    const u64 b = wgmma_operand(shared + turn.slot * kStageBytes + kStageA);
#pragma unroll
    for (int i = 0; i < STEPS; i++) wgmma<kTokens>(sum, a[i], wgmma_operand(b, i * kStepBytes), i == 0 ? add : 1);
    wgmma_commit();
  }
  /// A leaf, whose first fragments are in `first`, in one chain from zero. A stage's products run while the next one's
  /// fragments are fetched, at the end, if there are `more`, those of the next leaf.
  LP_DEVICE void chain(float* sum, Quad* first, bool more) {
    constexpr int FULL = P::leaf_steps / kStageSteps, REST = P::leaf_steps % kStageSteps;
    constexpr bool kOdd = (FULL + (REST > 0)) % 2;  // the last stage's fragments are in `first`
    Quad second[kStageSteps];
    u32 before = 0;
    const auto ended = [&](bool any) {  // the products of the stage before
      wgmma_wait<1>();
      if (any) release(before);
      before = turn.slot, turn.next();
    };
    pin<kAccumulators>(sum);
    if constexpr (FULL > 0) {
#pragma unroll 1
      for (int stage = 1;; stage += 2) {
        multiply<kStageSteps>(sum, first, stage > 1);
        ended(stage > 1);
        if (stage == FULL) break;
        fetch(second);
        multiply<kStageSteps>(sum, second, 1);
        ended(true);
        if (REST > 0 || more || stage + 1 < FULL) fetch(first);
        if (stage + 1 == FULL) break;
      }
    }
    if constexpr (REST > 0) {
      if constexpr (!kOdd) fetch(second);
      multiply<REST>(sum, kOdd ? first : second, FULL > 0);
      ended(FULL > 0);
      if (!kOdd && more) fetch(first);
    }
    if (kOdd && more) fetch(second);
    wgmma_wait<0>();
    release(before);
    if (kOdd && more)
#pragma unroll
      for (int i = 0; i < kStageSteps; i++) first[i] = second[i];
    pin<kAccumulators>(sum);
  }
  LP_DEVICE static void add_4(float* v, const Quad& q) {
    v[0] += __uint_as_float(q.x), v[1] += __uint_as_float(q.y), v[2] += __uint_as_float(q.z),
        v[3] += __uint_as_float(q.w);
  }
  /// The next leaves of a tile, ascending. `more`: leaves behind them. Additions begin with -0, which changes nothing.
  template <int LEAVES> LP_DEVICE void sum_leaves(float* sum, float* part, Quad* first, bool more) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) sum[i] = -0.0f;
#pragma unroll 1
    for (int leaf = 0; leaf < LEAVES; leaf++) {
      chain(part, first, more || leaf + 1 < LEAVES);
#pragma unroll
      for (int i = 0; i < kAccumulators; i++) sum[i] += part[i];
    }
  }
  /// The sums of a tile, of this block's part of K; of a product that is told in parts the next one.
  LP_DEVICE void sum_tile(float* sum) {
    constexpr int N = kAccumulators, GROUPS = P::leaves > P::group ? P::leaves / P::group : 1,
                  LEAVES = P::leaves / (GROUPS * P::told);
    float part[N];
    Quad first[kStageSteps];
    fetch(first);
#pragma unroll
    for (int i = 0; i < N; i++) part[i] = 0;
    if constexpr (GROUPS == 1 || CUT == Cut::kQuads) {
      sum_leaves<LEAVES>(sum, part, first, false);
    } else {
      const u32 third = shared + R::partial + thread_index() * 16;
#pragma unroll
      for (int i = 0; i < N; i++) sum[i] = -0.0f;
#pragma unroll 1
      for (int n = 0; n < GROUPS; n++) {
        float group[N];
        sum_leaves<LEAVES>(group, part, first, n + 1 < GROUPS);
        if (GROUPS == 4 && n == 2) {
#pragma unroll
          for (int j = 0; j < N / 4; j++) store_shared_16(third + j * (kConsumerThreads * 16), group + 4 * j);
          continue;
        }
        if (GROUPS == 4 && n == 3) {
#pragma unroll
          for (int j = 0; j < N / 4; j++) add_4(group + 4 * j, load_shared_16(third + j * (kConsumerThreads * 16)));
        }
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += group[i];
      }
    }
  }
};

/// Where the four blocks of a tile add up what each has summed. A block tells the others their runs of its tokens, once
/// they have read those of the tile before, and counts the bytes that it is told.
template <class P> struct Exchange {
  using R = Ring<P>;
  u32 shared, phase = 0;

  LP_DEVICE Exchange(u32 shared) : shared(shared) {}
  /// (g0 + g1) + (g2 + g3) of this block's run, the first kRunValues of `sum`, out of each block's sums of its group.
  LP_DEVICE void add_up(float* sum) {
    const u32 rank = cluster_rank<Cut::kQuads>(), mine = shared + R::partial + thread_index() * 16;
    if (thread_index() == 0) mbarrier_expect(shared + R::received, 3 * kRunBytes);
    wait_phase(shared + R::unread, phase ^ 1);
    float own[kRunValues];
#pragma unroll
    for (u32 to = 0; to < 4; to++) {
      const float* run = sum + to * kRunValues;
      if (to == rank) {
#pragma unroll
        for (int i = 0; i < kRunValues; i++) own[i] = run[i];
      } else {
        const u32 at = map_shared(mine + rank * kRunBytes, to), barrier = map_shared(shared + R::received, to);
#pragma unroll
        for (int j = 0; j < kRunGroups; j++) store_remote_16(at + j * (kConsumerThreads * 16), run + 4 * j, barrier);
      }
    }
    wait_phase(shared + R::received, phase);
#pragma unroll
    for (int j = 0; j < kRunGroups; j++) {
      float of[4][4];
#pragma unroll
      for (u32 from = 0; from < 4; from++) {
        const Quad q = load_shared_16(mine + from * kRunBytes + j * (kConsumerThreads * 16));
        const u32 told[4] = {q.x, q.y, q.z, q.w};  // of this block nothing
#pragma unroll
        for (int i = 0; i < 4; i++) of[from][i] = from == rank ? own[4 * j + i] : __uint_as_float(told[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) sum[4 * j + i] = (of[0][i] + of[1][i]) + (of[2][i] + of[3][i]);
    }
    __syncwarp();
    const u32 lane = lane_index();
    if (lane < 4 && lane != rank) mbarrier_arrive_remote(map_shared(shared + R::unread, lane));
    phase ^= 1;
  }
};

/// Fills A. `tiles`: see Tiles; begun while the launch before runs.
template <class P, Cut CUT, class E> LP_DEVICE void fill_weights(u32 shared, const u8* weights, const u32* tiles,
                                                                   u32 blocks) {
  using R = Ring<P>;
  static_assert(P::steps > 1, "units are told apart by where they lie");
  const u32 lane = lane_index();
  Turn<R::stages> turn;
  turn.phase = 1;
  each_tile<P, CUT>(blocks, [&](u32 group, u32, bool paired) {
    const u32 tile = group * kGroupTiles + lane;
    const bool on = lane < kGroupTiles && tile < P::tiles;
    const u32 word = on ? load_constant_u32(tiles + tile) : 0, next = __shfl_down_sync(kAllLanes, word, 1);
    const bool first = on && lane + 1 < kGroupTiles && word & 1 && next == word + 2;
    const u32 units = __ballot_sync(kAllLanes, first), tile_count = __popc(__ballot_sync(kAllLanes, on));
    const bool mine = on && !(units << 1 >> lane & 1) && (!paired || lane / 4 == blockIdx.x % 2);
    const u8* from = weights + (u64)(word >> 1) * kFragment;
    const auto load = [&](u32 to, u32 step, u32 bytes, u32 full) {
      if (paired) bulk_load_pair(to, from + (u64)step * kFragment, bytes, full);
      else bulk_load(to, from + (u64)step * kFragment, bytes, full);
    };
    each_stage<P, CUT>([&](int step, int steps) {
      wait_phase(shared + R::empty + 8 * turn.slot, turn.phase);
      const u32 to = shared + turn.slot * kStageBytes + lane * kTileBytes, full = shared + R::full + 8 * turn.slot;
      if (lane == 0) {
        store_shared_u32(shared + R::units + 4 * turn.slot, units);
        mbarrier_expect(full, tile_count * steps * kFragment);
      }
      if (mine && first) load(to, 2 * step, steps * 2 * kFragment, full);
      else if (mine && !(word & 1)) load(to, step, steps * kFragment, full);
      else if (mine)
        for (int i = 0; i < steps; i++) load(to + i * kFragment, 2 * (step + i), kFragment, full);
      turn.next();
    });
#pragma unroll 1
    for (int i = 0; i < E::stages; i++) {
      wait_phase(shared + R::empty + 8 * turn.slot, turn.phase);
      if (lane == 0) mbarrier_arrive(shared + R::full + 8 * turn.slot);
      turn.next();
    }
  });
}
/// The first token of a tile that this block finishes.
template <Cut CUT> LP_DEVICE u32 first_token() {
  return CUT == Cut::kPair ? 0 : cluster_rank<CUT>() * kRunTokens;
}
/// Fills B, and the stages of the epilogue, whose `fetch` gets the stage's index, its address and its barrier.
template <class P, Cut CUT, class E> LP_DEVICE void fill_vectors(u32 shared, const u8* vectors, u32 blocks,
                                                                   const E& epilogue) {
  using R = Ring<P>;
  Turn<R::stages> turn;
  turn.phase = 1;
  each_tile<P, CUT>(blocks, [&](u32 group, u32 block, bool) {
    const u8* from = vectors + (u64)block * P::steps * kStepBytes;
    each_stage<P, CUT>([&](int step, int steps) {
      wait_phase(shared + R::empty + 8 * turn.slot, turn.phase);
      const u32 full = shared + R::full + 8 * turn.slot;
      mbarrier_expect(full, steps * kStepBytes);
      bulk_load(shared + turn.slot * kStageBytes + kStageA, from + (u64)step * kStepBytes, steps * kStepBytes, full);
      turn.next();
    });
#pragma unroll 1
    for (int i = 0; i < E::stages; i++) {
      wait_phase(shared + R::empty + 8 * turn.slot, turn.phase);
      epilogue.fetch(i, group, block * kTokens + first_token<CUT>(), shared + turn.slot * kStageBytes,
                     shared + R::full + 8 * turn.slot);
      turn.next();
    }
  });
}

/// A product and what follows it, over `blocks` blocks of tokens. weights: of the product; tiles: its part of Tiles;
/// vectors: B. E finishes kRuns runs of tokens, cut in quads one.
template <class P, Cut CUT, class E> LP_DEVICE void multiply(const u8* weights, const u32* tiles, const u8* vectors,
                                                             u32 blocks, const E& epilogue) {
  using R = Ring<P>;
  static_assert(CUT == Cut::kPair || kInQuads<P>, "a block has a group of leaves");
  const u32 shared = shared_address(shared_memory), warp = warp_index();
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < R::stages; i++)
      mbarrier_init(shared + R::full + 8 * i, 2), mbarrier_init(shared + R::empty + 8 * i, 2 * kConsumers);
    mbarrier_init(shared + R::received, 1), mbarrier_init(shared + R::unread, 3 * kConsumers);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
  launch_dependents();
  if (warp >= kConsumers) {
    lower_registers<24>();
    if (warp == kWeights) fill_weights<P, CUT, E>(shared, weights, tiles, blocks);
    if (warp == kVectors && lane_index() == 0) {
      wait_launch_before();
      fence_async_global();  // what ordinary stores wrote is read by bulk copies
      fill_vectors<P, CUT>(shared, vectors, blocks, epilogue);
    }
    __syncwarp();
  } else {
    raise_registers<240>();
    wait_launch_before();
    Consumer<P, CUT> consumer(shared);
    Exchange<P> exchange(shared);
    float sum[kAccumulators];
    each_tile<P, CUT>(blocks, [&](u32 group, u32 block, bool paired) {
      consumer.begin(paired);
      const u32 tile = group * kGroupTiles + warp, token = block * kTokens + first_token<CUT>();
      if constexpr (P::told == 1) {
        consumer.sum_tile(sum);
        if constexpr (CUT == Cut::kQuads) exchange.add_up(sum);
        epilogue.finish(consumer, tile, token, sum);
      } else {
#pragma unroll 1
        for (u32 part = 0; part < P::told; part++) {
          consumer.sum_tile(sum);
          epilogue.finish(consumer, tile, token, sum, part);
        }
      }
    });
  }
  cluster_sync();  // nobody leaves while the others may still write here
}

}  // namespace matrix
