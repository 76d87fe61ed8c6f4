// Attention over the paged KV cache. An item is one page of one KV head for the rows of a sequence, the work of four
// warps: each has the scores of a leaf of 16 positions, then, with all weights, a quarter of the dimensions of the
// page's output. Columns are (row, query head), as many rows at a time as fit. The outputs of a row's pages meet in a
// merge. The order of additions is in softmax.cuh.
#pragma once

namespace narrow {

/// Rows of a sequence whose queries are columns together.
constexpr u32 kTileRows = kTogether ? 8 / kQueriesPerKv : 1;

/// The rows of a step: their outputs, [row][page][kv head], and the items that make them, [group][page][kv head]. Both
/// are counted once a step. A group is some rows of a sequence: as many as leave an item to all quads of warps, each of
/// which computes tile by tile, so that few pages are not left to few of them.
struct CountedRows : Rows {
  // Shared address: [columns] {outputs of the rows up to and with each, items of the groups that begin with these, rows
  // of the group that begins with it}. If rows are not together an output is an item, and there are no more counts.
  u32 counts;

  LP_DEVICE u32 outputs_before(u32 row) const {
    return row == 0 ? 0 : load_shared_u32(counts + (row - 1) * kCountBytes);
  }
  LP_DEVICE u32 items_up_to(u32 row) const {
    return load_shared_u32(counts + row * kCountBytes + (kTogether ? 4 : 0));
  }
  LP_DEVICE u32 items() const { return items_up_to(kColumns - 1); }
  LP_DEVICE u32 rows_from(u32 row) const { return kTogether ? load_shared_u32(counts + row * kCountBytes + 8) : 1; }
  /// Pages of `rows` rows of a sequence from `row` on.
  LP_DEVICE u32 pages_of(u32 row, u32 rows) const { return position(row + rows - 1) / kPage + 1 - first_page(row); }
  /// Writes a count of all rows: of each, with those before it.
  LP_DEVICE void add_up(u32 row, u32 at, u32 of_row) const {
#pragma unroll
    for (u32 d = 1; d < kColumns; d *= 2) {
      const u32 before = shuffle(of_row, (int)(row - d) & 31);
      of_row += row >= d ? before : 0;
    }
    if (row < kColumns) store_shared_u32(counts + row * kCountBytes + at, of_row);
  }
  /// Rows of the group that begins with `row`; 0: none does.
  LP_DEVICE u32 group_from(u32 row) const {
    if (!active(row)) return 0;
    const u32 first = rows[row].first_row;
    u32 sequence = 0;
#pragma unroll 1
    for (u32 r = 0; r < kColumns; r++) sequence += active(r) && rows[r].first_row == first;
    const u32 fit = sequence * pages_of(first, sequence) * kKvHeads / (kBlocks * (kWarps / 4)),
              group = fit >= kTileRows ? fit / kTileRows * kTileRows : fit > 0 ? fit : 1,
              left = first + sequence - row;
    return (row - first) % group == 0 ? (left < group ? left : group) : 0;
  }
  /// Writes `counts`. A whole warp calls it.
  LP_DEVICE void count_items() const {
    const u32 row = lane_index();
    add_up(row, 0, row < kColumns && active(row) ? pages(row) * kKvHeads : 0);
    if constexpr (kTogether) {
      const u32 group = row < kColumns ? group_from(row) : 0;
      add_up(row, 4, group > 0 ? pages_of(row, group) * kKvHeads : 0);
      if (row < kColumns) store_shared_u32(counts + row * kCountBytes + 8, group);
    }
    __syncwarp();
  }
};
/// row: the group's first.
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
    const u32 end = rows.items_up_to(r);
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
    constexpr u32 BYTES = kLeafBytes / kLeafChunks;
#pragma unroll
    for (u32 c = 0; c < kLeafChunks; c++) producer.issue<2>(on, leaf + c * BYTES, BYTES);
  }
}

/// A leaf of positions in shared memory: the addresses of its groups.
struct Leaf {
  u32 first, second;
};

/// Words of K and V that one lane fetches of a new position.
constexpr int kFreshWords = kDimTiles / 4;

