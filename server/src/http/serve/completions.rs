//! `/v1/chat/completions` and `/v1/completions`: a body in, a whole response or a stream of events out.

use std::{
    ops::ControlFlow,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, TryStreamExt, future::BoxFuture, stream::FuturesUnordered};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use uuid::Uuid;

use super::{
    App,
    error::ApiError,
    events::{EventSource, Events, event_response, write_json},
    json, parse,
    wire::{Api, ChunkWriter, Usage, WholeChoice, Writer, ids_bytes},
};
use crate::{
    drafts::DraftStep,
    engine::ModelInfo,
    frontend::{
        Choices, Frontend, GenerateError, Generation, Place, Prepared, Replies, ReplyChoice, ReplyEvent, unix_seconds,
    },
    request::{RawRequest, ValidRequest, validate},
    text::Text,
};

/// About what a token's text takes.
const ECHOED_BYTES: usize = 4;
/// Response header with the seed that was used, drawn or given.
pub(in crate::http) const SEED_HEADER: HeaderName = HeaderName::from_static("x-looplane-seed");

pub(in crate::http) async fn chat(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, Api::Chat, "/v1/chat/completions", request).await
}

pub(in crate::http) async fn completion(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, Api::Completion, "/v1/completions", request).await
}

/// The place comes first: it also bounds the memory of bodies.
pub(in crate::http) fn enter(app: &App, route: &'static str, request: &Request) -> Result<Place, ApiError> {
    let record = request.extensions().get().expect("every request has its record");
    Ok(app.frontend.enter(record, request.extensions().get(), route)?)
}

async fn answer(app: App, api: Api, route: &'static str, request: Request) -> Result<Response, ApiError> {
    let place = enter(&app, route, &request)?;
    let record = place.record.clone();
    generate(app, api, place, request).await.inspect_err(|error| record.failed(error.code))
}

async fn generate(app: App, api: Api, place: Place, request: Request) -> Result<Response, ApiError> {
    let frontend = &app.frontend;
    let read = move |json| {
        let read = match api {
            Api::Chat => parse::chat(json)?,
            Api::Completion => parse::completion(json)?,
        };
        Ok((read.model, read.raw, read.wanted))
    };
    let (generation, wanted) = admit(&app, place, request, read).await?;

    let prefix = if api == Api::Chat { "chatcmpl" } else { "cmpl" };
    let writer = Writer {
        api,
        id: format!("{prefix}-{}", Uuid::new_v4()),
        created: unix_seconds(),
        model: frontend.model_id.clone(),
        system_fingerprint: generation.model.bit_domain.clone(),
        logprobs: generation.request.logprobs,
        prompt_logprobs: generation.request.prompt_logprobs,
        wanted,
        draft_report: frontend.draft_report,
        tokenizer: Arc::clone(&frontend.text.tokenizer),
    };
    let seed = HeaderValue::from(generation.request.sampling.seed);
    let replies = Replies::new(generation, wanted.include_reasoning);
    let mut response = if wanted.stream {
        streamed(replies, writer, frontend.clone()).await?
    } else {
        whole(frontend, replies, writer).await?
    };
    response.headers_mut().insert(SEED_HEADER, seed);
    Ok(response)
}

/// Reads a request's body, checks it, and queues what it asks for. `read` makes of the body the model's name, the
/// request, and what else the answer depends on.
pub(in crate::http) async fn admit<T: Send + 'static>(
    app: &App,
    place: Place,
    request: Request,
    read: impl FnOnce(Value) -> Result<(String, RawRequest, T), ApiError> + Send + 'static,
) -> Result<(Generation, T), ApiError> {
    let Prepared { prepared: (valid, wanted), model, place } = check(app, place, request, read).await?;
    Ok((app.frontend.admit(valid, model, place).await?, wanted))
}

/// Reads a request's body and checks it, as [`admit`] does.
pub(in crate::http) async fn check<T: Send + 'static>(
    app: &App,
    place: Place,
    request: Request,
    read: impl FnOnce(Value) -> Result<(String, RawRequest, T), ApiError> + Send + 'static,
) -> Result<Prepared<(ValidRequest, T)>, ApiError> {
    let frontend = &app.frontend;
    check_content_type(request.headers())?;
    let (head, body) = request.into_parts();
    let body = frontend.read(head.extensions.get(), body).await?;
    let (bytes, checking) = (body.bytes(), frontend.clone());
    let prepare = move |model: &ModelInfo, text: &Text| -> Result<_, ApiError> {
        let (asked, raw, wanted) = read(json::parse(&body.blocks, model.max_context)?)?;
        checking.check_model(&asked)?;
        Ok((validate(raw, model, text)?, wanted))
    };
    frontend.prepare(place, bytes, prepare).await
}

