//! The answer of one choice in the shape of an API that has blocks: a body, or a stream of named events.

use std::{
    ops::ControlFlow,
    task::{Context, Poll, ready},
};

use axum::{http::HeaderValue, response::Response};

use super::{
    completions::{SEED_HEADER, json_response},
    error::ApiError,
    events::{EventSource, Events, event_response},
};
use crate::{
    frontend::{Frontend, Generation, Place, Replies, ReplyChoice, ReplyEnd, ReplyEvent, Told},
    metrics::FrontMetrics,
};

/// What an answer says, in the order in which it came.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) prompt_tokens: u64,
    pub(super) blocks: Vec<Block>,
    /// Tokens that came while the last block was thinking.
    pub(super) thinking_tokens: u64,
    /// `None` while more may come.
    pub(super) end: Option<End>,
}

/// A part of an answer: its text is what is said, what is thought, or a call's arguments.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) kind: BlockKind,
    pub(super) text: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum BlockKind {
    Text,
    Thinking,
    Call { id: String, name: String },
}

/// How an answer ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) reason: ReplyEnd,
    /// What the output stopped at.
    pub(super) stop_text: Option<String>,
    pub(super) completion_tokens: u64,
    /// Of the prompt.
    pub(super) cached_tokens: u64,
}

/// Writes the answer to one request. Blocks are numbered from 0; one ends before the next begins.
pub(super) trait Dialect: Send + Unpin + Sized + 'static {
    /// As [`EventSource::KEEP_ALIVE`].
    const KEEP_ALIVE: &'static [u8];
    /// The stream begins.
    fn begin(&mut self, answer: &Answer, events: &mut Events);
    /// A block begins, without text.
    fn begin_block(&mut self, index: usize, block: &Block, events: &mut Events);
    /// A block has more text.
    fn delta(&mut self, index: usize, block: &Block, text: &str, events: &mut Events);
    /// The last block ends, with all its text.
    fn end_block(&mut self, answer: &Answer, events: &mut Events);
    /// The stream ends with a whole answer.
    fn end(&mut self, answer: &Answer, events: &mut Events);
    /// The stream ends with an error.
    fn fail(&mut self, answer: &Answer, error: &ApiError, events: &mut Events);
    /// The body of a whole answer.
    fn whole(self, answer: &Answer) -> String;
}

/// Answers with the first choice of a request that has no more.
///
/// # Errors
/// Where the answer is whole, those of its generation; those of a stream are events.
pub(super) async fn answer(
    frontend: &Frontend,
    generation: Generation,
    stream: bool,
    dialect: impl Dialect,
) -> Result<Response, ApiError> {
    let seed = HeaderValue::from(generation.request.sampling.seed);
    let Replies { request, mut choices, place } = Replies::new(generation, true);
    let choice = choices.pop().expect("a request has a choice");
    let answer = Answer { prompt_tokens: request.prompt_tokens(), ..Answer::default() };
    let mut response = match stream {
        true => streamed(choice, answer, dialect, frontend.metrics.clone(), place),
        false => {
            let answer = read(choice, answer).await?;
            let bytes = answer.blocks.iter().map(|block| block.text.len()).sum();
            let body = frontend.compute(bytes, move || dialect.whole(&answer)).await?;
            json_response(body, place)
        }
    };
    response.headers_mut().insert(SEED_HEADER, seed);
    Ok(response)
}

/// Waits for the end. The client going away drops this future, and with it the sequence.
async fn read(mut choice: ReplyChoice, mut answer: Answer) -> Result<Answer, ApiError> {
    while let Some(event) = choice.next().await {
        match event? {
            ReplyEvent::Delta { told, generated, .. } => {
                for told in told {
                    let (kind, text) = kind_and_text(told);
                    answer.blocks.extend(answer.next_block(kind));
                    answer.last().text.push_str(&text);
                }
                answer.count(generated.len());
            }
            ReplyEvent::Finished { reason, stop_text, completion_tokens, cached_tokens, .. } => {
                answer.end = Some(End::new(reason, stop_text, completion_tokens, cached_tokens));
            }
        }
    }
    Ok(answer)
}

