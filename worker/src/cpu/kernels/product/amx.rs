//! The kernel of processors with AMX: a register is a matrix, so that a line of weights meets up to 32 vectors of
//! inputs in the time of one.
//!
//! Sixteen lines of a tile, `[16 pairs of k][16 rows][2 k]`, are what the right operand of `TDPBF16PS` has, and
//! vectors of inputs, 32 elements each, are the rows of the left one. So nothing is packed otherwise than for vector
//! instructions, and a result is `[vector][16 rows]`.
//!
//! Arithmetic: a run of a leaf ([`Runs`](crate::plan::Runs)) is cut in blocks of 16 pairs, whose rest is filled with
//! zeros. In a block the products of even k are summed, ascending, and those of odd k; both sums together are added to
//! the run's. The high and the low part of a column have sums of their own, and are added where a run ends. Zeros in
//! place of what is denormal, whatever the mode.
//!
//! The compiler knows no registers of this kind and no instruction of these: what is in them between two statements is
//! this file's own, from [`configure`] to [`release`].

use std::arch::asm;
use std::arch::x86_64::{_mm512_mask_storeu_epi16, _mm512_maskz_loadu_epi16};
use std::mem::MaybeUninit;

use super::super::lanes::{Avx512Bf16, LANES, LINE, Lanes};
use super::stored::{Stored, unpack};
use super::{AllRuns, Columns, Panel, SCALES_BYTES, TREE_DEPTH, scales, too_much};

/// Rows of a register: vectors of inputs, of sums, or pairs of k.
const ROWS: usize = 16;
/// Bytes of a row, and from a line to the next.
const ROW_BYTES: usize = 64;
/// Registers of sums.
const SUMS: usize = 4;
/// How far ahead of the lines in use those of a tile are asked for, in bytes.
const AHEAD: usize = 2048;

/// How far ahead of the inputs in use those of a row are asked for, in elements.
const INPUTS_AHEAD: usize = 4 * LINE;

type Sum = <Avx512Bf16 as Lanes>::Acc;

/// What `LDTILECFG` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Memory beside the registers.
#[repr(C, align(64))]
struct Room {
    /// Lines of tiles that are stored otherwise, of two blocks, or of the last block of a run.
    lines: [[[u16; ROWS * LINE]; SUMS]; 2],
    /// Inputs of the last block of a run.
    inputs: [[u16; LINE]; 2 * ROWS],
    /// What registers of sums held.
    sums: [[[f32; LANES]; ROWS]; SUMS],
}

/// `TILELOADD`
macro_rules! load {
    ($register:literal, $from:expr, $stride:expr) => {
        asm!(
            concat!("tileloadd ", $register, ", [{from} + {stride}]"),
            from = in(reg) $from, stride = in(reg) $stride, options(nostack, readonly, preserves_flags),
        )
    };
}

/// `TILESTORED`
macro_rules! store {
    ($register:literal, $to:expr) => {
        asm!(
            concat!("tilestored [{to} + {stride}], ", $register),
            to = in(reg) $to, stride = in(reg) ROW_BYTES, options(nostack, preserves_flags),
        )
    };
}

/// `TILEZERO`
macro_rules! zero {
    ($($register:literal)*) => {
        asm!($(concat!("tilezero ", $register),)* options(nomem, nostack, preserves_flags))
    };
}

/// `TDPBF16PS`
macro_rules! dot {
    ($sums:literal, $inputs:literal, $lines:literal) => {
        asm!(concat!("tdpbf16ps ", $sums, ", ", $inputs, ", ", $lines), options(nomem, nostack, preserves_flags),)
    };
}

/// Gives registers their shapes: 0 to 3 are sums (of T tiles and R blocks of rows: `t * R + r`), 4 and 5 inputs of
/// the blocks of rows, 6 and 7 lines.
///
/// # Safety
/// The processor has AMX, and the process the permission.
#[inline(always)]
unsafe fn configure(rows: [usize; 2]) {
    let second = if rows[1] > 0 { rows[1] } else { rows[0] };
    let [first, second] = [rows[0] as u8, second as u8];
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    configuration.row_bytes[..8].fill(ROW_BYTES as u16);
    configuration.rows[..8].copy_from_slice(&[first, second, first, second, first, second, 16, 16]);
    // SAFETY: the caller's; 64 bytes are readable.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly, preserves_flags));
    }
}

