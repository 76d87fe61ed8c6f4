//! Counts records into figures. Figures are of requests that succeeded; failures are counted by kind.

use std::collections::BTreeMap;

use crate::client::record::{Failure, RequestRecord};
use crate::figures::sample::Sample;
use crate::figures::slo::Slo;
use crate::figures::timeline::{Moment, Timeline};
use crate::load::conduct::Conduct;
use crate::stats::distribution::Distribution;
use crate::text::printable;

/// Most kinds of failure or finish reason told apart; more are counted together, as a server could invent them forever.
const MAX_KINDS: usize = 64;
/// Where kinds beyond [`MAX_KINDS`] are counted.
const OTHER_KINDS: &str = "other";
/// Percentiles that are reported.
pub const PERCENTILES: [(&str, f64); 5] = [("p50", 50.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0), ("p99.9", 99.9)];

/// The part of a run that its figures are of: requests that were due in it, and tokens and ends that came in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
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
    pub fn contains(self, time_ns: u64) -> bool {
        (self.from_ns..self.to_ns).contains(&time_ns)
    }
}

/// Figures of a run, updated record by record in memory that does not grow with the number of requests.
#[derive(Debug, Default)]
pub struct Tally {
    window: Window,
    pub slo: Option<Slo>,
    good: u64,
    /// Requests due outside of the counted part, and how many of them failed or were stopped.
    pub excluded: u64,
    pub excluded_failed: u64,
    /// Ends, tokens of prompts and output tokens in the window, of whichever requests.
    requests_in_window: u64,
    prompt_tokens_in_window: u64,
    output_tokens_in_window: f64,
    /// Requests that succeeded, that failed, and that the user stopped.
    pub completed: u64,
    pub failed: u64,
    pub interrupted: u64,
    /// Requests whose client misbehaved on purpose, which no other figure is of.
    pub misused: u64,
    /// Tokens of the requests that succeeded, and chunks that they came in.
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Of prompts whose server says how many of their tokens were cached: those, and all.
    cached_tokens: u64,
    cacheable_tokens: u64,
    pub chunks: u64,
    /// Chunks of requests that were cut off, see [`Self::add_cut_off`], and the end of the last that did not fail.
    cut_off_chunks: u64,
    arrived_until_ns: u64,
    /// Answers that came without the server's count of tokens, and without text.
    pub without_usage: u64,
    pub without_text: u64,
    ended_ns: u64,
    ttft: Distribution,
    ttft_from_intended: Distribution,
    itl: Distribution,
    tpot: Distribution,
    e2el: Distribution,
    e2el_from_intended: Distribution,
    client_delay: Distribution,
    client_lag: Distribution,
    pub finish_reasons: BTreeMap<String, u64>,
    pub errors: Kinds,
    /// Output tokens that arrived in each second of the run.
    tokens_in_second: Vec<f64>,
    timeline: Timeline,
    timeline_ended_ns: u64,
    pub sample: Sample,
    pub peak_in_flight: usize,
}

pub type Kinds = BTreeMap<String, (u64, String)>;

pub struct Metric<'a> {
    pub title: &'static str,
    pub key: &'static str,
    pub times: &'a Distribution,
}

impl Tally {
    /// An empty count of the requests due in `window`, which `slo` tells good from bad.
    pub fn new(window: Window, slo: Option<Slo>) -> Self {
        Self { window, slo, ..Self::default() }
    }

