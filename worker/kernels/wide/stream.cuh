// What flows into a block: weights and KV pages through one ring of stages, activations through another. A stage
// belongs to all eight consumer warps: each waits for every stage in order and releases it, but for pages
// (attention.cuh), and both stream warps take part in every one, so parities cannot alias.
#pragma once

namespace wide {

/// While the ring is full, during an exchange, weights of the same product go ahead into the second-level cache: at
/// most so many stages, one in so many clocks (below memory's rate, because what flows then delays the exchange). Only
/// where memory is what most of a layer waits for: with so many bytes of weights a block; of few bits, which take the
/// consumers longer, more.
constexpr u64 kLargeLayer = GateUp::format == Format::kBf16 ? 5 << 18 : 8 << 18;
constexpr u32 kAhead = kLayerBytes / kBlocks > kLargeLayer ? 4 : 0, kAheadClocks = 2000;

/// Barriers of both rings; one thread calls it, before a fence of what it has written.
LP_DEVICE void init_rings(u32 shared) {
  for (u32 i = 0; i < kStages; i++) {
    mbarrier_init(shared + Shared::stage_full + 8 * i, 2);
    mbarrier_init(shared + Shared::stage_empty + 8 * i, kConsumers);
  }
  for (u32 i = 0; i < kInputSlots; i++) {
    mbarrier_init(shared + Shared::input_full + 8 * i, 1);
    mbarrier_init(shared + Shared::input_empty + 8 * i, kConsumers);
  }
}

/// A lane's part of stages: of each leaf's runs `runs` a stage, of the last one perhaps fewer. Of a block's own tiles a
/// leaf is a span here. If it is `on`, it copies its tiles of each, `run_bytes`, to offset `to`; they lie behind each
/// other in memory.
struct Part {
  bool on;
  const u8* from;
  u32 to, run_bytes, runs, leaf_runs, leaves;
};

/// One of the two warps that stream weights and pages; both make the same calls, and each issues the copies of every
/// other lane (a bulk copy costs a warp about 50 clocks a lane).
struct Producer {
  const Launch& launch;
  u32 shared;
  u64 policy;
  // Stages. ahead: how many of those that are issued next are in the second-level cache.
  u32 second, issued = 0, ahead = 0;

  LP_DEVICE Producer(const Launch& launch, u32 shared, u32 warp)
      : launch(launch), shared(shared), policy(policy_evict_first()), second(warp == kStream1) {}
  LP_DEVICE static u32 lane() { return lane_index(); }
  /// Whether what a lane copies, if it is `on`, is this warp's to copy.
  LP_DEVICE bool takes(bool on) const { return on && (lane() & 1) == second; }
  /// Of the next stage.
  LP_DEVICE u32 slot() const { return issued % kStages; }
  /// Fills the next stage: each lane that is `on` copies `bytes` to offset `to` of it, which for what comes with a page
  /// lies behind the ring. `all`: bytes that this warp's lanes copy together. `following`: stages that lie behind it in
  /// memory.
  LP_DEVICE void issue(bool on, const u8* from, u32 to, u32 bytes, u32 all, u32 following = 0) {
    const u32 slot = this->slot(), full = shared + Shared::stage_full + 8 * slot, before = issued - kInFlight;
    // Lane 0 waits until the slot is released, which orders the consumers' reads before the copies that overwrite them
    // (block), lane 1 until the stage has landed that bounds what is in flight: one request for both, because each
    // queues behind all that the consumers load.
    bool waits = lane() == 0 || (lane() == 1 && issued >= kInFlight);
    const u32 barrier = lane() ? shared + Shared::stage_full + 8 * (before % kStages)
                               : shared + Shared::stage_empty + 8 * slot,
              phase = (lane() ? before / kStages : issued / kStages ^ 1) & 1;
    const long long begun = clock64();
    long long hastened = 0;
    while (const u32 waiting = __ballot_sync(kAllLanes, waits = waits && !mbarrier_test_wait(barrier, phase))) {
      const long long now = clock64();
      if ((int)lane() == __ffs(waiting) - 1 && now - begun > kWithinWaitLimit)
        wait_failed(launch, lane() ? kSiteLanded : kSiteSlotEmpty, phase, barrier);
      if constexpr (kAhead > 0) {
        const bool full = waiting & 1;
        if (full && ahead < following && ahead < kAhead && any_lane(now - hastened > kAheadClocks) && all_landed()) {
          hastened = now;
          ahead++;
          if (takes(on)) bulk_prefetch_l2(from + (u64)ahead * bytes, bytes, policy);
        }
      }
    }
    ahead -= ahead > 0;
    if (lane() == 0) mbarrier_expect(full, all);
    __syncwarp();
    if (takes(on)) bulk_load(shared + Shared::ring + slot * kStageBytes + to, from, bytes, full, policy);
    issued++;
  }
  LP_DEVICE void stream(const Part& part) {
    const u8* from = part.from;
    const u32 all = __reduce_add_sync(kAllLanes, takes(part.on) ? part.run_bytes : 0);
    u32 left = part.leaves * part.leaf_runs;
#pragma unroll 1
    for (u32 leaf = 0; leaf < part.leaves; leaf++)
#pragma unroll 1
      for (u32 k = 0; k < part.leaf_runs; k += part.runs) {
        const u32 runs = part.leaf_runs - k < part.runs ? part.leaf_runs - k : part.runs,
                  bytes = runs * part.run_bytes;
        left -= runs;
        issue(part.on, from, part.to, bytes, runs * all, left / part.runs);
        from += bytes;
      }
  }
  /// The pair's tiles of a product, this block's leaves: [way][tile][run] a stage, tiles of a unit interleaved.
  template <class C> LP_DEVICE static Part part(const u8* product) {
    using P = typename C::P;
    if (!C::on()) return Part{};
    const int way = lane() / C::units, leaf = C::first_leaf() + way * C::leaves;
    const Unit unit = C::unit(lane() % C::units);
    const u8* from =
        product + ((u64)(C::first_tile() + unit.first) * P::runs + leaf * P::leaf_runs * unit.width) * P::run;
    return Part{way < C::ways && unit.width, from, (u32)((way * C::tiles + unit.first) * C::runs * P::run),
                (u32)(unit.width * P::run), (u32)C::runs, (u32)P::leaf_runs, (u32)C::leaves};
  }
  /// A pass over the block's own tiles, all of K: [unit][run] a stage.
  template <class C> LP_DEVICE static Part own_part(const u8* product, int pass) {
    using P = typename C::P;
    const int width = C::width(pass, lane());
    const u8* from =
        product + (u64)(C::first_tile() + 2 * (pass * C::pass_units + (int)lane())) * P::runs * P::run;
    return Part{width > 0, from, lane() * C::runs * 2 * P::run, (u32)(width * P::run), (u32)C::runs,
                (u32)(C::bundle * P::leaf_runs), (u32)(P::leaves / C::bundle)};
  }

