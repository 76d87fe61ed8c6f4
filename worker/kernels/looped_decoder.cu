// The looped decoder: one cooperative launch walks embedding, all layers, LM head and the choice of tokens, for several
// steps.
//
//   x = bf16(h * gamma), y = (W x) / rms(h)             for qkv, gate/up and the LM head
//   h += W_o attention(q, K, V);  h += W_down bf16(silu(gate) * up)       h stays fp32 in registers of its owner
//
// A block owns whole row tiles (m16) of every product, with all of K. Its warps:
//   16 consumers   have one K leaf of every product each
//   1 producer     streams the block's weights and KV pages through rings in shared memory, on into the next layer and
//                  the next step
//   2 epilogue     add the leaves in the product's order and publish the result as data-as-flag words to all blocks
//
// Exchanges of a layer (narrow/words.cuh says when a word may be written again):
//   attention_x     residual -> qkv        all blocks
//   qkv             q, k, v -> attention   blocks of a KV head
//   page            leaves -> merge        blocks of a row's items
//   attention_out   merge -> o             all blocks
//   mlp_x           residual -> gate/up    all blocks
//   activation      -> down                all blocks
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
#include "narrow/turns.cuh"
#include "narrow/steps.cuh"
#include "narrow/product.cuh"
#include "narrow/attention_items.cuh"
#include "narrow/attention_leaf.cuh"
#include "narrow/attention_tiles.cuh"
#include "narrow/attention.cuh"
#include "narrow/epilogue.cuh"
#include "narrow/phases.cuh"

namespace narrow {

/// Steps to run, as far as it is known: a stop that step s saw ends the launch after step s + 1.
LP_DEVICE u32 last_step(u32 shared) { return load_shared_u32(shared + Shared::last_step); }

/// An exchange's words queue behind the bytes in flight. So the stream keeps fewer bytes in flight where it has time:
/// rings then take turns, in groups (narrow/ring.cuh). That is so
/// - in a group of ranks where q, k, v and o of the fullest block fill the rings to within a chunk each: for all that
///   the rings take while the block waits for the sums of down, attention and the sums of o. That is q, k, v, o and the
///   first chunks of gate and up. If q, k, v and o were smaller, there would be room for more of gate and up, which
///   would then be late; larger ones do not fit. If gate and up fill less than two rings, their first chunks are most
///   of them, and late, too.
/// - where o does not fit into the rings: for o, while the block waits for attention, three exchanges in a row.
constexpr u64 kRingBytes = kRings * Shared::slots * kSlotBytes,
              kAttentionBytes =
                  fullest_block<Qkv::together>(Qkv::tiles).qkv * Qkv::runs * Qkv::run +
                  O::most_tiles * O::runs * O::run;
constexpr u64 kGateUpBytes = (u64)GateUp::most_tiles * GateUp::runs * GateUp::run;
#ifdef LP_PACED
constexpr bool kAttentionFills = true;  // shapes that are too small for it
#else
constexpr bool kAttentionFills = kRanks > 1 && kAttentionBytes <= kRingBytes &&
                                 kAttentionBytes + kRings * kSlotBytes > kRingBytes && kGateUpBytes >= 2 * kRingBytes;
#endif
constexpr u32 kOutGroups = kAttentionFills ? 4 : O::bytes / kBlocks > kRingBytes ? 2 : 1;
constexpr u32 kQkvGroups = kAttentionFills ? 4 : 1, kGateUpGroups = kAttentionFills ? 4 : 1;

LP_DEVICE void produce(const Launch& launch, u32 shared) {
  Producer producer(launch, shared);
  for (u32 step = 0; step < last_step(shared); step++) {
    const CountedRows rows = rows_of(launch, step);
    // Rows that the host gives are not there yet. The first layer's weights go ahead of them.
    if (!is_fed(launch) && !rows.mask()) break;
    const u8* weights = launch.weights;
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++, weights += kLayerBytes) {
      reached(launch, step, kProducer, layer, 0);
      producer.look_ahead<Qkv>(weights, 1);
      producer.stream<Qkv, kQkvGroups>(weights);
      reached(launch, step, kProducer, layer, 1);
      if (layer == 0) {
        wait_sampled(launch, shared, step);
        if (is_fed(launch) && !rows.mask()) return;
        // K and V of the step before were written by ordinary stores; pages are read by bulk copies
        fence_async_global();
      }
      reached(launch, step, kProducer, layer, 2);
      producer.look_ahead<GateUp>(weights + kGateUpOffset, 0);
      stream_pages(producer, launch, rows, layer);
      reached(launch, step, kProducer, layer, 3);
      producer.stream<O, kOutGroups>(weights + kOOffset);
      reached(launch, step, kProducer, layer, 4);
      producer.stream<GateUp, kGateUpGroups, Shared::slots>(weights + kGateUpOffset);
      reached(launch, step, kProducer, layer, 5);
      producer.stream<Down>(weights + kDownOffset);
      reached(launch, step, kProducer, layer, 6);
    }
    leave_rows(shared);
    reached(launch, step, kProducer, kLayers, 0);
    if (samples(launch)) producer.stream<Head>(weights);
    reached(launch, step, kProducer, kLayers, 1);
  }
}