    pub fn add(&mut self, record: &RequestRecord) {
        self.timeline.add_request(record.sent_ns, record.ended_ns);
        self.timeline_ended_ns = self.timeline_ended_ns.max(record.ended_ns);
        if record.conduct != Conduct::Usual {
            self.misused += 1;
            return;
        }
        self.ended_ns = self.ended_ns.max(record.ended_ns);
        if record.failure.is_none() {
            self.arrived_until_ns = self.arrived_until_ns.max(record.ended_ns);
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
        if let (Some(cached), Some(all)) = (record.cached_tokens, record.prompt_tokens) {
            self.cached_tokens = self.cached_tokens.saturating_add(cached);
            self.cacheable_tokens = self.cacheable_tokens.saturating_add(all);
        }
        self.chunks += record.chunks_ns.len() as u64;
        self.without_usage += u64::from(record.completion_tokens.is_none());
        self.client_delay.record_ns(record.sent_ns.saturating_sub(record.intended_ns));
        self.e2el.record_ns(record.ended_ns.saturating_sub(record.sent_ns));
        self.e2el_from_intended.record_ns(record.ended_ns.saturating_sub(record.intended_ns));
        self.without_text += u64::from(record.chunks_ns.is_empty());
        self.add_token_times(record, record.first_token_ns());
        let reason = record.finish_reason.clone().unwrap_or_else(|| "none".into());
        *self.finish_reasons.entry(bounded_key(&self.finish_reasons, reason)).or_default() += 1;
    }

    fn add_token_times(&mut self, record: &RequestRecord, first_ns: Option<u64>) {
        if let Some(first_ns) = first_ns {
            self.ttft.record_ns(first_ns.saturating_sub(record.sent_ns));
            self.ttft_from_intended.record_ns(first_ns.saturating_sub(record.intended_ns));
        }
        for pair in record.chunks_ns.windows(2) {
            self.itl.record_ns(pair[1].saturating_sub(pair[0]));
        }
        if let Some(tpot_ns) = record.time_per_output_token_ns() {
            self.tpot.record_ns(tpot_ns);
        }
    }

    /// Counts what a request got that was cut off when its load was ended, one without a token with the time that it
    /// had waited. Figures of those alone that were answered in time would be the figures of the lucky ones, and look
    /// the better the more the server is overloaded.
    pub fn add_cut_off(&mut self, record: &RequestRecord) {
        self.arrived_until_ns = self.arrived_until_ns.max(record.ended_ns);
        self.cut_off_chunks += record.chunks_ns.len() as u64;
        self.add_token_times(record, record.first_token_ns().or(Some(record.ended_ns)));
    }

    /// Output tokens a second, those of requests that were cut off among them, until the last request ended that did
    /// not fail; 0 before any. A chunk stands for as many tokens as in the answers that are complete.
    pub fn arrived_tokens_per_s(&self) -> f64 {
        let tokens_a_chunk = if self.chunks > 0 { self.output_tokens as f64 / self.chunks as f64 } else { 1.0 };
        let tokens = (self.chunks + self.cut_off_chunks) as f64 * tokens_a_chunk;
        if self.arrived_until_ns > 0 { tokens / (self.arrived_until_ns as f64 / 1e9) } else { 0.0 }
    }

    /// Ends the count: adds what only the whole run knows, most requests in flight and how late the load tester's own
    /// timers were.
    pub fn close(&mut self, peak_in_flight: usize, client_lag: Distribution) {
        self.peak_in_flight = peak_in_flight;
        self.client_lag = client_lag;
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

    /// Share of the tokens of prompts that the server had cached; none where it does not say.
    pub fn cached_share(&self) -> Option<f64> {
        (self.cacheable_tokens > 0).then(|| self.cached_tokens as f64 / self.cacheable_tokens as f64)
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

    /// Most output tokens that arrived within one second of the run's clock.
    pub fn peak_tokens_per_s(&self) -> f64 {
        self.tokens_in_second.iter().copied().fold(0.0, f64::max)
    }

    pub fn moments(&self) -> Vec<Moment> {
        self.timeline.moments(self.timeline_ended_ns)
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

    /// The times called `key` in JSON; none for a key that no metric has.
    pub fn times(&self, key: &str) -> Option<&Distribution> {
        self.metrics().into_iter().find(|metric| metric.key == key).map(|metric| metric.times)
    }

    /// A percentile of the times called `key`, in milliseconds; none for no times.
    pub fn percentile_ms(&self, key: &str, percentile: f64) -> Option<f64> {
        self.times(key)?.percentile_ms(percentile)
    }

    /// The kind of failure that most requests ended with: its name, count and one message.
    pub fn worst_error(&self) -> Option<(&str, u64, &str)> {
        worst(&self.errors)
    }
}

/// The most frequent of `kinds`: its name, count and one message.
pub fn worst<'a>(kinds: impl IntoIterator<Item = (&'a String, &'a (u64, String))>) -> Option<(&'a str, u64, &'a str)> {
    let worst = kinds.into_iter().max_by_key(|(_, (count, _))| count);
    worst.map(|(kind, (count, example))| (kind.as_str(), *count, example.as_str()))
}

/// Counts `failure` by its kind, with the message of the first of each.
pub fn count_failure(kinds: &mut Kinds, failure: &Failure) {
    let kind = bounded_key(kinds, failure.kind());
    kinds.entry(kind).or_insert_with(|| (0, printable(&failure.to_string(), 200))).0 += 1;
}

fn bounded_key<T>(counts: &BTreeMap<String, T>, key: String) -> String {
    if counts.len() < MAX_KINDS || counts.contains_key(&key) { key } else { OTHER_KINDS.into() }
}

#[cfg(test)]
mod tests;
