// Attention over the paged KV cache. An item is one page of one KV head for one row; its four leaves of 16 positions go
// to four warps, which combine them into the page's result; results of pages meet in a merge. The order of additions is
// in softmax.cuh.
#pragma once

/// The rows of a step and their items, [row][page][kv head], which are counted once a step.
struct CountedRows : Rows {
  u32 item_ends;  // shared address: [columns] items of the rows up to and with each

  LP_DEVICE u32 items_before(u32 row) const { return row == 0 ? 0 : load_shared_u32(item_ends + (row - 1) * 4); }
  LP_DEVICE u32 items() const { return load_shared_u32(item_ends + (kColumns - 1) * 4); }
  /// Writes `item_ends`. A whole warp calls it.
  LP_DEVICE void count_items() const {
    const u32 row = lane_index();
    u32 items = row < kColumns && active(row) ? pages(row) * kKvHeads : 0;
#pragma unroll
    for (u32 d = 1; d < kColumns; d *= 2) {
      const u32 before = shuffle(items, (int)(row - d) & 31);
      items += row >= d ? before : 0;
    }
    if (row < kColumns) store_shared_u32(item_ends + row * 4, items);
    __syncwarp();
  }
};
struct Item {
  u32 row, page, kv_head;
};
/// The j-th item of this block in a layer; false if it has no more. Layers start at different blocks, so that few items
/// spread.
LP_DEVICE bool block_item(const CountedRows& rows, u32 layer, u32 j, u32& index, Item& item) {
  index = (rank_block() + layer * (kBlocks / 2 + 1)) % kBlocks + j * kBlocks;
  u32 row = 0, before = 0;
#pragma unroll
  for (u32 r = 0; r < kColumns; r++) {
    const u32 end = load_shared_u32(rows.item_ends + r * 4);
    if (index >= end) row = r + 1, before = end;
  }
  if (row == kColumns) return false;
  item = Item{row, rows.first_page(row) + (index - before) / kKvHeads, (index - before) % kKvHeads};
  return true;
}

/// Items go in turn to the four warps of a quad each: a round of items is one for each ring.
constexpr u32 kItemRings = kRings / 4;
/// Items of this block in a layer.
LP_DEVICE u32 block_items(const CountedRows& rows, u32 layer) {
  const u32 items = rows.items(), first = (rank_block() + layer * (kBlocks / 2 + 1)) % kBlocks;
  return items > first ? (items - first + kBlocks - 1) / kBlocks : 0;
}

/// Streams the pages of this block's items: item j goes to warps 4 (j % 4) .. + 3. K and V of earlier steps only: what
/// this step appends is patched in by the consumer.
LP_DEVICE void stream_pages(Producer& producer, const Launch& launch, const CountedRows& rows, u32 layer) {
  for (u32 j = 0;; j += kItemRings) {
    u32 index;
    Item item;
    const bool on = producer.lane() < kRings && block_item(rows, layer, j + producer.lane() / 4, index, item);
    if (!any_lane(on)) return;
    const u8* leaf = nullptr;
    if (on) {
      const u32 page = load_constant_u32(launch.page_table + rows.rows[item.row].slot * launch.page_stride + item.page);
      leaf = launch.kv + page_byte(layer, launch.kv_pages, page, item.kv_head) + producer.lane() % 4 * kLeafBytes;
    }
#pragma unroll
    for (u32 c = 0; c < kLeafChunks; c++) producer.issue<2>(on, leaf + c * kLeafV, kLeafBytes / kLeafChunks);
  }
}

/// Words of K and V that one lane fetches of a new position.
constexpr int kFreshWords = kDimTiles / 4;

/// Puts K and V of a position of this step into a leaf in shared memory: `row` computed them, `at` is the position
/// within the leaf. Returns 1 / rms of k (kQkNorm).
LP_DEVICE float patch_position(const Launch& launch, u32 k_leaf, u32 v_leaf, int kv_head, u32 row, u32 at, u32 tag) {
  const int lane = lane_index();
  u32 x[kFreshWords], y[kFreshWords], squares[kFreshWords];
  const u8* words = launch.words + qkv_word(kv_head, row, kQueriesPerKv * kDimTiles);
  poll_words<kFreshWords>(launch, words + lane * 16, 32 * 16, tag, kFreshWords, x, y, squares, kSiteFresh);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kFreshWords; i++) {
    const int word = i * 32 + lane, tile = word / 4 % kDimTiles, t = word & 3;
    if (word < kDimTiles * 4) {
      const u32 to = k_leaf + tile * kFragment + ((at & 7) * 4 + t) * 16 + (at >> 3) * 4;
      store_shared_u32(to, x[i]);
      store_shared_u32(to + 8, y[i]);
      sum += __uint_as_float(squares[i]);
    } else {
      const u32 to = v_leaf + tile * kFragment + (at & 7) / 2 * 16 + (at >> 3) * 8 + (at & 1) * 2;
      store_shared_u16(to + 2 * t * 64, x[i]);
      store_shared_u16(to + (2 * t + 1) * 64, x[i] >> 16);
      store_shared_u16(to + 2 * t * 64 + 4, y[i]);
      store_shared_u16(to + (2 * t + 1) * 64 + 4, y[i] >> 16);
    }
  }
  if constexpr (!kQkNorm) return 1;
  if (kDimTiles == 4 && lane >= 16) sum = 0;
