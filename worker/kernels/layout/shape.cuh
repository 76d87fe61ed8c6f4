// The model's dimensions, which the worker defines as LP_... in front of the source, and what follows from them:
// leaves, who owns which row tiles, where a weight lies. The same arithmetic is in worker/src/cuda/weights/panel.rs.
//
// Of a model that is cut for several ranks heads, KV heads and the intermediate size are those of a rank; the hidden
// size and the vocabulary are the model's.
#pragma once

#ifndef LP_RANKS
#define LP_RANKS 1
#endif
#ifndef LP_RANKS_HERE
#define LP_RANKS_HERE 1
#endif
#ifndef LP_SHARDS
#define LP_SHARDS LP_RANKS
#endif
/// Ranks of the group. Ranks of one launch, each a range of kBlocks of its blocks: more than one in tests, which have a
/// whole group on one GPU. Shards that the model is cut into: more than the ranks where a benchmark has only some of a
/// group's.
constexpr int kRanks = LP_RANKS, kRanksHere = LP_RANKS_HERE, kShards = LP_SHARDS;
static_assert(kShards == kRanks || (kShards > kRanks && kRanks > 1), "one rank computes the whole model");
static_assert(kRanks <= 16 && (kRanks & (kRanks - 1)) == 0 && (kRanksHere == 1 || kRanksHere == kRanks),
              "1, 2, 4, 8 or 16 ranks");

constexpr int kLayers = LP_LAYERS, kHidden = LP_HIDDEN, kHeads = LP_HEADS, kKvHeads = LP_KV_HEADS,
              kHeadDim = LP_HEAD_DIM;
constexpr int kIntermediate = LP_INTERMEDIATE, kVocab = LP_VOCAB, kBlocks = LP_BLOCKS, kColumns = LP_COLUMNS;
constexpr int kWindow = LP_WINDOW;  // positions a row attends to; 0: all
#ifdef LP_HEAD_WIDTH
constexpr int kHeadWidth = LP_HEAD_WIDTH;  // dimensions of a head that are not padding: what scores and norms divide by
#else
constexpr int kHeadWidth = kHeadDim;
#endif
constexpr bool kQkvBias = LP_QKV_BIAS, kQkNorm = LP_QK_NORM, kTied = LP_TIED;

/// How the weights of a product lie in its A fragments, of 16 rows by 16 columns. E4M3 have a scale a row, which is
/// applied to the sum of all leaves; groups of columns have a scale, and perhaps a zero point, in each row, which are
/// applied to the weights (ops/weights.cuh).
enum class Format { kBf16, kE4m3, kE4m3Groups, kInt4, kInt4Zeros };
constexpr bool is_grouped(Format format) { return format >= Format::kE4m3Groups; }
constexpr int fragment_bytes(Format format) {
  return format == Format::kBf16 ? 512 : format >= Format::kInt4 ? 128 : 256;
}
#ifndef LP_LAYER_FORMAT
#define LP_LAYER_FORMAT 0
#endif
#ifndef LP_GROUP
#define LP_GROUP 0
#endif
/// Of the products of a layer; the LM head is bf16. Of groups LP_GROUP columns.
constexpr Format kLayerFormat = (Format)LP_LAYER_FORMAT;
constexpr bool kScaled = kLayerFormat == Format::kE4m3;
/// Vectors that weights of few bits are multiplied with are so many times what they are (ops/weights.cuh).
constexpr float kRaised = kScaled ? 0x1p80f : is_grouped(kLayerFormat) ? 0x1p40f : 1;
/// k16 steps of a run: fragments of a tile that lie behind the scales they have in common, 16 bf16 (and as many zero
/// points). As many as a group and a leaf have whole ones of, at most four: no unit of work has fewer. E4M3 without
/// groups: as many as are read at a time, where leaves are whole eights of steps. (With others wide passes had more
/// groups of products of gate and up until these were loaded ahead.)
constexpr int run_steps_of(Format format, int leaf_steps) {
  constexpr int GROUP_STEPS = LP_GROUP / 16;
  if (!is_grouped(format)) return format == Format::kE4m3 && leaf_steps % 8 == 0 ? 2 : 1;
  return GROUP_STEPS % 4 == 0 && leaf_steps % 4 == 0 ? 4 : GROUP_STEPS % 2 == 0 && leaf_steps % 2 == 0 ? 2 : 1;
}
constexpr int header_bytes(Format format) { return format == Format::kInt4Zeros ? 64 : is_grouped(format) ? 32 : 0; }
/// A leaf is worked on in parts of so many k16 steps; no chunk of the stream crosses from one into the next.
constexpr int kPartSteps = 16;
constexpr int kMaxLeaves = 16, kPage = 64, kLeafPositions = 16;
constexpr int kQueriesPerKv = kHeads / kKvHeads, kDimTiles = kHeadDim / 16;
static_assert(kQueriesPerKv * kKvHeads == kHeads && kQueriesPerKv <= 8,
              "query heads of a KV head are the columns of one n8 tile");