/// Browsers may send other types to a foreign origin without asking it first.
pub(in crate::http) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = value.split(';').next().unwrap_or("").trim();
    let refused = |message| Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    if !essence.eq_ignore_ascii_case("application/json") {
        return refused(format!("the body must be sent as content-type: application/json, not {value:?}"));
    }
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => {
            refused(format!("the body must be sent without a content-encoding, not with {encoding:?}"))
        }
        _ => Ok(()),
    }
}

/// Waits for all choices. The client going away drops this future, and with it the sequences.
async fn whole(frontend: &Frontend, replies: Replies, writer: Writer) -> Result<Response, ApiError> {
    let Replies { request, choices, place } = replies;
    // Side by side, so that a stop text or an error of any of them is noticed as it comes.
    let reading: FuturesUnordered<_> = choices.into_iter().map(read_whole).collect();
    let mut wholes: Vec<WholeChoice> = reading.try_collect().await?;
    wholes.sort_unstable_by_key(|whole| whole.index);
    if writer.wanted.token_ids {
        wholes.iter_mut().for_each(|whole| whole.prompt = request.prompt_of(whole.index).tokens.clone());
    }
    let completion_tokens = wholes.iter().map(|whole| u64::from(whole.completion_tokens)).sum();
    let firsts = wholes.iter().filter(|whole| is_first(whole.index, request.choices));
    let cached_tokens = firsts.map(|whole| u64::from(whole.cached_tokens)).sum();
    let usage = Usage::new(request.prompt_tokens(), Some(cached_tokens), completion_tokens);
    let bytes_of = |whole: &WholeChoice| {
        let tokens = writer.tokens_bytes(whole.tokens.len()) + writer.prompt_bytes(whole.prompt_logprobs.len());
        let ids = if writer.wanted.token_ids { whole.prompt.len() + whole.generated.len() } else { 0 };
        whole.message.len() + tokens + ids_bytes(ids)
    };
    let bytes = wholes.iter().map(bytes_of).sum();
    let metrics = writer.metrics(wholes.len(), wholes.first().map_or(&[], |whole| &whole.drafts));
    let body = frontend.compute(bytes, move || writer.whole(&wholes, usage, metrics)).await?;
    Ok(json_response(body, place))
}

/// A whole answer. A long one keeps the place until it is sent, as its memory does.
pub(in crate::http) fn json_response(body: String, place: Place) -> Response {
    let length = HeaderValue::from(body.len());
    let body = Body::new(Full::from(body).map_frame(move |frame| {
        let _ = &place;
        frame
    }));
    let content_type = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, content_type), (header::CONTENT_LENGTH, length)], body).into_response()
}

async fn read_whole(mut choice: ReplyChoice) -> Result<WholeChoice, GenerateError> {
    let mut whole = WholeChoice { index: choice.index(), ..WholeChoice::default() };
    while let Some(event) = choice.next().await {
        match event? {
            ReplyEvent::Delta { told, tokens, generated } => {
                told.into_iter().for_each(|told| whole.message.add(told));
                whole.tokens.extend(tokens);
                whole.generated.extend(generated);
            }
            ReplyEvent::Finished {
                reason,
                completion_tokens,
                generated,
                cached_tokens,
                drafts,
                prompt_logprobs,
                ..
            } => {
                whole.generated.extend(generated);
                (whole.finish, whole.drafts, whole.prompt_logprobs) = (Some(reason.word()), drafts, prompt_logprobs);
                (whole.completion_tokens, whole.cached_tokens) = (completion_tokens, cached_tokens);
            }
        }
    }
    Ok(whole)
}

/// Whether a choice is the first of its prompt, whose tokens `usage` counts once.
fn is_first(index: u32, choices_each: u32) -> bool {
    index.is_multiple_of(choices_each)
}

/// The events of one streamed response. The client going away drops it, and with it the sequences.
struct EventStream {
    frontend: Arc<Frontend>,
    writer: Arc<ChunkWriter>,
    /// A prompt's events while they are written: many would delay others' tokens. Nothing is told meanwhile.
    writing: Option<BoxFuture<'static, Result<Events, GenerateError>>>,
    choices: Choices,
    /// Of each prompt.
    choices_each: u32,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    /// What each choice of all prompts has used so far.
    of_choice: Vec<Usage>,
    /// Of the choice that ended last.
    drafts: Vec<DraftStep>,
    _place: Place,
}

