//! Sixteen fp32 lanes: the few vector operations the kernels are written in, for each instruction set.
//!
//! Lanes are rows of a weight tile, or positions of a KV page, or columns of a value row: they never mix, so there is
//! no horizontal sum anywhere. Kernels are generic over [`Lanes`], inlined into one `#[target_feature]` entry per set.
#![allow(unsafe_code)]

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

    /// All lanes zero.
    unsafe fn zero() -> Self::Acc;
    /// Lane-wise `left + right`.
    unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// Reads 32 bf16 at `line`.
    unsafe fn line(line: *const u16) -> Self::Line;
    /// Reads 32 E4M3 at `line`, `[16][2]` like those of a line: 2^-8 of each, exactly. (As half precision they are
    /// that, by their bits alone, and converting subnormals from it does not depend on the floating-point mode.)
    unsafe fn line_e4m3(line: *const u8) -> Self::Line;
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

impl Lanes for Portable {
    type Acc = [f32; LANES];
    type Line = [[f32; LANES]; 2];
    type Pair = [f32; 2];

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
    unsafe fn line_e4m3(line: *const u8) -> Self::Line {
        // SAFETY: the caller passes 32 readable elements.
        let line = unsafe { &*line.cast::<[[u8; 2]; LANES]>() };
        let value = |bits: u8| f16::from_bits(u16::from(bits & 0x80) << 8 | u16::from(bits & 0x7f) << 7).to_f32();
        std::array::from_fn(|k| std::array::from_fn(|i| value(line[i][k])))
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

    use super::Lanes;

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

    /// AVX2, FMA and F16C: an accumulator is two registers.
    pub struct Avx2;

    impl Lanes for Avx2 {
        type Acc = [__m256; 2];
        /// `[k][half of the lanes]`
        type Line = [[__m256; 2]; 2];
        type Pair = [__m256; 2];

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
        unsafe fn line_e4m3(line: *const u8) -> Self::Line {
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
        unsafe fn pair(pair: *const u16) -> Self::Pair {
            // SAFETY: the trait's contract: the processor has AVX2, and two elements are readable.
            unsafe { [_mm256_set1_ps(super::widen(*pair)), _mm256_set1_ps(super::widen(*pair.add(1)))] }
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
        unsafe fn line_e4m3(line: *const u8) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX-512, and 32 elements are readable. The values have
            // few bits, so that the upper halves of their fp32 are bf16: those of k beside those of k + 1.
            unsafe {
                let [even, odd] =
                    halves(_mm256_loadu_si256(line.cast())).map(|half| _mm512_castps_si512(_mm512_cvtph_ps(half)));
                let pairs = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd);
                std::mem::transmute::<__m512i, __m512bh>(pairs)
            }
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
