//! How a token is drawn from the logits: the reference that every backend shares.
//!
//! The vocabulary is sharded: each rank holds the fp32 logits of its own rows of the LM head. A draw is the largest
//! `logit / temperature + Gumbel noise` over the tokens that the filters keep, and the noise is a function of seed,
//! position and token id alone, so the result does not depend on the number of ranks, the batch or the threads.
//!
//! Order of operations: logit bias, penalties and suppressed tokens on the raw logits (`process`); temperature; min_p,
//! top_k and top_p (`select`); the draw (`draw`, `noise`). Log-probabilities come from the raw logits (`logprobs`). The
//! elementary functions of [`crate::math`] have the same bits on every machine.
//!
//! A row that is held to a grammar draws among the tokens of its mask. A rank that does not know the mask in time says
//! so in the row's first exchange, and the row draws nothing on any rank.
//!
//! A NaN logit counts as minus infinity. Where every kept logit is minus infinity, or several are plus infinity, the
//! lowest id among the largest is drawn.

mod caller;
mod draw;
mod logprobs;
pub mod noise;
mod params;
mod pass;
mod process;
mod row;
mod sampler;
mod select;
mod shape;
#[cfg(test)]
mod tests;
mod vectors;

pub use caller::{Alone, Exchange, ParallelFor, Serial};
pub use params::{Allowed, MAX_TOP_LOGPROBS, MIN_TEMPERATURE, RowInput, Sampled, SamplingParams};
pub use sampler::Sampler;
pub use shape::SamplerShape;