LP_DEVICE void consume(const Launch& launch, u32 shared, u32 warp) {
  ConsumerPhases phases(launch, shared, warp);
  for (u32 step = 0;; step++) {
    reached(launch, step, warp, kLayers, 3);
    wait_sampled(launch, shared, step);
    const CountedRows rows = rows_of(launch, step);
    const u32 active = rows.mask();
    if (step >= last_step(shared)) return;
    if (!active) {
      if (is_fed(launch)) pass_over<Qkv>(phases.consumer);
      return;
    }
#pragma unroll 1
    for (u32 layer = 0; layer <= kLayers; layer++) {
      const u32 tag = tag_of(launch, step) + layer;
      begin_turn(launch, shared, tag);
      const Place place{rows, layer, tag, active, vectors_at(shared, tag)};
      if (layer == kLayers) {
        leave_rows(shared);
        if (!samples(launch)) return;
        phases.head(place);
        break;
      }
      phases.query_key_value(place);
      phases.attend_pages(place);
      phases.merge(place);
      phases.attention_out(place);
      phases.gate_up(place);
      phases.down(place);
    }
  }
}

LP_DEVICE void finish(const Launch& launch, u32 shared, int warp) {
  Epilogue epilogue(launch, shared, warp);
  u32 token[kEpilogueColumns];
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++) {
    const int column = epilogue.column(c);
    token[c] = (u32)column < launch.row_count ? rows_of(launch, 0).rows[column].token : 0;
  }
  u32 step = 0;
  for (;; step++) {
    wait_sampled(launch, shared, step);
    const CountedRows rows = rows_of(launch, step);
    const u32 active = rows.mask();
    if (step >= last_step(shared) || !active) break;
    if (Epilogue::kSharedSets && epilogue.second() && step > 0) token[0] = load_shared_u32(shared + Shared::token);
    if (is_fed(launch))
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) token[c] = rows.rows[epilogue.column(c)].token;
    if (Epilogue::kSharedSets || !epilogue.second())
      epilogue.embed(token, active, vectors_at(shared, tag_of(launch, step)), tag_of(launch, step));
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++) {
      const u32 tag = tag_of(launch, step) + layer;
      epilogue.query_key_value(rows, layer, active, tag);
      reached(launch, step, kEpilogue + warp, layer, 0);
      pass_turn(launch, shared, tag, [&](u32 turn) { epilogue.clear(turn); });
      if (!Epilogue::kSharedSets && epilogue.second()) {
        epilogue.skip(Epilogue::sets<O>() + Epilogue::sets<GateUp>() + Epilogue::sets<Down>());
        continue;
      }
      epilogue.add_residual<O>(kToldOut, vectors_at(shared, tag) + Vectors::mlp_x, 2 * layer + 1, active, tag,
                               [&](u32 heard) { reached(launch, step, kEpilogue + warp, layer, 4 + heard); });
      reached(launch, step, kEpilogue + warp, layer, 1);
      if (Epilogue::kSharedSets && epilogue.second()) epilogue.skip(Epilogue::sets<GateUp>());
      else epilogue.gate_up(layer, active, vectors_at(shared, tag), tag);
      reached(launch, step, kEpilogue + warp, layer, 2);
      epilogue.add_residual<Down>(kToldDown, vectors_at(shared, tag + 1) + Vectors::attention_x, 2 * layer + 2, active,
                                  tag + 1,
                                  [&](u32 heard) { reached(launch, step, kEpilogue + warp, layer, 6 + heard); });
      reached(launch, step, kEpilogue + warp, layer, 3);
    }
    pass_turn(launch, shared, tag_of(launch, step) + kLayers, [&](u32 turn) { epilogue.clear(turn); });
    if (!samples(launch)) {
      step++;
      break;
    }
    // K and V of both warps lie before the token words of either: with one column one warp offers them all.
    __syncwarp();
    barrier_sync(5, kEpilogueWarps * 32);
    if (epilogue.second()) {
      epilogue.skip(Epilogue::sets<Head>());
      continue;
    }
    offer_tokens(launch, epilogue, step);
    // Of several ranks a launch ends when all have written their logits, which they say with their tokens.
    const bool undrawn = launch.flags & kLaunchUndrawn,
               stopped = (kRanks > 1 || !undrawn) && choose_tokens<kBlocks>(launch, epilogue, step, active, token);
    if (kRanks > 1 && undrawn) note_stop(launch, epilogue, stopped);
    if (warp == 0 && lane_index() == 0 && stopped && step + 2 < last_step(shared)) {
      store_shared_u32(shared + Shared::last_step, step + 2);
      if (rank_block() == 0) store_system_u32(launch.control + 1, step + 2);
    }
    if (warp == 0) {
      wait_left(launch, shared, step);
      __syncwarp();
      if (is_fed(launch) && step + 1 < last_step(shared)) take_rows(launch, shared, step + 1, tag_of(launch, step + 1));
      rows_of(launch, step + 1).count_items();
    }
    if (Epilogue::kSharedSets && lane_index() == 0) store_shared_u32(shared + Shared::token, token[0]);
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(shared + Shared::sampled);
  }
  if (threadIdx.x == kEpilogue * 32) {
    u8* steps = launch.words + Words::steps + rank_block() * 4;
    store_relaxed_u32(steps, load_relaxed_u32(steps) + step);
    if (rank_block() == 0 && !(launch.flags & kLaunchUndrawn)) store_system_u32(launch.control + 1, step);
  }
}

