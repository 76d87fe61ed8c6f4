//! Elementary functions with the same bits on every machine: for attention, the MLP and sampling.
//!
//! Only IEEE additions, multiplications, divisions and bit operations: no libm, whose results differ between platforms,
//! and no fused multiply-add, which is a slow library call where the hardware has none and other bits where it has. The
//! fp32 functions are branch-free, so loops over them vectorise, whatever instruction set the caller is compiled for.

use std::f32::consts::LOG2_E;

/// ln 2 as a sum: the high part has 9 significant bits, so its product with an exponent is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// `e^x`. Over all inputs the largest error is 1.05 units in the last place, denormal results included, and the result
/// never falls as `x` grows.
///
/// NaN gives NaN, minus infinity 0, and what exceeds the range plus infinity.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // Past these limits the result is infinite or rounds to 0 in any case. A NaN fails both comparisons and stays.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };
    let rounded = x * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    // Taylor to r^7; |r| <= ln(2) / 2, so the rest is under 6e-9 of the result, a tenth of half a last place.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = (p * r) * r + r + 1.0;
    // Two factors: one alone could not reach below 2^-126. The first product is exact, so only one rounding happens.
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = exponent >> 1;
    p * power_of_two(half) * power_of_two(exponent.wrapping_sub(half))
}

/// Natural logarithm: [`ln_f64`] rounded, hence at most 0.51 units in the last place off.
#[inline]
pub fn ln(x: f32) -> f32 {
    ln_f64(f64::from(x)) as f32
}

/// Natural logarithm in double precision. Largest error 2 units in the last place.
///
/// 0 gives minus infinity, negative numbers and NaN give NaN, plus infinity gives plus infinity.
pub fn ln_f64(x: f64) -> f64 {
    const LN2_HI: f64 = 0.693_147_180_369_123_8;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    const TWO_POW_54: f64 = 18_014_398_509_481_984.0;
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x == f64::INFINITY {
        return x;
    }
    let (x, denormal) = if x < f64::MIN_POSITIVE { (x * TWO_POW_54, 54) } else { (x, 0) };
    // x = 2^n m with m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) puts the border where n changes.
    let above = x.to_bits().wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits()) as i64;
    let exponent = above >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub((exponent << 52) as u64));
    let n = (exponent - denormal) as f64;
    // ln(m) = 2 atanh(s) = 2 (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1), |s| < 0.172: what follows s^21 is
    // under 1e-18 of the whole.
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let mut series = 1.0 / 21.0;
    for odd in [19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = series * z + 1.0 / odd;
    }
    // 2 s = f - s f, which keeps the leading term exact.
    n * LN2_HI + (f - (s * f - 2.0 * s * (z * series) - n * LN2_LO))
}

