//! One model replica: starts its workers, feeds them with the scheduler's plans, hands their tokens to the sequences,
//! and starts them again when one is lost. The other end of [`EngineHandle`].
//!
//! `supervisor` lives from spawn to shutdown and runs one group after another. It asks `restart` when to start the
//! next, `watchdog` whether ranks hang, and `delivery` for everything between the front end and the scheduler. `start`
//! brings a group from started processes to its first plan, with `timing`, which sees what steps take; `step_times`
//! learns on. `workers`, `process` and `sockets` start and end processes. One task owns all state of a group; the tasks
//! beside it only move messages. `common` is what the replicas of one model share.

mod common;
mod config;
mod delivery;
#[cfg(test)]
pub(crate) mod fake;
mod fault;
mod figures;
mod process;
mod quarantine;
mod restart;
mod sockets;
mod start;
mod step_times;
mod supervisor;
#[cfg(test)]
pub(crate) mod tests;
mod timing;
mod watchdog;
mod workers;

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

use crate::engine::{EngineHandle, EngineState};
use crate::metrics::EngineMetrics;
use crate::sched::Scheduler;
pub use common::Common;
pub use config::{GroupConfig, GroupError, Timeouts};
use delivery::Delivery;
pub use figures::Figures;
pub use process::{Launcher, ProcessLauncher, WorkerExit};
use supervisor::{Channels, Supervisor};
use workers::KILL_LIMIT;

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
    /// Takes no new sequences, lets those at hand end (bounded by `timeouts.drain`), ends the workers, and returns when
    /// the last is gone.
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
    let common = Arc::new(Common::new(config.timeouts.quarantine));
    let mut replicas = spawn_replicas(GroupConfig { replicas: 1, ..config }, &common, |_| launcher.clone())?;
    Ok(replicas.remove(0))
}

/// As [`spawn`], all replicas of the configuration, of which there may be none. What lost one, alone, is not computed by
/// another, and all have to load the same model with the same bits: that is what they have in `common`.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_replicas(
    config: GroupConfig,
    common: &Arc<Common>,
    launcher: impl Fn(u32) -> Arc<dyn Launcher>,
) -> Result<Vec<(EngineHandle, GroupTask)>, GroupError> {
    if !matches!(config.tensor_parallel, 1 | 2 | 4 | 8 | 16) {
        return Err(GroupError::TensorParallel(config.tensor_parallel));
    }
    for (name, bound) in [("threads", config.threads), ("max_failed_starts", config.max_failed_starts)] {
        if bound == 0 {
            return Err(GroupError::Zero(name));
        }
    }
    let spawn = |replica| spawn_one(GroupConfig { replica, ..config.clone() }, launcher(replica), common);
    (0..config.replicas).map(spawn).collect()
}

fn spawn_one(
    config: GroupConfig,
    launcher: Arc<dyn Launcher>,
    common: &Arc<Common>,
) -> Result<(EngineHandle, GroupTask), GroupError> {
    let scheduler = Scheduler::new(config.limits.clone())?;
    let (command_sender, commands) = mpsc::unbounded_channel();
    let (state_sender, state) = watch::channel(EngineState::Loading("starting".into()));
    let (model_sender, model) = watch::channel(None);
    let metrics = Arc::new(EngineMetrics::default());
    let stop = CancellationToken::new();
    let (alive, workers) = mpsc::channel(1);
    let channels = Channels { commands, state: state_sender, model: model_sender, stop: stop.clone(), alive };
    let delivery = Delivery::new(scheduler, command_sender.clone(), metrics.clone(), common.clone());
    // What is logged of one of several says of which.
    let span = match config.replicas {
        1 => Span::none(),
        _ => tracing::error_span!("replica", number = config.replica),
    };
    let supervisor = Supervisor::new(config, launcher, delivery, common.clone(), channels);
    let task = tokio::spawn(supervisor.run().instrument(span));
    let handle = EngineHandle::new(command_sender, state, model, metrics.clone());
    Ok((handle, GroupTask { stop, task, metrics, workers }))
}
