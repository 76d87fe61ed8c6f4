// Products of a pass of 128 or 256 decoding rows in one launch: 32 layers of Llama 3.1 8B, without attention. How close
// does one launch come to the time that memory takes?
//
// A phase is a product; its units are a tile of 128 rows by 128 tokens with all of K (whole), or with a quarter of it,
// four leaves (cut). Blocks take units in turn. Weights are fetched as far ahead as the ring goes, also over the end of
// a phase; activations once all units of the phase before are there. The four blocks of a cut tile have neighbouring
// numbers and are at it at the same time: each sends three quarters of its sums through memory and adds up 32 tokens,
// (q0 + q1) + (q2 + q3).
//
// Order of who writes and who reads: sums, then `sent` of the tile (release, after a barrier of the consumers);
// results, then `done` of the phase. Proxy fences on both sides of `done`, as bulk copies read what stores wrote.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include "tests/matrix/fill.cuh"
#include "tests/matrix/products.cuh"

constexpr int kTokens = 128, kLayers = 32, kPhases = 4, kMostTiles = 512, kCounters = 1 + kMostTiles,
              kCounterWords = 32;
using R = Ring<kTokens, kAscending>;
struct Phase {
  u64 weights, activations, results;  // bytes from the layer's weights; of the vectors
  int k16, leaf, row_tiles, whole;    // whole: tiles with all of K, the rest is cut
  bool silu;
};
struct Crowd {
  Phase phases[kPhases];
  const u8* weights;
  u64 layer_bytes;
  u8* vectors;
  float4* sums;  // [block][4 quarters][16][256]
  u32* counters;
  int blocks;  // of 128 tokens
};
struct Work {
  int tile, block, quarter;  // quarter -1: all of K
};
LP_DEVICE int units_of(const Crowd& c, const Phase& p) { return (p.whole + (p.row_tiles - p.whole) * 4) * c.blocks; }
LP_DEVICE Work unit_of(const Crowd& c, const Phase& p, int unit) {
  const int whole = p.whole * c.blocks;
  if (unit < whole) return Work{unit / c.blocks, unit % c.blocks, -1};
  const int cut = (unit - whole) / 4;
  return Work{p.whole + cut / c.blocks, cut % c.blocks, (unit - whole) % 4};
}
/// Whole units of a phase end with a round of the grid in which its cut ones begin, so that the four of a tile are in
/// one round.
LP_DEVICE int first_cut(const Crowd& c, const Phase& p) {
  return (p.whole * c.blocks + gridDim.x - 1) / gridDim.x * gridDim.x;
}
template <class F> LP_DEVICE void each_unit(const Crowd& c, const Phase& p, F&& work) {
  const int whole = p.whole * c.blocks, units = units_of(c, p), gap = first_cut(c, p) - whole;
#pragma unroll 1
  for (int at = blockIdx.x; at < units + gap; at += gridDim.x) {
    if (at >= whole && at < whole + gap) continue;
    work(unit_of(c, p, at < whole ? at : at - gap));
  }
}
LP_DEVICE u32* counter(const Crowd& c, int layer, int phase, int index) {
  return c.counters + ((u64)(layer * kPhases + phase) * kCounters + index) * kCounterWords;
}

/// Result words of group j of 8 tokens of a tile.
LP_DEVICE void write_group(const Crowd& c, const Phase& p, const Work& w, int j, const float* v) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, step = w.tile * 8 + (threadIdx.x >> 5);
  u8* to = c.vectors + p.results;
  if (p.silu) {
    float h[2];
    for (int i = 0; i < 2; i++)
      h[i] = v[i] * v[2 + i] * reciprocal_approx(1.0f + exp2_approx(v[i] * -1.4426950408889634f));
    store_u32(to + next_byte<128>(p.row_tiles * 4, step / 2, w.block * 128 + 8 * j + g, t >> 1) + (step & 1) * 8 +
                  (t & 1) * 4,
              transpose_8x8(bf16_pair(h[0], h[1])));
  } else {
    to += next_byte<128>(p.row_tiles * 8, step, w.block * 128 + 8 * j + g, 0) + t * 4;
    store_u32(to, transpose_8x8(bf16_pair(v[0], v[1])));
    store_u32(to + 128, transpose_8x8(bf16_pair(v[2], v[3])));
  }
}
LP_DEVICE void arrive(u32* at) {
  fence_async_global();
  barrier_sync(1, 256);
  if (threadIdx.x == 0) add_release_u32(at, 1);
}

