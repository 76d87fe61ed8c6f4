// Attention of rows that decode, one of their sequence in the pass: a KV head of a row, or of one of its spans, is an
// item. A block has two sets of warps, each with items and a ring of pages of its own, so that one streams while the
// other begins or ends a span: four consumers, one a share of the span, whose columns are the row's query heads, and a
// producer. Shares meet in shared memory. Spans of a row that is an item are added by its set, those that are items
// themselves in matrix_merge_spans.
//
// All four consumers wait for every page in order and give it back, so parities cannot alias.
#pragma once

namespace matrix {

constexpr u32 kSpanSets = 2, kSpanWarps = kSpanSets * kSpanShares;
// Three warpgroups, as registers are given to whole ones.
constexpr int kAttendSpansThreads = 384, kMergeSpansThreads = 256;
constexpr u32 kQueryTiles = (kQueriesPerKv + 7) / 8;  // n8 tiles of columns

// Where shares meet, a tile of columns at a time: [share][dim tile][lane] 16 bytes as results of mma lie, then
// [share][t] reference and sum of columns 2 t and 2 t + 1.
constexpr u32 kShareOut = kDimTiles * 512, kShareSums = kSpanShares * kShareOut, kMeeting = kShareSums + 256;
constexpr u32 kSpanSlotsFit = (kSharedMost / kSpanSets - kMeeting) / (kPageSlot + 16),
              kSpanSlots = kSpanSlotsFit < 8 ? kSpanSlotsFit : 8;
using SpanRing = PageRing<kSpanSlots>;
constexpr u32 kSpanSetShared = (SpanRing::bytes + kMeeting + 127) / 128 * 128,
              kAttendSpansShared = kSpanSets * kSpanSetShared;
static_assert(kSpanSlots >= 2 && kAttendSpansShared <= kSharedMost, "a page that is used and one that is fetched");

// ---- items ----

/// A span: an item, or of a row that is one (`whole`).
struct SpanItem {
  u32 kv_head, row, place, slot, position, first, last;  // pages of the span that the row sees
  bool begins, ends;                                     // whether it is the row's first, and last

  LP_DEVICE bool whole() const { return place == kWhole; }
  LP_DEVICE bool only() const { return whole() && begins && ends; }
};
/// The spans of the set's items, the longest item first. Each lane looks at one of 32 rounds, so that none waits for
/// loads. A whole warp calls next.
struct SpanItems {
  const Launch& launch;
  const Pass& pass;
  u32 unit, units;  // the set, and how many there are: first one of each block, so that few items have a block each
  u32 round = 0, word = 0, place = 0, position = 0, slot = 0;
  u32 page = 0;  // where the row's next span begins; 0: there is none

