//! Counts records into figures. Figures are of requests that succeeded; failures are counted by kind.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::args::RateArg;
use crate::calibrate::{Calibration, TOLERATED_MS};
use crate::distribution::Distribution;
use crate::faults::{Conduct, FaultReport};
use crate::lengths::Shapes;
use crate::record::{Failure, RequestRecord, printable};
use crate::sample::Sample;
use crate::server_side::ServerSide;
use crate::slo::Slo;
use crate::spread::Spread;
use crate::timeline::{Moment, Timeline};

/// Most kinds of failure or finish reason told apart; more are counted together, as a server could invent them forever.
const MAX_KINDS: usize = 64;
/// Where kinds beyond [`MAX_KINDS`] are counted.
const OTHER_KINDS: &str = "other";
/// Percentiles that are reported.
pub const PERCENTILES: [(&str, f64); 5] = [("p50", 50.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0), ("p99.9", 99.9)];

/// What was run, for the head of the report.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Address of the server.
    pub target: String,
    /// Interface in vLLM's words, `openai-chat` or `openai`; over gRPC `looplane-grpc-chat` or `looplane-grpc`.
    pub backend: &'static str,
    /// Model id.
    pub model: String,
    /// Arrivals in words, for people.
    pub pacing: String,
    /// Rate of an open loop that is not a trace's.
    pub rate: Option<RateArg>,
    /// Shape of the gaps of an open loop: 1 is Poisson; none where gaps are constant.
    pub burstiness: Option<f64>,
    /// Most requests in flight.
    pub max_concurrency: usize,
    /// Seed of schedule and prompts.
    pub seed: u64,
    /// Lengths asked for.
    pub shapes: Shapes,
    /// Least output tokens asked for.
    pub min_tokens: Option<u32>,
    /// Share of each prompt that all prompts begin with.
    pub shared_prefix: f64,
    /// Whether generation went on past the end of sequence.
    pub ignore_eos: bool,
    /// Requests sent before the run that are not counted.
    pub warmup: u64,
    /// The load tester's own error, where it was measured before the run.
    pub calibration: Option<Calibration>,
    /// What a reader has to know to trust the figures.
    pub notes: Vec<String>,
}

/// The part of a run that its figures are of: requests that were due in it, and tokens and ends that came in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Start in nanoseconds of the run.
    pub from_ns: u64,
    /// End in nanoseconds of the run, not included.
    pub to_ns: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self { from_ns: 0, to_ns: u64::MAX }
    }
}

impl Window {
    /// Whether `time_ns` of the run lies inside.
    pub fn contains(self, time_ns: u64) -> bool {
        (self.from_ns..self.to_ns).contains(&time_ns)
    }
}

/// Figures of a run, updated record by record in memory that does not grow with the number of requests.
#[derive(Debug, Default)]
pub struct Tally {
    window: Window,
    slo: Option<Slo>,
    good: u64,
    excluded: u64,
    excluded_failed: u64,
    /// Ends, tokens of prompts and output tokens in the window, of whichever requests.
    requests_in_window: u64,
    prompt_tokens_in_window: u64,
    output_tokens_in_window: f64,
    completed: u64,
    failed: u64,
    interrupted: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    chunks: u64,
    without_usage: u64,
    without_text: u64,
    ended_ns: u64,
    ttft: Distribution,
    ttft_from_intended: Distribution,
    itl: Distribution,
    tpot: Distribution,
    e2el: Distribution,
    e2el_from_intended: Distribution,
    client_delay: Distribution,
    finish_reasons: BTreeMap<String, u64>,
    errors: BTreeMap<String, (u64, String)>,
    /// Output tokens that arrived in each second of the run.
    tokens_in_second: Vec<f64>,
    timeline: Timeline,
    timeline_ended_ns: u64,
    sample: Sample,
    peak_in_flight: usize,
    client_lag: Distribution,
    spread: Option<Spread>,
    /// Requests whose client misbehaved on purpose, which no figure is of.
    misused: u64,
    faults: Option<FaultReport>,
    server_side: Option<ServerSide>,
}

