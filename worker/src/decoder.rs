//! The seam between `control` and a backend: what a looped decoder is loaded with, fed with and reports.
//!
//! A backend runs on one OS thread of its own (and whatever team it starts). It never waits for the async side of the
//! worker, with one exception: a full outcome channel (see [`OutcomeSink::send`]).

mod fault;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::batch::{Finish, Plan, PlanFault, Verdict};
use crate::grammar::Vocabulary;
use crate::model::WeightFormat;
use crate::sampling::Sampled;

pub use fault::{Fault, LoadError};

/// Plans that wait in the worker for their token boundary. The server runs a few plans ahead at most; past this bound
/// it is the gRPC stream's flow control that waits, never a rank.
pub const PLANS_AHEAD: usize = 64;
/// Outcomes of steps that wait for the server to read them: seconds of decoding at 1 ms a step.
pub const OUTCOMES_AHEAD: usize = 4096;

/// What a rank is to load; meanings as in worker/v1 `LoadRequest`, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadRequest {
    /// Directory with config.json and safetensors.
    pub model_dir: PathBuf,
    /// This rank, under `tensor_parallel`.
    pub rank: usize,
    /// Ranks in the group.
    pub tensor_parallel: usize,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// Bound on sequences in the batch; 0, to [`crate::backend::load`]: its own choice.
    pub max_slots: usize,
    /// Bound on rows of a step, at least `max_slots`; 0, to [`crate::backend::load`]: its own choice.
    pub max_batch_tokens: usize,
    /// KV pages to allocate; 0: as `kv_bytes_limit` allows.
    pub kv_pages: usize,
    /// Bound on the bytes of the KV cache of this rank where `kv_pages` is 0; 0: the backend's own.
    pub kv_bytes_limit: u64,
    /// Longest wait for another rank inside a step.
    pub wait_limit: Duration,
    /// Bound on positions of one sequence; 0: the model's own.
    pub max_context: usize,
    /// Where to compute.
    pub device: Device,
    /// What the layers' matrices become while they are loaded, where they have more bits; `None`: they stay as stored.
    pub quantization: Option<WeightFormat>,
    /// A launch for each phase, where a GPU computes; CPU sockets refuse it.
    pub unlooped: bool,
    /// Tokens of finished answers that are kept to draft from; 0: none.
    pub draft_corpus_tokens: usize,
    /// For grammars; without it no sequence may have one.
    pub vocabulary: Option<Arc<Vocabulary>>,
    /// The sockets of this host, GPUs or shares of the cores, that other groups of the same server run on.
    pub others: Sockets,
    /// Measure how fast the socket reads memory, before anything is loaded.
    pub measure_read_limit: bool,
}

impl LoadRequest {
    /// The socket that the rank runs on, among those of the server.
    pub fn socket(&self) -> usize {
        self.others.before + self.rank
    }

    /// How many sockets the server uses on this host.
    pub fn all_sockets(&self) -> usize {
        self.others.before + self.tensor_parallel + self.others.behind
    }
}

/// Sockets beside those of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sockets {
    /// With lower numbers than those of the group.
    pub before: usize,
    /// With higher ones.
    pub behind: usize,
}

/// Where to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Device {
    /// A GPU if there is one that can, else CPU sockets.
    #[default]
    Auto,
    /// CPU sockets.
    Cpu,
    /// A GPU.
    Cuda,
}

/// What was loaded; meanings as in worker/v1 `Loaded`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Name as in config.json.
    pub architecture: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Bound on the positions of one sequence.
    pub max_context: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Pages of this rank's KV cache.
    pub kv_pages: usize,
    /// Packed weights of this rank.
    pub weight_bytes: u64,
    /// Those of them that stream in a pass.
    pub stream_bytes: u64,
    /// Those of them of the LM head, which only steps that sample read.
    pub head_bytes: u64,
    /// Bytes a second that the rank's socket can read from memory, where that was measured.
    pub read_limit: Option<u64>,
    /// KV cache of this rank.
    pub kv_bytes: u64,
    /// Names what decides the bits of a result.
    pub bit_domain: String,
    /// What the user should know, such as a dtype that was rounded.
    pub notes: Vec<String>,
    /// Names the checkpoint: its config.json, headers and file sizes.
    pub model_digest: String,
    /// Bound on sequences in the batch.
    pub max_slots: usize,
    /// Bound on rows of a step.
    pub max_batch_tokens: usize,
}

