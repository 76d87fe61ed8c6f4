//! Formats of weights: E4M3 with scales that are powers of two compute, bit for bit, what the same weights do as bf16.

use std::sync::Arc;

use super::gpu::gpu;
use super::wide::{self, Bits, Model, load};
use crate::model::conversion::quantised::tests::PowersOfTwo;
use crate::model::source::RandomSource;
use crate::model::{ModelConfig, WeightFormat};

const SLOTS: usize = 64;

/// Logits of rows in passes of every family.
fn logits(config: &ModelConfig) -> Vec<Bits> {
    let source = PowersOfTwo(RandomSource { config: config.clone(), seed: 3 });
    let mut model = Model::new(load(config, Arc::new(source), SLOTS, None), SLOTS);
    let tokens: Vec<u32> = (0..400).map(|i| i * i % 1999).collect();
    // Matrix passes of several cuts, then narrow ones.
    let mut bits: Vec<Bits> = [300, 128, 200].iter().flat_map(|chunk| model.prompt(0, &tokens, *chunk, None)).collect();
    bits.extend(model.alone(1, &tokens[..70]));
    for count in [1, 2, 8, 17, 32, 50, 64] {
        (1..count).for_each(|slot| drop(model.prompt(slot, &tokens[..slot as usize + 3], 8, None)));
        let rows: Vec<_> = (0..count).map(|slot| (slot, 11, if slot == 0 { 400 } else { slot + 3 })).collect();
        bits.extend(model.step(&rows, &vec![true; rows.len()], None));
    }
    bits
}

fn check(config: &ModelConfig) {
    if !gpu() {
        return;
    }
    let of = |layer_weights| logits(&ModelConfig { layer_weights, ..config.clone() });
    let (bf16, e4m3) = (of(WeightFormat::Bf16), of(WeightFormat::E4m3));
    let differ = bf16.iter().zip(&e4m3).filter(|(a, b)| a != b).count();
    assert!(differ == 0, "{differ} of {} rows differ: {:?}", bf16.len(), config.architecture);
    assert!(!e4m3.iter().any(wide::is_nan));
}

#[test]
fn e4m3_has_the_bits_of_bf16_everything_at_once() {
    check(&wide::with_features());
}

#[test]
fn e4m3_has_the_bits_of_bf16_uneven_shares() {
    check(&wide::llama_3b());
    check(&wide::qwen2_7b());
}

#[test]
fn e4m3_has_the_bits_of_bf16_small_models() {
    check(&wide::qwen2_half_b());
    check(&wide::smol());
}
