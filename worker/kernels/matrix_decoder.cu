// The decoder for passes of many rows: a launch runs one phase of one layer (matrix/layout.cuh), the same arithmetic as
// looped_decoder.cu bit by bit.
//
// A launch may begin while the one before it ends (programmatic dependent launch). Until it has waited for that one it
// reads nothing but weights and what no launch of the pass writes (attend_spans.cuh), and writes nothing.
#include "ptx/ptx.cuh"
#include "ptx/wgmma.cuh"
#include "layout/shape.cuh"
#include "layout/launch.cuh"
#include "layout/page.cuh"
#include "matrix/layout.cuh"
#include "sync/wait.cuh"
#include "sync/reached.cuh"
#include "ops/ranks.cuh"
#include "ops/tree_sum.cuh"
#include "ops/best.cuh"
#include "ops/softmax.cuh"
#include "ops/values.cuh"
#include "ops/weights.cuh"
#include "matrix/product.cuh"
#include "matrix/epilogue.cuh"
#include "matrix/vectors.cuh"
#include "matrix/choice.cuh"
#include "matrix/ranks.cuh"
#include "matrix/attend_tiles.cuh"
#include "matrix/attend_spans.cuh"
#include "matrix/attend.cuh"
#include "matrix/head_norms.cuh"

using matrix::Cut;
using matrix::kFinished;
using matrix::Memory;
using matrix::Tiles;

/// {bytes of memory, shared bytes and threads of a product, rows that sample and spans that are merged at most, tokens
/// of half a tile, shared bytes of attend_tiles and of attend_spans, blocks of a launch at most, sets of warps of a
/// block of attend_spans}
extern "C" __device__ const u64 matrix_decoder_needs[10] = {
    Memory::bytes, matrix::kProductBytes, matrix::kThreads, matrix::kMostSamples, matrix::kMostSpans,
    matrix::kTileTokens, matrix::kAttendShared, matrix::kAttendSpansShared, matrix::kMostBlocks,
    matrix::kSpanSets};

/// Of an exchange that copy engines carry (ranks.cuh), from the begin of words on: {x, bytes of x of a block of tokens,
/// sums, those that go out, bytes of a part of them and of a run of a part, tokens of a block and of a run; behind o
/// and behind down: the words of its meets for sums and for x, parts}
extern "C" __device__ const u64 matrix_decoder_carried[14] = {
    Memory::x, (u64)kHiddenTiles * matrix::kStepBytes, Memory::partial, Memory::outgoing, Memory::part_bytes,
    matrix::kRowGroups * Memory::run_bytes, matrix::kTokens, matrix::kRunTokens,
    matrix::meet_byte(matrix::kMeetOut), matrix::meet_byte(matrix::kMeetOutJoined), O::told,
    matrix::meet_byte(matrix::kMeetDown), matrix::meet_byte(matrix::kMeetDownJoined), Down::told};

#define LP_VECTORS(NAME) \
  extern "C" __global__ void __launch_bounds__(matrix::kVectorThreads) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32 layer)
#define LP_PRODUCT(NAME) \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(matrix::kThreads, 1) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass pass, u32 layer)

template <Cut CUT> LP_DEVICE void qkv(const Launch& launch, const matrix::Pass& pass, u32 layer) {
  matrix::multiply<Qkv, CUT>(launch.weights + layer * kLayerBytes, pass.tiles + Tiles::qkv, launch.words, Memory::x,
                             pass.blocks, matrix::Project<kFinished<CUT>>{launch, layer});
}
/// A product that is added to the residual, whose next norm is `norm`.
template <class P, Cut CUT> LP_DEVICE void add(const Launch& launch, const matrix::Pass& pass, const u8* weights,
                                               const u32* tiles, u64 vectors, u32 norm) {
  if constexpr (kRanks == 1)
    matrix::multiply<P, CUT>(weights, tiles, launch.words, vectors, pass.blocks,
                             matrix::Join<kFinished<CUT>>{launch, norm});
  else {
    matrix::multiply<P, CUT>(weights, tiles, launch.words, vectors, pass.blocks, matrix::Tell<P>{launch, pass});
    bulk_wait();
    fence_system();  // matrix/ranks.cuh
  }
}
template <Cut CUT> LP_DEVICE void out(const Launch& launch, const matrix::Pass& pass, u32 layer) {
  add<O, CUT>(launch, pass, launch.weights + layer * kLayerBytes + kOOffset, pass.tiles + Tiles::out,
              Memory::attention_out, 2 * layer + 1);
}
template <Cut CUT> LP_DEVICE void down(const Launch& launch, const matrix::Pass& pass, u32 layer) {
  add<Down, CUT>(launch, pass, launch.weights + layer * kLayerBytes + kDownOffset, pass.tiles + Tiles::down,
                 Memory::activation, 2 * layer + 2);
}
template <class E> LP_DEVICE void head(const Launch& launch, const matrix::Pass& pass, const E& epilogue) {
  matrix::multiply<Head, Cut::kPair>(launch.weights + kHeadOffset, pass.tiles + Tiles::head, launch.words,
                                     Memory::head_x, ~0u >> (32 - matrix::token_blocks(pass.sample_count)), epilogue);
}

