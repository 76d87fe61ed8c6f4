//! One model replica: starts its workers, feeds them with the scheduler's plans, hands their tokens to the sequences,
//! and starts them again when one is lost. The other end of [`EngineHandle`].
//!
//! `supervisor` lives from spawn to shutdown and runs one group after another. It asks `restart` when to start the
//! next, `watchdog` whether ranks hang, and `delivery` for everything between the front end and the scheduler. `start`
//! brings a group from started processes to its first plan, with `timing`, which sees what steps take; `step_times`
//! learns on. `workers`, `process` and `sockets` start and end processes. One task owns all state; the tasks beside it
//! only move messages.

mod config;
mod delivery;
#[cfg(test)]
mod fake;
mod fault;
mod figures;
mod life;
mod process;
mod quarantine;
mod restart;
#[cfg(test)]
mod simulation;
mod sockets;
mod start;
mod step_times;
mod supervisor;
#[cfg(test)]
mod tests;
mod timing;
mod watchdog;
mod workers;

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::engine::{EngineHandle, EngineState};
use crate::metrics::EngineMetrics;
use crate::sched::Scheduler;
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
    let channels = Channels { commands, state: state_sender, model: model_sender, stop: stop.clone(), alive };
    let delivery = Delivery::new(scheduler, command_sender.clone(), metrics.clone(), config.timeouts.quarantine);
    let task = tokio::spawn(Supervisor::new(config, launcher, delivery, channels).run());
    let handle = EngineHandle::new(command_sender, state, model, metrics.clone());
    Ok((handle, GroupTask { stop, task, metrics, workers }))
}