 private:
  /// Whether nothing is in flight. Asked while the ring is full, so that the last stage's barrier is in its phase or in
  /// the one after.
  LP_DEVICE bool all_landed() const {
    const u32 last = issued - 1;
    return any_lane(mbarrier_test_wait(shared + Shared::stage_full + 8 * (last % kStages), last / kStages & 1));
  }
};

/// The warp that fetches activations as soon as who writes them has published them. All blocks read them, for as long
/// as weights stream past: they are to stay in the second-level cache.
struct Input {
  const Launch& launch;
  u32 shared, filled = 0, ready = 0;  // filled: slots

  LP_DEVICE Input(const Launch& launch, u32 shared) : launch(launch), shared(shared) {}
  LP_DEVICE static u32 lane() { return lane_index(); }
  /// Input of the pair's tiles of a product: this block's leaves. count: of counters, one a leaf, or one for all.
  template <class C> LP_DEVICE void stream(u64 vector, u64 counters, u32 count, u32 target, u32 site) {
    constexpr int LEAF = C::P::leaf_steps;
    if (!C::on()) return;
    ready = 0;
#pragma unroll 1
    for (int n = 0; n < C::leaves; n++) {
      const int leaf = C::first_leaf() + n;
      for (int way = 0; way < C::ways; way++)
        await(counters, count, (leaf + way * C::leaves) * count / C::P::leaves, target, site);
      copy_span<C, C::ways>(vector + (u64)((leaf + (int)lane() % C::ways * C::leaves) * LEAF) * kStepBytes);
    }
  }
  /// Input of the block's own tiles: all of it, once a pass.
  template <class C> LP_DEVICE void stream_own(u64 vector, u64 counters, u32 target, u32 site) {
    using P = typename C::P;
    ready = 0;
    for (int pass = 0; pass < C::passes(); pass++)
#pragma unroll 1
      for (int leaf = 0; leaf < P::leaves; leaf += C::bundle) {
        for (int of = 0; of < C::bundle; of++) await(counters, P::leaves, leaf + of, target, site);
        copy_span<C, 1>(vector + (u64)(leaf * P::leaf_steps) * kStepBytes);
      }
  }

