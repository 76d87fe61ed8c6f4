// What the roles of a block do in each phase of a step: the loop walks these, and so do the single launches of
// unlooped_decoder.cu.
#pragma once

namespace narrow {

extern __shared__ __align__(1024) u8 shared_memory[];

/// Barriers of a launch; one thread calls it before the block's first barrier.
LP_DEVICE void begin_block(u32 shared) {
  for (u32 i = 0; i < kRings * Shared::slots; i++) {
    mbarrier_init(shared + Shared::full + 16 * i, 1);
    mbarrier_init(shared + Shared::full + 16 * i + 8, 1);
    mbarrier_init(shared + Shared::empty + 8 * i, 1);
  }
  for (int i = 0; i < 2; i++) {
    mbarrier_init(shared + Shared::partials_full + 8 * i, kWarps);
    mbarrier_init(shared + Shared::partials_empty + 8 * i, kEpilogueWarps);
  }
}
LP_DEVICE CountedRows rows_of(const Launch& launch, u32 step) {
  const Rows rows{reinterpret_cast<const Row*>(shared_memory + Shared::rows), launch.row_count, step};
  return CountedRows{rows, shared_address(shared_memory) + Shared::counts + step % 2 * kCountsBytes};
}
LP_DEVICE bool is_fed(const Launch& launch) { return kFed && launch.fed != nullptr; }
LP_DEVICE bool samples(const Launch& launch) {
  if (is_fed(launch)) return true;  // whichever rows it has by now
  for (u32 r = 0; r < launch.row_count; r++)
    if (rows_of(launch, 0).rows[r].flags & kRowSample) return true;
  return false;
}
LP_DEVICE u32 tag_of(const Launch& launch, u32 step) { return launch.epoch + step * (kLayers + 1); }

/// Where a step is: rows as they are in it, the layer (kLayers: LM head), tag of the layer's exchanges, columns that
/// compute, the layer's vectors.
struct Place {
  CountedRows rows;
  u32 layer, tag, active, vectors;
};

/// A warp holds a leaf of a norm's input in registers for all tiles of a product, if there are registers for it (hidden
/// sizes up to 8192, where there are 16 leaves). With 96 a thread longer ones spilled 1.6 to 5.6 KB, and a row of 405B
/// took longer than 32 in a wide pass.
constexpr bool kHoldsHidden = kHiddenSteps <= 32;
constexpr int kHeldSteps = kHoldsHidden ? kHiddenSteps : 1;

/// A consumer warp: its leaf of every product, its leaves of attention.
struct ConsumerPhases {
  const Launch& launch;
  u32 shared, warp;
  Consumer consumer;
  Partials partials;

  LP_DEVICE ConsumerPhases(const Launch& launch, u32 shared, u32 warp)
      : launch(launch), shared(shared), warp(warp), consumer(launch, shared, warp), partials(launch, shared) {}

