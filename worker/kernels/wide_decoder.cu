// The looped decoder for wide passes: 32 or 64 rows, several steps a launch. The same arithmetic as looped_decoder.cu,
// with the same weights, KV pool and launches, bit by bit; what differs is who does what (wide/geometry.cuh).
//
// Clusters of two blocks. Eight consumer warps (two warpgroups) do products, attention and what follows them; two warps
// stream weights and pages, one fetches activations, one finds norms. Exchanges of a layer (wide/exchange.cuh), q, k and
// v as words, the others each a counter that its readers wait for:
//   attention_x    residual -> qkv         a leaf of K        mlp_x          residual -> gate/up, a leaf of K
//   qkv            qkv -> attention        words              activation     silu -> down     a leaf of K
//   attention_out  attention -> o          all blocks
#include "ptx/ptx.cuh"
#include "ptx/wgmma.cuh"
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
#include "wide/geometry.cuh"
#include "wide/stream.cuh"
#include "wide/product.cuh"
#include "wide/exchange.cuh"
#include "wide/ranks.cuh"
#include "wide/attention_items.cuh"
#include "wide/attention_share.cuh"
#include "wide/attention.cuh"
#include "wide/epilogue.cuh"
#include "wide/head.cuh"

namespace wide {

extern __shared__ __align__(1024) u8 shared_memory[];

LP_DEVICE Rows rows_of(const Launch& launch, u32 step) {
  return Rows{reinterpret_cast<const Row*>(shared_memory + Shared::rows), launch.row_count, step};
}
LP_DEVICE bool samples(const Launch& launch) {
  for (u32 r = 0; r < launch.row_count; r++)
    if (launch.rows[r].flags & kRowSample) return true;
  return false;
}
/// Steps until every row idles, at most as many as the host asks for.
LP_DEVICE u32 steps_of(const Launch& launch) {
  u32 steps = launch.steps ? 1 : 0;
  for (u32 r = 0; launch.steps > 1 && r < launch.row_count; r++) {
    const u32 left = launch.rows[r].last_position - launch.rows[r].position;
    if (launch.rows[r].last_position > launch.rows[r].position && left >= steps)
      steps = left < launch.steps ? left + 1 : launch.steps;
  }
  return steps < launch.steps ? steps : launch.steps;
}
/// Generation of the residual's exchange: it is published once more in a step than all else, for the LM head.
LP_DEVICE u32 x_generation(u32 step, u32 layer) { return step * (kLayers + 1) + layer + 1; }
/// Uses of the receive buffer before this layer's.
LP_DEVICE u32 receive_use(u32 step, u32 layer) { return (generation_of(step, layer) - 1) * Receive::kLayerUses; }
/// Steps to run, as far as it is known: a stop that step s saw ends the launch after step s + 1.
LP_DEVICE u32 last_step(u32 shared) { return load_shared_u32(shared + Shared::last_step); }
/// Whether a row of this launch samples.
LP_DEVICE bool sampling(u32 shared) { return load_shared_u32(shared + Shared::sampling); }
/// Waits until the tokens of the step before are known. Orders K and V of that step and a stop before this step (grid).
LP_DEVICE void wait_sampled(const Launch& launch, u32 shared, u32 step) {
  if (step > 0) wait_barrier(launch, shared + Shared::sampled, (step - 1) & 1, kSiteToken);
  __syncwarp();
}

/// A layer's two parts. Each ends with a product that is added to the residual, o or down. The warps that stream have
/// one copy of the code for both, because code that runs once a layer comes from far away; the consumers, whose copy
/// would spill, have two.
constexpr u32 kAttention = 0;  // 1: MLP

LP_DEVICE void produce(const Launch& launch, u32 shared, u32 warp) {
  Producer producer(launch, shared, warp);
  for (u32 step = 0; step < last_step(shared); step++) {
    const Rows rows = rows_of(launch, step);
    const u8* weights = launch.weights;
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++, weights += kLayerBytes) {
#pragma unroll 1
      for (u32 part = 0; part < 2; part++) {
        reached(launch, step, warp, layer, 2 * part);
        const int passes = part == kAttention ? 1 : GateUpOwn::passes();  // before the part's last product
#pragma unroll 1
        for (int pass = 0; pass <= passes; pass++) {
          Part stages;
          if (pass == passes)
            stages = part == kAttention ? Producer::part<OCut>(weights + kOOffset)
                                        : Producer::part<DownCut>(weights + kDownOffset);
          else if (part == kAttention) stages = Producer::part<QkvCut>(weights);
          else stages = Producer::own_part<GateUpOwn>(weights + kGateUpOffset, pass);
          producer.stream(stages);
          if (part != kAttention || pass == passes) continue;
          if (layer == 0) {
            wait_sampled(launch, shared, step);
            // K and V of the step before were written by ordinary stores; pages are read by bulk copies
            fence_async_global();
          }
          reached(launch, step, warp, layer, 1);
          stream_attention(producer, rows, layer);
        }
      }
      reached(launch, step, warp, layer, 3);
    }
    if (!sampling(shared)) return;
    reached(launch, step, warp, kLayers, 0);
#pragma unroll 1
    for (int pass = 0; pass < HeadOwn::passes(); pass++) producer.stream(Producer::own_part<HeadOwn>(weights, pass));
    reached(launch, step, warp, kLayers, 1);
  }
}

