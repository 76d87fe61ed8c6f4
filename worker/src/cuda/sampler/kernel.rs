//! The sampler's kernels: what they are compiled from, and how much memory they want.

use std::sync::Arc;

use cudarc::driver::sys;

use super::launch::{LIST_WORDS, RowSampling};
use crate::cuda::device::gpu::Gpu;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, Program, Resources};
use crate::cuda::kernels::module::Module;
use crate::plan::ROW_TILE;

/// Bytes of the words that tell launches whether to stop.
pub(super) const STOPPED_BYTES: usize = 2 * size_of::<u32>();
/// Rows of a launch at most.
pub const MOST_ROWS: usize = 64;
/// Threads of a block. Fewer take as long for a row and longer for eight; with 1024 registers are spilled.
const THREADS: u32 = 512;
/// Name of the kernel.
const NAME: &str = "sampler";
/// The kernels' source, with what it includes.
pub const SOURCE: &str = include_str!("../../../kernels/sampler.cu");
/// The source's includes, by the names it has for them.
pub const HEADERS: [(&str, &str); 11] = [
    ("ptx/ptx.cuh", include_str!("../../../kernels/ptx/ptx.cuh")),
    ("layout/launch.cuh", include_str!("../../../kernels/layout/launch.cuh")),
    ("layout/sampler.cuh", include_str!("../../../kernels/layout/sampler.cuh")),
    ("sync/wait.cuh", include_str!("../../../kernels/sync/wait.cuh")),
    ("ops/lanes.cuh", include_str!("../../../kernels/ops/lanes.cuh")),
    ("ops/exact_math.cuh", include_str!("../../../kernels/ops/exact_math.cuh")),
    ("ops/noise.cuh", include_str!("../../../kernels/ops/noise.cuh")),
    ("ops/sampling_state.cuh", include_str!("../../../kernels/ops/sampling_state.cuh")),
    ("ops/sampling_scan.cuh", include_str!("../../../kernels/ops/sampling_scan.cuh")),
    ("ops/sampling_conclude.cuh", include_str!("../../../kernels/ops/sampling_conclude.cuh")),
    ("ops/sampling.cuh", include_str!("../../../kernels/ops/sampling.cuh")),
];

/// The kernels, compiled for a vocabulary.
#[derive(Debug)]
pub struct SamplerKernel {
    /// What the compiler said it takes.
    pub resources: Option<Resources>,
    /// Whether its binary came from the cache.
    pub cached: bool,
    pub(super) sample: sys::CUfunction,
    pub(super) count: sys::CUfunction,
    pub(super) threads: u32,
    pub(super) blocks: u32,
    pub(super) words_bytes: u64,
    pub(super) vocab: usize,
    pub(super) padded_vocab: usize,
    pub(super) rows: usize,
    pub(super) module: Module,
}

// SAFETY: functions are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for SamplerKernel {}

/// The kernels' constants.
pub fn program(vocab_size: usize, blocks: usize, rows: usize) -> Program<'static> {
    let defines = vec![
        ("LP_VOCAB", vocab_size as u64),
        ("LP_BLOCKS", blocks as u64),
        ("LP_COLUMNS", rows as u64),
        ("LP_SAMPLE_THREADS", THREADS.into()),
    ];
    Program { name: NAME, source: SOURCE, headers: &HEADERS, defines }
}

impl SamplerKernel {
    /// Compiles (or finds) the kernels for launches of up to `columns` rows, on so many blocks.
    ///
    /// # Errors
    /// They do not compile, or do not fit the GPU.
    pub fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        vocab_size: usize,
        columns: usize,
        blocks: usize,
    ) -> Result<Self, CudaError> {
        let rows = columns.min(MOST_ROWS);
        let (binary, cached) = compiler.build(&program(vocab_size, blocks, rows), cache)?;
        let module = Module::load(gpu, &binary.cubin)?;
        let [threads, words_bytes]: [u64; 2] = module.needs(NAME)?;
        Ok(Self {
            resources: Resources::of(NAME, &binary.log),
            cached,
            sample: module.function(NAME, 0)?,
            count: module.function("count_tokens", 0)?,
            threads: threads as u32,
            blocks: blocks as u32,
            words_bytes,
            vocab: vocab_size,
            padded_vocab: vocab_size.next_multiple_of(ROW_TILE),
            rows,
            module,
        })
    }

    /// Bytes of memory that [`Sampler::new`] takes, for steps of up to `rows` rows.
    pub fn bytes(&self, slots: usize, rows: usize) -> u64 {
        let masks = self.masks_words(slots, rows) * size_of::<u32>();
        self.words_bytes + (self.processed_bytes() + slots * self.slot_bytes() + masks + STOPPED_BYTES) as u64
    }

    pub(super) fn processed_bytes(&self) -> usize {
        self.rows * self.padded_vocab * size_of::<f32>()
    }

    pub(super) fn counts_bytes(&self) -> usize {
        self.padded_vocab * size_of::<u32>()
    }

    /// Words of a mask.
    pub(super) fn mask_words(&self) -> usize {
        self.vocab.div_ceil(u32::BITS as usize)
    }

    /// Words of the masks of as many rows as there are slots, and which of them each of the `rows` of a step has.
    pub(super) fn masks_words(&self, slots: usize, rows: usize) -> usize {
        slots * self.mask_words() + rows
    }

    fn slot_bytes(&self) -> usize {
        self.counts_bytes() + size_of::<RowSampling>() + LIST_WORDS * size_of::<u32>()
    }
}
