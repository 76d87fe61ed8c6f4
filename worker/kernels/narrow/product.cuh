// Products: weights out of the ring, activations out of exchange words, on tensor cores.
#pragma once

namespace narrow {

template <int V> struct Constant {
  static constexpr int value = V;
};

/// A word of a vector.
LP_DEVICE void put_word(u8* word, u32 low, u32 high, u32 tag, u32 extra) {
  if constexpr (kTaggedVectors) store_relaxed_16(word, low, high, tag, extra);
  else store_relaxed_8(word, ~low, ~high);
}

/// B fragments of STEPS k blocks of a vector, whose words begin at `words`, for the columns of `active`. With SQUARES
/// it is a whole leaf, and returns the sum of squares of this lane's column over it, as a binary tree (a tree of
/// eights, where there are eights for one, else these in order). Without FRAGMENTS that is all.
template <int STEPS, bool SQUARES = false, bool FRAGMENTS = true>
LP_DEVICE float get_fragments(const Launch& launch, const u8* words, u32 tag, u32 active, u32 (*b)[2], u32 site) {
  using Leaf = Vector<1, STEPS, SQUARES>;
  constexpr int EIGHTS = (STEPS + 7) / 8, FRAGMENT_STEPS = FRAGMENTS ? STEPS : 0;
  const int lane = lane_index(), g = lane >> 2, t = lane & 3;
  float eights[EIGHTS] = {};
  if constexpr (kTaggedVectors) {
    // One column: the 32 lanes share the words and hand them out.
    u32 x[EIGHTS], y[EIGHTS], squares[EIGHTS];
    poll_words<EIGHTS, true>(launch, words + lane * 16, 512, tag, (STEPS * 4 + 31 - lane) / 32, x, y, squares, site);
#pragma unroll
    for (int j = 0; j < FRAGMENT_STEPS; j++) {
      const u32 low = shuffle(x[j / 8], (j % 8) * 4 + t), high = shuffle(y[j / 8], (j % 8) * 4 + t);
      b[j][0] = g == 0 ? low : 0;
      b[j][1] = g == 0 ? high : 0;
    }
#pragma unroll
    for (int e = 0; e < (SQUARES ? EIGHTS : 0); e++) {
      float q = __uint_as_float(squares[e]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) q += shuffle_xor(q, d);
      eights[e] = q;
    }
  } else {
    const bool on = active >> g & 1;
    Quad v[Leaf::rows + Leaf::square_rows] = {};
    const auto missing = [&](int j) {
      // k blocks that are left at this row and lane: of which it holds two, or the squares of four.
      const int left = !on ? 0 : STEPS - (j < Leaf::rows ? 2 * j : 16 * (j - Leaf::rows) + 4 * t);
      if (j < Leaf::rows) return left > 0 && v[j].x == 0 ? j * 512 : left > 1 && v[j].z == 0 ? j * 512 + 8 : kThere;
      return left > 0 && v[j].x == 0   ? j * 512
             : left > 1 && v[j].y == 0 ? j * 512 + 4
             : left > 2 && v[j].z == 0 ? j * 512 + 8
             : left > 3 && v[j].w == 0 ? j * 512 + 12
                                       : kThere;
    };
    const auto fetch = [&](int j) {
      if (missing(j) != kThere)
        v[j] = j < Leaf::rows ? load_relaxed_8x2(words + lane * 16 + j * 512)
                              : load_relaxed_4x4(words + lane * 16 + j * 512);
    };
    constexpr int FIRST = FRAGMENTS ? 0 : Leaf::rows;  // row that is read
    poll<Leaf::rows + Leaf::square_rows - FIRST, true>(
        launch, words + lane * 16, ~0u, [&](int j) { fetch(FIRST + j); }, [&](int j) { return missing(FIRST + j); },
        [](u32 seen) { return seen != 0; }, site);
#pragma unroll
    for (int k = 0; k < FRAGMENT_STEPS; k++) {
      const Quad& pair = v[k / 2];
      b[k][0] = on ? ~(k % 2 ? pair.z : pair.x) : 0;
      b[k][1] = on ? ~(k % 2 ? pair.w : pair.y) : 0;
    }
#pragma unroll
    for (int row = 0; row < Leaf::square_rows; row++) {
      const Quad& quad = v[Leaf::rows + row];
      const auto square = [&](u32 word, int i) {
        return on && 16 * row + 4 * t + i < STEPS ? __uint_as_float(~word) : 0;
      };
      float eight = (square(quad.x, 0) + square(quad.y, 1)) + (square(quad.z, 2) + square(quad.w, 3));
      eight += shuffle_xor(eight, 1);
#pragma unroll
      for (int e = 0; e < 2 && row * 2 + e < EIGHTS; e++) eights[row * 2 + e] = shuffle(eight, (lane & ~3) + 2 * e);
    }
  }
  if constexpr (!SQUARES) return 0;
  if constexpr ((EIGHTS & (EIGHTS - 1)) == 0) return tree_sum<EIGHTS>(eights);
  float sum = eights[0];
#pragma unroll
  for (int e = 1; e < EIGHTS; e++) sum += eights[e];
  return sum;
}

/// Where a chunk of the stream that begins at k16 step `begin` of a leaf ends.
template <class P, int STEPS, int WIDTH> constexpr int chunk_end(int begin) {
  const int part = begin / kPartSteps * kPartSteps + kPartSteps,
            full = begin + chunk_steps<P>(WIDTH);
  return part < full ? (part < STEPS ? part : STEPS) : (full < STEPS ? full : STEPS);
}
/// Chunks of a leaf.
template <class P, int WIDTH> constexpr int chunks_of() {
  int chunks = 0;
  for (int begin = 0; begin < P::leaf_steps; begin = chunk_end<P, P::leaf_steps, WIDTH>(begin)) chunks++;
  return chunks;
}
/// Adds STEPS k16 steps of the products of WIDTH row tiles, in one chain a tile: the next chunks of the stream. round:
/// chunks of the ring for each of this warp's.
template <class P, int STEPS, int WIDTH, int BEGIN = 0>
LP_DEVICE void multiply_steps(Consumer& consumer, u32 round, const u32 (*b)[2], float (*acc)[4]) {
  if constexpr (BEGIN < STEPS) {
    constexpr int END = chunk_end<P, STEPS, WIDTH>(BEGIN);
    const u32 chunk = consumer.next + consumer.turn(), base = consumer.wait(chunk);
#ifdef LP_RELEASE_EARLY
    consumer.release(chunk, false);  // negative control
#endif
    RunScales<P::format> scales[WIDTH];
    StoredRun<P> weights[WIDTH];
#pragma unroll
    for (int k = BEGIN; k < END; k++)
#pragma unroll
      for (int n = 0; n < WIDTH; n++) {
        const u32 run = base + ((k - BEGIN) / P::run_steps * WIDTH + n) * P::run;
        if (k % P::run_steps == 0) {
          scales[n] = RunScales<P::format>::load(run);
          weights[n] = StoredRun<P>::load(run);
        }
        mma_m16n8k16(acc[n], weights[n].operand(k % P::run_steps, scales[n]), b[k][0], b[k][1]);
      }
    bool never = false;
#pragma unroll
    for (int n = 0; n < WIDTH; n++) never |= __float_as_uint(acc[n][0]) == 0x7fedcba9u;
#ifndef LP_RELEASE_EARLY
    consumer.release(chunk, never);
#endif
    consumer.next += round;
    multiply_steps<P, STEPS, WIDTH, END>(consumer, round, b, acc);
  }
}

/// The partial results of a block's row tiles, two tiles a set, on their way from the consumers to the epilogue. Orders
/// the partials of all consumer warps before the epilogue's reads, and those reads before the next set but one (block).
struct Partials {
  const Launch& launch;
  u32 shared, set = 0;

