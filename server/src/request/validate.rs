//! Every rule for a request's values, each with the range in its error.

use std::{sync::Arc, time::Duration};

use super::{
    Chat, FieldError, Input, MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_PROMPTS, MAX_SALT_BYTES, MAX_SEQUENCES, MAX_STOP_BYTES,
    MAX_STOP_TOKENS, MAX_STOPS, RawRequest, RequestError, ValidPrompt, ValidRequest, bounds, chat, draw_seed, form,
    ranges::{self, integer, number},
    tools,
};
use crate::{
    engine::{ModelInfo, SamplingParams},
    reply::Format,
    text::{Start, Stops, Text, TextError},
};

/// Checks a request against the model, fills in what it leaves out, and makes its input tokens. Long prompts take a
/// while: not for an async thread.
///
/// # Errors
/// Names the first field that is wrong.
pub fn validate(raw: RawRequest, model: &ModelInfo, text: &Text) -> Result<ValidRequest, RequestError> {
    let sampling = sampling(&raw, model, text)?;
    let choices = integer("n", raw.n.unwrap_or(1), &ranges::CHOICES)? as u32;
    let logprobs = match raw.logprobs {
        Some(count) => Some(integer(raw.logprobs_field, count, &ranges::LOGPROBS)? as u32),
        None => None,
    };
    let prompt_logprobs = match raw.prompt_logprobs {
        Some(count) => Some(integer("prompt_logprobs", count, &ranges::LOGPROBS)? as u32),
        None => None,
    };
    let prompt_alone = raw.max_tokens == Some(0) && (raw.echo || prompt_logprobs.is_some());
    let max_tokens = match raw.max_tokens {
        Some(_) if prompt_alone => Some(1),
        Some(count) => Some(integer(raw.max_tokens_field, count, &ranges::MAX_TOKENS)? as u32),
        None => None,
    };
    let min_tokens = integer("min_tokens", raw.min_tokens.unwrap_or(0), &ranges::MIN_TOKENS)? as u32;
    check_stops(&raw.stop)?;
    check_stop_tokens(&raw.stop_tokens, model)?;
    let cache_salt = cache_salt(raw.cache_salt)?;
    let timeout = match raw.timeout_ms {
        Some(time) => Some(integer("timeout_ms", time, &ranges::TIMEOUT_MS)? as u64),
        None => None,
    };
    let priority = integer("priority", raw.priority.unwrap_or(0), &ranges::PRIORITY)? as i32;

    let single = !matches!(&raw.input, Input::Texts(list) if list.len() > 1)
        && !matches!(&raw.input, Input::Tokens(list) if list.len() > 1);
    let mut texts = match &raw.input {
        Input::Texts(texts) if raw.echo => texts.clone(),
        _ => Vec::new(),
    };
    texts.reverse();
    let format = match &raw.input {
        Input::Chat(chat) => tools::format(chat, text)?,
        Input::Texts(_) | Input::Tokens(_) => Format::default(),
    };
    let calls = match &raw.input {
        Input::Chat(chat) => tools::calls(chat, &format, text),
        Input::Texts(_) | Input::Tokens(_) => None,
    };
    if matches!(&raw.input, Input::Chat(_)) && raw.add_special == Some(true) {
        return Err(RequestError::special_of_chat());
    }
    let special = raw.add_special.unwrap_or(true);
    let prompts = prompts(raw.input, raw.input_field, special, &cache_salt, model, text)?;
    if prompts.len() * choices as usize > MAX_SEQUENCES {
        let message = format!("{} prompts times n = {choices} is more than {MAX_SEQUENCES} sequences", prompts.len());
        return Err(RequestError::field("n", FieldError::Value, message));
    }
    let mut valid_prompts = Vec::with_capacity(prompts.len());
    for (index, Encoded { mut tokens, start, thinks }) in prompts.into_iter().enumerate() {
        if let Some(most) = raw.truncate_prompt {
            let most = truncated("truncate_prompt_tokens", most, model)?;
            tokens.drain(..tokens.len().saturating_sub(most));
        }
        let field = if single { raw.input_field.to_owned() } else { format!("{}[{index}]", raw.input_field) };
        let max_tokens = fit_context(&field, &tokens, max_tokens, raw.usual_max_tokens, model)?;
        if min_tokens > max_tokens {
            let message = format!("{min_tokens} is more than the {max_tokens} tokens that may be generated");
            return Err(RequestError::field("min_tokens", FieldError::Value, message));
        }
        valid_prompts.push(ValidPrompt { tokens, max_tokens, start, text: texts.pop(), thinks });
    }
    let mut stop_tokens = if raw.ignore_eos { Vec::new() } else { text.defaults.eos_tokens.clone() };
    stop_tokens.extend(&raw.stop_tokens);
    let form = form::form(raw.constraint, calls, &format, valid_prompts.iter().any(|prompt| prompt.thinks));
    let has_form = form.as_ref().is_some_and(|(_, form)| form.says_the_end());
    if has_form {
        form::check_end(min_tokens, raw.ignore_eos)?;
    }
    let needs = bounds::Needs { stop_tokens: &stop_tokens, min_tokens, has_form };
    let token_bounds = bounds::bounds(raw.allowed_tokens.as_deref(), &raw.bad_words, &needs, model, text)?;
    let stop = Stops { texts: raw.stop, shown: raw.include_stop, min_tokens };
    let prompts = valid_prompts;
    Ok(ValidRequest {
        prompts,
        choices,
        min_tokens,
        stop_tokens,
        sampling,
        logprobs,
        stop,
        format,
        cache_salt,
        timeout: timeout.map(Duration::from_millis),
        priority,
        form,
        grammar: None,
        token_bounds,
        show_special: raw.show_special,
        echo: raw.echo,
        prompt_logprobs,
        prompt_alone,
    })
}