LP_DEVICE void fetch(const Launch& launch, u32 shared) {
  Input input(launch, shared);
  for (u32 step = 0;; step++) {
    wait_sampled(launch, shared, step);
    if (step >= last_step(shared)) return;
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++) {
      const u32 generation = generation_of(step, layer);
      reached(launch, step, kInput, layer, 0);
      input.stream<QkvCut>(Words::attention_x, Words::x_ready, Qkv::leaves, x_generation(step, layer) * kLeafTiles,
                           kSiteAttentionX);
      input.stream<OCut>(Words::attention_out, Words::outputs_ready, 1, generation * kBlocks, kSiteAttentionOut);
      reached(launch, step, kInput, layer, 1);
      input.stream_own<GateUpOwn>(Words::mlp_x, Words::mlp_x_ready, generation * kLeafTiles, kSiteMlpX);
      input.stream<DownCut>(Words::activation, Words::activation_ready, Down::leaves, generation * kActivationTiles,
                            kSiteActivation);
      reached(launch, step, kInput, layer, 2);
    }
    if (!sampling(shared)) return;
    reached(launch, step, kInput, kLayers, 0);
    input.stream_own<HeadOwn>(Words::attention_x, Words::x_ready, x_generation(step, kLayers) * kLeafTiles,
                              kSiteHeadX);
    reached(launch, step, kInput, kLayers, 1);
  }
}

LP_DEVICE void find_norms(const Launch& launch, u32 shared) {
  for (u32 step = 0;; step++) {
    wait_sampled(launch, shared, step);
    if (step >= last_step(shared)) return;
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++) {
      const u32 tag = tag_of(launch, step, layer);
      reached(launch, step, kNorms, layer, 0);
#pragma unroll 1
      for (u32 part = 0; part < 2; part++)
        find_norm(launch, shared, part,
                  (part == kAttention ? x_generation(step, layer) : generation_of(step, layer)) * kLeafTiles, tag);
    }
    if (!sampling(shared)) return;
    // Does the host want the launch to end? Its memory is far: asked for while down is computed.
    if (rank_block() == 0 && lane_index() == 0)
      store_relaxed_u32(launch.words + Words::stop, load_system_u32(launch.control));
    find_norm(launch, shared, 0, x_generation(step, kLayers) * kLeafTiles, tag_of(launch, step, kLayers));
  }
}

/// The consumer warps' walk. What depends on a warp's tile is asked of any_lane: its lanes agree, but movmatrix or a
/// shuffle under a condition that the compiler cannot tell to be uniform costs the products their uniform registers.
struct Team {
  const Launch& launch;
  const u32 shared;
  Consumer consumer;
  Receive receive;
  Hidden hidden;

  LP_DEVICE Team(const Launch& launch, u32 shared)
      : launch(launch), shared(shared), consumer(launch, shared), receive{launch, shared}, hidden(launch) {}

