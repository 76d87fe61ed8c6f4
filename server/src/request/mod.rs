//! From a raw request, as HTTP or gRPC read it, to a valid one, or to an error that names the field.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use crate::{
    engine::{SamplingParams, SequenceRequest, TokenBounds},
    reply::Format,
    text::{ChatMessage, Constraint, Form, Start, Stops, TemplateOptions},
};

mod bounds;
mod chat;
mod error;
mod fences;
mod form;
mod levels;
pub mod ranges;
mod tools;
mod validate;

pub use error::{FieldError, RequestError};
pub use levels::{Level, LevelOf};
pub use tools::{MAX_TOOLS, ToolChoice, arguments};
pub use validate::{decode, encode, template_text, validate};

/// Choices of one prompt; each is a sequence of its own.
pub const MAX_CHOICES: u64 = 16;
/// Prompts of one request.
pub const MAX_PROMPTS: usize = 64;
/// Sequences of one request: prompts times choices.
pub const MAX_SEQUENCES: usize = 128;
/// Messages of one chat.
pub const MAX_MESSAGES: usize = 2048;
/// Stop texts of one request.
pub const MAX_STOPS: usize = 16;
/// Bytes of one stop text: as much output may have to be held back.
pub const MAX_STOP_BYTES: usize = 1024;
/// Most likely tokens reported at each step.
pub const MAX_TOP_LOGPROBS: u64 = 20;
/// Tokens with a bias of their own.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Tokens of one request's own that end its output.
pub const MAX_STOP_TOKENS: usize = 64;
/// Tokens that an answer is held to by their ids.
pub const MAX_ALLOWED_TOKENS: usize = 16_384;
/// Words that an answer does not have.
pub const MAX_BAD_WORDS: usize = 512;
/// Bytes of one of them.
pub const MAX_BAD_WORD_BYTES: usize = 256;
/// Bytes of a cache salt.
pub const MAX_SALT_BYTES: usize = 1024;

/// Longest time that a request may be given.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// What to go on from.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Plain texts, one sequence (or `n`) each. They are raw: a control token that is spelled out becomes that token.
    Texts(Vec<String>),
    /// Texts that are tokens already.
    Tokens(Vec<Vec<u32>>),
    /// Messages, made a prompt by the model's chat template, which alone writes control tokens.
    Chat(Chat),
}

/// A chat, and how it becomes a prompt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// What was said.
    pub messages: Vec<ChatMessage>,
    /// For the template.
    pub options: TemplateOptions,
    /// What the template is told by fields of their own.
    pub levels: Vec<Level>,
    /// The answer goes on from the last message's text, where it stands.
    pub continue_final_message: bool,
    /// Which of the tools may or must be called; those of the options are all that the model is told of.
    pub tool_choice: ToolChoice,
    /// The answer ends with its first call.
    pub one_call: bool,
    /// Tool calls and thinking are told apart from the answer's content, for a client that takes them so.
    pub in_parts: bool,
}

impl Chat {
    /// Messages, to be answered.
    pub fn new(messages: Vec<ChatMessage>) -> Self {
        Self { messages, ..Self::default() }
    }
}