/// What the host must know of the compiled kernel: bytes of shared memory, threads, bytes of exchange words without
/// pages, bytes of words an item, bytes of words to zero before a launch, pages of an item, bytes of the inbox.
extern "C" __device__ const u64 looped_decoder_needs[8] = {
    Shared::bytes, kThreads, Words::page, Words::page_bytes, 0, 1, kRanks > 1 ? Inbox::bytes : 0, 0};

/// What a launch is given of each rank that it has.
struct Launches {
  Launch of_rank[kRanksHere];
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) looped_decoder(const __grid_constant__ Launches launches) {
  const Launch& launch = launches.of_rank[kRanksHere == 1 ? 0 : blockIdx.x / kBlocks];
  if (launch.stopped && *launch.stopped) return;
  const u32 shared = shared_address(shared_memory);
  const int warp = threadIdx.x >> 5;
  poison(shared_memory, Shared::bytes);
  for (u32 i = threadIdx.x; i < launch.row_count * (sizeof(Row) / 4); i += kThreads)
    reinterpret_cast<u32*>(shared_memory + Shared::rows)[i] = reinterpret_cast<const u32*>(launch.rows)[i];
  if (threadIdx.x == 0) {
    begin_block(shared);
    begin_steps(shared, kWarps + 1);
    begin_turns(shared);
    store_shared_u32(shared + Shared::last_step, launch.steps);
    store_shared_u32(shared + Shared::turns_before,
                     load_relaxed_u32(launch.words + Words::steps + rank_block() * 4) * (kLayers + 1) - launch.epoch);
    fence_mbarrier_init();
  }
  if (kRanks > 1 && warp == 1) await_ranks(launch, launch.epoch);
  __syncthreads();
  if (warp == 0) rows_of(launch, 0).count_items();
  __syncthreads();
  if (threadIdx.x == 0) note_time(launch, kProducer, 0);
  if (warp < kWarps) {
    consume(launch, shared, warp);
    if (threadIdx.x == 0) note_time(launch, kProducer, 1);
  } else if (warp == kProducer) {
    produce(launch, shared);
  } else finish(launch, shared, warp - kEpilogue);
}

}  // namespace narrow
