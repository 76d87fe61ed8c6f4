// What a warp does with pages: the share of a span that it owns, with an online maximum.
#pragma once

/// What TILES n8 tiles of a group's columns have of a share: of tile n, columns 8 n + 2 t and 8 n + 2 t + 1.
template <int TILES> struct Share {
  u32 queries[TILES][kDimTiles][2];                // B fragments: column 8 n + g
  float scale[TILES][2];                           // of scores, all but k's part
  float reference[TILES][2], total[TILES][2] = {};
  float out[TILES][kDimTiles][4] = {};             // dimensions 16 j + g and + 8

  /// first: column of the group; begin: its first row.
  LP_DEVICE Share(const Launch& launch, u32 kv_head, u32 begin, u32 first, u32 columns) {
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const u32 column = first + 8 * n + g, row = begin + column / kQueriesPerKv,
                query = column % kQueriesPerKv * kDimTiles;
      const bool on = column < columns;
#pragma unroll
      for (int j = 0; j < kDimTiles; j++)
#pragma unroll
        for (u32 h = 0; h < 2; h++)
          queries[n][j][h] =
              on ? load_relaxed_u32(launch.words + Words::queries + query_byte(kv_head, query + j, h, row) + t * 4) : 0;
      float inverse = 1;
      if (kQkNorm && on) inverse = inverse_rms(launch, kv_head, query, row);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        reference[n][c] = kMinusInfinity;
        scale[n][c] = kQkNorm ? kScoreScale * shuffle(inverse, 8 * t + 4 * c) : kScoreScale;
      }
    }
  }
  LP_DEVICE static float inverse_rms(const Launch& launch, u32 kv_head, u32 tile, u32 row) {
    float squares[kDimTiles];
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
      squares[j] = __uint_as_float(
          load_relaxed_u32(launch.words + Words::squares + square_byte(kv_head, tile + j, row)));
    return rsqrt_approx(tree_sum<kDimTiles>(squares) * (1.0f / kHeadWidth) + __uint_as_float(LP_EPS));
  }
  /// Adds a page, in shared memory at `stage`. seen(position of the page, tile, column): whether that column sees it;
  /// `whole`: all do. k: 1 / rms (kQkNorm). True never, which only the products know.
  template <class SEEN> LP_DEVICE bool add_page(u32 stage, bool whole, const SEEN& seen, const float (*k)[2]) {
    const u32 lane = lane_index(), g = lane >> 2, from = stage + lane * 16;
    float score[TILES][kPageLeaves][4] = {};
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++) {
        const Quad fragment = load_shared_16(from + l * kLeafBytes + j * kFragment);
#pragma unroll
        for (int n = 0; n < TILES; n++) mma_m16n8k16(score[n][l], fragment, queries[n][j][0], queries[n][j][1]);
      }
    float keep[TILES][2], factor[TILES][kPageLeaves][2];
    u32 weights[TILES][kPageLeaves][2];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      float most[kPageLeaves][2], sum[kPageLeaves][2];
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++) {
        float* s = score[n][l];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[i] *= kQkNorm ? scale[n][i & 1] * k[l][i >> 1] : kScoreScale;
          if (!whole && !seen(l * kLeafPositions + g + 8 * (i >> 1), n, i & 1)) s[i] = kMinusInfinity;
        }
#pragma unroll
        for (int c = 0; c < 2; c++) most[l][c] = fmaxf(s[c], s[2 + c]);
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2)
#pragma unroll
        for (int l = 0; l < kPageLeaves; l++)
#pragma unroll
          for (int c = 0; c < 2; c++) most[l][c] = fmaxf(most[l][c], shuffle_xor(most[l][c], d));
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++) {
        float* s = score[n][l];
#pragma unroll
        for (int c = 0; c < 2; c++) {
          most[l][c] = ceilf(most[l][c]);
          // A leaf of which nothing is seen has weights of zero, not NaN.
          const float base = fmaxf(most[l][c], -3.4e38f);
          s[c] = exp2_approx(s[c] - base);
          s[2 + c] = exp2_approx(s[2 + c] - base);
          sum[l][c] = s[c] + s[2 + c];
        }
        weights[n][l][0] = transpose_8x8(bf16_pair(s[0], s[1]));
        weights[n][l][1] = transpose_8x8(bf16_pair(s[2], s[3]));
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2)
#pragma unroll
        for (int l = 0; l < kPageLeaves; l++)
