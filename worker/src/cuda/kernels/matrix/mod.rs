//! The kernels of matrix passes for one model: a launch for each phase of each layer (kernels/matrix/layout.cuh, of
//! several ranks kernels/matrix/ranks.cuh).

mod carry;
mod phases;
mod products;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, Resources};
use crate::cuda::kernels::function::{Begin, Function};
use crate::cuda::kernels::items::{AtOnce, Bounds, Last};
use crate::cuda::kernels::launch::Launch;
use crate::cuda::kernels::module::Module;
use crate::cuda::kernels::variants::{TOKEN_BLOCK, Variant, Width};
use crate::cuda::weights::layout::Layout;

use carry::Carrier;
#[cfg(test)]
pub use phases::names;
use phases::{Phase, Step, Steps, Turn, turns};
pub use products::Products;

/// What the source says of itself once it is compiled, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Needs {
    /// Bytes of the memory that launches share.
    memory_bytes: u64,
    /// Dynamic shared memory of a block of a product.
    product_shared: u64,
    /// Its threads.
    product_threads: u64,
    /// Rows of a pass that sample, at most.
    most_samples: u64,
    /// Spans that are merged, at most.
    most_spans: u64,
    /// Rows of half a tile of attention.
    tile_tokens: u64,
    /// Dynamic shared memory of attention of tiles, perhaps with spans beside.
    tiles_shared: u64,
    /// The same of attention of spans.
    spans_shared: u64,
    /// Blocks of a launch, at most.
    most_blocks: u64,
    /// Sets of warps of a block of attention of spans, each with items of its own.
    span_sets: u64,
}

/// How many numbers the source says of itself.
#[cfg(test)]
pub const NEEDS: usize = size_of::<Needs>() / size_of::<u64>();

impl Needs {
    /// Dynamic shared memory of a block.
    fn shared(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Embed | Phase::Norms | Phase::HeadNorms | Phase::MergeSpans | Phase::Gather => 0,
            Phase::Choose | Phase::TellEmbeddings | Phase::JoinOut | Phase::JoinDown => 0,
            Phase::NormsOfJoinedOut | Phase::NormsOfJoinedDown => 0,
            meet if meet.meets() => 0,
            Phase::AttendTiles | Phase::AttendCutTiles => self.tiles_shared,
            Phase::AttendSpans => self.spans_shared,
            _ => self.product_shared,
        }
    }
}

/// The second parameter of the kernels: what a pass is given beside its [`Launch`]. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Pass {
    /// [`Layout::tiles`]; filled in by [`Matrix::launch`].
    pub tiles: u64,
    /// [`super::items::Items`], this and the three after it.
    pub attend_tiles: u64,
    pub attend_spans: u64,
    pub merges: u64,
    pub samples: u64,
    /// u32, of a pass that chooses its tokens: 0, or how many steps the chain has. 0: the pass writes logits.
    pub stopped: u64,
    /// Of a pass that chooses: its rows, which become those of the next step; 0: there is none.
    pub next: u64,
    pub tile_count: u32,
    pub span_count: u32,
    pub merge_count: u32,
    pub sample_count: u32,
    /// Of the chain.
    pub step: u32,
    /// Whether there are tiles that are cut by spans.
    pub cut: u16,
    /// [`super::items::Items::tile_blocks`]
    pub tile_blocks: u16,
    /// Of a pass whose sums and x copy engines carry: how many runs of tokens a rank adds up, one behind the other.
    /// 0: kernels send them. Filled in by [`Matrix::launch_layers`] and [`Matrix::launch_head`].
    pub carried: u32,
    /// Blocks of tokens that the launch computes, a bit each. Filled in launch by launch.
    pub blocks: u32,
}

impl Pass {
    /// Of the launches behind K and V of the last layer.
    fn of_last(self, last: Last) -> Self {
        let tile_blocks = last.tiles.min(self.tile_blocks.into()) as u16;
        Self { blocks: last.blocks, tile_count: last.tiles, merge_count: last.merges, tile_blocks, ..self }
    }
}

