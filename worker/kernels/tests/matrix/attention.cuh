// Attention of prompt rows: out = softmax(q k^T) v of a chunk of tokens, on wgmma, queries as A.
//
// A block has 32 tokens of a KV head's kQueries = 4 query heads: two consumer warpgroups of 16 tokens each, a warp a
// query head. Queries are fragments of m16k16 in registers, [KV head][16 tokens][query head][d / 16][512 bytes]. A page
// of 64 positions is K [d / 16][8 positions][2 halves of d][position][8 d], then V [position / 16][8 d][2 halves of
// positions][d][8 positions], bf16: both as wgmma wants B without swizzle. A page is one bulk copy of 32 KiB.
//
// Weights are 2^(score - M), M an integer not under the largest score so far. Scores are rounded to multiples of 2^-12,
// so that a difference of M is a power of two and rounds nothing.
#pragma once
#include "tests/matrix/wgmma.cuh"

/// What is added from zero before it joins a row's output.
enum Leaf {
  kRow,     // nothing: one chain over all positions, the bound
  kPage64,  // a chain over a page
  kLeaf16,  // one k16 step
};
constexpr int kQueries = 4, kDim = 128, kTileTokens = 32, kPageBytes = 32768, kPageStages = 6;
constexpr float kGrid = 3072.0f;  // 1.5 * 2^11: a sum with it has steps of 2^-12
constexpr int kAttentionShared = kPageStages * (kPageBytes + 16);
extern __shared__ __align__(1024) u8 attention_memory[];

struct AttentionChunk {
  const u8 *queries, *pages;  // pages: [KV head][page]
  u8* out;                    // as B of the next product, blocks of 128 tokens
  int tokens, first, kv_heads, pages_a_head;
  float scale;
};

/// Tiles in order of falling length, dealt to and fro.
LP_DEVICE bool item_of(const AttentionChunk& c, int round, int& kv_head, int& tile) {
  const int at = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x),
            tiles = c.tokens / kTileTokens;
  kv_head = at % c.kv_heads, tile = tiles - 1 - at / c.kv_heads;
  return at < tiles * c.kv_heads;
}
LP_DEVICE int pages_of(const AttentionChunk& c, int tile) { return (c.first + (tile + 1) * kTileTokens + 63) / 64; }

struct PageTurn {
  u32 slot = 0, phase = 0;
  LP_DEVICE void next() {
    if (++slot == kPageStages) slot = 0, phase ^= 1;
  }
};

template <int LEAF> LP_DEVICE void attend_tile(const AttentionChunk& c, u32 ring, u32 full, u32 empty, PageTurn& turn,
                                               int kv_head, int tile) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, group = warp >> 2,
            head = warp & 3;
  const int token0 = tile * kTileTokens + group * 16, position0 = c.first + token0 + (int)g, pages = pages_of(c, tile);
  const Quad* from = reinterpret_cast<const Quad*>(c.queries) +
                     ((u64)(kv_head * (c.tokens / 16) + token0 / 16) * kQueries + head) * (kDim / 16) * 32 + lane;
  Quad q[kDim / 16];
#pragma unroll
  for (int i = 0; i < kDim / 16; i++) q[i] = load_constant_16(from + i * 32);
  float out[64], part[64], score[32], most[2] = {-1e30f, -1e30f}, total[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; i++) out[i] = part[i] = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) score[i] = 0;
  const auto scores = [&] {
    while (!mbarrier_try_wait(full + 8 * turn.slot, turn.phase)) {
    }
    pin<32>(score);
    wgmma_fence();
    const u64 k = wgmma_operand(ring + turn.slot * kPageBytes);
#pragma unroll
    for (int i = 0; i < kDim / 16; i++) wgmma<64>(score, q[i], wgmma_operand(k, i * 2048), i > 0);
    wgmma_commit();
  };
  scores();
#pragma unroll 1
  for (int page = 0; page < pages; page++) {
    wgmma_wait<0>();
    pin<32>(score);
    if (page * 64 + 63 > position0 - (int)g) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (page * 64 + i / 4 * 8 + 2 * (int)t + (i & 1) > position0 + (i >> 1 & 1) * 8) score[i] = -1e30f;
    }
    float high[2] = {score[0], score[2]};
