//! The answer of one choice in the shape of an API that has blocks: a body, or a stream of named events.

use std::{
    ops::ControlFlow,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{http::HeaderValue, response::Response};
use futures::{FutureExt, future::BoxFuture};

use super::{
    completions::{SEED_HEADER, json_response},
    error::ApiError,
    events::{EventSource, Events, event_response},
};
use crate::frontend::{
    Frontend, GenerateError, Generation, INLINE_BYTES, Place, Replies, ReplyChoice, ReplyEnd, ReplyEvent, Told,
};

/// What an answer says, in the order in which it came.
#[derive(Debug, Default)]
pub(in crate::http) struct Answer {
    pub(in crate::http) prompt_tokens: u64,
    pub(in crate::http) blocks: Vec<Block>,
    /// Tokens that came while the last block was thinking.
    pub(in crate::http) thinking_tokens: u64,
    /// `None` while more may come.
    pub(in crate::http) end: Option<End>,
}

/// A part of an answer: its text is what is said, what is thought, or a call's arguments.
#[derive(Debug)]
pub(in crate::http) struct Block {
    pub(in crate::http) kind: BlockKind,
    pub(in crate::http) text: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::http) enum BlockKind {
    Text,
    Thinking,
    Call { id: String, name: String },
}

/// How an answer ended.
#[derive(Debug)]
pub(in crate::http) struct End {
    pub(in crate::http) reason: ReplyEnd,
    /// What the output stopped at.
    pub(in crate::http) stop_text: Option<String>,
    pub(in crate::http) completion_tokens: u64,
    /// Of the prompt.
    pub(in crate::http) cached_tokens: u64,
}

/// Writes the answer to one request. Blocks are numbered from 0; one ends before the next begins.
pub(in crate::http) trait Dialect: Send + Unpin + Sized + 'static {
    /// As [`EventSource::KEEP_ALIVE`].
    const KEEP_ALIVE: &'static [u8];
    /// Bytes that the stream's begin and its end have beside the answer.
    fn head_bytes(&self) -> usize {
        0
    }
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
pub(in crate::http) async fn answer(
    frontend: &Arc<Frontend>,
    generation: Generation,
    stream: bool,
    dialect: impl Dialect,
) -> Result<Response, ApiError> {
    let seed = HeaderValue::from(generation.request.sampling.seed);
    let Replies { request, mut choices, place } = Replies::new(generation, true);
    let choice = choices.pop().expect("a request has a choice");
    let answer = Answer { prompt_tokens: request.prompt_tokens(), ..Answer::default() };
    let mut response = match stream {
        true => streamed(choice, answer, dialect, frontend.clone(), place).await?,
        false => {
            let answer = read(choice, answer).await?;
            let bytes = answer.bytes() + dialect.head_bytes();
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

async fn streamed<D: Dialect>(
    choice: ReplyChoice,
    answer: Answer,
    dialect: D,
    frontend: Arc<Frontend>,
    place: Place,
) -> Result<Response, ApiError> {
    let (bytes, mut teller) = (dialect.head_bytes(), Teller { dialect, answer });
    let begin = move || {
        let mut events = Events::default();
        teller.dialect.begin(&teller.answer, &mut events);
        (teller, events)
    };
    let (teller, events) = frontend.compute(bytes, begin).await?;
    Ok(event_response(events, EventStream { work: Work::Waiting(teller), choice, frontend, _place: place }))
}

/// The events of one streamed answer. The client going away drops it, and with it the sequence.
struct EventStream<D> {
    work: Work<D>,
    choice: ReplyChoice,
    frontend: Arc<Frontend>,
    _place: Place,
}

enum Work<D> {
    /// For what becomes known next.
    Waiting(Teller<D>),
    /// Long texts are told again at their ends, which would delay others' tokens. Nothing is told meanwhile.
    Writing(BoxFuture<'static, Result<Written<D>, GenerateError>>),
    Ended,
}

/// Who wrote, what was written, and whether more may come.
type Written<D> = (Teller<D>, Events, ControlFlow<()>);

impl<D: Dialect> EventSource for EventStream<D> {
    const KEEP_ALIVE: &'static [u8] = D::KEEP_ALIVE;

    fn poll_events(&mut self, context: &mut Context<'_>, events: &mut Events) -> Poll<ControlFlow<()>> {
        let written = match &mut self.work {
            Work::Writing(writing) => ready!(writing.poll_unpin(context)),
            Work::Waiting(_) => {
                let Some(event) = ready!(self.choice.poll_next(context)) else {
                    return Poll::Ready(ControlFlow::Break(()));
                };
                if let Err(error) = &event {
                    self.frontend.metrics.failed(error.code());
                }
                let Work::Waiting(mut teller) = std::mem::replace(&mut self.work, Work::Ended) else {
                    unreachable!("it was waiting")
                };
                let bytes = teller.told_again(&event);
                if bytes <= INLINE_BYTES {
                    let flow = teller.tell(event, events);
                    self.work = Work::Waiting(teller);
                    return Poll::Ready(flow);
                }
                let write = move || {
                    let mut events = Events::default();
                    let flow = teller.tell(event, &mut events);
                    (teller, events, flow)
                };
                let frontend = self.frontend.clone();
                let writing = async move { frontend.compute(bytes, write).await }.boxed();
                self.work = Work::Writing(writing);
                return Poll::Ready(ControlFlow::Continue(()));
            }
            Work::Ended => return Poll::Ready(ControlFlow::Break(())),
        };
        match written {
            Ok((teller, more, flow)) => {
                events.append(more);
                self.work = Work::Waiting(teller);
                Poll::Ready(flow)
            }
            // What would have told of the error is lost: the stream breaks off, so that nobody takes it for whole.
            Err(error) => {
                self.frontend.metrics.failed(error.code());
                self.work = Work::Ended;
                Poll::Ready(ControlFlow::Break(()))
            }
        }
    }
}

/// Writes the events of what becomes known.
struct Teller<D> {
    dialect: D,
    answer: Answer,
}

impl<D: Dialect> Teller<D> {
    /// Bytes of text that are told once more with this event, beside what is new.
    fn told_again(&self, event: &Result<ReplyEvent, GenerateError>) -> usize {
        match event {
            Ok(ReplyEvent::Delta { told, .. }) => {
                let Some(last) = self.answer.blocks.last() else { return 0 };
                let ends = told.iter().any(|told| is_of_another_block(told, last));
                if ends { last.text.len() } else { 0 }
            }
            Ok(ReplyEvent::Finished { .. }) | Err(_) => self.answer.bytes() + self.dialect.head_bytes(),
        }
    }

    /// Says whether more may come.
    fn tell(&mut self, event: Result<ReplyEvent, GenerateError>, events: &mut Events) -> ControlFlow<()> {
        match event {
            Ok(ReplyEvent::Delta { told, generated, .. }) => {
                told.into_iter().for_each(|told| self.tell_part(told, events));
                self.answer.count(generated.len());
                return ControlFlow::Continue(());
            }
            Ok(ReplyEvent::Finished { reason, stop_text, completion_tokens, cached_tokens, .. }) => {
                self.answer.end = Some(End::new(reason, stop_text, completion_tokens, cached_tokens));
                self.end_block(events);
                self.dialect.end(&self.answer, events);
            }
            // The response has begun, so the error can only be an event.
            Err(error) => self.dialect.fail(&self.answer, &error.into(), events),
        }
        ControlFlow::Break(())
    }

    fn tell_part(&mut self, told: Told, events: &mut Events) {
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
    /// Of text.
    fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.text.len()).sum()
    }

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

/// Whether the block ends with it. A call always begins one.
fn is_of_another_block(told: &Told, last: &Block) -> bool {
    match told {
        Told::Content(_) => last.kind != BlockKind::Text,
        Told::Reasoning(_) => last.kind != BlockKind::Thinking,
        Told::Call { .. } => true,
        Told::Arguments { .. } => false,
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
