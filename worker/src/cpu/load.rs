//! From a load request to a rank that is ready to run.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};

use super::budget::{self, Needs};
use super::expansions::Expansions;
use super::fabric::{Fabric, Shape};
use super::kernels::attention::MAX_HEAD_DIM;
use super::kernels::isa::Isa;
use super::looped_decoder::{AGREEMENT_WORDS, LoopedDecoder};
use super::memory::OutOfMemory;
use super::phases::{Activations, Shard};
use super::read_bandwidth;
use super::team::{Placement, Team, TeamError};
use super::weights::Weights;
use crate::batch::{Batch, Drafting, Limits};
use crate::decoder::{Decoder, Fault, LoadError, LoadRequest, Loaded, OutcomeSink, Phase, PlanSource, Progress};
use crate::grammar::Grammars;
use crate::model::conversion::{computed, converter, weights_note};
use crate::model::source::{RandomSource, Source};
use crate::model::{Checkpoint, ModelConfig};
use crate::plan::stream::{LAYER_PRODUCTS, embedding_bytes, packed_bytes};
use crate::plan::{KvLayout, ModelPlan, PAGE_POSITIONS, RankPlan};
use crate::rope::Rope;
use crate::sampling::{Sampler, SamplerShape};

/// How often a load tells its progress. Tests are told everything.
const PROGRESS_INTERVAL: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(100) };

/// What a load request leaves open.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Instruction set; `None`: the best one, or what [`super::ISA_VARIABLE`] names.
    pub isa: Option<Isa>,
    /// Leave threads where the kernel puts them, even if there is a core for each.
    pub unpinned: bool,
    /// Weights of this shape and seed in place of a checkpoint's; `model_dir` is not looked at.
    pub random: Option<RandomSource>,
}

/// A loaded rank on a CPU socket.
pub struct CpuDecoder {
    pub(super) decoder: LoopedDecoder,
    loaded: Loaded,
}

/// Set to `0`: threads stay unpinned even where there is a core for each, for several servers on one machine.
pub const PIN_VARIABLE: &str = "LOOPLANE_CPU_PIN";

/// Loads a rank from a checkpoint, on the instruction set and cores that the machine and the environment
/// ([`super::ISA_VARIABLE`], [`PIN_VARIABLE`]) say.
///
/// # Errors
/// The model is refused, or does not fit.
pub fn load(request: &LoadRequest, progress: &mut dyn FnMut(Progress)) -> Result<CpuDecoder, LoadError> {
    let unpinned = std::env::var(PIN_VARIABLE).is_ok_and(|value| value == "0");
    load_with(request, &Options { unpinned, ..Options::default() }, progress)
}

