//! What a report holds: what was run, its figures, and what a reader has to know to trust them.

use serde_json::Value;

use crate::figures::spread::Spread;
use crate::figures::tally::Tally;
use crate::load::pacing::RateArg;
use crate::load::shapes::Shapes;
use crate::run::calibrate::{Calibration, TOLERATED_MS};
use crate::run::watch::ServerSide;

/// What was run, for the head of the report.
#[derive(Debug, Clone)]
pub struct Setup {
    pub target: String,
    /// Interface in vLLM's words, `openai-chat` or `openai`; over gRPC `looplane-grpc-chat` or `looplane-grpc`.
    pub backend: &'static str,
    pub model: String,
    pub pacing: String,
    /// Rate of an open loop that is not a trace's.
    pub rate: Option<RateArg>,
    /// Shape of the gaps of an open loop: 1 is Poisson; none where gaps are constant.
    pub burstiness: Option<f64>,
    pub max_concurrency: usize,
    pub seed: u64,
    pub shapes: Shapes,
    pub min_tokens: Option<u32>,
    /// Share of each prompt that all prompts begin with.
    pub shared_prefix: f64,
    pub ignore_eos: bool,
    /// Requests sent before the run that are not counted.
    pub warmup: u64,
    /// The load tester's own error, where it was measured before the run.
    pub calibration: Option<Calibration>,
    /// What a reader has to know to trust the figures.
    pub notes: Vec<String>,
}

/// One line on the faults of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    pub name: String,
    pub text: String,
    /// Whether a server should have done better.
    pub is_bad: bool,
}

#[derive(Debug, Default)]
pub struct Findings {
    /// In the order of the options.
    pub lines: Vec<Finding>,
    /// What stands on a timeline of the run: seconds, and what happened then.
    pub events: Vec<(f64, String)>,
    /// An object with a field for each fault that was asked for; times in milliseconds.
    pub json: Value,
}

/// A run, or the one that stands for several.
pub struct Report {
    pub setup: Setup,
    pub tally: Tally,
    /// How much this and the other runs differ, where there were several.
    pub spread: Option<Spread>,
    /// What became of the faults, where any were asked for.
    pub faults: Option<Findings>,
    /// What the server said of itself, where it was asked.
    pub server_side: Option<ServerSide>,
}

impl Report {
    /// What happened in the run that its timelines show: seconds, and what it was.
    pub fn events(&self) -> Vec<(f64, String)> {
        self.faults.as_ref().map_or_else(Vec::new, |faults| faults.events.clone())
    }

    /// What was found before the run, what the load tester was, and what the counts say about how to read the figures.
    pub fn notes(&self) -> Vec<String> {
        let Self { setup, tally, .. } = self;
        let mut notes = setup.notes.clone();
        notes.extend(setup.calibration.as_ref().and_then(Calibration::note));
        if tally.excluded > 0 {
            let ((from_s, to_s), left_out, failed) = (tally.window_s(), tally.excluded, tally.excluded_failed);
            notes.push(format!(
                "counted from {from_s:.1} s to {to_s:.1} s of the run: {left_out} requests due outside of it are left out, \
                 {failed} of them failed"
            ));
        }
        if tally.misused > 0 {
            notes.push(format!(
                "{} requests met a client that misbehaved on purpose: all figures but those under faults are of the others",
                tally.misused
            ));
        }
        if tally.without_usage > 0 {
            notes.push(format!(
                "{} answers came without usage: their chunks are counted as tokens, their prompts not at all",
                tally.without_usage
            ));
        }
        if tally.without_text > 0 {
            notes.push(format!("{} answers held no text and have no time to first token", tally.without_text));
        }
        if tally.without_usage == 0 && tally.chunks != tally.output_tokens && tally.chunks > 0 {
            let share = tally.output_tokens as f64 / tally.chunks as f64;
            notes.push(format!("{share:.2} tokens a chunk: ITL is the time between chunks, TPOT that of a token"));
        }
        let given_up = ["timeout", "not_sent"].iter().filter_map(|kind| tally.errors.get(*kind));
        let given_up: u64 = given_up.map(|(count, _)| count).sum();
        if given_up > 0 {
            notes.push(format!("given up for taking too long, and missing from the times: {given_up}"));
        }
        let late = |key| tally.percentile_ms(key, 99.0).filter(|&ms| ms > TOLERATED_MS);
        if let Some(late_ms) = late("client_delay") {
            notes.push(format!(
                "one request in a hundred left {late_ms:.1} ms late or more: the load tester was too slow, or \
                 --max-in-flight too low; the times from when a request was due hold all the same"
            ));
        }
        if let Some(lag_ms) = late("client_lag") {
            notes.push(format!(
                "the load tester itself was late: one in a hundred of its own timers by {lag_ms:.1} ms or more, and so \
                 may every time be; measure from a quieter or larger machine"
            ));
        }
        notes
    }
}
