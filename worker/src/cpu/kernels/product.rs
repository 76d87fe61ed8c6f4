//! `y = W x` over packed tiles: the kernel that weights stream through.
//!
//! Arithmetic of one output (row, column): each leaf starts from zero and ascends K two at a time in one fp32
//! accumulator (which of the two comes first is up to the instruction set: see [`Lanes::dot`]); leaves combine as the
//! binary tree of [`crate::plan::tree`]. Where a column is split in a high and a low part, each step of K adds both,
//! high first. How many tiles and columns run interleaved changes only
//! what happens between two operations of one accumulator, never their order: bits do not depend on it.
//!
//! Weights in groups have no scale on their way into a sum. Each run of a leaf, what it has of one group, is a sum of
//! its own that starts from zero; times the group's scale (a rounding) it is added to the leaf's sum (another). Where
//! groups have zero points, the run's inputs are summed as well, in the same order, and so many times that sum are
//! taken off before. For several columns [`expand`] unpacks weights once; the sums stay the same.
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
/// How far ahead of the line in use a tile's lines are asked for into L2, in bytes: farther for one tile than for
/// each of several. Measured as above: 4 columns by 1 tile 56 GB/s at 8 KiB and 43 at 4; 1 column by 4 tiles 61 at 2
/// KiB.
const fn prefetch_distance(columns: usize) -> usize {
    if columns < MOST_BLOCK { 2048 } else { 8192 }
}
/// Sums a tree of [`MAX_LEAVES`] leaves has open at one time, the finished root included.
const TREE_DEPTH: usize = MAX_LEAVES.ilog2() as usize + 1;

/// Row tiles one after the other, each `[leaves][pairs of k]` lines of `[16 rows][2 k]` weights, of 4 bits four lines
/// side by side ([`int4_place`](super::lanes::int4_place)). In groups, each run of a leaf ends with its scales and zero
/// points.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    data: &'a [u8],
    format: WeightFormat,
    /// The lines are bf16 of weights in groups of `format`.
    expanded: bool,
    scales: &'a [f32],
    tiles: usize,
    tile_bytes: usize,
    leaves: usize,
    leaf_pairs: usize,
    runs: Runs,
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
    /// `tiles` tiles of `data`, which may be longer, of `leaves` leaves (a power of two up to [`MAX_LEAVES`]) of
    /// `leaf_pairs` pairs of k that have scales in common as `runs` says. `scales`: `[tiles][16]`, by which
    /// [`Panel::scale`] multiplies sums; empty where rows have none.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn new(
        data: &'a [u8],
        format: WeightFormat,
        scales: &'a [f32],
        tiles: usize,
        (leaves, leaf_pairs, runs): (usize, usize, Runs),
    ) -> Self {
        assert!(leaves.is_power_of_two() && leaves <= MAX_LEAVES, "{leaves} leaves");
        assert!(tiles > 0 && leaf_pairs > 0, "an empty panel");
        assert_eq!(runs.of(0).sum::<usize>(), leaf_pairs, "pairs of the runs of a leaf");
        let tile_bytes = runs.bytes(format, leaves);
        let end = tiles * tile_bytes;
        assert!(end <= data.len(), "a panel of {} bytes ends at {end}", data.len());
        Self { data, format, expanded: false, scales, tiles, tile_bytes, leaves, leaf_pairs, runs }
    }

    /// Row tiles.
    pub fn row_tiles(&self) -> usize {
        self.tiles
    }

    /// What the weights are stored in.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The weights, as they are packed.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Tiles `[first, first + tiles)` of this panel.
    pub fn tiles(&self, first: usize, tiles: usize) -> Self {
        assert!(first + tiles <= self.tiles && tiles > 0, "tiles {first} to {} of {}", first + tiles, self.tiles);
        let scales = if self.scales.is_empty() { self.scales } else { &self.scales[first * LANES..][..tiles * LANES] };
        Self { data: &self.data[first * self.tile_bytes..], scales, tiles, ..*self }
    }

    /// Applies the scales of the rows to the sums of all leaves of a column, `[tiles * 16]`.
    pub fn scale(&self, sums: &mut [f32]) {
        sums.iter_mut().zip(self.scales).for_each(|(sum, scale)| *sum *= scale);
    }

    fn pairs(&self) -> usize {
        self.leaves * self.leaf_pairs
    }

    fn check_product(&self, x: &Columns<'_>, out: &[f32]) {
        assert!((1..=MAX_COLUMNS).contains(&x.count), "{} columns", x.count);
        assert!((1..=2).contains(&x.parts), "{} parts", x.parts);
        let column_end = (x.count * x.parts - 1) * x.stride + 2 * self.pairs();
        assert!(column_end <= x.data.len(), "columns of {} elements end at {column_end}", x.data.len());
        assert!(x.count * self.tiles * LANES <= out.len(), "{} outputs", out.len());
    }
}

