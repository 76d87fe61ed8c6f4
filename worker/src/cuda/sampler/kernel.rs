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

/// Bytes of the word that tells launches whether to stop.
pub(super) const STOPPED_BYTES: usize = size_of::<u32>();
/// Rows of a group of a launch at most: each is a bit of a word.
pub const MOST_ROWS: usize = 64;
/// Groups of a launch of more rows.
const GROUPS: usize = 8;
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
    /// What the compiler said they take, for launches of few rows.
    pub resources: Option<Resources>,
    /// Whether the binaries came from the cache.
    pub cached: bool,
    /// For launches of up to [`MOST_ROWS`] rows.
    pub(super) few: Grid,
    /// For those of more.
    pub(super) many: Option<Grid>,
    pub(super) count: sys::CUfunction,
    pub(super) padded_vocab: usize,
    /// Of a launch, at most.
    pub(super) rows: usize,
}

/// The kernel that draws, on groups of blocks side by side that share the rows of a launch.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) sample: sys::CUfunction,
    pub(super) threads: u32,
    pub(super) groups: usize,
    /// Of a group.
    pub(super) blocks: usize,
    /// Of all groups.
    pub(super) rows: usize,
    pub(super) words_bytes: u64,
    pub(super) module: Module,
}

// SAFETY: functions are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for SamplerKernel {}

/// The kernels' constants: groups of so many blocks with up to so many rows each.
pub fn program(vocab_size: usize, groups: usize, blocks: usize, rows: usize) -> Program<'static> {
    let defines = vec![
        ("LP_VOCAB", vocab_size as u64),
        ("LP_GROUPS", groups as u64),
        ("LP_BLOCKS", blocks as u64),
        ("LP_COLUMNS", rows as u64),
        ("LP_SAMPLE_THREADS", THREADS.into()),
    ];
    Program { name: NAME, source: SOURCE, headers: &HEADERS, defines }
}

impl Grid {
    /// Compiles (or finds) the kernels; with what the compiler said and whether they came from the cache.
    fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        vocab_size: usize,
        (groups, blocks, rows): (usize, usize, usize),
    ) -> Result<(Self, Option<Resources>, bool), CudaError> {
        let (binary, cached) = compiler.build(&program(vocab_size, groups, blocks, rows), cache)?;
        let module = Module::load(gpu, &binary.cubin)?;
        let [threads, words_bytes]: [u64; 2] = module.needs(NAME)?;
        let sample = module.function(NAME, 0)?;
        let grid = Self { sample, threads: threads as u32, groups, blocks, rows: groups * rows, words_bytes, module };
        Ok((grid, Resources::of(NAME, &binary.log), cached))
    }
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
        let grid = |shape| Grid::load(gpu, compiler, cache, vocab_size, shape);
        let (few, resources, few_cached) = grid((1, blocks, columns.min(MOST_ROWS)))?;
        // All blocks run at one time: as many as there are for one group.
        let shares = (GROUPS, (blocks / GROUPS).max(1), columns.div_ceil(GROUPS).min(MOST_ROWS));
        let many = (columns > MOST_ROWS).then(|| grid(shares)).transpose()?;
        let cached = few_cached && many.as_ref().is_none_or(|(_, _, cached)| *cached);
        let many = many.map(|(grid, ..)| grid);
        Ok(Self {
            resources,
            cached,
            count: few.module.function("count_tokens", 0)?,
            padded_vocab: vocab_size.next_multiple_of(ROW_TILE),
            rows: many.as_ref().unwrap_or(&few).rows,
            few,
            many,
        })
    }

    /// The grid for a launch of so many rows, and where its words are among all.
    pub(super) fn grid(&self, rows: usize) -> (&Grid, u64) {
        match &self.many {
            Some(many) if rows > self.few.rows => (many, self.few.words_bytes),
            _ => (&self.few, 0),
        }
    }

    /// Bytes of memory that [`Sampler::new`] takes.
    pub fn bytes(&self, slots: usize) -> u64 {
        self.words_bytes() + (self.processed_bytes() + slots * self.slot_bytes() + STOPPED_BYTES) as u64
    }

    pub(super) fn words_bytes(&self) -> u64 {
        self.few.words_bytes + self.many.as_ref().map_or(0, |many| many.words_bytes)
    }

    pub(super) fn processed_bytes(&self) -> usize {
        self.rows * self.padded_vocab * size_of::<f32>()
    }

    pub(super) fn counts_bytes(&self) -> usize {
        self.padded_vocab * size_of::<u32>()
    }

    fn slot_bytes(&self) -> usize {
        self.counts_bytes() + size_of::<RowSampling>() + LIST_WORDS * size_of::<u32>()
    }
}
