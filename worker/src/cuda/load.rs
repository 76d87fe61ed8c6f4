//! From a load request to a GPU that is ready to run.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;

use super::device::gpu::{Gpu, probe};
use super::device::numa::{self, Home};
use super::error::CudaError;
use super::fabric::{self, Fabric, Group};
use super::kernels::blocks::best_blocks;
use super::kernels::cache::Cache;
use super::kernels::compile::{Compiler, Resources};
use super::kernels::kernel::Kernel;
use super::kernels::matrix::{Matrix, Room};
use super::kernels::sources::{HEADERS, SOURCES};
use super::kernels::variants::{LoopMode, Variant, check_shape, check_wide, matrix_of, variants_of};
use super::launches::engine::{Engine, Ties};
use super::launches::looped_decoder::LoopedDecoder;
use super::launches::pools::Memory;
use super::notes::gauge::{Gauge, Gauged};
use super::notes::phase::Phase as StepPhase;
use super::notes::read_limit::ReadLimit;
use super::sampler::draw::Sampler;
use super::sampler::kernel::{self as sampler, SamplerKernel};
use super::weights::heads::{KernelHeads, for_kernels};
use super::weights::layout::Layout;
use super::weights::panel::takes;
use super::weights::upload::Weights;
use crate::batch::{Batch, Drafting, Limits};
use crate::decoder::{Decoder, Fault, LoadError, LoadRequest, Loaded, OutcomeSink, Phase, PlanSource, Progress};
use crate::grammar::Grammars;
use crate::model::conversion::{computed, converter, weights_note};
use crate::model::source::Source;
use crate::model::{Checkpoint, ModelConfig, Tensor, WeightFormat};
use crate::plan::{Backend, ModelPlan, Product};
use crate::rope::Rope;

/// What a step with drafts takes longer than one of as many sequences within a launch, in microseconds: 8B on an H200,
/// 3.77 ms for 3.61 in a launch of its own. Fed ones take 30 to 50 less.
const DRAFTED_STEP_US: u32 = 150;

/// What a load request leaves open.
#[derive(Clone, Default)]
pub struct Options {
    /// Thread blocks; `None`: as many as suit model and GPU.
    pub blocks: Option<usize>,
    /// Weights of these dimensions in place of a checkpoint's; `model_dir` is not looked at.
    pub random: Option<(ModelConfig, Arc<dyn Source + Send>)>,
    /// Fill the KV pool with NaN.
    pub poison: bool,
    /// Whoever measures: other kernels, and times.
    pub gauge: Option<Arc<Gauge>>,
    /// The GPU, where it is not that of the rank's number: tests have a whole group on one.
    pub ordinal: Option<usize>,
    /// Shards that the model is cut into, where a benchmark computes only the first of them.
    pub shards: Option<usize>,
    /// `#define`s of debug builds of the kernels, as kernels/NOTES.md lists them.
    pub defines: Vec<(&'static str, u64)>,
}

/// A loaded rank on a GPU.
pub struct CudaDecoder {
    pub(super) decoder: LoopedDecoder<Engine>,
    loaded: Loaded,
    layout: Layout,
    gpu: Arc<Gpu>,
    /// Near the GPU, where there is a choice.
    home: Option<Home>,
}

/// The model, and where its weights come from.
struct Model {
    config: ModelConfig,
    /// How the layers' matrices are stored.
    stored: WeightFormat,
    checkpoint: Option<Checkpoint>,
    digest: String,
}

/// A checkpoint whose pages stay mapped until it is loaded: a tile is read leaf by leaf, by many threads, and giving
/// pages back in between would read them again from the system.
struct Mapped<'a>(&'a Checkpoint);

impl Source for Mapped<'_> {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        self.0.read(tensor, rows, columns, out);
    }

    fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
        Source::scales(self.0, tensor, rows, column, out);
    }

    fn zeros(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [u8]) {
        Source::zeros(self.0, tensor, rows, column, out);
    }
}