/// How the lines of a panel are read.
trait Stored {
    /// Lines that are read at one time, from 64 bytes.
    const LINES: usize;
    /// Whether weights are in groups: runs end with what those have in common.
    const GROUPS: bool;
    /// Whether that is zero points, too.
    const ZEROS: bool;
    /// Whether lines are bf16 as they are stored.
    const UNPACKED: bool = false;
    /// Lines as they are stored.
    type Lines<L: Lanes>: Copy;

    /// Bytes that so many lines take, at most `LINES`.
    fn bytes(lines: usize) -> usize;
    /// Reads `lines` lines at `at`.
    ///
    /// # Safety
    /// Those of [`Lanes`]; `bytes(lines)` are readable.
    unsafe fn read<L: Lanes>(at: *const u8, lines: usize, constants: L::Constants) -> Self::Lines<L>;
    /// Line `index` of these.
    ///
    /// # Safety
    /// Those of [`Lanes`].
    unsafe fn line<L: Lanes>(lines: Self::Lines<L>, index: usize, constants: L::Constants) -> L::Line;
}

struct Bf16;
struct E4m3;
struct Int4;
/// Weights in groups, whose lines are those of `S`.
struct Grouped<S, const ZEROS: bool>(std::marker::PhantomData<S>);

impl Stored for Bf16 {
    const LINES: usize = 1;
    const GROUPS: bool = false;
    const ZEROS: bool = false;
    const UNPACKED: bool = true;
    type Lines<L: Lanes> = L::Line;

    #[inline(always)]
    fn bytes(lines: usize) -> usize {
        lines * WeightFormat::Bf16.bytes(LINE)
    }

    #[inline(always)]
    unsafe fn read<L: Lanes>(at: *const u8, _lines: usize, constants: L::Constants) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::line(at.cast(), constants) }
    }

    #[inline(always)]
    unsafe fn line<L: Lanes>(lines: L::Line, _index: usize, _constants: L::Constants) -> L::Line {
        lines
    }
}

/// What E4M3 are divided by while they are multiplied ([`Lanes::e4m3`]): it is in the scales.
pub const E4M3_RAISED: f32 = 256.0;

impl Stored for E4m3 {
    const LINES: usize = 2;
    const GROUPS: bool = false;
    const ZEROS: bool = false;
    type Lines<L: Lanes> = L::E4m3s;

    #[inline(always)]
    fn bytes(lines: usize) -> usize {
        lines * WeightFormat::E4m3.bytes(LINE)
    }

    #[inline(always)]
    unsafe fn read<L: Lanes>(at: *const u8, lines: usize, _constants: L::Constants) -> L::E4m3s {
        // SAFETY: the caller's.
        unsafe { L::e4m3s(at, lines) }
    }

    #[inline(always)]
    unsafe fn line<L: Lanes>(lines: L::E4m3s, index: usize, _constants: L::Constants) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::e4m3(lines, index) }
    }
}

impl Stored for Int4 {
    const LINES: usize = INT4_LINES;
    const GROUPS: bool = false;
    const ZEROS: bool = false;
    type Lines<L: Lanes> = L::Int4s;

    /// Of fewer lines the rest is not looked at.
    #[inline(always)]
    fn bytes(_lines: usize) -> usize {
        INT4_LINES * LINE / 2
    }

    #[inline(always)]
    unsafe fn read<L: Lanes>(at: *const u8, _lines: usize, _constants: L::Constants) -> L::Int4s {
        // SAFETY: the caller's.
        unsafe { L::int4s(at) }
    }

