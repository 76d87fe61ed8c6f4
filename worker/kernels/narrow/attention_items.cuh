// Attention's items. An item is a page of one KV head for some rows of a sequence, the work of the four warps of a
// quad; or, where several rows have many pages, a share of a span of pages for all quads, a page each. The outputs that
// meet in a merge are those of a row's pages, or shares.
#pragma once

namespace narrow {

/// Rows of a sequence whose queries are columns of a product together, and rows of an item at most: such a tile for
/// each warp of a quad.
constexpr u32 kTileRows = kTogether ? 8 / kQueriesPerKv : 1,
              kItemRows = kTogether && 4 * kTileRows < kColumns ? 4 * kTileRows : kColumns;

/// The rows of a step: their outputs, [row][page or share][kv head], and the items that make them, [group][page or
/// share][kv head]. Both are counted once a step. A group is some rows of a sequence.
struct CountedRows : Rows {
  // Shared address: [columns] {outputs of the rows up to and with each, items of the groups that begin with these, rows
  // of the group that begins with it}, then whether items are shares. If rows are not together an output is an item,
  // and there are no more counts.
  u32 counts;

  LP_DEVICE u32 outputs_before(u32 row) const {
    return row == 0 ? 0 : load_shared_u32(counts + (row - 1) * kCountBytes);
  }
  LP_DEVICE u32 items_up_to(u32 row) const {
    return load_shared_u32(counts + row * kCountBytes + (kTogether ? 4 : 0));
  }
  LP_DEVICE u32 items() const { return items_up_to(kColumns - 1); }
  LP_DEVICE u32 rows_from(u32 row) const { return kTogether ? load_shared_u32(counts + row * kCountBytes + 8) : 1; }
  /// Items are shares, which leave an output for four pages.
  LP_DEVICE bool shares() const { return kShares && load_shared_u32(counts + kColumns * kCountBytes) != 0; }
  /// Pages of `rows` rows of a sequence from `row` on.
  LP_DEVICE u32 pages_of(u32 row, u32 rows) const { return position(row + rows - 1) / kPage + 1 - first_page(row); }
  /// Shares of those.
  LP_DEVICE u32 shares_of(u32 pages) const {
    const u32 last = pages % kSpanPages;
    return pages / kSpanPages * kSpanShares + (last < kSpanShares ? last : kSpanShares);
  }
  /// Writes a count of all rows: of each, with those before it.
  LP_DEVICE void add_up(u32 row, u32 at, u32 of_row) const {
#pragma unroll
    for (u32 d = 1; d < kColumns; d *= 2) {
      const u32 before = shuffle(of_row, (int)(row - d) & 31);
      of_row += row >= d ? before : 0;
    }
    if (row < kColumns) store_shared_u32(counts + row * kCountBytes + at, of_row);
  }
  /// Rows of the sequence of `row`, which is active.
  LP_DEVICE u32 sequence_rows(u32 row) const {
    u32 sequence = 0;
#pragma unroll 1
    for (u32 r = 0; r < kColumns; r++) sequence += active(r) && rows[r].first_row == rows[row].first_row;
    return sequence;
  }
  /// Rows of the group that begins with `row`; 0: none does. Of pages as many as leave an item to all quads.
  LP_DEVICE u32 group_from(u32 row, u32 sequence, bool shares) const {
    if (sequence == 0) return 0;
    const u32 first = rows[row].first_row,
              fit = shares ? kItemRows : sequence * pages_of(first, sequence) * kKvHeads / (kBlocks * (kWarps / 4)),
              whole = fit >= kTileRows ? fit / kTileRows * kTileRows : fit > 0 ? fit : 1,
              group = whole < kItemRows ? whole : kItemRows, left = first + sequence - row;
    return (row - first) % group == 0 ? (left < group ? left : group) : 0;
  }
  /// Writes `counts`. A whole warp calls it.
  LP_DEVICE void count_items() const {
    const u32 row = lane_index();
    if constexpr (kTogether) {
      const u32 sequence = row < kColumns && active(row) ? sequence_rows(row) : 0,
                pages = sequence > 0 ? pages_of(rows[row].first_row, sequence) : 0;
      // A share is read by all quads of a block, and there should be few that are not whole. Of rows that are alone
      // most warps have less to do in it: what they save, words, has to be many.
      u32 all = sequence > 0 && rows[row].first_row == row ? pages * kKvHeads : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) all += shuffle_xor(all, d);
      const bool shares = kShares && all >= kBlocks * (any_lane(sequence > 1) ? 3 : 30) &&
                          !any_lane(sequence > 0 && pages < kSpanPages);
      const u32 group = group_from(row, sequence, shares);
      const auto outputs = [&](u32 pages) { return (shares ? shares_of(pages) : pages) * kKvHeads; };
      add_up(row, 0, sequence > 0 ? outputs(this->pages(row)) : 0);
      add_up(row, 4, group > 0 ? outputs(pages_of(row, group)) : 0);
      if (row < kColumns) store_shared_u32(counts + row * kCountBytes + 8, group);
      if (kShares && row == 0) store_shared_u32(counts + kColumns * kCountBytes, shares);
    } else {
      add_up(row, 0, row < kColumns && active(row) ? pages(row) * kKvHeads : 0);
    }
    __syncwarp();
  }
};
/// row: the group's first.
struct Item {
  u32 row, page_or_share, kv_head;