  LP_DEVICE bool next(SpanItem& item) {
    const u32 count = pass.span_count * kKvHeads;
    if (page == 0 && round++ % 32 == 0) {
      const u32 index = item_index(round - 1 + lane_index(), unit, units);
      if (index < count) {
        const u32* span = pass.attend_spans + index / kKvHeads * 2;
        word = load_relaxed_u32(span), place = load_relaxed_u32(span + 1);
        const Row& row = launch.rows[word & 0xffff];
        position = row.position, slot = row.slot;
      }
    }
    const u32 index = item_index(round - 1, unit, units), of = (round - 1) % 32, what = shuffle(word, of),
              to = shuffle(place, of), at = shuffle(position, of), seen = first_visible(at) / kPage,
              first = page > 0 ? page : to == kWhole ? seen : max(seen, (what >> 16) * kSpanPages),
              last = min(at / kPage, first | (kSpanPages - 1));
    item = SpanItem{index % kKvHeads, what & 0xffff, to, shuffle(slot, of), at, first, last, first == seen,
                    last == at / kPage};
    page = item.whole() && !item.ends ? last + 1 : 0;
    return index < count;
  }
};

/// The pages of the set's items. Until a row's own page, where the row writes, it does not wait for the launch before:
/// nobody writes the pages before that one while the pass runs. Launches before the pass are over when it begins, as
/// its first one does not overlap. (Of two passes in turns a row of the second may have others of its sequence in the
/// first. Their qkv is over: norms in front of the second's qkv begin behind all before in the first layer, and in the
/// others let launches begin only once they have waited.) In the pass the row is alone of its sequence; qkv and
/// head_norms write K, V and scales where rows are, and beyond, and no sequence has a page of another (batch.rs refuses
/// such grants). Items, rows and page table are there before the pass; `choose` writes rows behind its other launches.
LP_DEVICE void stream_spans(const Launch& launch, u32 layer, SpanItems items, SpanRing& ring) {
  const u32 lane = lane_index();
  const u64 policy = policy_evict_first();
  const auto entries = [&](const SpanItem& item) {
    return item.first + lane <= item.last
               ? load_constant_u32(pages_of(launch, item.slot) + item.first + lane)
               : 0;
  };
  bool waited = false;
  fence_async_global();  // qkv writes pages as threads do
  SpanItem item;
  bool any = items.next(item);
  u32 entry = any ? entries(item) : 0;
#pragma unroll 1
  while (any) {
    SpanItem ahead;
    const bool more = items.next(ahead);
    const u32 entry_ahead = more ? entries(ahead) : 0;
#pragma unroll 1
    for (u32 at = item.first; at <= item.last; at++, ring.next()) {
      const u32 page = shuffle(entry, at - item.first),
                groups = at == item.position / kPage ? item.position % kPage / 8 + 1 : kPage / 8;  // that are begun
      if (!waited && at == item.position / kPage) {
        wait_launch_before();
        fence_async_global();
        waited = true;
      }
      hold_up();
      if (lane == 0)
        ring.fill(launch.kv + page_byte(layer, launch.kv_pages, page, item.kv_head), groups * kGroupBytes,
                  page_scales(launch, layer, page, item.kv_head), policy);
      __syncwarp();
    }
    item = ahead, entry = entry_ahead, any = more;
  }
}

// ---- consumers ----

/// A row's queries of a KV head: B, column 8 n + g its query head; columns left over repeat the last.
struct SpanQueries {
  u32 b[kQueryTiles][kDimTiles][2];
  float scale[kQueryTiles][2];  // of scores of columns 2 t and 2 t + 1, all but k's part

  LP_DEVICE void load(const Launch& launch, const SpanItem& item) {
    constexpr u32 kLast = kQueriesPerKv - 1;
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, head = item.kv_head * kQueriesPerKv;
#pragma unroll
    for (u32 n = 0; n < kQueryTiles; n++) {
      const u8* from = query_at(launch, item.row, head + min(8 * n + g, kLast)) + t * 4;
#pragma unroll
      for (u32 j = 0; j < kDimTiles; j++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) b[n][j][h] = load_relaxed_u32(from + j * 32 + h * 16);
#pragma unroll
      for (u32 c = 0; c < 2; c++) {
        scale[n][c] = kScoreScale;
        if constexpr (kQkNorm) scale[n][c] *= query_inverse_at(launch, item.row, head + min(8 * n + 2 * t + c, kLast));
      }
    }
  }
};

/// A share of a span: of tile n, columns 8 n + 2 t and + 1.
struct SpanShare {
  float reference[kQueryTiles][2], total[kQueryTiles][2];
  float out[kQueryTiles][kDimTiles][4];  // dimensions 16 j + g and + 8

