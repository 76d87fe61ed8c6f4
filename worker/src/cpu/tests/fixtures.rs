//! Logits and greedy tokens against those that transformers computed (worker/tests/fixtures).

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

fn check(name: &str, isa: Isa) {
    let dir = fixture(name);
    let expected: Expected = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let tensors = std::fs::read(dir.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&tensors).unwrap();
    let arrangement = Arrangement { isa, slots: 64, ..Arrangement::default() };
    let (mut decided, mut steps, mut worst) = (0, 0, 0.0f64);
    for (index, prompt) in expected.prompts.iter().enumerate() {
        let recorded: Vec<f32> =
            bytemuck::pod_collect_to_vec(tensors.tensor(&format!("logits.{index}")).unwrap().data());
        let vocab = recorded.len() / RECORDED;
        // Teacher-forced: a sequence for each recorded position of the prompt, and for each recorded greedy step.
        let length = prompt.ids.len();
        let of_prompt = (length + 1 - RECORDED..=length).map(|end| Request::greedy(&prompt.ids[..end], 1));
        let all: Vec<u32> = prompt.ids.iter().chain(&prompt.greedy).copied().collect();
        let of_greedy = (length..all.len()).map(|end| Request::greedy(&all[..end], 1));
        let replies = run(&dir, &arrangement, &of_prompt.chain(of_greedy).collect::<Vec<_>>());
        let mut largest = 0.0f64;
        let steps_recorded: Vec<f32> = tensors.tensor(&format!("greedy.{index}")).unwrap().data().as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect();
        for ((row, reply), margin) in steps_recorded.chunks_exact(vocab).zip(&replies[RECORDED..]).zip(&prompt.margin) {
            let e = row.iter().zip(&reply.logits[0]).map(|(a, b)| (f32::from_bits(*b) - a).abs()).fold(0.0f32, f32::max);
            let top = reply.tokens[0] == prompt.greedy[0];
            let _ = top;
            println!("STEP {name} {margin} {e}");
        }
        for (row, reply) in recorded.chunks_exact(vocab).zip(&replies) {
            let (mut error, mut size) = (0.0, 0.0);
            for (expected, got) in row.iter().zip(&reply.logits[0]) {
                let difference = f64::from(f32::from_bits(*got)) - f64::from(*expected);
                largest = largest.max(difference.abs());
                error += difference * difference;
                size += f64::from(*expected).powi(2);
            }
            worst = worst.max((error / size).sqrt());
        }
        let greedy = replies[RECORDED..].iter().zip(&prompt.greedy).zip(&prompt.margin);
        for (step, ((reply, expected), margin)) in greedy.enumerate() {
            steps += 1;
            if *margin > MARGIN_ERRORS * largest {
                decided += 1;
                assert_eq!(reply.tokens[0], *expected, "{name} {isa} prompt {index} step {step}, margin {margin}");
            }
        }
        // Free-running: the same tokens up to the first step that the error could have turned.
        let free = run(&dir, &arrangement, &[Request::greedy(&prompt.ids, prompt.greedy.len() as u32)]);
        let sure =
            prompt.margin.iter().position(|margin| *margin <= MARGIN_ERRORS * largest).unwrap_or(prompt.greedy.len());
        assert_eq!(free[0].tokens[..sure], prompt.greedy[..sure], "{name} {isa} prompt {index}");
    }
    println!("{name} {isa}: relative L2 error {worst:.5}, {decided} of {steps} greedy steps decided");
    assert!(worst <= LOGITS_RELATIVE_L2, "{name} {isa}: relative L2 error {worst}");
    let share = f64::from(decided) / f64::from(steps);
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
