//! What a group is, what it may use, and how long what may take.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use looplane_proto::worker::v1::{Vocabulary, load_request};

use crate::sched::{Limits, LimitsError};

/// What a group is and what it may use.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    /// The model's directory, as the workers see it.
    pub model_dir: PathBuf,
    /// Ranks: 1, 2, 4, 8 or 16.
    pub tensor_parallel: u32,
    /// Groups of so many ranks, each of which has the whole model.
    pub replicas: u32,
    /// Which of them this is, from 0.
    pub replica: u32,
    /// Compute threads of each worker, at least 1.
    pub threads: u32,
    /// Bounds of the batch and of the queue.
    pub limits: Limits,
    /// KV pages of each rank; 0: as many as the slots may need, within `kv_bytes_limit`.
    pub kv_pages: u32,
    /// Bytes of each rank's KV cache where `kv_pages` is 0; 0: the worker's own bound.
    pub kv_bytes_limit: u64,
    /// Where the workers compute.
    pub device: load_request::Device,
    /// What the layers' matrices become while they are loaded.
    pub quantization: load_request::Quantization,
    /// GPUs run a launch for each phase.
    pub unlooped: bool,
    /// Tokens of finished answers that each rank keeps to draft from; 0: none.
    pub draft_corpus_tokens: u32,
    /// For sequences that are held to a grammar; `None`: there are none.
    pub vocabulary: Option<Arc<Vocabulary>>,
    /// Bound on the positions of one sequence; 0: the model's own.
    pub max_context: u32,
    /// What a step should take at most where sequences decode, in which prompts have few rows to keep it; none: as long
    /// as brings more rows a second.
    pub itl_target: Option<Duration>,
    /// How long steps are timed before the first group serves; zero: not at all.
    pub timing: Duration,
    /// How long what may take.
    pub timeouts: Timeouts,
    /// Starts in a row that brought no group which computed a step, after which the model is given up.
    pub max_failed_starts: u32,
}

/// How long what may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeouts {
    /// The longest step. A worker that waits longer for another rank reports it and exits. A rank that owes a report
    /// for several times as long as the step should take, but no longer than this, counts as hung, and the group as
    /// lost. A process that ends is noticed at once, whatever this is.
    pub step: Duration,
    /// The least time after which a rank that owes a report counts as hung, however short its step should be.
    pub step_floor: Duration,
    /// Between two pings of the connection to each worker, busy or idle. Seldom: reports and `probe` tell sooner, but
    /// for a worker that loads.
    pub ping: Duration,
    /// For the answer; a worker whose connection does not answer counts as hung, and the group as lost. Longer than what
    /// the server itself may stand still: its clock runs on meanwhile, and answers that are there count for nothing.
    pub pong: Duration,
    /// From the start of a worker to its open socket; also the time for all ranks to join.
    pub start: Duration,
    /// Between two reports of a worker that loads.
    pub load: Duration,
    /// From the request to shut down until sequences that still run are given up.
    pub drain: Duration,
    /// Between two questions to the workers of a group that is idle, or has reported nothing for `step_floor`, whether
    /// they are still there.
    pub probe: Duration,
    /// For the answer; a worker that owes two in a row counts as hung, and the group as lost.
    pub answer: Duration,
    /// From the end of its stream of plans until a worker that has not exited is killed.
    pub exit: Duration,
    /// The first loss within `loss_window` is followed by a start at once, the second by this pause, each further one
    /// by twice the pause before.
    pub backoff: Duration,
    /// Bound on that pause.
    pub backoff_limit: Duration,
    /// Losses are forgotten after this time.
    pub loss_window: Duration,
    /// Requests like one that lost the group are refused for this time.
    pub quarantine: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            step: Duration::from_secs(120),
            start: Duration::from_secs(30),
            load: Duration::from_secs(600),
            drain: Duration::from_secs(30),
            step_floor: Duration::from_secs(3),
            ping: Duration::from_secs(5),
            pong: Duration::from_secs(20),
            probe: Duration::from_secs(1),
            answer: Duration::from_secs(2),
            exit: Duration::from_secs(10),
            backoff: Duration::from_millis(100),
            backoff_limit: Duration::from_secs(30),
            loss_window: Duration::from_secs(60),
            quarantine: Duration::from_secs(600),
        }
    }
}

impl GroupConfig {
    /// The defaults for a model directory and a number of ranks; one thread a worker.
    pub fn new(model_dir: PathBuf, tensor_parallel: u32) -> Self {
        Self {
            model_dir,
            tensor_parallel,
            replicas: 1,
            replica: 0,
            threads: 1,
            limits: Limits::default(),
            kv_pages: 0,
            kv_bytes_limit: 0,
            device: load_request::Device::Auto,
            quantization: load_request::Quantization::None,
            unlooped: false,
            draft_corpus_tokens: 0,
            vocabulary: None,
            max_context: 0,
            itl_target: None,
            timing: Duration::from_millis(1500),
            timeouts: Timeouts::default(),
            max_failed_starts: 5,
        }
    }
}

/// A configuration that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The plan cuts a model in powers of two.
    #[error("tensor parallelism is {0}; it must be 1, 2, 4, 8 or 16")]
    TensorParallel(u32),
    /// The router names replicas by the bits of a word.
    #[error("{0} replicas cannot be served by one front end: 1 to 64 can")]
    Replicas(u32),
    /// A bound of zero would stop everything.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A bound of the scheduler.
    #[error(transparent)]
    Limits(#[from] LimitsError),
}
