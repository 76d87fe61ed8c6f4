//! The ranges of a request's numbers: what is checked, told in errors, and written in `/openapi.json`.

use std::{fmt, ops::RangeInclusive};

use super::{FieldError, MAX_CHOICES, MAX_TIMEOUT, MAX_TOP_LOGPROBS, RequestError};
use crate::engine;

/// Of whole numbers.
pub type Whole = RangeInclusive<i64>;

/// Of numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Numbers {
    /// The least, or what is under all of them.
    pub low: f64,
    /// The most.
    pub high: f64,
    /// The least is none of them.
    pub over_low: bool,
}

const fn numbers(low: f64, high: f64) -> Numbers {
    Numbers { low, high, over_low: false }
}

/// Of a number that changes nothing.
pub const ANY: Whole = i64::MIN..=i64::MAX;
/// Of `n`.
pub const CHOICES: Whole = 1..=MAX_CHOICES as i64;
/// Of `logprobs`, `top_logprobs` and `prompt_logprobs`. (-1 is how vLLM's clients say "all", which nobody needs.)
pub const LOGPROBS: Whole = 0..=MAX_TOP_LOGPROBS as i64;
/// Of `max_tokens` where tokens are generated.
pub const MAX_TOKENS: Whole = 1..=u32::MAX as i64;
/// Of `max_tokens` where the prompt alone may be asked for.
pub const MAX_TOKENS_OR_NONE: Whole = 0..=u32::MAX as i64;
/// Of `min_tokens`.
pub const MIN_TOKENS: Whole = 0..=u32::MAX as i64;
/// Of `timeout_ms`.
pub const TIMEOUT_MS: Whole = 1..=MAX_TIMEOUT.as_millis() as i64;
/// Of `priority`.
pub const PRIORITY: Whole = *engine::PRIORITIES.start() as i64..=*engine::PRIORITIES.end() as i64;
/// Of `top_k`; -1 is how vLLM's clients say "all".
pub const TOP_K: Whole = -1..=u32::MAX as i64;
/// Of `truncate_prompt_tokens`, of which the context bounds the most; -1: as many as it has.
pub const TRUNCATED: Whole = -1..=u32::MAX as i64;
/// Of `limit_seconds` of a restart: a day at most.
pub const RESTART_LIMIT_SECONDS: Whole = 0..=86_400;
/// Of `temperature`.
pub const TEMPERATURE: Numbers = numbers(0.0, 2.0);
/// Of `top_p`.
pub const TOP_P: Numbers = Numbers { over_low: true, ..numbers(0.0, 1.0) };
/// Of `min_p`.
pub const MIN_P: Numbers = numbers(0.0, 1.0);
/// Of `presence_penalty` and `frequency_penalty`.
pub const PENALTY: Numbers = numbers(-2.0, 2.0);
/// Of `repetition_penalty`.
pub const REPETITION_PENALTY: Numbers = Numbers { over_low: true, ..numbers(0.0, 10.0) };
/// Of each of `logit_bias`.
pub const BIAS: Numbers = numbers(-100.0, 100.0);

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { low, high, over_low } = self;
        write!(f, "{}{low}, {high}]", if *over_low { '(' } else { '[' })
    }
}

/// A number in its range, as the worker's type, in which it has to be there, too: of 64 bits the least are 0 in 32. NaN
/// is in no range.
pub(super) fn number(field: &str, value: f64, range: &Numbers) -> Result<f32, RequestError> {
    let rounded = value as f32;
    let at_low = f64::from(rounded) == range.low && range.over_low;
    if (range.low..=range.high).contains(&value) && !at_low {
        Ok(rounded)
    } else {
        let shown = if rounded == 0.0 && value != 0.0 { format!("{value:e}") } else { value.to_string() };
        Err(RequestError::field(field, FieldError::Value, format!("{shown} is not in {range}")))
    }
}

/// A whole number in its range.
///
/// # Errors
/// It is not in it.
pub fn integer(field: &str, value: i64, range: &Whole) -> Result<i64, RequestError> {
    if range.contains(&value) {
        Ok(value)
    } else {
        let (low, high) = (range.start(), range.end());
        Err(RequestError::field(field, FieldError::Value, format!("{value} is not in [{low}, {high}]")))
    }
}
