//! Owns the scheduler and everything that lives as long as the replica: commands in, tokens out, and one group after
//! another until shutdown.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::launch::{Alive, Launcher, Workers};
use super::life::Life;
use super::start::{GRACE, Link, StartError, Traffic, start};
use super::vitals::{Heard, answer, probe, silent_rank};
use super::{Figures, GroupConfig};
use crate::engine::{Command, EngineState, ModelInfo, SequenceEvent};
use crate::metrics::EngineMetrics;
use crate::sched::{Action, Event, Scheduler};

#[cfg(test)]
mod tests;

/// Messages taken at once before plans are built: enough for a burst to enter one plan, few enough to stay prompt.
pub(super) const BURST: usize = 256;

/// The driver's ends of everything.
pub(super) struct Channels {
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    /// For the streams handed out, which cancel through it.
    pub(super) commands_back: mpsc::UnboundedSender<Command>,
    pub(super) state: watch::Sender<EngineState>,
    pub(super) model: watch::Sender<Option<Arc<ModelInfo>>>,
    pub(super) metrics: Arc<EngineMetrics>,
    pub(super) stop: CancellationToken,
    /// For the workers to hold.
    pub(super) alive: Alive,
}

/// How a group's life ended.
enum End {
    /// Shutdown: everything has ended, or the time for it is up.
    Stopped,
    /// It may be started again.
    Lost { reason: String, lived_well: bool },
    /// It cannot be served.
    Refused(String),
}

/// Why a group was lost.
pub(super) struct Fault {
    words: String,
    /// The rank whose stream broke, perhaps because it ends: its exit says more.
    ending: Option<u32>,
}

impl Fault {
    fn new(words: String) -> Self {
        Self { words, ending: None }
    }

    /// `words` follow "rank 3 ".
    pub(super) fn broken_stream(rank: usize, words: &str) -> Self {
        Self { words: format!("rank {rank} {words}"), ending: Some(rank as u32) }
    }
}

impl From<String> for Fault {
    fn from(words: String) -> Self {
        Self::new(words)
    }
}

/// The driver's end of a sequence.
pub(super) struct OwnedStream {
    /// Room for every token and the end, so that sending never waits.
    pub(super) events: mpsc::Sender<SequenceEvent>,
    pub(super) life: Life,
}

/// The task behind an engine handle.
pub(super) struct Driver {
    config: Arc<GroupConfig>,
    launcher: Arc<dyn Launcher>,
    pub(super) scheduler: Scheduler,
    pub(super) channels: Channels,
    pub(super) streams: HashMap<u64, OwnedStream>,
    pub(super) last_sequence: u64,
    /// Why nothing is taken any more.
    pub(super) closed: Option<String>,
    /// Why the last group was lost, in front of what is being done about it.
    lost: Option<String>,
    /// When the last group was lost; none while one takes plans.
    lost_at: Option<Instant>,
    /// Of the group at hand.
    pub(super) traffic: Traffic,
    /// Set by the request to shut down: when sequences that still run are given up.
    drain_until: Option<Instant>,
    pub(super) actions: Vec<Action>,
}

impl Driver {
    pub(super) fn new(
        config: GroupConfig,
        launcher: Arc<dyn Launcher>,
        scheduler: Scheduler,
        channels: Channels,
    ) -> Self {
        Self {
            config: Arc::new(config),
            launcher,
            scheduler,
            channels,
            streams: HashMap::new(),
            last_sequence: 0,
            closed: None,
            lost: None,
            lost_at: None,
            traffic: Traffic::default(),
            drain_until: None,
            actions: Vec::new(),
        }
    }

    /// Runs one group after another until shutdown.
    pub(super) async fn run(mut self) {
        let mut failures = 0;
        loop {
            let (reason, lived_well) = match self.group().await {
                End::Stopped => break,
                End::Refused(reason) => {
                    self.give_up(reason).await;
                    break;
                }
                End::Lost { reason, lived_well } => (reason, lived_well),
            };
            failures = if lived_well { 0 } else { failures + 1 };
            if failures >= self.config.max_failed_starts {
                self.give_up(format!("the workers failed {failures} times in a row, at last as {reason}")).await;
                break;
            }
            let waits = &self.config.waits;
            let pause = match failures {
                // After a good life the first start is tried at once.
                0 => Duration::ZERO,
                n => waits.backoff.saturating_mul(1 << (n - 1).min(16)).min(waits.backoff_limit),
            };
            let streams = match self.scheduler.sequences() {
                0 => "no request was running".into(),
                1 => "1 request goes on where it stopped".into(),
                count => format!("{count} requests go on where they stopped"),
            };
            let when = if pause.is_zero() { "now".into() } else { format!("in {} ms", pause.as_millis()) };
            tracing::warn!("{reason}; the workers are started again {when}, {streams}");
            self.lost = Some(reason);
            self.waiting_state()("waiting to start the workers again".into());
            if self.attend(sleep(pause)).await.is_none() {
                break;
            }
        }
        self.fail_all("the server is shutting down");
        let figures = Figures::of(&self.channels.metrics);
        if figures.steps > 0 {
            tracing::info!("the workers have ended; they computed {figures}");
        }
    }