/// Loads a rank, with options.
///
/// # Errors
/// The model is refused, or does not fit.
pub fn load_with(
    request: &LoadRequest,
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<CpuDecoder, LoadError> {
    let mut tell = |phase, bytes_done, bytes_total| progress(Progress { phase, bytes_done, bytes_total });
    tell(Phase::ReadingConfig, 0, 0);
    let isa = match options.isa {
        Some(isa) => isa.checked(),
        None => Isa::choose(),
    };
    let isa = isa.map_err(|error| LoadError::Request(error.to_string()))?;
    let (stored, checkpoint, model_digest) = match &options.random {
        Some(random) => (random.config.clone(), None, format!("random-{}", random.seed)),
        None => {
            let (config, text) = ModelConfig::with_text(&request.model_dir)?;
            let checkpoint = Checkpoint::open_as_found(&request.model_dir, &config)?;
            let digest = checkpoint.digest(&text);
            (checkpoint.config().clone(), Some(checkpoint), digest)
        }
    };
    let config = computed(&stored, request.quantization, takes);
    if config.head_dim > MAX_HEAD_DIM {
        let refusal = format!(
            "config.json: head_dim {} is over {MAX_HEAD_DIM}, the most the CPU decoder computes",
            config.head_dim
        );
        return Err(LoadError::Request(refusal));
    }
    let max_context = config.context(request.max_context)?;
    let plan = ModelPlan::new(&config, request.tensor_parallel)?;
    if request.rank >= plan.tensor_parallel || request.max_slots == 0 || request.max_batch_tokens < request.max_slots {
        return Err(LoadError::Request(format!(
            "rank {} of {}, {} slots and {} batch tokens do not fit together",
            request.rank, plan.tensor_parallel, request.max_slots, request.max_batch_tokens
        )));
    }
    let rank = plan.rank(request.rank);
    let kv = kv_layout(&plan, &rank, request, max_context)?;
    let shape = SamplerShape {
        vocab_size: config.vocab_size,
        padded_vocab: plan.padded_vocab,
        tensor_parallel: plan.tensor_parallel,
        rank: rank.rank,
        max_rows: request.max_slots,
    };
    let sampler = Sampler::new(shape);
    let bit_domain = plan.bit_domain("cpu", isa.name(), &super::kernels::domain::arithmetic(isa));
    let fabric_shape = Shape {
        ranks: plan.tensor_parallel,
        width: config.hidden_size,
        max_rows: request.max_batch_tokens,
        max_words: sampler.max_words() + AGREEMENT_WORDS,
        domain: domain_word(&bit_domain),
    };
    let pages = KvLayout::pages_for(max_context).min(kv.pages);
    let needs = Needs {
        weights: (packed_bytes(&plan, &rank) + embedding_bytes(&plan, &rank)) as u64,
        kv: (kv.pages as u64).saturating_mul(kv.page_bytes() as u64),
        activations: Activations::bytes(&plan, &rank, request.max_batch_tokens, request.max_slots)
            + Expansions::bytes(&plan, &rank, request.threads)
            + (request.max_slots * pages * (PAGE_POSITIONS + 1) * 4) as u64
            + Sampler::bytes(&shape) as u64,
        exchange: fabric_shape.bytes() as u64,
    };
    needs.check(plan.tensor_parallel, budget::available())?;
    let (placement, crowded, placed) =
        placement(request.socket(), request.all_sockets(), request.threads, options.unpinned);
    let mut team = Team::new(request.threads, placement, crowded).map_err(|error| match error {
        TeamError::Size(_) => LoadError::Request(error.to_string()),
        TeamError::Spawn { source, .. } => LoadError::System { what: "a compute thread", source },
    })?;

    let mut notes = checkpoint.as_ref().map(Checkpoint::notes).unwrap_or_default();
    let mut read_limit = None;
    if request.measure_read_limit {
        tell(Phase::MeasuringReads, 0, 0);
        match measure_reads(&mut team, isa, request.all_sockets()) {
            Ok(limit) => read_limit = Some(limit),
            Err(why) => notes.push(format!("how fast memory can be read is not known: {why}")),
        }
    }
    notes.push(format!("{isa}, {} threads, {placed}", request.threads));
    let total = needs.weights;
    let mut told = Instant::now();
    let source: &dyn Source = match (&checkpoint, &options.random) {
        (Some(checkpoint), _) => checkpoint,
        (None, Some(random)) => random,
        (None, None) => unreachable!("without random weights there is a checkpoint"),
    };
    let converter = converter(source, stored.layer_weights, &config);
    let source = converter.as_deref().unwrap_or(source);
    let weights = Weights::load(source, &plan, &rank, &team, &mut |bytes| {
        if told.elapsed() >= PROGRESS_INTERVAL {
            told = Instant::now();
            tell(Phase::PackingWeights, bytes, total);
        }
    })?;
    checkpoint.as_ref().map_or(Ok(()), Checkpoint::check_finite)?;
    tell(Phase::PackingWeights, total, total);
    notes.push(weights_note(stored.layer_weights, config.layer_weights, weights.stream_bytes()));

    tell(Phase::Allocating, 0, 0);
    let fabric = Fabric::new(fabric_shape, rank.rank, request.wait_limit, crowded)
        .map_err(|error| LoadError::System { what: "exchange memory", source: std::io::Error::other(error) })?;
    let loaded = Loaded {
        architecture: config.architecture.name().to_owned(),
        vocab_size: config.vocab_size,
        max_context,
        num_layers: config.num_layers,
        hidden_size: config.hidden_size,
        kv_pages: kv.pages,
        weight_bytes: weights.bytes(),
        stream_bytes: weights.stream_bytes(),
        head_bytes: weights.head_bytes(),
        read_limit,
        kv_bytes: (kv.pages * kv.page_bytes()) as u64,
        bit_domain,
        notes,
        model_digest,
        max_slots: request.max_slots,
        max_batch_tokens: request.max_batch_tokens,
    };
    let shard = Shard { isa, rope: Rope::new(&config), plan, rank, weights, kv };
    let x = Activations::new(&shard, request.max_batch_tokens, request.max_slots, request.threads)?;
    let batch = Batch::new(Limits {
        max_slots: request.max_slots,
        max_batch_tokens: request.max_batch_tokens,
        kv_pages: kv.pages,
        max_context,
        vocab_size: config.vocab_size,
        drafting: Drafting { whole_sizes: false, extra_us: 0 },
        draft_corpus_tokens: request.draft_corpus_tokens,
        window: config.sliding_window,
    });
    let decoder = LoopedDecoder {
        message: Vec::with_capacity(fabric_shape.max_words),
        shard,
        team,
        fabric,
        x,
        batch,
        sampler,
        grammars: Grammars::new(
            request.vocabulary.clone(),
            loaded.vocab_size,
            request.max_slots,
            request.tensor_parallel,
        ),
        steps: 0,
        #[cfg(test)]
        tap: None,
    };
    Ok(CpuDecoder { decoder, loaded })
}

impl CpuDecoder {
    /// Bytes of weights that stream through this rank in one decode step.
    pub fn stream_bytes(&self) -> u64 {
        self.decoder.shard.weights.stream_bytes()
    }
}

impl Decoder for CpuDecoder {
    fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    fn fabric_handle(&self) -> String {
        self.decoder.fabric.handle().to_owned()
    }

    fn join(&mut self, fabric_handles: &[String]) -> Result<(), Fault> {
        self.decoder.fabric.join(fabric_handles)
    }

    fn run(self: Box<Self>, plans: PlanSource, outcomes: OutcomeSink) -> Result<(), Fault> {
        self.decoder.run(plans, &outcomes)
    }
}

/// Bytes a second, while as many sockets measure as there are. Nothing is taken that a load might miss.
fn measure_reads(team: &mut Team, isa: Isa, sockets: usize) -> Result<u64, String> {
    let bytes = (read_bandwidth::limit_bytes(team.threads()) * sockets) as u64;
    if let Some(free) = budget::available().filter(|free| *free < 2 * bytes) {
        return Err(format!("to measure it takes {bytes} bytes, twice that were to be free, and {free} are"));
    }
    read_bandwidth::limit(team, isa).map_err(|error| error.to_string())
}

impl From<OutOfMemory> for LoadError {
    fn from(error: OutOfMemory) -> Self {
        LoadError::TooLarge {
            what: error.what,
            needed: error.bytes as u64,
            available: format!("the system refuses them ({})", error.source),
        }
    }
}

/// Whether there are kernels for the format of a model's weights: leaves must begin where runs of a group can.
fn takes(config: &ModelConfig) -> bool {
    let Ok(plan) = ModelPlan::new(config, 1) else { return true };
    LAYER_PRODUCTS.into_iter().all(|product| product.runs(&plan, &plan.rank(0)).is_some())
}

/// KV pages as asked for, or as many as the slots need within the byte limit.
fn kv_layout(
    plan: &ModelPlan,
    rank: &RankPlan,
    request: &LoadRequest,
    max_context: usize,
) -> Result<KvLayout, LoadError> {
    let page_bytes = KvLayout::new(plan, rank, 1).page_bytes() as u64;
    let needed = KvLayout::pages_for(max_context).saturating_mul(request.max_slots);
    let pages = match request.kv_pages {
        0 => needed.min(usize::try_from(request.kv_bytes_limit / page_bytes).unwrap_or(usize::MAX)),
        pages => pages,
    };
    if pages == 0 {
        let available = format!("the limit of the KV cache is {} bytes", request.kv_bytes_limit);
        return Err(LoadError::TooLarge { what: "KV pages", needed: page_bytes, available });
    }
    if u32::try_from(pages).is_err() {
        return Err(LoadError::Request(format!("{pages} KV pages are more than page numbers can name")));
    }
    Ok(KvLayout::new(plan, rank, pages))
}

/// Where the team of a rank with `threads` threads runs, and whether it is crowded: a core for each thread of the
/// server's ranks on this machine, of which every socket has as many, if there are so many.
pub(super) fn placement(socket: usize, sockets: usize, threads: usize, unpinned: bool) -> (Placement, bool, String) {
    let all = sockets * threads;
    let cores: Vec<usize> = match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect(),
        Err(_) => Vec::new(),
    };
    // A quota of a control group grants less time than the cores that it may run on would have.
    let quota = std::thread::available_parallelism().map_or(cores.len(), usize::from);
    let granted = cores.len().min(quota);
    let crowded = granted < all;
    if crowded {
        let placed = format!("not pinned: {granted} cores for the server's {all} threads");
        return (Placement::Floating, true, placed);
    }
    if unpinned {
        return (Placement::Floating, false, "not pinned: asked not to".to_owned());
    }
    let own = cores[socket * threads..][..threads].to_vec();
    // Nobody else is asked: a second server on this machine would pick the same cores.
    let placed = format!("pinned to cores {own:?} ({PIN_VARIABLE}=0 where another server runs on this machine)");
    (Placement::Pinned(own), false, placed)
}

