//! JSON bodies of `/v1/chat/completions` and `/v1/completions` to raw requests.

use serde_json::{Value, json};

use super::{
    error::{ApiError, wrong_type},
    fields::{Fields, Off},
    messages::conversation,
};
use crate::request::{FieldError, Input, RawRequest, RequestError, ranges};

/// A request as HTTP brings it: what to generate, and how to answer.
#[derive(Debug)]
pub(in crate::http) struct HttpRequest {
    /// Empty: the model that is served.
    pub(in crate::http) model: String,
    pub(in crate::http) raw: RawRequest,
    pub(in crate::http) wanted: Wanted,
}

/// How to answer.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::http) struct Wanted {
    pub(in crate::http) stream: bool,
    pub(in crate::http) stream_usage: StreamUsage,
    /// Log-probabilities name tokens by their ids.
    pub(in crate::http) tokens_as_ids: bool,
    /// The answer has the ids of its tokens and its prompt's.
    pub(in crate::http) token_ids: bool,
    /// The answer tells what was thought before it.
    pub(in crate::http) include_reasoning: bool,
    /// The answer names the tier that it was served at.
    pub(in crate::http) service_tier: bool,
}

/// Where a stream tells its usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::http) struct StreamUsage {
    /// In a chunk of its own, the last.
    pub(in crate::http) at_end: bool,
    /// So far, in every chunk.
    pub(in crate::http) in_each: bool,
}

/// Fields of both APIs that are not supported, each with the values that ask for nothing: OpenAI's, and those that
/// clients of vLLM send.
const UNSUPPORTED: [(&str, Off); 17] = [
    ("store", is_false),
    ("detokenize", is_true),
    ("early_stopping", is_false),
    ("guided_decoding_backend", |_| true),
    ("guided_whitespace_pattern", |_| false),
    ("kv_transfer_params", |_| false),
    ("length_penalty", is_one),
    ("logits_processors", is_empty_list),
    ("logprob_token_ids", is_empty_list),
    ("min_thinking_tokens", |_| false),
    ("prompt_embeds", |_| false),
    ("repetition_detection", |_| false),
    ("return_prompt_token_ids", is_false),
    ("structural_tag", |_| false),
    ("thinking_token_budget", |_| false),
    ("use_beam_search", is_false),
    ("vllm_xargs", is_empty_object),
];

const UNSUPPORTED_CHAT: [(&str, Off); 11] = [
    ("echo", is_false),
    ("chat_template", |_| false),
    ("media_io_kwargs", is_empty_object),
    ("mm_processor_kwargs", is_empty_object),
    ("return_assistant_tokens_mask", is_false),
    ("functions", is_empty_list),
    ("function_call", |value| value == "none"),
    ("audio", |_| false),
    ("modalities", |value| *value == json!(["text"])),
    ("prediction", |_| false),
    ("web_search_options", |_| false),
];

/// The tier at which everything is served, and OpenAI's names for tiers.
pub(in crate::http) const SERVICE_TIER: &str = "default";
const SERVICE_TIERS: [&str; 6] = ["auto", SERVICE_TIER, "flex", "scale", "priority", "fast"];

const UNSUPPORTED_COMPLETION: [(&str, Off); 1] = [("suffix", |value| value == "")];