/// Without WAITS activations are fetched before they are there: what is left is the stream and the tiles.
template <bool WAITS> __global__ void __launch_bounds__(384, 1) crowd(const __grid_constant__ Crowd c) {
  const u32 ring = shared_address(product_memory), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::stages; i++)
      mbarrier_init(ring + R::full + 8 * i, 2), mbarrier_init(ring + R::empty + 8 * i, 8);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp >= 8) {
    lower_registers<24>();
    if (warp > 9 || lane) return;
    const u64 policy = policy_evict_first();
    Turn<R::stages> turn;
    turn.phase = 1;
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++)
#pragma unroll 1
      for (int index = 0; index < kPhases; index++) {
        const Phase& p = c.phases[index];
        bool ready = !WAITS || warp == 8 || (layer == 0 && index == 0);
        each_unit(c, p, [&](const Work& w) {
          if (!ready) {
            const int before = index ? index - 1 : kPhases - 1;
            const u32 expected = units_of(c, c.phases[before]);
            while (load_acquire_u32(counter(c, index ? layer : layer - 1, before, 0)) < expected) {
            }
            fence_async_global();
            ready = true;
          }
          const int run = w.quarter < 0 ? p.k16 : p.k16 / 4, first = w.quarter < 0 ? 0 : w.quarter * run;
          const u8* a = c.weights + layer * c.layer_bytes + p.weights + ((u64)w.tile * 4 * p.k16 + first) * 1024;
          const u8* b = c.vectors + p.activations + ((u64)w.block * p.k16 + first) * (kTokens * 32);
#pragma unroll 1
          for (int k = 0; k < run; k += kSteps) {
            while (!mbarrier_try_wait(ring + R::empty + 8 * turn.slot, turn.phase)) {
            }
            const u32 at = ring + turn.slot * R::bytes, full = ring + R::full + 8 * turn.slot;
            mbarrier_expect(full, warp == 8 ? R::A : R::B);
            if (warp == 9)
              bulk_load(at + R::A, b + (u64)k * (kTokens * 32), R::B, full);
            else
#pragma unroll
              for (int u = 0; u < 4; u++)
                bulk_load(at + u * (kSteps * 1024), a + ((u64)u * p.k16 + k) * 1024, kSteps * 1024, full, policy);
            turn.next();
          }
        });
      }
    return;
  }
  raise_registers<240>();
  Consumer<kTokens, kAscending, kAlone> consumer{ring, (warp >> 1) * (kSteps * 1024) + (warp & 1) * 512 + lane * 16,
                                                 lane, 0};
#pragma unroll 1
  for (int layer = 0; layer < kLayers; layer++)
#pragma unroll 1
    for (int index = 0; index < kPhases; index++) {
      const Phase& p = c.phases[index];
      each_unit(c, p, [&](const Work& w) {
        float sum[kTokens / 2];
        Product run = {};
        run.k16 = w.quarter < 0 ? p.k16 : p.k16 / 4, run.leaf = p.leaf;
        sum_tile(consumer, run, sum);
        if (w.quarter < 0) {
#pragma unroll
          for (int j = 0; j < kTokens / 8; j++) write_group(c, p, w, j, sum + 4 * j);
        } else {
          float4* mine = c.sums + (u64)blockIdx.x * 4 * 4 * 256 + threadIdx.x;
          u32* sent = counter(c, layer, index, 1 + w.tile * c.blocks + w.block);
#pragma unroll
          for (int j = 0; j < 16; j++)
            if (j / 4 != w.quarter)
              mine[j * 256] = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
          barrier_sync(1, 256);
          if (threadIdx.x == 0) {
            add_release_u32(sent, 1);
            while (load_acquire_u32(sent) % 8 < 4) {
            }
          }
          barrier_sync(1, 256);
#pragma unroll
          for (int quarter = 0; quarter < 4; quarter++)
            if (quarter == w.quarter) {
              float4 parts[4][4];
#pragma unroll
              for (int q = 0; q < 4; q++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                  if (q != quarter)
                    parts[q][j] =
                        __ldcg(c.sums + ((u64)(blockIdx.x - quarter + q) * 16 + quarter * 4 + j) * 256 + threadIdx.x);
                  else
                    parts[q][j] = make_float4(sum[16 * quarter + 4 * j], sum[16 * quarter + 4 * j + 1],
                                              sum[16 * quarter + 4 * j + 2], sum[16 * quarter + 4 * j + 3]);
#pragma unroll
              for (int j = 0; j < 4; j++) {
                const auto all = [&](float a, float b, float c, float d) { return (a + b) + (c + d); };
                const float v[4] = {all(parts[0][j].x, parts[1][j].x, parts[2][j].x, parts[3][j].x),
                                    all(parts[0][j].y, parts[1][j].y, parts[2][j].y, parts[3][j].y),
                                    all(parts[0][j].z, parts[1][j].z, parts[2][j].z, parts[3][j].z),
                                    all(parts[0][j].w, parts[1][j].w, parts[2][j].w, parts[3][j].w)};
                write_group(c, p, w, quarter * 4 + j, v);
              }
            }
          // Nobody writes its sums again before all four have read them.
          barrier_sync(1, 256);
          if (threadIdx.x == 0) {
            add_release_u32(sent, 8);
            while (load_acquire_u32(sent) < 36) {
            }
          }
        }
        arrive(counter(c, layer, index, 0));
      });
    }
}

