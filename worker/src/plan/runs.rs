//! Runs: columns next to each other in a leaf whose weights have a scale in common.
//!
//! Groups are counted from the first column of a matrix, and a leaf begins where it may: mostly within a group. So a
//! leaf is a run up to the next group, whole groups, and what is left of one. Padding counts as columns like any other.

use super::{Leaves, ROW_TILE};
use crate::model::WeightFormat;

/// Where the runs of the leaves of a rank lie, in pairs of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// Pairs of a group.
    group: usize,
    /// The first pair of the first leaf.
    first: usize,
    /// Pairs from the first of a leaf to that of the next.
    leaf: usize,
    /// Pairs of a leaf, padding included.
    leaf_pairs: usize,
}

impl Runs {
    /// One run a leaf of `leaf_pairs`: no groups.
    pub const fn whole(leaf_pairs: usize) -> Self {
        Self { group: usize::MAX, first: 0, leaf: 0, leaf_pairs }
    }

    /// Those of the leaves from `first_leaf` on; `None` where a pair would lie in two groups: kernels read pairs.
    pub fn new(format: WeightFormat, k: Leaves, first_leaf: usize) -> Option<Self> {
        let Some(group) = format.group() else { return Some(Self::whole(k.padded / 2)) };
        let fits = group.is_multiple_of(2) && (k.count == 1 || k.len.is_multiple_of(2));
        let first = first_leaf * k.len / 2;
        fits.then_some(Self { group: group / 2, first, leaf: k.len / 2, leaf_pairs: k.padded / 2 })
    }

    /// Pairs of each run of a leaf, in order.
    #[inline(always)]
    pub fn of(&self, leaf: usize) -> RunsOfLeaf {
        let next = self.group - (self.first + leaf * self.leaf) % self.group;
        RunsOfLeaf { next, left: self.leaf_pairs, group: self.group }
    }

    /// Bytes of a tile of so many leaves as CPUs pack it: weights, and the scales and zero points of runs.
    pub fn bytes(&self, format: WeightFormat, leaves: usize) -> usize {
        let of_run = |run: usize| format.bytes(run.next_multiple_of(format.packed_pairs()) * 2 * ROW_TILE);
        self.sum(leaves, |run| of_run(run) + format.group_bytes(ROW_TILE))
    }

    /// Those of the same tile whose weights have become bf16.
    pub fn expanded_bytes(&self, format: WeightFormat, leaves: usize) -> usize {
        self.sum(leaves, |run| WeightFormat::Bf16.bytes(run * 2 * ROW_TILE) + format.group_bytes(ROW_TILE))
    }

    fn sum(&self, leaves: usize, bytes: impl Fn(usize) -> usize) -> usize {
        (0..leaves).flat_map(|leaf| self.of(leaf)).map(bytes).sum()
    }
}

/// See [`Runs::of`].
#[derive(Debug, Clone)]
pub struct RunsOfLeaf {
    /// Pairs up to the next group.
    next: usize,
    left: usize,
    group: usize,
}

impl Iterator for RunsOfLeaf {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let run = self.next.min(self.left);
        self.left -= run;
        self.next = self.group;
        (run > 0).then_some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(columns: u16, len: usize, count: usize, leaf: usize) -> Vec<usize> {
        let k = Leaves { count, len, padded: len.next_multiple_of(16) };
        let format = WeightFormat::Int4 { columns, zeros: false };
        let [from_0, from_leaf] =
            [0, leaf].map(|first| Runs::new(format, k, first).unwrap().of(leaf - first).collect::<Vec<_>>());
        assert_eq!(from_0, from_leaf, "the runs of a leaf do not depend on the rank");
        from_0
    }

    #[test]
    fn a_run_ends_where_a_group_does() {
        assert_eq!(runs(128, 256, 1, 0), [64, 64]);
        assert_eq!(runs(128, 304, 16, 0), [64, 64, 24]);
        assert_eq!(runs(128, 304, 16, 1), [40, 64, 48]);
        // 24 to 48, padded to 56.
        assert_eq!(runs(32, 24, 16, 1), [4, 12]);
        assert_eq!(runs(16, 24, 16, 1), [4, 8, 4]);
        assert_eq!(Runs::whole(24).of(3).collect::<Vec<_>>(), [24]);
    }

    #[test]
    fn four_lines_of_4_bits_are_packed_together() {
        let k = Leaves { count: 16, len: 50, padded: 64 };
        for (zeros, end) in [(false, 32), (true, 40)] {
            let format = WeightFormat::Int4 { columns: 16, zeros };
            let runs = Runs::new(format, k, 0).unwrap();
            assert_eq!(runs.of(0).collect::<Vec<_>>(), [8, 8, 8, 8]);
            assert_eq!(runs.of(1).collect::<Vec<_>>(), [7, 8, 8, 8, 1]);
            assert_eq!(runs.bytes(format, 2), (8 + 2 + 6 + 1) * 64 + 9 * end);
            assert_eq!(runs.expanded_bytes(format, 2), 64 * 64 + 9 * end);
        }
        let format = WeightFormat::E4m3Groups { columns: 16 };
        assert_eq!(Runs::new(format, k, 0).unwrap().bytes(format, 2), 64 * 32 + 9 * 32);
        assert_eq!(Runs::whole(32).bytes(WeightFormat::Bf16, 2), 64 * 64);
    }

    #[test]
    fn odd_leaves_have_none() {
        let format = WeightFormat::E4m3Groups { columns: 128 };
        let fits =
            |count, len: usize| Runs::new(format, Leaves { count, len, padded: len.next_multiple_of(16) }, 0).is_some();
        assert!(fits(16, 24) && fits(1, 51) && !fits(16, 25) && fits(2, 28));
    }
}
