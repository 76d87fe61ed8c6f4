//! `y = W x` over packed tiles: the kernel that weights stream through.
//!
//! Arithmetic of one output (row, column): each leaf starts from zero and ascends K two at a time in one fp32
//! accumulator (which of the two comes first is up to the instruction set: see [`Lanes::dot`]); leaves combine as the
//! binary tree of [`crate::plan::tree`]. Where a column is split in a high and a low part, each step of K adds both,
//! high first. How many tiles and columns run interleaved changes only
//! what happens between two operations of one accumulator, never their order: bits do not depend on it.
//!
//! Weights in groups are multiplied by their scales, and rounded to bf16, in registers: what is added up is the bits of
//! a panel of bf16 with these weights. Where there are more columns than one call takes, [`expand`] does that once.
#![allow(unsafe_code)]

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512Bf16};
use super::lanes::{LANES, LINE, Lanes, Portable};
use crate::model::WeightFormat;
use crate::plan::{MAX_LEAVES, Runs};

/// Most columns of one call: a line of weights is loaded once for all of them.
pub const MAX_COLUMNS: usize = 8;
/// (tile, column) pairs that run interleaved, where there are fewer columns: enough to hide the latency of a dot
/// product. More would be more tiles side by side, and at the start of each run of tiles all but the last begin unasked
/// for. Measured on a copy of the kernel over 32 MiB (best tenth of the passes, two cores of an EPYC that read 60
/// GB/s): 2 columns by 2 tiles 59 GB/s and by 4 tiles 52; 4 by 1 and 4: 56 and 48; 8 by 1 and 2: 54 and 48.
const MOST_BLOCK: usize = 4;
/// The same of weights in groups, whose unpacking takes registers and hides latency, too.
const MOST_BLOCK_SCALED: usize = 4;
/// How far ahead of the line in use a tile's lines are asked for into L2, in bytes: farther for one tile than for
/// each of several. Measured as above: 4 columns by 1 tile 56 GB/s at 8 KiB and 43 at 4; 1 column by 4 tiles 61 at 2
/// KiB.
const fn prefetch_distance(columns: usize) -> usize {
    if columns < MOST_BLOCK { 2048 } else { 8192 }
}
/// Sums a tree of [`MAX_LEAVES`] leaves has open at one time, the finished root included.
const TREE_DEPTH: usize = MAX_LEAVES.ilog2() as usize + 1;

/// Row tiles one after the other, each `[leaves][pairs of k]` lines of `[16 rows][2 k]` weights. In groups, each run of
/// a leaf begins with its scales and zero points.
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
    /// The pairs that have scales in common.
    pub runs: Runs,
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
        self.format.bytes(self.pairs() * LINE) + self.format.group_bytes(LANES) * self.runs.count(self.leaves)
    }

    fn check(&self) {
        assert!(self.leaves.is_power_of_two() && self.leaves <= MAX_LEAVES, "{} leaves", self.leaves);
        assert!(self.tiles > 0 && self.pairs() > 0, "an empty panel");
        assert_eq!(self.runs.of(0).sum::<usize>(), self.leaf_pairs, "pairs of the runs of a leaf");
        let line_end = self.tiles * self.tile_bytes();
        assert!(line_end <= self.data.len(), "a panel of {} bytes ends at {line_end}", self.data.len());
    }

    fn check_product(&self, x: &Columns<'_>, out: &[f32]) {
        self.check();
        assert!((1..=MAX_COLUMNS).contains(&x.count), "{} columns", x.count);
        assert!((1..=2).contains(&x.parts), "{} parts", x.parts);
        let column_end = (x.count * x.parts - 1) * x.stride + 2 * self.pairs();
        assert!(column_end <= x.data.len(), "columns of {} elements end at {column_end}", x.data.len());
        assert!(x.count * self.tiles * LANES <= out.len(), "{} outputs", out.len());
    }
}

/// How the lines of a panel are read.
trait Stored {
    /// Bytes of a line.
    const LINE_BYTES: usize;
    /// (Tile, column) pairs that run interleaved: what unpacks weights needs registers too, and hides latency.
    const MOST_BLOCK: usize;
    /// What the weights of a run have in common.
    type Scales<L: Lanes>: Copy;

    /// Reads what stands at the beginning of a run, and moves `at` to its lines.
    ///
    /// # Safety
    /// Those of [`Lanes`]; `group_bytes` are readable.
    unsafe fn scales<L: Lanes>(at: &mut *const u8) -> Self::Scales<L>;
    /// Reads the line at `at`, of a run with these scales.
    ///
    /// # Safety
    /// Those of [`Lanes`]; `LINE_BYTES` are readable.
    unsafe fn line<L: Lanes>(at: *const u8, scales: Self::Scales<L>) -> L::Line;
}

struct Bf16;
struct E4m3;
struct E4m3Groups;
struct Int4<const ZEROS: bool>;

impl Stored for Bf16 {
    const LINE_BYTES: usize = WeightFormat::Bf16.bytes(LINE);
    const MOST_BLOCK: usize = MOST_BLOCK;
    type Scales<L: Lanes> = ();

