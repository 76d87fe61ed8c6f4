//! Messages of inference/v1 to what they ask for.

use std::time::Duration;

use looplane_proto::inference::v1::{
    ChatRequest, DetokenizeRequest, DetokenizeResponse, GenerateRequest, SamplingParams, TokenizeRequest,
    TokenizeResponse, generate_request, sampling_params::Form, tokenize_request,
};
use prost::Message;
use serde_json::Value;
use tonic::metadata::MetadataMap;

use super::chat::{chat as read_chat, choose, given};
use crate::{
    engine::ModelInfo,
    request::{Chat, FieldError, Input, MAX_TIMEOUT, RawRequest, RequestError, decode, encode},
    text::{Constraint, Text},
};

/// What a call asks to generate.
pub(super) struct Asked {
    /// Empty: the model that is served.
    pub(super) model: String,
    pub(super) raw: RawRequest,
    /// What was thought before the answer is told.
    pub(super) include_reasoning: bool,
}

/// A message that names a model; empty: the one that is served.
pub(super) trait Named: Message + Default + 'static {
    fn model(&self) -> &str;
}

impl Named for TokenizeRequest {
    fn model(&self) -> &str {
        &self.model
    }
}

impl Named for DetokenizeRequest {
    fn model(&self) -> &str {
        &self.model
    }
}

pub(super) fn generate(request: GenerateRequest) -> Result<Asked, RequestError> {
    let GenerateRequest { model, input, sampling, cache_salt, truncate_prompt_tokens, priority } = request;
    let (field, input) = match input {
        Some(generate_request::Input::Prompt(prompt)) => ("prompt", Input::Texts(vec![prompt])),
        Some(generate_request::Input::TokenIds(tokens)) => ("token_ids", Input::Tokens(vec![tokens.ids])),
        None => return Err(RequestError::field("input", FieldError::Missing, "prompt or token_ids must be given")),
    };
    let raw = RawRequest {
        cache_salt: given(cache_salt),
        truncate_prompt: truncate_prompt_tokens.map(i64::from),
        priority: Some(priority.into()),
        ..raw(field, input, sampling)?
    };
    Ok(Asked { model, raw, include_reasoning: true })
}

pub(super) fn chat(request: ChatRequest) -> Result<Asked, RequestError> {
    let ChatRequest {
        model,
        chat,
        tool_choice,
        parallel_tool_calls,
        include_reasoning,
        sampling,
        cache_salt,
        truncate_prompt_tokens,
        priority,
    } = request;
    let missing = || RequestError::field("chat", FieldError::Missing, "must be given, with its messages");
    let mut chat = read_chat(chat.ok_or_else(missing)?, "chat")?;
    choose(&mut chat, tool_choice)?;
    let chat = Chat { one_call: parallel_tool_calls == Some(false), ..chat };
    let raw = RawRequest {
        cache_salt: given(cache_salt),
        truncate_prompt: truncate_prompt_tokens.map(i64::from),
        priority: Some(priority.into()),
        ..raw("chat.messages", Input::Chat(chat), sampling)?
    };
    Ok(Asked { model, raw, include_reasoning: include_reasoning.unwrap_or(true) })
}

fn raw(field: &'static str, input: Input, sampling: Option<SamplingParams>) -> Result<RawRequest, RequestError> {
    let SamplingParams {
        max_tokens,
        min_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logit_bias,
        stop,
        stop_token_ids,
        include_stop_str_in_output,
        ignore_eos,
        logprobs,
        prompt_logprobs,
        n,
        skip_special_tokens,
        form,
        allowed_token_ids,
        bad_words,
    } = sampling.unwrap_or_default();
    Ok(RawRequest {
        max_tokens: max_tokens.map(i64::from),
        min_tokens: min_tokens.map(i64::from),
        n: n.map(i64::from),
        temperature: temperature.map(f64::from),
        top_k: top_k.map(i64::from),
        top_p: top_p.map(f64::from),
        min_p: min_p.map(f64::from),
        seed,
        presence_penalty: presence_penalty.map(f64::from),
        frequency_penalty: frequency_penalty.map(f64::from),
        repetition_penalty: repetition_penalty.map(f64::from),
        logit_bias: logit_bias.into_iter().map(|(token, bias)| (token.into(), bias.into())).collect(),
        stop,
        include_stop: include_stop_str_in_output,
        ignore_eos,
        stop_tokens: stop_token_ids,
        logprobs: logprobs.map(i64::from),
        prompt_logprobs: prompt_logprobs.map(i64::from),
        show_special: !skip_special_tokens.unwrap_or(true),
        allowed_tokens: Some(allowed_token_ids).filter(|ids| !ids.is_empty()),
        bad_words,
        constraint: form.map(constraint).transpose()?.flatten(),
        ..RawRequest::new(field, input)
    })
}

