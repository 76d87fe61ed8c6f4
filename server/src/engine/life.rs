//! The times of one sequence on its way through the engine, and what of them is counted.

use tokio::time::Instant;

use crate::metrics::{Ended, EngineMetrics};
use crate::sched::FinishReason;

/// When a sequence came how far, as the engine has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Handed over.
    pub submitted: Instant,
    /// Got its first slot.
    pub admitted: Instant,
    /// Had its first token.
    pub computed: Instant,
}

/// Why nobody wants the rest of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwanted {
    /// Its owner has what it needs: a stop text was found.
    Complete,
    /// Its owner went away.
    Abandoned,
    /// The server gives its request up: another of its sequences failed, or the server ends.
    GivenUp,
}

/// A sequence from its submission to its end.
#[derive(Debug)]
pub struct Life {
    prompt_tokens: u64,
    submitted: Instant,
    admitted: Option<Instant>,
    /// When the first token came, and the newest.
    tokens: Option<(Instant, Instant)>,
    /// Tokens that count as generated: those the reader takes.
    pub generated: u64,
}

impl Life {
    /// A sequence with a prompt of so many tokens was handed over then.
    pub fn new(prompt_tokens: usize, submitted: Instant) -> Self {
        Self { prompt_tokens: prompt_tokens as u64, submitted, admitted: None, tokens: None, generated: 0 }
    }

    /// It got a slot. Only the first time counts: what follows a preemption or a fault is no queue.
    pub fn admitted(&mut self, now: Instant, metrics: &EngineMetrics) {
        if self.admitted.is_none() {
            self.admitted = Some(now);
            metrics.queue_time.observe(now - self.submitted);
        }
    }

    /// For who reads it, where its prompt was computed by now.
    pub fn times(&self, now: Instant) -> Times {
        Times { submitted: self.submitted, admitted: self.admitted.unwrap_or(self.submitted), computed: now }
    }

    /// Its prompt was computed, but for so many tokens.
    pub fn prompt(&mut self, cached_tokens: u32, now: Instant, metrics: &EngineMetrics) {
        metrics.first_token.observe(now - self.submitted);
        metrics.prefill_time.observe(now - self.admitted.unwrap_or(self.submitted));
        metrics.prompt_tokens.inc_by(self.prompt_tokens);
        metrics.request_prompt_tokens.observe_count(self.prompt_tokens);
        metrics.prefix_cache_queries.inc_by(self.prompt_tokens);
        metrics.prefix_cache_hits.inc_by(cached_tokens.into());
    }

    /// It got a token.
    pub fn token(&mut self, now: Instant, metrics: &EngineMetrics) {
        self.generated += 1;
        let (_, newest) = self.tokens.get_or_insert((now, now));
        if self.generated > 1 {
            metrics.inter_token.observe(now - *newest);
        }
        *newest = now;
    }

    /// It is over. One that did not come to its end says nothing of how long that takes.
    pub fn end(self, how: Ended, now: Instant, metrics: &EngineMetrics) {
        metrics.ended(how);
        if matches!(how, Ended::Stop | Ended::Length) {
            metrics.end_to_end.observe(now - self.submitted);
            metrics.request_generation_tokens.observe_count(self.generated);
            if let Some((first, newest)) = self.tokens {
                metrics.decode_time.observe(newest - first);
                metrics.inference_time.observe(newest - self.admitted.unwrap_or(self.submitted));
                let behind_first = u32::try_from(self.generated.saturating_sub(1)).unwrap_or(u32::MAX);
                if behind_first > 0 {
                    metrics.time_per_token.observe((newest - first) / behind_first);
                }
            }
        }
    }
}

impl From<FinishReason> for Ended {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Ended::Stop,
            FinishReason::Length => Ended::Length,
        }
    }
}

impl From<Unwanted> for Ended {
    fn from(because: Unwanted) -> Self {
        match because {
            Unwanted::Complete => Ended::Stop,
            Unwanted::Abandoned => Ended::Abort,
            Unwanted::GivenUp => Ended::Error,
        }
    }
}
