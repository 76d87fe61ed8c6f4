// Attention of prompt rows, on wgmma. A block has a tile of rows of a sequence and a KV head, or, where these are few,
// one span of that, whose outputs meet the row's others in matrix_merge_spans. Each of its two consumer
// warpgroups has kTileTokens of them: row r of its 64 is query head r % kQueriesPerKv of token r / kQueriesPerKv, those
// left over repeat the last token. Queries are A, in registers; K and V are B as they lie in a page, which is one copy
// into a ring. The next page's scores run while this page's outputs are added.
//
// Pages come in the order of additions (ops/softmax.cuh): by span, by share, ascending. A thread's part of the share is
// in registers; what is over of the span and of the row waits in shared memory.
#pragma once

namespace matrix {

// What a launch's blocks have in shared memory at most.
constexpr u32 kSharedMost = 232448;

/// The first position that a row sees.
LP_DEVICE u32 first_visible(u32 position) { return kWindow && position + 1 > kWindow ? position + 1 - kWindow : 0; }
/// 1 / rms of a page's K, [kPage] (kQkNorm).
LP_DEVICE float* page_scales(const Launch& launch, u32 layer, u32 page, u32 kv_head) {
  return launch.k_scale + first_scale(layer, launch.kv_pages, page, kv_head);
}
/// Queries of a token's head, [kHeadDim] bf16.
LP_DEVICE const u8* query_at(const Launch& launch, u32 row, u32 head) {
  return launch.words + Memory::queries + ((u64)row * kHeads + head) * (kHeadDim * 2);
}
LP_DEVICE float query_inverse_at(const Launch& launch, u32 row, u32 head) {
  return load_relaxed_f32(reinterpret_cast<const float*>(launch.words + Memory::query_inverse) + row * kHeads + head);
}
/// Which of `count` items is the unit's of a round: dealt to and fro, as the longest come first.
LP_DEVICE u32 item_index(u32 round, u32 unit, u32 units) {
  return round * units + (round & 1 ? units - 1 - unit : unit);
}

// ---- the ring ----

constexpr u32 kPageScales = kQkNorm ? kPage * 4 : 0, kPageSlot = kPageBytes + kPageScales;  // a page, then page_scales

/// Slots of a ring of pages, in turn, with the barriers [SLOTS] full, [SLOTS] empty behind them.
template <int SLOTS> struct PageRing {
  static constexpr u32 bytes = SLOTS * (kPageSlot + 16);
  u32 shared, slot = 0, phase = 0;

  LP_DEVICE u32 full() const { return shared + SLOTS * kPageSlot + slot * 8; }
  LP_DEVICE u32 empty() const { return full() + SLOTS * 8; }
  LP_DEVICE u32 page() const { return shared + slot * kPageSlot; }
  /// By one thread, before the others come.
  LP_DEVICE void init(u32 warps) const {
    for (u32 i = 0; i < SLOTS; i++) {
      mbarrier_init(shared + SLOTS * kPageSlot + i * 8, 1);
      mbarrier_init(shared + SLOTS * (kPageSlot + 8) + i * 8, warps);
    }
  }
  LP_DEVICE void next() {
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
  LP_DEVICE void wait() const {
    while (!mbarrier_try_wait(full(), phase)) {
    }
  }
  /// One lane: the first `size` bytes of a page into the slot, once it is free.
  template <class... POLICY> LP_DEVICE void fill(const u8* from, u32 size, const float* scales, POLICY... policy) {
    while (!mbarrier_try_wait(empty(), phase ^ 1)) {
    }
    mbarrier_expect(full(), size + kPageScales);
    bulk_load(page(), from, size, full(), policy...);
    if constexpr (kQkNorm) bulk_load(page() + kPageBytes, scales, kPageScales, full(), policy...);
  }
};

// ---- the order of pages ----

enum class After { kPage, kShare, kSpan, kAll };  // what is over

/// Pages `first` to `last` of a sequence, in the order of additions.
struct PageOrder {
  u32 first, last, page;

  LP_DEVICE PageOrder(u32 first, u32 last) : first(first), last(last) { enter(first, 0, span_end(first)); }
  /// Moves on, and says what ends with the page before.
  LP_DEVICE After next() {
    const u32 end = span_end(page), span = page / kSpanPages * kSpanPages;
    if (page + kSpanShares <= end) return page += kSpanShares, After::kPage;
    if (enter(span > first ? span : first, page % kSpanShares + 1, end)) return After::kShare;
    if (end == last) return After::kAll;
    return page = end + 1, After::kSpan;
  }

 private:
  LP_DEVICE u32 span_end(u32 of) const { return min(last, of | (kSpanPages - 1)); }
  /// To the first page of the first share from `share` on that has one of pages from .. end.
  LP_DEVICE bool enter(u32 from, u32 share, u32 end) {
    for (; share < kSpanShares; share++) {
      const u32 at = from + (share - from) % kSpanShares;
      if (at <= end) return page = at, true;
    }
    return false;
  }
};

// ---- items ----

constexpr int kAttendTilesThreads = 384, kTileConsumers = 256;

/// What is kept of a span of several: [query head] reference, sum, [kHeadDim] outputs.
LP_DEVICE float* span_part(const Launch& launch, u32 place, u32 kv_head, u32 query) {
  return reinterpret_cast<float*>(launch.words + Memory::spans +
                                  ((u64)place * kKvHeads + kv_head) * Memory::span_bytes) +
         query * (kHeadDim + 2);
}
/// In place of a place, or of a part: all that rows see.
constexpr u32 kWhole = ~0u;

/// CUT: of a pass whose tiles are cut by spans, or some of them.
template <bool CUT> struct TileItem {
  u32 kv_head, tile, position, part;  // position: of the first row; the others as in Pass::attend_tiles

  LP_DEVICE u32 row() const { return tile & 0xffff; }
  LP_DEVICE u32 rows() const { return tile >> 16; }
  LP_DEVICE bool whole() const { return !CUT || part == kWhole; }
  LP_DEVICE u32 first_of_all() const { return first_visible(position) / kPage; }
  LP_DEVICE u32 last_of_all() const { return (position + rows() - 1) / kPage; }
  LP_DEVICE u32 first_page() const {
    return whole() ? first_of_all() : max(first_of_all(), (part >> 16) * kSpanPages);
  }
  LP_DEVICE u32 last_page() const {
    return whole() ? last_of_all() : min(last_of_all(), (part >> 16) * kSpanPages + kSpanPages - 1);
  }
  /// Where a row's part of the span is kept.
  LP_DEVICE u32 place_of(u32 token) const {
    return (part & 0xffff) + token * (last_of_all() / kSpanPages - first_of_all() / kSpanPages + 1);
  }
};
/// Blocks of a launch that compute tiles, its first.
LP_DEVICE u32 tile_blocks(const Pass& pass) { return pass.tile_blocks ? pass.tile_blocks * kKvHeads : gridDim.x; }
/// The block's items, longest first. Each lane looks at one of 32 rounds, so that none waits for loads. A whole warp
/// calls next.
template <bool CUT> struct TileItems {
  const Launch& launch;
  const Pass& pass;
  u32 round = 0, tile = 0, part = 0, position = 0;

  LP_DEVICE bool next(TileItem<CUT>& item) {
    const u32 count = pass.tile_count * kKvHeads;
    if (round % 32 == 0) {
      const u32 index = item_index(round + lane_index(), blockIdx.x, tile_blocks(pass));
      if (index < count) {
        const u32* words = pass.attend_tiles + index / kKvHeads * 2;
        tile = load_relaxed_u32(words);
        if constexpr (CUT) part = load_relaxed_u32(words + 1);
        position = launch.rows[tile & 0xffff].position;
      }
    }
    const u32 index = item_index(round, blockIdx.x, tile_blocks(pass)), of = round % 32;
    item = TileItem<CUT>{index % kKvHeads, shuffle(tile, of), shuffle(position, of), CUT ? shuffle(part, of) : 0};
    round++;
    return index < count;
  }
};

// ---- shared memory ----

// What waits of a thread's rows: [4 values of a thread][thread] 16 bytes, then [warp][g] reference and sum of two rows.
constexpr u32 kTileOut = kHeadDim / 2, kParkedSums = kTileOut * kTileConsumers * 4,
              kParkedBytes = kParkedSums + kTileConsumers / 4 * 16;
constexpr u32 kTileSlotsFit = (kSharedMost - 2 * kParkedBytes) / (kPageSlot + 16),
              kTileSlots = kTileSlotsFit < 6 ? kTileSlotsFit : 6;
static_assert(kTileSlots >= 3, "a page that is used, the next one's scores and one that is fetched");
using TileRing = PageRing<kTileSlots>;
constexpr u32 kParkedSpan = TileRing::bytes, kParkedRow = kParkedSpan + kParkedBytes,
              kAttendTilesShared = kParkedRow + kParkedBytes;
extern __shared__ __align__(1024) u8 attend_memory[];

/// The slot's page, in a uniform register: descriptors from others take a tenth of a page's instructions.
LP_DEVICE u32 uniform_page(const TileRing& ring) { return __reduce_max_sync(kAllLanes, ring.page()); }
/// B in core matrices of 8 columns of 16 bytes, so far apart along k and along columns, `bytes` behind `address`.
LP_DEVICE u64 page_operand(u32 address, u32 bytes, u32 along_k, u32 along_columns) {
  return (u64)(along_columns >> 4) << 32 | ((address >> 4) + (bytes >> 4 | along_k >> 4 << 16));
}

// ---- outputs ----

/// What a thread has of the rows g and g + 8 of its warp's 16: out[4 j + 2 r + e] is dimension 8 j + 2 t + e of row r.
struct TilePart {
  float reference[2], total[2], out[kTileOut];

  LP_DEVICE void clear() {
#pragma unroll
    for (u32 r = 0; r < 2; r++) reference[r] = kMinusInfinity, total[r] = 0;
#pragma unroll
    for (u32 i = 0; i < kTileOut; i++) out[i] = 0;
  }
  /// Most often no reference of a warp's rows changes.
  LP_DEVICE void scale(const float* by) {
    if (!any_lane(by[0] != 1 || by[1] != 1)) return;
#pragma unroll
    for (u32 i = 0; i < kTileOut; i++) out[i] *= by[i >> 1 & 1];
  }
  LP_DEVICE static u32 parked(u32 at) { return at + thread_index() * 16; }
  LP_DEVICE static u32 parked_sums(u32 at) { return at + kParkedSums + thread_index() / 4 * 16; }
  LP_DEVICE void park(u32 at) {
    const float sums[4] = {reference[0], total[0], reference[1], total[1]};
    if (thread_index() % 4 == 0) store_shared_16(parked_sums(at), sums);
#pragma unroll
    for (u32 i = 0; i < kTileOut; i += 4) store_shared_16(parked(at) + i * (kTileConsumers * 4), out + i);
    __syncwarp();
    clear();
  }
  /// What was parked plus this.
  LP_DEVICE void join(u32 at) {
    const Quad sums = load_shared_16(parked_sums(at));
    const float its_reference[2] = {__uint_as_float(sums.x), __uint_as_float(sums.z)},
                its_total[2] = {__uint_as_float(sums.y), __uint_as_float(sums.w)};
    float mine[2], its[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const float now = fmaxf(reference[r], its_reference[r]);
      mine[r] = rescale(reference[r], now), its[r] = rescale(its_reference[r], now);
      reference[r] = now, total[r] = fmaf(its[r], its_total[r], mine[r] * total[r]);
    }
    scale(mine);
#pragma unroll
    for (u32 i = 0; i < kTileOut; i += 4) {
      const Quad v = load_shared_16(parked(at) + i * (kTileConsumers * 4));
      out[i] = fmaf(its[0], __uint_as_float(v.x), out[i]);
      out[i + 1] = fmaf(its[0], __uint_as_float(v.y), out[i + 1]);
      out[i + 2] = fmaf(its[1], __uint_as_float(v.z), out[i + 2]);
      out[i + 3] = fmaf(its[1], __uint_as_float(v.w), out[i + 3]);
    }
  }
};

/// Where a row of the warpgroup's 64 is.
struct TileRow {
  u32 token, head;  // of the tile; of the KV head
  bool on;

  template <bool CUT> LP_DEVICE TileRow(const TileItem<CUT>& item, u32 r) {
    const u32 thread = thread_index(), at = thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * r,
              from = thread / 128 * kTileTokens;
    token = from + at / kQueriesPerKv, head = at % kQueriesPerKv;
    on = at < kTileTokens * kQueriesPerKv && token < item.rows();
    if (!on) token = item.rows() - 1;
  }
};

/// The turns of a block's two warpgroups, where both have rows: one puts its products behind each other while the other
/// computes weights. Otherwise the tensor cores run products of both by pieces, and both wait for the last.
struct TileTurns {
  u32 group;
  bool on;

  LP_DEVICE static constexpr u32 barrier(u32 group) { return 1 + group; }
  /// By all consumers, once a launch: the first warpgroup begins.
  LP_DEVICE static void begin(u32 group) {
    if (group == 1) barrier_arrive(barrier(0), kTileConsumers);
  }
  LP_DEVICE void wait() const {
    if (on) barrier_sync(barrier(group), kTileConsumers);
  }
  LP_DEVICE void pass() const {
    if (on) barrier_arrive(barrier(1 - group), kTileConsumers);
  }
};

template <bool CUT> LP_DEVICE void attend_tile(const Launch& launch, u32 shared, TileRing& ring,
                                               const TileItem<CUT>& item) {
  const u32 t = thread_index() & 3, group = thread_index() / 128;
  const TileTurns turns{group, item.rows() > kTileTokens};
  u32 position[2];
  float scale[2] = {kScoreScale, kScoreScale};
  Quad q[kDimTiles];
  {
    const u8* from[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const TileRow row(item, r);
      const u32 head = item.kv_head * kQueriesPerKv + row.head;
      from[r] = query_at(launch, item.row() + row.token, head) + t * 4;
      position[r] = item.position + row.token;
      if constexpr (kQkNorm) scale[r] *= query_inverse_at(launch, item.row() + row.token, head);
    }
    // Two loads have halves of a sector: through the first-level cache, relaxed ones would fetch it twice.
    const auto word = [&](u32 r, u32 at) { return *reinterpret_cast<const u32*>(from[r] + at); };
#pragma unroll
    for (u32 j = 0; j < kDimTiles; j++)
      q[j] = Quad{word(0, j * 32), word(1, j * 32), word(0, j * 32 + 16), word(1, j * 32 + 16)};
  }
  // Of the warpgroup's rows.
  const u32 lowest = item.position + group * kTileTokens,
            highest = item.position + min(item.rows(), (group + 1) * kTileTokens) - 1;
  PageOrder order(item.first_page(), item.last_page());
  TilePart sum;
  float part[kTileOut], score[32];
  sum.clear();
#pragma unroll
  for (u32 i = 0; i < kTileOut; i++) part[i] = 0;
#pragma unroll
  for (u32 i = 0; i < 32; i++) score[i] = 0;
  const auto scores = [&] {
    ring.wait();
    pin<32>(score);
    wgmma_fence();
    const u32 page = uniform_page(ring);
#pragma unroll
    for (u32 j = 0; j < kDimTiles; j++) wgmma<64>(score, q[j], page_operand(page, j * 256, 128, kGroupBytes), j > 0);
    wgmma_commit();
  };
  turns.wait();
  scores();
  turns.pass();
  bool span_begun = false, row_begun = false;
  After after;
#pragma unroll 1
  do {
    hold_up();
    const u32 base = order.page * kPage, page = uniform_page(ring), empty = ring.empty();
    after = order.next();
    wgmma_wait<0>();
    pin<32>(score);
    if constexpr (kQkNorm) {
#pragma unroll
      for (u32 i = 0; i < 32; i++)
        score[i] *= scale[i >> 1 & 1] * load_shared_f32(page + kPageBytes + (i / 4 * 8 + 2 * t + (i & 1)) * 4);
    }
    if (base + kPage - 1 > lowest || base < first_visible(highest)) {
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        const int begin = (int)(first_visible(position[r]) - base - 2 * t), end = (int)(position[r] - base - 2 * t);
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const int at = i / 4 * 8 + (i & 1);
          if ((i >> 1 & 1) == r && (at > end || (kWindow && at < begin))) score[i] = kMinusInfinity;
        }
      }
    }
    float keep[2], factor[2], minimum[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      float high = score[2 * r];
#pragma unroll
      for (u32 i = 0; i < 32; i++)
        if ((i >> 1 & 1) == r) high = fmaxf(high, score[i]);
      high = fmaxf(high, shuffle_xor(high, 1));
      high = fmaxf(high, shuffle_xor(high, 2));
      high = ceilf(kQkNorm ? high : high * kScoreScale);
      const float now = fmaxf(sum.reference[r], high);
      // Of nothing, zero, nothing is to be kept.
      keep[r] = sum.reference[r] == kMinusInfinity ? 1 : rescale(sum.reference[r], now);
      factor[r] = rescale(high, now);
      sum.reference[r] = now, sum.total[r] *= keep[r];
      minimum[r] = fmaxf(high, -3.4e38f);  // of a page of which nothing is seen weights are zero, not NaN
    }
    float leaf[4][2];
    Quad weight[4];
#pragma unroll
    for (u32 l = 0; l < 4; l++) {
      float* s = score + 8 * l;
#pragma unroll
      for (u32 i = 0; i < 8; i++)
        s[i] = exp2_approx((kQkNorm ? s[i] : s[i] * kScoreScale) - minimum[i >> 1 & 1]);
#pragma unroll
      for (u32 r = 0; r < 2; r++) leaf[l][r] = (s[2 * r] + s[4 + 2 * r]) + (s[2 * r + 1] + s[5 + 2 * r]);
      weight[l] = Quad{bf16_pair(s[0], s[1]), bf16_pair(s[2], s[3]), bf16_pair(s[4], s[5]), bf16_pair(s[6], s[7])};
    }
    turns.wait();
    pin<8>(leaf[0]);  // of scores, which the next page's products write
    pin<kTileOut>(part);
    wgmma_fence();
#pragma unroll
    for (u32 l = 0; l < 4; l++)
      wgmma<kHeadDim>(part, weight[l], page_operand(page, kGroupV + l * 2 * kGroupBytes, kGroupBytes, 128), l > 0);
    wgmma_commit();
    ring.next();
    // While the products run.
    const auto add_weights = [&] {
      turns.pass();
      sum.scale(keep);
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
#pragma unroll
        for (u32 l = 0; l < 4; l++) {
          leaf[l][r] += shuffle_xor(leaf[l][r], 1);
          leaf[l][r] += shuffle_xor(leaf[l][r], 2);
        }
        sum.total[r] = fmaf(factor[r], ((leaf[0][r] + leaf[1][r]) + leaf[2][r]) + leaf[3][r], sum.total[r]);
      }
    };
    if (after != After::kAll) {
      scores();
      add_weights();
      wgmma_wait<1>();
    } else {
      add_weights();
      wgmma_wait<0>();
    }
    if (lane_index() == 0) mbarrier_arrive(empty);
    pin<kTileOut>(part);
#pragma unroll
    for (u32 i = 0; i < kTileOut; i++) sum.out[i] = fmaf(factor[i >> 1 & 1], part[i], sum.out[i]);
    if (after == After::kPage) continue;
    if (span_begun) sum.join(shared + kParkedSpan);
    span_begun = after == After::kShare;
    if (span_begun) sum.park(shared + kParkedSpan);
    else {
      if (row_begun) sum.join(shared + kParkedRow);
      row_begun = true;
      if (after == After::kSpan) sum.park(shared + kParkedRow);
    }
  } while (after != After::kAll);
  wgmma_wait<0>();  // nothing runs on, but the compiler does not know
