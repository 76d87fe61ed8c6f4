//! How many rows a step with prompts has: those who decode wait for its end, those whose prompts wait for many of them.

use std::time::Duration;

/// Beside sequences that decode, steps are large enough that prompts do not wait longer than this for their end, where
/// there are such.
const PROMPT_WAIT: Duration = Duration::from_millis(250);
/// They bring prompts at no less than this of the best rate, or few would wait for long.
const CALM: f64 = 0.6;
/// And are no larger once they bring them at so much of it.
const ENOUGH: f64 = 0.95;
/// A size is not taken if a larger one, which takes at most so many times as long, brings so many times the rate.
/// Passes compute blocks of rows in rounds of the device, so that some sizes fill none.
const HARDLY_LONGER: f64 = 1.25;
const OUTDONE: f64 = 1.2;

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
        if decoding == 0 {
            return self.alone.max(self.least);
        }
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
        size.map_or(0, |size| size.rows.saturating_sub(decoding)).max(self.least)
    }
}

impl Default for StepRows {
    /// No bound but that of any step.
    fn default() -> Self {
        let any = StepSize { rows: u32::MAX, time: Duration::from_secs(1) };
        Self { sizes: vec![any], alone: u32::MAX, least: 1 }
    }
}
