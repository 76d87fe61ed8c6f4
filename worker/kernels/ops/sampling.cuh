// The sampler: from the logits of one step to its tokens and the rows of the next, on all blocks of a launch of its
// own.
//
// Tokens are those of the CPU sampler (worker/src/sampling) for the same logits: bias, penalties, suppression and mask
// on the raw logits; temperature; min_p, top_k, top_p; the largest sum of value and Gumbel noise, ties to the lowest
// id. Log-probabilities are from raw logits: log of a sum of integer weights e^(x - max), multiples of 2^-40. So no
// result depends on the number of blocks or threads, on other rows or on timing: maxima and integer sums alone cross
// lanes, warps and blocks.
//
// Each row walks through stages; a stage is a pass of every block over the logits of its own tiles, then an exchange in
// which every block tells all what it found and all draw the same conclusion. All rows share each exchange.
//
//   exchanges          rows
//   1                  greedy, or temperature alone
//   2                  top_k up to 64, with any others: block maxima, which give the k best a floor, then lists of what
//                      reaches it
//   1 or 2, about      min_p, top_k over 64, or top_p: the unfiltered winner, then number and weight of the tokens that
//   ln(1 / share       rank before it; if the winner is not kept, all that is kept ranks before it, and the winner
//   kept) more         among those is next
//   5 more             top_k over 64 with top_p: the first token that top_k drops, found by a guessed pivot (random
//                      ones, if it is far off), then a list of what follows it
//   2, along with the  log-probabilities
//   others
//
// Exchange: orders what a block found (one warp a row) before every block's conclusion about that row (grid). 16-byte
// words, data and tag in one relaxed store, polled. Two buffers by the parity of the tag suffice: a block writes
// exchange e + 2 after it has read e + 1 of all, and a block publishes e + 1 after all its warps have read e (the
// barrier at the end of the loop). Tags go on from launch to launch. All blocks must run at one time.
#pragma once

