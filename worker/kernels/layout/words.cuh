// Exchange words: 16 bytes {data, data, tag, extra}, written by one relaxed store, read by one relaxed load. A word holds its
// data if its tag is the one expected, so no fence orders anything. A tag counts layers over all steps and launches:
// epoch + step * (layers + 1) + layer; the host starts again from 1 on zeroed words before it would wrap.
//
// Vectors are B fragments: of k block kb and column c four words, word t with k 2t, 2t+1 | 2t+8, 2t+9 of it; extra is the
// block's sum of squares in word 0.
//
// One buffer an exchange suffices. Who reads a word in a phase has a part in what every writer of the next use of that word
// waits for: readers of x (attention, MLP) own row tiles whose results all attention leaves, or all of down, need; each of the
// 16 warps of a block contributes a leaf to each of them. Attention leaves are needed by the merges, merges by all of o, o by the
// next x. A block without tiles in a phase reads nothing in it. A late reader would find a foreign tag and report it: a word is
// never taken for another layer's.
#pragma once

constexpr u64 vector_bytes(int k_blocks) { return (u64)k_blocks * kColumns * 64; }
/// Offsets in Launch::words.
struct Words {
  static constexpr u64 attention_x = 0, mlp_x = attention_x + vector_bytes(kHiddenTiles);
  static constexpr u64 attention_out = mlp_x + vector_bytes(kHiddenTiles);           // k blocks: heads * kDimTiles
  static constexpr u64 activation = attention_out + vector_bytes(kHeads * kDimTiles);  // k blocks: padded intermediate / 16
  static constexpr u64 qkv = activation + vector_bytes(GateUp::tiles / 2);            // [kv head][column][tiles of its heads][4]
  static constexpr int qkv_tiles = (kQueriesPerKv + 2) * kDimTiles;
  static constexpr u64 token = qkv + (u64)kKvHeads * kColumns * qkv_tiles * 64;       // [column][blocks]
  static constexpr u64 page = token + (u64)kColumns * kBlocks * 16;                   // [item][query heads][dim tiles][8], as many items as a launch may have
  static constexpr u64 page_bytes = (u64)kQueriesPerKv * kDimTiles * 128;
};
/// The four words of (k block, column) in a vector.
LP_DEVICE u32 vector_word(int k_block, int column) { return (u32)(k_block * kColumns + column) * 64; }
LP_DEVICE u64 qkv_word(int kv_head, int column, int tile) {
  return Words::qkv + (u64)((kv_head * kColumns + column) * Words::qkv_tiles + tile) * 64;
}
