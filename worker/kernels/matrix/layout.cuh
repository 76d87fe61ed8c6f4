// Matrix passes: what lies where in their memory, and what their launches are given.
//
// A pass has up to kColumns rows of a step, of prompts or decoding, in the order of the host. A launch runs one phase
// of one layer:
//   embed
//   | layers x (norms, qkv, [head_norms], [attend_tiles], [attend_spans], [merge_spans], out, norms, gate_up, down)
//   | norms, gather, head
// The brackets are left out where a pass has no such items, or attend_tiles has rows that are alone, too. Each reads
// what launches before it have written. Rows beyond the last one, up to a block of tokens, hold anything: a column of a
// product has a part in nothing but itself. So may, behind qkv of the last layer, rows that do not sample
// (Pass::blocks). Where none samples, a pass ends there. A pass that chooses its tokens ends with head_choose, choose
// (choice.cuh) instead of head. Of several ranks there are more launches: see ranks.cuh.
#pragma once

namespace matrix {

constexpr int kTokens = 128;                   // of a block of tokens: columns of a product's tile
constexpr u32 kStepBytes = kTokens * 32;       // of a k16 step of a block's activations
constexpr u64 kResidualBytes = kTokens * 512;  // of a block's residual, 128 hidden rows
constexpr int kMostSamples = kColumns < 512 ? kColumns : 512;  // rows of a pass that sample
constexpr int kMostSpans = 4096;                               // spans of a pass that are merged (per KV head)
static_assert(kColumns % kTokens == 0, "whole blocks of tokens");
constexpr int kTokenBlocks = kColumns / kTokens, kSampleBlocks = kMostSamples / kTokens;
constexpr u32 kVocabTiles = kRanks * kHeadTiles;    // of 16 vocabulary rows
constexpr int kRowGroups = (kHiddenTiles + 7) / 8;  // groups of 128 hidden rows, the last perhaps not full

/// Blocks of a product, at most: a Hopper GPU has up to 144 multiprocessors.
constexpr u64 kMostBlocks = 144;

/// Activations, B of a product of `steps` k16 steps: [block of tokens][k16 step][8 tokens][2 halves of k][token][8 k]
/// bf16.
LP_DEVICE u64 vector_byte(int steps, u32 step, u32 token, u32 half) {
  return ((u64)(token / kTokens) * steps + step) * kStepBytes + (token % kTokens / 8 * 2 + half) * 128 + token % 8 * 16;
}

/// Where the ranks of a group meet in a pass.
enum Meet : u32 {
  kMeetBegun, kMeetEmbedded, kMeetOut, kMeetOutJoined, kMeetDown, kMeetDownJoined, kMeetLogits, kMeets
};

/// Of Memory::places, of rows beyond the last one.
constexpr u32 kNoPlace = ~0u;
/// Offsets in Launch::words, which of several ranks are the rank's inbox.
struct Memory {
  // u32, for the sampler behind the pass: whether all hosts want the chain to end (kRanks > 1).
  static constexpr u64 stop = 0;
  static constexpr u64 meets = 128;  // [Meet][rank] {tag, whether its host wants the chain to end, 0, 0}
  // Input of qkv, gate/up; of the LM head before `gather`.
  static constexpr u64 x = kRanks == 1 ? 0 : (meets + kMeets * kRanks * 16 + 127) / 128 * 128;
  static constexpr u64 attention_out = x + (u64)kTokenBlocks * kHiddenTiles * kStepBytes;
  static constexpr u64 activation = attention_out + (u64)kTokenBlocks * O::steps * kStepBytes;
  // [token][query head][d] bf16, after norm's weights and rope, before 1 / rms of the head
  static constexpr u64 queries = activation + (u64)kTokenBlocks * Down::steps * kStepBytes;
  // [token][query heads, then KV heads][dim tile] f32: squares of 16 dimensions, before norm's weights (kQkNorm)
  static constexpr u64 head_squares = queries + (u64)kColumns * kHeads * kHeadDim * 2;
  // [token][query head] f32 1 / rms (kQkNorm)
  static constexpr u64 query_inverse =
      head_squares + (u64)(kQkNorm ? kHeads + kKvHeads : 0) * kDimTiles * kColumns * 4;
  // The residual, fp32: [group of 128 rows][block of tokens][8 tokens (16)][consumer thread (256)][4], a thread's four
  // as an accumulator of wgmma has them: rows g, g, g + 8, g + 8 of its warp's 16, columns 2 t, 2 t + 1, 2 t, 2 t + 1.
  static constexpr u64 residual = query_inverse + (u64)(kQkNorm ? kHeads : 0) * kColumns * 4;
  // [block of tokens][hidden tile][token] f32
  static constexpr u64 squares = residual + (u64)kRowGroups * kTokenBlocks * kResidualBytes;
  static constexpr u64 inverse = squares + (u64)kHiddenTiles * kColumns * 4;         // [token] f32: 1 / rms
  static constexpr u64 head_x = inverse + (u64)kColumns * 4;                         // as x, of the rows that sample
  static constexpr u64 head_inverse = head_x + (u64)kSampleBlocks * kHiddenTiles * kStepBytes;
  // [token] {position, (page * kPage + position % kPage) << 1 | whether it is the last of several rows of its sequence}
  static constexpr u64 places = head_inverse + (u64)kMostSamples * 4;
  // Of a span that is merged: [place][kv head][query head]: reference, sum, [d] outputs, f32.
  static constexpr u64 spans = places + (u64)kColumns * 8;
  static constexpr u64 span_bytes = (u64)kQueriesPerKv * (kHeadDim + 2) * 4;
  // Of a block of a product whose K is cut (product.cuh): sums that the others of its tile tell it, of two units in
  // turns; of its team [2] u32 that count who has come, zeroed by `embed`.
  static constexpr u64 sums = spans + (u64)kMostSpans * kKvHeads * span_bytes;
  static constexpr u64 block_sums = 3 * 16384;
  static constexpr u64 come = sums + kMostBlocks * 2 * block_sums;
  // Of several ranks: what each of them has summed of o or of down, of the runs of 32 tokens that this rank adds up:
  // [rank][part][run][group of 128 rows][row tile][8 tokens][lane][4] f32, a lane's four as in the residual.
  static constexpr u64 partial = (come + kMostBlocks / 4 * 8 + 127) / 128 * 128;
  static constexpr u64 run_bytes = kResidualBytes / 4, own_runs = (kTokenBlocks + kRanks - 1) / kRanks * 4;
  static constexpr u64 part_bytes = kRowGroups * own_runs * run_bytes;
  static constexpr int parts = kRanks == 1 ? 0 : kRanks * (O::told > Down::told ? O::told : Down::told);
  // The same of what this rank has summed, [rank that adds it up], where copy engines carry it there.
  static constexpr u64 outgoing = partial + parts * part_bytes;
  // [token][hidden] bf16 (kRanks > 1).
  static constexpr u64 embeddings = outgoing + parts * part_bytes;
  // [column][row tile of the vocabulary] u64: the best of 16 rows (choice.cuh).
  static constexpr u64 best = embeddings + (kRanks == 1 ? 0 : (u64)kColumns * kHidden * 2);
  static constexpr u64 bytes = best + (u64)kMostSamples * kVocabTiles * 8;
};

/// First byte of the words of a meet, of rank 0.
constexpr u64 meet_byte(Meet meet) { return Memory::meets + (u64)meet * kRanks * 16; }
/// Byte of the squares of (row tile, token).
LP_DEVICE u64 squares_byte(u32 tile, u32 token) {
  return Memory::squares + (((u64)(token / kTokens) * kHiddenTiles + tile) * kTokens + token % kTokens) * 4;
}
/// Byte of the residual of (row tile, 8 tokens), of its warp's first thread.
LP_DEVICE u64 residual_byte(u32 tile, u32 token) {
  return ((u64)(tile / 8) * kTokenBlocks + token / kTokens) * kResidualBytes + token % kTokens / 8 * 4096 +
         tile % 8 * 512;
}

/// Bytes of a row tile's sums of a run of 32 tokens: [8 tokens][lane][4] f32.
constexpr u32 kSentBytes = 2048;

/// Byte of the best of a row tile of the vocabulary.
LP_DEVICE u64 best_byte(u32 column, u32 tile) { return Memory::best + ((u64)column * kVocabTiles + tile) * 8; }

/// A row tile of a product's weights: where its run r lies, in runs from the product's begin:
/// (word >> 1) + r * (1 + (word & 1)). The host knows how tiles are packed.
struct Tiles {
  static constexpr u32 qkv = 0, out = qkv + Qkv::tiles, gate_up = out + O::tiles, down = gate_up + GateUp::tiles,
                       head = down + Down::tiles, count = head + Head::tiles;
};

/// What a pass is given beside its Launch, of which it uses weights to page_table, logits, rows, tokens, control,
/// report, row_count, epoch, page_stride, kv_pages, rank and inbox.
struct Pass {
  const u32* tiles;        // [Tiles::count]
  // Rows of a sequence that has several in the pass, 2 * kTileTokens of them at most: {first row | rows << 16, place |
  // span << 16, or ~0: all that they see}. The longest first. Row r's part is at place + r * spans that the tile sees.
  const u32* attend_tiles;
  // Of a row that is alone in the pass of its sequence: {row | span << 16, place}, or {row, ~0: all that it sees}. The
  // longest first. A span is 16 pages from a page that is a multiple of 16.
  const u32* attend_spans;
  const u32* merges;       // of a row whose spans are items: {row | spans << 16, first place}
  const u32* samples;      // [samples] rows, ascending: column i of the logits is of row samples[i]
  // Of a pass that chooses its tokens; null: it writes logits, for the sampler behind it. 0, or how many steps the
  // chain has: those behind them choose nothing.
  u32* stopped;
  Row* next;               // of a pass that chooses: its rows, which become those of the next step; null: there is none
  u32 tile_count, span_count, merge_count, sample_count;
  u32 step;                // of the chain; the first one does not look at `stopped`, but sets it
  u16 cut;                 // whether tiles are cut by spans
  // Blocks of a KV head that compute tiles while the others compute rows that are alone; 0: all compute tiles, and rows
  // that are alone have a launch of their own.
  u16 tile_blocks;
  // 0, or, where copy engines carry sums and x, how many runs a rank adds up, one behind the other (ranks.cuh).
  u32 carried;
  // Blocks of tokens that the launch computes, a bit each: all, but behind K and V of the last layer those in which
  // rows sample. The tiles and merges that it is given are then of such rows alone.
  u32 blocks;
};
static_assert(kTokenBlocks <= 32, "a bit for each block of tokens");

/// The rank that adds up a run of 32 tokens, and which of its own it is.
LP_DEVICE u32 owner_of(const Pass& pass, u32 run) { return pass.carried ? run / pass.carried : run % kRanks; }
LP_DEVICE u32 place_of_run(const Pass& pass, u32 run) { return pass.carried ? run % pass.carried : run / kRanks; }
/// From Memory::partial or Memory::outgoing on: part `part` of TOLD of sums of (row tile, place of a run), of a rank or
/// for it.
template <int TOLD> LP_DEVICE u64 sums_byte(u32 rank, u32 part, u32 tile, u32 place) {
  return (rank * TOLD + part) * Memory::part_bytes + ((u64)place * kRowGroups + tile / 8) * Memory::run_bytes +
         tile % 8 * kSentBytes;
}

/// Tokens of a tile of 64 (token, query head) pairs.
constexpr int kTileTokens = 64 / kQueriesPerKv;

}  // namespace matrix