/// Leaves nothing that a switch of threads would have to keep.
///
/// # Safety
/// The processor has AMX.
#[inline(always)]
unsafe fn release() {
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
}

/// Walks the columns, and for as many as registers take the tiles in order.
///
/// # Safety
/// `Panel::check_product` passed, the processor has AMX and AVX-512 BF16, and the process the permission.
#[inline(always)]
pub unsafe fn product<S: Stored>(panel: &Panel<'_>, x: &Columns<'_>, of_inputs: &[f32], out: &mut [f32]) {
    let (most, runs) = (2 * ROWS / x.parts, of_inputs.len() / x.count);
    let mut room = MaybeUninit::<Room>::uninit();
    for first in (0..x.count).step_by(most) {
        let count = most.min(x.count - first);
        let x = Columns { data: &x.data[first * x.parts * x.stride..], count, ..*x };
        let rows = count * x.parts;
        let of_inputs = &of_inputs[runs * first..runs * (first + count)];
        let out = out[first * panel.tiles * LANES..].as_mut_ptr();
        // SAFETY: the caller's; `tile` and those beside it are under `panel.tiles`.
        unsafe {
            configure([rows.min(ROWS), rows.saturating_sub(ROWS)]);
            let mut tile = 0;
            while tile < panel.tiles {
                let room = room.as_mut_ptr();
                tile += match (rows > ROWS, panel.tiles - tile) {
                    (true, 2..) => block::<S, 2, 2>(panel, &x, of_inputs, tile, out, room),
                    (true, _) => block::<S, 1, 2>(panel, &x, of_inputs, tile, out, room),
                    (false, 4..) => block::<S, 4, 1>(panel, &x, of_inputs, tile, out, room),
                    (false, _) => block::<S, 1, 1>(panel, &x, of_inputs, tile, out, room),
                };
            }
        }
    }
    // SAFETY: the caller's.
    unsafe { release() };
}

