// The looped decoder without the loop: a launch runs one phase of one layer, to measure what the loop is worth. The
// same device functions, the same bits.
//
// A step is a chain of launches that is captured once as a CUDA graph:
//   embed | layers x (query_key_value, attend, merge, attention_out, gate_up, down) | head, choose
// What blocks exchange was written by the launch before, so words are found at the first look, and blocks need not run
// at the same time; only what ranks tell each other is told and heard in one launch. What the loop keeps on the chip
// between phases lies in memory: the residual, the tokens, the step (Pass).
//
// A launch may begin while the one before it ends (programmatic dependent launch). Until it has waited for that one it
// reads nothing but weights.
#include "ptx/ptx.cuh"
#include "layout/shape.cuh"
#include "layout/page.cuh"
#include "layout/launch.cuh"
#include "layout/rows.cuh"
#include "layout/inbox.cuh"
#include "sync/wait.cuh"
#include "sync/reached.cuh"
#include "ops/ranks.cuh"
#include "sync/start.cuh"
#include "ops/tree_sum.cuh"
#include "ops/values.cuh"
#include "ops/weights.cuh"
#include "ops/best.cuh"
#include "ops/softmax.cuh"
#include "narrow/words.cuh"
#include "narrow/inbox.cuh"
#include "narrow/shared_memory.cuh"
#include "narrow/ring.cuh"
#include "narrow/product.cuh"
#include "narrow/attention_items.cuh"
#include "narrow/attention_leaf.cuh"
#include "narrow/attention_tiles.cuh"
#include "narrow/attention.cuh"
#include "narrow/epilogue.cuh"
#include "narrow/phases.cuh"

namespace narrow {

/// What changes from step to step, which a captured launch cannot carry in its parameters; and the state between
/// launches.
struct Pass {
  u64* tokens;
  u32 row_count, epoch, flags, step;
  // The set of vectors that all layers use: the one that was used last, which the loop's next launch clears before it
  // uses it. Here nobody waits for a word, so none must be cleared.
  u32 vectors;
  u32 token[kColumns];  // to embed
  Row rows[kColumns];
  float residual[kColumns][kHidden];
};

/// In the order of worker/src/cuda/notes/trace.rs.
enum class Phase { kEmbed, kQueryKeyValue, kAttend, kMerge, kAttentionOut, kGateUp, kDown, kHead, kChoose, kCount };

/// Products of a layer: their weights stream before the launch before has ended.
constexpr bool streams_ahead(Phase phase) {
  return phase == Phase::kQueryKeyValue || phase == Phase::kAttentionOut || phase == Phase::kGateUp ||
         phase == Phase::kDown;
}

template <Phase PHASE> LP_DEVICE void produce(const Launch& launch, u32 shared, const Place& place) {
  Producer producer(launch, shared);
  const u8* weights = launch.weights + (u64)place.layer * kLayerBytes;
  if constexpr (PHASE == Phase::kQueryKeyValue) producer.stream<Qkv>(weights);
  if constexpr (PHASE == Phase::kAttend) {
    fence_async_global();  // K and V of earlier steps were written by ordinary stores; pages are read by bulk copies
    stream_pages(producer, launch, place.rows, place.layer);
  }
  if constexpr (PHASE == Phase::kAttentionOut) producer.stream<O>(weights + kOOffset);
  if constexpr (PHASE == Phase::kGateUp) producer.stream<GateUp>(weights + kGateUpOffset);
  if constexpr (PHASE == Phase::kDown) producer.stream<Down>(weights + kDownOffset);
  if constexpr (PHASE == Phase::kHead) producer.stream<Head>(weights);
}

template <Phase PHASE> LP_DEVICE void consume(const Launch& launch, u32 shared, u32 warp, const Place& place) {
  ConsumerPhases phases(launch, shared, warp);
  if constexpr (PHASE == Phase::kQueryKeyValue) phases.query_key_value(place);
  if constexpr (PHASE == Phase::kAttend) phases.attend_pages(place);
  if constexpr (PHASE == Phase::kMerge) phases.merge(place);
  if constexpr (PHASE == Phase::kAttentionOut) phases.attention_out(place);
  if constexpr (PHASE == Phase::kGateUp) phases.gate_up(place);
  if constexpr (PHASE == Phase::kDown) phases.down(place);
  if constexpr (PHASE == Phase::kHead) phases.head(place);
}

/// The block's part of the residual: registers of the epilogue in the loop.
template <class F> LP_DEVICE void each_residual(Epilogue& epilogue, Pass& pass, F&& f) {
  const int first = O::first_tile(rank_block()), end = O::first_tile(rank_block() + 1);
#pragma unroll
  for (int s = 0; s < Epilogue::kSets; s++) {
    if (!epilogue.mine(s)) continue;
    const int tile = first + 2 * s + Epilogue::half();
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++)
      if (tile < end) f(epilogue.hidden(s)[c], pass.residual[epilogue.column(c)][tile * 16 + Epilogue::row()]);
  }
}

