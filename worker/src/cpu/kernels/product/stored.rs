//! How the lines of a panel are stored, and become lines of bf16.

use std::marker::PhantomData;

use super::super::lanes::{LINE, Lanes};
use crate::model::WeightFormat;

/// How the lines of a panel are read.
pub trait Stored {
    /// Lines that are read at one time, from 64 bytes.
    const LINES: usize;
    /// Whether weights are in groups: runs end with what those have in common.
    const GROUPS: bool;
    /// Whether lines have [`INT4_RAISED`](super::super::lanes::INT4_RAISED) too much.
    const RAISED: bool;
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

/// Lines of bf16.
pub struct Bf16;
/// Lines of E4M3.
pub struct E4m3;
/// Lines of 4 bits.
pub struct Int4;
/// Weights in groups, whose lines are those of `S`.
pub struct Grouped<S, const RAISED: bool>(PhantomData<S>);

impl Stored for Bf16 {
    const LINES: usize = 1;
    const GROUPS: bool = false;
    const RAISED: bool = false;
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
    const RAISED: bool = false;
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
    const RAISED: bool = true;
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

impl<S: Stored, const RAISED: bool> Stored for Grouped<S, RAISED> {
    const LINES: usize = S::LINES;
    const GROUPS: bool = true;
    const RAISED: bool = RAISED;
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

/// How far ahead of the lines that are unpacked others are asked for into L1, in bytes. With them alone in L2 4 bits
/// come at 25.6 to 27.4 GB/s, so at 27.4 to 27.9 (two threads of a Xeon that reads 31).
const NEAR: usize = 512;

/// Writes `lines` lines at `at` as bf16, and asks for what is `ahead` bytes behind, into L2.
/// Returns where the next lines are.
///
/// # Safety
/// Those of [`Lanes`]; `at` and `to` have so many lines.
#[inline(always)]
pub unsafe fn unpack<L: Lanes, S: Stored>(
    mut at: *const u8,
    lines: usize,
    mut to: *mut u16,
    ahead: usize,
) -> *const u8 {
    // SAFETY: the caller's; a prefetch may point anywhere.
    unsafe {
        let constants = L::constants();
        let mut left = lines;
        while left > 0 {
            let lines = left.min(S::LINES);
            let read = S::read::<L>(at, lines, constants);
            L::prefetch(at.wrapping_add(ahead).cast());
            L::prefetch_near(at.wrapping_add(NEAR).cast());
            for index in 0..S::LINES {
                if index < lines {
                    L::store_line(S::line::<L>(read, index, constants), to.add(index * LINE));
                }
            }
            at = at.add(S::bytes(lines));
            to = to.add(lines * LINE);
            left -= lines;
        }
    }
    at
}