/// The bit domain in one word, for the header of the exchange memory (FNV-1a).
fn domain_word(domain: &str) -> u32 {
    domain.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::format::INT4;

    fn request() -> LoadRequest {
        LoadRequest {
            model_dir: "random".into(),
            rank: 0,
            tensor_parallel: 2,
            threads: 1,
            max_slots: 4,
            max_batch_tokens: 16,
            kv_pages: 0,
            kv_bytes_limit: 1 << 20,
            wait_limit: Duration::from_secs(1),
            max_context: 0,
            device: crate::decoder::Device::Cpu,
            quantization: None,
            unlooped: false,
            measure_read_limit: false,
            draft_corpus_tokens: 0,
            vocabulary: None,
            others: crate::decoder::Sockets::default(),
        }
    }

    fn options() -> Options {
        let config = crate::plan::tests::config(4, 2, 384, 768);
        Options { random: Some(RandomSource { config, seed: 3 }), unpinned: true, ..Options::default() }
    }

    fn refusal(request: &LoadRequest, options: &Options) -> String {
        load_with(request, options, &mut |_| ()).err().expect("a refusal").to_string()
    }

    #[test]
    fn what_was_loaded_is_told() {
        let mut told = Vec::new();
        let decoder = load_with(&request(), &options(), &mut |progress| told.push(progress)).unwrap();
        let loaded = decoder.loaded();
        // 2 layers, 1 KV head of 64, K and V, 64 positions, 4 bytes: 64 KiB a page; 16 of them in the limit.
        assert_eq!((loaded.kv_pages, loaded.kv_bytes), (16, 1 << 20));
        assert_eq!((loaded.vocab_size, loaded.max_context, loaded.num_layers, loaded.hidden_size), (768, 2048, 2, 256));
        let plan = ModelPlan::new(&decoder.decoder.shard.plan.config, 2).unwrap();
        assert_eq!(decoder.stream_bytes(), crate::plan::stream::packed_bytes(&plan, &plan.rank(0)) as u64);
        assert_eq!(loaded.weight_bytes, decoder.stream_bytes() + 384 * 256 * 2);
        assert_eq!(loaded.head_bytes, 384 * 256 * 2);
        assert!(loaded.bit_domain.starts_with("cpu-") && loaded.notes.iter().any(|note| note.contains("not pinned")));
        let mut phases: Vec<_> = told.iter().map(|progress| progress.phase).collect();
        phases.dedup();
        assert_eq!(phases, [Phase::ReadingConfig, Phase::PackingWeights, Phase::Allocating]);
        let packed: Vec<_> = told.iter().filter(|progress| progress.phase == Phase::PackingWeights).collect();
        assert!(packed.iter().all(|progress| progress.bytes_total == loaded.weight_bytes));
        assert!(packed.is_sorted_by_key(|progress| progress.bytes_done));
        assert_eq!(packed.last().unwrap().bytes_done, loaded.weight_bytes);
    }

    #[test]
    fn groups_stay_packed_unless_a_pair_would_lie_in_two() {
        let load = |intermediate, quantization| {
            let config = crate::plan::tests::config(4, 2, intermediate, 768);
            let random = Some(RandomSource { config, seed: 3 });
            let request = LoadRequest { quantization, ..request() };
            load_with(&request, &Options { random, ..options() }, &mut |_| ()).unwrap()
        };
        let [plain, packed, odd] =
            [load(384, None), load(384, Some(INT4)), load(400, Some(INT4))].map(|decoder| decoder.loaded().clone());
        let note = |loaded: &Loaded| loaded.notes.iter().find(|note| note.contains("a pass reads")).unwrap().clone();
        let (layers, of_bf16) = (packed.stream_bytes - packed.head_bytes, plain.stream_bytes - plain.head_bytes);
        // A scale for 24 columns at worst: a leaf of the intermediate size.
        assert!(layers > of_bf16 / 4 && layers < of_bf16 * 3 / 10, "{layers} of {of_bf16}");
        assert!(note(&packed).contains("int4 in groups of 128, quantised at load"), "{}", note(&packed));
        assert!(note(&odd).contains("weights of the layers in bf16"), "{}", note(&odd));
        assert_ne!(packed.bit_domain, plain.bit_domain);
    }

    #[test]
    fn the_bit_domain_names_the_arithmetic_and_not_the_arrangement() {
        let domain = |request: &LoadRequest, isa| {
            let options = Options { isa: Some(isa), ..options() };
            load_with(request, &options, &mut |_| ()).unwrap().loaded().bit_domain.clone()
        };
        let best = Isa::best();
        let of_rank_0 = domain(&request(), best);
        assert_eq!(domain(&LoadRequest { rank: 1, threads: 2, ..request() }, best), of_rank_0);
        assert_eq!(domain(&LoadRequest { tensor_parallel: 1, max_slots: 2, ..request() }, best), of_rank_0);
        if best != Isa::Portable {
            assert_ne!(domain(&request(), Isa::Portable), of_rank_0);
        }
    }

    #[test]
    fn requests_that_cannot_be_met_are_refused_with_their_numbers() {
        let (good, options) = (request(), options());
        let refused = |request: LoadRequest| refusal(&request, &options);
        let told = refused(LoadRequest { rank: 2, ..good.clone() });
        assert!(told.contains("rank 2 of 2"), "{told}");
        let told = refused(LoadRequest { max_batch_tokens: 3, ..good.clone() });
        assert!(told.contains("4 slots and 3 batch tokens"), "{told}");
        let told = refused(LoadRequest { threads: 0, ..good.clone() });
        assert!(told.contains("a worker of 0 threads"), "{told}");
        let told = refused(LoadRequest { kv_bytes_limit: 1000, ..good.clone() });
        assert!(told.contains("KV pages need 65536 bytes, but the limit of the KV cache is 1000 bytes"), "{told}");
        let told = refused(LoadRequest { kv_pages: u32::MAX as usize - 1, ..good.clone() });
        assert!(told.contains("281474976579584 of KV cache") && told.contains("lower --kv-memory-mib"), "{told}");
        let told = refused(LoadRequest { kv_pages: 1 << 40, ..good.clone() });
        assert!(told.contains("more than page numbers can name"), "{told}");
        let told = refused(LoadRequest { tensor_parallel: 3, ..good.clone() });
        assert!(told.contains("tensor parallelism 3"), "{told}");
        let mut wide = options.clone();
        wide.random.as_mut().unwrap().config.head_dim = 512;
        assert!(refusal(&good, &wide).contains("head_dim 512 is over 256"));
    }

    #[test]
    fn a_weight_that_is_not_finite_is_refused_at_load() {
        let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama-tied");
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(fixture.join("config.json"), dir.path().join("config.json")).unwrap();
        let mut bytes = std::fs::read(fixture.join("model.safetensors")).unwrap();
        let request = LoadRequest { model_dir: dir.path().into(), tensor_parallel: 1, ..request() };
        let mut load = |last: [u8; 2]| {
            let end = bytes.len() - 2;
            bytes[end..].copy_from_slice(&last);
            std::fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
            load_with(&request, &Options { unpinned: true, ..Options::default() }, &mut |_| ()).map(drop)
        };
        load([0, 0]).unwrap();
        let error = load(0x7fc0u16.to_le_bytes()).unwrap_err().to_string();
        assert!(error.contains("model.safetensors: tensor ") && error.contains(" is NaN in row "), "{error}");
    }

    #[test]
    fn ranks_of_random_weights_hold_slices_of_the_same_model() {
        let whole = load_with(&LoadRequest { tensor_parallel: 1, ..request() }, &options(), &mut |_| ()).unwrap();
        for rank in 0..2 {
            let part = load_with(&LoadRequest { rank, ..request() }, &options(), &mut |_| ()).unwrap();
            let vocab = part.decoder.shard.rank.vocab.clone();
            let head = |decoder: &CpuDecoder| {
                decoder.decoder.shard.weights.panel(0, crate::plan::Product::LmHead).data().to_vec()
            };
            let row_len = 256 * size_of::<u16>();
            assert_eq!(head(&part), head(&whole)[vocab.start * row_len..vocab.end * row_len]);
            let mut embedded = [[0.0; 256]; 2];
            part.decoder.shard.weights.embed(vocab.start as u32 + 5, 0..256, &mut embedded[0]);
            whole.decoder.shard.weights.embed(vocab.start as u32 + 5, 0..256, &mut embedded[1]);
            assert_eq!(embedded[0], embedded[1]);
        }
    }
}
