//! What lies where in the exchange memory of a rank.

use crate::plan::ROW_TILE;

/// Values of a row that one slice holds: four row tiles.
pub const SLICE: usize = 4 * ROW_TILE;
const CACHE_LINE: usize = 64;
const MAGIC: u32 = 0x6c70_6678;
/// Raised when the layout of a segment changes: ranks of different builds must not meet.
const LAYOUT_VERSION: u32 = 1;

/// What the exchange memory of a rank holds; the same for all ranks of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Ranks of the group.
    pub ranks: usize,
    /// Values of a row.
    pub width: usize,
    /// Most rows of an exchange.
    pub max_rows: usize,
    /// Most words of a gather.
    pub max_words: usize,
    /// Names the bits that the ranks compute: ranks of another domain are refused.
    pub domain: u32,
}

impl Shape {
    /// Slices of a row.
    pub fn slices(&self) -> usize {
        self.width.div_ceil(SLICE)
    }

    pub(super) fn header(&self, rank: usize) -> [u32; 8] {
        let numbers = [self.ranks, rank, self.width, self.max_rows, self.max_words];
        let [ranks, rank, width, rows, words] = numbers.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        [MAGIC, LAYOUT_VERSION, self.domain, ranks, rank, width, rows, words]
    }

    // A segment: header, flag of the words, flags of the slices (a cache line each), words [2][max_words] u32,
    // slices [2][slices][max_rows][SLICE] f32. Offsets in bytes.

    pub(super) fn gather_flag(&self) -> usize {
        CACHE_LINE
    }

    pub(super) fn slice_flag(&self, slice: usize) -> usize {
        (2 + slice) * CACHE_LINE
    }

    pub(super) fn words(&self, epoch: u32) -> usize {
        self.slice_flag(self.slices()) + (epoch as usize % 2) * (self.max_words * 4).next_multiple_of(CACHE_LINE)
    }

    pub(super) fn slice(&self, epoch: u32, slice: usize) -> usize {
        let boxes = self.slice_flag(self.slices()) + 2 * (self.max_words * 4).next_multiple_of(CACHE_LINE);
        boxes + ((epoch as usize % 2) * self.slices() + slice) * self.slice_len() * 4
    }

    pub(super) fn slice_len(&self) -> usize {
        self.max_rows * SLICE
    }

    /// Bytes of a segment.
    pub fn bytes(&self) -> usize {
        self.slice(1, self.slices())
    }
}