#pragma unroll
    for (int i = 0; i < 32; i++) high[i >> 1 & 1] = fmaxf(high[i >> 1 & 1], score[i]);
    float keep[2], base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      high[r] = fmaxf(high[r], shuffle_xor(high[r], 1));
      high[r] = fmaxf(high[r], shuffle_xor(high[r], 2));
      const float now = fmaxf(most[r], ceilf(high[r] * c.scale));
      keep[r] = exp2_approx(most[r] - now);
      most[r] = now, base[r] = kGrid + now, total[r] *= keep[r];
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
      score[i] = exp2_approx(fmaf(score[i], c.scale, kGrid) - base[i >> 1 & 1]);
      total[i >> 1 & 1] += score[i];
    }
    Quad weight[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      weight[i] = Quad{bf16_pair(score[8 * i], score[8 * i + 1]), bf16_pair(score[8 * i + 2], score[8 * i + 3]),
                       bf16_pair(score[8 * i + 4], score[8 * i + 5]), bf16_pair(score[8 * i + 6], score[8 * i + 7])};
    const u32 slot = turn.slot;
    const u64 v = wgmma_operand(ring + slot * kPageBytes + 16384);
    const auto add = [&](bool first) {
#pragma unroll
      for (int i = 0; i < 64; i++) out[i] = first ? fmaf(keep[i >> 1 & 1], out[i], part[i]) : out[i] + part[i];
    };
    if constexpr (LEAF == kRow) {
#pragma unroll
      for (int i = 0; i < 64; i++) out[i] *= keep[i >> 1 & 1];
      pin<64>(out);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) wgmma<128>(out, weight[i], wgmma_operand(v, i * 4096), 1);
      wgmma_commit();
    } else {
      pin<64>(part);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < (LEAF == kPage64 ? 4 : 1); i++)
        wgmma<128>(part, weight[i], wgmma_operand(v, i * 4096), i > 0);
      wgmma_commit();
      if constexpr (LEAF == kLeaf16) {
#pragma unroll
        for (int i = 1; i < 4; i++) {
          wgmma_wait<0>();
          pin<64>(part);
          add(i == 1);
          pin<64>(part);
          wgmma_fence();
          wgmma<128>(part, weight[i], wgmma_operand(v, i * 4096), 0);
          wgmma_commit();
        }
      }
    }
    turn.next();
    if (page + 1 < pages) {
      scores();
      wgmma_wait<1>();
    } else
      wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(empty + 8 * slot);
    if constexpr (LEAF == kRow)
      pin<64>(out);
    else {
      pin<64>(part);
      add(LEAF == kPage64);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    total[r] += shuffle_xor(total[r], 1);
    total[r] += shuffle_xor(total[r], 2);
    total[r] = reciprocal_approx(total[r]);
  }
  const int heads = c.kv_heads * kQueries;
  u8* to = c.out + ((u64)(token0 / 128) * heads * 8 + (kv_head * kQueries + head) * 8) * 4096 + token0 % 128 / 8 * 256 +
           g * 16 + t * 4;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    u8* at = to + i / 8 * 4096 + (i / 4 & 1) * 128;
    store_u32(at, bf16_pair(out[i] * total[0], out[i + 1] * total[0]));
    store_u32(at + 256, bf16_pair(out[i + 2] * total[1], out[i + 3] * total[1]));
  }
}

template <int LEAF> __global__ void __launch_bounds__(384, 1) attention(const AttentionChunk c) {
  const u32 ring = shared_address(attention_memory), full = ring + kPageStages * kPageBytes,
            empty = full + 8 * kPageStages, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPageStages; i++) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, 8);
    fence_mbarrier_init();
  }
  __syncthreads();
  PageTurn turn;
  int kv_head, tile;
  if (warp >= 8) {
    lower_registers<24>();
    if (threadIdx.x != 256) return;
    turn.phase = 1;
#pragma unroll 1
    for (int round = 0; item_of(c, round, kv_head, tile); round++) {
      const u8* from = c.pages + (u64)kv_head * c.pages_a_head * kPageBytes;
#pragma unroll 1
      for (int page = 0; page < pages_of(c, tile); page++, turn.next()) {
        while (!mbarrier_try_wait(empty + 8 * turn.slot, turn.phase)) {
        }
        mbarrier_expect(full + 8 * turn.slot, kPageBytes);
        bulk_load(ring + turn.slot * kPageBytes, from + (u64)page * kPageBytes, kPageBytes, full + 8 * turn.slot);
      }
    }
    return;
  }
  raise_registers<240>();
#pragma unroll 1
  for (int round = 0; item_of(c, round, kv_head, tile); round++)
    attend_tile<LEAF>(c, ring, full, empty, turn, kv_head, tile);
}
