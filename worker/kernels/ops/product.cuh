// Products: weights out of the ring, activations out of exchange words, on tensor cores.
#pragma once

template <int V> struct Constant {
  static constexpr int value = V;
};

template <int N> LP_DEVICE float tree_sum(const float* v) {
  if constexpr (N == 1) return v[0];
  else return tree_sum<N / 2>(v) + tree_sum<N / 2>(v + N / 2);
}

/// B fragments of STEPS k blocks of a vector, from block `first` on, for the columns of `active`; returns the sum of squares of this
/// lane's column over them: by eights as a tree, the eights in order. With one column the 32 lanes share the words and hand them out.
template <int STEPS> LP_DEVICE float get_fragments(const Launch& launch, const u8* vector, int first, u32 tag, u32 active, u32 (*b)[2], u32 site) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr int EIGHTS = (STEPS + 7) / 8;
  float sum = 0;
  if constexpr (kColumns == 1) {
    u32 x[EIGHTS], y[EIGHTS], squares[EIGHTS];
    if constexpr (STEPS % 8 == 0) {
      poll_words<EIGHTS>(launch, vector + vector_word(first, 0) + lane * 16, 8 * 64, tag, true, x, y, squares, site);
    } else {
      if constexpr (EIGHTS > 1) poll_words<EIGHTS - 1>(launch, vector + vector_word(first, 0) + lane * 16, 8 * 64, tag, true, x, y, squares, site);
      poll_words<1>(launch, vector + vector_word(first + (EIGHTS - 1) * 8, 0) + lane * 16, 0, tag, g < STEPS % 8, x + EIGHTS - 1, y + EIGHTS - 1, squares + EIGHTS - 1, site);
    }
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const u32 low = shuffle(x[j / 8], (j % 8) * 4 + t), high = shuffle(y[j / 8], (j % 8) * 4 + t);
      b[j][0] = g == 0 ? low : 0;
      b[j][1] = g == 0 ? high : 0;
    }
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      float q = __uint_as_float(squares[e]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) q += shuffle_xor(q, d);
      sum += q;
    }
  } else {
    const bool on = active >> g & 1;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      constexpr int LAST = STEPS - (EIGHTS - 1) * 8;
      u32 x[8], y[8], squares[8];
      const u8* words = vector + vector_word(first + e * 8, g) + t * 16;
      const int n = e + 1 < EIGHTS ? 8 : LAST;
      if (e + 1 < EIGHTS || LAST == 8) poll_words<8>(launch, words, vector_word(1, 0), tag, on, x, y, squares, site);
      else poll_words<LAST>(launch, words, vector_word(1, 0), tag, on, x, y, squares, site);
      float q[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        q[j] = j < n ? __uint_as_float(squares[j]) : 0;
        if (j < n) b[e * 8 + j][0] = x[j], b[e * 8 + j][1] = y[j];
      }
      sum += tree_sum<8>(q);
    }
  }
  return sum;
}

/// Where a chunk of the stream that begins at k16 step `begin` of a leaf ends.
template <int STEPS, int WIDTH> constexpr int chunk_end(int begin) {
  const int part = begin / kPartSteps * kPartSteps + kPartSteps, full = begin + (int)kSlotBytes / (WIDTH * kFragment);
  return part < full ? (part < STEPS ? part : STEPS) : (full < STEPS ? full : STEPS);
}
/// Adds STEPS k16 steps of the products of WIDTH row tiles, in one chain a tile: the next chunks of the stream.
template <int STEPS, int WIDTH, int BEGIN = 0> LP_DEVICE void multiply_steps(Consumer& consumer, const u32 (*b)[2], float (*acc)[4]) {
  if constexpr (BEGIN < STEPS) {
    constexpr int END = chunk_end<STEPS, WIDTH>(BEGIN);
    const u32 chunk = consumer.next + consumer.turn(), base = consumer.wait(chunk) + (threadIdx.x & 31) * 16;
#ifdef LP_RELEASE_EARLY
    consumer.release(chunk, false);  // negative control
#endif
#pragma unroll
    for (int k = BEGIN; k < END; k++)
#pragma unroll
      for (int n = 0; n < WIDTH; n++) mma_m16n8k16(acc[n], load_shared_16(base + ((k - BEGIN) * WIDTH + n) * kFragment), b[k][0], b[k][1]);
    bool never = false;
#pragma unroll
    for (int n = 0; n < WIDTH; n++) never |= __float_as_uint(acc[n][0]) == 0x7fedcba9u;
#ifndef LP_RELEASE_EARLY
    consumer.release(chunk, never);
#endif
    consumer.next += kRingWarps;
    multiply_steps<STEPS, WIDTH, END>(consumer, b, acc);
  }
}

