//! Sends requests when they are due, or as slots become free, and hands out a record of each.
//!
//! In an open loop the schedule is never bent to the server: a request that cannot leave because `max_in_flight` others
//! are unanswered keeps its intended time, and its wait counts into its latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::client::Client;
use crate::distribution::Distribution;
use crate::lag::LagMeter;
use crate::lengths::Shapes;
use crate::prompt::Prompts;
use crate::record::{Clock, Failure, RequestRecord};

/// Records that wait to be counted; a full channel holds back those who send, never memory.
const RECORDS_WAITING: usize = 1024;
/// Pause of a closed loop's slot after a connection was refused. Refusals cost nothing: without a pause a dead server
/// would be counted as failing tens of thousands of times a second.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(50);

/// Which of OpenAI's two interfaces is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

/// What each request asks, and of whom.
#[derive(Debug)]
pub struct Workload {
    /// Connection to the server.
    pub client: Client,
    /// Interface asked.
    pub endpoint: Endpoint,
    /// Model id.
    pub model: String,
    /// Prompt of each request.
    pub prompts: Prompts,
    /// Lengths of each request.
    pub shapes: Shapes,
    /// Least tokens to generate, for requests that may be so long (an extension of OpenAI's interface).
    pub min_tokens: Option<u32>,
    /// Go on past the end-of-sequence token (an extension of OpenAI's interface).
    pub ignore_eos: bool,
    /// Time limit of one request, which also limits how long a due request waits to be sent.
    pub timeout: Duration,
}

/// When requests are due, counted from the start of the run, never decreasing. The run ends with it.
pub type Schedule = Box<dyn Iterator<Item = Duration> + Send>;

/// How requests are paced.
pub enum Pacing {
    /// So many at a time, each slot sending its next request when the last one ended.
    Closed {
        /// Requests in flight.
        concurrency: usize,
    },
    /// As the schedule says.
    Open {
        /// Due times.
        arrivals: Schedule,
        /// Most requests in flight: what bounds the sockets and memory of the load tester.
        max_in_flight: usize,
    },
}

/// When to stop sending.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Extent {
    /// After so many requests.
    Requests(u64),
    /// With the last request due before this time; those in flight are waited for.
    Duration(Duration),
}

/// One run of requests.
pub struct Load {
    /// Pace.
    pub pacing: Pacing,
    /// Length.
    pub extent: Extent,
    /// Index of the first request, so that two runs need not send the same prompts.
    pub first_index: u64,
}

/// A run under way.
pub struct Running {
    /// The record of each request as it ends; closed when the last one has ended.
    pub records: mpsc::Receiver<RequestRecord>,
    /// The run's clock, which the records' times are of.
    pub clock: Clock,
    in_flight: Arc<InFlight>,
    lag: LagMeter,
}

#[derive(Debug, Default)]
struct InFlight {
    now: AtomicUsize,
    peak: AtomicUsize,
}

/// What every task of a run shares.
#[derive(Clone)]
struct Shared {
    workload: Arc<Workload>,
    clock: Clock,
    stop: CancellationToken,
    records: mpsc::Sender<RequestRecord>,
    in_flight: Arc<InFlight>,
}

/// Starts `load` on the current runtime. When `stop` is cancelled nothing more is sent and requests in flight end as
/// [`Failure::Interrupted`].
pub fn start(workload: Arc<Workload>, load: Load, stop: CancellationToken) -> Running {
    let (sender, records) = mpsc::channel(RECORDS_WAITING);
    let clock = Clock::start();
    let in_flight = Arc::<InFlight>::default();
    let shared = Shared { workload, clock, stop, records: sender, in_flight: in_flight.clone() };
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
    Running { records, clock, in_flight, lag: LagMeter::start() }
}

impl Running {
    /// Most requests that were in flight at once so far.
    pub fn peak_in_flight(&self) -> usize {
        self.in_flight.peak.load(Ordering::Relaxed)
    }

    /// Requests in flight now.
    pub fn in_flight(&self) -> usize {
        self.in_flight.now.load(Ordering::Relaxed)
    }

    /// How late the load tester's own timers were so far.
    pub fn lags(&self) -> Distribution {
        self.lag.lags()
    }
}

