//! `y = W x` over packed tiles: the kernel that weights stream through.
//!
//! Arithmetic of one output (row, column) with vector instructions ([`vectors`]): each leaf starts from zero and
//! ascends K two at a time in one fp32 accumulator (which of the two comes first is up to the instruction set: see
//! [`Lanes::dot`]); leaves combine as the binary tree of [`crate::plan::tree`]. Where a column is split in a high and a
//! low part, each step of K adds both, high first. AMX has an order of its own within a leaf ([`amx`]), and so a bit
//! domain of its own. How many tiles and columns run interleaved changes only what happens between two operations of
//! one accumulator, never their order: bits do not depend on it.
//!
//! Weights in groups have no scale on their way into a sum. Each run of a leaf, what it has of one group, is a sum of
//! its own that starts from zero; times the group's scale (a rounding) it is added to the leaf's sum (another). Weights
//! of 4 bits are 128 more in it than what is stored, which takes the fewest instructions; the run's inputs are summed
//! as well ([`sums_of_inputs`]), and what is too much, 128 and the zero point, times that sum is taken off before. For
//! several columns [`expand`] unpacks weights once; the sums stay the same.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod stored;
mod vectors;

use std::marker::PhantomData;

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512Bf16};
use super::lanes::{INT4_RAISED, LANES, LINE, Lanes, Portable};
use crate::model::WeightFormat;
use crate::model::format::MIDDLE;
use crate::plan::runs::RunsOfLeaf;
use crate::plan::{MAX_LEAVES, Runs};

pub use stored::E4M3_RAISED;
use stored::{Bf16, E4m3, Grouped, Int4, Stored, unpack};

/// Most columns of one call.
pub const MAX_COLUMNS: usize = 32;
/// How far ahead of the lines that are expanded others are asked for, in bytes.
const EXPAND_AHEAD: usize = 2048;
/// Bytes of the scales of a run.
const SCALES_BYTES: usize = LANES * 2;
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
    /// Runs of all leaves.
    run_count: usize,
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
        let run_count = (0..leaves).map(|leaf| runs.of(leaf).count()).sum();
        assert!(format.group().is_some() || run_count == leaves, "{run_count} runs without groups");
        let tile_bytes = runs.bytes(format, leaves);
        let end = tiles * tile_bytes;
        assert!(end <= data.len(), "a panel of {} bytes ends at {end}", data.len());
        Self { data, format, expanded: false, scales, tiles, tile_bytes, leaves, leaf_pairs, runs, run_count }
    }

    /// Row tiles.
    pub fn row_tiles(&self) -> usize {
        self.tiles
    }

    /// Where scales end in the leaves.
    pub fn runs(&self) -> Runs {
        self.runs
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

    /// Whether products take off what weights are raised by, times the sums of the inputs.
    pub fn is_raised(&self) -> bool {
        matches!(self.format, WeightFormat::Int4 { .. })
    }

    fn check_product(&self, x: &Columns<'_>, out: &[f32]) {
        self.check_columns(x);
        assert!(x.count * self.tiles * LANES <= out.len(), "{} outputs", out.len());
    }

    fn check_columns(&self, x: &Columns<'_>) {
        assert!((1..=MAX_COLUMNS).contains(&x.count), "{} columns", x.count);
        assert!((1..=2).contains(&x.parts), "{} parts", x.parts);
        let column_end = (x.count * x.parts - 1) * x.stride + 2 * self.pairs();
        assert!(column_end <= x.data.len(), "columns of {} elements end at {column_end}", x.data.len());
    }
}

/// Writes `out[column][row]` for all rows of the panel: `[columns][tiles * 16]` fp32, before [`Panel::scale`].
/// `of_inputs`: [`sums_of_inputs`] of all columns, if [`Panel::is_raised`].
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn product(isa: Isa, panel: Panel<'_>, x: Columns<'_>, of_inputs: &[f32], out: &mut [f32]) {
    panel.check_product(&x, out);
    let sums = if panel.is_raised() { panel.run_count * x.count } else { 0 };
    assert_eq!(of_inputs.len(), sums, "sums of the inputs of {} runs and {} columns", panel.run_count, x.count);
    run(isa, &panel, Job::Product(&x, of_inputs, out));
}

/// Sums of the inputs of each run of the leaves, `[columns][runs]`: lane i of sixteen adds pair i of each sixteen, the
/// high part's before the low one's, and of a run's lanes each half is added to the other. They are the same for all
/// tiles of a product.
///
/// # Panics
/// If a length does not fit, or this processor lacks `isa`.
pub fn sums_of_inputs(isa: Isa, panel: &Panel<'_>, x: &Columns<'_>) -> Box<[f32]> {
    panel.check_columns(x);
    let mut sums = Vec::with_capacity(panel.run_count * x.count);
    run(isa, panel, Job::Inputs(x, &mut sums));
    sums.into()
}