/// A request with the right types and nothing else checked. `None`: the field was left out.
#[derive(Debug, Clone, PartialEq)]
pub struct RawRequest {
    /// Name of the field that `input` came from.
    pub input_field: &'static str,
    /// What to go on from.
    pub input: Input,
    /// Name of the field that `max_tokens` came from.
    pub max_tokens_field: &'static str,
    /// Bound on generated tokens; left out: `usual_max_tokens`, or as many as there is room for.
    pub max_tokens: Option<i64>,
    /// Where `max_tokens` is left out; `None`: the end of the context.
    pub usual_max_tokens: Option<u32>,
    /// Generated tokens before the first stop token.
    pub min_tokens: Option<i64>,
    /// Choices for each prompt.
    pub n: Option<i64>,
    /// In [0, 2].
    pub temperature: Option<f64>,
    /// 0 or -1: all.
    pub top_k: Option<i64>,
    /// In (0, 1].
    pub top_p: Option<f64>,
    /// In [0, 1].
    pub min_p: Option<f64>,
    /// Left out: one is drawn.
    pub seed: Option<u64>,
    /// In [-2, 2].
    pub presence_penalty: Option<f64>,
    /// In [-2, 2].
    pub frequency_penalty: Option<f64>,
    /// In (0, 10].
    pub repetition_penalty: Option<f64>,
    /// (token, bias in [-100, 100]).
    pub logit_bias: Vec<(u64, f64)>,
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// The one that does is part of it.
    pub include_stop: bool,
    /// Plain texts have what the model expects around them, such as a begin token; left out: they do, and chats have
    /// what their template writes.
    pub add_special: Option<bool>,
    /// Only so many tokens of the prompt, its last; -1: as many as the context has room for beside one.
    pub truncate_prompt: Option<i64>,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Tokens that end the output, beside those.
    pub stop_tokens: Vec<u32>,
    /// The tokens that the output may have.
    pub allowed_tokens: Option<Vec<u32>>,
    /// Texts that it does not have.
    pub bad_words: Vec<String>,
    /// Name of the field that `logprobs` came from.
    pub logprobs_field: &'static str,
    /// Report log-probabilities, and of so many most likely tokens.
    pub logprobs: Option<i64>,
    /// KV pages are shared with requests of the same salt alone.
    pub cache_salt: Option<String>,
    /// What the output is held to, with the name of the field that says so.
    pub constraint: Option<(String, Constraint)>,
    /// Names of control tokens are part of the output.
    pub show_special: bool,
    /// The output begins with the prompt.
    pub echo: bool,
    /// Report log-probabilities of the prompt's tokens, and of so many most likely ones in their places.
    pub prompt_logprobs: Option<i64>,
    /// It is given up so many milliseconds after it came.
    pub timeout_ms: Option<i64>,
    /// The lowest is first; left out: 0.
    pub priority: Option<i64>,
}

impl RawRequest {
    /// A request that asks for nothing beyond its input.
    pub fn new(input_field: &'static str, input: Input) -> Self {
        Self {
            input_field,
            input,
            max_tokens_field: "max_tokens",
            max_tokens: None,
            usual_max_tokens: None,
            min_tokens: None,
            n: None,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            seed: None,
            presence_penalty: None,
            frequency_penalty: None,
            repetition_penalty: None,
            logit_bias: Vec::new(),
            stop: Vec::new(),
            include_stop: false,
            add_special: None,
            truncate_prompt: None,
            ignore_eos: false,
            stop_tokens: Vec::new(),
            allowed_tokens: None,
            bad_words: Vec::new(),
            logprobs_field: "logprobs",
            logprobs: None,
            cache_salt: None,
            constraint: None,
            show_special: false,
            echo: false,
            prompt_logprobs: None,
            timeout_ms: None,
            priority: None,
        }
    }
}

/// A request that can be served as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidRequest {
    /// At least one prompt, each of at least one token and shorter than the context.
    pub prompts: Vec<ValidPrompt>,
    /// Choices for each prompt, at least 1.
    pub choices: u32,
    /// As in [`SequenceRequest`].
    pub min_tokens: u32,
    /// As in [`SequenceRequest`].
    pub stop_tokens: Vec<u32>,
    /// With the seed of choice 0.
    pub sampling: SamplingParams,
    /// As in [`SequenceRequest`].
    pub logprobs: Option<u32>,
    /// What ends the output by its text.
    pub stop: Stops,
    /// What is told apart in it.
    pub format: Format,
    /// As in [`SequenceRequest`].
    pub cache_salt: Arc<str>,
    /// What the output is held to, with the name of the field that says so, to be compiled to `grammar`.
    pub form: Option<(String, Form)>,
    /// As in [`SequenceRequest`].
    pub grammar: Option<Arc<str>>,
    /// As in [`SequenceRequest`].
    pub token_bounds: Arc<TokenBounds>,
    /// Names of control tokens are part of the output.
    pub show_special: bool,
    /// The output begins with the prompt.
    pub echo: bool,
    /// What is told of the prompt beside that, as in [`SequenceRequest`].
    pub prompt_logprobs: Option<u32>,
    /// The prompt is all that is asked about: the one token that is generated is not told.
    pub prompt_alone: bool,
    /// It is given up so long after it came.
    pub timeout: Option<Duration>,
    /// As in [`crate::engine::Standing`].
    pub priority: i32,
}