fn sampling(raw: &RawRequest, model: &ModelInfo, text: &Text) -> Result<SamplingParams, RequestError> {
    let defaults = &text.defaults;
    let top_k = integer("top_k", raw.top_k.unwrap_or(defaults.top_k), &ranges::TOP_K)?;
    let repetition_penalty = raw.repetition_penalty.unwrap_or(defaults.repetition_penalty);
    Ok(SamplingParams {
        temperature: number("temperature", raw.temperature.unwrap_or(defaults.temperature), &ranges::TEMPERATURE)?,
        top_k: top_k.max(0) as u32,
        top_p: number("top_p", raw.top_p.unwrap_or(defaults.top_p), &ranges::TOP_P)?,
        min_p: number("min_p", raw.min_p.unwrap_or(defaults.min_p), &ranges::MIN_P)?,
        seed: raw.seed.unwrap_or_else(draw_seed),
        presence_penalty: number("presence_penalty", raw.presence_penalty.unwrap_or(0.0), &ranges::PENALTY)?,
        frequency_penalty: number("frequency_penalty", raw.frequency_penalty.unwrap_or(0.0), &ranges::PENALTY)?,
        repetition_penalty: number("repetition_penalty", repetition_penalty, &ranges::REPETITION_PENALTY)?,
        logit_bias: logit_bias(&raw.logit_bias, model)?,
    })
}

/// Left out: that of all requests without one, the empty text.
fn cache_salt(salt: Option<String>) -> Result<Arc<str>, RequestError> {
    match salt {
        Some(salt) if !(1..=MAX_SALT_BYTES).contains(&salt.len()) => {
            let message = format!("its {} bytes are not in [1, {MAX_SALT_BYTES}]", salt.len());
            Err(RequestError::field("cache_salt", FieldError::Value, message))
        }
        salt => Ok(salt.unwrap_or_default().into()),
    }
}

fn logit_bias(biases: &[(u64, f64)], model: &ModelInfo) -> Result<Vec<(u32, f32)>, RequestError> {
    let wrong = |message: String| RequestError::field("logit_bias", FieldError::Value, message);
    if biases.len() > MAX_LOGIT_BIAS {
        return Err(wrong(format!("{} entries are more than {MAX_LOGIT_BIAS}", biases.len())));
    }
    let mut checked = Vec::with_capacity(biases.len());
    for (token, bias) in biases {
        let token = u32::try_from(*token).ok().filter(|token| *token < model.vocab_size).ok_or_else(|| {
            wrong(format!("token {token} does not exist; the vocabulary has {} tokens", model.vocab_size))
        })?;
        checked.push((token, number(&format!("logit_bias.{token}"), *bias, &ranges::BIAS)?));
    }
    checked.sort_unstable_by_key(|(token, _)| *token);
    match checked.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(wrong(format!("token {} is named twice", pair[0].0))),
        None => Ok(checked),
    }
}

/// How many tokens of a prompt are left.
fn truncated(field: &str, most: i64, model: &ModelInfo) -> Result<usize, RequestError> {
    let longest = i64::from(model.max_context).saturating_sub(1).max(1);
    let most = if most == -1 { longest } else { integer(field, most, &(1..=longest))? };
    Ok(most as usize)
}

