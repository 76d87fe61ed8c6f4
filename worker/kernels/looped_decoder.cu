// The looped decoder: one cooperative launch walks embedding, all layers, LM head and the choice of tokens, for several steps.
//
//   x = bf16(h * gamma), y = (W x) / rms(h)             for qkv, gate/up and the LM head
//   h += W_o attention(q, K, V);  h += W_down bf16(silu(gate) * up)       h stays fp32 in registers of its owner
//
// A block owns whole row tiles (m16) of every product, with all of K. Warps: 16 consumers, each with one K leaf of every product;
// one producer warp, which streams the block's weights and KV pages through rings in shared memory, on into the next layer and the next step; two epilogue warps, which add the leaves as a binary tree and publish the result as data-as-flag words to all blocks.
//
// Exchanges of a layer (words.cuh says when a word may be written again):
//   attention_x    residual -> qkv          all blocks            page           leaves -> merge    blocks of a row's items
//   qkv            q, k, v -> attention     blocks of a KV head   attention_out  merge -> o         all blocks
//   mlp_x          residual -> gate/up      all blocks            activation     -> down            all blocks
#include "ptx/ptx.cuh"
#include "layout/shape.cuh"
#include "layout/launch.cuh"
#include "layout/words.cuh"
#include "layout/shared_memory.cuh"
#include "sync/wait.cuh"
#include "sync/ring.cuh"
#include "ops/product.cuh"
#include "ops/attention.cuh"
#include "ops/epilogue.cuh"

extern __shared__ __align__(1024) u8 shared_memory[];

LP_DEVICE Rows rows_of(const Launch& launch, u32 step) {
  return Rows{reinterpret_cast<const Row*>(shared_memory + Shared::rows), launch.row_count, step, shared_address(shared_memory) + Shared::item_ends + (step & 1) * kColumns * 4};
}
LP_DEVICE bool samples(const Launch& launch) {
  for (u32 r = 0; r < launch.row_count; r++)
    if (rows_of(launch, 0).rows[r].flags & kRowSample) return true;
  return false;
}
LP_DEVICE u32 tag_of(const Launch& launch, u32 step) { return launch.epoch + step * (kLayers + 1); }
/// The number of a step of this launch in all launches.
LP_DEVICE u32 count_of(u32 shared, u32 step) { return load_shared_u32(shared + Shared::first_step) + step; }
/// Steps to run, as far as it is known: a stop that step s saw ends the launch after step s + 1.
LP_DEVICE u32 last_step(u32 shared) { return load_shared_u32(shared + Shared::last_step); }
/// Waits until the tokens of the step before are known: orders their sampling, K and V of that step and a stop before this step (grid, by the
/// token words and the fences on both sides of them).
LP_DEVICE void wait_sampled(const Launch& launch, u32 shared, u32 step) {
  if (step > 0) wait_barrier(launch, shared + Shared::sampled, (step - 1) & 1, kSiteToken);
}

/// A warp is at stage `stage` of a layer. With LP_TRACE it notes the clock, in the last step: Launch::trace is [block][warp][layer][16]. With
/// LP_DELAYS, a seed, it is held up now and then, which must change nothing but time.
LP_DEVICE void reached(const Launch& launch, u32 step, u32 warp, u32 layer, u32 stage) {
#ifdef LP_TRACE
  if (step + 1 == launch.steps && (threadIdx.x & 31) == 0)
    launch.trace[(((u64)blockIdx.x * (kThreads / 32) + warp) * (kLayers + 1) + layer) * 16 + stage] = clock64();
#endif
#ifdef LP_DELAYS
  u32 hash = (((blockIdx.x * 32 + warp) * 64 + layer) * 16 + stage) * 64 + step + LP_DELAYS * 0x9e3779b9u;
  hash = (hash ^ hash >> 16) * 0x85ebca6bu;
  hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
  hash ^= hash >> 16;
  // One in 16 is held up for up to 30 us, and one in 4096 for 2 ms.
  const long long until = clock64() + (hash % 4096 == 0 ? 4000000 : hash % 16 == 0 ? hash >> 16 : 0);
  while (clock64() < until) {}
  __syncwarp();
#endif
}