/// Puts K and V of a position of this step into a leaf in shared memory: `row` computed them, `at` is the position
/// within the leaf. Returns 1 / rms of k (kQkNorm).
LP_DEVICE float patch_position(const Launch& launch, const Leaf& leaf, int kv_head, u32 row, u32 at, u32 tag) {
  const int lane = lane_index();
  const u32 group = at < 8 ? leaf.first : leaf.second;
  u32 x[kFreshWords], y[kFreshWords], squares[kFreshWords];
  const u8* words = launch.words + qkv_word(kv_head, row, kQueriesPerKv * kDimTiles);
  poll_words<kFreshWords>(launch, words + lane * 16, 32 * 16, tag, kFreshWords, x, y, squares, kSiteFresh);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kFreshWords; i++) {
    // Of dimensions d and d + 1, d + 8 and d + 9 of a tile.
    const int word = i * 32 + lane, dim = word / 4 % kDimTiles * 16 + 2 * (word & 3);
    if (word < kDimTiles * 4) {
      const u32 to = group + k_byte(at & 7, dim);
      store_shared_u32(to, x[i]);
      store_shared_u32(to + 128, y[i]);
      sum += __uint_as_float(squares[i]);
    } else {
      const u32 to = group + v_byte(at & 7, dim);
      store_shared_u16(to, x[i]);
      store_shared_u16(to + 16, x[i] >> 16);
      store_shared_u16(to + 128, y[i]);
      store_shared_u16(to + 144, y[i] >> 16);
    }
  }
  if constexpr (!kQkNorm) return 1;
  if (kDimTiles == 4 && lane >= 16) sum = 0;
#pragma unroll
  for (int d = 4; d < 32; d *= 2) sum += shuffle_xor(sum, d);
  return inverse_rms<kHeadWidth>(shuffle(sum, 0));
}

/// Some rows of an item's group.
struct Tile {
  u32 first, rows;  // of them; columns of more rows hold nothing
  bool begins;      // the group's first: what is new has yet to come into the leaf

  LP_DEVICE bool has(u32 column) const { return column < rows * kQueriesPerKv; }
  LP_DEVICE u32 row(u32 column) const { return first + (kTileRows > 1 && has(column) ? column / kQueriesPerKv : 0); }
};

/// Scores of a tile's rows with the item's leaf `number`: of positions g and g + 8, columns 2t and 2t + 1. Minus
/// infinity where a row does not see the position. V is zeroed where none of the group's rows, up to `last`, does.
LP_DEVICE void score_leaf(const Launch& launch, const CountedRows& rows, const Item& item, const Tile& tile, u32 last,
                          u32 layer, u32 number, const Leaf& leaf, u32 tag, float* score) {
  const int lane = lane_index(), g = lane >> 2, t = lane & 3;
  const u32 p = rows.position(last), low = rows.first_visible(item.row),
            base = item.page * kPage + number * kLeafPositions;
  if (tile.begins) {
    const auto seen = [&](u32 at) { return base + at <= p && base + at >= low; };
    clear_unseen(leaf.first, seen);
    clear_unseen(leaf.second, [&](u32 at) { return seen(8 + at); });
  }
#pragma unroll
  for (int i = 0; i < 4; i++) score[i] = kMinusInfinity;
  if (base > p || base + kLeafPositions <= low) return;
  u32 x[kDimTiles], y[kDimTiles], squares[kDimTiles];
  poll_words<kDimTiles>(launch,
                        launch.words + qkv_word(item.kv_head, tile.row(g), g % kQueriesPerKv * kDimTiles) + t * 16, 64,
                        tag, tile.has(g) ? kDimTiles : 0, x, y, squares, kSiteQuery);
  // Of columns 2t, 2t + 1; of positions g, g + 8.
  float query_scale[2] = {kScoreScale, kScoreScale}, key_scale[2] = {1, 1}, *stored = nullptr;
  if constexpr (kQkNorm) {
    const u32 page = load_constant_u32(launch.page_table + rows.rows[item.row].slot * launch.page_stride + item.page);
    stored = launch.k_scale + (((u64)layer * launch.kv_pages + page) * kKvHeads + item.kv_head) * kPage +
             number * kLeafPositions;
    float q[kDimTiles];
#pragma unroll
    for (int j = 0; j < kDimTiles; j++) q[j] = __uint_as_float(squares[j]);
    const float mine = inverse_rms<kHeadWidth>(tree_sum<kDimTiles>(q));
    query_scale[0] *= shuffle(mine, 8 * t), query_scale[1] *= shuffle(mine, 8 * t + 4);
    key_scale[0] = load_relaxed_f32(stored + g), key_scale[1] = load_relaxed_f32(stored + g + 8);
  }
  const Row& row = rows.rows[item.row];
  const u32 fresh = row.first_position + rows.step;
  for (u32 at = fresh > base ? fresh - base : 0; tile.begins && at < kLeafPositions && base + at <= p; at++) {
    const float k = patch_position(launch, leaf, item.kv_head, row.first_row + (base + at - fresh), at, tag);
    if constexpr (kQkNorm) {
      if (at == g) key_scale[0] = k;
      if (at == g + 8) key_scale[1] = k;
      if (lane == 0) stored[at] = k;
    }
  }
  __syncwarp();
  float sum[4] = {};
  const u32 from = k_rows(leaf.first, leaf.second);
#pragma unroll
  for (int j = 0; j < kDimTiles; j++) mma_m16n8k16(sum, ldmatrix_x4(from + j * kFragmentDims), x[j], y[j]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 at = base + g + i / 2 * 8, row = tile.row(2 * t + (i & 1));
    const bool seen = kTogether ? at <= rows.position(row) && at >= rows.first_visible(row) : at <= p && at >= low;
    if (seen) score[i] = sum[i] * (query_scale[i & 1] * key_scale[i / 2]);
  }
}

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

