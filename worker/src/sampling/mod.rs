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
//! A NaN logit counts as minus infinity. Where every kept logit is minus infinity, or several are plus infinity, the
//! lowest id among the largest is drawn.

mod draw;
mod logprobs;
pub mod noise;
mod pass;
mod process;
mod row;
mod sampler;
mod select;
mod shape;
#[cfg(test)]
mod tests;
mod vectors;

use std::convert::Infallible;

pub use sampler::Sampler;
pub use shape::SamplerShape;

/// Most entries of [`Sampled::top`].
pub const MAX_TOP_LOGPROBS: usize = 20;
/// Temperatures below this are greedy, like 0: noise of at most 23 times the temperature would drown in the rounding of
/// ordinary fp32 logits, and dividing by less could overflow.
pub const MIN_TEMPERATURE: f32 = 1e-5;

/// Checked sampling parameters of one sequence; meanings and ranges as in worker/v1 `Sampling`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 (or under [`MIN_TEMPERATURE`]): greedy.
    pub temperature: f32,
    /// 0: all.
    pub top_k: u32,
    /// In (0, 1].
    pub top_p: f32,
    /// In [0, 1].
    pub min_p: f32,
    /// Key of the random draws.
    pub seed: u64,
    /// Subtracted from logits of tokens generated before.
    pub presence_penalty: f32,
    /// Subtracted once for each time a token was generated before.
    pub frequency_penalty: f32,
    /// Over 0; 1: off.
    pub repetition_penalty: f32,
    /// (token, bias), ascending by token, no token twice.
    pub logit_bias: Vec<(u32, f32)>,
}

impl SamplingParams {
    /// The largest logit, and nothing that changes it.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// What sampling one row yielded.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token drawn.
    pub token: u32,
    /// Log-probability of `token` under the raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens under the raw logits with their log-probabilities, most likely first, lowest id on a tie.
    pub top: Vec<(u32, f32)>,
}

/// One row to sample. Every rank passes the same rows in the same order.
#[derive(Debug, Clone, Copy)]
pub struct RowInput<'a> {
    /// Parameters of the sequence.
    pub params: &'a SamplingParams,
    /// Position of the new token in its sequence: tokens of prompt and output before it.
    pub position: u32,
    /// Tokens of the prompt (read by the repetition penalty).
    pub prompt: &'a [u32],
    /// Tokens generated so far, those before a preemption included (read by all penalties).
    pub generated: &'a [u32],
    /// Tokens that must not be drawn: the stop tokens while fewer than min_tokens are generated.
    pub suppress: &'a [u32],
    /// Asks for the log-probability of the drawn token and of this many most likely ones, at most [`MAX_TOP_LOGPROBS`].
    pub logprobs: Option<u32>,
}

/// Carries words between the ranks of a group.
pub trait Exchange {
    /// Why an exchange failed: another rank is gone, or the wait passed its limit.
    type Error;

    /// Gives this rank's words to all ranks and returns those of all ranks, concatenated in rank order.
    ///
    /// Every rank calls this equally often with equally many words, at most [`Sampler::max_words`].
    fn all_gather(&mut self, mine: &[u32]) -> Result<&[u32], Self::Error>;
}

/// Spreads independent units of work over a caller's threads.
pub trait ParallelFor {
    /// Calls `work` once with each of `0..units`, on any threads in any order, and returns when all calls have.
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync));
}

/// Runs all units on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl ParallelFor for Serial {
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..units).for_each(work);
    }
}

/// The exchange of a group of one rank.
#[derive(Debug, Clone, Default)]
pub struct Alone {
    words: Vec<u32>,
}

impl Exchange for Alone {
    type Error = Infallible;

    fn all_gather(&mut self, mine: &[u32]) -> Result<&[u32], Infallible> {
        self.words.clear();
        self.words.extend_from_slice(mine);
        Ok(&self.words)
    }
}
