//! Weights of few bits, expanded to bf16 while they are read.

use std::ops::Range;

use half::bf16;

use crate::model::Tensor;
use crate::model::format::to_bf16;
use crate::model::source::Source;

/// A source whose values have their scales: what a product of these weights in groups computes with, bit for bit.
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
