// LM head and greedy choice: the best token of each column over the block's rows, then over all blocks. Scratch: the receive buffer.
#pragma once

using HeadOwn = Own<Head>;

struct Choice {
  const Launch& launch;
  u32 shared;

  /// After the LM head the peer may send the next step's qkv as soon as it has the tokens, while they are read here: it sends to later slots.
  static_assert(kPrompt || kConsumers * kColumns * 8 <= Receive::first_received<QkvCut> * Receive::tile_bytes<QkvCut>, "the choice lies before what the peer sends");
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
    for (u32 i = thread_index(); i < kConsumers * kColumns; i += kConsumerThreads) store(i / kColumns, i % kColumns, Best{});
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
          const int id = first_tile * 16 + g + e * 8;
          const float logit = sum[e >> 1][4 * j + c + 2 * (e & 1)] * inverse;
          if (e >> 1 >= width || id >= kVocab) continue;
          best.offer(logit, id);
          if (launch.flags & kLaunchLogits) launch.logits[(u64)column * (Head::tiles * 16) + id] = logit;
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
  /// The best of this block to all blocks and of all blocks to this one, into row 0 of the scratch; true if the host wants the launch to end (the warp of the norms has asked).
  /// Orders K, V and words of this step before all that follows in any block (grid).
  LP_DEVICE bool exchange(u32 step) const {
    const u32 tid = thread_index();
    consumers_sync();
    if (tid < kColumns) {
      Best best;
      for (u32 w = 0; w < kConsumers; w++) {
        const Best other = load(w, tid);
        best.offer(other.value, other.id);
      }
      store_relaxed_u64(launch.words + Words::best + (blockIdx.x * kColumns + tid) * 8, (u64)best.id << 32 | __float_as_uint(best.value));
    }
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
    const bool stopped = load_relaxed_u32(launch.words + Words::stop) != 0;
    consumers_sync();
    if (tid < kColumns) {
      for (u32 part = 1; part < kParts; part++) {
        const Best other = load(part, tid);
        best.offer(other.value, other.id);
      }
      store(0, tid, best);
    }
    consumers_sync();
    return stopped;
  }
};
