// Greedy choice of a token.
#pragma once

constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xff800000u);

/// The largest logit, ties to the lowest id; NaN counts as minus infinity.
struct Best {
  float value = kMinusInfinity;
  u32 id = ~0u;
  LP_DEVICE void offer(float v, u32 i) {
    v = v == v ? v : kMinusInfinity;
    if (v > value || (v == value && i < id)) value = v, id = i;
  }
  /// With the lane at distance d.
  LP_DEVICE void over(int d) {
    const float v = shuffle_xor(value, d);
    const u32 i = shuffle_xor(id, d);
    offer(v, i);
  }
  LP_DEVICE void over_lanes() {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) over(d);
  }
};
