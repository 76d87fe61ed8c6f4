// A product of the matrix kernel: C [rows of weights][tokens] = A B, persistent blocks, tiles of 128 rows by N tokens.
//
// A: fragments of m16k16 as they are packed today, [unit of two row tiles][k16 step][tile][512 bytes]. B: activations in blocks of N tokens,
// [block][k16 step][8 tokens][2 halves of k][token][8 k] bf16, so that a stage is one copy. A stage is kSteps k16 steps of both.
//
// Warps 0 to 3 and 4 to 7 are two consumer warpgroups, 64 rows by N tokens each, A in registers; warp 8 fills the ring. With PAIR a cluster of two
// blocks has neighbouring tiles: of the same tokens (each fetches half of B for both) or of the same rows (half of A).
//
// Shared memory: ring [stages] of a stage's bytes, then [N / 8][thread] 16 bytes for a partial sum (kQuads), then barriers.
// A stage is full once its bytes have landed, empty once all consumer warps (of both blocks of a pair) have read it.
#pragma once
#include "tests/matrix/wgmma.cuh"

/// Order of additions over the 16 leaves of K; a leaf is one chain of k16 steps from zero.
enum Order {
  kChain,      // no leaves: one chain over K
  kAscending,  // leaves, ascending
  kTree,       // leaves as a binary tree; pairs in registers, the rest in memory
  kQuads,      // four leaves ascending, four such sums as a binary tree
};
/// What follows the sums.
enum Epilogue {
  kRaw,       // sums as fp32, [row][token]
  kPartial,   // sums as fp32, as a thread has them: what blocks that divide K tell each other
  kSilu,      // 8 rows of gate and of up a tile: silu(gate) up, scaled by a token's 1 / rms, as the next B in blocks of 128 tokens
  kResidual,  // added to the residual, whose tile comes through the ring; scaled by the norm's weights it is the next B, in blocks of 192 tokens; squares are summed
  kRope,      // scaled by 1 / rms and turned; as bf16 [8 rows][8 tokens]
  kPlain,     // as bf16
};
enum Pair { kAlone, kSameTokens, kSameRows };

#ifndef LP_STEPS
#define LP_STEPS 4
#endif
constexpr int kSteps = LP_STEPS;
struct Product {
  const u8 *a, *b;
  float *raw, *residual, *stash;  // stash: [block][3][N / 2][256]
  u8* next;
  const float *inverse, *norm, *turns;  // [token], [row], [token][64][2]
  float* squares;                       // [row / 16][token]
  int k16, leaf, row_tiles, token_tiles;
};
template <int N, int ORDER> struct Ring {
  static constexpr int A = kSteps * 8 * 512, B = kSteps * N * 32, bytes = A + B;
  static constexpr int slot = ORDER == kQuads ? N * 512 : 0;
  static constexpr int stages = (226 * 1024 - slot) / bytes;
  static constexpr int partial = stages * bytes, full = partial + slot, empty = full + 8 * stages, shared = empty + 8 * stages;
};
extern __shared__ __align__(1024) u8 product_memory[];

LP_DEVICE void bulk_load_pair(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)3) : "memory");
}
LP_DEVICE u32 rank_in_cluster() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

template <int STAGES> struct Turn {
  u32 slot = 0, phase = 0;
  LP_DEVICE void next() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};

