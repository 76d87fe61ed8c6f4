//! The sampler of one rank: runs the rows of a step through as many exchanges as their filters need.
//!
//! Each row walks through stages. A stage is a pass over the rank's logits, a leaf of one row at a time; then all ranks
//! exchange what they found, and every rank draws the same conclusion for every row: the token, or the row's next
//! stage. All rows share each exchange.
//!
//! | filters of the row | stages |
//! |---|---|
//! | greedy | largest logit |
//! | none | draw |
//! | top_k of at most [`MAX_LISTED`], with any others | list of the k best tokens |
//! | others | largest logit, 4 digits for top_k, 4 digits for top_p, draw |

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::caller::{Exchange, ParallelFor};
use super::draw::{Cut, Entry, TopList};
use super::logprobs::LogSum;
use super::params::{Allowed, MAX_TOP_LOGPROBS, RowInput, Sampled};
use super::pass::{Found, Pass};
use super::process::Processor;
use super::row::{MAX_LISTED, RowState, Stage, draw_listed};
use super::select::{BINS, Progress, cut_at, min_p_threshold};
use super::shape::SamplerShape;
use crate::plan::MAX_LEAVES;

/// Words of an [`Entry`].
const ENTRY_WORDS: usize = 2;
/// Words of an [`Entry`] and the raw logit of its token.
const CANDIDATE_WORDS: usize = 3;
/// Words of the sums of a selection's bins.
const BINS_WORDS: usize = 2 * BINS;
/// Most words of one row in one exchange: what a mask is and log-probabilities go with the first stage, which counts no
/// bins.
const MAX_ROW_WORDS: usize = BINS_WORDS;
const _: () = assert!(1 + 2 + MAX_TOP_LOGPROBS * ENTRY_WORDS + MAX_LISTED * CANDIDATE_WORDS <= MAX_ROW_WORDS);

/// Samples the rows of a step together with the samplers of the other ranks. Allocates when it is made; afterwards only
/// the record of changed logits may still grow, to what the rows of one step need at most.
#[derive(Debug)]
pub struct Sampler {
    shape: SamplerShape,
    processor: Processor,
    states: Vec<RowState>,
    /// [max_rows][leaves of this rank]; each is locked by one thread at a time, so never waited for.
    found: Vec<Mutex<Found>>,
    message: Vec<u32>,
    /// Scratch of merging what leaves or ranks found.
    merged: TopList,
    candidates: Vec<(Entry, f32)>,
    results: Vec<Sampled>,
}

impl Sampler {
    /// A sampler with all its buffers.
    ///
    /// # Panics
    /// If the shape breaks its own rules.
    pub fn new(shape: SamplerShape) -> Self {
        shape.check();
        let SamplerShape { padded_vocab, tensor_parallel, max_rows, .. } = shape;
        let empty = Sampled { token: 0, logprob: None, top: Vec::new() };
        let result = || Sampled { top: Vec::with_capacity(MAX_TOP_LOGPROBS), ..empty.clone() };
        Self {
            processor: Processor::new(shape.tokens(), max_rows),
            states: Vec::with_capacity(max_rows),
            found: (0..max_rows * shape.leaves()).map(|_| Mutex::new(Found::new(padded_vocab / MAX_LEAVES))).collect(),
            message: Vec::with_capacity(max_rows * MAX_ROW_WORDS),
            merged: TopList::new(MAX_LISTED, 0),
            candidates: Vec::with_capacity(tensor_parallel * MAX_LISTED),
            results: (0..max_rows).map(|_| result()).collect(),
            shape,
        }
    }

    /// Most words that one rank contributes to one exchange.
    pub fn max_words(&self) -> usize {
        self.shape.max_rows * MAX_ROW_WORDS
    }

    /// Bytes that [`Self::new`] takes, to within a few thousand.
    pub fn bytes(shape: &SamplerShape) -> usize {
        let leaf_len = shape.padded_vocab / MAX_LEAVES;
        let found = size_of::<Mutex<Found>>() + Found::bytes(leaf_len);
        let row =
            shape.leaves() * found + MAX_ROW_WORDS * size_of::<u32>() + MAX_TOP_LOGPROBS * size_of::<(u32, f32)>();
        shape.max_rows * row + Processor::bytes(shape.tokens().len())
    }