#pragma unroll
  for (int d = 4; d < 32; d *= 2) sum += shuffle_xor(sum, d);
  return rsqrt_approx(shuffle(sum, 0) * (1.0f / kHeadWidth) + __uint_as_float(LP_EPS));
}

/// One leaf: its output (not divided by its sum) goes over its K in shared memory as [query head][stride] f32, its
/// reference and sum to the end of its V as [query head][2].
constexpr u32 kOutputStride = kQueriesPerKv * (kHeadDim + 4) * 4 <= kLeafV ? (kHeadDim + 4) * 4 : kHeadDim * 4,
              kLeafSums = kLeafV - 64;
static_assert(kQueriesPerKv * kOutputStride <= kLeafV, "outputs of a leaf fit where its K was");
LP_DEVICE void attend_leaf(const Launch& launch, const CountedRows& rows, const Item& item, u32 layer, u32 number,
                           u32 k_leaf, u32 v_leaf, u32 tag) {
  const int lane = lane_index(), g = lane >> 2, t = lane & 3;
  const u32 p = rows.position(item.row), low = rows.first_visible(item.row),
            base = item.page * kPage + number * kLeafPositions;
  const auto visible = [&](u32 at) { return base + at <= p && base + at >= low; };
  float most[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0, 0};
  if (base <= p && base + kLeafPositions > low) {
    u32 x[kDimTiles], y[kDimTiles], squares[kDimTiles];
    poll_words<kDimTiles>(launch, launch.words + qkv_word(item.kv_head, item.row, g * kDimTiles) + t * 16, 64, tag,
                          g < kQueriesPerKv ? kDimTiles : 0, x, y, squares, kSiteQuery);
    // Of columns 2t, 2t + 1; of positions g, g + 8.
    float query_scale[2] = {kScoreScale, kScoreScale}, key_scale[2] = {1, 1};
    if constexpr (kQkNorm) {
      const u32 page = load_constant_u32(launch.page_table + rows.rows[item.row].slot * launch.page_stride + item.page);
      const float* stored = launch.k_scale + (((u64)layer * launch.kv_pages + page) * kKvHeads + item.kv_head) * kPage +
                            number * kLeafPositions;
      float q[kDimTiles];
#pragma unroll
      for (int j = 0; j < kDimTiles; j++) q[j] = __uint_as_float(squares[j]);
      const float mine = rsqrt_approx(tree_sum<kDimTiles>(q) * (1.0f / kHeadWidth) + __uint_as_float(LP_EPS));
      query_scale[0] *= shuffle(mine, 8 * t), query_scale[1] *= shuffle(mine, 8 * t + 4);
      key_scale[0] = load_relaxed_f32(stored + g), key_scale[1] = load_relaxed_f32(stored + g + 8);
      const Row& row = rows.rows[item.row];
      const u32 fresh = row.first_position + rows.step;
      for (u32 at = fresh > base ? fresh - base : 0; at < kLeafPositions && base + at <= p; at++) {
        const float k = patch_position(launch, k_leaf, v_leaf, item.kv_head, row.first_row + (base + at - fresh), at,
                                       tag);
        if (at == g) key_scale[0] = k;
        if (at == g + 8) key_scale[1] = k;
        if (lane == 0) const_cast<float*>(stored)[at] = k;
      }
    } else {
      const Row& row = rows.rows[item.row];
      const u32 fresh = row.first_position + rows.step;
      for (u32 at = fresh > base ? fresh - base : 0; at < kLeafPositions && base + at <= p; at++)
        patch_position(launch, k_leaf, v_leaf, item.kv_head, row.first_row + (base + at - fresh), at, tag);
    }
    __syncwarp();
    float score[4] = {};
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
      mma_m16n8k16(score, load_shared_16(k_leaf + j * kFragment + lane * 16), x[j], y[j]);
    __syncwarp();
    const bool seen[2] = {visible(g), visible(g + 8)};
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      score[i] = seen[i / 2] ? score[i] * (query_scale[i & 1] * key_scale[i / 2]) : kMinusInfinity;
      most[i & 1] = fmaxf(most[i & 1], score[i]);
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
#pragma unroll
      for (int c = 0; c < 2; c++) most[c] = fmaxf(most[c], shuffle_xor(most[c], d));
#pragma unroll
    for (int c = 0; c < 2; c++) most[c] = ceilf(most[c]);
#pragma unroll
    for (int i = 0; i < 4; i++) weight[i] = seen[i / 2] ? exp2_approx(score[i] - most[i & 1]) : 0;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      sum[c] = weight[c] + weight[2 + c];
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[c] += shuffle_xor(sum[c], d);
    }
    const u32 b0 = transpose_8x8(bf16_pair(weight[0], weight[1])), b1 = transpose_8x8(bf16_pair(weight[2], weight[3]));
    // V of positions that are not seen may hold anything, NaN too.
    const u32 early = (visible(2 * t) ? 0xffffu : 0) | (visible(2 * t + 1) ? 0xffff0000u : 0);
    const u32 late = (visible(2 * t + 8) ? 0xffffu : 0) | (visible(2 * t + 9) ? 0xffff0000u : 0);
    const u32 to = k_leaf + 2 * t * kOutputStride + g * 4;
#pragma unroll
    for (int j = 0; j < kDimTiles; j++) {
      Quad v = load_shared_16(v_leaf + j * kFragment + lane * 16);
      v.x &= early;
      v.y &= early;
      v.z &= late;
      v.w &= late;
      float out[4] = {};
      mma_m16n8k16(out, v, b0, b1);
      if (2 * t < kQueriesPerKv) store_shared_f32(to + j * 64, out[0]), store_shared_f32(to + j * 64 + 32, out[2]);
      if (2 * t + 1 < kQueriesPerKv)
        store_shared_f32(to + kOutputStride + j * 64, out[1]),
            store_shared_f32(to + kOutputStride + j * 64 + 32, out[3]);
    }
    __syncwarp();
  }
  if (g == 0) {
    store_shared_f32(v_leaf + kLeafSums + t * 16, most[0]);
    store_shared_f32(v_leaf + kLeafSums + t * 16 + 4, sum[0]);
    store_shared_f32(v_leaf + kLeafSums + t * 16 + 8, most[1]);
    store_shared_f32(v_leaf + kLeafSums + t * 16 + 12, sum[1]);
  }
}

