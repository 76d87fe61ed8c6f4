//! What a request would be computed as, without computing it: vLLM's `/v1/chat/completions/render` and
//! `/v1/completions/render`, and llama.cpp's `/apply-template`. They take the way of the requests themselves, up to the
//! engine.

use std::collections::BTreeMap;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde::Serialize;
use serde_json::json;

use super::{
    App,
    completions::{check, enter, json_response},
    error::ApiError,
    messages, parse, tokens,
    wire::{Api, ids_bytes},
};
use crate::{
    engine::FinishReason,
    frontend::{Place, Prepared},
    request::{FieldError, RequestError, ValidPrompt, ValidRequest, template_text},
    text::Text,
};

/// vLLM's `GenerateRequest`, and the prompt's text.
#[derive(Serialize)]
struct Rendered<'a> {
    request_id: &'a str,
    prompt: String,
    token_ids: &'a [u32],
    features: Option<()>,
    sampling_params: Sampling<'a>,
    model: &'a str,
    stream: bool,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<&'a str>,
    priority: i32,
    kv_transfer_params: Option<()>,
}

#[derive(Clone, Copy, Serialize)]
struct StreamOptions {
    include_usage: bool,
    continuous_usage_stats: bool,
}

/// vLLM's `SamplingParams`, with the model's defaults filled in.
#[derive(Serialize)]
struct Sampling<'a> {
    n: u32,
    temperature: f32,
    /// 0: all.
    top_k: u32,
    top_p: f32,
    min_p: f32,
    /// Null: one is drawn.
    seed: Option<u64>,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    logit_bias: Option<BTreeMap<u32, f32>>,
    stop: &'a [String],
    include_stop_str_in_output: bool,
    /// All tokens that end the output, the model's own among them: so they are the only ones.
    stop_token_ids: &'a [u32],
    ignore_eos: bool,
    max_tokens: u32,
    min_tokens: u32,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    skip_special_tokens: bool,
    structured_outputs: Option<StructuredOutputs<'a>>,
    /// Null: any.
    allowed_token_ids: Option<&'a [u32]>,
    /// The tokens of `bad_words`, as vLLM's sampler has them.
    bad_words_token_ids: Option<&'a [Vec<u32>]>,
}

#[derive(Serialize)]
struct StructuredOutputs<'a> {
    /// In Lark, as llguidance takes it, whatever the request's form is.
    grammar: &'a str,
}

pub(in crate::http) async fn chat(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, Api::Chat, "/v1/chat/completions/render", request).await
}

pub(in crate::http) async fn completion(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, Api::Completion, "/v1/completions/render", request).await
}

/// The prompt of a chat as one text.
pub(in crate::http) async fn apply_template(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    tokens::answer(app, "/apply-template", request, |mut fields, model, text| {
        let chat = messages::conversation(&mut fields)?;
        fields.finish()?;
        Ok(json!({"prompt": template_text(&chat, "messages", model, text)?}))
    })
    .await
}

async fn answer(app: App, api: Api, route: &'static str, request: Request) -> Result<Response, ApiError> {
    let place = enter(&app, route, &request)?;
    let record = place.record.clone();
    let result = render(app, api, place, request).await;
    match result {
        Ok(_) => record.finished(FinishReason::Stop),
        Err(ref error) => record.failed(error.code),
    }
    result
}

async fn render(app: App, api: Api, place: Place, request: Request) -> Result<Response, ApiError> {
    let id = place.record.request_id().clone();
    let read = move |body| {
        let read = match api {
            Api::Chat => parse::chat(body)?,
            Api::Completion => parse::completion(body)?,
        };
        let options = StreamOptions {
            include_usage: read.wanted.stream_usage.at_end,
            continuous_usage_stats: read.wanted.stream_usage.in_each,
        };
        let (seed, stream_options) = (read.raw.seed, read.wanted.stream_usage.at_end.then_some(options));
        Ok((read.model, read.raw, (seed, read.wanted.stream, stream_options)))
    };
    let Prepared { prepared: (mut valid, wanted), place, .. } = check(&app, place, request, read).await?;
    app.frontend.compile(&mut valid).await?;
    let (frontend, bytes) = (app.frontend.clone(), ids_bytes(valid.prompt_tokens() as usize));
    let field = if api == Api::Chat { "messages" } else { "prompt" };
    let write = move || -> Result<String, ApiError> {
        let (seed, stream, stream_options) = wanted;
        let mut all = Vec::with_capacity(valid.prompts.len());
        for prompt in &valid.prompts {
            all.push(Rendered {
                request_id: id.as_str(),
                prompt: text_of(prompt, field, &frontend.text)?,
                token_ids: &prompt.tokens,
                features: None,
                sampling_params: sampling(&valid, prompt, seed),
                model: &frontend.model_id,
                stream,
                stream_options,
                cache_salt: Some(&*valid.cache_salt).filter(|salt| !salt.is_empty()),
                priority: valid.priority,
                kv_transfer_params: None,
            });
        }
        let written = match api {
            Api::Chat => serde_json::to_string(&all[0]),
            Api::Completion => serde_json::to_string(&all),
        };
        Ok(written.expect("strings and numbers with string keys are always JSON"))
    };
    Ok(json_response(app.frontend.compute(bytes, write).await??, place))
}

/// As its tokens have it: cut or not, the names of control tokens among them.
fn text_of(prompt: &ValidPrompt, field: &str, text: &Text) -> Result<String, RequestError> {
    let decoded = text.tokenizer.decode(&prompt.tokens, true);
    decoded.map_err(|error| RequestError::field(field, FieldError::Value, error.to_string()))
}

fn sampling<'a>(valid: &'a ValidRequest, prompt: &ValidPrompt, seed: Option<u64>) -> Sampling<'a> {
    let params = &valid.sampling;
    Sampling {
        n: valid.choices,
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        seed,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: params.repetition_penalty,
        logit_bias: (!params.logit_bias.is_empty()).then(|| params.logit_bias.iter().copied().collect()),
        stop: &valid.stop.texts,
        include_stop_str_in_output: valid.stop.shown,
        stop_token_ids: &valid.stop_tokens,
        ignore_eos: true,
        max_tokens: if valid.prompt_alone { 0 } else { prompt.max_tokens },
        min_tokens: valid.min_tokens,
        logprobs: valid.logprobs,
        prompt_logprobs: valid.prompt_logprobs,
        skip_special_tokens: !valid.show_special,
        structured_outputs: valid.grammar.as_deref().map(|grammar| StructuredOutputs { grammar }),
        allowed_token_ids: Some(&*valid.token_bounds.allowed).filter(|ids| !ids.is_empty()),
        bad_words_token_ids: Some(&*valid.token_bounds.forbidden).filter(|words| !words.is_empty()),
    }
}
