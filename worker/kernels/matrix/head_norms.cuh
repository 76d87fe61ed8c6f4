// 1 / rms of heads (kQkNorm): of queries for this pass, of K for all that read its pages.
#pragma once

namespace matrix {
constexpr int kHeadNormsThreads = 256;
}

/// A thread has a row's head.
extern "C" __global__ void __launch_bounds__(matrix::kHeadNormsThreads)
    matrix_head_norms(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass, u32 layer) {
  using namespace matrix;
  constexpr u32 kAll = kHeads + kKvHeads;
  launch_dependents();
  wait_launch_before();
  for (u32 job = blockIdx.x * kHeadNormsThreads + threadIdx.x; job < launch.row_count * kAll;
       job += gridDim.x * kHeadNormsThreads) {
    const u32 row = job / kAll, head = job % kAll;
    const float* from =
        reinterpret_cast<const float*>(launch.words + Memory::head_squares) + (u64)job * kDimTiles;
    float squares[kDimTiles];
#pragma unroll
    for (u32 j = 0; j < kDimTiles; j++) squares[j] = load_relaxed_f32(from + j);
    const float inverse = inverse_rms<kHeadWidth>(tree_sum<kDimTiles>(squares));
    if (head < kHeads) {
      reinterpret_cast<float*>(launch.words + Memory::query_inverse)[row * kHeads + head] = inverse;
    } else {
      const u32 position = launch.rows[row].position,
                page = load_constant_u32(launch.page_table + launch.rows[row].slot * launch.page_stride +
                                         position / kPage);
      page_scales(launch, layer, page, head - kHeads)[position % kPage] = inverse;
    }
  }
}