LP_DEVICE void produce(const Launch& launch, u32 shared) {
  Producer producer(launch, shared);
  for (u32 step = 0; step < last_step(shared) && rows_of(launch, step).mask(); step++) {
    const Rows rows = rows_of(launch, step);
    const u8* weights = launch.weights;
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++, weights += kLayerBytes) {
      reached(launch, step, kProducer, layer, 0);
      producer.stream<Qkv, false>(weights);
      if (layer == 0) {
        wait_sampled(launch, shared, step);
        fence_async_global();  // K and V of the step before were written by ordinary stores; pages are read by bulk copies
      }
      reached(launch, step, kProducer, layer, 1);
      stream_pages(producer, launch, rows, layer);
      // Fewer bytes in flight while attention is being waited for: three exchanges in a row queue behind them.
      producer.stream<O, true>(weights + kOOffset);
      producer.stream<GateUp, false>(weights + kGateUpOffset);
      reached(launch, step, kProducer, layer, 2);
      producer.stream<Down, false>(weights + kDownOffset);
    }
    if (samples(launch)) producer.stream<Head, false>(weights);
  }
}

LP_DEVICE void consume(const Launch& launch, u32 shared, u32 warp) {
  Consumer consumer(launch, shared, warp);
  Partials partials(launch, shared, warp);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u32 b[kHiddenSteps > kPartSteps ? kHiddenSteps : kPartSteps][2];
  u32 active;
  const auto get_hidden = [&](u32 vector, u32 tag, int squares, u32 site) {
    if (warp >= kHiddenLeaves) return;
    const float sum = get_fragments<kHiddenSteps, true>(launch, launch.words + vector + warp * HiddenVector::leaf_bytes, tag, active, b, site);
    if (t == 0 && g < kColumns) store_shared_f32(shared + Shared::squares + ((squares * kMaxLeaves + warp) * kColumns + g) * 4, sum);
  };
  for (u32 step = 0;; step++) {
    wait_sampled(launch, shared, step);
    const Rows rows = rows_of(launch, step);
    active = rows.mask();
    if (step >= last_step(shared) || !active) return;
    const u32 count = count_of(shared, step);
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++) {
      const u32 tag = tag_of(launch, step) + layer, vectors = vectors_of(count, layer);
      reached(launch, step, warp, layer, 0);
      if (Epilogue::sets<Qkv>()) {
        get_hidden(vectors + Vectors::attention_x, tag, 0, kSiteAttentionX);
        reached(launch, step, warp, layer, 1);
        multiply<Qkv>(consumer, partials, b);
      }
      reached(launch, step, warp, layer, 2);
      attend(launch, consumer, shared, rows, layer, tag);
      reached(launch, step, warp, layer, 3);
      merge_pages(launch, rows, warp, tag, launch.words + vectors + Vectors::attention_out);
      reached(launch, step, warp, layer, 4);
      if (Epilogue::sets<O>()) {
        const u8* input = launch.words + vectors + Vectors::attention_out;
        if constexpr (O::leaf_steps <= kPartSteps) {
          if (warp < kHeadLeaves) get_fragments<O::leaf_steps>(launch, input + warp * AttentionVector::leaf_bytes, tag, active, b, kSiteAttentionOut);
          reached(launch, step, warp, layer, 5);
          multiply<O>(consumer, partials, b);
        } else {
          multiply_fetching<O>(consumer, partials, input, tag, active, kSiteAttentionOut);
        }
      }
      reached(launch, step, warp, layer, 6);
      if (Epilogue::sets<GateUp>()) {
        get_hidden(vectors + Vectors::mlp_x, tag, 1, kSiteMlpX);
        reached(launch, step, warp, layer, 7);
        multiply<GateUp>(consumer, partials, b);
      }
      reached(launch, step, warp, layer, 8);
      multiply_fetching<Down>(consumer, partials, launch.words + vectors + Vectors::activation, tag, active, kSiteActivation);
      reached(launch, step, warp, layer, 9);
    }
    if (!samples(launch)) return;
    if (Epilogue::sets<Head>()) {
      get_hidden(vectors_of(count, kLayers) + Vectors::attention_x, tag_of(launch, step) + kLayers, 0, kSiteHeadX);
      multiply<Head>(consumer, partials, b);
    }
  }
}