impl Workload {
    /// Path of the interface.
    pub fn path(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
        }
    }

    /// JSON body that asks for `max_tokens` tokens after `prompt`. Greedy, so that runs can be compared.
    pub fn body(&self, prompt: &str, max_tokens: u32) -> Bytes {
        let mut body = json!({
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        match self.endpoint {
            Endpoint::Chat => body["messages"] = json!([{ "role": "user", "content": prompt }]),
            Endpoint::Completions => body["prompt"] = json!(prompt),
        }
        if let Some(min_tokens) = self.min_tokens {
            body["min_tokens"] = json!(min_tokens.min(max_tokens));
        }
        if self.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        body.to_string().into()
    }
}

async fn closed_slot(shared: Shared, extent: Extent, first_index: u64, next_index: Arc<AtomicU64>) {
    while !shared.stop.is_cancelled() {
        let intended_ns = shared.clock.now_ns();
        let offset = next_index.fetch_add(1, Ordering::Relaxed);
        if !extent.includes(offset, Duration::from_nanos(intended_ns)) {
            return;
        }
        let record = shared.perform(first_index + offset, intended_ns).await;
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
            if shared.records.send(record).await.is_err() {
                return;
            }
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let record = shared.perform(index, intended_ns).await;
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

    /// Sends request `index` now and follows it to its end.
    async fn perform(&self, index: u64, intended_ns: u64) -> RequestRecord {
        let workload = &self.workload;
        let shape = workload.shapes.of(index);
        let body = workload.body(&workload.prompts.text(index, shape.prompt_tokens), shape.max_tokens);
        let mut record = RequestRecord::new(index, intended_ns, self.clock.now_ns());
        let now = self.in_flight.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.in_flight.peak.fetch_max(now, Ordering::Relaxed);
        let interrupted = tokio::select! {
            biased;
            () = workload.client.stream(workload.path(), body, self.clock, &mut record) => false,
            () = self.stop.cancelled() => true,
        };
        self.in_flight.now.fetch_sub(1, Ordering::Relaxed);
        if interrupted {
            record.ended_ns = self.clock.now_ns();
            record.failure = Some(Failure::Interrupted);
        }
        record
    }
}

impl Extent {
    /// Whether the request number `offset` (from 0) that is due at `due` belongs to the run.
    fn includes(self, offset: u64, due: Duration) -> bool {
        match self {
            Extent::Requests(requests) => offset < requests,
            Extent::Duration(duration) => due < duration,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::{ArrivalProcess, Arrivals, Rate};
    use crate::lengths::Lengths;
    use crate::mock::{Fault, Mock};

    fn workload(base: &str, timeout: Duration) -> Arc<Workload> {
        Arc::new(Workload {
            client: Client::new(base, None, timeout).expect("the mock's address is valid"),
            endpoint: Endpoint::Completions,
            model: "mock".into(),
            prompts: Prompts::of_words(0),
            shapes: Shapes::Drawn { prompt: Lengths::Constant(4), output: Lengths::Constant(2), seed: 0 },
            min_tokens: None,
            ignore_eos: true,
            timeout,
        })
    }

    fn open(rate_per_s: f64, max_in_flight: usize, extent: Extent) -> Load {
        let arrivals =
            Box::new(Arrivals::new(ArrivalProcess::Constant, Rate::constant(rate_per_s), 0).expect("in range"));
        Load { pacing: Pacing::Open { arrivals, max_in_flight }, extent, first_index: 0 }
    }

    async fn collect(mut running: Running) -> Vec<RequestRecord> {
        let mut records = Vec::new();
        while let Some(record) = running.records.recv().await {
            records.push(record);
        }
        records
    }

    #[tokio::test]
    async fn a_closed_loop_sends_all_and_keeps_to_its_concurrency() {
        let mock = Mock { ttft: Duration::from_millis(20), ..Mock::default() }.serve().await;
        let load = Load { pacing: Pacing::Closed { concurrency: 3 }, extent: Extent::Requests(10), first_index: 100 };
        let mut running = start(workload(&mock.base, Duration::from_secs(20)), load, CancellationToken::new());
        let mut indices = Vec::new();
        while let Some(record) = running.records.recv().await {
            assert_eq!(record.failure, None);
            indices.push(record.index);
        }
        indices.sort_unstable();
        assert_eq!(indices, (100..110).collect::<Vec<_>>());
        assert_eq!(running.peak_in_flight(), 3);
        let requests = mock.requests();
        assert_eq!(requests.len(), 10);
        assert!(requests.iter().all(|r| r["ignore_eos"] == true && r["stream_options"]["include_usage"] == true));
        assert!(requests.iter().all(|r| r["model"] == "mock" && r["prompt"].is_string() && r["max_tokens"] == 2));
    }

    #[tokio::test]
    async fn an_open_loop_sends_at_its_due_times() {
        let mock = Mock { ttft: Duration::from_millis(300), ..Mock::default() }.serve().await;
        let load = open(50.0, 64, Extent::Duration(Duration::from_secs(1)));
        let records =
            collect(start(workload(&mock.base, Duration::from_secs(20)), load, CancellationToken::new())).await;
        assert_eq!(records.len(), 50, "50 a second for a second, though each answer takes 0.3 s");
        for record in &records {
            assert_eq!(record.failure, None);
            assert_eq!(record.intended_ns, record.index * 20_000_000);
            assert!(record.sent_ns >= record.intended_ns);
        }
    }

    /// The test of coordinated omission: the server stands still from 0.5 s to 2.5 s, and only four requests may be in
    /// flight. Every request that was due in that time must show the wait until the end of the stall.
    #[tokio::test]
    async fn a_stall_shows_in_every_request_that_was_due_in_it() {
        let (from, to) = (Duration::from_millis(500), Duration::from_millis(2500));
        let mock = Mock { fault: Fault::Stall(from, to), ..Mock::default() }.serve().await;
        let load = open(50.0, 4, Extent::Duration(Duration::from_secs(3)));
        let records =
            collect(start(workload(&mock.base, Duration::from_secs(20)), load, CancellationToken::new())).await;
        assert_eq!(records.len(), 150);

        // The mock's clock starts with the first request that it sees, a little after the run's: the stall begins and
        // ends that much later. Requests due in its first 400 ms are left out, the timer's millisecond is allowed for.
        let tolerance_ns = 5_000_000;
        let (from_ns, to_ns) = (from.as_nanos() as u64 + 400_000_000, to.as_nanos() as u64);
        let due_in_stall = records.iter().filter(|r| (from_ns..to_ns).contains(&r.intended_ns));
        let mut seen = 0;
        for record in due_in_stall {
            seen += 1;
            let latency_ns = record.ended_ns - record.intended_ns;
            assert!(latency_ns + tolerance_ns >= to_ns - record.intended_ns, "{record:?}");
        }
        assert_eq!(seen, 80);

        // Control: the service time hides the stall from all but those few that were in flight when it began.
        let long_service = records.iter().filter(|r| r.ended_ns - r.sent_ns > 500_000_000).count();
        assert!((1..=8).contains(&long_service), "{long_service} requests show the stall in their service time");
    }

    #[tokio::test]
    async fn due_requests_that_find_no_slot_are_counted_as_not_sent() {
        let mock = Mock { ttft: Duration::from_secs(60), ..Mock::default() }.serve().await;
        let load = open(20.0, 1, Extent::Requests(10));
        let records =
            collect(start(workload(&mock.base, Duration::from_millis(300)), load, CancellationToken::new())).await;
        assert_eq!(records.len(), 10, "every request is accounted for");
        let count = |failure: Failure| records.iter().filter(|r| r.failure == Some(failure.clone())).count();
        assert!(count(Failure::NotSent) > 0 && count(Failure::Timeout) > 0);
        assert_eq!(count(Failure::NotSent) + count(Failure::Timeout), 10);
    }

    #[tokio::test]
    async fn a_stop_ends_both_loops_at_once_and_accounts_for_what_was_in_flight() {
        let mock = Mock { ttft: Duration::from_secs(60), ..Mock::default() }.serve().await;
        let closed = Load { pacing: Pacing::Closed { concurrency: 5 }, extent: Extent::Requests(1000), first_index: 0 };
        for load in [closed, open(20.0, 64, Extent::Duration(Duration::from_secs(60)))] {
            let stop = CancellationToken::new();
            let running = start(workload(&mock.base, Duration::from_secs(60)), load, stop.clone());
            tokio::time::sleep(Duration::from_millis(200)).await;
            stop.cancel();
            let records = tokio::time::timeout(Duration::from_secs(10), collect(running)).await.expect("stops at once");
            assert!((1..=5).contains(&records.len()), "{} records", records.len());
            assert!(records.iter().all(|r| r.failure == Some(Failure::Interrupted)));
        }
    }

    #[tokio::test]
    async fn a_dead_server_is_not_hammered() {
        let load = Load {
            pacing: Pacing::Closed { concurrency: 2 },
            extent: Extent::Duration(Duration::from_millis(500)),
            first_index: 0,
        };
        let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", unused.local_addr().expect("bound"));
        drop(unused);
        let records = collect(start(workload(&base, Duration::from_secs(5)), load, CancellationToken::new())).await;
        assert!((2..=24).contains(&records.len()), "{} refusals in half a second", records.len());
        assert!(records.iter().all(|r| matches!(r.failure, Some(Failure::Connect(_)))));
    }
}