  LP_DEVICE void at(const Place& place, u32 stage) const { reached(launch, place.rows.step, warp, place.layer, stage); }
  /// A product of a norm's input, of which this warp has a leaf, whose sum of squares is for the epilogue. `stage` is
  /// reached once the input is there.
  template <class P> LP_DEVICE void multiply_normed(const Place& place, u32 vector, int squares, u32 site, u32 stage) {
    if (!Epilogue::sets<P>()) return;
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
    const u32 leaf = place.vectors + vector + warp * HiddenVector::leaf_bytes;
    u32 b[kHeldSteps][2];
    if (warp < kHiddenLeaves) {
      const float sum = get_fragments<kHiddenSteps, true, kHoldsHidden>(launch, launch.words + leaf, place.tag,
                                                                        place.active, b, site);
      if (t == 0 && g < kColumns)
        store_shared_f32(shared + Shared::squares + ((squares * kMaxLeaves + warp) * kColumns + g) * 4, sum);
    }
    at(place, stage);
    if constexpr (kHoldsHidden) multiply<P>(consumer, partials, b);
    else multiply_fetching<P, kPartSteps>(consumer, partials, leaf, place.tag, place.active, site, [] {});
  }
  LP_DEVICE void query_key_value(const Place& place) {
    at(place, 0);
    multiply_normed<Qkv>(place, Vectors::attention_x, 0, kSiteAttentionX, 1);
  }
  LP_DEVICE void attend_pages(const Place& place) {
    at(place, 2);
    attend(launch, consumer, shared, place.rows, place.layer, place.tag);
  }
  LP_DEVICE void merge(const Place& place) {
    at(place, 3);
    u8* out = launch.words + place.vectors + Vectors::attention_out;
    // Of one row with many pages twice as many warps merge half a k block each, and fetch two spans at once.
    if (kColumns == 1 && place.rows.pages(0) > kSpanPages) merge_pages<4>(launch, place.rows, warp, place.tag, out);
    else merge_pages<8>(launch, place.rows, warp, place.tag, out);
  }
  LP_DEVICE void attention_out(const Place& place) {
    at(place, 4);
    if (!Epilogue::sets<O>()) return;
    const u32 leaf = place.vectors + Vectors::attention_out + O::leaf(warp) * AttentionVector::leaf_bytes;
    if constexpr (O::leaf_steps <= kPartSteps) {
      u32 b[O::leaf_steps][2];
      if (warp < O::workers)
        get_fragments<O::leaf_steps>(launch, launch.words + leaf, place.tag, place.active, b, kSiteAttentionOut);
      at(place, 5);
      multiply<O>(consumer, partials, b);
    } else {
      // In parts of a chunk: longer ones are spilled.
      constexpr int PART = is_grouped(O::format) ? kPartSteps : chunk_steps<O>(1);
      multiply_fetching<O, PART>(consumer, partials, leaf, place.tag, place.active, kSiteAttentionOut,
                                 [&] { at(place, 5); });
    }
  }
  LP_DEVICE void gate_up(const Place& place) {
    at(place, 6);
    multiply_normed<GateUp>(place, Vectors::mlp_x, 1, kSiteMlpX, 7);
  }
  LP_DEVICE void down(const Place& place) {
    at(place, 8);
    const u32 leaf = place.vectors + Vectors::activation + Down::leaf(warp) * ActivationVector::leaf_bytes;
    multiply_fetching<Down, kPartSteps>(consumer, partials, leaf, place.tag, place.active, kSiteActivation,
                                        [&] { at(place, 9); });
    at(place, 10);
  }
  LP_DEVICE void head(const Place& place) {
    at(place, 0);
    multiply_normed<Head>(place, Vectors::attention_x, 0, kSiteHeadX, 1);
    at(place, 2);
  }
};

/// LM head: logits, and unless the sampler draws, the best token of this block's rows for every column, to all blocks;
/// with it whether the host wants the launch to end.
LP_DEVICE void offer_tokens(const Launch& launch, Epilogue& epilogue, u32 step) {
  const int lane = lane_index(), first = Head::first_tile(rank_block()), sets = Epilogue::sets<Head>();
  u32 stop = 0;
  if (rank_block() == 0 && epilogue.warp == 0) stop = load_system_u32(launch.control);
  Best best[kEpilogueColumns];
  for (int s = 0; s < sets; s++) {
    epilogue.take<Head>(s == 0 ? 0 : -1);
    const int row = (first + 2 * s) * 16 + lane, id = own_rank(launch) * (kHeadTiles * 16) + row;
    const bool on = id < kVocab && first + 2 * s + Epilogue::half() < Head::first_tile(rank_block() + 1);
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) {
      const float logit = epilogue.y[c] * epilogue.inverse[c];
      if (on) best[c].offer(logit, id);
      if (on && launch.flags & kLaunchLogits) put_logit(launch, epilogue.column(c), id, logit);
    }
  }
  if (kRanks == 1 && launch.flags & kLaunchUndrawn) return;
  __syncwarp();
  fence_tokens(launch);  // K and V of this step of all lanes, and logits, before lane 0's token words
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++) {
    best[c].over_lanes();
    if (lane == 0)
      store_relaxed_16(launch.words + token_words(step, epilogue.column(c)) + rank_block() * 16,
                       __float_as_uint(best[c].value), best[c].id, tag_of(launch, step), stop);
  }
}