    #[inline(always)]
    unsafe fn scales<L: Lanes>(_at: &mut *const u8) {}

    #[inline(always)]
    unsafe fn line<L: Lanes>(at: *const u8, (): ()) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::line(at.cast()) }
    }
}

impl Stored for E4m3 {
    const LINE_BYTES: usize = WeightFormat::E4m3.bytes(LINE);
    const MOST_BLOCK: usize = MOST_BLOCK;
    type Scales<L: Lanes> = ();

    #[inline(always)]
    unsafe fn scales<L: Lanes>(_at: &mut *const u8) {}

    #[inline(always)]
    unsafe fn line<L: Lanes>(at: *const u8, (): ()) -> L::Line {
        // SAFETY: the caller's. E4M3 have fewer bits than bf16.
        unsafe { L::exact(L::e4m3(at)) }
    }
}

/// What E4M3 are divided by while they are multiplied ([`Lanes::e4m3`]): it is in the scales.
pub const E4M3_RAISED: f32 = 256.0;

impl Stored for E4m3Groups {
    const LINE_BYTES: usize = E4m3::LINE_BYTES;
    const MOST_BLOCK: usize = MOST_BLOCK_SCALED;
    type Scales<L: Lanes> = L::Scales;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(at: &mut *const u8) -> L::Scales {
        // SAFETY: the caller's; a header is 16 bf16.
        unsafe {
            let scales = L::scales(*at, [1.0 / E4M3_RAISED; 2]);
            *at = at.add(HEADER_BYTES);
            scales
        }
    }

    #[inline(always)]
    unsafe fn line<L: Lanes>(at: *const u8, scales: L::Scales) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::scaled::<false>(L::e4m3(at), scales) }
    }
}

impl<const ZEROS: bool> Stored for Int4<ZEROS> {
    const LINE_BYTES: usize = LINE / 2;
    const MOST_BLOCK: usize = MOST_BLOCK_SCALED;
    type Scales<L: Lanes> = L::Scales;

    #[inline(always)]
    unsafe fn scales<L: Lanes>(at: &mut *const u8) -> L::Scales {
        // SAFETY: the caller's; a header is 16 bf16, and 16 zero points of 4 bits where there are some.
        unsafe {
            let mut scales = L::scales(*at, L::INT4_RAISED);
            *at = at.add(HEADER_BYTES);
            if ZEROS {
                scales = L::with_zeros(scales, *at);
                *at = at.add(LANES / 2);
            }
            scales
        }
    }

    #[inline(always)]
    unsafe fn line<L: Lanes>(at: *const u8, scales: L::Scales) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::scaled::<ZEROS>(L::int4(at), scales) }
    }
}

/// Bytes of the scales of a run.
const HEADER_BYTES: usize = LANES * 2;

/// Writes `out[column][row]` for all rows of the panel: `[columns][tiles * 16]` fp32, before [`Panel::scale`].
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn product(isa: Isa, panel: Panel<'_>, x: Columns<'_>, out: &mut [f32]) {
    panel.check_product(&x, out);
    run(isa, &panel, Job::Product(&x, out));
}

/// Writes the weights of a panel in groups, times their scales, as those of a panel of bf16.
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn expand<'a>(isa: Isa, panel: Panel<'_>, out: &'a mut [u16]) -> Panel<'a> {
    panel.check();
    let out = &mut out[..panel.tiles * panel.pairs() * LINE];
    run(isa, &panel, Job::Expand(out));
    Panel {
        data: bytemuck::cast_slice(out),
        format: WeightFormat::Bf16,
        scales: &[],
        runs: Runs::whole(panel.leaf_pairs),
        ..panel
    }
}

