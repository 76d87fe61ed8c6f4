// Messages between the ranks of a group in wide passes: words of 16 bytes {data, data, tag, extra} as in
// ../narrow/inbox.cuh, in the inbox of the rank that reads them.
//
// Sums of 32 columns are half a megabyte a rank, too much to send to every rank. So each rank owns a share of the
// columns, whose residual it keeps, and a product that is added to the residual takes two hops:
//
//   message              content                           writer -> reader
//   sums of o, of down   a block's rows of a column        block b -> block b of the column's rank, which adds those of
//                        (Product::told)                   all ranks, in leaf_sum's order, and that to its residual
//   x, with squares      the same rows, scaled, bf16       block b of that rank -> block b of every other rank, which
//                                                          publishes all columns to its own GPU as one GPU does
//   embedding            the same rows of a token, bf16    block b of the rank whose vocabulary shard has the token ->
//                                                          block b of the column's rank
//   token                best token of a rank's shard      a block -> all blocks of every rank
//   logits               of a rank's shard                 their owners -> the sampler of every rank, behind fences
//                                                          (../ops/ranks.cuh)
//
// Nobody sends columns past the launch's rows. All blocks own rows, so every block has a part in all of it, and one
// buffer of each suffices:
//   sums        Block b of rank r sends sums of o again a layer later, when all its threads have had x after o from all
//               ranks (publish). The rank that sent x of a column had read its sums. The same holds for down, and x
//               after down. In a launch that samples nothing, x after the last down is not sent: the next messages are
//               those of the next launch, after its x.
//   x           Rank q sends x after o again when it has the sums of o of the next layer from block b of every rank.
//               That block sent them after it had had the x before. The same holds for down.
//   embedding   Its reader reads it before it sends x of the step's first layer, and block b of every rank has that x
//               before it gets to the next step.
//   token       A rank chooses its best token of step s + 1 after its blocks have had x in that step, so after sums of
//               step s + 1 from block b of every rank, for all b. Each block reads the token words of step s before it
//               sends any of these sums.
//   logits      They lie behind the same sums, and these behind the samplers of the step before, in every rank's
//               stream.
// Launches may have different rows: x of any column shows that its rank has begun the launch, so has ended the one
// before. A tag tells words of different layers apart: a late reader reports a foreign word and never takes it.
#pragma once

namespace wide {

/// Columns whose residual a rank has.
constexpr u32 kRankColumns = kColumns / kRanks;
LP_DEVICE u32 rank_of_column(u32 column) { return column / kRankColumns; }

/// A lane sends 8 rows of a column: three words of fp32, for each part that a rank tells, or two of bf16.
constexpr u32 kSumWords = 3, kXWords = 2, kParts = O::told;
static_assert((int)O::told == (int)Down::told && (int)O::told_group == (int)Down::told_group,
              "ranks are told of both alike");

enum Told : u32 { kToldOut, kToldDown, kTold };  // sums, and the x that follows them

struct Inbox : InboxHead {
  static constexpr u64 chunks = (u64)kBlocks * kHiddenChunks;                           // of 8 rows
  // [o, down][rank][part][block][word][chunk][column of the share]
  static constexpr u64 sums = head_bytes;
  // [after o, after down][block][chunk][column][word]
  static constexpr u64 x = sums + kTold * kRanks * kParts * chunks * kSumWords * kRankColumns * 16;
  // [block][word][chunk][column of the share]
  static constexpr u64 embedding = x + kTold * chunks * kColumns * kXWords * 16;
  static constexpr u64 token = embedding + chunks * kXWords * kRankColumns * 16;        // [column][rank]
  static constexpr u64 bytes = token + (u64)kColumns * kRanks * 16;