/// `T` tiles from `first_tile` by the columns of `R` blocks of rows; returns `T`.
///
/// # Safety
/// As [`product`]; `first_tile + T <= panel.tiles`, and registers are [`configure`]d for the rows of `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn block<S: Stored, const T: usize, const R: usize>(
    panel: &Panel<'_>,
    x: &Columns<'_>,
    of_inputs: &[f32],
    first_tile: usize,
    out: *mut f32,
    room: *mut Room,
) -> usize {
    const { assert!(T * R <= SUMS) };
    // SAFETY: every line and pair read lies in the ranges that `check_product` asserted; prefetches may point anywhere.
    // What is read of `room` was written before.
    unsafe {
        let end_bytes = panel.format.group_bytes(LANES);
        let mut tiles = Tiles::<T> {
            at: std::array::from_fn(|t| panel.data.as_ptr().add((first_tile + t) * panel.tile_bytes)),
            end: panel.data.as_ptr().wrapping_add((first_tile + 1) * panel.tile_bytes),
            tile_bytes: panel.tile_bytes,
        };
        let mut inputs = Inputs { at: x.data.as_ptr(), stride: x.stride, rows: x.count * x.parts };
        // open[l]: the left sum of 2^l leaves that waits for its right neighbour, of tile t and column c at 16 R t + c.
        let mut open = [const { MaybeUninit::<[Sum; SUMS * ROWS]>::uninit() }; TREE_DEPTH];
        let open: [*mut Sum; TREE_DEPTH] = open.each_mut().map(|level| level.as_mut_ptr().cast());
        let mut of_leaf = MaybeUninit::<[Sum; SUMS * ROWS]>::uninit();
        let of_leaf: *mut Sum = of_leaf.as_mut_ptr().cast();
        let mut runs = AllRuns::new(panel.runs, panel.leaves);
        let (mut turn, mut done) = (0, 0);
        let runs_of_column = of_inputs.len() / x.count;
        // A block is fetched while the one before it is multiplied, of the next run, too.
        let mut next_run = runs.next();
        let mut next = tiles.fetch::<S>(next_run.map_or(0, |run| run.pairs.min(ROWS)), room, turn);
        while let Some(run) = next_run {
            zero!("tmm0" "tmm1" "tmm2" "tmm3");
            let mut left = run.pairs;
            // Scales and zero points.
            let mut ends = tiles.at;
            while left > 0 {
                let (pairs, lines) = (left.min(ROWS), next);
                left -= pairs;
                turn ^= 1;
                if left == 0 {
                    ends = tiles.at;
                    if S::GROUPS {
                        tiles.at = tiles.at.map(|at| at.wrapping_add(end_bytes));
                    }
                    next_run = runs.next();
                }
                let ahead = if left > 0 { left } else { next_run.map_or(0, |run| run.pairs) };
                next = tiles.fetch::<S>(ahead.min(ROWS), room, turn);
                let (x, stride) = inputs.take(pairs, room);
                step::<T, R>(x, stride, lines);
            }
            store_sums::<T, R>(room);
            for (t, ends) in ends.into_iter().enumerate() {
                let of_tile = of_leaf.add(ROWS * R * t);
                if !S::GROUPS {
                    for c in 0..x.count {
                        *of_tile.add(c) = column(room, t * R, c, x.parts);
                    }
                    continue;
                }
                let scales = scales::<Avx512Bf16>(panel.format, ends);
                let too_much = match S::RAISED {
                    true => too_much::<Avx512Bf16>(panel.format, ends.wrapping_add(SCALES_BYTES)),
                    false => Avx512Bf16::zero(),
                };
                for c in 0..x.count {
                    let mut sum = column(room, t * R, c, x.parts);
                    if S::RAISED {
                        let of_run = Avx512Bf16::splat(*of_inputs.get_unchecked(c * runs_of_column + done));
                        sum = Avx512Bf16::sub(sum, Avx512Bf16::mul(too_much, of_run));
                    }
                    let before = if run.begins_leaf { Avx512Bf16::zero() } else { *of_tile.add(c) };
                    *of_tile.add(c) = Avx512Bf16::add(before, Avx512Bf16::mul(scales, sum));
                }
            }
            done += 1;
            let Some(leaf) = run.ends_leaf else { continue };
            let level = leaf.trailing_ones() as usize;
            for t in 0..T {
                for place in ROWS * R * t..ROWS * R * t + x.count {
                    let mut sum = *of_leaf.add(place);
                    for left in &open[..level] {
                        sum = Avx512Bf16::add(*left.add(place), sum);
                    }
                    *open[level].add(place) = sum;
                }
            }
        }
        let root = open[panel.leaves.ilog2() as usize];
        for c in 0..x.count {
            for t in 0..T {
                let to = out.add((c * panel.tiles + first_tile + t) * LANES);
                Avx512Bf16::store(*root.add(ROWS * R * t + c), to);
            }
        }
    }
    T
}

/// Tiles that run side by side.
struct Tiles<const T: usize> {
    /// Where the next lines are.
    at: [*const u8; T],
    /// Where those of the first tile end.
    end: *const u8,
    tile_bytes: usize,
}

impl<const T: usize> Tiles<T> {
    /// Moves past the next `pairs` lines of each tile and returns where they are as bf16, as many as a block has: in
    /// place, or in `room`. Of none that is nowhere.
    ///
    /// # Safety
    /// As [`block`].
    #[inline(always)]
    unsafe fn fetch<S: Stored>(&mut self, pairs: usize, room: *mut Room, turn: usize) -> [*const u16; T] {
        // Behind a tile's end lies one that runs beside it: what is asked for is the next one of its turn.
        let is_last = self.at[0].wrapping_add(AHEAD) >= self.end;
        let ahead = if is_last { AHEAD + (T - 1) * self.tile_bytes } else { AHEAD };
        let mut lines = [std::ptr::null(); T];
        if pairs == 0 {
            return lines;
        }
        // SAFETY: the caller's.
        unsafe {
            for (t, (at, lines)) in self.at.iter_mut().zip(&mut lines).enumerate() {
                let to: *mut u16 = (&raw mut (*room).lines[turn][t]).cast();
                *lines = to;
                if S::UNPACKED && pairs == ROWS {
                    *lines = at.cast();
                    for line in 0..ROWS {
                        Avx512Bf16::prefetch(at.wrapping_add(ahead + line * ROW_BYTES).cast());
                    }
                    *at = at.wrapping_add(ROWS * ROW_BYTES);
                } else if pairs == ROWS {
                    *at = unpack::<Avx512Bf16, S>(*at, ROWS, to, ahead);
                } else {
                    *at = unpack::<Avx512Bf16, S>(*at, pairs, to, ahead);
                    to.add(pairs * LINE).write_bytes(0, (ROWS - pairs) * LINE);
                }
            }
        }
        lines
    }
}

