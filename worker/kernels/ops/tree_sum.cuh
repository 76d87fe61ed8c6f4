// Sums of fixed order. Plain adds, so no bit depends on who adds.
#pragma once

struct Plus {
  LP_DEVICE float operator()(float a, float b) const { return a + b; }
};

/// Sum of N values in the one order of all kernels: GROUP neighbours make a group, which is added ascending,
/// ((v0 + v1) + v2) + v3; the groups are added as a binary tree, (g0 + g1) + (g2 + g3). N and GROUP are powers of two;
/// less than a group is ascending. `add`: instead of +.
template <int N, int GROUP, class ADD = Plus> LP_DEVICE float leaf_sum(const float* v, const ADD& add = {}) {
  if constexpr (N > GROUP) {
    return add(leaf_sum<N / 2, GROUP>(v, add), leaf_sum<N / 2, GROUP>(v + N / 2, add));
  } else {
    float sum = v[0];
#pragma unroll
    for (int i = 1; i < N; i++) sum = add(sum, v[i]);
    return sum;
  }
}
/// Sum of N values, a power of two, as a binary tree.
template <int N> LP_DEVICE float tree_sum(const float* v) { return leaf_sum<N, 1>(v); }
