//! inference/v1 `GenerateRequest` to a raw request.

use std::time::Duration;

use looplane_proto::inference::v1::{ChatMessage as ProtoMessage, GenerateRequest, generate_request};

use tonic::metadata::MetadataMap;

use crate::{
    request::{Chat, FieldError, Input, MAX_TIMEOUT, RawRequest, RequestError},
    text::ChatMessage,
};

/// Field by field; in proto3 a number that is 0 was left out.
pub(super) fn raw(request: GenerateRequest) -> Result<RawRequest, RequestError> {
    let (field, input) = match request.input {
        Some(generate_request::Input::Prompt(prompt)) => ("prompt", Input::Texts(vec![prompt])),
        Some(generate_request::Input::TokenIds(tokens)) => ("token_ids", Input::Tokens(vec![tokens.ids])),
        Some(generate_request::Input::Chat(chat)) => {
            let messages: Result<_, _> = chat.messages.into_iter().enumerate().map(message).collect();
            ("chat.messages", Input::Chat(Chat::new(messages?)))
        }
        None => {
            let message = "one of prompt, token_ids and chat must be given";
            return Err(RequestError::field("input", FieldError::Missing, message));
        }
    };
    if request.top_logprobs > 0 && !request.logprobs {
        return Err(RequestError::field("top_logprobs", FieldError::Value, "needs logprobs to be true"));
    }
    let nonzero = |value: f32| (value != 0.0).then_some(f64::from(value));
    Ok(RawRequest {
        max_tokens: (request.max_tokens != 0).then_some(i64::from(request.max_tokens)),
        min_tokens: Some(i64::from(request.min_tokens)),
        temperature: request.temperature.map(f64::from),
        top_k: request.top_k.map(i64::from),
        top_p: request.top_p.map(f64::from),
        min_p: request.min_p.map(f64::from),
        seed: request.seed,
        presence_penalty: nonzero(request.presence_penalty),
        frequency_penalty: nonzero(request.frequency_penalty),
        repetition_penalty: nonzero(request.repetition_penalty),
        logit_bias: request.logit_bias.iter().map(|(token, bias)| (u64::from(*token), f64::from(*bias))).collect(),
        stop: request.stop,
        ignore_eos: request.ignore_eos,
        cache_salt: Some(request.cache_salt).filter(|salt| !salt.is_empty()),
        logprobs_field: "top_logprobs",
        logprobs: request.logprobs.then_some(i64::from(request.top_logprobs)),
        ..RawRequest::new(field, input)
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

fn message((index, message): (usize, ProtoMessage)) -> Result<ChatMessage, RequestError> {
    match message.role.as_str() {
        "developer" => Ok(ChatMessage::new("system", message.content)),
        "system" | "user" | "assistant" => Ok(ChatMessage::new(message.role, message.content)),
        role => {
            let text = format!("{role:?} is none of system, developer, user, assistant");
            Err(RequestError::field(format!("chat.messages[{index}].role"), FieldError::Value, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{engine::ModelInfo, request::validate, text::Text};

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
    fn what_is_left_out_is_as_if_left_out_over_http() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
        let mut text = Text::load(&fixture).unwrap();
        text.defaults.repetition_penalty = 1.25;
        text.defaults.temperature = 0.5;
        (text.defaults.top_k, text.defaults.top_p, text.defaults.min_p) = (7, 0.875, 0.0625);
        let model = ModelInfo {
            model_digest: String::new(),
            architecture: String::new(),
            vocab_size: 768,
            max_context: 64,
            tensor_parallel: 1,
            bit_domain: String::new(),
        };
        let input = Some(generate_request::Input::Prompt("Hi".into()));
        let grpc = raw(GenerateRequest { input, seed: Some(1), ..GenerateRequest::default() }).unwrap();
        let http = RawRequest { seed: Some(1), ..RawRequest::new("prompt", Input::Texts(vec!["Hi".into()])) };
        let grpc = validate(grpc, &model, &text).unwrap();
        assert_eq!(grpc.sampling.repetition_penalty, 1.25);
        assert_eq!(grpc, validate(http, &model, &text).unwrap());
    }
}