    /// The life of one group.
    async fn group(&mut self) -> End {
        let (launcher, ranks) = (Arc::clone(&self.launcher), self.config.tensor_parallel);
        let alive = self.channels.alive.clone();
        // Forking and the file system take their time: not on a thread that serves streams.
        let launch = spawn_blocking(move || Workers::launch(&*launcher, ranks, &alive));
        let launched = self.see_to(launch).await;
        let launched = launched.unwrap_or_else(|error| Err(StartError::fault(format!("the launch failed: {error}"))));
        let mut workers = match launched {
            Ok(workers) => workers,
            Err(error) => return self.not_started(error),
        };
        let config = Arc::clone(&self.config);
        let progress = self.waiting_state();
        let started = self.attend(start(&config, &mut workers, progress)).await;
        let mut link = match started {
            None => {
                self.see_to(workers.kill()).await;
                return End::Stopped;
            }
            Some(Err(error)) => {
                self.see_to(workers.kill()).await;
                return self.not_started(error);
            }
            Some(Ok(link)) => link,
        };
        if let Err(reason) = self.announce(&link) {
            self.see_to(workers.kill()).await;
            return End::Refused(reason);
        }
        let born = Instant::now();
        let steps = self.channels.metrics.steps();
        let Err(fault) = self.serve(&mut link, &mut workers).await else {
            self.drain(link, workers).await;
            return End::Stopped;
        };
        // First of all, so that what the front end says meanwhile meets a scheduler without a group.
        self.apply(Event::GroupLost).expect("the loss of a group is no fault of it");
        self.channels.metrics.losses.inc();
        self.lost_at.get_or_insert_with(Instant::now);
        self.lost = Some(fault.words.clone());
        self.waiting_state()("ending the other workers".into());
        let mut reason = fault.words;
        if let Some(rank) = fault.ending
            && let Some(exit) = self.see_to(workers.end_beside(rank, GRACE)).await
        {
            reason = exit;
        }
        self.see_to(workers.kill()).await;
        let ran = self.channels.metrics.steps() > steps;
        End::Lost { reason, lived_well: ran || born.elapsed() >= self.config.waits.backoff_limit }
    }

    /// What would fail again is refused, unless it has served before: then it may come back.
    fn not_started(&self, error: StartError) -> End {
        match error.is_final && self.channels.model.borrow().is_none() {
            true => End::Refused(error.reason),
            false => End::Lost { reason: error.reason, lived_well: false },
        }
    }

    /// Tells the scheduler and the world of a group that is up. A group that would give other bits is refused.
    fn announce(&mut self, link: &Link) -> Result<(), String> {
        let facts = &link.facts;
        if let Some(known) = &*self.channels.model.borrow() {
            another_model(known, &facts.model)?;
        }
        let (kv_pages, page_positions) = (facts.kv_pages, facts.page_positions);
        self.apply(Event::GroupReady { kv_pages, page_positions })?;
        self.traffic = facts.traffic;
        let metrics = &self.channels.metrics;
        metrics.kv_bytes.set(facts.traffic.kv_bytes);
        metrics.stream_bytes.set(facts.traffic.stream_bytes);
        if let Some(lost_at) = self.lost_at.take() {
            metrics.recovery.observe(lost_at.elapsed());
        }
        self.channels.model.send_if_modified(|model| {
            let first = model.is_none();
            model.get_or_insert_with(|| Arc::new(facts.model.clone()));
            first
        });
        self.channels.state.send_if_modified(|state| show_progress(state, EngineState::Ready));
        Ok(())
    }