    /// Draws the next token of every row.
    ///
    /// `logits` is [rows][local vocab] fp32, this rank's share of the raw logits; bias and penalties change it in
    /// place. All ranks call this with the same rows, and all get the same results, in row order: a row gets
    /// [`Sampled::LATE`] or [`Sampled::NOTHING`] if one of the ranks says so of what it may draw. The number of
    /// exchanges follows from the rows' parameters alone, but for a top_k that keeps everything: 1 if every row is
    /// greedy, unfiltered or has a top_k of at most 64; else up to 10.
    ///
    /// # Errors
    /// What the exchange reports. The step is lost then.
    ///
    /// # Panics
    /// If there are more rows than the shape has, the logits are not theirs, a row wants more than
    /// [`MAX_TOP_LOGPROBS`], or an exchange returned too few or too many words.
    pub fn sample<X: Exchange>(
        &mut self,
        rows: &[RowInput<'_>],
        logits: &mut [f32],
        exchange: &mut X,
        parallel: &impl ParallelFor,
    ) -> Result<&[Sampled], X::Error> {
        let shape = self.shape;
        assert!(rows.len() <= shape.max_rows, "{} rows for a sampler of {}", rows.len(), shape.max_rows);
        assert_eq!(logits.len(), rows.len() * shape.local_vocab(), "logits of {} rows", rows.len());
        let most = rows.iter().filter_map(|row| row.logprobs).max();
        assert!(most <= Some(MAX_TOP_LOGPROBS as u32), "{most:?} logprobs asked for, {MAX_TOP_LOGPROBS} is the most");
        self.states.clear();
        self.states.extend(rows.iter().map(|row| RowState::new(row, shape.vocab_size)));
        self.scan_raw(rows, logits, parallel);
        self.processor.start_step();
        for (row, logits) in rows.iter().zip(logits.chunks_exact_mut(shape.local_vocab())) {
            self.processor.apply(row, logits);
        }
        let mut first = true;
        while self.states.iter().any(|state| state.stage != Stage::Done) {
            self.scan(logits, parallel);
            self.encode(rows, logits, first);
            let stride = self.message.len();
            let gathered = exchange.all_gather(&self.message)?;
            assert_eq!(gathered.len(), stride * shape.tensor_parallel, "words of {} ranks", shape.tensor_parallel);
            for (row, input) in rows.iter().enumerate() {
                let offset = self.states[row].offset;
                let words = |rank: usize| &gathered[rank * stride + offset..(rank + 1) * stride];
                if first && let Some(instead) = instead_of_token(input, words, shape.tensor_parallel) {
                    self.states[row].stage = Stage::Done;
                    self.results[row] = Sampled::none(instead);
                    continue;
                }
                let used = if first { self.decode_first(row, input, words) } else { 0 };
                self.conclude(row, logits, |rank| &words(rank)[used..]);
            }
            first = false;
        }
        for (row, input) in rows.iter().enumerate() {
            let state = &self.states[row];
            let drawn = self.results[row].token < Sampled::NOTHING;
            let wanted = input.logprobs.filter(|_| drawn);
            self.results[row].logprob = wanted.map(|_| state.log_sum.logprob(state.raw));
        }
        Ok(&self.results[..rows.len()])
    }

    /// Log-sum-exp and the best tokens by raw logit, for the rows that ask for log-probabilities.
    fn scan_raw(&self, rows: &[RowInput<'_>], logits: &[f32], parallel: &impl ParallelFor) {
        if rows.iter().all(|row| row.logprobs.is_none()) {
            return;
        }
        let (shape, leaves) = (&self.shape, self.shape.leaves());
        parallel.for_each(rows.len() * leaves, &|unit| {
            let Some(top) = rows[unit / leaves].logprobs else { return };
            let leaf = shape.leaf(unit / leaves, unit % leaves, logits, 1.0);
            lock(&self.found[unit]).scan(&leaf, Pass::Logprobs(top as usize));
        });
    }

    /// The pass of every row's stage.
    fn scan(&self, logits: &[f32], parallel: &impl ParallelFor) {
        let (shape, leaves) = (&self.shape, self.shape.leaves());
        parallel.for_each(self.states.len() * leaves, &|unit| {
            let state = &self.states[unit / leaves];
            let leaf = shape.leaf(unit / leaves, unit % leaves, logits, state.scale);
            lock(&self.found[unit]).scan(&leaf, Pass::Stage(state));
        });
    }

    /// Merges what this rank's leaves found into the message. Rows that are done add no words.
    fn encode(&mut self, rows: &[RowInput<'_>], logits: &[f32], first: bool) {
        let leaves = self.shape.leaves();
        self.message.clear();
        for (row, input) in rows.iter().enumerate() {
            self.states[row].offset = self.message.len();
            let found = row * leaves..(row + 1) * leaves;
            if first && input.allowed != Allowed::All {
                self.message.push(mask_word(input));
            }
            if let (true, Some(top)) = (first, input.logprobs) {
                self.encode_logprobs(found.clone(), top as usize);
            }
            match self.states[row].stage {
                Stage::Largest | Stage::Draw => {
                    let better = |best: Entry, other: Entry| if other.beats(&best) { other } else { best };
                    let best = self.found[found].iter_mut().map(|found| unlocked(found).best);
                    let best = best.fold(Entry::NONE, better);
                    self.push_candidate(row, input, best, logits);
                }
                Stage::List(limit) => {
                    self.merged.reset(limit);
                    for found in &mut self.found[found] {
                        unlocked(found).list.entries().iter().for_each(|entry| self.merged.offer(*entry));
                    }
                    for i in 0..limit {
                        let entry = self.merged.entries().get(i).copied().unwrap_or(Entry::NONE);
                        self.push_candidate(row, input, entry, logits);
                    }
                }
                Stage::Select(_) => {
                    for bin in 0..BINS {
                        let sum: u64 =
                            self.found[found.clone()].iter_mut().map(|found| unlocked(found).bins[bin]).sum();
                        self.message.extend([sum as u32, (sum >> 32) as u32]);
                    }
                }
                Stage::Done => {}
            }
        }
    }

    fn encode_logprobs(&mut self, found: Range<usize>, top: usize) {
        let mut sums = [LogSum::EMPTY; MAX_LEAVES];
        let sums = &mut sums[..found.len()];
        self.merged.reset(top);
        for (sum, found) in sums.iter_mut().zip(&mut self.found[found]) {
            let found = unlocked(found);
            *sum = found.log_sum;
            found.top.entries().iter().for_each(|entry| self.merged.offer(*entry));
        }
        let sum = LogSum::tree(sums);
        self.message.extend([sum.max.to_bits(), sum.sum.to_bits()]);
        for i in 0..top {
            let entry = self.merged.entries().get(i).copied().unwrap_or(Entry::NONE);
            self.message.extend([entry.value.to_bits(), entry.token]);
        }
    }

    fn push_candidate(&mut self, row: usize, input: &RowInput<'_>, entry: Entry, logits: &[f32]) {
        let raw = if input.logprobs.is_none() || entry == Entry::NONE {
            // Not asked for, or all ids of this rank are padding or cut away and it has no token to offer.
            f32::NEG_INFINITY
        } else {
            let index = entry.token as usize - self.shape.tokens().start as usize;
            self.processor.raw(row, entry.token, logits[row * self.shape.local_vocab() + index])
        };
        self.message.extend([entry.value.to_bits(), entry.token, raw.to_bits()]);
    }

    /// Merges the ranks' log-sum-exp and best tokens by raw logit; the number of words that go in front of the stage's
    /// in the first exchange.
    fn decode_first<'a>(&mut self, row: usize, input: &RowInput<'_>, words: impl Fn(usize) -> &'a [u32]) -> usize {
        let result = &mut self.results[row];
        result.top.clear();
        let of_mask = usize::from(input.allowed != Allowed::All);
        let Some(top) = input.logprobs else { return of_mask };
        let used = 2 + top as usize * ENTRY_WORDS;
        let mut sums = [LogSum::EMPTY; MAX_LEAVES];
        let sums = &mut sums[..self.shape.tensor_parallel];
        self.merged.reset(top as usize);
        for (rank, sum) in sums.iter_mut().enumerate() {
            let words = &words(rank)[of_mask..];
            *sum = LogSum { max: f32::from_bits(words[0]), sum: f32::from_bits(words[1]) };
            for entry in words[2..used].chunks_exact(ENTRY_WORDS) {
                self.merged.offer(Entry { value: f32::from_bits(entry[0]), token: entry[1] });
            }
        }
        let log_sum = LogSum::tree(sums);
        self.states[row].log_sum = log_sum;
        let tokens = self.merged.entries().iter().filter(|entry| **entry != Entry::NONE);
        result.top.extend(tokens.map(|entry| (entry.token, log_sum.logprob(entry.value))));
        of_mask + used
    }

    /// Draws the conclusion of a round for one row from the words of all ranks.
    fn conclude<'a>(&mut self, row: usize, logits: &[f32], words: impl Fn(usize) -> &'a [u32]) {
        let ranks = self.shape.tensor_parallel;
        let candidate =
            |words: &[u32]| (Entry { value: f32::from_bits(words[0]), token: words[1] }, f32::from_bits(words[2]));
        match self.states[row].stage {
            Stage::Done => {}
            Stage::Largest | Stage::Draw => {
                let better = |a: (Entry, f32), b: (Entry, f32)| if b.0.beats(&a.0) { b } else { a };
                let none = (Entry::NONE, f32::NEG_INFINITY);
                let winner = (0..ranks).map(|rank| candidate(words(rank))).fold(none, better);
                let state = &mut self.states[row];
                if state.stage == Stage::Largest && !state.greedy {
                    state.max = winner.0.value;
                    if let Some(min_p) = state.min_p {
                        state.cut = Cut { value: min_p_threshold(min_p, state.max), tie_end: u32::MAX };
                    }
                    state.stage = state.next_filter();
                } else {
                    self.finish(row, winner);
                }
            }
            Stage::List(limit) => {
                self.candidates.clear();
                for rank in 0..ranks {
                    let listed = words(rank)[..limit * CANDIDATE_WORDS].chunks_exact(CANDIDATE_WORDS).map(candidate);
                    self.candidates.extend(listed.filter(|(entry, _)| *entry != Entry::NONE));
                }
                self.candidates.sort_unstable_by(|a, b| a.0.rank(&b.0));
                self.candidates.truncate(limit);
                let winner = draw_listed(&self.states[row], &self.candidates);
                self.finish(row, winner);
            }
            Stage::Select(selection) => {
                let bin = |rank: usize, digit: usize| {
                    let words = &words(rank)[2 * digit..];
                    u64::from(words[0]) | u64::from(words[1]) << 32
                };
                let state = &mut self.states[row];
                state.stage = match selection.advance(ranks, self.shape.rank, bin) {
                    Progress::Next(selection) => Stage::Select(selection),
                    Progress::KeepsAll => state.next_filter(),
                    Progress::Found { value, mine, tied } => {
                        let local = self.shape.row(row, logits, state.scale);
                        state.cut = cut_at(&local, &state.cut, value, mine, tied);
                        state.next_filter()
                    }
                };
            }
        }
    }

    fn finish(&mut self, row: usize, (winner, raw): (Entry, f32)) {
        self.results[row].token = winner.token;
        self.states[row].raw = raw;
        self.states[row].stage = Stage::Done;
    }
}

/// What this rank says of the mask of a row that has one: 0 if it is known.
fn mask_word(row: &RowInput<'_>) -> u32 {
    match row.allowed {
        Allowed::All | Allowed::These(_) | Allowed::Only(_) => 0,
        Allowed::Late => Sampled::LATE,
        Allowed::Nothing => Sampled::NOTHING,
    }
}

/// What a row gets in place of a token, by what the ranks say of its mask: it waits for the latest of them.
fn instead_of_token<'a>(row: &RowInput<'_>, words: impl Fn(usize) -> &'a [u32], ranks: usize) -> Option<u32> {
    let has_mask = row.allowed != Allowed::All;
    let said = has_mask.then(|| (0..ranks).map(|rank| words(rank)[0]).max());
    said.flatten().filter(|&instead| instead > 0)
}

/// A unit's record. One that a panic left half written is written anew before it is read.
fn lock(found: &Mutex<Found>) -> MutexGuard<'_, Found> {
    found.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unlocked(found: &mut Mutex<Found>) -> &mut Found {
    found.get_mut().unwrap_or_else(PoisonError::into_inner)
}
