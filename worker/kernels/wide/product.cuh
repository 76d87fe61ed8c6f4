// Products of a wide pass: weights from the ring as A fragments in registers, activations from shared memory, on wgmma.
#pragma once

namespace wide {

/// Where the runs of a warp's row tile lie in a stage, and its activations in a slot.
struct Place {
  int tile;                 // of the stage
  bool on;                  // idle warps multiply zeros
  u32 runs, stride, input;  // bytes
};
template <class C> LP_DEVICE Place place_of() {
  const u32 warp = warp_index();
  const u32 group = warp >> 2, way = C::split == Split::kLeaves ? group : 0;
  const int tile = C::split == Split::kTiles ? warp : warp & 3;
  const bool on = tile < C::stage_tiles();
  const Unit unit = C::unit_of(on ? tile : 0);
  return Place{
      tile, on,
      ((way * C::tiles + unit.first) * C::runs + (on ? tile : 0) - unit.first) * C::P::run,
      (u32)unit.width * C::P::run,
      C::split == Split::kLeaves    ? way * C::input_steps * kStepBytes
      : C::split == Split::kColumns ? group * (C::columns / 8 * 256)
                                    : 0};
}

/// Where a group of products finds its operands: the stage, and the slots that it begins or is within.
template <int SLOTS> struct Operands {
  u32 stage = 0, input[SLOTS] = {};
};
/// Slots that a group of STEPS touches.
template <class C, int STEPS = C::group_steps>
constexpr int kSlots = STEPS > C::input_steps ? (STEPS + C::input_steps - 1) / C::input_steps : 1;

/// A group: k16 steps k to k + STEPS of a span, for TILES tiles whose runs lie in the stage where `run_at(run, tile)`
/// says, if they are `on`. It begins with a slot or lies within one; `input`: byte of the warp's columns in it. `sum`:
/// of each tile, or of each leaf of a bundle, which is one group.
template <class C, int STEPS, int TILES, class RUN_AT>
LP_DEVICE void multiply(Consumer& consumer, Operands<kSlots<C>>& at, int k, bool on, u32 input, const RUN_AT& run_at,
                        float (*sum)[C::columns / 2]) {
  using P = typename C::P;
  constexpr int N = C::columns, SLOT = C::input_steps, SLOTS = kSlots<C, STEPS>, RUN = P::run_steps,
                SUMS = TILES * C::bundle;
  static_assert(STEPS % RUN == 0 && C::steps % RUN == 0, "whole runs");
  static_assert(C::bundle == 1 || (TILES == 1 && STEPS == C::span_steps), "a bundle is a group of a tile");
  // Where all groups begin with a stage, or a slot, no branch says so, which would cost the operands their uniform
  // registers.
  constexpr bool kStageEach = C::group_steps % C::steps == 0, kSlotEach = C::group_steps % SLOT == 0;
  if (kStageEach || k % C::steps == 0) at.stage = consumer.wait();
  // Others become operands one after the other, while products run.
  constexpr bool kStoredAsUsed = P::format == Format::kBf16;
  StoredRun<P> a[STEPS / RUN][TILES];
  RunScales<P::format> scales[STEPS / RUN][TILES];
#pragma unroll
  for (int r = 0; r < STEPS / RUN; r++)
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const u32 run = at.stage + run_at((kStageEach ? 0 : k % C::steps / RUN) + r, t);
      scales[r][t] = on ? RunScales<P::format>::load(run) : RunScales<P::format>{};
      a[r][t] = on ? StoredRun<P>::load(run) : StoredRun<P>{};
    }
#pragma unroll
  for (int s = 0; s < SLOTS; s++)  // while fragments are loaded
    if (kSlotEach || k % SLOT == 0) at.input[s] = consumer.wait_input(s) + input;
  u64 operand[SLOTS];  // of one lane, or the compiler takes it for a lane's own and moves it before every product
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
    operand[s] = wgmma_operand(shuffle(at.input[s], 0) + (kSlotEach ? 0 : k % SLOT * kStepBytes));
#pragma unroll
  for (int i = 0; i < SUMS; i++) pin<N / 2>(sum[i]);
  if (kStoredAsUsed) wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    Quad of[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) of[t] = a[i / RUN][t].operand(i % RUN, scales[i / RUN][t]);
    if (!kStoredAsUsed) wgmma_fence();
#pragma unroll
    for (int t = 0; t < TILES; t++)
      wgmma<N>(sum[C::bundle > 1 ? i / P::leaf_steps : t], of[t],
               wgmma_operand(operand[i / SLOT], i % SLOT * kStepBytes));
  }
  const bool ends = k + STEPS == C::span_steps;
  wgmma_commit();
  if (kStageEach || (k + STEPS) % C::steps == 0 || ends) consumer.release();  // its fragments are operands
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < SUMS; i++) pin<N / 2>(sum[i]);
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
    if (kSlotEach || (k + STEPS) % SLOT == 0 || ends) consumer.release_input();
}
/// One span of TILES tiles, k16 steps of each leaf ascending from zero, in groups, the last one perhaps of fewer steps.
template <class C, int TILES, class RUN_AT>
LP_DEVICE void multiply_span(Consumer& consumer, bool on, u32 input, const RUN_AT& run_at,
                             float (*sum)[C::columns / 2]) {
  constexpr int STEPS = C::group_steps, SPAN = C::span_steps, WHOLE = SPAN / STEPS * STEPS;
#pragma unroll
  for (int t = 0; t < TILES * C::bundle; t++)
#pragma unroll
    for (int i = 0; i < C::columns / 2; i++) sum[t][i] = 0;
  Operands<kSlots<C>> at;
#pragma unroll 1
  for (int k = 0; k < WHOLE; k += STEPS) multiply<C, STEPS, TILES>(consumer, at, k, on, input, run_at, sum);
  if constexpr (WHOLE < SPAN) multiply<C, SPAN - WHOLE, TILES>(consumer, at, WHOLE, on, input, run_at, sum);
}

