// Gumbel noise that is a function of seed, position and token id alone; bits as worker/src/sampling/noise.rs:
// Philox4x32-10 (Salmon et al., SC 2011), key = seed, counter = (block, position, 0, 0); block 16 g + b of the g-th 64
// ids holds the ids at b, b + 16, b + 32 and b + 48.
#pragma once

namespace sampling {

struct Noise { u32 seed_lo, seed_hi, position; };
struct Bits4 { u32 x, y, z, w; };

// Bits of the ids group * 64 + within, + 16, + 32, + 48, for block = group * 16 + within.
LP_DEVICE Bits4 noise_bits(const Noise& noise, u32 block) {
  u32 c0 = block, c1 = noise.position, c2 = 0, c3 = 0, k0 = noise.seed_lo, k1 = noise.seed_hi;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u32 hi0 = mul_hi(c0, 0xd2511f53u), lo0 = c0 * 0xd2511f53u, hi1 = mul_hi(c2, 0xcd9e8d57u),
              lo1 = c2 * 0xcd9e8d57u;
    c0 = hi1 ^ c1 ^ k0; c1 = lo1; c2 = hi0 ^ c3 ^ k1; c3 = lo0;
    k0 += 0x9e3779b9u; k1 += 0xbb67ae85u;
  }
  return Bits4{c0, c1, c2, c3};
}

LP_DEVICE u32 noise_bits_of(const Noise& noise, u32 token) {
  const Bits4 b = noise_bits(noise, (token >> 6) * 16 + (token & 15));
  const u32 lane = token >> 4 & 3;
  return lane == 0 ? b.x : lane == 1 ? b.y : lane == 2 ? b.z : b.w;
}

// -ln(-ln u) with u = (bits + 1/2) / 2^32, rounded to fp32 once.
LP_DEVICE float gumbel(u32 random) {
  const double u = mul(add((double)random, 0.5), 1.0 / 4294967296.0);
  return (float)-ln_f64(-ln_f64(u));
}

// Never less than gumbel(random), at most 0.16 more where the noise is between 2 and 14. (The same fp32 operations as
// on the CPU, where a test checks the bound; no result depends on its bits.)
LP_DEVICE float gumbel_bound(u32 random) {
  constexpr float kLn2 = 0.693147180559945309417f;
  const float v = (float)(int)(~random >> 8), log2_scaled = (float)(int)bits(v);
  return sub((127.0f + 24.0f) * kLn2 + 1e-3f, mul(log2_scaled, kLn2 / 8388608.0f));
}

}  // namespace sampling