async fn streamed(replies: Replies, writer: Writer, frontend: Arc<Frontend>) -> Result<Response, ApiError> {
    let Replies { request, choices, place } = replies;
    let tokens_of = |choice: &ReplyChoice| request.prompt_of(choice.index()).tokens.len();
    let ids = if writer.wanted.token_ids { choices.iter().map(tokens_of).sum() } else { 0 };
    let (choices_each, prompt_tokens) = (request.choices, request.prompt_tokens());
    let numbers: Vec<u32> = choices.iter().map(ReplyChoice::index).collect();
    let open = move || {
        let (writer, mut events) = (ChunkWriter::new(writer), Events::default());
        let mut of_choice = Vec::with_capacity(numbers.len());
        for index in numbers {
            let prompt = &request.prompt_of(index).tokens;
            let none = Usage::new(prompt.len() as u64, None, 0);
            writer.opening(index, prompt, none, &mut events);
            of_choice.push(none);
        }
        (writer, events, of_choice)
    };
    let (writer, events, of_choice) = frontend.compute(ids_bytes(ids), open).await?;
    let choices = Choices::from(choices);
    let stream = EventStream {
        frontend,
        writer: Arc::new(writer),
        writing: None,
        choices,
        choices_each,
        prompt_tokens,
        cached_tokens: 0,
        completion_tokens: 0,
        of_choice,
        drafts: Vec::new(),
        _place: place,
    };
    Ok(event_response(events, stream))
}

impl EventSource for EventStream {
    const KEEP_ALIVE: &'static [u8] = b": keep-alive\n\n";

    fn poll_events(&mut self, context: &mut Context<'_>, events: &mut Events) -> Poll<ControlFlow<()>> {
        let next = match &mut self.writing {
            Some(writing) => {
                let written = ready!(writing.as_mut().poll(context));
                self.writing = None;
                written.map(|more| {
                    events.append(more);
                    None
                })
            }
            None => match ready!(self.choices.poll_next_unpin(context)) {
                Some((index, event)) => event.map(|event| Some((index, event))),
                None => {
                    let usage = Usage::new(self.prompt_tokens, Some(self.cached_tokens), self.completion_tokens);
                    self.writer.end(usage, self.of_choice.len(), &self.drafts, events);
                    return Poll::Ready(ControlFlow::Break(()));
                }
            },
        };
        match next {
            Ok(Some((index, event))) => self.tell(index, event, events),
            Ok(None) => {}
            // The response has begun, so the error can only be an event. Without [DONE] nobody takes it for whole.
            Err(error) => {
                self.frontend.metrics.failed(error.code());
                let body = ApiError::from(error).body();
                events.data(|out| write_json(out, &body));
                return Poll::Ready(ControlFlow::Break(()));
            }
        }
        Poll::Ready(ControlFlow::Continue(()))
    }
}

impl EventStream {
    fn tell(&mut self, index: u32, event: ReplyEvent, events: &mut Events) {
        match event {
            ReplyEvent::Delta { told, tokens, generated } => {
                let so_far = &mut self.of_choice[index as usize];
                *so_far = so_far.and(generated.len() as u64);
                let so_far = *so_far;
                // Tokens that were not generated are the prompt's, but for a few that were held back.
                let echoed = tokens.len().saturating_sub(generated.len());
                if echoed == 0 {
                    self.writer.deltas(index, told, (tokens, generated), so_far, events);
                    return;
                }
                let bytes = ECHOED_BYTES * echoed + self.writer.tokens_bytes(tokens.len());
                let (writer, frontend) = (self.writer.clone(), self.frontend.clone());
                let write = move || {
                    let mut events = Events::default();
                    writer.deltas(index, told, (tokens, generated), so_far, &mut events);
                    events
                };
                self.writing = Some(Box::pin(async move { frontend.compute(bytes, write).await }));
            }
            ReplyEvent::Finished { reason, completion_tokens, generated, cached_tokens, drafts, .. } => {
                self.drafts = drafts;
                self.completion_tokens += u64::from(completion_tokens);
                if is_first(index, self.choices_each) {
                    self.cached_tokens += u64::from(cached_tokens);
                }
                let used = self.of_choice[index as usize].and(generated.len() as u64);
                self.writer.finish(index, reason.word(), &generated, used, events);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_plain_json() {
        let check = |content_type: &'static str, encoding: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
            encoding.map(|value| headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(value)));
            check_content_type(&headers)
        };
        assert_eq!(check("application/json; charset=utf-8", None), Ok(()));
        assert_eq!(check("application/json", Some("identity")), Ok(()));
        let error = check("application/json", Some("gzip")).unwrap_err();
        assert_eq!(error.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert!(error.message.contains("gzip"), "{}", error.message);
        assert!(check("text/plain", None).is_err());
    }
}