  LP_DEVICE void clear() {
#pragma unroll
    for (u32 n = 0; n < kQueryTiles; n++) {
#pragma unroll
      for (u32 c = 0; c < 2; c++) reference[n][c] = kMinusInfinity, total[n][c] = 0;
#pragma unroll
      for (u32 j = 0; j < kDimTiles; j++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) out[n][j][i] = 0;
    }
  }
  /// Adds a page, in shared memory at `page`, of which positions begin .. end are seen. True never, which only the
  /// products know (narrow/ring.cuh).
  LP_DEVICE bool add_page(u32 page, int begin, int end, const SpanQueries& queries) {
    const u32 lane = lane_index(), row = lane & 7, first = lane >> 3 & 1, second = lane >> 4;
    const int g = lane >> 2, t = lane & 3;
    const auto seen = [&](int at) { return at >= begin && at <= end; };
    // K: matrices of both groups of a leaf, then of the next 8 dimensions; V: the other way about.
    const u32 k = page + first * kGroupBytes + second * 128 + row * 16,
              v = page + kGroupV + second * kGroupBytes + first * 128 + row * 16;
    float score[kQueryTiles][4][4] = {};
#pragma unroll
    for (u32 j = 0; j < kDimTiles; j++)
#pragma unroll
      for (u32 l = 0; l < 4; l++) {
        const Quad a = ldmatrix_x4(k + l * 2 * kGroupBytes + j * 256);
#pragma unroll
        for (u32 n = 0; n < kQueryTiles; n++) mma_m16n8k16(score[n][l], a, queries.b[n][j][0], queries.b[n][j][1]);
      }
    u32 weights[kQueryTiles][4][2];
    float keep[kQueryTiles][2], factor[kQueryTiles][2];
#pragma unroll
    for (u32 n = 0; n < kQueryTiles; n++) {
      float high[2] = {kMinusInfinity, kMinusInfinity}, sum[4][2];
#pragma unroll
      for (u32 l = 0; l < 4; l++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          const u32 at = l * kLeafPositions + g + 8 * (i >> 1);
          float& s = score[n][l][i];
          s *= kQkNorm ? queries.scale[n][i & 1] * load_shared_f32(page + kPageBytes + at * 4) : kScoreScale;
          if (!seen(at)) s = kMinusInfinity;
          high[i & 1] = fmaxf(high[i & 1], s);
        }
#pragma unroll
      for (u32 d = 4; d < 32; d *= 2)
#pragma unroll
        for (u32 c = 0; c < 2; c++) high[c] = fmaxf(high[c], shuffle_xor(high[c], d));
#pragma unroll
      for (u32 c = 0; c < 2; c++) {
        high[c] = ceilf(high[c]);
        const float now = fmaxf(reference[n][c], high[c]);
        keep[n][c] = rescale(reference[n][c], now), factor[n][c] = rescale(high[c], now);
        reference[n][c] = now;
        high[c] = fmaxf(high[c], -3.4e38f);  // of a page of which nothing is seen weights are zero, not NaN
      }
#pragma unroll
      for (u32 l = 0; l < 4; l++) {
        float* s = score[n][l];
#pragma unroll
        for (u32 i = 0; i < 4; i++) s[i] = exp2_approx(s[i] - high[i & 1]);
#pragma unroll
        for (u32 c = 0; c < 2; c++) sum[l][c] = s[c] + s[2 + c];
        weights[n][l][0] = transpose_8x8(bf16_pair(s[0], s[1]));
        weights[n][l][1] = transpose_8x8(bf16_pair(s[2], s[3]));
      }
#pragma unroll
      for (u32 d = 4; d < 32; d *= 2)
#pragma unroll
        for (u32 l = 0; l < 4; l++)
#pragma unroll
          for (u32 c = 0; c < 2; c++) sum[l][c] += shuffle_xor(sum[l][c], d);
#pragma unroll
      for (u32 c = 0; c < 2; c++)
        total[n][c] = fmaf(keep[n][c], total[n][c],
                           factor[n][c] * (((sum[0][c] + sum[1][c]) + sum[2][c]) + sum[3][c]));
    }
    // V of positions that are not seen may be anything, NaN too.
    u32 kept[4][2];
#pragma unroll
    for (u32 l = 0; l < 4; l++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32 at = l * kLeafPositions + 8 * h + 2 * t;
        kept[l][h] = (seen(at) ? 0xffffu : 0) | (seen(at + 1) ? 0xffff0000u : 0);
      }
    bool never = false;
#pragma unroll
    for (u32 j = 0; j < kDimTiles; j++) {
      float part[kQueryTiles][4] = {};
#pragma unroll
      for (u32 l = 0; l < 4; l++) {
        Quad a = ldmatrix_x4(v + l * 2 * kGroupBytes + j * 256);
        a.x &= kept[l][0], a.y &= kept[l][0], a.z &= kept[l][1], a.w &= kept[l][1];
#pragma unroll
        for (u32 n = 0; n < kQueryTiles; n++) mma_m16n8k16(part[n], a, weights[n][l][0], weights[n][l][1]);
      }
#pragma unroll
      for (u32 n = 0; n < kQueryTiles; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
          out[n][j][i] = fmaf(keep[n][i & 1], out[n][j][i], factor[n][i & 1] * part[n][i]);
        never |= __float_as_uint(out[n][j][0]) == 0x7fedcba9u;
      }
    }
    return never;
  }
};

/// What the spans of a row add up to, ascending: a query head's reference and sum.
struct SpanSums {
  float reference = kMinusInfinity, total = 0;
  float keep, factor;  // what outputs of the spans before are multiplied by, and those of the last one

