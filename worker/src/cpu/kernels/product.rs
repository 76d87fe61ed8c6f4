//! `y = W x` over packed tiles: the kernel that weights stream through.
//!
//! Arithmetic of one output (row, column): each leaf starts from zero and ascends K two at a time in one fp32
//! accumulator (which of the two comes first is up to the instruction set: see [`Lanes::dot`]); leaves combine as the
//! binary tree of [`crate::plan::tree`]. Where a column is split in a high and a low part, each step of K adds both,
//! high first. How many tiles and columns run interleaved changes only
//! what happens between two operations of one accumulator, never their order: bits do not depend on it.
#![allow(unsafe_code)]

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512Bf16};
use super::lanes::{LANES, LINE, Lanes, Portable};
use crate::model::WeightFormat;
use crate::plan::MAX_LEAVES;

/// Most columns of one call: a line of weights is loaded once for all of them.
pub const MAX_COLUMNS: usize = 8;
/// (tile, column) pairs that run interleaved, where there are fewer columns: enough to hide the latency of a dot
/// product. More would be more tiles side by side, and at the start of each run of tiles all but the last begin unasked
/// for. Measured on a copy of the kernel over 32 MiB (best tenth of the passes, two cores of an EPYC that read 60
/// GB/s): 2 columns by 2 tiles 59 GB/s and by 4 tiles 52; 4 by 1 and 4: 56 and 48; 8 by 1 and 2: 54 and 48.
const MAX_BLOCK: usize = 4;
/// How far ahead of the line in use a tile's lines are asked for into L2, in bytes: farther for one tile than for
/// each of several. Measured as above: 4 columns by 1 tile 56 GB/s at 8 KiB and 43 at 4; 1 column by 4 tiles 61 at 2
/// KiB.
const fn prefetch_distance(columns: usize) -> usize {
    if columns < MAX_BLOCK { 2048 } else { 8192 }
}
/// Sums a tree of [`MAX_LEAVES`] leaves has open at one time, the finished root included.
const TREE_DEPTH: usize = MAX_LEAVES.ilog2() as usize + 1;

/// Row tiles one after the other, each `[leaves][pairs of k]` lines of `[16 rows][2 k]` weights.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    /// `[tiles][leaves][leaf_pairs][16][2]` weights, or more; bf16 are aligned.
    pub data: &'a [u8],
    /// What they are.
    pub format: WeightFormat,
    /// `[tiles][16]`, by which [`Panel::scale`] multiplies sums; empty where weights have no scales.
    pub scales: &'a [f32],
    /// Row tiles.
    pub tiles: usize,
    /// Leaves of K; a power of two up to [`MAX_LEAVES`].
    pub leaves: usize,
    /// Pairs of k of a leaf.
    pub leaf_pairs: usize,
}

/// Activations: up to [`MAX_COLUMNS`] columns, each of one or two vectors of `2 * leaves * leaf_pairs` bf16. The second
/// vector, if there is one, is what rounding to the first left off.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// `[columns][parts]` vectors, each `stride` elements after the one before.
    pub data: &'a [u16],
    /// Elements from a vector to the next.
    pub stride: usize,
    /// Columns, 1 to [`MAX_COLUMNS`].
    pub count: usize,
    /// Vectors of a column: 1, or 2 for a high and a low part.
    pub parts: usize,
}

impl<'a> Panel<'a> {
    /// Tiles `[first, first + tiles)` of this panel.
    pub fn tiles(&self, first: usize, tiles: usize) -> Self {
        let scales = if self.scales.is_empty() { self.scales } else { &self.scales[first * LANES..][..tiles * LANES] };
        Self { data: &self.data[first * self.tile_bytes()..], scales, tiles, ..*self }
    }

    /// Applies the scales of the rows to the sums of all leaves of a column, `[tiles * 16]`.
    pub fn scale(&self, sums: &mut [f32]) {
        sums.iter_mut().zip(self.scales).for_each(|(sum, scale)| *sum *= scale);
    }

