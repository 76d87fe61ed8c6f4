//! Known pitfalls, and values that should not occur but do.

use super::{Case, SplitMix, greedy, plain, random_logits, run, same, token};
use crate::sampling::{Allowed, Sampled, SamplingParams};

/// Tokens drawn over many seeds.
fn drawn(params: &SamplingParams, logits: &[f32]) -> std::collections::BTreeSet<u32> {
    let case = |seed| Case::new(SamplingParams { seed, ..params.clone() }, logits.to_vec());
    let cases: Vec<Case> = (0..300).map(case).collect();
    run(2, &cases).0.iter().map(|sampled| sampled.token).collect()
}

#[test]
fn filters_at_their_limits() {
    // Tokens 2 and 5 tie for the first place; the others are nearly as likely.
    let logits = [0.9, 0.8, 1.0, 0.7, 0.9, 1.0, 0.6, 0.5];
    let all: Vec<u32> = (0..8).collect();
    let base = plain(1.0, 0);
    let drawn = |params: SamplingParams| drawn(&params, &logits).into_iter().collect::<Vec<u32>>();
    assert_eq!(drawn(base.clone()), all);
    assert_eq!(drawn(SamplingParams { top_k: 8, ..base.clone() }), all);
    assert_eq!(drawn(SamplingParams { top_k: u32::MAX, top_p: 1.0, ..base.clone() }), all);
    assert_eq!(drawn(SamplingParams { top_p: 0.999_999, ..base.clone() }), all);
    assert_eq!(drawn(SamplingParams { top_p: f32::MIN_POSITIVE, ..base.clone() }), [2]);
    assert_eq!(drawn(SamplingParams { top_k: 1, ..base.clone() }), [2]);
    assert_eq!(drawn(SamplingParams { top_k: 2, ..base.clone() }), [2, 5]);
    assert_eq!(drawn(SamplingParams { top_k: 3, ..base.clone() }), [0, 2, 5]);
    assert_eq!(drawn(SamplingParams { min_p: 1.0, ..base.clone() }), [2, 5]);
    assert_eq!(drawn(SamplingParams { min_p: 1.0, top_p: 0.5, ..base.clone() }), [2]);
    assert_eq!(drawn(SamplingParams { min_p: 1e-30, ..base.clone() }), all);
    // Two of eight equal tokens hold a quarter: 0.26 needs a third.
    let equal = SamplingParams { top_p: 0.26, ..base };
    assert_eq!(super::edges::drawn(&equal, &[0.0; 8]).into_iter().collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn top_p_follows_top_k_and_top_k_follows_min_p() {
    // Of 200 equal tokens top_k leaves 100, and of those top_p half; taken over all tokens it would be 100.
    let params = SamplingParams { top_k: 100, top_p: 0.5, ..plain(1.0, 0) };
    assert_eq!(drawn(&params, &[1.0; 200]).last(), Some(&49));
    // A cut by min_p right through the ties of nothing: ties it keeps are what top_k counts.
    let mut logits = vec![-50.0; 200];
    logits[100..180].fill(1.0);
    let params = SamplingParams { top_k: 70, min_p: 0.5, ..plain(1.0, 0) };
    let tokens = drawn(&params, &logits);
    assert_eq!((tokens.first(), tokens.last()), (Some(&100), Some(&169)));
}

#[test]
fn ties_across_ranks_keep_the_lowest_ids() {
    let mut cases = Vec::new();
    for seed in 0..400 {
        cases.push(Case::new(SamplingParams { top_k: 130, seed, ..plain(1.0, 0) }, vec![0.0; 250]));
    }
    let (results, _) = run(16, &cases);
    let largest = results.iter().map(|sampled| sampled.token).max();
    assert!(largest < Some(130) && largest > Some(120), "{largest:?}");
}

#[test]
fn odd_logits_have_defined_results() {
    let (nan, inf, neg) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let filters = [
        greedy(),
        plain(1.0, 1),
        SamplingParams { top_k: 3, ..plain(0.5, 2) },
        SamplingParams { top_k: 3, top_p: 0.9, min_p: 0.1, ..plain(0.5, 2) },
        SamplingParams { top_p: 0.4, min_p: 0.5, ..plain(2.0, 3) },
        SamplingParams { min_p: 1.0, ..plain(2.0, 3) },
    ];
    for params in filters {
        let token = |logits: &[f32]| token(Case::new(params.clone(), logits.to_vec()));
        assert_eq!(token(&[nan, neg, nan, -2.0, nan]), 3);
        assert_eq!(token(&[nan; 70]), 0);
        assert_eq!(token(&[neg; 70]), 0);
        assert_eq!(token(&[1.0, nan, inf, 5.0, inf]), 2);
        assert_eq!(token(&[7.0]), 0);
    }
}

#[test]
fn the_two_zeros_are_tied() {
    assert_eq!(token(Case::new(greedy(), vec![-1.0, -0.0, 0.0])), 1);
    assert_eq!(token(Case::new(SamplingParams { top_k: 1, ..plain(1.0, 0) }, vec![-1.0, -0.0, 0.0])), 1);
    let first = SamplingParams { top_p: 0.1, ..plain(1.0, 0) };
    assert_eq!(token(Case::new(first, vec![-1.0, -0.0, 0.0])), 1);
}

#[test]
fn bias_and_suppression_can_force_a_token_and_logprobs_stay_raw() {
    let logits = vec![3.0, 1.0, 0.0, 2.0];
    let mut case = Case::new(SamplingParams { logit_bias: vec![(2, 100.0)], ..plain(1.0, 5) }, logits);
    case.logprobs = Some(2);
    let raw = f64::ln(3f64.exp() + 1f64.exp() + 1.0 + 2f64.exp());
    let (results, _) = run(2, std::slice::from_ref(&case));
    assert_eq!(results[0].token, 2);
    assert!((f64::from(results[0].logprob.unwrap()) + raw).abs() < 1e-6);
    assert_eq!(results[0].top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [0, 3]);
    // Suppression wins over bias; ids that do not exist are ignored.
    case.suppress = vec![2, 0, 1, 900];
    case.generated = vec![3, 3, 900];
    case.params.frequency_penalty = 50.0;
    let (results, _) = run(2, std::slice::from_ref(&case));
    assert_eq!(results[0].token, 3);
    assert!((f64::from(results[0].logprob.unwrap()) - (2.0 - raw)).abs() < 1e-6);
    // Infinite bias of both signs on infinite logits makes NaN, which counts as minus infinity.
    let params = SamplingParams { logit_bias: vec![(0, f32::NEG_INFINITY)], ..greedy() };
    assert_eq!(token(Case::new(params, vec![f32::INFINITY, -1.0, -2.0])), 1);
}

/// Row 1 has a mask of one token; what ranks say of it decides, and the rows beside it are as without.
#[test]
fn a_row_whose_mask_a_rank_does_not_know_draws_nothing() {
    let params = SamplingParams { top_k: 3, ..plain(1.0, 8) };
    let cases = [0, 1, 2].map(|row| Case::new(params.clone(), random_logits(0, 333, &mut SplitMix(4 + row))));
    let mut cases = cases.map(|case| Case { logprobs: Some(2), ..case });
    let without = run(4, &cases).0;
    cases[1].mask = vec![0; 11];
    cases[1].mask[9] = 1 << 4;
    let masked = run(4, &cases).0;
    assert_eq!(masked[1].token, 9 * 32 + 4);
    assert_eq!(masked[1].top, without[1].top, "raw logits have no mask");
    let (late, nothing) = (Allowed::Late, Allowed::Nothing);
    for (unknown, instead) in [
        (vec![(2, late)], Sampled::LATE),
        (vec![(0, nothing), (1, nothing), (2, nothing), (3, nothing)], Sampled::NOTHING),
        (vec![(0, nothing), (3, late)], Sampled::LATE),
    ] {
        cases[1].unknown = unknown;
        let drawn = run(4, &cases).0;
        assert!(same(&drawn[1..2], &[Sampled::none(instead)]), "{:?}", drawn[1]);
        assert!(same(&drawn[..1], &without[..1]) && same(&drawn[2..], &without[2..]));
    }
}

#[test]
fn a_tiny_temperature_is_greedy_and_a_small_one_nearly() {
    let logits = vec![1.0, 1.001, 0.5];
    assert_eq!(token(Case::new(plain(1e-38, 1), logits.clone())), 1);
    assert_eq!(drawn(&plain(2e-5, 0), &logits).into_iter().collect::<Vec<_>>(), [1]);
}

#[test]
fn nan_in_one_row_leaves_the_others_alone() {
    let good = Case::new(SamplingParams { top_p: 0.7, ..plain(1.0, 8) }, random_logits(0, 333, &mut SplitMix(4)));
    let bad = Case { logits: vec![f32::NAN; 333], ..good.clone() };
    let alone = run(4, std::slice::from_ref(&good)).0;
    let between = run(4, &[bad.clone(), good, bad]).0;
    assert!(same(&alone, &between[1..2]));
}

#[test]
fn no_rows_need_no_exchange() {
    use crate::sampling::{Alone, Sampler, SamplerShape, Serial};
    let shape = SamplerShape { vocab_size: 20, padded_vocab: 256, tensor_parallel: 1, rank: 0, max_rows: 2 };
    let Ok(results) = Sampler::new(shape).sample(&[], &mut [], &mut Alone::default(), &Serial).map(<[_]>::len);
    assert_eq!(results, 0);
}
