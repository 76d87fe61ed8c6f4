//! How weights are stored: E4M3, 4 bits, and their scales.
//!
//! Every value that a format can hold is a bf16 as well, so weights travel through [`Source`](super::source::Source) as
//! bf16, without their scales, and whoever packs them finds the stored bits again without rounding.
//!
//! A row's scale is applied to the sum of a product. A group's is applied to the sums of its weights on CPUs; on GPUs
//! to each weight, which is rounded to bf16: the bits are those of a bf16 model with these weights.

use std::fmt;
use std::sync::LazyLock;

use clap::builder::PossibleValue;
use half::bf16;

/// How the weights of a product are stored and streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum WeightFormat {
    /// 16 bits, no scales.
    #[default]
    Bf16,
    /// 8 bits (FP8: 1 sign, 4 exponent, 3 mantissa, no infinity), with an f32 scale a row.
    E4m3,
    /// The same with a bf16 scale for each `columns` of a row. Of blocks all rows have their block's.
    E4m3Groups {
        /// A multiple of 16.
        columns: u16,
    },
    /// 4 bits, 0 to 15, less a zero point; a bf16 scale for each `columns` of a row.
    Int4 {
        /// A multiple of 16.
        columns: u16,
        /// Each group has a zero point; else all have 8.
        zeros: bool,
    },
}

/// 4 bits as they are made here: in symmetric groups of 128.
pub const INT4: WeightFormat = WeightFormat::Int4 { columns: 128, zeros: false };
/// The zero point of symmetric groups of 4 bits.
pub const MIDDLE: u8 = 8;
/// The smallest magnitude of a group's scale, 2^-100; what is smaller is zero. No sum knows a weight with such a scale,
/// and none that is multiplied by a larger one is denormal, so that it does not matter how these are treated.
pub const GROUP_SCALE_MIN: f32 = f32::from_bits((127 - 100) << 23);
/// The largest one, 2^100.
pub const GROUP_SCALE_MAX: f32 = f32::from_bits((127 + 100) << 23);
/// The largest magnitude of E4M3.
pub const E4M3_MAX: f32 = 448.0;
/// The bits of what is not a number, but for the sign.
const E4M3_NAN: u8 = 0x7f;

impl WeightFormat {
    /// Bytes of `values` weights, without scales. An even number of them.
    pub const fn bytes(self, values: usize) -> usize {
        match self {
            Self::Bf16 => values * 2,
            Self::E4m3 | Self::E4m3Groups { .. } => values,
            Self::Int4 { .. } => values / 2,
        }
    }

    /// Pairs of columns that CPUs pack side by side: of 4 bits, a byte has two. A run takes a multiple of these.
    pub const fn packed_pairs(self) -> usize {
        if matches!(self, Self::Int4 { .. }) { 4 } else { 1 }
    }

    /// Bytes of the scales and zero points of a group of each of `rows` rows; an even number of them.
    pub const fn group_bytes(self, rows: usize) -> usize {
        match (self.group(), self.has_zeros()) {
            (None, _) => 0,
            (Some(_), false) => rows * 2,
            (Some(_), true) => rows * 2 + rows / 2,
        }
    }

    /// Whether rows have scales, which are applied to sums.
    pub const fn has_row_scales(self) -> bool {
        matches!(self, Self::E4m3)
    }

    /// Columns of a row that have a scale in common.
    pub const fn group(self) -> Option<usize> {
        match self {
            Self::E4m3Groups { columns } | Self::Int4 { columns, .. } => Some(columns as usize),
            Self::Bf16 | Self::E4m3 => None,
        }
    }

    /// Whether groups have zero points.
    pub const fn has_zeros(self) -> bool {
        matches!(self, Self::Int4 { zeros: true, .. })
    }

    /// The name in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::E4m3 | Self::E4m3Groups { .. } => "fp8",
            Self::Int4 { .. } => "int4",
        }
    }
}

/// In messages and in the plan's hash.
impl fmt::Display for WeightFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())?;
        self.group().map_or(Ok(()), |columns| write!(formatter, " in groups of {columns}"))?;
        formatter.write_str(if self.has_zeros() { " with zero points" } else { "" })
    }
}

/// The formats that weights can be quantised to at load.
impl clap::ValueEnum for WeightFormat {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Bf16, Self::E4m3, INT4]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Bf16 => "16 bits, no scales",
            Self::E4m3 => "8 bits (E4M3), a scale a row",
            _ => "4 bits, a scale for each 128 columns of a row",
        };
        Self::value_variants().contains(self).then(|| PossibleValue::new(self.name()).help(help))
    }
}