/// One leaf of a warp's tile.
template <class C> LP_DEVICE void sum_leaf(Consumer& consumer, const Place& place, float* sum) {
  const auto run_at = [&](int run, int) { return place.runs + run * place.stride; };
  multiply_span<C, 1>(consumer, place.on, place.input, run_at, reinterpret_cast<float(*)[C::columns / 2]>(sum));
}
/// LEAVES leaves of a warp's tile, whole groups or less than one, in the order of leaf_sum. Loops, because code that
/// runs once a layer comes from far away.
template <class C, int LEAVES> LP_DEVICE void sum_groups(Consumer& consumer, const Place& place, float* sum) {
  constexpr int RUNS = LEAVES > C::P::group ? 2 : LEAVES;
  if constexpr (RUNS == 1) {
    sum_leaf<C>(consumer, place, sum);
  } else {
#pragma unroll
    for (int i = 0; i < C::columns / 2; i++) sum[i] = 0;
#pragma unroll 1
    for (int n = 0; n < RUNS; n++) {
      float run[C::columns / 2];
      sum_groups<C, LEAVES / RUNS>(consumer, place, run);
#pragma unroll
      for (int i = 0; i < C::columns / 2; i++) sum[i] += run[i];
    }
  }
}
/// A warp's leaves of its tile, as C::parts sums.
template <class C> LP_DEVICE void sum_leaves(Consumer& consumer, const Place& place, float (*sum)[C::columns / 2]) {
  if constexpr (C::parts == 1) {
    sum_groups<C, C::leaves>(consumer, place, sum[0]);
  } else {
    static_assert(C::parts == 2, "the first moves over for the second");
#pragma unroll
    for (int i = 0; i < C::columns / 2; i++) sum[1][i] = 0;
#pragma unroll 1
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int i = 0; i < C::columns / 2; i++) sum[0][i] = sum[1][i];
      sum_leaf<C>(consumer, place, sum[1]);
    }
  }
}