static_assert(kHeadDim % 64 == 0 && kHidden % 16 == 0, "head_dim is a multiple of 64, hidden of 16");

constexpr int most_leaves(int n) {
  int leaves = 1;
  while (leaves < kMaxLeaves && n % (2 * leaves) == 0) leaves *= 2;
  return leaves;
}

/// This block among those of its rank.
LP_DEVICE u32 rank_block() { return kRanksHere == 1 ? blockIdx.x : blockIdx.x % LP_BLOCKS; }

/// A product y = W x: its row tiles by k16 steps; leaves of LEAF_STEPS k16 steps cut K; a tile is dealt to a block
/// whole. GROUP leaves next to each other make a group, which is added ascending; groups are added as a binary tree
/// (leaf_sum). qkv, o and down have four groups of a quarter of the model's leaves (quads), so that each of one, two
/// and four ranks has whole ones. All leaves of gate/up and of the LM head are one group: their K is never cut. WAYS:
/// a rank has too few leaves for a block's warps, so so many tiles next to each other have warps of their own, and each
/// tile is a unit of the stream; with 1 a warp has its leaf of both tiles of a set.
template <int TILES, int LEAVES, int LEAF_STEPS, int GROUP, int WAYS = 1, Format FORMAT = kLayerFormat>
struct Product {
  static constexpr Format format = FORMAT;
  static constexpr int fragment = fragment_bytes(FORMAT), lane_bytes = fragment / 32;  // and of a lane of it
  static constexpr int tiles = TILES, leaves = LEAVES, ways = WAYS, workers = LEAVES * WAYS, leaf_steps = LEAF_STEPS,
                       steps = LEAVES * LEAF_STEPS;
  static constexpr int group = GROUP;
  /// A rank with whole groups tells the others their sum, one with less its leaves one by one: values an output, and
  /// how many of all ranks' are a group.
  static constexpr int told = LEAVES < GROUP ? LEAVES : 1, told_group = LEAVES < GROUP ? GROUP : 1;
  /// Runs: k16 steps, bytes of the scales and of all; runs of a leaf and of all leaves.
  static constexpr int run_steps = run_steps_of(FORMAT, LEAF_STEPS), header = header_bytes(FORMAT),
                       run = header + run_steps * fragment, leaf_runs = LEAF_STEPS / run_steps,
                       runs = LEAVES * leaf_runs;
  /// k16 steps of a run that a lane reads at a time, at most 16 bytes.
  static constexpr int piece_steps = 16 / lane_bytes < run_steps ? 16 / lane_bytes : run_steps;
  static constexpr u64 bytes = (u64)TILES * runs * run;
  /// First tile of block `block`; of block kBlocks, the end.
  LP_DEVICE static constexpr int first_tile(int block) { return (int)((u32)block * tiles / kBlocks); }
  static_assert((long long)TILES * kBlocks < 1ll << 31, "so 32 bits will do");
  static constexpr int most_tiles = (tiles + kBlocks - 1) / kBlocks;
  static constexpr bool together = false;  // with another product
  /// Tiles that the consumer warps take at a time, whole sets of two.
  static constexpr int at_a_time = WAYS == 1 ? 2 : WAYS;
  static_assert(at_a_time % 2 == 0, "whole sets");
  /// The leaf of consumer warp `warp`, and of which of these tiles, or from which on.
  LP_DEVICE static int leaf(int warp) { return WAYS == 1 ? warp : warp % LEAVES; }
  LP_DEVICE static int way(int warp) { return WAYS == 1 ? 0 : warp / LEAVES; }
  /// Whether it has one in the tiles from `tile` on of a block whose last is before `end`.
  LP_DEVICE static bool works(int warp, int tile, int end) {
    return warp < workers && (WAYS == 1 || tile + way(warp) < end);
  }
};
/// Leaves of a group where the whole model has so many.
constexpr int quad_of(int leaves) { return leaves < 4 ? 1 : leaves / 4; }
constexpr int kHiddenTiles = kHidden / 16;
constexpr int kHiddenLeaves = most_leaves(kHiddenTiles), kHiddenSteps = kHiddenTiles / kHiddenLeaves;
constexpr int kHeadLeaves = most_leaves(kHeads * kShards) / kShards,
              kDownLeaves = most_leaves(kIntermediate * kShards) / kShards;