fn check_stops(stops: &[String]) -> Result<(), RequestError> {
    let wrong = |message: String| Err(RequestError::field("stop", FieldError::Value, message));
    if stops.len() > MAX_STOPS {
        return wrong(format!("{} stop texts are more than {MAX_STOPS}", stops.len()));
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        Some(stop) => wrong(format!("a stop text has {} bytes; it must have 1 to {MAX_STOP_BYTES}", stop.len())),
        None => Ok(()),
    }
}

fn check_stop_tokens(tokens: &[u32], model: &ModelInfo) -> Result<(), RequestError> {
    let checked = match tokens.len() {
        0..=MAX_STOP_TOKENS => check_tokens(tokens, model),
        count => Err(format!("{count} tokens are more than {MAX_STOP_TOKENS}")),
    };
    checked.map_err(|message| RequestError::field("stop_token_ids", FieldError::Value, message))
}

/// The tokens of an input of one prompt, which came in `field`. `special`: of a plain text with what the model expects
/// around it.
///
/// # Errors
/// As [`validate`] has them of an input, but for its length in tokens.
pub fn encode(
    input: Input,
    field: &str,
    special: bool,
    model: &ModelInfo,
    text: &Text,
) -> Result<Vec<u32>, RequestError> {
    let all = prompts(input, field, special, "", model, text)?;
    Ok(all.into_iter().flat_map(|prompt| prompt.tokens).collect())
}

/// The text of tokens, which came in `field`, with that of special tokens.
///
/// # Errors
/// One of them does not exist.
pub fn decode(tokens: &[u32], field: &str, model: &ModelInfo, text: &Text) -> Result<String, RequestError> {
    let wrong = |message: String| RequestError::field(field, FieldError::Value, message);
    check_tokens(tokens, model).map_err(wrong)?;
    text.tokenizer.decode(tokens, true).map_err(|error| wrong(error.to_string()))
}

/// All of them exist.
fn check_tokens(tokens: &[u32], model: &ModelInfo) -> Result<(), String> {
    let size = model.vocab_size;
    match tokens.iter().find(|id| **id >= size) {
        Some(id) => Err(format!("token {id} does not exist; the vocabulary has {size} tokens")),
        None => Ok(()),
    }
}

/// The prompt that the model's chat template makes of a chat, which came in `field`.
///
/// # Errors
/// As [`validate`] has them of a chat, but for its length in tokens.
pub fn template_text(chat: &Chat, field: &str, model: &ModelInfo, text: &Text) -> Result<String, RequestError> {
    check_messages(chat, field)?;
    Ok(chat::prompt(chat, field, model.max_context, text)?.text)
}

fn check_messages(chat: &Chat, field: &str) -> Result<(), RequestError> {
    match chat.messages.len() {
        1..=MAX_MESSAGES => Ok(()),
        messages => {
            let message = format!("there must be 1 to {MAX_MESSAGES} messages, not {messages}");
            Err(RequestError::field(field, FieldError::Value, message))
        }
    }
}

/// A prompt of which only the length is not checked yet.
struct Encoded {
    tokens: Vec<u32>,
    start: Start,
    thinks: bool,
}

/// Each prompt. `special`: of plain texts with what the model expects around them.
fn prompts(
    input: Input,
    field: &str,
    special: bool,
    salt: &str,
    model: &ModelInfo,
    text: &Text,
) -> Result<Vec<Encoded>, RequestError> {
    let wrong = |message: String| RequestError::field(field, FieldError::Value, message);
    let check_count = |count: usize| match count {
        0 => Err(wrong("must not be empty".into())),
        1..=MAX_PROMPTS => Ok(()),
        _ => Err(wrong(format!("{count} prompts are more than {MAX_PROMPTS}"))),
    };
    match input {
        Input::Chat(chat) => {
            check_messages(&chat, field)?;
            let prompt = chat::prompt(&chat, field, model.max_context, text)?;
            let thinks = tools::thinks(&chat, &prompt.text);
            // The template has written the special tokens, the begin token included.
            let mut tokens = Vec::new();
            for part in prompt.parts() {
                tokens.extend(encode_text(part, false, salt, field, text)?);
            }
            Ok(vec![Encoded { tokens, start: Start::Beginning, thinks }])
        }
        Input::Texts(texts) => {
            check_count(texts.len())?;
            if texts.iter().any(String::is_empty) {
                return Err(wrong("a prompt must not be empty".into()));
            }
            // All lengths are checked before any text is tokenised.
            let max_context = model.max_context;
            let max_bytes = text.tokenizer.max_text_bytes(max_context);
            if let Some(prompt_bytes) = texts.iter().map(String::len).find(|bytes| *bytes > max_bytes) {
                return Err(RequestError::PromptBytes { field: field.to_owned(), prompt_bytes, max_context });
            }
            let tokens = |prompt: &String| {
                let tokens = encode_text(prompt, special, salt, field, text)?;
                Ok(Encoded { tokens, start: Start::Middle, thinks: false })
            };
            texts.iter().map(tokens).collect()
        }
        Input::Tokens(lists) => {
            check_count(lists.len())?;
            let check = |tokens: Vec<u32>| {
                check_tokens(&tokens, model).map_err(wrong)?;
                let text_before = tokens.iter().any(|id| !text.tokenizer.is_special(*id));
                let start = if text_before { Start::Middle } else { Start::Beginning };
                Ok(Encoded { tokens, start, thinks: false })
            };
            lists.into_iter().map(check).collect()
        }
    }
}

