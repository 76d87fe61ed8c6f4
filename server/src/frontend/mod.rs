//! From a request to running sequences: what HTTP and gRPC share between parsing and writing.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

mod error;
mod generation;

pub use error::GenerateError;
pub use generation::{Choice, ChoiceEvent, Generation};

use crate::{
    engine::{EngineHandle, EngineState, ModelInfo, SubmitError, Unwanted},
    metrics::FrontMetrics,
    request::{FieldError, RawRequest, RequestError, validate},
    text::{OutputText, Text},
};

/// Bytes of request body up to which a request is prepared where it was read; tokenising more would hold up others.
const INLINE_BYTES: usize = 4096;

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
        let mut choices: Vec<Choice> = Vec::new();
        let given_up = self.closing.child_token();
        let count = valid.sequences().count() as u64;
        for (index, (request, start)) in valid.sequences().enumerate() {
            let stop_tokens = request.stop_tokens.clone();
            let stream = match self.engine.submit(request).await {
                Ok(stream) => stream,
                Err(error) => {
                    choices.iter_mut().for_each(|choice| choice.let_go(Unwanted::Refused));
                    return Err(too_many(error, count));
                }
            };
            let output = OutputText::new(self.text.tokenizer.clone(), start, valid.stop.clone());
            choices.push(Choice::new(index as u32, stream, output, stop_tokens, given_up.clone()));
        }
        Ok(Generation { request: valid, model, choices, permit })
    }
}

/// A full queue is for later; a request that is longer than the whole queue is for never.
fn too_many(error: SubmitError, count: u64) -> GenerateError {
    match error {
        SubmitError::QueueFull { limit, what: "sequences", .. } if count > limit => {
            let message = format!(
                "prompts times n make {count} sequences, and the queue takes {limit} at most (--max-queued-requests)"
            );
            RequestError::field("n", FieldError::Value, message).into()
        }
        error => error.into(),
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
