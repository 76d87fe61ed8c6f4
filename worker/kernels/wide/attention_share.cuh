// What a warp does with pages: the share of a span that it owns, with an online maximum; and what this step adds to
// them.
#pragma once

namespace wide {

/// K and V of a position of this step, which the page that was copied does not have yet.
struct Fresh {
  static constexpr int kWords = kDimTiles / 4;  // of a lane: K's, then V's
  static constexpr u32 kStride = 8 * kColumns * kQkvWordBytes;
  u32 x[kWords], y[kWords];
  float k;  // 1 / rms of K (kQkNorm)

  /// The lane's first word of a row.
  LP_DEVICE static const u8* words(const Launch& launch, u32 kv_head, u32 row) {
    const u32 lane = lane_index();
    return launch.words + qkv_word(kv_head, kQueriesPerKv * kDimTiles + lane / 4, row) + lane % 4 * 16;
  }
  /// Of rows newest, newest - 1, ..., but not before `oldest`, which comes again instead.
  static constexpr u32 kTogether = 4;
  LP_DEVICE static void receive(const Launch& launch, u32 kv_head, u32 newest, u32 oldest, u32 tag, Fresh* to) {
    constexpr u32 WORDS = kTogether * kWords;
    const auto at = [&](u32 j) {
      const u32 back = j / kWords, row = newest - oldest < back ? oldest : newest - back;
      return words(launch, kv_head, row) + j % kWords * kStride;
    };
    u32 of_x[WORDS], of_y[WORDS], squares[WORDS];
    receive_words<WORDS>(launch, at, tag, of_x, of_y, squares, kSiteFresh);
#pragma unroll
    for (u32 i = 0; i < kTogether; i++) to[i].take(of_x + i * kWords, of_y + i * kWords, squares + i * kWords);
  }
  LP_DEVICE void take(const u32* of_x, const u32* of_y, const u32* squares) {
#pragma unroll
    for (int i = 0; i < kWords; i++) x[i] = of_x[i], y[i] = of_y[i];
    if constexpr (!kQkNorm) return;
    float sum = lane_index() / 4 < kDimTiles ? __uint_as_float(squares[0]) : 0;
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum += shuffle_xor(sum, d);
    k = inverse_rms<kHeadWidth>(shuffle(sum, 0));
  }
  /// Into a page in shared memory at `stage`, at position `at` of it, and into the one in memory, if there is a `page`.
  /// A whole warp calls it.
  LP_DEVICE void put(u32 stage, u32 at, u8* page) const {
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const u32 tile = i * 8 + lane_index() / 4, dim = tile % kDimTiles * 16 + lane_index() % 4 * 2;
      const bool key = tile < kDimTiles;
      const u32 to = key ? k_byte(at, dim) : v_byte(at, dim);
      if (key) {
        store_shared_u32(stage + to, x[i]);
        store_shared_u32(stage + to + 128, y[i]);
        if (page) store_u32(page + to, x[i]), store_u32(page + to + 128, y[i]);
      } else {
        const u32 v[4] = {x[i], x[i] >> 16, y[i], y[i] >> 16};  // of dimensions d, d + 1, d + 8, d + 9
#pragma unroll
        for (u32 d = 0; d < 4; d++) {
          store_shared_u16(stage + to + d / 2 * 128 + d % 2 * 16, v[d]);
          if (page) store_u16(page + to + d / 2 * 128 + d % 2 * 16, v[d]);
        }
      }
    }
    __syncwarp();
  }
};

/// What an n8 tile of a group's columns has of a share: columns 2 t and 2 t + 1 of the tile.
struct Share {
  u32 queries[kDimTiles][2];     // B fragments: column g
  float scale[2];                // of scores, all but k's part
  float reference[2], total[2] = {};
  float out[kDimTiles][4] = {};  // dimensions 16 j + g and + 8