/// Sends the best token of this rank's shard to all ranks, from one of BLOCKS blocks, and whether its host wants the
/// launch to end.
template <u32 BLOCKS> LP_DEVICE void tell_token(const Launch& launch, u32 step, int column, const Best& best, u32 tag,
                                                bool stop) {
  const u32 lane = lane_index();
  if (rank_block() != column % BLOCKS) return;
  // Orders the logits of all blocks, whose words this warp has read, before its own words.
  if (launch.flags & kLaunchLogits) fence_tokens(launch);
  if (lane < kRanks)
    store_system_16(launch.inbox[lane] + Inbox::token(step, column, own_rank(launch)), __float_as_uint(best.value),
                    best.id, tag, stop);
}
/// Puts the best token of all ranks into `token`, for columns that have one; true if all hosts want the launch to end.
/// Every rank reads the same words. All words of the warp's columns are polled together: word w is of column w / kRanks
/// from rank w % kRanks.
LP_DEVICE bool hear_tokens(const Launch& launch, const Epilogue& epilogue, u32 step, u32 active, u32 tag, u32* token) {
  constexpr u32 WORDS = kEpilogueColumns * kRanks, EACH = (WORDS + 31) / 32;
  const u32 lane = lane_index();
  const u8* words = launch.inbox[own_rank(launch)] + Inbox::token(step, epilogue.column(0), 0);
  const auto on = [&](int j) {
    const u32 word = j * 32 + lane, column = epilogue.column(word / kRanks);
    return word < WORDS && (active >> column & 1 || column == 0);
  };
  Quad heard[EACH] = {};
  const auto missing = [&](int j) { return on(j) && heard[j].z != tag ? (j * 32 + lane) * 16 + 8 : kThere; };
  const auto fetch = [&](int j) {
    if (missing(j) != kThere) heard[j] = load_system_16(words + (j * 32 + lane) * 16);
  };
  poll<EACH, false>(
      launch, words, tag, fetch, missing, [&](u32 seen) { return seen == tag; }, kSiteRankTokens,
      [](u32 at) { return at / 16 % kRanks; });
  Best best[EACH];
#pragma unroll
  for (u32 j = 0; j < EACH; j++) {
    best[j].offer(__uint_as_float(heard[j].x), heard[j].y);
#pragma unroll
    for (u32 d = 1; d < kRanks; d *= 2) best[j].over(d);
  }
#pragma unroll
  for (u32 c = 0; c < kEpilogueColumns; c++) {
    const u32 id = shuffle(best[c * kRanks / 32].id, c * kRanks % 32);
    if (token[c] != ~0u) token[c] = id;
  }
  return !any_lane(lane < kRanks && heard[0].w == 0);
}

/// The best token of every column over the whole vocabulary into `token`, and to the host, unless the sampler draws;
/// true if the host wants the launch to end. BLOCKS blocks choose, all alike.
template <u32 BLOCKS> LP_DEVICE bool choose_tokens(const Launch& launch, const Epilogue& epilogue, u32 step, u32 active,
                                                   u32* token) {
  const int lane = lane_index();
  const u32 tag = tag_of(launch, step);
  bool stopped = false;
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++) {
    const int column = epilogue.column(c);
    token[c] = ~0u;
    if (!(active >> column & 1) && column != 0) continue;
    const u8* words = launch.words + token_words(step, column);
    Best all;
    constexpr int EACH = (kBlocks + 31) / 32;  // words a lane
    u32 value[EACH], id[EACH], stop[EACH];
    poll_words<EACH>(launch, words + lane * 16, 512, tag, (kBlocks + 31 - lane) / 32, value, id, stop, kSiteSampled);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane < kBlocks) all.offer(__uint_as_float(value[i]), id[i]);
    if (column == 0) stopped = shuffle(stop[0], 0) != 0;
    all.over_lanes();
    if constexpr (kRanks > 1) tell_token<BLOCKS>(launch, step, column, all, tag, stopped);
    if (active >> column & 1 && (is_fed(launch) || rows_of(launch, step).rows[column].flags & kRowSample))
      token[c] = all.id;
  }
  if constexpr (kRanks > 1) stopped = hear_tokens(launch, epilogue, step, active, tag, token);
  fence_tokens(launch);  // token words before K and V of this step are read, and its logits
  if (launch.flags & kLaunchUndrawn) return stopped;
#pragma unroll
  for (int c = 0; c < kEpilogueColumns; c++)
    if (rank_block() == 0 && lane == 0)
      store_system_u64(launch.tokens + (u64)step * kColumns + epilogue.column(c), (u64)tag << 32 | token[c]);
  return stopped;
}
/// Of several ranks: says to the sampler, a launch behind this one, whether all hosts want its chain to end.
LP_DEVICE void note_stop(const Launch& launch, const Epilogue& epilogue, bool stopped) {
  if (rank_block() == 0 && epilogue.warp == 0 && lane_index() == 0)
    store_system_u32((u32*)(launch.inbox[own_rank(launch)] + Inbox::stop), stopped);
}

}  // namespace narrow
