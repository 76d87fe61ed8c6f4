#pragma once

/// Sum of N values, a power of two, as a binary tree.
template <int N> LP_DEVICE float tree_sum(const float* v) {
  if constexpr (N == 1) return v[0];
  else return tree_sum<N / 2>(v) + tree_sum<N / 2>(v + N / 2);
}
