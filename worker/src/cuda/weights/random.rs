//! Weights that a benchmark makes up: normally distributed, as models are initialised, and cheap enough to fill a GPU
//! in seconds.

use std::ops::Range;

use half::bf16;

use crate::model::source::Source;
use crate::model::{LayerTensor, ModelConfig, Tensor};

/// Standard deviation of every matrix, but for those whose results are added to the residual stream.
const DEVIATION: f64 = 0.02;
/// Values that a weight can have, each as likely: quantiles of the normal distribution, up to 4 deviations.
const QUANTILES: usize = 1 << 14;
/// Weights that one draw of 64 bits yields.
const PER_DRAW: usize = 4;

/// N(0, 0.02), divided by the root of twice the number of layers in o_proj and down_proj; norms are 1. A function of
/// seed, tensor and place.
#[derive(Debug, Clone)]
pub struct NormalSource {
    config: ModelConfig,
    seed: u64,
    /// By scale: others, and those of o_proj and down_proj.
    quantiles: [Vec<bf16>; 2],
}

impl NormalSource {
    /// Another seed is another model.
    pub fn new(config: &ModelConfig, seed: u64) -> Self {
        let damped = DEVIATION / (2.0 * config.num_layers as f64).sqrt();
        let quantiles = [DEVIATION, damped].map(|deviation| {
            let scaled = |z: f64| bf16::from_f64(z * deviation);
            (0..QUANTILES).map(|i| scaled(normal_quantile((i as f64 + 0.5) / QUANTILES as f64))).collect()
        });
        Self { config: config.clone(), seed, quantiles }
    }
}

impl Source for NormalSource {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        let shape = tensor.shape(&self.config);
        let (name, scale) = match tensor {
            Tensor::Embedding => (0, 0),
            Tensor::LmHead => (u64::from(!self.config.tied_embeddings), 0),
            Tensor::FinalNorm => (2, 0),
            Tensor::Layer(layer, tensor) => {
                let damped = matches!(tensor, LayerTensor::AttentionOut | LayerTensor::Down);
                (3 + layer as u64 * 32 + tensor as u64, usize::from(damped))
            }
        };
        if shape.len() == 1 && !is_bias(tensor) {
            out.fill(bf16::ONE);
            return;
        }
        let stride = *shape.last().expect("a tensor has dimensions");
        let key = mix(self.seed ^ name.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let quantiles = &self.quantiles[scale][..QUANTILES];
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            let first = row * stride + columns.start;
            let (mut draw, mut bits) = (usize::MAX, 0);
            for (place, out) in (first..).zip(out) {
                if place / PER_DRAW != draw {
                    draw = place / PER_DRAW;
                    bits = mix(key ^ draw as u64);
                }
                *out = quantiles[(bits >> (place % PER_DRAW * 16)) as usize % QUANTILES];
            }
        }
    }

    fn scales(&self, _tensor: Tensor, _rows: Range<usize>, _column: usize, out: &mut [f32]) {
        out.fill(1.0);
    }
}

fn is_bias(tensor: Tensor) -> bool {
    use LayerTensor::{KeyBias, QueryBias, ValueBias};
    matches!(tensor, Tensor::Layer(_, QueryBias | KeyBias | ValueBias))
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where the normal distribution's cumulative probability is `p`, by bisection.
fn normal_quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        let below = 0.5 * libm::erfc(-middle / std::f64::consts::SQRT_2);
        if below < p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_normal_with_the_right_deviation() {
        let config = crate::plan::tests::config(4, 2, 384, 768);
        let source = NormalSource::new(&config, 1);
        for (tensor, deviation) in [
            (Tensor::LmHead, 0.02),
            (Tensor::Layer(1, LayerTensor::Gate), 0.02),
            (Tensor::Layer(1, LayerTensor::Down), 0.01),
        ] {
            let shape = tensor.shape(&config);
            let mut values = vec![bf16::ZERO; shape[0] * shape[1]];
            source.read(tensor, 0..shape[0], 0..shape[1], &mut values);
            let count = values.len() as f64;
            let moment = |power| values.iter().map(|v| (v.to_f64() / deviation).powi(power)).sum::<f64>() / count;
            assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02, "{tensor:?} {}", moment(2));
            assert!(moment(3).abs() < 0.08 && (moment(4) - 3.0).abs() < 0.15, "{tensor:?} {}", moment(4));
        }
    }

    #[test]
    fn a_weight_is_the_same_whichever_slice_it_is_read_in() {
        let config = crate::plan::tests::config(4, 2, 384, 768);
        let source = NormalSource::new(&config, 1);
        let tensor = Tensor::Layer(0, LayerTensor::Down);
        let mut whole = vec![bf16::ZERO; 256 * 384];
        source.read(tensor, 0..256, 0..384, &mut whole);
        let mut part = vec![bf16::ZERO; 3 * 7];
        source.read(tensor, 10..13, 5..12, &mut part);
        for (i, value) in part.iter().enumerate() {
            assert_eq!(*value, whole[(10 + i / 7) * 384 + 5 + i % 7]);
        }
        let mut norm = vec![bf16::ZERO; 3];
        source.read(Tensor::FinalNorm, 0..1, 0..3, &mut norm);
        assert_eq!(norm, [bf16::ONE; 3]);
    }
}
