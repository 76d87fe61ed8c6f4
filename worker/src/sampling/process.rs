//! Logit bias, penalties, suppressed tokens and masks, applied to this rank's raw logits.
//!
//! In this order: bias is added; logits of tokens in the prompt or the output are divided (if positive) or multiplied
//! (if not) by the repetition penalty, as Hugging Face does; frequency and presence penalties of tokens in the output
//! are subtracted, as the OpenAI API defines them; suppressed tokens, and those outside the mask, become minus
//! infinity.

use std::ops::Range;

use super::params::{Allowed, RowInput};

/// Marks of a token: its original logit is kept; it occurs in prompt or output. The rest counts it in the output.
const CHANGED: u32 = 1 << 31;
const SEEN: u32 = 1 << 30;
const COUNT: u32 = SEEN - 1;

/// Changes logits and remembers what they were. Costs the length of the history, not of the vocabulary.
#[derive(Debug)]
pub(super) struct Processor {
    /// Ids of this rank that are tokens.
    tokens: Range<u32>,
    /// [tokens] marks, 0 between rows.
    marks: Vec<u32>,
    /// (index in the rank's logits, raw logit) of what was changed, row by row, ascending within a row.
    changed: Vec<(u32, f32)>,
    /// [rows] the row's part of `changed`.
    rows: Vec<Range<usize>>,
}

impl Processor {
    pub fn new(tokens: Range<u32>, max_rows: usize) -> Self {
        let marks = vec![0; tokens.len()];
        Self { changed: Vec::with_capacity(tokens.len()), rows: Vec::with_capacity(max_rows), tokens, marks }
    }

    /// Bytes that [`Self::new`] takes for `tokens` tokens.
    pub fn bytes(tokens: usize) -> usize {
        tokens * (size_of::<u32>() + size_of::<(u32, f32)>())
    }

    /// Forgets the rows of the step before.
    pub fn start_step(&mut self) {
        self.changed.clear();
        self.rows.clear();
    }

    /// Processes the next row's `logits` ([rank vocab]) in place.
    pub fn apply(&mut self, row: &RowInput<'_>, logits: &mut [f32]) {
        let start = self.changed.len();
        let params = row.params;
        for &(token, bias) in &params.logit_bias {
            if let Some(i) = self.mark(token, 0, logits) {
                logits[i] += bias;
            }
        }
        if params.repetition_penalty != 1.0 {
            for &token in row.prompt {
                self.mark(token, SEEN, logits);
            }
        }
        if params.has_penalties() {
            for &token in row.generated {
                if let Some(i) = self.mark(token, SEEN, logits) {
                    self.marks[i] += 1;
                }
            }
        }
        for &token in row.suppress {
            self.mark(token, 0, logits);
        }
        for &(i, _) in &self.changed[start..] {
            let mark = std::mem::take(&mut self.marks[i as usize]);
            if mark & SEEN != 0 {
                let logit = &mut logits[i as usize];
                *logit = penalised(*logit, mark & COUNT, row);
            }
        }
        for token in row.suppress.iter().filter(|token| self.tokens.contains(token)) {
            logits[(token - self.tokens.start) as usize] = f32::NEG_INFINITY;
        }
        // Raw logits are asked for of tokens alone that were drawn.
        match row.allowed {
            Allowed::These(mask) => {
                self.forbid(logits, |token| mask[token as usize / 32] >> (token % 32) & 1 == 0);
            }
            Allowed::Only(only) => self.forbid(logits, |token| token != only),
            Allowed::All | Allowed::Late | Allowed::Nothing => {}
        }
        if row.logprobs.is_some() {
            self.changed[start..].sort_unstable_by_key(|&(i, _)| i);
        }
        self.rows.push(start..self.changed.len());
    }

    /// Tokens that are forbidden cannot be drawn.
    fn forbid(&self, logits: &mut [f32], forbidden: impl Fn(u32) -> bool) {
        for (token, logit) in self.tokens.clone().zip(logits) {
            if forbidden(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// What the logit of `token`, one of this rank, was in `row` (which asked for log-probabilities) before [`apply`]
    /// made it `now`.
    ///
    /// [`apply`]: Self::apply
    pub fn raw(&self, row: usize, token: u32, now: f32) -> f32 {
        let changed = &self.changed[self.rows[row].clone()];
        let index = token - self.tokens.start;
        let at = changed.partition_point(|&(i, _)| i < index);
        changed.get(at).filter(|&&(i, _)| i == index).map_or(now, |&(_, raw)| raw)
    }

    /// Marks `token` and notes its logit if this is its first mark; its index, if it is one of this rank's.
    fn mark(&mut self, token: u32, with: u32, logits: &[f32]) -> Option<usize> {
        if !self.tokens.contains(&token) {
            return None;
        }
        let i = (token - self.tokens.start) as usize;
        if self.marks[i] & CHANGED == 0 {
            self.changed.push((i as u32, logits[i]));
        }
        self.marks[i] |= CHANGED | with;
        Some(i)
    }
}

/// The logit of a token that occurs in the prompt or, `count` times, in the output.
fn penalised(logit: f32, count: u32, row: &RowInput<'_>) -> f32 {
    let params = row.params;
    let penalty = params.repetition_penalty;
    let mut logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
    if count > 0 {
        logit -= params.frequency_penalty * count as f32;
        logit -= params.presence_penalty;
    }
    logit
}
