//! What is cut where, which leaves sum what, in which tree: pure code, shared by every backend.
//!
//! Contract 4 (same bits) lives here. A product `y = W x` sums its K dimension in fixed *leaves*, each in ascending order
//! from zero in fp32; leaves combine as a binary tree of plain fp32 adds over their index; bias and residual are added
//! after the root. The number of leaves depends on the model alone, so that any tensor-parallel cut owns whole subtrees.

use std::ops::Range;

use crate::model::ModelConfig;

/// Positions a KV page holds. Also the attention leaf: scores, maximum, sum and output are computed a page at a time and
/// merged in page order.
pub const PAGE_POSITIONS: usize = 64;
/// Rows of a weight tile: the M of the tensor-core instruction, and of a 512-bit register of fp32 lanes.
pub const ROW_TILE: usize = 16;
/// Columns of a leaf are padded with zeros to a multiple of this.
pub const K_STEP: usize = 16;
/// Most leaves of one product, and most ranks.
pub const MAX_LEAVES: usize = 16;

/// How the K dimension of one product is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaves {
    /// Number of leaves; a power of two, at most [`MAX_LEAVES`].
    pub count: usize,
    /// Columns of one leaf.
    pub len: usize,
    /// `len` rounded up to [`K_STEP`]; activations and packed weights hold zeros in between.
    pub padded: usize,
}

/// The cut of a model, the same for every rank and (but for `tensor_parallel`) for every group size.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPlan {
    /// Dimensions.
    pub config: ModelConfig,
    /// Ranks: 1, 2, 4, 8 or 16.
    pub tensor_parallel: usize,
    /// q, k, v, gate, up and LM head: K is the hidden size.
    pub hidden: Leaves,
    /// o_proj: K is cut by query heads.
    pub heads: Leaves,
    /// down_proj: K is cut by intermediate columns.
    pub intermediate: Leaves,
    /// Rows of the LM head with padding: [`MAX_LEAVES`] shards of a whole number of row tiles. Rows from
    /// `config.vocab_size` up do not exist: their logits are never looked at.
    pub padded_vocab: usize,
}

/// What one rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    /// This rank, from 0.
    pub rank: usize,
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads; where ranks outnumber KV heads, several ranks hold the same one.
    pub kv_heads: Range<usize>,
    /// Leaves of o_proj.
    pub head_leaves: Range<usize>,
    /// Intermediate columns (of gate, up, down).
    pub intermediate: Range<usize>,
    /// Leaves of down_proj.
    pub intermediate_leaves: Range<usize>,
    /// Rows of embedding and LM head, within `padded_vocab`.
    pub vocab: Range<usize>,
}