/// What is done with the lines of a panel.
enum Job<'a, 'x> {
    Product(&'a Columns<'x>, &'a mut [f32]),
    /// To `[tiles][leaves][leaf_pairs][16][2]` bf16.
    Expand(&'a mut [u16]),
}

fn run(isa: Isa, panel: &Panel<'_>, job: Job<'_, '_>) {
    assert!(isa.available(), "{isa} on a processor without it");
    match isa {
        // SAFETY: the callers checked lengths, and the processor has `isa`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => unsafe { run_avx512(panel, job) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(panel, job) },
        // SAFETY: as above; plain Rust runs anywhere.
        _ => unsafe { run_stored::<Portable>(panel, job) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn run_avx512(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe { run_stored::<Avx512Bf16>(panel, job) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe { run_stored::<Avx2>(panel, job) }
}

/// # Safety
/// [`Panel::check`] passed, with what the job asks for, and the processor has the set `L`.
#[inline(always)]
unsafe fn run_stored<L: Lanes>(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe {
        match panel.format {
            WeightFormat::Bf16 => run_inlined::<L, Bf16>(panel, job),
            WeightFormat::E4m3 => run_inlined::<L, E4m3>(panel, job),
            WeightFormat::E4m3Groups { .. } => run_inlined::<L, E4m3Groups>(panel, job),
            WeightFormat::Int4 { zeros: false, .. } => run_inlined::<L, Int4<false>>(panel, job),
            WeightFormat::Int4 { zeros: true, .. } => run_inlined::<L, Int4<true>>(panel, job),
        }
    }
}

/// # Safety
/// As [`run_stored`].
#[inline(always)]
unsafe fn run_inlined<L: Lanes, S: Stored>(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe {
        match job {
            Job::Product(x, out) => product_inlined::<L, S>(panel, x, out),
            Job::Expand(out) => expand_inlined::<L, S>(panel, out),
        }
    }
}

/// # Safety
/// [`Panel::check`] passed, `out` has room for the tiles, and the processor has the set `L`.
#[inline(always)]
unsafe fn expand_inlined<L: Lanes, S: Stored>(panel: &Panel<'_>, out: &mut [u16]) {
    // SAFETY: every line read lies in the ranges `check` asserted, and `out` has as many.
    unsafe {
        let (mut at, mut to) = (panel.data.as_ptr(), out.as_mut_ptr());
        for _ in 0..panel.tiles {
            for run in (0..panel.leaves).flat_map(|leaf| panel.runs.of(leaf)) {
                let scales = S::scales::<L>(&mut at);
                for _ in 0..run {
                    L::store_line(S::line::<L>(at, scales), to);
                    at = at.add(S::LINE_BYTES);
                    to = to.add(LINE);
                }
            }
        }
    }
}

/// Walks the tiles in order, as many at a time as the columns leave accumulators for.
///
/// # Safety
/// [`Panel::check_product`] passed, and the processor has the set `L`.
#[inline(always)]
unsafe fn product_inlined<L: Lanes, S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, out: &mut [f32]) {
    let columns = x.count.next_power_of_two();
    let mut tile = 0;
    while tile < panel.tiles {
        let left = panel.tiles - tile;
        let most = (S::MOST_BLOCK / columns).max(1);
        let tiles = if left >= most { most } else { 1 << left.ilog2() };
        if columns > L::COLUMNS {
            // The second half finds the tile's lines in L2.
            for (x, sums) in halves(panel, x, out, L::COLUMNS) {
                // SAFETY: as below, of each half; columns past `x.count` are not written.
                unsafe {
                    match x.parts {
                        1 => block::<L, S, 1, 4, 1>(panel, &x, tile, sums),
                        _ => block::<L, S, 1, 4, 2>(panel, &x, tile, sums),
                    }
                }
            }
            tile += 1;
            continue;
        }
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

/// The first `count` columns and the rest, each with its sums.
fn halves<'a, 'x>(
    panel: &Panel<'_>,
    x: &Columns<'x>,
    out: &'a mut [f32],
    count: usize,
) -> [(Columns<'x>, &'a mut [f32]); 2] {
    let (sums, their_sums) = out.split_at_mut(count * panel.tiles * LANES);
    let others = Columns { data: &x.data[count * x.parts * x.stride..], count: x.count - count, ..*x };
    [(Columns { count, ..*x }, sums), (others, their_sums)]
}

/// `T` tiles from `first_tile` by `C` columns of `P` parts. Columns past `x.count` repeat the last one and are not
/// written.
///
/// # Safety
/// [`Panel::check_product`] passed, `first_tile + T <= panel.tiles`, and the processor has the set `L`.
#[inline(always)]
unsafe fn block<L: Lanes, S: Stored, const T: usize, const C: usize, const P: usize>(
    panel: &Panel<'_>,
    x: &Columns<'_>,
    first_tile: usize,
    out: &mut [f32],
) {
    // SAFETY: every line and pair read lies in the ranges `check_product` asserted: tiles under `panel.tiles`, pairs
    // under `leaves * leaf_pairs`, columns under `x.count`; prefetches may point anywhere. The loads and stores are
    // unaligned.
    unsafe {
        let mut at: [*const u8; T] =
            std::array::from_fn(|t| panel.data.as_ptr().add((first_tile + t) * panel.tile_bytes()));
        // One index for all columns: a pointer each would not fit the general registers beside eight columns.
        let columns: [*const u16; C] = std::array::from_fn(|c| x.data.as_ptr().add(c.min(x.count - 1) * P * x.stride));
        let mut k = 0;
        // open[l]: the left sum of 2^l leaves that waits for its right neighbour.
        let mut open = [[[L::zero(); C]; T]; TREE_DEPTH];
        for leaf in 0..panel.leaves {
            let mut acc = [[L::zero(); C]; T];
            for run in panel.runs.of(leaf) {
                let mut scales = [S::scales::<L>(&mut at[0]); T];
                for t in 1..T {
                    scales[t] = S::scales::<L>(&mut at[t]);
                }
                for _ in 0..run {
                    for t in 0..T {
                        let line = S::line::<L>(at[t], scales[t]);
                        L::prefetch(at[t].wrapping_add(const { prefetch_distance(C) }).cast());
                        at[t] = at[t].wrapping_add(S::LINE_BYTES);
                        for part in 0..P {
                            for c in 0..C {
                                let pair = L::pair(columns[c].wrapping_add(k + part * x.stride));
                                acc[t][c] = L::dot(acc[t][c], line, pair);
                            }
                        }
                    }
                    k += 2;
                }
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
mod tests;