/// What kernels are loaded for.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Sequences that are computed at a time.
    pub max_slots: usize,
    /// Blocks of a launch at most.
    pub blocks: usize,
    /// Rows of a step at most.
    pub most_rows: usize,
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct Matrix {
    /// Passes that they compute.
    pub width: Width,
    /// What they are given room for.
    pub bounds: Bounds,
    /// How attention is divided among the blocks of a launch.
    pub at_once: AtOnce,
    /// What the compiler said that they take: the most registers of a kernel, and what all spill.
    pub resources: Option<Resources>,
    /// Whether the binary came from the cache.
    pub cached: bool,
    needs: Needs,
    /// Of each phase.
    functions: Vec<Function>,
    tiles: DeviceBuffer,
    /// Blocks of a launch, all at once on the GPU: twos are clusters, and fours wait for each other.
    blocks: u32,
    steps: Steps,
    /// Of several ranks, where steps may have more rows than a pass.
    carrier: Option<Carrier>,
    // The functions are its.
    _module: Module,
}

impl Matrix {
    /// Compiles (or finds) the kernels for a model, with more `#define`s than their own, and loads them.
    ///
    /// # Errors
    /// They do not compile, or do not fit the GPU.
    pub fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        layout: &Layout,
        variant: Variant,
        Room { max_slots, blocks, most_rows }: Room,
        defines: &[(&'static str, u64)],
    ) -> Result<Self, CudaError> {
        let does_not_fit = |problem: String| {
            Err(CudaError::Kernel { kernel: format!("{} of {} columns", variant.name(), variant.columns()), problem })
        };
        let mut program = variant.program(layout);
        program.defines.extend(defines);
        let (binary, cached) = compiler.build(&program, cache)?;
        let module = Module::load(gpu, &binary.cubin)?;
        let needs: Needs = module.needs(variant.name())?;
        let mut functions = Vec::new();
        for phase in Phase::ALL {
            let (shared, has) = (needs.shared(phase), gpu.facts.shared_bytes as u64);
            if shared > has {
                let name = phase.name();
                return does_not_fit(format!("{name} needs {shared} bytes of shared memory, a block has {has}"));
            }
            functions.push(Function::load(&module, phase.name(), shared as u32)?);
        }
        let threads = functions[Phase::GateUp as usize].threads();
        assert_eq!(u64::from(threads), needs.product_threads, "a product's launch bounds are its threads");
        let pairs = layout.ranks() > 1 && most_rows > variant.columns();
        let c = &layout.plan().config;
        let blocks = (blocks.min(needs.most_blocks as usize) & !3).max(4) as u32;
        let heads = layout.rank().kv_heads.len();
        let bounds = Bounds {
            samples: (needs.most_samples as usize).min(max_slots),
            spans: needs.most_spans as usize,
            window: c.sliding_window,
        };
        let resources: Option<Vec<_>> =
            Phase::ALL.into_iter().map(|phase| Resources::of(phase.name(), &binary.log)).collect();
        Ok(Self {
            width: Width { bounds: Some(bounds), ..variant.width },
            bounds,
            at_once: AtOnce {
                tile_rows: 2 * needs.tile_tokens as usize,
                tiles: blocks as usize / heads,
                rows: needs.span_sets as usize * blocks as usize / heads,
            },
            resources: resources.map(|all| Resources {
                registers: all.iter().map(|of| of.registers).max().unwrap_or(0),
                spilled: all.iter().map(|of| of.spilled).sum(),
                stack: all.iter().map(|of| of.stack).max().unwrap_or(0),
            }),
            cached,
            needs,
            functions,
            tiles: DeviceBuffer::of(gpu, &layout.tiles())?,
            blocks,
            steps: Steps::of(layout, Products::of(layout, blocks)),
            carrier: pairs.then(|| Carrier::new(gpu, layout, &module)).transpose()?,
            _module: module,
        })
    }

    /// Whether two passes of a step may be computed together.
    pub fn has_pairs(&self) -> bool {
        self.carrier.is_some()
    }

    /// How the products of a layer are divided among blocks.
    pub fn products(&self) -> Products {
        self.steps.products
    }

    /// Bytes of [`Launch::words`], which of several ranks are the rank's inbox.
    pub fn memory_bytes(&self) -> u64 {
        self.needs.memory_bytes
    }

    /// Puts a pass into the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` and `pass` point to is as their fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, launch: Launch, pass: Pass, last: Last, stream: &Stream) -> Result<(), CudaError> {
        let mut half = Half::new(self, launch, pass, last, self.steps.phases(launch.row_count, &pass, last));
        // SAFETY: as the caller vouches.
        unsafe { half.put_while(stream, |_| true) }
    }

