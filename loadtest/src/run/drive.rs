//! Sends requests when they are due, or as slots become free, and hands out a record of each.
//!
//! In an open loop the schedule is never bent to the server: a request that cannot leave because `max_in_flight` others
//! are unanswered keeps its intended time, and its wait counts into its latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::client::record::{Clock, Failure, RequestRecord};
use crate::load::conduct::Conducts;
use crate::load::pacing::{Extent, Pacing, Schedule};
use crate::run::lag::LagMeter;
use crate::run::meter::Meter;
use crate::run::workload::{Turn, Workload};
use crate::stats::distribution::Distribution;

/// Records that wait to be counted; a full channel holds back those who send, never memory.
const RECORDS_WAITING: usize = 1024;
/// Pause of a closed loop's slot after a connection was refused. Refusals cost nothing: without a pause a dead server
/// would be counted as failing tens of thousands of times a second.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(50);

pub struct Load {
    pub pacing: Pacing,
    pub extent: Extent,
    /// Index of the first request, so that two runs need not send the same prompts.
    pub first_index: u64,
    pub conducts: Conducts,
}

/// A run under way.
pub struct Running {
    /// The record of each request as it ends; closed when the last one has ended.
    pub records: mpsc::Receiver<RequestRecord>,
    /// The run's clock, which the records' times are of.
    pub clock: Clock,
    pub meter: Arc<Meter>,
    lag: LagMeter,
}

#[derive(Clone)]
struct Shared {
    workload: Arc<Workload>,
    conducts: Conducts,
    clock: Clock,
    stop: CancellationToken,
    records: mpsc::Sender<RequestRecord>,
    meter: Arc<Meter>,
}

/// Starts `load` on the current runtime. When `stop` is cancelled nothing more is sent and requests in flight end as
/// [`Failure::Interrupted`].
pub fn start(workload: Arc<Workload>, load: Load, stop: CancellationToken) -> Running {
    let (sender, records) = mpsc::channel(RECORDS_WAITING);
    let clock = Clock::start();
    let (meter, conducts) = (Arc::<Meter>::default(), load.conducts);
    let shared = Shared { workload, conducts, clock, stop, records: sender, meter: meter.clone() };
    match load.pacing {
        Pacing::Closed { concurrency } => {
            let next_index = Arc::new(AtomicU64::new(0));
            for _ in 0..concurrency {
                tokio::spawn(closed_slot(shared.clone(), load.extent, load.first_index, next_index.clone()));
            }
        }
        Pacing::Open { arrivals, max_in_flight } => {
            tokio::spawn(open_loop(shared, arrivals, max_in_flight, load.extent, load.first_index));
        }
    }
    Running { records, clock, meter, lag: LagMeter::start() }
}

impl Running {
    /// How late the load tester's own timers were so far.
    pub fn lags(&self) -> Distribution {
        self.lag.lags()
    }
}

async fn closed_slot(shared: Shared, extent: Extent, first_index: u64, next_index: Arc<AtomicU64>) {
    let mut chat = Vec::new();
    while !shared.stop.is_cancelled() {
        let intended_ns = shared.clock.now_ns();
        let offset = next_index.fetch_add(1, Ordering::Relaxed);
        if !extent.includes(offset, Duration::from_nanos(intended_ns)) {
            return;
        }
        let record = shared.perform(first_index + offset, intended_ns, &mut chat).await;
        let refused = matches!(record.failure, Some(Failure::Connect(_)));
        if shared.records.send(record).await.is_err() {
            return;
        }
        if refused {
            tokio::select! {
                () = shared.stop.cancelled() => return,
                () = tokio::time::sleep(PAUSE_AFTER_REFUSAL) => {}
            }
        }
    }
}

async fn open_loop(shared: Shared, arrivals: Schedule, max_in_flight: usize, extent: Extent, first_index: u64) {
    let slots = Arc::new(Semaphore::new(max_in_flight));
    for (offset, due) in (0..).zip(arrivals) {
        if !extent.includes(offset, due) {
            return;
        }
        let slot = tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            slot = shared.slot_when_due(due, &slots) => slot,
        };
        let intended_ns = due.as_nanos() as u64;
        let index = first_index + offset;
        let Some(slot) = slot else {
            let mut record = RequestRecord::new(index, intended_ns, shared.clock.now_ns());
            record.failure = Some(Failure::NotSent);
            shared.meter.fail();
            if shared.records.send(record).await.is_err() {
                return;
            }
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let record = shared.perform(index, intended_ns, &mut Vec::new()).await;
            drop(slot);
            // A closed channel means that nobody counts any more.
            let _ = shared.records.send(record).await;
        });
    }
}

impl Shared {
    /// Waits until `due` and then for a free slot; none if there was no slot within the time limit of a request.
    async fn slot_when_due(&self, due: Duration, slots: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        self.clock.sleep_until(due).await;
        let give_up = self.clock.sleep_until(due + self.workload.timeout);
        tokio::select! {
            biased;
            slot = slots.clone().acquire_owned() => slot.ok(),
            () = give_up => None,
        }
    }

    /// Sends request `index` now, as the next turn of `chat`, and follows it to its end. A chat that has all its turns,
    /// or that a request failed in, is left empty.
    async fn perform(&self, index: u64, intended_ns: u64, chat: &mut Vec<Turn>) -> RequestRecord {
        let workload = &self.workload;
        let shape = workload.shapes.of(index);
        let prompt = workload.prompts.text(index, shape.prompt_tokens);
        let conduct = self.conducts.of(index);
        let request = workload.request(chat, &prompt, shape.max_tokens).misused(conduct);
        let mut record = RequestRecord::new(index, intended_ns, self.clock.now_ns());
        record.conduct = conduct;
        record.turn = chat.len() as u32;
        let goes_on = record.turn + 1 < workload.turns;
        record.text = (goes_on || self.conducts.keeps_texts).then(String::new);
        record.watch = Some(self.meter.clone());
        self.meter.begin();
        let broken_off = tokio::select! {
            biased;
            () = request.send(self.clock, &mut record) => None,
            () = self.stop.cancelled() => Some(Failure::Interrupted),
            () = conduct.hangs_up() => Some(Failure::Cancelled),
        };
        if broken_off.is_some() {
            record.ended_ns = self.clock.now_ns();
            record.failure = broken_off;
        }
        self.meter.end(&record);
        let answer = if self.conducts.keeps_texts { record.text.clone() } else { record.text.take() };
        match answer {
            Some(assistant) if goes_on && record.failure.is_none() => chat.push(Turn { user: prompt, assistant }),
            _ => chat.clear(),
        }
        record
    }
}

#[cfg(test)]
mod tests;
