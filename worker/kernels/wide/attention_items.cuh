// Who attends to what in a wide pass. An item is what some rows of one sequence, a group, see of a KV head in one span of pages (../ops/softmax.cuh). A block owns
// items whole, in the order [KV head][group][span], and as many pages in all as every other block, to half an item.
#pragma once

// Of the consumer warps, four make a set, one a share of a span; a set holds two n8 tiles of columns (row, query head).
constexpr u32 kSetWarps = kSpanShares, kSets = kConsumers / kSetWarps, kSetTiles = kPrompt ? 2 : 1;
constexpr u32 kGroupRows = kWindow ? 1 : kSets * kSetTiles * 8 / kQueriesPerKv;  // with a window, spans begin at another page for each row
constexpr u32 kPageBytes = 4 * kLeafBytes, kPageLeaves = kPage / kLeafPositions;
static_assert(kPageBytes <= kStageBytes, "a page is a stage");

/// Groups are known by their last rows.
LP_DEVICE bool ends_group(const Rows& rows, u32 row) {
  if (!rows.active(row)) return false;
  const u32 first = rows.rows[row].first_row;
  return (row + 1 - first) % kGroupRows == 0 || !rows.active(row + 1) || rows.rows[row + 1].first_row != first;
}
LP_DEVICE u32 group_begin(const Rows& rows, u32 last) {
  const u32 first = rows.rows[last].first_row;
  return last - (last - first) % kGroupRows;
}
LP_DEVICE u32 spans_of(const Rows& rows, u32 last) { return (rows.pages(last) + kSpanPages - 1) / kSpanPages; }

struct AttentionItem {
  u32 kv_head, last;  // the group's last row
  u32 begin, pages;   // from the first page that the group sees
};

/// The block's items, in the order of its stages. A whole warp calls everything together.
struct AttentionItems {
  const Rows& rows;
  u32 kv_head = 0, last = 0, next_page = 0;  // where the walk is: a group, and its pages that were taken
  u32 stages = 0;                            // left

  LP_DEVICE AttentionItems(const Rows& rows) : rows(rows) {
    constexpr u32 kLaneRows = kColumns / 32;
    u32 pages[kLaneRows], sum = 0;
#pragma unroll
    for (u32 i = 0; i < kLaneRows; i++) {
      const u32 row = lane() * kLaneRows + i;
      sum += pages[i] = ends_group(rows, row) ? rows.pages(row) : 0;
    }
    u32 end = sum;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
      const u32 below = __shfl_up_sync(kAllLanes, end, d);
      if (lane() >= d) end += below;
    }
    const u32 head_stages = shuffle(end, 31), all = head_stages * kKvHeads;
    if (all == 0) return;
    // The boundary between items that is nearest to `stage`, and where the walk goes on from there.
    const auto seek = [&](u32 stage) {
      const u32 head = stage / head_stages;
      u32 rest = stage % head_stages - (end - sum), begin = 0, row = ~0u, page = 0;  // wraps if it is before this lane's rows
#pragma unroll
      for (u32 i = 0; i < kLaneRows; i++) {
        if (row == ~0u && rest < pages[i]) {
          const u32 span = rest / kSpanPages * kSpanPages, length = pages[i] - span < kSpanPages ? pages[i] - span : kSpanPages;
          row = lane() * kLaneRows + i;
          page = 2 * (rest - span) > length ? span + length : span;
          begin = stage - rest + page;
        }
        rest -= pages[i];
      }
      const int owner = __ffs(__ballot_sync(kAllLanes, row != ~0u)) - 1;
      kv_head = head;
      last = shuffle(row, owner);
      next_page = shuffle(page, owner);
      return shuffle(begin, owner);
    };
    const u32 until = blockIdx.x + 1 == kBlocks ? all : seek((blockIdx.x + 1) * all / kBlocks);
    stages = until - seek(blockIdx.x * all / kBlocks);
  }
  LP_DEVICE bool next(AttentionItem& item) {
    if (stages == 0) return false;
    while (next_page == rows.pages(last)) {
      next_page = 0;
      for (last++;; last += 32) {
        const u32 found = __ballot_sync(kAllLanes, ends_group(rows, last + lane()));
        last += found ? __ffs(found) - 1 : 0;
        if (found) break;
        if (last + 32 >= rows.count) last = ~0u - 31, kv_head++;  // 0 next
      }
    }
    const u32 left = rows.pages(last) - next_page;
    item = AttentionItem{kv_head, last, next_page, left < kSpanPages ? left : kSpanPages};
    next_page += item.pages;
    stages -= item.pages;
    return true;
  }

 private:
  LP_DEVICE static u32 lane() { return lane_index(); }
};

/// The pages of the block's items. Those that this pass adds to come after the KV head's counter.
LP_DEVICE void stream_attention(Producer& producer, const Rows& rows, u32 layer, u32 generation) {
  const Launch& launch = producer.launch;
  const u32 lane = lane_index();
  AttentionItems items(rows);
  u32 ready = ~0u;  // a KV head
  for (AttentionItem item; items.next(item);) {
    const Row& row = rows.rows[item.last];
    const u32 first = rows.first_page(item.last) + item.begin, last = rows.position(item.last), fresh = (row.first_position + rows.step) / kPage;
    u32 entry = 0;
    if (lane < item.pages) entry = load_constant_u32(launch.page_table + row.slot * launch.page_stride + first + lane);
    for (u32 i = 0; i < item.pages; i++) {
      if (first + i >= fresh && ready != item.kv_head) wait_queries(launch, ready = item.kv_head, generation);
      // Of the last page only the leaves that are begun; what else lies in the slot is masked.
      const u32 leaves = first + i == last / kPage ? last % kPage / kLeafPositions + 1 : kPageLeaves, bytes = leaves * (kLeafBytes / 2);
      const u8* page = launch.kv + page_byte(layer, launch.kv_pages, shuffle(entry, i), item.kv_head);
      producer.issue(lane < 2, page + lane * bytes, lane * bytes, bytes, !kPrompt);
    }
  }
}
