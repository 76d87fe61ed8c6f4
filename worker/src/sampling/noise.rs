//! Gumbel noise that is a function of seed, position and token id alone.
//!
//! Bits come from Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
//! easy as 1, 2, 3", SC 2011), with the seed as key, low word first, and (block, position, 0, 0) as counter. A block of
//! four words serves four tokens: of the `g`-th [`GROUP`] of consecutive ids, block `16 g + b` holds those at `b`,
//! `b + 16`, `b + 32` and `b + 48`, so that sixteen blocks fill whole vectors.

#[cfg(target_arch = "x86_64")]
use super::vectors::wide_vectors;
use crate::math::ln_f64;

/// Tokens that share a run of blocks.
pub const GROUP: usize = 64;
/// Blocks of a group.
const BLOCKS: usize = GROUP / 4;
/// No noise exceeds this: `-ln(-ln(1 - 2^-33))` is 22.874.
pub const MAX_GUMBEL: f32 = 22.88;

const MULTIPLIER_0: u32 = 0xD251_1F53;
const MULTIPLIER_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;
const ROUNDS: usize = 10;

/// The noise of one draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    key: [u32; 2],
    position: u32,
}

impl Noise {
    /// Noise for the token at `position` of a sequence with this seed.
    pub fn new(seed: u64, position: u32) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], position }
    }

    /// Random bits of one token.
    pub fn bits(&self, token: u32) -> u32 {
        let within = token as usize % GROUP;
        let block = token / GROUP as u32 * BLOCKS as u32 + (within % BLOCKS) as u32;
        philox([[block], [self.position], [0], [0]], self.key)[within / BLOCKS][0]
    }

    /// Random bits of the tokens from `group * GROUP` on: token `lane * 16 + b` of the group at `[lane][b]`.
    #[allow(unsafe_code)]
    pub fn group_bits(&self, group: u32) -> [[u32; BLOCKS]; 4] {
        #[cfg(target_arch = "x86_64")]
        if wide_vectors() {
            // SAFETY: the processor has the instructions.
            return unsafe { self.group_bits_avx512(group) };
        }
        self.group_bits_portable(group)
    }

    // Neither version is inlined: the loops of `philox` vectorise when they are compiled on their own.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn group_bits_avx512(&self, group: u32) -> [[u32; BLOCKS]; 4] {
        self.group_philox(group)
    }

    #[inline(never)]
    fn group_bits_portable(&self, group: u32) -> [[u32; BLOCKS]; 4] {
        self.group_philox(group)
    }

    #[inline(always)]
    fn group_philox(&self, group: u32) -> [[u32; BLOCKS]; 4] {
        let first = group.wrapping_mul(BLOCKS as u32);
        let blocks = std::array::from_fn(|b| first.wrapping_add(b as u32));
        philox([blocks, [self.position; BLOCKS], [0; BLOCKS], [0; BLOCKS]], self.key)
    }

    /// Standard Gumbel noise of one token.
    pub fn gumbel(&self, token: u32) -> f32 {
        gumbel(self.bits(token))
    }
}

/// Standard Gumbel noise from 32 random bits: `-ln(-ln u)` with `u = (bits + 1/2) / 2^32`, which double precision holds
/// exactly and which is never 0 or 1. In [-3.13, 22.88].
pub fn gumbel(bits: u32) -> f32 {
    let u = (f64::from(bits) + 0.5) / 4_294_967_296.0;
    -ln_f64(-ln_f64(u)) as f32
}

/// Never less than [`gumbel`] of the same bits, at most 0.16 more where the noise is between 2 and 14, and cheap.
///
/// With `v = 1 - u` and as `-ln u >= v`, the noise is at most `-ln v`; and `log2` of a float is at least the straight
/// line between powers of two, which is its bit pattern read as an integer.
#[inline(always)]
pub fn gumbel_bound(bits: u32) -> f32 {
    use std::f32::consts::LN_2;
    // v rounded down to 24 bits, times 2^24.
    let v = ((!bits) >> 8) as i32 as f32;
    let log2_scaled = v.to_bits() as i32 as f32;
    // 127 is the exponent's offset, 24 undoes the scale of v, and the margin covers this function's own rounding.
    (127.0 + 24.0) * LN_2 + 1e-3 - log2_scaled * (LN_2 / 8_388_608.0)
}

