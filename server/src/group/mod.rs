//! One model replica: starts its workers, feeds them with the scheduler's plans, hands their tokens to the sequences, and
//! starts them again when one is lost. The other end of [`EngineHandle`].
//!
//! `launch` starts and ends processes, `start` brings a group from nothing to the first plan, `driver` owns the scheduler and
//! lives from spawn to shutdown, `intake` is its side towards the front end and `exchange` that towards the workers, `life`
//! has the times of a sequence, `vitals` tells ranks that hang. One task owns all state; the tasks beside it only move
//! messages.

mod driver;
mod exchange;
#[cfg(test)]
mod fake;
mod intake;
mod launch;
mod life;
mod start;
#[cfg(test)]
mod tests;
mod vitals;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use looplane_proto::worker::v1::load_request;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::engine::{EngineHandle, EngineState};
use crate::metrics::EngineMetrics;
use crate::sched::{Limits, LimitsError, Scheduler};
use launch::KILL_LIMIT;
pub use launch::{Launcher, ProcessLauncher, WorkerExit};

/// What a group is and what it may use.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    /// The model's directory, as the workers see it.
    pub model_dir: PathBuf,
    /// Ranks: 1, 2, 4, 8 or 16.
    pub tensor_parallel: u32,
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
    /// GPUs run a launch for each phase.
    pub unlooped: bool,
    /// Bound on the positions of one sequence; 0: the model's own.
    pub max_context: u32,
    /// How long what may take.
    pub waits: Waits,
    /// Starts or short lives of the group in a row after which it is given up.
    pub max_failed_starts: u32,
}

/// How long what may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waits {
    /// The longest step. A worker that waits longer for another rank reports it and exits; a rank that owes a report for
    /// longer counts as hung, and the group as lost. A process that ends is noticed at once, whatever this is.
    pub step: Duration,
    /// From the start of a worker to its open socket; also the time for all ranks to join.
    pub start: Duration,
    /// Between two reports of a worker that loads.
    pub load: Duration,
    /// From the request to shut down until sequences that still run are given up.
    pub drain: Duration,
    /// Between two questions to the workers of an idle group whether they are still there.
    pub probe: Duration,
    /// For the answer; a worker that owes two in a row counts as hung, and the group as lost.
    pub answer: Duration,
    /// From the end of its stream of plans until a worker that has not exited is killed.
    pub exit: Duration,
    /// Pause before the second start in a row; doubled for each further one.
    pub backoff: Duration,
    /// Bound on that pause. A group that lives as long counts as started well.
    pub backoff_limit: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            step: Duration::from_secs(120),
            start: Duration::from_secs(30),
            load: Duration::from_secs(600),
            drain: Duration::from_secs(30),
            probe: Duration::from_secs(5),
            answer: Duration::from_secs(5),
            exit: Duration::from_secs(10),
            backoff: Duration::from_millis(250),
            backoff_limit: Duration::from_secs(30),
        }
    }
}

