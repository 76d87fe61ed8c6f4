//! The pass of a stage over one leaf, compiled for AVX-512 too.
//!
//! Passes are operations on integers and IEEE operations that nothing contracts or reorders: every version has the same
//! bits.

use super::draw::{Cut, Entry, Leaf, TopList, best, draw};
use super::logprobs::LogSum;
use super::params::MAX_TOP_LOGPROBS;
use super::row::{MAX_LISTED, RowState, Stage};
use super::select::BINS;
#[cfg(target_arch = "x86_64")]
use super::vectors::wide_vectors;

/// What a pass looks for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pass<'a> {
    /// The log-sum-exp and this many best tokens, by raw logit.
    Logprobs(usize),
    /// What the row's stage needs.
    Stage(&'a RowState),
}

/// What the passes over one leaf of one row found.
#[derive(Debug)]
pub(super) struct Found {
    pub log_sum: LogSum,
    pub top: TopList,
    pub best: Entry,
    pub list: TopList,
    pub bins: [u64; BINS],
}

impl Found {
    /// Nothing yet, in leaves of at most `leaf_len`. Allocates nothing later.
    pub fn new(leaf_len: usize) -> Self {
        Self {
            log_sum: LogSum::EMPTY,
            top: TopList::new(MAX_TOP_LOGPROBS, leaf_len),
            best: Entry::NONE,
            list: TopList::new(MAX_LISTED, leaf_len),
            bins: [0; BINS],
        }
    }

    /// Bytes that [`Self::new`] takes beside itself.
    pub fn bytes(leaf_len: usize) -> usize {
        TopList::bytes(MAX_TOP_LOGPROBS, leaf_len) + TopList::bytes(MAX_LISTED, leaf_len)
    }

    /// Looks through a leaf, with the widest vectors that this processor has.
    #[allow(unsafe_code)]
    pub fn scan(&mut self, leaf: &Leaf<'_>, pass: Pass<'_>) {
        #[cfg(target_arch = "x86_64")]
        if wide_vectors() {
            // SAFETY: the processor has the instructions.
            return unsafe { self.scan_avx512(leaf, pass) };
        }
        self.scan_plain(leaf, pass);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn scan_avx512(&mut self, leaf: &Leaf<'_>, pass: Pass<'_>) {
        self.scan_plain(leaf, pass);
    }

    // Inlined, with all that it calls, into each version.
    #[inline(always)]
    fn scan_plain(&mut self, leaf: &Leaf<'_>, pass: Pass<'_>) {
        let state = match pass {
            Pass::Logprobs(top) => {
                self.log_sum = LogSum::of(leaf.logits);
                return self.top.fill(leaf, top);
            }
            Pass::Stage(state) => state,
        };
        match state.stage {
            Stage::Largest => self.best = best(leaf, &Cut::NOTHING),
            Stage::Draw => self.best = draw(leaf, &state.cut, &state.noise),
            Stage::List(limit) => self.list.fill(leaf, limit),
            Stage::Select(selection) => {
                self.bins.fill(0);
                selection.measure(leaf, &state.cut, &mut self.bins);
            }
            Stage::Done => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::select::{Limit, Progress, Selection};
    use crate::sampling::{Allowed, RowInput, SamplingParams};

    /// A row's state at a stage, with a cut that keeps about half of the tokens.
    fn state(stage: Stage) -> RowState {
        let params = SamplingParams { temperature: 0.7, seed: 5, ..SamplingParams::greedy() };
        let row = RowInput {
            params: &params,
            position: 3,
            prompt: &[],
            generated: &[],
            suppress: &[],
            allowed: Allowed::All,
            logprobs: None,
        };
        RowState { stage, cut: Cut { value: 0.1, tie_end: 900 }, ..RowState::new(&row, 5000) }
    }

    #[test]
    fn wide_vectors_give_the_same_bits() {
        // Many ties, and what is no number.
        let mut logits: Vec<f32> = (0..1003u32).map(|i| (i * 7919 % 4001) as f32 / 200.0 - 10.0).collect();
        logits.extend((0..500u32).map(|i| (i % 5) as f32));
        (logits[100], logits[200]) = (f32::NAN, f32::NEG_INFINITY);
        let advance = |selection: Selection, bins: &[u64; BINS]| match selection.advance(1, 0, |_, bin| bins[bin]) {
            Progress::Next(selection) => selection,
            other => panic!("{other:?}"),
        };
        for (first, len) in [(64, logits.len()), (17, 1003), (129, 40), (1000, 1)] {
            let leaf = Leaf { logits: &logits[..len], first, scale: 1.0 / 0.7 };
            let mut found = [Found::new(leaf.logits.len()), Found::new(leaf.logits.len())];
            let mut same = |pass: Pass<'_>| {
                let [wide, plain] = &mut found;
                wide.scan(&leaf, pass);
                plain.scan_plain(&leaf, pass);
                let bits = |sum: LogSum| [sum.max, sum.sum].map(f32::to_bits);
                assert_eq!(bits(wide.log_sum), bits(plain.log_sum));
                assert_eq!((wide.best, wide.bins), (plain.best, plain.bins));
                assert_eq!(wide.top.entries(), plain.top.entries());
                assert_eq!(wide.list.entries(), plain.list.entries());
                wide.bins
            };
            same(Pass::Logprobs(MAX_TOP_LOGPROBS));
            for stage in [Stage::Largest, Stage::Draw, Stage::List(MAX_LISTED)] {
                same(Pass::Stage(&state(stage)));
            }
            for limit in [Limit::TopK(30), Limit::TopP(0.6)] {
                let mut selection = Selection::new(limit, 10.0 / 0.7);
                for _ in 0..3 {
                    let bins = same(Pass::Stage(&state(Stage::Select(selection))));
                    if bins.iter().sum::<u64>() <= 30 {
                        break;
                    }
                    selection = advance(selection, &bins);
                }
            }
        }
    }
}
