// Matrix passes: stand-ins without anything in them, until the kernels are there.
#include "ptx/ptx.cuh"
#include "layout/shape.cuh"
#include "layout/launch.cuh"
#include "matrix/layout.cuh"

constexpr int kThreads = 384;

#define LP_PHASE(NAME)                                  \
  extern "C" __global__ void __launch_bounds__(kThreads) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32 layer) {}
LP_PHASE(matrix_embed)
LP_PHASE(matrix_norms)
LP_PHASE(matrix_qkv)
LP_PHASE(matrix_head_norms)
LP_PHASE(matrix_attend_tiles)
LP_PHASE(matrix_attend_spans)
LP_PHASE(matrix_merge_spans)
LP_PHASE(matrix_out)
LP_PHASE(matrix_gate_up)
LP_PHASE(matrix_down)
LP_PHASE(matrix_gather)
LP_PHASE(matrix_head)
LP_PHASE(matrix_qkv_split)
LP_PHASE(matrix_out_split)
LP_PHASE(matrix_down_split)

/// What the host must know of the compiled kernels: bytes of their memory; shared memory and threads of a product; most
/// samples and merged spans of a pass; tokens of a tile; shared memory of attention of tiles and of spans.
extern "C" __device__ const u64 matrix_decoder_needs[8] = {
    matrix::Memory::bytes, 0, kThreads, matrix::kMostSamples, matrix::kMostSpans, matrix::kTileTokens, 0, 0};
