//! One row on its way from parameters to a token: its stages and what is known of it.

use super::draw::{Cut, Entry};
use super::logprobs::LogSum;
use super::noise::Noise;
use super::params::{MIN_TEMPERATURE, RowInput};
use super::select::{Limit, Selection, mass_of, min_p_threshold, weight};

/// Up to this top_k, ranks exchange their best tokens themselves, which takes one round; above, they count them.
pub(super) const MAX_LISTED: usize = 64;

/// What the next pass looks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Stage {
    /// The best token by value.
    Largest,
    /// The best token by value and noise.
    Draw,
    /// The best tokens by value, this many.
    List(usize),
    /// The threshold of a filter.
    Select(Selection),
    /// Nothing: the token is known.
    Done,
}

/// Where a row stands, from its parameters to its token.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowState {
    pub stage: Stage,
    pub greedy: bool,
    /// 1 / temperature; 1 for greedy rows.
    pub scale: f32,
    /// Filters that are on and not yet in `cut`.
    pub min_p: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub cut: Cut,
    /// Largest scaled logit, once known.
    pub max: f32,
    pub noise: Noise,
    /// Where the row's words begin in the message of this round.
    pub offset: usize,
    /// Raw logit of the token drawn.
    pub raw: f32,
    pub log_sum: LogSum,
}

impl RowState {
    pub fn new(row: &RowInput<'_>, vocab_size: usize) -> Self {
        let params = row.params;
        let greedy = params.temperature < MIN_TEMPERATURE;
        let on = !greedy;
        let top_k = (on && params.top_k > 0 && (params.top_k as usize) < vocab_size).then_some(params.top_k);
        let top_p = (on && params.top_p < 1.0).then_some(params.top_p);
        let min_p = (on && params.min_p > 0.0).then_some(params.min_p);
        let stage = match (top_k, top_p, min_p) {
            _ if greedy => Stage::Largest,
            (None, None, None) => Stage::Draw,
            (Some(k), ..) if k as usize <= MAX_LISTED => Stage::List(k as usize),
            _ => Stage::Largest,
        };
        Self {
            stage,
            greedy,
            scale: if greedy { 1.0 } else { 1.0 / params.temperature },
            min_p,
            top_k,
            top_p,
            cut: Cut::NOTHING,
            max: f32::NEG_INFINITY,
            noise: Noise::new(params.seed, row.position),
            offset: 0,
            raw: f32::NEG_INFINITY,
            log_sum: LogSum::EMPTY,
        }
    }

    /// The stage after the largest logit or a filter.
    pub fn next_filter(&mut self) -> Stage {
        let limit = match (self.top_k.take(), self.top_p) {
            (Some(k), _) => Limit::TopK(k),
            (None, Some(p)) => {
                self.top_p = None;
                Limit::TopP(p)
            }
            (None, None) => return Stage::Draw,
        };
        Stage::Select(Selection::new(limit, self.max))
    }
}

/// The filters after top_k, and the draw, over the tokens that top_k keeps: `candidates`, best first, at least one.
pub(super) fn draw_listed(state: &RowState, candidates: &[(Entry, f32)]) -> (Entry, f32) {
    let top = candidates[0];
    let max = top.0.value;
    let mut kept = candidates.len();
    if let Some(min_p) = state.min_p {
        let threshold = min_p_threshold(min_p, max);
        kept = candidates.partition_point(|(entry, _)| entry.value >= threshold);
    }
    if let Some(top_p) = state.top_p {
        let weights = || candidates[..kept].iter().map(|(entry, _)| weight(entry.value, max));
        let mut missing = mass_of(top_p, weights().sum());
        let reached = weights().position(|weight| {
            missing = missing.saturating_sub(weight);
            missing == 0
        });
        kept = reached.map_or(kept, |last| last + 1);
    }
    if !max.is_finite() {
        return top;
    }
    let with_noise = |&(entry, raw): &(Entry, f32)| {
        (Entry { value: entry.value + state.noise.gumbel(entry.token), token: entry.token }, raw)
    };
    let better = |a: (Entry, f32), b: (Entry, f32)| if b.0.beats(&a.0) { b } else { a };
    candidates[..kept].iter().map(with_noise).fold((Entry::NONE, f32::NEG_INFINITY), better)
}
