// The stream: every consumer warp has a ring of slots of its own in shared memory, and lane w of the producer warp fills that of warp w,
// in the order in which the warp takes its chunks. So the bookkeeping is a lane's registers, a barrier has one writer and one reader, and a chunk
// costs the producer a sixteenth of a warp's time (one thread for a common ring needs about 430 clocks a chunk).
//
// Bytes in flight are bounded, because flags queue behind them: a chunk is issued once the chunk kInFlight places before it in its ring
// has landed; the rest of the ring holds landed data. Paced, half of that: the lower and the upper eight rings take turns.
#pragma once

constexpr u32 kInFlight = kSlotBytes >= 4096 ? 1 : 4096 / kSlotBytes;

/// Lane w issues the chunks of consumer warp w. All lanes of the producer warp call everything together.
struct Producer {
  const Launch& launch;
  u32 shared;  // address of shared memory
  u64 policy;
  u32 chunk = 0;  // of this lane's ring

  LP_DEVICE Producer(const Launch& launch, u32 shared) : launch(launch), shared(shared), policy(policy_evict_first()) {}
  LP_DEVICE static u32 lane() { return threadIdx.x & 31; }
  /// The next chunk of each lane that is `on`.
  template <bool PACED> LP_DEVICE void issue(bool on, const u8* from, u32 bytes) {
    if constexpr (PACED) {
      u32 partner = shuffle_xor(chunk, 8);
      issue_lanes<true>(on && lane() < 8, partner, from, bytes);
      partner = shuffle_xor(chunk, 8);
      issue_lanes<true>(on && lane() >= 8, partner, from, bytes);
    } else {
      issue_lanes<false>(on, 0, from, bytes);
    }
  }
  /// The block's share of a product: unit by unit, a leaf's k16 steps ascending.
  template <class P, bool PACED> LP_DEVICE void stream(const u8* product) {
    const int end = P::first_tile(blockIdx.x + 1);
    const bool on = lane() < P::leaves;
    for (int tile = P::first_tile(blockIdx.x); tile < end; tile += 2) {
      const int width = tile + 1 < end ? 2 : 1, chunk_steps = kSlotBytes / (width * kFragment);
      const u8* leaf = product + ((u64)tile * P::steps + (on ? lane() : 0) * (P::leaf_steps * width)) * kFragment;
#pragma unroll 1
      for (int k = 0; k < P::leaf_steps; k += chunk_steps)
        issue<PACED>(on, leaf + k * width * kFragment, (P::leaf_steps - k < chunk_steps ? P::leaf_steps - k : chunk_steps) * width * kFragment);
    }
  }

 private:
  LP_DEVICE u32 full(u32 ring, u32 chunk) const { return shared + Shared::full + (ring * Shared::slots + chunk % Shared::slots) * 8; }
  LP_DEVICE u32 empty(u32 ring, u32 chunk) const { return shared + Shared::empty + (ring * Shared::slots + chunk % Shared::slots) * 8; }
  LP_DEVICE static u32 parity(u32 chunk) { return chunk / Shared::slots & 1; }

  /// A lane goes ahead as soon as its own chunk may: no lane's warp waits for another's.
  template <bool PACED> LP_DEVICE void issue_lanes(bool todo, u32 partner, const u8* from, u32 bytes) {
    const u32 ring = lane();
    const long long begun = clock64();
    while (any_lane(todo)) {
      if (!todo) continue;
      // Released: orders the warp's reads of the slot before the copy that overwrites it (block). Landed: bounds what is in flight.
      if (chunk >= Shared::slots && !mbarrier_test_wait(empty(ring, chunk), parity(chunk) ^ 1)) {
        if (clock64() - begun > 2 * kWaitLimit) wait_failed(launch, kSiteSlotEmpty, chunk, ring);
        continue;
      }
      if (chunk >= kInFlight && !mbarrier_test_wait(full(ring, chunk - kInFlight), parity(chunk - kInFlight))) continue;
      if (PACED && partner > 0 && !mbarrier_test_wait(full(ring ^ 8, partner - 1), parity(partner - 1))) continue;
      mbarrier_expect(full(ring, chunk), bytes);
      bulk_load(shared + Shared::ring + (ring * Shared::slots + chunk % Shared::slots) * kSlotBytes, from, bytes, full(ring, chunk), policy);
      chunk++;
      todo = false;
    }
  }
};

/// A consumer warp's chunks, in order.
struct Consumer {
  const Launch& launch;
  u32 shared, warp, slot = 0, parity = 0;

  LP_DEVICE Consumer(const Launch& launch, u32 shared, u32 warp) : launch(launch), shared(shared), warp(warp) {}
  /// Waits until the next chunk has landed; its address. Orders the bulk copy before the reads (block).
  LP_DEVICE u32 wait() {
    const u32 at = warp * Shared::slots + slot;
    wait_barrier(launch, shared + Shared::full + at * 8, parity, kSiteFull);
    return shared + Shared::ring + at * kSlotBytes;
  }
  /// Gives the slot back. All lanes of the warp must have used (not only requested) what they read: `never` is false, but the
  /// compiler cannot know, and is computed from every result of the chunk. An arrive overtakes shared-memory loads of its own warp that
  /// are still queued, and the next copy would overwrite what they have not read.
  LP_DEVICE void release(bool never) { release_slot(never, slot), advance(); }
  /// A slot is given back later, by its number.
  LP_DEVICE u32 keep() {
    const u32 kept = slot;
    advance();
    return kept;
  }
  LP_DEVICE void release_slot(bool never, u32 slot) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared + Shared::empty + (warp * Shared::slots + slot) * 8 + (never ? 8192 : 0));
  }

 private:
  LP_DEVICE void advance() {
    if (++slot == Shared::slots) slot = 0, parity ^= 1;
  }
};
