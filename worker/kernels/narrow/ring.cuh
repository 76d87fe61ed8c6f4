// The stream. Consumer warps have rings of slots in shared memory, one for each warp or one for two. Lane r of the
// producer warp fills ring r, in the order in which its warps take their chunks. So the bookkeeping is a lane's
// registers, a barrier has one writer and one reader at a time, and the lanes work side by side (one thread for a
// common ring needs about 430 clocks a chunk).
//
// Bytes in flight are bounded, because flags queue behind them: a lane issues a chunk once the one kInFlight before it
// in its ring has landed; the rest of the ring holds landed data. A paced stream has fewer of its bytes in flight: its
// rings form groups, and at any time the rings of one group have none of them.
//
// A ring that is full of landed chunks leaves memory idle while consumers wait for an exchange. Its lane then
// prefetches later weights into L2, in small pieces: once the consumers go on, the ring fills faster from L2 than from
// memory.
//
// A chunk's full barrier is one of two of its slot, taken in turns: parities then alias only 4 x slots chunks apart. A
// warp that waits for chunk n knows that chunk n - 2 x slots has landed, so that the phase it waits for is the next: it
// has had a chunk that lies no further back in its ring, or has waited for the warps whose chunks it passed over
// (each_set).
#pragma once

namespace narrow {

LP_DEVICE u32 full_barrier(u32 shared, u32 ring, u32 chunk) {
  return shared + Shared::full + ((ring * Shared::slots + chunk % Shared::slots) * 2 + (chunk / Shared::slots & 1)) * 8;
}
LP_DEVICE u32 full_parity(u32 chunk) { return chunk / (2 * Shared::slots) & 1; }
LP_DEVICE u32 empty_barrier(u32 shared, u32 ring, u32 chunk) {
  return shared + Shared::empty + (ring * Shared::slots + chunk % Shared::slots) * 8;
}
LP_DEVICE u32 slot_address(u32 shared, u32 ring, u32 chunk) {
  return shared + Shared::ring + (ring * Shared::slots + chunk % Shared::slots) * kSlotBytes;
}

/// Bytes that a lane brings into L2 ahead of its ring, and how: pieces, so many clocks apart.
constexpr u32 kAheadBytes = 16384, kAheadPiece = 2048, kAheadPace = 200;

constexpr u32 kEveryChunk = ~0u;

/// Lane r issues the chunks of ring r. All lanes of the producer warp call everything together.
struct Producer {
  const Launch& launch;
  u32 shared;  // address of shared memory
  u64 policy;
  u32 chunk = 0;  // of this lane's ring
  const u8* ahead = nullptr;  // what may be brought into L2: `ahead_bytes` from here on
  u32 ahead_bytes = 0;
  Clocks ahead_asked = 0;  // when the last piece was

  LP_DEVICE Producer(const Launch& launch, u32 shared) : launch(launch), shared(shared), policy(policy_evict_first()) {}
  LP_DEVICE static u32 lane() { return lane_index(); }
  /// The next chunk of each lane that is `on`, of GROUPS groups of rings one after the other; more than one are paced:
  /// each waits for what the one after it had in flight.
  template <u32 GROUPS> LP_DEVICE void issue(bool on, const u8* from, u32 bytes) {
    constexpr u32 RINGS = kRings / GROUPS;
    static_assert(RINGS * GROUPS == kRings, "groups of as many rings");
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
      const u32 others = GROUPS > 1 ? shuffle(chunk, (lane() + RINGS) % kRings) : 0;
      issue_lanes<GROUPS>(on && (GROUPS == 1 || lane() / RINGS == group), others, from, bytes, 0);
    }
  }
  /// Until the end of the next product's stream a full ring looks ahead to the block's unit number `unit` of a product:
  /// to the leaf that comes first in the ring.
  template <class P> LP_DEVICE void look_ahead(const u8* product, int unit) {
    const int tile = P::first_tile(rank_block()) + 2 * unit, end = P::first_tile(rank_block() + 1),
              width = tile + 1 < end ? 2 : 1;
    const u32 leaf_bytes = P::leaf_runs * width * P::run;
    ahead = product + (u64)tile * P::runs * P::run + lane() * leaf_bytes;
    ahead_bytes = tile >= end || lane() >= kRings || lane() >= P::leaves ? 0
                  : leaf_bytes < kAheadBytes                             ? leaf_bytes
                                                                         : kAheadBytes;
  }
  /// The block's share of a product: unit by unit, or as many units at a time as have warps, a leaf's k16 steps
  /// ascending. The first PACED chunks of each ring in GROUPS groups.
  template <class P, u32 GROUPS = 1, u32 PACED = kEveryChunk> LP_DEVICE void stream(const u8* product) {
    const int end = P::first_tile(rank_block() + 1);
    u32 issued = 0;  // chunks of each ring, whether it has a leaf or not
    for (int tile = P::first_tile(rank_block()); tile < end; tile += P::at_a_time) {
      const int width = P::ways == 1 && tile + 1 < end ? 2 : 1, most_steps = chunk_steps<P>(width);
      // With ways, leaves of a tile follow those of the tile before.
      const bool on = lane() < kRings && P::works(lane(), tile, end);
      const u8* leaf = product + ((u64)tile * P::runs + (on ? lane() : 0) * (P::leaf_runs * width)) * P::run;
#pragma unroll 1
      for (int k = 0, steps; k < P::leaf_steps; k += steps) {
        const int part_end = k / kPartSteps * kPartSteps + kPartSteps,
                  leaf_end = part_end < P::leaf_steps ? part_end : P::leaf_steps;
        steps = leaf_end - k < most_steps ? leaf_end - k : most_steps;
        const u8* from = leaf + k / P::run_steps * width * P::run;
        const u32 bytes = steps / P::run_steps * width * P::run, stride = kRings * P::leaf_runs * width * P::run;
        const auto has = [&](u32 w) { return P::ways == 1 ? on : on && P::works(lane() + w * kRings, tile, end); };
        if (GROUPS > 1 && issued < PACED) {
#pragma unroll
          for (u32 w = 0; w < kRingWarps; w++) {
            if (issued + w < PACED) issue<GROUPS>(has(w), from + w * stride, bytes);
            else issue<1>(has(w), from + w * stride, bytes);
          }
        } else {
          // A chunk for each warp of the ring, and no ring waits for another in between.
          u32 warps = 0;
#pragma unroll
          for (u32 w = 0; w < kRingWarps; w++) warps |= (u32)has(w) << w;
          issue_lanes<1>(warps, 0, from, bytes, stride);
        }
        issued += kRingWarps;
      }
    }
    ahead_bytes = 0;
  }

