// An item of several tiles of rows, or of a share: each warp of a quad has the weights of a tile with all of its page,
// and lays them where the page's K was. Then, of a page, each has a quarter of the dimensions for all tiles. Of a share
// the quads have a tile each, and add up the outputs of its pages, so that a quarter of the words leave the block.
#pragma once

namespace narrow {

/// What a tile's warp leaves over K of its own leaf, which all have read: weights of the page, B fragments, over its
/// first group; over the second [column] {reference, sum}.
static_assert(4 * kLeafPositions * 8 * 2 <= kGroupV && 8 * 8 <= kGroupV, "they fit where K was");

/// The weights of a tile with a page, this warp's: from its queries to what it leaves for the others. `of`: this warp's
/// leaf of the page.
LP_DEVICE void weigh_page(const Launch& launch, const CountedRows& rows, const LeafOfItem& of, const Tile& tile,
                          const QuadWarp& warp, u32 layer, u32 tag) {
  const Leaf& leaf = warp.leaf;
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
  of.clear(rows, leaf);
  if (of.is_seen(rows)) {
    float scale[2] = {}, *stored = nullptr;
    if constexpr (kQkNorm) stored = of.key_scales(launch, rows, layer);
    of.patch(launch, rows, leaf, stored, tag, scale);
  }
  warp.meet();  // all leaves have landed, with what is new in them, and the addresses are there
  // Of a share's pages the last ones may not be there.
  const bool weighs = tile.rows > 0 && of.page <= rows.position(of.last) / kPage;
  u32 weights[4][2];
  float most[2] = {kMinusInfinity, kMinusInfinity}, total[2] = {};
  if (weighs) {
    const Leaves all(warp.of_quad());
    const Queries queries(launch, of.item, tile, tag);
    float score[4][4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const LeafOfItem each{of.item, of.page, i, of.last};
      float scale[2] = {1, 1};
      if constexpr (kQkNorm) {
        // Those of this step, too, which the leaf's warp has stored before the barrier.
        const float* stored = each.key_scales(launch, rows, layer);
        scale[0] = load_relaxed_f32(stored + g), scale[1] = load_relaxed_f32(stored + g + 8);
      }
      each.scores(rows, Leaf{all.first[i], all.second[i]}, tile, queries, scale, score[i]);
#pragma unroll
      for (int c = 0; c < 2; c++) most[c] = fmaxf(most[c], fmaxf(score[i][c], score[i][2 + c]));
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) most[c] = fmaxf(most[c], shuffle_xor(most[c], d));
      most[c] = ceilf(most[c]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        score[i][c] = exp2_approx(score[i][c] - most[c]), score[i][2 + c] = exp2_approx(score[i][2 + c] - most[c]);
        float sum = score[i][c] + score[i][2 + c];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += shuffle_xor(sum, d);
        total[c] = i == 0 ? sum : total[c] + sum;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) weights[i][h] = transpose_8x8(bf16_pair(score[i][2 * h], score[i][2 * h + 1]));
  }
  warp.meet();  // K has been read
  if (weighs) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      store_shared_16(leaf.first + h * 512 + lane * 16,
                      Quad{weights[2 * h][0], weights[2 * h][1], weights[2 * h + 1][0], weights[2 * h + 1][1]});
    if (g < 2) {
      const float of_column[2] = {g == 0 ? most[0] : most[1], g == 0 ? total[0] : total[1]};
      store_shared_8(leaf.second + (2 * t + g) * 8, of_column);
    }
  }
}