  /// first: column of the group; begin: its first row. `fresh`: K and V of the item's last position, which come with
  /// the queries.
  LP_DEVICE Share(const Launch& launch, const AttentionItem& item, u32 begin, u32 first, u32 columns, u32 tag,
                  Fresh& fresh) {
    constexpr u32 WORDS = kDimTiles + Fresh::kWords;
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
    const bool on = first + g < columns;
    const u32 column = on ? first + g : first, row = begin + column / kQueriesPerKv;
    const u8 *query = launch.words + qkv_word(item.kv_head, column % kQueriesPerKv * kDimTiles, row) + t * 16,
             *newest = Fresh::words(launch, item.kv_head, item.last);
    const auto at = [&](u32 j) {
      return j < kDimTiles ? query + j * (kColumns * kQkvWordBytes) : newest + (j - kDimTiles) * Fresh::kStride;
    };
    u32 x[WORDS], y[WORDS], extra[WORDS];
    receive_words<WORDS>(launch, at, tag, x, y, extra, kSiteQuery);
    float squares[kDimTiles];
#pragma unroll
    for (int j = 0; j < kDimTiles; j++) {
      queries[j][0] = on ? x[j] : 0, queries[j][1] = on ? y[j] : 0;
      squares[j] = __uint_as_float(extra[j]);
    }
    const float inverse = kQkNorm && on ? inverse_rms<kHeadWidth>(tree_sum<kDimTiles>(squares)) : 1;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      reference[c] = kMinusInfinity;
      scale[c] = kQkNorm ? kScoreScale * shuffle(inverse, 8 * t + 4 * c) : kScoreScale;
    }
    fresh.take(x + kDimTiles, y + kDimTiles, extra + kDimTiles);
  }
  /// Adds a page, in shared memory at `stage`. seen(position of the page, column): whether that column sees it;
  /// `whole`: all do. k: 1 / rms (kQkNorm). True never, which only the products know.
  template <class SEEN> LP_DEVICE bool add_page(u32 stage, bool whole, const SEEN& seen, const float (*k)[2]) {
    const u32 g = lane_index() >> 2, keys = stage + k_rows(0, kGroupBytes), values = stage + v_rows(0, kGroupBytes);
    float score[kPageLeaves][4] = {};
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++) {
        const Quad fragment = ldmatrix_x4(keys + l * kLeafBytes + j * kFragmentDims);
        mma_m16n8k16(score[l], fragment, queries[j][0], queries[j][1]);
      }
    float keep[2], factor[2];
    u32 weights[kPageLeaves][2];
    float most[2] = {kMinusInfinity, kMinusInfinity}, base[2], sum[kPageLeaves][2];
#pragma unroll
    for (int l = 0; l < kPageLeaves; l++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& s = score[l][i];
        s *= kQkNorm ? scale[i & 1] * k[l][i >> 1] : kScoreScale;
        if (!whole && !seen(l * kLeafPositions + g + 8 * (i >> 1), i & 1)) s = kMinusInfinity;
        most[i & 1] = fmaxf(most[i & 1], s);
      }
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) most[c] = fmaxf(most[c], shuffle_xor(most[c], d));
      most[c] = ceilf(most[c]);
      // A page of which nothing is seen has weights of zero, not NaN.
      base[c] = fmaxf(most[c], -3.4e38f);
    }
#pragma unroll
    for (int l = 0; l < kPageLeaves; l++) {
      float* s = score[l];
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = exp2_approx(s[i] - base[i & 1]);
#pragma unroll
      for (int c = 0; c < 2; c++) sum[l][c] = s[c] + s[2 + c];
      weights[l][0] = transpose_8x8(bf16_pair(s[0], s[1]));
      weights[l][1] = transpose_8x8(bf16_pair(s[2], s[3]));
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++)
#pragma unroll
        for (int c = 0; c < 2; c++) sum[l][c] += shuffle_xor(sum[l][c], d);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float now = fmaxf(reference[c], most[c]);
      float page = sum[0][c];
#pragma unroll
      for (int l = 1; l < kPageLeaves; l++) page += sum[l][c];
      keep[c] = rescale(reference[c], now);
      factor[c] = rescale(most[c], now);
      total[c] = fmaf(keep[c], total[c], factor[c] * page);
      reference[c] = now;
    }
    bool never = false;
    constexpr int kSide = 4;  // chains side by side: a product waits for the one before it in its chain
#pragma unroll
    for (int first = 0; first < kDimTiles; first += kSide) {
      float page[kSide][4] = {};
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++)
#pragma unroll
        for (int j = 0; j < kSide; j++) {
          const Quad fragment = ldmatrix_x4(values + l * kLeafBytes + (first + j) * kFragmentDims);
          mma_m16n8k16(page[j], fragment, weights[l][0], weights[l][1]);
        }
#pragma unroll
      for (int j = 0; j < kSide; j++) {
        float* sum = out[first + j];
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf(keep[i & 1], sum[i], factor[i & 1] * page[j][i]);
        never |= __float_as_uint(sum[0]) == 0x7fedcba9u;
      }
    }
    return never;
  }
};

/// 1 / rms of K at positions 16 l + g and + 8 of a page, of those before `fresh`, from memory. Where the page brings
/// them, take_k_scale does that.
LP_DEVICE void fetch_k_scale(const float* stored, u32 page, u32 fresh, float (*k)[2]) {
#pragma unroll
  for (u32 l = 0; l < kPageLeaves; l++)
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 at = l * kLeafPositions + (lane_index() >> 2) + 8 * r;
      if (page * kPage + at < fresh) k[l][r] = load_relaxed_f32(stored + at);
    }
}
/// Those of positions before `fresh`, of the page that is awaited; what lies behind the last one may be anything.
LP_DEVICE void take_k_scale(const Consumer& consumer, u32 page, u32 fresh, float (*k)[2]) {
  const u32 scales = consumer.shared + Shared::scales_of(consumer.slot());
#pragma unroll
  for (u32 l = 0; l < kPageLeaves; l++)
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 at = l * kLeafPositions + (lane_index() >> 2) + 8 * r;
      if (page * kPage + at < fresh) k[l][r] = load_shared_f32(scales + at * 4);
    }
}

}  // namespace wide
