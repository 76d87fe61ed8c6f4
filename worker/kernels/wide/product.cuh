// Products of a wide pass: weights from the ring as A fragments in registers, activations from shared memory, on wgmma.
#pragma once

namespace wide {

/// Where the fragments of a warp's row tile lie in a stage, and its activations in a slot.
struct Place {
  int tile;                      // of the stage
  bool on;                       // idle warps multiply zeros
  u32 fragments, stride, input;  // bytes
};
template <class C> LP_DEVICE Place place_of() {
  const u32 warp = warp_index();
  const u32 group = warp >> 2, way = C::split == Split::kLeaves ? group : 0;
  const int tile = C::split == Split::kTiles ? warp : warp & 3;
  const bool on = tile < C::stage_tiles();
  const Unit unit = C::unit_of(on ? tile : 0);
  return Place{
      tile, on,
      ((way * C::tiles + unit.first) * C::steps + (on ? tile : 0) - unit.first) * kFragment + lane_index() * 16,
      (u32)unit.width * kFragment,
      C::split == Split::kLeaves    ? way * C::input_steps * kStepBytes
      : C::split == Split::kColumns ? group * (C::columns / 8 * 256)
                                    : 0};
}

/// Slots of activations whose products are under way together. A group of products takes 0.4 us, however few they are:
/// where weights are streamed sooner than that, of several ranks, it has two.
constexpr int kGroupSlots = kRanks > 1 ? 2 : 1;
/// k16 steps of a group, which stages and slots of so many have in common.
constexpr int group_steps(int stage, int slot) { return stage < kGroupSlots * slot ? stage : kGroupSlots * slot; }

/// One leaf of a warp's tile, k16 steps ascending from zero, in groups.
template <class C> LP_DEVICE void sum_leaf(Consumer& consumer, const Place& place, float* sum) {
  constexpr int N = C::columns, SLOT = C::input_steps;
  constexpr int STEPS = group_steps(C::steps, SLOT);
  constexpr int SLOTS = STEPS > SLOT ? STEPS / SLOT : 1;
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 0;
  u32 stage = 0, input[SLOTS] = {};
#pragma unroll 1
  for (int k = 0; k < C::P::leaf_steps; k += STEPS) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
      if (k % SLOT == 0) input[s] = consumer.wait_input(s) + place.input;
    if (k % C::steps == 0) stage = consumer.wait() + place.fragments;
    Quad a[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      a[i] = place.on ? load_shared_16(stage + (k % C::steps + i) * place.stride) : Quad{0, 0, 0, 0};
    u64 operand[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) operand[s] = wgmma_operand(input[s] + k % SLOT * kStepBytes);
    pin<N / 2>(sum);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; i++) wgmma<N>(sum, a[i], wgmma_operand(operand[i / SLOT], i % SLOT * kStepBytes));
    wgmma_finish();
    pin<N / 2>(sum);
    if ((k + STEPS) % C::steps == 0) consumer.release();
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
      if ((k + STEPS) % SLOT == 0) consumer.release_input();
  }
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

/// A unit of a block's own tiles with all of K, leaves ascending; of THIN units the tile of the warp. `width` tiles; of
/// fewer than two the other sum means nothing.
template <class C> LP_DEVICE void sum_unit(Consumer& consumer, int unit, int width, float (*sum)[C::columns / 2]) {
  constexpr int R = C::columns / 2, T = C::warp_tiles, SLOT = (int)kInputSteps,
                STEPS = C::thin ? group_steps(C::steps, SLOT) : 4, SLOTS = STEPS > SLOT ? STEPS / SLOT : 1;
  const u32 stride = width * kFragment, second = width == 2 ? kFragment : 0,
            fragments = unit * (C::steps * 2 * kFragment) + lane_index() * 16 + (C::thin && C::second() ? second : 0);
  const u32 columns = C::split_columns ? (warp_index() >> 2) * (C::columns / 8 * 256) : 0;
#pragma unroll
  for (int t = 0; t < T; t++)
#pragma unroll
    for (int i = 0; i < R; i++) sum[t][i] = 0;
#pragma unroll 1
  for (int n = 0; n < C::P::leaves; n++) {
    float leaf[T][R];
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
      for (int i = 0; i < R; i++) leaf[t][i] = 0;
    u32 stage = 0, input[SLOTS] = {};
#pragma unroll 1
    for (int k = 0; k < C::P::leaf_steps; k += STEPS) {
#pragma unroll
      for (int s = 0; s < SLOTS; s++)
        if (k % SLOT == 0) input[s] = consumer.wait_input(s) + columns;
      if (k % C::steps == 0) stage = consumer.wait() + fragments;
      Quad a[STEPS][T];
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const u32 from = stage + (k % C::steps + i) * stride;
#pragma unroll
        for (int t = 0; t < T; t++) a[i][t] = width > 0 ? load_shared_16(from + t * second) : Quad{0, 0, 0, 0};
      }
      u64 operand[SLOTS];
#pragma unroll
      for (int s = 0; s < SLOTS; s++) operand[s] = wgmma_operand(input[s] + k % SLOT * kStepBytes);
#pragma unroll
      for (int t = 0; t < T; t++) pin<R>(leaf[t]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int t = 0; t < T; t++)
          wgmma<C::columns>(leaf[t], a[i][t], wgmma_operand(operand[i / SLOT], i % SLOT * kStepBytes));
      wgmma_finish();
#pragma unroll
      for (int t = 0; t < T; t++) pin<R>(leaf[t]);
      if ((k + STEPS) % C::steps == 0) consumer.release();
#pragma unroll
      for (int s = 0; s < SLOTS; s++)
        if ((k + STEPS) % SLOT == 0) consumer.release_input();
    }
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int t = 0; t < T; t++) sum[t][i] += leaf[t][i];
  }
}

}  // namespace wide