/// What the exchange of a tile's weights overwrites of a leaf's K, for the tiles behind it. In memory of its own: most
/// items have one tile, and no registers to spare.
struct Overwritten {
  static constexpr u32 kWords = (kWeights + 8 * kWeightStride + 127) / 128;
  volatile u32 words[kWords];

  LP_DEVICE void save(u32 leaf) {
#pragma unroll
    for (u32 i = 0; i < kWords; i++) words[i] = load_shared_u32(leaf + (i * 32 + lane_index()) * 4);
    __syncwarp();
  }
  LP_DEVICE void restore(u32 leaf) const {
#pragma unroll
    for (u32 i = 0; i < kWords; i++) store_shared_u32(leaf + (i * 32 + lane_index()) * 4, words[i]);
    __syncwarp();
  }
};
static_assert(Overwritten::kWords * 128 <= kGroupV, "no more than K");

/// This warp's leaves of the block's items, and its quarter of the dimensions of the pages' results.
LP_DEVICE void attend(const Launch& launch, Consumer& consumer, u32 shared, const CountedRows& rows, u32 layer,
                      u32 tag) {
  constexpr int TILES = kDimTiles / 4;
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, quad = consumer.warp >> 2, number = consumer.warp & 3,
            leaves = shared + Shared::leaves + quad * 32;
  u32 index;
  Item item;
  for (u32 j = quad; block_item(rows, layer, j, index, item); j += 4) {
    const u32 chunk = consumer.next + j / kItemRings * kLeafChunks;
    Leaf leaf;
    leaf.first = consumer.wait(chunk);
    leaf.second = kLeafChunks == 1 ? leaf.first + kGroupBytes : consumer.wait(chunk + 1);
    if (lane == 0) {
      store_shared_u32(leaves + number * 4, leaf.first);
      store_shared_u32(leaves + 16 + number * 4, leaf.second);
    }
    Overwritten overwritten;
    const auto attend_rows = [&](const Tile& tile, u32 last) {
      if (!tile.begins) overwritten.restore(leaf.first);
      float score[4], most[2], total[2];
      score_leaf(launch, rows, item, tile, last, layer, number, leaf, tag, score);
      if (kTogether && tile.begins && tile.first + kTileRows <= last) overwritten.save(leaf.first);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        most[c] = fmaxf(score[c], score[2 + c]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) most[c] = fmaxf(most[c], shuffle_xor(most[c], d));
      }
      if (g == 0) store_shared_8(leaf.first + t * 8, most);
      barrier_sync(1 + quad, 128);  // all leaves have landed, with what is new in them, and the addresses are there
      const Quad first = load_shared_16(leaves), second = load_shared_16(leaves + 16);
      const Leaf all[4] = {{first.x, second.x}, {first.y, second.y}, {first.z, second.z}, {first.w, second.w}};
      const u32 summed = load_shared_u32(leaves + lane / 8 * 4) + kWeights + lane % 8 * kWeightStride;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float of[2];
        load_shared_8(all[i].first + t * 8, of);
        most[0] = fmaxf(most[0], of[0]), most[1] = fmaxf(most[1], of[1]);
      }
      // Those of V of the first leaf while the weights are on their way; there are no registers for more.
      const auto fragment = [&](int d, int i) {
        return ldmatrix_x4(v_rows(all[i].first, all[i].second) + (number * TILES + d) * kFragmentDims);
      };
      Quad v[TILES];
#pragma unroll
      for (int d = 0; d < TILES; d++) v[d] = fragment(d, 0);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        most[c] = ceilf(most[c]);  // finite: a row sees a position of each of its pages
        const u32 to = leaf.first + kWeights + (2 * t + c) * kWeightStride + g * 4;
        store_shared_f32(to, exp2_approx(score[c] - most[c]));
        store_shared_f32(to + 32, exp2_approx(score[2 + c] - most[c]));
      }
      barrier_sync(1 + quad, 128);
      u32 weights[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float w[2];
          load_shared_8(all[i].first + kWeights + g * kWeightStride + t * 8 + h * 32, w);
          weights[i][h] = bf16_pair(w[0], w[1]);
        }
      const float sum = sum_weights(summed);  // of leaf lane / 8, column lane % 8
      float out[TILES][4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int d = 0; d < TILES; d++)
          mma_m16n8k16(out[d], i == 0 ? v[d] : fragment(d, i), weights[i][0], weights[i][1]);
      // Orders what was written to the slots before the copies that use them again. It waits for all that the warp has
      // stored: so it stands before the words, where the products take longer.
      if (!kTogether || tile.first + kTileRows > last) fence_async_shared();
