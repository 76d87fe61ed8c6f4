//! JSON bodies of `/v1/chat/completions` and `/v1/completions` to raw requests.

use serde_json::{Value, json};

use super::{
    error::{ApiError, wrong_type},
    fields::{Fields, Off},
};
use crate::{
    request::{FieldError, Input, RawRequest, RequestError},
    text::ChatMessage,
};

/// A request as HTTP brings it: what to generate, and how to answer.
#[derive(Debug)]
pub(super) struct HttpRequest {
    /// Empty: the model that is served.
    pub(super) model: String,
    pub(super) raw: RawRequest,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

/// Fields of both APIs that are not supported, each with the values that ask for nothing.
const UNSUPPORTED: [(&str, Off); 3] = [
    ("response_format", |value| *value == json!({"type": "text"})),
    ("service_tier", |value| value == "auto" || value == "default"),
    ("store", |value| *value == false),
];

const UNSUPPORTED_CHAT: [(&str, Off); 11] = [
    ("tools", is_empty_list),
    ("tool_choice", |value| value == "none"),
    ("parallel_tool_calls", Value::is_boolean),
    ("functions", is_empty_list),
    ("function_call", |value| value == "none"),
    ("audio", |_| false),
    ("modalities", |value| *value == json!(["text"])),
    ("prediction", |_| false),
    ("reasoning_effort", |value| value == "none"),
    ("verbosity", |value| value == "medium"),
    ("web_search_options", |_| false),
];

const UNSUPPORTED_COMPLETION: [(&str, Off); 3] =
    [("best_of", |value| *value == 1), ("echo", |value| *value == false), ("suffix", |value| value == "")];

const UNSUPPORTED_MESSAGE: [(&str, Off); 6] = [
    ("tool_calls", is_empty_list),
    ("tool_call_id", |_| false),
    ("function_call", |_| false),
    ("audio", |_| false),
    ("refusal", |_| false),
    ("annotations", is_empty_list),
];

fn is_empty_list(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

/// Reads the body of `/v1/chat/completions`.
pub(super) fn chat(body: Value) -> Result<HttpRequest, ApiError> {
    let mut fields = Fields::new(body, "")?;
    let messages = messages(fields.required("messages")?)?;
    let mut raw = RawRequest::new("messages", Input::Chat(messages));
    let max_completion_tokens = fields.integer("max_completion_tokens")?;
    let max_tokens = fields.integer("max_tokens")?;
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
    let top = fields.integer("top_logprobs")?;
    if top.is_some_and(|top| top != 0) && !wanted {
        let message = "needs logprobs to be true";
        return Err(RequestError::field("top_logprobs", FieldError::Value, message).into());
    }
    raw.logprobs_field = "top_logprobs";
    raw.logprobs = wanted.then(|| top.unwrap_or(0));
    fields.unsupported(&UNSUPPORTED_CHAT)?;
    common(fields, raw)
}

/// Reads the body of `/v1/completions`.
pub(super) fn completion(body: Value) -> Result<HttpRequest, ApiError> {
    let mut fields = Fields::new(body, "")?;
    let mut raw = RawRequest::new("prompt", prompt(fields.required("prompt")?)?);
    raw.max_tokens = fields.integer("max_tokens")?;
    raw.logprobs = fields.integer("logprobs")?;
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
    raw.min_tokens = fields.integer("min_tokens")?;
    raw.n = fields.integer("n")?;
    raw.temperature = fields.number("temperature")?;
    raw.top_k = fields.integer("top_k")?;
    raw.top_p = fields.number("top_p")?;
    raw.min_p = fields.number("min_p")?;
    raw.seed = fields.seed("seed")?;
    raw.presence_penalty = fields.number("presence_penalty")?;
    raw.frequency_penalty = fields.number("frequency_penalty")?;
    raw.repetition_penalty = fields.number("repetition_penalty")?;
    raw.ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
    raw.cache_salt = fields.string("cache_salt")?;
    if let Some(stop) = fields.value("stop") {
        raw.stop = stops(stop)?;
    }
    if let Some(bias) = fields.value("logit_bias") {
        raw.logit_bias = logit_bias(bias)?;
    }
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = match fields.value("stream_options") {
        Some(_) if !stream => {
            let message = "only makes sense with stream: true";
            return Err(RequestError::field("stream_options", FieldError::Value, message).into());
        }
        Some(options) => {
            let mut options = Fields::new(options, "stream_options")?;
            let include = options.boolean("include_usage")?.unwrap_or(false);
            options.unsupported(&[("include_obfuscation", |value| *value == false)])?;
            options.finish()?;
            include
        }
        None => false,
    };
    labels(&mut fields)?;
    fields.unsupported(&UNSUPPORTED)?;
    fields.finish()?;
    Ok(HttpRequest { model, raw, stream, include_usage })
}

/// Labels for the caller's own records: they ask for nothing, so nothing is ignored by taking them.
fn labels(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(name)?;
    }
    match fields.value("metadata") {
        Some(metadata) if !metadata.is_object() => Err(wrong_type("metadata", "an object")),
        _ => Ok(()),
    }
}

fn messages(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    let Value::Array(list) = value else { return Err(wrong_type("messages", "a list of messages")) };
    list.into_iter().enumerate().map(|(index, value)| message(value, &format!("messages[{index}]"))).collect()
}

fn message(value: Value, path: &str) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::new(value, path)?;
    let role_path = fields.path("role");
    let Value::String(role) = fields.required("role")? else { return Err(wrong_type(role_path, "a string")) };
    let role = match role.as_str() {
        // OpenAI's newer name for the same role; models' templates know the older one.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => {
            let message = "tools are not supported";
            return Err(RequestError::field(role_path, FieldError::Unsupported, message).into());
        }
        _ => {
            let message = format!("{role:?} is none of system, developer, user, assistant");
            return Err(RequestError::field(role_path, FieldError::Value, message).into());
        }
    };
    fields.unsupported(&UNSUPPORTED_MESSAGE)?;
    let content_path = fields.path("content");
    let content = content(fields.required("content")?, &content_path)?;
    let name = fields.string("name")?;
    fields.finish()?;
    Ok(ChatMessage { role: role.into(), content, name })
}

/// A text, or a list of text parts, which are one text in pieces.
fn content(value: Value, path: &str) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) if !parts.is_empty() => parts,
        _ => return Err(wrong_type(path, "a string or a list of text parts")),
    };
    let mut text = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, &format!("{path}[{index}]"))?;
        let type_path = part.path("type");
        if part.required("type")? != "text" {
            let message = "only parts of type \"text\" are supported";
            return Err(RequestError::field(type_path, FieldError::Unsupported, message).into());
        }
        let text_path = part.path("text");
        match part.required("text")? {
            Value::String(piece) => text.push_str(&piece),
            _ => return Err(wrong_type(text_path, "a string")),
        }
        part.finish()?;
    }
    Ok(text)
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

fn token_ids(list: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, value): (usize, &Value)| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| wrong_type(format!("{path}[{index}]"), "a token id"))
    };
    list.iter().enumerate().map(id).collect()
}

fn stops(value: Value) -> Result<Vec<String>, ApiError> {
    let expected = "a string or a list of strings";
    match value {
        Value::String(stop) => Ok(vec![stop]),
        Value::Array(list) => {
            let text = |value| match value {
                Value::String(stop) => Ok(stop),
                _ => Err(wrong_type("stop", expected)),
            };
            list.into_iter().map(text).collect()
        }
        _ => Err(wrong_type("stop", expected)),
    }
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

#[cfg(test)]
mod tests;
