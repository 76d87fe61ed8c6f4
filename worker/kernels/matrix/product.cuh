// Products of matrix passes: C [rows of weights][tokens] = A B, in tiles of 128 rows by 128 tokens, by persistent
// blocks.
//
// Cut::kPair, clusters of two: they have the same rows and two blocks of tokens that follow each other, and each
// fetches half of A for both. Of an odd last block of tokens both take rows of their own, and each fetches half of B.
// Where leaves are added ascending, a block has registers for two tiles of the same rows: then a pair has rows of its
// own and both blocks of tokens, fetches half of B each, and reads a leaf of A twice. That is a third less to fetch.
// Cut::kHalves, teams of two such pairs, where blocks would idle in the last round of tiles: a pair sums two of the
// four groups of leaves, half of K. The two blocks of a tile exchange sums, and each finishes 64 of its tokens.
// Cut::kQuads, teams of four pairs: a pair sums one group, and a block finishes 32 tokens. Sums go through memory: of
// clusters of four blocks a GPU can have 30 at once.
//
// Warps 0 to 3 and 4 to 7 are two warpgroups that multiply, a warp a row tile: A in registers, B in shared memory. Warp
// 8 fills A, as early as the launch before still runs, warp 9 B and, behind a tile's B, what the epilogue needs, in
// rings of their own: a slot of A is free once its products have begun. A stage is kStageSteps k16 steps of a leaf, its
// last one perhaps fewer.
//
// Sums: leaves from zero, each one chain; ascending, or in quads: groups of leaves ascending, at most four, whose sums
// are added as a binary tree. A rank that has less than a group has its leaves one by one.
#pragma once

extern __shared__ __align__(1024) u8 shared_memory[];