/// What the output is held to, with the name of the field that says so.
fn constraint(form: Form) -> Result<Option<(String, Constraint)>, RequestError> {
    let wrong = |field: &str, message: String| RequestError::field(field, FieldError::Value, message);
    let (field, constraint) = match form {
        Form::JsonObject(false) => return Ok(None),
        Form::JsonObject(true) => ("json_object", Constraint::json_object()),
        Form::JsonSchema(text) => match serde_json::from_str(&text) {
            Ok(schema @ (Value::Object(_) | Value::Bool(_))) => ("json_schema", Constraint::Json(schema)),
            Ok(_) => return Err(wrong("json_schema", "must be the text of an object, a JSON schema".into())),
            Err(error) => {
                return Err(wrong("json_schema", format!("the text is not a schema in JSON: {error}")));
            }
        },
        Form::Regex(text) => ("regex", Constraint::Regex(text)),
        Form::Grammar(text) => ("grammar", Constraint::Grammar(text)),
        Form::Choice(of) if of.texts.is_empty() || of.texts.iter().any(String::is_empty) => {
            return Err(wrong("choice.texts", "must be a list of texts, none of them empty".into()));
        }
        Form::Choice(of) => ("choice", Constraint::Choice(of.texts)),
    };
    match &constraint {
        Constraint::Regex(text) | Constraint::Grammar(text) if text.is_empty() => {
            Err(wrong(field, "must not be empty".into()))
        }
        _ => Ok(Some((field.to_owned(), constraint))),
    }
}

pub(super) fn tokenize(
    request: TokenizeRequest,
    model: &ModelInfo,
    text: &Text,
) -> Result<TokenizeResponse, RequestError> {
    let ids = match (request.input, request.add_special_tokens) {
        (None, _) => return Err(RequestError::field("input", FieldError::Missing, "prompt or chat must be given")),
        (Some(tokenize_request::Input::Chat(_)), Some(true)) => {
            let message = "the chat template writes them; leave the field out";
            return Err(RequestError::field("add_special_tokens", FieldError::Unsupported, message));
        }
        (Some(tokenize_request::Input::Chat(chat)), _) => {
            let chat = Input::Chat(read_chat(chat, "chat")?);
            encode(chat, "chat.messages", true, model, text)?
        }
        (Some(tokenize_request::Input::Prompt(prompt)), special) => {
            encode(Input::Texts(vec![prompt]), "prompt", special.unwrap_or(true), model, text)?
        }
    };
    Ok(TokenizeResponse { ids, max_context: model.max_context })
}

pub(super) fn detokenize(
    request: DetokenizeRequest,
    model: &ModelInfo,
    text: &Text,
) -> Result<DetokenizeResponse, RequestError> {
    Ok(DetokenizeResponse { text: decode(&request.ids, "ids", model, text)? })
}

/// Fields of [`SamplingParams`], by the names that HTTP has for them, too.
const OF_SAMPLING: [&str; 26] = [
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
    "skip_special_tokens",
    "json_object",
    "json_schema",
    "regex",
    "grammar",
    "choice",
    "allowed_token_ids",
    "bad_words",
];
/// Fields of `Chat` that HTTP has in its body.
const OF_CHAT: [&str; 7] = [
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "verbosity",
    "documents",
];

/// An error that names a field as HTTP has it, with the path that it has here.
pub(super) fn at_its_path(error: RequestError) -> RequestError {
    error.with_param(|param| {
        let name = param.split(['.', '[']).next().unwrap_or_default();
        let param = match param {
            "tool_choice.function.name" => "tool_choice.function".to_owned(),
            _ if name == "tools" => param.replace(".function.", "."),
            _ => param.to_owned(),
        };
        match name {
            _ if OF_SAMPLING.contains(&name) => format!("sampling.{param}"),
            _ if OF_CHAT.contains(&name) => format!("chat.{param}"),
            _ => param,
        }
    })
}

