//! Heads narrower than the kernel's are padded with zeros: their scores, outputs and norms stay what they are.
//!
//! The kernel computes heads of 64 or 128 dimensions. A model with others is read as one with wider heads, whose
//! further rows of q, k and v, and columns of o_proj, are zero. Rotation pairs dimension i with i + half a head, so the
//! two halves of q and k are padded each.

use std::ops::Range;

use half::bf16;

use crate::model::source::Source;
use crate::model::{LayerTensor, ModelConfig, Tensor};

/// Widths of the kernel's heads are multiples of this.
const STEP: usize = 64;

/// The dimensions as the kernel computes them.
pub fn padded(config: &ModelConfig) -> ModelConfig {
    ModelConfig { head_dim: config.head_dim.next_multiple_of(STEP), ..config.clone() }
}

/// A model's weights with padded heads.
pub struct PaddedHeads<'a> {
    /// The weights as they are.
    pub source: &'a dyn Source,
    /// Width of its heads.
    pub width: usize,
    /// Width to pad to, at least `width`.
    pub padded: usize,
}

/// How a padded head lies in the dimensions of a tensor.
#[derive(Clone, Copy)]
enum Order {
    /// First half, zeros, second half, zeros.
    Halves,
    /// All, then zeros.
    Whole,
}

impl PaddedHeads<'_> {
    /// The dimension in the tensor that dimension `dim` of all padded heads is; `None`: zero.
    fn place(&self, order: Order, dim: usize) -> Option<usize> {
        let (head, dim) = (dim / self.padded, dim % self.padded);
        let within = match order {
            Order::Whole => (dim < self.width).then_some(dim),
            Order::Halves => {
                let (half, padded) = (self.width / 2, self.padded / 2);
                (dim % padded < half).then(|| dim / padded * half + dim % padded)
            }
        };
        within.map(|within| head * self.width + within)
    }
}

impl Source for PaddedHeads<'_> {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        use LayerTensor::{AttentionOut, Key, KeyBias, KeyNorm, Query, QueryBias, QueryNorm, Value, ValueBias};
        let Tensor::Layer(_, kind) = tensor else { return self.source.read(tensor, rows, columns, out) };
        if self.width == self.padded {
            return self.source.read(tensor, rows, columns, out);
        }
        let (by_rows, order) = match kind {
            Query | Key => (true, Order::Halves),
            Value => (true, Order::Whole),
            QueryBias | KeyBias | QueryNorm | KeyNorm => (false, Order::Halves),
            ValueBias | AttentionOut => (false, Order::Whole),
            _ => return self.source.read(tensor, rows, columns, out),
        };
        out.fill(bf16::ZERO);
        if by_rows {
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
                if let Some(row) = self.place(order, row) {
                    self.source.read(tensor, row..row + 1, columns.clone(), out);
                }
            }
            return;
        }
        let heads = columns.start / self.padded..columns.end.div_ceil(self.padded);
        let real = heads.start * self.width..heads.end * self.width;
        let mut values = vec![bf16::ZERO; real.len()];
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            self.source.read(tensor, row..row + 1, real.clone(), &mut values);
            for (column, out) in columns.clone().zip(out) {
                if let Some(place) = self.place(order, column) {
                    *out = values[place - real.start];
                }
            }
        }
    }

    fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
        let order = match tensor {
            _ if self.width == self.padded => None,
            Tensor::Layer(_, LayerTensor::Query | LayerTensor::Key) => Some(Order::Halves),
            Tensor::Layer(_, LayerTensor::Value) => Some(Order::Whole),
            _ => None,
        };
        let Some(order) = order else { return self.source.scales(tensor, rows, column, out) };
        for (row, out) in rows.zip(out) {
            *out = 1.0;
            if let Some(row) = self.place(order, row) {
                self.source.scales(tensor, row..row + 1, column, std::slice::from_mut(out));
            }
        }
    }

    /// Heads are not padded where there are groups ([`takes`](super::panel::takes)).
    fn zeros(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [u8]) {
        self.source.zeros(tensor, rows, column, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::source::RandomSource;

    #[test]
    fn padded_heads_hold_every_weight_once_and_pairs_of_a_rotation_stay_half_a_head_apart() {
        let config = ModelConfig { head_dim: 48, qkv_bias: true, ..crate::plan::tests::config(4, 2, 384, 768) };
        let wide = padded(&config);
        assert_eq!((wide.head_dim, padded(&wide).head_dim), (64, 64));
        let source = RandomSource { config: config.clone(), seed: 7 };
        let heads = PaddedHeads { source: &source, width: 48, padded: 64 };
        let read = |source: &dyn Source, config: &ModelConfig, tensor: LayerTensor| {
            let shape = Tensor::Layer(0, tensor).shape(config);
            let (rows, columns) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
            let mut values = vec![bf16::ZERO; rows * columns];
            source.read(Tensor::Layer(0, tensor), 0..rows, 0..columns, &mut values);
            (values, columns)
        };
        let (real, columns) = read(&source, &config, LayerTensor::Query);
        let (got, _) = read(&heads, &wide, LayerTensor::Query);
        for (row, got) in got.chunks_exact(columns).enumerate() {
            let (head, dim) = (row / 64, row % 64);
            let expected = match dim {
                0..24 => Some(head * 48 + dim),
                32..56 => Some(head * 48 + dim - 8),
                _ => None,
            };
            match expected {
                Some(row) => assert_eq!(got, &real[row * columns..][..columns]),
                None => assert!(got.iter().all(|value| *value == bf16::ZERO)),
            }
        }
        for (tensor, halves) in
            [(LayerTensor::AttentionOut, false), (LayerTensor::ValueBias, false), (LayerTensor::KeyBias, true)]
        {
            let ((real, narrow), (got, wide)) = (read(&source, &config, tensor), read(&heads, &wide, tensor));
            for (real, got) in real.chunks_exact(narrow).zip(got.chunks_exact(wide)) {
                for (column, got) in got.iter().enumerate() {
                    let (head, dim) = (column / 64, column % 64);
                    let place = match (halves, dim) {
                        (false, 0..48) | (true, 0..24) => Some(head * 48 + dim),
                        (true, 32..56) => Some(head * 48 + dim - 8),
                        _ => None,
                    };
                    assert_eq!(*got, place.map_or(bf16::ZERO, |place| real[place]), "{tensor:?} {column}");
                }
            }
            // A slice is what it is in the whole.
            let mut part = vec![bf16::ZERO; 20];
            heads.read(Tensor::Layer(0, tensor), 0..1, 50..70, &mut part);
            assert_eq!(part, got[50..70]);
        }
    }
}