/// The partial results of a block's row tiles, two tiles a set, on their way from the consumers to the epilogue. Orders the partials
/// of all consumer warps before the epilogue's reads, and those reads before the next set but one (block).
struct Partials {
  const Launch& launch;
  u32 shared, warp, set = 0;

  LP_DEVICE Partials(const Launch& launch, u32 shared, u32 warp) : launch(launch), shared(shared), warp(warp) {}
  template <int WIDTH> LP_DEVICE void put(bool mine, const float (*acc)[4]) {
    const u32 buffer = set & 1;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    wait_barrier(launch, shared + Shared::partials_empty + 8 * buffer, (set >> 1 & 1) ^ 1, kSitePartialsEmpty);
    __syncwarp();
    if (mine) {
#pragma unroll
      for (int n = 0; n < WIDTH; n++) {
        const u32 to = shared + Shared::partials + buffer * kSetBytes + ((n * kWarps + warp) * kColumns * 16 + g) * 4;
#pragma unroll
        for (int c = 0; c < 2; c++)
          if (2 * t + c < kColumns) {
            store_shared_f32(to + (2 * t + c) * 64, acc[n][c]);
            store_shared_f32(to + (2 * t + c) * 64 + 32, acc[n][2 + c]);
          }
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + Shared::partials_full + 8 * buffer);
    set++;
  }
};

/// The block's share of a product whose leaf lies in `b`: for each unit this warp's leaf of it.
template <class P> LP_DEVICE void multiply(Consumer& consumer, Partials& partials, const u32 (*b)[2]) {
  const int end = P::first_tile(blockIdx.x + 1);
  const bool mine = consumer.warp < P::leaves;
#pragma unroll 1
  for (int tile = P::first_tile(blockIdx.x); tile < end; tile += 2) {
    float acc[2][4] = {};
    const auto unit = [&](auto width) {
      if (mine) multiply_steps<P::leaf_steps, decltype(width)::value>(consumer, b, acc);
      partials.template put<decltype(width)::value>(mine, acc);
    };
    if (tile + 1 < end) unit(Constant<2>{}); else unit(Constant<1>{});
  }
}

/// The same for down, whose leaf is too long for registers: its activations are fetched 16 k blocks at a time. `arrived` is told of the first.
template <class P, class F> LP_DEVICE void multiply_fetching(Consumer& consumer, Partials& partials, const u8* vector, u32 tag, u32 active, u32 site, F&& arrived) {
  constexpr int PART = kPartSteps, REST = P::leaf_steps % PART;
  const int end = P::first_tile(blockIdx.x + 1);
  const bool mine = consumer.warp < P::leaves;
#pragma unroll 1
  for (int tile = P::first_tile(blockIdx.x); tile < end; tile += 2) {
    float acc[2][4] = {};
    const auto unit = [&](auto width) {
      const int leaf = consumer.warp * P::leaf_steps;
      u32 b[PART][2];
#pragma unroll 1
      for (int k = 0; mine && k + PART <= P::leaf_steps; k += PART) {
        get_fragments<PART>(consumer.launch, vector, leaf + k, tag, active, b, site);
        if (k == 0 && tile == P::first_tile(blockIdx.x)) arrived();
        multiply_steps<PART, decltype(width)::value>(consumer, b, acc);
      }
      if constexpr (REST > 0)
        if (mine) {
          get_fragments<REST>(consumer.launch, vector, leaf + P::leaf_steps - REST, tag, active, b, site);
          multiply_steps<REST, decltype(width)::value>(consumer, b, acc);
        }
      partials.template put<decltype(width)::value>(mine, acc);
    };
    if (tile + 1 < end) unit(Constant<2>{}); else unit(Constant<1>{});
  }
}
