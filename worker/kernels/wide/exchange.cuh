// Exchanges. Over the chip by words with a tag, which readers poll (q, k and v, spans of attention), or by counters,
// for what bulk copies read: a block stores, then adds how many row tiles it has stored; readers wait for generation x
// tiles. One buffer an exchange suffices, because every layer all blocks, those without tiles, too,
// publish outputs_ready behind all that they read of the layer before, and every writer waits for what follows that.
// Within a pair by bulk copies from shared memory to shared memory, whose bytes complete the receiver's barrier, so
// that nobody needs a fence at cluster scope.
#pragma once

namespace wide {

/// Row tiles that a counter counts: of x a leaf's, of gate and up those of a leaf of down's input.
constexpr u32 kLeafTiles = kHiddenSteps, kActivationTiles = 2 * Down::leaf_steps;

/// Generations of the exchanges, from 1; and the tags of words.
LP_DEVICE u32 generation_of(u32 step, u32 layer) { return unknown(step) * kLayers + layer + 1; }
LP_DEVICE u32 tag_of(const Launch& launch, u32 step, u32 layer) {
  return launch.epoch + unknown(step) * (kLayers + 1) + layer;
}

LP_DEVICE void wait_count(const Launch& launch, u64 counter, u32 target, u32 site) {
  const u32* p = (const u32*)(launch.words + counter);
  u32 seen = load_acquire_u32(p);
  if (kAblateWaits || (int)(seen - target) >= 0) return;
  const long long begun = clock64();
  while ((int)((seen = load_acquire_u32(p)) - target) < 0)
    if (clock64() - begun > kBlocksWaitLimit) wait_failed(launch, site, target, seen);
}
/// Loads words at(0) to at(N - 1) into x, y and extra until all have the tag. While some are missing, one lane's
/// missing word stands for all (polling them all slows the stream).
template <int N, class AT> LP_DEVICE void receive_words(const Launch& launch, const AT& at, u32 tag, u32* x, u32* y,
                                                        u32* extra, u32 site) {
  long long begun = 0;
  while (true) {
    u32 missing = ~0u, seen = 0;
#pragma unroll
    for (int j = N - 1; j >= 0; j--) {
      const Quad v = load_relaxed_16(at(j));
      x[j] = v.x;
      y[j] = v.y;
      extra[j] = v.w;
      if (!kAblateWaits && v.z != tag) missing = j, seen = v.z;
    }
    if (!any_lane(missing != ~0u)) break;
    if (begun == 0) begun = clock64();
    if (missing != ~0u && clock64() - begun > kBlocksWaitLimit) wait_failed(launch, site, tag, seen);
    const u32 scout = __ballot_sync(kAllLanes, missing != ~0u);
    if ((int)lane_index() == __ffs(scout) - 1) {
      const u8* word = at(missing);
      while ((seen = load_relaxed_16(word).z) != tag)
        if (clock64() - begun > kBlocksWaitLimit) wait_failed(launch, site, tag, seen);
    }
    __syncwarp();
  }
  __syncwarp();
}
LP_DEVICE void consumers_sync() { barrier_sync(1, kConsumerThreads); }
/// What the consumers of this block have stored is there for all who see the counter grow: bulk copies, too.
LP_DEVICE void publish(const Launch& launch, u64 counter) {
  fence_async_global();
  consumers_sync();
  if (thread_index() == 0) add_release_u32((u32*)(launch.words + counter), 1);
}

/// The same of the block's row tiles of P, whose counters count EACH.
template <class P, int EACH> LP_DEVICE void publish_tiles(const Launch& launch, u64 counters) {
  fence_async_global();
  consumers_sync();
  if (thread_index() > 0) return;
  const int end = P::first_tile(block_index() + 1);
#pragma unroll 1
  for (int tile = P::first_tile(block_index()), next; tile < end; tile = next) {
    const int counter = tile / EACH;
    next = (counter + 1) * EACH < end ? (counter + 1) * EACH : end;
    add_release_u32((u32*)(launch.words + counters + counter * Words::counter), next - tile);
  }
}

/// Partial sums that the pair exchanges, and finished ones on their way to whoever goes on with them, in the receive
/// buffer. A tile is [16 rows][columns] f32, groups of 8 columns swizzled so that 8 columns of four groups of rows are
/// read without conflicts.
struct Receive {
  const Launch& launch;
  u32 shared;

  static constexpr u32 kLayerUses = 3;  // of the buffer in a layer: qkv, o, down
  /// Before anything is written to either block's buffer: both have read what they had received before.
  LP_DEVICE void begin(u32 use) {
    wait_barrier(launch, shared + Shared::receive_free, use & 1 ^ 1, kSitePartialsEmpty);
    __syncwarp();
  }
  /// After a barrier of the consumers that follows the last read: the peer may send again.
  LP_DEVICE void end() {
    if (thread_index() < 2) mbarrier_arrive_remote(map_shared(shared + Shared::receive_free, thread_index()));
  }