  /// part: of those of all ranks.
  LP_DEVICE static u64 sum(u32 told, u32 part, u32 word, u32 chunk, u32 column) {
    return sums + ((((u64)(told * kRanks * kParts + part) * kBlocks + rank_block()) * kSumWords + word) *
                       (kHiddenChunks * kRankColumns) +
                   chunk * kRankColumns + column % kRankColumns) *
                      16;
  }
  LP_DEVICE static u64 x_word(u32 told, u32 word) {
    return x + ((told * kBlocks + rank_block()) * (u64)(kHiddenChunks * kColumns * kXWords) + word) * 16;
  }
  LP_DEVICE static u64 embedded(u32 word, u32 chunk, u32 column) {
    return embedding + (((u64)rank_block() * kXWords + word) * (kHiddenChunks * kRankColumns) + chunk * kRankColumns +
                        column % kRankColumns) *
                           16;
  }
};

/// This rank among the others.
struct Ranks {
  const Launch& launch;

  // `unknown`: what follows from the rank is computed where it is used, since registers are few.
  LP_DEVICE u32 own() const { return unknown(own_rank(launch)); }
  /// Whether it keeps the residual of a column.
  LP_DEVICE bool has(u32 column) const { return kRanks == 1 || rank_of_column(column) == own(); }

  /// A part of its sums of 8 rows of a column, to the rank that has it.
  LP_DEVICE void tell_sums(u32 told, u32 part, u32 chunk, u32 column, const float* sum, u32 tag) const {
    if (has(column) || column >= launch.row_count) return;
    u8* to = launch.inbox[rank_of_column(column)];
#pragma unroll
    for (u32 j = 0; j < kSumWords; j++)
      store_system_16(to + Inbox::sum(told, own() * kParts + part, j, chunk, column), __float_as_uint(sum[3 * j]),
                      __float_as_uint(sum[3 * j + 1]), tag, j + 1 < kSumWords ? __float_as_uint(sum[3 * j + 2]) : 0);
  }
  /// Sums of 8 rows of a column that it has, of all ranks; `own` are its own parts. A whole warp calls it.
  LP_DEVICE void hear_sums(u32 told, u32 chunk, u32 column, bool on, const float (*own)[8], float* sum,
                           u32 tag) const {
    hear_parts<0, kRanks * kParts>(told, chunk, column, on && has(column) && column < launch.row_count, own, sum, tag);
  }

  /// 8 rows of x of a column that it has, with the sum of squares of their tile, to all others.
  LP_DEVICE void tell_x(u32 told, u32 chunk, u32 column, const u32* x, float squares, u32 tag) const {
    if (column >= launch.row_count) return;
    const u64 at = Inbox::x_word(told, (chunk * kColumns + column) * kXWords);
#pragma unroll 1
    for (u32 i = 1; i < kRanks; i++) {
      u8* to = launch.inbox[(own() + i) % kRanks] + at;
      store_system_16(to, x[0], x[1], tag, __float_as_uint(squares));
      store_system_16(to + 16, x[2], x[3], tag, 0);
    }
  }
  /// x of the columns that others have, into `x`, and their sums of squares, for the readers on this GPU. All consumers
  /// call it. Columns that nobody sends are zero. sums: of the block's first tile.
  LP_DEVICE void hear_x(u32 told, u8* x, u8* sums, u32 tag) const {
    constexpr u32 WORDS = kHiddenChunks * kColumns * kXWords, EACH = (WORDS + kConsumerThreads - 1) / kConsumerThreads;
    const u32 thread = thread_index();
    const u8* base = launch.inbox[own()] + Inbox::x_word(told, thread);
    const auto column = [&](u32 j) { return (j * kConsumerThreads + thread) / kXWords % kColumns; };
    const u32 words_here = hidden_tiles() * 2 * kColumns * kXWords;
    const auto on = [&](u32 j) { return j * kConsumerThreads + thread < words_here && !has(column(j)); };
    Quad words[EACH] = {};
    const auto missing = [&](u32 j) {
      return on(j) && column(j) < launch.row_count && words[j].z != tag ? j * kConsumerThreads * 16 + 8 : kThere;
    };
    const auto fetch = [&](u32 j) {
      if (missing(j) != kThere) words[j] = load_system_16(base + j * kConsumerThreads * 16);
    };
    poll<EACH, false>(
        launch, base, tag, fetch, missing, [&](u32 seen) { return seen == tag; }, kSiteRankX,
        [&](u32 at) { return rank_of_column(column(at / (kConsumerThreads * 16))); });
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
      const u32 word = j * kConsumerThreads + thread, half = word % kXWords, chunk = word / kXWords / kColumns;
      if (!on(j)) continue;
      store_relaxed_8(x + vector_byte(first_hidden_tile() + (chunk >> 1), column(j), chunk & 1) + half * 8, words[j].x,
                      words[j].y);
      if (chunk % 2 == 0 && half == 0) store_relaxed_u32(sums + (chunk / 2 * kColumns + column(j)) * 4, words[j].w);
    }
  }

