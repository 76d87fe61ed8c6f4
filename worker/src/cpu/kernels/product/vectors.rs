//! The kernel of vector instructions: a lane for each row of a tile, and a register for each of its columns' sums.

use super::super::lanes::{LANES, Lanes};
use super::stored::Stored;
use super::{Columns, Panel, SCALES_BYTES, TREE_DEPTH, scales, too_much};
use crate::model::WeightFormat;

/// Most columns of one pass over the lines: a line of weights is loaded once for all of them.
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

/// Walks the columns, [`MAX_COLUMNS`] at a time.
///
/// # Safety
/// `Panel::check_product` passed, and the processor has the set `L`.
#[inline(always)]
pub unsafe fn product<L: Lanes, S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, of_inputs: &[f32], out: &mut [f32]) {
    let outputs = out.chunks_mut(MAX_COLUMNS * panel.tiles * LANES);
    for (first, out) in (0..x.count).step_by(MAX_COLUMNS).zip(outputs) {
        let (runs, count) = (of_inputs.len() / x.count, MAX_COLUMNS.min(x.count - first));
        let of_inputs = &of_inputs[runs * first..runs * (first + count)];
        let data = &x.data[first * x.parts * x.stride..];
        let x = Columns { data, count, ..*x };
        // SAFETY: the caller's.
        unsafe { columns::<L, S>(panel, &x, of_inputs, out) };
    }
}

/// Walks the tiles in order, as many at a time as the columns leave accumulators for.
///
/// # Safety
/// As [`product`], of at most [`MAX_COLUMNS`] columns.
#[inline(always)]
unsafe fn columns<L: Lanes, S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, of_inputs: &[f32], out: &mut [f32]) {
    let columns = x.count.next_power_of_two();
    let mut tile = 0;
    while tile < panel.tiles {
        let left = panel.tiles - tile;
        let most = (if S::UNPACKED { MOST_BLOCK } else { L::MOST_BLOCK_PACKED } / columns).max(1);
        let tiles = if left >= most { most } else { 1 << left.ilog2() };
        if columns > L::COLUMNS {
            // The second half finds the tile's lines in L2.
            for (x, of_inputs, sums) in halves(panel, (x, of_inputs), out, L::COLUMNS) {
                // SAFETY: as below, of each half; columns past `x.count` are not written.
                unsafe {
                    match x.parts {
                        1 => block::<L, S, 1, 4, 1>(panel, (&x, of_inputs), tile, sums),
                        _ => block::<L, S, 1, 4, 2>(panel, (&x, of_inputs), tile, sums),
                    }
                }
            }
            tile += 1;
            continue;
        }
        // SAFETY: `tile + tiles <= panel.tiles`, and `columns` is `x.count` or rounded up.
        unsafe {
            match (tiles, columns, x.parts) {
                (4, 1, 1) => block::<L, S, 4, 1, 1>(panel, (x, of_inputs), tile, out),
                (4, 1, 2) => block::<L, S, 4, 1, 2>(panel, (x, of_inputs), tile, out),
                (2, 1, 1) => block::<L, S, 2, 1, 1>(panel, (x, of_inputs), tile, out),
                (2, 1, 2) => block::<L, S, 2, 1, 2>(panel, (x, of_inputs), tile, out),
                (2, 2, 1) => block::<L, S, 2, 2, 1>(panel, (x, of_inputs), tile, out),
                (2, 2, 2) => block::<L, S, 2, 2, 2>(panel, (x, of_inputs), tile, out),
                (1, 1, 1) => block::<L, S, 1, 1, 1>(panel, (x, of_inputs), tile, out),
                (1, 1, 2) => block::<L, S, 1, 1, 2>(panel, (x, of_inputs), tile, out),
                (1, 2, 1) => block::<L, S, 1, 2, 1>(panel, (x, of_inputs), tile, out),
                (1, 2, 2) => block::<L, S, 1, 2, 2>(panel, (x, of_inputs), tile, out),
                (1, 4, 1) => block::<L, S, 1, 4, 1>(panel, (x, of_inputs), tile, out),
                (1, 4, 2) => block::<L, S, 1, 4, 2>(panel, (x, of_inputs), tile, out),
                (1, 8, 1) => block::<L, S, 1, 8, 1>(panel, (x, of_inputs), tile, out),
                (1, 8, 2) => block::<L, S, 1, 8, 2>(panel, (x, of_inputs), tile, out),
                other => unreachable!("no kernel for (tiles, columns, parts) {other:?}"),
            }
        }
        tile += tiles;
    }
}