    #[inline(always)]
    unsafe fn line<L: Lanes>(lines: L::Int4s, index: usize, constants: L::Constants) -> L::Line {
        // SAFETY: the caller's.
        unsafe { L::int4(lines, index, constants) }
    }
}

impl<S: Stored, const ZEROS: bool> Stored for Grouped<S, ZEROS> {
    const LINES: usize = S::LINES;
    const GROUPS: bool = true;
    const ZEROS: bool = ZEROS;
    const UNPACKED: bool = S::UNPACKED;
    type Lines<L: Lanes> = S::Lines<L>;

    #[inline(always)]
    fn bytes(lines: usize) -> usize {
        S::bytes(lines)
    }

    #[inline(always)]
    unsafe fn read<L: Lanes>(at: *const u8, lines: usize, constants: L::Constants) -> S::Lines<L> {
        // SAFETY: the caller's.
        unsafe { S::read::<L>(at, lines, constants) }
    }

    #[inline(always)]
    unsafe fn line<L: Lanes>(lines: S::Lines<L>, index: usize, constants: L::Constants) -> L::Line {
        // SAFETY: the caller's.
        unsafe { S::line::<L>(lines, index, constants) }
    }
}

/// Lines of 4 bits side by side.
const INT4_LINES: usize = WeightFormat::Int4 { columns: 16, zeros: false }.packed_pairs();
/// Bytes of the scales of a run.
const SCALES_BYTES: usize = LANES * 2;
/// Bytes of its zero points.
const ZEROS_BYTES: usize = LANES / 2;

/// Writes `out[column][row]` for all rows of the panel: `[columns][tiles * 16]` fp32, before [`Panel::scale`].
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn product(isa: Isa, panel: Panel<'_>, x: Columns<'_>, out: &mut [f32]) {
    panel.check_product(&x, out);
    run(isa, &panel, Job::Product(&x, out));
}

/// Whether so many rows are faster with weights that [`expand`] unpacked than with those of the panel, whose lines are
/// unpacked for each [`MAX_COLUMNS`] rows.
pub fn expands(isa: Isa, format: WeightFormat, rows: usize) -> bool {
    match (format, isa) {
        (WeightFormat::Bf16, _) => false,
        // Unpacking leaves too few of sixteen registers for the sums of several columns.
        (WeightFormat::Int4 { .. }, Isa::Avx2) => rows > 2,
        _ => rows > MAX_COLUMNS,
    }
}

/// Writes the weights of a panel as bf16, without their scales, which follow each run as they do in the panel. Products
/// with what is returned have the same bits.
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn expand<'a>(isa: Isa, panel: Panel<'a>, out: &'a mut [u16]) -> Panel<'a> {
    let tile_bytes = panel.runs.expanded_bytes(panel.format, panel.leaves);
    let out = &mut out[..panel.tiles * tile_bytes / size_of::<u16>()];
    run(isa, &panel, Job::Expand(out));
    Panel { data: bytemuck::cast_slice(out), expanded: true, tile_bytes, ..panel }
}

