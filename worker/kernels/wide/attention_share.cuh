// What a warp does with pages: the share of a span that it owns, with an online maximum.
#pragma once

namespace wide {

/// What an n8 tile of a group's columns has of a share: columns 2 t and 2 t + 1 of the tile.
struct Share {
  u32 queries[kDimTiles][2];     // B fragments: column g
  float scale[2];                // of scores, all but k's part
  float reference[2], total[2] = {};
  float out[kDimTiles][4] = {};  // dimensions 16 j + g and + 8

  /// first: column of the group; begin: its first row.
  LP_DEVICE Share(const Launch& launch, u32 kv_head, u32 begin, u32 first, u32 columns) {
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
    const u32 column = first + g, row = begin + column / kQueriesPerKv,
              query = column % kQueriesPerKv * kDimTiles;
    const bool on = column < columns;
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
#pragma unroll
      for (u32 h = 0; h < 2; h++)
        queries[j][h] =
            on ? load_relaxed_u32(launch.words + Words::queries + query_byte(kv_head, query + j, h, row) + t * 4) : 0;
    float inverse = 1;
    if (kQkNorm && on) inverse = inverse_of_head(launch, kv_head, query, row);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      reference[c] = kMinusInfinity;
      scale[c] = kQkNorm ? kScoreScale * shuffle(inverse, 8 * t + 4 * c) : kScoreScale;
    }
  }
  LP_DEVICE static float inverse_of_head(const Launch& launch, u32 kv_head, u32 tile, u32 row) {
    float squares[kDimTiles];
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
      squares[j] = __uint_as_float(
          load_relaxed_u32(launch.words + Words::squares + square_byte(kv_head, tile + j, row)));
    return inverse_rms<kHeadWidth>(tree_sum<kDimTiles>(squares));
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

/// 1 / rms of k at positions 16 l + g and + 8 of a page: of this pass from what qkv left, which is kept for later
/// passes; of others from memory, or, where the page brings them (kScaledStages), by take_k_scale.
LP_DEVICE void fetch_k_scale(const Launch& launch, const Rows& rows, const AttentionItem& item, u32 layer, u32 page,
                             float (*k)[2]) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, last = rows.position(item.last);
  const Row& row = rows.rows[item.last];
  const u32 fresh = row.first_position + rows.step;
  if (kScaledStages && page * kPage + kPage <= fresh) return;
  const u32 of_pool = load_constant_u32(launch.page_table + row.slot * launch.page_stride + page);
  float* stored = launch.k_scale + first_scale(layer, launch.kv_pages, of_pool, item.kv_head);
#pragma unroll
  for (u32 l = 0; l < kPageLeaves; l++)
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 at = l * kLeafPositions + g + 8 * r, position = page * kPage + at;
      if (position > last) continue;
      if (position < fresh) {
        if constexpr (!kScaledStages) k[l][r] = load_relaxed_f32(stored + at);
      } else {
        k[l][r] = Share::inverse_of_head(launch, item.kv_head, kQueriesPerKv * kDimTiles,
                                        row.first_row + (position - fresh));
        if (t == 0) stored[at] = k[l][r];
      }
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