/// LM head: the best token of every column over the whole vocabulary into `token`; true if the host wants the launch to end.
LP_DEVICE bool choose(const Launch& launch, Epilogue& epilogue, u32 step, u32 active, u32* token) {
  const int lane = threadIdx.x & 31, first = Head::first_tile(blockIdx.x), sets = Epilogue::sets<Head>();
  const u32 tag = tag_of(launch, step);
  u32 stop = 0;
  if (blockIdx.x == 0 && epilogue.warp == 0) stop = load_system_u32(launch.control);
  Best best[kEpilogueColumns];
  for (int s = 0; s < sets; s++) {
    epilogue.take<Head>(s == 0 ? 0 : -1);
    const int id = (first + 2 * s) * 16 + lane;
    const bool on = id < kVocab && first + 2 * s + Epilogue::half() < Head::first_tile(blockIdx.x + 1);
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) {
      const float logit = epilogue.y[c] * epilogue.inverse[c];
      if (on) best[c].offer(logit, id);
      if (on && launch.flags & kLaunchLogits) launch.logits[(u64)epilogue.column(c) * (Head::tiles * 16) + id] = logit;
    }
  }
  fence_gpu();  // K and V of this step, and cleared vectors, before its token words
  if (kColumns > 1) barrier_sync(kEpilogueBarrier, kEpilogueWarps * 32);  // those of either warp
  __syncwarp();
  bool stopped = false;
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++) {
    best[c].over_lanes();
    u8* words = launch.words + Words::token + (u64)epilogue.column(c) * kBlocks * 16;
    if (lane == 0) store_relaxed_16(words + blockIdx.x * 16, __float_as_uint(best[c].value), best[c].id, tag, stop);
  }
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++) {
    const int column = epilogue.column(c);
    token[c] = ~0u;
    if (!(active >> column & 1) && column != 0) continue;
    const u8* words = launch.words + Words::token + (u64)column * kBlocks * 16;
    Best all;
    for (int from = 0; from < kBlocks; from += 32) {
      u32 value, id, extra;
      const bool on = from + lane < kBlocks;
      poll_words<1>(launch, words + (from + lane) * 16, 0, tag, on ? 1 : 0, &value, &id, &extra, kSiteSampled);
      if (on) all.offer(__uint_as_float(value), id);
      if (from == 0 && column == 0) stopped = shuffle(extra, 0) != 0;
    }
    all.over_lanes();
    if (active >> column & 1 && rows_of(launch, step).rows[column].flags & kRowSample) token[c] = all.id;
  }
  fence_gpu();  // token words before K and V of this step are read, and cleared vectors polled
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++)
    if (blockIdx.x == 0 && lane == 0) store_system_u64(launch.tokens + (u64)step * kColumns + epilogue.column(c), (u64)tag << 32 | token[c]);
  return stopped;
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
    const Rows rows = rows_of(launch, step);
    const u32 active = rows.mask();
    if (step >= last_step(shared) || !active) break;
    const u32 count = count_of(shared, step);
    if (!epilogue.second()) epilogue.embed(token, active, vectors_of(count, 0), tag_of(launch, step));