fn encode_text(prompt: &str, special: bool, salt: &str, field: &str, text: &Text) -> Result<Vec<u32>, RequestError> {
    let wrong = |error: TextError| RequestError::field(field, FieldError::Value, error.to_string());
    text.tokenizer.encode(prompt, special, salt).map_err(wrong)
}

/// How many tokens may follow this prompt.
fn fit_context(
    field: &str,
    prompt: &[u32],
    max_tokens: Option<u32>,
    usual: Option<u32>,
    model: &ModelInfo,
) -> Result<u32, RequestError> {
    if prompt.is_empty() {
        return Err(RequestError::field(field, FieldError::Value, "the prompt has no tokens"));
    }
    let prompt_tokens = prompt.len() as u64;
    let room = u64::from(model.max_context).saturating_sub(prompt_tokens);
    let most = usual.map_or(room, |usual| room.min(usual.into())).max(1);
    let asked = max_tokens.map_or(most, u64::from);
    if asked > room {
        let field = field.to_owned();
        return Err(RequestError::ContextLength { field, prompt_tokens, asked, max_context: model.max_context });
    }
    Ok(asked as u32)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::ChatMessage;

    fn text() -> Text {
        Text::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")).unwrap()
    }

    fn model() -> ModelInfo {
        ModelInfo {
            model_digest: String::new(),
            architecture: "LlamaForCausalLM".into(),
            vocab_size: 768,
            max_context: 32,
            tensor_parallel: 2,
            bit_domain: "d".into(),
        }
    }

    fn tokens(count: usize) -> RawRequest {
        RawRequest::new("prompt", Input::Tokens(vec![vec![5; count]]))
    }

    #[test]
    fn what_is_left_out_comes_from_the_model() {
        let valid = validate(tokens(8), &model(), &text()).unwrap();
        assert_eq!(valid.prompts[0].max_tokens, 24);
        assert_eq!(valid.stop_tokens, [1, 4]);
        assert_eq!((valid.sampling.temperature, valid.sampling.top_p, valid.logprobs), (1.0, 1.0, None));
        let ignoring = RawRequest { ignore_eos: true, ..tokens(8) };
        assert!(validate(ignoring, &model(), &text()).unwrap().stop_tokens.is_empty());
    }

    #[test]
    fn prompt_and_output_fit_the_context_or_are_refused_with_the_numbers() {
        let with_max = |prompt: usize, max: Option<i64>| {
            validate(RawRequest { max_tokens: max, ..tokens(prompt) }, &model(), &text())
        };
        assert_eq!(with_max(8, Some(24)).unwrap().prompts[0].max_tokens, 24);
        assert_eq!(with_max(31, None).unwrap().prompts[0].max_tokens, 1);
        for (prompt, max, asked) in
            [(8, Some(25), 25), (32, None, 1), (4000, None, 1), (1, Some(4294967295), 4294967295)]
        {
            let error = with_max(prompt, max).unwrap_err();
            let expected = RequestError::ContextLength {
                field: "prompt".into(),
                prompt_tokens: prompt as u64,
                asked,
                max_context: 32,
            };
            assert_eq!(error, expected);
            assert_eq!(error.code(), "context_length_exceeded");
        }
    }

    #[test]
    fn seeds_belong_to_choices() {
        let raw = RawRequest {
            n: Some(2),
            seed: Some(9),
            ..RawRequest::new("prompt", Input::Tokens(vec![vec![5], vec![6]]))
        };
        let valid = validate(raw, &model(), &text()).unwrap();
        let sequences: Vec<_> =
            valid.sequences().map(|(request, _)| (request.prompt[0], request.sampling.seed)).collect();
        assert_eq!(sequences.len(), 4);
        assert_eq!((sequences[0], sequences[2]), ((5, 9), (6, 9)));
        assert_eq!(sequences[1].1, sequences[3].1);
        assert_ne!(sequences[0].1, sequences[1].1);
    }

    #[test]
    fn a_chat_has_the_templates_begin_token_only() {
        let raw = RawRequest::new("messages", Input::Chat(Chat::new(vec![ChatMessage::new("user", "Hi")])));
        let valid = validate(raw, &ModelInfo { max_context: 2048, ..model() }, &text()).unwrap();
        assert_eq!(valid.prompts[0].tokens.iter().filter(|id| **id == 0).count(), 1);
    }

    #[test]
    fn values_out_of_range_are_named() {
        let raw = || tokens(1);
        let list = |count: usize| Input::Tokens(vec![vec![5]; count]);
        for (request, field) in [
            (RawRequest { temperature: Some(f64::NAN), ..raw() }, "temperature"),
            (RawRequest { temperature: Some(2.1), ..raw() }, "temperature"),
            (RawRequest { top_p: Some(0.0), ..raw() }, "top_p"),
            (RawRequest { top_p: Some(f64::INFINITY), ..raw() }, "top_p"),
            (RawRequest { top_k: Some(-2), ..raw() }, "top_k"),
            (RawRequest { min_p: Some(-0.1), ..raw() }, "min_p"),
            (RawRequest { presence_penalty: Some(-2.5), ..raw() }, "presence_penalty"),
            (RawRequest { frequency_penalty: Some(3.0), ..raw() }, "frequency_penalty"),
            (RawRequest { repetition_penalty: Some(0.0), ..raw() }, "repetition_penalty"),
            // 0 in 32 bits.
            (RawRequest { repetition_penalty: Some(1e-309), ..raw() }, "repetition_penalty"),
            (RawRequest { top_p: Some(1e-60), ..raw() }, "top_p"),
            (RawRequest { n: Some(0), ..raw() }, "n"),
            (RawRequest { n: Some(17), ..raw() }, "n"),
            (
                RawRequest { max_tokens: Some(0), max_tokens_field: "max_completion_tokens", ..raw() },
                "max_completion_tokens",
            ),
            (RawRequest { max_tokens: Some(2), min_tokens: Some(3), ..raw() }, "min_tokens"),
            (RawRequest { logprobs: Some(21), logprobs_field: "top_logprobs", ..raw() }, "top_logprobs"),
            (RawRequest { stop: vec![String::new()], ..raw() }, "stop"),
            (RawRequest { stop: vec!["x".into(); 17], ..raw() }, "stop"),
            (RawRequest { cache_salt: Some(String::new()), ..raw() }, "cache_salt"),
            (RawRequest { timeout_ms: Some(0), ..raw() }, "timeout_ms"),
            (RawRequest { timeout_ms: Some(-1), ..raw() }, "timeout_ms"),
            (RawRequest { timeout_ms: Some(i64::MAX), ..raw() }, "timeout_ms"),
            (RawRequest { priority: Some(-101), ..raw() }, "priority"),
            (RawRequest { priority: Some(i64::MAX), ..raw() }, "priority"),
            (RawRequest { cache_salt: Some("s".repeat(1025)), ..raw() }, "cache_salt"),
            (RawRequest { logit_bias: vec![(768, 1.0)], ..raw() }, "logit_bias"),
            (RawRequest { logit_bias: vec![(1, 1.0), (1, 2.0)], ..raw() }, "logit_bias"),
            (RawRequest { logit_bias: vec![(5, -101.0)], ..raw() }, "logit_bias.5"),
            (RawRequest::new("prompt", Input::Tokens(vec![vec![]])), "prompt"),
            (RawRequest::new("prompt", Input::Tokens(vec![vec![768]])), "prompt"),
            (RawRequest::new("prompt", Input::Tokens(vec![vec![5], vec![]])), "prompt[1]"),
            (RawRequest::new("prompt", Input::Texts(vec![String::new()])), "prompt"),
            (RawRequest::new("prompt", Input::Texts(Vec::new())), "prompt"),
            (RawRequest::new("prompt", list(65)), "prompt"),
            (RawRequest { n: Some(16), ..RawRequest::new("prompt", list(9)) }, "n"),
            (RawRequest::new("messages", Input::Chat(Chat::default())), "messages"),
        ] {
            let error = validate(request, &model(), &text()).unwrap_err();
            assert_eq!(error.param(), field, "{error}");
            assert_eq!(error.code(), "invalid_value", "{error}");
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
