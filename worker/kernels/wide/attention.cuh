// Attention of a wide pass. An item is what some rows of one sequence, a group, see of a KV head in one span of pages (../ops/softmax.cuh); a block owns items whole, and
// as many pages in all as every other block, to half an item. A page is a stage of the ring. Of the warps, four make a set, and warp c of a set takes
// pages c, c + 4, ... of a span, which is the span's share c: it walks them with an online maximum, K and V read once for all columns that it has in registers. Then the
// shares of a set meet in shared memory. The columns (row, query head) of a group are up to four n8 tiles: sets divide them, or, of a single tile, as
// of a row that decodes, take items in turn, so that the end of one item overlaps with the pages of the next.
//
// A set has nothing to do with the stages of the other's items: who uses a page gives it back for the other set, too. But it may wait for a stage only when what was
// in the same slot before has landed, or parities would alias; so before it goes on it waits until the other set has seen all pages of its item land.
//
// Rows of more than one span meet through words in memory: {two dimensions, tag, reference or sum}, as pages do in narrow passes.
#pragma once

constexpr u32 kSetWarps = kSpanShares, kSets = kConsumers / kSetWarps, kSetTiles = 2;
constexpr u32 kGroupRows = kWindow ? 1 : kSets * kSetTiles * 8 / kQueriesPerKv;  // with a window, spans begin at another page for each row
constexpr u32 kPageBytes = 4 * kLeafBytes, kPageLeaves = kPage / kLeafPositions;
static_assert(kPageBytes <= kStageBytes, "a page is a stage");
constexpr u32 kLaneDims = kHeadDim / 32;  // of an output, of the lane of a warp that has it all
constexpr u32 kAttentionItemPages = kSpanPages;
constexpr u64 kAttentionItemBytes = (u64)kQueriesPerKv * kHeadDim * 8;  // words of a row's span and KV head: [query][kLaneDims / 2][lane]

// ---- who attends to what ----

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
  LP_DEVICE static u32 lane() { return threadIdx.x & 31; }
};

/// The pages of the block's items. Those that this pass adds to come after the KV head's counter.
LP_DEVICE void stream_attention(Producer& producer, const Rows& rows, u32 layer, u32 generation) {
  const Launch& launch = producer.launch;
  const u32 lane = threadIdx.x & 31;
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

// ---- a span ----

/// What TILES n8 tiles of a group's columns have of a share: of tile n, columns 8 n + 2 t and 8 n + 2 t + 1.
template <int TILES> struct Share {
  u32 queries[TILES][kDimTiles][2];                // B fragments: column 8 n + g
  float scale[TILES][2];                           // of scores, all but k's part
  float reference[TILES][2], total[TILES][2] = {};
  float out[TILES][kDimTiles][4] = {};             // dimensions 16 j + g and + 8

  /// first: column of the group; begin: its first row.
  LP_DEVICE Share(const Launch& launch, u32 kv_head, u32 begin, u32 first, u32 columns) {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const u32 column = first + 8 * n + g, row = begin + column / kQueriesPerKv, query = column % kQueriesPerKv * kDimTiles;
      const bool on = column < columns;
#pragma unroll
      for (int j = 0; j < kDimTiles; j++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) queries[n][j][h] = on ? load_relaxed_u32(launch.words + Words::queries + query_byte(kv_head, query + j, h, row) + t * 4) : 0;
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
    for (int j = 0; j < kDimTiles; j++) squares[j] = __uint_as_float(load_relaxed_u32(launch.words + Words::squares + square_byte(kv_head, tile + j, row)));
    return rsqrt_approx(tree_sum<kDimTiles>(squares) * (1.0f / kHeadWidth) + __uint_as_float(LP_EPS));
  }
  /// Adds a page, in shared memory at `stage`. seen(position of the page, tile, column): whether that column sees it; `whole`: all do. k: 1 / rms (kQkNorm).
  /// True never, which only the products know.
  template <class SEEN> LP_DEVICE bool add_page(u32 stage, bool whole, const SEEN& seen, const float (*k)[2]) {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, from = stage + lane * 16;
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
          const float base = fmaxf(most[l][c], -3.4e38f);  // a leaf of which nothing is seen has weights of zero, not NaN
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

/// Zeroes V of the positions of a page that nobody sees: it may hold anything, NaN too, whose products with weights of zero are NaN.
template <class SEEN> LP_DEVICE void clear_unseen(u32 stage, const SEEN& seen) {
  const u32 lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
  for (u32 l = 0; l < kPageLeaves; l++) {
    const auto mask = [&](u32 at) { return (seen(l * kLeafPositions + at) ? 0xffffu : 0) | (seen(l * kLeafPositions + at + 1) ? 0xffff0000u : 0); };
    const u32 early = mask(2 * t), late = mask(2 * t + 8), from = stage + l * kLeafBytes + kLeafV + lane * 16;
    if (!any_lane((early & late) != ~0u)) continue;
#pragma unroll
    for (int j = 0; j < kDimTiles; j++) {
      const Quad v = load_shared_16(from + j * kFragment);
      const float kept[4] = {__uint_as_float(v.x & early), __uint_as_float(v.y & early), __uint_as_float(v.z & late), __uint_as_float(v.w & late)};
      store_shared_16(from + j * kFragment, kept);
    }
  }
}

/// 1 / rms of k at positions 16 l + g and + 8 of a page; of this pass from what qkv left, which is kept for later passes.
LP_DEVICE void fetch_k_scale(const Launch& launch, const Rows& rows, const AttentionItem& item, u32 layer, u32 page, float (*k)[2]) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, last = rows.position(item.last);
  const Row& row = rows.rows[item.last];
  const u32 fresh = row.first_position + rows.step, entry = load_constant_u32(launch.page_table + row.slot * launch.page_stride + page);
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
        k[l][r] = Share<1>::inverse_rms(launch, item.kv_head, kQueriesPerKv * kDimTiles, row.first_row + (position - fresh));
        if (t == 0) stored[at] = k[l][r];
      }
    }
}