/// One kind of time in the report.
pub struct Metric<'a> {
    /// Name for people.
    pub title: &'static str,
    /// Name within JSON fields.
    pub key: &'static str,
    /// Its times.
    pub times: &'a Distribution,
}

impl Tally {
    /// An empty count of the requests due in `window`, which `slo` tells good from bad.
    pub fn new(window: Window, slo: Option<Slo>) -> Self {
        Self { window, slo, ..Self::default() }
    }

    /// Counts one request.
    pub fn add(&mut self, record: &RequestRecord) {
        self.timeline.add_request(record.sent_ns, record.ended_ns);
        self.timeline_ended_ns = self.timeline_ended_ns.max(record.ended_ns);
        if record.conduct != Conduct::Usual {
            self.misused += 1;
            return;
        }
        self.ended_ns = self.ended_ns.max(record.ended_ns);
        if record.failure.is_none() {
            self.add_throughput(record);
        }
        if !self.window.contains(record.intended_ns) {
            self.excluded += 1;
            self.excluded_failed += u64::from(record.failure.is_some());
            return;
        }
        match &record.failure {
            None => self.add_completed(record),
            Some(Failure::Interrupted) => self.interrupted += 1,
            Some(failure) => {
                self.failed += 1;
                count_failure(&mut self.errors, failure);
            }
        }
    }

    /// Counts when an answer came, whenever it was due.
    fn add_throughput(&mut self, record: &RequestRecord) {
        if self.window.contains(record.ended_ns) {
            self.requests_in_window += 1;
            let tokens = record.prompt_tokens.unwrap_or(0);
            self.prompt_tokens_in_window = self.prompt_tokens_in_window.saturating_add(tokens);
        }
        // Tokens without text came at the end at the latest.
        let end = [record.ended_ns];
        let arrivals_ns = if record.chunks_ns.is_empty() { &end[..] } else { &record.chunks_ns };
        let tokens_each = record.output_tokens() as f64 / arrivals_ns.len() as f64;
        for &time_ns in arrivals_ns {
            let second = (time_ns / 1_000_000_000) as usize;
            if self.tokens_in_second.len() <= second {
                self.tokens_in_second.resize(second + 1, 0.0);
            }
            self.tokens_in_second[second] += tokens_each;
            self.timeline.add_tokens(time_ns, tokens_each);
            if self.window.contains(time_ns) {
                self.output_tokens_in_window += tokens_each;
            }
        }
    }

    fn add_completed(&mut self, record: &RequestRecord) {
        self.completed += 1;
        self.good += u64::from(self.slo.is_some_and(|slo| slo.is_met(record)));
        self.sample.add(record);
        let tokens = record.output_tokens();
        self.prompt_tokens = self.prompt_tokens.saturating_add(record.prompt_tokens.unwrap_or(0));
        self.output_tokens = self.output_tokens.saturating_add(tokens);
        self.chunks += record.chunks_ns.len() as u64;
        self.without_usage += u64::from(record.completion_tokens.is_none());
        self.client_delay.record_ns(record.sent_ns.saturating_sub(record.intended_ns));
        self.e2el.record_ns(record.ended_ns.saturating_sub(record.sent_ns));
        self.e2el_from_intended.record_ns(record.ended_ns.saturating_sub(record.intended_ns));
        match record.first_token_ns() {
            Some(first_ns) => {
                self.ttft.record_ns(first_ns.saturating_sub(record.sent_ns));
                self.ttft_from_intended.record_ns(first_ns.saturating_sub(record.intended_ns));
            }
            None => self.without_text += 1,
        }
        for pair in record.chunks_ns.windows(2) {
            self.itl.record_ns(pair[1].saturating_sub(pair[0]));
        }
        if let Some(tpot_ns) = record.time_per_output_token_ns() {
            self.tpot.record_ns(tpot_ns);
        }
        let reason = record.finish_reason.clone().unwrap_or_else(|| "none".into());
        *self.finish_reasons.entry(bounded_key(&self.finish_reasons, reason)).or_default() += 1;
    }

    /// Ends the count: adds what only the whole run knows, most requests in flight and how late the load tester's own
    /// timers were.
    pub fn close(&mut self, peak_in_flight: usize, client_lag: Distribution) {
        self.peak_in_flight = peak_in_flight;
        self.client_lag = client_lag;
    }

