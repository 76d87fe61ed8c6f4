//! How a checkpoint stores the matrices of the layers: of which tensors, and how these lie.

use super::format::WeightFormat;

/// How a checkpoint stores the matrices of the layers, as config.json says; single ones may be plain all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storage {
    /// `weight` in bf16, f16 or f32.
    #[default]
    Plain,
    /// `weight` in E4M3, `weight_scale` one a row or one of all.
    E4m3,
    /// `weight` in E4M3, a scale for each block of `rows` x `columns`.
    E4m3Blocks {
        /// A multiple of 16.
        rows: usize,
        /// A multiple of 16.
        columns: usize,
        /// The scales' name, in place of `weight`.
        scales: &'static str,
    },
    /// 4 bits, eight in a word.
    Int4 {
        /// Tensors and order.
        packing: Packing,
        /// Columns with a scale in common, a multiple of 16; `None`: a whole row.
        group: Option<usize>,
        /// Groups have zero points; else those that are stored are all 8.
        zeros: bool,
        /// Each column says what its group is; else those that lie together are one.
        ordered: bool,
    },
}

/// Tensors of 4 bits, and their order: words are i32, the lowest bits are first. `[o, i]`: the matrix's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// compressed-tensors, `pack-quantized`: `weight_packed` `[o, i / 8]`, `weight_scale` `[o, groups]`,
    /// `weight_zero_point` `[o / 8, groups]`, `weight_g_idx` `[i]`.
    CompressedTensors,
    /// AutoAWQ, `gemm`: `qweight` `[i, o / 8]`, `qzeros` `[groups, o / 8]`, both in the order 0, 2, 4, 6, 1, 3, 5, 7;
    /// `scales` `[groups, o]`.
    Awq,
    /// GPTQ: `qweight` `[i / 8, o]`, `qzeros` `[groups, o / 8]`, `scales` `[groups, o]`, `g_idx` `[i]`.
    Gptq {
        /// Of each word of `qzeros`, 1 was taken from each of its eight: `gptq`. Else they are as they are: `gptq_v2`.
        less_one: bool,
    },
}

impl Storage {
    /// The format of what is stored so.
    pub fn format(self) -> WeightFormat {
        match self {
            Self::Plain => WeightFormat::Bf16,
            Self::E4m3 => WeightFormat::E4m3,
            Self::E4m3Blocks { columns, .. } => WeightFormat::E4m3Groups { columns: run(Some(columns)) },
            Self::Int4 { group, zeros, .. } => WeightFormat::Int4 { columns: run(group), zeros },
        }
    }
}

/// The most columns, of those that are streamed with a scale, that groups consist of.
fn run(group: Option<usize>) -> u16 {
    let divides = |columns: &u16| group.is_none_or(|group| group.is_multiple_of(usize::from(*columns)));
    [128, 64, 32, 16].into_iter().find(divides).expect("config.json was refused otherwise")
}
