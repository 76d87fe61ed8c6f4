//! Weights of few bits, expanded to bf16 while they are read.

use std::ops::Range;

use half::bf16;

use crate::model::Tensor;
use crate::model::format::to_bf16;
use crate::model::source::Source;

/// A source whose values have their scales, rounded to bf16: what a GPU's product of these weights in groups computes
/// with, bit for bit.
pub struct Expanded<'a>(pub &'a dyn Source);

/// Groups begin at multiples of so many columns.
const COLUMNS: usize = 16;

impl Source for Expanded<'_> {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        self.0.read(tensor, rows.clone(), columns.clone(), out);
        if !tensor.is_streamed_in_layers() || columns.is_empty() {
            return;
        }
        let mut scales = vec![1.0; rows.len()];
        let mut first = columns.start;
        while first < columns.end {
            let end = ((first / COLUMNS + 1) * COLUMNS).min(columns.end);
            self.0.scales(tensor, rows.clone(), first, &mut scales);
            for (values, scale) in out.chunks_exact_mut(columns.len()).zip(&scales) {
                let values = &mut values[first - columns.start..end - columns.start];
                values.iter_mut().for_each(|value| *value = to_bf16(value.to_f32() * scale));
            }
            first = end;
        }
    }

    fn scales(&self, _tensor: Tensor, _rows: Range<usize>, _column: usize, out: &mut [f32]) {
        out.fill(1.0);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::format::{MIDDLE, WeightFormat, from_e4m3, to_e4m3};
    use crate::model::source::RandomSource;

    /// Random weights in groups of the format of their config, whose scales, and zero points, all differ.
    pub(crate) struct Grouped(pub RandomSource);

    impl Grouped {
        fn group(&self) -> usize {
            self.0.config.layer_weights.group().expect("a format of groups")
        }

        /// Sized like the weights, or a part of them, so that codes are as many as there are; bf16.
        fn scale(&self, tensor: Tensor, row: usize, group: usize) -> f32 {
            let size = 1.7 / (tensor.shape(&self.0.config)[1] as f32).sqrt();
            let most = if matches!(self.0.config.layer_weights, WeightFormat::Int4 { .. }) { 8.0 } else { 400.0 };
            bf16::from_f32(size / most * (0.75 + ((row * 7 + group * 13) % 64) as f32 / 100.0)).to_f32()
        }

        fn zero(&self, row: usize, group: usize) -> u8 {
            if self.0.config.layer_weights.has_zeros() { ((row * 5 + group * 3) % 16) as u8 } else { MIDDLE }
        }
    }

    impl Source for Grouped {
        fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
            self.0.read(tensor, rows.clone(), columns.clone(), out);
            if !tensor.is_streamed_in_layers() {
                return;
            }
            let four_bits = matches!(self.0.config.layer_weights, WeightFormat::Int4 { .. });
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
                for (column, value) in columns.clone().zip(out) {
                    let (group, was) = (column / self.group(), value.to_f32());
                    let (scaled, zero) = (was / self.scale(tensor, row, group), f32::from(self.zero(row, group)));
                    *value = if four_bits {
                        bf16::from_f32((scaled.round() + zero).clamp(0.0, 15.0) - zero)
                    } else {
                        from_e4m3(to_e4m3(scaled))
                    };
                }
            }
        }

        fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
            let scale = |row| self.scale(tensor, row, column / self.group());
            rows.zip(out).for_each(|(row, out)| *out = if tensor.is_streamed_in_layers() { scale(row) } else { 1.0 });
        }

        fn zeros(&self, _tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [u8]) {
            rows.zip(out).for_each(|(row, out)| *out = self.zero(row, column / self.group()));
        }
    }
}