#pragma unroll
          for (int c = 0; c < 2; c++) sum[l][c] += shuffle_xor(sum[l][c], d);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float now = reference[n][c], page = 0;
#pragma unroll
        for (int l = 0; l < kPageLeaves; l++) now = fmaxf(now, most[l][c]);
#pragma unroll
        for (int l = 0; l < kPageLeaves; l++) page = fmaf(factor[n][l][c] = rescale(most[l][c], now), sum[l][c], page);
        keep[n][c] = rescale(reference[n][c], now);
        total[n][c] = fmaf(keep[n][c], total[n][c], page);
        reference[n][c] = now;
      }
    }
    bool never = false;
#pragma unroll
    for (int j = 0; j < kDimTiles; j++) {
      float page[TILES][4] = {};
#pragma unroll
      for (int l = 0; l < kPageLeaves; l++) {
        const Quad fragment = load_shared_16(from + l * kLeafBytes + kLeafV + j * kFragment);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          float leaf[4] = {};
          mma_m16n8k16(leaf, fragment, weights[n][l][0], weights[n][l][1]);
#pragma unroll
          for (int i = 0; i < 4; i++) page[n][i] = fmaf(factor[n][l][i & 1], leaf[i], page[n][i]);
        }
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][j][i] = fmaf(keep[n][i & 1], out[n][j][i], page[n][i]);
        never |= __float_as_uint(out[n][j][0]) == 0x7fedcba9u;
      }
    }
    return never;
  }
};

/// Zeroes V of the positions of a page that nobody sees: it may hold anything, NaN too, whose products with weights of
/// zero are NaN.
template <class SEEN> LP_DEVICE void clear_unseen(u32 stage, const SEEN& seen) {
  const u32 lane = lane_index(), t = lane & 3;
#pragma unroll 1
  for (u32 l = 0; l < kPageLeaves; l++) {
    const auto mask = [&](u32 at) {
      return (seen(l * kLeafPositions + at) ? 0xffffu : 0) | (seen(l * kLeafPositions + at + 1) ? 0xffff0000u : 0);
    };
    const u32 early = mask(2 * t), late = mask(2 * t + 8), from = stage + l * kLeafBytes + kLeafV + lane * 16;
    if (!any_lane((early & late) != ~0u)) continue;
#pragma unroll
    for (int j = 0; j < kDimTiles; j++) {
      const Quad v = load_shared_16(from + j * kFragment);
      const float kept[4] = {__uint_as_float(v.x & early), __uint_as_float(v.y & early), __uint_as_float(v.z & late),
                             __uint_as_float(v.w & late)};
      store_shared_16(from + j * kFragment, kept);
    }
  }
}

/// 1 / rms of k at positions 16 l + g and + 8 of a page; of this pass from what qkv left, which is kept for later
/// passes.
LP_DEVICE void fetch_k_scale(const Launch& launch, const Rows& rows, const AttentionItem& item, u32 layer, u32 page,
                             float (*k)[2]) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, last = rows.position(item.last);
  const Row& row = rows.rows[item.last];
  const u32 fresh = row.first_position + rows.step,
            entry = load_constant_u32(launch.page_table + row.slot * launch.page_stride + page);
  float* stored = launch.k_scale + (((u64)layer * launch.kv_pages + entry) * kKvHeads + item.kv_head) * kPage;
#pragma unroll
  for (u32 l = 0; l < kPageLeaves; l++)
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 at = l * kLeafPositions + g + 8 * r, position = page * kPage + at;
      k[l][r] = 0;
      if (position > last) continue;
      if (position < fresh) {
        k[l][r] = load_relaxed_f32(stored + at);
      } else {
        k[l][r] = Share<1>::inverse_rms(launch, item.kv_head, kQueriesPerKv * kDimTiles,
                                        row.first_row + (position - fresh));
        if (t == 0) stored[at] = k[l][r];
      }
    }
}