template <int N, int ORDER, int PAIR> struct Consumer {
  using R = Ring<N, ORDER>;
  u32 ring, fragments, lane, empty;  // empty: of this lane's block of the pair
  Turn<R::stages> turn;

  LP_DEVICE u32 wait() {
    while (!mbarrier_try_wait(ring + R::full + 8 * turn.slot, turn.phase)) {}
    return ring + turn.slot * R::bytes;
  }
  LP_DEVICE void release(u32 slot) {
    if (PAIR == kAlone) {
      if (lane == 0) mbarrier_arrive(ring + R::empty + 8 * slot);
    } else if (lane < 2) mbarrier_arrive_remote(empty + 8 * slot);
  }
  LP_DEVICE void fetch(Quad* a) {
    const u32 at = wait() + fragments;
#pragma unroll
    for (int i = 0; i < kSteps; i++) a[i] = load_shared_16(at + i * 1024);
  }
  LP_DEVICE void multiply(float* sum, const Quad* a, u32 add) {
    wgmma_fence();
    const u64 b = wgmma_operand(ring + turn.slot * R::bytes + R::A);
#pragma unroll
    for (int i = 0; i < kSteps; i++) wgmma<N>(sum, a[i], wgmma_operand(b, i * N * 32), i == 0 ? add : 1);
    wgmma_commit();
  }
  /// A run of k16 steps, a multiple of 8, in one chain from zero, whose first fragments are in `first`. One stage's products run while the next one's fragments are fetched,
  /// at the end, if there are `more`, those of the next run.
  LP_DEVICE void chain(float* sum, int steps, Quad* first, bool more) {
    Quad second[kSteps];
    u32 before = 0;
    pin<N / 2>(sum);
#pragma unroll 1
    for (int k = 0; k < steps; k += 2 * kSteps) {
      multiply(sum, first, k > 0);
      wgmma_wait<1>();
      if (k > 0) release(before);
      before = turn.slot, turn.next();
      fetch(second);
      multiply(sum, second, 1);
      wgmma_wait<1>();
      release(before);
      before = turn.slot, turn.next();
      if (more || k + 2 * kSteps < steps) fetch(first);
    }
    wgmma_wait<0>();
    release(before);
    pin<N / 2>(sum);
  }
};

template <int N> LP_DEVICE void store_partial(u32 at, const float* v) {
#pragma unroll
  for (int j = 0; j < N / 8; j++) store_shared_16(at + j * 4096, v + 4 * j);
}
template <int N> LP_DEVICE void add_partial(u32 at, float* v) {
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const Quad q = load_shared_16(at + j * 4096);
    v[4 * j] += __uint_as_float(q.x), v[4 * j + 1] += __uint_as_float(q.y), v[4 * j + 2] += __uint_as_float(q.z), v[4 * j + 3] += __uint_as_float(q.w);
  }
}
template <int N> LP_DEVICE void store_memory(float4* at, const float* v) {
#pragma unroll
  for (int j = 0; j < N / 8; j++) at[j * 256] = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}
template <int N> LP_DEVICE void add_memory(const float4* at, float* v) {
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float4 q = at[j * 256];
    v[4 * j] += q.x, v[4 * j + 1] += q.y, v[4 * j + 2] += q.z, v[4 * j + 3] += q.w;
  }
}

/// The sums of a tile, 64 rows by N tokens of a warpgroup, in a product's order.
template <int N, int ORDER, int PAIR> LP_DEVICE void sum_tile(Consumer<N, ORDER, PAIR>& consumer, const Product& p, float* sum) {
  constexpr int R = N / 2;
  using Shape = Ring<N, ORDER>;
  float part[R];
  Quad first[kSteps];
  consumer.fetch(first);
#pragma unroll
  for (int i = 0; i < R; i++) part[i] = 0;
  if constexpr (ORDER == kChain) {
    consumer.chain(sum, p.k16, first, false);
  } else if constexpr (ORDER == kAscending) {
#pragma unroll
    for (int i = 0; i < R; i++) sum[i] = 0;
#pragma unroll 1
    for (int k = 0; k < p.k16; k += p.leaf) {
      consumer.chain(part, p.leaf, first, k + p.leaf < p.k16);
#pragma unroll
      for (int i = 0; i < R; i++) sum[i] += part[i];
    }
  } else if constexpr (ORDER == kTree) {
    float4* mine = reinterpret_cast<float4*>(p.stash + (u64)blockIdx.x * 3 * R * 256) + threadIdx.x;
#pragma unroll 1
    for (u32 pair = 0; pair < 8; pair++) {
      consumer.chain(part, p.leaf, first, true);
      consumer.chain(sum, p.leaf, first, pair < 7);
#pragma unroll
      for (int i = 0; i < R; i++) sum[i] = part[i] + sum[i];
      u32 level = 0;
#pragma unroll 1
      for (; pair >> level & 1; level++) add_memory<N>(mine + level * R * 64, sum);
      if (level < 3) store_memory<N>(mine + level * R * 64, sum);
    }
  } else {
    constexpr bool kRoom = N <= 128;  // for a third set of registers
    float4* mine = reinterpret_cast<float4*>(p.stash + (u64)blockIdx.x * 3 * R * 256) + threadIdx.x;
    const u32 slot = consumer.ring + Shape::partial + threadIdx.x * 16;
    float left[kRoom ? R : 1];
#pragma unroll
    for (int i = 0; i < (kRoom ? R : 1); i++) left[i] = 0;
#pragma unroll 1
    for (int quad = 0; quad < 4; quad++) {
#pragma unroll
      for (int i = 0; i < R; i++) sum[i] = 0;
#pragma unroll 1
      for (int n = 0; n < 4; n++) {
        consumer.chain(part, p.leaf, first, quad * 4 + n < 15);
#pragma unroll
        for (int i = 0; i < R; i++) sum[i] += part[i];
      }
      if constexpr (kRoom) {
        if (quad == 2) store_partial<N>(slot, sum);
        else {
          if (quad == 3) add_partial<N>(slot, sum);
#pragma unroll
          for (int i = 0; i < R; i++) left[i] += sum[i];
        }
      } else {
        if (quad % 2 == 0) store_partial<N>(slot, sum);
        else add_partial<N>(slot, sum);
        if (quad == 1) store_memory<N>(mine, sum);
      }
    }
    if constexpr (kRoom) {
#pragma unroll
      for (int i = 0; i < R; i++) sum[i] = left[i];
    } else add_memory<N>(mine, sum);
  }
}

