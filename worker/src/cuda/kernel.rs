//! The looped decoder's kernel for one model: its constants, its binary, and how it is launched.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::cache::Cache;
use super::compile::{Compiler, Program, Resources};
use super::device::{Gpu, Stream};
use super::error::{CudaError, checked};
use super::launch::Launch;
use super::layout::Layout;
use crate::model::ModelConfig;

/// Columns of the variants, ascending: rows that a launch computes at a time.
pub const VARIANTS: [usize; 2] = [1, 8];
/// Name of the kernel.
const NAME: &str = "looped_decoder";
/// The kernel's source, with what it includes.
pub const SOURCE: &str = include_str!("../../kernels/looped_decoder.cu");
/// The source's includes, by the names it has for them.
pub const HEADERS: [(&str, &str); 15] = [
    ("ptx/ptx.cuh", include_str!("../../kernels/ptx/ptx.cuh")),
    ("layout/shape.cuh", include_str!("../../kernels/layout/shape.cuh")),
    ("layout/launch.cuh", include_str!("../../kernels/layout/launch.cuh")),
    ("layout/rows.cuh", include_str!("../../kernels/layout/rows.cuh")),
    ("layout/words.cuh", include_str!("../../kernels/layout/words.cuh")),
    ("layout/shared_memory.cuh", include_str!("../../kernels/layout/shared_memory.cuh")),
    ("sync/wait.cuh", include_str!("../../kernels/sync/wait.cuh")),
    ("sync/reached.cuh", include_str!("../../kernels/sync/reached.cuh")),
    ("sync/ring.cuh", include_str!("../../kernels/sync/ring.cuh")),
    ("ops/tree_sum.cuh", include_str!("../../kernels/ops/tree_sum.cuh")),
    ("ops/best.cuh", include_str!("../../kernels/ops/best.cuh")),
    ("ops/product.cuh", include_str!("../../kernels/ops/product.cuh")),
    ("ops/softmax.cuh", include_str!("../../kernels/ops/softmax.cuh")),
    ("ops/attention.cuh", include_str!("../../kernels/ops/attention.cuh")),
    ("ops/epilogue.cuh", include_str!("../../kernels/ops/epilogue.cuh")),
];
/// Widest head; narrower ones are padded to this or half of it.
const MAX_HEAD_DIM: usize = 128;
/// Query heads of a KV head are columns of one tensor-core product.
const MAX_QUERIES_PER_KV: usize = 8;

/// Machine code in a GPU.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    gpu: Arc<Gpu>,
}

/// The kernel for one number of columns.
#[derive(Debug)]
pub struct Kernel {
    /// Rows of a launch at most.
    pub columns: usize,
    /// What the compiler said it takes.
    pub resources: Option<Resources>,
    /// Whether its binary came from the cache.
    pub cached: bool,
    function: sys::CUfunction,
    threads: u32,
    shared_bytes: u32,
    /// Bytes of exchange words before those of pages, and of each page of a row and KV head.
    words: (u64, u64),
    blocks: u32,
    module: Module,
}

// SAFETY: modules and functions are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for Module {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Send for Kernel {}

/// Refuses dimensions that the kernel is not written for.
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

/// The kernel's constants for a model.
pub fn program(layout: &Layout, columns: usize) -> Program<'static> {
    let c = &layout.plan().config;
    let defines: Vec<(&'static str, usize)> = vec![
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
        ("LP_COLUMNS", columns),
    ];
    let defines = defines.into_iter().map(|(name, value)| (name, value as u64)).collect();
    Program { name: NAME, source: SOURCE, headers: &HEADERS, defines }
}

