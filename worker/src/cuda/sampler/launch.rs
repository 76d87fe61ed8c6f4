//! What a launch of the sampler is given and answers: the same structs as in kernels/layout/sampler.cuh.

use bytemuck::{Pod, Zeroable};

use crate::sampling::{MAX_TOP_LOGPROBS, Sampled};

/// Entries of a sequence's logit bias at most: as many as the server takes.
pub const MOST_BIASES: usize = 1024;
/// Stop tokens at most of a sequence that must not draw them at first.
pub const MOST_SUPPRESSED: usize = 256;
/// Words of a slot's lists: pairs of token and bias, then suppressed tokens.
pub const LIST_WORDS: usize = 2 * MOST_BIASES + MOST_SUPPRESSED;
/// [`RowSampling::flags`]: log-probabilities are wanted.
pub const WANT_LOGPROBS: u32 = 1;

/// How the tokens of a slot are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RowSampling {
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_k: u32,
    pub seed: [u32; 2],
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub flags: u32,
    pub top_logprobs: u32,
    pub bias_count: u32,
    pub suppress_count: u32,
    /// Tokens are suppressed while the new one's position is below this.
    pub suppress_until: u32,
    pub bias: u64,
    pub suppress: u64,
}

/// A token and its log-probability.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
struct Likely {
    token: u32,
    logprob: f32,
}

/// Log-probabilities of a drawn token.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RowLogprobs {
    logprob: f32,
    count: u32,
    top: [Likely; MAX_TOP_LOGPROBS],
}

/// The kernel's parameter. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct SamplerLaunch {
    /// `[rows][vocabulary padded to tiles]` f32
    pub logits: u64,
    /// This and the three after it are the sampler's own.
    pub processed: u64,
    /// `[slots][padded vocabulary]` u32
    pub counts: u64,
    /// Words of the exchanges.
    pub words: u64,
    /// `[slots]` of parameters.
    pub sampling: u64,
    /// `[row_count]` [`Row`](crate::cuda::kernels::launch::Row): those of the next step come to stand there.
    pub rows: u64,
    /// u32 of the sampler: not 0 once the launches of the chain are to do nothing.
    pub stopped: u64,
    /// Mapped: `[row_count]` of tag << 32 | token.
    pub tokens: u64,
    /// Mapped: `[row_count]` [`RowLogprobs`].
    pub logprobs: u64,
    /// Mapped: as [`Launch::control`](crate::cuda::kernels::launch::Launch::control), of a chain.
    pub control: u64,
    /// u32: not 0 ends the chain: the first word of `control`, or of several ranks what the decoder found all their
    /// hosts to want.
    pub stop: u64,
    /// Mapped: why a wait failed.
    pub report: u64,
    /// Rows.
    pub row_count: u32,
    /// Of the token words.
    pub tag: u32,
    /// `[masks][words of a mask]`: a bit a token that may be drawn.
    pub masks: u64,
    /// `[row_count]` u32: 1 + the row's mask, or 0; itself 0 if no row has one.
    pub mask_of: u64,
    /// Step of the chain.
    pub step: u32,
    /// Rows of the same step, in launches before this one.
    pub rows_before: u32,
}

impl RowLogprobs {
    /// With the token that they are of; of the most likely tokens so many.
    pub fn of(&self, token: u32, most: u32) -> Sampled {
        let top = self.top[..(self.count.min(most) as usize).min(MAX_TOP_LOGPROBS)].iter();
        Sampled { token, logprob: Some(self.logprob), top: top.map(|of| (of.token, of.logprob)).collect() }
    }
}

#[cfg(test)]
impl RowLogprobs {
    /// Where its fields are: `logprob`, `count`, `top`.
    pub const fn offsets() -> [usize; 3] {
        use std::mem::offset_of;
        [offset_of!(Self, logprob), offset_of!(Self, count), offset_of!(Self, top)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_become_what_the_cpu_sampler_gives() {
        let mut of = RowLogprobs { logprob: -1.5, count: 2, ..RowLogprobs::default() };
        of.top[..3].copy_from_slice(&[1, 2, 3].map(|token| Likely { token, logprob: -(token as f32) }));
        assert_eq!(of.of(9, 20), Sampled { token: 9, logprob: Some(-1.5), top: vec![(1, -1.0), (2, -2.0)] });
        assert_eq!(of.of(9, 1).top, [(1, -1.0)]);
    }
}
