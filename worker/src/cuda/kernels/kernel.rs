//! A kernel of the looped decoder for one model: its binary, what it needs, and how it is launched.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};
use cudarc::driver::result;

use super::cache::Cache;
use super::compile::{Compiler, Resources};
use super::deal::{Deal, most_spans};
use super::function::{Begin, Function};
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
    Loop(Function),
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
        let function = |name: &str| {
            Ok(Function::load(&module, name, needs.shared_bytes as u32)?.with_threads(needs.threads as u32))
        };
        let way = match variant.unlooped() {
            None => Way::Loop(function(variant.name())?),
            Some(overlapped) => {
                let shape = (layout.plan().config.num_layers as u32, layout.blocks() as u32);
                Way::Phases(Box::new(Chain::new(&module, function, shape, overlapped)?))
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
            let resident = function.resident_blocks(kernel.blocks)?;
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

    /// Puts a launch into the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` points to is as its fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&mut self, launch: Launch, stream: &Stream) -> Result<(), CudaError> {
        if self.needs.zeroed_words > 0 {
            let bytes = self.needs.zeroed_words as usize;
            // SAFETY: the words are at least as long as the part that is to be zero; the caller vouches for their
            // address.
            let zeroed = unsafe { result::memset_d8_async(launch.words, 0, bytes, stream.raw) };
            checked("cuMemsetD8Async", zeroed)?;
        }
        match &mut self.way {
            // SAFETY: the kernel takes one parameter, a `Launch`; the caller vouches for what it points to.
            Way::Loop(function) => unsafe {
                function.launch(stream, self.blocks, Begin::Together, [bytes_of(&launch)])
            },
            // SAFETY: as the caller vouches.
            Way::Phases(chain) => unsafe { chain.launch(launch, stream) },
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.module.gpu()
    }
}