  template <class C> static constexpr u32 tile_bytes = C::columns * 64;
  template <class C> static constexpr int pieces = C::split == Split::kColumns ? 2 : 1;  // of a tile
  /// Slots of a part of the tiles that a block owns.
  template <class C> static constexpr int owned_slots = C::odd_tiles * pieces<C>;
  /// First slot of tiles that come from the peer; before them lie the other warpgroup's (kLeaves) and those on their
  /// way to the peer. Of a chained pair both blocks have all tiles in the same slots.
  template <class C> static constexpr int first_received = !C::halves                   ? 0
                                                           : C::split == Split::kLeaves ? C::tiles
                                                           : C::chained                 ? 0
                                                                                        : owned_slots<C>;
  template <class C> static constexpr int slots =
      first_received<C> + (C::chained ? C::tiles * pieces<C> : C::P::told * owned_slots<C>);

  /// Adds the pair's partial sums of each row tile where it is owned; leaves of less than a group stay apart.
  /// Afterwards `add_rows8` reads them. `meanwhile` is done while sums are on their way.
  template <class C, class MEANWHILE> LP_DEVICE void exchange(u32 use, const Place& place,
                                                              float (*sum)[C::columns / 2],
                                                              const MEANWHILE& meanwhile) {
    static_assert(slots<C> * tile_bytes<C> <= Shared::scratch, "partial sums fit the receive buffer");
    begin(use);
    constexpr bool kGroups = C::split == Split::kLeaves;  // the second half of the leaves is in the second warpgroup
    const u32 group = warp_index() >> 2;
    const bool mine = !C::halves || (place.tile >= C::first_owned(1)) == (half() == 1);
    const int piece = C::split == Split::kColumns ? group : 0,
              within = (place.tile - (C::halves ? C::first_owned(mine ? half() : half() ^ 1) : 0)) * pieces<C> + piece;
    bool on = place.on;
#pragma unroll
    for (int p = 0; p < C::parts; p++) swap_rows<C>(sum[p]);
    if constexpr (C::halves) {
      const bool second = C::chained && half() == 1;  // the peer's leaves come before this block's
      if (!second && !(kGroups && group == 1)) add_parts<C>(sum);
      if constexpr (kGroups) {
        if (on && group == 0) put<C>(place.tile, place.tile, sum[0]);
        consumers_sync();
        on = on && group == 1;
        if (on && !second) {
          add<C>(place.tile, place.tile, sum[0]);
          add_parts<C>(sum);
        }
      }
      if constexpr (C::chained) {
        // The first block's sums of all tiles go to the second, which finishes them and sends back what is not its own.
        const int at = first_received<C> + place.tile * pieces<C> + piece;
        if (on && !second) send<C>(at, at, place.tile, sum[0]);
        expect<C>(second ? C::stage_tiles() : C::owned(0));
        meanwhile();
        await_received<C>(use);
        if (on && second) {
          if constexpr (kGroups) {
            float before[C::columns / 2] = {};
            add<C>(at, place.tile, before);
            add<C>(place.tile, place.tile, before);
#pragma unroll
            for (int i = 0; i < C::columns / 2; i++) sum[0][i] += before[i];
          } else {
            add<C>(at, place.tile, sum[0]);
            add_parts<C>(sum);
          }
          if (mine) put<C>(at, place.tile, sum[0]);
          else send<C>(at, at, place.tile, sum[0]);
        }
      } else {
        const int received = first_received<C> + within;
        if (on && !mine) send<C>(kGroups ? place.tile : within, received, place.tile, sum[0]);
        if constexpr (keeps_own<C>) {
          if (on && mine) put<C>(place.tile, place.tile, sum[0]);
          // Orders what the slots hold before the copies of later exchanges, while the peer's sums are on their way.
          fence_async_shared();
        }
        expect<C>(C::owned(half()));
        meanwhile();
        await_received<C>(use);
        if (keeps_own<C>) return;
        if (on && mine) {
          add<C>(received, place.tile, sum[0]);
          put<C>(received, place.tile, sum[0]);
        }
      }
    } else {
      meanwhile();
#pragma unroll
      for (int p = 0; p < C::parts; p++)
        if (on) put<C>((kGroups ? group : p) * owned_slots<C> + within, place.tile, sum[p]);
    }
    fence_async_shared();  // the same
    consumers_sync();
  }
  /// Adds to `to` a part of rows 8 `chunk` .. + 7 of this block's rows for a column.
  template <class C> LP_DEVICE void add_rows8(int chunk, int column, float* to, int part = 0) const {
    const int within = chunk >> 1, tile = (C::halves ? C::first_owned(half()) : 0) + within, row = (chunk & 1) * 8;
    const u32 first = unknown(place<C>(row, column % C::columns, tile));
    const u32 received = slot<C>(first_received<C> + part * owned_slots<C> +
                                 (C::chained ? tile : within) * pieces<C> + column / C::columns),
              own = slot<C>(tile);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 at = (first ^ kSwizzled * (i & kOrders<C>)) + i * C::columns * 4;
      if constexpr (keeps_own<C>) to[i] += load_shared_f32(own + at) + load_shared_f32(received + at);
      else to[i] += load_shared_f32(received + at);
    }
  }