  LP_DEVICE void wait_norm(int norm, u32 generation) {
    wait_barrier(launch, shared + Shared::norms + 8 * norm, generation & 1 ^ 1, kSiteNorm);
    __syncwarp();
  }
  /// The embedding of each column's token: of the launch in step 0, then what it sampled.
  LP_DEVICE void begin(const Rows& rows, const Choice& choice) {
    const u32 tag = tag_of(launch, rows.step, 0);
    hidden.embed(
        [&](u32 row) {
          return !rows.active(row) ? Hidden::kIdle : rows.step ? choice.load(0, row).id : rows.rows[row].token;
        },
        tag);
    hidden.fetch_gamma(0);
    hidden.publish_x(0, tag);
  }
  LP_DEVICE void attention(const Rows& rows, u32 step, u32 layer) {
    const Place place = place_of<QkvCut>();
    float sum[QkvCut::parts][QkvCut::columns / 2];
    if (QkvCut::on()) sum_leaves<QkvCut>(consumer, place, sum);
    reached(launch, step, warp_index(), layer, 1);
    receive.exchange<QkvCut>(receive_use(step, layer), place, sum, [] {});
    reached(launch, step, warp_index(), layer, 2);
    wait_norm(0, x_generation(step, layer));
    reached(launch, step, warp_index(), layer, 12);
    Projection{launch, shared}.write(rows, receive, layer, tag_of(launch, step, layer));
    reached(launch, step, warp_index(), layer, 3);
    attend(consumer, rows, layer);
    receive.end();
    reached(launch, step, warp_index(), layer, 4);
    add_product<OCut>(receive_use(step, layer) + 1, 2 * layer + 1, kToldOut, tag_of(launch, step, layer));
    reached(launch, step, warp_index(), layer, 5);
    hidden.publish_x(1, tag_of(launch, step, layer));
    receive.end();
  }
  LP_DEVICE void mlp(u32 step, u32 layer, bool last) {
    reached(launch, step, warp_index(), layer, 6);
#pragma unroll 1
    for (int pass = 0; pass < GateUpOwn::passes(); pass++) {
      float sum[GateUpOwn::warp_tiles][GateUpOwn::columns / 2];
      const int unit = GateUpOwn::unit(), width = GateUpOwn::width(pass, unit);
      sum_unit<GateUpOwn>(consumer, unit, width, sum);
      if (pass == 0) wait_norm(1, generation_of(step, layer));
#pragma unroll
      for (int t = 0; t < GateUpOwn::warp_tiles; t++) {
        const int tile = GateUpOwn::single ? GateUpOwn::second() : t;  // of the unit
        if (any_lane(tile < width))
          write_activation(launch, shared, layer,
                           GateUpOwn::first_tile() + 2 * (pass * GateUpOwn::pass_units + unit) + tile,
                           first_column<GateUpOwn>(), sum[t]);
      }
    }
    // Without a tile nothing reads the norm; the barrier's phase still counts.
    if (!GateUpOwn::all_on && GateUpOwn::passes() == 0) wait_norm(1, generation_of(step, layer));
    reached(launch, step, warp_index(), layer, 7);
    publish_tiles<GateUp, (int)kActivationTiles>(launch, Words::activation_ready);
    add_product<DownCut>(receive_use(step, layer) + 2, 2 * layer + 2, kToldDown, tag_of(launch, step, layer));
    reached(launch, step, warp_index(), layer, 8);
    if (last) consumers_sync();
    else hidden.publish_x(0, tag_of(launch, step, layer + 1));
    receive.end();
    reached(launch, step, warp_index(), layer, 9);
  }
  LP_DEVICE bool head(u32 step, const Choice& choice) {
    reached(launch, step, warp_index(), kLayers, 0);
    wait_norm(0, x_generation(step, kLayers));
    choice.clear();  // all have published x, so the peer has received the sums that lay there
#pragma unroll 1
    for (int pass = 0; pass < HeadOwn::passes(); pass++) {
      float sum[2][HeadOwn::columns / 2];
      const int unit = HeadOwn::unit(), width = HeadOwn::width(pass, unit);
      sum_unit<HeadOwn>(consumer, unit, width, sum);
      if (any_lane(width > 0))
        choice.offer(HeadOwn::first_tile() + 2 * (pass * HeadOwn::pass_units + unit), width, first_column<HeadOwn>(),
                     sum);
    }
    reached(launch, step, warp_index(), kLayers, 1);
    const bool stopped = kRanks == 1 && launch.flags & kLaunchUndrawn ? false : choice.exchange(step);
    reached(launch, step, warp_index(), kLayers, 2);
    return stopped;
  }

 private:
  template <class C> LP_DEVICE u32 first_column() const {
    return C::split_columns ? (warp_index() >> 2) * C::columns : 0;
  }
  /// o or down, into the residual, whose next norm is `norm`.
  template <class C> LP_DEVICE void add_product(u32 use, int norm, u32 told, u32 tag) {
    const Place place = place_of<C>();
    float sum[C::parts][C::columns / 2];
    if (C::on()) sum_leaves<C>(consumer, place, sum);
    receive.exchange<C>(use, place, sum, [&] { hidden.fetch(norm); });
    hidden.add<C>(receive, norm, told, tag);
  }
};

