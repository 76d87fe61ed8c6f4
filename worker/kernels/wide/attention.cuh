// Attention of a wide pass: a block's items (attention_items.cuh). A page is a stage of the ring. Warp c of a set of
// four takes pages c, c + 4, ... of a span, which are the span's share c (attention_share.cuh): K and V are read once
// for all columns that it has in registers. Then the shares of a set meet in shared memory. The columns (row, query
// head) of a group are one or two n8 tiles: sets divide them, or, of a single tile, as of a row that decodes, take
// items in turn, so that the end of one item overlaps with the pages of the next.
//
// A set has nothing to do with the stages of the other's items, nor, where all pages of a warp come to one slot
// (kOwnPages), a warp with the pages of others: who uses a page gives it back for them, too. But a stage may be waited
// for only when what was in the same slot before has landed, or parities would alias. Within an item that is the warp's
// own page before; and before a set goes on it waits until the other set has seen all pages of its item land.
//
// K and V of this step's positions are not in the pages that are copied. They come as words, with the queries, and each
// warp puts them into its page in shared memory, and the row's own into the page in memory.
//
// Rows of more than one span meet through words in memory: {two dimensions, tag, reference or sum}, as pages do in
// narrow passes.
#pragma once

namespace wide {

constexpr u32 kLaneDims = kHeadDim / 32;  // of an output, of the lane of a warp that has it all
constexpr u32 kAttentionItemPages = kSpanPages;
// Words of a row's span and KV head: [query][kLaneDims / 2][lane].
constexpr u64 kAttentionItemBytes = (u64)kQueriesPerKv * kHeadDim * 8;

/// An output: kLaneDims dimensions a lane, from kLaneDims * lane on.
struct Merged {
  float reference = kMinusInfinity, total = 0, out[kLaneDims] = {};

  LP_DEVICE void add(const Merged& other) {
    const float now = fmaxf(reference, other.reference), mine = rescale(reference, now),
                its = rescale(other.reference, now);
    total = fmaf(mine, total, its * other.total);
#pragma unroll
    for (u32 i = 0; i < kLaneDims; i++) out[i] = fmaf(mine, out[i], its * other.out[i]);
    reference = now;
  }
  /// Into the input of o.
  LP_DEVICE void write(const Launch& launch, u32 head, u32 row) const {
    const float inverse = raised(reciprocal_approx(total));
    const u32 dim = lane_index() * kLaneDims;
    u8* to = launch.words + Words::attention_out + vector_byte(head * kDimTiles + dim / 16, row, dim / 8 % 2) +
             dim % 8 * 2;
#pragma unroll
    for (u32 i = 0; i < kLaneDims; i += 2) store_u32(to + 2 * i, bf16_pair(out[i] * inverse, out[i + 1] * inverse));
  }
  /// As words, for who merges the row's spans: even lanes carry the reference, odd ones the sum.
  LP_DEVICE void publish(u8* words, u32 tag) const {
    const u32 lane = lane_index();
#pragma unroll
    for (u32 i = 0; i < kLaneDims / 2; i++)
      store_relaxed_16(words + (i * 32 + lane) * 16, __float_as_uint(out[2 * i]), __float_as_uint(out[2 * i + 1]), tag,
                       __float_as_uint(lane % 2 ? total : reference));
  }
  LP_DEVICE void receive(const Launch& launch, const u8* words, u32 tag) {
    const u32 lane = lane_index();
    u32 x[kLaneDims / 2], y[kLaneDims / 2], extra[kLaneDims / 2];
    receive_words<kLaneDims / 2>(
        launch, [&](u32 i) { return words + (i * 32 + lane) * 16; }, tag, x, y, extra, kSitePage);
#pragma unroll
    for (u32 i = 0; i < kLaneDims / 2; i++) out[2 * i] = __uint_as_float(x[i]), out[2 * i + 1] = __uint_as_float(y[i]);
    reference = __uint_as_float(shuffle(extra[0], lane & ~1));
    total = __uint_as_float(shuffle(extra[0], lane | 1));
  }
};
/// Pages, and spans of these, that a window reaches into at most: from a page's last position, a span's last page on.
constexpr u32 kWindowPages = (kWindow + kPage - 2) / kPage + 1,
              kWindowSpans = (kWindowPages + 2 * kSpanPages - 2) / kSpanPages;
/// span: counted from the first one that the row sees.
LP_DEVICE u8* span_words(const Launch& launch, u32 row, u32 head, u32 span) {
  const u32 all = (launch.page_stride + kSpanPages - 1) / kSpanPages,
            spans = kWindow && kWindowSpans < all ? kWindowSpans : all;
  return launch.words + Words::items +
         ((u64)(row * kKvHeads + head / kQueriesPerKv) * spans + span) * kAttentionItemBytes +
         head % kQueriesPerKv * (kHeadDim * 8);
}

/// Whether a warp's pages of an item all come to the same slot of the ring.
constexpr bool kOwnPages = kSpanShares == kStages;
constexpr u32 kColumnBytes = (kHeadDim + 4) * 4;  // without bank conflicts
constexpr u32 kShareBytes = 8 * kColumnBytes, kSetScratch = kSpanShares * (kShareBytes + 8 * 8);
static_assert(kSets * kSetScratch <= kInputSlots * kInputSteps * kStepBytes, "shares fit the slots of activations");
/// The set's shares of an item meet where activations lie otherwise: those of qkv have been used, and o's are not
/// fetched before all blocks have attended. Then each warp has some of the columns. begin: first row of the group;
/// `whole`: the span is all that its rows see; place: among the spans that they see.
LP_DEVICE void merge_shares(const Consumer& consumer, const AttentionItem& item, const Share& share, u32 begin,
                            u32 first, u32 columns, bool whole, u32 place, u32 tag) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, set = warp_index() / kSetWarps,
            number = warp_index() % kSetWarps;
  const u32 outputs = consumer.shared + Shared::input + set * kSetScratch, sums = outputs + kSpanShares * kShareBytes;
  const u32 to = outputs + number * kShareBytes + 2 * t * kColumnBytes + g * 4;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
      store_shared_f32(to + (i & 1) * kColumnBytes + (16 * j + 8 * (i >> 1)) * 4, share.out[j][i]);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const u32 sum = sums + (number * 8 + 2 * t + c) * 8;
    if (g == 0) store_shared_f32(sum, share.reference[c]), store_shared_f32(sum + 4, share.total[c]);
  }
  barrier_sync(2 + set, kSetWarps * 32);