    /// Adds what the server said of itself.
    pub fn set_server_side(&mut self, server_side: ServerSide) {
        self.server_side = Some(server_side);
    }

    /// What the server said of itself, where it was asked.
    pub fn server_side(&self) -> Option<&ServerSide> {
        self.server_side.as_ref()
    }

    /// Makes this run the one that is shown of those that `spread` is of.
    pub fn stand_for(&mut self, spread: Spread) {
        self.spread = Some(spread);
    }

    /// Adds what became of the faults of the run.
    pub fn suffered(&mut self, faults: FaultReport) {
        self.faults = Some(faults);
    }

    /// What became of the faults, where any were asked for.
    pub fn faults(&self) -> Option<&FaultReport> {
        self.faults.as_ref()
    }

    /// What happened in the run that its timelines show: seconds, and what it was.
    pub fn events(&self) -> Vec<(f64, String)> {
        self.faults.as_ref().map_or_else(Vec::new, FaultReport::events)
    }

    /// Requests whose client misbehaved on purpose, which are among no others.
    pub fn misused(&self) -> u64 {
        self.misused
    }

    /// How much this and the other runs differ, where there were several.
    pub fn spread(&self) -> Option<&Spread> {
        self.spread.as_ref()
    }

    /// Most requests in flight at once.
    pub fn peak_in_flight(&self) -> usize {
        self.peak_in_flight
    }

    /// Requests that succeeded.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Requests that failed, without those that the user stopped.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Requests that the user stopped.
    pub fn interrupted(&self) -> u64 {
        self.interrupted
    }

    /// From the start of the run to the end of its last request whose client behaved, in seconds.
    pub fn duration_s(&self) -> f64 {
        self.ended_ns as f64 / 1e9
    }

    /// Start and end of the counted part of the run, in seconds of the run.
    pub fn window_s(&self) -> (f64, f64) {
        let to_ns = self.window.to_ns.min(self.ended_ns).max(self.window.from_ns);
        (self.window.from_ns as f64 / 1e9, to_ns as f64 / 1e9)
    }

    /// Requests due outside of the counted part, and how many of them failed or were stopped.
    pub fn excluded(&self) -> (u64, u64) {
        (self.excluded, self.excluded_failed)
    }

    /// Answers that ended in the counted part, a second of it; 0 for a run without requests.
    pub fn requests_per_s(&self) -> f64 {
        self.per_second(self.requests_in_window as f64)
    }

    /// Output tokens that arrived in the counted part, a second of it.
    pub fn output_tokens_per_s(&self) -> f64 {
        self.per_second(self.output_tokens_in_window)
    }

    /// The same with the tokens of the prompts of the answers that ended in it.
    pub fn total_tokens_per_s(&self) -> f64 {
        self.per_second(self.prompt_tokens_in_window as f64 + self.output_tokens_in_window)
    }

    /// Limits that requests were held to.
    pub fn slo(&self) -> Option<Slo> {
        self.slo
    }

    /// Requests due in the counted part that met every limit; none without limits.
    pub fn good(&self) -> Option<u64> {
        self.slo.map(|_| self.good)
    }

    /// Goodput: [`Self::good`] a second of the counted part.
    pub fn good_requests_per_s(&self) -> Option<f64> {
        self.good().map(|good| self.per_second(good as f64))
    }

    fn per_second(&self, count: f64) -> f64 {
        let (from_s, to_s) = self.window_s();
        if to_s > from_s { count / (to_s - from_s) } else { 0.0 }
    }

    /// Prompt tokens of the requests that succeeded, as the server counted them.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    /// Tokens generated for the requests that succeeded.
    pub fn output_tokens(&self) -> u64 {
        self.output_tokens
    }

    /// Most output tokens that arrived within one second of the run's clock.
    pub fn peak_tokens_per_s(&self) -> f64 {
        self.tokens_in_second.iter().copied().fold(0.0, f64::max)
    }

    /// Finish reasons with their counts.
    pub fn finish_reasons(&self) -> &BTreeMap<String, u64> {
        &self.finish_reasons
    }

