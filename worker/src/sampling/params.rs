//! What a row asks of the sampler, and what it gets.

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
    /// Tokens that were generated change the logits.
    pub fn has_penalties(&self) -> bool {
        (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
    }

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

/// Which tokens a row may draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Allowed<'a> {
    /// Any.
    #[default]
    All,
    /// Those that a grammar allows: those whose bit is set, at least one: bit `i % 32` of word `i / 32` for token i.
    /// Stop tokens are among them where the sequence may end.
    These(&'a [u32]),
    /// This one: it is sampled for its log-probability.
    Only(u32),
    /// That is not known yet.
    Late,
    /// That cannot be known: the grammar is too complex to be followed.
    Nothing,
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

impl Sampled {
    /// In place of a token, over all ids: the row sits the step out, since a rank did not know what it may draw.
    pub const LATE: u32 = u32::MAX - 1;
    /// In place of a token, over all ids: there is nothing that the row may draw.
    pub const NOTHING: u32 = u32::MAX - 2;

    /// One of those two.
    pub fn none(instead: u32) -> Self {
        Self { token: instead, logprob: None, top: Vec::new() }
    }
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
    /// Tokens that may be drawn. What ranks know of them may differ by [`Allowed::Late`] and [`Allowed::Nothing`]
    /// alone.
    pub allowed: Allowed<'a>,
    /// Asks for the log-probability of the drawn token and of this many most likely ones, at most [`MAX_TOP_LOGPROBS`].
    pub logprobs: Option<u32>,
}