#pragma unroll
      for (int c = 0; c < 2; c++) {
        total[c] = shuffle(sum, 2 * t + c);
#pragma unroll
        for (int i = 1; i < 4; i++) total[c] += shuffle(sum, i * 8 + 2 * t + c);
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const u32 column = 2 * t + c;
        if (!tile.has(column)) continue;
        u32 output = index;
        if constexpr (kTogether) {
          const u32 row = tile.row(column), first = rows.first_page(row);
          if (item.page < first || item.page > rows.position(row) / kPage) continue;
          output = rows.outputs_before(row) + (item.page - first) * kKvHeads + item.kv_head;
        }
        u8* words = launch.words + Words::page + output * Words::page_bytes + (number * TILES * 8 + g) * 16 +
                    column % kQueriesPerKv * (kDimTiles * 128);
#pragma unroll
        for (int d = 0; d < TILES; d++)
          // Even words carry the reference, odd ones the sum.
          store_relaxed_16(words + d * 128, __float_as_uint(out[d][c]), __float_as_uint(out[d][2 + c]), tag,
                           __float_as_uint(g % 2 ? total[c] : most[c]));
      }
      barrier_sync(1 + quad, 128);
    };
    if constexpr (kTogether) {
      const u32 end = item.row + rows.rows_from(item.row);
#pragma unroll 1
      for (u32 row = item.row; row < end; row += kTileRows)
        attend_rows(Tile{row, end - row < kTileRows ? end - row : kTileRows, row == item.row}, end - 1);
    } else attend_rows(Tile{item.row, 1, true}, item.row);
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
    // Pages are counted from the begin of the row's first span, of whose first pages a row with a window sees nothing.
    const u32 unseen = rows.first_page(row) % kSpanPages, pages = unseen + rows.pages(row),
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
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float scale = rescale(__uint_as_float(shuffle(z[i], lane & ~1)), now);
        if (i >= n) continue;
        share_total = fmaf(scale, __uint_as_float(z[i]), share_total);
        share_low = fmaf(scale, __uint_as_float(x[i]), share_low);
        share_high = fmaf(scale, __uint_as_float(y[i]), share_high);
      }
#pragma unroll
      for (u32 s = 0; s < SPANS; s++) {
        const float keep = s == 0 ? rescale(largest, now) : 1;
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

}  // namespace narrow
