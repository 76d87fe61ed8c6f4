// Exchange words: messages between the blocks of a GPU, each written by one relaxed store and read by one relaxed load.
// A word itself tells whether its data has arrived, so no fence orders anything.
//
// Tagged words are 16 bytes {data, data, tag, extra}. Such a word holds its data if its tag is the one expected. A tag
// counts layers over all steps and launches: epoch + step * (layers + 1) + layer. Before it would wrap, the host starts
// again from 1 on zeroed words. A late reader would find a foreign tag and report it: a tagged word is never taken for
// another layer's.
//
// One buffer an exchange suffices: the reader of a word contributes to what every writer of its next use waits for.
//   x (attention, MLP)   A block that reads x owns row tiles. All attention leaves, or all of down, need their results,
//                        and each of the block's 16 warps contributes a leaf to each tile. (Leaves that are fetched in
//                        parts are read again for each set of tiles, the last time before the last contribution.)
//   attention            Merges need all leaves, o needs all merges, the next x needs all of o.
//   token                A block reads token words before its part of the next step, which all later token words need.
//   rows (fed)           A block reads them before its part of a turn of their step. Block 0 writes the next ones once
//                        the tokens of that step are known, after all blocks have passed such a turn (below).
// A block without tiles in a phase reads nothing in it. A block without any tiles (kIdleBlocks) has no part in a step,
// so there steps take turns at two buffers of token words. Such a block offers its words of step s + 1 after it has
// read those of step s. The words of step s + 2, the next in the same place, come after the words of step s + 1 of all
// blocks, which choose its tokens.
//
// Vectors, the activations that every block reads, are B fragments: of k block kb and column c four words, word t with
// k 2t, 2t+1 | 2t+8, 2t+9 of it. With one column their words are tagged, and extra is the block's sum of squares in
// word 0.
//
// With eight columns tags would be half of the bytes that all blocks read of vectors. So a word is its 8 bytes of data
// alone, and holds the complement of its bf16s: bf16_pair makes every NaN 0x7fff, so no complement is 0, and 0 means
// "not written yet". Sums of squares are words of 4 bytes of the same kind. Words go back to 0 between two uses.
//
// Four sets of vectors (few enough to stay in L2) are used in turns: one turn a layer, counted over all steps of all
// launches, with one for the LM head. Blocks pass a turn a layer late, so nobody waits for it (turns.cuh). In turn
// n, once all consumers of its block have begun turn n, an epilogue warp
//   1. waits until the epilogue warps of all blocks have passed turn n - 1 (acquire), and opens turn n + 1 to the
//      consumers of its block,
//   2. clears its share of the set of turn n - 2,
//   3. passes turn n: counts itself in Words::turns (release).
// Step 2 clears no word that somebody still needs. A warp that passed turn n - 1 found that all consumers of its block
// had begun it, and these end a turn before they begin the next. So after step 1 all words up to turn n - 2 have been
// written and read, in blocks and warps without a part in them, too.
// Step 2 comes before the set's next words, those of turn n + 2. The first of them is its input, which epilogue warps
// publish in turn n + 1 after their step 1, so after the zeros of all blocks. Consumers poll and merge in a turn only
// after step 1 of the turn before has opened it, so after those zeros, too.
// Launches follow each other in order: the first two turns of a launch use sets that the launch before has cleared, and
// each block remembers how many steps there have been. Whatever ends a launch after a step (a stop, idle columns,
// nothing to sample) ends it in all blocks after the turn of the head.
#pragma once