  /// 8 rows of a token's embedding, to the rank that has the column.
  LP_DEVICE void tell_embedding(u32 chunk, u32 column, const u32* row, u32 tag) const {
    u8* to = launch.inbox[rank_of_column(column)];
#pragma unroll
    for (u32 j = 0; j < kXWords; j++)
      store_system_16(to + Inbox::embedded(j, chunk, column), row[2 * j], row[2 * j + 1], tag, 0);
  }
  /// The same, of a column that it has, from the rank that has the token. A whole warp calls it, with those that are
  /// `on`.
  LP_DEVICE void hear_embedding(u32 chunk, u32 column, bool on, u32* row, u32 tag) const {
    const u8* base = launch.inbox[own()] + Inbox::embedded(0, chunk, column);
    constexpr u32 STRIDE = kHiddenChunks * kRankColumns * 16;
    Quad words[kXWords] = {};
    const auto missing = [&](u32 j) { return on && words[j].z != tag ? j * STRIDE + 8 : kThere; };
    const auto fetch = [&](u32 j) {
      if (missing(j) != kThere) words[j] = load_system_16(base + j * STRIDE);
    };
    poll<kXWords, false>(
        launch, base, tag, fetch, missing, [&](u32 seen) { return seen == tag; }, kSiteEmbedding,
        [](u32) { return kNobody; });
#pragma unroll
    for (u32 j = 0; j < kXWords; j++)
      if (on) row[2 * j] = words[j].x, row[2 * j + 1] = words[j].y;
  }

 private:
  /// COUNT parts, from FIRST on of those of all ranks, in the order of leaf_sum.
  template <u32 FIRST, u32 COUNT> LP_DEVICE void hear_parts(u32 told, u32 chunk, u32 column, bool on,
                                                            const float (*own_parts)[8], float* sum, u32 tag) const {
    if constexpr (COUNT > 4) {  // words that there are registers for
      static_assert(O::told_group <= 4, "halves have whole groups");
      float rest[8];
      hear_parts<FIRST, COUNT / 2>(told, chunk, column, on, own_parts, sum, tag);
      hear_parts<FIRST + COUNT / 2, COUNT / 2>(told, chunk, column, on, own_parts, rest, tag);
#pragma unroll
      for (u32 i = 0; i < 8; i++) sum[i] += rest[i];
    } else {
      const u8* base = launch.inbox[own()] + Inbox::sum(told, FIRST, 0, chunk, column);
      constexpr u32 WORD = kHiddenChunks * kRankColumns * 16, PART = kBlocks * kSumWords * WORD;
      Quad words[COUNT * kSumWords] = {};
      const auto at = [](u32 j) { return j / kSumWords * PART + j % kSumWords * WORD; };
      const auto missing = [&](u32 j) {
        return on && (FIRST + j / kSumWords) / kParts != own() && words[j].z != tag ? at(j) + 8 : kThere;
      };
      const auto fetch = [&](u32 j) {
        if (missing(j) != kThere) words[j] = load_system_16(base + at(j));
      };
      poll<COUNT * kSumWords, false>(
          launch, base, tag, fetch, missing, [&](u32 seen) { return seen == tag; }, kSiteSums,
          [](u32 at) { return (FIRST + at / PART) / kParts; });
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        float of[COUNT];
#pragma unroll
        for (u32 p = 0; p < COUNT; p++) {
          const Quad& word = words[p * kSumWords + i / 3];
          of[p] = (FIRST + p) / kParts == own()
                      ? own_parts[(FIRST + p) % kParts][i]
                      : __uint_as_float(i % 3 == 0 ? word.x : i % 3 == 1 ? word.y : word.w);
        }
        sum[i] = leaf_sum<COUNT, O::told_group>(of);
      }
    }
  }
};

}  // namespace wide
