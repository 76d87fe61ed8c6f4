// The arithmetic that attention has in every kernel.
//
// A page's weights are 2^(score - M), M its largest score rounded up to an integer, so that to change the reference of
// a sum or an output from M to N is to multiply by a power of two, which rounds nothing. So the bits depend only on the
// order of additions, never on who computes what, nor on which maxima are known by then. The order:
//   page    its output is one chain of products over its four leaves of 16 positions, ascending, from zero. The sum of
//           weights: of a leaf w[p] + w[p + 8], then as a tree over p; leaves ascending.
//   share   of a span, 16 pages counted from position 0: its pages of the same index modulo 4, ascending from zero
//   span    its four shares, ascending; of a window's first one those pages that the row sees
//   row     its spans, ascending from zero; only then it divides
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

/// Zeroes V of those of a group's positions that are not seen(position of the group), which is alike in all lanes: it
/// may hold anything, NaN too, whose products with weights of zero are NaN. A whole warp calls it.
template <class SEEN> LP_DEVICE void clear_unseen(u32 group, const SEEN& seen) {
  u32 keep[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) keep[i] = (seen(2 * i) ? 0xffffu : 0) | (seen(2 * i + 1) ? 0xffff0000u : 0);
  if ((keep[0] & keep[1] & keep[2] & keep[3]) == ~0u) return;
#pragma unroll
  for (u32 i = 0; i < kHeadDim / 32; i++) {
    const u32 at = group + kGroupV + (i * 32 + lane_index()) * 16;
    const Quad v = load_shared_16(at);
    const float kept[4] = {__uint_as_float(v.x & keep[0]), __uint_as_float(v.y & keep[1]),
                           __uint_as_float(v.z & keep[2]), __uint_as_float(v.w & keep[3])};
    store_shared_16(at, kept);
  }
  __syncwarp();
}
/// The same of a page of which positions `begin` to `end` - 1 are seen.
LP_DEVICE void clear_outside(u32 page, u32 begin, u32 end) {
#pragma unroll 1
  for (u32 at = 0; at < kPage; at += 8) {
    const u32 group = page + k_byte(at, 0);
    if (at >= end || at + 8 <= begin) {
      constexpr float kZeros[4] = {};
#pragma unroll
      for (u32 i = 0; i < kHeadDim / 32; i++) store_shared_16(group + kGroupV + (i * 32 + lane_index()) * 16, kZeros);
    } else if (at < begin || at + 8 > end) {
      clear_unseen(group, [&](u32 i) { return at + i >= begin && at + i < end; });
    }
  }
  __syncwarp();
}