#pragma unroll 1
    for (u32 layer = 0; layer < kLayers; layer++) {
      const u32 tag = tag_of(launch, step) + layer, vectors = vectors_of(count, layer);
      epilogue.query_key_value(rows, layer, active, tag);
      reached(launch, step, kEpilogue + warp, layer, 0);
      epilogue.prepare(vectors_of(count + 1, layer), vectors_of(count, layer + 1));
      if (epilogue.second()) {
        epilogue.skip(Epilogue::sets<O>() + Epilogue::sets<GateUp>() + Epilogue::sets<Down>());
        continue;
      }
      epilogue.add_residual<O>(vectors + Vectors::mlp_x, 2 * layer + 1, active, tag);
      reached(launch, step, kEpilogue + warp, layer, 1);
      epilogue.gate_up(active, vectors, tag);
      reached(launch, step, kEpilogue + warp, layer, 2);
      epilogue.add_residual<Down>(vectors_of(count, layer + 1) + Vectors::attention_x, 2 * layer + 2, active, tag + 1);
      reached(launch, step, kEpilogue + warp, layer, 3);
    }
    epilogue.prepare(vectors_of(count + 1, kLayers), vectors_of(count + 1, 0));
    if (!samples(launch)) {
      step++;
      break;
    }
    if (epilogue.second()) {
      epilogue.skip(Epilogue::sets<Head>());
      continue;
    }
    const bool stopped = choose(launch, epilogue, step, active, token);
    if (warp == 0 && (threadIdx.x & 31) == 0 && stopped && step + 2 < last_step(shared)) {
      store_shared_u32(shared + Shared::last_step, step + 2);
      if (blockIdx.x == 0) store_system_u32(launch.control + 1, step + 2);
    }
    if (warp == 0) rows_of(launch, step + 1).count_items();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared + Shared::sampled);
  }
  if (threadIdx.x == kEpilogue * 32) {
    store_relaxed_u32(launch.words + Words::steps + blockIdx.x * 4, count_of(shared, step));
    if (blockIdx.x == 0) store_system_u32(launch.control + 1, step);
  }
}

/// What the host must know of the compiled kernel: bytes of shared memory, threads, bytes of exchange words without pages, bytes of words an item.
extern "C" __device__ const u64 looped_decoder_needs[4] = {Shared::bytes, kThreads, Words::page, Words::page_bytes};

extern "C" __global__ void __launch_bounds__(kThreads, 1) looped_decoder(const __grid_constant__ Launch launch) {
  const u32 shared = shared_address(shared_memory);
  const int warp = threadIdx.x >> 5;
  for (u32 i = threadIdx.x; i < launch.row_count * (sizeof(Row) / 4); i += kThreads)
    reinterpret_cast<u32*>(shared_memory + Shared::rows)[i] = reinterpret_cast<const u32*>(launch.rows)[i];
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kRings * Shared::slots; i++) {
      mbarrier_init(shared + Shared::full + 16 * i, 1);
      mbarrier_init(shared + Shared::full + 16 * i + 8, 1);
      mbarrier_init(shared + Shared::empty + 8 * i, 1);
    }
    for (int i = 0; i < 2; i++) {
      mbarrier_init(shared + Shared::partials_full + 8 * i, kWarps);
      mbarrier_init(shared + Shared::partials_empty + 8 * i, kEpilogueWarps);
    }
    mbarrier_init(shared + Shared::sampled, kColumns == 1 ? 1 : kEpilogueWarps);
    store_shared_u32(shared + Shared::last_step, launch.steps);
    store_shared_u32(shared + Shared::first_step, load_relaxed_u32(launch.words + Words::steps + blockIdx.x * 4));
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == 0) rows_of(launch, 0).count_items();
  __syncthreads();
  if (warp < kWarps) consume(launch, shared, warp);
  else if (warp == kProducer) {
    produce(launch, shared);
  } else finish(launch, shared, warp - kEpilogue);
}
