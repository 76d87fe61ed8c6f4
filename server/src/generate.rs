//! From a request to running sequences: what HTTP and gRPC share between parsing and writing.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use futures::{Stream, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::{
    engine::{
        EngineHandle, EngineState, FinishReason, ModelInfo, SequenceEvent, SequenceStream, SubmitError, Unwanted,
    },
    metrics::FrontMetrics,
    request::{RawRequest, RequestError, ValidRequest, validate},
    text::{OutputText, Piece, Text},
};

/// Bytes of request body up to which a request is prepared where it was read; tokenising more would hold up others.
const INLINE_BYTES: usize = 4096;

/// Why a request was not served, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The request is at fault.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The engine did not take it.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// As many requests are being served as the front end allows.
    #[error("the limit of {limit} requests at one time is reached (--max-concurrent-requests)")]
    Busy {
        /// The bound.
        limit: usize,
    },
    /// No new requests are taken: the server ends.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The model has not been loaded yet, or cannot be.
    #[error("the server is {0}")]
    NotReady(String),
    /// The engine gave the sequence up.
    #[error("the request was given up: {0}")]
    Failed(String),
    /// A bug: the request was not answered.
    #[error("internal error: {0}")]
    Internal(String),
}

impl GenerateError {
    /// The stable code that clients and operators see.
    pub fn code(&self) -> &'static str {
        match self {
            GenerateError::Request(error) => error.code(),
            GenerateError::Submit(SubmitError::QueueFull { .. }) | GenerateError::Busy { .. } => "rate_limit_exceeded",
            GenerateError::Submit(SubmitError::TooLarge { .. } | SubmitError::NeverFits { .. }) => "request_too_large",
            GenerateError::Submit(SubmitError::Quarantined { .. }) => "request_quarantined",
            GenerateError::Submit(SubmitError::Unavailable(_)) | GenerateError::NotReady(_) => "not_ready",
            GenerateError::ShuttingDown => "shutting_down",
            GenerateError::Failed(_) => "generation_failed",
            GenerateError::Internal(_) => "internal_error",
        }
    }
}

/// What every connection of the front end shares.
#[derive(Debug)]
pub struct Frontend {
    /// The scheduler and its workers.
    pub engine: EngineHandle,
    /// The model's text side.
    pub text: Arc<Text>,
    /// The name that requests call the model by.
    pub model_id: String,
    /// When the front end started, in seconds since 1970.
    pub started: u64,
    /// What it counts.
    pub metrics: FrontMetrics,
    /// Set: no new requests.
    pub draining: CancellationToken,
    /// Set: requests that still run end now, with an error.
    pub closing: CancellationToken,
    permits: Arc<Semaphore>,
    max_concurrent_requests: usize,
}

impl Frontend {
    /// A front end that serves at most `max_concurrent_requests` (at least 1) at a time.
    pub fn new(engine: EngineHandle, text: Arc<Text>, model_id: String, max_concurrent_requests: usize) -> Self {
        Self {
            engine,
            text,
            model_id,
            started: unix_seconds(),
            metrics: FrontMetrics::default(),
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            permits: Arc::new(Semaphore::new(max_concurrent_requests)),
            max_concurrent_requests,
        }
    }

    /// Takes a place among the requests served at one time; it is free again when the permit is dropped.
    ///
    /// # Errors
    /// [`GenerateError::Busy`] if there is none, [`GenerateError::ShuttingDown`] while draining.
    pub fn enter(&self) -> Result<OwnedSemaphorePermit, GenerateError> {
        if self.draining.is_cancelled() {
            return Err(GenerateError::ShuttingDown);
        }
        let busy = |_| GenerateError::Busy { limit: self.max_concurrent_requests };
        self.permits.clone().try_acquire_owned().map_err(busy)
    }

    /// The engine's state, or that no new requests are taken.
    pub fn state(&self) -> EngineState {
        match self.draining.is_cancelled() {
            true => EngineState::Draining,
            false => self.engine.state(),
        }
    }

    /// Waits until no request is being served.
    pub async fn idle(&self) {
        let all = self.max_concurrent_requests as u32;
        // An error would say that the semaphore is closed, which nobody does.
        let _ = self.permits.acquire_many(all).await;
    }

    /// What the served model is.
    ///
    /// # Errors
    /// [`GenerateError::NotReady`] before it has loaded for the first time.
    pub fn model(&self) -> Result<Arc<ModelInfo>, GenerateError> {
        self.engine.model().ok_or_else(|| GenerateError::NotReady(in_words(&self.engine.state())))
    }

    /// Checks that `asked` names the served model; empty does.
    ///
    /// # Errors
    /// [`RequestError::ModelNotFound`].
    pub fn check_model(&self, asked: &str) -> Result<(), RequestError> {
        if asked.is_empty() || asked == self.model_id {
            return Ok(());
        }
        Err(RequestError::ModelNotFound { asked: asked.into(), served: self.model_id.clone() })
    }

