//! The sampler as a whole: against a plain reference, over all group sizes, at its edges, and as a random variable.

mod edges;
mod group;
mod random;
mod reference;

use std::convert::Infallible;
use std::sync::{Barrier, Mutex};

use super::{Allowed, Exchange, ParallelFor, RowInput, Sampled, Sampler, SamplerShape, SamplingParams};
use crate::plan::{MAX_LEAVES, ROW_TILE};

/// Everything that decides one row's result.
#[derive(Debug, Clone)]
struct Case {
    params: SamplingParams,
    position: u32,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    suppress: Vec<u32>,
    /// A bit a token that may be drawn; empty: all may.
    mask: Vec<u32>,
    /// Ranks that do not know the mask, with what they say.
    unknown: Vec<(usize, Allowed<'static>)>,
    logprobs: Option<u32>,
    /// [vocab_size] raw logits.
    logits: Vec<f32>,
}

impl Case {
    fn new(params: SamplingParams, logits: Vec<f32>) -> Self {
        let none = Vec::new;
        let [prompt, generated, suppress, mask] = [none(), none(), none(), none()];
        let unknown = Vec::new();
        Self { params, position: 0, prompt, generated, suppress, mask, unknown, logprobs: None, logits }
    }

    fn input(&self, rank: usize) -> RowInput<'_> {
        let says = self.unknown.iter().find(|(of, _)| *of == rank).map(|(_, says)| *says);
        let known = if self.mask.is_empty() { Allowed::All } else { Allowed::These(&self.mask) };
        RowInput {
            params: &self.params,
            position: self.position,
            prompt: &self.prompt,
            generated: &self.generated,
            suppress: &self.suppress,
            allowed: says.unwrap_or(known),
            logprobs: self.logprobs,
        }
    }
}

fn greedy() -> SamplingParams {
    SamplingParams::greedy()
}

fn plain(temperature: f32, seed: u64) -> SamplingParams {
    SamplingParams { temperature, seed, ..greedy() }
}

/// Seeded numbers for tests, without a correlation to the noise under test.
#[derive(Debug, Clone)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// In [0, 1).
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// Roughly normal: a sum of twelve uniform numbers.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// Logits of the given kind: 0 smooth, 1 with many ties, 2 with infinities and NaN, 3 all equal, 4 a wide range.
fn random_logits(kind: u32, vocab: usize, random: &mut SplitMix) -> Vec<f32> {
    let one = |random: &mut SplitMix| match kind {
        0 => random.normal() * 3.0,
        1 => (random.normal() * 2.0).round() * 0.5 * if random.below(2) == 0 { 1.0 } else { -1.0 },
        2 => match random.below(12) {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            2 if random.below(40) == 0 => f32::INFINITY,
            _ => random.normal(),
        },
        3 => 0.25,
        _ => random.normal() * 40.0,
    };
    (0..vocab).map(|_| one(random)).collect()
}

/// Rows of the LM head for this vocabulary: at least one poisoned row of padding wherever there is room.
fn padded(vocab: usize) -> usize {
    (vocab + 1).next_multiple_of(MAX_LEAVES * ROW_TILE)
}

/// What the ranks of a test group share.
struct Group {
    words: Mutex<Vec<Vec<u32>>>,
    arrived: Barrier,
}

/// One rank's end. Counts its rounds.
struct Member<'a> {
    group: &'a Group,
    rank: usize,
    max_words: usize,
    rounds: usize,
    gathered: Vec<u32>,
}

impl Exchange for Member<'_> {
    type Error = Infallible;

    fn all_gather(&mut self, mine: &[u32]) -> Result<&[u32], Infallible> {
        assert!(mine.len() <= self.max_words);
        self.rounds += 1;
        self.group.words.lock().unwrap()[self.rank] = mine.to_vec();
        self.group.arrived.wait();
        let words = self.group.words.lock().unwrap();
        assert!(words.iter().all(|words| words.len() == mine.len()), "ranks disagree about the length");
        self.gathered = words.concat();
        drop(words);
        self.group.arrived.wait();
        Ok(&self.gathered)
    }
}

/// Runs units last to first: their order must not count.
struct Backwards;

impl ParallelFor for Backwards {
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..units).rev().for_each(work);
    }
}

/// Runs the cases as one step of a group of ranks, and again with the same samplers; results and rounds of the step.
fn run(tensor_parallel: usize, cases: &[Case]) -> (Vec<Sampled>, usize) {
    let vocab_size = cases[0].logits.len();
    let group = Group { words: Mutex::new(vec![Vec::new(); tensor_parallel]), arrived: Barrier::new(tensor_parallel) };
    let of_rank = |rank: usize| {
        let padded_vocab = padded(vocab_size);
        let shape = SamplerShape { vocab_size, padded_vocab, tensor_parallel, rank, max_rows: cases.len() };
        let mut sampler = Sampler::new(shape);
        let max_words = sampler.max_words();
        let mut member = Member { group: &group, rank, max_words, rounds: 0, gathered: Vec::new() };
        let rows: Vec<RowInput<'_>> = cases.iter().map(|case| case.input(rank)).collect();
        let local = shape.local_vocab();
        let mut logits: Vec<f32> = Vec::new();
        for case in cases {
            // Padding is poisoned with what would win, or spread.
            let poison = |id: usize| if id.is_multiple_of(2) { f32::INFINITY } else { f32::NAN };
            let ids = rank * local..(rank + 1) * local;
            logits.extend(ids.map(|id| case.logits.get(id).copied().unwrap_or_else(|| poison(id))));
        }
        let Ok(first) = sampler.sample(&rows, &mut logits.clone(), &mut member, &Backwards);
        let first = first.to_vec();
        let rounds = std::mem::take(&mut member.rounds);
        let Ok(second) = sampler.sample(&rows, &mut logits, &mut member, &Backwards);
        assert!(same(&first, second), "a second step differs: {first:?} {second:?}");
        (first, rounds)
    };
    let mut results: Vec<_> = std::thread::scope(|scope| {
        let of_rank = &of_rank;
        let ranks: Vec<_> = (0..tensor_parallel).map(|rank| scope.spawn(move || of_rank(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    });
    let rank_0 = results.remove(0);
    for other in results {
        assert!(same(&rank_0.0, &other.0) && rank_0.1 == other.1, "ranks disagree: {rank_0:?} {other:?}");
    }
    rank_0
}

/// Bit for bit.
fn same(a: &[Sampled], b: &[Sampled]) -> bool {
    let bits = |sampled: &Sampled| {
        let top: Vec<_> = sampled.top.iter().map(|(token, logprob)| (*token, logprob.to_bits())).collect();
        (sampled.token, sampled.logprob.map(f32::to_bits), top)
    };
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| bits(a) == bits(b))
}

fn token(case: Case) -> u32 {
    run(1, &[case]).0[0].token
}
