// What follows from the words of all blocks, for one row: one warp reads them and moves the row to its next stage.
// Every block draws the same conclusion, since all read the same words.
#pragma once

namespace sampling {

constexpr u32 kHeads = (kBlocks + 31) / 32;        // blocks a lane reads of
LP_DEVICE bool listed(const RowState& row) { return row.top_k > 0 && row.top_k <= kMaxListed; }

// Waits for a word: orders what a block found before what is concluded from it (grid).
LP_DEVICE Quad wait_word(const Scratch& s, const u8* p, u32 tag, u32 kind) {
  Quad v = load_relaxed_16(p);
  if (v.z == tag) return v;
  const long long begun = clock64();
  while ((v = load_relaxed_16(p)).z != tag)
    if (clock64() - begun > kWaitLimit) wait_failed(s.launch, kSiteSamplerBest + kind, tag, v.z);
  return v;
}

// The words of one kind of all blocks; lane l holds those of blocks l, l + 32, ..., zeros past the last block. Whole
// warp.
LP_DEVICE void gather(u32 thread, const Scratch& s, u32 r, u32 kind, u32 tag, Quad (&w)[kHeads]) {
  const u8* p = s.launch.words + word_at(tag & 1, r, kind) + lane_of(thread) * 16;
#pragma unroll
  for (u32 i = 0; i < kHeads; i++)
    w[i] = lane_of(thread) + 32 * i < kBlocks ? load_relaxed_16(p + i * 512) : Quad{0, 0, tag, 0};
#pragma unroll
  for (u32 i = 0; i < kHeads; i++) if (w[i].z != tag) w[i] = wait_word(s, p + i * 512, tag, kind);
  warp_sync();
}

// The best of them and its value. `floor`: a key that the largest values of at least k blocks reach (0 if there are not
// so many blocks), so that what ranks below is not among the best k; only if k is over 0.
struct Winner { Place place; u64 entry; u32 floor; };
LP_DEVICE Winner best_of_all(u32 thread, const Scratch& s, u32 r, u32 kind, u32 tag, u32 k) {
  Quad w[kHeads];
  gather(thread, s, r, kind, tag, w);
  u64 mine = 0;
  u32 value = 0, floor = 0;
#pragma unroll
  for (u32 i = 0; i < kHeads; i++) {
    const u64 e = entry_of_key(w[i].x, w[i].y);
    if (e > mine) { mine = e; value = w[i].w; }
  }
  const u64 best = warp_max64(mine);
  const u32 from = lowest_bit(ballot(mine == best));
  const Place place{float_of(shuffle(value, from)), best == 0 ? kNone : token_of(best)};
  if (k == 0 || k > kBlocks) return Winner{place, best, 0};
#pragma unroll 1
  for (u32 bit = 31; bit >= 12; bit--) {
    const u32 trial = floor | 1u << bit;
    u32 reach = 0;
#pragma unroll
    for (u32 i = 0; i < kHeads; i++) reach += w[i].x >= trial;
    if (warp_add(reach) >= k) floor = trial;
  }
  return Winner{place, best, floor};
}
struct Amount { u64 weight; u32 tokens; };
LP_DEVICE Amount sum_of_all(u32 thread, const Scratch& s, u32 r, u32 kind, u32 tag) {
  Quad w[kHeads];
  gather(thread, s, r, kind, tag, w);
  Amount a{0, 0};
#pragma unroll
  for (u32 i = 0; i < kHeads; i++) { a.weight += (u64)w[i].y << 32 | w[i].x; a.tokens += w[i].w; }
  return Amount{warp_add64(a.weight), warp_add(a.tokens)};
}

// The best `limit` of all blocks' lists: lane l holds the l-th best in `low` and the (32 + l)-th in `high`. Whole warp.
struct List { u64 low, high; u32 length; };
LP_DEVICE List merge_lists(u32 thread, const Scratch& s, u32 r, u32 list, u32 limit, u32 tag) {
  constexpr u32 kListBytes = kMaxListed * 16;
  const u32 lane = lane_of(thread);
  const u8* p = s.launch.words + list_at(tag & 1, r, list, lane);
  u64 head[kHeads], second[kHeads]; // the first two entries of a block's list that are not taken
  u32 next[kHeads];                 // index of the entry after them; above 16 bits, the number of entries
  Quad w[kHeads];
#pragma unroll
  for (u32 i = 0; i < kHeads; i++)
    w[i] = lane + 32 * i < kBlocks ? load_relaxed_16(p + i * 32 * kListBytes) : Quad{0, 0, tag, 0};
#pragma unroll
  for (u32 i = 0; i < kHeads; i++) {
    if (w[i].z != tag) w[i] = wait_word(s, p + i * 32 * kListBytes, tag, list);
    head[i] = w[i].w ? entry_of_key(w[i].x, w[i].y) : 0;
    next[i] = w[i].w << 16 | 2;
  }
#pragma unroll
  for (u32 i = 0; i < kHeads; i++)
    w[i] = next[i] >> 16 > 1 ? load_relaxed_16(p + i * 32 * kListBytes + 16) : Quad{0, 0, tag, 0};
#pragma unroll
  for (u32 i = 0; i < kHeads; i++) {
    if (w[i].z != tag) w[i] = wait_word(s, p + i * 32 * kListBytes + 16, tag, list);
    second[i] = entry_of_key(w[i].x, w[i].y);
  }
  warp_sync();
  u64 low = 0, high = 0;
  u32 n = 0;
  for (; n < limit; n++) {
    u64 mine = 0;
#pragma unroll
    for (u32 i = 0; i < kHeads; i++) mine = larger(mine, head[i]);
    const u64 best = warp_max64(mine);
    if (best == 0) break;
    if (lane == n % 32) { if (n < 32) low = best; else high = best; }
    if (mine == best) {
#pragma unroll
      for (u32 i = 0; i < kHeads; i++) {
        if (head[i] != best) continue;
        head[i] = second[i];
        second[i] = 0;
        const u32 index = next[i] & 0xffff;
        if (index >= next[i] >> 16) continue;
        const Quad v = wait_word(s, p + i * 32 * kListBytes + index * 16, tag, list);
        second[i] = entry_of_key(v.x, v.y);
        next[i]++;
      }
    }
    warp_sync();
  }
  return List{low, high, n};
}

// Sum over the lanes before this one, and over all.
LP_DEVICE u64 sum_before(u64 v, u32 lane, u64& total) {
  u64 sum = v;
#pragma unroll
  for (u32 d = 1; d < 32; d *= 2) {
    const u64 other = shuffle_up(sum, d);
    if (lane >= d) sum += other;
  }
  total = shuffle(sum, 31);
  return sum - v;
}

// min_p, top_p and the draw among the best top_k tokens.
LP_DEVICE u32 draw_listed(const RowState& row, u64 low, u64 high, u32 lane) {
  const u64 top = shuffle(low, 0);
  const float max = value_of(top);
  if (infinite(max)) return token_of(top);
  bool keep_low = low != 0 && value_of(low) >= row.threshold, keep_high = high != 0 && value_of(high) >= row.threshold;
  if (row.top_p < 1.0f) {
    u64 total_low, total_high;
    const u64 weight_low = keep_low ? weight_of(value_of(low), max) : 0,
              weight_high = keep_high ? weight_of(value_of(high), max) : 0;
    const u64 before_low = sum_before(weight_low, lane, total_low),
              before_high = sum_before(weight_high, lane, total_high) + total_low;
    const u64 mass = mass_of(row.top_p, total_low + total_high);
    keep_low = keep_low && before_low < mass;
    keep_high = keep_high && before_high < mass;
  }
  u64 mine = 0;
#pragma unroll 1
  for (u32 i = 0; i < 2; i++) {
    const u64 e = i == 0 ? low : high;
    const bool keep = i == 0 ? keep_low : keep_high;
    if (keep) mine = larger(mine, entry(add(value_of(e), gumbel(noise_bits_of(row.noise, token_of(e)))), token_of(e)));
    warp_sync();
  }
  return token_of(warp_max64(mine));
}

// The how-manieth largest of the blocks' largest values is of interest: the k-th is a floor of the best k, for a list.
// Where top_k is over kMaxListed, the one that about top_k - 32 tokens reach, if tokens lie anyhow in blocks; 0 if none
// does. (A guess at a pivot: no result depends on it.)
LP_DEVICE u32 floor_rank(const RowState& row) {
  if (listed(row) || row.stage == kNear) return list_limit(row, kDrawList);
  if (row.top_k == 0 || row.top_p >= 1.0f || row.top_k > 8 * kBlocks) return 0;
  return (u32)mul((float)kBlocks, sub(1.0f, exp_(div(32.0f - (float)row.top_k, (float)kBlocks))));
}

// One warp reads what all blocks say of one kind of a row.
LP_DEVICE void listen(u32 thread, Scratch& s, u32 r, u32 kind, u32 tag) {
  RowState& row = s.rows[r];
  Said& said = s.said[r][kind == kDrawList ? kBest : kind == kTopList ? kRaw : kind];
  const u32 lane = lane_of(thread);
  if (kind == kDrawList) {
    const u32 limit = list_limit(row, kind);
    const List list = merge_lists(thread, s, r, kind, limit, tag);
    if (row.stage == kRank) {
      const u64 low = shuffle(list.low, limit - 1), high = shuffle(list.high, limit - 1),
                last = limit > 32 ? high : low;
      if (lane == 0) said.place = Place{value_of(last), token_of(last)};
    } else {
      const u32 token = draw_listed(row, list.low, list.high, lane);
      if (lane == 0) row.token = token;
    }
  } else if (kind == kTopList) {
    const List list = merge_lists(thread, s, r, kind, list_limit(row, kind), tag);
    if (lane < list.length) s.top[r][lane] = Place{value_of(list.low), token_of(list.low)};
    if (lane == 0) row.top_count = list.length;
  } else if (kind == kBefore || kind == kAll || (kind == kRaw && row.logprob_stage == kRawSum)) {
    const Amount sum = sum_of_all(thread, s, r, kind, tag);
    if (lane == 0) { said.sum = sum.weight; said.tokens = sum.tokens; }
  } else {
    const u32 k = kind == kRaw                             ? row.params->top_logprobs
                  : kind == kOther && row.stage != kSelect ? floor_rank(row)
                                                           : 0;
    const Winner best = best_of_all(thread, s, r, kind, tag, k);
    if (lane == 0) { said.place = best.place; said.floor = best.floor; }
  }
}

// ---- conclusions, by one thread, from what all blocks said
LP_DEVICE void drawn(RowState& row, u32 token) {
  row.token = token;
  row.stage = kDone;
}

// After the largest value: a list, the candidate itself, or a check of it.
LP_DEVICE void conclude_first(RowState& row, const Said* said) {
  const Place max = said[kOther].place, candidate = said[kBest].place;
  if (infinite(max.value)) return drawn(row, max.token);
  row.max = max.value;
  row.threshold = row.min_p > 0.0f ? add(max.value, ln_(row.min_p)) : -kInfinity;
  row.floor = said[kOther].floor;
  if (listed(row)) {
    row.stage = kList;
    return;
  }
  if (row.top_k == 0 && row.top_p >= 1.0f && candidate.value >= row.threshold) return drawn(row, candidate.token);
  row.pivot = candidate;
  row.high = Place{kInfinity, 0};
  row.low = Place{-kInfinity, kNone};
  row.flags |= kFirstCheck;
  row.stage = kCheck;
}

// The filters keep a beginning of the ranking. So if the candidate, the best of a beginning by value and noise, is not
// kept, the kept tokens rank before it, and the best of those is the next candidate.
LP_DEVICE void conclude_check(RowState& row, const Said* said) {
  const u32 top_k = row.top_k, flags = row.flags;
  const float top_p = row.top_p;
  row.flags = flags & ~(kFirstCheck | kBound);
  if (flags & kFirstCheck && top_p < 1.0f) {
    if (top_k > 0 && said[kAll].tokens > top_k) {
      row.stage = kSelect;
      if (row.floor > key_of(-kInfinity) && !infinite(value_of(row.floor)))
        row.pivot = Place{value_of(row.floor), kNone};
      return;
    }
    row.limit = mass_of(top_p, said[kAll].sum);
  }
  if (flags & kBound) row.limit = mass_of(top_p, said[kBefore].sum);
  bool kept = row.pivot.value >= row.threshold && !(flags & kBound);
  if (top_p < 1.0f) kept = kept && said[kBefore].sum < row.limit;
  else if (top_k > 0) kept = kept && said[kBefore].tokens < top_k;
  const Place next = said[kBest].place;
  if (kept) drawn(row, row.pivot.token);
  else if (top_p >= 1.0f && top_k == 0) drawn(row, next.token); // min_p alone, and it keeps all that was looked at
  else row.pivot = next;
}

// Which token is the first that top_k drops? Random pivots between those known to be kept and to be dropped, until a
// list can tell.
LP_DEVICE void conclude_select(RowState& row, const Said* said) {
  const u32 ahead = said[kBefore].tokens;
  if (ahead == row.top_k) { row.flags |= kBound; row.stage = kCheck; }
  else if (ahead > row.top_k) { row.low = row.pivot; row.pivot = said[kBest].place; }
  else {
    row.high = row.pivot;
    row.ahead_of_high = ahead;
    row.pivot = said[kOther].place;
    if (row.top_k - ahead < kMaxListed) row.stage = kNear;
  }
}

LP_DEVICE void conclude_logprobs(RowState& row, const Said* said) {
  if (row.logprob_stage == kRawMax) {
    row.raw_max = said[kRaw].place.value;
    row.top_floor = said[kRaw].floor;
    row.logprob_stage = kRawSum;
  } else if (row.logprob_stage == kRawSum) {
    row.log_sum = (float)ln_f64(mul(to_double(said[kRaw].sum), 1.0 / 1099511627776.0));
    row.logprob_stage = kLogprobsDone;
  }
}

// What the next exchange says of the row.
LP_DEVICE u32 next_kinds(const RowState& row) {
  u32 says = 0;
  switch (row.stage) {
    case kDraw: says = 1u << kBest; break;
    case kFirst: says = 1u << kOther | (listed(row) ? 0 : 1u << kBest); break;
    case kNear: says = 1u << kOther; break;
    case kCheck: says = 1u << kBest | 1u << kBefore | (row.flags & kFirstCheck ? 1u << kAll : 0); break;
    case kSelect: says = 1u << kBest | 1u << kOther | 1u << kBefore; break;
    case kRank:
    case kList: says = 1u << kDrawList; break;
    default: break;
  }
  if (row.logprob_stage == kRawMax) says |= 1u << kRaw;
  if (row.logprob_stage == kRawSum) says |= 1u << kRaw | (row.params->top_logprobs > 0 ? 1u << kTopList : 0);
  return says;
}

LP_DEVICE void conclude(RowState& row, const Said* said) {
  switch (row.stage) {
    case kDraw: drawn(row, said[kBest].place.token); break;
    case kFirst: conclude_first(row, said); break;
    case kCheck: conclude_check(row, said); break;
    case kSelect: conclude_select(row, said); break;
    case kNear: row.floor = said[kOther].floor; row.stage = kRank; break;
    case kRank: row.pivot = said[kBest].place; row.flags |= kBound; row.stage = kCheck; break;
    case kList: row.stage = kDone; break;
    default: break;
  }
  conclude_logprobs(row, said);
  row.says = next_kinds(row);
}

// Log-probability of a raw logit.
LP_DEVICE float logprob(const RowState& row, float value) {
  return sub(value == row.raw_max ? 0.0f : sub(value, row.raw_max), row.log_sum);
}

// The block that owns the token tells the host, counts it, and makes the row that of the next step. No block reads the
// row any more: every one has taken part in an exchange since it did. Of several rows of a sequence the host counts the
// tokens that hold, and no next step is made.
LP_DEVICE void deliver(u32 thread, const Scratch& s, u32 r) {
  const RowState& row = s.rows[r];
  const SamplerLaunch& launch = s.launch;
  const u32 lane = lane_of(thread), token = row.token;
  if (!owns(own_ids(s.block), token)) return;
  const u64 word = (u64)launch.tag << 32 | token;
  if (row.logprob_stage == kLogprobsDone) {
    RowLogprobs& to = launch.logprobs[r];
    if (lane < row.top_count) {
      to.top[lane].token = s.top[r][lane].token;
      to.top[lane].logprob = logprob(row, s.top[r][lane].value);
    }
    if (lane == 0) { to.logprob = logprob(row, scaled(raw_logits(s, r)[token], 1.0f)); to.count = row.top_count; }
    warp_sync();
    if (lane == 0) store_release_system_u64(launch.tokens + r, word);
  } else if (lane == 0) {
    store_system_u64(launch.tokens + r, word);
  }
  if (lane != 0 || row.flags & kSeveral) return;
  if (row.flags & kPenalised) launch.counts[(u64)row.slot * kPadded + token]++;
  Row& next = launch.rows[r];
  next.token = token;
  next.first_position = ++next.position;
}

}  // namespace sampling
