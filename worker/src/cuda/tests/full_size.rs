//! A model of full size against torch: `kernels/tests/full_size.py` makes up the same weights and writes down prompts
//! and what they yield.

use std::sync::Arc;

use safetensors::SafeTensors;

use super::gpu::gpu;
use super::wide::{Model, NARROW, load};
use crate::bench::Shape;
use crate::cuda::NormalSource;
use crate::model::ModelConfig;

/// The file that the script wrote. It takes a GPU and half a minute, so whoever does not name one is told that this was
/// skipped.
const REFERENCE: &str = "LOOPLANE_FULL_SIZE_REFERENCE";
/// As in the script.
const SEED: u64 = 1;
const CONTEXT: usize = 4096;
/// Prompts that are computed in narrow passes, too.
const NARROW_PROMPTS: usize = 4;
/// Bound on our error against fp32, over that of torch in bf16, which rounds in more places (measured: 0.55).
const TIMES_TORCH: f64 = 0.7;

fn relative_l2(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let pairs = || got.iter().zip(expected).map(|(g, e)| (f64::from(*g), f64::from(*e)));
    (pairs().map(|(g, e)| (g - e).powi(2)).sum::<f64>() / pairs().map(|(_, e)| e * e).sum::<f64>()).sqrt()
}

#[test]
fn prompts_of_an_8b_model_agree_with_torch() {
    let Some(path) = std::env::var_os(REFERENCE) else {
        eprintln!("skipped: {REFERENCE} names no reference");
        return;
    };
    assert!(gpu(), "a reference is of use on a GPU");
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let values = |name: String| -> Vec<f32> { bytemuck::pod_collect_to_vec(tensors.tensor(&name).unwrap().data()) };
    let ids = |prompt: usize| -> Option<Vec<u32>> {
        Some(bytemuck::pod_collect_to_vec(tensors.tensor(&format!("ids.{prompt}")).ok()?.data()))
    };
    let prompts: Vec<Vec<u32>> = (0..).map_while(ids).collect();
    assert!(prompts.len() >= 32);

    let config = ModelConfig { max_positions: CONTEXT, ..Shape::B8.config() };
    let mut model =
        Model::new(load(&config, Arc::new(NormalSource::new(&config, SEED)), prompts.len(), None), prompts.len());
    let (mut ours, mut torchs) = (Vec::new(), Vec::new());
    for (slot, prompt) in prompts.iter().enumerate() {
        let got = model.prompt(slot as u32, prompt, 512, None).pop().expect("a prompt's last chunk samples");
        let got: Vec<f32> = got.into_iter().map(f32::from_bits).collect();
        let expected = values(format!("fp32.{slot}"));
        ours.push(relative_l2(&got, &expected));
        torchs.push(relative_l2(&values(format!("bf16.{slot}")), &expected));
        eprintln!("{:>5} tokens: relative L2 error {:.5}, torch in bf16 {:.5}", prompt.len(), ours[slot], torchs[slot]);
        if slot < NARROW_PROMPTS {
            let alone = model.prompt(slot as u32, prompt, prompt.len(), Some(NARROW)).pop();
            assert!(alone == Some(got.iter().map(|logit| logit.to_bits()).collect()), "narrow passes of prompt {slot}");
        }
    }
    let worst = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
    let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
    eprintln!(
        "mean {:.5} and worst {:.5}; torch {:.5} and {:.5}",
        mean(&ours),
        worst(&ours),
        mean(&torchs),
        worst(&torchs)
    );
    assert!(mean(&ours) <= TIMES_TORCH * mean(&torchs) && worst(&ours) <= TIMES_TORCH * worst(&torchs));
}