 private:
  /// The block's own sums stay beside what it receives, and who reads adds them: a barrier less. Without kLeaves there
  /// is no room.
  template <class C> static constexpr bool keeps_own = C::halves && C::split == Split::kLeaves && !C::chained;
  template <class C> LP_DEVICE u32 slot(int index) const { return shared + Shared::receive + index * tile_bytes<C>; }
  /// Byte of a tile's (row, column). Groups of 8 columns lie in an order of their own in each row: j groups on from the
  /// first it is this byte ^ kSwizzled * j, and i rows on from a multiple of four ^ kSwizzled * (i & kOrders), beside
  /// the rows' bytes.
  template <class C> LP_DEVICE static u32 place(int row, int column, int tile) {
    return (row * C::columns + (column ^ ((row ^ (row >> 3) ^ (2 * tile)) & kOrders<C>) << 3)) * 4;
  }
  static constexpr u32 kSwizzled = 32;
  template <class C> static constexpr int kOrders = C::columns < 32 ? C::columns / 8 - 1 : 3;
  static_assert(Shared::receive % (8 * kSwizzled) == 0, "tiles begin where the bits of groups are 0");
  /// Lanes t and t ^ 1 swap halves, so that a lane has 4 columns of one row: row g + 8 (t & 1), columns 8 j + 4 (t >>
  /// 1) ...
  template <class C> LP_DEVICE static void swap_rows(float* sum) {
    const bool odd = thread_index() & 1;
#pragma unroll
    for (int j = 0; j < C::columns / 8; j++) {
      float* v = sum + 4 * j;
      const float a = shuffle_xor(odd ? v[0] : v[2], 1), b = shuffle_xor(odd ? v[1] : v[3], 1);
      if (odd) v[0] = a, v[1] = b;
      else v[2] = a, v[3] = b;
    }
  }
  /// Of this lane's first four columns; those of group j are at this address ^ kSwizzled * j.
  template <class C> LP_DEVICE u32 address(int slot_index, int tile) const {
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
    return unknown(slot<C>(slot_index) + place<C>(g + 8 * (t & 1), 4 * (t >> 1), tile));
  }
  template <class C> LP_DEVICE void put(int slot_index, int tile, const float* sum) const {
    const u32 to = address<C>(slot_index, tile);
#pragma unroll
    for (int j = 0; j < C::columns / 8; j++) store_shared_16(to ^ kSwizzled * j, sum + 4 * j);
  }
  template <class C> LP_DEVICE void add(int slot_index, int tile, float* sum) const {
    const u32 from = address<C>(slot_index, tile);
#pragma unroll
    for (int j = 0; j < C::columns / 8; j++) {
      const Quad v = load_shared_16(from ^ kSwizzled * j);
      sum[4 * j] += __uint_as_float(v.x);
      sum[4 * j + 1] += __uint_as_float(v.y);
      sum[4 * j + 2] += __uint_as_float(v.z);
      sum[4 * j + 3] += __uint_as_float(v.w);
    }
  }
  /// The warp's parts one after the other.
  template <class C> LP_DEVICE static void add_parts(float (*sum)[C::columns / 2]) {
#pragma unroll
    for (int p = 1; p < C::parts; p++)
#pragma unroll
      for (int i = 0; i < C::columns / 2; i++) sum[0][i] += sum[p][i];
  }
  /// A tile's sums, from this block's slot `from` to the peer's slot `to`.
  template <class C> LP_DEVICE void send(int from, int to, int tile, const float* sum) const {
    const u32 peer = half() ^ 1;
    put<C>(from, tile, sum);
    fence_async_shared();
    __syncwarp();
    if (lane_index() == 0)
      bulk_send(map_shared(slot<C>(to), peer), slot<C>(from), tile_bytes<C>,
                map_shared(shared + Shared::receive_full, peer));
  }
  /// Every warp: so many tiles come from the peer.
  template <class C> LP_DEVICE void expect(int tiles) const {
    __syncwarp();
    if (lane_index() > 0) return;
    if (warp_index() == 0) mbarrier_expect(shared + Shared::receive_full, tiles * pieces<C> * tile_bytes<C>);
    else mbarrier_arrive(shared + Shared::receive_full);
  }
  /// Sums are received in the uses of products that are cut.
  template <class C> LP_DEVICE void await_received(u32 use) const {
    constexpr u32 LAYER = QkvCut::halves + OCut::halves + DownCut::halves;
    const u32 of = use % kLayerUses,
              phase = use / kLayerUses * LAYER + (of > 0 && QkvCut::halves) + (of > 1 && OCut::halves);
    wait_barrier(launch, shared + Shared::receive_full, phase & 1, kSitePartialsFull);
    __syncwarp();
  }
};

}  // namespace wide