    fn pairs(&self) -> usize {
        self.leaves * self.leaf_pairs
    }

    fn tile_bytes(&self) -> usize {
        self.format.bytes(self.pairs() * LINE)
    }

    fn check(&self, x: &Columns<'_>, out: &[f32]) {
        assert!(self.leaves.is_power_of_two() && self.leaves <= MAX_LEAVES, "{} leaves", self.leaves);
        assert!(self.tiles > 0 && self.pairs() > 0, "an empty panel");
        assert!((1..=MAX_COLUMNS).contains(&x.count), "{} columns", x.count);
        assert!((1..=2).contains(&x.parts), "{} parts", x.parts);
        let line_end = self.tiles * self.tile_bytes();
        assert!(line_end <= self.data.len(), "a panel of {} bytes ends at {line_end}", self.data.len());
        let column_end = (x.count * x.parts - 1) * x.stride + 2 * self.pairs();
        assert!(column_end <= x.data.len(), "columns of {} elements end at {column_end}", x.data.len());
        assert!(x.count * self.tiles * LANES <= out.len(), "{} outputs", out.len());
    }
}

/// How the lines of a panel are read.
trait Stored {
    /// Bytes of a line.
    const LINE_BYTES: usize;
    /// Reads the line at `at`.
    ///
    /// # Safety
    /// Those of [`Lanes`]; `LINE_BYTES` are readable.
    unsafe fn line<L: Lanes>(at: *const u8) -> L::Line;
}

struct Bf16;
struct E4m3;

impl Stored for Bf16 {
    const LINE_BYTES: usize = WeightFormat::Bf16.bytes(LINE);

    #[inline(always)]
    unsafe fn line<L: Lanes>(at: *const u8) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::line(at.cast()) }
    }
}

impl Stored for E4m3 {
    const LINE_BYTES: usize = WeightFormat::E4m3.bytes(LINE);

    #[inline(always)]
    unsafe fn line<L: Lanes>(at: *const u8) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::line_e4m3(at) }
    }
}

/// What E4M3 are divided by while they are multiplied ([`Lanes::line_e4m3`]): it is in the scales.
pub const E4M3_RAISED: f32 = 256.0;

