// Several ranks: they reduce the sums of o and of down by runs of 32 tokens, and gather x. Each run is of one rank
// (`owner_of`), which alone keeps its residual. A pass is then
//   begun | tell_embeddings | embedded | embed, norms
//   .. out | join_out | norms .. down | join_down | norms .. of each layer, the last norms before gather
//   .. head | logits | [choose]
// where the lines are meets, which wait until all ranks have come as far: launches of one warp, or the begin of the
// launch behind the line (join: told, norms: joined).
//
//   memory      writer -> readers                            its next writer waits for
//   embeddings  the rank that has a token -> all ranks       begun: `embed` of the pass before is over
//   partial     out, down -> the join of a run's rank        joined: joins of all ranks have read it
//   x, squares  the join of a run's rank -> all ranks        told: qkv (gate/up), which read x, came before
//   logits,     a rank's head -> the samplers or choose of   begun: the samplers before it in the stream, or choose,
//   best        all ranks                                    are over
//
// A launch ends with all that it wrote in this GPU's memory, and the next one begins with that; what it wrote to other
// ranks each of its threads fences itself, once its copies have written it. So a meet's warp has seen what launches
// before it wrote or read, here and there, and its fence orders that before its word; the fence of the warp that reads
// the word orders it before the launches behind that one (system). Tags count layers, and all ranks have the same
// passes, so a rank's word never goes back; a rank that has gone on shows a later tag.
//
// Two passes may be computed together, launch by launch in turns, each with words of its own. Then copy engines carry
// sums and x (worker/src/cuda/kernels/matrix/carry.rs) while the other pass computes: a product keeps what it has
// summed for others in `outgoing`, a join writes x for itself alone, runs of a rank lie one behind the other, and it is
// copies behind these launches that write their words. The table above stays true: copies of sums come behind the
// product and are over before others join, those of x come behind the join and are over before others find norms; so
// `outgoing` is read before the next product of the pass, which waits for the norms. A pass's last copies are over
// before its head.
//
// Launches behind a meet begin when it is over: they would take multiprocessors from ranks that it waits for, where
// ranks share a GPU, as in tests. Of joins and norms there are no more blocks than of the products in front of them.
#pragma once