static_assert(kHeadLeaves > 0 && kDownLeaves > 0, "a rank has whole leaves");
/// Ways of a product of `tiles` row tiles: as many warps as there are rings at least (8), if there are tiles for them.
constexpr int leaf_ways(int leaves, int tiles) {
  const int most = ((tiles + kBlocks - 1) / kBlocks + 1) / 2 * 2, wanted = leaves < 4 ? 8 / leaves : 2;
  return kRanks == 1 || leaves == kMaxLeaves ? 1 : wanted < most ? wanted : most;
}
constexpr int kDownSteps = (kIntermediate / kDownLeaves + 15) / 16;
using O = Product<kHiddenTiles, kHeadLeaves, kHeads * kDimTiles / kHeadLeaves, quad_of(kHeadLeaves * kShards),
                  leaf_ways(kHeadLeaves, kHiddenTiles)>;
/// A tile has 8 rows of gate, then the same 8 of up, so a lane has both sums of a product of theirs: of k block b of
/// down's input tile 2b has 0 to 3 and 8 to 11, tile 2b + 1 the others (gate_up_k). Each writes whole words of the
/// vector. The two stay together where no block gets fuller by it: 8b on four GPUs takes 2 % longer if 64 blocks have 4
/// tiles and 64 have 3 than if 96 have 4 and 32 have 2.
struct GateUp : Product<2 * kDownLeaves * kDownSteps, kHiddenLeaves, kHiddenSteps, kHiddenLeaves> {
  static constexpr int pairs = tiles / 2;
  static constexpr bool in_pairs = 2 * ((pairs + kBlocks - 1) / kBlocks) == most_tiles;
  LP_DEVICE static constexpr int first_tile(int block) {
    return (int)(in_pairs ? (u32)block * pairs / kBlocks * 2 : (u32)block * tiles / kBlocks);
  }
};
/// Which k of its k block of down's input row `row` (0 to 7) of tile `tile` of gate and up is.
LP_DEVICE constexpr int gate_up_k(int tile, int row) { return (row >> 2) * 8 + (tile & 1) * 4 + (row & 3); }
/// Of several ranks q, k and v have too few tiles for even shares, and they are as long as those of gate and up.
/// TOGETHER a block's share of both is even; apart q, k and v are spread by themselves, and the first blocks of a round
/// have one more of them, the last ones more of gate and up. The first tile of q, k, v of a block.
template <bool TOGETHER> LP_DEVICE constexpr long long first_of_qkv(long long block, long long tiles) {
  return TOGETHER ? block * (tiles + GateUp::tiles) / kBlocks - GateUp::first_tile((int)block)
                  : (block * tiles + kBlocks - 1) / kBlocks;
}
struct Fullest {
  long long qkv, both;  // most tiles of q, k, v that a block has, and with those of gate and up
};
template <bool TOGETHER> constexpr Fullest fullest_block(long long tiles) {
  Fullest most{};
  for (int block = 0; block < kBlocks; block++) {
    const long long own = first_of_qkv<TOGETHER>(block + 1, tiles) - first_of_qkv<TOGETHER>(block, tiles);
    const long long both = own + GateUp::first_tile(block + 1) - GateUp::first_tile(block);
    most = Fullest{own > most.qkv ? own : most.qkv, both > most.both ? both : most.both};
  }
  return most;
}
/// Attention waits for the block with the most tiles of q, k, v: apart they are dealt if that makes them fewer and no
/// block fuller, or if together a block would have to give one back.
constexpr bool dealt_together(long long tiles) {
  const Fullest together = fullest_block<true>(tiles), apart = fullest_block<false>(tiles);
  return (tiles + GateUp::tiles) / kBlocks >= GateUp::most_tiles &&
         (together.qkv <= apart.qkv || together.both < apart.both);
}
struct Qkv : Product<(kHeads + 2 * kKvHeads) * kDimTiles, kHiddenLeaves, kHiddenSteps, quad_of(kHiddenLeaves)> {
  static constexpr bool together = kRanks > 1 && dealt_together(tiles);
  LP_DEVICE static constexpr int first_tile(int block) {
    return (int)(kRanks > 1 ? first_of_qkv<together>(block, tiles) : (u32)block * tiles / kBlocks);
  }
};
using Down = Product<kHiddenTiles, kDownLeaves, kDownSteps, quad_of(kDownLeaves * kShards),
                     leaf_ways(kDownLeaves, kHiddenTiles)>;