/// Writes `out[column][row]` for all rows of the panel: `[columns][tiles * 16]` fp32, before [`Panel::scale`].
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn product(isa: Isa, panel: Panel<'_>, x: Columns<'_>, out: &mut [f32]) {
    panel.check(&x, out);
    assert!(isa.available(), "{isa} on a processor without it");
    match isa {
        // SAFETY: lengths were checked above, and the processor has `isa`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => unsafe { product_avx512(&panel, &x, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { product_avx2(&panel, &x, out) },
        // SAFETY: as above; plain Rust runs anywhere.
        _ => unsafe { product_stored::<Portable>(&panel, &x, out) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn product_avx512(panel: &Panel<'_>, x: &Columns<'_>, out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe { product_stored::<Avx512Bf16>(panel, x, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn product_avx2(panel: &Panel<'_>, x: &Columns<'_>, out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe { product_stored::<Avx2>(panel, x, out) }
}

/// # Safety
/// [`Panel::check`] passed, and the processor has the set `L`.
#[inline(always)]
unsafe fn product_stored<L: Lanes>(panel: &Panel<'_>, x: &Columns<'_>, out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe {
        match panel.format {
            WeightFormat::Bf16 => product_inlined::<L, Bf16>(panel, x, out),
            WeightFormat::E4m3 => product_inlined::<L, E4m3>(panel, x, out),
            WeightFormat::E4m3Groups { .. } | WeightFormat::Int4 { .. } => unreachable!("a load expands groups"),
        }
    }
}

/// Walks the tiles in order, as many at a time as the columns leave accumulators for.
///
/// # Safety
/// [`Panel::check`] passed, and the processor has the set `L`.
#[inline(always)]
unsafe fn product_inlined<L: Lanes, S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, out: &mut [f32]) {
    let columns = x.count.next_power_of_two();
    let mut tile = 0;
    while tile < panel.tiles {
        let left = panel.tiles - tile;
        let most = (MAX_BLOCK / columns).max(1);
        let tiles = if left >= most { most } else { 1 << left.ilog2() };
        // SAFETY: `tile + tiles <= panel.tiles`, and `columns` is `x.count` or rounded up.
        unsafe {
            match (tiles, columns, x.parts) {
                (4, 1, 1) => block::<L, S, 4, 1, 1>(panel, x, tile, out),
                (4, 1, 2) => block::<L, S, 4, 1, 2>(panel, x, tile, out),
                (2, 1, 1) => block::<L, S, 2, 1, 1>(panel, x, tile, out),
                (2, 1, 2) => block::<L, S, 2, 1, 2>(panel, x, tile, out),
                (2, 2, 1) => block::<L, S, 2, 2, 1>(panel, x, tile, out),
                (2, 2, 2) => block::<L, S, 2, 2, 2>(panel, x, tile, out),
                (1, 1, 1) => block::<L, S, 1, 1, 1>(panel, x, tile, out),
                (1, 1, 2) => block::<L, S, 1, 1, 2>(panel, x, tile, out),
                (1, 2, 1) => block::<L, S, 1, 2, 1>(panel, x, tile, out),
                (1, 2, 2) => block::<L, S, 1, 2, 2>(panel, x, tile, out),
                (1, 4, 1) => block::<L, S, 1, 4, 1>(panel, x, tile, out),
                (1, 4, 2) => block::<L, S, 1, 4, 2>(panel, x, tile, out),
                (1, 8, 1) => block::<L, S, 1, 8, 1>(panel, x, tile, out),
                (1, 8, 2) => block::<L, S, 1, 8, 2>(panel, x, tile, out),
                other => unreachable!("no kernel for (tiles, columns, parts) {other:?}"),
            }
        }
        tile += tiles;
    }
}

/// `T` tiles from `first_tile` by `C` columns of `P` parts. Columns past `x.count` repeat the last one and are not
/// written.
///
/// # Safety
/// [`Panel::check`] passed, `first_tile + T <= panel.tiles`, and the processor has the set `L`.
#[inline(always)]
unsafe fn block<L: Lanes, S: Stored, const T: usize, const C: usize, const P: usize>(
    panel: &Panel<'_>,
    x: &Columns<'_>,
    first_tile: usize,
    out: &mut [f32],
) {
    // SAFETY: every line and pair read lies in the ranges `check` asserted: tiles under `panel.tiles`, pairs under
    // `leaves * leaf_pairs`, columns under `x.count`; prefetches may point anywhere. The loads and stores are
    // unaligned.
    unsafe {
        let mut lines: [*const u8; T] =
            std::array::from_fn(|t| panel.data.as_ptr().add((first_tile + t) * panel.tile_bytes()));
        // One index for all columns: a pointer each would not fit the general registers beside eight columns.
        let columns: [*const u16; C] = std::array::from_fn(|c| x.data.as_ptr().add(c.min(x.count - 1) * P * x.stride));
        let mut at = 0;
        // open[l]: the left sum of 2^l leaves that waits for its right neighbour.
        let mut open = [[[L::zero(); C]; T]; TREE_DEPTH];
        for leaf in 0..panel.leaves {
            let mut acc = [[L::zero(); C]; T];
            for _ in 0..panel.leaf_pairs {
                let mut line = [S::line::<L>(lines[0]); T];
                for t in 0..T {
                    line[t] = S::line::<L>(lines[t]);
                    L::prefetch(lines[t].wrapping_add(const { prefetch_distance(C) }).cast());
                    lines[t] = lines[t].wrapping_add(S::LINE_BYTES);
                }
                for part in 0..P {
                    for c in 0..C {
                        let pair = L::pair(columns[c].wrapping_add(at + part * x.stride));
                        for t in 0..T {
                            acc[t][c] = L::dot(acc[t][c], line[t], pair);
                        }
                    }
                }
                at += 2;
            }
            let mut level = 0;
            while (leaf >> level) & 1 == 1 {
                for t in 0..T {
                    for c in 0..C {
                        acc[t][c] = L::add(open[level][t][c], acc[t][c]);
                    }
                }
                level += 1;
            }
            open[level] = acc;
        }
        let root = &open[panel.leaves.ilog2() as usize];
        let rows = panel.tiles * LANES;
        for (t, columns) in root.iter().enumerate() {
            for (c, sum) in columns.iter().take(x.count).enumerate() {
                L::store(*sum, out.as_mut_ptr().add(c * rows + (first_tile + t) * LANES));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::kernels::isa::FlushDenormals;
    use crate::model::format::from_e4m3;

    /// Uniform in [-1, 1), from a counter.
    fn noise(seed: u64, i: usize) -> f32 {
        let mut z = (seed << 32).wrapping_add(i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z >> 40) as f32) / (1u64 << 23) as f32 - 1.0
    }

    fn random(seed: u64, len: usize) -> Vec<u16> {
        (0..len).map(|i| bf16::from_f32(noise(seed, i)).to_bits()).collect()
    }

    fn panel(data: &[u16], tiles: usize, leaves: usize, leaf_pairs: usize) -> Panel<'_> {
        let format = WeightFormat::Bf16;
        Panel { data: bytemuck::cast_slice(data), format, scales: &[], tiles, leaves, leaf_pairs }
    }

    fn isas() -> Vec<Isa> {
        [Isa::Avx512Bf16, Isa::Avx2, Isa::Portable].into_iter().filter(|isa| isa.available()).collect()
    }

    fn run(isa: Isa, panel: Panel<'_>, x: Columns<'_>) -> Vec<u32> {
        let mut out = vec![f32::NAN; x.count * panel.tiles * LANES];
        product(isa, panel, x, &mut out);
        out.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn agrees_with_double_precision() {
        let (tiles, leaves, leaf_pairs) = (7, 4, 24);
        let k = 2 * leaves * leaf_pairs;
        let weights = random(1, tiles * k * LANES);
        let x = random(2, 5 * 2 * k);
        let value = |bits: u16| f64::from(bf16::from_bits(bits).to_f32());
        for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
            let out =
                run(isa, panel(&weights, tiles, leaves, leaf_pairs), Columns { data: &x, stride: k, count: 5, parts });
            for column in 0..5 {
                for row in 0..tiles * LANES {
                    let weight = |i: usize| weights[(row / LANES * k / 2 + i / 2) * LINE + row % LANES * 2 + i % 2];
                    let terms = (0..parts * k).map(|i| value(weight(i % k)) * value(x[column * parts * k + i]));
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                    let got = f64::from(f32::from_bits(out[column * tiles * LANES + row]));
                    // A rounding for each term, of at most 2^-24 of the running sum, which `size` bounds.
                    let bound = size * (parts * k) as f64 * 2f64.powi(-24);
                    assert!((got - sum).abs() <= bound, "{isa} {parts} {row} {column}: {got} {sum}");
                }
            }
        }
    }

    #[test]
    fn bits_depend_neither_on_other_columns_nor_on_the_tiles_beside() {
        let (tiles, leaves, leaf_pairs) = (11, 16, 8);
        let k = 2 * leaves * leaf_pairs;
        let weights = random(3, tiles * k * LANES);
        let whole = panel(&weights, tiles, leaves, leaf_pairs);
        for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
            let mut x = random(4, 8 * parts * k);
            let own = x[3 * parts * k..4 * parts * k].to_vec();
            let alone = run(isa, whole.tiles(6, 1), Columns { data: &own, stride: k, count: 1, parts });
            for poison in [false, true] {
                if poison {
                    x.fill(bf16::NAN.to_bits());
                    x[3 * parts * k..4 * parts * k].copy_from_slice(&own);
                }
                for count in 4..=8 {
                    let all = run(isa, whole, Columns { data: &x, stride: k, count, parts });
                    assert_eq!(all[3 * tiles * LANES + 6 * LANES..][..LANES], alone, "{isa} {parts} {count}");
                }
            }
        }
    }

    #[test]
    fn portable_and_avx2_agree_in_every_bit() {
        if !Isa::Avx2.available() {
            eprintln!("skipped: this processor has no AVX2");
            return;
        }
        let _mode = FlushDenormals::enter();
        let (tiles, leaves, leaf_pairs) = (5, 8, 40);
        let k = 2 * leaves * leaf_pairs;
        let (weights, x) = (random(5, tiles * k * LANES), random(6, 3 * 2 * k));
        for parts in [1, 2] {
            let columns = Columns { data: &x, stride: k, count: 3, parts };
            let bits = |isa| run(isa, panel(&weights, tiles, leaves, leaf_pairs), columns);
            assert_eq!(bits(Isa::Portable), bits(Isa::Avx2));
        }
    }

    /// E4M3 have the bits of bf16 that are 2^-8 of them, in any number of tiles, columns and parts; every value, and in
    /// a mode without denormals.
    #[test]
    fn e4m3_have_the_bits_of_the_same_weights_as_bf16() {
        let _mode = FlushDenormals::enter();
        let (tiles, leaves, leaf_pairs) = (7, 4, 24);
        let k = 2 * leaves * leaf_pairs;
        let bits: Vec<u8> = (0..tiles * k * LANES)
            .map(|i| (noise(9, i).to_bits() >> 8) as u8)
            .map(|bits| if bits & 0x7f == 0x7f { bits ^ 1 } else { bits })
            .collect();
        assert_eq!((0..=255u8).filter(|of| bits.contains(of)).count(), 254);
        let same = |bits: &u8| bf16::from_f32(from_e4m3(*bits).to_f32() / E4M3_RAISED).to_bits();
        let plain: Vec<u16> = bits.iter().map(same).collect();
        let x = random(10, 8 * 2 * k);
        for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
            for count in 1..=8 {
                let x = Columns { data: &x, stride: k, count, parts };
                let bf16 = panel(&plain, tiles, leaves, leaf_pairs);
                let e4m3 = Panel { data: &bits, format: WeightFormat::E4m3, ..bf16 };
                assert_eq!(run(isa, e4m3, x), run(isa, bf16, x), "{isa} {parts} {count}");
                assert_eq!(run(isa, e4m3.tiles(2, 3), x), run(isa, bf16.tiles(2, 3), x), "{isa} {parts} {count}");
            }
        }
    }

    #[test]
    fn leaves_sum_as_the_plans_tree() {
        let (leaves, leaf_pairs) = (16, 3);
        let k = 2 * leaves * leaf_pairs;
        let (weights, x) = (random(7, k * LANES), random(8, k));
        for isa in isas() {
            let columns =
                |leaf: usize| Columns { data: &x[leaf * 2 * leaf_pairs..], stride: 2 * leaf_pairs, count: 1, parts: 1 };
            let mut sums: Vec<f32> = (0..leaves)
                .flat_map(|leaf| {
                    let one = panel(&weights[leaf * leaf_pairs * LINE..], 1, 1, leaf_pairs);
                    run(isa, one, columns(leaf)).into_iter().map(f32::from_bits)
                })
                .collect();
            let whole = run(isa, panel(&weights, 1, leaves, leaf_pairs), columns(0));
            crate::plan::tree::tree_sum_rows(&mut sums, LANES);
            assert_eq!(whole, sums[..LANES].iter().map(|sum| sum.to_bits()).collect::<Vec<_>>(), "{isa}");
        }
    }

    #[test]
    #[should_panic(expected = "columns of 15 elements end at 16")]
    fn a_short_column_is_refused() {
        let weights = random(11, 16 * LANES);
        product(
            Isa::Portable,
            panel(&weights, 1, 1, 8),
            Columns { data: &[0; 15], stride: 16, count: 1, parts: 1 },
            &mut [0.0; 16],
        );
    }
}