/// What a load is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The phase now in progress.
    pub phase: Phase,
    /// Bytes of it that are done.
    pub bytes_done: u64,
    /// Bytes of it in all; 0: not known.
    pub bytes_total: u64,
}

/// Phases of a load, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// config.json and the headers of the weights.
    ReadingConfig,
    /// How fast memory can be read.
    MeasuringReads,
    /// Weights come from disk and are laid out in stream order.
    PackingWeights,
    /// KV cache, buffers, exchange memory.
    Allocating,
}

impl Phase {
    /// In words, as worker/v1 spells them.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadingConfig => "reading config",
            Self::MeasuringReads => "measuring reads",
            Self::PackingWeights => "packing weights",
            Self::Allocating => "allocating",
        }
    }
}

/// One step was run, or a plan without rows was applied; meanings as in worker/v1 `Outcome`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// The plan.
    pub version: u64,
    /// The step in it, from 0.
    pub step: u32,
    /// False for a plan that has no rows.
    pub ran_step: bool,
    /// What was sampled, in slot order; empty on ranks other than 0.
    pub tokens: Vec<OutcomeToken>,
    /// Tokens of prompts whose log-probabilities are wanted; empty on ranks other than 0.
    pub prompt: Vec<PromptToken>,
    /// Rows computed.
    pub rows: usize,
    /// Positions whose K and V were read.
    pub positions: usize,
    /// Sequences with drafts, and rows of them.
    pub drafted: Vec<(u64, usize)>,
    /// Duration of the step.
    pub step_time: Duration,
    /// How much of it was waiting for other ranks, where the backend tells.
    pub wait_time: Option<Duration>,
}

#[cfg(test)]
impl Outcome {
    /// Rows of drafts.
    pub fn rows_drafted(&self) -> usize {
        self.drafted.iter().map(|(_, rows)| rows).sum()
    }
}

/// A sampled token of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct OutcomeToken {
    /// The sequence.
    pub sequence: u64,
    /// The token, with log-probabilities if asked for.
    pub sampled: Sampled,
    /// The sequence ended with it.
    pub finish: Option<Finish>,
}

/// A token of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptToken {
    /// Its sequence.
    pub sequence: u64,
    /// Its position.
    pub position: u32,
    /// The token itself, with log-probabilities.
    pub sampled: Sampled,
}

impl Outcome {
    /// Takes up what became of the step's samples: of each its sequence and the position of its row.
    pub fn take_samples(&mut self, rows: &[(u64, u32)], sampled: Vec<Sampled>, verdicts: &[Verdict]) {
        for ((&(sequence, position), sampled), verdict) in rows.iter().zip(sampled).zip(verdicts) {
            match *verdict {
                Verdict::Token(finish) => self.tokens.push(OutcomeToken { sequence, sampled, finish }),
                Verdict::Nothing => {
                    self.tokens.push(OutcomeToken { sequence, sampled, finish: Some(Finish::Nothing) });
                }
                Verdict::Given => self.prompt.push(PromptToken { sequence, position: position + 1, sampled }),
                Verdict::Rejected | Verdict::Late => {}
            }
        }
    }
}

/// A loaded rank: its shard packed, its memory taken.
pub trait Decoder: Send {
    /// What was loaded.
    fn loaded(&self) -> &Loaded;

    /// Where other ranks find this rank's exchange memory; opaque.
    fn fabric_handle(&self) -> String;

    /// Maps the exchange memory of every rank; handles in rank order. Called once, before `run`, and for all ranks at
    /// the same time: it may wait for the others.
    ///
    /// # Errors
    /// A handle cannot be mapped, or does not fit this rank, or a rank does not join.
    fn join(&mut self, fabric_handles: &[String]) -> Result<(), Fault>;

    /// Runs plans until their stream ends and all are done (`plans.wait_next()` said `None` while idle).
    ///
    /// # Errors
    /// The fault that ends the worker.
    fn run(self: Box<Self>, plans: PlanSource, outcomes: OutcomeSink) -> Result<(), Fault>;
}

/// Loads a rank; runs on a blocking thread. Progress is reported at least twice a second while weights are read and
/// packed.
pub type Load = dyn Fn(&LoadRequest, &mut dyn FnMut(Progress)) -> Result<Box<dyn Decoder>, LoadError> + Send + Sync;

/// The decoder's end of the stream of plans.
#[derive(Debug)]
pub struct PlanSource {
    plans: mpsc::Receiver<Result<Plan, Fault>>,
    /// A plan that `wait_next` received and `take` has not taken.
    next: Option<Plan>,
    newest: Arc<AtomicU64>,
}