/// Sums over the 8 lanes of the same t of 2 HALF values each: every lane keeps two of the sums.
template <int HALF> LP_DEVICE void halve(float* v, u32 lane) {
  const bool upper = lane & 2 * HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float mine = upper ? v[HALF + i] : v[i], other = upper ? v[i] : v[HALF + i];
    v[i] = mine + shuffle_xor(other, 2 * HALF);
  }
  if constexpr (HALF > 2) halve<HALF / 2>(v, lane);
}

/// Byte of the next product's B, in blocks of BLOCK tokens: 16 bytes of (k16 step, half, token).
template <int BLOCK> LP_DEVICE u64 next_byte(int k16, int step, int token, int half) {
  return ((u64)(token / BLOCK) * k16 + step) * (BLOCK * 32) + (token % BLOCK / 8 * 2 + half) * 128 + token % 8 * 16;
}

template <int N, int ORDER, int EPILOGUE, int PAIR> LP_DEVICE void finish_tile(Consumer<N, ORDER, PAIR>& consumer, const Product& p, int rows128, int block, float* sum) {
  constexpr int J = N / 8;
  using Shape = Ring<N, ORDER>;
  const int lane = consumer.lane, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, step = rows128 * 8 + warp, token0 = block * N, tokens = p.token_tiles * N;
  if constexpr (EPILOGUE == kRaw) {
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) p.raw[(u64)(step * 16 + g + (c >> 1) * 8) * tokens + token0 + 8 * j + 2 * t + (c & 1)] = sum[4 * j + c];
  } else if constexpr (EPILOGUE == kPartial) {
    store_memory<N>(reinterpret_cast<float4*>(p.raw) + (u64)(rows128 * p.token_tiles + block) * (J * 256) + threadIdx.x, sum);
  } else if constexpr (EPILOGUE == kSilu) {
    const float2* inverse = reinterpret_cast<const float2*>(p.inverse + token0) + t;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float2 scale = __ldg(inverse + 4 * j);
      float v[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float s = c ? scale.y : scale.x, gate = sum[4 * j + c] * s, up = sum[4 * j + 2 + c] * s;
        v[c] = gate * up * reciprocal_approx(1.0f + exp2_approx(gate * -1.4426950408889634f));
      }
      const u32 word = transpose_8x8(bf16_pair(v[0], v[1]));
      store_u32(p.next + next_byte<128>(p.row_tiles * 4, step / 2, token0 + 8 * j + g, t >> 1) + (step & 1) * 8 + (t & 1) * 4, word);
    }
  } else if constexpr (EPILOGUE == kResidual) {
    constexpr int PER = Shape::bytes / 4096;  // groups of 8 tokens a stage
    const float low = p.norm[step * 16 + g], high = p.norm[step * 16 + g + 8];
    float4* residual = reinterpret_cast<float4*>(p.residual) + (u64)(rows128 * p.token_tiles + block) * (J * 256) + threadIdx.x;
#pragma unroll
    for (int first = 0; first < J; first += PER) {
      const u32 at = consumer.wait() + threadIdx.x * 16;
#pragma unroll
      for (int j = first; j < first + PER && j < J; j++) {
        const Quad q = load_shared_16(at + (j - first) * 4096);
        float* x = sum + 4 * j;
        x[0] += __uint_as_float(q.x), x[1] += __uint_as_float(q.y), x[2] += __uint_as_float(q.z), x[3] += __uint_as_float(q.w);
        residual[j * 256] = make_float4(x[0], x[1], x[2], x[3]);
        const u32 upper = transpose_8x8(bf16_pair(x[0] * low, x[1] * low)), lower = transpose_8x8(bf16_pair(x[2] * high, x[3] * high));
        u8* to = p.next + next_byte<192>(p.row_tiles * 8, step, token0 + 8 * j + g, 0) + t * 4;
        store_u32(to, upper);
        store_u32(to + 128, lower);
        x[0] = fmaf(x[0], x[0], x[2] * x[2]), x[1] = fmaf(x[1], x[1], x[3] * x[3]);
      }
      consumer.release(consumer.turn.slot);
      consumer.turn.next();
    }
    // Sums of squares over the warp's rows: the lanes of a token halve what they hold three times.
#pragma unroll
    for (int j = 0; j < J; j += 8) {
      float v[16];
#pragma unroll
      for (int i = 0; i < 16; i++) v[i] = sum[4 * (j + i / 2) + i % 2];
      halve<8>(v, lane);
      const int group = j + (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
      reinterpret_cast<float2*>(p.squares + (u64)step * tokens + token0 + 8 * group)[t] = make_float2(v[0], v[1]);
    }
  } else if constexpr (EPILOGUE == kRope) {
    const float2* inverse = reinterpret_cast<const float2*>(p.inverse + token0) + t;
    const float2* turns = reinterpret_cast<const float2*>(p.turns) + (u64)(token0 + 2 * t) * 64 + step % 8 * 8 + g;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float2 scale = __ldg(inverse + 4 * j), turn[2] = {__ldg(turns + 512 * j), __ldg(turns + 512 * j + 64)};
      float low[2], high[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float s = c ? scale.y : scale.x, x = sum[4 * j + c] * s, y = sum[4 * j + 2 + c] * s;
        low[c] = fmaf(x, turn[c].x, -(y * turn[c].y)), high[c] = fmaf(y, turn[c].x, x * turn[c].y);
      }
      u8* to = p.next + next_byte<128>(p.row_tiles * 8, step, token0 + 8 * j + g, 0) + t * 4;
      store_u32(to, transpose_8x8(bf16_pair(low[0], low[1])));
      store_u32(to + 128, transpose_8x8(bf16_pair(high[0], high[1])));
    }
  } else {
#pragma unroll
    for (int j = 0; j < J; j++) {
      u8* to = p.next + next_byte<N>(p.row_tiles * 8, step, token0 + 8 * j + g, 0) + t * 4;
      store_u32(to, transpose_8x8(bf16_pair(sum[4 * j], sum[4 * j + 1])));
      store_u32(to + 128, transpose_8x8(bf16_pair(sum[4 * j + 2], sum[4 * j + 3])));
    }
  }
}