/// Loads a rank from a checkpoint.
///
/// # Errors
/// The GPU cannot be used, the model is refused, or does not fit.
pub fn load(request: &LoadRequest, progress: &mut dyn FnMut(Progress)) -> Result<CudaDecoder, LoadError> {
    load_with(request, &Options::default(), progress)
}

/// Loads a rank, with options.
///
/// # Errors
/// The GPU cannot be used, the model is refused, or does not fit.
pub fn load_with(
    request: &LoadRequest,
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<CudaDecoder, LoadError> {
    let mut tell = |phase, bytes_done, bytes_total| progress(Progress { phase, bytes_done, bytes_total });
    tell(Phase::ReadingConfig, 0, 0);
    let model = Model::open(request, options)?;
    let shards = options.shards.unwrap_or(request.tensor_parallel);
    check(request, &model.config)?;
    if request.tensor_parallel > 1 && options.ordinal.is_none() {
        fabric::survey(request.others.before, request.tensor_parallel)?;
    }
    let ordinal = options.ordinal.unwrap_or(request.socket());
    let home = numa::bind(request.rank, &probe(ordinal)?.pci);
    let gpu = Gpu::open(ordinal)?;
    let compiler = Compiler::find()?;
    let mut notes = model.checkpoint.as_ref().map(Checkpoint::notes).unwrap_or_default();
    let mut read_limit = None;
    if request.measure_read_limit {
        tell(Phase::MeasuringReads, 0, 0);
        match ReadLimit::of(ordinal) {
            Ok(limit) => read_limit = Some(limit),
            Err(why) => notes.push(format!("how fast memory can be read is not known: {why}")),
        }
    }
    let plan_of = |config: &ModelConfig| ModelPlan::for_backend(Backend::Cuda, config, shards);
    let plan = plan_of(&model.config)?;
    let computed_as = for_kernels(&model.config);
    let wide = plan_of(&computed_as).map_err(|error| {
        let copies = computed_as.num_kv_heads / model.config.num_kv_heads;
        CudaError::Shape(format!("each KV head is computed as {copies}, and {error}"))
    })?;
    let blocks = options.blocks.unwrap_or_else(|| best_blocks(&wide, gpu.facts.sms)).min(gpu.facts.sms);
    let layout = Layout::new(&wide, request.rank, blocks, model.config.head_dim).of_first(request.tensor_parallel);
    let max_context = model.config.context(request.max_context)?;
    let loop_mode = if request.unlooped { LoopMode::Off } else { LoopMode::On };
    let (kernels, matrix, sampler) = kernels(&gpu, &compiler, &layout, request, loop_mode, options)?;

    let mut memory = Memory::plan(&layout, request, max_context, &kernels, matrix.as_ref(), &sampler);
    memory.fit(request, &gpu)?;
    let source: &dyn Source = match (&model.checkpoint, &options.random) {
        (Some(checkpoint), _) => &Mapped(checkpoint),
        (None, Some((_, random))) => &**random,
        (None, None) => unreachable!("without random weights there is a checkpoint"),
    };
    let converter = converter(source, model.stored, &model.config);
    let source = converter.as_deref().unwrap_or(source);
    let source = &KernelHeads::new(source, &model.config);
    let rope = Rope::new(&model.config);
    let pools = memory.pools(&gpu, options.poison)?;
    let sampler = Sampler::new(sampler, &memory.sizes)?;
    let (begun, total) = (Instant::now(), memory.needs.weights + memory.needs.embedding);
    // One core is left to what other replicas' requests need meanwhile.
    let threads = std::thread::available_parallelism().map_or(1, |cores| usize::from(cores).saturating_sub(1).max(1));
    let weights = Weights::load(&gpu, &layout, source, &rope, max_context, threads, &mut |done| {
        tell(Phase::PackingWeights, done, total);
    })?;
    model.checkpoint.as_ref().map_or(Ok(()), Checkpoint::check_finite)?;
    tell(Phase::PackingWeights, total, total);
    let seconds = begun.elapsed().as_secs_f64();
    tracing::info!("packed {:.2} GB in {seconds:.2} s on {threads} threads", total as f64 / 1e9);

    tell(Phase::Allocating, 0, 0);
    notes.push(weights_note(model.stored, model.config.layer_weights, layout.bytes() as u64));
    notes.push(describe(&gpu, &compiler, &layout, &kernels, matrix.as_ref()));
    if loop_mode != LoopMode::On {
        notes.push("--loop off: passes of up to 8 rows run a launch for each phase; wider ones run as ever".into());
    }
    let config = &model.config;
    let bit_domain = plan.bit_domain("cuda", "sm90a", &arithmetic(&compiler));
    let ties = match request.tensor_parallel {
        1 => None,
        ranks => {
            let inbox = memory.inbox.clone();
            // Ranks cut a step into passes by how their products are divided, so that has to be the same.
            let products = matrix.as_ref().map(Matrix::products);
            let same = format!("{bit_domain} {} {blocks} blocks {products:?} {inbox:?}", model.digest);
            let group = Group { rank: request.rank, ranks, plan: same };
            Some(Ties { fabric: Fabric::new(&gpu, group, inbox.bytes as usize, request.wait_limit)?, inbox })
        }
    };
    let loaded = Loaded {
        architecture: config.architecture.name().to_owned(),
        vocab_size: config.vocab_size,
        max_context,
        num_layers: config.num_layers,
        hidden_size: config.hidden_size,
        kv_pages: memory.sizes.kv_pages,
        weight_bytes: total,
        stream_bytes: layout.bytes() as u64,
        head_bytes: layout.panel(Product::LmHead).bytes() as u64,
        read_limit,
        kv_bytes: memory.sizes.kv_pages as u64 * memory.needs.kv_page,
        bit_domain,
        notes,
        model_digest: model.digest,
        max_slots: request.max_slots,
        max_batch_tokens: request.max_batch_tokens,
    };
    let batch = Batch::new(Limits {
        max_slots: request.max_slots,
        max_batch_tokens: request.max_batch_tokens,
        kv_pages: memory.sizes.kv_pages,
        max_context,
        vocab_size: config.vocab_size,
        drafting: Drafting { whole_sizes: true, extra_us: DRAFTED_STEP_US },
        draft_corpus_tokens: request.draft_corpus_tokens,
        window: config.sliding_window,
    });
    let mut launcher = Engine::new(memory.sizes, kernels, matrix, loop_mode, sampler, weights, pools)?;
    launcher.ties = ties;
    if let Some(gauge) = &options.gauge {
        let cache = Cache::from_environment();
        let others = gauge.variants(&layout);
        let others = load_kernels(&gpu, &compiler, &cache, &layout, &others, &options.defines)?;
        launcher.gauged = Some(Gauged::new(gauge.clone(), &gpu, &layout, others)?);
    }
    let (vocabulary, slots, ranks) = (request.vocabulary.clone(), request.max_slots, request.tensor_parallel);
    let grammars = Grammars::new(vocabulary, loaded.vocab_size, slots, ranks);
    let (rank, masked_step) = (request.rank, Duration::ZERO);
    let decoder = LoopedDecoder { launcher, batch, grammars, rank, since_drafts: u32::MAX, masked_step };
    Ok(CudaDecoder { decoder, loaded, layout, gpu, home })
}

/// Whether a model can be loaded for a request, apart from memory and GPU: what `--device auto` asks.
///
/// # Errors
/// Why not.
pub fn check(request: &LoadRequest, config: &ModelConfig) -> Result<(), LoadError> {
    if request.max_slots == 0 || request.max_batch_tokens < request.max_slots {
        return Err(LoadError::Request(format!(
            "{} slots and {} batch tokens do not fit together",
            request.max_slots, request.max_batch_tokens
        )));
    }
    Ok(check_shape(config)?)
}

impl Model {
    fn open(request: &LoadRequest, options: &Options) -> Result<Self, LoadError> {
        let of = |stored: &ModelConfig, checkpoint, digest| {
            let config = computed(stored, request.quantization, takes);
            Self { stored: stored.layer_weights, config, checkpoint, digest }
        };
        if let Some((config, _)) = &options.random {
            return Ok(of(config, None, "random".into()));
        }
        let (config, text) = ModelConfig::with_text(&request.model_dir)?;
        let checkpoint = Checkpoint::open_as_found(&request.model_dir, &config)?;
        let digest = checkpoint.digest(&text);
        let stored = checkpoint.config().clone();
        Ok(of(&stored, Some(checkpoint), digest))
    }
}

/// What decides the bits of a result beside the plan: the sources and the compiler.
fn arithmetic(compiler: &Compiler) -> String {
    compiler.arithmetic(&SOURCES.concat(), &HEADERS) + &compiler.arithmetic(sampler::SOURCE, &sampler::HEADERS)
}

/// What 9 to 64 rows take without wide passes. The figure is that of Llama 3.1 8B and 3.2 3B on an H200 with 131
/// blocks, which are no pairs, beside their own: 1.19 (64 rows) to 1.42 times (9 rows; docs/shapes.md).
pub(super) fn without_wide(problem: &str, has_matrix: bool) -> String {
    let instead = match has_matrix {
        true => "matrix passes, which take 1.2 to 1.4 times as long",
        false => "passes of 8, so 32 of them take 4 times as long as 8",
    };
    format!("steps of 9 to 64 rows are {instead}: the kernel for them does not take this model ({problem})")
}

/// All variants, those in `loop_mode` that there are in it, matrix passes where steps may need them, and the sampler,
/// compiled at the same time.
fn kernels(
    gpu: &Arc<Gpu>,
    compiler: &Compiler,
    layout: &Layout,
    request: &LoadRequest,
    loop_mode: LoopMode,
    options: &Options,
) -> Result<(Vec<Kernel>, Option<Matrix>, SamplerKernel), CudaError> {
    let defines = &options.defines;
    let (begun, cache) = (Instant::now(), Cache::from_environment());
    let matrix = matrix_of(layout, request.max_batch_tokens);
    if let Some(slow) = check_wide(layout).err().map(|problem| without_wide(&problem, matrix.is_some())) {
        tracing::warn!("{slow}");
    }
    let vocab_size = layout.plan().config.vocab_size;
    let in_mode = |variant: Variant| variant.in_mode(loop_mode, false).unwrap_or(variant);
    let variants: Vec<_> = variants_of(layout).into_iter().map(in_mode).collect();
    let most_rows = variants.iter().chain(&matrix).map(Variant::columns).max().unwrap_or(1);
    // Ranks on one GPU leave room for each other: they wait for each other.
    let blocks = options.ordinal.and(options.blocks).unwrap_or(gpu.facts.sms);
    let room = Room { max_slots: request.max_slots, blocks, most_rows: request.max_batch_tokens };
    let (kernels, matrix, sampler) = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load_kernels(gpu, compiler, &cache, layout, &variants, defines));
        let load_matrix = |variant| {
            let matrix = Matrix::load(gpu, compiler, &cache, layout, variant, room, defines)?;
            let what = format!("{} of {} columns", variant.name(), variant.columns());
            tell(&what, matrix.cached, begun.elapsed(), matrix.resources);
            Ok(matrix)
        };
        let loading_matrix = scope.spawn(move || matrix.map(load_matrix).transpose());
        let sampler = SamplerKernel::load(gpu, compiler, &cache, vocab_size, most_rows, blocks);
        if let Ok(sampler) = &sampler {
            tell("sampler", sampler.cached, begun.elapsed(), sampler.resources);
        }
        let kernels = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (kernels, loading_matrix.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), sampler)
    });
    let loaded = (kernels?, matrix?, sampler?);
    tracing::info!("kernels ready in {:.2} s", begun.elapsed().as_secs_f64());
    Ok(loaded)
}

