//! What a benchmark says: the same figures as a table and as JSON.

use std::fmt::{self, Display};
use std::time::Duration;

use serde::Serialize;

use super::group::StepTime;

/// A whole run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of Looplane.
    pub version: &'static str,
    /// Name of the shape, or the model's directory.
    pub model: String,
    /// Whether weights were made up.
    pub random_weights: bool,
    /// Where it was computed.
    pub device: &'static str,
    /// The processor's name, where the system tells.
    pub processor: Option<String>,
    /// Ranks.
    pub tensor_parallel: usize,
    /// Compute threads of each rank.
    pub threads: usize,
    /// Notes of the load of rank 0: instruction set, cores.
    pub notes: Vec<String>,
    /// Tokens of each sequence before the first step.
    pub context: u32,
    /// Steps measured of each batch.
    pub steps: u32,
    /// The machine's read bandwidth, measured between the steps.
    pub read: Read,
    /// By batch, in the order asked for.
    pub batches: Vec<BatchReport>,
    /// How fast a prompt is computed, where that was asked for.
    pub prompt: Option<PromptReport>,
}

/// How fast a prompt is computed while nobody decodes.
#[derive(Debug, Clone, Serialize)]
pub struct PromptReport {
    /// Its tokens.
    pub tokens: u32,
    /// Median time from the first plan to the first token, in ms.
    pub ms: f64,
    /// The fastest, in ms.
    pub best_ms: f64,
    /// Tokens of the prompt a second, in the median.
    pub tokens_per_s: f64,
}

/// How fast the machine reads memory with as many threads.
#[derive(Debug, Clone, Serialize)]
pub struct Read {
    /// Bytes of a pass.
    pub bytes: u64,
    /// Passes.
    pub passes: usize,
    /// GB/s (10^9) of the fastest pass.
    pub best_gb_s: f64,
    /// GB/s of the median pass.
    pub median_gb_s: f64,
}

/// How fast a batch decodes.
#[derive(Debug, Clone, Serialize)]
pub struct BatchReport {
    /// Sequences.
    pub batch: u32,
    /// Median time of a step, sampling included, in ms: a token of each sequence.
    pub step_ms: f64,
    /// Time of the fastest step, in ms.
    pub best_step_ms: f64,
    /// Mean time of a step that rank 0 waited for other ranks, in ms.
    pub wait_ms: f64,
    /// Bytes of weights that stream in a step, of all ranks.
    pub weight_bytes: u64,
    /// Mean bytes of K and V that a step reads, of all ranks.
    pub kv_bytes: u64,
    /// GB/s (10^9) of the median step: weights, K and V.
    pub gb_s: f64,
    /// `gb_s` over the median pass of the read bandwidth.
    pub share_of_median_read: f64,
    /// `gb_s` over the fastest pass of the read bandwidth.
    pub share_of_best_read: f64,
    /// Fastest step against fastest pass.
    pub best_share: f64,
    /// Tokens a second of all sequences together.
    pub tokens_per_s: f64,
    /// `step_ms` over that of batch 1, where that was measured.
    pub times_batch_1: Option<f64>,
}

impl Read {
    /// From the times of passes of `bytes`; at least one.
    pub fn new(bytes: u64, mut passes: Vec<Duration>) -> Self {
        passes.sort();
        let rate = |pass: Duration| bytes as f64 / pass.as_secs_f64() / 1e9;
        Self { bytes, passes: passes.len(), best_gb_s: rate(passes[0]), median_gb_s: rate(passes[passes.len() / 2]) }
    }
}

impl BatchReport {
    /// From the times of steps (at least one) that read so many bytes each.
    pub fn new(batch: u32, times: &[StepTime], weight_bytes: u64, kv_bytes: u64, read: &Read) -> Self {
        let mut ms: Vec<f64> = times.iter().map(|time| time.step.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let (best, median) = (ms[0], ms[ms.len() / 2]);
        let rate = |ms: f64| (weight_bytes + kv_bytes) as f64 / ms / 1e6;
        let waited: Duration = times.iter().map(|time| time.wait).sum();
        Self {
            batch,
            step_ms: median,
            best_step_ms: best,
            wait_ms: waited.as_secs_f64() * 1e3 / times.len() as f64,
            weight_bytes,
            kv_bytes,
            gb_s: rate(median),
            share_of_median_read: rate(median) / read.median_gb_s,
            share_of_best_read: rate(median) / read.best_gb_s,
            best_share: rate(best) / read.best_gb_s,
            tokens_per_s: f64::from(batch) / median * 1e3,
            times_batch_1: None,
        }
    }
}

impl PromptReport {
    /// From the times of a prompt of `tokens` tokens; at least one.
    pub fn new(tokens: u32, mut times: Vec<Duration>) -> Self {
        times.sort();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let median = ms(times[times.len() / 2]);
        Self { tokens, ms: median, best_ms: ms(times[0]), tokens_per_s: f64::from(tokens) / median * 1e3 }
    }
}

impl Report {
    /// Relates every batch to batch 1, where that was measured.
    pub fn relate(&mut self) {
        let alone = self.batches.iter().find(|of| of.batch == 1).map(|of| of.step_ms);
        self.batches.iter_mut().for_each(|of| of.times_batch_1 = alone.map(|alone| of.step_ms / alone));
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weights = if self.random_weights { "random weights" } else { "its own weights" };
        let processor = self.processor.as_deref().unwrap_or("an unnamed processor");
        writeln!(f, "Looplane {} · {}, {weights} · {}: {processor}", self.version, self.model, self.device)?;
        writeln!(f, "{} ranks, {} threads each; {}", self.tensor_parallel, self.threads, self.notes.join("; "))?;
        let read = &self.read;
        writeln!(
            f,
            "read bandwidth {:.1} GB/s at best, {:.1} GB/s in the median of {} passes over {} MiB",
            read.best_gb_s,
            read.median_gb_s,
            read.passes,
            read.bytes >> 20
        )?;
        writeln!(f, "context {} and up, {} steps of each batch\n", self.context, self.steps)?;
        let titles = ["batch", "ms a step", "best", "waiting", "MB a step", "GB/s", "of read", "of best", "best/best"];
        for title in titles {
            write!(f, "{title:>11}")?;
        }
        writeln!(f, "{:>11}{:>11}", "tokens/s", "x batch 1")?;
        for of in &self.batches {
            write!(f, "{:>11}{:>11.2}{:>11.2}{:>11.2}", of.batch, of.step_ms, of.best_step_ms, of.wait_ms)?;
            write!(f, "{:>11.1}{:>11.2}", (of.weight_bytes + of.kv_bytes) as f64 / 1e6, of.gb_s)?;
            for share in [of.share_of_median_read, of.share_of_best_read, of.best_share] {
                write!(f, "{:>10.1}%", share * 100.0)?;
            }
            write!(f, "{:>11.1}", of.tokens_per_s)?;
            match of.times_batch_1 {
                Some(times) => writeln!(f, "{times:>11.2}")?,
                None => writeln!(f, "{:>11}", "-")?,
            }
        }
        if let Some(PromptReport { tokens, ms, best_ms, tokens_per_s }) = &self.prompt {
            writeln!(
                f,
                "\nprompt of {tokens} tokens: {ms:.1} ms to its first token, {best_ms:.1} at best, {tokens_per_s:.0} tokens/s"
            )?;
        }
        writeln!(f, "\nof read: median step against median pass; of best: median step against fastest pass")
    }
}
