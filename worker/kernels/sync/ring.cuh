// The stream: one producer thread fills a ring of slots with chunks, each for one consumer warp. Bytes in flight are bounded:
// a chunk is issued once the chunk `window` places before it has landed; the rest of the ring holds landed data.
//
// Barriers belong to warps, not to slots: chunk n of a warp uses its pair full[n & 1], empty[n & 1]. Chunk n is issued only after
// chunk n - 2 of its warp was released, so a barrier never runs two phases ahead of who waits for it.
#pragma once

constexpr int least_of(int a, int b) { return a < b ? a : b; }
constexpr u32 kFewestLeaves = least_of(kHiddenLeaves, least_of(kHeadLeaves, kDownLeaves));
/// Most chunks in flight.
constexpr u32 kMaxWindow = 15;
/// Products deal chunks to their leaves in turn and an item of attention to four warps, so chunk n + 2 of a warp is at least this many
/// chunks behind chunk n. Where the ring or the window is longer, n's barriers may have passed on: see `Producer::newest`.
constexpr u32 kNearestNextButOne = kFewestLeaves + 4;
constexpr bool kBarriersMayPass = Shared::slots > kNearestNextButOne || kMaxWindow > kNearestNextButOne;
#ifndef LP_WINDOW_BYTES
#define LP_WINDOW_BYTES 65536
#endif
#ifndef LP_WINDOW_BYTES_WAITING
#define LP_WINDOW_BYTES_WAITING 32768
#endif
constexpr u32 window_of(u32 bytes, u32 chunk) {
  u32 n = bytes / chunk;
  if (n > kMaxWindow) n = kMaxWindow;
  if (n > 15) n = 15;
  return n < 1 ? 1 : n;
}

/// The thread that issues the stream.
struct Producer {
  const Launch& launch;
  u32 shared;  // address of shared memory
  u64 policy;
  u32 issued = 0, slot = 0;

  LP_DEVICE Producer(const Launch& launch, u32 shared) : launch(launch), shared(shared), policy(policy_evict_first()) {
    for (int w = 0; w < kWarps; w++) store_shared_u32(shared + Shared::chunks + w * 4, 0);
  }
  LP_DEVICE void issue(u32 warp, const u8* from, u32 bytes, u32 window) {
    const u32 chunk = load_shared_u32(shared + Shared::chunks + warp * 4);
    const u32 owner = load_shared_u32(shared + Shared::slot_owner + slot * 4);
    const u32 earlier = load_shared_u32(shared + Shared::issued + ((issued - window) & 15) * 4);
    // Released: orders the reads of a slot, and of a warp's barriers, before the copy that uses them again (block).
    if (issued >= Shared::slots && newest(owner)) released(owner);
    if (chunk >= 2) released((chunk - 2) << 8 | warp);
    if (issued >= window && newest(earlier)) wait_barrier(launch, barrier(Shared::full, earlier), earlier >> 9 & 1, kSiteLanded);
    const u32 mine = chunk << 8 | warp, full = barrier(Shared::full, mine);
    store_shared_u32(shared + Shared::slot_of + warp * 8 + (chunk & 1) * 4, slot);
    store_shared_u32(shared + Shared::slot_owner + slot * 4, mine);
    store_shared_u32(shared + Shared::issued + (issued & 15) * 4, mine);
    store_shared_u32(shared + Shared::chunks + warp * 4, chunk + 1);
    mbarrier_expect(full, bytes);
    bulk_load(shared + Shared::ring + slot * kSlotBytes, from, bytes, full, policy);
    issued++;
    if (++slot == Shared::slots) slot = 0;
  }
  /// The block's share of a product, in the order in which consumers take it: unit, part, leaf.
  template <class P> LP_DEVICE void stream(const u8* product, u32 block, u32 window) {
    const int end = P::first_tile(block + 1);
    for (int tile = P::first_tile(block); tile < end; tile += 2) {
      const int width = tile + 1 < end ? 2 : 1;
      const u8* unit = product + (u64)tile * P::steps * kFragment;
#pragma unroll 1
      for (int part = 0; part < P::parts; part++) {
        const int begin = P::part_begin(part), steps = P::part_begin(part + 1) - begin;
#pragma unroll 1
        for (int leaf = 0; leaf < P::leaves; leaf++)
          issue(leaf, unit + (u64)((leaf * P::leaf_steps + begin) * width) * kFragment, steps * width * kFragment, window);
      }
    }
  }

 private:
  /// False if the chunk next but one of the same warp was issued: then this one was released, and its barriers may be two phases on, where
  /// a wait for its parity would not end.
  LP_DEVICE bool newest(u32 chunk) {
    if constexpr (!kBarriersMayPass) return true;
    return load_shared_u32(shared + Shared::chunks + (chunk & 255) * 4) <= (chunk >> 8) + 2;
  }
  LP_DEVICE u32 barrier(u32 of, u32 chunk) { return shared + of + (chunk & 255) * 16 + (chunk >> 8 & 1) * 8; }
  LP_DEVICE void released(u32 chunk) { wait_barrier(launch, barrier(Shared::empty, chunk), chunk >> 9 & 1, kSiteSlotEmpty); }
};

/// A consumer warp's chunks, in order.
struct Consumer {
  const Launch& launch;
  u32 shared, warp, chunk = 0;

  LP_DEVICE Consumer(const Launch& launch, u32 shared, u32 warp) : launch(launch), shared(shared), warp(warp) {}
  /// Waits until the next chunk has landed; its slot. Orders the bulk copy before the reads (block).
  LP_DEVICE u32 wait() {
    wait_barrier(launch, shared + Shared::full + warp * 16 + (chunk & 1) * 8, chunk >> 1 & 1, kSiteFull);
    return load_shared_u32(shared + Shared::slot_of + warp * 8 + (chunk & 1) * 4);
  }
  LP_DEVICE u32 address(u32 slot) const { return shared + Shared::ring + slot * kSlotBytes; }
  /// Gives the slot back. All lanes of the warp must have used (not only requested) what they read: `never` is false, but the
  /// compiler cannot know, and is computed from every result of the chunk. An arrive overtakes shared-memory loads of its own warp that
  /// are still queued, and the next copy would overwrite what they have not read.
  LP_DEVICE void release(bool never) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared + Shared::empty + warp * 16 + (chunk & 1) * 8 + (never ? 8192 : 0));
    chunk++;
  }
};