/// The control side's end of the stream of plans. Dropping it ends the stream.
#[derive(Debug)]
pub struct PlanFeed {
    plans: mpsc::Sender<Result<Plan, Fault>>,
    newest: Arc<AtomicU64>,
}

/// A stream of plans with room for [`PLANS_AHEAD`].
pub fn plan_stream() -> (PlanFeed, PlanSource) {
    let (sender, receiver) = mpsc::channel(PLANS_AHEAD);
    let newest = Arc::new(AtomicU64::new(0));
    (PlanFeed { plans: sender, newest: newest.clone() }, PlanSource { plans: receiver, next: None, newest })
}

impl PlanFeed {
    /// Hands a plan over, waiting for room; false if the decoder has ended.
    pub async fn push(&self, plan: Plan) -> bool {
        let version = plan.version;
        let delivered = self.plans.send(Ok(plan)).await.is_ok();
        // Release: whoever sees the version (Acquire in `newest`) finds the plan in the channel.
        self.newest.store(version, Ordering::Release);
        delivered
    }

    /// Completes once the decoder has ended and takes no more plans.
    pub async fn closed(&self) {
        self.plans.closed().await;
    }

    /// Ends the stream with a fault, which the decoder meets after the plans before it.
    pub async fn fail(self, fault: Fault) {
        // A decoder that has ended has its own fault to report.
        let _ = self.plans.send(Err(fault)).await;
    }
}

impl PlanSource {
    /// The highest version that is complete in this worker (0: none yet): what the rank offers in an exchange. Never
    /// waits.
    pub fn newest(&self) -> u64 {
        self.newest.load(Ordering::Acquire)
    }

    /// The plan of this version, which is the next in order and at most [`Self::newest`] (on any rank: plans this rank
    /// has offered). Does not wait unless the caller breaks that rule.
    ///
    /// # Errors
    /// The stream broke, or the version is not the next.
    pub fn take(&mut self, version: u64) -> Result<Plan, Fault> {
        match self.wait_next()? {
            Some(next) if next == version => {}
            Some(got) => return Err(PlanFault::Version { expected: version, got }.into()),
            None => return Err(Fault::PlanStream(format!("it ended before plan {version}"))),
        }
        Ok(self.next.take().expect("wait_next said that there is a next plan"))
    }

    /// Sleeps until there is a next plan and says its version; `None` once the stream has ended and every plan was
    /// taken. For a decoder that has nothing to compute.
    ///
    /// # Errors
    /// The stream broke.
    pub fn wait_next(&mut self) -> Result<Option<u64>, Fault> {
        if self.next.is_none() {
            self.next = self.plans.blocking_recv().transpose()?;
        }
        Ok(self.next.as_ref().map(|plan| plan.version))
    }
}

/// Counters that Health answers from.
#[derive(Debug, Default)]
pub struct Vitals {
    /// Plan of the newest step (or plan without rows) that was reported.
    pub version: AtomicU64,
    /// Steps run in the life of the worker.
    pub steps: AtomicU64,
}

/// The decoder's end of the stream of outcomes.
#[derive(Debug)]
pub struct OutcomeSink {
    outcomes: mpsc::Sender<Outcome>,
    vitals: Arc<Vitals>,
}

/// A stream of outcomes with room for [`OUTCOMES_AHEAD`].
pub fn outcome_stream(vitals: Arc<Vitals>) -> (OutcomeSink, mpsc::Receiver<Outcome>) {
    let (sender, receiver) = mpsc::channel(OUTCOMES_AHEAD);
    (OutcomeSink { outcomes: sender, vitals }, receiver)
}

impl OutcomeSink {
    /// Reports a step. Waits only while [`OUTCOMES_AHEAD`] outcomes are unread. That cannot deadlock: outcomes leave
    /// through a task of their own that depends on nothing but the server reading them, and the server reads outcomes
    /// without waiting for a plan to be accepted. A server that stopped reading is caught by the other ranks' wait
    /// limit.
    ///
    /// # Errors
    /// The server is gone.
    pub fn send(&self, outcome: Outcome) -> Result<(), Fault> {
        self.vitals.version.store(outcome.version, Ordering::Relaxed);
        self.vitals.steps.fetch_add(u64::from(outcome.ran_step), Ordering::Relaxed);
        self.outcomes.blocking_send(outcome).map_err(|_| Fault::ServerGone)
    }
}
