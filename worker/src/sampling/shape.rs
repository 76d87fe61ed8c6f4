//! Which logits are whose: the vocabulary in leaves and ranks.

use std::ops::Range;

use super::draw::Leaf;
use crate::plan::MAX_LEAVES;

/// What a [`Sampler`](super::Sampler) is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerShape {
    /// Tokens; logits from here up to `padded_vocab` are never looked at.
    pub vocab_size: usize,
    /// Rows of the LM head, a multiple of [`MAX_LEAVES`]. Leaf `i` is the `i`-th sixteenth of them.
    pub padded_vocab: usize,
    /// Ranks: 1, 2, 4, 8 or 16.
    pub tensor_parallel: usize,
    /// This rank; its logits are those from `rank * padded_vocab / tensor_parallel` on.
    pub rank: usize,
    /// Most rows of one step.
    pub max_rows: usize,
}

impl SamplerShape {
    /// Panics if the shape breaks its own rules.
    pub(super) fn check(&self) {
        let Self { vocab_size, padded_vocab, tensor_parallel, rank, .. } = *self;
        assert!(
            tensor_parallel.is_power_of_two() && tensor_parallel <= MAX_LEAVES && rank < tensor_parallel,
            "{self:?}"
        );
        assert!(padded_vocab % MAX_LEAVES == 0 && vocab_size > 0 && vocab_size <= padded_vocab, "{self:?}");
        assert!(padded_vocab < 1 << 22, "weights of {padded_vocab} tokens could overflow their sum");
    }

    /// Logits of a row that this rank holds.
    pub fn local_vocab(&self) -> usize {
        self.padded_vocab / self.tensor_parallel
    }

    /// Leaves of this rank.
    pub(super) fn leaves(&self) -> usize {
        MAX_LEAVES / self.tensor_parallel
    }

    /// Ids of this rank that are tokens.
    pub(super) fn tokens(&self) -> Range<u32> {
        let start = self.rank * self.local_vocab();
        let end = (start + self.local_vocab()).min(self.vocab_size).max(start);
        start as u32..end as u32
    }

    /// All tokens of a row of this rank's logits.
    pub(super) fn row<'a>(&self, row: usize, logits: &'a [f32], scale: f32) -> Leaf<'a> {
        let tokens = self.tokens();
        let start = row * self.local_vocab();
        Leaf { logits: &logits[start..start + tokens.len()], first: tokens.start, scale }
    }

    /// The tokens of one of this rank's leaves.
    pub(super) fn leaf<'a>(&self, row: usize, leaf: usize, logits: &'a [f32], scale: f32) -> Leaf<'a> {
        let row = self.row(row, logits, scale);
        let len = self.padded_vocab / MAX_LEAVES;
        let start = (leaf * len).min(row.logits.len());
        let end = (start + len).min(row.logits.len());
        Leaf { logits: &row.logits[start..end], first: row.first + start as u32, scale }
    }
}