/// A warp's quarter of a tile's output of a page, whose leaves these are.
LP_DEVICE Quarter output_of(const Leaves& leaves, u32 tile, u32 quarter) {
  const u32 lane = lane_index(), t = lane & 3;
  Quarter q{};
  u32 from = leaves.first[0], and_sums = leaves.second[0];
#pragma unroll
  for (u32 i = 1; i < 4; i++)
    if (tile == i) from = leaves.first[i], and_sums = leaves.second[i];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Quad w = load_shared_16(from + h * 512 + lane * 16);
    const auto add = [&](int i, u32 x, u32 y) {
      const u32 v = v_rows(leaves.first[i], leaves.second[i]) + quarter * kQuarterTiles * kFragmentDims;
#pragma unroll
      for (int d = 0; d < kQuarterTiles; d++) mma_m16n8k16(q.out[d], ldmatrix_x4(v + d * kFragmentDims), x, y);
    };
    add(2 * h, w.x, w.y);
    add(2 * h + 1, w.z, w.w);
  }
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float of_column[2];
    load_shared_8(and_sums + (2 * t + c) * 8, of_column);
    q.most[c] = of_column[0], q.total[c] = of_column[1];
  }
  return q;
}

/// A tile's output of a share: that of its pages, ascending. Pages that a row does not see count for nothing.
LP_DEVICE Quarter output_of_share(const CountedRows& rows, const Item& item, const Tile& tile, u32 number, u32 quarter,
                                  u32 leaves) {
  const u32 t = lane_index() & 3;
  Quarter share{};
  share.most[0] = share.most[1] = kMinusInfinity;
#pragma unroll 1
  for (u32 i = 0; i < kSpanShares && item.page(true, i) <= rows.position(tile.first + tile.rows - 1) / kPage; i++) {
    const Quarter page = output_of(Leaves(leaves + i * 32), number, quarter);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      if (item.page(true, i) > rows.position(tile.row(2 * t + c)) / kPage) continue;
      const float most = fmaxf(share.most[c], page.most[c]), keep = rescale(share.most[c], most),
                  scale = rescale(page.most[c], most);
      share.most[c] = most;
      share.total[c] = fmaf(scale, page.total[c], keep * share.total[c]);
#pragma unroll
      for (int d = 0; d < kQuarterTiles; d++)
#pragma unroll
        for (int h = c; h < 4; h += 2) share.out[d][h] = fmaf(scale, page.out[d][h], keep * share.out[d][h]);
    }
  }
  return share;
}

/// This warp's part of an item of `of_item` rows.
LP_DEVICE void attend_tiles(const Launch& launch, const CountedRows& rows, const Item& item, u32 of_item,
                            const QuadWarp& warp, u32 layer, u32 tag) {
  const bool shares = rows.shares();
  const u32 last = item.row + of_item - 1, t = lane_index() & 3, quarter = warp.number;
  const auto tile_of = [&](u32 number) {
    const u32 first = number * kTileRows, left = of_item > first ? of_item - first : 0;
    return Tile{item.row + first, left < kTileRows ? left : kTileRows};
  };
  const LeafOfItem of{item, item.page(shares, warp.quad), warp.number, last};
  weigh_page(launch, rows, of, tile_of(warp.number), warp, layer, tag);
  if (shares) {
    barrier_sync(kAllQuads, kWarps * 32);
    const Tile tile = tile_of(warp.quad);
    if (tile.rows > 0) {
      const Quarter share = output_of_share(rows, item, tile, warp.quad, quarter, warp.leaves);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const u32 row = tile.row(2 * t + c);
        if (tile.has(2 * t + c) && item.page(true, 0) <= rows.position(row) / kPage)
          share.put(launch, rows.outputs_before(row) + item.page_or_share * kKvHeads + item.kv_head, quarter, c, tag);
      }
    }
    fence_async_shared();  // see attend_tile
    barrier_sync(kAllQuads, kWarps * 32);
  } else {
    warp.meet();
    const Leaves all(warp.of_quad());
#pragma unroll 1
    for (u32 i = 0; i * kTileRows < of_item; i++) {
      const Tile tile = tile_of(i);
      const Quarter page = output_of(all, i, quarter);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const u32 row = tile.row(2 * t + c), page_of_row = item.page_or_share - rows.first_page(row);
        if (tile.has(2 * t + c) && page_of_row < rows.pages(row))
          page.put(launch, rows.outputs_before(row) + page_of_row * kKvHeads + item.kv_head, quarter, c, tag);
      }
    }
    fence_async_shared();
    warp.meet();
  }
}

}  // namespace narrow