/// Vectors of inputs: where the next pairs of the first are, and how far apart they are, in elements.
struct Inputs {
    at: *const u16,
    stride: usize,
    rows: usize,
}

impl Inputs {
    /// Moves past the next `pairs` and returns where they are and how far apart, as many as a block has: in place, or
    /// in `room`.
    ///
    /// # Safety
    /// As [`block`].
    #[inline(always)]
    unsafe fn take(&mut self, pairs: usize, room: *mut Room) -> (*const u16, usize) {
        let at = self.at;
        self.at = at.wrapping_add(2 * pairs);
        for row in 0..self.rows {
            // SAFETY: the caller's; a prefetch may point anywhere.
            unsafe { Avx512Bf16::prefetch_near(at.wrapping_add(row * self.stride + INPUTS_AHEAD)) };
        }
        if pairs == ROWS {
            return (at, self.stride);
        }
        // SAFETY: the caller's: what lies behind the pairs is not read.
        unsafe {
            for row in 0..self.rows {
                let some = _mm512_maskz_loadu_epi16((1 << (2 * pairs)) - 1, at.add(row * self.stride).cast());
                _mm512_mask_storeu_epi16((&raw mut (*room).inputs[row]).cast(), u32::MAX, some);
            }
            ((&raw const (*room).inputs).cast(), LINE)
        }
    }
}

/// Sum of a column in registers `register` and, where it has more rows, the next one, which were stored: its high and
/// its low part.
///
/// # Safety
/// The processor has AVX-512, and they were stored.
#[inline(always)]
unsafe fn column(room: *const Room, register: usize, column: usize, parts: usize) -> Sum {
    // SAFETY: the caller's: a sum is sixteen lanes. Registers follow each other in memory.
    unsafe {
        let rows = (&raw const (*room).sums).cast::<Sum>().add(register * ROWS + column * parts);
        if parts == 1 { *rows } else { Avx512Bf16::add(*rows, *rows.add(1)) }
    }
}

/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn store_sums<const T: usize, const R: usize>(room: *mut Room) {
    // SAFETY: the caller's.
    unsafe {
        let sums = &raw mut (*room).sums;
        store!("tmm0", &raw mut (*sums)[0]);
        if T * R > 1 {
            store!("tmm1", &raw mut (*sums)[1]);
        }
        if T * R > 2 {
            store!("tmm2", &raw mut (*sums)[2]);
            store!("tmm3", &raw mut (*sums)[3]);
        }
    }
}

/// Adds a block: sixteen lines of each tile by 32 inputs of each row.
///
/// # Safety
/// As [`block`]; so many lines and inputs are readable.
#[inline(always)]
unsafe fn step<const T: usize, const R: usize>(x: *const u16, stride: usize, lines: [*const u16; T]) {
    const { assert!(matches!((T, R), (1 | 4, 1) | (1 | 2, 2))) };
    // SAFETY: the caller's.
    unsafe {
        load!("tmm4", x, stride * size_of::<u16>());
        if R == 2 {
            load!("tmm5", x.add(ROWS * stride), stride * size_of::<u16>());
        }
        load!("tmm6", lines[0], ROW_BYTES);
        dot!("tmm0", "tmm4", "tmm6");
        if R == 2 {
            dot!("tmm1", "tmm5", "tmm6");
        }
        if T == 2 {
            load!("tmm7", lines[1], ROW_BYTES);
            dot!("tmm2", "tmm4", "tmm7");
            dot!("tmm3", "tmm5", "tmm7");
        }
        if T == 4 {
            load!("tmm7", lines[1], ROW_BYTES);
            dot!("tmm1", "tmm4", "tmm7");
            load!("tmm6", lines[2], ROW_BYTES);
            dot!("tmm2", "tmm4", "tmm6");
            load!("tmm7", lines[3], ROW_BYTES);
            dot!("tmm3", "tmm4", "tmm7");
        }
    }
}