/// What is done with the lines of a panel.
enum Job<'a, 'x> {
    Product(&'a Columns<'x>, &'a mut [f32]),
    /// To `[tiles][leaves][leaf_pairs][16][2]` bf16, and what ends runs.
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
/// [`Panel::check_product`] passed, or `out` has room for what is expanded, and the processor has the set `L`.
#[inline(always)]
unsafe fn run_stored<L: Lanes>(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe {
        match (panel.format, panel.expanded) {
            (WeightFormat::Bf16, _) | (WeightFormat::E4m3, true) => run_inlined::<L, Bf16>(panel, job),
            (WeightFormat::E4m3, false) => run_inlined::<L, E4m3>(panel, job),
            (WeightFormat::E4m3Groups { .. }, false) => run_inlined::<L, Grouped<E4m3, false>>(panel, job),
            (WeightFormat::Int4 { zeros: false, .. }, false) => run_inlined::<L, Grouped<Int4, false>>(panel, job),
            (WeightFormat::Int4 { zeros: true, .. }, false) => run_inlined::<L, Grouped<Int4, true>>(panel, job),
            (WeightFormat::Int4 { zeros: true, .. }, true) => run_inlined::<L, Grouped<Bf16, true>>(panel, job),
            (_, true) => run_inlined::<L, Grouped<Bf16, false>>(panel, job),
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
/// `out` has room for what is expanded, and the processor has the set `L`.
#[inline(always)]
unsafe fn expand_inlined<L: Lanes, S: Stored>(panel: &Panel<'_>, out: &mut [u16]) {
    // SAFETY: every line read lies in the ranges that `Panel::new` asserted, and `out` has as many.
    unsafe {
        let constants = L::constants();
        let end_bytes = panel.format.group_bytes(LANES);
        let (mut at, mut to) = (panel.data.as_ptr(), out.as_mut_ptr());
        for _ in 0..panel.tiles {
            for run in (0..panel.leaves).flat_map(|leaf| panel.runs.of(leaf)) {
                let mut left = run;
                while left > 0 {
                    let lines = left.min(S::LINES);
                    let read = S::read::<L>(at, lines, constants);
                    for index in 0..S::LINES {
                        if index < lines {
                            L::store_line(S::line::<L>(read, index, constants), to.add(index * LINE));
                        }
                    }
                    at = at.add(S::bytes(lines));
                    to = to.add(lines * LINE);
                    left -= lines;
                }
                at.copy_to_nonoverlapping(to.cast(), end_bytes);
                at = at.add(end_bytes);
                to = to.add(end_bytes / size_of::<u16>());
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
        let most = (if S::UNPACKED { MOST_BLOCK } else { L::MOST_BLOCK_PACKED } / columns).max(1);
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
        let mut tiles = Tiles {
            at: std::array::from_fn(|t| panel.data.as_ptr().add((first_tile + t) * panel.tile_bytes)),
            ahead: 0,
        };
        // One index for all columns: a pointer each would not fit the general registers beside eight columns.
        let at_first = std::array::from_fn(|c| x.data.as_ptr().add(c.min(x.count - 1) * P * x.stride));
        let columns = Begins { at: at_first, stride: x.stride };
        let constants = L::constants();
        let (distance, leaf_bytes) = (const { prefetch_distance(C) }, panel.tile_bytes / panel.leaves);
        let raised = if matches!(panel.format, WeightFormat::E4m3Groups { .. }) { E4M3_RAISED } else { 1.0 };
        let mut k = 0;
        // open[l]: the left sum of 2^l leaves that waits for its right neighbour.
        let mut open = [[[L::zero(); C]; T]; TREE_DEPTH];
        for leaf in 0..panel.leaves {
            let mut acc = [[L::zero(); C]; T];
            // Behind a tile's end lies one that runs beside it: what is asked for is the next one of its turn.
            let is_last = (leaf + 1) * leaf_bytes + distance > panel.tile_bytes;
            tiles.ahead = if is_last { distance + (T - 1) * panel.tile_bytes } else { distance };
            for run in panel.runs.of(leaf) {
                let mut sum = if S::GROUPS { [[L::zero(); C]; T] } else { acc };
                // The sum of the inputs, in all lanes.
                let mut inputs = [L::zero(); C];
                for _ in 0..run / S::LINES {
                    step::<L, S, T, C, P>(&mut tiles, &columns, k, S::LINES, &mut sum, &mut inputs, constants);
                    k += 2 * S::LINES;
                }
                let left = run % S::LINES;
                if left > 0 {
                    step::<L, S, T, C, P>(&mut tiles, &columns, k, left, &mut sum, &mut inputs, constants);
                    k += 2 * left;
                }
                acc = if S::GROUPS { end_run::<L, S, T, C>(&mut tiles.at, raised, acc, sum, inputs) } else { sum };
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

/// Where the columns of a product begin, and how far apart the parts of one are, in elements.
#[derive(Clone, Copy)]
struct Begins<const C: usize> {
    at: [*const u16; C],
    stride: usize,
}

impl<const C: usize> Begins<C> {
    /// Address of pair `k / 2` of a part of a column.
    #[inline(always)]
    fn pair(&self, column: usize, part: usize, k: usize) -> *const u16 {
        self.at[column].wrapping_add(k + part * self.stride)
    }
}

/// Tiles that run side by side: where the next lines are, and how many bytes behind those lines are asked for.
struct Tiles<const T: usize> {
    at: [*const u8; T],
    ahead: usize,
}

/// Adds `lines` lines of each tile, from pair `k / 2` on, to the sums.
///
/// # Safety
/// As [`block`], for these lines.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "a column is an index of several arrays")]
unsafe fn step<L: Lanes, S: Stored, const T: usize, const C: usize, const P: usize>(
    tiles: &mut Tiles<T>,
    columns: &Begins<C>,
    k: usize,
    lines: usize,
    sum: &mut [[L::Acc; C]; T],
    inputs: &mut [L::Acc; C],
    constants: L::Constants,
) {
    const { assert!(T == 1 || T == 2 || T == 4) };
    // SAFETY: the caller's. No loop, because the compiler leaves a long one as it is, with the sums in memory; and no
    // closure, because it would not be compiled for the set.
    unsafe {
        step_of_tile::<L, S, C, P>(&mut tiles.at[0], tiles.ahead, columns, k, lines, &mut sum[0], constants);
        if T > 1 {
            step_of_tile::<L, S, C, P>(&mut tiles.at[1], tiles.ahead, columns, k, lines, &mut sum[1], constants);
        }
        if T > 2 {
            step_of_tile::<L, S, C, P>(&mut tiles.at[2], tiles.ahead, columns, k, lines, &mut sum[2], constants);
            step_of_tile::<L, S, C, P>(&mut tiles.at[3], tiles.ahead, columns, k, lines, &mut sum[3], constants);
        }
    }
    if S::ZEROS {
        for index in 0..S::LINES {
            if index < lines {
                for c in 0..C {
                    for part in 0..P {
                        // SAFETY: the caller's.
                        unsafe {
                            let pair = L::pair(columns.pair(c, part, k + 2 * index), constants);
                            inputs[c] = L::dot(inputs[c], L::ones(), pair);
                        }
                    }
                }
            }
        }
    }
}

/// As [`step`], of one tile.
///
/// # Safety
/// As [`step`].
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "a column is an index of several arrays")]
unsafe fn step_of_tile<L: Lanes, S: Stored, const C: usize, const P: usize>(
    at: &mut *const u8,
    ahead: usize,
    columns: &Begins<C>,
    k: usize,
    lines: usize,
    sum: &mut [L::Acc; C],
    constants: L::Constants,
) {
    // SAFETY: the caller's; a prefetch may point anywhere.
    unsafe {
        let read = S::read::<L>(*at, lines, constants);
        L::prefetch(at.wrapping_add(ahead).cast());
        *at = at.wrapping_add(S::bytes(lines));
        for index in 0..S::LINES {
            if index < lines {
                let line = S::line::<L>(read, index, constants);
                for part in 0..P {
                    for c in 0..C {
                        let pair = L::pair(columns.pair(c, part, k + 2 * index), constants);
                        sum[c] = L::dot(sum[c], line, pair);
                    }
                }
            }
        }
    }
}

/// Moves past the ends of a run, and adds its sums times their scales to those of the leaf.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn end_run<L: Lanes, S: Stored, const T: usize, const C: usize>(
    at: &mut [*const u8; T],
    raised: f32,
    mut acc: [[L::Acc; C]; T],
    mut sum: [[L::Acc; C]; T],
    inputs: [L::Acc; C],
) -> [[L::Acc; C]; T] {
    // SAFETY: the caller's: scales, and zero points where there are some, lie behind the lines of a run.
    unsafe {
        for t in 0..T {
            let scales = L::scales(at[t], raised);
            at[t] = at[t].wrapping_add(SCALES_BYTES);
            if S::ZEROS {
                let zeros = L::zeros(at[t]);
                at[t] = at[t].wrapping_add(ZEROS_BYTES);
                for c in 0..C {
                    sum[t][c] = L::sub(sum[t][c], L::mul(zeros, inputs[c]));
                }
            }
            for c in 0..C {
                acc[t][c] = L::add(acc[t][c], L::mul(scales, sum[t][c]));
            }
        }
        acc
    }
}

#[cfg(test)]
mod tests;