/// Variants, compiled at the same time.
fn load_kernels(
    gpu: &Arc<Gpu>,
    compiler: &Compiler,
    cache: &Cache,
    layout: &Layout,
    variants: &[Variant],
    defines: &[(&'static str, u64)],
) -> Result<Vec<Kernel>, CudaError> {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let load = |variant: &Variant| {
            let variant = *variant;
            scope.spawn(move || {
                let kernel = Kernel::load(gpu, compiler, cache, layout, variant, defines)?;
                let what = format!("{} of {} columns", variant.name(), variant.columns());
                tell(&what, kernel.cached, begun.elapsed(), kernel.resources);
                Ok(kernel)
            })
        };
        let loading: Vec<_> = variants.iter().map(load).collect();
        loading
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn tell(what: &str, cached: bool, took: Duration, resources: Option<Resources>) {
    tracing::info!(
        "{what} {} in {:.2} s: {}",
        if cached { "from the cache" } else { "compiled" },
        took.as_secs_f64(),
        resources.map_or("resources not told".into(), |of| {
            format!("{} registers, {} bytes spilled", of.registers, of.spilled)
        })
    );
}

fn describe(gpu: &Gpu, compiler: &Compiler, layout: &Layout, kernels: &[Kernel], matrix: Option<&Matrix>) -> String {
    let facts = &gpu.facts;
    let resources = kernels.iter().filter_map(|kernel| kernel.resources);
    let resources = resources.chain(matrix.and_then(|matrix| matrix.resources));
    let spilled: u32 = resources.map(|of| of.spilled).sum();
    format!(
        "GPU {}: {}, {} blocks on {} multiprocessors, driver for CUDA {}.{}, NVRTC {}, {spilled} bytes of registers \
         spilled",
        facts.ordinal,
        facts.name,
        layout.blocks(),
        facts.sms,
        facts.driver.0,
        facts.driver.1,
        compiler.version_text(),
    )
}

impl CudaDecoder {
    /// Bytes of weights that stream through this rank in one decode step.
    pub fn stream_bytes(&self) -> u64 {
        self.layout.bytes() as u64
    }

    /// How many of them a phase of the step streams.
    pub fn phase_bytes(&self, phase: StepPhase) -> u64 {
        let product = match phase {
            StepPhase::QueryKeyValue => Product::QueryKeyValue,
            StepPhase::AttentionOut => Product::AttentionOut,
            StepPhase::GateUp => Product::GateUp,
            StepPhase::Down => Product::Down,
            StepPhase::Head => Product::LmHead,
            StepPhase::Embed | StepPhase::Attend | StepPhase::Merge | StepPhase::Choose => return 0,
        };
        let times = if product == Product::LmHead { 1 } else { self.loaded.num_layers };
        (times * self.layout.panel(product).bytes()) as u64
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Decoder for CudaDecoder {
    fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    fn fabric_handle(&self) -> String {
        self.decoder.launcher.ties.as_ref().map_or_else(String::new, |ties| ties.fabric.handle())
    }

    fn join(&mut self, fabric_handles: &[String]) -> Result<(), Fault> {
        match (&mut self.decoder.launcher.ties, fabric_handles) {
            (Some(ties), handles) => ties.fabric.join(handles),
            (None, [alone]) if alone.is_empty() => Ok(()),
            (None, others) => Err(Fault::Join {
                rank: self.decoder.rank,
                problem: format!("{} handles came for a rank that is alone", others.len()),
            }),
        }
    }

    fn run(self: Box<Self>, plans: PlanSource, outcomes: OutcomeSink) -> Result<(), Fault> {
        let rank = self.decoder.rank;
        if let Some(Err(error)) = self.home.as_ref().map(Home::bind) {
            tracing::debug!("rank {rank}: the thread of the decoder is not bound: {error}");
        }
        self.decoder.launcher.enter().map_err(|error| Fault::Cuda { rank, step: 0, error })?;
        self.decoder.run(plans, &outcomes)
    }
}
