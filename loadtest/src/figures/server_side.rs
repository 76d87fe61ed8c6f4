//! What the server's own counts say about a part of a run.

use serde::Serialize;

use crate::client::metrics::{Field, Snapshot};
use crate::figures::tally::Tally;
use crate::run::watch::{Series, ServerSide};

/// Mean and highest of a value that was looked at again and again.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Range {
    pub mean: f64,
    #[serde(rename = "max")]
    pub most: f64,
}

/// What a server says of a part of a run, under the names that it has in the report's JSON; none of what it does not
/// say.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Length of the part that the counts are of, in seconds: from the last look before it to the first after it.
    pub length_s: f64,
    pub mean_step_ms: Option<f64>,
    pub steps_per_s: Option<f64>,
    /// Share of the time that was spent in steps.
    pub busy_share: Option<f64>,
    /// Share of the steps' time that rank 0 waited for other ranks.
    pub rank_wait_share: Option<f64>,
    /// Rows of a step, in the mean, and those of them that decode.
    pub rows_per_step: Option<f64>,
    pub decode_rows_per_step: Option<f64>,
    /// Sequences in the batch, and those that waited for it.
    pub running: Option<Range>,
    pub waiting: Option<Range>,
    /// Share of the KV cache in use.
    pub kv_cache_usage: Option<Range>,
    /// Share of the tokens of prompts that the prefix cache held.
    pub prefix_cache_hit_share: Option<f64>,
    /// Tokens generated a second.
    pub generation_throughput: Option<f64>,
    /// GB/s (10^9) that steps had to read while they ran, on all ranks; what can be read; and the share of it.
    pub read_gb_s: Option<f64>,
    pub read_limit_gb_s: Option<f64>,
    pub share_of_read_limit: Option<f64>,
    /// Mean times to the first token, between tokens and in the queue, as the engine has them.
    pub mean_ttft_ms: Option<f64>,
    pub mean_itl_ms: Option<f64>,
    pub mean_queue_ms: Option<f64>,
    /// Sequences that lost their place for lack of KV pages.
    pub preemptions: Option<f64>,
    /// Groups of workers lost, and the mean time until the next one took over.
    pub worker_losses: Option<f64>,
    pub mean_recovery_s: Option<f64>,
}

impl Figures {
    /// The figures of the part from `from_s` to `to_s` of the run.
    pub fn of(series: &Series, (from_s, to_s): (f64, f64)) -> Self {
        let said = &series.said;
        let first = said.iter().rposition(|(time_s, _)| *time_s <= from_s).unwrap_or(0);
        let last = said.iter().position(|(time_s, _)| *time_s >= to_s).unwrap_or(said.len() - 1).max(first);
        let looks = &said[first..=last];
        let ((begun_s, before), (ended_s, after)) = (&said[first], &said[last]);
        let length_s = ended_s - begun_s;
        let grown = |field| after.since(before, field);
        let mean = |sum, count| grown(sum).zip(grown(count)).filter(|(_, n)| *n > 0.0).map(|(sum, n)| sum / n);
        let per_s = |field| grown(field).filter(|_| length_s > 0.0).map(|count| count / length_s);
        let read_gb_s = mean(Field::ReadBytes, Field::StepSeconds).map(|bytes_per_s| bytes_per_s / 1e9);
        let ms = |seconds: f64| 1e3 * seconds;
        Self {
            length_s,
            mean_step_ms: mean(Field::StepSeconds, Field::Steps).map(ms),
            steps_per_s: per_s(Field::Steps),
            busy_share: per_s(Field::StepSeconds),
            rank_wait_share: mean(Field::WaitSeconds, Field::StepSeconds),
            rows_per_step: mean(Field::Rows, Field::Steps),
            decode_rows_per_step: mean(Field::DecodeRows, Field::Steps),
            running: range(looks, Field::Running),
            waiting: range(looks, Field::Waiting),
            kv_cache_usage: range(looks, Field::KvUsage),
            prefix_cache_hit_share: mean(Field::CacheHits, Field::CacheQueries),
            generation_throughput: per_s(Field::GenerationTokens),
            read_gb_s,
            read_limit_gb_s: series.read_limit_gb_s,
            share_of_read_limit: read_gb_s.zip(series.read_limit_gb_s).map(|(read, limit)| read / limit),
            mean_ttft_ms: mean(Field::FirstTokenSeconds, Field::FirstTokens).map(ms),
            mean_itl_ms: mean(Field::GapSeconds, Field::Gaps).map(ms),
            mean_queue_ms: mean(Field::QueueSeconds, Field::Queued).map(ms),
            preemptions: grown(Field::Preemptions),
            worker_losses: grown(Field::WorkerLosses),
            mean_recovery_s: mean(Field::RecoverySeconds, Field::Recoveries),
        }
    }