    /// Validates a request and queues its sequences. `bytes` is the size of its text, which decides where the work of
    /// tokenising is done. `permit` is kept until the generation ends or is dropped.
    ///
    /// # Errors
    /// As the request, the engine's bounds and the engine's state have it; then no sequence stays queued.
    pub async fn admit(
        &self,
        raw: RawRequest,
        bytes: usize,
        permit: OwnedSemaphorePermit,
    ) -> Result<Generation, GenerateError> {
        let model = self.model()?;
        let valid = if bytes <= INLINE_BYTES {
            validate(raw, &model, &self.text)?
        } else {
            let (model, text) = (model.clone(), self.text.clone());
            let task = tokio::task::spawn_blocking(move || validate(raw, &model, &text));
            task.await.map_err(|error| GenerateError::Internal(format!("preparing the prompt: {error}")))??
        };
        let given_up = self.closing.child_token();
        let (requests, starts): (Vec<_>, Vec<_>) = valid.sequences().unzip();
        let stop_tokens: Vec<Vec<u32>> = requests.iter().map(|request| request.stop_tokens.clone()).collect();
        let streams = self.engine.submit(requests).await?;
        let choices = streams.into_iter().zip(starts).zip(stop_tokens).zip(0..);
        let choices = choices.map(|(((stream, start), stop_tokens), index)| Choice {
            index,
            stream: Some(stream),
            output: OutputText::new(self.text.tokenizer.clone(), start, valid.stop.clone()),
            stop_tokens,
            finish: None,
            completion_tokens: 0,
            given_up: given_up.clone(),
        });
        let choices = choices.collect();
        Ok(Generation { request: valid, model, choices, permit })
    }
}

/// A state as part of a sentence: "the server is ...".
pub fn in_words(state: &EngineState) -> String {
    match state {
        EngineState::Loading(phase) if phase.is_empty() => "loading the model".into(),
        EngineState::Loading(phase) => format!("loading the model ({phase})"),
        EngineState::Ready => "ready".into(),
        EngineState::Recovering(what) => format!("recovering ({what})"),
        EngineState::Draining => "shutting down".into(),
        EngineState::Failed(why) => format!("failed ({why})"),
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

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
    pub permit: OwnedSemaphorePermit,
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
    },
}

/// One sequence, on its way to becoming text. Dropping it cancels the sequence.
#[derive(Debug)]
pub struct Choice {
    /// Its number in the response.
    pub index: u32,
    /// `None` once it has ended.
    stream: Option<SequenceStream>,
    output: OutputText,
    stop_tokens: Vec<u32>,
    /// The end, known but not yet told.
    finish: Option<FinishReason>,
    completion_tokens: u32,
    /// Set: the server gives the request up. Shared with the request's other choices, so that those that are dropped
    /// after an error of one are not taken for the client's going away.
    given_up: CancellationToken,
}

impl Choice {
    /// What becomes known next; `None` after the end or an error.
    pub async fn next(&mut self) -> Option<Result<ChoiceEvent, GenerateError>> {
        loop {
            if let Some(reason) = self.finish.take() {
                let completion_tokens = self.completion_tokens;
                return Some(Ok(ChoiceEvent::Finished { reason, completion_tokens }));
            }
            let stream = self.stream.as_mut()?;
            let event = tokio::select! {
                biased;
                event = stream.next() => event,
                () = self.given_up.cancelled() => return Some(Err(self.give_up(GenerateError::ShuttingDown))),
            };
            match self.apply(event) {
                Ok(piece) if piece.is_empty() => {}
                Ok(piece) => return Some(Ok(ChoiceEvent::Delta(piece))),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Everything that [`Choice::next`] returns, as a stream with the choice's index.
    pub fn into_stream(self) -> impl Stream<Item = (u32, Result<ChoiceEvent, GenerateError>)> {
        stream::unfold(
            self,
            |mut choice| async move { choice.next().await.map(|event| ((choice.index, event), choice)) },
        )
    }

    fn apply(&mut self, event: Option<SequenceEvent>) -> Result<Piece, GenerateError> {
        match event {
            Some(SequenceEvent::Token(token)) => {
                self.completion_tokens += 1;
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
            Some(SequenceEvent::Failed(why)) => Err(self.give_up(GenerateError::Failed(why))),
            None => Err(self.give_up(GenerateError::Failed("the engine ended".into()))),
        }
    }

    /// Lets go of a sequence that has not ended by itself, too: a stop text was found.
    fn end(&mut self, reason: FinishReason) {
        self.let_go(Unwanted::Complete);
        self.finish = Some(reason);
    }

    /// Ends the choice with an error, and with it its request.
    fn give_up(&mut self, error: GenerateError) -> GenerateError {
        self.given_up.cancel();
        self.let_go(Unwanted::GivenUp);
        error
    }

    fn let_go(&mut self, because: Unwanted) {
        if let Some(stream) = self.stream.take() {
            stream.let_go(because);
        }
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        if self.given_up.is_cancelled() {
            self.let_go(Unwanted::GivenUp);
        }
    }
}