fn streamed<D: Dialect>(
    choice: ReplyChoice,
    answer: Answer,
    mut dialect: D,
    metrics: FrontMetrics,
    place: Place,
) -> Response {
    let mut events = Events::default();
    dialect.begin(&answer, &mut events);
    event_response(events, EventStream { dialect, answer, choice, metrics, _place: place })
}

/// The events of one streamed answer. The client going away drops it, and with it the sequence.
struct EventStream<D> {
    dialect: D,
    answer: Answer,
    choice: ReplyChoice,
    metrics: FrontMetrics,
    _place: Place,
}

impl<D: Dialect> EventSource for EventStream<D> {
    const KEEP_ALIVE: &'static [u8] = D::KEEP_ALIVE;

    fn poll_events(&mut self, context: &mut Context<'_>, events: &mut Events) -> Poll<ControlFlow<()>> {
        match ready!(self.choice.poll_next(context)) {
            Some(Ok(ReplyEvent::Delta { told, generated, .. })) => {
                told.into_iter().for_each(|told| self.tell(told, events));
                self.answer.count(generated.len());
                return Poll::Ready(ControlFlow::Continue(()));
            }
            Some(Ok(ReplyEvent::Finished { reason, stop_text, completion_tokens, cached_tokens, .. })) => {
                self.answer.end = Some(End::new(reason, stop_text, completion_tokens, cached_tokens));
                self.end_block(events);
                self.dialect.end(&self.answer, events);
            }
            // The response has begun, so the error can only be an event.
            Some(Err(error)) => {
                self.metrics.failed(error.code());
                self.dialect.fail(&self.answer, &error.into(), events);
            }
            None => {}
        }
        Poll::Ready(ControlFlow::Break(()))
    }
}

impl<D: Dialect> EventStream<D> {
    fn tell(&mut self, told: Told, events: &mut Events) {
        let (kind, text) = kind_and_text(told);
        if let Some(block) = self.answer.next_block(kind) {
            self.end_block(events);
            self.dialect.begin_block(self.answer.blocks.len(), &block, events);
            self.answer.blocks.push(block);
        }
        let index = self.answer.blocks.len() - 1;
        let block = self.answer.last();
        if !text.is_empty() {
            self.dialect.delta(index, block, &text, events);
            block.text.push_str(&text);
        }
    }

    fn end_block(&mut self, events: &mut Events) {
        if !self.answer.blocks.is_empty() {
            self.dialect.end_block(&self.answer, events);
        }
    }
}

impl Answer {
    /// The block that begins with output of this kind, if one does; without a kind the output goes on.
    fn next_block(&self, kind: Option<BlockKind>) -> Option<Block> {
        let kind = kind.filter(|kind| self.blocks.last().is_none_or(|last| last.kind != *kind))?;
        Some(Block { kind, text: String::new() })
    }

    fn count(&mut self, tokens: usize) {
        if self.blocks.last().is_some_and(|last| last.kind == BlockKind::Thinking) {
            self.thinking_tokens += tokens as u64;
        }
    }

    fn last(&mut self) -> &mut Block {
        self.blocks.last_mut().expect("a call begins before its arguments")
    }
}

impl End {
    fn new(reason: ReplyEnd, stop_text: Option<String>, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self { reason, stop_text, completion_tokens: completion_tokens.into(), cached_tokens: cached_tokens.into() }
    }
}

/// Two calls are never of one kind: their names differ. Arguments go on with their call.
fn kind_and_text(told: Told) -> (Option<BlockKind>, String) {
    match told {
        Told::Content(text) => (Some(BlockKind::Text), text),
        Told::Reasoning(text) => (Some(BlockKind::Thinking), text),
        Told::Call { id, name, .. } => (Some(BlockKind::Call { id, name }), String::new()),
        Told::Arguments { text, .. } => (None, text),
    }
}
