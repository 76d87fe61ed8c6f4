// Passes of a block over the logits of its own tiles: candidates, sums before a pivot, lists of the best.
#pragma once

namespace sampling {

LP_DEVICE const float* raw_logits(const Scratch& s, u32 r) { return s.launch.logits + (u64)r * kPadded; }
LP_DEVICE const float* values(const Scratch& s, u32 r) {
  return s.rows[r].flags & kProcessed ? s.launch.processed + (u64)r * kPadded : raw_logits(s, r);
}

// The best token so far by an upper bound of value and noise. The noise itself costs double-precision logarithms, so it
// is evaluated once, at the end; `next` says which tokens could not be told from the best without it.
struct Candidate { float bound, next, value; u32 token; };
LP_DEVICE Candidate no_candidate() { return Candidate{-kInfinity, -kInfinity, -kInfinity, kNone}; }

LP_DEVICE void consider(Candidate& c, float bound, float value, u32 token) {
  if (bound > c.bound || (bound == c.bound && token < c.token)) {
    c.next = c.bound;
    c.bound = bound; c.value = value; c.token = token;
  } else if (bound > c.next) {
    c.next = bound;
  }
}
// Its exact rank; 0 if there is none.
LP_DEVICE u64 evaluate(const Candidate& c, const Noise& noise, bool greedy) {
  if (c.token == kNone) return 0;
  return entry(greedy ? c.value : add(c.value, gumbel(noise_bits_of(noise, c.token))), c.token);
}
// Some token of this lane that is not its candidate could rank before `best`.
LP_DEVICE bool unclear(const Candidate& c, u64 best, bool greedy) {
  const float value = value_of(best);
  return !greedy && best != 0 && !infinite(value) && c.next >= value;
}

// Calls f(first, block) for the lane's share of the groups of four ids (first, + 16, + 32, + 48) that `own` has a part
// in; `block` is the counter of their noise.
template <class F> LP_DEVICE void for_each_four(const Ids& own, u32 part, u32 parts, u32 lane, F f) {
  const u32 units = own.end > own.first ? ((own.end + 63) / 64 - own.first / 64) * 16 : 0;
  for (u32 i = part * 32 + lane; i < units; i += parts * 32)
    f((own.first / 64 + i / 16) * 64 + i % 16, own.first / 64 * 16 + i);
}

// A random number of a token, another one for every pivot.
LP_DEVICE u32 shuffled(u32 token, u32 pivot) {
  u32 h = token * 0x9e3779b1u ^ pivot * 0x85ebca77u;
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15) * 0x846ca68bu;
  return (h ^ h >> 16) | 1;
}

// The warp's best token, exactly, from its lanes' candidates; `again` is called if too many are too close to call, with
// the value to reach, and returns this lane's best of all its tokens whose noise could reach it.
template <class F> LP_DEVICE u64 settle(const Candidate& c, const Noise& noise, bool greedy, F again) {
  u64 best = warp_max64(evaluate(c, noise, greedy));
  if (ballot(unclear(c, best, greedy))) {
    const u64 mine = again(value_of(best));
    warp_sync();
    best = warp_max64(larger(mine, best));
  }
  return best;
}
// All tokens of a lane's share whose noise could reach `need`, evaluated.
LP_DEVICE u64 draw_again(const float* logits, const RowState& row, const Ids& own, const Place& pivot, float threshold,
                         u32 part, u32 parts, u32 lane, float need) {
  const float scale = row.scale;
  const Noise noise = row.noise;
  u64 best = 0;
  for_each_four(own, part, parts, lane, [&](u32 first, u32 block) {
    const Bits4 random = noise_bits(noise, block);
#pragma unroll 1
    for (u32 j = 0; j < 4; j++) {
      const u32 id = first + 16 * j, bits = j == 0 ? random.x : j == 1 ? random.y : j == 2 ? random.z : random.w;
      if (!owns(own, id)) continue;
      const float value = scaled(logits[id], scale);
      if (value >= threshold && before(Place{value, id}, pivot) && add(value, gumbel_bound(bits)) >= need)
        best = larger(best, entry(add(value, gumbel(bits)), id));
    }
  });
  return best;
}

// Entries from `high` on are below this.
LP_DEVICE u64 after_high(const RowState& row) { return entry(row.high.value, row.high.token) + 1; }

