//! Where weights come from: a checkpoint, or a seed.

use std::ops::Range;

use half::bf16;

use super::format::MIDDLE;
use super::{Checkpoint, LayerTensor, ModelConfig, Tensor};

/// Where weights come from.
pub trait Source: Sync {
    /// Writes `rows` x `columns` of a tensor to `out`, row-major; a vector is one row. Afterwards the source keeps
    /// nothing of them in memory, so that packing needs no more than what it packs.
    ///
    /// Of a matrix that is stored with scales, values are without them, and less the zero point of their group.
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]);

    /// Writes what the values of each of `rows` of a matrix are to be multiplied by, at `column`: 1 where there are no
    /// scales. Those of groups are values of bf16, zero or from 2^-100 to 2^100 in magnitude.
    fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]);

    /// Writes the zero points of each of `rows` of a matrix of 4 bits, at `column`: [`MIDDLE`] where groups have none.
    fn zeros(&self, _tensor: Tensor, _rows: Range<usize>, _column: usize, out: &mut [u8]) {
        out.fill(MIDDLE);
    }
}

impl Source for Checkpoint {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        Checkpoint::read(self, tensor, rows.clone(), columns, out);
        self.release(tensor, rows);
    }

    fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
        Checkpoint::scales(self, tensor, rows, column, out);
    }

    fn zeros(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [u8]) {
        Checkpoint::zeros(self, tensor, rows, column, out);
    }
}

/// Weights that are a function of seed, tensor and place, for benchmarks and tests: uniform, sized so that activations
/// keep their scale through the layers; norms near 1.
#[derive(Debug, Clone)]
pub struct RandomSource {
    /// Dimensions.
    pub config: ModelConfig,
    /// Another seed is another model.
    pub seed: u64,
}

impl Source for RandomSource {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        let shape = tensor.shape(&self.config);
        let (name, size) = match tensor {
            Tensor::Embedding => (0, 1.0),
            Tensor::FinalNorm => (1, 0.1),
            Tensor::LmHead if self.config.tied_embeddings => (0, 1.0),
            Tensor::LmHead => (2, 1.7 / (self.config.hidden_size as f32).sqrt()),
            Tensor::Layer(layer, tensor) => {
                let columns = if shape.len() == 2 { shape[1] as f32 } else { 300.0 };
                (3 + layer as u64 * 32 + tensor as u64, 1.7 / columns.sqrt())
            }
        };
        let base = if shape.len() == 1 && !is_bias(tensor) { 1.0 } else { 0.0 };
        let stride = *shape.last().expect("a tensor has dimensions") as u64;
        let key = (self.seed ^ name.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            for (out, column) in out.iter_mut().zip(columns.clone()) {
                let place = row as u64 * stride + column as u64;
                let mut z = (key ^ place).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
                *out = bf16::from_f32(base + size * ((z >> 40) as f32 / (1u32 << 23) as f32 - 1.0));
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
