//! A request that the engine has taken: its choices, each on its way from tokens to text.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{Stream, future::BoxFuture, stream};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::{compute, error::GenerateError, place::Place, pool::Pool, record::Record, served::GivenUp};
use crate::{
    drafts::DraftStep,
    engine::{FinishReason, GeneratedToken, ModelInfo, SequenceEvent, SequenceStream, Unwanted},
    request::ValidRequest,
    text::{OutputText, Piece, Tokenizer},
};

/// A request whose sequences are queued or running. Dropping it cancels them.
#[derive(Debug)]
pub struct Generation {
    /// What was admitted.
    pub request: ValidRequest,
    /// Facts of the model that serves it.
    pub model: Arc<ModelInfo>,
    /// One for each sequence, by index.
    pub choices: Vec<Choice>,
    /// Its place among the requests served at one time.
    pub place: Place,
}

/// What a choice made known.
#[derive(Debug, Clone, PartialEq)]
pub enum ChoiceEvent {
    /// More output.
    Delta(Piece),
    /// The end.
    Finished {
        /// Why it ended; a stop text counts as [`FinishReason::Stop`].
        reason: FinishReason,
        /// All tokens generated, the stop token or the tokens of a stop text included.
        completion_tokens: u32,
        /// Those of them since the last piece.
        generated: Vec<u32>,
        /// Tokens of the prompt that were not computed: they were cached.
        cached_tokens: u32,
        /// Steps with drafts.
        drafts: Vec<DraftStep>,
        /// The prompt's tokens from the second on with their log-probabilities, if these are wanted.
        prompt_logprobs: Vec<GeneratedToken>,
    },
}

/// What a choice tells of its prompt.
#[derive(Debug)]
pub(super) struct Echo {
    /// Its tokens.
    pub(super) tokens: Vec<u32>,
    /// As the client wrote it, if it wrote a text.
    pub(super) text: Option<String>,
    /// Makes it a text.
    pub(super) pool: Arc<Pool>,
}

/// The prompt with its log-probabilities, which are told at the end, too.
type Told = (Piece, Vec<GeneratedToken>);

/// A prompt that is being made a text: a long one would delay others' tokens.
struct Echoing {
    told: BoxFuture<'static, Result<Told, GenerateError>>,
    /// The output that became known before.
    behind: Piece,
}

impl fmt::Debug for Echoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Echoing").field("behind", &self.behind).finish_non_exhaustive()
    }
}

/// When a request is given up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    timeout: Duration,
    at: Instant,
}

impl Deadline {
    pub(super) fn new(arrived: std::time::Instant, timeout: Duration) -> Self {
        Self { timeout, at: Instant::from_std(arrived) + timeout }
    }

    /// The error of a request that is over already.
    pub(super) fn is_over(self) -> Option<GenerateError> {
        (self.at <= Instant::now()).then(|| self.error())
    }

    fn error(self) -> GenerateError {
        GenerateError::DeadlineExceeded { timeout_ms: self.timeout.as_millis() as u64 }
    }
}

/// One sequence, on its way to becoming text. Dropping it cancels the sequence.
#[derive(Debug)]
pub struct Choice {
    /// Its number in the response.
    pub index: u32,
    /// The first of its prompt, whose tokens count once.
    is_first: bool,
    /// `None` once it has ended.
    stream: Option<SequenceStream>,
    output: OutputText,
    stop_tokens: Vec<u32>,
    /// What is yet to be told in front of the output.
    echo: Option<Echo>,
    /// Meanwhile no more of the output is taken.
    echoing: Option<Echoing>,
    /// Characters that were.
    echoed_chars: usize,
    /// The output is not told.
    prompt_alone: bool,
    prompt_logprobs: Vec<GeneratedToken>,
    tokenizer: Arc<Tokenizer>,
    /// The end, known but not yet told.
    finish: Option<FinishReason>,
    completion_tokens: u32,
    /// Those since the last piece.
    generated: Vec<u32>,
    cached_tokens: u32,
    drafts: Vec<DraftStep>,
    record: Arc<Record>,
    given_up: GivenUp,
    giving_up: Pin<Box<WaitForCancellationFutureOwned>>,
    deadline: Option<(Deadline, Pin<Box<Sleep>>)>,
}