pub(in crate::http) fn is_empty_list(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

fn is_empty_object(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn is_true(value: &Value) -> bool {
    *value == true
}

fn is_false(value: &Value) -> bool {
    *value == false
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

/// Tokens of a completion that does not say how many it wants, as OpenAI has it.
const COMPLETION_TOKENS: u32 = 16;

/// Reads the body of `/v1/chat/completions`.
pub(in crate::http) fn chat(body: Value) -> Result<HttpRequest, ApiError> {
    let mut fields = Fields::new(body, "")?;
    let mut raw = RawRequest::new("messages", Input::Chat(conversation(&mut fields)?));
    let max_completion_tokens = fields.integer("max_completion_tokens", ranges::MAX_TOKENS_OR_NONE)?;
    let max_tokens = fields.integer("max_tokens", ranges::MAX_TOKENS_OR_NONE)?;
    raw.max_tokens = match (max_completion_tokens, max_tokens) {
        (Some(new), Some(old)) if new != old => {
            let message = "differs from max_completion_tokens; give one of them";
            return Err(RequestError::field("max_tokens", FieldError::Value, message).into());
        }
        (Some(_), _) => {
            raw.max_tokens_field = "max_completion_tokens";
            max_completion_tokens
        }
        (None, _) => max_tokens,
    };
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", ranges::LOGPROBS)?;
    if top.is_some_and(|top| top != 0) && !wanted {
        let message = "needs logprobs to be true";
        return Err(RequestError::field("top_logprobs", FieldError::Value, message).into());
    }
    raw.logprobs_field = "top_logprobs";
    raw.logprobs = wanted.then(|| top.unwrap_or(0));
    let include_reasoning = fields.boolean("include_reasoning")?.unwrap_or(true);
    fields.unsupported(&UNSUPPORTED_CHAT)?;
    let mut request = common(fields, raw)?;
    request.wanted.include_reasoning = include_reasoning;
    Ok(request)
}

/// Reads the body of `/v1/completions`.
pub(in crate::http) fn completion(body: Value) -> Result<HttpRequest, ApiError> {
    let mut fields = Fields::new(body, "")?;
    let mut raw = RawRequest::new("prompt", prompt(fields.required("prompt")?)?);
    raw.max_tokens = fields.integer("max_tokens", ranges::MAX_TOKENS_OR_NONE)?;
    raw.usual_max_tokens = Some(COMPLETION_TOKENS);
    raw.logprobs = fields.integer("logprobs", ranges::LOGPROBS)?;
    raw.echo = fields.boolean("echo")?.unwrap_or(false);
    raw.n = fields.integer("n", ranges::CHOICES)?;
    // The best of as many as there are are all of them.
    if let Some(best_of) = fields.integer("best_of", ranges::CHOICES)?.filter(|best_of| *best_of != raw.n.unwrap_or(1))
    {
        let message = format!("{best_of} is not n: this server gives all that it generates");
        return Err(RequestError::field("best_of", FieldError::Unsupported, message).into());
    }
    fields.unsupported(&UNSUPPORTED_COMPLETION)?;
    common(fields, raw)
}

fn common(mut fields: Fields, mut raw: RawRequest) -> Result<HttpRequest, ApiError> {
    let model = match fields.string("model")? {
        Some(name) if name.is_empty() => {
            return Err(RequestError::field("model", FieldError::Value, "must not be empty").into());
        }
        name => name.unwrap_or_default(),
    };
    raw.min_tokens = fields.integer("min_tokens", ranges::MIN_TOKENS)?;
    raw.n = fields.integer("n", ranges::CHOICES)?.or(raw.n);
    sampling(&mut fields, &mut raw)?;
    raw.constraint = constraint::constraint(&mut fields)?;
    raw.prompt_logprobs = fields.integer("prompt_logprobs", ranges::LOGPROBS)?;
    raw.truncate_prompt = fields.integer("truncate_prompt_tokens", ranges::TRUNCATED)?;
    raw.add_special = fields.boolean("add_special_tokens")?;
    // Names of control tokens stand as the tokenizer has them, without spaces, as with all of Hugging Face's fast ones.
    fields.boolean("spaces_between_special_tokens")?;
    raw.show_special = !fields.boolean("skip_special_tokens")?.unwrap_or(true);
    let tokens_as_ids = fields.boolean("return_tokens_as_token_ids")?.unwrap_or(false);
    let token_ids = fields.boolean("return_token_ids")?.unwrap_or(false);
    if let Some(ids) = fields.list("allowed_token_ids", "a list of token ids", "integer")? {
        raw.allowed_tokens = Some(self::token_ids(&ids, "allowed_token_ids")?);
    }
    if let Some(words) = fields.list("bad_words", "a list of strings", "string")? {
        raw.bad_words = texts(Value::Array(words), "bad_words", "a list of strings")?;
    }
    let stream = fields.boolean("stream")?.unwrap_or(false);
    if stream && raw.prompt_logprobs.is_some() {
        let message = "does not go with stream: true; those of an echo do";
        return Err(RequestError::field("prompt_logprobs", FieldError::Value, message).into());
    }
    let stream_usage = match fields.value("stream_options") {
        Some(_) if !stream => {
            let message = "only makes sense with stream: true";
            return Err(RequestError::field("stream_options", FieldError::Value, message).into());
        }
        Some(options) => {
            let mut options = Fields::new(options, "stream_options")?;
            let at_end = options.boolean("include_usage")?.unwrap_or(false);
            let in_each = options.boolean("continuous_usage_stats")?.unwrap_or(false);
            options.unsupported(&[("include_obfuscation", is_false)])?;
            options.finish()?;
            StreamUsage { at_end, in_each: at_end && in_each }
        }
        None => StreamUsage::default(),
    };
    labels(&mut fields)?;
    let service_tier = service_tier(&mut fields)?;
    fields.unsupported(&UNSUPPORTED)?;
    fields.finish()?;
    let include_reasoning = false;
    let wanted = Wanted { stream, stream_usage, tokens_as_ids, token_ids, include_reasoning, service_tier };
    Ok(HttpRequest { model, raw, wanted })
}

/// How tokens are drawn, where the output ends, and who is served first: by vLLM's names, wherever vLLM takes them.
pub(in crate::http) fn sampling(fields: &mut Fields, raw: &mut RawRequest) -> Result<(), ApiError> {
    raw.temperature = fields.number("temperature", ranges::TEMPERATURE)?;
    raw.top_k = fields.integer("top_k", ranges::TOP_K)?;
    raw.top_p = fields.number("top_p", ranges::TOP_P)?;
    raw.min_p = fields.number("min_p", ranges::MIN_P)?;
    raw.seed = fields.seed("seed")?;
    raw.presence_penalty = fields.number("presence_penalty", ranges::PENALTY)?;
    raw.frequency_penalty = fields.number("frequency_penalty", ranges::PENALTY)?;
    raw.repetition_penalty = fields.number("repetition_penalty", ranges::REPETITION_PENALTY)?;
    if let Some(bias) = fields.value("logit_bias") {
        raw.logit_bias = logit_bias(bias)?;
    }
    raw.ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
    if let Some(stop) = fields.value("stop") {
        raw.stop = stops(stop)?;
    }
    if let Some(ids) = fields.list("stop_token_ids", "a list of token ids", "integer")? {
        raw.stop_tokens = token_ids(&ids, "stop_token_ids")?;
    }
    raw.include_stop = fields.boolean("include_stop_str_in_output")?.unwrap_or(false);
    raw.cache_salt = fields.string("cache_salt")?;
    raw.timeout_ms = fields.integer("timeout_ms", ranges::TIMEOUT_MS)?;
    raw.priority = fields.integer("priority", ranges::PRIORITY)?;
    Ok(())
}

/// Whether a tier is asked for. There is one, whose name answers then have: OpenAI's tell the tier that was used, which
/// need not be the one that was asked for.
pub(in crate::http) fn service_tier(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(tier) = fields.string("service_tier")? else { return Ok(false) };
    if !SERVICE_TIERS.contains(&tier.as_str()) {
        let message = format!("{tier:?} is none of {}", SERVICE_TIERS.join(", "));
        return Err(RequestError::field("service_tier", FieldError::Value, message).into());
    }
    Ok(true)
}

/// Labels for the caller's own records: they ask for nothing, so nothing is ignored by taking them.
pub(in crate::http) fn labels(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(name)?;
    }
    fields.object("metadata").map(drop)
}

/// A text, a list of texts, a list of token ids, or a list of lists of token ids.
fn prompt(value: Value) -> Result<Input, ApiError> {
    let expected = "a string, a list of strings, a list of token ids, or a list of such lists";
    let list = match value {
        Value::String(text) => return Ok(Input::Texts(vec![text])),
        Value::Array(list) => list,
        _ => return Err(wrong_type("prompt", expected)),
    };
    match list.first() {
        None => Ok(Input::Texts(Vec::new())),
        Some(Value::String(_)) => {
            let text = |(index, value)| match value {
                Value::String(text) => Ok(text),
                _ => Err(wrong_type(format!("prompt[{index}]"), "a string, as the first is")),
            };
            Ok(Input::Texts(list.into_iter().enumerate().map(text).collect::<Result<_, _>>()?))
        }
        Some(Value::Number(_)) => Ok(Input::Tokens(vec![token_ids(&list, "prompt")?])),
        Some(Value::Array(_)) => {
            let ids = |(index, value): (usize, &Value)| match value {
                Value::Array(ids) => token_ids(ids, &format!("prompt[{index}]")),
                _ => Err(wrong_type(format!("prompt[{index}]"), "a list of token ids, as the first is")),
            };
            Ok(Input::Tokens(list.iter().enumerate().map(ids).collect::<Result<_, _>>()?))
        }
        Some(_) => Err(wrong_type("prompt", expected)),
    }
}

pub(in crate::http) fn token_ids(list: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, value): (usize, &Value)| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| wrong_type(format!("{path}[{index}]"), "a token id"))
    };
    list.iter().enumerate().map(id).collect()
}

