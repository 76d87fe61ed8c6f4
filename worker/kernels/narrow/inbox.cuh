// Messages between the ranks of a group: words of 16 bytes, each written by one store and read by one load at system
// scope. A rank has an inbox in its own memory. The other ranks write it, each in places of its own; its blocks read
// it.
//
//   message              content                              writer -> reader
//   sums of o, of down   a rank's partial sums of a row tile  block b -> block b of every other rank, which own the
//                        (Product::told)                      same tiles of the residual
//   embedding            a token's row as bf16                the rank whose shard has the row; the others send zeros
//   token                best token of a rank's shard         one block -> all blocks of every rank
//   logits               of a rank's shard                    their owners -> the sampler of every rank, behind fences:
//                                                             the sampler is another launch
//
// Tags. A token word is {data, data, tag, extra} as in words.cuh, so no fence orders anything. With one column all
// words are. With eight columns tags would be half of what the links carry. So words of sums and of the embedding hold
// the complements of four columns of a row. No complement is 0, and 0 means "not written yet"; the reader sets a word
// back to 0 once it has read it.
//
// One buffer of each suffices, because a writer comes to a word again only after its reader has read it:
//   sums, embedding   A warp overwrites its words of a layer (a step) when it has the next layer's sums. So it has read
//                     what the same warp of the same block of every other rank sent in between (after o: sums of down,
//                     and the other way round; embedding: sums of o). That warp sent it after it had read the word that
//                     is overwritten.
//   token             A rank's best token of step s + 1 needs the rows of all its blocks in step s + 1. Those need sums
//                     of every warp of the other ranks that owns rows, which has read the token words of step s before.
//                     Blocks without rows (kIdleBlocks) read token words from two buffers, in turns. A rank sends its
//                     token of step s + 2 when it has the tokens of step s + 1 of all ranks. Each of these was chosen
//                     from words of all blocks of its rank, and these blocks had read the tokens of step s.
//   logits            They come after the step's sums, so after every rank has begun the step. A rank begins it after
//                     its sampler, which runs before it in the stream, has read the logits of the step before.
// A tag tells words of different layers apart: a late reader reports a foreign word and never takes it.
//
// A word without a tag must be 0 before it is written again, and must not be set to 0 before it has been read. A lane
// writes, reads and clears the words of its own place only. It reads a word, clears it, passes a system fence
// (Epilogue::forget), and then sends the next sums, of the other kind. The lane of this place in the rank that writes
// the word again has read those sums before, and passes a fence in its own forget before it sends anything. So the two
// fences, around the sums sent in between, order the zero before the next word (system). All ranks end at the same
// step, with the same columns, and read all that they are sent: between launches every word is 0.
#pragma once

namespace narrow {

enum Told : u32 { kToldOut, kToldDown, kToldEmbedding, kTold };

struct Inbox : InboxHead {
  /// Words of a part that a rank tells of a row tile. Of one column a word has two rows, of eight four columns of a
  /// row: [four columns][row].
  static constexpr u32 tile_bytes = kColumns == 1 ? 8 * 16 : kColumns / 4 * 16 * 16;
  static constexpr int most_parts = O::told > Down::told ? O::told : Down::told;
  static constexpr u64 told_bytes = (u64)kHiddenTiles * kRanks * most_parts * tile_bytes;
  static constexpr u64 tiles = head_bytes, tokens = tiles + kTold * told_bytes;  // [buffer][column][rank]
  static constexpr u64 bytes = tokens + kTokenBuffers * kColumns * kRanks * 16;
  LP_DEVICE static u64 token(u32 step, u32 column, u32 rank) {
    return tokens + step % kTokenBuffers * (u64)(kColumns * kRanks * 16) + (column * kRanks + rank) * 16;
  }
  /// The first of a rank's parts of a row tile, of which each rank tells PARTS: [tile][rank][part].
  template <int PARTS> LP_DEVICE static u64 tile(u32 told, u32 tile, u32 rank) {
    static_assert(PARTS <= most_parts, "there is room");
    return tiles + told * told_bytes + (u64)((tile * kRanks + rank) * PARTS) * tile_bytes;
  }
};

}  // namespace narrow
