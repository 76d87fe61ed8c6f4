// A product of the matrix kernel: C [rows of weights][tokens] = A B, persistent blocks, tiles of 128 rows by N tokens.
//
// A: fragments of m16k16 as they are packed today, [unit of two row tiles][k16 step][tile][512 bytes]. B: activations
// in blocks of N tokens, [block][k16 step][8 tokens][2 halves of k][token][8 k] bf16, so that a stage is one copy. A
// stage is kSteps k16 steps of both.
//
// Warps 0 to 3 and 4 to 7 are two consumer warpgroups, 64 rows by N tokens each, A in registers; warp 8 fills the ring.
// With PAIR a cluster of two blocks has neighbouring tiles: of the same tokens (each fetches half of B for both) or of
// the same rows (half of A).
//
// Shared memory: ring [stages] of a stage's bytes, then [N / 8][thread] 16 bytes for a partial sum (kQuads), then
// barriers. A stage is full once its bytes have landed, empty once all consumer warps (of both blocks of a pair) have
// read it.
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
  kRaw,      // sums as fp32, [row][token]
  kPartial,  // sums as fp32, as a thread has them: what blocks that divide K tell each other
  kSilu,  // 8 rows of gate and of up a tile: silu(gate) up, scaled by a token's 1 / rms, as the next B in blocks of 128
          // tokens
  kResidual,  // added to the residual, whose tile comes through the ring; scaled by the norm's weights it is the next
              // B, in blocks of 128 tokens; squares are summed
  kRope,      // scaled by 1 / rms and turned; as bf16 [8 rows][8 tokens]
  kPlain,     // as bf16
};
enum Pair { kAlone, kSameTokens, kSameRows };

constexpr int kSteps = 4;  // stages of two cost a quarter more
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
  static constexpr int partial = stages * bytes, full = partial + slot, empty = full + 8 * stages,
                       shared = empty + 8 * stages;
};
extern __shared__ __align__(1024) u8 product_memory[];

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
    while (!mbarrier_try_wait(ring + R::full + 8 * turn.slot, turn.phase)) {
    }
    return ring + turn.slot * R::bytes;
  }
  LP_DEVICE void release(u32 slot) {
    if (PAIR == kAlone) {
      if (lane == 0) mbarrier_arrive(ring + R::empty + 8 * slot);
    } else if (lane < 2)
      mbarrier_arrive_remote(empty + 8 * slot);
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
  /// A run of k16 steps, whole stages, in one chain from zero, whose first fragments are in `first`. One stage's
  /// products run while the next one's fragments are fetched, at the end, if there are `more`, those of the next run.
  LP_DEVICE void chain(float* sum, int steps, Quad* first, bool more) {
    Quad second[kSteps];
    u32 before = 0;
    pin<N / 2>(sum);
#pragma unroll 1
    for (int k = 0;; k += 2 * kSteps) {
      multiply(sum, first, k > 0);
      wgmma_wait<1>();
      if (k > 0) release(before);
      before = turn.slot, turn.next();
      const int left = steps - k - kSteps;
      if (left == 0) break;
      fetch(second);
      multiply(sum, second, 1);
      wgmma_wait<1>();
      release(before);
      before = turn.slot, turn.next();
      if (more || left > kSteps) fetch(first);
      if (left == kSteps) break;
    }
    wgmma_wait<0>();
    release(before);
    if (more && steps / kSteps % 2) fetch(first);
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
    v[4 * j] += __uint_as_float(q.x), v[4 * j + 1] += __uint_as_float(q.y), v[4 * j + 2] += __uint_as_float(q.z),
        v[4 * j + 3] += __uint_as_float(q.w);
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
template <int N, int ORDER, int PAIR>
LP_DEVICE void sum_tile(Consumer<N, ORDER, PAIR>& consumer, const Product& p, float* sum) {
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
        if (quad == 2)
          store_partial<N>(slot, sum);
        else {
          if (quad == 3) add_partial<N>(slot, sum);
#pragma unroll
          for (int i = 0; i < R; i++) left[i] += sum[i];
        }
      } else {
        if (quad % 2 == 0)
          store_partial<N>(slot, sum);
        else
          add_partial<N>(slot, sum);
        if (quad == 1) store_memory<N>(mine, sum);
      }
    }
    if constexpr (kRoom) {
#pragma unroll
      for (int i = 0; i < R; i++) sum[i] = left[i];
    } else
      add_memory<N>(mine, sum);
  }
}