/// Whether so many rows are faster with weights that [`expand`] unpacked than with those of the panel, whose lines are
/// unpacked for each block of rows.
pub fn expands(isa: Isa, format: WeightFormat, rows: usize) -> bool {
    match (format, isa) {
        (WeightFormat::Bf16, _) => false,
        // Unpacking leaves too few of sixteen registers for the sums of several columns.
        (WeightFormat::Int4 { .. }, Isa::Avx2) => rows > 2,
        (_, Isa::Amx) => rows > MAX_COLUMNS,
        _ => rows > vectors::MAX_COLUMNS,
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
    Product(&'a Columns<'x>, &'a [f32], &'a mut [f32]),
    /// To `[columns][runs]`.
    Inputs(&'a Columns<'x>, &'a mut Vec<f32>),
    /// To `[tiles][leaves][leaf_pairs][16][2]` bf16, and what ends runs.
    Expand(&'a mut [u16]),
}

fn run(isa: Isa, panel: &Panel<'_>, job: Job<'_, '_>) {
    assert!(isa.available(), "{isa} on a processor without it");
    match isa {
        // SAFETY: the callers checked lengths, and the processor has `isa`.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => unsafe { run_amx(panel, job) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => unsafe { run_avx512(panel, job) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(panel, job) },
        // SAFETY: as above; plain Rust runs anywhere.
        _ => unsafe { run_stored::<Vectors<Portable>>(panel, job) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn run_amx(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe { run_stored::<Amx>(panel, job) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn run_avx512(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe { run_stored::<Vectors<Avx512Bf16>>(panel, job) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe { run_stored::<Vectors<Avx2>>(panel, job) }
}

/// How lines become sums.
trait Kernel {
    /// What unpacks lines.
    type Lanes: Lanes;

    /// Writes the sums of a panel whose lines are stored as `S`.
    ///
    /// # Safety
    /// [`Panel::check_product`] passed, and the processor has the set.
    unsafe fn product<S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, of_inputs: &[f32], out: &mut [f32]);
}

struct Vectors<L>(PhantomData<L>);

impl<L: Lanes> Kernel for Vectors<L> {
    type Lanes = L;

    #[inline(always)]
    unsafe fn product<S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, of_inputs: &[f32], out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { vectors::product::<L, S>(panel, x, of_inputs, out) }
    }
}

#[cfg(target_arch = "x86_64")]
struct Amx;

#[cfg(target_arch = "x86_64")]
impl Kernel for Amx {
    type Lanes = Avx512Bf16;

    #[inline(always)]
    unsafe fn product<S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, of_inputs: &[f32], out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { amx::product::<S>(panel, x, of_inputs, out) }
    }
}

/// # Safety
/// [`Panel::check_product`] passed, or `out` has room for what is expanded, and the processor has the set of `K`.
#[inline(always)]
unsafe fn run_stored<K: Kernel>(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe {
        match (panel.format, panel.expanded) {
            (WeightFormat::Bf16, _) | (WeightFormat::E4m3, true) => run_inlined::<K, Bf16>(panel, job),
            (WeightFormat::E4m3, false) => run_inlined::<K, E4m3>(panel, job),
            (WeightFormat::E4m3Groups { .. }, false) => run_inlined::<K, Grouped<E4m3, false>>(panel, job),
            (WeightFormat::E4m3Groups { .. }, true) => run_inlined::<K, Grouped<Bf16, false>>(panel, job),
            (WeightFormat::Int4 { .. }, false) => run_inlined::<K, Grouped<Int4, true>>(panel, job),
            (WeightFormat::Int4 { .. }, true) => run_inlined::<K, Grouped<Bf16, true>>(panel, job),
        }
    }
}

/// # Safety
/// As [`run_stored`].
#[inline(always)]
unsafe fn run_inlined<K: Kernel, S: Stored>(panel: &Panel<'_>, job: Job<'_, '_>) {
    // SAFETY: the caller's.
    unsafe {
        match job {
            Job::Product(x, of_inputs, out) => K::product::<S>(panel, x, of_inputs, out),
            Job::Inputs(x, sums) => add_inputs::<K::Lanes>(panel, x, sums),
            Job::Expand(out) => expand_inlined::<K::Lanes, S>(panel, out),
        }
    }
}

/// See [`sums_of_inputs`].
///
/// # Safety
/// [`Panel::check_columns`] passed, and the processor has the set `L`.
#[inline(always)]
unsafe fn add_inputs<L: Lanes>(panel: &Panel<'_>, x: &Columns<'_>, sums: &mut Vec<f32>) {
    for column in 0..x.count {
        let mut at = &x.data[column * x.parts * x.stride..];
        let mut runs = AllRuns::new(panel.runs, panel.leaves);
        while let Some(Run { pairs, .. }) = runs.next() {
            let (len, whole) = (2 * pairs, 2 * pairs / LINE * LINE);
            let parts = [&at[..len], &at[(x.parts - 1) * x.stride..][..len]];
            let mut lanes = [0.0; LANES];
            // SAFETY: the caller's; a line is so long, or is filled with zeros.
            unsafe {
                let constants = L::constants();
                let ones = L::pair([0x3f80; 2].as_ptr(), constants);
                let mut sum = L::zero();
                for line in (0..whole).step_by(LINE) {
                    sum = L::dot(sum, L::line(parts[0].as_ptr().add(line), constants), ones);
                    if x.parts == 2 {
                        sum = L::dot(sum, L::line(parts[1].as_ptr().add(line), constants), ones);
                    }
                }
                if whole < len {
                    for part in &parts[..x.parts] {
                        let mut line = [0; LINE];
                        line[..len - whole].copy_from_slice(&part[whole..]);
                        sum = L::dot(sum, L::line(line.as_ptr(), constants), ones);
                    }
                }
                L::store(sum, lanes.as_mut_ptr());
            }
            for half in [8, 4, 2, 1] {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
            }
            sums.push(lanes[0]);
            at = &at[len..];
        }
    }
}

/// The scales of a run at `scales`.
///
/// # Safety
/// The processor has the set `L`, and scales are readable.
#[inline(always)]
unsafe fn scales<L: Lanes>(format: WeightFormat, scales: *const u8) -> L::Acc {
    let raised = if matches!(format, WeightFormat::E4m3Groups { .. }) { E4M3_RAISED } else { 1.0 };
    // SAFETY: the caller's.
    unsafe { L::scales(scales, raised) }
}

/// What the sums of the inputs are taken off times: what lines have too much, and the zero points at `zeros`, or the
/// middle where there are none.
///
/// # Safety
/// The processor has the set `L`, and zero points are readable where `format` has some.
#[inline(always)]
unsafe fn too_much<L: Lanes>(format: WeightFormat, zeros: *const u8) -> L::Acc {
    // SAFETY: the caller's.
    unsafe {
        let raised = L::splat(INT4_RAISED);
        L::add(raised, if format.has_zeros() { L::zeros(zeros) } else { L::splat(f32::from(MIDDLE)) })
    }
}

/// # Safety
/// `out` has room for what is expanded, and the processor has the set `L`.
#[inline(always)]
unsafe fn expand_inlined<L: Lanes, S: Stored>(panel: &Panel<'_>, out: &mut [u16]) {
    // SAFETY: every line read lies in the ranges that `Panel::new` asserted, and `out` has as many.
    unsafe {
        let end_bytes = panel.format.group_bytes(LANES);
        let (mut at, mut to) = (panel.data.as_ptr(), out.as_mut_ptr());
        for _ in 0..panel.tiles {
            for run in (0..panel.leaves).flat_map(|leaf| panel.runs.of(leaf)) {
                at = unpack::<L, S>(at, run, to, EXPAND_AHEAD);
                to = to.add(run * LINE);
                at.copy_to_nonoverlapping(to.cast(), end_bytes);
                at = at.add(end_bytes);
                to = to.add(end_bytes / size_of::<u16>());
            }
        }
    }
}

/// The runs of a panel's leaves, in order.
struct AllRuns {
    runs: Runs,
    leaf: usize,
    leaves: usize,
    of_leaf: RunsOfLeaf,
    begins_leaf: bool,
    next: Option<usize>,
}

/// A run of a leaf.
#[derive(Clone, Copy)]
struct Run {
    pairs: usize,
    /// It is the first of its leaf.
    begins_leaf: bool,
    /// The leaf whose last run it is.
    ends_leaf: Option<usize>,
}

impl AllRuns {
    #[inline(always)]
    fn new(runs: Runs, leaves: usize) -> Self {
        let mut of_leaf = runs.of(0);
        let next = of_leaf.next();
        Self { runs, leaf: 0, leaves, of_leaf, begins_leaf: true, next }
    }

    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        let pairs = self.next?;
        let begins_leaf = self.begins_leaf;
        self.next = self.of_leaf.next();
        self.begins_leaf = self.next.is_none();
        let ends_leaf = self.begins_leaf.then_some(self.leaf);
        if ends_leaf.is_some() {
            self.leaf += 1;
            if self.leaf < self.leaves {
                self.of_leaf = self.runs.of(self.leaf);
                self.next = self.of_leaf.next();
            }
        }
        Some(Run { pairs, begins_leaf, ends_leaf })
    }
}

#[cfg(test)]
mod tests;
