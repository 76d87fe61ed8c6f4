//! Sends requests when they are due, or as slots become free, and hands out a record of each.
//!
//! In an open loop the schedule is never bent to the server: a request that cannot leave because `max_in_flight` others
//! are unanswered keeps its intended time, and its wait counts into its latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use looplane_proto::inference::v1::generate_request::Input;
use looplane_proto::inference::v1::{Chat, ChatMessage, GenerateRequest};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::distribution::Distribution;
use crate::faults::Conducts;
use crate::lag::LagMeter;
use crate::lengths::Shapes;
use crate::meter::Meter;
use crate::prompt::Prompts;
use crate::record::{Clock, Failure, RequestRecord};
use crate::target::{Ready, Target};

/// Records that wait to be counted; a full channel holds back those who send, never memory.
const RECORDS_WAITING: usize = 1024;
/// Pause of a closed loop's slot after a connection was refused. Refusals cost nothing: without a pause a dead server
/// would be counted as failing tens of thousands of times a second.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(50);

/// What is asked for: an answer in a chat or text after a prompt. Over gRPC the one call takes both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Endpoint {
    /// The answer to a chat (/v1/chat/completions)
    Chat,
    /// The text after a prompt (/v1/completions)
    Completions,
}

/// What each request asks, and of whom.
#[derive(Debug)]
pub struct Workload {
    /// The server.
    pub target: Target,
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
    /// Turns of each chat of a closed loop.
    pub turns: u32,
    /// Go on past the end-of-sequence token (an extension of OpenAI's interface).
    pub ignore_eos: bool,
    /// Time limit of one request, which also limits how long a due request waits to be sent.
    pub timeout: Duration,
}

/// A question and its answer: what the next turn of a chat is sent after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// What was asked.
    pub user: String,
    /// What the server answered.
    pub assistant: String,
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
    /// Which requests meet a client that misbehaves.
    pub conducts: Conducts,
}

/// A run under way.
pub struct Running {
    /// The record of each request as it ends; closed when the last one has ended.
    pub records: mpsc::Receiver<RequestRecord>,
    /// The run's clock, which the records' times are of.
    pub clock: Clock,
    meter: Arc<Meter>,
    lag: LagMeter,
}

/// What every task of a run shares.
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
    /// Most requests that were in flight at once so far.
    pub fn peak_in_flight(&self) -> usize {
        self.meter.peak_in_flight()
    }

    /// Requests in flight now.
    pub fn in_flight(&self) -> usize {
        self.meter.in_flight()
    }

    /// What the run is doing.
    pub fn meter(&self) -> Arc<Meter> {
        self.meter.clone()
    }

    /// How late the load tester's own timers were so far.
    pub fn lags(&self) -> Distribution {
        self.lag.lags()
    }
}

impl Workload {
    /// The request for `max_tokens` tokens after `prompt`, in a chat after the turns `before` it. Greedy, so that runs can
    /// be compared.
    pub fn request(&self, before: &[Turn], prompt: &str, max_tokens: u32) -> Ready<'_> {
        match &self.target {
            Target::Http(client) => Ready::Http(client, self.path(), self.body(before, prompt, max_tokens)),
            Target::Grpc(client) => Ready::Grpc(client, Box::new(self.message(before, prompt, max_tokens))),
        }
    }

    /// Path of the interface over HTTP.
    pub fn path(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
        }
    }

    fn body(&self, before: &[Turn], prompt: &str, max_tokens: u32) -> Bytes {
        let mut body = json!({
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        match self.endpoint {
            Endpoint::Chat => {
                let message = |role: &str, content: &str| json!({ "role": role, "content": content });
                let earlier =
                    before.iter().flat_map(|turn| [message("user", &turn.user), message("assistant", &turn.assistant)]);
                body["messages"] = earlier.chain([message("user", prompt)]).collect();
            }
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

    fn message(&self, before: &[Turn], prompt: &str, max_tokens: u32) -> GenerateRequest {
        let input = match self.endpoint {
            Endpoint::Chat => {
                let message = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
                let earlier =
                    before.iter().flat_map(|turn| [message("user", &turn.user), message("assistant", &turn.assistant)]);
                Input::Chat(Chat { messages: earlier.chain([message("user", prompt)]).collect() })
            }
            Endpoint::Completions => Input::Prompt(prompt.to_owned()),
        };
        GenerateRequest {
            model: self.model.clone(),
            input: Some(input),
            max_tokens,
            min_tokens: self.min_tokens.map_or(0, |min_tokens| min_tokens.min(max_tokens)),
            temperature: Some(0.0),
            ignore_eos: self.ignore_eos,
            ..GenerateRequest::default()
        }
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

    /// Sends request `index` now, as the next turn of `chat`, and follows it to its end. A chat that has all its turns, or
    /// that a request failed in, is left empty.
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
        record.text = (goes_on || self.conducts.keeps_texts()).then(String::new);
        record.meter = Some(self.meter.clone());
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
        let answer = if self.conducts.keeps_texts() { record.text.clone() } else { record.text.take() };
        match answer {
            Some(assistant) if goes_on && record.failure.is_none() => chat.push(Turn { user: prompt, assistant }),
            _ => chat.clear(),
        }
        record
    }
}

impl Extent {
    /// The same, where there are only so many requests to send.
    pub fn at_most(self, requests: u64) -> Self {
        match self {
            Extent::Requests(limit) => Extent::Requests(limit.min(requests)),
            Extent::Duration(_) => self,
        }
    }

    /// Whether the request number `offset` (from 0) that is due at `due` belongs to the run.
    fn includes(self, offset: u64, due: Duration) -> bool {
        match self {
            Extent::Requests(requests) => offset < requests,
            Extent::Duration(duration) => due < duration,
        }
    }
}

#[cfg(test)]
mod tests;
