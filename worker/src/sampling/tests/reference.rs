//! The sampler against a plain implementation in double precision that sorts one whole row.

use super::{Case, SplitMix, greedy, random_logits, run};
use crate::sampling::noise::Noise;
use crate::sampling::{MIN_TEMPERATURE, Sampled, SamplingParams};

/// Decisions closer than this could go either way in fp32: such cases prove nothing.
const MARGIN: f64 = 2e-5;

/// Bias, penalties and suppression, token by token over the whole vocabulary.
fn processed(case: &Case) -> Vec<f32> {
    let params = &case.params;
    let one = |(id, &logit): (usize, &f32)| {
        let id = id as u32;
        let mut logit = logit;
        if let Some((_, bias)) = params.logit_bias.iter().find(|(token, _)| *token == id) {
            logit += bias;
        }
        let count = case.generated.iter().filter(|token| **token == id).count();
        if count > 0 || case.prompt.contains(&id) {
            let penalty = params.repetition_penalty;
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        if count > 0 {
            logit = logit - params.frequency_penalty * count as f32 - params.presence_penalty;
        }
        let masked = case.mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 0);
        if logit.is_nan() || masked || case.suppress.contains(&id) { f32::NEG_INFINITY } else { logit }
    };
    case.logits.iter().enumerate().map(one).collect()
}

/// The token, or none where a decision is within the margin. Finite maxima only.
fn reference(case: &Case) -> Option<u32> {
    let params = &case.params;
    let greedy = params.temperature < MIN_TEMPERATURE;
    let scale = if greedy { 1.0 } else { 1.0 / params.temperature };
    let mut tokens: Vec<(f64, u32)> = processed(case).iter().map(|x| f64::from(x * scale)).zip(0..).collect();
    tokens.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let max = tokens[0].0;
    // Sorting told the two zeros apart; their tokens are tied.
    if max == 0.0 || tokens.iter().any(|(x, _)| *x == 0.0) {
        tokens.iter_mut().for_each(|(x, _)| *x += 0.0);
        tokens.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    }
    if greedy {
        return Some(tokens[0].1);
    }
    if params.min_p == 1.0 {
        tokens.retain(|(x, _)| *x == max);
    } else if params.min_p > 0.0 {
        let threshold = max + f64::from(params.min_p).ln();
        if tokens.iter().any(|(x, _)| (x - threshold).abs() < MARGIN * (1.0 + max.abs())) {
            return None;
        }
        tokens.retain(|(x, _)| *x >= threshold);
    }
    if params.top_k > 0 {
        tokens.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let total: f64 = tokens.iter().map(|(x, _)| (x - max).exp()).sum();
        let target = f64::from(params.top_p) * total;
        let mut sum = 0.0;
        let mut kept = 0;
        while sum < target {
            sum += (tokens[kept].0 - max).exp();
            kept += 1;
            if (sum - target).abs() < MARGIN * total {
                // Tokens alike in weight reach the target one after the other; only a nearly exact hit is doubtful.
                return (target < 0.5 * MARGIN * total).then_some(tokens[0].1);
            }
        }
        tokens.truncate(kept);
    }
    let noise = Noise::new(params.seed, case.position);
    let gumbel = |token| -(-((f64::from(noise.bits(token)) + 0.5) / 4_294_967_296.0).ln()).ln();
    let mut scores: Vec<(f64, u32)> = tokens.iter().map(|&(x, token)| (x + gumbel(token), token)).collect();
    scores.sort_by(|a, b| b.0.total_cmp(&a.0));
    let doubtful = scores.len() > 1 && scores[0].0 - scores[1].0 < MARGIN * (1.0 + scores[0].0.abs());
    (!doubtful).then_some(scores[0].1)
}

fn assert_logprobs(case: &Case, sampled: &Sampled) {
    let Some(top) = case.logprobs else {
        assert!(sampled.logprob.is_none() && sampled.top.is_empty());
        return;
    };
    let mut tokens: Vec<(f64, u32)> = case.logits.iter().map(|x| f64::from(*x + 0.0)).zip(0..).collect();
    let sum = tokens.iter().map(|(x, _)| x.exp()).sum::<f64>().ln();
    let near = |got: f32, exact: f64| (f64::from(got) - exact).abs() < 1e-5 * (1.0 + exact.abs());
    assert!(near(sampled.logprob.unwrap(), tokens[sampled.token as usize].0 - sum));
    tokens.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    assert_eq!(sampled.top.len(), (top as usize).min(tokens.len()));
    for ((token, logprob), (logit, expected)) in sampled.top.iter().zip(&tokens) {
        assert_eq!(token, expected);
        assert!(near(*logprob, logit - sum));
    }
}

/// Every combination of filters, with and without processing, on smooth and on tied logits.
#[test]
fn agrees_with_the_reference_for_every_combination() {
    let vocab = 300;
    let mut random = SplitMix(1);
    let (mut checked, mut doubtful) = (0, 0);
    for temperature in [0.0, 0.3, 1.0, 2.5] {
        for top_k in [0, 1, 5, 64, 65, 150, 300, u32::MAX] {
            for top_p in [1.0, 0.95, 0.5, 1e-6] {
                let mut cases = Vec::new();
                for min_p in [0.0, 0.02, 1.0] {
                    for kind in [0, 1, 3, 4] {
                        let params =
                            SamplingParams { temperature, top_k, top_p, min_p, seed: random.next(), ..greedy() };
                        let mut case = Case::new(params, random_logits(kind, vocab, &mut random));
                        case.position = random.below(5000) as u32;
                        case.logprobs = [None, Some(0), Some(3), Some(20)][random.below(4)];
                        if random.below(2) == 0 {
                            process(&mut case, &mut random);
                        }
                        cases.push(case);
                    }
                }
                let (results, _) = run(4, &cases);
                for (case, sampled) in cases.iter().zip(&results) {
                    assert_logprobs(case, sampled);
                    match reference(case) {
                        Some(token) => assert_eq!(sampled.token, token, "{case:?}"),
                        None => doubtful += 1,
                    }
                    checked += 1;
                }
            }
        }
    }
    assert_eq!(checked, 4 * 8 * 4 * 12);
    assert!(doubtful * 10 < checked, "{doubtful} of {checked} cases prove nothing");
}

/// Gives the case a history, penalties, bias and suppressed tokens.
fn process(case: &mut Case, random: &mut SplitMix) {
    let vocab = case.logits.len();
    let history = |len: usize, random: &mut SplitMix| (0..len).map(|_| random.below(vocab) as u32).collect::<Vec<_>>();
    case.prompt = history(40, random);
    // Few distinct tokens, so that they repeat.
    case.generated = history(60, random).into_iter().map(|token| token % 20 * 7).collect();
    case.suppress = history(3, random);
    if random.below(3) == 0 {
        case.mask = (0..vocab.div_ceil(32)).map(|_| (random.next() & random.next()) as u32 | 1 << 5).collect();
        case.suppress.clear();
    }
    let mut bias: Vec<u32> = history(6, random);
    bias.sort_unstable();
    bias.dedup();
    case.params.logit_bias = bias.into_iter().map(|token| (token, random.normal() * 5.0)).collect();
    case.params.presence_penalty = random.normal();
    case.params.frequency_penalty = random.normal() * 0.3;
    case.params.repetition_penalty = [1.0, 1.3, 0.8][random.below(3)];
}