/// One prompt of a valid request.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidPrompt {
    /// At least one.
    pub tokens: Vec<u32>,
    /// Bound on generated tokens, at least 1; with the prompt it fits the context.
    pub max_tokens: u32,
    /// Where the output stands in its text.
    pub start: Start,
    /// As the client wrote it, if it wrote a text.
    pub text: Option<String>,
    /// It has begun the output's thinking.
    pub thinks: bool,
}

impl ValidRequest {
    /// The sequences to generate, prompt by prompt, and the prompt of each. Choice k of a prompt has the same seed
    /// whatever else the request holds; that of choice 0 is the request's.
    pub fn sequences(&self) -> impl Iterator<Item = (SequenceRequest, &ValidPrompt)> + '_ {
        // What is echoed has log-probabilities if the output has.
        let prompt_logprobs = self.prompt_logprobs.max(self.logprobs.filter(|_| self.echo));
        self.prompts.iter().flat_map(move |prompt| {
            (0..self.choices).map(move |choice| {
                let sampling =
                    SamplingParams { seed: choice_seed(self.sampling.seed, choice), ..self.sampling.clone() };
                let request = SequenceRequest {
                    prompt: prompt.tokens.clone(),
                    max_tokens: prompt.max_tokens,
                    min_tokens: self.min_tokens,
                    stop_tokens: self.stop_tokens.clone(),
                    sampling,
                    logprobs: self.logprobs,
                    cache_salt: self.cache_salt.clone(),
                    grammar: self.grammar.clone(),
                    token_bounds: self.token_bounds.clone(),
                    prompt_logprobs,
                };
                (request, prompt)
            })
        })
    }

    /// The prompt of a choice, by its number among those of all prompts.
    pub fn prompt_of(&self, choice: u32) -> &ValidPrompt {
        &self.prompts[(choice / self.choices) as usize]
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum()
    }
}

/// Seeds that a client can hand back in JSON without loss: integers that a double holds exactly.
const DRAWN_SEEDS: RangeInclusive<u64> = 0..=(1 << 53) - 1;

/// A seed for a request that brings none.
fn draw_seed() -> u64 {
    // The low 62 bits of a version 4 UUID are random.
    let (_, low) = uuid::Uuid::new_v4().as_u64_pair();
    low & DRAWN_SEEDS.end()
}

/// The seed of a choice: choice 0 has the request's own, the others one mixed from it (SplitMix64's finaliser).
fn choice_seed(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    let mut mixed = seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_zero_has_the_requests_seed_and_the_others_their_own() {
        let seeds: std::collections::HashSet<u64> = (0..16).map(|choice| choice_seed(7, choice)).collect();
        assert_eq!(seeds.len(), 16);
        assert_eq!(choice_seed(7, 0), 7);
        // SplitMix64 from seed 0, as its author's own code prints it.
        assert_eq!(choice_seed(0, 1), 0xe220_a839_7b1d_cdaf);
        assert_eq!(choice_seed(0, 2), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn drawn_seeds_differ_and_survive_json() {
        let (a, b) = (draw_seed(), draw_seed());
        assert_ne!(a, b);
        assert!(DRAWN_SEEDS.contains(&a) && a as f64 as u64 == a);
    }
}