    /// Kinds of failure with their counts and one message of each.
    pub fn errors(&self) -> &BTreeMap<String, (u64, String)> {
        &self.errors
    }

    /// Load and throughput over the run.
    pub fn moments(&self) -> Vec<Moment> {
        self.timeline.moments(self.timeline_ended_ns)
    }

    /// Times of single requests that succeeded, as [`Sample::to_json`] has them.
    pub fn sampled_requests(&self) -> Value {
        self.sample.to_json()
    }

    /// Every kind of time, in the order of the report.
    pub fn metrics(&self) -> [Metric<'_>; 8] {
        let metric = |title, key, times| Metric { title, key, times };
        [
            metric("time to first token", "ttft", &self.ttft),
            metric("  from when it was due", "ttft_from_intended", &self.ttft_from_intended),
            metric("between tokens (ITL)", "itl", &self.itl),
            metric("per output token (TPOT)", "tpot", &self.tpot),
            metric("end to end", "e2el", &self.e2el),
            metric("  from when it was due", "e2el_from_intended", &self.e2el_from_intended),
            metric("client: sent late by", "client_delay", &self.client_delay),
            metric("client: timers late by", "client_lag", &self.client_lag),
        ]
    }

    /// What was found before the run, what the load tester was, and what the counts say about how to read the figures.
    pub fn notes(&self, setup: &Setup) -> Vec<String> {
        let mut notes = setup.notes.clone();
        notes.extend(setup.calibration.as_ref().and_then(Calibration::note));
        if self.excluded > 0 {
            let ((from_s, to_s), failed) = (self.window_s(), self.excluded_failed);
            notes.push(format!(
                "counted from {from_s:.1} s to {to_s:.1} s of the run: {} requests due outside of it are left out, {failed} \
                 of them failed",
                self.excluded
            ));
        }
        if self.misused > 0 {
            notes.push(format!(
                "{} requests met a client that misbehaved on purpose: all figures but those under faults are of the others",
                self.misused
            ));
        }
        if self.without_usage > 0 {
            notes.push(format!(
                "{} answers came without usage: their chunks are counted as tokens, their prompts not at all",
                self.without_usage
            ));
        }
        if self.without_text > 0 {
            notes.push(format!("{} answers held no text and have no time to first token", self.without_text));
        }
        if self.without_usage == 0 && self.chunks != self.output_tokens && self.chunks > 0 {
            let share = self.output_tokens as f64 / self.chunks as f64;
            notes.push(format!("{share:.2} tokens a chunk: ITL is the time between chunks, TPOT that of a token"));
        }
        let given_up: u64 = ["timeout", "not_sent"].iter().filter_map(|kind| self.errors.get(*kind)).map(|e| e.0).sum();
        if given_up > 0 {
            notes.push(format!("given up for taking too long, and missing from the times: {given_up}"));
        }
        if let Some(late_ms) = self.client_delay.percentile_ms(99.0).filter(|&ms| ms > TOLERATED_MS) {
            notes.push(format!(
                "one request in a hundred left {late_ms:.1} ms late or more: the load tester was too slow, or \
                 --max-in-flight too low; the times from when a request was due hold all the same"
            ));
        }
        if let Some(lag_ms) = self.client_lag.percentile_ms(99.0).filter(|&ms| ms > TOLERATED_MS) {
            notes.push(format!(
                "the load tester itself was late: one in a hundred of its own timers by {lag_ms:.1} ms or more, and so \
                 may every time be; measure from a quieter or larger machine"
            ));
        }
        notes
    }
}

/// Counts `failure` by its kind, with the message of the first of each.
pub fn count_failure(kinds: &mut BTreeMap<String, (u64, String)>, failure: &Failure) {
    let kind = bounded_key(kinds, failure.kind());
    kinds.entry(kind).or_insert_with(|| (0, printable(&failure.to_string(), 200))).0 += 1;
}

fn bounded_key<T>(counts: &BTreeMap<String, T>, key: String) -> String {
    if counts.len() < MAX_KINDS || counts.contains_key(&key) { key } else { OTHER_KINDS.into() }
}

#[cfg(test)]
pub(crate) mod tests;
