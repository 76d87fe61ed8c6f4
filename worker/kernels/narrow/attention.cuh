// Attention over the paged KV cache. Of one tile of rows, the four warps of a quad have the scores of a leaf of 16
// positions each, then, with all weights, a quarter of the dimensions of the page's output. The outputs of a row's
// pages meet in a merge. The order of additions is in softmax.cuh.
#pragma once

namespace narrow {

/// What the warps of a page exchange of their leaves, each over the K of its first group, which it has read by then:
/// the largest score of each column, then [column] weights of 16 positions, f32, without bank conflicts.
constexpr u32 kWeights = 32, kWeightStride = 80;
static_assert(kWeights + 8 * kWeightStride <= kGroupV, "they fit where K was");
/// Sum of a leaf's 16 weights of a column.
LP_DEVICE float sum_weights(u32 weights) {
  float w[16];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Quad v = load_shared_16(weights + i * 16);
    w[4 * i] = __uint_as_float(v.x), w[4 * i + 1] = __uint_as_float(v.y), w[4 * i + 2] = __uint_as_float(v.z),
          w[4 * i + 3] = __uint_as_float(v.w);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] += w[8 + i];
  return tree_sum<8>(w);
}

/// A page of a tile: this warp's leaf, and its quarter of the dimensions of the page's output. `index`: of the item.
LP_DEVICE void attend_tile(const Launch& launch, const CountedRows& rows, const Item& item, const Tile& tile, u32 index,
                           const QuadWarp& warp, u32 layer, u32 tag) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, number = warp.number;
  const Leaf& leaf = warp.leaf;
  const LeafOfItem of{item, item.page_or_share, number, tile.first + tile.rows - 1};
  of.clear(rows, leaf);
  float score[4] = {kMinusInfinity, kMinusInfinity, kMinusInfinity, kMinusInfinity};
  if (of.is_seen(rows)) {
    const Queries queries(launch, item, tile, tag);
    float scale[2] = {1, 1}, *stored = nullptr;
    if constexpr (kQkNorm) {
      stored = of.key_scales(launch, rows, layer);
      scale[0] = load_relaxed_f32(stored + g), scale[1] = load_relaxed_f32(stored + g + 8);
    }
    of.patch(launch, rows, leaf, stored, tag, scale);
    of.scores(rows, leaf, tile, queries, scale, score);
    __syncwarp();
  }
  Quarter quarter{};
#pragma unroll
  for (int c = 0; c < 2; c++) {
    quarter.most[c] = fmaxf(score[c], score[2 + c]);
#pragma unroll
    for (int d = 4; d < 32; d *= 2) quarter.most[c] = fmaxf(quarter.most[c], shuffle_xor(quarter.most[c], d));
  }
  if (g == 0) store_shared_8(leaf.first + t * 8, quarter.most);
  warp.meet();  // all leaves have landed, with what is new in them, and the addresses are there
  const Leaves all(warp.of_quad());
  const u32 summed = load_shared_u32(warp.of_quad() + lane / 8 * 4) + kWeights + lane % 8 * kWeightStride;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float of[2];
    load_shared_8(all.first[i] + t * 8, of);
    quarter.most[0] = fmaxf(quarter.most[0], of[0]), quarter.most[1] = fmaxf(quarter.most[1], of[1]);
  }
  // Those of V of the first leaf while the weights are on their way; there are no registers for more.
  const auto fragment = [&](int d, int i) {
    return ldmatrix_x4(v_rows(all.first[i], all.second[i]) + (number * kQuarterTiles + d) * kFragmentDims);
  };
  Quad v[kQuarterTiles];