// A warp's part of the pass of kDraw, kFirst and kNear: the best by value and noise, and the largest value. Adds them
// to what is found.
LP_DEVICE void scan_all(u32 thread, Scratch& s, u32 r, u32 part, u32 parts) {
  const RowState& row = s.rows[r];
  const float* logits = values(s, r);
  const Ids own = own_ids(s.block);
  const u32 lane = lane_of(thread);
  const bool greedy = row.flags & kGreedy, near = row.stage == kNear, first_pass = row.stage == kFirst || near;
  const bool draw = !first_pass || (!near && (row.top_k == 0 || row.top_k > kMaxListed));
  const u64 from = near ? after_high(row) : ~0ull;
  const float scale = row.scale;
  const Noise noise = row.noise;
  Candidate best = no_candidate();
  u64 largest = 0;
  for_each_four(own, part, parts, lane, [&](u32 first, u32 block) {
    float v[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) v[j] = owns(own, first + 16 * j) ? scaled(logits[first + 16 * j], scale) : -kInfinity;
    Bits4 random{0, 0, 0, 0};
    if (draw && !greedy) random = noise_bits(noise, block);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      const u32 id = first + 16 * j, bits = j == 0 ? random.x : j == 1 ? random.y : j == 2 ? random.z : random.w;
      if (!owns(own, id)) continue;
      if (first_pass && entry(v[j], id) < from) largest = larger(largest, entry(v[j], id));
      if (draw) consider(best, greedy ? v[j] : add(v[j], gumbel_bound(bits)), v[j], id);
    }
  });
  warp_sync();
  u64 exact = 0;
  if (draw)
    exact = settle(best, noise, greedy, [&](float need) {
      return draw_again(logits, row, own, Place{-kInfinity, kNone}, -kInfinity, part, parts, lane, need);
    });
  if (first_pass) largest = warp_max64(largest);
  if (lane != 0) return;
  if (exact) atomic_max(&s.found[r].best, exact);
  if (largest) atomic_max(&s.found[r].other, largest);
}

// A warp's part of the passes that look at a pivot. kCheck: number and weight of the tokens that rank before it (and of
// all), the best of those by value and noise. kSelect: their number, and a random token on either side of the pivot.
LP_DEVICE void scan_pivot(u32 thread, Scratch& s, u32 r, u32 part, u32 parts) {
  const RowState& row = s.rows[r];
  Found& found = s.found[r];
  const float* logits = values(s, r);
  const Ids own = own_ids(s.block);
  const u32 lane = lane_of(thread);
  const bool select = row.stage == kSelect, all = row.flags & kFirstCheck, weigh = !select && row.top_p < 1.0f;
  const float scale = row.scale, threshold = row.threshold, max = row.max;
  const Place pivot = row.pivot, high = row.high, low = row.low;
  const Noise noise = row.noise;
  Candidate best = no_candidate();
  u64 weight = 0, all_weight = 0, higher = 0, lower = 0;
  u32 tokens = 0, all_tokens = 0;
  for_each_four(own, part, parts, lane, [&](u32 first, u32 block) {
    Bits4 random{0, 0, 0, 0};
    if (!select) random = noise_bits(noise, block);
#pragma unroll 1
    for (u32 j = 0; j < 4; j++) {
      const u32 id = first + 16 * j, bits = j == 0 ? random.x : j == 1 ? random.y : j == 2 ? random.z : random.w;
      if (!owns(own, id)) continue;
      const Place place{scaled(logits[id], scale), id};
      if (place.value < threshold) continue;
      const bool ahead = before(place, pivot);
      const u64 w = weigh && (ahead || all) ? weight_of(place.value, max) : 0;
      all_tokens++;
      all_weight += w;
      if (ahead) { tokens++; weight += w; }
      if (!select) {
        if (ahead) consider(best, add(place.value, gumbel_bound(bits)), place.value, id);
        continue;
      }
      const u64 key = (u64)shuffled(id, pivot.token) << 32 | id;
      if (ahead && before(high, place)) higher = larger(higher, key);
      if (before(pivot, place) && before(place, low)) lower = larger(lower, key);
    }
  });
  warp_sync();
  if (!select)
    higher = settle(best, noise, false, [&](float need) {
      return draw_again(logits, row, own, pivot, threshold, part, parts, lane, need);
    });
  else { higher = warp_max64(higher); lower = warp_max64(lower); }
  tokens = warp_add(tokens);
  if (all) all_tokens = warp_add(all_tokens);
  if (weigh) { weight = warp_add64(weight); if (all) all_weight = warp_add64(all_weight); }
  if (lane != 0) return;
  if (higher) atomic_max(&found.best, higher);
  if (lower) atomic_max(&found.other, lower);
  if (tokens) atomic_add(&found.tokens, tokens);
  if (weight) atomic_add(&found.weight, weight);
  if (all && all_tokens) atomic_add(&found.all_tokens, all_tokens);
  if (all && all_weight) atomic_add(&found.all_weight, all_weight);
}

