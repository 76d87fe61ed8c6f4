// What a launch is given; the same structs are in worker/src/cuda/kernels/launch.rs.
#pragma once

/// One row of a pass: one token of one sequence. Rows of a sequence are consecutive, positions ascending; in launches
/// of several steps it has one, unless the host gives the rows of each step.
struct Row {
  u32 token, position, slot;
  u32 first_row, first_position;  // of the first row of its sequence in this launch
  u32 flags;                      // kRowSample: its logits are needed; kRowSeveral
  u32 last_position;              // past it the row idles
  u32 reserved;
};
constexpr u32 kRowSample = 1;
// Several rows of its sequence sample: those behind the first compute drafts, of which only the host knows which hold.
constexpr u32 kRowSeveral = 2;
constexpr u32 kLaunchLogits = 1;   // Launch::flags: write the logits of the last step
// With one step: a launch of the sampler behind this one chooses the tokens.
constexpr u32 kLaunchUndrawn = 2;

struct Launch {
  const u8* weights;      // packed, see shape.cuh
  const u8* gamma;        // [2 * layers + 1][hidden] bf16
  const u8* embedding;    // [vocab, or the rank's shard of it][hidden] bf16; null if tied
  const float* bias;      // [layers][rows of qkv]
  const float* scales;    // [layers][Scales::layer] (kScaled)
  const float* qk_norm;   // [layers][2][head_dim], dims in the order of a packed head
  const float* rope;      // [positions][head_dim / 2][cos, sin]
  u8* kv;                 // the pool
  float* k_scale;         // [layer][page][kv head][64] 1 / rms of k (kQkNorm)
  u8* words;              // exchange words, kWordsBytes, zeroed when they were taken and when the epoch starts again
  const u32* page_table;  // [slot][page_stride]
  float* logits;          // [columns][vocab padded to tiles]; of several ranks every rank's, as far from its inbox
  const Row* rows;        // [row_count]
  // Mapped: [steps][columns], of a launch whose steps have the rows that the host gives when it has the tokens of the
  // step before: those of the first are `rows`. All sample. Without any the launch ends. Else null.
  const Row* fed;
  // Attention's items, dealt to the blocks of a KV head (wide/attention_items.cuh); null for narrow passes.
  const u32* items;
  const u32* stopped;     // null, or of a chain: not 0: do nothing
  u64* tokens;            // mapped: [steps][columns] (tag of the step << 32 | token)
  // Mapped. [0], from the host: if not 0, end at a token boundary at most two steps on. [1], to the host: steps that
  // the launch runs, written once that is known, at the latest when it ends. [2], from the host: tag of the newest step
  // whose rows lie in `fed`.
  u32* control;
  u32* report;            // mapped: why a wait failed
  long long* trace;
  u32 row_count, steps, epoch, page_stride, kv_pages, flags, rank, reserved;
  // Of every rank, this one included: messages from the other ranks (inbox.cuh), zeroed as words are.
  u8* inbox[16];
};

/// Row of the page table of a slot whose K and V attention reads. LP_NEIGHBOR, a negative control, is a slot that reads
/// those of the one before it (but its own 1 / rms of k).
LP_DEVICE const u32* pages_of(const Launch& launch, u32 slot) {
#ifdef LP_NEIGHBOR
  slot -= slot == LP_NEIGHBOR;
#endif
  return launch.page_table + slot * launch.page_stride;
}