  LP_DEVICE Partials(const Launch& launch, u32 shared) : launch(launch), shared(shared) {}
  /// Leaf `leaf` of WIDTH tiles of the set, from its tile `first` on, if it is `mine`.
  template <int WIDTH> LP_DEVICE void put(bool mine, int first, int leaf, const float (*acc)[4]) {
    const u32 buffer = set & 1;
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
    wait_barrier(launch, shared + Shared::partials_empty + 8 * buffer, (set >> 1 & 1) ^ 1, kSitePartialsEmpty);
    __syncwarp();
    if (mine) {
#pragma unroll
      for (int n = 0; n < WIDTH; n++) {
        const u32 to = shared + Shared::partials + buffer * kSetBytes +
                       (((first + n) * kWarps + leaf) * kColumns * 16 + g) * 4;
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
  /// Waits until all warps have put the last set.
  LP_DEVICE void wait_last() const {
    const u32 last = set - 1;
    wait_barrier(launch, shared + Shared::partials_full + 8 * (last & 1), last >> 1 & 1, kSitePartialsFull);
    __syncwarp();
  }
};

/// Whether a warp without work in a product may pass over more chunks of its ring than parities tell apart (ring.cuh).
template <class P> constexpr bool may_run_ahead() {
  const int passed = (P::most_tiles + P::at_a_time - 1) / P::at_a_time * chunks_of<P, 1>();
  return P::ways > 1 && kRingWarps > 1 && passed + (int)kRingWarps > 2 * (int)Shared::slots;
}
/// The block's share of a product, as many tiles at a time as have warps: `work` adds this warp's leaf of WIDTH tiles
/// to sums that are zero. Where several sets are computed at a time, a warp passes on those of others behind its own
/// work.
template <class P, class F> LP_DEVICE void each_set(Consumer& consumer, Partials& partials, F&& work) {
  const int end = P::first_tile(rank_block() + 1);
  bool passed = false;  // over chunks of the last tiles
#pragma unroll 1
  for (int tile = P::first_tile(rank_block()); tile < end; tile += P::at_a_time) {
    float acc[2][4] = {};
    const bool mine = P::works(consumer.warp, tile, end);
    const u32 round = consumer.template round<P>(tile, end);
    const auto unit = [&](auto width) {
      constexpr int WIDTH = decltype(width)::value;
      if (mine) work(width, round, acc);
      else if constexpr (P::ways > 1) consumer.next += round * chunks_of<P, WIDTH>(), passed = true;  // another warp's
      const int way = P::way(consumer.warp), leaf = P::leaf(consumer.warp);
      if constexpr (P::at_a_time == 2) {
        partials.template put<WIDTH>(mine, way, leaf, acc);
      } else {
#pragma unroll 1
        for (int set = 0; set < P::at_a_time && tile + set < end; set += 2)
          partials.template put<WIDTH>(mine && way / 2 * 2 == set, way % 2, leaf, acc);
      }
    };
    if (P::ways == 1 && tile + 1 < end) unit(Constant<2>{}); else unit(Constant<1>{});
  }
  // All warps have put the last set, so the chunks that were passed over have landed. (None puts the next but one into
  // its buffer before this warp has.)
#ifndef LP_UNAWAITED  // negative control
  if constexpr (may_run_ahead<P>())
    if (any_lane(passed)) partials.wait_last();
#endif
}

/// The same for a product whose leaf of activations lies in `b`.
template <class P> LP_DEVICE void multiply(Consumer& consumer, Partials& partials, const u32 (*b)[2]) {
  each_set<P>(consumer, partials, [&](auto width, u32 round, float (*acc)[4]) {
    multiply_steps<P, P::leaf_steps, decltype(width)::value>(consumer, round, b, acc);
  });
}

/// The same for a leaf that is too long for registers: its activations are fetched PART k blocks at a time, for each
/// set. `leaf`: byte of the words. Calls `arrived` when the first have arrived.
template <class P, int PART, class F> LP_DEVICE void multiply_fetching(Consumer& consumer, Partials& partials, u32 leaf,
                                                                       u32 tag, u32 active, u32 site, F&& arrived) {
  static_assert(PART == kPartSteps || (P::run_steps == 1 && PART == chunk_steps<P>(1)),
                "parts end where chunks of the stream do");
  constexpr int REST = P::leaf_steps % PART;
  bool first = true;
  each_set<P>(consumer, partials, [&](auto width, u32 round, float (*acc)[4]) {
    u32 b[PART][2];
#pragma unroll 1
    for (int k = 0; k + PART <= P::leaf_steps; k += PART) {
      get_fragments<PART>(consumer.launch, consumer.launch.words + leaf + k / PART * Vector<1, PART>::bytes, tag,
                          active, b, site);
      if (first) arrived();
      first = false;
      multiply_steps<P, PART, decltype(width)::value>(consumer, round, b, acc);
    }
    if constexpr (REST > 0) {
      get_fragments<REST>(consumer.launch, consumer.launch.words + leaf + P::leaf_steps / PART * Vector<1, PART>::bytes,
                          tag, active, b, site);
      multiply_steps<P, REST, decltype(width)::value>(consumer, round, b, acc);
    }
  });
}

/// Takes this warp's chunks of a product and gives them back: they were streamed for a step that is not. A call, which
/// takes no registers from products.
template <class P> static __device__ __noinline__ void pass_over(Consumer consumer) {
  static_assert(P::ways == 1, "a warp has its leaf of all tiles, or none");
  if (consumer.warp >= P::workers) return;
  const int end = P::first_tile(rank_block() + 1);
#pragma unroll 1
  for (int tile = P::first_tile(rank_block()); tile < end; tile += 2) {
    const int chunks = tile + 1 < end ? chunks_of<P, 2>() : chunks_of<P, 1>();
#pragma unroll 1
    for (int i = 0; i < chunks; i++, consumer.next += kRingWarps) {
      const u32 chunk = consumer.next + consumer.turn();
      consumer.wait(chunk);
      consumer.release(chunk, false);
    }
  }
}

}  // namespace narrow