/// Fills the ring for one tile.
template <int N, int ORDER, int EPILOGUE, int PAIR> LP_DEVICE void fill_tile(Turn<Ring<N, ORDER>::stages>& turn, u32 ring, const Product& p, int rows128, int block, u32 rank) {
  using R = Ring<N, ORDER>;
  const u8 *a = p.a + (u64)rows128 * 4 * p.k16 * 1024, *b = p.b + (u64)block * p.k16 * (N * 32);
#pragma unroll 1
  for (int k = 0; k < p.k16; k += kSteps) {
    while (!mbarrier_try_wait(ring + R::empty + 8 * turn.slot, turn.phase)) {}
    const u32 at = ring + turn.slot * R::bytes, full = ring + R::full + 8 * turn.slot;
    mbarrier_expect(full, R::bytes);
    if constexpr (PAIR == kSameTokens) bulk_load_pair(at + R::A + rank * (R::B / 2), b + (u64)k * (N * 32) + rank * (R::B / 2), R::B / 2, full);
    else bulk_load(at + R::A, b + (u64)k * (N * 32), R::B, full);
#pragma unroll
    for (int u = 0; u < 4; u++) {
      if constexpr (PAIR == kSameRows) {
        if (u / 2 == (int)rank) bulk_load_pair(at + u * (kSteps * 1024), a + ((u64)u * p.k16 + k) * 1024, kSteps * 1024, full);
      } else bulk_load(at + u * (kSteps * 1024), a + ((u64)u * p.k16 + k) * 1024, kSteps * 1024, full);
    }
    turn.next();
  }
  if constexpr (EPILOGUE == kResidual) {
    constexpr int TILE = N * 512;
    const u8* from = reinterpret_cast<const u8*>(p.residual) + (u64)(rows128 * p.token_tiles + block) * TILE;
#pragma unroll 1
    for (int done = 0; done < TILE; done += R::bytes / 4096 * 4096) {
      while (!mbarrier_try_wait(ring + R::empty + 8 * turn.slot, turn.phase)) {}
      const int left = TILE - done, bytes = left < R::bytes / 4096 * 4096 ? left : R::bytes / 4096 * 4096;
      mbarrier_expect(ring + R::full + 8 * turn.slot, bytes);
      bulk_load(ring + turn.slot * R::bytes, from + done, bytes, ring + R::full + 8 * turn.slot);
      turn.next();
    }
  }
}