/// An output: kLaneDims dimensions a lane, from kLaneDims * lane on.
struct Merged {
  float reference = kMinusInfinity, total = 0, out[kLaneDims] = {};

  LP_DEVICE void add(const Merged& other) {
    const float now = fmaxf(reference, other.reference), mine = rescale(reference, now), its = rescale(other.reference, now);
    total = fmaf(mine, total, its * other.total);
#pragma unroll
    for (u32 i = 0; i < kLaneDims; i++) out[i] = fmaf(mine, out[i], its * other.out[i]);
    reference = now;
  }
  /// Into the input of o.
  LP_DEVICE void write(const Launch& launch, u32 head, u32 row) const {
    const float inverse = reciprocal_approx(total);
    const u32 dim = (threadIdx.x & 31) * kLaneDims;
    u8* to = launch.words + Words::attention_out + vector_byte(head * kDimTiles + dim / 16, row, dim / 8 % 2) + dim % 8 * 2;
#pragma unroll
    for (u32 i = 0; i < kLaneDims; i += 2) store_u32(to + 2 * i, bf16_pair(out[i] * inverse, out[i + 1] * inverse));
  }
  /// As words, for who merges the row's spans: even lanes carry the reference, odd ones the sum.
  LP_DEVICE void publish(u8* words, u32 tag) const {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 i = 0; i < kLaneDims / 2; i++)
      store_relaxed_16(words + (i * 32 + lane) * 16, __float_as_uint(out[2 * i]), __float_as_uint(out[2 * i + 1]), tag, __float_as_uint(lane % 2 ? total : reference));
  }
  LP_DEVICE void receive(const Launch& launch, const u8* words, u32 tag) {
    const u32 lane = threadIdx.x & 31;
    u32 x[kLaneDims / 2], y[kLaneDims / 2], extra[kLaneDims / 2];
    poll_words<kLaneDims / 2>(launch, words + lane * 16, 32 * 16, tag, true, x, y, extra, kSitePage);
#pragma unroll
    for (u32 i = 0; i < kLaneDims / 2; i++) out[2 * i] = __uint_as_float(x[i]), out[2 * i + 1] = __uint_as_float(y[i]);
    reference = __uint_as_float(shuffle(extra[0], lane & ~1));
    total = __uint_as_float(shuffle(extra[0], lane | 1));
  }
};
LP_DEVICE u8* span_words(const Launch& launch, u32 row, u32 head, u32 span) {
  const u32 spans = (launch.page_stride + kSpanPages - 1) / kSpanPages;
  return launch.words + Words::items + ((u64)(row * kKvHeads + head / kQueriesPerKv) * spans + span) * kAttentionItemBytes + head % kQueriesPerKv * (kHeadDim * 8);
}