namespace matrix {

constexpr u32 kConsumers = 8, kConsumerThreads = kConsumers * 32, kWeights = 8, kVectors = 9, kThreads = 384;
constexpr u32 kGroupTiles = 8;   // row tiles of a group: a tile's rows
constexpr int kStageSteps = 4;   // stages of two cost a quarter more
template <class P> constexpr u32 kTileBytes = kStageSteps / P::run_steps * P::run;  // of a row tile in a stage
constexpr u32 kSlotBytes = 16384;                                      // of a stage of A, and of B
constexpr u32 kRingSlots = 14;                                         // that a block has room for
constexpr int kAccumulators = kTokens / 2;                             // of a thread
/// A run of tokens, 4 groups of 8: what squares are summed of at a time, and what a block of a team finishes at least.
constexpr int kRunGroups = 4, kRunTokens = 32, kRuns = kTokens / kRunTokens, kRunValues = 4 * kRunGroups;
constexpr u32 kRunBytes = kRunValues * kConsumerThreads * 4;
static_assert(kGroupTiles * kTileBytes<Head> <= kSlotBytes && kStageSteps * kStepBytes <= kSlotBytes &&
                  kRunBytes == kSlotBytes,
              "slots hold a stage, or a run");

template <class P, class Q> constexpr bool kSame = false;
template <class P> constexpr bool kSame<P, P> = true;
/// How neighbouring blocks divide tiles.
enum class Cut { kPair, kHalves, kQuads };
/// Parts that K is cut into, and runs of a tile that a block finishes.
template <Cut CUT> constexpr int kParts = CUT == Cut::kPair ? 1 : CUT == Cut::kHalves ? 2 : 4;
template <Cut CUT> constexpr int kFinished = kRuns / kParts<CUT>;
/// Leaves of a double tile are kept in the ring, beside some of what follows. Weights of few bits are unpacked in
/// registers, of which double tiles leave none.
template <class P> constexpr int kLeafStages = (P::leaf_steps + kStageSteps - 1) / kStageSteps;
template <class P, Cut CUT> constexpr bool kDoubles = CUT == Cut::kPair && P::format == Format::kBf16 &&
    P::leaves == P::group && kLeafStages<P> <= 6 && (kSame<P, GateUp> || kSame<P, Head>);
/// Blocks of a team, which work on the same unit: for each part of K a pair.
template <Cut CUT> constexpr u32 kTeam = 2 * kParts<CUT>;
/// Whether a product's leaves are added in four groups; of fewer leaves than four ascending is the same.
template <class P> constexpr bool kInQuads = P::leaves == 4 * P::group;
/// Whether a rank sends a product's sums to others.
template <class P> constexpr bool kSent = kRanks > 1 && (kSame<P, O> || kSame<P, Down>);

/// Offsets in shared memory.
template <class P, Cut CUT> struct Ring {
  // Slots that keep sums of a tile: a thread's of the third group of leaves, [8 tokens][thread][4] f32; or what is
  // sent, [warp][8 tokens][lane][4].
  static constexpr u32 sums = (kInQuads<P> && CUT == Cut::kPair) || kSent<P> ? kRuns : 0;
  static constexpr u32 b_slots = sums ? 4 : 5, a_slots = kRingSlots - sums - b_slots;
  static constexpr u32 b = a_slots * kSlotBytes, partial = b + b_slots * kSlotBytes;
  static constexpr u32 a_full = kRingSlots * kSlotBytes, a_empty = a_full + 8 * a_slots;  // mbarriers
  static constexpr u32 b_full = a_empty + 8 * a_slots, b_empty = b_full + 8 * b_slots;
  // [slot of A] u32: bit kStageSteps * i if row tiles i and i + 1 have come together, [k16 step][tile].
  static constexpr u32 units = b_empty + 8 * b_slots;
  static constexpr u32 bytes = units + 4 * a_slots;
};
constexpr u32 kProductBytes = Ring<GateUp, Cut::kPair>::bytes;  // of any product
static_assert(Ring<GateUp, Cut::kPair>::sums == 0 && kProductBytes <= 227 * 1024, "shared memory of a block");

/// A slot, and the phase of its barriers.
template <u32 SLOTS> struct Turn {
  u32 slot = 0, phase = 0;
  LP_DEVICE void next() {
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
};
LP_DEVICE void wait_phase(u32 barrier, u32 phase) {
  while (!mbarrier_try_wait(barrier, phase)) {
  }
}

/// The part of K that this block sums.
template <Cut CUT> LP_DEVICE u32 part_of_k() { return blockIdx.x % kTeam<CUT> / (kTeam<CUT> / kParts<CUT>); }

/// What a pair's two tiles have in common, so that each block fetches half of it for both.
enum class Common : u32 { kNothing, kRows, kTokens };
struct Tile {
  u32 group;          // of row tiles
  u32 block, second;  // of tokens; of a double tile two, else the same
  Common common;      // nothing: the other block has no tile
  u32 unit;           // that the team works on
  LP_DEVICE bool doubled() const { return block != second; }
};
/// The block of tokens that has place `place` among those of a mask.
LP_DEVICE u32 block_at(u32 blocks, u32 place) {
#pragma unroll 1
  for (; place > 0; place--) blocks &= blocks - 1;
  return __ffs(blocks) - 1;
}
/// Units of GROUPS groups and `count` blocks of tokens that are double tiles: whole rounds of them, and what is left
/// unless it takes fewer rounds as single tiles, with those that follow.
template <u32 GROUPS> LP_DEVICE u32 double_units(u32 count, u32 teams) {
  const u32 most = GROUPS / 2 * (count / 2), rest = most % teams, idle = teams - rest,
            single = GROUPS % 2 * (count / 2) + count % 2 * ((GROUPS + 1) / 2);
  const u32 doubled = 2 + (single > idle ? (single - idle + teams - 1) / teams : 0),
            apart = (2 * rest + single + teams - 1) / teams;
  return doubled <= apart ? most : most - rest;
}
/// The tiles of this block, of the blocks of tokens in `blocks`: calls work(tile). All tiles of two groups follow each
/// other, so that weights of an odd last block of tokens, too, are in the second-level cache. But double tiles come
/// first, then what is left of their kind, then those of an odd last block.
template <class P, Cut CUT, class WORK> LP_DEVICE void each_tile(u32 blocks, const WORK& work) {
  constexpr u32 GROUPS = (P::tiles + kGroupTiles - 1) / kGroupTiles;
  const u32 teams = gridDim.x / kTeam<CUT>;
  if (blockIdx.x >= teams * kTeam<CUT>) return;
  const u32 doubles = kDoubles<P, CUT> ? double_units<GROUPS>(__popc(blocks), teams) : 0;
#pragma unroll 1
  for (u32 unit = blockIdx.x / kTeam<CUT>;; unit += teams) {
    const u32 side = blockIdx.x % 2, count = __popc(blocks), pairs = count / 2;
    u32 group, first, more = 0;  // which of the blocks of tokens, and of a double tile one more
    Common common = Common::kRows;
    if (kDoubles<P, CUT> && unit < doubles) {
      group = unit / pairs * 2 + side, first = unit % pairs * 2, more = 1, common = Common::kTokens;
    } else if (kDoubles<P, CUT> && doubles > 0) {
      const u32 next = unit - doubles;
      if (next < GROUPS * pairs - 2 * doubles) {
        // Two of what could be a double tile follow each other, then those of an odd last group.
        const u32 halves = 2 * (GROUPS / 2 * pairs - doubles), of = doubles + next / 2,
                  pair = next < halves ? of : next - halves;
        group = next < halves ? of / pairs * 2 + next % 2 : GROUPS - 1, first = pair % pairs * 2 + side;
      } else {
        if (count % 2 == 0) return;
        group = (next - (GROUPS * pairs - 2 * doubles)) * 2 + side, first = count - 1, common = Common::kTokens;
      }
    } else {
      const bool both = unit / count < GROUPS / 2;
      const u32 two = both ? unit / count : GROUPS / 2, of = unit - two * count;
      const u32 shared = both ? 2 * pairs : pairs;
      if (of < shared) group = 2 * two + (both ? of % 2 : 0), first = (both ? of / 2 : of) * 2 + side;
      else if (of < shared + count % 2) group = 2 * two + side, first = count - 1, common = Common::kTokens;
      else return;
    }
    if (common == Common::kTokens && group - side + 1 >= GROUPS) common = Common::kNothing;
    if (group >= GROUPS) return;
    work(Tile{group, block_at(blocks, first), block_at(blocks, first + more), common, unit});
  }
}
/// The stages of a tile of this block: calls work(first k16 step, steps, time), of each leaf so many times.
template <class P, Cut CUT, class WORK> LP_DEVICE void each_stage(u32 times, const WORK& work) {
  constexpr int LEAF = P::leaf_steps, RUN = P::steps / kParts<CUT>;
  const int first = (int)part_of_k<CUT>() * RUN;
  int left = LEAF;
  u32 time = 0;
#pragma unroll 1
  for (int step = first; step < first + RUN;) {
    const int steps = LEAF % kStageSteps == 0 || left > kStageSteps ? kStageSteps : left;
#ifdef LP_SWAP_LEAVES  // negative control: the second and the third
    const int leaf = step / LEAF;
    work(P::leaves < 3 || (leaf != 1 && leaf != 2) ? step : leaf == 1 ? step + LEAF : step - LEAF, steps, time);
#else
    work(step, steps, time);
#endif
    step += steps, left -= steps;
    if (left > 0) continue;
    left = LEAF;
    if (!kDoubles<P, CUT>) continue;
    time++;
    if (time == times) time = 0;
    else step -= LEAF;
  }
}

LP_DEVICE void add_4(float* v, const Quad& q) {
  v[0] += __uint_as_float(q.x), v[1] += __uint_as_float(q.y), v[2] += __uint_as_float(q.z),
      v[3] += __uint_as_float(q.w);
}

/// A warpgroup's side of the rings.
template <class P, Cut CUT> struct Consumer {
  using R = Ring<P, CUT>;
  u32 shared;
  u32 runs;       // of the warp's row tile in the first slot | whether they are two apart
  u32 empty;      // a_empty of the block that this lane tells what has been read
  bool kept;      // whether the leaf will be read again
  u32 fetched;    // slot of the stage whose fragments have been asked for last
  Turn<R::a_slots> a;
  Turn<R::b_slots> b;

  LP_DEVICE Consumer(u32 shared) : shared(shared) {}
  /// Before a tile.
  LP_DEVICE void begin(const Tile& of) {
    hold_up();
    wait_phase(shared + R::a_full + 8 * a.slot, a.phase);
    const u32 units = load_shared_u32(shared + R::units + 4 * a.slot), warp = warp_index(),
              first = units >> kStageSteps * warp & 1, second = units << kStageSteps >> kStageSteps * warp & 1,
              lane = lane_index(), rank = blockIdx.x % 2;
    runs = shared + (warp - second) * kTileBytes<P> + second * P::run + (first | second);
    // Both blocks of a pair wait for the readers of what either fetches; one that is alone is told twice.
    empty = map_shared(shared + R::a_empty, of.common != Common::kNothing ? lane & 1 : rank);
    kept = of.doubled();
  }
  /// Address of the next stage of B, or of the epilogue, once it is full.
  LP_DEVICE u32 wait() {
    hold_up();
    wait_phase(shared + R::b_full + 8 * b.slot, b.phase);
    return shared + R::b + b.slot * kSlotBytes;
  }
  LP_DEVICE void release(u32 slot) {
    if (lane_index() < 2) mbarrier_arrive_remote(empty + (R::b_empty - R::a_empty) + 8 * slot);
  }
  /// After a stage of the epilogue. All lanes must have used (not only requested) what they read: an arrive overtakes
  /// loads of its own warp that are still queued. `never` is false, but computed from the result of every load.
  LP_DEVICE void done(bool never) {
#ifdef LP_RELEASE_EARLY  // negative control
    never = false;
#endif
    __syncwarp();
    release(b.slot + (never ? 8192 : 0));
    b.next();
  }
  /// Gives back the slot of the stage of A whose fragments have been asked for last.
  LP_DEVICE void give_back() {
    if (lane_index() < 2 && !(kDoubles<P, CUT> && kept)) mbarrier_arrive_remote(empty + 8 * fetched);
  }
  /// Asks for the fragments of the next stage of A.
  LP_DEVICE void fetch(Quad* to) {
    wait_phase(shared + R::a_full + 8 * a.slot, a.phase);
    const u32 at = (runs & ~1u) + a.slot * kSlotBytes, stride = P::run << (runs & 1);
#pragma unroll
    for (int r = 0; r < kStageSteps / P::run_steps; r++) {
      const auto scales = RunScales<P::format>::load(at + r * stride);
      const auto weights = StoredRun<P>::load(at + r * stride);
#pragma unroll
      for (int i = 0; i < P::run_steps; i++) to[r * P::run_steps + i] = weights.operand(i, scales);
    }
    fetched = a.slot;
    a.next();
#ifdef LP_RELEASE_EARLY
    give_back();
#endif
  }
  /// Behind a leaf that more follow: of a double tile it is read a second time, and then given back.
  LP_DEVICE void turn_leaf(bool doubled) {
    if (!kDoubles<P, CUT> || !doubled) return;
    kept = !kept;
    if (kept) return;
    const bool around = a.slot < kLeafStages<P>;
    a.slot = around ? a.slot + R::a_slots - kLeafStages<P> : a.slot - kLeafStages<P>, a.phase ^= around;
  }
  /// Begins the products of the stage whose fragments have been asked for last. They have what they need from its slot
  /// of A, which is given back: not before (see done).
  template <int STEPS> LP_DEVICE void multiply(float* sum, const Quad* of, u32 add) {
    const u64 operand = wgmma_operand(wait());
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      wgmma<kTokens>(sum, of[i], wgmma_operand(operand, i * kStepBytes), i == 0 ? add : 1);
    wgmma_commit();
#ifndef LP_RELEASE_EARLY
    give_back();
#endif
  }
  /// A leaf, whose first fragments are in `first`, in one chain from zero. A stage's products run while the next one's
  /// fragments are fetched, at the end, if there are `more`, those of the next leaf.
  LP_DEVICE void chain(float* sum, Quad* first, bool more, bool doubled = false) {
    constexpr int FULL = P::leaf_steps / kStageSteps, REST = P::leaf_steps % kStageSteps;
    constexpr bool kOdd = (FULL + (REST > 0)) % 2;  // the last stage's fragments are in `first`
    // Stages of the loop. It is left behind a `second` where shorter ones follow, or the compiler runs all products one
    // by one.
    constexpr int LOOP = REST > 0 ? FULL / 2 * 2 : FULL;
    Quad second[kStageSteps];
    u32 before = 0;
    const auto ended = [&](bool any) {  // the products of the stage before
      wgmma_wait<1>();
      if (any) release(before);
      before = b.slot;
      b.next();
    };
    pin<kAccumulators>(sum);
    if constexpr (LOOP > 0) {
#pragma unroll 1
      for (int stage = 1;; stage += 2) {
        multiply<kStageSteps>(sum, first, stage > 1);
        ended(stage > 1);
        if (stage == LOOP) break;
        fetch(second);
        multiply<kStageSteps>(sum, second, 1);
        ended(true);
        if (REST == 0 && stage + 1 == LOOP && more) turn_leaf(doubled);
        if (REST > 0 || more || stage + 1 < LOOP) fetch(first);
        if (stage + 1 == LOOP) break;
      }
    }
    if constexpr (LOOP < FULL) {
      multiply<kStageSteps>(sum, first, LOOP > 0);
      ended(LOOP > 0);
    }
    if constexpr (REST > 0) {
      if constexpr (!kOdd) fetch(second);
      multiply<REST>(sum, kOdd ? first : second, FULL > 0);
      ended(FULL > 0);
      if (!kOdd && more) turn_leaf(doubled), fetch(first);
    }
    if (kOdd && more) turn_leaf(doubled), fetch(second);
    wgmma_wait<0>();
    release(before);
    if (kOdd && more)
#pragma unroll
      for (int i = 0; i < kStageSteps; i++) first[i] = second[i];
    pin<kAccumulators>(sum);
  }
  /// The sums of a double tile, those of the second block of tokens behind those of the first, or, if it is not
  /// `doubled`, of the first alone.
  LP_DEVICE void sum_tiles(float* sum, bool doubled) {
    constexpr int N = kAccumulators;
    float part[N];
    Quad first[kStageSteps];
    fetch(first);
#pragma unroll
    for (int i = 0; i < N; i++) part[i] = 0, sum[i] = sum[N + i] = -0.0f;
    // What is left to do; of a double tile times two.
#pragma unroll 1
    for (int left = doubled ? 2 * P::leaves : P::leaves; left > 0; left--) {
      chain(part, first, left > 1, doubled);
      if (doubled && left % 2 != 0) {
#pragma unroll
        for (int i = 0; i < N; i++) sum[N + i] += part[i];
      } else {
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += part[i];
      }
    }
  }
  /// The sums of a tile, of this block's part of K; of a product that is told in parts the next one. Additions begin
  /// with -0, which changes nothing.
  LP_DEVICE void sum_tile(float* sum) {
    constexpr int N = kAccumulators, LEAVES = P::leaves / (kParts<CUT> * P::told),
                  GROUP = P::leaves > P::group ? P::group : LEAVES;
    float part[N], ahead[N];  // of a leaf, of a group
    Quad first[kStageSteps];
    fetch(first);
#pragma unroll
    for (int i = 0; i < N; i++) part[i] = 0, ahead[i] = sum[i] = -0.0f;
    float* group = GROUP == LEAVES ? sum : ahead;
#pragma unroll 1
    for (int leaf = 1; leaf <= LEAVES; leaf++) {
      chain(part, first, leaf < LEAVES);
#pragma unroll
      for (int i = 0; i < N; i++) group[i] += part[i];
      if (GROUP == LEAVES || leaf % GROUP != 0) continue;
      if (LEAVES == 4 * GROUP && leaf >= 3 * GROUP) {
        const u32 third = shared + R::partial + thread_index() * 16;
        if (leaf == 3 * GROUP) {
#pragma unroll
          for (int j = 0; j < N / 4; j++) store_shared_16(third + j * (kConsumerThreads * 16), group + 4 * j);
#pragma unroll
          for (int i = 0; i < N; i++) group[i] = -0.0f;
          continue;
        }
#pragma unroll
        for (int j = 0; j < N / 4; j++) add_4(group + 4 * j, load_shared_16(third + j * (kConsumerThreads * 16)));
      }
#pragma unroll
      for (int i = 0; i < N; i++) sum[i] += group[i], group[i] = -0.0f;
    }
  }
};

/// What the blocks of a tile tell each other, in memory: what a block is told by part `own ^ (i + 1)` of K has place i,
/// [8 tokens][thread][4] f32. A team has room for two units: at the second one all its blocks have read what they were
/// told of the first.
template <Cut CUT> struct Exchange {
  static constexpr u32 kAll = kParts<CUT>, kPlace = kFinished<CUT> * kRunBytes, kGroup = kConsumerThreads * 16;
  static constexpr int kValues = kFinished<CUT> * kRunValues;

  /// What the block of a part is told.
  LP_DEVICE static u8* told(u8* words, u32 unit, u32 part) {
    static_assert((kAll - 1) * kPlace <= Memory::block_sums, "room of a block");
    const u32 team = blockIdx.x / kTeam<CUT>, round = unit / (gridDim.x / kTeam<CUT>);
    return words + Memory::sums + thread_index() * 16 +
           (u64)((team * 2 + round % 2) * kTeam<CUT> + part * 2 + blockIdx.x % 2) * Memory::block_sums;
  }
  /// Until all blocks of the tile have come here. The blocks of a team are resident, all at the same unit.
  LP_DEVICE static void meet(u8* words) {
    barrier_sync(1, kConsumerThreads);
    if (thread_index() == 0) {
      u32* come = reinterpret_cast<u32*>(words + Memory::come) + blockIdx.x / kTeam<CUT> * 2 + blockIdx.x % 2;
      // A tile's blocks count four, tile by tile and launch by launch.
      const u32 all = (fetch_add_release_u32(come, 4 / kAll) & ~3u) + 4;
      while ((int)(load_acquire_u32(come) - all) < 0) {
      }
    }
    barrier_sync(1, kConsumerThreads);
  }
  /// Tells the block of part `to` the kValues of `sum`.
  LP_DEVICE static void tell(u8* words, u32 unit, u32 to, const float* sum) {
    u8* at = told(words, unit, to) + ((part_of_k<CUT>() ^ to) - 1) * kPlace;
#pragma unroll
    for (int j = 0; j < kValues / 4; j++) store_floats(at + j * kGroup, sum + 4 * j);
  }
  /// (g0 + g1) + (g2 + g3) of what this block finishes, the first kValues of `sum`, out of each block's sums of its
  /// groups.
  LP_DEVICE static void add_up(u8* words, u32 unit, float* sum) {
    const u32 own = part_of_k<CUT>();
#pragma unroll
    for (u32 to = 0; to < kAll; to++)
      if (to != own) tell(words, unit, to, sum + to * kValues);
    // Its own to the front.
#pragma unroll
    for (u32 part = 1; part < kAll; part++)
      if (part == own)
#pragma unroll
        for (int i = 0; i < kValues; i++) sum[i] = sum[part * kValues + i];
    meet(words);
    const u8* from = told(words, unit, own);
    Quad others[kAll - 1][kValues / 4];
#pragma unroll
    for (u32 i = 0; i < kAll - 1; i++)
#pragma unroll
      for (int j = 0; j < kValues / 4; j++) others[i][j] = load_relaxed_4x4(from + i * kPlace + j * kGroup);
#pragma unroll
    for (int j = 0; j < kValues / 4; j++) {
      add_4(sum + 4 * j, others[0][j]);  // either order of two summands has the same sum
      if constexpr (kAll == 4) {
        float pair[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
        add_4(pair, others[1][j]);
        add_4(pair, others[2][j]);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[4 * j + i] += pair[i];
      }
    }
  }
};

/// Fills A. `tiles`: see Tiles; begun while the launch before runs. A lane has a run of a row tile, the first one all
/// of them, where they lie together: bulk copies of several lanes are issued at once, those of a loop are not.
template <class P, Cut CUT> LP_DEVICE void fill_weights(u32 shared, const u8* weights, const u32* tiles, u32 blocks) {
  using R = Ring<P, CUT>;
  static_assert(P::runs > 1, "units are told apart by where they lie");
  static_assert(kGroupTiles * kStageSteps == 32, "a lane for each run");
  const u32 lane = lane_index(), place = lane / kStageSteps;
  const int own = lane % kStageSteps;
  const u64 once = policy_evict_first();
  Turn<R::a_slots> turn;
  turn.phase = 1;
  each_tile<P, CUT>(blocks, [&](const Tile& of) {
    const u32 tile = of.group * kGroupTiles + place;
    const bool on = tile < P::tiles;
    const u32 word = on ? load_constant_u32(tiles + tile) : 0, stride = P::run << (word & 1),
              next = __shfl_down_sync(kAllLanes, word, kStageSteps);
    const bool first = on && place + 1 < kGroupTiles && word & 1 && next == word + 2, whole = first || !(word & 1);
    const u32 units = __ballot_sync(kAllLanes, first),
              tile_count = __popc(__ballot_sync(kAllLanes, on)) / kStageSteps;
    const bool own_half = of.common != Common::kRows || lane / 16 == blockIdx.x % 2,
               mine = on && own_half && !(units << kStageSteps >> lane & 1);
    const u8* from = weights + (u64)(word >> 1) * P::run;
    each_stage<P, CUT>(1, [&](int first_step, int steps, u32) {
      const int first_run = first_step / P::run_steps, runs = steps / P::run_steps;
      hold_up();
      wait_phase(shared + R::a_empty + 8 * turn.slot, turn.phase);
      const u32 to = shared + turn.slot * kSlotBytes + place * kTileBytes<P> + own * P::run,
                full = shared + R::a_full + 8 * turn.slot;
      if (lane == 0) {
        store_shared_u32(shared + R::units + 4 * turn.slot, units);
        mbarrier_expect(full, tile_count * runs * P::run);
      }
      if (mine && own < (whole ? 1 : runs)) {
        const u8* at = from + (u64)(first_run + own) * stride;
        const u32 bytes = whole ? runs * stride : P::run;
        if (of.common == Common::kRows) bulk_load_pair(to, at, bytes, full);
        else if (__popc(blocks) <= (of.doubled() ? 2 : 1)) bulk_load(to, at, bytes, full, once);
        else bulk_load(to, at, bytes, full);
      }
      turn.next();
    });
  });
}
/// The first token of a tile that this block finishes.
template <Cut CUT> LP_DEVICE u32 first_token() { return part_of_k<CUT>() * kFinished<CUT> * kRunTokens; }
/// Fills B, and the stages of the epilogue, whose `fetch` gets the stage's index, its address and its barrier.
template <class P, Cut CUT, class E> LP_DEVICE void fill_vectors(u32 shared, const u8* vectors, u32 blocks,
                                                                   const E& epilogue) {
  using R = Ring<P, CUT>;
  Turn<R::b_slots> turn;
  turn.phase = 1;
  each_tile<P, CUT>(blocks, [&](const Tile& of) {
    const auto fill = [&](const auto& load) {
      hold_up_lane();
      wait_phase(shared + R::b_empty + 8 * turn.slot, turn.phase);
      load(shared + R::b + turn.slot * kSlotBytes, shared + R::b_full + 8 * turn.slot);
      turn.next();
    };
    each_stage<P, CUT>(of.doubled() ? 2 : 1, [&](int step, int steps, u32 time) {
      fill([&](u32 to, u32 full) {
        const u8* from = vectors + ((u64)(time == 0 ? of.block : of.second) * P::steps + step) * kStepBytes;
        const u32 half = steps * (kStepBytes / 2), own = blockIdx.x % 2 * half;
        mbarrier_expect(full, 2 * half);
        if (of.common == Common::kTokens) bulk_load_pair(to + own, from + own, half, full);
        else bulk_load(to, from, 2 * half, full);
      });
    });
#pragma unroll 1
    for (u32 time = 0; time < (of.doubled() ? 2 : 1); time++)
#pragma unroll 1
      for (int i = 0; i < E::stages; i++)
        fill([&](u32 to, u32 full) {
          const u32 block = time == 0 ? of.block : of.second;
          epilogue.fetch(i, of.group, block * kTokens + first_token<CUT>(), to, full);
        });
  });
}

/// A product and what follows it, of the blocks of tokens in `blocks`, a bit each. weights: of the product; tiles: its
/// part of Tiles; words: the pass's memory; vectors: where B begins there. E finishes kFinished<CUT> runs of tokens.
template <class P, Cut CUT, class E> LP_DEVICE void multiply(const u8* weights, const u32* tiles, u8* words,
                                                             u64 vectors, u32 blocks, const E& epilogue) {
  using R = Ring<P, CUT>;
  static_assert(CUT == Cut::kPair || kInQuads<P>, "a block has whole groups of leaves");
  static_assert(R::bytes <= kProductBytes, "shared memory of a block");
  const u32 shared = shared_address(shared_memory), warp = warp_index();
  poison(shared_memory, R::bytes);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < R::a_slots; i++)
      mbarrier_init(shared + R::a_full + 8 * i, 1), mbarrier_init(shared + R::a_empty + 8 * i, 2 * kConsumers);
    for (u32 i = 0; i < R::b_slots; i++)
      mbarrier_init(shared + R::b_full + 8 * i, 1), mbarrier_init(shared + R::b_empty + 8 * i, 2 * kConsumers);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
  launch_dependents();
  if (warp >= kConsumers) {
    lower_registers<24>();
    if (warp == kWeights) fill_weights<P, CUT>(shared, weights, tiles, blocks);
    if (warp == kVectors && lane_index() == 0) {
      wait_launch_before();
      fence_async_global();  // what ordinary stores wrote is read by bulk copies
      fill_vectors<P, CUT>(shared, words + vectors, blocks, epilogue);
    }
    __syncwarp();
  } else {
    raise_registers<240>();
    wait_launch_before();
    Consumer<P, CUT> consumer(shared);
    float sum[kAccumulators * (kDoubles<P, CUT> ? 2 : 1)];
    each_tile<P, CUT>(blocks, [&](const Tile& of) {
      consumer.begin(of);
      // Found behind the sums, which need all registers.
      const auto tile = [&] { return of.group * kGroupTiles + warp; };
      const auto token = [&] { return of.block * kTokens + first_token<CUT>(); };
      if constexpr (kDoubles<P, CUT>) {
        consumer.sum_tiles(sum, of.doubled());
        epilogue.finish(consumer, tile(), token(), sum);
        if (!of.doubled()) return;
#pragma unroll
        for (int i = 0; i < kAccumulators; i++) sum[i] = sum[kAccumulators + i];
        epilogue.finish(consumer, tile(), of.second * kTokens, sum);
      } else if constexpr (P::told > 1) {
#pragma unroll 1
        for (u32 part = 0; part < P::told; part++) {
          consumer.sum_tile(sum);
          epilogue.finish(consumer, tile(), token(), sum, part);
        }
      } else {
        consumer.sum_tile(sum);
        if constexpr (CUT != Cut::kPair) Exchange<CUT>::add_up(words, of.unit, sum);
        epilogue.finish(consumer, tile(), token(), sum);
      }
    });
  }
  cluster_sync();  // nobody leaves while the others may still write here
}

}  // namespace matrix
