//! The sampler as a whole: against a plain reference, over all group sizes, and as a random variable.

use super::{Alone, RowInput, Sampler, SamplerShape, SamplingParams, Serial};

fn greedy() -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: Vec::new(),
    }
}

#[test]
fn greedy_takes_the_lowest_of_the_largest() {
    let shape = SamplerShape { vocab_size: 40, padded_vocab: 48, tensor_parallel: 1, rank: 0, max_rows: 1 };
    let mut logits = vec![f32::NAN; 48];
    logits[..40].fill(1.0);
    logits[7] = 2.0;
    logits[31] = 2.0;
    let params = greedy();
    let row = RowInput { params: &params, position: 3, prompt: &[], generated: &[], suppress: &[], logprobs: None };
    let mut sampler = Sampler::new(shape);
    let Ok(sampled) = sampler.sample(&[row], &mut logits, &mut Alone::default(), &Serial);
    assert_eq!(sampled[0].token, 7);
}
