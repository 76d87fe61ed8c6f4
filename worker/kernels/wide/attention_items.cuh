// Who attends to what in a wide pass. An item is what some rows of one sequence, a group, see of a KV head in one span
// of pages (../ops/softmax.cuh). As many blocks attend to each KV head, in its order; the host deals a head's items to
// them, the longest first, and all heads' alike (worker/src/cuda/kernels/deal.rs).
#pragma once

namespace wide {

// Of the consumer warps, four make a set, one a share of a span; a set holds an n8 tile of columns (row, query head).
constexpr u32 kSetWarps = kSpanShares, kSets = kConsumers / kSetWarps;
// With a window, each row sees from another position on.
constexpr u32 kGroupRows = kWindow ? 1 : kSets * 8 / kQueriesPerKv;
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
LP_DEVICE u32 first_span(const Rows& rows, u32 last) { return rows.first_page(last) / kSpanPages; }
LP_DEVICE u32 spans_of(const Rows& rows, u32 last) {
  return rows.position(last) / (kPage * kSpanPages) + 1 - first_span(rows, last);
}

constexpr u32 kHeadBlocks = kBlocks / kKvHeads;  // those that are left over attend to nothing
LP_DEVICE u32 own_kv_head() { return block_index() / kHeadBlocks; }

struct AttentionItem {
  u32 kv_head, last;  // the group's last row
  u32 begin, pages;   // those of a span that the group sees
};

/// The block's items of a step, in the order of its stages. A whole warp calls everything together: each lane looks at
/// one item of the list. Launch::items: [kHeadBlocks] where a block's list begins, and where the last one ends; then
/// the lists of (last row | span << 8).
struct AttentionItems {
  const Launch& launch;
  const Rows& rows;
  u32 ahead, end;         // of the list: what no lane has looked at
  u32 listed, pages = 0;  // the lane's item, and its pages in this step
  u32 left = 0;           // lanes whose items are to come

  LP_DEVICE AttentionItems(const Launch& launch, u32 shared, const Rows& rows) : launch(launch), rows(rows) {
    ahead = load_shared_u32(shared + Shared::items);
    end = load_shared_u32(shared + Shared::items + 4);
    look();
  }
  LP_DEVICE bool any() const { return left != 0; }
  LP_DEVICE AttentionItem next() {
    const int owner = __ffs(left) - 1;
    const u32 of = shuffle(listed, owner);
    const AttentionItem item{own_kv_head(), of & 255, first_page(of), shuffle(pages, owner)};
    left &= left - 1;
    look();
    return item;
  }

 private:
  /// The first page of a listed span that the group sees, if it sees any.
  LP_DEVICE u32 first_page(u32 of) const {
    const u32 span = (of >> 8) * kSpanPages, first = rows.first_page(of & 255);
    return span < first ? first : span;
  }
  /// The list has every span that a row comes to in the launch: those that it has not begun or has left, and rows that
  /// idle, are passed over.
  LP_DEVICE void look() {
    for (; left == 0 && ahead < end; ahead += 32) {
      const u32 index = ahead + lane_index();
      pages = 0;
      if (index < end) {
        listed = load_constant_u32(launch.items + index);
        const u32 last = listed & 255, begin = first_page(listed), after = ((listed >> 8) + 1) * kSpanPages,
                  seen = rows.active(last) ? rows.position(last) / kPage + 1 : 0, end = seen < after ? seen : after;
        if (begin < end) pages = end - begin;
      }
      left = __ballot_sync(kAllLanes, pages != 0);
    }
  }
};

/// The pages of the block's items. What this step appends to them is not awaited: who attends puts it in (Fresh).
LP_DEVICE void stream_attention(Producer& producer, const Rows& rows, u32 layer) {
  const Launch& launch = producer.launch;
  const u32 lane = lane_index();
  for (AttentionItems items(launch, producer.shared, rows); items.any();) {
    const AttentionItem item = items.next();
    const u32 last = rows.position(item.last);
    u32 entry = 0;
    if (lane < item.pages)
      entry = load_constant_u32(pages_of(launch, rows.rows[item.last].slot) + item.begin + lane);
    for (u32 i = 0; i < item.pages; i++) {
      // Of the last page only the leaves that are begun; what else lies in the slot is masked.
      const u32 leaves = item.begin + i == last / kPage ? last % kPage / kLeafPositions + 1 : kPageLeaves,
                bytes = leaves * (kLeafBytes / 2);
      const u32 of_pool = shuffle(entry, i);
      const u8* from = launch.kv + page_byte(layer, launch.kv_pages, of_pool, item.kv_head) + lane * bytes;
      u32 to = lane * bytes, size = bytes;
      if (kScaledStages && lane == 2) {
        from = (const u8*)(launch.k_scale + first_scale(layer, launch.kv_pages, of_pool, item.kv_head));
        to = Shared::scales_of(producer.slot()) - (Shared::ring + producer.slot() * kStageBytes), size = kScalesBytes;
      }
      producer.issue(lane < (kScaledStages ? 3 : 2), from, to, size,
                     bytes + (kScaledStages && !producer.second ? kScalesBytes : 0));
    }
  }
}

}  // namespace wide
