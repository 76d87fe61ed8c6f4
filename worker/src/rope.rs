//! Rotary position embedding: angles of a position, and the rotation of a head.
//!
//! Cosines and sines are computed once a step for each row, in double precision with a library whose bits are the same
//! on every machine; a table over all positions would cost a long-context model tens of megabytes a rank.

use crate::model::ModelConfig;

/// Inverse wavelengths of a model, in radians a position: `[head_dim / 2]`.
#[derive(Debug, Clone)]
pub struct Rope {
    frequencies: Vec<f64>,
}

impl Rope {
    /// The frequencies of a model: `theta^(-2i / head_dim)`, scaled as `rope_type: llama3` where the model asks for it.
    pub fn new(config: &ModelConfig) -> Self {
        let mut rope = Self::with_theta(config.rope.theta, config.head_dim);
        if let Some(scaling) = &config.rope.llama3 {
            for frequency in &mut rope.frequencies {
                let turns = scaling.original_positions as f64 * *frequency / std::f64::consts::TAU;
                // 0: stretched, 1: kept, between: interpolated by turns within the original context.
                let kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                *frequency *= kept + (1.0 - kept) / scaling.factor;
            }
        }
        rope
    }

    /// The frequencies `theta^(-2i / head_dim)`.
    pub fn with_theta(theta: f64, head_dim: usize) -> Self {
        let half = head_dim / 2;
        Self { frequencies: (0..half).map(|i| libm::pow(theta, -(i as f64) / half as f64)).collect() }
    }

    /// Writes (cosine, sine) of each angle at a position: `[head_dim / 2]`.
    pub fn turns(&self, position: u32, out: &mut [[f32; 2]]) {
        for (out, frequency) in out.iter_mut().zip(&self.frequencies) {
            let (sine, cosine) = libm::sincos(f64::from(position) * frequency);
            *out = [cosine as f32, sine as f32];
        }
    }
}

/// Rotates a head in place: dimension i with dimension i + head_dim / 2.
pub fn rotate(head: &mut [f32], turns: &[[f32; 2]]) {
    let (low, high) = head.split_at_mut(turns.len());
    for ((low, high), [cosine, sine]) in low.iter_mut().zip(high).zip(turns) {
        (*low, *high) = (*low * cosine - *high * sine, *high * cosine + *low * sine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Llama3Scaling;

    fn config() -> ModelConfig {
        crate::plan::tests::config(4, 2, 384, 768)
    }

    #[test]
    fn turns_are_those_of_the_formula() {
        let rope = Rope::new(&config());
        let mut turns = [[0.0; 2]; 32];
        rope.turns(1000, &mut turns);
        for (i, [cosine, sine]) in turns.into_iter().enumerate() {
            let angle = 1000.0 * 10_000f64.powf(-(i as f64) / 32.0);
            assert!((f64::from(cosine) - angle.cos()).abs() < 1e-7 && (f64::from(sine) - angle.sin()).abs() < 1e-7);
        }
    }

    #[test]
    fn llama3_scaling_stretches_long_waves_only() {
        let mut scaled = config();
        scaled.rope.llama3 =
            Some(Llama3Scaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 64 });
        let (plain, scaled) = (Rope::new(&config()).frequencies, Rope::new(&scaled).frequencies);
        for (plain, scaled) in plain.into_iter().zip(scaled) {
            let turns = 64.0 * plain / std::f64::consts::TAU;
            let expected = match turns {
                turns if turns < 1.0 => plain / 8.0,
                turns if turns > 4.0 => plain,
                turns => (1.0 - (turns - 1.0) / 3.0) * plain / 8.0 + (turns - 1.0) / 3.0 * plain,
            };
            assert!((scaled / expected - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn rotation_keeps_length_and_turns_by_the_angle() {
        let mut head = [3.0, 0.0, 4.0, 0.0];
        rotate(&mut head, &[[0.0, 1.0], [1.0, 0.0]]);
        assert_eq!(head, [-4.0, 0.0, 3.0, 0.0]);
    }
}
