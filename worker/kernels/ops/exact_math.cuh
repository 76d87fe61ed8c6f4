// Exponential and logarithm with the bits of the CPU sampler (worker/src/sampling/math.rs): IEEE additions,
// multiplications, divisions and bit operations in the same order, rounded one by one.
#pragma once

namespace sampling {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

// 2 to the power k, -126 to 127.
LP_DEVICE float power_of_two(int k) { return float_of((u32)(k + 127) << 23); }

// e^x; NaN gives NaN, minus infinity 0.
LP_DEVICE float exp_(float x) {
  constexpr float kRound = 12582912.0f, kLn2Hi = 0.6933594f, kLn2Lo = -2.1219444e-4f, kLog2E = 1.44269504088896340736f;
  x = x > 89.0f ? 89.0f : x;
  x = x < -105.0f ? -105.0f : x;
  const float rounded = add(mul(x, kLog2E), kRound), n = sub(rounded, kRound);
  const float r = sub(sub(x, mul(n, kLn2Hi)), mul(n, kLn2Lo));
  float p = 1.0f / 5040.0f;
  p = add(mul(p, r), 1.0f / 720.0f);
  p = add(mul(p, r), 1.0f / 120.0f);
  p = add(mul(p, r), 1.0f / 24.0f);
  p = add(mul(p, r), 1.0f / 6.0f);
  p = add(mul(p, r), 0.5f);
  p = add(add(mul(mul(p, r), r), r), 1.0f);
  const int exponent = (int)(bits(rounded) - bits(kRound)), half = exponent >> 1;
  return mul(mul(p, power_of_two(half)), power_of_two(exponent - half));
}

// Natural logarithm in double precision; 0 gives minus infinity, negative numbers and NaN give NaN.
LP_DEVICE double ln_f64(double x) {
  constexpr double kLn2Hi = 0.6931471803691238, kLn2Lo = 1.9082149292705877e-10,
                   kSqrtHalf = 0.707106781186547524400844362104849039;
  if (!(x >= 0.0)) return double_of(0x7ff8000000000000ull);
  if (x == 0.0) return -(double)kInfinity;
  if (x == (double)kInfinity) return x;
  const bool denormal = x < 2.2250738585072014e-308;
  if (denormal) x = mul(x, 18014398509481984.0);
  const long long exponent = (long long)(bits(x) - bits(kSqrtHalf)) >> 52;
  const double m = double_of(bits(x) - ((u64)exponent << 52)), n = (double)(exponent - (denormal ? 54 : 0));
  const double f = sub(m, 1.0), s = div(f, add(2.0, f)), z = mul(s, s);
  double series = 1.0 / 21.0;
  series = add(mul(series, z), 1.0 / 19.0);
  series = add(mul(series, z), 1.0 / 17.0);
  series = add(mul(series, z), 1.0 / 15.0);
  series = add(mul(series, z), 1.0 / 13.0);
  series = add(mul(series, z), 1.0 / 11.0);
  series = add(mul(series, z), 1.0 / 9.0);
  series = add(mul(series, z), 1.0 / 7.0);
  series = add(mul(series, z), 1.0 / 5.0);
  series = add(mul(series, z), 1.0 / 3.0);
  // n hi + (f - (s f - 2 s (z series) - n lo)), in the order of the Rust expression
  const double inner = sub(sub(mul(s, f), mul(mul(2.0, s), mul(z, series))), mul(n, kLn2Lo));
  return add(mul(n, kLn2Hi), sub(f, inner));
}

LP_DEVICE float ln_(float x) { return (float)ln_f64((double)x); }

}  // namespace sampling
