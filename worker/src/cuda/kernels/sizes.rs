//! How much of everything launches have, fixed at load.

use std::time::Duration;

use super::variants::Attention;

/// Steps of one launch at most.
pub const MOST_STEPS: usize = 256;

/// Counts of an engine, fixed at load.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// This rank.
    pub rank: usize,
    /// Of how many.
    pub ranks: usize,
    /// Sequences.
    pub max_slots: usize,
    /// Rows of a step.
    pub max_batch_tokens: usize,
    /// Rows of all launches that are in the stream together: those of a step, and those of them that sample once more;
    /// at least those of a fed launch.
    pub rows: usize,
    /// Pages of the longest sequence.
    pub slot_pages: usize,
    /// Pages that a row sees at most.
    pub visible_pages: usize,
    /// Pages of the pool.
    pub kv_pages: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Words of attention's items, of all launches that are in the stream together.
    pub item_words: usize,
    /// Logits of a row, of all ranks, as the decoder writes and the sampler reads them.
    pub kernel_vocab: usize,
    /// What it costs that rows of a sequence read its pages.
    pub attention: Attention,
    /// Longest time without a token.
    pub wait_limit: Duration,
}

impl Sizes {
    /// Words of the token ring, with kernels of up to `columns` columns that sample: a launch of many steps, or one
    /// step's launches, of which the last alone is not full.
    pub fn ring(&self, columns: usize) -> usize {
        (MOST_STEPS * columns).max(self.max_batch_tokens + columns)
    }
}
