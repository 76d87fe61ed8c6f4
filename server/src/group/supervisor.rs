//! Owns everything that lives as long as the replica, and runs one group after another until shutdown. `feed` is what
//! it does while a group is up, `replace` how one is ended on request.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::common::Common;
use super::config::GroupConfig;
use super::delivery::Delivery;
use super::fault::{GRACE, StartError};
use super::figures::Figures;
use super::process::Launcher;
use super::restart::{Loss, RestartPolicy, Verdict};
use super::start::{Link, start};
use super::step_times::StepTimes;
use super::workers::{Alive, Workers};
use crate::engine::{Command, EngineState, ModelInfo};
use crate::sched::Blame;
use replace::Replacement;

mod feed;
mod replace;
#[cfg(test)]
mod tests;

/// Messages taken at once before plans are built: enough for a burst to enter one plan, few enough to stay prompt.
const BURST: usize = 256;

/// Whoever stands in front of a replica that is given up has so long to take its sequences.
const HANDED_OVER_WITHIN: Duration = Duration::from_millis(500);

/// The supervisor's ends of everything.
pub(super) struct Channels {
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    pub(super) state: watch::Sender<EngineState>,
    pub(super) model: watch::Sender<Option<Arc<ModelInfo>>>,
    pub(super) stop: CancellationToken,
    /// For the workers to hold.
    pub(super) alive: Alive,
}

/// How a group's life ended.
enum End {
    /// Shutdown: everything has ended, or the time for it is up.
    Stopped,
    /// On request: the next is started at once.
    Replaced,
    /// It may be started again.
    Lost { reason: String, loss: Loss },
    /// It cannot be served.
    Refused(String),
}

/// The task behind an engine handle.
pub(super) struct Supervisor {
    config: Arc<GroupConfig>,
    launcher: Arc<dyn Launcher>,
    delivery: Delivery,
    common: Arc<Common>,
    channels: Channels,
    policy: RestartPolicy,
    times: StepTimes,
    /// What the policy counts time from.
    born: Instant,
    /// Why the last group is gone, in front of what is being done about it.
    lost: Option<String>,
    /// When the last group was lost; none while one takes plans.
    lost_at: Option<Instant>,
    /// Set by the request to shut down: when sequences that still run are given up.
    drain_until: Option<Instant>,
    /// Set by the request for new workers, until they are up.
    replacement: Option<Replacement>,
}

impl Supervisor {
    pub(super) fn new(
        config: GroupConfig,
        launcher: Arc<dyn Launcher>,
        delivery: Delivery,
        common: Arc<Common>,
        channels: Channels,
    ) -> Self {
        Self {
            policy: RestartPolicy::new(&config.timeouts, config.max_failed_starts),
            // A number that was asked for is taken at its word.
            times: StepTimes::new(config.limits.max_batch_tokens == 0, config.itl_target),
            config: Arc::new(config),
            launcher,
            delivery,
            common,
            channels,
            born: Instant::now(),
            lost: None,
            lost_at: None,
            drain_until: None,
            replacement: None,
        }
    }

    /// Runs one group after another until shutdown.
    pub(super) async fn run(mut self) {
        loop {
            let (reason, loss) = match self.group().await {
                End::Stopped => break,
                End::Replaced => continue,
                End::Refused(reason) => {
                    self.give_up(reason).await;
                    break;
                }
                End::Lost { reason, loss } => (reason, loss),
            };
            let pause = match self.policy.lost(loss, self.born.elapsed()) {
                Verdict::Restart { after } => after,
                Verdict::GiveUp { failed_starts } => {
                    self.give_up(format!("the workers failed {failed_starts} times in a row, at last as {reason}"))
                        .await;
                    break;
                }
            };
            let streams = match self.delivery.sequences() {
                0 => "no sequence waits for them".into(),
                1 => "1 sequence goes on where it stopped, or begins".into(),
                count => format!("{count} sequences go on where they stopped, or begin"),
            };
            let when = if pause.is_zero() { "now".into() } else { format!("in {} ms", pause.as_millis()) };
            tracing::warn!("{reason}; the workers are started again {when}, {streams}");
            self.lost = Some(reason);
            self.show_start()("waiting to start the workers again".into());
            if self.wait_unless_stopped(sleep(pause)).await.is_none() {
                break;
            }
        }
        self.delivery.fail_all("the server is shutting down");
        let figures = Figures::of(self.delivery.metrics());
        if figures.steps > 0 {
            tracing::info!("the workers have ended; they computed {figures}");
        }
    }