namespace matrix {

constexpr int kMeetThreads = 32;

/// Says that this rank has come to a meet, which block 0 does unless copy engines do, and waits for the others. Hosts
/// put launches one by one and may be late at any of them, so the wait is as long as for the start of a launch. Whole
/// blocks call it.
template <Meet MEET> LP_DEVICE void meet_others(const Launch& launch, u32 layer, bool carried) {
  const u32 lane = lane_index(), own = own_rank(launch), tag = launch.epoch + layer;
#ifdef LP_LATE  // rank 1 begins so many clocks late
  for (const Clocks since = clocks(); MEET == kMeetBegun && own == 1 && clocks() - since < LP_LATE;) {}
#endif
#ifdef LP_HASTY  // negative control
  constexpr Clocks LIMIT = kWaitLimit;
#else
  constexpr Clocks LIMIT = kStartLimit;
#endif
  // One answer of the host for all.
  const u32 stop = shuffle(MEET == kMeetLogits && lane == 0 ? load_system_u32(launch.control) : 0, 0);
  Quad word{};
  if (lane < kRanks) {
    constexpr u64 WORDS = meet_byte(MEET);
    fence_system();
    if (blockIdx.x == 0 && !carried) store_system_16(launch.inbox[lane] + WORDS + own * 16, tag, stop, 0, 0);
    const Clocks since = clocks();
    while (!(carried && lane == own) && (word = load_system_16(launch.inbox[own] + WORDS + lane * 16)).x < tag)
      if (clocks() - since > LIMIT) wait_failed(launch, kSiteRanksMet, tag, word.x, lane);
    fence_system();
  }
  const bool all_stop = !any_lane(lane < kRanks && word.y == 0);
  if (MEET == kMeetLogits && lane == 0) store_system_u32((u32*)(launch.words + Memory::stop), all_stop);
}
template <Meet MEET> LP_DEVICE void meet(const Launch& launch, u32 layer, bool carried = false) {
  if (warp_index() == 0) meet_others<MEET>(launch, layer, carried);
  __syncthreads();
}

/// The rows of the embedding that this rank has in its shard, to all ranks; of shards that no rank has, zeros. A warp
/// takes a token.
LP_DEVICE void tell_embeddings(const Launch& launch) {
  constexpr u32 SHARD = kHeadTiles * 16;
  const u32 own = own_rank(launch);
  each_warp(launch.row_count, [&](u32 token) {
    const u32 id = launch.rows[token].token, shard = id / SHARD, row = id % SHARD;
    if (shard % kRanks != own) return;
    for (u32 k = lane_index() * 8; k < kHidden; k += 256) {
      Quad v{};
      if (shard == own)
        v = Quad{embedding_pair(launch, row, k), embedding_pair(launch, row, k + 2), embedding_pair(launch, row, k + 4),
                 embedding_pair(launch, row, k + 6)};
      for (u32 i = 0; i < kRanks; i++)
        store_16(launch.inbox[(own + i) % kRanks] + Memory::embeddings + ((u64)token * kHidden + k) * 2, v);
    }
  });
  fence_system();
}

/// Adds what all ranks have told of their sums of P, o or down, to the residual of this rank's runs, in the one order
/// of additions: the input of the next product, with the weights of norm `norm`, for all ranks. A warp takes a run of a
/// row tile.
template <class P> LP_DEVICE void join(const Launch& launch, const Pass& pass, u32 norm) {
  constexpr int PARTS = kRanks * P::told;
  // Groups of 8 tokens at a time: words that there are registers for.
  constexpr int GROUPS = PARTS > 8 ? 1 : PARTS > 4 ? 2 : kRunGroups;
  const u32 lane = lane_index(), own = own_rank(launch), runs = (launch.row_count + kRunTokens - 1) / kRunTokens,
            first = own * pass.carried, owned = !pass.carried ? (runs + kRanks - 1 - own) / kRanks
                                                : runs > first ? min(runs - first, pass.carried) : 0;
  each_warp(owned * kHiddenTiles, [&](u32 item) {
    const u32 tile = item % kHiddenTiles, place = item / kHiddenTiles,
              token = (pass.carried ? first + place : place * kRanks + own) * kRunTokens;
    if (!has_block(pass, token)) return;
    const u32 gamma = gamma_of(launch, norm, tile);
    const int row = tile * 16 + (lane >> 2);
    const float low = scale_before(launch, norm, row), high = scale_before(launch, norm, row + 8);
    const u64 at = residual_byte(tile, token) + lane * 16;
    const float4* residual = reinterpret_cast<const float4*>(launch.words + Memory::residual + at);
    float h[kRunValues];
#pragma unroll
    for (int group = 0; group < kRunGroups; group += GROUPS) {
      Quad of[GROUPS][PARTS];
#pragma unroll
      for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
          of[j][p] = load_system_16(launch.words + Memory::partial + lane * 16 + (group + j) * 512 +
                                    sums_byte<P::told>(p / P::told, p % P::told, tile, place));
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        const float4 before = residual[(group + j) * kConsumerThreads];
        const float own_residual[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float v[PARTS];
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            const Quad& q = of[j][p];
            v[p] = __uint_as_float(i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w);
          }
          h[4 * (group + j) + i] = scaled(leaf_sum<PARTS, P::told_group>(v), i & 2 ? high : low) + own_residual[i];
        }
      }
    }
    publish_hidden<kRanks>(launch, tile, token, from_bf16(gamma & 0xffff), from_bf16(gamma >> 16), h,
                           pass.carried > 0);
  });
  fence_system();
}

}  // namespace matrix
