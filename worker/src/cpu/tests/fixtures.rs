//! Logits and greedy tokens against those that transformers computed (worker/tests/fixtures).

use std::path::Path;

use super::group::{Arrangement, Request, fixture, run};
use crate::cpu::Isa;
use crate::cpu::tolerance::{
    DECIDED_SHARE, GROUPS_DECIDED_SHARE, GROUPS_LOGITS_RELATIVE_L2, LOGITS_RELATIVE_L2, ORDER_LOGITS_RELATIVE_L2,
};
use crate::golden::{self, RECORDED};
use crate::model::checkpoint::tests::formats::{TINY, in_bf16, with_even_scales};
use crate::model::{LayerTensor, Tensor};

fn check(name: &str, isa: Isa) {
    let dir = fixture(name);
    let arrangement = Arrangement { isa, slots: 64, ..Arrangement::default() };
    let (mut decided, mut steps, mut worst) = (0, 0, 0.0f64);
    for (index, prompt) in golden::read(&dir).iter().enumerate() {
        // Teacher-forced: a sequence for each recorded position.
        let all = prompt.tokens();
        let requests: Vec<_> = prompt.ends().map(|end| Request::greedy(&all[..end], 1)).collect();
        let replies = run(&dir, &arrangement, &requests);
        let logits: Vec<Vec<f32>> =
            replies.iter().map(|reply| reply.logits[0].iter().map(|bits| f32::from_bits(*bits)).collect()).collect();
        let errors = prompt.errors(logits.iter().map(Vec::as_slice));
        worst = errors.iter().fold(worst, |worst, error| worst.max(error.relative_l2));
        let sure = prompt.decided(&errors);
        for step in &sure {
            assert_eq!(
                replies[RECORDED + step].tokens[0],
                prompt.greedy[*step],
                "{name} {isa} prompt {index} step {step}"
            );
        }
        decided += sure.len();
        steps += prompt.greedy.len();
        // Free-running: the same tokens up to the first step that the error could have turned.
        let free = run(&dir, &arrangement, &[Request::greedy(&prompt.ids, prompt.greedy.len() as u32)]);
        let until = sure.iter().zip(0..).take_while(|(step, count)| *step == count).count();
        assert_eq!(free[0].tokens[..until], prompt.greedy[..until], "{name} {isa} prompt {index}");
    }
    println!("{name} {isa}: relative L2 error {worst:.5}, {decided} of {steps} greedy steps decided");
    let grouped = TINY.iter().any(|(tiny, format)| *tiny == name && format.group().is_some());
    let (most, least) = match grouped {
        true => (GROUPS_LOGITS_RELATIVE_L2, GROUPS_DECIDED_SHARE),
        false => (LOGITS_RELATIVE_L2, DECIDED_SHARE),
    };
    assert!(worst <= most, "{name} {isa}: relative L2 error {worst}");
    let share = decided as f64 / steps as f64;
    assert!(share >= least, "{name} {isa}: {decided} of {steps} greedy steps are decided by their margin");
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
    llama_in_fp8: "llama-tied-fp8",
    blocks_of_fp8: "tiny-fp8-blocks",
    four_bits_of_compressed_tensors: "tiny-packed",
    four_bits_with_zero_points: "tiny-packed-zeros",
    four_bits_of_awq: "tiny-awq",
    four_bits_of_gptq: "tiny-gptq",
    four_bits_in_act_order: "tiny-gptq-desc-act",
}

/// In every instruction set, on any number of ranks, in steps of any number of rows.
#[test]
fn groups_have_the_same_bits_in_any_arrangement() {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    for (isa, (name, _)) in isas.flat_map(|isa| TINY.map(|tiny| (isa, tiny))) {
        let prompt = golden::read(&fixture(name)).remove(0);
        let requests: Vec<_> = (0..64).map(|i| Request::greedy(&prompt.ids[..1 + i % prompt.ids.len()], 2)).collect();
        let bits = |dir: &Path, tensor_parallel, slots| {
            let arrangement = Arrangement { isa, tensor_parallel, slots, ..Arrangement::default() };
            run(dir, &arrangement, &requests[..slots])
        };
        let in_bf16 = |picked| in_bf16(&fixture(name), picked);
        let (stored, plain) = (bits(&fixture(name), 1, 64), bits(in_bf16(None).path(), 1, 64));
        // Two heads: no more ranks.
        for (tensor_parallel, slots) in [(1, 9), (2, 8), (2, 33), (2, 1), (1, 2)] {
            let other = bits(&fixture(name), tensor_parallel, slots);
            assert!(other == stored[..slots], "{name} {isa}, {slots} sequences on {tensor_parallel} ranks");
        }
        let some = |tensor| matches!(tensor, Tensor::Layer(0, LayerTensor::Gate | LayerTensor::Key));
        assert!(bits(in_bf16(Some(&some)).path(), 1, 3) == plain[..3], "{name} {isa}, partly");
        // In act order the scales belong to no run: such a model is one in bf16.
        assert_eq!(stored == plain, name == "tiny-gptq-desc-act", "{name} {isa}");
    }
}

#[test]
fn groups_with_scales_that_round_no_weight_are_close_to_bf16() {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    for (isa, (name, _)) in isas.flat_map(|isa| TINY.map(|tiny| (isa, tiny))) {
        let prompt = golden::read(&fixture(name)).remove(0);
        let requests: Vec<_> = (1..=prompt.ids.len()).map(|end| Request::greedy(&prompt.ids[..end], 1)).collect();
        let logits = |dir: &Path| run(dir, &Arrangement { isa, slots: 64, ..Arrangement::default() }, &requests);
        let stored = with_even_scales(name);
        let plain = logits(in_bf16(stored.path(), None).path());
        let errors = logits(stored.path())
            .into_iter()
            .zip(plain)
            .map(|(stored, plain)| relative_l2(&stored.logits[0], &plain.logits[0]));
        let worst = errors.fold(0.0, f64::max);
        println!("{name} {isa}: relative L2 error {worst:.5}");
        assert!(worst < ORDER_LOGITS_RELATIVE_L2, "{name} {isa}: {worst}");
    }
}

fn relative_l2(left: &[u32], right: &[u32]) -> f64 {
    let value = |bits: &u32| f64::from(f32::from_bits(*bits));
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let error = squares(&mut left.iter().zip(right).map(|(left, right)| value(left) - value(right)));
    (error / squares(&mut right.iter().map(value))).sqrt()
}

#[test]
fn the_portable_kernels_are_right_too() {
    check("llama-tied", Isa::Portable);
}