#pragma unroll
  for (u32 r = 0; r < 2; r++) {
    const TileRow row(item, r);
    if (!row.on) continue;
    if (!item.whole()) {
      float* to = span_part(launch, item.place_of(row.token), item.kv_head, row.head);
      if (t == 0) store_f32x2(to, sum.reference[r], sum.total[r]);
#pragma unroll
      for (u32 i = 0; i < kTileOut; i += 4)
        store_f32x2(to + 2 + 2 * i + 2 * t, sum.out[i + 2 * r], sum.out[i + 2 * r + 1]);
      continue;
    }
    const float inverse = raised(reciprocal_approx(sum.total[r]));
    const u32 step = (item.kv_head * kQueriesPerKv + row.head) * kDimTiles;
    u8* to = launch.words + Memory::attention_out + vector_byte(O::steps, step, item.row() + row.token, 0) + t * 4;
#pragma unroll
    for (u32 i = 0; i < kTileOut; i += 4)
      store_u32(to + i / 8 * kStepBytes + (i / 4 & 1) * 128,
                bf16_pair(sum.out[i + 2 * r] * inverse, sum.out[i + 2 * r + 1] * inverse));
  }
}

/// The pages of the block's items.
template <bool CUT> LP_DEVICE void stream_tiles(const Launch& launch, const Pass& pass, u32 layer, TileRing& ring) {
  const u32 lane = lane_index();
  TileItems<CUT> items{launch, pass};
#pragma unroll 1
  for (TileItem<CUT> item; items.next(item);) {
    const u32* table = pages_of(launch, launch.rows[item.row()].slot);
    PageOrder order(item.first_page(), item.last_page());
    u32 entry = 0;
    After after = After::kSpan;
#pragma unroll 1
    do {
      const u32 at = order.page / kSpanPages * kSpanPages + lane;
      if (after == After::kSpan && lane < kSpanPages && at >= order.first && at <= order.last)
        entry = load_constant_u32(table + at);
      const u32 page = shuffle(entry, order.page % kSpanPages);
      hold_up();
      if (lane == 0)
        ring.fill(launch.kv + page_byte(layer, launch.kv_pages, page, item.kv_head), kPageBytes,
                  page_scales(launch, layer, page, item.kv_head));
      __syncwarp();
      ring.next();
      after = order.next();
    } while (after != After::kAll);
  }
}

