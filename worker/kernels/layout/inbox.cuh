// What ranks tell each other: words of 16 bytes, each written by one store and read by one load at system scope. A rank
// has an inbox, in its own memory; the other ranks write it, in places of their own, and its blocks read it.
//
//   sums of o, of down    a rank's partial sums of a row tile   block b -> block b of every other rank, which own the same tiles of the residual
//   embedding             the bf16s of a token's row, from the rank whose shard has it; the others send zeros
//   token                 best token of a rank's shard           one block -> all blocks of every rank
//   logits                of a rank's shard                      its owners -> the sampler of every rank, behind fences: the sampler is another launch
//
// Token words, and with one column all words, are {data, data, tag, extra} as in words.cuh, so that no fence orders
// anything. With eight columns half of what the links carry would be tags: sums and embedding are the complements of
// four columns of a row instead, of which 0 is none and stands for "not there", and who has heard a word makes it 0
// again.
//
// One buffer of each suffices. A warp overwrites what it said in a layer (a step) when it has the next layer's sums. To
// have them it has read what the same warp of the same block of every other rank said in between (after o: sums of
// down, and the other way round; embedding: sums of o), and that warp spoke after it had read the word that is
// overwritten. Token words: a rank's best token of step s + 1 needs all its blocks' rows of step s + 1, so sums of
// every warp of the other ranks' that owns some, which read the token words of step s before. Blocks that own none
// (kIdleBlocks) read them from two buffers by turns: a rank tells its token of step s + 2 when it has all ranks' of
// step s + 1, each of which was chosen from words of all its blocks, and these had read those of step s. Logits of a
// step come after its sums, so after every rank has begun it, and that is after its sampler, which runs before in its
// stream, has read those of the step before. Tags tell a word of another layer: a late reader reports it and never
// takes it.
//
// A word without a tag must also be 0 when it is said again, and only once it has been heard. A lane says, hears and
// clears the words of its own place and no others: it hears a word, clears it, has a system fence (Epilogue::forget),
// and then says the sums that come next, of the other kind. The lane of this place in the rank that says the word again
// has heard those sums before, and its own forget of them has a fence between hearing them and saying anything. So the
// zero comes before the next word: the fences of both, around the sums said in between, order it (system). All ranks
// end at the same step, with the same columns, and hear all that they are told: between launches every word is 0.
#pragma once

enum Told : u32 { kToldOut, kToldDown, kToldEmbedding, kTold };

struct Inbox {
  // u32, written by its own rank: whether all hosts wanted the launch to end, for the sampler behind it
  static constexpr u64 stop = 0;
  static constexpr u64 begun = 64;  // [rank] u32: epoch of the last launch that it has begun (sync/start.cuh)
  /// Words of a row tile from one rank. Of one column a word has two rows, of eight four columns of a row: [four
  /// columns][row].
  static constexpr u32 tile_bytes = kColumns == 1 ? 8 * 16 : kColumns / 4 * 16 * 16;
  static constexpr u64 told_bytes = (u64)kHiddenTiles * kRanks * tile_bytes;
  static_assert(begun + kRanks * 4 <= 128, "in front of the tiles");
  static constexpr u64 tiles = 128, tokens = tiles + kTold * told_bytes;  // [buffer][column][rank]
  static constexpr u64 bytes = tokens + kTokenBuffers * kColumns * kRanks * 16;
  LP_DEVICE static u64 token(u32 step, u32 column, u32 rank) {
    return tokens + step % kTokenBuffers * (u64)(kColumns * kRanks * 16) + (column * kRanks + rank) * 16;
  }
  LP_DEVICE static u64 tile(u32 told, u32 tile, u32 rank) {
    return tiles + told * told_bytes + (u64)(tile * kRanks + rank) * tile_bytes;
  }
};
