// The decoder for passes of many rows: a launch runs one phase of one layer (matrix/layout.cuh), the same arithmetic as
// looped_decoder.cu bit by bit.
//
// A launch may begin while the one before it ends (programmatic dependent launch). Until it has waited for that one it
// reads nothing but weights, and writes nothing.
#include "ptx/ptx.cuh"
#include "ptx/wgmma.cuh"
#include "layout/shape.cuh"
#include "layout/launch.cuh"
#include "layout/page.cuh"
#include "matrix/layout.cuh"
#include "ops/tree_sum.cuh"
#include "ops/values.cuh"
#include "matrix/product.cuh"
#include "matrix/epilogue.cuh"
#include "matrix/vectors.cuh"

using matrix::Memory;
using matrix::Tiles;

/// {bytes of memory, shared bytes and threads of a product, rows that sample and spans that are merged at most, tokens
/// of an item of attend_tiles, shared bytes of attend_tiles and of attend_spans}
extern "C" __device__ const u64 matrix_decoder_needs[8] = {
    Memory::bytes, matrix::kProductBytes, matrix::kThreads, matrix::kMostSamples, matrix::kMostSpans,
    matrix::kTileTokens, 0, 0};

#define LP_VECTORS(NAME) \
  extern "C" __global__ void __launch_bounds__(matrix::kVectorThreads) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32 layer)
#define LP_PRODUCT(NAME) \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(matrix::kThreads, 1) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32 layer)

LP_VECTORS(matrix_embed) {
  launch_dependents();
  wait_launch_before();
  matrix::embed(launch);
}
LP_VECTORS(matrix_norms) {
  launch_dependents();
  wait_launch_before();
  matrix::find_norms(launch);
}
LP_PRODUCT(matrix_qkv) {
  matrix::multiply<Qkv>(launch.weights + layer * kLayerBytes, pass.tiles + Tiles::qkv, launch.words + Memory::x,
                        matrix::token_blocks(launch.row_count), matrix::Project{launch, layer});
}
LP_PRODUCT(matrix_out) {
  matrix::multiply<O>(launch.weights + layer * kLayerBytes + kOOffset, pass.tiles + Tiles::out,
                      launch.words + Memory::attention_out, matrix::token_blocks(launch.row_count),
                      matrix::Join{launch, 2 * layer + 1});
}
LP_PRODUCT(matrix_gate_up) {
  matrix::multiply<GateUp>(launch.weights + layer * kLayerBytes + kGateUpOffset, pass.tiles + Tiles::gate_up,
                           launch.words + Memory::x, matrix::token_blocks(launch.row_count), matrix::Activate{launch});
}
LP_PRODUCT(matrix_down) {
  matrix::multiply<Down>(launch.weights + layer * kLayerBytes + kDownOffset, pass.tiles + Tiles::down,
                         launch.words + Memory::activation, matrix::token_blocks(launch.row_count),
                         matrix::Join{launch, 2 * layer + 2});
}
LP_VECTORS(matrix_gather) {
  launch_dependents();
  wait_launch_before();
  matrix::gather(launch, pass);
}
LP_PRODUCT(matrix_head) {
  matrix::multiply<Head>(launch.weights + kHeadOffset, pass.tiles + Tiles::head, launch.words + Memory::head_x,
                         matrix::token_blocks(pass.sample_count), matrix::Logits{launch, pass});
}
