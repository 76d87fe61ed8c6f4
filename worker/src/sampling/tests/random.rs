//! The draw as a random variable: its frequencies are the softmax over what the filters keep.

use super::{Case, plain, run};
use crate::sampling::SamplingParams;

const DRAWS: u64 = 20_000;
/// Tokens whose logit is not minus infinity, in a vocabulary that spans several leaves and groups of noise.
const LIKELY: [(u32, f32); 10] = [
    (0, 1.0),
    (1, 0.0),
    (15, 2.0),
    (16, -1.0),
    (63, 0.5),
    (64, 1.5),
    (100, 0.25),
    (211, 1.0),
    (255, -0.5),
    (299, 0.75),
];

/// Pearson's statistic of draws with `params` against the softmax at `temperature` over the best `kept` tokens.
fn chi_square(params: &SamplingParams, temperature: f64, kept: usize, vary_seed: bool) -> f64 {
    let mut logits = vec![-40.0; 300];
    for (token, logit) in LIKELY {
        logits[token as usize] = logit;
    }
    let mut counts = vec![0u64; 300];
    for start in (0..DRAWS).step_by(500) {
        let case = |i: u64| {
            let mut case = Case::new(params.clone(), logits.clone());
            (case.params.seed, case.position) = if vary_seed { (i, 9) } else { (77, i as u32) };
            case
        };
        let cases: Vec<Case> = (start..start + 500).map(case).collect();
        for sampled in run(1, &cases).0 {
            counts[sampled.token as usize] += 1;
        }
    }
    let mut tokens = LIKELY;
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let share = |logit: f32| (f64::from(logit) / temperature).exp();
    let total: f64 = tokens[..kept].iter().map(|(_, logit)| share(*logit)).sum();
    let outside: u64 =
        (0..300).filter(|id| tokens[..kept].iter().all(|(t, _)| t != id)).map(|id| counts[id as usize]).sum();
    assert_eq!(outside, 0, "tokens were drawn that are not kept");
    let term = |&(token, logit): &(u32, f32)| {
        let expected = DRAWS as f64 * share(logit) / total;
        (counts[token as usize] as f64 - expected).powi(2) / expected
    };
    tokens[..kept].iter().map(term).sum()
}

/// The limits are exceeded once in ten thousand runs by chance; seeds are fixed, so they never are.
#[test]
fn frequencies_follow_the_softmax() {
    for vary_seed in [false, true] {
        let statistic = chi_square(&plain(1.0, 0), 1.0, 10, vary_seed);
        assert!(statistic < 33.7, "9 degrees of freedom: {statistic}");
    }
    let statistic = chi_square(&plain(0.6, 0), f64::from(0.6f32), 10, true);
    assert!(statistic < 33.7, "9 degrees of freedom: {statistic}");
    // Listed, counted, and cut by probability: five tokens are left each time.
    let filters = [
        SamplingParams { top_k: 5, ..plain(1.0, 0) },
        SamplingParams { top_k: 200, min_p: 0.28, ..plain(1.0, 0) },
        SamplingParams { top_p: 0.75, ..plain(1.0, 0) },
    ];
    for params in filters {
        let statistic = chi_square(&params, 1.0, 5, true);
        assert!(statistic < 23.5, "4 degrees of freedom: {statistic} for {params:?}");
    }
}

/// The control: a temperature that is off by a tenth does not pass.
#[test]
fn the_test_of_frequencies_can_fail() {
    assert!(chi_square(&plain(0.9, 0), 1.0, 10, true) > 33.7);
}