int main() {
  constexpr u64 kQkv = 6144ull * 4096 * 2, kO = 4096ull * 4096 * 2, kGateUp = 28672ull * 4096 * 2,
                kDown = 4096ull * 14336 * 2;
  Crowd c = {};
  c.layer_bytes = kQkv + kO + kGateUp + kDown;
  u8* weights;
  const u64 vector = 16 << 20, counter_bytes = (u64)kLayers * kPhases * kCounters * kCounterWords * 4;
  CHECK(cudaMalloc(&weights, kLayers * c.layer_bytes));
  CHECK(cudaMalloc(&c.vectors, 4 * vector));
  CHECK(cudaMalloc(&c.sums, 132ull * 16 * 256 * 16));
  CHECK(cudaMalloc(&c.counters, counter_bytes));
  fill<<<4096, 256>>>((u16*)weights, kLayers * c.layer_bytes / 2, 5, 0);
  c.weights = weights;
  cudaEvent_t begun, ended;
  CHECK(cudaEventCreate(&begun));
  CHECK(cudaEventCreate(&ended));
  const auto time = [&](auto kernel, const char* what) {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, R::shared));
    float ms[15];
    for (int i = -3; i < 15; i++) {
      CHECK(cudaMemset(c.counters, 0, counter_bytes));
      CHECK(cudaEventRecord(begun));
      kernel<<<132, 384, R::shared>>>(c);
      CHECK(cudaGetLastError());
      CHECK(cudaEventRecord(ended));
      CHECK(cudaEventSynchronize(ended));
      float m;
      CHECK(cudaEventElapsedTime(&m, begun, ended));
      if (i >= 0) ms[i] = m;
    }
    std::sort(ms, ms + 15);
    printf("%d rows, %d tiles of gate and up whole, %s: %.3f ms (%.3f to %.3f), %.0f GB/s of weights\n", c.blocks * 128,
           c.phases[2].whole, what, ms[7], ms[0], ms[14], kLayers * c.layer_bytes / ms[7] * 1e-6);
    fflush(stdout);
  };
  fill<<<1024, 256>>>((u16*)c.vectors, 2 * vector, 6, 0);
  for (int blocks : {1, 2})
    for (int whole : {224, 0}) {
      c.blocks = blocks;
      // Inputs stay as they are: sums of sums would overflow, and NaN takes less power.
      c.phases[0] = Phase{0, 0, vector, 256, 16, 48, 0, false};
      c.phases[1] = Phase{kQkv, 0, 2 * vector, 256, 16, 32, 0, false};
      c.phases[2] = Phase{kQkv + kO, 0, 3 * vector, 256, 16, 224, whole, true};
      c.phases[3] = Phase{kQkv + kO + kGateUp, 0, vector, 896, 56, 32, 0, false};
      time(crowd<true>, "in order");
      time(crowd<false>, "no waits for activations");
    }
}
