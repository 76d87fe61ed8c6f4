//! The seam between the front end and the scheduler: what a request becomes once it is valid, and what comes back.
//!
//! What a sequence is asked for is the scheduler's to say, and passed on from here. `http` and `grpc` hold an
//! [`EngineHandle`]; `group` owns the other end. Neither knows the other.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use prometheus_client::metrics::counter::Counter;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::drafts::DraftStep;
use crate::metrics::EngineMetrics;
pub use crate::sched::{
    FinishReason, GeneratedToken, MAX_WEIGHT, PRIORITIES, SamplingParams, SequenceRequest, Standing, SubmitError,
    TokenBounds, leaves_room,
};

/// What clients are told of a log-probability: JSON has no infinities, and of a token that cannot be drawn, or whose
/// logit is no number, OpenAI says -9999.
pub fn client_logprob(logprob: f32) -> f32 {
    const FLOOR: f32 = -9999.0;
    if logprob.is_finite() { logprob } else { FLOOR }
}

/// What a sequence's owner receives, in order; `Finished` or `Failed` is last.
#[derive(Debug, Clone, PartialEq)]
pub enum SequenceEvent {
    /// The prompt was computed; once, before the first token. [`SequenceStream`] keeps it.
    Prompt {
        /// Tokens of it that were not computed, since cached pages held them.
        cached_tokens: u32,
        /// The prompt's tokens from the second on with their log-probabilities, if these are wanted.
        logprobs: Vec<GeneratedToken>,
    },
    /// A step had drafts; before its tokens. [`SequenceStream`] keeps it.
    Drafts(DraftStep),
    /// The next token.
    Token(GeneratedToken),
    /// The end.
    Finished(FinishReason),
    /// The sequence was given up; the text says why.
    Failed(String),
}

/// What the front end may say of the model before and while it is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineState {
    /// Workers are starting; the phase in words, such as "rank 1: packing weights 40 %".
    Loading(String),
    /// Requests are computed.
    Ready,
    /// A worker was lost and the group is coming back; requests wait, none is lost.
    Recovering(String),
    /// No new requests; those running end.
    Draining,
    /// The group cannot be served any more; the text says why.
    Failed(String),
}

/// Facts of the loaded model, known once the group has loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelInfo {
    /// Names the checkpoint's files; a group that comes back with another one is refused.
    pub model_digest: String,
    /// Architecture name as in config.json.
    pub architecture: String,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// Bound on prompt and output together, in positions.
    pub max_context: u32,
    /// Ranks of the group.
    pub tensor_parallel: u32,
    /// Names what decides the bits of a result.
    pub bit_domain: String,
}

/// The sequences of one request on their way to the scheduler.
#[derive(Debug)]
pub struct Submission {
    /// What to generate, at least one.
    pub requests: Vec<SequenceRequest>,
    /// Whose they are, and how urgent.
    pub standing: Standing,
    /// When they were handed over.
    pub submitted: Instant,
    /// Answered once: all are queued, in this order, or why none is.
    pub reply: oneshot::Sender<Result<Vec<SequenceStream>, SubmitError>>,
}

/// What the handle sends to the engine.
#[derive(Debug)]
pub enum Command {
    /// A new request.
    Submit(Submission),
    /// Nobody wants the rest of a sequence.
    Cancel {
        /// Its number.
        sequence: u64,
        /// Tokens that its reader took.
        taken: u64,
        /// Why not.
        because: Unwanted,
    },
    /// Whether the task that does all this still takes its turns; answered in its turn.
    Ping(oneshot::Sender<()>),
}

/// Why nobody wants the rest of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwanted {
    /// Its owner has what it needs: a stop text was found.
    Complete,
    /// Its owner went away.
    Abandoned,
    /// The server gives its request up: another of its sequences failed, or the server ends.
    GivenUp,
}

/// The events of one sequence. Dropping it cancels the sequence: slot and pages are free one step later.
#[derive(Debug)]
pub struct SequenceStream {
    id: u64,
    events: mpsc::Receiver<SequenceEvent>,
    commands: mpsc::UnboundedSender<Command>,
    /// Tokens that the reader took, and of all readers.
    taken: u64,
    all_taken: Counter,
    cached_tokens: u32,
    prompt_logprobs: Vec<GeneratedToken>,
    drafts: Vec<DraftStep>,
    ended: bool,
    because: Unwanted,
}

impl SequenceStream {
    /// Made by the engine. `events` has room for every token the sequence may generate, each in a step with drafts, and
    /// its end, so the engine never waits for a slow reader and the buffer is bounded by `max_tokens`.
    pub fn new(id: u64, events: mpsc::Receiver<SequenceEvent>, commands: mpsc::UnboundedSender<Command>) -> Self {
        let (all_taken, because) = (Counter::default(), Unwanted::Abandoned);
        let (drafts, prompt_logprobs) = (Vec::new(), Vec::new());
        let (taken, cached_tokens, ended) = (0, 0, false);
        Self { id, events, commands, taken, all_taken, cached_tokens, prompt_logprobs, drafts, ended, because }
    }