template <int N, int ORDER, int EPILOGUE, int PAIR> __global__ void __launch_bounds__(384, 1) product(const Product p) {
  using R = Ring<N, ORDER>;
  const u32 ring = shared_address(product_memory), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 rank = PAIR == kAlone ? 0 : rank_in_cluster();
  constexpr int PAIRS = PAIR == kAlone ? 1 : 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::stages; i++) mbarrier_init(ring + R::full + 8 * i, 1), mbarrier_init(ring + R::empty + 8 * i, 8 * PAIRS);
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (PAIR != kAlone) cluster_sync();
  const int rows = PAIR == kSameTokens ? p.row_tiles / 2 : p.row_tiles, blocks = PAIR == kSameRows ? p.token_tiles / 2 : p.token_tiles;
  const auto each_tile = [&](auto&& work) {
#pragma unroll 1
    for (int tile = blockIdx.x / PAIRS; tile < rows * blocks; tile += gridDim.x / PAIRS) {
      const int row = tile / blocks, block = tile % blocks;
      work(PAIR == kSameTokens ? row * 2 + (int)rank : row, PAIR == kSameRows ? block * 2 + (int)rank : block);
    }
  };
  if (warp >= 8) {
    lower_registers<24>();
    if (warp == 8 && lane == 0) {
      Turn<R::stages> turn;
      turn.phase = 1;
      each_tile([&](int row, int block) { fill_tile<N, ORDER, EPILOGUE, PAIR>(turn, ring, p, row, block, rank); });
    }
  } else {
    raise_registers<240>();
    Consumer<N, ORDER, PAIR> consumer{ring, (warp >> 1) * (kSteps * 1024) + (warp & 1) * 512 + lane * 16, lane, PAIR == kAlone ? 0 : map_shared(ring + R::empty, lane & 1)};
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0;
    each_tile([&](int row, int block) {
      sum_tile(consumer, p, sum);
      finish_tile<N, ORDER, EPILOGUE>(consumer, p, row, block, sum);
    });
  }
  __syncwarp();
  if constexpr (PAIR != kAlone) cluster_sync();  // nobody leaves while the other may still write here
}
