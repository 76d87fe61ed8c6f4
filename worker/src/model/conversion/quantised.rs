//! Weights that are quantised while they are read: `--quantization` on a checkpoint that has more bits.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;

use crate::model::format::{E4M3_MAX, from_e4m3, group_scale, to_e4m3};
use crate::model::source::Source;
use crate::model::{ModelConfig, Tensor};

/// A row's scale that nobody has asked for yet.
const UNKNOWN: u32 = u32::MAX;

/// Half of the steps between the smallest and the largest of 4 bits.
const INT4_HALF: f32 = 7.5;

/// A source whose layers' matrices become what `config.layer_weights` says. All else stays as it is.
///
/// - E4M3: a scale a row, its largest magnitude over 448.
/// - 4 bits: a scale a group, its largest magnitude over 7.5, in bf16, and the nearest of 16 values.
///
/// As the public libraries quantise without data (compressed-tensors, `float-quantized` per channel, `pack-quantized`
/// per group, symmetric). A row's scale is found when it is first read, from the whole row, so every rank finds the
/// same.
pub struct Quantised<'a> {
    source: &'a dyn Source,
    config: ModelConfig,
    /// By matrix: bits of each row's scale (E4M3).
    scales: Vec<(Tensor, Box<[AtomicU32]>)>,
}

