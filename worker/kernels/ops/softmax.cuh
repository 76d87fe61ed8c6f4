// The arithmetic that attention has in every kernel.
//
// A leaf's weights are 2^(score - M), M the largest score rounded up to an integer, so that to change the reference of
// a sum or an output from M to N is to multiply by a power of two, which rounds nothing. So the bits depend only on the
// order of additions, never on who computes what, nor on which maxima are known by then. The order: a page adds its
// leaves from zero; a span of 16 pages, counted from the first one that the row sees, adds pages of the same index
// modulo 4 from zero, then these four shares as a tree; a row adds its spans from zero, and only then divides.
#pragma once

constexpr double square_root(double x) {
  double r = x;
  for (int i = 0; i < 40; i++) r = 0.5 * (r + x / r);
  return r;
}
constexpr float kScoreScale = (float)(1.4426950408889634 / square_root(kHeadWidth));  // scores in powers of two
constexpr u32 kSpanPages = 16, kSpanShares = 4;

/// 2^(from - to), integers: what takes a value from one reference to a larger one. Zero below 2^-126, where no addition
/// can tell, and from minus infinity, the reference of nothing.
LP_DEVICE float rescale(float from, float to) {
  constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: the low bits of a float are its integer part
  return __uint_as_float(__float_as_uint(fmaxf(from - to, -127.0f) + (kInteger + 127.0f)) << 23);
}
