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
    /// Two lines of E4M3, as they are stored.
    type E4m3s: Copy;
    /// Four lines of 4 bits, as they are stored.
    type Int4s: Copy;
    /// Constants of a pass over a panel.
    type Constants: Copy;

    /// Columns whose sums fit the registers beside a line of weights.
    const COLUMNS: usize;
    /// (Tile, column) pairs that run interleaved where lines are unpacked, which takes registers, too.
    const MOST_BLOCK_PACKED: usize;

    /// To be made before the loops that use them.
    unsafe fn constants() -> Self::Constants;
    /// All lanes zero.
    unsafe fn zero() -> Self::Acc;
    /// Lane-wise `left + right`.
    unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// Lane-wise `left - right`.
    unsafe fn sub(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// Lane-wise `left * right`.
    unsafe fn mul(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// Reads 32 bf16 at `line`.
    unsafe fn line(line: *const u16, constants: Self::Constants) -> Self::Line;
    /// The same in all lanes.
    unsafe fn splat(value: f32) -> Self::Acc;
    /// Reads `lines` lines of 32 E4M3 at `at`, one or two: `[lines][16][2]` like those of bf16.
    unsafe fn e4m3s(at: *const u8, lines: usize) -> Self::E4m3s;
    /// Line `index` of these: 2^-8 of each, exactly, because normal numbers are bf16 of the same bits then. No bf16 of
    /// them is denormal, so that the floating-point mode does not matter.
    unsafe fn e4m3(lines: Self::E4m3s, index: usize) -> Self::Line;
    /// Reads four lines of 4 bits at `at`, 64 bytes: see [`int4_place`].
    unsafe fn int4s(at: *const u8) -> Self::Int4s;
    /// Line `index` of these: [`INT4_RAISED`] and the number that the 4 bits are, 128 to 143.
    unsafe fn int4(lines: Self::Int4s, index: usize, constants: Self::Constants) -> Self::Line;
    /// Reads the scales of a group, 16 bf16 at `scales`, times `raised`, by which the group's weights are too small.
    /// Each is zero or from 2^-100 to 2^100.
    unsafe fn scales(scales: *const u8, raised: f32) -> Self::Acc;
    /// Reads zero points, numbers from 0 to 15: those of lanes 0 to 7 in the low halves of eight bytes at `zeros`, the
    /// others in the high ones.
    unsafe fn zeros(zeros: *const u8) -> Self::Acc;
    /// Writes a line as 32 bf16.
    unsafe fn store_line(line: Self::Line, to: *mut u16);
    /// Reads two bf16 at `pair`.
    unsafe fn pair(pair: *const u16, constants: Self::Constants) -> Self::Pair;
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
    /// The same into L1.
    unsafe fn prefetch_near(address: *const u16);
}

/// Plain Rust. A product of two bf16 is exact in fp32 (8 + 8 significand bits of 24), so a multiplication and an
/// addition round as one fused operation does, and AVX2 with FMA gives the same bits. (Products under 2^-126 are
/// flushed here and not inside an FMA: sums that small do not occur beside a weight.)
pub struct Portable;

#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// What is added to numbers of 4 bits while they are multiplied: bf16 from 128 to 255 are whole, so that the bits of
/// the sum are those of 128 with the 4 bits in the lowest places.
pub const INT4_RAISED: f32 = 128.0;

/// [`INT4_RAISED`] as bf16.
#[cfg(target_arch = "x86_64")]
const INT4_RAISED_BITS: i16 = 0x4300;

/// Where four lines of 4 bits have the weight of a lane: its byte of 64, and whether it is the high half of that.
///
/// A word of 16 bits has the four lines' weights of one (lane, k), and words lie as the elements of a line do.
pub const fn int4_place(line: usize, lane: usize, k: usize) -> (usize, bool) {
    (lane * 4 + k * 2 + line / 2, line % 2 == 1)
}

/// Low and high bytes of the bf16 of E4M3 whose three highest bits of the exponent are zero: whole multiples of 2^-9
/// (of 2^-17, here), by the four bits that remain.
#[cfg(target_arch = "x86_64")]
const E4M3_SMALL_BYTES: [[u8; 16]; 2] = bytes_of({
    let mut numbers = [0.0; 16];
    let mut bits = 0;
    while bits < 16 {
        numbers[bits as usize] = bits as f32 / (1 << 17) as f32;
        bits += 1;
    }
    numbers
});

/// Low and high bytes of numbers that bf16 can hold.
#[cfg(target_arch = "x86_64")]
const fn bytes_of(numbers: [f32; 16]) -> [[u8; 16]; 2] {
    let mut bytes = [[0; 16]; 2];
    let mut i = 0;
    while i < 16 {
        let [_, _, low, high] = numbers[i].to_bits().to_le_bytes();
        (bytes[0][i], bytes[1][i]) = (low, high);
        i += 1;
    }
    bytes
}

impl Lanes for Portable {
    type Acc = [f32; LANES];
    type Line = [[f32; LANES]; 2];
    type Pair = [f32; 2];
    type E4m3s = [[[u8; 2]; LANES]; 2];
    type Int4s = [u8; 64];
    type Constants = ();

    const COLUMNS: usize = 8;
    const MOST_BLOCK_PACKED: usize = 4;

    #[inline(always)]
    unsafe fn constants() -> Self::Constants {}

    #[inline(always)]
    unsafe fn zero() -> Self::Acc {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc {
        std::array::from_fn(|i| left[i] + right[i])
    }

    #[inline(always)]
    unsafe fn sub(left: Self::Acc, right: Self::Acc) -> Self::Acc {
        std::array::from_fn(|i| left[i] - right[i])
    }

    #[inline(always)]
    unsafe fn mul(left: Self::Acc, right: Self::Acc) -> Self::Acc {
        std::array::from_fn(|i| left[i] * right[i])
    }

    #[inline(always)]
    unsafe fn line(line: *const u16, _constants: Self::Constants) -> Self::Line {
        // SAFETY: the caller passes 32 readable elements.
        let line = unsafe { &*line.cast::<[[u16; 2]; LANES]>() };
        std::array::from_fn(|k| std::array::from_fn(|i| widen(line[i][k])))
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Acc {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn e4m3s(at: *const u8, lines: usize) -> Self::E4m3s {
        let line = |line: usize| {
            if line < lines {
                // SAFETY: the caller passes so many lines.
                unsafe { at.add(LINE * line).cast::<[[u8; 2]; LANES]>().read_unaligned() }
            } else {
                [[0; 2]; LANES]
            }
        };
        [line(0), line(1)]
    }

    #[inline(always)]
    unsafe fn e4m3(lines: Self::E4m3s, index: usize) -> Self::Line {
        // As half precision they are 2^-8 of themselves by their bits alone.
        let value = |bits: u8| f16::from_bits(u16::from(bits & 0x80) << 8 | u16::from(bits & 0x7f) << 7).to_f32();
        std::array::from_fn(|k| std::array::from_fn(|i| value(lines[index][i][k])))
    }

    #[inline(always)]
    unsafe fn int4s(at: *const u8) -> Self::Int4s {
        // SAFETY: the caller passes 64 readable bytes.
        unsafe { at.cast::<[u8; 64]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn int4(lines: Self::Int4s, index: usize, _constants: Self::Constants) -> Self::Line {
        let value = |lane: usize, k: usize| {
            let (byte, high) = int4_place(index, lane, k);
            INT4_RAISED + f32::from(if high { lines[byte] >> 4 } else { lines[byte] & 15 })
        };
        std::array::from_fn(|k| std::array::from_fn(|i| value(i, k)))
    }

    #[inline(always)]
    unsafe fn scales(scales: *const u8, raised: f32) -> Self::Acc {
        // SAFETY: the caller passes 16 readable bf16.
        unsafe { scales.cast::<[u16; LANES]>().read_unaligned() }.map(|scale| widen(scale) * raised)
    }

    #[inline(always)]
    unsafe fn zeros(zeros: *const u8) -> Self::Acc {
        // SAFETY: the caller passes 8 readable bytes.
        let zeros = unsafe { zeros.cast::<[u8; LANES / 2]>().read_unaligned() };
        std::array::from_fn(|i| f32::from(zeros[i % 8] >> (i / 8 * 4) & 15))
    }

    #[inline(always)]
    unsafe fn store_line(line: Self::Line, to: *mut u16) {
        let words: [[u16; 2]; LANES] = std::array::from_fn(|i| [0, 1].map(|k| (line[k][i].to_bits() >> 16) as u16));
        // SAFETY: the caller passes 32 writable elements.
        unsafe { to.cast::<[[u16; 2]; LANES]>().write_unaligned(words) }
    }

    #[inline(always)]
    unsafe fn pair(pair: *const u16, _constants: Self::Constants) -> Self::Pair {
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

    #[inline(always)]
    unsafe fn prefetch_near(_address: *const u16) {}
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512Bf16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{E4M3_SMALL_BYTES, INT4_RAISED_BITS, LINE, Lanes};

    /// Sixteen E4M3, in the upper bytes of words, as fp32, 2^-8 of them: as half precision they are that by their bits
    /// alone, one place lower. The conversion takes subnormal ones as they are in any floating-point mode.
    #[inline(always)]
    unsafe fn halves(words: __m256i) -> [__m256; 2] {
        // SAFETY: the caller's processor has AVX2 and F16C. The sign, moved along, stands in its place, too.
        unsafe {
            let bits = _mm256_and_si256(_mm256_srai_epi16::<1>(words), _mm256_set1_epi16(0xbf80_u16.cast_signed()));
            [_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(bits))]
        }
    }

    /// Of `VPTERNLOG`: a & b | c.
    const AND_OR: i32 = 0xea;

    /// Sixteen bytes, in each quarter of a register.
    #[inline(always)]
    unsafe fn four_times(table: &[u8; 16]) -> __m512i {
        // SAFETY: the caller's processor has AVX-512, and an array of sixteen bytes is readable.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) }
    }

    /// Line `index` of four of 4 bits, of eight lanes: see [`int4_place`](super::int4_place).
    #[inline(always)]
    unsafe fn numbers(lines: __m256i, index: usize, high_halves: __m256i) -> [__m256; 2] {
        // SAFETY: the caller's processor has AVX2.
        unsafe {
            let bits = match index {
                0 => lines,
                1 => _mm256_srli_epi16::<4>(lines),
                2 => _mm256_srli_epi16::<8>(lines),
                _ => _mm256_srli_epi16::<12>(lines),
            };
            let bits = _mm256_and_si256(bits, _mm256_set1_epi16(15));
            widened(_mm256_or_si256(bits, _mm256_set1_epi16(INT4_RAISED_BITS)), high_halves)
        }
    }

    /// Two bf16 in each 32-bit word as fp32: the lower ones, and the upper ones.
    #[inline(always)]
    unsafe fn widened(words: __m256i, high_halves: __m256i) -> [__m256; 2] {
        // SAFETY: the caller's processor has AVX2.
        unsafe {
            let high = _mm256_and_si256(words, high_halves);
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(high)]
        }
    }

    /// AVX2, FMA and F16C: an accumulator is two registers.
    pub struct Avx2;

    impl Lanes for Avx2 {
        type Acc = [__m256; 2];
        /// `[k][half of the lanes]`
        type Line = [[__m256; 2]; 2];
        type Pair = [__m256; 2];
        /// A line each.
        type E4m3s = [__m256i; 2];
        /// `[half of the lanes]`
        type Int4s = [__m256i; 2];
        /// A mask of the upper halves of 32-bit words.
        type Constants = __m256i;

        /// Of sixteen registers a column takes two.
        const COLUMNS: usize = 4;
        const MOST_BLOCK_PACKED: usize = 2;

        #[inline(always)]
        unsafe fn constants() -> Self::Constants {
            // SAFETY: the trait's contract: the processor has AVX2. A mask that the compiler sees becomes a blend,
            // which has fewer ports.
            unsafe { _mm256_set1_epi32(std::hint::black_box(0xffff_0000_u32).cast_signed()) }
        }

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
        unsafe fn sub(left: Self::Acc, right: Self::Acc) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2.
            unsafe { [_mm256_sub_ps(left[0], right[0]), _mm256_sub_ps(left[1], right[1])] }
        }

        #[inline(always)]
        unsafe fn mul(left: Self::Acc, right: Self::Acc) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2.
            unsafe { [_mm256_mul_ps(left[0], right[0]), _mm256_mul_ps(left[1], right[1])] }
        }

        #[inline(always)]
        unsafe fn line(line: *const u16, constants: Self::Constants) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX2, and 32 elements are readable. A 32-bit word is one
            // lane's (k, k + 1).
            unsafe {
                let [left, right] = [_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(16).cast())];
                let ([a, b], [c, d]) = (widened(left, constants), widened(right, constants));
                [[a, c], [b, d]]
            }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2.
            unsafe { [_mm256_set1_ps(value); 2] }
        }

        #[inline(always)]
        unsafe fn e4m3s(at: *const u8, lines: usize) -> Self::E4m3s {
            // SAFETY: the trait's contract: the processor has AVX2, and `lines` lines are readable.
            unsafe {
                let first = _mm256_loadu_si256(at.cast());
                [first, if lines > 1 { _mm256_loadu_si256(at.add(LINE).cast()) } else { first }]
            }
        }

        #[inline(always)]
        unsafe fn e4m3(lines: Self::E4m3s, index: usize) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX2 and F16C.
            unsafe { [halves(_mm256_slli_epi16::<8>(lines[index])), halves(lines[index])] }
        }

        #[inline(always)]
        unsafe fn int4s(at: *const u8) -> Self::Int4s {
            // SAFETY: the trait's contract: the processor has AVX2, and 64 bytes are readable.
            unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] }
        }

        #[inline(always)]
        unsafe fn int4(lines: Self::Int4s, index: usize, constants: Self::Constants) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX2.
            unsafe {
                let ([a, b], [c, d]) = (numbers(lines[0], index, constants), numbers(lines[1], index, constants));
                [[a, c], [b, d]]
            }
        }

        #[inline(always)]
        unsafe fn scales(scales: *const u8, raised: f32) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2, and 16 bf16 are readable.
            unsafe {
                let mut all = [_mm256_set1_ps(raised); 2];
                for half in 0..2 {
                    let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(scales.add(16 * half).cast()));
                    all[half] = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), all[half]);
                }
                all
            }
        }

        #[inline(always)]
        unsafe fn zeros(zeros: *const u8) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX2, and 8 bytes are readable.
            unsafe {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros.cast()));
                let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
                [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes))]
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
        unsafe fn pair(pair: *const u16, constants: Self::Constants) -> Self::Pair {
            // SAFETY: the trait's contract: the processor has AVX2, and two elements are readable. They are loaded
            // together: two moves from scalars take longer.
            unsafe { widened(_mm256_set1_epi32(pair.cast::<i32>().read_unaligned()), constants) }
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

        #[inline(always)]
        unsafe fn prefetch_near(address: *const u16) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
    }

    /// AVX-512 BF16: one register, one `VDPBF16PS` for a line and a column.
    pub struct Avx512Bf16;

    impl Lanes for Avx512Bf16 {
        type Acc = __m512;
        type Line = __m512bh;
        type Pair = __m512bh;
        /// A quarter of the lanes of one line, then the same of the other.
        type E4m3s = __m512i;
        type Int4s = __m512i;
        type Constants = ();

        const COLUMNS: usize = 8;
        const MOST_BLOCK_PACKED: usize = 4;

        #[inline(always)]
        unsafe fn constants() -> Self::Constants {}

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
        unsafe fn sub(left: Self::Acc, right: Self::Acc) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512.
            unsafe { _mm512_sub_ps(left, right) }
        }

        #[inline(always)]
        unsafe fn mul(left: Self::Acc, right: Self::Acc) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512.
            unsafe { _mm512_mul_ps(left, right) }
        }

        #[inline(always)]
        unsafe fn line(line: *const u16, _constants: Self::Constants) -> Self::Line {
            // SAFETY: 32 elements are readable; both types are 512 plain bits.
            unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(line.cast())) }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512.
            unsafe { _mm512_set1_ps(value) }
        }

        #[inline(always)]
        unsafe fn e4m3s(at: *const u8, lines: usize) -> Self::E4m3s {
            // SAFETY: the trait's contract: the processor has AVX-512, and `lines` lines are readable.
            unsafe {
                let both = match lines {
                    1 => _mm512_castsi256_si512(_mm256_loadu_si256(at.cast())),
                    _ => _mm512_loadu_si512(at.cast()),
                };
                _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), both)
            }
        }

        #[inline(always)]
        unsafe fn e4m3(lines: Self::E4m3s, index: usize) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX-512. A byte is seeee mmm; the bf16 of a normal number
            // is s0111eee emmm0000. Small ones are looked up, by their lowest four bits.
            unsafe {
                let small_low = four_times(&E4M3_SMALL_BYTES[0]);
                let small_high = four_times(&E4M3_SMALL_BYTES[1]);
                let is_small = _mm512_testn_epi8_mask(lines, _mm512_set1_epi8(0x70));
                let lowest = _mm512_and_si512(lines, _mm512_set1_epi8(0x0f));
                let low = _mm512_and_si512(_mm512_slli_epi16::<4>(lines), _mm512_set1_epi8(0xf0_u8.cast_signed()));
                let low = _mm512_mask_shuffle_epi8(low, is_small, small_low, lowest);
                let high = _mm512_srli_epi16::<4>(lines);
                let high = _mm512_ternarylogic_epi32::<AND_OR>(high, _mm512_set1_epi8(0x07), _mm512_set1_epi8(0x38));
                let high = _mm512_mask_shuffle_epi8(high, is_small, small_high, lowest);
                let high = _mm512_ternarylogic_epi32::<AND_OR>(lines, _mm512_set1_epi8(i8::MIN), high);
                std::mem::transmute::<__m512i, __m512bh>(match index {
                    0 => _mm512_unpacklo_epi8(low, high),
                    _ => _mm512_unpackhi_epi8(low, high),
                })
            }
        }

        #[inline(always)]
        unsafe fn int4s(at: *const u8) -> Self::Int4s {
            // SAFETY: the trait's contract: the processor has AVX-512, and 64 bytes are readable.
            unsafe { _mm512_loadu_si512(at.cast()) }
        }

        #[inline(always)]
        unsafe fn int4(lines: Self::Int4s, index: usize, _constants: Self::Constants) -> Self::Line {
            // SAFETY: the trait's contract: the processor has AVX-512; both types are 512 plain bits.
            unsafe {
                let bits = match index {
                    0 => lines,
                    1 => _mm512_srli_epi16::<4>(lines),
                    2 => _mm512_srli_epi16::<8>(lines),
                    _ => _mm512_srli_epi16::<12>(lines),
                };
                let (lowest, raised) = (_mm512_set1_epi16(15), _mm512_set1_epi16(INT4_RAISED_BITS));
                let number = _mm512_ternarylogic_epi32::<AND_OR>(bits, lowest, raised);
                std::mem::transmute::<__m512i, __m512bh>(number)
            }
        }

        #[inline(always)]
        unsafe fn scales(scales: *const u8, raised: f32) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512, and 16 bf16 are readable.
            unsafe {
                let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(scales.cast()));
                _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_set1_ps(raised))
            }
        }

        #[inline(always)]
        unsafe fn zeros(zeros: *const u8) -> Self::Acc {
            // SAFETY: the trait's contract: the processor has AVX-512, and 8 bytes are readable.
            unsafe {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros.cast()));
                let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), _mm256_srli_epi32::<4>(bytes));
                _mm512_cvtepi32_ps(both)
            }
        }

        #[inline(always)]
        unsafe fn store_line(line: Self::Line, to: *mut u16) {
            // SAFETY: 32 elements are writable; both types are 512 plain bits.
            unsafe { _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(line)) }
        }

        #[inline(always)]
        unsafe fn pair(pair: *const u16, _constants: Self::Constants) -> Self::Pair {
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

        #[inline(always)]
        unsafe fn prefetch_near(address: *const u16) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
    }
}