    /// Counts every token that the reader takes in `counter`, too: what clients are told of is what is counted.
    pub fn counted_in(mut self, counter: Counter) -> Self {
        self.all_taken = counter;
        self
    }

    /// The sequence's number, unique in the life of the server.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Tokens of the prompt that were not computed, since cached pages held them; known with the first token.
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// The prompt's tokens from the second on with their log-probabilities, if these are wanted; known with the first
    /// token, once.
    pub fn take_prompt_logprobs(&mut self) -> Vec<GeneratedToken> {
        std::mem::take(&mut self.prompt_logprobs)
    }

    /// Steps with drafts, up to that of the last token taken; once.
    pub fn take_drafts(&mut self) -> Vec<DraftStep> {
        std::mem::take(&mut self.drafts)
    }

    /// The next token or the end; `None` after it, or if the engine is gone.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<SequenceEvent>> {
        let event = loop {
            match ready!(self.events.poll_recv(context)) {
                Some(SequenceEvent::Prompt { cached_tokens, logprobs }) => {
                    (self.cached_tokens, self.prompt_logprobs) = (cached_tokens, logprobs);
                }
                Some(SequenceEvent::Drafts(step)) => self.drafts.push(step),
                event => break event,
            }
        };
        self.ended = !matches!(event, Some(SequenceEvent::Token(_)));
        if !self.ended {
            self.taken += 1;
            self.all_taken.inc();
        }
        Poll::Ready(event)
    }

    /// As [`SequenceStream::poll_next`].
    pub async fn next(&mut self) -> Option<SequenceEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Lets the sequence go and says why, where dropping it says that nobody is there any more.
    pub fn let_go(mut self, because: Unwanted) {
        self.because = because;
    }
}

impl Drop for SequenceStream {
    fn drop(&mut self) {
        if !self.ended {
            // An engine that is gone has nothing left to cancel.
            let _ = self.commands.send(Command::Cancel { sequence: self.id, taken: self.taken, because: self.because });
        }
    }
}

/// The front end's end of the seam; cheap to clone.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    // Unbounded as a channel, bounded in content: every Submit waits for its reply and the number of requests in the
    // front end is bounded (`--max-connections`), and there is one Cancel a sequence. A Cancel must never be dropped.
    commands: mpsc::UnboundedSender<Command>,
    state: watch::Receiver<EngineState>,
    model: watch::Receiver<Option<Arc<ModelInfo>>>,
    metrics: Arc<EngineMetrics>,
}

impl EngineHandle {
    /// Made by the engine, or by a test that plays one.
    pub fn new(
        commands: mpsc::UnboundedSender<Command>,
        state: watch::Receiver<EngineState>,
        model: watch::Receiver<Option<Arc<ModelInfo>>>,
        metrics: Arc<EngineMetrics>,
    ) -> Self {
        Self { commands, state, model, metrics }
    }

    /// Queues the sequences of a request, all of them or none.
    ///
    /// # Errors
    /// Says which bound was reached, or that the server is not serving.
    pub async fn submit(
        &self,
        requests: Vec<SequenceRequest>,
        standing: Standing,
    ) -> Result<Vec<SequenceStream>, SubmitError> {
        let (reply, answer) = oneshot::channel();
        let gone = || SubmitError::Unavailable("shutting down".into());
        let submission = Submission { requests, standing, submitted: Instant::now(), reply };
        self.commands.send(Command::Submit(submission)).map_err(|_| gone())?;
        let unanswered = |_| match self.state() {
            EngineState::Draining => gone(),
            _ => SubmitError::Unavailable("without an engine: it ended before it answered".into()),
        };
        answer.await.map_err(unanswered)?
    }

    /// Waits until the engine's task takes its next turn: for ever, if it hangs.
    ///
    /// # Errors
    /// The task has ended.
    pub async fn ping(&self) -> Result<(), oneshot::error::RecvError> {
        let (reply, answer) = oneshot::channel();
        // What cannot be sent is dropped, and the reply in it.
        let _ = self.commands.send(Command::Ping(reply));
        answer.await
    }

    /// The state now.
    pub fn state(&self) -> EngineState {
        self.state.borrow().clone()
    }

    /// To wait for changes of the state.
    pub fn watch_state(&self) -> watch::Receiver<EngineState> {
        self.state.clone()
    }

    /// Facts of the model; `None` while it loads for the first time.
    pub fn model(&self) -> Option<Arc<ModelInfo>> {
        self.model.borrow().clone()
    }

    /// What the engine counts.
    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }
}