/// This warp's leaves of the block's items, and its quarter of the pages' results.
LP_DEVICE void attend(const Launch& launch, Consumer& consumer, u32 shared, const CountedRows& rows, u32 layer,
                      u32 tag) {
  const u32 lane = lane_index(), quad = consumer.warp >> 2, number = consumer.warp & 3;
  u32 index;
  Item item;
  for (u32 j = quad; block_item(rows, layer, j, index, item); j += 4) {
    const u32 chunk = consumer.next + j / kItemRings * kLeafChunks;
    const u32 k_leaf = consumer.wait(chunk), v_leaf = kLeafChunks == 1 ? k_leaf + kLeafV : consumer.wait(chunk + 1);
    if (lane == 0) {
      store_shared_u32(shared + Shared::quad_leaf + consumer.warp * 8, k_leaf);
      store_shared_u32(shared + Shared::quad_leaf + consumer.warp * 8 + 4, v_leaf);
    }
    attend_leaf(launch, rows, item, layer, number, k_leaf, v_leaf, tag);
    barrier_sync(1 + quad, 128);
    u32 outputs[4], sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      outputs[i] = load_shared_u32(shared + Shared::quad_leaf + (quad * 4 + i) * 8);
      sums[i] = load_shared_u32(shared + Shared::quad_leaf + (quad * 4 + i) * 8 + 4) + kLeafSums;
    }
    u8* page = launch.words + Words::page + index * Words::page_bytes;
    constexpr u32 words = kQueriesPerKv * kHeadDim / 8;
    for (u32 word = lane; word < words; word += 32) {
      const u32 head = word / (kHeadDim / 8), tile = number * (kDimTiles / 4) + word % (kHeadDim / 8) / 8,
                dim = tile * 16 + word % 8;
      float reference[4], largest = kMinusInfinity, total = 0, low = 0, high = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) largest = fmaxf(largest, reference[i] = load_shared_f32(sums[i] + head * 8));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float scale = rescale(reference[i], largest);
        const u32 out = outputs[i] + head * kOutputStride + dim * 4;
        const float sum = load_shared_f32(sums[i] + head * 8 + 4), first = load_shared_f32(out),
                    second = load_shared_f32(out + 32);
        const bool none = reference[i] == kMinusInfinity;  // its output is K still
        total = fmaf(scale, sum, total);
        low = fmaf(scale, none ? 0 : first, low);
        high = fmaf(scale, none ? 0 : second, high);
      }
      // Even words carry the reference, odd ones the sum.
      store_relaxed_16(page + ((head * kDimTiles + tile) * 8 + word % 8) * 16, __float_as_uint(low),
                       __float_as_uint(high), tag, __float_as_uint(word % 2 ? total : largest));
    }
    fence_async_shared();  // orders what was written to the slots before the copies that use them again
    barrier_sync(1 + quad, 128);