template <Phase PHASE> LP_DEVICE void finish(const Launch& launch, u32 shared, int warp, const Place& place,
                                             Pass& pass) {
  constexpr bool residual = PHASE == Phase::kAttentionOut || PHASE == Phase::kDown;
  const u32 active = place.active, layer = place.layer, vectors = place.vectors;
  Epilogue epilogue(launch, shared, warp);
  if constexpr (PHASE == Phase::kQueryKeyValue) epilogue.query_key_value(place.rows, layer, active, place.tag);
  if (epilogue.second() && !(Epilogue::kSharedSets && (residual || PHASE == Phase::kEmbed))) {
    if constexpr (residual) epilogue.skip(Epilogue::sets<O>());
    if constexpr (PHASE == Phase::kGateUp) epilogue.skip(Epilogue::sets<GateUp>());
    if constexpr (PHASE == Phase::kHead) epilogue.skip(Epilogue::sets<Head>());
    return;
  }
  u32 token[kEpilogueColumns];
  if constexpr (PHASE == Phase::kEmbed) {
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) token[c] = pass.token[epilogue.column(c)];
    epilogue.embed(token, active, vectors, place.tag);
  }
  if constexpr (residual) each_residual(epilogue, pass, [](float& here, float there) { here = there; });
  if constexpr (PHASE == Phase::kAttentionOut)
    epilogue.add_residual<O>(kToldOut, vectors + Vectors::mlp_x, 2 * layer + 1, active, place.tag);
  if constexpr (PHASE == Phase::kGateUp) epilogue.gate_up(layer, active, vectors, place.tag);
  if constexpr (PHASE == Phase::kDown)
    epilogue.add_residual<Down>(kToldDown, vectors + Vectors::attention_x, 2 * layer + 2, active, place.tag + 1);
  if constexpr (residual || PHASE == Phase::kEmbed)
    each_residual(epilogue, pass, [](float here, float& there) { there = here; });
  if constexpr (PHASE == Phase::kHead) offer_tokens(launch, epilogue, place.rows.step);
  if constexpr (PHASE == Phase::kChoose) {
    const bool undrawn = launch.flags & kLaunchUndrawn,
               stopped = choose_tokens<1>(launch, epilogue, place.rows.step, active, token);
    if (kRanks > 1 && undrawn) note_stop(launch, epilogue, stopped);
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++)
      if ((threadIdx.x & 31) == 0) pass.token[epilogue.column(c)] = token[c];
  }
}

/// With LP_TRACE, of the last two steps in turns: when the last block ended a phase. Launch::trace is
/// [2][layer][phase].
LP_DEVICE void ended(const Launch& launch, u32 step, u32 layer, Phase phase) {
#ifdef LP_TRACE
  if ((threadIdx.x & 31) == 0)
    atomicMax((u64*)launch.trace + ((step & 1) * (kLayers + 1) + layer) * (u32)Phase::kCount + (u32)phase,
              global_nanoseconds());
#endif
}