/// The nearest bf16, ties to even: [`bf16::from_f32`] without a branch, so that loops vectorise.
#[inline(always)]
pub fn to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    // Of what is not a number, cutting could leave an infinity.
    let not_a_number = bits >> 16 | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { not_a_number } else { rounded } as u16)
}

/// A group's scale: the nearest bf16, or zero. What is larger than [`GROUP_SCALE_MAX`], or no number, stays so.
pub fn group_scale(value: f32) -> bf16 {
    let scale = bf16::from_f32(value);
    if scale.to_f32().abs() < GROUP_SCALE_MIN { bf16::ZERO } else { scale }
}

/// The value of E4M3 bits; exact. 0x7f and 0xff are no numbers.
pub fn from_e4m3(bits: u8) -> bf16 {
    let (sign, exponent, mantissa) = (u16::from(bits >> 7) << 15, u16::from(bits >> 3 & 15), u16::from(bits & 7));
    if bits & 0x7f == E4M3_NAN {
        return bf16::from_bits(sign | bf16::NAN.to_bits());
    }
    // The exponent's bias is 7, bf16's is 127; subnormals are whole multiples of 2^-9.
    let magnitude = match exponent {
        0 => bf16::from_f32(f32::from(mantissa) / 512.0).to_bits(),
        _ => (exponent + 120) << 7 | mantissa << 4,
    };
    bf16::from_bits(sign | magnitude)
}

/// The nearest E4M3 (ties to even), at most [`E4M3_MAX`] in magnitude; what is not a number stays none.
#[inline]
pub fn to_e4m3(value: f32) -> u8 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    /// Bits of fp32's significand that E4M3 does not have.
    const DROPPED: u32 = 20;
    /// Whose last bit is worth 2^-9, the smallest subnormal: a sum with it rounds there.
    const STEPS: f32 = (1 << 14) as f32;
    let (sign, magnitude) = ((value.to_bits() >> 24 & 0x80) as u8, value.abs());
    let bits = if magnitude >= SMALLEST_NORMAL {
        let bits = magnitude.to_bits();
        let half = (1 << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1);
        ((bits + half) >> DROPPED) - ((127 - 7) << 3)
    } else {
        (magnitude + STEPS).to_bits() - STEPS.to_bits()
    };
    if value.is_nan() { sign | E4M3_NAN } else { sign | bits.min(u32::from(E4M3_NAN) - 1) as u8 }
}

/// [`to_e4m3`] of bf16, by a table: for those that hold such values, and many of them.
pub fn bf16_to_e4m3(value: bf16) -> u8 {
    static TABLE: LazyLock<Box<[u8]>> =
        LazyLock::new(|| (0..=u16::MAX).map(|bits| to_e4m3(bf16::from_bits(bits).to_f32())).collect());
    TABLE[usize::from(value.to_bits())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_comes_back() {
        for bits in 0..=u8::MAX {
            let value = from_e4m3(bits);
            assert_eq!(value.is_nan(), bits & 0x7f == 0x7f);
            assert_eq!((to_e4m3(value.to_f32()), bf16_to_e4m3(value)), (bits, bits), "{bits:#x} {value}");
        }
        let known = [(0x01, 2f32.powi(-9)), (0x07, 7.0 / 512.0), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0xb9, -1.125)];
        for (bits, value) in known.into_iter().chain([(0x7e, 448.0), (0xfe, -448.0), (0x00, 0.0)]) {
            assert_eq!(from_e4m3(bits).to_f32(), value, "{bits:#x}");
        }
    }

    #[test]
    fn rounding_to_bf16_is_that_of_the_library() {
        let low = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        for value in (0..=u16::MAX).flat_map(|high| low.map(|low| f32::from_bits(u32::from(high) << 16 | low))) {
            assert_eq!(to_bf16(value).to_bits(), bf16::from_f32(value).to_bits(), "{:#x}", value.to_bits());
        }
    }

    #[test]
    fn what_lies_between_goes_to_the_nearest_and_ties_to_even() {
        for bits in 0..0x7e_u8 {
            let [low, high] = [bits, bits + 1].map(|bits| from_e4m3(bits).to_f32());
            let middle = f32::midpoint(low, high);
            let even = bits + bits % 2;
            assert_eq!(to_e4m3(middle), even, "{middle}");
            assert_eq!(to_e4m3(-middle), even | 0x80, "{middle}");
            assert_eq!(to_e4m3(f32::midpoint(low, middle)), bits);
            assert_eq!(to_e4m3(f32::midpoint(middle, high)), bits + 1);
        }
        assert_eq!([to_e4m3(1e30), to_e4m3(f32::NEG_INFINITY), to_e4m3(f32::NAN)], [0x7e, 0xfe, 0x7f]);
    }
}
