//! The seam between the front end and the scheduler: what a request becomes once it is valid, and what comes back.
//!
//! What a sequence is asked for is the scheduler's to say, and passed on from here. `http` and `grpc` hold an
//! [`EngineHandle`]; `group` owns the other end, or `fleet`, where a host on another machine computes, or `router`, which
//! stands in front of several of these. None knows the front end. `sequence` is what goes in and comes out, `life` the
//! times in between, `work` what a replica has to do, `restart` how it gets new workers.

mod life;
mod restart;
mod sequence;
mod work;

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::metrics::EngineMetrics;
pub use crate::sched::{
    FinishReason, GeneratedToken, Handed, Load, MAX_WEIGHT, PRIORITIES, SamplingParams, SequenceRequest, Standing,
    SubmitError, TokenBounds, leaves_room,
};
pub use life::{Life, Times, Unwanted};
pub use restart::{Restart, RestartError, UnderWay};
pub use sequence::{
    Command, Moved, Returned, SequenceEvent, SequenceSender, SequenceStream, Submission, ping, sequence,
};
pub use work::Work;

/// What clients are told of a log-probability: JSON has no infinities, and of a token that cannot be drawn, or whose
/// logit is no number, OpenAI says -9999.
pub fn client_logprob(logprob: f32) -> f32 {
    const FLOOR: f32 = -9999.0;
    if logprob.is_finite() { logprob } else { FLOOR }
}

/// What the front end may say of the model before and while it is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineState {
    /// Workers are starting; the phase in words, such as "rank 1: packing weights 40 %".
    Loading(String),
    /// Requests are computed.
    Ready,
    /// A worker was lost, or all are being replaced, and the group is coming back; requests wait, none is lost.
    Recovering(String),
    /// No new requests; those running end.
    Draining,
    /// The group cannot be served any more; the text says why.
    Failed(String),
}

impl EngineState {
    /// Given up.
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
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

impl ModelInfo {
    /// Whether prompt and answer of a request have room in the context.
    pub fn holds(&self, request: &SequenceRequest) -> bool {
        request.positions() < u64::from(self.max_context)
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
    replicas: Arc<[Replica]>,
}

/// One group of workers with the whole model.
#[derive(Debug, Clone)]
pub struct Replica {
    /// How it is.
    pub state: watch::Receiver<EngineState>,
    /// What it counts.
    pub metrics: Arc<EngineMetrics>,
}

impl EngineHandle {
    /// Made by an engine that is alone, or by a test that plays one.
    pub fn new(
        commands: mpsc::UnboundedSender<Command>,
        state: watch::Receiver<EngineState>,
        model: watch::Receiver<Option<Arc<ModelInfo>>>,
        metrics: Arc<EngineMetrics>,
    ) -> Self {
        let replicas = Arc::new([Replica { state: state.clone(), metrics }]);
        Self { commands, state, model, replicas }
    }

    /// Made by who stands in front of replicas; state and model are those of all together.
    pub fn in_front_of(
        replicas: Vec<Replica>,
        commands: mpsc::UnboundedSender<Command>,
        state: watch::Receiver<EngineState>,
        model: watch::Receiver<Option<Arc<ModelInfo>>>,
    ) -> Self {
        Self { commands, state, model, replicas: replicas.into() }
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
        let submission = Submission::new(requests, standing, Instant::now(), reply);
        self.commands.send(Command::Submit(submission)).map_err(|_| gone())?;
        let unanswered = |_| match self.state() {
            EngineState::Draining => gone(),
            _ => SubmitError::Unavailable("without an engine: it ended before it answered".into()),
        };
        answer.await.map_err(unanswered)?
    }

    /// Waits until the tasks that decide everything take their next turns: for ever, if one hangs.
    ///
    /// # Errors
    /// One has ended.
    pub async fn ping(&self) -> Result<(), oneshot::error::RecvError> {
        ping(&self.commands).await
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

    /// To wait for changes of the model.
    pub fn watch_model(&self) -> watch::Receiver<Option<Arc<ModelInfo>>> {
        self.model.clone()
    }

    /// The groups that compute, by their numbers.
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// What all replicas have at hand.
    pub fn load(&self) -> Load {
        self.replicas.iter().map(|replica| replica.metrics.load()).sum()
    }

    /// Where commands go.
    pub fn commands(&self) -> &mpsc::UnboundedSender<Command> {
        &self.commands
    }
}