template <Phase PHASE> LP_DEVICE void run(const Launch& captured, Pass& pass, u32 layer) {
  constexpr bool ahead = streams_ahead(PHASE);
  const u32 shared = shared_address(shared_memory), warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    begin_block(shared);
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  if (ahead && warp == kProducer) {
    produce<PHASE>(captured, shared, Place{{}, layer, 0, 0, 0});
    return;
  }
  wait_launch_before();
  static_assert(sizeof(pass.rows) / 4 <= kWarps * 32, "the consumers copy the rows");
  if (threadIdx.x < sizeof(pass.rows) / 4)
    reinterpret_cast<u32*>(shared_memory + Shared::rows)[threadIdx.x] =
        reinterpret_cast<const u32*>(pass.rows)[threadIdx.x];
  Launch launch = captured;
  launch.row_count = pass.row_count, launch.epoch = pass.epoch, launch.flags = pass.flags, launch.tokens = pass.tokens;
  launch.steps = 0;
  const u32 step = pass.step;
  barrier_sync(5, ahead ? kThreads - 32 : kThreads);
  const CountedRows rows = rows_of(launch, step);
  if constexpr (PHASE == Phase::kAttend || PHASE == Phase::kMerge) {
    if (warp == 0) rows.count_items();
    __syncthreads();
  }
  const Place place{rows, layer, tag_of(launch, step) + layer, rows.mask(), pass.vectors};
  if ((PHASE == Phase::kHead || PHASE == Phase::kChoose) && !samples(launch)) return;
  // Ranks of a group go on: here they tell each other that all have written their logits.
  if (PHASE == Phase::kChoose && kRanks == 1 && launch.flags & kLaunchUndrawn) return;
  if (warp < kWarps) consume<PHASE>(launch, shared, warp, place);
  else if (warp == kProducer) produce<PHASE>(launch, shared, place);
  else finish<PHASE>(launch, shared, warp - kEpilogue, place, pass);
  ended(launch, step, layer, PHASE);
  if constexpr (PHASE == Phase::kChoose) {
    __syncthreads();
    if (threadIdx.x == 0) pass.step = step + 1;
  }
}

/// Before the steps of a run: what they are to compute.
extern "C" __global__ void begin(const __grid_constant__ Launch launch, Pass* pass) {
  if (kRanks > 1 && threadIdx.x < 32) await_ranks(launch, launch.epoch);
  for (u32 i = threadIdx.x; i < launch.row_count * (sizeof(Row) / 4); i += blockDim.x)
    reinterpret_cast<u32*>(pass->rows)[i] = reinterpret_cast<const u32*>(launch.rows)[i];
  if (threadIdx.x < kColumns)
    pass->token[threadIdx.x] = threadIdx.x < launch.row_count ? launch.rows[threadIdx.x].token : 0;
  if (threadIdx.x > 0) return;
  pass->tokens = launch.tokens;
  pass->row_count = launch.row_count, pass->epoch = launch.epoch, pass->flags = launch.flags, pass->step = 0;
  pass->vectors = vectors_of(load_relaxed_u32(launch.words + Words::steps) * (kLayers + 1) - 1);
}

#define LP_LAUNCH(NAME, PHASE) \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) \
      NAME(const __grid_constant__ Launch launch, Pass* pass, u32 layer) { \
    run<PHASE>(launch, *pass, layer); \
  }
LP_LAUNCH(embed, Phase::kEmbed)
LP_LAUNCH(query_key_value, Phase::kQueryKeyValue)
LP_LAUNCH(attend_pages, Phase::kAttend)
LP_LAUNCH(merge, Phase::kMerge)
LP_LAUNCH(attention_out, Phase::kAttentionOut)
LP_LAUNCH(gate_up, Phase::kGateUp)
LP_LAUNCH(down, Phase::kDown)
LP_LAUNCH(head, Phase::kHead)
LP_LAUNCH(choose, Phase::kChoose)

/// As in looped_decoder.cu.
extern "C" __device__ const u64 unlooped_decoder_needs[8] = {
    Shared::bytes, kThreads, Words::page, Words::page_bytes, 0, 1, kRanks > 1 ? Inbox::bytes : 0, 0};
extern "C" __device__ const u64 pass_bytes = sizeof(Pass);

}  // namespace narrow
