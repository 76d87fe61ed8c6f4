//! The bounds of the scheduler, and which of them cannot work.

use std::time::Duration;

/// Beside sequences that decode, steps are large enough that prompts do not wait longer than this for their end, where
/// there are such.
const PROMPT_WAIT: Duration = Duration::from_millis(250);
/// They bring prompts at no less than this of the best rate, or few would wait for long.
const CALM: f64 = 0.6;
/// And are no larger once they bring them at so much of it.
const ENOUGH: f64 = 0.95;
/// A size is not taken if a larger one, which takes at most so many times as long, brings so many times the rate. Passes
/// compute blocks of rows in rounds of the device, so that some sizes fill none.
const HARDLY_LONGER: f64 = 1.25;
const OUTDONE: f64 = 1.2;

/// Bounds of the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Sequences in the batch at one time; 0: as many as the group can take.
    pub max_slots: u32,
    /// Rows (decode tokens and prompt tokens) of one step, at least `max_slots`; 0: as many as the group can take.
    pub max_batch_tokens: u32,
    /// Steps of one plan: the K that bounds a launch of the loop.
    pub steps_per_plan: u32,
    /// Plans sent of which no step was reported; 2 keep the loop fed while an outcome is on its way.
    pub plans_ahead: u32,
    /// Sequences that wait for their first admission.
    pub max_waiting_requests: u64,
    /// Prompt tokens of the sequences that wait for their first admission. (A request of a single one may exceed it:
    /// the context bounds it already.)
    pub max_waiting_tokens: u64,
    /// Losses of the group after which a sequence that was computed each time is a suspect, and computed alone.
    pub suspect_after: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_slots: 64,
            max_batch_tokens: 512,
            steps_per_plan: 16,
            plans_ahead: 2,
            max_waiting_requests: 1024,
            max_waiting_tokens: 1 << 20,
            suspect_after: 2,
        }
    }
}

/// A bound that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A bound of zero would stop everything.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// Every slot may decode in one step.
    #[error(
        "max_batch_tokens is {tokens}, but every one of the {slots} slots needs a row: raise it to at least {slots}"
    )]
    BatchTooSmall {
        /// Rows of a step.
        tokens: u32,
        /// Slots.
        slots: u32,
    },
}

impl Limits {
    /// Whether the bounds can work.
    ///
    /// # Errors
    /// Names the bound that is zero or too small.
    pub fn validate(&self) -> Result<(), LimitsError> {
        let bounds = [
            ("steps_per_plan", u64::from(self.steps_per_plan)),
            ("plans_ahead", u64::from(self.plans_ahead)),
            ("max_waiting_requests", self.max_waiting_requests),
            ("max_waiting_tokens", self.max_waiting_tokens),
            ("suspect_after", u64::from(self.suspect_after)),
        ];
        if let Some((name, _)) = bounds.iter().find(|(_, bound)| *bound == 0) {
            return Err(LimitsError::Zero(name));
        }
        if self.max_batch_tokens > 0 && self.max_batch_tokens < self.max_slots {
            return Err(LimitsError::BatchTooSmall { tokens: self.max_batch_tokens, slots: self.max_slots });
        }
        Ok(())
    }
}

/// What a group that is ready can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShape {
    /// Pages of its KV cache.
    pub kv_pages: u32,
    /// Positions a page holds, at least 1.
    pub page_positions: u32,
    /// Sequences in the batch at one time, at least 1.
    pub max_slots: u32,
    /// Rows of one step, at least `max_slots`.
    pub max_batch_tokens: u32,
    /// The number of the plan that it takes next.
    pub first_version: u64,
}

/// A size of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// In all.
    pub rows: u32,
    /// What such a step takes.
    pub time: Duration,
}

/// How many rows a step with prompts should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRows {
    /// Where sequences decode beside: one of these, ascending.
    pub sizes: Vec<StepSize>,
    /// Where none decodes.
    pub alone: u32,
    /// Of prompts at least, however many sequences decode: prompts go on, too. At least 1.
    pub least: u32,
}

impl StepRows {
    /// Rows of prompts beside `decoding` rows, where prompts of `waiting` tokens in all are not computed to their end.
    ///
    /// Those who decode wait less in short steps, and those whose prompts wait in long ones, which compute more rows a
    /// second. So it is the smallest size in which prompts do not wait for long, or none brings more; and half of its
    /// rows at least are theirs.
    pub(super) fn of_prompts(&self, decoding: u32, waiting: u64) -> u32 {
        let rate = |size: &StepSize| f64::from(size.rows.saturating_sub(decoding)) / size.time.as_secs_f64();
        let best = self.sizes.iter().map(rate).fold(0.0, f64::max);
        let is_outdone = |size: &StepSize| {
            let larger = |other: &&StepSize| other.rows > size.rows && other.time <= size.time.mul_f64(HARDLY_LONGER);
            self.sizes.iter().filter(larger).any(|larger| rate(larger) >= OUTDONE * rate(size))
        };
        let is_fit = |size: &&StepSize| size.rows / 2 >= decoding && rate(size) >= CALM * best && !is_outdone(size);
        let is_enough =
            |size: &&StepSize| rate(size) * PROMPT_WAIT.as_secs_f64() >= waiting as f64 || rate(size) >= ENOUGH * best;
        let mut fit = self.sizes.iter().filter(is_fit);
        let size = fit.clone().find(is_enough).or_else(|| fit.next_back()).or(self.sizes.last());
        let rows = match decoding {
            0 => self.alone,
            _ => size.map_or(0, |size| size.rows.saturating_sub(decoding)),
        };
        rows.max(self.least)
    }
}

impl Default for StepRows {
    /// No bound but that of any step.
    fn default() -> Self {
        let any = StepSize { rows: u32::MAX, time: Duration::from_secs(1) };
        Self { sizes: vec![any], alone: u32::MAX, least: 1 }
    }
}