impl Module {
    /// Loads machine code.
    ///
    /// # Errors
    /// The driver refuses it.
    #[allow(unsafe_code)]
    pub fn load(gpu: &Arc<Gpu>, cubin: &[u8]) -> Result<Self, CudaError> {
        gpu.make_current()?;
        // SAFETY: the bytes are a whole cubin, as the compiler made it or the cache's checksum says.
        let raw = checked("cuModuleLoadData", unsafe { result::module::load_data(cubin.as_ptr().cast::<c_void>()) })?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    /// A kernel in it that may use `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// It is not there, or may not.
    #[allow(unsafe_code)]
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<sys::CUfunction, CudaError> {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded for as long as `self` lives.
        let function = checked("cuModuleGetFunction", unsafe { result::module::get_function(self.raw, name) })?;
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of a loaded module.
        let set = unsafe { result::function::set_function_attribute(function, most, shared_bytes as i32) };
        checked("cuFuncSetAttribute", set)?;
        Ok(function)
    }

    #[allow(unsafe_code)]
    fn needs(&self) -> Result<[u64; 4], CudaError> {
        // SAFETY: the module is loaded for as long as `self` lives.
        let found = unsafe { result::module::get_global(self.raw, c"looped_decoder_needs".to_owned()) };
        let (address, bytes) = checked("cuModuleGetGlobal", found)?;
        let mut needs = [0u64; 4];
        assert_eq!(bytes, size_of_val(&needs), "the source has four numbers there");
        // SAFETY: the range is the global's.
        checked("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(&mut needs, address) })?;
        Ok(needs)
    }
}

impl Drop for Module {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, and nobody else unloads it.
        let unloaded = self.gpu.make_current().map(|()| unsafe { result::module::unload(self.raw) });
        if let Ok(Err(error)) = unloaded {
            tracing::debug!("cuModuleUnload: {error}");
        }
    }
}

impl Kernel {
    /// Compiles (or finds) the kernel for a model, loads it and checks that all its blocks run at the same time.
    ///
    /// # Errors
    /// It does not compile, or does not fit the GPU.
    #[allow(unsafe_code)]
    pub fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        layout: &Layout,
        columns: usize,
    ) -> Result<Self, CudaError> {
        let (binary, cached) = compiler.build(&program(layout, columns), cache)?;
        let module = Module::load(gpu, &binary.cubin)?;
        let [shared_bytes, threads, fixed_words, page_words] = module.needs()?;
        let does_not_fit =
            |problem: String| Err(CudaError::Kernel { kernel: format!("{NAME} of {columns} columns"), problem });
        if shared_bytes > gpu.facts.shared_bytes as u64 {
            let has = gpu.facts.shared_bytes;
            return does_not_fit(format!("needs {shared_bytes} bytes of shared memory, a block of this GPU has {has}"));
        }
        let (threads, shared_bytes) = (threads as u32, shared_bytes as u32);
        let function = module.function(NAME, shared_bytes)?;
        // SAFETY: the function is of a loaded module.
        let resident = unsafe {
            result::occupancy::max_active_block_per_multiprocessor(function, threads as i32, shared_bytes as usize)
        };
        let resident = checked("cuOccupancyMaxActiveBlocksPerMultiprocessor", resident)?.max(0) as usize;
        if resident * gpu.facts.sms < layout.blocks() {
            let (blocks, sms) = (layout.blocks(), gpu.facts.sms);
            return does_not_fit(format!("its {blocks} blocks do not run at one time on {sms} multiprocessors"));
        }
        Ok(Self {
            columns,
            resources: Resources::of(NAME, &binary.log),
            cached,
            function,
            threads,
            shared_bytes,
            words: (fixed_words, page_words),
            blocks: layout.blocks() as u32,
            module,
        })
    }

    /// Bytes of exchange words for rows of up to `pages` visible pages.
    pub fn words_bytes(&self, config: &ModelConfig, pages: usize) -> u64 {
        self.words.0 + self.words.1 * (self.columns * pages * config.num_kv_heads) as u64
    }

    /// Shared memory of a block, in bytes.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// Puts a launch into the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` points to is as its fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, mut launch: Launch, stream: &Stream) -> Result<(), CudaError> {
        let mut parameters = [(&raw mut launch).cast::<c_void>()];
        // SAFETY: the kernel takes one parameter, a `Launch`, which the call copies; the caller vouches for what it points to.
        let launched = unsafe {
            result::launch_cooperative_kernel(
                self.function,
                (self.blocks, 1, 1),
                (self.threads, 1, 1),
                self.shared_bytes,
                stream.raw,
                &mut parameters,
            )
        };
        checked("cuLaunchCooperativeKernel", launched)
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.module.gpu
    }
}
