//! The whole decoder: against transformers' logits and greedy tokens, and against itself in every arrangement that must
//! not change a bit.

mod arrangements;
mod fixtures;
pub(crate) mod group;

pub use group::Tap;