    /// Name and value of each figure that is known, for people; with `tally`'s own beside those that the client has,
    /// too.
    pub fn in_words(&self, tally: &Tally) -> Vec<(&'static str, String)> {
        // The server counts every request, the client's figures are of the usual ones.
        let of_which = if tally.misused > 0 { ", of the requests without a fault" } else { "" };
        let beside = |key: &str, ms: f64| {
            let mean = tally.times(key).and_then(|times| times.mean_ms());
            let client = mean.map_or_else(String::new, |ms| format!(" (the client's mean{of_which}: {ms:.2} ms)"));
            format!("{ms:.2} ms in the mean{client}")
        };
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let looks = |range: Range| format!("{:.1} in the mean, at most {:.0}", range.mean, range.most);
        let step = self.mean_step_ms.zip(self.steps_per_s).zip(self.busy_share).map(|((ms, per_s), busy)| {
            let waiting = self.rank_wait_share.filter(|share| *share > 0.0);
            let waiting =
                waiting.map_or_else(String::new, |share| format!(", {} of that for other ranks", percent(share)));
            format!("{ms:.3} ms in the mean, {per_s:.1} a second, {} of the time in steps{waiting}", percent(busy))
        });
        let rows = self.rows_per_step.map(|rows| match self.decode_rows_per_step {
            Some(decode) => format!("{rows:.2} in the mean: {decode:.2} that decode, {:.2} of prompts", rows - decode),
            None => format!("{rows:.2} in the mean"),
        });
        let kv = self.kv_cache_usage;
        let kv = kv.map(|of| format!("{} in the mean, at most {}", percent(of.mean), percent(of.most)));
        let read = self.read_gb_s.map(|gb_s| match self.share_of_read_limit.zip(self.read_limit_gb_s) {
            Some((share, limit)) => format!("{gb_s:.1} GB/s, {} of the read limit ({limit:.1} GB/s)", percent(share)),
            None => format!("{gb_s:.1} GB/s (--read-limit says which share of what can be read)"),
        });
        let tokens = self
            .generation_throughput
            .map(|per_s| format!("{per_s:.1} a second (the client's{of_which}: {:.1})", tally.output_tokens_per_s()));
        let lost = self.worker_losses.filter(|count| *count > 0.0).map(|count| {
            let back = self.mean_recovery_s;
            times(count) + &back.map_or_else(String::new, |s| format!(", back after {s:.2} s in the mean"))
        });
        let rows: Vec<_> = [
            ("step", step),
            ("rows of a step", rows),
            ("sequences running", self.running.map(looks)),
            ("sequences waiting", self.waiting.map(looks)),
            ("KV cache in use", kv),
            ("prompts cached", self.prefix_cache_hit_share.map(|share| percent(share) + " of their tokens")),
            ("read in steps", read),
            ("tokens generated", tokens),
            ("time to first token", self.mean_ttft_ms.map(|ms| beside("ttft", ms))),
            ("between tokens", self.mean_itl_ms.map(|ms| beside("tpot", ms))),
            ("in the queue", self.mean_queue_ms.map(|ms| format!("{ms:.2} ms in the mean"))),
            ("preempted", self.preemptions.filter(|count| *count > 0.0).map(times)),
            ("workers lost", lost),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect();
        if rows.is_empty() {
            let why = "none: it answered too few questions, does not say enough, or began to count again meanwhile";
            return vec![("figures", why.into())];
        }
        rows
    }
}

/// Over the looks between the first, from before the part, and the last, from after it; none where it was too short for
/// one.
fn range(looks: &[(f64, Snapshot)], field: Field) -> Option<Range> {
    let within = looks.get(1..looks.len() - 1)?;
    let values: Vec<f64> = within.iter().filter_map(|(_, said)| said.get(field)).collect();
    let most = values.iter().copied().reduce(f64::max)?;
    Some(Range { mean: values.iter().sum::<f64>() / values.len() as f64, most })
}

/// "once", "3 times".
pub fn times(count: f64) -> String {
    if count == 1.0 { "once".into() } else { format!("{count:.0} times") }
}

/// How many groups of workers the server lost over the whole run; none where it does not say.
pub fn worker_losses(side: &ServerSide) -> Option<f64> {
    match side {
        ServerSide::Unknown(_) => None,
        ServerSide::Seen(series) => Figures::of(series, (0.0, f64::INFINITY)).worker_losses,
    }
}