    /// Puts the layers of two passes into the stream, so that copy engines carry what one has summed or added up to the
    /// other ranks while the other multiplies. Each has words and inboxes of its own; the second one may see what the
    /// first one writes to the cache.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Self::launch`].
    #[allow(unsafe_code)]
    pub unsafe fn launch_layers(&self, passes: [(Launch, Pass, Last); 2], stream: &Stream) -> Result<(), CudaError> {
        let carrier = self.carrier.as_ref().expect("pairs, as the step has more rows than a pass");
        let mut halves = passes.map(|(launch, pass, last)| {
            let pass = Pass { carried: carrier.own_runs(launch.row_count), ..pass };
            Half::new(self, launch, pass, last, self.steps.body(launch.row_count, &pass, last))
        });
        // SAFETY: as the caller vouches.
        unsafe {
            for half in &mut halves {
                half.put_while(stream, |phase| phase != Phase::Embed)?;
                half.put(stream)?;
                // Attention of spans reads early what was complete before a pass, so before the first layer of both.
                half.begin = Begin::Behind;
            }
            for (half, turn) in turns(self.steps.layers) {
                let half = &mut halves[half];
                match turn {
                    Turn::Compute => half.put_while(stream, |phase| phase.leaves().is_none())?,
                    Turn::Tell | Turn::Join => half.put_carried(stream, carrier)?,
                }
            }
        }
        carrier.end(stream)
    }

    /// Puts what comes behind the layers of a pass into the stream, `again` if other passes have been computed since.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Self::launch`].
    #[allow(unsafe_code)]
    pub unsafe fn launch_head(
        &self,
        launch: Launch,
        pass: Pass,
        last: Last,
        again: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        // As the joins in front of it.
        let carried = self.carrier.as_ref().map_or(0, |carrier| carrier.own_runs(launch.row_count));
        let pass = Pass { carried, ..pass };
        let mut half = Half::new(self, launch, pass, last, self.steps.head(&pass, again));
        // SAFETY: as the caller vouches.
        unsafe { half.put_while(stream, |_| true) }
    }
}

/// A pass that is put into the stream launch by launch.
struct Half<'a> {
    matrix: &'a Matrix,
    launch: Launch,
    pass: Pass,
    last: Last,
    steps: Vec<Step>,
    /// Launches that are in the stream.
    put: usize,
    /// Of the next launch.
    begin: Begin,
}

impl<'a> Half<'a> {
    fn new(matrix: &'a Matrix, launch: Launch, pass: Pass, last: Last, steps: Vec<Step>) -> Self {
        let blocks = launch.row_count.div_ceil(TOKEN_BLOCK as u32);
        let pass = Pass { tiles: matrix.tiles.address(), blocks: u32::MAX >> (u32::BITS - blocks), ..pass };
        // Whatever is in front of a pass has to be over.
        Self { matrix, launch, pass, last, steps, put: 0, begin: Begin::Behind }
    }

    /// Puts the next launch into the stream.
    #[allow(unsafe_code)]
    unsafe fn put(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let Step { phase, layer, samples } = self.steps[self.put];
        let pass = if samples { self.pass.of_last(self.last) } else { self.pass };
        let blocks = if phase.meets() { 1 } else { self.matrix.blocks };
        let parameters = [bytes_of(&self.launch), bytes_of(&pass), bytes_of(&layer)];
        // SAFETY: the kernels take a `Launch`, a `Pass` and a layer; the caller vouches for what they point to.
        unsafe { self.matrix.functions[phase as usize].launch(stream, blocks, self.begin, parameters)? };
        self.begin = Begin::Overlapping;
        self.put += 1;
        Ok(())
    }

    /// Puts launches into the stream up to the first of another phase.
    #[allow(unsafe_code)]
    unsafe fn put_while(&mut self, stream: &Stream, of: impl Fn(Phase) -> bool) -> Result<(), CudaError> {
        while self.steps.get(self.put).is_some_and(|step| of(step.phase)) {
            // SAFETY: as the caller vouches.
            unsafe { self.put(stream)? };
        }
        Ok(())
    }

    /// Puts the next launch, if there is one, and has what it leaves for the other ranks carried.
    #[allow(unsafe_code)]
    unsafe fn put_carried(&mut self, stream: &Stream, carrier: &Carrier) -> Result<(), CudaError> {
        // A pass without rows that sample ends before the other one of its pair.
        let Some(&Step { phase, layer, .. }) = self.steps.get(self.put) else { return Ok(()) };
        let what = phase.leaves().expect("a product or a join, up to which launches were put");
        // SAFETY: as the caller vouches.
        unsafe {
            self.put(stream)?;
            carrier.carry(stream, &self.launch, what, layer)
        }
    }
}
