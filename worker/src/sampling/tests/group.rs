//! The same bits for every group size, batch and place in it.

use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::{Case, SplitMix, greedy, padded, plain, random_logits, run, same};
use crate::sampling::{Alone, ParallelFor, Sampled, Sampler, SamplerShape, SamplingParams};

const VOCAB: usize = 700;

fn case() -> impl Strategy<Value = Case> {
    let temperature = prop_oneof![Just(0.0f32), Just(1.0), 0.05..3.0f32];
    let top_k = prop_oneof![Just(0u32), 1..=64u32, 65..800u32];
    let top_p = prop_oneof![Just(1.0f32), 1e-6..1.0f32, 0.5..1.0f32];
    let min_p = prop_oneof![Just(0.0f32), 0.0..=1.0f32];
    let filters = (temperature, top_k, top_p, min_p);
    let penalties = (any::<bool>(), -2.0..2.0f32, -2.0..2.0f32, 0.5..2.0f32);
    let rest = (any::<u64>(), any::<u32>(), 0..5u32, prop::option::of(0..=20u32));
    (filters, penalties, rest).prop_map(|((temperature, top_k, top_p, min_p), (processed, a, b, c), rest)| {
        let (seed, position, kind, logprobs) = rest;
        let mut random = SplitMix(seed ^ 0x5eed);
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..greedy() };
        let mut case = Case::new(params, random_logits(kind, VOCAB, &mut random));
        (case.position, case.logprobs) = (position, logprobs);
        if processed && seed.is_multiple_of(2) {
            case.mask = (0..VOCAB.div_ceil(32)).map(|_| random.next() as u32).collect();
        }
        if processed {
            case.prompt = (0..30).map(|_| random.below(VOCAB) as u32).collect();
            case.generated = (0..30).map(|_| random.below(50) as u32).collect();
            case.suppress = vec![random.below(VOCAB) as u32, random.below(VOCAB) as u32];
            case.params.presence_penalty = a;
            case.params.frequency_penalty = b;
            case.params.repetition_penalty = c;
            case.params.logit_bias = vec![(random.below(VOCAB) as u32, 10.0 * a)];
        }
        case
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn results_do_not_depend_on_group_or_batch(cases in prop::collection::vec(case(), 1..6)) {
        let (together, _) = run(1, &cases);
        for tensor_parallel in [2, 4, 8, 16] {
            let (results, _) = run(tensor_parallel, &cases);
            prop_assert!(same(&together, &results), "tp {tensor_parallel}: {together:?} {results:?}");
        }
        let reversed: Vec<Case> = cases.iter().rev().cloned().collect();
        let mut results = run(2, &reversed).0;
        results.reverse();
        prop_assert!(same(&together, &results));
        for (case, expected) in cases.iter().zip(&together) {
            let alone: Vec<Sampled> = run(4, std::slice::from_ref(case)).0;
            prop_assert!(same(&alone, std::slice::from_ref(expected)));
        }
    }

    #[test]
    fn a_vocabulary_smaller_than_the_group_works(vocab in 1..40usize, seed in any::<u64>(), k in 0..100u32) {
        let logits = random_logits((seed % 5) as u32, vocab, &mut SplitMix(seed));
        let mut case = Case::new(SamplingParams { top_k: k, top_p: 0.9, ..plain(0.8, seed) }, logits);
        case.logprobs = Some(20);
        let (one, _) = run(1, std::slice::from_ref(&case));
        prop_assert!((one[0].token as usize) < vocab);
        prop_assert_eq!(one[0].top.len(), vocab.min(20));
        prop_assert!(same(&one, &run(16, &[case]).0));
    }
}

/// Runs units on three threads, whichever comes first.
struct Threads;

impl ParallelFor for Threads {
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(unit) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|unit| *unit < units) {
                        work(unit);
                    }
                });
            }
        });
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let params = [
        greedy(),
        plain(1.0, 1),
        SamplingParams { top_k: 30, ..plain(0.8, 2) },
        SamplingParams { top_k: 90, top_p: 0.9, min_p: 0.01, ..plain(1.2, 3) },
    ];
    let mut random = SplitMix(9);
    let mut cases: Vec<Case> =
        params.into_iter().map(|params| Case::new(params, random_logits(0, VOCAB, &mut random))).collect();
    cases.iter_mut().for_each(|case| case.logprobs = Some(7));
    let (expected, _) = run(1, &cases);
    let padded_vocab = padded(VOCAB);
    let shape = SamplerShape { vocab_size: VOCAB, padded_vocab, tensor_parallel: 1, rank: 0, max_rows: 4 };
    let mut sampler = Sampler::new(shape);
    let rows: Vec<_> = cases.iter().map(|case| case.input(0)).collect();
    let mut logits = Vec::new();
    for case in &cases {
        logits.extend_from_slice(&case.logits);
        logits.resize(logits.len().next_multiple_of(padded_vocab), f32::NAN);
    }
    for _ in 0..20 {
        let Ok(results) = sampler.sample(&rows, &mut logits, &mut Alone::default(), &Threads);
        assert!(same(results, &expected));
    }
}

/// The control of the equality tests: they compare more than constants.
#[test]
fn seed_and_position_change_the_draw() {
    let logits = vec![0.0; VOCAB];
    let draw = |seed, position| {
        let mut case = Case::new(plain(1.0, seed), logits.clone());
        case.position = position;
        run(2, &[case]).0[0].token
    };
    let distinct: std::collections::HashSet<u32> =
        (0..20).map(|i| draw(i, 0)).chain((1..20).map(|i| draw(0, i))).collect();
    assert!(distinct.len() > 30, "{}", distinct.len());
}

#[test]
fn rounds_are_few() {
    let logits = random_logits(0, VOCAB, &mut SplitMix(3));
    let row = |params| {
        let mut case = Case::new(params, logits.clone());
        case.logprobs = Some(5);
        case
    };
    let quick = [
        row(greedy()),
        row(plain(1.0, 1)),
        row(SamplingParams { top_k: 64, top_p: 0.5, min_p: 0.1, ..plain(1.0, 2) }),
        row(SamplingParams { top_p: 0.5, ..greedy() }),
        row(SamplingParams { top_k: u32::MAX, ..plain(1.0, 1) }),
    ];
    assert_eq!(run(4, &quick).1, 1);
    assert_eq!(run(4, &[row(SamplingParams { min_p: 0.1, ..plain(1.0, 2) })]).1, 2);
    assert_eq!(run(4, &[row(SamplingParams { top_p: 0.9, ..plain(1.0, 2) })]).1, 6);
    let slow = row(SamplingParams { top_k: 65, top_p: 0.9, ..plain(1.0, 2) });
    assert_eq!(run(4, &[quick[0].clone(), slow, quick[1].clone()]).1, 10);
}
