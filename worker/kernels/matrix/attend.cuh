// The launches of attention.
#pragma once

namespace matrix {

static_assert(kAttendTilesThreads == kAttendSpansThreads, "blocks of one launch");
constexpr int kAttendThreads = kAttendTilesThreads;
constexpr u32 kAttendShared = kAttendTilesShared > kAttendSpansShared ? kAttendTilesShared : kAttendSpansShared;

/// Tiles, and beside them, if they have only some of the blocks, rows that are alone.
template <bool CUT> LP_DEVICE void attend(const Launch& launch, const Pass& pass, u32 layer) {
  if (blockIdx.x >= tile_blocks(pass)) {
    attend_spans(launch, pass, layer, tile_blocks(pass));
    return;  // behind an else the compiler runs the tiles' products one by one (heads of 64)
  }
  attend_tiles<CUT>(launch, pass, layer);
}

}  // namespace matrix

#define LP_ATTEND(NAME) \
  extern "C" __global__ void __launch_bounds__(matrix::kAttendThreads, 1) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32 layer)

LP_ATTEND(matrix_attend_tiles) { matrix::attend<false>(launch, pass, layer); }
LP_ATTEND(matrix_attend_cut_tiles) { matrix::attend<true>(launch, pass, layer); }
LP_ATTEND(matrix_attend_spans) { matrix::attend_spans(launch, pass, layer, 0); }

/// Rows whose spans are items, which are added ascending: a warp has a row's query head.
extern "C" __global__ void __launch_bounds__(matrix::kMergeSpansThreads)
    matrix_merge_spans(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32) {
  using namespace matrix;
  constexpr u32 kPairs = kHeadDim / 64;  // a lane has dimensions 64 i + 2 lane and + 1
  launch_dependents();
  wait_launch_before();
  hold_up();
  const u32 lane = lane_index(), warps = kMergeSpansThreads / 32;
  for (u32 job = blockIdx.x * warps + warp_index(); job < pass.merge_count * kHeads; job += gridDim.x * warps) {
    const u32 word = load_relaxed_u32(pass.merges + job / kHeads * 2),
              place = load_relaxed_u32(pass.merges + job / kHeads * 2 + 1), row = word & 0xffff, spans = word >> 16,
              head = job % kHeads;
    const float* from = span_part(launch, place, head / kQueriesPerKv, head % kQueriesPerKv);
    SpanSums sums;
    float out[kPairs][2] = {};
#pragma unroll 4
    for (u32 span = 0; span < spans; span++) {
      const float* part = from + (u64)span * kKvHeads * (Memory::span_bytes / 4);
      const u64 its = load_relaxed_u64(part);
      sums.add(__uint_as_float((u32)its), __uint_as_float((u32)(its >> 32)));
#pragma unroll
      for (u32 i = 0; i < kPairs; i++) {
        const u64 pair = load_relaxed_u64(part + 2 + 64 * i + 2 * lane);
        out[i][0] = fmaf(sums.keep, out[i][0], sums.factor * __uint_as_float((u32)pair));
        out[i][1] = fmaf(sums.keep, out[i][1], sums.factor * __uint_as_float((u32)(pair >> 32)));
      }
    }
    const float inverse = raised(reciprocal_approx(sums.total));
#pragma unroll
    for (u32 i = 0; i < kPairs; i++) {
      const u32 dim = 64 * i + 2 * lane;
      store_u32(launch.words + Memory::attention_out +
                    vector_byte(O::steps, head * kDimTiles + dim / 16, row, dim / 8 % 2) + dim % 8 * 2,
                bf16_pair(out[i][0] * inverse, out[i][1] * inverse));
    }
  }
}