 private:
  LP_DEVICE bool landed(u32 ring, u32 chunk) const {
    return mbarrier_test_wait(full_barrier(shared, ring, chunk), full_parity(chunk));
  }
  /// A lane goes ahead as soon as its own chunk may: no ring waits for another. The chunks are those of the warps in
  /// `todo`, a bit each; the second's lies `stride` behind the first's.
  template <u32 GROUPS> LP_DEVICE void issue_lanes(u32 todo, u32 others, const u8* from, u32 bytes, u32 stride) {
    const u32 ring = lane();
    const Clocks begun = clocks();
    while (any_lane(todo != 0)) {
      if (!todo) continue;
      // Released: orders the warp's reads of the slot before the copy that overwrites it (block). Landed: bounds what
      // is in flight.
      if (chunk >= Shared::slots &&
          !mbarrier_test_wait(empty_barrier(shared, ring, chunk), (chunk / Shared::slots & 1) ^ 1)) {
        // The first layer's weights of a step, which may be more than the rings hold, go ahead of rows that the host
        // gives. There the limit is that of what the consumers wait for (steps.cuh).
        if (!kFed && clocks() - begun > kWithinWaitLimit) wait_failed(launch, kSiteSlotEmpty, chunk, ring);
        if (ahead_bytes > 0 && clocks() - ahead_asked > kAheadPace && landed(ring, chunk - 1)) {
          const u32 piece = ahead_bytes < kAheadPiece ? ahead_bytes : kAheadPiece;
          bulk_prefetch_l2(ahead, piece);
          ahead += piece, ahead_bytes -= piece, ahead_asked = clocks();
        }
        continue;
      }
      if (chunk >= kInFlight && !landed(ring, chunk - kInFlight)) continue;
      if (GROUPS > 1 && others > 0 && !landed((ring + kRings / GROUPS) % kRings, others - 1)) continue;
      const u32 barrier = full_barrier(shared, ring, chunk);
      mbarrier_expect(barrier, bytes);
      static_assert(kRingWarps <= 2, "a warp and the one `stride` behind it");
      bulk_load(slot_address(shared, ring, chunk), todo & 1 ? from : from + stride, bytes, barrier, policy);
      chunk++;
      todo &= todo - 1;
    }
  }
};

/// A consumer warp's chunks: `next` is the number in its ring of the next round of chunks, one a warp of the ring.
struct Consumer {
  const Launch& launch;
  u32 shared, warp, next = 0;

  LP_DEVICE Consumer(const Launch& launch, u32 shared, u32 warp) : launch(launch), shared(shared), warp(warp) {}
  LP_DEVICE u32 ring() const { return warp % kRings; }
  /// This warp's turn in a round.
  LP_DEVICE u32 turn() const { return warp / kRings; }
  /// Chunks of the ring in a round of the tiles from `tile` on: one for each of its warps that has a leaf of them.
  template <class P> LP_DEVICE u32 round(int tile, int end) const {
    if constexpr (P::ways == 1) return kRingWarps;
    u32 chunks = 0;
#pragma unroll
    for (u32 w = 0; w < kRingWarps; w++) chunks += P::works(ring() + w * kRings, tile, end);
    return chunks;
  }
  /// Waits until a chunk of the ring has landed; its address. Orders the bulk copy before the reads (block).
  LP_DEVICE u32 wait(u32 chunk) {
    wait_barrier(launch, full_barrier(shared, ring(), chunk), full_parity(chunk), kSiteFull);
    return slot_address(shared, ring(), chunk);
  }
  /// Gives a chunk's slot back. All lanes of the warp must have used (not only requested) what they read: `never` is
  /// false, but the compiler cannot know, and is computed from every result of the chunk. An arrive overtakes
  /// shared-memory loads of its own warp that are still queued, and the next copy would overwrite what they have not
  /// read.
  LP_DEVICE void release(u32 chunk, bool never) {
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(empty_barrier(shared, ring(), chunk) + (never ? 8192 : 0));
  }
};

}  // namespace narrow