#pragma unroll
  for (int d = 0; d < kQuarterTiles; d++) v[d] = fragment(d, 0);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    quarter.most[c] = ceilf(quarter.most[c]);  // finite: a row sees a position of each of its pages
    const u32 to = leaf.first + kWeights + (2 * t + c) * kWeightStride + g * 4;
    store_shared_f32(to, exp2_approx(score[c] - quarter.most[c]));
    store_shared_f32(to + 32, exp2_approx(score[2 + c] - quarter.most[c]));
  }
  warp.meet();
  u32 weights[4][2];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float w[2];
      load_shared_8(all.first[i] + kWeights + g * kWeightStride + t * 8 + h * 32, w);
      weights[i][h] = bf16_pair(w[0], w[1]);
    }
  const float sum = sum_weights(summed);  // of leaf lane / 8, column lane % 8
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int d = 0; d < kQuarterTiles; d++)
      mma_m16n8k16(quarter.out[d], i == 0 ? v[d] : fragment(d, i), weights[i][0], weights[i][1]);
  // Orders what was written to the slots before the copies that use them again. It waits for all that the warp has
  // stored: so it stands before the words, where the products take longer.
  fence_async_shared();
#pragma unroll
  for (int c = 0; c < 2; c++) {
    quarter.total[c] = shuffle(sum, 2 * t + c);
#pragma unroll
    for (int i = 1; i < 4; i++) quarter.total[c] += shuffle(sum, i * 8 + 2 * t + c);
  }
#pragma unroll
  for (int c = 0; c < 2; c++) {
    if (!tile.has(2 * t + c)) continue;
    u32 output = index;
    if constexpr (kTogether) {
      const u32 row = tile.row(2 * t + c), first = rows.first_page(row);
      if (item.page_or_share < first || item.page_or_share > rows.position(row) / kPage) continue;
      output = rows.outputs_before(row) + (item.page_or_share - first) * kKvHeads + item.kv_head;
    }
    quarter.put(launch, output, number, c, tag);
  }
  warp.meet();
}

/// This warp's part of the block's items.
LP_DEVICE void attend(const Launch& launch, Consumer& consumer, u32 shared, const CountedRows& rows, u32 layer,
                      u32 tag) {
  const u32 quad = consumer.warp >> 2;
  const bool shares = rows.shares();
  u32 index;
  Item item;
  for (u32 j = shares ? 0 : quad; block_item(rows, layer, j, index, item); j += shares ? 1 : 4) {
    const u32 chunk = consumer.next + (shares ? j * kSpanShares + quad : j) / kPageRings * kLeafChunks;
    QuadWarp warp{quad, consumer.warp & 3, shared + Shared::leaves, {consumer.wait(chunk), 0}};
    warp.leaf.second = kLeafChunks == 1 ? warp.leaf.first + kGroupBytes : consumer.wait(chunk + 1);
    warp.tell();
    const u32 of_item = rows.rows_from(item.row);
    if (kTogether && (shares || of_item > kTileRows)) attend_tiles(launch, rows, item, of_item, warp, layer, tag);
    else attend_tile(launch, rows, item, Tile{item.row, of_item}, index, warp, layer, tag);
#pragma unroll
    for (u32 c = 0; c < kLeafChunks; c++) consumer.release(chunk + c, false);
  }
  const u32 pages = block_pages(rows, layer), first = consumer.ring() / 4;
  consumer.next += (pages > first ? (pages - first + kPageRings - 1) / kPageRings : 0) * kLeafChunks;
}