 private:
  /// Waits for counter `index`; all are looked at together. Orders what its writers published before the copies that
  /// follow (grid, generic before async).
  LP_DEVICE void await(u64 counters, u32 count, u32 index, u32 target, u32 site) {
    if (ready >> index & 1) return;
    const long long begun = clock64();
    while (true) {
      u32 seen = target;
      if (lane() < count) seen = load_acquire_u32((const u32*)(launch.words + counters + lane() * Words::counter));
      ready = __ballot_sync(kAllLanes, kAblateWaits || (int)(seen - target) >= 0);
      if (ready >> index & 1) break;
      if (clock64() - begun > kBlocksWaitLimit && lane() == index) wait_failed(launch, site, target, seen);
    }
    fence_async_global();
    __syncwarp();
  }
  /// Fills the next slots with a span of each way, which lies where a lane of that way says, `from` bytes into the
  /// words. A lane has a way of a slot, so that all slots that are empty are filled at a time; the last one perhaps in
  /// part. (A way may see a slot empty before the other does: its bytes may land before they are expected.)
  template <class C, u32 WAYS> LP_DEVICE void copy_span(u64 from) {
    constexpr int SPAN = C::span_steps, STEPS = C::input_steps, PARTS = (SPAN + STEPS - 1) / STEPS;
    static_assert((int)WAYS * STEPS <= (int)kInputSteps, "a slot has room for a part of each way");
    const int place = lane() / WAYS;
    const u32 way = lane() % WAYS;
#pragma unroll 1
    for (int first = 0; first < PARTS; first += kInputSlots) {
      const int part = first + place, left = SPAN - part * STEPS;
      const u32 number = filled + place, slot = number % kInputSlots, phase = number / kInputSlots & 1 ^ 1,
                full = shared + Shared::input_full + 8 * slot, empty = shared + Shared::input_empty + 8 * slot,
                bytes = (left < STEPS ? left : STEPS) * kStepBytes;
      bool awaited = place < (int)kInputSlots && part < PARTS;
      for (const long long begun = clock64(); any_lane(awaited);) {
        const bool fills = awaited && mbarrier_test_wait(empty, phase);
        if (fills && way == 0) mbarrier_expect(full, WAYS * bytes);
        __syncwarp();
        if (fills)
          bulk_load(shared + Shared::input + slot * (kInputSteps * kStepBytes) + way * (STEPS * kStepBytes),
                    launch.words + from + part * (STEPS * (int)kStepBytes), bytes, full, policy_evict_last());
        awaited = awaited && !fills;
        if (awaited && clock64() - begun > kWithinWaitLimit) wait_failed(launch, kSiteInputEmpty, phase, empty);
      }
      filled += PARTS - first < (int)kInputSlots ? PARTS - first : kInputSlots;
    }
  }
};

/// A consumer warp's place in both rings.
struct Consumer {
  const Launch& launch;
  u32 shared, stages = 0, inputs = 0;  // given back

  LP_DEVICE u32 slot() const { return stages % kStages; }
  LP_DEVICE Consumer(const Launch& launch, u32 shared) : launch(launch), shared(shared) {}
  /// Waits for the next stage; its address. Orders the copies before the reads (block).
  LP_DEVICE u32 wait() {
    wait_barrier(launch, shared + Shared::stage_full + 8 * slot(), stages / kStages & 1, kSiteFull);
    __syncwarp();
    return shared + Shared::ring + slot() * kStageBytes;
  }
  /// Gives the stage back and moves on. All lanes must have used (not only requested) what they read: an arrive
  /// overtakes loads of its own warp that are still queued. `never` is false, but the compiler cannot know if it is
  /// computed from every result. `warps`: for how many consumer warps; the others skip it.
  LP_DEVICE void release(bool never = false, u32 warps = 1) {
    __syncwarp();
    if (elected())
      mbarrier_arrive(shared + Shared::stage_empty + 8 * slot() + (never ? 8192 : 0), warps);
    stages++;
  }
  /// Passes over stages that other warps give back for this one. It must not wait for the next before they have landed.
  LP_DEVICE void skip(u32 others) { stages += others; }
  /// The same for the slots of activations; `ahead`: of those that are not given back yet.
  LP_DEVICE u32 wait_input(u32 ahead = 0) {
    const u32 number = inputs + ahead, slot = number % kInputSlots;
    wait_barrier(launch, shared + Shared::input_full + 8 * slot, number / kInputSlots & 1, kSiteInputFull);
    __syncwarp();
    return shared + Shared::input + slot * (kInputSteps * kStepBytes);
  }
  LP_DEVICE void release_input() {
    __syncwarp();
    if (elected()) mbarrier_arrive(shared + Shared::input_empty + 8 * (inputs % kInputSlots));
    inputs++;
  }
};

}  // namespace wide
