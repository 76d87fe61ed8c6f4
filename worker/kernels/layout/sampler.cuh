// What a launch of the sampler is given and answers; the same structs are in worker/src/cuda/sampler.
#pragma once

/// How the tokens of a sequence are drawn: written when it enters a slot. Meanings and ranges as worker/v1 `Sampling`.
struct RowSampling {
  float temperature;         // 0 or below kMinTemperature: greedy
  float top_p;               // 1: off
  float min_p;               // 0: off
  u32 top_k;                 // 0: off
  u32 seed_lo, seed_hi;
  float repetition_penalty;  // 1: off
  float presence_penalty;    // 0: off
  float frequency_penalty;   // 0: off
  u32 flags;                 // kWantLogprobs
  u32 top_logprobs;          // 0 to kMaxTop
  u32 bias_count;            // entries of bias
  u32 suppress_count;        // entries of suppress
  u32 suppress_until;        // suppressed while the new token's position is below this (prompt length + min_tokens)
  u64 bias;                  // device address of [bias_count] {u32 token, f32 bias}, no token twice
  // Device address of [suppress_count] u32 tokens; ids past the vocabulary are ignored, also in bias.
  u64 suppress;
};
// RowSampling::flags: log-probability of the drawn token, and of `top_logprobs` most likely ones
constexpr u32 kWantLogprobs = 1;
constexpr u32 kMaxTop = 20;       // most entries of RowLogprobs
static_assert(sizeof(RowSampling) == 72, "Rust mirrors this");

/// Log-probabilities of a drawn token, in mapped memory. Written before the row's token word, which releases it.
struct RowLogprobs {
  float logprob;  // of the drawn token
  u32 count;      // entries of top
  struct {
    u32 token;
    float logprob;
  } top[kMaxTop];  // most likely first, lowest id on a tie
};
static_assert(sizeof(RowLogprobs) == 168, "Rust mirrors this");

struct SamplerLaunch {
  const float* logits;          // [rows][padded vocabulary] f32, as the decoder wrote them
  // [rows][padded vocabulary] f32: logits after bias, penalties, suppression and mask; rows without these never touch
  // it.
  float* processed;
  // [slots][padded vocabulary]: times generated, kSeen; only rows with penalties read it, and update it unless they are
  // several of their sequence.
  u32* counts;
  u8* words;                    // kWordsBytes, zeroed when they were taken; no other use
  const RowSampling* sampling;  // [slots]
  Row* rows;                    // [row_count] of the decoder's launch; becomes those of the next step
  u32* stopped;                 // 1 once the chain is to end: the launches behind this one do nothing
  u64* tokens;                  // mapped: [row_count] tag << 32 | token; kNone of a row that does not sample
  RowLogprobs* logprobs;        // mapped: [row_count], of the rows that want them
  u32* control;                 // mapped: [0] not 0: end the chain; [1] steps that it ran, if it was ended
  // If not 0, the chain ends: control[0], or in a group what all hosts want (layout/inbox.cuh).
  const u32* stop;
  u32* report;                  // mapped: why a wait failed
  u32 row_count, tag;
  const u32* masks;             // [masks][kMaskWords]: a bit a token that may be drawn
  // [row_count]: 1 + the row's mask; 0: it may draw all tokens. Null: so may all rows.
  const u32* mask_of;
  u32 step;                     // of the chain; the first one's launches do not look at `stopped`, but set it
  u32 rows_before;              // of the same step, in launches before this one
};
static_assert(sizeof(SamplerLaunch) == 128, "Rust mirrors this");