/// The first `count` columns and the rest, each with the sums of its inputs and its outputs.
fn halves<'a, 'x>(
    panel: &Panel<'_>,
    (x, of_inputs): (&Columns<'x>, &'x [f32]),
    out: &'a mut [f32],
    count: usize,
) -> [(Columns<'x>, &'x [f32], &'a mut [f32]); 2] {
    let (sums, their_sums) = out.split_at_mut(count * panel.tiles * LANES);
    let (of_inputs, of_theirs) = of_inputs.split_at(count * of_inputs.len() / x.count);
    let others = Columns { data: &x.data[count * x.parts * x.stride..], count: x.count - count, ..*x };
    [(Columns { count, ..*x }, of_inputs, sums), (others, of_theirs, their_sums)]
}

/// `T` tiles from `first_tile` by `C` columns of `P` parts. Columns past `x.count` repeat the last one and are not
/// written.
///
/// # Safety
/// `Panel::check_product` passed, `first_tile + T <= panel.tiles`, and the processor has the set `L`.
#[inline(always)]
unsafe fn block<L: Lanes, S: Stored, const T: usize, const C: usize, const P: usize>(
    panel: &Panel<'_>,
    (x, of_inputs): (&Columns<'_>, &[f32]),
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
        let (mut k, mut runs_done) = (0, 0);
        // open[l]: the left sum of 2^l leaves that waits for its right neighbour.
        let mut open = [[[L::zero(); C]; T]; TREE_DEPTH];
        for leaf in 0..panel.leaves {
            let mut acc = [[L::zero(); C]; T];
            // Behind a tile's end lies one that runs beside it: in the last leaf (of one leaf: everywhere) what is
            // asked for is the next one of its turn.
            let is_last = (leaf + 1) * leaf_bytes + distance > panel.tile_bytes;
            tiles.ahead = if is_last { distance + (T - 1) * panel.tile_bytes } else { distance };
            for run in panel.runs.of(leaf) {
                let mut sum = if S::GROUPS { [[L::zero(); C]; T] } else { acc };
                for _ in 0..run / S::LINES {
                    step::<L, S, T, C, P>(&mut tiles, &columns, k, S::LINES, &mut sum, constants);
                    k += 2 * S::LINES;
                }
                let left = run % S::LINES;
                if left > 0 {
                    step::<L, S, T, C, P>(&mut tiles, &columns, k, left, &mut sum, constants);
                    k += 2 * left;
                }
                acc = match S::GROUPS {
                    true => {
                        let of_run = of_inputs.get(runs_done..).unwrap_or_default();
                        runs_done += 1;
                        let of_run = of_run.iter().step_by((of_inputs.len() / x.count).max(1));
                        end_run::<L, S, T, C>(panel.format, &mut tiles.at, of_run, acc, sum)
                    }
                    false => sum,
                };
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
unsafe fn step<L: Lanes, S: Stored, const T: usize, const C: usize, const P: usize>(
    tiles: &mut Tiles<T>,
    columns: &Begins<C>,
    k: usize,
    lines: usize,
    sum: &mut [[L::Acc; C]; T],
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

/// Moves past the ends of a run, and adds its sums times their scales to those of the leaf. `of_inputs`: sums of the
/// inputs of each column, where lines are raised.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn end_run<'a, L: Lanes, S: Stored, const T: usize, const C: usize>(
    format: WeightFormat,
    at: &mut [*const u8; T],
    of_inputs: impl Iterator<Item = &'a f32> + Clone,
    mut acc: [[L::Acc; C]; T],
    mut sum: [[L::Acc; C]; T],
) -> [[L::Acc; C]; T] {
    // SAFETY: the caller's: scales, and zero points where there are some, lie behind the lines of a run.
    unsafe {
        for t in 0..T {
            let scales = scales::<L>(format, at[t]);
            if S::RAISED {
                let too_much = too_much::<L>(format, at[t].wrapping_add(SCALES_BYTES));
                for (sum, of_inputs) in sum[t].iter_mut().zip(of_inputs.clone()) {
                    *sum = L::sub(*sum, L::mul(too_much, L::splat(*of_inputs)));
                }
            }
            at[t] = at[t].wrapping_add(format.group_bytes(LANES));
            for c in 0..C {
                acc[t][c] = L::add(acc[t][c], L::mul(scales, sum[t][c]));
            }
        }
        acc
    }
}