/// Leaves of both tiles of a unit whose weights have few bits, one after the other: a step is unpacked while products
/// of the step before run, and the next group's fragments are loaded while the last products of this one do, across
/// leaves. But before the next group begins these are over: for products that run on around a loop the compiler keeps
/// their registers everywhere. `on`, input, run_at: as of multiply.
template <class C, class RUN_AT> struct Ahead {
  using P = typename C::P;
  static constexpr int N = C::columns, SLOT = C::input_steps, RUN = P::run_steps, STEPS = C::group_steps,
                       LEAF = P::leaf_steps, WHOLE = LEAF / STEPS * STEPS, REST = LEAF - WHOLE, TILES = 2;
  static_assert(C::steps % STEPS == 0 && SLOT % STEPS == 0 && STEPS % RUN == 0 && REST % RUN == 0, "whole runs");

  Consumer& consumer;
  const bool on;
  const u32 input;
  const RUN_AT& run_at;
  int leaves;  // that are left
  const u32 lane = lane_index();
  bool fetched = false;
  u32 stage = 0, slot = 0;  // addresses
  u64 operand = 0;          // of the group's first step
  StoredRun<P> stored[STEPS / RUN][TILES];
  RunScales<P::format> scales[STEPS / RUN][TILES];
  Quad of[2][TILES];        // operands of two steps

  /// One leaf from zero. `sum` may be anything, but not undefined.
  LP_DEVICE void leaf(float (*sum)[N / 2]) {
    leaves--;
#pragma unroll
    for (int t = 0; t < TILES; t++) pin<N / 2>(sum[t]);
    // The first leaf begins with a group in front of it, which fetches the first one: its products are of anything, and
    // the chain does not add to them. So where groups divide the leaf there is one copy of the code that fetches.
    constexpr int WITHIN = REST > 0 ? WHOLE - STEPS : WHOLE;
#pragma unroll 1
    for (int k = fetched ? 0 : -STEPS; k < WITHIN; k += STEPS)
      group<STEPS, STEPS>(k, k + STEPS < LEAF ? k + STEPS : 0, k + STEPS < LEAF || leaves > 0, sum);
    if constexpr (REST > 0) {
      group<STEPS, REST>(WHOLE - STEPS, WHOLE, true, sum);
      group<REST, STEPS>(WHOLE, 0, leaves > 0, sum);
    }
    fetched = true;
#pragma unroll
    for (int t = 0; t < TILES; t++) pin<N / 2>(sum[t]);
  }

 private:
  /// The group at k, whose first step is unpacked. Then the one of NEXT steps at `next`, if there is one (`more`), is
  /// fetched.
  template <int GROUP, int NEXT> LP_DEVICE void group(int k, int next, bool more, float (*sum)[N / 2]) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      wgmma_fence();
#pragma unroll
      for (int t = 0; t < TILES; t++)
        wgmma<N>(sum[t], of[i % 2][t], wgmma_operand(operand, i * kStepBytes), i == 0 ? k : 1);
      wgmma_commit();
      if (i + 1 < GROUP) {
        if (i > 0) wgmma_wait<1>();
        unpack(i + 1);
      }
    }
    const bool ends = k + GROUP == LEAF, slot_ends = k >= 0 && ((k + GROUP) % SLOT == 0 || ends);
    if (k >= 0 && ((k + GROUP) % C::steps == 0 || ends)) consumer.release();  // its fragments are operands
    if (more) fetch<NEXT>(next, slot_ends);
    wgmma_wait<(GROUP - 1) % 2>();  // of[0] has been used
    unpack(0);
    wgmma_wait<0>();
    if (slot_ends) consumer.release_input();
  }
  /// Fragments of the group at k, and where its activations lie. `before`: slots that are not given back yet.
  template <int GROUP> LP_DEVICE void fetch(int k, u32 before) {
    if (k % C::steps == 0) stage = consumer.wait();
#pragma unroll
    for (int r = 0; r < GROUP / RUN; r++)
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const u32 run = stage + run_at(k % C::steps / RUN + r, t);
        scales[r][t] = on ? RunScales<P::format>::load(run, lane) : RunScales<P::format>{};
        stored[r][t] = on ? StoredRun<P>::load(run, lane) : StoredRun<P>{};
      }
    if (k % SLOT == 0) slot = consumer.wait_input(before) + input;
    operand = wgmma_operand(shuffle(slot + k % SLOT * kStepBytes, 0));  // of one lane: see multiply
  }
  LP_DEVICE void unpack(int step) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
      of[step % 2][t] = stored[step / RUN][t].operand(step % RUN, scales[step / RUN][t]);
  }
};

/// A unit of a block's own tiles with all of K, leaves ascending; of SINGLE ones the tile of the warp. `width` tiles;
/// of fewer than two the other sum means nothing.
template <class C> LP_DEVICE void sum_unit(Consumer& consumer, int unit, int width, float (*sum)[C::columns / 2]) {
  using P = typename C::P;
  constexpr int R = C::columns / 2, T = C::warp_tiles;
  const u32 stride = width * P::run, second = width == 2 ? P::run : 0,
            runs = unit * (C::runs * 2 * P::run) + (C::single && C::second() ? second : 0);
  const u32 columns = C::split_columns ? (warp_index() >> 2) * (C::columns / 8 * 256) : 0;
  const auto run_at = [&](int run, int t) { return runs + run * stride + t * second; };
#pragma unroll
  for (int t = 0; t < T; t++)
#pragma unroll
    for (int i = 0; i < R; i++) sum[t][i] = 0;
  const auto add = [&](const float (*leaf)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int t = 0; t < T; t++) sum[t][i] += leaf[t][i];
  };
  if constexpr (C::ahead) {
    Ahead<C, decltype(run_at)> products{consumer, width > 0, columns, run_at, P::leaves};
    float leaf[T][R] = {};
#pragma unroll 1
    for (int n = 0; n < P::leaves; n++) {
      products.leaf(leaf);
      add(leaf);
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < P::leaves / C::bundle; n++) {
      float leaf[C::bundle * T][R];
      multiply_span<C, T>(consumer, width > 0, columns, run_at, leaf);
#pragma unroll
      for (int b = 0; b < C::bundle; b++) add(leaf + b);
    }
  }
}

}  // namespace wide
