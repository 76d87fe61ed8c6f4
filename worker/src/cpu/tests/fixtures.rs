//! Logits and greedy tokens against those that transformers computed (worker/tests/fixtures).

use half::f16;
use safetensors::SafeTensors;

use super::group::{Arrangement, Request, fixture, run};
use crate::cpu::Isa;
use crate::cpu::tolerance::{DECIDED_SHARE, LOGITS_RELATIVE_L2, MARGIN_ERRORS};

#[derive(serde::Deserialize)]
struct Expected {
    prompts: Vec<Prompt>,
}

#[derive(serde::Deserialize)]
struct Prompt {
    ids: Vec<u32>,
    greedy: Vec<u32>,
    margin: Vec<f64>,
}

/// Positions at the end of a prompt whose logits are recorded.
const RECORDED: usize = 16;

/// How far a position's logits are from the recorded ones.
struct Error {
    relative_l2: f64,
    /// Largest difference of one logit.
    largest: f64,
}

impl Error {
    fn of(got: &[u32], expected: &[f32]) -> Self {
        assert_eq!(got.len(), expected.len());
        let (mut error, mut size, mut largest) = (0.0, 0.0, 0.0f64);
        for (got, expected) in got.iter().zip(expected) {
            let expected = f64::from(*expected);
            let difference = f64::from(f32::from_bits(*got)) - expected;
            largest = largest.max(difference.abs());
            error += difference * difference;
            size += expected * expected;
        }
        Self { relative_l2: (error / size).sqrt(), largest }
    }
}

fn check(name: &str, isa: Isa) {
    let dir = fixture(name);
    let expected: Expected = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let tensors = std::fs::read(dir.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&tensors).unwrap();
    let arrangement = Arrangement { isa, slots: 64, ..Arrangement::default() };
    let (mut decided, mut steps, mut worst) = (0, 0, 0.0f64);
    for (index, prompt) in expected.prompts.iter().enumerate() {
        let tensor = |kind: &str| tensors.tensor(&format!("{kind}.{index}")).unwrap();
        let of_prompt: Vec<f32> = bytemuck::pod_collect_to_vec(tensor("logits").data());
        let of_greedy: Vec<f16> = bytemuck::pod_collect_to_vec(tensor("greedy").data());
        let recorded: Vec<f32> = of_prompt.into_iter().chain(of_greedy.into_iter().map(f16::to_f32)).collect();
        let vocab = recorded.len() / (RECORDED + prompt.greedy.len());
        // Teacher-forced: a sequence for each recorded position of the prompt, and for each greedy step, the first
        // of which draws from the prompt's last position.
        let length = prompt.ids.len();
        let all: Vec<u32> = prompt.ids.iter().chain(&prompt.greedy).copied().collect();
        let ends = (length + 1 - RECORDED..=length).chain(length..all.len());
        let replies = run(&dir, &arrangement, &ends.map(|end| Request::greedy(&all[..end], 1)).collect::<Vec<_>>());
        assert_eq!(replies.len(), recorded.len() / vocab);
        let errors = replies.iter().zip(recorded.chunks_exact(vocab));
        let errors: Vec<_> = errors.map(|(reply, recorded)| Error::of(&reply.logits[0], recorded)).collect();
        worst = errors.iter().fold(worst, |worst, error| worst.max(error.relative_l2));
        let is_decided = |step: usize| prompt.margin[step] > MARGIN_ERRORS * errors[RECORDED + step].largest;
        for step in (0..prompt.greedy.len()).filter(|step| is_decided(*step)) {
            let (got, expected, margin) =
                (replies[RECORDED + step].tokens[0], prompt.greedy[step], prompt.margin[step]);
            assert_eq!(got, expected, "{name} {isa} prompt {index} step {step}, margin {margin}");
            decided += 1;
        }
        steps += prompt.greedy.len();
        // Free-running: the same tokens up to the first step that the error could have turned.
        let free = run(&dir, &arrangement, &[Request::greedy(&prompt.ids, prompt.greedy.len() as u32)]);
        let sure = (0..prompt.greedy.len()).find(|step| !is_decided(*step)).unwrap_or(prompt.greedy.len());
        assert_eq!(free[0].tokens[..sure], prompt.greedy[..sure], "{name} {isa} prompt {index}");
    }
    println!("{name} {isa}: relative L2 error {worst:.5}, {decided} of {steps} greedy steps decided");
    assert!(worst <= LOGITS_RELATIVE_L2, "{name} {isa}: relative L2 error {worst}");
    let share = f64::from(decided) / steps as f64;
    assert!(share >= DECIDED_SHARE, "{name} {isa}: {decided} of {steps} greedy steps are decided by their margin");
}

macro_rules! fixtures {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            check($name, Isa::best());
        })*
    };
}

fixtures! {
    llama_with_grouped_heads: "llama-gqa",
    llama_with_scaled_rope: "llama31-scaled",
    llama_with_tied_embeddings: "llama-tied",
    llama_with_sixteen_kv_heads: "llama-mha16",
    qwen2_with_bias: "qwen2-bias",
    qwen3_with_head_norms: "qwen3-qknorm",
    mistral_with_a_window: "mistral-window",
}

#[test]
fn the_portable_kernels_are_right_too() {
    check("llama-tied", Isa::Portable);
}
