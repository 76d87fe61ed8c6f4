//! How many rows a step with prompts has: those who decode wait for its end, those whose prompts wait for many of them.

use std::time::Duration;

/// Beside sequences that decode, steps are large enough that prompts do not wait longer than this for their end, where
/// there are such.
const PROMPT_WAIT: Duration = Duration::from_millis(250);
/// They bring prompts at no less than this of the best rate, or few would wait for long.
const CALM: f64 = 0.4;
/// That is not asked of a size that computes within this time all prompts that wait.
const SOON: Duration = Duration::from_millis(20);
/// And are no larger once they bring them at so much of it.
const ENOUGH: f64 = 0.95;
/// And a token takes so many times as long as by the best of these, at most.
const SLACK: f64 = 1.1;
/// Of two sizes the longer one is better if tokens come faster by it than by this power of what it takes longer: a step
/// may take twice as long if they come 7 % faster, for those who decode see its length.
const LONGER: f64 = 0.1;
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

/// Sequences in slots whose prompts are not computed to their end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) prompts: u32,
    /// Of those prompts that a step may compute, what is computed of them included and what was cached not.
    pub(super) tokens: u64,
}

/// How many rows a step with prompts should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRows {
    /// Where sequences decode beside: one of these, ascending.
    pub sizes: Vec<StepSize>,
    /// What steps take in which all rows decode, ascending; of more rows, as the last. Empty: that is not known.
    pub decode: Vec<StepSize>,
    /// Where none decodes.
    pub alone: u32,
    /// The smallest step with prompts, half of which are theirs at least, however many sequences decode. At least 1.
    pub least: u32,
}

impl StepRows {
    /// Rows of prompts beside `decoding` rows, where `per_token` rows of prompts were computed lately for each token.
    ///
    /// Those who decode wait less in short steps, and those whose prompts wait in long ones, which compute more rows a
    /// second, so that fewer steps have any. So it is the smallest size in which prompts do not wait for long, or none
    /// brings more; by which tokens do not take much longer, nor so much longer than by a larger one that its length is
    /// outweighed; and half of its rows at least are theirs.
    pub(super) fn of_prompts(&self, decoding: u32, waiting: Waiting, per_token: f64) -> u32 {
        if decoding == 0 {
            return self.alone.max(self.least);
        }
        let rate = |size: &StepSize| f64::from(size.rows.saturating_sub(decoding)) / size.time.as_secs_f64();
        let best = self.sizes.iter().map(rate).fold(0.0, f64::max);
        let is_outdone = |size: &StepSize| {
            let larger = |other: &&StepSize| other.rows > size.rows && other.time <= size.time.mul_f64(HARDLY_LONGER);
            self.sizes.iter().filter(larger).any(|larger| rate(larger) >= OUTDONE * rate(size))
        };
        let is_within = |size: &StepSize, limit: Duration| rate(size) * limit.as_secs_f64() >= waiting.tokens as f64;
        let is_fair = |size: &&StepSize| {
            let is_calm = rate(size) >= CALM * best || is_within(size, SOON);
            size.rows / 2 >= decoding && is_calm && !is_outdone(size)
        };
        let token = |size| (size, self.token_s(size, decoding, waiting.prompts, per_token));
        let fair: Vec<(&StepSize, f64)> = self.sizes.iter().filter(is_fair).map(token).collect();
        let quickest = fair.iter().map(|(_, token)| *token).fold(f64::INFINITY, f64::min);
        let weight = |(size, token): &(&StepSize, f64)| token * size.time.as_secs_f64().powf(LONGER);
        let lightest = fair.iter().min_by(|a, b| weight(a).total_cmp(&weight(b))).map_or(0, |(size, _)| size.rows);
        let is_quick = |(size, token): &&(&StepSize, f64)| *token <= SLACK * quickest && size.rows >= lightest;
        let is_enough = |size: &&StepSize| is_within(size, PROMPT_WAIT) || rate(size) >= ENOUGH * best;
        let mut fit = fair.iter().filter(is_quick).map(|(size, _)| *size);
        match fit.clone().find(is_enough).or_else(|| fit.next_back()) {
            Some(size) => size.rows - decoding,
            None => {
                let rows = self.sizes.last().map_or(0, |size| size.rows.saturating_sub(decoding));
                rows.max(self.least.div_ceil(2))
            }
        }
    }

    /// Seconds that a sequence takes for each of its tokens by steps of `size`, its part of the time of its prompt
    /// included, if the sequences at hand go on as they do: `decoding` that decode, and `prompts` more.
    fn token_s(&self, size: &StepSize, decoding: u32, prompts: u32, per_token: f64) -> f64 {
        let known = self.decode.iter().find(|step| step.rows >= decoding).or(self.decode.last());
        let Some(decode) = known else { return 0.0 };
        let (time, rows) = (size.time.as_secs_f64(), f64::from(size.rows));
        // So many steps does the prompt of a token take, and so many of all steps have prompts.
        let of_token = per_token / f64::from(size.rows.saturating_sub(decoding).max(1));
        let with_prompts = (of_token * f64::from(decoding)).min(1.0);
        let between = with_prompts * time + (1.0 - with_prompts) * decode.time.as_secs_f64();
        // Where all steps have prompts, these keep sequences waiting until no more decode than are brought.
        let is_full = of_token * f64::from(decoding) >= 1.0;
        let in_full_steps = f64::from(decoding + prompts) * (1.0 + per_token) / rows * time;
        (between + of_token * time).max(if is_full { in_full_steps } else { 0.0 })
    }
}

impl Default for StepRows {
    /// No bound but that of any step.
    fn default() -> Self {
        let any = StepSize { rows: u32::MAX, time: Duration::from_secs(1) };
        Self { sizes: vec![any], decode: Vec::new(), alone: u32::MAX, least: 1 }
    }
}

/// Of the last few hundred steps: tokens that were computed of prompts, and tokens that were generated.
#[derive(Debug, Default)]
pub(super) struct Mix {
    prompts: f64,
    generated: f64,
}

impl Mix {
    /// Steps after which one counts for a third of what it did.
    const REMEMBERED: f64 = 512.0;

    /// Rows of prompts were planned.
    pub(super) fn plan(&mut self, prompts: u32) {
        self.prompts += f64::from(prompts);
    }

    /// A step generated so many tokens.
    pub(super) fn step(&mut self, generated: usize) {
        self.prompts -= self.prompts / Self::REMEMBERED;
        self.generated += generated as f64 - self.generated / Self::REMEMBERED;
    }

    /// Rows of prompts for each token.
    pub(super) fn per_token(&self) -> f64 {
        self.prompts / self.generated.max(1.0)
    }
}
