// What the sampler's blocks share: exchange words; and what a block knows of its rows.
//
// The shape comes as LP_VOCAB (tokens), LP_BLOCKS (blocks of the launch), LP_COLUMNS (rows of a launch at most) and
// LP_SAMPLE_THREADS (threads of a block).
#pragma once

namespace sampling {

constexpr u32 kVocab = LP_VOCAB, kTiles = (kVocab + 15) / 16, kPadded = kTiles * 16;
constexpr u32 kBlocks = LP_BLOCKS, kRows = LP_COLUMNS;
constexpr u32 kNone = 0xffffffffu;       // no token
constexpr u32 kMaskWords = (kVocab + 31) / 32; // of a mask: bit i % 32 of word i / 32 for token i
constexpr u32 kMaxListed = 64;           // up to this top_k, blocks exchange their best tokens themselves
constexpr float kMinTemperature = 1e-5f; // below: greedy
constexpr u32 kSeen = 1u << 31;          // of a count: the token occurs in the prompt
static_assert(kTiles * 16ull < (1u << 22), "sums of weights could overflow");

// Exchange words of a row: what block b says stands at word_at(parity, row, kind) + 16 b. What all say is read by one
// warp a kind.
enum Kind : u32 {
  kBest,     // {key, token, tag, value}: the best token by value and noise (kSelect: a pivot before the present one)
  kOther,    // {key, token, tag, value}: the largest value (kSelect: a pivot after the present one)
  kBefore,   // {weight lo, weight hi, tag, tokens}: of the tokens that rank before the pivot
  kAll,      // {weight lo, weight hi, tag, tokens}: of all tokens that min_p keeps
  kRaw,      // {key, token, tag, value}: the largest raw logit; then {weight lo, weight hi, tag, 0}: of all raw logits
  kKinds,    // the others are lists, at list_at
  kDrawList = kKinds, // the best tokens by value, to draw from (kRank: those from `high` on)
  kTopList   // the most likely tokens
};
constexpr u32 kHeadBytes = 64; // u32 tag of the next exchange
constexpr u32 kRowWords = kHeadBytes, kRowWordsBytes = 2 * kRows * kKinds * kBlocks * 16;
constexpr u32 kLists = kRowWords + kRowWordsBytes;
constexpr u64 kListsBytes = 2ull * kRows * 2 * kBlocks * kMaxListed * 16, kWordsBytes = kLists + kListsBytes;
LP_DEVICE u32 word_at(u32 parity, u32 row, u32 kind) {
  return kRowWords + ((parity * kRows + row) * kKinds + kind) * kBlocks * 16;
}
// {key, token, tag, length of the list}: best first; an empty list has one word that says so.
LP_DEVICE u64 list_at(u32 parity, u32 row, u32 list, u32 block) {
  return kLists + (u64)(((parity * kRows + row) * 2 + list - kDrawList) * kBlocks + block) * kMaxListed * 16;
}
// Tags count exchanges and skip 0 (untouched memory) and 1 (so that the parity alternates over the wrap).
LP_DEVICE constexpr u32 next_tag(u32 tag) { return tag + 1 < 2 ? 2 : tag + 1; }
static_assert(next_tag(2) == 3 && next_tag(0xfffffffeu) == 0xffffffffu && next_tag(0xffffffffu) == 2,
              "wraps with its parity");

// ---- block memory
enum Stage : u32 {
  kIdle,   // no row, or none to sample
  kDone,   // the token is known
  kDraw,   // the best token by value (greedy) or by value and noise: no filters
  kFirst,  // the largest value; the best by value and noise, unless a list follows
  kNear,   // the largest value from `high` on
  kCheck,  // is the pivot among the tokens that the filters keep?
  kSelect, // which token is the first that top_k drops? A pivot with not many too few tokens before it
  kRank,   // the tokens from `high` on, down to the first that top_k drops
  kList    // the top_k best tokens themselves
};
enum StateFlags : u32 {
  kGreedy = 1,
  kProcessed = 2,  // logits are read from SamplerLaunch::processed
  kPenalised = 4,  // counts matter
  kFirstCheck = 8, // this check also adds up what min_p keeps
  kBound = 16,     // the pivot is the first token that top_k drops, not a candidate
  kSeveral = 32    // as kRowSeveral
};
enum LogprobStage : u32 { kNoLogprobs, kRawMax, kRawSum, kLogprobsDone };

// A place in the ranking of tokens: by value, the lower id first on a tie.
struct Place { float value; u32 token; };

struct RowState {
  const RowSampling* params;
  const u32* mask;         // of the tokens that may be drawn; null: all
  u64 limit;               // kCheck: weight before a token that top_p keeps is less than this
  u32 stage, logprob_stage, flags;
  u32 says;                // kinds of the next exchange, a bit each; 0: the row is done
  float scale;             // 1 / temperature; 1 if greedy
  Noise noise;             // position is that of the new token
  u32 slot, drafts;        // drafts: tokens of this row and those before it that are not counted
  u32 top_k; float top_p, min_p; // 0, 1, 0: off
  float max, threshold;    // the largest value, and that of min_p
  Place pivot, high, low;  // kSelect: the token looked for ranks after high and not after low
  // Keys: tokens that rank below are in no list. Without a list, floor is a guess at kSelect's first pivot.
  u32 floor, top_floor;
  u32 ahead_of_high;       // tokens that rank before `high`
  float raw_max, log_sum;  // log-probability = (raw - raw_max) - log_sum
  u32 top_count;           // of Scratch::top
  u32 token;               // the result
};
// What all blocks said of one kind: the best entry, or a sum.
struct Said { u64 sum; Place place; u32 tokens, floor; };
// What a block found in one pass.
struct Found { u64 best, other, weight, all_weight, raw; u32 tokens, all_tokens; };
struct Scratch {
  SamplerLaunch launch;
  RowState rows[kRows];
  Found found[kRows];
  Said said[kRows][kKinds];
  Place top[kRows][kMaxTop]; // raw logit and token
  u32 tag;                   // of the next exchange
  u32 block;
};
static_assert(kRows <= 64 && sizeof(Scratch) <= 48 * 1024, "rows are bits of 64, and lie in static shared memory");

constexpr u32 kThreads = LP_SAMPLE_THREADS, kWarps = kThreads / 32;
static_assert(kThreads % 32 == 0 && kThreads >= 32, "whole warps");
LP_DEVICE void sync() { barrier_sync(0, kThreads); }
LP_DEVICE u32 warp_of(u32 thread) { return thread / 32; }
LP_DEVICE u32 lane_of(u32 thread) { return thread % 32; }

// Ids of a block that are tokens.
struct Ids { u32 first, end; };
LP_DEVICE Ids own_ids(u32 block) {
  const u32 first = block * kTiles / kBlocks * 16, end = (block + 1) * kTiles / kBlocks * 16;
  return Ids{first < kVocab ? first : kVocab, end < kVocab ? end : kVocab};
}
LP_DEVICE bool owns(const Ids& own, u32 id) { return id >= own.first && id < own.end; }

// ---- values and their ranking
// The value by which a logit is ranked: NaN is minus infinity, both zeros are plus zero.
LP_DEVICE float scaled(float logit, float scale) {
  const float value = add(mul(logit, scale), 0.0f);
  return value != value ? -kInfinity : value;
}
// Orders like the value, over 0; and back.
LP_DEVICE u32 key_of(float value) {
  const u32 b = bits(value);
  return b ^ ((u32)((int)b >> 31) | 1u << 31);
}
LP_DEVICE float value_of(u32 key) { return float_of(key >> 31 ? key ^ 1u << 31 : ~key); }
// Orders tokens by key, then by lower id; 0: none.
#ifdef LP_BREAK_TIES
LP_DEVICE u64 pack(u32 key, u32 token) { return (u64)key << 32 | token; } // negative control: the higher id
LP_DEVICE u32 token_of(u64 entry) { return (u32)entry; }
#else
LP_DEVICE u64 pack(u32 key, u32 token) { return (u64)key << 32 | (u32)~token; }
LP_DEVICE u32 token_of(u64 entry) { return ~(u32)entry; }
#endif
LP_DEVICE u64 entry(float value, u32 token) { return pack(key_of(value), token); }
LP_DEVICE u64 entry_of_key(u32 key, u32 token) { return key == 0 ? 0 : pack(key, token); }
LP_DEVICE float value_of(u64 entry) { return value_of((u32)(entry >> 32)); }
LP_DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }
LP_DEVICE bool before(const Place& a, const Place& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}
LP_DEVICE bool infinite(float v) { return v == kInfinity || v == -kInfinity; }

// e^(value - max) as a multiple of 2^-40, rounded down; value <= max. Integers, so that sums have no order.
LP_DEVICE u64 weight_of(float value, float max) {
  const float share = value == max ? 1.0f : exp_(sub(value, max));
  return to_integer(mul(share, 1099511627776.0f));
}
// The smallest weight that is a share of at least p of total; at least 1, at most total.
LP_DEVICE u64 mass_of(float p, u64 total) {
  const u64 mass = to_integer(round_up(mul((double)p, to_double(total))));
  const u64 most = total > 1 ? total : 1;
  return mass < 1 ? 1 : mass > most ? most : mass;
}

LP_DEVICE u64 warp_max64(u64 v) {
  const u32 hi = warp_max((u32)(v >> 32));
  return (u64)hi << 32 | warp_max((u32)(v >> 32) == hi ? (u32)v : 0);
}
LP_DEVICE u64 warp_add64(u64 v) {
#pragma unroll
  for (u32 d = 1; d < 32; d *= 2) v += shuffle_xor(v, d);
  return v;
}

}  // namespace sampling
