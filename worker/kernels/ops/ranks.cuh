// What all passes of a group's ranks have in common.
#pragma once

LP_DEVICE u32 own_rank(const Launch& launch) { return kRanks == 1 ? 0 : launch.rank; }

/// The logits of a rank, which all have at the same distance from their inboxes.
LP_DEVICE float* logits_of(const Launch& launch, u32 rank) {
  if constexpr (kRanks == 1) return launch.logits;
  const u64 distance = (const u8*)launch.logits - launch.inbox[own_rank(launch)];
  return reinterpret_cast<float*>(launch.inbox[rank] + distance);
}
/// A logit into the memory of every rank, whose sampler sees the whole vocabulary.
LP_DEVICE void put_logit(const Launch& launch, u32 column, u32 id, float logit) {
  const u64 at = (u64)column * ((kVocab + 15) / 16 * 16) + id;
#pragma unroll 1
  for (u32 rank = 0; rank < kRanks; rank++) logits_of(launch, rank)[at] = logit;
}
/// Orders a step's K, V and logits and its token words: among the ranks, where they write each other logits.
LP_DEVICE void fence_tokens(const Launch& launch) {
  if (kRanks > 1 && launch.flags & kLaunchLogits) fence_system();
  else fence_gpu();
}