    /// Feeds the group until shutdown (`Ok`) or until it is lost.
    async fn serve(&mut self, link: &mut Link, workers: &mut Workers) -> Result<(), Fault> {
        let mut ranks = vec![Heard { when: Instant::now(), step: (0, 0) }; link.plans.len()];
        let mut owed_since = None;
        let mut probing = None;
        loop {
            self.send_plans(link)?;
            if self.drain_until.is_some() && self.scheduler.is_idle() {
                return Ok(());
            }
            let owed = self.scheduler.is_outstanding();
            owed_since = owed.then(|| owed_since.unwrap_or_else(Instant::now));
            // Reports show that a busy rank is there; an idle one is asked.
            let waits = &self.config.waits;
            let ask = || Box::pin(probe(link.health.clone(), waits.probe, waits.answer));
            probing = (!owed).then(|| probing.take().unwrap_or_else(ask));
            // The rank that waits for a hung one says which it is: it is given the time to.
            let silent_at = silent_rank(&ranks, owed_since, self.config.waits.step + GRACE);
            tokio::select! {
                event = link.events.recv() => {
                    let here = std::iter::from_fn(|| link.events.try_recv().ok());
                    for event in event.into_iter().chain(here).take(BURST) {
                        self.rank_event(event, &mut ranks)?;
                    }
                }
                command = self.channels.commands.recv() => self.commands(command)?,
                exit = workers.next_exit() => return Err(Fault::new(exit)),
                answered = answer(&mut probing) => {
                    answered.map_err(|(rank, words)| Fault::broken_stream(rank, &words))?;
                    probing = None;
                }
                () = self.channels.stop.cancelled(), if self.drain_until.is_none() => self.begin_drain(),
                () = until(self.drain_until) => return Ok(()),
                () = until(silent_at.map(|(at, _)| at)) => {
                    // The server itself may have stood still, and the reports be here.
                    if let Ok(event) = link.events.try_recv() {
                        self.rank_event(event, &mut ranks)?;
                        continue;
                    }
                    let rank = silent_at.map_or(0, |(_, rank)| rank);
                    let limit = self.config.waits.step;
                    let (version, step) = ranks[rank].step;
                    return Err(Fault::new(format!(
                        "rank {rank} has been silent for longer than a step may take, {limit:?}, after step {step} of \
                         plan {version} (if its machine is only slow: raise --step-limit-seconds)"
                    )));
                }
            }
        }
    }

    /// Waits for `future` while there is no group to feed; `None` if shutdown has nothing left to wait for.
    async fn attend<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        loop {
            if self.drain_until.is_some() && self.scheduler.sequences() == 0 {
                return None;
            }
            tokio::select! {
                output = &mut future => return Some(output),
                () = until(self.drain_until) => return None,
                () = self.hear() => {}
            }
        }
    }

    /// Waits for `future` to its end, such as that of killed workers, while there is no group to feed.
    async fn see_to<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                output = &mut future => return output,
                () = self.hear() => {}
            }
        }
    }

    /// Takes what the front end or the operator says next. Cancel-safe.
    async fn hear(&mut self) {
        tokio::select! {
            command = self.channels.commands.recv() => {
                self.commands(command).expect("without a group, no command makes a fault");
            }
            () = self.channels.stop.cancelled(), if self.drain_until.is_none() => self.begin_drain(),
        }
    }

    fn begin_drain(&mut self) {
        self.closed = Some("shutting down".into());
        self.drain_until = Some(Instant::now() + self.config.waits.drain);
        let count = self.scheduler.sequences();
        if count > 0 {
            tracing::info!("{count} sequences have {} s to end", self.config.waits.drain.as_secs());
        }
        self.channels.state.send_replace(EngineState::Draining);
    }

    /// Ends the plans, and with them the workers.
    async fn drain(&mut self, mut link: Link, workers: Workers) {
        self.fail_all("the server is shutting down");
        link.plans.clear();
        // The streams are read to their end, so that no worker waits for the driver.
        let rest = async { while link.events.recv().await.is_some() {} };
        let limit = self.config.waits.exit;
        let both = async { tokio::join!(timeout(limit, rest), workers.end(limit)) };
        let (_, faults) = self.see_to(both).await;
        faults.iter().for_each(|fault| tracing::warn!("{fault}"));
    }

    /// The replica cannot be served: says so to everyone until shutdown.
    async fn give_up(&mut self, reason: String) {
        // Whoever watches the state says so to the user.
        tracing::debug!("given up: {reason}");
        self.fail_all(&reason);
        self.closed = Some(format!("unable to serve the model: {reason}"));
        self.channels.state.send_if_modified(|state| show_progress(state, EngineState::Failed(reason)));
        self.attend(std::future::pending::<()>()).await;
    }

    /// Shows what is being done to get a group up.
    fn waiting_state(&self) -> impl Fn(String) + use<> {
        let state = self.channels.state.clone();
        let loaded = self.channels.model.borrow().is_some();
        let lost = self.lost.clone();
        move |doing| {
            let words = match &lost {
                Some(reason) => format!("{reason}; {doing}"),
                None => doing,
            };
            let next = if loaded { EngineState::Recovering(words) } else { EngineState::Loading(words) };
            state.send_if_modified(|state| show_progress(state, next));
        }
    }
}

/// Refuses a group that would continue streams with other bits than they began with.
fn another_model(known: &ModelInfo, now: &ModelInfo) -> Result<(), String> {
    if known == now {
        return Ok(());
    }
    if known.model_digest != now.model_digest {
        return Err("the files of the model have changed since it was loaded, and running requests cannot go on with \
                    another one: start the server again to serve it"
            .into());
    }
    Err(format!("the workers came back as another model: {now:?} instead of {known:?}"))
}

/// Shows `next`, unless the replica is shutting down: that is the last thing it says.
fn show_progress(state: &mut EngineState, next: EngineState) -> bool {
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
