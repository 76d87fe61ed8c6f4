// Exchange words: what blocks tell each other, written by one relaxed store, read by one relaxed load. A word says by itself whether its data is
// there, so no fence orders anything.
//
// Vectors, the activations that every block reads, are B fragments in words of 8 bytes {k 2t, 2t+1 | 2t+8, 2t+9}, t = 0 .. 3: 32 bytes a k block and column.
// Half of what is read is data, not tags, because a word holds the complement of its bf16s and 0 stands for "not there": bf16_pair makes every NaN
// 0x7fff, so the complement is never 0. A hidden vector has sums of squares of its k blocks, too, words of 4 bytes of the same kind.
// Every layer of a step has vectors of its own, and steps take turns at two sets of them. While a step writes one set, epilogue warps clear the other one: all that it held
// has been read, since the tokens of the step before are known, and the tokens of this step (fences on both sides of them) or the
// end of the launch order the zeros before the next step's words. Which set comes first is remembered by each block from launch to launch.
// A step that does not sample has no token words, so it is its launch's only one.
//
// The other words are 16 bytes {data, data, tag, extra}: such a word holds its data if its tag is the one expected. A tag counts layers over all steps and
// launches: epoch + step * (layers + 1) + layer; the host starts again from 1 on zeroed words before it would wrap.
// One buffer of them suffices. Who reads a word in a phase has a part in what every writer of the next use of that word
// waits for: attention leaves are needed by the merges, merges by all of o, o by the next x, and x by whoever computes q, k and v. A late reader would find a foreign tag and report it: such a word is
// never taken for another layer's. Token words have one buffer, too: a block with tiles of qkv or gate/up has read them before its part of the next step,
// which all token words after that need; of a block without (tiny models on a full grid) it is only assumed that it reads them within a step.
#pragma once

/// A vector in LEAVES leaves of STEPS k blocks. A leaf is rows of 512 bytes, which a warp reads by one load each, 16 bytes a lane: [pair of k blocks][column][t][of the pair]
/// words, and then, with SQUARES, the sums of squares of the k blocks, 16 a column and row.
template <int LEAVES, int STEPS, bool SQUARES = false> struct Vector {
  static constexpr int rows = kColumns == 1 ? (STEPS + 15) / 16 : (STEPS + 1) / 2;
  static constexpr int square_rows = !SQUARES ? 0 : kColumns == 1 ? 1 : (STEPS + 15) / 16;
  static_assert(!SQUARES || STEPS <= 128, "the squares of a leaf's one column fit a row");
  static constexpr u32 leaf_bytes = (rows + square_rows) * 512, bytes = LEAVES * leaf_bytes;
  /// Word t of (k block, column).
  LP_DEVICE static u32 word(int k_block, int column, int t) {
    const int k = k_block % STEPS;
    return k_block / STEPS * leaf_bytes + (k / 2 * kColumns + column) * 64 + t * 16 + k % 2 * 8;
  }
  LP_DEVICE static u32 square(int k_block, int column) {
    const int k = k_block % STEPS;
    return k_block / STEPS * leaf_bytes + rows * 512 + (kColumns == 1 ? k * 4 : k / 16 * 512 + column * 64 + k % 16 * 4);
  }
};
using HiddenVector = Vector<kHiddenLeaves, kHiddenSteps, true>;
using AttentionVector = Vector<kHeadLeaves, O::leaf_steps>;
using ActivationVector = Vector<kDownLeaves, kDownSteps>;

/// Offsets in a layer's vectors. The layer after the last has the LM head's input.
struct Vectors {
  static constexpr u32 attention_x = 0, mlp_x = attention_x + HiddenVector::bytes;
  static constexpr u32 attention_out = mlp_x + HiddenVector::bytes, activation = attention_out + AttentionVector::bytes;
  static constexpr u32 bytes = activation + ActivationVector::bytes;
};
/// Offsets in Launch::words.
struct Words {
  static constexpr u64 vectors = 0;                                            // [2 sets][layers + 1]
  static constexpr u64 first_set = vectors + 2ull * (kLayers + 1) * Vectors::bytes;  // [blocks] the set that the next launch begins with
  static constexpr u64 qkv = (first_set + kBlocks * 4 + 15) / 16 * 16;         // [kv head][column][tiles of its heads][4]
  static constexpr int qkv_tiles = (kQueriesPerKv + 2) * kDimTiles;
  static constexpr u64 token = qkv + (u64)kKvHeads * kColumns * qkv_tiles * 64;       // [column][blocks]
  static constexpr u64 page = token + (u64)kColumns * kBlocks * 16;                   // [item][query heads][dim tiles][8], as many items as a launch may have
  static constexpr u64 page_bytes = (u64)kQueriesPerKv * kDimTiles * 128;
};
static_assert(Words::first_set < 1ull << 32, "vectors are addressed with 32 bits");
LP_DEVICE u32 vectors_of(u32 set, u32 layer) { return (set * (kLayers + 1) + layer) * Vectors::bytes; }
LP_DEVICE u64 qkv_word(int kv_head, int column, int tile) {
  return Words::qkv + (u64)((kv_head * kColumns + column) * Words::qkv_tiles + tile) * 64;
}