    /// The life of one group.
    async fn group(&mut self) -> End {
        let (launcher, ranks) = (Arc::clone(&self.launcher), self.config.tensor_parallel);
        let alive = self.channels.alive.clone();
        // Forking and the file system take their time: not on a thread that serves streams.
        let span = tracing::Span::current();
        let launch = spawn_blocking(move || span.in_scope(|| Workers::launch(&*launcher, ranks, &alive)));
        let launched = self.wait(launch).await;
        let launched = launched.unwrap_or_else(|error| Err(StartError::fault(format!("the launch failed: {error}"))));
        let mut workers = match launched {
            Ok(workers) => workers,
            Err(error) => return self.not_started(error),
        };
        let config = Arc::clone(&self.config);
        let progress = self.show_start();
        let timing = if self.times.is_empty() { config.timing } else { Duration::ZERO };
        let started = self.wait_unless_stopped(start(&config, timing, &mut workers, progress)).await;
        let mut link = match started {
            None => {
                self.wait(workers.kill()).await;
                return End::Stopped;
            }
            Some(Err(error)) => {
                self.wait(workers.kill()).await;
                return self.not_started(error);
            }
            Some(Ok(link)) => link,
        };
        if let Err(reason) = self.announce(&link) {
            self.wait(workers.kill()).await;
            return End::Refused(reason);
        }
        let up_since = Instant::now();
        let plans = self.delivery.metrics().plans.get();
        let Err(fault) = self.feed(&mut link, &mut workers).await else {
            if self.replacement.is_some() {
                self.end_replaced(link, workers).await;
                return End::Replaced;
            }
            self.delivery.fail_all("the server is shutting down");
            self.end(link, workers).await;
            return End::Stopped;
        };
        // First of all, so that what the front end says meanwhile meets a scheduler without a group.
        let blame = self.delivery.group_lost();
        self.lost_at.get_or_insert_with(Instant::now);
        self.lost = Some(fault.words.clone());
        self.show_start()("ending the other workers".into());
        let mut reason = fault.words;
        if let Some(rank) = fault.ending
            && let Some(exit) = self.wait(workers.end_beside(rank, GRACE)).await
        {
            reason = exit;
        }
        self.wait(workers.kill()).await;
        let worked = self.delivery.metrics().plans.get() > plans;
        let lived = up_since.elapsed() >= self.config.timeouts.loss_window;
        let loss = match blame {
            Blame::Sequence { sequence, losses, .. } => {
                tracing::warn!("sequence {sequence} was computed alone when the workers were lost, and has failed");
                Loss::Attributed { losses }
            }
            Blame::Nobody if worked || lived => Loss::Running,
            Blame::Nobody | Blame::Group => Loss::FailedStart,
        };
        End::Lost { reason, loss }
    }

    /// What would fail again is refused, unless it has served before: then it may come back.
    fn not_started(&self, error: StartError) -> End {
        match error.is_final && self.channels.model.borrow().is_none() {
            true => End::Refused(error.reason),
            false => End::Lost { reason: error.reason, loss: Loss::FailedStart },
        }
    }

    /// Tells the scheduler and the world of a group that is up. A group that would give other bits is refused.
    fn announce(&mut self, link: &Link) -> Result<(), String> {
        let facts = &link.facts;
        self.common.agree(&facts.model)?;
        self.times.set_max_rows(facts.shape.max_batch_tokens);
        link.timed.iter().for_each(|step| self.times.observe(step));
        self.delivery.group_ready(facts);
        self.delivery.limit_step_rows(self.times.rows());
        self.delivery.set_step_times(self.times.table());
        self.policy.group_ready();
        if let Some(lost_at) = self.lost_at.take() {
            self.delivery.metrics().recovery.observe(lost_at.elapsed());
        }
        // The context may be another: it follows from the pages that the group got.
        self.channels.model.send_if_modified(|model| {
            let changed = model.as_deref() != Some(&facts.model);
            if changed {
                *model = Some(Arc::new(facts.model.clone()));
            }
            changed
        });
        self.replacement = None;
        self.show_up();
        Ok(())
    }

