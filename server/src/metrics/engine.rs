//! What the engine counts: sequences, tokens, steps, KV pages, workers lost.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use super::histogram::{Bounds, Histogram};
use super::ranks::Ranks;
use crate::drafts::{DraftStep, MOST_DRAFTS};
use crate::sched::Load;

/// Steps: from a quarter of a millisecond, the least of small models on GPUs.
const STEPS: Bounds = Bounds::Micros(&[
    250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5000, 7500, 10_000, 15_000, 25_000, 50_000, 75_000, 100_000, 150_000,
    250_000, 500_000, 1_000_000, 2_500_000, 10_000_000,
]);
/// Between tokens: vLLM's bounds, and below its first those of steps.
const GAPS: Bounds = Bounds::Micros(&[
    250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5000, 7500, 10_000, 25_000, 50_000, 75_000, 100_000, 150_000, 200_000,
    300_000, 400_000, 500_000, 750_000, 1_000_000, 2_500_000, 5_000_000, 7_500_000, 10_000_000, 20_000_000, 40_000_000,
    80_000_000,
]);
/// Up to the first token: vLLM's bounds.
const FIRST: Bounds = Bounds::Micros(&[
    1000,
    5000,
    10_000,
    20_000,
    40_000,
    60_000,
    80_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    20_000_000,
    40_000_000,
    80_000_000,
    160_000_000,
    640_000_000,
    2_560_000_000,
]);
/// Whole requests and their parts, and groups of workers that come back: vLLM's bounds, and three below its first.
const WHOLE: Bounds = Bounds::Micros(&[
    50_000,
    100_000,
    200_000,
    300_000,
    500_000,
    800_000,
    1_000_000,
    1_500_000,
    2_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    15_000_000,
    20_000_000,
    30_000_000,
    40_000_000,
    50_000_000,
    60_000_000,
    120_000_000,
    240_000_000,
    480_000_000,
    960_000_000,
    1_920_000_000,
    7_680_000_000,
]);
/// Tokens of a request.
const TOKENS: Bounds =
    Bounds::Counts(&[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000]);
/// Rows of a step.
const ROWS: Bounds = Bounds::Counts(&[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]);

/// How a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ended {
    /// A stop token or a stop text.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// Its client went away.
    Abort,
    /// The server gave it up.
    Error,
}

impl Ended {
    pub(super) const ALL: [Ended; 4] = [Ended::Stop, Ended::Length, Ended::Abort, Ended::Error];

    /// vLLM's word.
    pub(super) fn word(self) -> &'static str {
        match self {
            Ended::Stop => "stop",
            Ended::Length => "length",
            Ended::Abort => "abort",
            Ended::Error => "error",
        }
    }
}

/// A step that was run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRun {
    /// Rows that decoded.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prompt_rows: u64,
    /// Its duration on rank 0.
    pub time: Duration,
    /// Of that, waiting for other ranks, where the backend tells.
    pub wait: Option<Duration>,
    /// Bytes that all ranks together had to read at least: the weights once, those of the LM head if it sampled, K and
    /// V of what its rows see.
    pub read_bytes: u64,
}

/// Everything that the engine counts. Its one task writes, scrapes read.
#[derive(Debug, Clone)]
pub struct EngineMetrics {
    pub(super) running: Gauge<u64, AtomicU64>,
    pub(super) waiting: Gauge<u64, AtomicU64>,
    pub(super) kv_usage: Gauge<f64, AtomicU64>,
    pub(super) kv_pages_used: Gauge<u64, AtomicU64>,
    pub(super) kv_pages_cached: Gauge<u64, AtomicU64>,
    pub(super) kv_pages: Gauge<u64, AtomicU64>,
    /// Positions of a KV page.
    pub page_positions: Gauge<u64, AtomicU64>,
    /// Bytes of the KV cache of all ranks.
    pub kv_bytes: Gauge<u64, AtomicU64>,
    /// Bytes of weights that a pass streams, on all ranks.
    pub stream_bytes: Gauge<u64, AtomicU64>,
    pub(super) preemptions: Counter,
    /// By [`Ended`].
    pub(super) ended: [Counter; Ended::ALL.len()],
    /// Tokens of prompts, counted with the first token that follows them.
    pub prompt_tokens: Counter,
    /// Tokens of prompts that the prefix cache was asked for.
    pub prefix_cache_queries: Counter,
    /// Those of them that it held.
    pub prefix_cache_hits: Counter,
    pub(super) drafts: Counter,
    pub(super) draft_tokens: Counter,
    pub(super) accepted_tokens: Counter,
    /// By the place of a token in its draft.
    pub(super) accepted_by_position: [Counter; MOST_DRAFTS as usize],
    /// Tokens that readers took: what `usage` tells clients, summed up.
    pub generation_tokens: Counter,
    /// Tokens of a prompt.
    pub request_prompt_tokens: Histogram,
    /// Tokens generated for a sequence, counted at its end.
    pub request_generation_tokens: Histogram,
    /// From submission to the first admission.
    pub queue_time: Histogram,
    /// From admission to the first token.
    pub prefill_time: Histogram,
    /// From the first token to the last.
    pub decode_time: Histogram,
    /// From admission to the last token.
    pub inference_time: Histogram,
    /// From the first token to the last, by the tokens behind the first.
    pub time_per_token: Histogram,
    /// From submission to the first token.
    pub first_token: Histogram,
    /// Between two tokens of a sequence, as the engine has them: slow readers do not count.
    pub inter_token: Histogram,
    /// From submission to the end.
    pub end_to_end: Histogram,
    /// Plans sent to the workers.
    pub plans: Counter,
    pub(super) step_time: Histogram,
    pub(super) step_wait: Histogram,
    pub(super) step_rows: Histogram,
    pub(super) decode_rows: Counter,
    pub(super) prompt_rows: Counter,
    pub(super) read_bytes: Counter,
    /// Groups of workers lost.
    pub losses: Counter,
    /// From the loss of a group until its successor takes plans.
    pub recovery: Histogram,
    /// What each rank does in its steps.
    pub ranks: Arc<Ranks>,
}