constexpr u32 kRound = kSetWarps, kColumnBytes = (kHeadDim + 8) * 4;  // without bank conflicts
constexpr u32 kShareBytes = kRound * kColumnBytes, kSetScratch = kSpanShares * (kShareBytes + kRound * 8);
static_assert(kSets * kSetScratch <= Shared::scratch, "shares fit the receive buffer");
/// The set's shares of an item, four columns at a time, of which each warp then has one. begin: first row of the group; `whole`: the span is all that its rows see.
template <int TILES> LP_DEVICE void merge_shares(const Consumer& consumer, const AttentionItem& item, const Share<TILES>& share, u32 begin, u32 first, u32 columns, bool whole, u32 tag) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, set = consumer.warp / kSetWarps, number = consumer.warp % kSetWarps;
  const u32 outputs = consumer.shared + Shared::receive + set * kSetScratch, sums = outputs + kSpanShares * kShareBytes;
  const u32 to = outputs + number * kShareBytes + t % 2 * 2 * kColumnBytes + g * 4, from = outputs + number * kColumnBytes + lane * kLaneDims * 4;
#pragma unroll
  for (u32 r = 0; r < TILES * 8 / kRound; r++) {
    if (first + r * kRound >= columns) break;
    const int n = r * kRound / 8;
    if (t / 2 == r % 2) {
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < kDimTiles; j++) store_shared_f32(to + (i & 1) * kColumnBytes + (16 * j + 8 * (i >> 1)) * 4, share.out[n][j][i]);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const u32 sum = sums + (number * kRound + t % 2 * 2 + c) * 8;
        if (g == 0) store_shared_f32(sum, share.reference[n][c]), store_shared_f32(sum + 4, share.total[n][c]);
      }
    }
    barrier_sync(2 + set, kSetWarps * 32);
    const u32 column = first + r * kRound + number;
    if (column < columns) {
      const auto part = [&](u32 share) {
        Merged m;
        m.reference = load_shared_f32(sums + (share * kRound + number) * 8);
        m.total = load_shared_f32(sums + (share * kRound + number) * 8 + 4);
#pragma unroll
        for (u32 i = 0; i < kLaneDims; i++) m.out[i] = load_shared_f32(from + share * kShareBytes + i * 4);
        return m;
      };
      Merged span = part(0), rest = part(2);
      span.add(part(1));
      rest.add(part(3));
      span.add(rest);
      const u32 row = begin + column / kQueriesPerKv, head = item.kv_head * kQueriesPerKv + column % kQueriesPerKv;
      if (whole) span.write(consumer.launch, head, row);
      else span.publish(span_words(consumer.launch, row, head, item.begin / kSpanPages), tag);
    }
    barrier_sync(2 + set, kSetWarps * 32);
  }
}

/// TILES tiles, from column `first` on, of an item: this warp's pages of it. `alone`: the other set has no part in it.
template <int TILES, class BEGIN, class LANDED>
LP_DEVICE void attend_span(Consumer& consumer, const Rows& rows, const AttentionItem& item, u32 layer, u32 tag, u32 first, u32 columns, bool alone, const BEGIN& begin_stages, const LANDED& landed) {
  const Launch& launch = consumer.launch;
  const u32 t = threadIdx.x & 3, begin = group_begin(rows, item.last), number = consumer.warp % kSetWarps;
  const u32 low = rows.first_visible(item.last), high = rows.position(item.last), earliest = rows.position(begin), first_page = rows.first_page(item.last) + item.begin;
  Share<TILES> share(launch, item.kv_head, begin, first, columns);
  begin_stages();
#pragma unroll 1
  for (u32 i = 0; i < item.pages; i++) {
    if (i % kSpanShares != number) {
      consumer.wait();
      if (i + 1 == item.pages) landed();
      consumer.release();
      continue;
    }
    const u32 page = first_page + i, base = page * kPage;
    float k[kPageLeaves][2];
    if constexpr (kQkNorm) fetch_k_scale(launch, rows, item, layer, page, k);
    const u32 stage = consumer.wait();
    if (i + 1 == item.pages) landed();
    const bool whole = base >= low && base + kPage - 1 <= earliest;
    if (!whole) clear_unseen(stage, [&](u32 at) { return base + at >= low && base + at <= high; });
    const bool never = share.add_page(stage, whole, [&](u32 at, u32 n, u32 c) { return base + at >= low && base + at <= earliest + (first + 8 * n + 2 * t + c) / kQueriesPerKv; }, k);
    if (!whole) fence_async_shared();  // orders what was zeroed before the copies that use the slot again
    consumer.release(never, alone ? 1 + kSetWarps : 1);
  }
  merge_shares<TILES>(consumer, item, share, begin, first, columns, spans_of(rows, item.last) == 1, tag);
}

