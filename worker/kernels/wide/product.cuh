// Products of a wide pass: weights from the ring as A fragments in registers, activations from shared memory, on wgmma.
#pragma once

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
  return Place{tile, on, ((way * C::tiles + unit.first) * C::steps + (on ? tile : 0) - unit.first) * kFragment + lane_index() * 16, (u32)unit.width * kFragment,
               C::split == Split::kLeaves ? way * C::input_steps * kStepBytes : C::split == Split::kColumns ? group * (C::columns / 8 * 256) : 0};
}

/// One leaf of a warp's tile, k16 steps ascending from zero, in groups that a stage and a slot have in common.
template <class C> LP_DEVICE void sum_leaf(Consumer& consumer, const Place& place, float* sum) {
  constexpr int N = C::columns, SHARED_STEPS = C::steps < C::input_steps ? C::steps : C::input_steps;
  constexpr int STEPS = C::leaves == kMaxLeaves ? 2 : SHARED_STEPS;  // the tree of 16 leaves leaves fewer registers
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 0;
  u32 stage = 0, input = 0;
#pragma unroll 1
  for (int k = 0; k < C::P::leaf_steps; k += STEPS) {
    if (k % C::input_steps == 0) input = consumer.wait_input() + place.input;
    if (k % C::steps == 0) stage = consumer.wait() + place.fragments;
    Quad a[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) a[i] = place.on ? load_shared_16(stage + (k % C::steps + i) * place.stride) : Quad{0, 0, 0, 0};
    const u64 operand = wgmma_operand(input + k % C::input_steps * kStepBytes);
    pin<N / 2>(sum);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; i++) wgmma<N>(sum, a[i], wgmma_operand(operand, i * kStepBytes));
    wgmma_finish();
    pin<N / 2>(sum);
    if ((k + STEPS) % C::steps == 0) consumer.release();
    if ((k + STEPS) % C::input_steps == 0) consumer.release_input();
  }
}
/// LEAVES leaves of a warp's tile, as a binary tree. Loops, because code that runs once a layer comes from far away.
template <class C, int LEAVES = C::leaves> LP_DEVICE void sum_leaves(Consumer& consumer, const Place& place, float* sum) {
  if constexpr (LEAVES == 1) {
    sum_leaf<C>(consumer, place, sum);
  } else {
#pragma unroll
    for (int i = 0; i < C::columns / 2; i++) sum[i] = 0;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      float part[C::columns / 2];
      sum_leaves<C, LEAVES / 2>(consumer, place, part);
#pragma unroll
      for (int i = 0; i < C::columns / 2; i++) sum[i] += part[i];
    }
  }
}

/// A unit of a block's own tiles with all of K, leaves ascending. `width` tiles; of fewer than two the other sum means nothing.
template <class C> LP_DEVICE void sum_unit(Consumer& consumer, int unit, int width, float (*sum)[C::columns / 2]) {
  constexpr int R = C::columns / 2, STEPS = 4;
  const u32 fragments = unit * (C::steps * 2 * kFragment) + lane_index() * 16, stride = width * kFragment, second = width == 2 ? kFragment : 0;
  const u32 columns = C::split_columns ? (warp_index() >> 2) * (C::columns / 8 * 256) : 0;
#pragma unroll
  for (int i = 0; i < R; i++) sum[0][i] = sum[1][i] = 0;
#pragma unroll 1
  for (int n = 0; n < C::P::leaves; n++) {
    float leaf[2][R];
#pragma unroll
    for (int i = 0; i < R; i++) leaf[0][i] = leaf[1][i] = 0;
    u32 stage = 0, input = 0;
#pragma unroll 1
    for (int k = 0; k < C::P::leaf_steps; k += STEPS) {
      if (k % kInputSteps == 0) input = consumer.wait_input() + columns;
      if (k % C::steps == 0) stage = consumer.wait() + fragments;
      Quad a[STEPS][2];
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const u32 from = stage + (k % C::steps + i) * stride;
        a[i][0] = width > 0 ? load_shared_16(from) : Quad{0, 0, 0, 0};
        a[i][1] = width > 0 ? load_shared_16(from + second) : Quad{0, 0, 0, 0};
      }
      const u64 operand = wgmma_operand(input + k % kInputSteps * kStepBytes);
      pin<R>(leaf[0]);
      pin<R>(leaf[1]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        wgmma<C::columns>(leaf[0], a[i][0], wgmma_operand(operand, i * kStepBytes));
        wgmma<C::columns>(leaf[1], a[i][1], wgmma_operand(operand, i * kStepBytes));
      }
      wgmma_finish();
      pin<R>(leaf[0]);
      pin<R>(leaf[1]);
      if ((k + STEPS) % C::steps == 0) consumer.release();
      if ((k + STEPS) % kInputSteps == 0) consumer.release_input();
    }
#pragma unroll
    for (int i = 0; i < R; i++) sum[0][i] += leaf[0][i], sum[1][i] += leaf[1][i];
  }
}
