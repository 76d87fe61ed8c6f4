// Sampling inside the looped decoder: from the logits of one step to its tokens, on all blocks of a cooperative launch.
//
// Tokens are those of the CPU sampler (worker/src/sampling) for the same logits: bias, penalties and suppression on the raw
// logits; temperature; min_p, top_k, top_p; the largest sum of value and Gumbel noise, ties to the lowest id. Log-probabilities
// are from raw logits: log of a sum of integer weights e^(x - max), multiples of 2^-40. So no result depends on the number of
// blocks or threads, on other rows or on timing: maxima and integer sums alone cross lanes, warps and blocks.
//
// Each row walks through stages; a stage is a pass of every block over the logits of its own tiles, then an exchange in which
// every block tells all what it found and all draw the same conclusion. All rows share each exchange.
//
//   exchanges                           rows
//   1                                   greedy, or temperature alone; candidates come from the LM head (offer, deposit) or a pass
//   2                                   top_k up to 64, with any others: block maxima, which give the k best a floor, then lists
//                                       of what reaches it
//   1 or 2, about ln(1 / share kept)    min_p, top_k over 64, or top_p: the unfiltered winner, then number and weight of the tokens
//   more                                that rank before it; if it is not kept, all that is kept ranks before it, and the winner among
//                                       that is next
//   5 more                              top_k over 64 with top_p: what top_k drops first is found by a guessed pivot (random ones, if it
//                                       is far off), then a list of what follows it
//   2, along with the others            log-probabilities
//
// Exchange: orders what a block found (one warp a row) before every block's conclusion about that row (grid). 16-byte words,
// data and tag in one relaxed store, polled. Two buffers by the parity of the tag suffice: a block writes exchange e + 2 after it has
// read e + 1 of all, and a block publishes e + 1 after all its warps have read e (the barrier at the end of the loop).
//
// Use, per launch: start; per step: begin_row for every row, then a barrier; the LM head, with offer and deposit; sample. Tokens stand in
// Scratch::rows[r].token until the next begin_row. At the end of the launch: stop. The caller sees to it that the block's logits and
// deposits are visible to the team when it calls sample, and the rows to those who offer. Any number of whole warps may be the team.
//
// Memory: Scratch, in shared memory (3.7 KiB for 8 rows); kWordsBytes (4.5 MB for 8 rows and 132 blocks, mostly lists).
#pragma once
#include "sampling_conclude.cuh"