fn stops(value: Value) -> Result<Vec<String>, ApiError> {
    match value {
        Value::String(stop) => Ok(vec![stop]),
        list => texts(list, "stop", "a string or a list of strings"),
    }
}

pub(in crate::http) fn texts(value: Value, path: &str, expected: &str) -> Result<Vec<String>, ApiError> {
    let Value::Array(list) = value else { return Err(wrong_type(path, expected)) };
    let text = |value| match value {
        Value::String(text) => Ok(text),
        _ => Err(wrong_type(path, expected)),
    };
    list.into_iter().map(text).collect()
}

fn logit_bias(value: Value) -> Result<Vec<(u64, f64)>, ApiError> {
    let Value::Object(map) = value else { return Err(wrong_type("logit_bias", "an object of token ids and numbers")) };
    let entry = |(token, bias): (String, Value)| {
        let digits = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_digit());
        let Some(id) = token.parse().ok().filter(|_| digits) else {
            let message = format!("{token:?} is not a token id");
            return Err(RequestError::field("logit_bias", FieldError::Value, message).into());
        };
        let bias = bias.as_f64().ok_or_else(|| wrong_type(format!("logit_bias.{token}"), "a number"))?;
        Ok((id, bias))
    };
    map.into_iter().map(entry).collect()
}

pub(in crate::http) mod constraint;
#[cfg(test)]
mod tests;
