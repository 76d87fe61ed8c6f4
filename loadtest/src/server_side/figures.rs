//! What the server's own counts say about a part of a run.

use serde_json::{Map, Value, json};

use super::{Field, Series, ServerSide, Snapshot};
use crate::report::Tally;

/// Mean and highest of a value that was looked at again and again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// Mean over the looks.
    pub mean: f64,
    /// Highest of the looks.
    pub most: f64,
}

/// What a server says of a part of a run; none of what it does not say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// Length of the part that the counts are of, in seconds: from the last look before it to the first after it.
    pub length_s: f64,
    /// Mean time of a step, in milliseconds.
    pub step_ms: Option<f64>,
    /// Steps a second.
    pub steps_per_s: Option<f64>,
    /// Share of the time that was spent in steps.
    pub busy: Option<f64>,
    /// Share of the steps' time that rank 0 waited for other ranks.
    pub rank_wait: Option<f64>,
    /// Rows of a step, in the mean.
    pub rows: Option<f64>,
    /// Of these, to decode.
    pub decode_rows: Option<f64>,
    /// Sequences in the batch.
    pub running: Option<Range>,
    /// Sequences that waited for it.
    pub waiting: Option<Range>,
    /// Share of the KV cache in use.
    pub kv_usage: Option<Range>,
    /// Tokens generated a second.
    pub tokens_per_s: Option<f64>,
    /// GB/s (10^9) that steps had to read while they ran, on all ranks.
    pub read_gb_s: Option<f64>,
    /// The same over what can be read.
    pub share_of_read_limit: Option<f64>,
    /// Mean time to the first token as the engine has it, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Mean time between tokens, likewise.
    pub itl_ms: Option<f64>,
    /// Mean time in the queue, likewise.
    pub queue_ms: Option<f64>,
    /// Sequences that lost their place for lack of KV pages.
    pub preemptions: Option<f64>,
    /// Groups of workers lost.
    pub worker_losses: Option<f64>,
    /// Mean time until the next group took over, in seconds.
    pub recovery_s: Option<f64>,
}

impl Series {
    /// The figures of the part from `from_s` to `to_s` of the run.
    pub fn figures(&self, (from_s, to_s): (f64, f64)) -> Figures {
        let first = self.said.iter().rposition(|(time_s, _)| *time_s <= from_s).unwrap_or(0);
        let last = self.said.iter().position(|(time_s, _)| *time_s >= to_s).unwrap_or(self.said.len() - 1).max(first);
        let looks = &self.said[first..=last];
        let ((begun_s, before), (ended_s, after)) = (&self.said[first], &self.said[last]);
        let length_s = ended_s - begun_s;
        let grown = |field| after.since(before, field);
        let mean = |sum, count| grown(sum).zip(grown(count)).filter(|(_, n)| *n > 0.0).map(|(sum, n)| sum / n);
        let per_s = |field| grown(field).filter(|_| length_s > 0.0).map(|count| count / length_s);
        let bytes = grown(Field::ReadBytes).zip(grown(Field::StepSeconds)).filter(|(_, seconds)| *seconds > 0.0);
        let read_gb_s = bytes.map(|(bytes, seconds)| bytes / seconds / 1e9);
        let ms = |seconds: f64| 1e3 * seconds;
        Figures {
            length_s,
            step_ms: mean(Field::StepSeconds, Field::Steps).map(ms),
            steps_per_s: per_s(Field::Steps),
            busy: per_s(Field::StepSeconds),
            rank_wait: mean(Field::WaitSeconds, Field::StepSeconds),
            rows: mean(Field::Rows, Field::Steps),
            decode_rows: mean(Field::DecodeRows, Field::Steps),
            running: range(looks, Field::Running),
            waiting: range(looks, Field::Waiting),
            kv_usage: range(looks, Field::KvUsage),
            tokens_per_s: per_s(Field::GenerationTokens),
            read_gb_s,
            share_of_read_limit: read_gb_s.zip(self.read_limit_gb_s).map(|(read, limit)| read / limit),
            ttft_ms: mean(Field::FirstTokenSeconds, Field::FirstTokens).map(ms),
            itl_ms: mean(Field::GapSeconds, Field::Gaps).map(ms),
            queue_ms: mean(Field::QueueSeconds, Field::Queued).map(ms),
            preemptions: grown(Field::Preemptions),
            worker_losses: grown(Field::WorkerLosses),
            recovery_s: mean(Field::RecoverySeconds, Field::Recoveries),
        }
    }
}

/// Over the looks between the first, from before the part, and the last, from after it; none where it was too short for one.
fn range(looks: &[(f64, Snapshot)], field: Field) -> Option<Range> {
    let within = looks.get(1..looks.len() - 1)?;
    let values: Vec<f64> = within.iter().filter_map(|(_, said)| said.get(field)).collect();
    let most = values.iter().copied().reduce(f64::max)?;
    Some(Range { mean: values.iter().sum::<f64>() / values.len() as f64, most })
}