    /// Waits for `future` while there is no group to feed; `None` if shutdown has nothing left to wait for.
    async fn wait_unless_stopped<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        loop {
            if self.drain_until.is_some() && self.delivery.sequences() == 0 {
                return None;
            }
            tokio::select! {
                output = &mut future => return Some(output),
                () = until(self.drain_until) => return None,
                () = self.next_command() => {}
            }
        }
    }

    /// Waits for `future` to its end, such as that of killed workers, while there is no group to feed.
    async fn wait<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                output = &mut future => return output,
                () = self.next_command() => {}
            }
        }
    }

    /// Does what the front end or the operator asks next. Cancel-safe.
    async fn next_command(&mut self) {
        tokio::select! {
            command = self.channels.commands.recv() => self.commands(command),
            () = self.channels.stop.cancelled(), if self.drain_until.is_none() => self.begin_drain(),
        }
    }

    /// Does `first` and what else is there.
    fn commands(&mut self, first: Option<Command>) {
        let more = std::iter::from_fn(|| self.channels.commands.try_recv().ok());
        // What is taken out of the channel is done: nothing more is taken once the burst is full.
        let commands: Vec<_> = first.into_iter().chain(more).take(BURST).collect();
        for command in commands {
            match command {
                Command::Restart(restart) => self.replace(restart),
                command => self.delivery.command(command),
            }
        }
    }

    fn begin_drain(&mut self) {
        self.delivery.close("shutting down".into());
        // What waits may yet be computed.
        self.delivery.group_stays();
        self.replacement = None;
        self.drain_until = Some(Instant::now() + self.config.timeouts.drain);
        let count = self.delivery.sequences();
        if count > 0 {
            tracing::info!("{count} sequences have {} s to end", self.config.timeouts.drain.as_secs());
        }
        self.channels.state.send_replace(EngineState::Draining);
    }

    /// Ends the plans, and with them the workers.
    async fn end(&mut self, mut link: Link, workers: Workers) {
        link.plans.clear();
        // The streams are read to their end, so that no worker waits for the server.
        let rest = async { while link.events.recv().await.is_some() {} };
        let limit = self.config.timeouts.exit;
        let both = async { tokio::join!(timeout(limit, rest), workers.end(limit)) };
        let (_, faults) = self.wait(both).await;
        faults.iter().for_each(|fault| tracing::warn!("{fault}"));
    }

    /// The replica cannot be served: says so to everyone until shutdown.
    async fn give_up(&mut self, reason: String) {
        // Whoever watches the state says so to the user.
        tracing::debug!("given up: {reason}");
        self.replacement = None;
        self.delivery.close(format!("unable to serve the model: {reason}"));
        // First the state: who stands in front takes what can go on elsewhere, and the rest fails.
        self.show(EngineState::Failed(reason.clone()));
        if self.delivery.sequences() > 0 {
            self.wait_unless_stopped(sleep(HANDED_OVER_WITHIN)).await;
        }
        self.delivery.fail_all(&reason);
        self.wait_unless_stopped(std::future::pending::<()>()).await;
    }

    fn show(&self, next: EngineState) {
        self.channels.state.send_if_modified(|state| show(state, next));
    }

    /// Shows what is being done to get a group up.
    fn show_start(&self) -> impl Fn(String) + use<> {
        let state = self.channels.state.clone();
        let loaded = self.channels.model.borrow().is_some();
        let lost = self.lost.clone();
        move |doing| {
            let words = match &lost {
                Some(reason) => format!("{reason}; {doing}"),
                None => doing,
            };
            let next = if loaded { EngineState::Recovering(words) } else { EngineState::Loading(words) };
            state.send_if_modified(|state| show(state, next));
        }
    }
}

/// Shows `next`, unless the replica is shutting down: that is the last thing it says.
fn show(state: &mut EngineState, next: EngineState) -> bool {
    let show = *state != EngineState::Draining && *state != next;
    if show {
        *state = next;
    }
    show
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
