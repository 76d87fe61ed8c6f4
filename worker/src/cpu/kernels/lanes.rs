//! Sixteen fp32 lanes: the few vector operations the kernels are written in, for each instruction set.
//!
//! Lanes are rows of a weight tile, or positions of a KV page, or columns of a value row: they never mix, so there is
//! no horizontal sum anywhere. Kernels are generic over [`Lanes`], inlined into one `#[target_feature]` entry per set.
#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop, reason = "registers are named by their places, and loops over them unrolled")]

use half::f16;

/// Lanes of an accumulator.
pub const LANES: usize = 16;
/// bf16 elements of one line: two consecutive k for each lane, 64 bytes.
pub const LINE: usize = 2 * LANES;

/// Vector operations over sixteen fp32 lanes.
///
/// # Safety
/// Every method may use instructions that only the set's own processors have: call them only where
/// [`Isa::available`](super::isa::Isa::available) said yes, inlined into a function compiled for the set.
pub trait Lanes {
    /// `[16]` fp32.
    type Acc: Copy;
    /// A line of weights, `[16][2]` bf16, as the dot product wants it.
    type Line: Copy;
    /// Two consecutive activations, the same in all lanes.
    type Pair: Copy;
    /// What the weights of a group are multiplied by and lessened by, `[16]` each.
    type Scales: Copy;

    /// Columns whose sums fit the registers beside a line of weights.
    const COLUMNS: usize;
    /// What [`Lanes::int4`] multiplies numbers by, of k and of k + 1.
    const INT4_RAISED: [f32; 2];

    /// All lanes zero.
    unsafe fn zero() -> Self::Acc;
    /// Lane-wise `left + right`.
    unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// Reads 32 bf16 at `line`.
    unsafe fn line(line: *const u16) -> Self::Line;
    /// Reads 32 E4M3 at `line`, `[16][2]` like those of a line: 2^-8 of each, exactly, `[k][16]`. (As half precision
    /// they are that, by their bits alone, and converting subnormals from it does not depend on the floating-point
    /// mode.)
    unsafe fn e4m3(line: *const u8) -> [Self::Acc; 2];
    /// Reads 32 values of 4 bits at `line`, a byte a lane: that of k in the low half, that of k + 1 in the high one.
    /// Numbers from -8 to 7 (two's complement) times [`Lanes::INT4_RAISED`], exactly, `[k][16]`.
    unsafe fn int4(line: *const u8) -> [Self::Acc; 2];
    /// A line of values that bf16 can hold.
    unsafe fn exact(values: [Self::Acc; 2]) -> Self::Line;
    /// Reads 16 bf16 at `scales`, for values that are `raised` times too large, of k and of k + 1. Each is zero or from
    /// 2^-100 to 2^100.
    unsafe fn scales(scales: *const u8, raised: [f32; 2]) -> Self::Scales;
    /// Reads the zero points of [`Lanes::int4`], numbers from -8 to 7: those of lanes 0 to 7 in the low halves of eight
    /// bytes at `zeros`, the others in the high ones.
    unsafe fn with_zeros(scales: Self::Scales, zeros: *const u8) -> Self::Scales;
    /// A line of values, less their zero points (if `ZEROS`), times their scales, rounded to bf16 (to nearest, ties to
    /// even). Values less zero points have at most 4 bits and a scale 8, so that a product is exact in fp32.
    unsafe fn scaled<const ZEROS: bool>(values: [Self::Acc; 2], scales: Self::Scales) -> Self::Line;
    /// Writes a line as 32 bf16.
    unsafe fn store_line(line: Self::Line, to: *mut u16);
    /// Reads two bf16 at `pair`.
    unsafe fn pair(pair: *const u16) -> Self::Pair;
    /// `acc + line[.][0] * pair[0] + line[.][1] * pair[1]`. [`Portable`] and AVX2 add k first, then k + 1; `VDPBF16PS`
    /// adds k + 1 first, then k, on processors of AMD, and is not relied on for either: the bit domain names what it
    /// does.
    unsafe fn dot(acc: Self::Acc, line: Self::Line, pair: Self::Pair) -> Self::Acc;
    /// `acc + weight * row`, where `row` points to 16 fp32. Rounds twice, the product and the sum, in every set.
    unsafe fn axpy(acc: Self::Acc, weight: f32, row: *const f32) -> Self::Acc;
    /// Writes 16 fp32.
    unsafe fn store(acc: Self::Acc, to: *mut f32);
    /// Asks for the cache line at `address`, which need not exist, into L2.
    unsafe fn prefetch(address: *const u16);
}