impl<'a> Quantised<'a> {
    /// Quantises what `source` reads of a model, to the format of these dimensions.
    pub fn new(source: &'a dyn Source, config: &ModelConfig) -> Self {
        let matrices = Tensor::all(config).into_iter().filter(|tensor| tensor.is_streamed_in_layers());
        let unknown = |tensor: Tensor| {
            let rows = if config.layer_weights.has_row_scales() { tensor.shape(config)[0] } else { 0 };
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
        let most = most(&values);
        let scale = if most > 0.0 { most / E4M3_MAX } else { 1.0 };
        scales[row].store(scale.to_bits(), Ordering::Relaxed);
        scale
    }

    fn quantises(&self, tensor: Tensor) -> Option<&[AtomicU32]> {
        let place = self.scales.binary_search_by_key(&tensor, |(tensor, _)| *tensor).ok()?;
        Some(&self.scales[place].1)
    }

    /// The whole groups of `group` columns that hold `columns`.
    fn groups(&self, tensor: Tensor, group: usize, columns: &Range<usize>) -> Range<usize> {
        let end = columns.end.next_multiple_of(group).min(tensor.shape(&self.config)[1]);
        columns.start / group * group..end
    }
}

fn most(values: &[bf16]) -> f32 {
    values.iter().fold(0f32, |most, value| most.max(value.to_f32().abs()))
}

/// The scale of a group of 4 bits; 1 of one that is all zeros.
fn int4_scale(values: &[bf16]) -> f32 {
    let scale = group_scale(most(values) / INT4_HALF).to_f32();
    if scale > 0.0 { scale } else { 1.0 }
}

/// The nearest of the 16 values of 4 bits, ties to even, of what is far smaller than 2^22; NaN stays so.
fn nearest_int4(value: f32) -> f32 {
    // From 1.5 * 2^23 on fp32 has integers alone, so the sum is rounded to one. `round_ties_even` would be a call for
    // each value, as builds know no processor that has an instruction for it.
    const INTEGERS: f32 = 12_582_912.0;
    (value + INTEGERS - INTEGERS).clamp(-8.0, 7.0)
}

impl Source for Quantised<'_> {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        let Some(scales) = self.quantises(tensor) else { return self.source.read(tensor, rows, columns, out) };
        let Some(group) = self.config.layer_weights.group() else {
            self.source.read(tensor, rows.clone(), columns.clone(), out);
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len().max(1))) {
                let scale = self.scale(scales, tensor, row);
                // What is not finite stays so, for the check that follows a load.
                out.iter_mut().for_each(|value| *value = from_e4m3(to_e4m3(value.to_f32() / scale)));
            }
            return;
        };
        let whole = self.groups(tensor, group, &columns);
        let mut values = vec![bf16::ZERO; whole.len()];
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len().max(1))) {
            self.source.read(tensor, row..row + 1, whole.clone(), &mut values);
            for group in values.chunks_mut(group) {
                let scale = int4_scale(group);
                group.iter_mut().for_each(|value| *value = bf16::from_f32(nearest_int4(value.to_f32() / scale)));
            }
            out.copy_from_slice(&values[columns.start - whole.start..][..columns.len()]);
        }
    }

    fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
        let Some(scales) = self.quantises(tensor) else { return self.source.scales(tensor, rows, column, out) };
        let Some(group) = self.config.layer_weights.group() else {
            return rows.zip(out).for_each(|(row, out)| *out = self.scale(scales, tensor, row));
        };
        let columns = self.groups(tensor, group, &(column..column + 1));
        let mut values = vec![bf16::ZERO; rows.len() * columns.len()];
        self.source.read(tensor, rows, columns.clone(), &mut values);
        values.chunks_exact(columns.len()).zip(out).for_each(|(values, out)| *out = int4_scale(values));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::LayerTensor;
    use crate::model::format::{INT4, WeightFormat};
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
            let scaled = self.0.config.layer_weights.has_row_scales();
            let quantises = tensor.is_streamed_in_layers();
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())).filter(|_| quantises) {
                let of = |value: bf16| from_e4m3(to_e4m3(value.to_f32() / Self::scale(row))).to_f32();
                let times = if scaled { 1.0 } else { Self::scale(row) };
                out.iter_mut().for_each(|value| *value = bf16::from_f32(of(*value) * times));
            }
        }

        fn scales(&self, tensor: Tensor, rows: Range<usize>, _column: usize, out: &mut [f32]) {
            let scaled = self.0.config.layer_weights.has_row_scales() && tensor.is_streamed_in_layers();
            rows.zip(out).for_each(|(row, out)| *out = if scaled { Self::scale(row) } else { 1.0 });
        }
    }

    #[test]
    fn rows_are_within_half_a_step_of_what_they_were_whichever_slice_is_read() {
        let config = crate::plan::tests::config(4, 2, 384, 768);
        let config = ModelConfig { layer_weights: WeightFormat::E4m3, ..config };
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
            quantised.scales(tensor, 0..rows, 0, &mut scales);
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

    #[test]
    fn the_nearest_of_4_bits_is_the_even_one_of_two() {
        for step in -640..=640 {
            let value = step as f32 / 64.0;
            assert_eq!(nearest_int4(value), value.round_ties_even().clamp(-8.0, 7.0), "{value}");
            for value in [value.next_up(), value.next_down()] {
                assert_eq!(nearest_int4(value), value.round_ties_even().clamp(-8.0, 7.0), "{value}");
            }
        }
        assert!(nearest_int4(f32::NAN).is_nan());
    }

    #[test]
    fn groups_of_4_bits_are_within_half_a_step_and_expand_to_what_was_rounded() {
        let config = ModelConfig { layer_weights: INT4, ..crate::plan::tests::config(4, 2, 384, 768) };
        let random = RandomSource { config: config.clone(), seed: 3 };
        let (quantised, tensor) = (Quantised::new(&random, &config), Tensor::Layer(1, LayerTensor::Down));
        let read = |source: &dyn Source, columns: Range<usize>| {
            let mut values = vec![bf16::ZERO; 8 * columns.len()];
            source.read(tensor, 0..8, columns, &mut values);
            values
        };
        let [was, is] = [&random as &dyn Source, &quantised].map(|source| read(source, 0..384));
        let expanded = read(&super::super::Expanded(&quantised), 0..384);
        assert!(is.iter().all(|value| (-8.0..=7.0).contains(&value.to_f32()) && value.to_f32().fract() == 0.0));
        for columns in [3..50, 120..300] {
            for (source, whole) in [(&quantised as &dyn Source, &is), (&super::super::Expanded(&quantised), &expanded)]
            {
                for (row, part) in read(source, columns.clone()).chunks(columns.len()).enumerate() {
                    assert_eq!(part, &whole[row * 384..][columns.clone()]);
                }
            }
        }
        for column in 0..384 {
            let mut scales = [0.0; 8];
            quantised.scales(tensor, 0..8, column, &mut scales);
            for (row, scale) in scales.into_iter().enumerate() {
                let place = row * 384 + column;
                let (was, is) = (was[place].to_f32(), is[place].to_f32());
                // The largest positive one of a group lies half a step beyond 7.
                assert!((was - is * scale).abs() <= scale * 0.55, "{was} {is} {scale}");
                assert_eq!(expanded[place], bf16::from_f32(is * scale));
            }
        }
    }
}