/// How long the call may take, as its client says. A timeout beyond the longest is that.
pub(super) fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, RequestError> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let wrong = || {
        let message = format!("{value:?} is no time: it is 1 to 8 digits and one of H, M, S, m, u, n");
        RequestError::field("grpc-timeout", FieldError::Value, message)
    };
    let (digits, unit) =
        value.to_str().ok().and_then(|text| text.split_at_checked(text.len().checked_sub(1)?)).ok_or_else(wrong)?;
    let nanoseconds: u64 = match unit {
        "H" => 3_600_000_000_000,
        "M" => 60_000_000_000,
        "S" => 1_000_000_000,
        "m" => 1_000_000,
        "u" => 1_000,
        "n" => 1,
        _ => return Err(wrong()),
    };
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(wrong());
    }
    let count: u64 = digits.parse().map_err(|_| wrong())?;
    Ok(Some(Duration::from_nanos(nanoseconds.saturating_mul(count)).min(MAX_TIMEOUT)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::request::validate;

    #[test]
    fn a_calls_time_is_read_in_all_its_units() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            timeout(&metadata)
        };
        assert_eq!(timeout(&MetadataMap::new()), Ok(None));
        for (text, time) in [
            ("0n", Duration::ZERO),
            ("1n", Duration::from_nanos(1)),
            ("20u", Duration::from_micros(20)),
            ("300m", Duration::from_millis(300)),
            ("4S", Duration::from_secs(4)),
            ("2M", Duration::from_secs(120)),
            ("1H", Duration::from_secs(3600)),
            ("99999999H", MAX_TIMEOUT),
        ] {
            assert_eq!(read(text), Ok(Some(time)), "{text}");
        }
        for text in ["", "5", "S", "-1S", "1.5S", "123456789m", "1s", "1 S", "+1S"] {
            assert!(read(text).unwrap_err().to_string().contains("grpc-timeout"), "{text}");
        }
    }

    #[test]
    fn errors_know_every_field_of_the_messages_that_http_has_elsewhere() {
        let files = prost_types::FileDescriptorSet::decode(looplane_proto::DESCRIPTORS).unwrap().file;
        let fields = |name: &str| {
            let messages = files.iter().filter(|file| file.package() == "looplane.inference.v1");
            let message = messages.flat_map(|file| &file.message_type).find(|message| message.name() == name);
            let fields = message.expect("the message exists").field.iter();
            fields.map(|field| field.name().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(fields("SamplingParams"), OF_SAMPLING);
        assert_eq!(fields("Chat")[1..], OF_CHAT);
        let path = |param: &str| at_its_path(RequestError::field(param, FieldError::Value, "")).param().to_owned();
        for (param, here) in [
            ("n", "sampling.n"),
            ("logit_bias.7", "sampling.logit_bias.7"),
            ("tools[1].function.name", "chat.tools[1].name"),
            ("tool_choice.function.name", "tool_choice.function"),
            ("chat.messages[0].content", "chat.messages[0].content"),
            ("token_ids", "token_ids"),
        ] {
            assert_eq!(path(param), here);
        }
    }

    #[test]
    fn what_is_left_out_is_as_if_left_out_over_http() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
        let mut text = Text::load(&fixture).unwrap();
        text.defaults.repetition_penalty = 1.25;
        text.defaults.temperature = 0.5;
        (text.defaults.top_k, text.defaults.top_p, text.defaults.min_p) = (7, 0.875, 0.0625);
        let model = ModelInfo { vocab_size: 768, max_context: 64, ..ModelInfo::default() };
        let input = Some(generate_request::Input::Prompt("Hi".into()));
        let sampling = Some(SamplingParams { seed: Some(1), ..SamplingParams::default() });
        let grpc = generate(GenerateRequest { input, sampling, ..GenerateRequest::default() }).unwrap().raw;
        let http = RawRequest { seed: Some(1), ..RawRequest::new("prompt", Input::Texts(vec!["Hi".into()])) };
        let grpc = validate(grpc, &model, &text).unwrap();
        assert_eq!(grpc.sampling.repetition_penalty, 1.25);
        assert_eq!(grpc, validate(http, &model, &text).unwrap());
    }
}