/// Plain Rust. A product of two bf16 is exact in fp32 (8 + 8 significand bits of 24), so a multiplication and an
/// addition round as one fused operation does, and AVX2 with FMA gives the same bits. (Products under 2^-126 are
/// flushed here and not inside an FMA: sums that small do not occur beside a weight.)
pub struct Portable;

#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// What makes two factors of a scale, `[a, b]`: `v * a - v * b` is x = `v * scale / raised`, rounded to bf16.
///
/// x has 12 bits (see [`Lanes::scaled`]), and `v * b` is 2^16 x, exactly. `v * a` is 2^16 x + x: it rounds once, where
/// x has its eighth bit, to 2^16 x plus the nearest bf16 of x. (x does not carry into the exponent. A tie goes to even:
/// 2^16 x is an even number of those last bits.) Both factors and the difference are exact; the bounds of scales keep
/// all of it in the range of normal numbers.
#[inline(always)]
const fn rounded_by(raised: f32) -> [f32; 2] {
    [65537.0 / raised, 65536.0 / raised]
}

impl Lanes for Portable {
    type Acc = [f32; LANES];
    type Line = [[f32; LANES]; 2];
    type Pair = [f32; 2];
    /// As [`rounded_by`] has them, then zero points.
    type Scales = [[f32; LANES]; 3];