/// By the first blocks of a launch.
template <bool CUT> LP_DEVICE void attend_tiles(const Launch& launch, const Pass& pass, u32 layer) {
  const u32 shared = shared_address(attend_memory), warp = threadIdx.x / 32;
  TileRing ring{shared};
  poison(attend_memory, kAttendTilesShared);
  if (threadIdx.x == 0) {
    ring.init(kTileConsumers / 32);
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_launch_before();
  if (warp >= kTileConsumers / 32) {
    lower_registers<24>();
    if (warp > kTileConsumers / 32) return;
    fence_async_global();  // qkv wrote pages as threads do
    stream_tiles<CUT>(launch, pass, layer, ring);
    return;
  }
  raise_registers<240>();
  TileTurns::begin(threadIdx.x / 128);
  TileItems<CUT> items{launch, pass};
#pragma unroll 1
  for (TileItem<CUT> item; items.next(item);) {
    if (shuffle(threadIdx.x / 128, 0) * kTileTokens < item.rows()) {
      attend_tile(launch, shared, ring, item);
      continue;
    }
    for (u32 page = item.first_page(); page <= item.last_page(); page++, ring.next()) {
      ring.wait();
      if (lane_index() == 0) mbarrier_arrive(ring.empty());
    }
  }
}

}  // namespace matrix
