//! What a sequence is asked for, what it answers, and why it is not taken. The front end sees these through the
//! engine's seam.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// How a token is drawn; meanings and ranges as in worker/v1 `Sampling`.
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
    /// Key of the random draws; given at admission where the request has none.
    pub seed: u64,
    /// In [-2, 2].
    pub presence_penalty: f32,
    /// In [-2, 2].
    pub frequency_penalty: f32,
    /// Over 0; 1: off.
    pub repetition_penalty: f32,
    /// (token, bias), ascending by token, no token twice.
    pub logit_bias: Vec<(u32, f32)>,
}

impl SamplingParams {
    /// The largest logit, and nothing that changes logits.
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

/// Tokens that an output may have, by name. Of more than one of these fields, all hold.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct TokenBounds {
    /// No others; empty: any.
    pub allowed: Vec<u32>,
    /// Tokens that do not follow each other in it, each of at least one.
    pub forbidden: Vec<Vec<u32>>,
}

/// One sequence to generate. A request with `n` choices or several prompts becomes several of these.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceRequest {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// Bound on generated tokens, at least 1; prompt and output together fit the context.
    pub max_tokens: u32,
    /// Generated tokens before which stop tokens are neither sampled nor obeyed.
    pub min_tokens: u32,
    /// Token ids that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Log-probabilities are wanted: of the sampled token and of this many most likely ones.
    pub logprobs: Option<u32>,
    /// KV pages are shared with sequences of the same salt alone. Changes no token.
    pub cache_salt: Arc<str>,
    /// The output is held to this grammar, as worker/v1 has it.
    pub grammar: Option<Arc<str>>,
    /// The tokens that the output may have, by name.
    pub token_bounds: Arc<TokenBounds>,
    /// Log-probabilities of the prompt's tokens are wanted, and of this many most likely ones in their places.
    pub prompt_logprobs: Option<u32>,
}

impl SequenceRequest {
    /// Positions that prompt and output need in all. The last token sampled is never computed itself.
    pub fn positions(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens) - 1
    }

    /// Equal for requests that ask for the same, whatever their seeds.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let sampling = &self.sampling;
        (&self.prompt, self.max_tokens, self.min_tokens, &self.stop_tokens, self.logprobs).hash(&mut hasher);
        (&self.grammar, &self.token_bounds, self.prompt_logprobs).hash(&mut hasher);
        let numbers = [
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        ];
        (sampling.top_k, numbers.map(f32::to_bits)).hash(&mut hasher);
        sampling.logit_bias.iter().for_each(|(token, bias)| (token, bias.to_bits()).hash(&mut hasher));
        hasher.finish()
    }
}

/// A token as it comes out of the loop.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// Token id.
    pub id: u32,
    /// Log-probability under the raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens, most likely first.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled (it is the last token sent).
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

/// Why a sequence was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// 429: a bound of the queue is reached.
    #[error("the queue is full: {waiting} of at most {limit} {what} wait")]
    QueueFull {
        /// What waits now.
        waiting: u64,
        /// The bound.
        limit: u64,
        /// "sequences" or "prompt tokens"; or those of the owner, who is to leave the rest to others.
        what: Cow<'static, str>,
    },
    /// 400: the KV cache as a whole is too small for this sequence.
    #[error(
        "the request needs {needed} KV pages, but the whole cache has {available}: lower max_tokens or the prompt, or \
         start the server with more --kv-pages or --kv-memory-mib"
    )]
    TooLarge {
        /// Pages that prompt and output need.
        needed: u64,
        /// Pages in the cache.
        available: u64,
    },
    /// 400: the queue would not take this request even if it were empty.
    #[error("the request brings {asked} {what}, and the queue takes at most {limit} ({option}): send fewer at a time")]
    NeverFits {
        /// What the request brings.
        asked: u64,
        /// The bound.
        limit: u64,
        /// "sequences" or "prompt tokens".
        what: Cow<'static, str>,
        /// The option that sets the bound.
        option: Cow<'static, str>,
    },
    /// 422: a request like this one was computed alone when the workers were lost.
    #[error(
        "a request like this one was being computed, alone, when the workers were lost; it is not tried again for \
         {seconds_left} s (the server's log says how the workers ended)"
    )]
    Quarantined {
        /// Until it would be tried again.
        seconds_left: u64,
    },
    /// 503: the model is not (or no longer) being served.
    #[error("the server is {0}")]
    Unavailable(String),
}
