// Who owns what in a wide pass, and what lies where.
//
// A pair is a cluster of two blocks. Of qkv, o and down a pair owns the row tiles that its blocks own in narrow passes,
// and each block sums half of K of all of them: so a block reads half of the activations. Gate/up and the LM head are
// not cut: a block owns its tiles with all of K.
//
// Any number of leaves and of k16 steps of a leaf will do. Pairs own equally many tiles or not, some perhaps none. A
// product is not cut where a pair owns more than eight tiles or a block more than four, or where it has a single leaf;
// in groups of 8 and 16 neither are o and down, of which a rank has less than a group of leaves. A leaf's last stage,
// and its last slot of activations, may have fewer steps than the others.
//
// Leaves are added in the order of leaf_sum, of which blocks and warpgroups have runs. Runs of whole groups (a quarter
// of the leaves) are simply added. Where a run is less, whoever has the first run of a group sends its sum to whoever
// has the next, which adds its own leaves one by one.
#pragma once

namespace wide {

static_assert(kColumns == 32 || kColumns == 64, "rows of a wide pass");
constexpr int kConsumers = 8;  // warps, two warpgroups
constexpr u32 kConsumerThreads = kConsumers * 32;
// The other warps: weights and pages (two), activations, 1 / rms.
constexpr int kStream0 = 8, kInput = 9, kNorms = 10, kStream1 = 11;
constexpr u32 kThreads = 12 * 32;
/// Registers of a thread.
constexpr int kConsumerRegisters = 216, kOtherRegisters = 72;
constexpr int kPairs = kBlocks / 2;
/// The residual stream: runs of 8 of a block's rows, at most; warps that have a tile of it, 16 columns each; rounds
/// until the warps have all of it.
constexpr int kHiddenChunks = O::most_tiles * 2, kTileWarps = kColumns / 16;
constexpr int kHiddenRounds = (O::most_tiles * kTileWarps + kConsumers - 1) / kConsumers;
constexpr int kQkvTiles = (kQueriesPerKv + 2) * kDimTiles;  // of a KV head
constexpr u32 kQkvWordBytes = 64;                           // of a row tile and column

/// Row tiles of a product that so many blocks next to each other own at most.
template <class P> LP_DEVICE constexpr int most_tiles(int blocks) {
  int most = 0;
  for (int block = 0; block < kBlocks; block += blocks) {
    const int tiles = P::first_tile(block + blocks) - P::first_tile(block);
    most = tiles > most ? tiles : most;
  }
  return most;
}

/// Row tiles of a product that a block owns at least.
template <class P> LP_DEVICE constexpr int least_tiles() {
  int least = P::tiles;
  for (int block = 0; block < kBlocks; block++) {
    const int tiles = P::first_tile(block + 1) - P::first_tile(block);
    least = tiles < least ? tiles : least;
  }
  return least;
}

/// Tiles of sums that a block has room for (Shared::receive).
constexpr int kSumTiles = 8;
/// The shapes that wide passes take; those of other models are matrix passes. Also in
/// worker/src/cuda/kernels/variants.rs.
constexpr bool kWideFits =
    // Blocks form pairs, and each KV head has some.
    kBlocks % 2 == 0 && kKvHeads <= kBlocks &&
    // A warp sums a tile.
    most_tiles<Qkv>(1) <= kConsumers && most_tiles<O>(1) <= kConsumers &&
    // There is room for what is told of each.
    (int)O::told * most_tiles<O>(1) <= kSumTiles &&
    // Of several ranks every block has a part in what they tell each other, o and down alike.
    (kRanks == 1 || (kHiddenTiles >= kBlocks && (int)O::told == (int)Down::told &&
                     (int)O::told_group == (int)Down::told_group));
static_assert(kWideFits,
              "wide passes need an even number of blocks, at least as many as KV heads, and at most 8 row tiles of qkv "
              "and of o and down, of what ranks tell leaf by leaf 4; of several ranks a hidden tile for each block, "
              "and as many leaves of o as of down in what ranks tell each other");

LP_DEVICE u32 block_index() { return unknown(rank_block()); }
LP_DEVICE u32 pair() { return block_index() >> 1; }
/// Which half of K this block sums, and which of the pair's tiles it owns.
LP_DEVICE u32 half() { return block_index() & 1; }

/// The block's tiles of the hidden state.
LP_DEVICE u32 first_hidden_tile() { return O::first_tile(block_index()); }
LP_DEVICE int hidden_tiles() { return O::first_tile(block_index() + 1) - O::first_tile(block_index()); }

// ---- stages and slots ----

/// A slot of activations takes the warp that fetches it 0.3 us, whatever its size. Where the weights that go with 8 k16
/// steps of a pair's tiles of o and down stream sooner, because the tiles or their bits are few, slots have 16 and take
/// the room of a stage.
constexpr bool kLargeSlots = kColumns == 32 && most_tiles<O>(2) * O::fragment < 4 * 512;
constexpr u32 kStageBytes = 32768, kStages = kColumns == 32 && !kLargeSlots ? 5 : 4;
/// Whether a page comes with its 1 / rms of K (kQkNorm). At 64 columns there is no room for them; they are loaded.
constexpr bool kScaledStages = kQkNorm && kColumns == 32;
constexpr u32 kScalesBytes = kPage * 4;
/// Stages in flight. Must not exceed the ring.
constexpr u32 kInFlight = 3;
/// Activations, in memory and in shared memory: [k16 step][group of 8 columns][2 halves of k][8 columns][8 k] bf16.
constexpr u32 kStepBytes = kColumns * 32;
constexpr u32 kInputSlots = kStages, kInputSteps = kLargeSlots ? 16 : 8;  // k16 steps of a slot
// k16 steps of a slot that a warp uses at most, since it has registers for as many fragments; and of a bundle of leaves
// of a tile (OwnSingles), which is one group.
constexpr int kWaySteps = 8, kBundleSteps = 16;
LP_DEVICE constexpr u32 vector_byte(u32 step, u32 column, u32 half) {
  return step * kStepBytes + (column >> 3) * 256 + half * 128 + (column & 7) * 16;
}

LP_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
/// Slots of activations whose products are under way together. A group of products takes 0.4 us at least:
/// where the weights of a slot are streamed sooner than that, and of several ranks, whose slots are small, it has two.
constexpr int group_slots(int slot_bytes) { return (kRanks > 1 ? !kLargeSlots : slot_bytes < 16384) ? 2 : 1; }
/// Steps of the parts of a leaf, whole runs, at most `most` each, all but the last of equally many.
constexpr int part_steps(int most, int leaf_steps, int run_steps = 1) {
  const int most_runs = most / run_steps, runs = leaf_steps / run_steps, parts = (runs + most_runs - 1) / most_runs;
  return (runs + parts - 1) / parts * run_steps;
}
/// Parts of a leaf that a stage with room for `most` has: a power of two of them, so that groups do not cross stages.
constexpr int stage_parts(int most, int part, int leaf_steps) {
  int parts = 1;
  while (2 * parts * part <= most && parts * part < leaf_steps) parts *= 2;
  return parts;
}

/// Steps of two tiles that a warp has registers to load ahead, whole runs.
template <class P> constexpr int ahead_steps() {
  constexpr int REGISTERS = 32, RUN = 2 * (P::run_steps * P::lane_bytes / 4 + (is_grouped(P::format) ? 2 : 0));
  return REGISTERS / RUN * P::run_steps;
}

/// Leaves of a product that make equal bundles of at most so many steps, and so many at most.
template <class P> constexpr int bundled(int most_steps, int most) {
  for (int leaves = most; leaves > 1; leaves--)
    if (P::leaves % leaves == 0 && leaves * P::leaf_steps <= most_steps) return leaves;
  return 1;
}

/// Tiles next to each other in memory: first of them, among those of the stage, and how many (1 or 2; 0: none).
struct Unit {
  int first, width;
};

enum class Split { kTiles, kLeaves, kColumns };  // what the two warpgroups divide among them

/// How a product that a pair owns lies on its blocks and warps: a warp sums a row tile. `halves` false: not cut, a
/// block owns its tiles with all of K.
template <class PRODUCT> struct Cut {
  using P = PRODUCT;
  // even: all pairs own equally many tiles.
  static constexpr bool halves = P::leaves > 1 && P::leaves >= P::group && most_tiles<P>(2) <= kConsumers &&
                                 2 * most_tiles<P>(1) <= kSumTiles,
                        even = P::tiles % kPairs == 0 && !P::together && tiles_of<P>(0) <= tiles_of<P>(1);
  static constexpr int pair_tiles = even ? P::tiles / kPairs : most_tiles<P>(2);       // at most, like all that follow
  static constexpr int even_tiles = even ? pair_tiles / 2 : most_tiles<P>(1),
                       odd_tiles = even ? pair_tiles - even_tiles : even_tiles;
  // Whether every pair, or block, has tiles.
  static constexpr bool all_on = (int)P::tiles >= (halves ? kPairs : kBlocks) && !P::together;
  static constexpr int tiles = halves ? pair_tiles : odd_tiles;            // of a stage
  static constexpr int block_leaves = halves ? P::leaves / 2 : P::leaves;  // of a block
  static constexpr Split split = tiles > 4          ? Split::kTiles
                                 : block_leaves > 1 ? Split::kLeaves
                                                    : Split::kColumns;
  static_assert(tiles <= (split == Split::kTiles ? 8 : 4), "a warp a tile");
  static constexpr int ways = split == Split::kLeaves ? 2 : 1,
                       columns = split == Split::kColumns ? kColumns / 2 : kColumns;
  static constexpr int leaves = block_leaves / ways;                                             // of a warp
  static constexpr int bundle = 1, span_steps = P::leaf_steps;                                   // as of OwnSingles
  /// Sums of a warp: one, or, of less than a group, each leaf, since one is added after the other to what lies before.
  static constexpr int parts = leaves < P::group ? leaves : 1;
  /// The blocks of the pair have the two halves of a group.
  static constexpr bool chained = halves && block_leaves < P::group;
  static_assert(!chained || 2 * block_leaves == P::group, "a pair has a group");
  // Of each way: k16 steps of a slot, of a stage, and of products that are under way together.
  static constexpr int input_steps =
      part_steps(min_of((int)kInputSteps / ways, kWaySteps), P::leaf_steps, P::run_steps);
  static constexpr int stage_slots =
      stage_parts((int)kStageBytes / (ways * tiles * P::run) * P::run_steps, input_steps, P::leaf_steps);
  static constexpr int steps = stage_slots * input_steps, runs = steps / P::run_steps;
  static constexpr int most_group_slots = group_slots(ways * tiles * input_steps * P::fragment),
                       group_steps = (stage_slots < most_group_slots ? stage_slots : most_group_slots) * input_steps;
  static constexpr int unit_tiles = P::ways == 1 ? 2 : 1;                                        // of a unit
  static constexpr int odd_units = (odd_tiles + unit_tiles - 1) / unit_tiles;
  static constexpr int units = !halves ? odd_units
                               : even  ? (even_tiles + unit_tiles - 1) / unit_tiles + odd_units
                                       : pair_tiles / unit_tiles + 1;

  /// First tile of the stage in the product, and how many the stage has.
  LP_DEVICE static int first_tile() {
    if constexpr (even && halves) return (int)pair() * pair_tiles;
    else return P::first_tile(halves ? (int)pair() * 2 : block_index());
  }
  LP_DEVICE static int stage_tiles() {
    if constexpr (even && halves) return pair_tiles;
    else return halves ? owned(0) + owned(1) : owned(half());
  }
  /// Whether the block has a part in the product.
  LP_DEVICE static bool on() { return all_on || stage_tiles() > 0; }
  LP_DEVICE static int first_leaf() { return halves ? (int)half() * block_leaves : 0; }
  /// Tiles that block `of` of the pair owns, and the first of them.
  LP_DEVICE static int owned(u32 of) {
    if constexpr (even) return of ? odd_tiles : even_tiles;
    else return P::first_tile(pair() * 2 + of + 1) - P::first_tile(pair() * 2 + of);
  }
  LP_DEVICE static int first_owned(u32 of) { return of ? owned(0) : 0; }
  LP_DEVICE static int units_of(int tiles) { return (tiles + unit_tiles - 1) / unit_tiles; }
  LP_DEVICE static Unit unit_of(int tile) {
    const bool odd = halves && tile >= owned(0);
    const int run = odd ? owned(0) : 0, length = halves ? owned(odd) : stage_tiles(),
              first = (tile - run) / unit_tiles * unit_tiles;
    return Unit{run + first, unit_tiles == 2 && first + 1 < length ? 2 : 1};
  }
  LP_DEVICE static Unit unit(int index) {
    const int even_units = halves ? units_of(owned(0)) : 0,
              tile = halves && index >= even_units ? owned(0) + unit_tiles * (index - even_units) : unit_tiles * index;
    return tile < stage_tiles() ? unit_of(tile) : Unit{0, 0};
  }
};
using QkvCut = Cut<Qkv>;
using OCut = Cut<O>;
using DownCut = Cut<Down>;

/// A block's own tiles of a product, with all of K, in passes of some units, which read x once each. A warp has TILES
/// tiles of a unit, one or both.
template <class PRODUCT, int TILES> struct OwnTiles {
  using P = PRODUCT;
  static constexpr int warp_tiles = TILES;
  /// Whether every block has tiles.
  static constexpr bool all_on = least_tiles<P>() > 0;
  static constexpr int most_units = (P::most_tiles + 1) / 2;
  static constexpr int pass_units = part_steps(kConsumers * TILES / 2, most_units);
  // Where a warpgroup has warps for all of a pass, the two divide columns, else units or tiles.
  static constexpr bool split_columns = pass_units * 2 / TILES <= kConsumers / 2;
  static constexpr int columns = split_columns ? kColumns / 2 : kColumns;
  // k16 steps that a stage has room for.
  static constexpr int room = (int)kStageBytes / (pass_units * 2 * P::run) * P::run_steps;

  LP_DEVICE static int first_tile() { return P::first_tile(block_index()); }
  LP_DEVICE static int tiles() { return P::first_tile(block_index() + 1) - P::first_tile(block_index()); }
  LP_DEVICE static int passes() { return ((tiles() + 1) / 2 + pass_units - 1) / pass_units; }
  /// The warp's unit of a pass, and, of one tile, whether that is the second.
  LP_DEVICE static int unit() { return (split_columns ? warp_index() & 3 : warp_index()) / (2 / TILES); }
  LP_DEVICE static bool second() { return warp_index() & 1; }
  /// Tiles of a unit; not positive if there is none.
  LP_DEVICE static int width(int pass, int unit) {
    const int left = tiles() - 2 * (pass * pass_units + unit);
    return unit >= pass_units ? 0 : left < 2 ? left : 2;
  }
};

/// A warp has both tiles of a unit. Of weights of few bits fragments are loaded `ahead` (product.cuh).
template <class P> struct OwnUnits : OwnTiles<P, 2> {
  using Tiles = OwnTiles<P, 2>;
  static constexpr bool single = false, ahead = P::format != Format::kBf16;
  static constexpr int bundle = 1, span_steps = P::leaf_steps;
  // k16 steps that there are registers for: six of all 64 columns, or those that are loaded ahead.
  static constexpr int most_registers = ahead ? ahead_steps<P>() : Tiles::columns == 64 ? 6 : kWaySteps,
                       most_steps = min_of(min_of(Tiles::room, most_registers), kWaySteps);
  // k16 steps of products that are under way together, of a slot, and of a stage. A slot has whole stages; ahead: both
  // have whole groups.
  static constexpr int group_steps = part_steps(most_steps, P::leaf_steps, P::run_steps);
  static constexpr int input_steps = (int)kInputSteps / group_steps * group_steps;
  static constexpr int leaf_groups = (P::leaf_steps + group_steps - 1) / group_steps,
                       steps = (ahead ? min_of(Tiles::room / group_steps, leaf_groups) : 1) * group_steps,
                       runs = steps / P::run_steps;
};

/// A warp has a tile: a block has no more tiles than warps.
template <class P> struct OwnSingles : OwnTiles<P, 1> {
  using Tiles = OwnTiles<P, 1>;
  static constexpr bool single = true, ahead = false;
  /// Leaves that follow each other in a group of products, each with sums of its own: as many as there are registers
  /// for, since a group of few steps takes no less time. A span is that, or a leaf.
  static constexpr int most_bundle = bundled<P>(min_of(Tiles::room, kBundleSteps), 128 / Tiles::columns),
                       bundle = Tiles::columns < 64 ? most_bundle : 1, span_steps = bundle * P::leaf_steps;
  // k16 steps of a slot, of a stage, and of products that are under way together. A bundle is a stage and a group. Else
  // a stage has whole slots, or a slot whole stages.
  static constexpr int part =
      bundle > 1 ? span_steps : part_steps(min_of(Tiles::room, kWaySteps), P::leaf_steps, P::run_steps);
  static constexpr int input_steps =
      bundle > 1 ? part_steps((int)kInputSteps, span_steps) : (int)kInputSteps / kWaySteps * part;
  static constexpr int steps = stage_parts(Tiles::room, part, span_steps) * part, runs = steps / P::run_steps;
  static constexpr int most_group_slots = group_slots(Tiles::pass_units * 2 * part * P::fragment),
                       group_steps = steps > part ? most_group_slots * part : part;
};

template <class P, bool SINGLES> struct Own : OwnUnits<P> {};
template <class P> struct Own<P, true> : OwnSingles<P> {};
using GateUpOwn = Own<GateUp, (GateUp::most_tiles <= kConsumers)>;

// ---- memory ----

/// Offsets in Launch::words. The host zeroes the counters before every launch; what has a tag is told from older words
/// by it, the rest is written before a counter that its readers wait for.
struct Words {
  static constexpr u64 counter = 128;                                             // bytes from one counter to the next
  // A counter for each leaf of K, of the row tiles that are written of it.
  static constexpr u64 x_ready = 0, mlp_x_ready = x_ready + 16 * counter;
  static constexpr u64 activation_ready = mlp_x_ready + 16 * counter;
  static constexpr u64 outputs_ready = activation_ready + 16 * counter;           // of attention: all blocks
  static constexpr u64 tokens_ready = outputs_ready + counter;                    // all blocks
  static constexpr u64 zeroed = tokens_ready + counter;
  static constexpr u64 attention_x = zeroed, mlp_x = attention_x + (u64)kHiddenTiles * kStepBytes;
  static constexpr u64 attention_out = mlp_x + (u64)kHiddenTiles * kStepBytes;
  static constexpr u64 activation = attention_out + (u64)O::steps * kStepBytes;
  // [row tile of q, k and v][column][4 words], `qkv_word`
  static constexpr u64 qkv = activation + (u64)Down::steps * kStepBytes;
  // [x, MLP's x][hidden tile][column] f32: squares of its rows
  static constexpr u64 sums = qkv + (u64)Qkv::tiles * kColumns * kQkvWordBytes;
  // [x, MLP's x][column] (tag << 32 | 1 / rms)
  static constexpr u64 inverse = sums + 2ull * kHiddenTiles * kColumns * 4;
  // [block][column] (token << 32 | logit)
  static constexpr u64 best = inverse + 2ull * kColumns * 8;
  // u32: whether the host wants the launch to end.
  static constexpr u64 stop = best + (u64)kBlocks * kColumns * 8;
  // The residual stream, each thread's own: Hidden.
  static constexpr u64 hidden = stop + 128;
  static constexpr u64 items = hidden + (u64)kBlocks * kHiddenRounds * kConsumerThreads * 32;  // of attention
};
/// q, k and v of this step: words {dimensions 2 t, 2 t + 1 of a row tile; 2 t + 8, 2 t + 9; tag; sum of squares of the
/// tile (kQkNorm)}, t from 0 to 3. `tile`: of the KV head's, its query heads, then k, then v.
LP_DEVICE u64 qkv_word(u32 kv_head, u32 tile, u32 column) {
  return Words::qkv + (u64)((kv_head * kQkvTiles + tile) * kColumns + column) * kQkvWordBytes;
}
/// Of the block's first hidden tile, of the sums of squares of x (norm 0) or the MLP's x (1).
LP_DEVICE u64 squares_byte(int norm) {
  return Words::sums + (u64)(norm * kHiddenTiles + first_hidden_tile()) * kColumns * 4;
}

/// Offsets in shared memory.
struct Shared {
  static constexpr u32 ring = 0;                                                     // [kStages]
  // [kInputSlots]; between qkv and o attention's shares.
  static constexpr u32 input = ring + kStages * kStageBytes;
  // Partial sums of the pair; scratch of the LM head.
  static constexpr u32 receive = input + kInputSlots * kInputSteps * kStepBytes;
  static constexpr u32 scratch = kColumns == 32 ? 24576 : 32768;
  static constexpr u32 inverse = receive + scratch;                                  // [x, MLP's x][column] 1 / rms
  static constexpr u32 rows = inverse + 2 * kColumns * 4;                            // [column] Row
  static constexpr u32 stage_full = rows + kColumns * sizeof(Row);                   // mbarriers
  static constexpr u32 stage_empty = stage_full + kStages * 8;
  static constexpr u32 input_full = stage_empty + kStages * 8, input_empty = input_full + kInputSlots * 8;
  static constexpr u32 receive_full = input_empty + kInputSlots * 8, receive_free = receive_full + 8;
  static constexpr u32 norms = receive_free + 8;                                     // [x, MLP's x]
  // Completes a phase once a step's tokens are known.
  static constexpr u32 sampled = norms + 16;
  static constexpr u32 last_step = sampled + 8;                                      // steps to run
  static constexpr u32 sampling = last_step + 4;                                     // whether a row samples
  // First and end of the block's list in Launch::items.
  static constexpr u32 items = sampling + 4;
  static constexpr u32 scales = (items + 8 + 15) / 16 * 16;                          // [kStages][kPage] (kScaledStages)
  static constexpr u32 bytes = scales + (kScaledStages ? kStages * kScalesBytes : 0);
  LP_DEVICE static u32 scales_of(u32 slot) { return scales + slot * kScalesBytes; }
};
static_assert(Shared::bytes <= 227 * 1024, "shared memory of a block");

}  // namespace wide