/// `x / (1 + e^-x)`. Largest error 3 units in the last place while `e^-x` is finite; minus 0 below -89, NaN for minus
/// infinity and for NaN.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// 2 to the power `k`, -126 to 127. Other `k` (they come from NaN alone) give meaningless numbers, but do not panic.
#[inline(always)]
fn power_of_two(k: i32) -> f32 {
    f32::from_bits((k.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units in the last place of the fp32 nearest to `exact`.
    fn ulps_f32(got: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        if got == nearest {
            return ((f64::from(got) - exact) / spacing_f32(nearest)).abs();
        }
        assert!(got.is_finite() && nearest.is_finite(), "{got} is not {exact}");
        (f64::from(got) - exact).abs() / spacing_f32(nearest)
    }

    fn spacing_f32(x: f32) -> f64 {
        if !x.is_finite() {
            return f64::INFINITY;
        }
        let x = x.abs().max(f32::MIN_POSITIVE);
        f64::from(f32::from_bits(x.to_bits() + 1)) - f64::from(x)
    }

    fn dense_f32() -> impl Iterator<Item = f32> {
        (0..=u32::MAX / 397).map(|i| f32::from_bits(i * 397)).filter(|x| !x.is_nan())
    }

    #[test]
    fn exp_is_within_its_bound() {
        let mut worst = 0.0f64;
        let mut check = |x: f32| {
            let exact = f64::from(x).exp();
            if exact as f32 == f32::INFINITY || exact as f32 == 0.0 {
                assert_eq!(exp(x), exact as f32, "exp({x})");
            } else {
                worst = worst.max(ulps_f32(exp(x), exact));
            }
        };
        dense_f32().for_each(&mut check);
        (-1_100_000..=900_000).for_each(|i| check(i as f32 * 1e-4));
        println!("exp: {worst} ulp");
        assert!(worst < 1.05, "{worst}");
    }

    #[test]
    fn exp_at_the_edges() {
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-f32::NAN).is_nan());
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::from_bits(1)), 1.0);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(-103.0) > 0.0 && exp(-103.0) < f32::MIN_POSITIVE);
        assert_eq!(exp(-104.5).to_bits(), 0);
    }

    #[test]
    fn exp_bits_are_frozen() {
        // They are part of every result: a change here is a change of bit domain.
        let bits = [1.0, -1.0, 10.0, -10.0, 0.1, -87.0, -100.0].map(|x| exp(x).to_bits());
        assert_eq!(bits, EXP_BITS, "{bits:#x?}");
    }
    const EXP_BITS: [u32; 7] = [0x402d_f854, 0x3ebc_5ab2, 0x46ac_14ee, 0x383e_6bce, 0x3f8d_763e, 0x00b3_3687, 0x1b];

    #[test]
    fn ln_is_within_its_bound() {
        let mut worst = 0.0f64;
        for x in dense_f32().filter(|x| *x > 0.0 && x.is_finite()) {
            let exact = f64::from(x).ln();
            worst = worst.max(ulps_f32(ln(x), exact));
        }
        println!("ln: {worst} ulp");
        assert!(worst < 0.51, "{worst}");
    }

    #[test]
    fn ln_f64_is_within_its_bound() {
        let mut worst = 0.0f64;
        let dense = (1..2_000_000u64).map(|i| f64::from_bits(i.wrapping_mul(4_611_686_018_427) & (u64::MAX >> 1)));
        let near_one = (1..500_000u32).map(|i| 1.0 - f64::from(i) / f64::from(1 << 22));
        let tiny_steps = (1..5000u32).map(|i| 1.0 - f64::from(i) * f64::from(f32::EPSILON) / 512.0);
        for x in dense.chain(near_one).chain(tiny_steps).filter(|x| x.is_finite() && *x > 0.0) {
            let exact = x.ln();
            let spacing = f64::from_bits(exact.abs().to_bits() + 1) - exact.abs();
            worst = worst.max((ln_f64(x) - exact).abs() / spacing);
        }
        println!("ln_f64: {worst} ulp");
        assert!(worst <= 2.0, "{worst}");
    }

    #[test]
    fn ln_at_the_edges() {
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert_eq!(ln(-0.0), f32::NEG_INFINITY);
        assert_eq!(ln(1.0).to_bits(), 0);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert!(ln(-1.0).is_nan() && ln(f32::NEG_INFINITY).is_nan() && ln(f32::NAN).is_nan());
        assert_eq!(ln_f64(f64::from_bits(1)), f64::from_bits(1).ln());
    }

    #[test]
    fn silu_is_within_its_bound() {
        let mut worst = 0.0f64;
        for x in dense_f32().filter(|x| *x > -88.0 && x.abs() > f32::MIN_POSITIVE && x.is_finite()) {
            let exact = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            if exact.abs() > f64::from(f32::MIN_POSITIVE) {
                worst = worst.max(ulps_f32(silu(x), exact));
            }
        }
        println!("silu: {worst} ulp");
        assert!(worst < 3.0, "{worst}");
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert_eq!(silu(-200.0), 0.0);
        assert!(silu(f32::NAN).is_nan() && silu(f32::NEG_INFINITY).is_nan());
    }
}
