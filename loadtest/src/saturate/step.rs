//! One step of a search: what a rate came to, and whether the server bore it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::figures::tally::Tally;
use crate::stats::line::Line;

/// Share of what arrives by which a server falls behind. A queue that grows by it delays each request by as much more
/// than the one a second before.
const BEHIND: f64 = 0.05;
/// Standard deviations by which growth must exceed chance.
const SIGNIFICANT: f64 = 3.0;

/// What one rate came to. Times to tokens and between them are also of requests that were cut off with the step.
#[derive(Debug)]
pub struct Step {
    pub rate_per_s: f64,
    pub tally: Tally,
    pub verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    KeepsUp,
    InFlightGrows,
    FirstTokenGrows,
    TurnsAway,
    /// `--max-in-flight` requests were unanswered, and the step was ended.
    AllInFlight,
}

/// What is measured over a step to judge it by.
#[derive(Debug, Default)]
pub struct Growth {
    /// Seconds of the step, and requests in flight then.
    pub in_flight: Vec<(f64, f64)>,
    /// Seconds of the step at which a request was due, and those until its first token.
    pub first_token: Vec<(f64, f64)>,
}

impl Growth {
    /// Judges the second half of a step of `length` at `rate_per_s`.
    pub fn verdict(&self, rate_per_s: f64, length: Duration) -> Verdict {
        let half_s = length.as_secs_f64() / 2.0;
        let second_half = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|&(time_s, _)| time_s >= half_s).collect()
        };
        let in_flight = second_half(&self.in_flight);
        if let Some(line) = Line::through(&in_flight) {
            // In a server that keeps up, requests in flight vary like their mean where arrivals know nothing of each
            // other.
            let grown = line.slope * half_s;
            if line.slope > BEHIND * rate_per_s && grown > SIGNIFICANT * line.mean.max(1.0).sqrt() {
                return Verdict::InFlightGrows;
            }
        }
        if let Some(line) = Line::through(&second_half(&self.first_token))
            && line.slope > BEHIND
            && line.slope > SIGNIFICANT * line.slope_error
        {
            return Verdict::FirstTokenGrows;
        }
        Verdict::KeepsUp
    }
}

impl Step {
    pub fn line(&self) -> String {
        let pair = |key: &str| match (self.tally.percentile_ms(key, 50.0), self.tally.percentile_ms(key, 99.0)) {
            (Some(p50), Some(p99)) => format!("{p50:.1}, {p99:.1}"),
            _ => "-".into(),
        };
        format!(
            "{:>17.3}{:>11.3}{:>11.1}{:>26}{:>22}{:>12}   {}",
            self.rate_per_s,
            self.tally.requests_per_s(),
            self.tally.arrived_tokens_per_s(),
            pair("ttft_from_intended"),
            pair("itl"),
            self.tally.peak_in_flight,
            self.verdict.in_words()
        )
    }

    pub fn to_json(&self) -> Value {
        let mut step = json!({
            "request_rate": self.rate_per_s,
            "keeps_up": self.verdict == Verdict::KeepsUp,
            "verdict": self.verdict.in_words(),
            "completed": self.tally.completed,
            "failed": self.tally.failed,
            "request_throughput": self.tally.requests_per_s(),
            "request_goodput": self.tally.good_requests_per_s(),
            "output_throughput": self.tally.arrived_tokens_per_s(),
            "max_concurrent_requests": self.tally.peak_in_flight,
        });
        for metric in self.tally.metrics() {
            step[format!("median_{}_ms", metric.key)] = json!(self.tally.percentile_ms(metric.key, 50.0));
            step[format!("p99_{}_ms", metric.key)] = json!(self.tally.percentile_ms(metric.key, 99.0));
        }
        step
    }
}

impl Verdict {
    pub fn in_words(self) -> &'static str {
        match self {
            Verdict::KeepsUp => "keeps up",
            Verdict::InFlightGrows => "falls behind: requests in flight grow",
            Verdict::FirstTokenGrows => "falls behind: the time to first token grows",
            Verdict::TurnsAway => "turns requests away",
            Verdict::AllInFlight => "falls behind: --max-in-flight requests unanswered",
        }
    }
}