/// Philox4x32-10 of `N` counters side by side: word `w` of counter `i` at `[w][i]`.
///
/// Words stand in the low halves of 64-bit lanes, with anything in the high halves: so a vector multiplication, which
/// reads low halves, gives both halves of a product at once.
#[inline(always)]
fn philox<const N: usize>(counters: [[u32; N]; 4], mut key: [u32; 2]) -> [[u32; N]; 4] {
    let low = |word: u64| word & u64::from(u32::MAX);
    let mut wide = [[0u64; N]; 4];
    for (wide, word) in wide.as_flattened_mut().iter_mut().zip(counters.as_flattened()) {
        *wide = u64::from(*word);
    }
    let [mut c0, mut c1, mut c2, mut c3] = wide;
    for _ in 0..ROUNDS {
        for i in 0..N {
            let product_0 = low(c0[i]).wrapping_mul(u64::from(MULTIPLIER_0));
            let product_1 = low(c2[i]).wrapping_mul(u64::from(MULTIPLIER_1));
            c0[i] = (product_1 >> 32) ^ c1[i] ^ u64::from(key[0]);
            c1[i] = product_1;
            c2[i] = (product_0 >> 32) ^ c3[i] ^ u64::from(key[1]);
            c3[i] = product_0;
        }
        key = [key[0].wrapping_add(WEYL_0), key[1].wrapping_add(WEYL_1)];
    }
    let mut words = counters;
    for (word, wide) in words.as_flattened_mut().iter_mut().zip([c0, c1, c2, c3].as_flattened()) {
        *word = *wide as u32;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        // Random123's kat_vectors, "philox4x32 10".
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in cases {
            assert_eq!(philox(counter.map(|word: u32| [word]), key), answer.map(|word: u32| [word]));
        }
    }

    #[test]
    fn a_group_holds_the_bits_of_its_tokens() {
        let noise = Noise::new(0x0123_4567_89ab_cdef, 77);
        for group in [0, 1, 2004] {
            let bits = noise.group_bits(group);
            for (within, bits) in bits.iter().flatten().enumerate() {
                assert_eq!(*bits, noise.bits(group * GROUP as u32 + within as u32));
            }
            assert_eq!(bits, noise.group_bits_portable(group));
        }
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let bits = Noise::new(1, 2).bits(3);
        for other in [Noise::new(2, 2).bits(3), Noise::new(1 << 32 | 1, 2).bits(3), Noise::new(1, 3).bits(3)] {
            assert_ne!(bits, other);
        }
        let noise = Noise::new(9, 9);
        let distinct: std::collections::HashSet<u32> = (0..4096).map(|token| noise.bits(token)).collect();
        assert!(distinct.len() >= 4094, "{}", distinct.len());
    }

    #[test]
    fn the_noise_is_finite_and_its_bound_holds() {
        let samples = (0..2_000_000u32).map(|i| i.wrapping_mul(2_654_435_761));
        let edges = (0..1000).flat_map(|i| [i, u32::MAX - i]);
        let powers = (0..32).flat_map(|i| [1u32 << i, !(1 << i), (1 << i) - 1, !((1 << i) - 1)]);
        for bits in samples.chain(edges).chain(powers) {
            let noise = gumbel(bits);
            let bound = gumbel_bound(bits);
            assert!(noise.is_finite() && noise > -3.15 && noise <= MAX_GUMBEL, "{bits:#x}: {noise}");
            assert!(bound >= noise, "{bits:#x}: {noise} over {bound}");
            assert!(!(2.0..14.0).contains(&noise) || bound < noise + 0.16, "{bits:#x}: {bound} is loose for {noise}");
        }
    }

    #[test]
    fn the_noise_has_the_moments_of_a_gumbel_distribution() {
        let noise = Noise::new(42, 0);
        let count = 400_000u32;
        let values: Vec<f64> = (0..count).map(|token| f64::from(noise.gumbel(token))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(count);
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / f64::from(count);
        // Euler's constant and pi^2 / 6; six standard errors of the mean are 0.012.
        assert!((mean - 0.577_216).abs() < 0.012, "{mean}");
        assert!((variance - 1.644_934).abs() < 0.05, "{variance}");
    }
}
