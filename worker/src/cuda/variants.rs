//! The kernels of a model: one for each width of a pass, out of two sources.

use super::compile::Program;
use super::error::CudaError;
use super::layout::Layout;
use super::passes::Width;
use crate::model::ModelConfig;

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// The width of its passes, and what one takes: of Llama 3.1 8B at 512 positions on an H200.
    pub width: Width,
    design: Design,
    /// Launches note times, for whoever measures.
    traced: bool,
}

/// How a kernel works. All compute the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Design {
    /// A block owns rows of weights, of all K.
    Narrow,
    /// The same, a launch for each phase.
    Unlooped {
        /// A launch begins while the one before it ends.
        overlapped: bool,
    },
}

/// How the phases of a step become launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LoopMode {
    /// One launch walks all phases of many steps.
    #[default]
    On,
    /// A launch for each phase of each layer, in a CUDA graph for each step.
    Off,
    /// As off, but a launch begins while the one before it ends (programmatic dependent launch).
    Overlapped,
}

/// All, by columns ascending.
pub const VARIANTS: [Variant; 2] = [narrow(1, 3370), narrow(8, 3990)];
/// The kernels' sources.
pub const SOURCES: [&str; 1] = [include_str!("../../kernels/looped_decoder.cu")];
/// The kernels that run a phase each, by the same headers.
const UNLOOPED_SOURCE: &str = include_str!("../../kernels/unlooped_decoder.cu");
/// What the sources include, by the names they have for it.
pub const HEADERS: [(&str, &str); 11] = [
    ("ptx/ptx.cuh", include_str!("../../kernels/ptx/ptx.cuh")),
    ("layout/shape.cuh", include_str!("../../kernels/layout/shape.cuh")),
    ("layout/launch.cuh", include_str!("../../kernels/layout/launch.cuh")),
    ("layout/words.cuh", include_str!("../../kernels/layout/words.cuh")),
    ("layout/shared_memory.cuh", include_str!("../../kernels/layout/shared_memory.cuh")),
    ("sync/wait.cuh", include_str!("../../kernels/sync/wait.cuh")),
    ("sync/ring.cuh", include_str!("../../kernels/sync/ring.cuh")),
    ("ops/product.cuh", include_str!("../../kernels/ops/product.cuh")),
    ("ops/attention.cuh", include_str!("../../kernels/ops/attention.cuh")),
    ("ops/epilogue.cuh", include_str!("../../kernels/ops/epilogue.cuh")),
    ("ops/phases.cuh", include_str!("../../kernels/ops/phases.cuh")),
];
/// Widest head; narrower ones are padded to this or half of it.
const MAX_HEAD_DIM: usize = 128;
/// Query heads of a KV head are columns of one tensor-core product.
const MAX_QUERIES_PER_KV: usize = 8;

const fn narrow(columns: usize, time_us: u32) -> Variant {
    Variant { width: Width { columns, samples: true, time_us }, design: Design::Narrow, traced: false }
}

/// Refuses dimensions that the kernels are not written for.
///
/// # Errors
/// Names the dimension.
pub fn check_shape(config: &ModelConfig) -> Result<(), CudaError> {
    let refuse = |problem: String| Err(CudaError::Shape(problem));
    if !config.hidden_size.is_multiple_of(16) {
        return refuse(format!("hidden_size {} is not a multiple of 16", config.hidden_size));
    }
    if config.head_dim > MAX_HEAD_DIM {
        return refuse(format!("head_dim {} is over {MAX_HEAD_DIM}", config.head_dim));
    }
    let queries = config.num_heads / config.num_kv_heads;
    if queries > MAX_QUERIES_PER_KV {
        return refuse(format!("{queries} query heads share a KV head, {MAX_QUERIES_PER_KV} is the most"));
    }
    Ok(())
}

impl Variant {
    /// Rows of a launch at most.
    pub fn columns(&self) -> usize {
        self.width.columns
    }

    /// Name of the kernel in its source.
    pub fn name(&self) -> &'static str {
        match self.design {
            Design::Narrow => "looped_decoder",
            Design::Unlooped { .. } => "unlooped_decoder",
        }
    }

    /// The same pass in another mode, noting times or not; `None` where there is none.
    pub fn in_mode(self, mode: LoopMode, traced: bool) -> Option<Self> {
        let design = match (self.design, mode) {
            (Design::Narrow, LoopMode::On) => Design::Narrow,
            (Design::Narrow, mode) => Design::Unlooped { overlapped: mode == LoopMode::Overlapped },
            (Design::Unlooped { .. }, _) => return None,
        };
        Some(Self { design, traced, ..self })
    }

    /// Whether it runs a launch for each phase, and if so, whether they overlap.
    pub fn unlooped(&self) -> Option<bool> {
        match self.design {
            Design::Narrow => None,
            Design::Unlooped { overlapped } => Some(overlapped),
        }
    }

    /// The kernel's source with its constants for a model.
    pub fn program(&self, layout: &Layout) -> Program<'static> {
        let c = &layout.plan().config;
        let mut defines: Vec<(&'static str, usize)> = vec![
            ("LP_LAYERS", c.num_layers),
            ("LP_HIDDEN", c.hidden_size),
            ("LP_HEADS", c.num_heads),
            ("LP_KV_HEADS", c.num_kv_heads),
            ("LP_HEAD_DIM", c.head_dim),
            ("LP_HEAD_WIDTH", layout.head_width()),
            ("LP_INTERMEDIATE", c.intermediate_size),
            ("LP_VOCAB", c.vocab_size),
            ("LP_WINDOW", c.sliding_window.unwrap_or(0)),
            ("LP_QKV_BIAS", c.qkv_bias.into()),
            ("LP_QK_NORM", c.qk_norm.into()),
            ("LP_TIED", c.tied_embeddings.into()),
            ("LP_EPS", c.rms_norm_eps.to_bits() as usize),
            ("LP_BLOCKS", layout.blocks()),
            ("LP_COLUMNS", self.columns()),
        ];
        defines.extend(self.traced.then_some(("LP_TRACE", 1)));
        let defines = defines.into_iter().map(|(name, value)| (name, value as u64)).collect();
        let source = match self.design {
            Design::Narrow => SOURCES[0],
            Design::Unlooped { .. } => UNLOOPED_SOURCE,
        };
        Program { name: self.name(), source, headers: &HEADERS, defines }
    }
}
