// The kernel of a product (product_tile.cuh) with an epilogue (epilogues.cuh): one block a multiprocessor takes tiles
// in turn, all token blocks of a run of rows one after the other.
#pragma once
#include "tests/matrix/epilogues.cuh"

/// Fills the ring for one tile.
template <int N, int ORDER, int EPILOGUE, int PAIR> LP_DEVICE void fill_tile(Turn<Ring<N, ORDER>::stages>& turn,
                                                                             u32 ring, const Product& p, int rows128,
                                                                             int block, u32 rank) {
  using R = Ring<N, ORDER>;
  const u8 *a = p.a + (u64)rows128 * 4 * p.k16 * 1024, *b = p.b + (u64)block * p.k16 * (N * 32);
#pragma unroll 1
  for (int k = 0; k < p.k16; k += kSteps) {
    while (!mbarrier_try_wait(ring + R::empty + 8 * turn.slot, turn.phase)) {
    }
    const u32 at = ring + turn.slot * R::bytes, full = ring + R::full + 8 * turn.slot;
    mbarrier_expect(full, R::bytes);
    if constexpr (PAIR == kSameTokens)
      bulk_load_pair(at + R::A + rank * (R::B / 2), b + (u64)k * (N * 32) + rank * (R::B / 2), R::B / 2, full);
    else
      bulk_load(at + R::A, b + (u64)k * (N * 32), R::B, full);
#pragma unroll
    for (int u = 0; u < 4; u++) {
      if constexpr (PAIR == kSameRows) {
        if (u / 2 == (int)rank)
          bulk_load_pair(at + u * (kSteps * 1024), a + ((u64)u * p.k16 + k) * 1024, kSteps * 1024, full);
      } else
        bulk_load(at + u * (kSteps * 1024), a + ((u64)u * p.k16 + k) * 1024, kSteps * 1024, full);
    }
    turn.next();
  }
  if constexpr (EPILOGUE == kResidual) {
    constexpr int TILE = N * 512;
    const u8* from = reinterpret_cast<const u8*>(p.residual) + (u64)(rows128 * p.token_tiles + block) * TILE;
#pragma unroll 1
    for (int done = 0; done < TILE; done += R::bytes / 4096 * 4096) {
      while (!mbarrier_try_wait(ring + R::empty + 8 * turn.slot, turn.phase)) {
      }
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
    for (int i = 0; i < R::stages; i++)
      mbarrier_init(ring + R::full + 8 * i, 1), mbarrier_init(ring + R::empty + 8 * i, 8 * PAIRS);
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (PAIR != kAlone) cluster_sync();
  const int rows = PAIR == kSameTokens ? p.row_tiles / 2 : p.row_tiles,
            blocks = PAIR == kSameRows ? p.token_tiles / 2 : p.token_tiles;
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
    Consumer<N, ORDER, PAIR> consumer{ring, (warp >> 1) * (kSteps * 1024) + (warp & 1) * 512 + lane * 16, lane,
                                      PAIR == kAlone ? 0 : map_shared(ring + R::empty, lane & 1)};
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
