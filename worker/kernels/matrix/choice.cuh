// Greedy choice in matrix passes, where no row needs the sampler: the LM head writes the best of 16 vocabulary rows
// instead of logits, and a launch behind it the best of all. The rule is that of ../ops/best.cuh.
#pragma once

namespace matrix {

/// A logit of vocabulary row `id`, so that the larger word is the better choice: its bits in the order of values, both
/// zeros as one, then ~id. Not for NaN.
LP_DEVICE u64 choice_word(float logit, u32 id) {
  const u32 bits = __float_as_uint(logit + 0.0f);
  return (u64)(bits ^ ((u32)((int)bits >> 31) | 1u << 31)) << 32 | ~id;
}
LP_DEVICE u32 id_of(u64 word) { return ~(u32)word; }
LP_DEVICE u64 better(u64 a, u64 b) { return a > b ? a : b; }
/// Of columns that this lane and the one at a distance both have words of, the upper lane keeps the upper KEPT, the
/// other one the lower ones, each the better of both words.
template <int KEPT> LP_DEVICE void keep_half(u64* words, int distance) {
  const bool upper = lane_index() & distance;
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const u64 told = shuffle_xor(upper ? words[i] : words[i + KEPT], distance);
    words[i] = better(upper ? words[i + KEPT] : words[i], told);
  }
}

/// After the LM head, instead of Logits: to Memory::best. Of several ranks to all, each its shard's tiles.
struct Choose : HeadEpilogue {
  template <class CONSUMER> LP_DEVICE void finish(CONSUMER& consumer, u32 tile, u32 token, float* sum) const {
    consumer.done(normalize<kRuns>(consumer.wait(), sum));
    if (!any_lane(tile < Head::tiles)) return;
    constexpr int OF_LANE = kTokens / 4;  // columns: i is column i / 2 * 8 + 2 t + i % 2
    const u32 lane = lane_index(), place = own_rank(launch) * kHeadTiles + tile, id = place * 16 + (lane >> 2);
    // A row beyond the vocabulary is never the best: there is one before it that is as good.
    const auto logit = [&](float v, u32 of) { return of < kVocab ? fmaxf(v, kMinusInfinity) : kMinusInfinity; };
    u64 best[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      const float* v = sum + i / 2 * 4 + i % 2;
      const float low = logit(v[0], id), high = logit(v[2], id + 8);
      best[i] = high > low ? choice_word(high, id + 8) : choice_word(low, id);
    }
    // The 8 lanes that have other rows of the same columns.
    keep_half<OF_LANE / 2>(best, 16);
    keep_half<OF_LANE / 4>(best, 8);
    keep_half<OF_LANE / 8>(best, 4);
#pragma unroll 1
    for (u32 rank = 0; rank < kRanks; rank++) {
      u8* words = kRanks == 1 ? launch.words : launch.inbox[rank];
#pragma unroll
      for (int k = 0; k < OF_LANE / 8; k++) {
        const u32 i = (lane >> 2) * (OF_LANE / 8) + k, column = token + i / 2 * 8 + (lane & 3) * 2 + i % 2;
        if (column < pass.sample_count) *reinterpret_cast<u64*>(words + best_byte(column, place)) = best[k];
      }
    }
    if constexpr (kRanks > 1) fence_system();  // ranks.cuh
  }
};

LP_DEVICE u64 best_of_lanes(u64 word) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) word = better(word, shuffle_xor(word, distance));
  return word;
}
/// A block a column: its token, to the host and into its row of the next step. The last launch of a pass; as the
/// sampler it does nothing once the chain has ended, and asks the host whether it is to end.
LP_DEVICE void choose(const Launch& launch, const Pass& pass) {
  __shared__ u64 of_warps[kVectorThreads / 32];
  // Blocks of this launch may find either 0 or the step after this one.
  const u32 steps = pass.step > 0 ? load_relaxed_u32(pass.stopped) : 0;
  if (steps != 0 && steps <= pass.step) return;
  const u32 lane = lane_index();
#pragma unroll 1
  for (u32 column = blockIdx.x; column < pass.sample_count; column += gridDim.x) {
    const u64* words = reinterpret_cast<const u64*>(launch.words + best_byte(column, 0));
    u64 best = 0;
#pragma unroll 1
    for (u32 first = threadIdx.x; first < kVocabTiles; first += 8 * kVectorThreads) {
      u64 word[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 tile = first + i * kVectorThreads;
        word[i] = tile < kVocabTiles ? words[tile] : 0;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) best = better(best, word[i]);
    }
    best = best_of_lanes(best);
    if (lane == 0) of_warps[warp_index()] = best;
    __syncthreads();
    if (warp_index() == 0) best = best_of_lanes(lane < kVectorThreads / 32 ? of_warps[lane] : 0);
    if (threadIdx.x == 0) {
      const u32 token = id_of(best);
      store_system_u64(launch.tokens + column, (u64)launch.epoch << 32 | token);
      if (pass.next) {
        Row& next = pass.next[pass.samples[column]];
        next.token = token;
        next.first_position = ++next.position;
      }
    }
    __syncthreads();
  }
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  const u32 stop =
      kRanks == 1 ? load_system_u32(launch.control) : load_relaxed_u32(launch.words + Memory::stop);
  *pass.stopped = stop ? pass.step + 1 : 0;
  if (stop) store_system_u32(launch.control + 1, pass.step + 1);
}

}  // namespace matrix