  LP_DEVICE void add(float its, float sum) {
    const float now = fmaxf(reference, its);
    keep = rescale(reference, now), factor = rescale(its, now);
    total = fmaf(keep, total, factor * sum), reference = now;
  }
};
/// A warp's part of a row that is an item: columns 2 t and 2 t + 1 of a tile, a quarter of the dimensions.
struct RowSums {
  SpanSums column[kQueryTiles][2];
  float out[kQueryTiles][kDimTiles / 4][4];

  LP_DEVICE void clear() {
#pragma unroll
    for (u32 n = 0; n < kQueryTiles; n++) {
      column[n][0] = column[n][1] = SpanSums();
#pragma unroll
      for (u32 i = 0; i < kDimTiles / 4; i++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) out[n][i][k] = 0;
    }
  }
};

/// The four shares of a span's columns 8 n on, ascending: each warp adds a quarter of the dimensions. A row's span is
/// added to `row`, and the last one writes what they add up to.
LP_DEVICE void meet(const Launch& launch, u32 at, u32 set, u32 number, const SpanItem& item, u32 n,
                    const SpanShare& share, RowSums& row) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (u32 j = 0; j < kDimTiles; j++)
    store_shared_16(at + number * kShareOut + j * 512 + lane * 16, share.out[n][j]);
  const float sums[4] = {share.reference[n][0], share.total[n][0], share.reference[n][1], share.total[n][1]};
  if (g == 0) store_shared_16(at + kShareSums + (number * 4 + t) * 16, sums);
  barrier_sync(1 + set, kSpanShares * 32);
  float reference[2] = {kMinusInfinity, kMinusInfinity}, total[2] = {0, 0}, factor[kSpanShares][2];
  Quad its[kSpanShares];
#pragma unroll
  for (u32 s = 0; s < kSpanShares; s++) {
    its[s] = load_shared_16(at + kShareSums + (s * 4 + t) * 16);
    reference[0] = fmaxf(reference[0], __uint_as_float(its[s].x));
    reference[1] = fmaxf(reference[1], __uint_as_float(its[s].z));
  }
#pragma unroll
  for (u32 s = 0; s < kSpanShares; s++) {
    factor[s][0] = rescale(__uint_as_float(its[s].x), reference[0]);
    factor[s][1] = rescale(__uint_as_float(its[s].z), reference[1]);
    total[0] = fmaf(factor[s][0], __uint_as_float(its[s].y), total[0]);
    total[1] = fmaf(factor[s][1], __uint_as_float(its[s].w), total[1]);
  }
  const bool whole = item.whole(), added = whole && !item.only();
  float inverse[2];
#pragma unroll
  for (u32 c = 0; c < 2; c++) {
    if (added) row.column[n][c].add(reference[c], total[c]);
    inverse[c] = raised(reciprocal_approx(added ? row.column[n][c].total : total[c]));
  }
  if (!whole && number == 0 && g == 0) {
#pragma unroll
    for (u32 c = 0; c < 2; c++)
      if (8 * n + 2 * t + c < kQueriesPerKv) {
        float* to = span_part(launch, item.place, item.kv_head, 8 * n + 2 * t + c);
        to[0] = reference[c], to[1] = total[c];
      }
  }
#pragma unroll
  for (u32 i = 0; i < kDimTiles / 4; i++) {
    const u32 j = number * (kDimTiles / 4) + i;
    float out[4] = {};
#pragma unroll
    for (u32 s = 0; s < kSpanShares; s++) {
      const Quad v = load_shared_16(at + s * kShareOut + j * 512 + lane * 16);
      out[0] = fmaf(factor[s][0], __uint_as_float(v.x), out[0]);
      out[1] = fmaf(factor[s][1], __uint_as_float(v.y), out[1]);
      out[2] = fmaf(factor[s][0], __uint_as_float(v.z), out[2]);
      out[3] = fmaf(factor[s][1], __uint_as_float(v.w), out[3]);
    }
    if (added) {
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        const SpanSums& column = row.column[n][k % 2];
        out[k] = row.out[n][i][k] = fmaf(column.keep, row.out[n][i][k], column.factor * out[k]);
      }
    }
    if (whole) {
      if (!item.ends) continue;
      // Lanes then have dimensions 2 t and 2 t + 1 of column g.
      const u32 low = transpose_8x8(bf16_pair(out[0] * inverse[0], out[1] * inverse[1])),
                high = transpose_8x8(bf16_pair(out[2] * inverse[0], out[3] * inverse[1])),
                step = (item.kv_head * kQueriesPerKv + 8 * n + g) * kDimTiles + j;
      if (8 * n + g >= kQueriesPerKv) continue;
      u8* to = launch.words + Memory::attention_out + vector_byte(O::steps, step, item.row, 0) + t * 4;
      store_u32(to, low), store_u32(to + 128, high);
    } else {
#pragma unroll
      for (u32 c = 0; c < 2; c++)
        if (8 * n + 2 * t + c < kQueriesPerKv) {
          float* to = span_part(launch, item.place, item.kv_head, 8 * n + 2 * t + c) + 2 + 16 * j + g;
          to[0] = out[c], to[8] = out[2 + c];
        }
    }
  }
  barrier_sync(1 + set, kSpanShares * 32);
}