namespace sampling {

// Once a launch, by the whole team of every block.
LP_DEVICE void start(u32 block, u32 thread, Scratch& s, const Memory& memory) {
  for (u32 r = thread; r < kRows; r += kThreads) {
    s.found[r] = Found{};
    s.rows[r].says = 0;
  }
  if (thread == 0) {
    s.memory = memory;
    s.block = block;
    const u32 tag = *(const u32*)memory.words;
    s.tag = tag < 2 ? 2 : tag;
  }
  sync();
}

// At its end: the next launch goes on counting tags here. Every block has read the old one before it took part in an exchange.
LP_DEVICE void stop(u32 thread, const Scratch& s) {
  sync();
  if (s.block == 0 && thread == 0) *(u32*)s.memory.words = s.tag;
}

// Which candidates the LM head deposits. Noise of a single token costs four times what it costs in a pass over neighbours.
enum Offers : u32 { kOfferNone, kOfferGreedy, kOfferAll };

// One thread, for each row of a step; no row: null. Then a barrier. `position` is that of the new token, i.e. the tokens before it.
LP_CALL void begin_row(Scratch& s, u32 r, const RowSampling* params, u32 position, u32 slot, Offers offers) {
  RowState& row = s.rows[r];
  row.token = kNone;
  row.says = 0;
  row.stage = kIdle;
  row.logprob_stage = kNoLogprobs;
  row.flags = 0;
  row.top_count = 0;
  if (params == nullptr || params->flags & kLogitsOnly) return;
  const RowSampling& p = *params;
  const bool greedy = p.temperature < kMinTemperature;
  const bool penalised = p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
  const bool processed = penalised || p.bias_count > 0 || (p.suppress_count > 0 && position < p.suppress_until);
  row.params = params;
  row.scale = greedy ? 1.0f : div(1.0f, p.temperature);
  row.noise = Noise{p.seed_lo, p.seed_hi, position};
  row.slot = slot;
  row.top_k = !greedy && p.top_k < kVocab ? p.top_k : 0;
  row.top_p = !greedy && p.top_p < 1.0f ? p.top_p : 1.0f;
  row.min_p = !greedy && p.min_p > 0.0f ? p.min_p : 0.0f;
  row.stage = row.top_k == 0 && row.top_p == 1.0f && row.min_p == 0.0f ? kDraw : kFirst;
  row.flags = (greedy ? kGreedy : 0) | (processed ? kProcessed : 0) | (penalised ? kPenalised : 0) | (processed || offers == kOfferNone || (offers == kOfferGreedy && !greedy) ? kScan : 0);
  if (p.flags & kWantLogprobs) row.logprob_stage = kRawMax;
  row.says = next_kinds(row);
}

// How to rank the logits of a row that are offered.
struct Ranking { Noise noise; float scale; bool greedy, wanted; };
// `wanted`: if not, offer and deposit of this row may be left out.
LP_DEVICE Ranking ranking_of(const RowState& row) { return Ranking{row.noise, row.scale, (row.flags & kGreedy) != 0, row.stage == kDraw && !(row.flags & kScan)}; }
// Shows a lane's candidate one more logit. Ids past the vocabulary are ignored.
LP_DEVICE void offer(Candidate& c, const Ranking& ranking, float logit, u32 id) {
  if (!ranking.wanted || id >= kVocab) return;
  const float value = scaled(logit, ranking.scale);
  if (ranking.greedy) return consider(c, value, value, id);
  // A token whose largest noise could not change the candidate costs no random bits.
  if (add(value, kMaxGumbel + 0.01f) < c.next) return;
  consider(c, add(value, gumbel_bound(noise_bits_of(ranking.noise, id))), value, id);
}
// A whole warp gives up its lanes' candidates of one row, once a step.
LP_DEVICE void deposit(Scratch& s, u32 r, const Ranking& ranking, const Candidate& c, u32 lane) {
  if (!ranking.wanted) return;
  const u64 best = warp_max64(evaluate(c, ranking.noise, ranking.greedy));
  const bool scan = ballot(unclear(c, best, ranking.greedy)) != 0;
  if (lane != 0) return;
  if (best) atomic_max(&s.found[r].best, best);
  if (scan) atomic_or(&s.rows[r].flags, kScan);
}

// The rows, a bit each, for which f holds. Whole warp; lane r looks at row r.
template <class F> LP_DEVICE u32 rows_where(u32 thread, const Scratch& s, F f) { return ballot(lane_of(thread) < kRows && f(s.rows[lane_of(thread) < kRows ? lane_of(thread) : 0])); }
LP_DEVICE u32 pending(u32 thread, const Scratch& s) { return rows_where(thread, s, [](const RowState& row) { return row.says != 0; }); }

// Writes the logits after bias, penalties and suppression of the rows that have such.
LP_CALL void process(u32 thread, const Scratch& s) {
  const u32 rows = rows_where(thread, s, [](const RowState& row) { return row.stage > kDone && row.flags & kProcessed; });
  if (rows == 0) return;
  const Ids own = own_ids(s.block);
#pragma unroll 1
  for (u32 step = 0; step < 3; step++) {
#pragma unroll 1
    for (u32 left = rows; left != 0; left &= left - 1) {
      const u32 r = lowest_bit(left);
      const RowState& row = s.rows[r];
      const RowSampling& p = *row.params;
      const float* raw = raw_logits(s, r);
      float* to = s.memory.processed + (u64)r * kPadded;
      const u32* counts = row.flags & kPenalised ? s.memory.counts + (u64)row.slot * kPadded : nullptr;
      auto penalised = [&](float logit, u32 id) {
        const u32 count = counts ? counts[id] : 0;
        if (count == 0) return logit;
        logit = logit > 0.0f ? div(logit, p.repetition_penalty) : mul(logit, p.repetition_penalty);
        if (count & ~kSeen) logit = sub(sub(logit, mul(p.frequency_penalty, (float)(count & ~kSeen))), p.presence_penalty);
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
      } else if (row.noise.position < p.suppress_until) {
        const u32* suppress = (const u32*)p.suppress;
        for (u32 i = thread; i < p.suppress_count; i += kThreads) if (owns(own, suppress[i])) to[suppress[i]] = -kInfinity;
      }
    }
    sync();
  }
}

LP_DEVICE u32 nth_bit(u32 mask, u32 n) {
  for (; n > 0; n--) mask &= mask - 1;
  return lowest_bit(mask);
}
// Deals `rows` (a mask) to the team's warps: f(row, part, parts), as many parts of a row as there are warps for it.
template <class F> LP_DEVICE void deal(u32 thread, u32 rows, F f) {
  const u32 n = popc(rows);
  if (n == 0) return;
  const u32 parts = kWarps > n ? kWarps / n : 1;
#pragma unroll 1
  for (u32 task = warp_of(thread); task < n * parts; task += kWarps) f(nth_bit(rows, task / parts), task % parts, parts);
}

// Deals the kinds that the rows say to the team's warps, those of a row together with those of others: f(row, kind).
template <class F> LP_DEVICE void deal_kinds(u32 thread, const Scratch& s, u32 among, F f) {
  u32 task = 0;
#pragma unroll 1
  for (u32 rows = rows_where(thread, s, [&](const RowState& row) { return (row.says & among) != 0; }); rows != 0; rows &= rows - 1) {
    const u32 r = lowest_bit(rows);
#pragma unroll 1
    for (u32 says = s.rows[r].says & among; says != 0; says &= says - 1)
      if (task++ % kWarps == warp_of(thread)) f(r, lowest_bit(says));
  }
}
constexpr u32 kListKinds = 1u << kDrawList | 1u << kTopList;

// The passes and lists of one exchange.
LP_CALL void scan(u32 thread, Scratch& s, u32 tag) {
  const u32 raw = rows_where(thread, s, [](const RowState& row) { return (row.says & 1u << kRaw) != 0; });
  const u32 passes = rows_where(thread, s, [](const RowState& row) { return (row.says & (1u << kBest | 1u << kOther)) != 0 && (row.stage != kDraw || row.flags & kScan); });
  deal(thread, passes, [&](u32 r, u32 part, u32 parts) { if (s.rows[r].stage <= kNear) scan_all(thread, s, r, part, parts); else scan_pivot(thread, s, r, part, parts); });
  deal(thread, raw, [&](u32 r, u32 part, u32 parts) { scan_raw(thread, s, r, part, parts); });
  deal_kinds(thread, s, kListKinds, [&](u32 r, u32 list) { publish_list(thread, s, r, list, tag); });
}
static_assert(kRows <= 32, "rows as bits");

// A warp tells all blocks what its block found for one row. Orders it before their conclusion (grid).
LP_CALL void publish(u32 thread, Scratch& s, u32 r, u32 tag) {
  const RowState& row = s.rows[r];
  const Found& found = s.found[r];
  const u32 kind = lane_of(thread);
  if (kind < kKinds && row.says >> kind & 1) {
    const bool select = row.stage == kSelect;
    Word w{0, 0, tag, 0};
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
    st_relaxed(s.memory.words + word_at(tag & 1, r, kind) + s.block * 16, w);
  }
  warp_sync();
  if (kind == 0) s.found[r] = Found{};
}

// Candidates are all that is left to compare: one warp a row says, hears and concludes. The same words as in the longer way, which
// other blocks may take.
LP_DEVICE void compare_candidates(u32 thread, Scratch& s, u32 rows, u32 tag) {
#pragma unroll 1
  for (u32 r = warp_of(thread); r < kRows; r += kWarps) {
    if (!(rows >> r & 1) || lane_of(thread) != 0) continue;
    const u64 best = s.found[r].best;
    st_relaxed(s.memory.words + word_at(tag & 1, r, kBest) + s.block * 16, Word{(u32)(best >> 32), token_of(best), tag, 0});
    s.found[r].best = 0;
  }
  warp_sync();
#pragma unroll 1
  for (u32 r = warp_of(thread); r < kRows; r += kWarps) {
    if (!(rows >> r & 1)) continue;
    const Winner best = best_of_all(thread, s, r, kBest, tag, 0);
    if (lane_of(thread) == 0) {
      drawn(s.rows[r], best.place.token);
      s.rows[r].says = 0;
    }
    warp_sync();
    deliver(thread, s, r);
  }
}

// Samples the rows of a step; all threads of the team, on all blocks, with the same rows.
LP_CALL void sample(u32 thread, Scratch& s, Output out) {
  if (thread == 0) s.output = out;
  sync();
  u32 tag = s.tag, rows = pending(thread, s);
  const u32 candidates = rows_where(thread, s, [](const RowState& row) { return row.says == 1u << kBest && row.stage == kDraw && !(row.flags & kScan); });
  if (rows != 0 && rows == candidates) {
    sync(); // every warp has decided before the first concludes
    compare_candidates(thread, s, rows, tag);
    tag = next_tag(tag);
    rows = 0;
    sync();
  }
  if (rows != 0) process(thread, s);
  while (rows != 0) {
    scan(thread, s, tag);
    sync();
#pragma unroll 1
    for (u32 r = warp_of(thread); r < kRows; r += kWarps) if (rows >> r & 1) publish(thread, s, r, tag);
    deal_kinds(thread, s, ~0u, [&](u32 r, u32 kind) { listen(thread, s, r, kind, tag); });
    sync();
#pragma unroll 1
    for (u32 r = warp_of(thread); r < kRows; r += kWarps) {
      if (!(rows >> r & 1)) continue;
      if (lane_of(thread) == 0) conclude(s.rows[r], s.said[r]);
      warp_sync();
      if (s.rows[r].says == 0) deliver(thread, s, r);
    }
    tag = next_tag(tag);
    sync();
    rows = pending(thread, s);
  }
  if (thread == 0) s.tag = tag;
}

// Counts the tokens of a sequence that enters a slot: `counts` [kPadded] of the slot, zeroed before; prompt first. Any threads of
// any kernel that ends before the next launch.
LP_DEVICE void count_token(u32* counts, u32 token, bool prompt) {
  if (token >= kVocab) return;
  if (prompt) atomic_or(counts + token, kSeen); else atomic_add(counts + token, 1);
}

}  // namespace sampling
