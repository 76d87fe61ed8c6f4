//! What the engine counts: sequences, tokens, steps, KV pages, workers lost.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::histogram::{Bounds, Histogram};
use crate::drafts::DraftStep;
use crate::sched::Load;

/// Steps, and the gaps between tokens: from a quarter of a millisecond, the least of small models on GPUs.
const STEPS: Bounds = Bounds::Micros(&[
    250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5000, 7500, 10_000, 15_000, 25_000, 50_000, 75_000, 100_000, 150_000,
    250_000, 500_000, 1_000_000, 2_500_000, 10_000_000,
]);
/// Up to the first token: waiting and prompts. vLLM's bounds, as far as a request may wait here.
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
]);
/// Whole requests, and groups of workers that come back.
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
]);
/// Tokens of a request.
const TOKENS: Bounds =
    Bounds::Counts(&[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000]);
/// Rows of a step.
const ROWS: Bounds = Bounds::Counts(&[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    finished_reason: &'static str,
}

/// Place of a token in a draft, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DraftPosition {
    position: u32,
}

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
    const ALL: [Ended; 4] = [Ended::Stop, Ended::Length, Ended::Abort, Ended::Error];

    /// vLLM's word.
    fn label(self) -> Finished {
        let finished_reason = match self {
            Ended::Stop => "stop",
            Ended::Length => "length",
            Ended::Abort => "abort",
            Ended::Error => "error",
        };
        Finished { finished_reason }
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
    /// Of that, waiting for other ranks.
    pub wait: Duration,
    /// Bytes that all ranks together had to read at least: the weights once, those of the LM head if it sampled, K and
    /// V of what its rows see.
    pub read_bytes: u64,
}

/// Everything that the engine counts. Its one task writes, scrapes read.
#[derive(Debug, Clone)]
pub struct EngineMetrics {
    running: Gauge<u64, AtomicU64>,
    waiting: Gauge<u64, AtomicU64>,
    kv_usage: Gauge<f64, AtomicU64>,
    kv_pages_used: Gauge<u64, AtomicU64>,
    kv_pages_cached: Gauge<u64, AtomicU64>,
    kv_pages: Gauge<u64, AtomicU64>,
    /// Bytes of the KV cache of all ranks.
    pub kv_bytes: Gauge<u64, AtomicU64>,
    /// Bytes of weights that a pass streams, on all ranks.
    pub stream_bytes: Gauge<u64, AtomicU64>,
    preemptions: Counter,
    finished: Family<Finished, Counter>,
    /// The counters of `finished`, as [`Ended`] counts: looking one up takes a lock.
    ended: [Counter; Ended::ALL.len()],
    /// Tokens of prompts, counted with the first token that follows them.
    pub prompt_tokens: Counter,
    /// Tokens of prompts that the prefix cache was asked for.
    pub prefix_cache_queries: Counter,
    /// Those of them that it held.
    pub prefix_cache_hits: Counter,
    drafts: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    accepted_by_position: Family<DraftPosition, Counter>,
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
    /// From submission to the first token.
    pub first_token: Histogram,
    /// Between two tokens of a sequence, as the engine has them: slow readers do not count.
    pub inter_token: Histogram,
    /// From submission to the end.
    pub end_to_end: Histogram,
    /// Plans sent to the workers.
    pub plans: Counter,
    step_time: Histogram,
    step_wait: Histogram,
    step_rows: Histogram,
    decode_rows: Counter,
    prompt_rows: Counter,
    read_bytes: Counter,
    /// Groups of workers lost.
    pub losses: Counter,
    /// From the loss of a group until its successor takes plans.
    pub recovery: Histogram,
}