LP_VECTORS(matrix_embed) {
  launch_dependents();
  wait_launch_before();
  hold_up();
  matrix::embed(launch);
}
LP_VECTORS(matrix_norms) {
  launch_dependents();
  // Who has no tokens leaves at once, and the next launch can fetch weights there. The others wait.
  if (blockIdx.x >= matrix::norm_runs(launch)) return;
  wait_launch_before();
  hold_up();
  matrix::find_norms(launch, pass);
}
LP_PRODUCT(matrix_qkv) { qkv<Cut::kPair>(launch, pass, layer); }
LP_PRODUCT(matrix_out) { out<Cut::kPair>(launch, pass, layer); }
LP_PRODUCT(matrix_gate_up) {
  matrix::multiply<GateUp, Cut::kPair>(launch.weights + layer * kLayerBytes + kGateUpOffset,
                                       pass.tiles + Tiles::gate_up, launch.words, Memory::x, pass.blocks,
                                       matrix::Activate{launch, layer});
}
LP_PRODUCT(matrix_down) { down<Cut::kPair>(launch, pass, layer); }
LP_VECTORS(matrix_gather) {
  launch_dependents();
  wait_launch_before();
  hold_up();
  matrix::gather(launch, pass);
}
LP_PRODUCT(matrix_head) { head(launch, pass, matrix::Logits{{launch, pass}}); }
LP_PRODUCT(matrix_head_choose) { head(launch, pass, matrix::Choose{{launch, pass}}); }
LP_VECTORS(matrix_choose) {
  launch_dependents();
  wait_launch_before();
  hold_up();
  matrix::choose(launch, pass);
}

// The same by teams of four blocks and of eight, which share K. Not for products of fewer than four leaves.
#define LP_CUT(NAME, PRODUCT, WORK)                                                                \
  LP_PRODUCT(NAME##_halves) {                                                                      \
    if constexpr (matrix::kInQuads<PRODUCT>) WORK<Cut::kHalves>(launch, pass, layer); else trap(); \
  }                                                                                                \
  LP_PRODUCT(NAME##_quads) {                                                                       \
    if constexpr (matrix::kInQuads<PRODUCT>) WORK<Cut::kQuads>(launch, pass, layer); else trap();  \
  }
LP_CUT(matrix_qkv, Qkv, qkv)
LP_CUT(matrix_out, O, out)
LP_CUT(matrix_down, Down, down)

// Of several ranks (matrix/ranks.cuh).
#define LP_MEET(NAME, MEET) \
  extern "C" __global__ void __launch_bounds__(matrix::kMeetThreads) \
      NAME(const __grid_constant__ Launch launch, const __grid_constant__ matrix::Pass, u32 layer) { \
    wait_launch_before(); \
    hold_up(); \
    if constexpr (kRanks > 1) matrix::meet<MEET>(launch, layer); else trap(); \
  }
LP_MEET(matrix_meet_begun, matrix::kMeetBegun)
LP_MEET(matrix_meet_embedded, matrix::kMeetEmbedded)
LP_MEET(matrix_meet_logits, matrix::kMeetLogits)
LP_VECTORS(matrix_tell_embeddings) {
  launch_dependents();
  wait_launch_before();
  hold_up();
  if constexpr (kRanks > 1) matrix::tell_embeddings(launch); else trap();
}
#define LP_JOIN(NAME, MEET, PRODUCT, NORM)                                \
  LP_VECTORS(NAME) {                                                      \
    wait_launch_before();                                                 \
    hold_up();                                                            \
    if constexpr (kRanks > 1) {                                           \
      matrix::meet<MEET>(launch, layer, pass.carried > 0);                \
      launch_dependents();                                                \
      matrix::join<PRODUCT>(launch, pass, NORM);                          \
    } else trap();                                                        \
  }
LP_JOIN(matrix_join_out, matrix::kMeetOut, O, 2 * layer + 1)
LP_JOIN(matrix_join_down, matrix::kMeetDown, Down, 2 * layer + 2)
// The next launch begins only once this one has waited: of two passes in turns attention of the second, which reads
// early, must find what qkv of the first has written (attend_spans.cuh).
#define LP_NORMS_OF_JOINED(NAME, MEET)                                    \
  LP_VECTORS(NAME) {                                                      \
    if (blockIdx.x >= matrix::norm_runs(launch)) return;                  \
    wait_launch_before();                                                 \
    hold_up();                                                            \
    if constexpr (kRanks > 1) {                                           \
      matrix::meet<MEET>(launch, layer, pass.carried > 0);                \
      launch_dependents();                                                \
      matrix::find_norms(launch, pass);                                   \
    } else trap();                                                        \
  }
LP_NORMS_OF_JOINED(matrix_norms_of_joined_out, matrix::kMeetOutJoined)
LP_NORMS_OF_JOINED(matrix_norms_of_joined_down, matrix::kMeetDownJoined)
