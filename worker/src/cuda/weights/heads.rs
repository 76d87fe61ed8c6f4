//! A model's heads as the kernels compute them.
//!
//! They compute heads of 64 or 128 dimensions. A model with others is read as one with wider heads, whose further rows
//! of q, k and v, and columns of o_proj, are zero: scores, outputs and norms stay what they are. Rotation pairs
//! dimension i with i + half a head, so the two halves of q and k are padded each.
//!
//! Query heads of a KV head are columns of one tensor-core product, which has eight. A model with more is read as one
//! with copies of its KV heads, which some of the query heads have each. That touches no bit either; K and V take as
//! many times the memory.

use std::ops::Range;

use half::bf16;

use crate::model::source::Source;
use crate::model::{LayerTensor, ModelConfig, Tensor};

/// Widths of the kernel's heads are multiples of this.
const STEP: usize = 64;
/// Query heads of a KV head at most.
const MOST_QUERIES_PER_KV: usize = 8;

/// The dimensions as the kernels compute them.
pub fn for_kernels(config: &ModelConfig) -> ModelConfig {
    let head_dim = config.head_dim.next_multiple_of(STEP);
    ModelConfig {
        head_dim,
        num_kv_heads: config.num_kv_heads * copies(config.num_heads / config.num_kv_heads),
        ..config.clone()
    }
}

/// Copies of a KV head with so many query heads: a power of two, which divides among ranks, if one will do.
fn copies(queries: usize) -> usize {
    let will_do = |copies: &usize| queries.is_multiple_of(*copies) && queries / copies <= MOST_QUERIES_PER_KV;
    let powers = std::iter::successors(Some(1), |copies| Some(copies * 2)).take_while(|copies| *copies <= queries);
    powers.chain(1..=queries).find(will_do).unwrap_or(1)
}

/// A model's weights with heads as they are computed.
pub struct KernelHeads<'a> {
    source: &'a dyn Source,
    /// Width of its heads, and width to pad to.
    width: usize,
    padded: usize,
    /// Of each KV head.
    copies: usize,
}

/// How a padded head lies in the dimensions of a tensor.
#[derive(Clone, Copy)]
enum Order {
    /// First half, zeros, second half, zeros.
    Halves,
    /// All, then zeros.
    Whole,
}

/// Heads of a tensor: copies of each, and how they are padded.
#[derive(Clone, Copy)]
struct Heads {
    copies: usize,
    order: Order,
}

impl<'a> KernelHeads<'a> {
    /// Of the weights as they are, of a model with these dimensions.
    pub fn new(source: &'a dyn Source, config: &ModelConfig) -> Self {
        let wide = for_kernels(config);
        let copies = wide.num_kv_heads / config.num_kv_heads;
        Self { source, width: config.head_dim, padded: wide.head_dim, copies }
    }

    /// The heads that the rows or columns of a tensor, or the values of a vector, are; `None`: they are what they are.
    fn heads(&self, tensor: Tensor) -> Option<Heads> {
        use LayerTensor::{AttentionOut, Key, KeyBias, KeyNorm, Query, QueryBias, QueryNorm, Value, ValueBias};
        let Tensor::Layer(_, kind) = tensor else { return None };
        let (copies, order) = match kind {
            Key | KeyBias => (self.copies, Order::Halves),
            Value | ValueBias => (self.copies, Order::Whole),
            Query | QueryBias | QueryNorm | KeyNorm => (1, Order::Halves),
            AttentionOut => (1, Order::Whole),
            _ => return None,
        };
        (copies > 1 || self.width < self.padded).then_some(Heads { copies, order })
    }

    /// The same, of tensors whose rows are those of heads.
    fn heads_of_rows(&self, tensor: Tensor) -> Option<Heads> {
        let of_rows = matches!(tensor, Tensor::Layer(_, LayerTensor::Query | LayerTensor::Key | LayerTensor::Value));
        self.heads(tensor).filter(|_| of_rows)
    }

    /// The dimension in the tensor that dimension `dim` of all computed heads is; `None`: zero.
    fn place(&self, heads: Heads, dim: usize) -> Option<usize> {
        let (head, dim) = (dim / self.padded / heads.copies, dim % self.padded);
        let within = match heads.order {
            Order::Whole => (dim < self.width).then_some(dim),
            Order::Halves => {
                let (half, padded) = (self.width / 2, self.padded / 2);
                (dim % padded < half).then(|| dim / padded * half + dim % padded)
            }
        };
        within.map(|within| head * self.width + within)
    }
}

