// What becomes of a value between two products: one arithmetic for all who compute it.
#pragma once

/// An input of a layer's product, for its vector.
LP_DEVICE float raised(float v) { return kRaised != 1 ? v * kRaised : v; }
/// silu(gate) * up, for down's vector.
LP_DEVICE float silu(float gate, float up) {
  return raised(gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.44269504f)) * up);
}
/// Rope of row `row` of a packed tile, a dimension of a head; `other` is the one it is turned with, 8 rows away.
LP_DEVICE float turned(int row, float v, float other, float cosine, float sine) {
  return row < 8 ? fmaf(v, cosine, -(other * sine)) : fmaf(v, cosine, other * sine);
}
/// Rope of both.
LP_DEVICE void turn(float& low, float& high, float cosine, float sine) {
  const float x = low, y = high;
  low = turned(0, x, y, cosine, sine);
  high = turned(8, y, x, cosine, sine);
}
/// 1 / rms of N values with that sum of squares.
template <int N> LP_DEVICE float inverse_rms(float squares) {
  return rsqrt_approx(squares * (1.0f / N) + __uint_as_float(LP_EPS));
}

/// Sum of squares over a leaf of the hidden state, of whose row tile i `tile(i)` is the sum: a tree of eights, where
/// there are eights for one, else these in order.
template <class TILE> LP_DEVICE float leaf_squares(const TILE& tile) {
  constexpr int EIGHTS = (kHiddenSteps + 7) / 8;
  float eights[EIGHTS];
#pragma unroll
  for (int e = 0; e < EIGHTS; e++) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 8 * e + i < kHiddenSteps ? tile(8 * e + i) : 0;
    eights[e] = tree_sum<8>(v);
  }
  if constexpr ((EIGHTS & (EIGHTS - 1)) == 0) return tree_sum<EIGHTS>(eights);
  float sum = eights[0];
#pragma unroll
  for (int e = 1; e < EIGHTS; e++) sum += eights[e];
  return sum;
}

// Sums of squares over 16 rows by 32 tokens, which a warp holds as accumulators: sum[4 j + c] is of row g or, c over
// 1, g + 8, and token 8 j + 2 t + (c & 1). Of rows r, r ^ 1 are added first, then r ^ 2, r ^ 4 and r ^ 8.

/// Of the 2 HALF values of each lane half, added over lanes ^ MASK; then the same with the next mask, up to 16.
template <int HALF, int MASK> LP_DEVICE void halve(float* v) {
  const bool upper = lane_index() & MASK;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float mine = upper ? v[HALF + i] : v[i], other = upper ? v[i] : v[HALF + i];
    v[i] = mine + shuffle_xor(other, MASK);
  }
  if constexpr (MASK < 16) halve<HALF / 2, MASK * 2>(v);
}
/// The sum of token `token_of_square()`.
LP_DEVICE float sum_squares(const float* sum) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float x = sum[(i & ~3) + (i & 1) * 2 + (i >> 1 & 1)];
    v[i] = x * x;
  }
  halve<8, 4>(v);
  return v[0] + v[1];
}
LP_DEVICE u32 token_of_square() {
  const u32 lane = lane_index();
  return (lane >> 2 & 1) * 16 + (lane >> 3 & 1) * 8 + (lane & 3) * 2 + (lane >> 4);
}