impl Default for EngineMetrics {
    fn default() -> Self {
        let finished = Family::default();
        // Present from the start: a rate needs a value before the first event.
        let ended = Ended::ALL.map(|how| Family::<Finished, Counter>::get_or_create_owned(&finished, &how.label()));
        Self {
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_usage: Gauge::default(),
            kv_pages_used: Gauge::default(),
            kv_pages_cached: Gauge::default(),
            kv_pages: Gauge::default(),
            kv_bytes: Gauge::default(),
            stream_bytes: Gauge::default(),
            preemptions: Counter::default(),
            finished,
            ended,
            prompt_tokens: Counter::default(),
            prefix_cache_queries: Counter::default(),
            prefix_cache_hits: Counter::default(),
            drafts: Counter::default(),
            draft_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            accepted_by_position: Family::default(),
            generation_tokens: Counter::default(),
            request_prompt_tokens: Histogram::new(TOKENS),
            request_generation_tokens: Histogram::new(TOKENS),
            queue_time: Histogram::new(FIRST),
            prefill_time: Histogram::new(FIRST),
            decode_time: Histogram::new(WHOLE),
            first_token: Histogram::new(FIRST),
            inter_token: Histogram::new(STEPS),
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
        self.step_wait.observe(step.wait);
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
        for position in 0..step.accepted {
            self.accepted_by_position.get_or_create(&DraftPosition { position }).inc();
        }
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

    /// Time in steps, and waiting for other ranks in them, in nanoseconds.
    pub fn step_ns(&self) -> (u64, u64) {
        (self.step_time.sum(), self.step_wait.sum())
    }

    /// Gives everything its name.
    pub fn register(&self, registry: &mut Registry) {
        self.register_requests(registry);
        let r = registry;
        r.register("kv_cache_usage_perc", "Share of the KV pages that sequences hold, 0 to 1", self.kv_usage.clone());
        r.register("kv_cache_pages_used", "KV pages that sequences hold", self.kv_pages_used.clone());
        let help = "KV pages that nobody holds, kept for prompts that begin with the same: taken when memory is needed";
        r.register("kv_cache_pages_cached", help, self.kv_pages_cached.clone());
        r.register("kv_cache_pages", "KV pages of the group", self.kv_pages.clone());
        r.register("kv_cache_size_bytes", "KV cache of all ranks", self.kv_bytes.clone());
        r.register("weight_stream_bytes", "Weights that a pass streams, of all ranks", self.stream_bytes.clone());
        let help = "Times a sequence gave up its slot: for want of pages, to others while its reader was behind, or for a trial";
        r.register("num_preemptions", help, self.preemptions.clone());
        r.register("plans", "Plans sent to the workers", self.plans.clone());
        let step = "Duration of a step on rank 0: a token of every sequence that decodes, and chunks of prompts";
        r.register_with_unit("step_duration", step, Unit::Seconds, self.step_time.clone());
        let wait = "Of a step on rank 0, waiting for other ranks";
        r.register_with_unit("step_wait", wait, Unit::Seconds, self.step_wait.clone());
        r.register("step_rows", "Rows (tokens) of a step, of prompts and decoding", self.step_rows.clone());
        r.register("decode_rows", "Rows computed to decode", self.decode_rows.clone());
        let rows = "Rows computed of prompts, and again of what was preempted or lost with its workers";
        r.register("prompt_rows", rows, self.prompt_rows.clone());
        let bytes = "Bytes that steps had to read at least, on all ranks: weights once a step, without the LM head \
                     where none samples, K and V of what its rows see";
        r.register("step_read_bytes", bytes, self.read_bytes.clone());
        r.register("worker_losses", "Groups of workers lost, also where none was started again", self.losses.clone());
        let recovery = "From the loss of a group of workers until the next takes work";
        r.register_with_unit("worker_recovery", recovery, Unit::Seconds, self.recovery.clone());
    }

    fn register_requests(&self, r: &mut Registry) {
        r.register("num_requests_running", "Sequences in slots of the batch", self.running.clone());
        r.register("num_requests_waiting", "Sequences that wait for a slot", self.waiting.clone());
        let help = "Sequences that ended, by reason (abort: the client went away; error: the server gave it up)";
        r.register("request_success", help, self.finished.clone());
        r.register("prompt_tokens", "Tokens of prompts, those that were cached included", self.prompt_tokens.clone());
        let help = "Steps of sequences that had drafts";
        r.register("spec_decode_num_drafts", help, self.drafts.clone());
        let help = "Tokens that were drafted: rows of steps that count if they are what is sampled in front of them";
        r.register("spec_decode_num_draft_tokens", help, self.draft_tokens.clone());
        let help = "Drafted tokens that were accepted";
        r.register("spec_decode_num_accepted_tokens", help, self.accepted_tokens.clone());
        let help = "Drafted tokens that were accepted, by their position in the draft";
        r.register("spec_decode_num_accepted_tokens_per_pos", help, self.accepted_by_position.clone());
        let help = "Tokens of prompts that the prefix cache was asked for";
        r.register("prefix_cache_queries", help, self.prefix_cache_queries.clone());
        let help = "Tokens of prompts that were not computed, since the prefix cache held them";
        r.register("prefix_cache_hits", help, self.prefix_cache_hits.clone());
        r.register(
            "generation_tokens",
            "Tokens generated, as clients are told in usage",
            self.generation_tokens.clone(),
        );
        r.register("request_prompt_tokens", "Tokens of a prompt", self.request_prompt_tokens.clone());
        let help = "Tokens generated for a sequence";
        r.register("request_generation_tokens", help, self.request_generation_tokens.clone());
        for (name, help, times) in [
            ("time_to_first_token", "From submission to the first token", &self.first_token),
            (
                "inter_token_latency",
                "Between two tokens of a sequence, as they come out of the loop",
                &self.inter_token,
            ),
            ("e2e_request_latency", "From submission to the end", &self.end_to_end),
            ("request_queue_time", "From submission to the first admission to a slot", &self.queue_time),
            ("request_prefill_time", "From admission to the first token", &self.prefill_time),
            ("request_decode_time", "From the first token to the last", &self.decode_time),
        ] {
            r.register_with_unit(name, help, Unit::Seconds, times.clone());
        }
    }
}