impl Source for KernelHeads<'_> {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        let Some(heads) = self.heads(tensor) else { return self.source.read(tensor, rows, columns, out) };
        out.fill(bf16::ZERO);
        if self.heads_of_rows(tensor).is_some() {
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
                if let Some(row) = self.place(heads, row) {
                    self.source.read(tensor, row..row + 1, columns.clone(), out);
                }
            }
            return;
        }
        let width = self.padded * heads.copies;
        let real = columns.start / width * self.width..columns.end.div_ceil(width) * self.width;
        let mut values = vec![bf16::ZERO; real.len()];
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            self.source.read(tensor, row..row + 1, real.clone(), &mut values);
            for (column, out) in columns.clone().zip(out) {
                if let Some(place) = self.place(heads, column) {
                    *out = values[place - real.start];
                }
            }
        }
    }

    fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
        let Some(heads) = self.heads_of_rows(tensor) else { return self.source.scales(tensor, rows, column, out) };
        for (row, out) in rows.zip(out) {
            *out = 1.0;
            if let Some(row) = self.place(heads, row) {
                self.source.scales(tensor, row..row + 1, column, std::slice::from_mut(out));
            }
        }
    }

    /// Where there are groups, and so zeros, heads have no padding ([`takes`](super::panel::takes)).
    fn zeros(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [u8]) {
        let Some(heads) = self.heads_of_rows(tensor) else { return self.source.zeros(tensor, rows, column, out) };
        for (row, out) in rows.zip(out) {
            if let Some(row) = self.place(heads, row) {
                self.source.zeros(tensor, row..row + 1, column, std::slice::from_mut(out));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::source::RandomSource;

    #[test]
    fn padded_heads_hold_every_weight_once_and_pairs_of_a_rotation_stay_half_a_head_apart() {
        let config = ModelConfig { head_dim: 48, qkv_bias: true, ..crate::plan::tests::config(4, 2, 384, 768) };
        let wide = for_kernels(&config);
        assert_eq!((wide.head_dim, for_kernels(&wide).head_dim), (64, 64));
        let source = RandomSource { config: config.clone(), seed: 7 };
        let heads = KernelHeads::new(&source, &config);
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

    /// Rows by their numbers.
    struct Numbers;

    impl Source for Numbers {
        fn read(&self, _: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
            let numbers = rows.flat_map(|row| columns.clone().map(move |column| row + column));
            out.iter_mut().zip(numbers).for_each(|(out, number)| *out = bf16::from_f32(number as f32));
        }

        fn scales(&self, _: Tensor, rows: Range<usize>, _: usize, out: &mut [f32]) {
            out.iter_mut().zip(rows).for_each(|(out, row)| *out = row as f32);
        }

        fn zeros(&self, _: Tensor, rows: Range<usize>, _: usize, out: &mut [u8]) {
            out.iter_mut().zip(rows).for_each(|(out, row)| *out = row as u8);
        }
    }

    /// Two KV heads of twelve query heads each are four of six.
    #[test]
    fn copies_of_a_kv_head_have_its_weights_biases_scales_and_zeros() {
        let config = crate::plan::tests::config(24, 2, 384, 768);
        let heads = KernelHeads::new(&Numbers, &config);
        assert_eq!(for_kernels(&config).num_kv_heads, 4);
        let of = |tensor, row: usize| {
            let tensor = Tensor::Layer(0, tensor);
            let (mut value, mut scale, mut zero) = ([bf16::ZERO], [0.0], [0]);
            heads.read(tensor, row..row + 1, 0..1, &mut value);
            heads.scales(tensor, row..row + 1, 0, &mut scale);
            heads.zeros(tensor, row..row + 1, 0, &mut zero);
            (value[0].to_f32(), scale[0], zero[0])
        };
        let bias = |tensor, column: usize| {
            let mut value = [bf16::ZERO];
            heads.read(Tensor::Layer(0, tensor), 0..1, column..column + 1, &mut value);
            value[0].to_f32()
        };
        for (row, real) in [(0, 0), (63, 63), (64, 0), (127, 63), (128, 64), (191, 127), (192, 64), (255, 127)] {
            for tensor in [LayerTensor::Key, LayerTensor::Value] {
                assert_eq!(of(tensor, row), (real as f32, real as f32, real as u8), "{tensor:?} {row}");
            }
            for tensor in [LayerTensor::KeyBias, LayerTensor::ValueBias] {
                assert_eq!(bias(tensor, row), real as f32, "{tensor:?} {row}");
            }
            assert_eq!(of(LayerTensor::Query, row), (row as f32, row as f32, row as u8));
            assert_eq!(bias(LayerTensor::AttentionOut, row), row as f32);
        }
    }
}