    const COLUMNS: usize = 8;
    const INT4_RAISED: [f32; 2] = [1.0; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::Acc {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc {
        std::array::from_fn(|i| left[i] + right[i])
    }

    #[inline(always)]
    unsafe fn line(line: *const u16) -> Self::Line {
        // SAFETY: the caller passes 32 readable elements.
        let line = unsafe { &*line.cast::<[[u16; 2]; LANES]>() };
        std::array::from_fn(|k| std::array::from_fn(|i| widen(line[i][k])))
    }

    #[inline(always)]
    unsafe fn e4m3(line: *const u8) -> [Self::Acc; 2] {
        // SAFETY: the caller passes 32 readable elements.
        let line = unsafe { &*line.cast::<[[u8; 2]; LANES]>() };
        let value = |bits: u8| f16::from_bits(u16::from(bits & 0x80) << 8 | u16::from(bits & 0x7f) << 7).to_f32();
        std::array::from_fn(|k| std::array::from_fn(|i| value(line[i][k])))
    }

    #[inline(always)]
    unsafe fn int4(line: *const u8) -> [Self::Acc; 2] {
        // SAFETY: the caller passes 16 readable bytes.
        let line = unsafe { line.cast::<[i8; LANES]>().read_unaligned() };
        [line.map(|byte| f32::from(byte << 4 >> 4)), line.map(|byte| f32::from(byte >> 4))]
    }

    #[inline(always)]
    unsafe fn exact(values: [Self::Acc; 2]) -> Self::Line {
        values
    }

    #[inline(always)]
    unsafe fn scales(scales: *const u8, [raised, _]: [f32; 2]) -> Self::Scales {
        // SAFETY: the caller passes 16 readable bf16.
        let scales = unsafe { scales.cast::<[u16; LANES]>().read_unaligned() };
        let [a, b] = rounded_by(raised);
        [scales.map(|scale| widen(scale) * a), scales.map(|scale| widen(scale) * b), [0.0; LANES]]
    }

    #[inline(always)]
    unsafe fn with_zeros([a, b, _]: Self::Scales, zeros: *const u8) -> Self::Scales {
        // SAFETY: the caller passes 8 readable bytes.
        let zeros = unsafe { zeros.cast::<[u8; LANES / 2]>().read_unaligned() };
        [a, b, std::array::from_fn(|i| f32::from((zeros[i % 8] << (4 - i / 8 * 4)).cast_signed() >> 4))]
    }

    #[inline(always)]
    unsafe fn scaled<const ZEROS: bool>(values: [Self::Acc; 2], [a, b, zeros]: Self::Scales) -> Self::Line {
        values.map(|values| {
            std::array::from_fn(|i| {
                let value = if ZEROS { values[i] - zeros[i] } else { values[i] };
                value * a[i] - value * b[i]
            })
        })
    }

    #[inline(always)]
    unsafe fn store_line(line: Self::Line, to: *mut u16) {
        let words: [[u16; 2]; LANES] = std::array::from_fn(|i| [0, 1].map(|k| (line[k][i].to_bits() >> 16) as u16));
        // SAFETY: the caller passes 32 writable elements.
        unsafe { to.cast::<[[u16; 2]; LANES]>().write_unaligned(words) }
    }

    #[inline(always)]
    unsafe fn pair(pair: *const u16) -> Self::Pair {
        // SAFETY: the caller passes two readable elements.
        unsafe { [widen(*pair), widen(*pair.add(1))] }
    }

    #[inline(always)]
    unsafe fn dot(acc: Self::Acc, line: Self::Line, pair: Self::Pair) -> Self::Acc {
        std::array::from_fn(|i| acc[i] + line[0][i] * pair[0] + line[1][i] * pair[1])
    }

    #[inline(always)]
    unsafe fn axpy(acc: Self::Acc, weight: f32, row: *const f32) -> Self::Acc {
        // SAFETY: the caller passes 16 readable elements.
        let row = unsafe { row.cast::<[f32; LANES]>().read_unaligned() };
        std::array::from_fn(|i| acc[i] + weight * row[i])
    }

    #[inline(always)]
    unsafe fn store(acc: Self::Acc, to: *mut f32) {
        // SAFETY: the caller passes 16 writable elements.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(acc) }
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u16) {}
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512Bf16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, rounded_by};

    /// Sixteen pairs of E4M3 as half precision, 2^-8 of them: the first of each pair, and the second.
    #[inline(always)]
    unsafe fn halves(pairs: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's processor has AVX2. The sign is the topmost bit of either; exponent and mantissa lie
        // eight bits below where half precision has them.
        unsafe {
            let (sign, rest) = (_mm256_set1_epi16(i16::MIN), _mm256_set1_epi16(0x3f80));
            let half = |signs, rests| _mm256_or_si256(_mm256_and_si256(signs, sign), _mm256_and_si256(rests, rest));
            [
                half(_mm256_slli_epi16::<8>(pairs), _mm256_slli_epi16::<7>(pairs)),
                half(pairs, _mm256_srli_epi16::<1>(pairs)),
            ]
        }
    }

    /// The lowest 4 bits of each lane, in two's complement: a table of sixteen, by index.
    #[inline(always)]
    unsafe fn numbers(lanes: __m512i) -> __m512 {
        // SAFETY: the caller's processor has AVX-512.
        unsafe {
            let of =
                _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0);
            _mm512_permutexvar_ps(lanes, of)
        }
    }

    /// AVX2, FMA and F16C: an accumulator is two registers.
    pub struct Avx2;

    impl Lanes for Avx2 {
        type Acc = [__m256; 2];
        /// `[k][half of the lanes]`
        type Line = [[__m256; 2]; 2];
        type Pair = [__m256; 2];
        /// `[k]`: as [`rounded_by`] has them, then zero points; `[half of the lanes]` each.
        type Scales = [[[__m256; 2]; 3]; 2];