impl Choice {
    /// `prompt_alone`: the output is not told.
    pub(super) fn new(
        (index, is_first): (u32, bool),
        stream: SequenceStream,
        text: (OutputText, Arc<Tokenizer>),
        stop_tokens: Vec<u32>,
        (echo, prompt_alone): (Option<Echo>, bool),
        record: Arc<Record>,
        (given_up, deadline): (GivenUp, Option<Deadline>),
    ) -> Self {
        let (stream, (output, tokenizer)) = (Some(stream), text);
        Self {
            index,
            is_first,
            stream,
            output,
            stop_tokens,
            echo,
            echoing: None,
            echoed_chars: 0,
            prompt_alone,
            prompt_logprobs: Vec::new(),
            tokenizer,
            finish: None,
            completion_tokens: 0,
            generated: Vec::new(),
            cached_tokens: 0,
            drafts: Vec::new(),
            record,
            giving_up: Box::pin(given_up.token.clone().cancelled_owned()),
            given_up,
            deadline: deadline.map(|deadline| (deadline, Box::pin(sleep_until(deadline.at)))),
        }
    }

    /// What becomes known next; `None` after the end or an error.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<ChoiceEvent, GenerateError>>> {
        loop {
            if let Some(echoing) = &mut self.echoing {
                if let Poll::Ready(told) = echoing.told.as_mut().poll(context) {
                    let piece = self.echoed(told);
                    return Poll::Ready(Some(piece.map(|piece| self.delta(piece))));
                }
            } else if let Some(reason) = self.finish.take() {
                return Poll::Ready(Some(Ok(self.finished(reason))));
            } else if self.stream.is_none() {
                return Poll::Ready(None);
            }
            if let Some((deadline, timer)) = &mut self.deadline
                && timer.as_mut().poll(context).is_ready()
            {
                let error = deadline.error();
                return Poll::Ready(Some(Err(self.give_up(error))));
            }
            let event = match &mut self.stream {
                Some(stream) if self.echoing.is_none() => stream.poll_next(context),
                _ => Poll::Pending,
            };
            let Poll::Ready(event) = event else {
                ready!(self.giving_up.as_mut().poll(context));
                let error = self.given_up.error();
                return Poll::Ready(Some(Err(self.give_up(error))));
            };
            match self.apply(event).map(|piece| self.behind_echo(piece)) {
                Ok(piece) if piece.is_empty() => {}
                Ok(piece) => {
                    return Poll::Ready(Some(Ok(self.delta(piece))));
                }
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn delta(&mut self, piece: Piece) -> ChoiceEvent {
        ChoiceEvent::Delta(Piece { generated: std::mem::take(&mut self.generated), ..piece })
    }

    fn finished(&mut self, reason: FinishReason) -> ChoiceEvent {
        self.record.finished(reason);
        ChoiceEvent::Finished {
            reason,
            completion_tokens: self.completion_tokens,
            generated: std::mem::take(&mut self.generated),
            cached_tokens: self.cached_tokens,
            drafts: std::mem::take(&mut self.drafts),
            prompt_logprobs: std::mem::take(&mut self.prompt_logprobs),
        }
    }

    /// The stop text that ended its output.
    pub fn stop_text(&self) -> Option<&str> {
        self.output.stop_text()
    }

    /// Ends the choice as a stop text does: its reader has all that it wants.
    pub fn complete(&mut self) {
        if self.stream.is_some() {
            self.end(FinishReason::Stop);
        }
    }

    /// Everything that [`Choice::poll_next`] returns, as a stream with the choice's index.
    pub fn into_stream(mut self) -> impl Stream<Item = (u32, Result<ChoiceEvent, GenerateError>)> {
        stream::poll_fn(move |context| self.poll_next(context).map(|event| event.map(|event| (self.index, event))))
    }

    fn apply(&mut self, event: Option<SequenceEvent>) -> Result<Piece, GenerateError> {
        match event {
            Some(SequenceEvent::Token(_)) if self.prompt_alone => Ok(Piece::default()),
            Some(SequenceEvent::Finished(_)) if self.prompt_alone => {
                self.end(FinishReason::Length);
                Ok(Piece::default())
            }
            Some(SequenceEvent::Token(token)) => {
                self.completion_tokens += 1;
                if let (1, Some(times)) = (self.completion_tokens, self.stream.as_ref().and_then(SequenceStream::times))
                {
                    self.record.computed(times);
                }
                self.generated.push(token.id);
                self.record.token();
                // The stop token that ends the sequence is the last, and not output.
                if self.stop_tokens.contains(&token.id) {
                    return Ok(Piece::default());
                }
                let (piece, stopped) = self.output.push(token);
                if stopped {
                    self.end(FinishReason::Stop);
                }
                Ok(piece)
            }
            Some(SequenceEvent::Finished(reason)) => {
                let (piece, stopped) = self.output.finish();
                self.end(if stopped { FinishReason::Stop } else { reason });
                Ok(piece)
            }
            // The stream keeps it.
            Some(SequenceEvent::Prompt { .. } | SequenceEvent::Drafts(_)) => Ok(Piece::default()),
            Some(SequenceEvent::Failed(why)) => Err(self.give_up(GenerateError::Failed(why))),
            Some(SequenceEvent::Contradiction) => Err(self.give_up(GenerateError::Contradiction)),
            None => Err(self.give_up(GenerateError::Failed("the engine ended".into()))),
        }
    }

    /// Output, unless the prompt is to be told before it and was not: what is known of that came with the first token.
    fn behind_echo(&mut self, mut output: Piece) -> Piece {
        if let Some(stream) = &mut self.stream {
            self.prompt_logprobs.append(&mut stream.take_prompt_logprobs());
        }
        output.tokens.iter_mut().for_each(|token| token.text_offset += self.echoed_chars);
        let Some(Echo { tokens, text, pool }) = self.echo.take() else { return output };
        let (known, tokenizer) = (std::mem::take(&mut self.prompt_logprobs), self.tokenizer.clone());
        let tops = known.first().map_or(0, |token| token.top.len());
        let bytes = tokens.len() * (1 + tops) * size_of::<GeneratedToken>();
        let work = move || -> Told {
            let mut of = known.iter().cloned();
            let token = |(index, id): (usize, u32)| {
                let of = if index > 0 { of.next() } else { None };
                of.unwrap_or(GeneratedToken { id, logprob: None, top: Vec::new() })
            };
            let tokens = tokens.into_iter().enumerate().map(token).collect();
            (Piece::echo(&tokenizer, tokens, text), known)
        };
        let told = Box::pin(async move { compute(&pool, bytes, work).await });
        self.echoing = Some(Echoing { told, behind: output });
        Piece::default()
    }

    /// The prompt, and behind it what became known meanwhile.
    fn echoed(&mut self, told: Result<Told, GenerateError>) -> Result<Piece, GenerateError> {
        let mut behind = self.echoing.take().map(|echoing| echoing.behind).unwrap_or_default();
        let (mut piece, known) = told.map_err(|error| self.give_up(error))?;
        self.prompt_logprobs = known;
        self.echoed_chars = piece.text.chars().count();
        behind.tokens.iter_mut().for_each(|token| token.text_offset += self.echoed_chars);
        piece.append(behind);
        Ok(piece)
    }

    /// Lets go of a sequence that has not ended by itself, too: a stop text was found.
    fn end(&mut self, reason: FinishReason) {
        self.let_go(Unwanted::Complete);
        self.finish = Some(reason);
    }

    /// Ends the choice with an error, and with it its request.
    fn give_up(&mut self, error: GenerateError) -> GenerateError {
        self.record.failed(error.code());
        self.given_up.token.cancel();
        (self.echoing, self.finish) = (None, None);
        self.let_go(self.given_up.unwanted());
        error
    }

    fn let_go(&mut self, because: Unwanted) {
        if let Some(mut stream) = self.stream.take() {
            (self.cached_tokens, self.drafts) = (stream.cached_tokens(), stream.take_drafts());
            let counted = if self.is_first { self.cached_tokens } else { 0 };
            self.record.let_go(stream.times(), counted, &self.drafts);
            self.prompt_logprobs.append(&mut stream.take_prompt_logprobs());
            stream.let_go(because);
        }
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        let is_given_up = self.given_up.token.is_cancelled();
        self.let_go(if is_given_up { self.given_up.unwanted() } else { Unwanted::Abandoned });
    }
}
