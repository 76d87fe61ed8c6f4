//! Formats of weights compute, bit for bit, what the same weights do as bf16: E4M3 with scales of rows if those are powers
//! of two, groups always.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::gpu::gpu;
use super::wide::{self, Bits, Model, load};
use crate::cuda::weights::panel::takes;
use crate::model::conversion::Expanded;
use crate::model::conversion::expanded::tests::Grouped;
use crate::model::conversion::quantised::tests::PowersOfTwo;
use crate::model::format::INT4;
use crate::model::source::{RandomSource, Source};
use crate::model::{ModelConfig, Tensor, WeightFormat};

const SLOTS: usize = 64;

/// Logits of rows in passes of every family.
fn logits(config: &ModelConfig, source: Arc<dyn Source + Send>) -> Vec<Bits> {
    let mut model = Model::new(load(config, source, SLOTS, None), SLOTS);
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
    let [bf16, e4m3] = [WeightFormat::Bf16, WeightFormat::E4m3].map(|layer_weights| {
        let config = ModelConfig { layer_weights, ..config.clone() };
        logits(&config, Arc::new(PowersOfTwo(RandomSource { config: config.clone(), seed: 3 })))
    });
    compare(&bf16, &e4m3, config, WeightFormat::E4m3);
}

fn compare(bf16: &[Bits], of: &[Bits], config: &ModelConfig, format: WeightFormat) {
    let differ = bf16.iter().zip(of).filter(|(a, b)| a != b).count();
    assert!(differ == 0, "{format}: {differ} of {} rows differ: {:?}", bf16.len(), config.architecture);
    assert!(!of.iter().any(wide::is_nan));
}

/// Weights in groups, expanded when they are read.
struct InBf16(Grouped);

impl Source for InBf16 {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        Expanded(&self.0).read(tensor, rows, columns, out);
    }

    fn scales(&self, _tensor: Tensor, _rows: Range<usize>, _column: usize, out: &mut [f32]) {
        out.fill(1.0);
    }
}

fn check_groups(config: &ModelConfig, format: WeightFormat) {
    if !gpu() {
        return;
    }
    let grouped = ModelConfig { layer_weights: format, ..config.clone() };
    assert!(takes(&grouped), "{format}");
    let source = || Grouped(RandomSource { config: grouped.clone(), seed: 3 });
    let bf16 = logits(config, Arc::new(InBf16(source())));
    compare(&bf16, &logits(&grouped, Arc::new(source())), config, format);
}

const ZEROS: WeightFormat = WeightFormat::Int4 { columns: 128, zeros: true };
const BLOCKS: WeightFormat = WeightFormat::E4m3Groups { columns: 128 };

#[test]
fn groups_have_the_bits_of_bf16_everything_at_once() {
    [INT4, ZEROS, BLOCKS].into_iter().for_each(|format| check_groups(&wide::with_features(), format));
}

/// Runs of four k16 steps, of two and of one.
#[test]
fn groups_have_the_bits_of_bf16_uneven_shares() {
    check_groups(&wide::llama_3b(), INT4);
    check_groups(&wide::llama_3b(), WeightFormat::Int4 { columns: 32, zeros: false });
    check_groups(&wide::qwen2_7b(), ZEROS);
    check_groups(&wide::qwen2_7b(), BLOCKS);
    check_groups(&wide::mistral_nemo(), INT4);
}

#[test]
fn groups_have_the_bits_of_bf16_small_models() {
    check_groups(&wide::qwen2_half_b(), INT4);
    check_groups(&wide::smol(), WeightFormat::Int4 { columns: 64, zeros: true });
    check_groups(&wide::smol(), BLOCKS);
}

#[test]
fn e4m3_has_the_bits_of_bf16_everything_at_once() {
    check(&wide::with_features());
}

#[test]
fn e4m3_has_the_bits_of_bf16_uneven_shares() {
    check(&wide::llama_3b());
    check(&wide::qwen2_7b());
    check(&wide::mistral_nemo());
}

#[test]
fn e4m3_has_the_bits_of_bf16_small_models() {
    check(&wide::qwen2_half_b());
    check(&wide::smol());
}