/// Row tiles of the LM head, and of the embedding: with several ranks each has as many, the last ones perhaps of rows
/// beyond the vocabulary.
constexpr int kHeadTiles = kRanks == 1 ? (kVocab + 15) / 16 : (kVocab + 255) / 256 * 16 / kShards;
using Head = Product<kHeadTiles, kHiddenLeaves, kHiddenSteps, kHiddenLeaves, 1, Format::kBf16>;
template <class P> constexpr int tiles_of(int block) { return P::first_tile(block + 1) - P::first_tile(block); }
constexpr bool a_block_idles() {
  for (int block = 0; block < kBlocks; block++)
    if (tiles_of<O>(block) == 0 && tiles_of<GateUp>(block) == 0) return true;  // nor of down, which has the rows of o
  return false;
}
/// Whether blocks may have no tiles of a layer at all, as in small models on many blocks. Nobody waits for their part
/// of a step, so they may fall behind (narrow/words.cuh, narrow/steps.cuh).
constexpr bool kIdleBlocks = a_block_idles();
/// Of a layer's scales, the first of each product: f32, a row tile's 16 rows as they are packed.
struct Scales {
  static constexpr int qkv = 0, out = qkv + Qkv::tiles * 16, gate_up = out + O::tiles * 16,
                       down = gate_up + GateUp::tiles * 16, layer = down + Down::tiles * 16;
};
constexpr u64 kOOffset = Qkv::bytes, kGateUpOffset = kOOffset + O::bytes, kDownOffset = kGateUpOffset + GateUp::bytes;
constexpr u64 kLayerBytes = kDownOffset + Down::bytes, kHeadOffset = kLayers * kLayerBytes;

/// Byte within an A fragment of bf16 of (row, k).
LP_DEVICE constexpr int fragment_byte(int row, int k) {
  return ((row & 7) * 4 + (k & 7) / 2) * 16 + ((row >> 3) + (k >> 3) * 2) * 4 + (k & 1) * 2;
}
/// Byte of weight (row, k) of the LM head within its product: the embedding of a tied model.
LP_DEVICE u64 head_byte(int row, int k) {
  const int tile = row / 16;
  const int block = (int)(((long long)(tile + 1) * kBlocks - 1) / Head::tiles);
  const int first = Head::first_tile(block), end = Head::first_tile(block + 1);
  const int unit = first + ((tile - first) & ~1), width = unit + 1 < end ? 2 : 1;
  return (u64)unit * Head::steps * Head::fragment + (u64)((k / 16) * width + (tile - unit)) * Head::fragment +
         fragment_byte(row % 16, k % 16);
}