impl Default for EngineMetrics {
    fn default() -> Self {
        Self {
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_usage: Gauge::default(),
            kv_pages_used: Gauge::default(),
            kv_pages_cached: Gauge::default(),
            kv_pages: Gauge::default(),
            page_positions: Gauge::default(),
            kv_bytes: Gauge::default(),
            stream_bytes: Gauge::default(),
            preemptions: Counter::default(),
            ended: Default::default(),
            prompt_tokens: Counter::default(),
            prefix_cache_queries: Counter::default(),
            prefix_cache_hits: Counter::default(),
            drafts: Counter::default(),
            draft_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            accepted_by_position: Default::default(),
            generation_tokens: Counter::default(),
            request_prompt_tokens: Histogram::new(TOKENS),
            request_generation_tokens: Histogram::new(TOKENS),
            queue_time: Histogram::new(FIRST),
            prefill_time: Histogram::new(FIRST),
            decode_time: Histogram::new(WHOLE),
            inference_time: Histogram::new(WHOLE),
            time_per_token: Histogram::new(GAPS),
            first_token: Histogram::new(FIRST),
            inter_token: Histogram::new(GAPS),
            end_to_end: Histogram::new(WHOLE),
            plans: Counter::default(),
            step_time: Histogram::new(STEPS),
            step_wait: Histogram::new(STEPS),
            step_rows: Histogram::new(ROWS),
            decode_rows: Counter::default(),
            prompt_rows: Counter::default(),
            read_bytes: Counter::default(),
            losses: Counter::default(),
            recovery: Histogram::new(WHOLE),
            ranks: Arc::default(),
        }
    }
}

impl EngineMetrics {
    /// Takes note of what is at hand now.
    pub fn set_load(&self, load: Load) {
        self.running.set(load.running);
        self.waiting.set(load.waiting);
        self.kv_pages_used.set(load.kv_pages_used);
        self.kv_pages_cached.set(load.kv_pages_cached);
        self.kv_pages.set(load.kv_pages);
        self.kv_usage.set(load.kv_pages_used as f64 / load.kv_pages.max(1) as f64);
        // The scheduler counts them; this only follows.
        self.preemptions.inc_by(load.preemptions - self.preemptions.get());
    }

    /// What was at hand when that was noted last.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.get(),
            waiting: self.waiting.get(),
            kv_pages_used: self.kv_pages_used.get(),
            kv_pages_cached: self.kv_pages_cached.get(),
            kv_pages: self.kv_pages.get(),
            preemptions: self.preemptions.get(),
        }
    }

    /// Counts a step.
    pub fn step(&self, step: StepRun) {
        self.step_time.observe(step.time);
        if let Some(wait) = step.wait {
            self.step_wait.observe(wait);
        }
        self.step_rows.observe_count(step.decode_rows + step.prompt_rows);
        self.decode_rows.inc_by(step.decode_rows);
        self.prompt_rows.inc_by(step.prompt_rows);
        self.read_bytes.inc_by(step.read_bytes);
    }

    /// Counts how the drafts of a sequence fared in a step.
    pub fn drafts(&self, step: DraftStep) {
        self.drafts.inc();
        self.draft_tokens.inc_by(step.drafted.into());
        self.accepted_tokens.inc_by(step.accepted.into());
        self.accepted_by_position.iter().take(step.accepted as usize).for_each(|accepted| _ = accepted.inc());
    }

    /// Counts the end of a sequence.
    pub fn ended(&self, how: Ended) {
        self.ended[how as usize].inc();
    }

    /// Steps run.
    pub fn steps(&self) -> u64 {
        self.step_time.count()
    }

    /// Rows computed.
    pub fn rows(&self) -> u64 {
        self.decode_rows.get() + self.prompt_rows.get()
    }

    /// Time in steps, and waiting for other ranks in them where that was told, in nanoseconds.
    pub fn step_ns(&self) -> (u64, Option<u64>) {
        (self.step_time.sum(), (self.step_wait.count() > 0).then(|| self.step_wait.sum()))
    }
}