#pragma unroll 1
  for (u32 of = number; of < 8 && first + of < columns; of += kSetWarps) {
    const auto part = [&](u32 share) {
      const u32 from = outputs + share * kShareBytes + of * kColumnBytes + lane * kLaneDims * 4,
                sum = sums + (share * 8 + of) * 8;
      Merged m;
      m.reference = load_shared_f32(sum);
      m.total = load_shared_f32(sum + 4);
#pragma unroll
      for (u32 i = 0; i < kLaneDims; i++) m.out[i] = load_shared_f32(from + i * 4);
      return m;
    };
    Merged span = part(0);
#pragma unroll
    for (u32 share = 1; share < kSpanShares; share++) span.add(part(share));
    const u32 column = first + of, row = begin + column / kQueriesPerKv,
              head = item.kv_head * kQueriesPerKv + column % kQueriesPerKv;
    if (whole) span.write(consumer.launch, head, row);
    else span.publish(span_words(consumer.launch, row, head, place), tag);
  }
  barrier_sync(2 + set, kSetWarps * 32);
}

/// A tile, from column `first` on, of an item: this warp's pages of it. `alone`: the other set has no part in it.
template <class BEGIN, class LANDED>
LP_DEVICE void attend_span(Consumer& consumer, const Rows& rows, const AttentionItem& item, u32 layer, u32 first,
                           u32 columns, bool alone, const BEGIN& begin_stages, const LANDED& landed) {
  const Launch& launch = consumer.launch;
  const Row& row = rows.rows[item.last];
  const u32 t = thread_index() & 3, g = lane_index() >> 2, begin = group_begin(rows, item.last),
            number = warp_index() % kSetWarps, tag = tag_of(launch, rows.step, layer);
  const u32 low = rows.first_visible(item.last), high = rows.position(item.last), earliest = rows.position(begin),
            first_fresh = row.first_position + rows.step;
  Fresh fresh;  // of position `high`
  Share share(launch, item, begin, first, columns, tag, fresh);
  reached(launch, rows.step, warp_index(), layer, 10);
  begin_stages();
  // Without a page of its own.
  if (kOwnPages && item.pages <= (number - item.begin) % kSpanShares) landed();
#pragma unroll 1
  for (u32 i = 0; i < item.pages; i++) {
    const u32 page = item.begin + i, base = page * kPage;
    if (any_lane(page % kSpanShares != number)) {
      if constexpr (kOwnPages) {
        consumer.skip(1);
      } else {
        consumer.wait();
        if (i + 1 == item.pages) landed();
        consumer.release();
      }
      continue;
    }
    const bool whole = base >= low && base + kPage - 1 <= earliest, patched = base + kPage > first_fresh;
    // Not pages_of, which a control (LP_NEIGHBOR) may point at what is another's: this is written to.
    const bool pooled = patched || (kQkNorm && !kScaledStages);
    const u32 of_pool = pooled ? load_constant_u32(launch.page_table + row.slot * launch.page_stride + page) : 0;
    float* stored = launch.k_scale + first_scale(layer, launch.kv_pages, of_pool, item.kv_head);
    float k[kPageLeaves][2] = {};
    if constexpr (kQkNorm && !kScaledStages) fetch_k_scale(stored, page, first_fresh, k);
    const u32 stage = consumer.wait();
    if constexpr (kScaledStages) take_k_scale(consumer, page, first_fresh, k);
    if (i + (kOwnPages ? kSpanShares : 1) >= item.pages) landed();
    if (!whole) clear_outside(stage, low > base ? low - base : 0, high + 1 > base ? min(high + 1 - base, kPage) : 0);
    if (any_lane(patched)) {
      const u32 from = first_fresh > base ? first_fresh : base, oldest = from > low ? from : low,
                newest = min(high, base + kPage - 1);
      u8* in_pool = launch.kv + page_byte(layer, launch.kv_pages, of_pool, item.kv_head);
      Fresh next[Fresh::kTogether] = {fresh};
      u32 left = newest == high;  // of these
#pragma unroll 1
      for (u32 position = newest + 1; any_lane(position > oldest); left--) {
        position--;
        if (any_lane(left == 0)) {
          Fresh::receive(launch, item.kv_head, row.first_row + (position - first_fresh),
                         row.first_row + (oldest - first_fresh), tag, next);
          left = Fresh::kTogether;
        }
        // Those of the group's own rows are kept, by one of its sets.
        const bool kept = position >= earliest && first == 0;
        next[0].put(stage, position - base, kept ? in_pool : nullptr);
        if constexpr (kQkNorm) {
#pragma unroll
          for (u32 l = 0; l < kPageLeaves; l++)
#pragma unroll
            for (u32 r = 0; r < 2; r++)
              if (base + l * kLeafPositions + g + 8 * r == position) k[l][r] = next[0].k;
          if (kept && lane_index() == 0) stored[position - base] = next[0].k;
        }
#pragma unroll
        for (u32 i = 1; i < Fresh::kTogether; i++) next[i - 1] = next[i];
      }
    }
    // Both sets have changed the page: neither reads it before the other is through.
    if (any_lane(!alone && (patched || !whole))) {
      reached(launch, rows.step, warp_index(), layer, 13);
      barrier_sync(6 + number, 64);
    }
    const bool never = share.add_page(
        stage, whole,
        [&](u32 at, u32 c) {
          return base + at >= low && base + at <= earliest + (first + 2 * t + c) / kQueriesPerKv;
        },
        k);
    if (patched || !whole) fence_async_shared();  // orders what was written before the copies that use the slot again
    consumer.release(never, (kOwnPages ? kSetWarps : 1) + (alone ? kSetWarps : 0));
  }
  merge_shares(consumer, item, share, begin, first, columns, spans_of(rows, item.last) == 1,
               item.begin / kSpanPages - first_span(rows, item.last), tag);
}

