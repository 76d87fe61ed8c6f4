// LM head and greedy choice: the best token of each column over the block's rows, then over all blocks. Scratch: the
// receive buffer.
#pragma once

namespace wide {

using HeadOwn = OwnUnits<Head>;

struct Choice {
  const Launch& launch;
  u32 shared;

  /// After the LM head the peer may send the next step's qkv, where that is cut, as soon as it has the tokens, while
  /// they are read here: it sends to later slots.
  static_assert(!QkvCut::halves ||
                    kConsumers * kColumns * 8 <= Receive::first_received<QkvCut> * Receive::tile_bytes<QkvCut>,
                "the choice lies before what the peer sends");
  LP_DEVICE u32 slot(u32 row, u32 column) const { return shared + Shared::receive + (row * kColumns + column) * 8; }
  LP_DEVICE Best load(u32 row, u32 column) const {
    Best best;
    best.value = load_shared_f32(slot(row, column));
    best.id = load_shared_u32(slot(row, column) + 4);
    return best;
  }
  LP_DEVICE void store(u32 row, u32 column, const Best& best) const {
    store_shared_f32(slot(row, column), best.value);
    store_shared_u32(slot(row, column) + 4, best.id);
  }
  LP_DEVICE void clear() const {
    for (u32 i = thread_index(); i < kConsumers * kColumns; i += kConsumerThreads)
      store(i / kColumns, i % kColumns, Best{});
    consumers_sync();
  }
  /// The logits of a warp's unit: into its best, and to the host if it asks.
  LP_DEVICE void offer(int first_tile, int width, u32 first_column, const float (*sum)[HeadOwn::columns / 2]) const {
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < HeadOwn::columns / 8; j++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const u32 column = first_column + 8 * j + 2 * t + c;
        const float inverse = inverse_of(shared, 0, column);
        Best best;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int id = own_rank(launch) * (kHeadTiles * 16) + first_tile * 16 + g + e * 8;
          const float logit = sum[e >> 1][4 * j + c + 2 * (e & 1)] * inverse;
          if (e >> 1 >= width || id >= kVocab) continue;
          best.offer(logit, id);
          if (launch.flags & kLaunchLogits) put_logit(launch, column, id, logit);
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          const float v = shuffle_xor(best.value, d);
          const u32 i = shuffle_xor(best.id, d);
          best.offer(v, i);
        }
        if (g == 0) {
          const Best before = load(warp_index(), column);
          best.offer(before.value, before.id);
          store(warp_index(), column, best);
        }
      }
  }
  /// The best of this block to all blocks and of all blocks to this one, into row 0 of the scratch; true if the host
  /// wants the launch to end (the warp of the norms has asked). Orders K, V and words of this step before all that
  /// follows in any block (grid).
  LP_DEVICE bool exchange(u32 step) const {
    const u32 tid = thread_index();
    consumers_sync();
    if (tid < kColumns) {
      Best best;
      for (u32 w = 0; w < kConsumers; w++) {
        const Best other = load(w, tid);
        best.offer(other.value, other.id);
      }
      store_relaxed_u64(launch.words + Words::best + (rank_block() * kColumns + tid) * 8,
                        (u64)best.id << 32 | __float_as_uint(best.value));
    }
    if (kRanks > 1) fence_tokens(launch);  // logits of this thread, before the block's token word
    publish(launch, Words::tokens_ready);
    if (tid == 0) wait_count(launch, Words::tokens_ready, kBlocks * (step + 1), kSiteSampled);
    consumers_sync();
    constexpr u32 kParts = kConsumerThreads / kColumns;
    Best best;
#pragma unroll 8
    for (u32 block = tid / kColumns; block < kBlocks; block += kParts) {
      const u64 word = load_relaxed_u64(launch.words + Words::best + (block * kColumns + tid % kColumns) * 8);
      best.offer(__uint_as_float((u32)word), (u32)(word >> 32));
    }
    store(tid / kColumns, tid % kColumns, best);
    bool stopped = load_relaxed_u32(launch.words + Words::stop) != 0;
    consumers_sync();
    if (tid < kColumns) {
      for (u32 part = 1; part < kParts; part++) {
        const Best other = load(part, tid);
        best.offer(other.value, other.id);
      }
      if constexpr (kRanks > 1) stopped = agree(tid, step, stopped, best);
      store(0, tid, best);
    }
    consumers_sync();
    return stopped;
  }

 private:
  /// The best of this rank to all ranks and of all ranks to this one, for a column a lane; true, for column 0, if all
  /// hosts want the launch to end. Every rank reads the same words.
  LP_DEVICE bool agree(u32 column, u32 step, bool stop, Best& best) const {
    const u32 tag = tag_of(launch, step, 0), own = own_rank(launch);
    if (rank_block() == column % kBlocks) {
      fence_tokens(launch);  // logits of all blocks, whose counter this block has seen, before its word
      for (u32 rank = 0; rank < kRanks; rank++)
        store_system_16(launch.inbox[rank] + Inbox::token + (column * kRanks + own) * 16, __float_as_uint(best.value),
                        best.id, tag, stop);
    }
    const u8* words = launch.inbox[own] + Inbox::token + column * kRanks * 16;
    Quad heard[kRanks] = {};
    const auto missing = [&](u32 j) { return heard[j].z != tag ? j * 16 + 8 : kThere; };
    const auto fetch = [&](u32 j) {
      if (missing(j) != kThere) heard[j] = load_system_16(words + j * 16);
    };
    poll<kRanks, false>(
        launch, words, tag, fetch, missing, [&](u32 seen) { return seen == tag; }, kSiteRankTokens,
        [](u32 at) { return at / 16; });
    fence_tokens(launch);  // words before K and V of this step are read, and its logits
    stop = true;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; rank++) {
      best.offer(__uint_as_float(heard[rank].x), heard[rank].y);
      stop &= heard[rank].w != 0;
    }
    return stop;
  }
};

}  // namespace wide