#pragma unroll
    for (u32 c = 0; c < kLeafChunks; c++) consumer.release(chunk + c, false);
  }
  const u32 items = block_items(rows, layer), first = consumer.ring() / 4;
  consumer.next += (items > first ? (items - first + kItemRings - 1) / kItemRings : 0) * kLeafChunks;
}

/// Merges the pages of (row, query head, tile of 16 dimensions, part of it) and publishes that part of a k block of
/// attention's output. A part is PAIRS pairs of dimensions d, d + 8. Lanes are [span][share of it][pair], so that small
/// parts take several spans of pages at once. Jobs start at the last warp: the first ones have leaves.
template <u32 PAIRS> LP_DEVICE void merge_pages(const Launch& launch, const CountedRows& rows, u32 warp, u32 tag,
                                                u8* attention_out) {
  constexpr u32 PARTS = 8 / PAIRS, JOBS = kHeads * kDimTiles * PARTS, SPAN = kSpanShares * PAIRS, SPANS = 32 / SPAN,
                STRIDE = kKvHeads * Words::page_bytes;
  const u32 lane = lane_index(), pair = lane % PAIRS, share = lane / PAIRS % kSpanShares, span = lane / SPAN;
  for (u32 job = rank_block() + kBlocks * (kWarps - 1 - warp); job < rows.count * JOBS; job += kBlocks * kWarps) {
    const u32 row = job / JOBS, head = job % JOBS / (kDimTiles * PARTS), tile = job / PARTS % kDimTiles,
              part = job % PARTS;
    if (!rows.active(row)) continue;
    const u32 pages = rows.pages(row), first = rows.items_before(row) + head / kQueriesPerKv;
    const u8* words = launch.words + Words::page +
                      ((u64)first * kQueriesPerKv + head % kQueriesPerKv) * (kDimTiles * 128) + tile * 128 +
                      (part * PAIRS + pair) * 16;
    float largest = kMinusInfinity, total = 0, low = 0, high = 0;
    for (u32 begin = 0; begin < pages; begin += SPANS * kSpanPages) {
      const u32 page = begin + span * kSpanPages + share,
                left = page < pages ? (pages - page + kSpanShares - 1) / kSpanShares : 0, n = left < 4 ? left : 4;
      u32 x[4], y[4], z[4];
      poll_words<4>(launch, words + (u64)page * STRIDE, kSpanShares * STRIDE, tag, n, x, y, z, kSitePage);
      // References are in even lanes, sums in odd ones.
      float now = kMinusInfinity;
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        if (i < n) now = fmaxf(now, __uint_as_float(z[i]));
#pragma unroll
      for (u32 d = PAIRS; d < 32; d *= 2) now = fmaxf(now, shuffle_xor(now, d));
      now = fmaxf(largest, shuffle(now, lane & ~1));
      float span_total = 0, span_low = 0, span_high = 0;
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float scale = rescale(__uint_as_float(shuffle(z[i], lane & ~1)), now);
        if (i >= n) continue;
        span_total = fmaf(scale, __uint_as_float(z[i]), span_total);
        span_low = fmaf(scale, __uint_as_float(x[i]), span_low);
        span_high = fmaf(scale, __uint_as_float(y[i]), span_high);
      }
#pragma unroll
      for (u32 d = PAIRS; d < SPAN; d *= 2) {
        span_total += shuffle_xor(span_total, d);
        span_low += shuffle_xor(span_low, d);
        span_high += shuffle_xor(span_high, d);
      }
#pragma unroll
      for (u32 s = 0; s < SPANS; s++) {
        const float keep = s == 0 ? rescale(largest, now) : 1;
        const auto of_span = [&](float v) { return SPANS == 1 ? v : shuffle(v, s * SPAN + lane % SPAN); };
        total = fmaf(keep, total, of_span(span_total));
        low = fmaf(keep, low, of_span(span_low));
        high = fmaf(keep, high, of_span(span_high));
      }
      largest = now;
    }
    const float inverse = reciprocal_approx(shuffle(total, lane | 1));
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
