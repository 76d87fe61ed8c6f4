//! A kernel of the looped decoder for one model: its binary, what it needs, and how it is launched.

use std::ffi::c_void;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::cache::Cache;
use super::compile::{Compiler, Resources};
use super::deal::{Deal, most_spans};
use super::launch::Launch;
use super::module::Module;
use super::unlooped::Chain;
use super::variants::Variant;
use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::error::{CudaError, checked};
use crate::cuda::weights::layout::Layout;

/// One variant, loaded.
#[derive(Debug)]
pub struct Kernel {
    /// Which it is.
    pub variant: Variant,
    /// What the compiler said it takes.
    pub resources: Option<Resources>,
    /// Whether its binary came from the cache.
    pub cached: bool,
    /// How its launches want attention dealt to blocks; `None`: blocks find out by themselves.
    pub deal: Option<Deal>,
    needs: Needs,
    way: Way,
    blocks: u32,
    module: Module,
}

/// How it is put into a stream.
#[derive(Debug)]
enum Way {
    /// One cooperative launch.
    Loop(sys::CUfunction),
    /// Graphs of launches.
    Phases(Box<Chain>),
}

/// What the source says of itself once it is compiled, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Needs {
    /// Dynamic shared memory of a block, in bytes.
    shared_bytes: u64,
    /// Threads of a block.
    threads: u64,
    /// Bytes of exchange words before those of items.
    fixed_words: u64,
    /// Bytes of words of an item: some visible pages of one row and KV head.
    item_words: u64,
    /// Bytes at the start of the words that are zero when a launch begins.
    zeroed_words: u64,
    /// Pages of an item.
    item_pages: u64,
    /// Bytes of what other ranks tell this one; 0 if there are none.
    inbox_bytes: u64,
    /// Rows of a group at most, where items are dealt by the host; 0 where they are not.
    group_rows: u64,
}

/// How many numbers that are.
#[cfg(test)]
pub const NEEDS: usize = size_of::<Needs>() / size_of::<u64>();

// SAFETY: modules and functions are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for Kernel {}

impl Kernel {
    /// Compiles (or finds) a variant for a model, with more `#define`s than its own, loads it and checks that all its
    /// blocks run at the same time.
    ///
    /// # Errors
    /// It does not compile, or does not fit the GPU.
    pub fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        layout: &Layout,
        variant: Variant,
        defines: &[(&'static str, u64)],
    ) -> Result<Self, CudaError> {
        let does_not_fit = |problem: String| {
            Err(CudaError::Kernel { kernel: format!("{} of {} columns", variant.name(), variant.columns()), problem })
        };
        if let Err(problem) = variant.check(layout) {
            return does_not_fit(problem);
        }
        let mut program = variant.program(layout);
        program.defines.extend(defines);
        let (binary, cached) = compiler.build(&program, cache)?;
        let module = Module::load(gpu, &binary.cubin)?;
        let needs: Needs = module.needs(variant.name())?;
        if needs.shared_bytes > gpu.facts.shared_bytes as u64 {
            let (bytes, has) = (needs.shared_bytes, gpu.facts.shared_bytes);
            return does_not_fit(format!("needs {bytes} bytes of shared memory, a block of this GPU has {has}"));
        }
        let way = match variant.unlooped() {
            None => Way::Loop(module.function(variant.name(), needs.shared_bytes as u32)?),
            Some(overlapped) => {
                let layers = layout.plan().config.num_layers as u32;
                Way::Phases(Box::new(Chain::new(&module, needs.shared_bytes as u32, layers, overlapped)?))
            }
        };
        let resources = Resources::of(variant.name(), &binary.log);
        let deal = (needs.group_rows > 0).then(|| Deal {
            blocks: layout.blocks() / layout.rank().kv_heads.len(),
            group_rows: needs.group_rows as usize,
            span_pages: needs.item_pages as usize,
            window: layout.plan().config.sliding_window,
        });
        let kernel = Self { variant, resources, cached, deal, needs, way, blocks: layout.blocks() as u32, module };
        if let Way::Loop(function) = kernel.way {
            let resident = kernel.resident_blocks(function)?;
            if resident < kernel.blocks {
                let (blocks, sms) = (kernel.blocks, gpu.facts.sms);
                return does_not_fit(format!(
                    "{resident} of its {blocks} blocks run at the same time on {sms} multiprocessors"
                ));
            }
        }
        Ok(kernel)
    }

    /// Bytes of exchange words for rows of up to `pages` visible pages.
    pub fn words_bytes(&self, layout: &Layout, pages: usize) -> u64 {
        let rows_and_heads = (self.variant.columns() * layout.rank().kv_heads.len()) as u64;
        let items = match layout.plan().config.sliding_window {
            None => pages.div_ceil(self.needs.item_pages as usize),
            Some(_) => most_spans(pages, self.needs.item_pages as usize),
        };
        let items = rows_and_heads * items as u64;
        self.needs.fixed_words + self.needs.item_words * items
    }

    /// Bytes of the inbox: what other ranks tell the kernel.
    pub fn inbox_bytes(&self) -> u64 {
        self.needs.inbox_bytes
    }

    /// Warps of a block.
    pub fn warps(&self) -> usize {
        self.needs.threads as usize / 32
    }

    /// How many blocks the GPU runs at the same time: in whole clusters, where the kernel asks for clusters.
    #[allow(unsafe_code)]
    fn resident_blocks(&self, function: sys::CUfunction) -> Result<u32, CudaError> {
        let width = Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH;
        // SAFETY: the function is of a loaded module.
        let width = unsafe { result::function::get_function_attribute(function, width) };
        let width = checked("cuFuncGetAttribute", width)?.max(1) as u32;
        let mut cluster = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: width, y: 1, z: 1 },
            },
        };
        let config = self.config(std::ptr::null_mut(), &mut cluster);
        let mut clusters = 0;
        // SAFETY: the function is of a loaded module, the configuration's one attribute and the integer live until the
        // call returns.
        let asked = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, function, &config) };
        checked("cuOccupancyMaxActiveClusters", asked.result())?;
        Ok(clusters.max(0) as u32 * width)
    }

    /// All blocks, with an attribute.
    fn config(&self, stream: sys::CUstream, attribute: &mut sys::CUlaunchAttribute) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.needs.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.needs.shared_bytes as u32,
            hStream: stream,
            attrs: attribute,
            numAttrs: 1,
        }
    }

    /// Puts a launch into the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` points to is as its fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&mut self, mut launch: Launch, stream: &Stream) -> Result<(), CudaError> {
        if self.needs.zeroed_words > 0 {
            let bytes = self.needs.zeroed_words as usize;
            // SAFETY: the words are at least as long as the part that is to be zero; the caller vouches for their
            // address.
            let zeroed = unsafe { result::memset_d8_async(launch.words, 0, bytes, stream.raw) };
            checked("cuMemsetD8Async", zeroed)?;
        }
        let function = match &mut self.way {
            Way::Loop(function) => *function,
            Way::Phases(chain) => {
                let shape = (self.blocks, self.needs.threads as u32);
                // SAFETY: as the caller vouches.
                return unsafe { chain.launch(launch, shape, stream) };
            }
        };
        let mut parameters = [(&raw mut launch).cast::<c_void>()];
        let mut cooperative = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { cooperative: 1 },
        };
        let config = self.config(stream.raw, &mut cooperative);
        // SAFETY: the kernel takes one parameter, a `Launch`, which the call copies; the caller vouches for what it
        // points to.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
        checked("cuLaunchKernelEx", launched.result())
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.module.gpu()
    }
}
