//! What an engine has counted so far, as one value: for whoever shows it without a Prometheus in between.

use serde::Serialize;

use super::engine::EngineMetrics;
use super::histogram::Histogram;
use super::ranks::Rank;

/// Of one engine. What is counted grows from its start on; what it is at is as of now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// Sequences in slots of the batch.
    pub running: u64,
    /// Sequences that wait for a slot.
    pub waiting: u64,
    /// Times a sequence gave up its slot.
    pub preemptions: u64,
    /// Groups of workers lost.
    pub losses: u64,
    /// KV pages.
    pub kv_pages: u64,
    /// Those that sequences hold.
    pub kv_pages_used: u64,
    /// Those that nobody holds, kept for prompts to come.
    pub kv_pages_cached: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tokens of prompts that the prefix cache was asked for.
    pub cache_queries: u64,
    /// Those of them that it held.
    pub cache_hits: u64,
    /// Tokens that were drafted.
    pub drafted_tokens: u64,
    /// Those of them that were accepted.
    pub accepted_tokens: u64,
    /// From submission to the first token.
    pub first_token: Times,
    /// Between two tokens of a sequence.
    pub inter_token: Times,
    /// Steps on rank 0.
    pub steps: Times,
    /// By number.
    pub ranks: Vec<RankSnapshot>,
}

/// How many times were measured, and their sum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    /// How many.
    pub count: u64,
    /// In seconds.
    pub seconds: f64,
}

/// Of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankSnapshot {
    /// Seconds in steps.
    pub step_seconds: f64,
    /// Of these, waiting for other ranks, where it tells.
    pub wait_seconds: Option<f64>,
    /// Bytes that its steps had to read at least.
    pub read_bytes: u64,
    /// Bytes a second that its socket can read, where that was measured.
    pub read_limit: Option<u64>,
    /// Its newest step.
    pub newest_step: StepSnapshot,
}

/// Of one step of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepSnapshot {
    /// Its seconds.
    pub seconds: f64,
    /// Of these, waiting for other ranks, where the rank tells.
    pub wait_seconds: Option<f64>,
    /// Bytes that it had to read at least.
    pub read_bytes: u64,
}

impl EngineMetrics {
    /// As counted so far; figures may be a step apart.
    pub fn snapshot(&self) -> Snapshot {
        let load = self.load();
        Snapshot {
            running: load.running,
            waiting: load.waiting,
            preemptions: load.preemptions,
            losses: self.losses.get(),
            kv_pages: load.kv_pages,
            kv_pages_used: load.kv_pages_used,
            kv_pages_cached: load.kv_pages_cached,
            prompt_tokens: self.prompt_tokens.get(),
            generated_tokens: self.generation_tokens.get(),
            cache_queries: self.prefix_cache_queries.get(),
            cache_hits: self.prefix_cache_hits.get(),
            drafted_tokens: self.draft_tokens.get(),
            accepted_tokens: self.accepted_tokens.get(),
            first_token: Times::of(&self.first_token),
            inter_token: Times::of(&self.inter_token),
            steps: Times::of(&self.step_time),
            ranks: self.ranks.iter().map(Rank::snapshot).collect(),
        }
    }
}

impl Times {
    fn of(histogram: &Histogram) -> Self {
        Self { count: histogram.count(), seconds: histogram.sum() as f64 / 1e9 }
    }
}