namespace narrow {

constexpr bool kTaggedVectors = kColumns == 1;
/// Whether the host may give the rows of each step (Launch::fed), as it does where it drafts.
constexpr bool kFed = kColumns > 1;

/// A vector in LEAVES leaves of STEPS k blocks. Tagged: [k block][t] words. Otherwise a leaf is rows of 512 bytes,
/// which a warp reads by one load each, 16 bytes a lane: [pair of k blocks][column][t][of the pair] words, and then,
/// with SQUARES, the sums of squares of the k blocks, 16 a column and row.
template <int LEAVES, int STEPS, bool SQUARES = false> struct Vector {
  static constexpr int rows = (STEPS + 1) / 2, square_rows = SQUARES ? (STEPS + 15) / 16 : 0;
  static constexpr u32 leaf_bytes = kTaggedVectors ? STEPS * 64 : (rows + square_rows) * 512,
                       bytes = LEAVES * leaf_bytes;
  /// Word t of (k block, column).
  LP_DEVICE static u32 word(int k_block, int column, int t) {
    const int k = k_block % STEPS;
    return k_block / STEPS * leaf_bytes +
           (kTaggedVectors ? k * 64 + t * 16 : k / 2 * 512 + column * 64 + t * 16 + k % 2 * 8);
  }
  LP_DEVICE static u32 square(int k_block, int column) {
    const int k = k_block % STEPS;
    return k_block / STEPS * leaf_bytes + (rows + k / 16) * 512 + column * 64 + k % 16 * 4;
  }
};
using HiddenVector = Vector<kHiddenLeaves, kHiddenSteps, true>;
using AttentionVector = Vector<kHeadLeaves, O::leaf_steps>;
using ActivationVector = Vector<kDownLeaves, kDownSteps>;

/// Offsets in a set of vectors. The LM head's has but attention_x, its input.
struct Vectors {
  static constexpr u32 sets = kTaggedVectors ? 1 : 4;
  static constexpr u32 attention_x = 0, mlp_x = attention_x + HiddenVector::bytes;
  static constexpr u32 attention_out = mlp_x + HiddenVector::bytes, activation = attention_out + AttentionVector::bytes;
  static constexpr u32 bytes = activation + ActivationVector::bytes;
};
/// Buffers of token words, which steps use by turns.
constexpr u32 kTokenBuffers = kIdleBlocks ? 2 : 1;
/// Offsets in Launch::words.
struct Words {
  static constexpr u64 vectors = 0;                                            // [sets]
  // u32: how often an epilogue warp has passed a turn.
  static constexpr u64 turns = vectors + (u64)Vectors::sets * Vectors::bytes;
  static constexpr u64 steps = turns + 128;                                    // [blocks] so far, of all launches
  // [kv head][column][tiles of its heads][4]
  static constexpr u64 qkv = (steps + kBlocks * 4 + 15) / 16 * 16;
  static constexpr int qkv_tiles = (kQueriesPerKv + 2) * kDimTiles;
  static constexpr u64 token = qkv + (u64)kKvHeads * kColumns * qkv_tiles * 64;       // [buffer][column][blocks]
  // [column][2], the rows of a step of a fed launch: {token, position, tag, slot}, {first_position, first_row, tag,
  // last_position}.
  static constexpr u64 rows = token + (u64)kTokenBuffers * kColumns * kBlocks * 16;
  // [item][query heads][dim tiles][8], as many items as a launch may have.
  static constexpr u64 page = rows + (kFed ? kColumns * 32 : 0);
  static constexpr u64 page_bytes = (u64)kQueriesPerKv * kDimTiles * 128;
};
static_assert(Words::steps < 1ull << 32, "vectors are addressed with 32 bits");
/// Where the vectors of a turn are, counted over all launches; the count may wrap.
LP_DEVICE u32 vectors_of(u32 turn) { return turn % Vectors::sets * Vectors::bytes; }
LP_DEVICE u64 token_words(u32 step, int column) {
  return Words::token + (u64)column * kBlocks * 16 + (u64)(step % kTokenBuffers) * (kColumns * kBlocks * 16);
}
LP_DEVICE u64 qkv_word(int kv_head, int column, int tile) {
  return Words::qkv + (u64)((kv_head * kColumns + column) * Words::qkv_tiles + tile) * 64;
}

}  // namespace narrow