impl GroupConfig {
    /// The defaults for a model directory and a number of ranks; one thread a worker.
    pub fn new(model_dir: PathBuf, tensor_parallel: u32) -> Self {
        Self {
            model_dir,
            tensor_parallel,
            threads: 1,
            limits: Limits::default(),
            kv_pages: 0,
            kv_bytes_limit: 0,
            device: load_request::Device::Auto,
            unlooped: false,
            max_context: 0,
            waits: Waits::default(),
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
    /// A bound of zero would stop everything.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A bound of the scheduler.
    #[error(transparent)]
    Limits(#[from] LimitsError),
}

/// What the steps of the loop took, over all groups of this replica.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Plans sent.
    pub plans: u64,
    /// Steps run.
    pub steps: u64,
    /// Rows (prompt and decode tokens) computed.
    pub rows: u64,
    /// Tokens sampled.
    pub tokens: u64,
    /// Time in steps on rank 0, in nanoseconds.
    pub step_ns: u64,
    /// Of that, waiting for other ranks.
    pub wait_ns: u64,
    /// Groups lost.
    pub losses: u64,
}

impl Figures {
    /// As counted so far.
    fn of(metrics: &EngineMetrics) -> Self {
        let (step_ns, wait_ns) = metrics.step_ns();
        Self {
            plans: metrics.plans.get(),
            steps: metrics.steps(),
            rows: metrics.rows(),
            tokens: metrics.generation_tokens.get(),
            step_ns,
            wait_ns,
            losses: metrics.losses.get(),
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plans, steps, rows, tokens, step_ns, wait_ns, losses } = *self;
        write!(f, "{tokens} tokens in {steps} steps ({rows} rows, {plans} plans)")?;
        if steps > 0 && step_ns > 0 {
            let mean_ms = step_ns as f64 / steps as f64 / 1e6;
            let waiting = wait_ns as f64 * 100.0 / step_ns as f64;
            write!(f, ", {mean_ms:.3} ms a step on rank 0, {waiting:.1} % of it waiting for other ranks")?;
        }
        match losses {
            0 => Ok(()),
            1 => write!(f, "; the workers were lost once"),
            _ => write!(f, "; the workers were lost {losses} times"),
        }
    }
}

/// The task that runs a group. Dropping it kills the workers; [`GroupTask::shutdown`] lets them finish.
#[derive(Debug)]
pub struct GroupTask {
    stop: CancellationToken,
    task: JoinHandle<()>,
    metrics: Arc<EngineMetrics>,
    /// Of the processes of workers; closed, and so without a message, once the last is gone.
    workers: mpsc::Receiver<()>,
}

impl GroupTask {
    /// Takes no new sequences, lets those at hand end (bounded by `waits.drain`), ends the workers, and returns when the
    /// last is gone.
    pub async fn shutdown(self) {
        self.shutdown_unless(std::future::pending()).await;
    }

    /// As [`GroupTask::shutdown`]; once `now` is there, the workers are killed, and it returns when the last is gone.
    pub async fn shutdown_unless(mut self, now: impl Future<Output = ()>) {
        self.stop.cancel();
        tokio::select! {
            biased;
            () = now => {
                self.task.abort();
                // Nothing but its end is known of a task that was cut off.
                let _ = (&mut self.task).await;
                if timeout(KILL_LIMIT, self.workers.recv()).await.is_err() {
                    tracing::error!("killed workers are still there after {KILL_LIMIT:?}");
                }
            }
            ended = &mut self.task => if let Err(error) = ended {
                tracing::error!("the group's task failed: {error}");
            }
        }
    }

    /// What was measured so far.
    pub fn figures(&self) -> Figures {
        Figures::of(&self.metrics)
    }
}

impl Drop for GroupTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a group in the background, on the current tokio runtime. The handle's state says how far it is.
///
/// # Errors
/// Names what is wrong in the configuration. A model that cannot be loaded shows as [`EngineState::Failed`].
pub fn spawn(config: GroupConfig, launcher: Arc<dyn Launcher>) -> Result<(EngineHandle, GroupTask), GroupError> {
    if !matches!(config.tensor_parallel, 1 | 2 | 4 | 8 | 16) {
        return Err(GroupError::TensorParallel(config.tensor_parallel));
    }
    for (name, bound) in [("threads", config.threads), ("max_failed_starts", config.max_failed_starts)] {
        if bound == 0 {
            return Err(GroupError::Zero(name));
        }
    }
    let scheduler = Scheduler::new(config.limits.clone())?;
    let (command_sender, commands) = mpsc::unbounded_channel();
    let (state_sender, state) = watch::channel(EngineState::Loading("starting".into()));
    let (model_sender, model) = watch::channel(None);
    let metrics = Arc::new(EngineMetrics::default());
    let stop = CancellationToken::new();
    let (alive, workers) = mpsc::channel(1);
    let engine = driver::Channels {
        commands,
        commands_back: command_sender.clone(),
        state: state_sender,
        model: model_sender,
        metrics: metrics.clone(),
        stop: stop.clone(),
        alive,
    };
    let task = tokio::spawn(driver::Driver::new(config, launcher, scheduler, engine).run());
    let handle = EngineHandle::new(command_sender, state, model, metrics.clone());
    Ok((handle, GroupTask { stop, task, metrics, workers }))
}