/// Merges the pages of (row, query head, tile of 16 dimensions, part of it), or its shares, and publishes that part of
/// a k block of attention's output. A part is PAIRS pairs of dimensions d, d + 8. Lanes are [span][share of it][pair],
/// so that small parts take several spans of pages at once. Jobs start at the last warp: the first ones have leaves.
template <u32 PAIRS> LP_DEVICE void merge_pages(const Launch& launch, const CountedRows& rows, u32 warp, u32 tag,
                                                u8* attention_out) {
  constexpr u32 PARTS = 8 / PAIRS, JOBS = kHeads * kDimTiles * PARTS, SPAN = kSpanShares * PAIRS, SPANS = 32 / SPAN,
                STRIDE = kKvHeads * Words::page_bytes;
  const u32 lane = lane_index(), pair = lane % PAIRS, share = lane / PAIRS % kSpanShares, span = lane / SPAN;
  for (u32 job = rank_block() + kBlocks * (kWarps - 1 - warp); job < rows.count * JOBS; job += kBlocks * kWarps) {
    const u32 row = job / JOBS, head = job % JOBS / (kDimTiles * PARTS), tile = job / PARTS % kDimTiles,
              part = job % PARTS;
    if (!rows.active(row)) continue;
    // Pages are counted from the begin of the row's first span, of whose first pages a row with a window sees nothing.
    // In the place of a span's pages there may be the shares of four spans.
    const bool shares = rows.shares();
    const u32 unseen = rows.first_page(row) % kSpanPages,
              pages = shares ? rows.shares_of(rows.pages(row)) : unseen + rows.pages(row),
              first = rows.outputs_before(row) + head / kQueriesPerKv;
    const u8* words = launch.words + Words::page +
                      ((u64)first * kQueriesPerKv + head % kQueriesPerKv) * (kDimTiles * 128) + tile * 128 +
                      (part * PAIRS + pair) * 16;
    float largest = kMinusInfinity, total = 0, low = 0, high = 0;
    for (u32 begin = 0; begin < pages; begin += SPANS * kSpanPages) {
      const u32 at = begin + span * kSpanPages, end = at + kSpanPages < pages ? at + kSpanPages : pages;
      u32 page = at + share;
      if (page < unseen) page += (unseen - page + kSpanShares - 1) / kSpanShares * kSpanShares;
      const u32 n = page < end ? (end - page + kSpanShares - 1) / kSpanShares : 0;
      u32 x[4], y[4], z[4];
      poll_words<4>(launch, words + (u64)(page - unseen) * STRIDE, kSpanShares * STRIDE, tag, n, x, y, z, kSitePage);
      // References are in even lanes, sums in odd ones.
      float now = kMinusInfinity;
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        if (i < n) now = fmaxf(now, __uint_as_float(z[i]));
#pragma unroll
      for (u32 d = PAIRS; d < 32; d *= 2) now = fmaxf(now, shuffle_xor(now, d));
      now = fmaxf(largest, shuffle(now, lane & ~1));
      float share_total = 0, share_low = 0, share_high = 0;
      const auto add_spans = [&](bool first) {
#pragma unroll
        for (u32 s = 0; s < SPANS; s++) {
          const float keep = s == 0 && first ? rescale(largest, now) : 1;
          const auto of_span = [&](float v) {
            float sum = shuffle(v, s * SPAN + pair);
#pragma unroll
            for (u32 i = 1; i < kSpanShares; i++) sum += shuffle(v, s * SPAN + i * PAIRS + pair);
            return sum;
          };
          total = fmaf(keep, total, of_span(share_total));
          low = fmaf(keep, low, of_span(share_low));
          high = fmaf(keep, high, of_span(share_high));
        }
      };
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float scale = rescale(__uint_as_float(shuffle(z[i], lane & ~1)), now);
        if (i < n) {
          share_total = fmaf(scale, __uint_as_float(z[i]), share_total);
          share_low = fmaf(scale, __uint_as_float(x[i]), share_low);
          share_high = fmaf(scale, __uint_as_float(y[i]), share_high);
        }
        if (kShares && shares) {
          add_spans(i == 0);
          share_total = share_low = share_high = 0;
        }
      }
      if (!shares) add_spans(true);
      largest = now;
    }
    const float inverse = raised(reciprocal_approx(shuffle(total, lane | 1)));
    low *= inverse;
    high *= inverse;
    const u32 t = lane % (PAIRS / 2);
    const float a = shuffle(low, 2 * t), b = shuffle(low, 2 * t + 1), c = shuffle(high, 2 * t),
                d = shuffle(high, 2 * t + 1);
    if (lane < PAIRS / 2)
      put_word(attention_out + AttentionVector::word(head * kDimTiles + tile, row, part * (PAIRS / 2) + t),
               bf16_pair(a, b), bf16_pair(c, d), tag, 0);
  }
}

}  // namespace narrow
