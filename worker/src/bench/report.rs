//! What a benchmark says: the same figures as a table and as JSON.

use std::fmt::{self, Display};
use std::time::Duration;

use serde::Serialize;

use super::group::StepTime;
use crate::cuda::{Exchange, Exchanges, LoopMode, Phase, PhaseTime};

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
    /// Shards that the model was cut into, where the ranks are only some of a group's: its tokens are none of the
    /// model.
    pub shard_of: Option<usize>,
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
    /// Steps with tokens of a prompt beside each batch, where that was asked for.
    pub beside: Vec<BesideReport>,
}

/// How long a step takes that also computes tokens of a prompt.
#[derive(Debug, Clone, Serialize)]
pub struct BesideReport {
    /// Sequences that decode.
    pub batch: u32,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Median time of a step, in ms.
    pub step_ms: f64,
    /// The fastest, in ms.
    pub best_step_ms: f64,
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
    /// The same as work: TFLOP/s of the layers' products, of the last layer q, k and v alone: nothing else of it is
    /// computed for all tokens. Attention and the LM head take time, but count for nothing.
    pub tflop_per_s: f64,
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
    /// Positions that a step of a sequence sees in the mean.
    pub mean_context: f64,
    /// How phases became launches, on a GPU.
    pub loop_mode: Option<LoopMode>,
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
    /// Time of the step at the fastest pass of the read bandwidth, in ms.
    pub floor_ms: f64,
    /// `step_ms` over that of batch 1, where that was measured in the same mode.
    pub times_batch_1: Option<f64>,
    /// `step_ms` over that of the same batch in the loop, where that was measured.
    pub times_looped: Option<f64>,
    /// Clock of a GPU's multiprocessors while `phases` was noted, in MHz: it moves with power and temperature, and what
    /// waits takes with it; looped only.
    pub sm_mhz: Option<f64>,
    /// What its time goes into, on a GPU: of one step, that notes times and takes a little longer for it.
    pub phases: Vec<PhaseReport>,
    /// How long ranks took to exchange sums in that step: in the loop of narrow passes of several GPUs.
    pub exchanges: Option<Exchanges>,
}

/// A phase of a step, in all layers.
#[derive(Debug, Clone, Serialize)]
pub struct PhaseReport {
    /// Which.
    pub phase: Phase,
    /// Bytes of weights, or K and V, that it reads.
    pub bytes: u64,
    /// Its time, in microseconds. In the loop that of consumer warps in the mean: what a phase streams may have come
    /// before it.
    pub us: f64,
    /// How much of it they waited for what other blocks compute, in microseconds; looped only.
    pub wait_us: Option<f64>,
    /// GB/s (10^9).
    pub gb_s: f64,
    /// `gb_s` over the fastest pass of the read bandwidth.
    pub share_of_best_read: f64,
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
            floor_ms: (weight_bytes + kv_bytes) as f64 / read.best_gb_s / 1e6,
            times_batch_1: None,
            mean_context: 0.0,
            loop_mode: None,
            times_looped: None,
            sm_mhz: None,
            phases: Vec::new(),
            exchanges: None,
        }
    }
}

impl PhaseReport {
    /// From the time of a phase that read so many bytes.
    pub fn new(time: PhaseTime, bytes: u64, read: &Read) -> Self {
        let gb_s = bytes as f64 / time.us.max(f64::MIN_POSITIVE) / 1e3;
        let PhaseTime { phase, us, wait_us } = time;
        Self { phase, bytes, us, wait_us, gb_s, share_of_best_read: gb_s / read.best_gb_s }
    }
}

impl BesideReport {
    /// From the times of steps; at least one.
    pub fn new(batch: u32, tokens: u32, mut times: Vec<Duration>) -> Self {
        times.sort();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Self { batch, tokens, step_ms: ms(times[times.len() / 2]), best_step_ms: ms(times[0]) }
    }
}

impl PromptReport {
    /// From the times of a prompt of `tokens` tokens; at least one. weights: parameters that each token is multiplied
    /// by, those of the layers' products but for the last layer's behind q, k and v, which only the last token needs.
    pub fn new(tokens: u32, mut times: Vec<Duration>, weights: usize) -> Self {
        times.sort();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let median = ms(times[times.len() / 2]);
        let tokens_per_s = f64::from(tokens) / median * 1e3;
        let tflop_per_s = tokens_per_s * 2.0 * weights as f64 / 1e12;
        Self { tokens, ms: median, best_ms: ms(times[0]), tokens_per_s, tflop_per_s }
    }
}

impl Report {
    /// Relates every batch to batch 1 and to the loop, where those were measured.
    pub fn relate(&mut self) {
        let measured: Vec<_> = self.batches.iter().map(|of| (of.batch, of.loop_mode, of.step_ms)).collect();
        let ms = |batch, mode| measured.iter().find(|of| (of.0, of.1) == (batch, mode)).map(|of| of.2);
        for of in &mut self.batches {
            of.times_batch_1 = ms(1, of.loop_mode).map(|alone| of.step_ms / alone);
            of.times_looped = ms(of.batch, Some(LoopMode::On)).map(|looped| of.step_ms / looped);
        }
    }
}