impl Figures {
    /// Name and value of each figure that is known, for people; with `tally`'s own beside those that the client has, too.
    pub fn in_words(&self, tally: &Tally, read_limit_gb_s: Option<f64>) -> Vec<(&'static str, String)> {
        let metrics = tally.metrics();
        // The server counts every request, the client's figures are of the usual ones.
        let of_which = if tally.misused() > 0 { ", of the requests without a fault" } else { "" };
        let client = |key: &str| {
            let mean = metrics.iter().find(|metric| metric.key == key).and_then(|metric| metric.times.mean_ms());
            mean.map_or_else(String::new, |ms| format!(" (the client's mean{of_which}: {ms:.2} ms)"))
        };
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let mut rows = Vec::new();
        let mut put = |name, value: Option<String>| rows.extend(value.map(|value| (name, value)));
        put(
            "step",
            self.step_ms.zip(self.steps_per_s).zip(self.busy).map(|((ms, per_s), busy)| {
                let waiting = self.rank_wait.filter(|share| *share > 0.0);
                let waiting =
                    waiting.map_or_else(String::new, |share| format!(", {} of that for other ranks", percent(share)));
                format!("{ms:.3} ms in the mean, {per_s:.1} a second, {} of the time in steps{waiting}", percent(busy))
            }),
        );
        put(
            "rows of a step",
            self.rows.map(|rows| match self.decode_rows {
                Some(decode) => {
                    format!("{rows:.2} in the mean: {decode:.2} that decode, {:.2} of prompts", rows - decode)
                }
                None => format!("{rows:.2} in the mean"),
            }),
        );
        let looks = |range: Range| format!("{:.1} in the mean, at most {:.0}", range.mean, range.most);
        put("sequences running", self.running.map(looks));
        put("sequences waiting", self.waiting.map(looks));
        put(
            "KV cache in use",
            self.kv_usage.map(|range| format!("{} in the mean, at most {}", percent(range.mean), percent(range.most))),
        );
        put(
            "read in steps",
            self.read_gb_s.map(|gb_s| match (self.share_of_read_limit, read_limit_gb_s) {
                (Some(share), Some(limit)) => {
                    format!("{gb_s:.1} GB/s, {} of the read limit ({limit:.1} GB/s)", percent(share))
                }
                _ => format!("{gb_s:.1} GB/s (--read-limit says which share of what can be read)"),
            }),
        );
        put(
            "tokens generated",
            self.tokens_per_s.map(|per_s| {
                format!("{per_s:.1} a second (the client's{of_which}: {:.1})", tally.output_tokens_per_s())
            }),
        );
        put("time to first token", self.ttft_ms.map(|ms| format!("{ms:.2} ms in the mean{}", client("ttft"))));
        put("between tokens", self.itl_ms.map(|ms| format!("{ms:.2} ms in the mean{}", client("tpot"))));
        put("in the queue", self.queue_ms.map(|ms| format!("{ms:.2} ms in the mean")));
        put("preempted", self.preemptions.filter(|count| *count > 0.0).map(times));
        put(
            "workers lost",
            self.worker_losses.filter(|count| *count > 0.0).map(|count| {
                let back = self.recovery_s.map_or_else(String::new, |s| format!(", back after {s:.2} s in the mean"));
                times(count) + &back
            }),
        );
        if rows.is_empty() {
            let why = "none: it answered too few questions, does not say enough, or began to count again meanwhile";
            rows.push(("figures", why.into()));
        }
        rows
    }
}

/// "once", "3 times".
pub fn times(count: f64) -> String {
    if count == 1.0 { "once".into() } else { format!("{count:.0} times") }
}

impl ServerSide {
    /// How many groups of workers the server lost over the whole run; none where it does not say.
    pub fn worker_losses(&self) -> Option<f64> {
        match self {
            ServerSide::Unknown(_) => None,
            ServerSide::Seen(series) => series.figures((0.0, f64::INFINITY)).worker_losses,
        }
    }

    /// The part of the report's JSON about the counted part of a run, and what was said at each look.
    pub fn to_json(&self, tally: &Tally) -> Value {
        let series = match self {
            ServerSide::Unknown(why) => return json!({ "unknown": why }),
            ServerSide::Seen(series) => series,
        };
        let figures = series.figures(tally.window_s());
        let range = |range: Option<Range>| range.map(|range| json!({ "mean": range.mean, "max": range.most }));
        let mut fields = Map::new();
        for (name, value) in [
            ("names", json!(series.dialect())),
            ("looks", json!(series.said.len())),
            ("missed_looks", json!(series.missed)),
            ("length_s", json!(figures.length_s)),
            ("mean_step_ms", json!(figures.step_ms)),
            ("steps_per_s", json!(figures.steps_per_s)),
            ("busy_share", json!(figures.busy)),
            ("rank_wait_share", json!(figures.rank_wait)),
            ("rows_per_step", json!(figures.rows)),
            ("decode_rows_per_step", json!(figures.decode_rows)),
            ("running", json!(range(figures.running))),
            ("waiting", json!(range(figures.waiting))),
            ("kv_cache_usage", json!(range(figures.kv_usage))),
            ("generation_throughput", json!(figures.tokens_per_s)),
            ("read_gb_s", json!(figures.read_gb_s)),
            ("read_limit_gb_s", json!(series.read_limit_gb_s)),
            ("share_of_read_limit", json!(figures.share_of_read_limit)),
            ("mean_ttft_ms", json!(figures.ttft_ms)),
            ("mean_itl_ms", json!(figures.itl_ms)),
            ("mean_queue_ms", json!(figures.queue_ms)),
            ("preemptions", json!(figures.preemptions)),
            ("worker_losses", json!(figures.worker_losses)),
            ("mean_recovery_s", json!(figures.recovery_s)),
        ] {
            fields.insert(name.into(), value);
        }
        let look = |field| series.said.iter().map(|(_, said)| said.get(field)).collect::<Vec<_>>();
        fields.insert(
            "timeline".into(),
            json!({
                "time_s": series.said.iter().map(|(time_s, _)| *time_s).collect::<Vec<_>>(),
                "running": look(Field::Running),
                "waiting": look(Field::Waiting),
                "kv_cache_usage": look(Field::KvUsage),
                "steps": look(Field::Steps),
                "step_seconds": look(Field::StepSeconds),
            }),
        );
        Value::Object(fields)
    }
}
