//! How a token is drawn: parameters and results shared by every backend.

/// Checked sampling parameters of one sequence; meanings and ranges as in worker/v1 `Sampling`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy.
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