/// A consumer's share of the spans of the set's items.
LP_DEVICE void add_spans(const Launch& launch, SpanItems items, u32 set, u32 number, SpanRing& ring) {
  SpanItem item;
  SpanQueries queries, next;
  SpanShare share;
  RowSums row;
  bool any = items.next(item);
  // Without items too: who waits for this launch waits for all before it.
  wait_launch_before();
  if (any) queries.load(launch, item);
#pragma unroll 1
  while (any) {
    SpanItem ahead;
    const bool more = items.next(ahead);
    if (more) next.load(launch, ahead);
    share.clear();
    if (item.begins) row.clear();
#pragma unroll 1
    for (u32 page = item.first; page <= item.last; page++, ring.next()) {
      hold_up();
      ring.wait();
      bool never = false;
      if (page % kSpanShares == number)
        never = share.add_page(ring.page(), (int)(first_visible(item.position) - page * kPage),
                               (int)(item.position - page * kPage), queries);
      __syncwarp();
      if (lane_index() == 0) mbarrier_arrive(ring.empty() + (never ? 8192 : 0));
    }
#pragma unroll
    for (u32 n = 0; n < kQueryTiles; n++)
      meet(launch, ring.shared + SpanRing::bytes, set, number, item, n, share, row);
    item = ahead, queries = next, any = more;
  }
}

/// By the blocks of a launch from `first` on.
LP_DEVICE void attend_spans(const Launch& launch, const Pass& pass, u32 layer, u32 first) {
  const u32 warp = threadIdx.x / 32, set = warp < kSpanWarps ? warp / kSpanShares : warp - kSpanWarps;
  SpanRing ring{shared_address(attend_memory) + set * kSpanSetShared};
  poison(attend_memory, kAttendSpansShared);
  if (warp >= kSpanWarps && set < kSpanSets && threadIdx.x % 32 == 0) {
    ring.init(kSpanShares);
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  const u32 blocks = gridDim.x - first;
  SpanItems items{launch, pass, set * blocks + blockIdx.x - first, kSpanSets * blocks};
  if (warp >= kSpanWarps) {
    lower_registers<56>();
    if (set < kSpanSets) stream_spans(launch, layer, items, ring);
    return;
  }
  raise_registers<224>();
  add_spans(launch, items, set, warp % kSpanShares, ring);
}

}  // namespace matrix
