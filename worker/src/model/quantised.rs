//! Weights that are quantised while they are read: `--quantization fp8` on a checkpoint that has more bits.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;

use super::format::{E4M3_MAX, WeightFormat, from_e4m3, to_e4m3};
use super::source::Source;
use super::{ModelConfig, Tensor};

/// A row's scale that nobody has asked for yet.
const UNKNOWN: u32 = u32::MAX;

/// A model of these dimensions once it is quantised as it was asked for. A checkpoint that has as few bits stays as it
/// is.
pub fn quantised(config: &ModelConfig, to: Option<WeightFormat>) -> ModelConfig {
    ModelConfig { layer_weights: to.unwrap_or(config.layer_weights), ..config.clone() }
}

/// What the user should know of the weights that a rank reads in a pass: of a model that is `quantised` while it is read,
/// or as it is stored.
pub fn weights_note(config: &ModelConfig, quantised: bool, pass_bytes: u64) -> String {
    let how = if quantised { ", quantised at load with a scale a row" } else { "" };
    format!("weights of the layers in {}{how}; a pass reads {:.1} MB", config.layer_weights, pass_bytes as f64 / 1e6)
}

/// A source whose layers' matrices become E4M3, with a scale a row: its largest magnitude over 448, as the public
/// libraries quantise per channel (compressed-tensors, `float-quantized`, strategy `channel`). All else stays as it is.
///
/// A scale is found when a row is first read, from the whole row, so every rank finds the same.
pub struct Quantised<'a> {
    source: &'a dyn Source,
    config: ModelConfig,
    /// By matrix: bits of each row's scale.
    scales: Vec<(Tensor, Box<[AtomicU32]>)>,
}

impl<'a> Quantised<'a> {
    /// Quantises what `source` reads of a model of these dimensions.
    pub fn new(source: &'a dyn Source, config: &ModelConfig) -> Self {
        let matrices = Tensor::all(config).into_iter().filter(|tensor| tensor.is_streamed_in_layers());
        let unknown = |tensor: Tensor| {
            let rows = tensor.shape(config)[0];
            (tensor, (0..rows).map(|_| AtomicU32::new(UNKNOWN)).collect())
        };
        let mut scales: Vec<_> = matrices.map(unknown).collect();
        scales.sort_by_key(|(tensor, _)| *tensor);
        Self { source, config: config.clone(), scales }
    }

    /// The scale of a row of a matrix that is quantised; 1 of one that is all zeros.
    fn scale(&self, scales: &[AtomicU32], tensor: Tensor, row: usize) -> f32 {
        let known = scales[row].load(Ordering::Relaxed);
        if known != UNKNOWN {
            return f32::from_bits(known);
        }
        let columns = tensor.shape(&self.config)[1];
        let mut values = vec![bf16::ZERO; columns];
        self.source.read(tensor, row..row + 1, 0..columns, &mut values);
        let most = values.iter().fold(0f32, |most, value| most.max(value.to_f32().abs()));
        let scale = if most > 0.0 { most / E4M3_MAX } else { 1.0 };
        scales[row].store(scale.to_bits(), Ordering::Relaxed);
        scale
    }

    fn quantises(&self, tensor: Tensor) -> Option<&[AtomicU32]> {
        let place = self.scales.binary_search_by_key(&tensor, |(tensor, _)| *tensor).ok()?;
        Some(&self.scales[place].1)
    }
}

impl Source for Quantised<'_> {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        self.source.read(tensor, rows.clone(), columns.clone(), out);
        let Some(scales) = self.quantises(tensor) else { return };
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len().max(1))) {
            let scale = self.scale(scales, tensor, row);
            // What is not finite stays so, for the check that follows a load.
            out.iter_mut().for_each(|value| *value = from_e4m3(to_e4m3(value.to_f32() / scale)));
        }
    }

    fn scales(&self, tensor: Tensor, rows: Range<usize>, out: &mut [f32]) {
        match self.quantises(tensor) {
            Some(scales) => {
                rows.zip(out).for_each(|(row, out)| *out = self.scale(scales, tensor, row));
            }
            None => self.source.scales(tensor, rows, out),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::LayerTensor;
    use crate::model::source::RandomSource;

    /// Weights that E4M3 can hold, with scales that are powers of two: where its config says bf16 the same weights
    /// without scales, so that either has the other's bits.
    pub(crate) struct PowersOfTwo(pub RandomSource);

    impl PowersOfTwo {
        fn scale(row: usize) -> f32 {
            2f32.powi(-4 - (row % 8) as i32)
        }
    }

    impl Source for PowersOfTwo {
        fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
            self.0.read(tensor, rows.clone(), columns.clone(), out);
            let scaled = self.0.config.layer_weights.is_scaled();
            let quantises = tensor.is_streamed_in_layers();
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())).filter(|_| quantises) {
                let of = |value: bf16| from_e4m3(to_e4m3(value.to_f32() / Self::scale(row))).to_f32();
                let times = if scaled { 1.0 } else { Self::scale(row) };
                out.iter_mut().for_each(|value| *value = bf16::from_f32(of(*value) * times));
            }
        }

        fn scales(&self, tensor: Tensor, rows: Range<usize>, out: &mut [f32]) {
            let scaled = self.0.config.layer_weights.is_scaled() && tensor.is_streamed_in_layers();
            rows.zip(out).for_each(|(row, out)| *out = if scaled { Self::scale(row) } else { 1.0 });
        }
    }

    #[test]
    fn rows_are_within_half_a_step_of_what_they_were_whichever_slice_is_read() {
        let config = crate::plan::tests::config(4, 2, 384, 768);
        let random = RandomSource { config: config.clone(), seed: 3 };
        let quantised = Quantised::new(&random, &config);
        for tensor in Tensor::all(&config) {
            let shape = tensor.shape(&config);
            let (rows, columns) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
            let read = |source: &dyn Source, columns: Range<usize>| {
                let mut values = vec![bf16::ZERO; rows * columns.len()];
                source.read(tensor, 0..rows, columns, &mut values);
                values
            };
            let slice = read(&quantised, 5..9);
            let (was, is) = (read(&random, 0..columns), read(&quantised, 0..columns));
            let mut scales = vec![0.0; rows];
            quantised.scales(tensor, 0..rows, &mut scales);
            if !tensor.is_streamed_in_layers() {
                assert!(was == is && scales.iter().all(|scale| *scale == 1.0), "{tensor:?}");
                continue;
            }
            for row in 0..rows {
                let (was, is) = (&was[row * columns..][..columns], &is[row * columns..][..columns]);
                assert_eq!(slice[row * 4..][..4], is[5..9]);
                let most = is.iter().map(|value| value.to_f32().abs()).fold(0.0, f32::max);
                assert_eq!(most, E4M3_MAX, "{tensor:?} {row}");
                for (was, is) in was.iter().zip(is) {
                    let (was, value) = (was.to_f32(), is.to_f32() * scales[row]);
                    // Half a step: 2^-4 of the value, or of the smallest normal one.
                    let step = is.to_f32().abs().max(2f32.powi(-6)) * scales[row] / 16.0;
                    assert!((was - value).abs() <= step * 1.01, "{tensor:?} {was} {value}");
                }
            }
        }
        assert!(Tensor::Layer(0, LayerTensor::Down).is_streamed_in_layers() && !Tensor::LmHead.is_streamed_in_layers());
    }
}