impl Display for BatchReport {
    /// Its phases.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.phases.iter().map(|of| of.bytes).sum::<u64>() as f64;
        let us = self.phases.iter().map(|of| of.us).sum::<f64>();
        let floor = self.floor_ms * 1e3;
        write!(f, "batch {}, loop {}: phases of a step that notes times", self.batch, mode_name(self.loop_mode))?;
        writeln!(f, "{}", self.sm_mhz.map_or(String::new(), |mhz| format!(", multiprocessors at {mhz:.0} MHz")))?;
        for title in ["phase", "MB", "us", "waiting", "GB/s", "of best"] {
            write!(f, "{title:>11}")?;
        }
        writeln!(f)?;
        for of in &self.phases {
            write!(f, "{:>11}{:>11.1}{:>11.1}", of.phase.name(), of.bytes as f64 / 1e6, of.us)?;
            match of.wait_us {
                Some(wait) => write!(f, "{wait:>11.1}")?,
                None => write!(f, "{:>11}", "-")?,
            }
            match of.bytes {
                0 => writeln!(f, "{:>11}{:>11}", "-", "-")?,
                _ => writeln!(f, "{:>11.0}{:>10.1}%", of.gb_s, of.share_of_best_read * 100.0)?,
            }
        }
        let rate = bytes / us / 1e3;
        writeln!(
            f,
            "{:>11}{:>11.1}{us:>11.1}{:>11}{rate:>11.0}{:>10.1}%",
            "step",
            bytes / 1e6,
            "",
            floor / us * 100.0
        )?;
        self.exchanges.as_ref().map_or(Ok(()), |exchanges| write_exchanges(exchanges, f))
    }
}

fn write_exchanges(exchanges: &Exchanges, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Exchanges { sums, nearest_us, farthest_us, closure_us, drift_us } = exchanges;
    let told = |Exchange { phase, push_to_use, push_to_heard, word, .. }: &Exchange| {
        let (all, heard, word) = (push_to_use, push_to_heard.median_us, word.median_us);
        let name = phase.name();
        format!(
            "{name} {:.2} (mean {:.2}, most {:.2}; {heard:.2} to all heard, {word:.2} for a word)",
            all.median_us, all.mean_us, all.most_us
        )
    };
    let told: Vec<_> = sums.iter().map(told).collect();
    writeln!(f, "us from the last push of sums to their last use, median of layers: {}", told.join(", "))?;
    write!(f, "a word between ranks takes {nearest_us:.2} to {farthest_us:.2} us at least; their clocks agree to ")?;
    match closure_us {
        Some(closure) => writeln!(f, "{closure:.2} us among three ranks, {drift_us:.2} between halves of the layers"),
        None => writeln!(f, "{drift_us:.2} us between halves of the layers"),
    }
}

/// As on the command line.
fn mode_name(mode: Option<LoopMode>) -> &'static str {
    match mode {
        None => "-",
        Some(LoopMode::On) => "on",
        Some(LoopMode::Off) => "off",
        Some(LoopMode::Overlapped) => "overlapped",
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weights = if self.random_weights { "random weights" } else { "its own weights" };
        let processor = self.processor.as_deref().unwrap_or("an unnamed processor");
        writeln!(f, "Looplane {} · {}, {weights} · {}: {processor}", self.version, self.model, self.device)?;
        writeln!(f, "{} ranks, {} threads each; {}", self.tensor_parallel, self.threads, self.notes.join("; "))?;
        if let Some(shards) = self.shard_of {
            let ranks = self.tensor_parallel;
            writeln!(
                f,
                "STREAM OF A LARGER GROUP: each rank has a shard of {shards} and exchanges sums with {} of {} peers",
                ranks - 1,
                shards - 1
            )?;
        }
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
        writeln!(f, "{:>11}{:>11}{:>11}{:>11}{:>11}", "tokens/s", "x batch 1", "floor ms", "loop", "x looped")?;
        for of in &self.batches {
            write!(f, "{:>11}{:>11.2}{:>11.2}{:>11.2}", of.batch, of.step_ms, of.best_step_ms, of.wait_ms)?;
            write!(f, "{:>11.1}{:>11.2}", (of.weight_bytes + of.kv_bytes) as f64 / 1e6, of.gb_s)?;
            for share in [of.share_of_median_read, of.share_of_best_read, of.best_share] {
                write!(f, "{:>10.1}%", share * 100.0)?;
            }
            write!(f, "{:>11.1}", of.tokens_per_s)?;
            let times = |times: Option<f64>| times.map_or("-".to_owned(), |times| format!("{times:.2}"));
            write!(f, "{:>11}{:>11.2}", times(of.times_batch_1), of.floor_ms)?;
            writeln!(f, "{:>11}{:>11}", mode_name(of.loop_mode), times(of.times_looped))?;
        }
        for of in self.batches.iter().filter(|of| !of.phases.is_empty()) {
            writeln!(f, "\n{of}")?;
        }
        if let Some(PromptReport { tokens, ms, best_ms, tokens_per_s, tflop_per_s }) = &self.prompt {
            writeln!(
                f,
                "\nprompt of {tokens} tokens: {ms:.1} ms to its first token, {best_ms:.1} at best, {tokens_per_s:.0} \
                 tokens/s, {tflop_per_s:.3} TFLOP/s"
            )?;
        }
        for BesideReport { batch, tokens, step_ms, best_step_ms } in &self.beside {
            writeln!(
                f,
                "\nbatch {batch} beside {tokens} tokens of a prompt: {step_ms:.2} ms a step, {best_step_ms:.2} at best"
            )?;
        }
        writeln!(f, "\nof read: median step against median pass; of best: median step against fastest pass")
    }
}