/// Rows of several spans: each (row, query head) is merged by one warp of the grid.
LP_DEVICE void merge_spans(const Consumer& consumer, const Rows& rows, u32 tag) {
  for (u32 job = rank_block() + kBlocks * warp_index(); job < rows.count * kHeads; job += kBlocks * kConsumers) {
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

LP_DEVICE void attend(Consumer& consumer, const Rows& rows, u32 layer) {
  const auto set = [] { return warp_index() / kSetWarps; };
  AttentionItems items(consumer.launch, consumer.shared, rows);
  bool others = false;  // the item before was the other set's
  // Sets take turns by items of a single tile, whatever lies between them: so neither tells twice before it is heard.
  for (u32 turn = 0; items.any();) {
    const AttentionItem item = items.next();
    const u32 columns = (item.last + 1 - group_begin(rows, item.last)) * kQueriesPerKv, tiles = (columns + 7) / 8;
    const bool alone = tiles == 1;
    const u32 owner = turn % kSets;
    if (alone) turn++;
    if (any_lane(alone && set() != owner)) {
      consumer.skip(item.pages);
      others = true;
      continue;
    }
    const auto landed = [&] {
      if (alone && items.any()) barrier_arrive(4 + set(), kConsumerThreads);
    };
    const auto begin = [&] {
      if (others) barrier_sync(4 + (set() ^ 1), kConsumerThreads);
      others = false;
    };
    const u32 half = (tiles + 1) / 2, first = set() && !alone ? half * 8 : 0;
    attend_span(consumer, rows, item, layer, first, columns, alone, begin, landed);
  }
  reached(consumer.launch, rows.step, warp_index(), layer, 11);
  merge_spans(consumer, rows, tag_of(consumer.launch, rows.step, layer));
  fence_async_shared();  // orders the scratch before the activations that are copied there
  publish(consumer.launch, Words::outputs_ready);
}

}  // namespace wide