LP_DEVICE void consume(const Launch& launch, u32 shared) {
  Team team(launch, shared);
  const Choice choice{launch, shared};
  u32 step = 0;
  for (; step < last_step(shared); step++) {
    const Rows rows = rows_of(launch, step);
    reached(launch, step, warp_index(), kLayers, 3);
    team.begin(rows, choice);
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++) {
      reached(launch, step, warp_index(), layer, 0);
      team.attention(rows, step, layer);
      team.mlp(step, layer, layer + 1 == kLayers && !sampling(shared));
    }
    if (!sampling(shared)) {
      step++;
      break;
    }
    const bool stopped = team.head(step, choice);
    if (launch.flags & kLaunchUndrawn) {
      if (kRanks > 1 && rank_block() == 0 && thread_index() == 0)
        store_system_u32((u32*)(launch.inbox[own_rank(launch)] + Inbox::stop), stopped);
      // The other warps wait for the end of the step.
      if (thread_index() == 0) mbarrier_arrive(shared + Shared::sampled);
      return;
    }
    if (rank_block() == 0 && thread_index() < kColumns) {
      const u32 row = thread_index();
      const bool sampled = rows.active(row) && rows.rows[row].flags & kRowSample;
      store_system_u64(launch.tokens + (u64)step * kColumns + row,
                       (u64)tag_of(launch, step, 0) << 32 | (sampled ? choice.load(0, row).id : ~0u));
    }
    if (thread_index() == 0) {
      if (stopped && step + 2 < last_step(shared)) {
        store_shared_u32(shared + Shared::last_step, step + 2);
        if (rank_block() == 0) store_system_u32(launch.control + 1, step + 2);
      }
      mbarrier_arrive(shared + Shared::sampled);
    }
    consumers_sync();
  }
  if (rank_block() == 0 && thread_index() == 0) store_system_u32(launch.control + 1, step);
}

/// What the host must know of the compiled kernel: bytes of shared memory, threads, bytes of words without items, bytes
/// of words an item, bytes of words to zero before a launch, pages of an item, bytes of the inbox, rows of a group
/// whose items the host deals.
extern "C" __device__ const u64 wide_decoder_needs[8] = {
    Shared::bytes, kThreads, Words::items, kAttentionItemBytes, Words::zeroed, kAttentionItemPages,
    kRanks > 1 ? Inbox::bytes : 0, kGroupRows};

/// What a launch is given of each rank that it has.
struct Launches {
  Launch of_rank[kRanksHere];
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    wide_decoder(const __grid_constant__ Launches launches) {
  const Launch& launch = launches.of_rank[kRanksHere == 1 ? 0 : blockIdx.x / kBlocks];
  if (launch.stopped && *launch.stopped) return;
  const u32 shared = shared_address(shared_memory);
  poison(shared_memory, Shared::bytes);
  for (u32 i = threadIdx.x; i < launch.row_count * (sizeof(Row) / 4); i += kThreads)
    reinterpret_cast<u32*>(shared_memory + Shared::rows)[i] = reinterpret_cast<const u32*>(launch.rows)[i];
  if (threadIdx.x == 0) {
    init_rings(shared);
    mbarrier_init(shared + Shared::receive_full, kConsumers);
    mbarrier_init(shared + Shared::receive_free, 2);
    mbarrier_init(shared + Shared::norms, 1);
    mbarrier_init(shared + Shared::norms + 8, 1);
    mbarrier_init(shared + Shared::sampled, 1);
    store_shared_u32(shared + Shared::last_step, steps_of(launch));
    fence_mbarrier_init();
  }
  if (threadIdx.x == kThreads - 1) store_shared_u32(shared + Shared::sampling, samples(launch));
  if (threadIdx.x < 2)
    store_shared_u32(shared + Shared::items + 4 * threadIdx.x,
                     own_kv_head() < kKvHeads
                         ? load_constant_u32(launch.items + block_index() % kHeadBlocks + threadIdx.x)
                         : 0);
  if (threadIdx.x == 0) note_time(launch, kStream0, 0);
  if (kRanks > 1 && warp_index() == 1) await_ranks(launch, launch.epoch);
  __syncthreads();
  cluster_sync();
  // What both sides need each finds for itself, or the side with fewer registers would keep it in memory for both.
  const u32 role = warp_index();
  if (role < kConsumers) {
    raise_registers<kConsumerRegisters>();
    consume(launch, unknown(shared_address(shared_memory)));
  } else {
    lower_registers<kOtherRegisters>();
    const u32 own = unknown(shared_address(shared_memory));
    if (role == kInput) fetch(launch, own);
    else if (role == kNorms) find_norms(launch, own);
    else produce(launch, own, role);
  }
  __syncthreads();
  if (threadIdx.x == 0) note_time(launch, kStream0, 1);
  cluster_sync();  // a block's shared memory lives until its peer has sent its last
}

}  // namespace wide