/// Rows of several spans: each (row, query head) is merged by one warp of the grid.
LP_DEVICE void merge_spans(const Consumer& consumer, const Rows& rows, u32 tag) {
  for (u32 job = blockIdx.x + kBlocks * consumer.warp; job < rows.count * kHeads; job += kBlocks * kConsumers) {
    const u32 row = job / kHeads, head = job % kHeads;
    if (!rows.active(row)) continue;
    u32 last = row;
    while (!ends_group(rows, last)) last++;
    const u32 spans = spans_of(rows, last);
    if (spans == 1) continue;
    Merged all;
#pragma unroll 1
    for (u32 span = 0; span < spans; span++) {
      Merged part;
      part.receive(consumer.launch, span_words(consumer.launch, row, head, span), tag);
      all.add(part);
    }
    all.write(consumer.launch, head, row);
  }
}

/// Passes of 128 rows have no room for them in shared memory but the scratch, and loads from memory one after the other would cost microseconds.
LP_DEVICE Rows rows_at_hand(const Consumer& consumer, const Rows& rows) {
  if (!kPrompt) return rows;
  constexpr u32 kAt = Shared::receive + kSets * kSetScratch, kBytes = kColumns * sizeof(Row);
  static_assert(kSets * kSetScratch + kBytes <= Shared::scratch && kBytes <= kConsumerThreads * 16, "rows beside the shares");
  if (threadIdx.x * 16 < rows.count * sizeof(Row)) {
    const Quad v = load_constant_16(reinterpret_cast<const u8*>(rows.rows) + threadIdx.x * 16);
    const float words[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    store_shared_16(consumer.shared + kAt + threadIdx.x * 16, words);
  }
  consumers_sync();
  return Rows{static_cast<const Row*>(__cvta_shared_to_generic(consumer.shared + kAt)), rows.count, rows.step};
}
LP_DEVICE void attend(Consumer& consumer, const Rows& all_rows, u32 layer, u32 tag, u32 generation) {
  const u32 set = consumer.warp / kSetWarps;
  const Rows rows = rows_at_hand(consumer, all_rows);
  AttentionItems items(rows);
  u32 ready = ~0u, turn = 0;
  bool others = false;  // the item before was the other set's
  for (AttentionItem item; items.next(item); turn++) {
    const u32 columns = (item.last + 1 - group_begin(rows, item.last)) * kQueriesPerKv, tiles = (columns + 7) / 8;
    const bool alone = tiles == 1;
    if (alone && set != turn % kSets) {
      consumer.skip(item.pages);
      others = true;
      continue;
    }
    if (ready != item.kv_head) wait_queries(consumer.launch, ready = item.kv_head, generation);
    if (turn == 0) reached(consumer.launch, rows.step, consumer.warp, layer, 10);
    const auto landed = [&] {
      if (alone && items.stages > 0) barrier_arrive(4 + set, kConsumerThreads);
    };
    const auto begin = [&] {
      if (others) barrier_sync(4 + (set ^ 1), kConsumerThreads);
      others = false;
    };
    const u32 half = (tiles + 1) / 2, mine = set && !alone ? tiles - half : half, first = set && !alone ? half * 8 : 0;
    if (mine == 2) attend_span<2>(consumer, rows, item, layer, tag, first, columns, alone, begin, landed);
    else attend_span<1>(consumer, rows, item, layer, tag, first, columns, alone, begin, landed);
  }
  reached(consumer.launch, rows.step, consumer.warp, layer, 11);
  merge_spans(consumer, rows, tag);
  fence_async_shared();  // orders the scratch before what the pair sends there
  publish(consumer.launch, Words::outputs_ready);
}