// The same for log-probabilities: the largest raw logit, then the sum of the weights.
LP_DEVICE void scan_raw(u32 thread, Scratch& s, u32 r, u32 part, u32 parts) {
  const RowState& row = s.rows[r];
  Found& found = s.found[r];
  const float* logits = raw_logits(s, r);
  const Ids own = own_ids(s.block);
  const bool sum = row.logprob_stage == kRawSum;
  const float max = row.raw_max;
  u64 result = 0;
  for (u32 id = own.first + part * 32 + lane_of(thread); id < own.end; id += parts * 32) {
    const float value = scaled(logits[id], 1.0f);
    result = sum ? result + weight_of(value, max) : larger(result, entry(value, id));
  }
  warp_sync();
  result = sum ? warp_add64(result) : warp_max64(result);
  if (lane_of(thread) != 0 || result == 0) return;
  if (sum) atomic_add(&found.raw, result); else atomic_max(&found.raw, result);
}

// The two best of this lane's tokens that rank after `last` and not below `floor`.
struct Two { u64 first, second; };
LP_DEVICE Two best_after(const float* logits, float scale, const Ids& own, u32 lane, u64 last, u32 floor) {
  Two best{0, 0};
#pragma unroll 8
  for (u32 id = own.first + lane; id < own.end; id += 32) {
    const float value = scaled(logits[id], scale);
    if (key_of(value) < floor) continue;
    const u64 e = entry(value, id);
    if (e >= last) continue;
    if (e > best.first) { best.second = best.first; best.first = e; }
    else if (e > best.second) best.second = e;
  }
  return best;
}

// Entries that a list may have.
LP_DEVICE u32 list_limit(const RowState& row, u32 list) {
  return list == kTopList                           ? row.params->top_logprobs
         : row.stage == kRank || row.stage == kNear ? row.top_k - row.ahead_of_high + 1
                                                    : row.top_k;
}

// A warp publishes the block's best tokens that the floor leaves, best first. Orders them before merge_lists of every
// block (grid).
LP_DEVICE void publish_list(u32 thread, const Scratch& s, u32 r, u32 list, u32 tag) {
  const RowState& row = s.rows[r];
  const bool top = list == kTopList;
  const float* logits = top ? raw_logits(s, r) : values(s, r);
  const float scale = top ? 1.0f : row.scale;
  const bool rank = !top && row.stage == kRank;
  const u32 limit = list_limit(row, list), floor = top ? row.top_floor : row.floor, lane = lane_of(thread);
  const u64 from = rank ? after_high(row) : ~0ull;
  const Ids own = own_ids(s.block);
  Two mine = best_after(logits, scale, own, lane, from, floor);
  bool more = mine.second != 0; // this lane may have others than these two
  u64 low = 0, high = 0;
  u32 n = 0;
  for (; n < limit; n++) {
    const u64 best = warp_max64(mine.first);
    if (best == 0) break;
    if (lane == n % 32) { if (n < 32) low = best; else high = best; }
    if (mine.first == best) {
      if (mine.second == 0 && more) {
        mine = best_after(logits, scale, own, lane, best, floor);
        more = mine.second != 0;
      } else {
        mine = Two{mine.second, 0};
      }
    }
    warp_sync();
  }
  u8* to = s.launch.words + list_at(tag & 1, r, list, s.block) + lane * 16;
  if (lane < n || lane == 0) store_relaxed_16(to, (u32)(low >> 32), token_of(low), tag, n);
  if (lane + 32 < n) store_relaxed_16(to + 32 * 16, (u32)(high >> 32), token_of(high), tag, n);
}

}  // namespace sampling