namespace sampling {

// One thread a row: where it begins. `position` is that of the new token, i.e. the tokens before it.
LP_DEVICE void begin_row(RowState& row, const RowSampling& p, u32 position, u32 slot, const u32* mask) {
  const bool greedy = p.temperature < kMinTemperature;
  const bool penalised = p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
  const bool processed =
      penalised || mask || p.bias_count > 0 || (p.suppress_count > 0 && position < p.suppress_until);
  row.mask = mask;
  row.params = &p;
  row.scale = greedy ? 1.0f : div(1.0f, p.temperature);
  row.noise = Noise{p.seed_lo, p.seed_hi, position};
  row.slot = slot;
  row.top_k = !greedy && p.top_k < kVocab ? p.top_k : 0;
  row.top_p = !greedy && p.top_p < 1.0f ? p.top_p : 1.0f;
  row.min_p = !greedy && p.min_p > 0.0f ? p.min_p : 0.0f;
  row.stage = row.top_k == 0 && row.top_p == 1.0f && row.min_p == 0.0f ? kDraw : kFirst;
  row.flags = (greedy ? kGreedy : 0) | (processed ? kProcessed : 0) | (penalised ? kPenalised : 0);
  if (p.flags & kWantLogprobs) row.logprob_stage = kRawMax;
  row.says = next_kinds(row);
}

// The launch and its rows into the block's memory. The host hears of rows that do not sample at once.
LP_DEVICE void begin(const SamplerLaunch& launch, Scratch& s, u32 block, u32 thread) {
  for (u32 r = thread; r < launch.row_count; r += kThreads) {
    s.found[r] = Found{};
    RowState& row = s.rows[r];
    row.token = kNone;
    row.says = 0;
    row.stage = kIdle;
    row.logprob_stage = kNoLogprobs;
    row.flags = 0;
    row.top_count = 0;
    const Row of = launch.rows[r];
    if (of.flags & kRowSample && of.position <= of.last_position) {
      const u32 mask = launch.mask_of ? launch.mask_of[r] : 0;
      begin_row(row, launch.sampling[of.slot], of.position + 1, of.slot,
                mask ? launch.masks + (u64)(mask - 1) * kMaskWords : nullptr);
      row.drafts = 0;
      if (of.flags & kRowSeveral) {
        row.flags |= kSeveral;
        while (row.drafts < r + launch.rows_before && (launch.rows + r)[-1 - (int)row.drafts].slot == of.slot)
          row.drafts++;
      }
    } else if (block == 0) store_system_u64(launch.tokens + r, (u64)launch.tag << 32 | kNone);
  }
  if (thread == 0) {
    s.launch = launch;
    s.block = block;
    const u32 tag = *(const u32*)launch.words;
    s.tag = tag < 2 ? 2 : tag;
  }
  sync();
}

// The rows, a bit each, for which f holds. Whole warp; a lane looks at every 32nd row.
template <class F> LP_DEVICE u64 rows_where(u32 thread, const Scratch& s, F f) {
  u64 rows = 0;
  for (u32 first = 0; first < s.launch.row_count; first += 32) {
    const u32 r = first + lane_of(thread);
    rows |= (u64)ballot(r < s.launch.row_count && f(s.rows[r])) << first;
  }
  return rows;
}
LP_DEVICE u64 pending(u32 thread, const Scratch& s) {
  return rows_where(thread, s, [](const RowState& row) { return row.says != 0; });
}

// Writes the logits after bias, penalties, suppression and mask of the rows that have such.
LP_DEVICE void process(u32 thread, const Scratch& s) {
  const u64 rows = rows_where(thread, s,
                              [](const RowState& row) { return row.stage > kDone && row.flags & kProcessed; });
  if (rows == 0) return;
  const Ids own = own_ids(s.block);
#pragma unroll 1
  for (u32 step = 0; step < 4; step++) {
#pragma unroll 1
    for (u64 left = rows; left != 0; left &= left - 1) {
      const u32 r = lowest_bit(left);
      const RowState& row = s.rows[r];
      const RowSampling& p = *row.params;
      const float* raw = raw_logits(s, r);
      float* to = s.launch.processed + (u64)r * kPadded;
      const u32* counts = row.flags & kPenalised ? s.launch.counts + (u64)row.slot * kPadded : nullptr;
      const Row* of = s.launch.rows + r;
      auto penalised = [&](float logit, u32 id) {
        u32 count = counts ? counts[id] : 0;
        for (u32 back = 0; counts && back < row.drafts; back++) count += of[-(int)back].token == id;
        if (count == 0) return logit;
        logit = logit > 0.0f ? div(logit, p.repetition_penalty) : mul(logit, p.repetition_penalty);
        if (count & ~kSeen)
          logit = sub(sub(logit, mul(p.frequency_penalty, (float)(count & ~kSeen))), p.presence_penalty);
        return logit;
      };
      if (step == 0) {
        for (u32 id = own.first + thread; id < own.end; id += kThreads) to[id] = penalised(raw[id], id);
      } else if (step == 1) {
        const u32* bias = (const u32*)p.bias;
        for (u32 i = thread; i < p.bias_count; i += kThreads) {
          const u32 id = bias[2 * i];
          if (owns(own, id)) to[id] = penalised(add(raw[id], float_of(bias[2 * i + 1])), id);
        }
      } else if (step == 2 && row.noise.position < p.suppress_until) {
        const u32* suppress = (const u32*)p.suppress;
        for (u32 i = thread; i < p.suppress_count; i += kThreads)
          if (owns(own, suppress[i])) to[suppress[i]] = -kInfinity;
      } else if (step == 3 && row.mask) {
        for (u32 id = own.first + thread; id < own.end && id < kVocab; id += kThreads)
          if (!(row.mask[id / 32] >> id % 32 & 1)) to[id] = -kInfinity;
      }
    }
    sync();
  }
}

LP_DEVICE u32 nth_bit(u64 mask, u32 n) {
  for (; n > 0; n--) mask &= mask - 1;
  return lowest_bit(mask);
}
// Deals `rows` (a mask) to the team's warps: f(row, part, parts), as many parts of a row as there are warps for it.
template <class F> LP_DEVICE void deal(u32 thread, u64 rows, F f) {
  const u32 n = popc(rows);
  if (n == 0) return;
  const u32 parts = kWarps > n ? kWarps / n : 1;
#pragma unroll 1
  for (u32 task = warp_of(thread); task < n * parts; task += kWarps)
    f(nth_bit(rows, task / parts), task % parts, parts);
}

// Deals the kinds that the rows say to the team's warps, those of a row together with those of others: f(row, kind).
template <class F> LP_DEVICE void deal_kinds(u32 thread, const Scratch& s, u32 among, F f) {
  u32 task = 0;
#pragma unroll 1
  for (u64 rows = rows_where(thread, s, [&](const RowState& row) { return (row.says & among) != 0; }); rows != 0;
       rows &= rows - 1) {
    const u32 r = lowest_bit(rows);
#pragma unroll 1
    for (u32 says = s.rows[r].says & among; says != 0; says &= says - 1)
      if (task++ % kWarps == warp_of(thread)) f(r, lowest_bit(says));
  }
}
constexpr u32 kListKinds = 1u << kDrawList | 1u << kTopList;

// The passes and lists of one exchange.
LP_DEVICE void scan(u32 thread, Scratch& s, u32 tag) {
  const u64 raw = rows_where(thread, s, [](const RowState& row) { return (row.says & 1u << kRaw) != 0; });
  const u64 passes = rows_where(thread, s,
                                [](const RowState& row) { return (row.says & (1u << kBest | 1u << kOther)) != 0; });
  deal(thread, passes, [&](u32 r, u32 part, u32 parts) {
    if (s.rows[r].stage <= kNear) scan_all(thread, s, r, part, parts);
    else scan_pivot(thread, s, r, part, parts);
  });
  deal(thread, raw, [&](u32 r, u32 part, u32 parts) { scan_raw(thread, s, r, part, parts); });
  deal_kinds(thread, s, kListKinds, [&](u32 r, u32 list) { publish_list(thread, s, r, list, tag); });
}

// A warp tells all blocks what its block found for one row. Orders it before their conclusion (grid).
LP_DEVICE void publish(u32 thread, Scratch& s, u32 r, u32 tag) {
  const RowState& row = s.rows[r];
  const Found& found = s.found[r];
  const u32 kind = lane_of(thread);
  if (kind < kKinds && row.says >> kind & 1) {
    const bool select = row.stage == kSelect;
    Quad w{0, 0, tag, 0};
    if (kind <= kOther) {
      const u64 e = kind == kBest ? found.best : found.other;
      if (e) {
        w.x = (u32)(e >> 32);
        w.y = select ? (u32)e : token_of(e);
        if (row.stage != kDraw) w.w = bits(scaled(values(s, r)[w.y], row.scale));
      }
    } else if (kind == kRaw && row.logprob_stage == kRawMax) {
      w.x = (u32)(found.raw >> 32);
      w.y = token_of(found.raw);
      w.w = bits(value_of(found.raw));
    } else {
      const u64 sum = kind == kBefore ? found.weight : kind == kAll ? found.all_weight : found.raw;
      w.x = (u32)sum;
      w.y = (u32)(sum >> 32);
      w.w = kind == kBefore ? found.tokens : kind == kAll ? found.all_tokens : 0;
    }
    store_relaxed_16(s.launch.words + word_at(tag & 1, r, kind) + s.block * 16, w.x, w.y, w.z, w.w);
  }
  warp_sync();
  if (kind == 0) s.found[r] = Found{};
}

// Exchanges until every row has its token.
LP_DEVICE void draw(u32 thread, Scratch& s) {
  u32 tag = s.tag;
  u64 rows = pending(thread, s);
  if (rows != 0) process(thread, s);
  while (rows != 0) {
    scan(thread, s, tag);
    sync();
#pragma unroll 1
    for (u32 r = warp_of(thread); r < s.launch.row_count; r += kWarps) if (rows >> r & 1) publish(thread, s, r, tag);
    deal_kinds(thread, s, ~0u, [&](u32 r, u32 kind) { listen(thread, s, r, kind, tag); });
    sync();
#pragma unroll 1
    for (u32 r = warp_of(thread); r < s.launch.row_count; r += kWarps) {
      if (!(rows >> r & 1)) continue;
      if (lane_of(thread) == 0) conclude(s.rows[r], s.said[r]);
      warp_sync();
      if (s.rows[r].says == 0) deliver(thread, s, r);
    }
    tag = next_tag(tag);
    sync();
    rows = pending(thread, s);
  }
  // Every block has read the tag it began with before it took part in an exchange.
  if (s.block == 0 && thread == 0) *(u32*)s.launch.words = tag;
}

// The kernel; all threads of all blocks.
LP_DEVICE void sample(const SamplerLaunch& launch, Scratch& s, u32 block, u32 thread) {
  if (launch.step > 0 && *launch.stopped) return;
  // Asked for here, needed at the end: it comes from the host's memory.
  const bool asks = block == 0 && thread == 0;
  const u32 stop = asks ? load_system_u32(launch.stop) : 0;
  begin(launch, s, block, thread);
  draw(thread, s);
  // No block still has to look whether the chain goes on: all have taken part in an exchange, or nobody has a row.
  if (!asks) return;
  *launch.stopped = stop != 0;
  if (stop) store_system_u32(launch.control + 1, launch.step + 1);
}

// Counts the tokens of a sequence that enters a slot: `counts` [kPadded] of the slot, zeroed before; prompt first. Any
// threads of any kernel that ends before the next launch.
LP_DEVICE void count_token(u32* counts, u32 token, bool prompt) {
  if (token >= kVocab) return;
  if (prompt) atomic_or(counts + token, kSeen); else atomic_add(counts + token, 1);
}

}  // namespace sampling
