//! The sequences of the batch: applies the server's plans at token boundaries and says which rows each step computes.
//!
//! Pure and deterministic: every rank runs the same `Batch` over the same plans and the same sampled tokens, so all ranks
//! admit, cancel and stop at the same token without talking about it.

/// One row of a step: one token of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Slot of the sequence.
    pub slot: u32,
    /// Token to embed.
    pub token: u32,
    /// Its position in the sequence, from 0. The row appends K and V there and attends to positions up to it.
    pub position: u32,
    /// The row's logits are needed: the next token of the sequence is sampled from them.
    pub sample: bool,
}