        /// Of sixteen registers a column takes two.
        const COLUMNS: usize = 4;
        /// As they come out of a byte with the fewest operations: at the top of a word, and above its lowest four bits.
        const INT4_RAISED: [f32; 2] = [(1 << 28) as f32, 16.0];

        #[inline(always)]
        unsafe fn zero() -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2.
            unsafe { [_mm256_setzero_ps(); 2] }
        }

        #[inline(always)]
        unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2.
            unsafe { [_mm256_add_ps(left[0], right[0]), _mm256_add_ps(left[1], right[1])] }
        }

        #[inline(always)]
        unsafe fn line(line: *const u16) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX2, and 32 elements are readable. A 32-bit word is one
            // lane's (k, k + 1): its high half is the bf16 of k + 1 in place, its low half that of k.
            unsafe {
                let words = [_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(16).cast())];
                let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                [
                    words.map(|word| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(word))),
                    words.map(|word| _mm256_castsi256_ps(_mm256_and_si256(word, high))),
                ]
            }
        }

        #[inline(always)]
        unsafe fn e4m3(line: *const u8) -> [Self::Acc; 2] {
            // SAFETY: the trait's contract: the processor has AVX2 and F16C, and 32 elements are readable.
            unsafe {
                halves(_mm256_loadu_si256(line.cast())).map(|half| {
                    [
                        _mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)),
                    ]
                })
            }
        }

        #[inline(always)]
        unsafe fn int4(line: *const u8) -> [Self::Acc; 2] {
            // SAFETY: the trait's contract: the processor has AVX2, and 16 bytes are readable.
            unsafe {
                let mut values = [[_mm256_setzero_ps(); 2]; 2];
                for half in 0..2 {
                    let bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(line.add(8 * half).cast()));
                    let odd = _mm256_and_si256(bytes, _mm256_set1_epi32(!15));
                    values[0][half] = _mm256_cvtepi32_ps(_mm256_slli_epi32::<28>(bytes));
                    values[1][half] = _mm256_cvtepi32_ps(odd);
                }
                values
            }
        }

        #[inline(always)]
        unsafe fn exact(values: [Self::Acc; 2]) -> Self::Line {
            values
        }

        #[inline(always)]
        unsafe fn scales(scales: *const u8, raised: [f32; 2]) -> Self::Scales {
            // SAFETY: the trait's contract: the processor has AVX2, and 16 bf16 are readable.
            unsafe {
                let mut all = [[[_mm256_setzero_ps(); 2]; 3]; 2];
                for half in 0..2 {
                    let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(scales.add(16 * half).cast()));
                    let scale = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
                    for k in 0..2 {
                        let [a, b] = rounded_by(raised[k]);
                        all[k][0][half] = _mm256_mul_ps(scale, _mm256_set1_ps(a));
                        all[k][1][half] = _mm256_mul_ps(scale, _mm256_set1_ps(b));
                    }
                }
                all
            }
        }

        #[inline(always)]
        unsafe fn with_zeros(mut scales: Self::Scales, zeros: *const u8) -> Self::Scales {
            // SAFETY: the trait's contract: the processor has AVX2, and 8 bytes are readable.
            unsafe {
                let bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(zeros.cast()));
                let low = _mm256_srai_epi32::<28>(_mm256_slli_epi32::<28>(bytes));
                let halves = [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srai_epi32::<4>(bytes))];
                for k in 0..2 {
                    for (half, zeros) in halves.into_iter().enumerate() {
                        scales[k][2][half] = _mm256_mul_ps(zeros, _mm256_set1_ps(Self::INT4_RAISED[k]));
                    }
                }
                scales
            }
        }

        #[inline(always)]
        unsafe fn scaled<const ZEROS: bool>(mut values: [Self::Acc; 2], scales: Self::Scales) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX2 and FMA.
            unsafe {
                for k in 0..2 {
                    let [a, b, zeros] = scales[k];
                    for half in 0..2 {
                        let value = values[k][half];
                        let value = if ZEROS { _mm256_sub_ps(value, zeros[half]) } else { value };
                        values[k][half] = _mm256_fnmadd_ps(value, b[half], _mm256_mul_ps(value, a[half]));
                    }
                }
                values
            }
        }

        #[inline(always)]
        unsafe fn store_line(line: Self::Line, to: *mut u16) {
            // SAFETY: the trait's contract: the processor has AVX2, and 32 elements are writable.
            unsafe {
                for half in 0..2 {
                    let even = _mm256_srli_epi32::<16>(_mm256_castps_si256(line[0][half]));
                    let pairs = _mm256_or_si256(even, _mm256_castps_si256(line[1][half]));
                    _mm256_storeu_si256(to.add(16 * half).cast(), pairs);
                }
            }
        }

        #[inline(always)]
        unsafe fn pair(pair: *const u16) -> Self::Pair {
            // SAFETY: the trait's contract: the processor has AVX2, and two elements are readable. They are loaded
            // together: two moves from scalars take longer.
            unsafe {
                let both = _mm256_set1_epi32(pair.cast::<i32>().read_unaligned());
                let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(_mm256_and_si256(both, high))]
            }
        }

        #[inline(always)]
        unsafe fn dot(acc: Self::Acc, line: Self::Line, pair: Self::Pair) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2 and FMA.
            unsafe {
                [
                    _mm256_fmadd_ps(line[1][0], pair[1], _mm256_fmadd_ps(line[0][0], pair[0], acc[0])),
                    _mm256_fmadd_ps(line[1][1], pair[1], _mm256_fmadd_ps(line[0][1], pair[0], acc[1])),
                ]
            }
        }

        #[inline(always)]
        unsafe fn axpy(acc: Self::Acc, weight: f32, row: *const f32) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2, and 16 elements are readable.
            unsafe {
                let weight = _mm256_set1_ps(weight);
                [
                    _mm256_add_ps(acc[0], _mm256_mul_ps(weight, _mm256_loadu_ps(row))),
                    _mm256_add_ps(acc[1], _mm256_mul_ps(weight, _mm256_loadu_ps(row.add(8)))),
                ]
            }
        }

        #[inline(always)]
        unsafe fn store(acc: Self::Acc, to: *mut f32) {
            // SAFETY: the trait's contract: the processor has AVX2, and 16 elements are writable.
            unsafe {
                _mm256_storeu_ps(to, acc[0]);
                _mm256_storeu_ps(to.add(8), acc[1]);
            }
        }

        #[inline(always)]
        unsafe fn prefetch(address: *const u16) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
        }
    }

    /// AVX-512 BF16: one register, one `VDPBF16PS` for a line and a column.
    pub struct Avx512Bf16;

    impl Lanes for Avx512Bf16 {
        type Acc = __m512;
        type Line = __m512bh;
        type Pair = __m512bh;
        /// Scales, and what is added for zero points: less these times the scale.
        type Scales = [__m512; 2];

        const COLUMNS: usize = 8;
        const INT4_RAISED: [f32; 2] = [1.0; 2];

        #[inline(always)]
        unsafe fn zero() -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512.
            unsafe { _mm512_add_ps(left, right) }
        }

        #[inline(always)]
        unsafe fn line(line: *const u16) -> Self::Line {
            // SAFETY: 32 elements are readable; both types are 512 plain bits.
            unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(line.cast())) }
        }

        #[inline(always)]
        unsafe fn e4m3(line: *const u8) -> [Self::Acc; 2] {
            // SAFETY: the trait's contract: the processor has AVX-512, and 32 elements are readable.
            unsafe { halves(_mm256_loadu_si256(line.cast())).map(|half| _mm512_cvtph_ps(half)) }
        }

        #[inline(always)]
        unsafe fn int4(line: *const u8) -> [Self::Acc; 2] {
            // SAFETY: the trait's contract: the processor has AVX-512, and 16 bytes are readable.
            unsafe {
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(line.cast()));
                [numbers(bytes), numbers(_mm512_srli_epi32::<4>(bytes))]
            }
        }

        #[inline(always)]
        unsafe fn exact([even, odd]: [Self::Acc; 2]) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX-512. The upper halves of the values are bf16: those
            // of k beside those of k + 1.
            unsafe {
                let [even, odd] = [_mm512_castps_si512(even), _mm512_castps_si512(odd)];
                let pairs = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd);
                std::mem::transmute::<__m512i, __m512bh>(pairs)
            }
        }

        #[inline(always)]
        unsafe fn scales(scales: *const u8, [raised, _]: [f32; 2]) -> Self::Scales {
            // SAFETY: the trait's contract: the processor has AVX-512, and 16 bf16 are readable.
            unsafe {
                let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(scales.cast()));
                let scales = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                [_mm512_mul_ps(scales, _mm512_set1_ps(1.0 / raised)), _mm512_setzero_ps()]
            }
        }

        #[inline(always)]
        unsafe fn with_zeros([scales, _]: Self::Scales, zeros: *const u8) -> Self::Scales {
            // SAFETY: the trait's contract: the processor has AVX-512, and 8 bytes are readable.
            unsafe {
                let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros.cast()));
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), _mm256_srli_epi32::<4>(low));
                [scales, _mm512_fnmadd_ps(numbers(both), scales, _mm512_setzero_ps())]
            }
        }

        #[inline(always)]
        unsafe fn scaled<const ZEROS: bool>([even, odd]: [Self::Acc; 2], scales: Self::Scales) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX-512 BF16. A fused operation is exact here. The
            // conversion rounds as bf16 do everywhere; that it takes denormals for zeros is out of the scales' bounds.
            unsafe {
                let [scale, zeros] = scales;
                let [even, odd] = match ZEROS {
                    true => [_mm512_fmadd_ps(even, scale, zeros), _mm512_fmadd_ps(odd, scale, zeros)],
                    false => [_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale)],
                };
                // Those of k in the lower half, those of k + 1 in the upper one.
                let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
                let places = _mm512_set_epi16(
                    31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                    18, 2, 17, 1, 16, 0,
                );
                std::mem::transmute::<__m512i, __m512bh>(_mm512_permutexvar_epi16(places, halves))
            }
        }

        #[inline(always)]
        unsafe fn store_line(line: Self::Line, to: *mut u16) {
            // SAFETY: 32 elements are writable; both types are 512 plain bits.
            unsafe { _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(line)) }
        }

        #[inline(always)]
        unsafe fn pair(pair: *const u16) -> Self::Pair {
            // SAFETY: two elements are readable; both types are 512 plain bits.
            unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair.cast::<i32>().read_unaligned())) }
        }

        #[inline(always)]
        unsafe fn dot(acc: Self::Acc, line: Self::Line, pair: Self::Pair) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512 BF16.
            unsafe { _mm512_dpbf16_ps(acc, line, pair) }
        }

        #[inline(always)]
        unsafe fn axpy(acc: Self::Acc, weight: f32, row: *const f32) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512, and 16 elements are readable.
            unsafe { _mm512_add_ps(acc, _mm512_mul_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(row))) }
        }

        #[inline(always)]
        unsafe fn store(acc: Self::Acc, to: *mut f32) {
            // SAFETY: the trait's contract: the processor has AVX-512, and 16 elements are writable.
            unsafe { _mm512_storeu_ps(to, acc) }
        }

        #[inline(always)]
        unsafe fn prefetch(address: *const u16) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
        }
    }
}