  /// The page of a quad: of a share its number `quad`.
  LP_DEVICE u32 page(bool share, u32 quad) const {
    if (!share) return page_or_share;
    return page_or_share / kSpanShares * kSpanPages + quad * kSpanShares + page_or_share % kSpanShares;
  }
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
  const u32 first = rows.shares() ? 0 : rows.first_page(row);
  item = Item{row, first + (index - before) / kKvHeads, (index - before) % kKvHeads};
  return true;
}

/// Pages go in turn to the four warps of a quad each: a round of pages is one for each ring.
constexpr u32 kPageRings = kRings / 4;
/// Pages of this block in a layer.
LP_DEVICE u32 block_pages(const CountedRows& rows, u32 layer) {
  const u32 items = rows.items(), first = (rank_block() + layer * (kBlocks / 2 + 1)) % kBlocks;
  return (items > first ? (items - first + kBlocks - 1) / kBlocks : 0) * (rows.shares() ? kSpanShares : 1);
}

/// Streams the pages of this block's items: page n goes to warps 4 (n % 4) .. + 3. K and V of earlier steps only: what
/// this step appends is patched in by the consumer.
LP_DEVICE void stream_pages(Producer& producer, const Launch& launch, const CountedRows& rows, u32 layer) {
  const bool shares = rows.shares();
  for (u32 n = 0;; n += kPageRings) {
    const u32 of_lane = n + producer.lane() / 4;
    u32 index;
    Item item;
    const bool on =
        producer.lane() < kRings && block_item(rows, layer, shares ? of_lane / kSpanShares : of_lane, index, item);
    if (!any_lane(on)) return;
    const u8* leaf = nullptr;
    if (on) {
      u32 number = item.page(shares, of_lane % kSpanShares);
      if constexpr (kShares) {
        // The last span may have fewer pages: any does for those that nobody sees.
        const u32 last = rows.position(item.row + rows.rows_from(item.row) - 1) / kPage;
        if (number > last) number = last;
      }
      const u32 page = load_constant_u32(pages_of(launch, rows.rows[item.row].slot) + number);
      leaf = launch.kv + page_byte(layer, launch.kv_pages, page, item.kv_head) + producer.lane() % 4 * kLeafBytes;
    }
    constexpr u32 BYTES = kLeafBytes / kLeafChunks;
#pragma unroll
    for (u32 c = 0; c < kLeafChunks; c++) producer.issue<2>(on, leaf + c * BYTES, BYTES);
  }
}

}  // namespace narrow
