//! The sampler on a GPU, the host's side of `kernels/sampler.cu`: how the tokens of each slot are drawn, and launches that
//! draw them.
//!
//! What a sequence asks for is copied to the GPU when it enters its slot, and stays; what it has generated is counted there,
//! for sequences with penalties. The structs are those of `kernels/layout/sampler.cuh`.

use std::ffi::c_void;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::result;
use cudarc::driver::sys;

use super::cache::Cache;
use super::compile::{Compiler, Program, Resources};
use super::device::{Gpu, Stream};
use super::error::{CudaError, checked};
use super::kernel::Module;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::pools::Sizes;
use crate::batch::Slot;
use crate::plan::{PAGE_POSITIONS, ROW_TILE};
use crate::sampling::{MAX_TOP_LOGPROBS, Sampled};

/// Rows of a launch at most.
pub const MOST_ROWS: usize = 64;
/// Entries of a sequence's logit bias at most: as many as the server takes.
const MOST_BIASES: usize = 1024;
/// Stop tokens at most of a sequence that must not draw them at first.
const MOST_SUPPRESSED: usize = 256;
/// Words of a slot's lists: pairs of token and bias, then suppressed tokens.
const LIST_WORDS: usize = 2 * MOST_BIASES + MOST_SUPPRESSED;
/// [`RowSampling::flags`]: log-probabilities are wanted.
const WANT_LOGPROBS: u32 = 1;
/// Threads of a block. Fewer take as long for a row and longer for eight; with 1024 registers are spilled.
const THREADS: u32 = 512;
/// Threads of a block that counts tokens.
const COUNT_THREADS: u32 = 256;
/// Name of the kernel.
const NAME: &str = "sampler";
/// The kernels' source, with what it includes.
pub const SOURCE: &str = include_str!("../../kernels/sampler.cu");
/// The source's includes, by the names it has for them.
pub const HEADERS: [(&str, &str); 11] = [
    ("ptx/ptx.cuh", include_str!("../../kernels/ptx/ptx.cuh")),
    ("layout/launch.cuh", include_str!("../../kernels/layout/launch.cuh")),
    ("layout/sampler.cuh", include_str!("../../kernels/layout/sampler.cuh")),
    ("sync/wait.cuh", include_str!("../../kernels/sync/wait.cuh")),
    ("ops/lanes.cuh", include_str!("../../kernels/ops/lanes.cuh")),
    ("ops/exact_math.cuh", include_str!("../../kernels/ops/exact_math.cuh")),
    ("ops/noise.cuh", include_str!("../../kernels/ops/noise.cuh")),
    ("ops/sampling_state.cuh", include_str!("../../kernels/ops/sampling_state.cuh")),
    ("ops/sampling_scan.cuh", include_str!("../../kernels/ops/sampling_scan.cuh")),
    ("ops/sampling_conclude.cuh", include_str!("../../kernels/ops/sampling_conclude.cuh")),
    ("ops/sampling.cuh", include_str!("../../kernels/ops/sampling.cuh")),
];

/// How the tokens of a slot are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
struct RowSampling {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
    seed: [u32; 2],
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    flags: u32,
    top_logprobs: u32,
    bias_count: u32,
    suppress_count: u32,
    /// Tokens are suppressed while the new one's position is below this.
    suppress_until: u32,
    bias: u64,
    suppress: u64,
}

/// A token and its log-probability.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
struct Likely {
    token: u32,
    logprob: f32,
}

/// Log-probabilities of a drawn token.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RowLogprobs {
    logprob: f32,
    count: u32,
    top: [Likely; MAX_TOP_LOGPROBS],
}

/// The kernel's parameter. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct SamplerLaunch {
    /// `[rows][vocabulary padded to tiles]` f32
    pub logits: u64,
    /// This and the three after it are the sampler's own.
    pub processed: u64,
    /// `[slots][padded vocabulary]` u32
    pub counts: u64,
    /// Words of the exchanges.
    pub words: u64,
    /// `[slots]` of parameters.
    pub sampling: u64,
    /// `[row_count]` [`Row`](super::launch::Row): those of the next step come to stand there.
    pub rows: u64,
    /// u32 of the sampler: not 0 once the launches of the chain are to do nothing.
    pub stopped: u64,
    /// Mapped: `[row_count]` of tag << 32 | token.
    pub tokens: u64,
    /// Mapped: `[row_count]` [`RowLogprobs`].
    pub logprobs: u64,
    /// Mapped: as [`Launch::control`](super::launch::Launch::control), of a chain.
    pub control: u64,
    /// u32: not 0 ends the chain: the first word of `control`, or of several ranks what the decoder found all their hosts to want.
    pub stop: u64,
    /// Mapped: why a wait failed.
    pub report: u64,
    /// Rows.
    pub row_count: u32,
    /// Of the token words.
    pub tag: u32,
    /// Step of the chain.
    pub step: u32,
    /// 0
    pub reserved: u32,
}

/// The kernels, compiled for a vocabulary.
#[derive(Debug)]
pub struct SamplerKernel {
    /// What the compiler said it takes.
    pub resources: Option<Resources>,
    /// Whether its binary came from the cache.
    pub cached: bool,
    sample: sys::CUfunction,
    count: sys::CUfunction,
    threads: u32,
    blocks: u32,
    words_bytes: u64,
    padded_vocab: usize,
    rows: usize,
    module: Module,
}

/// The kernels with their memory.
#[derive(Debug)]
pub struct Sampler {
    kernel: SamplerKernel,
    words: DeviceBuffer,
    processed: DeviceBuffer,
    counts: DeviceBuffer,
    sampling: DeviceBuffer,
    lists: DeviceBuffer,
    stopped: DeviceBuffer,
    host_sampling: PinnedBuffer<RowSampling>,
    host_lists: PinnedBuffer<u32>,
    /// Tokens to be counted: read by the GPU, and written anew only when it has.
    host_tokens: PinnedBuffer<u32>,
    tokens_used: usize,
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

impl RowLogprobs {
    /// With the token that they are of.
    pub fn of(&self, token: u32) -> Sampled {
        let top = self.top[..(self.count as usize).min(MAX_TOP_LOGPROBS)].iter();
        Sampled { token, logprob: Some(self.logprob), top: top.map(|of| (of.token, of.logprob)).collect() }
    }
}

impl SamplerKernel {
    /// Compiles (or finds) the kernels for launches of up to `columns` rows, a block on every multiprocessor.
    ///
    /// # Errors
    /// They do not compile, or do not fit the GPU.
    pub fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        vocab_size: usize,
        columns: usize,
    ) -> Result<Self, CudaError> {
        let (blocks, rows) = (gpu.facts.sms, columns.min(MOST_ROWS));
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
            padded_vocab: vocab_size.next_multiple_of(ROW_TILE),
            rows,
            module,
        })
    }

    /// Bytes of memory that [`Sampler::new`] takes.
    pub fn bytes(&self, slots: usize) -> u64 {
        self.words_bytes + (self.processed_bytes() + slots * self.slot_bytes() + size_of::<u32>()) as u64
    }

    fn processed_bytes(&self) -> usize {
        self.rows * self.padded_vocab * size_of::<f32>()
    }

    fn counts_bytes(&self) -> usize {
        self.padded_vocab * size_of::<u32>()
    }

    fn slot_bytes(&self) -> usize {
        self.counts_bytes() + size_of::<RowSampling>() + LIST_WORDS * size_of::<u32>()
    }
}

impl Sampler {
    /// Takes the memory.
    ///
    /// # Errors
    /// There is not so much.
    pub fn new(kernel: SamplerKernel, sizes: &Sizes) -> Result<Self, CudaError> {
        let (gpu, slots) = (kernel.module.gpu().clone(), sizes.max_slots);
        assert_eq!(kernel.padded_vocab, sizes.kernel_vocab, "both kernels pad the vocabulary to tiles of the LM head");
        let mut host_sampling: PinnedBuffer<RowSampling> = PinnedBuffer::zeroed(&gpu, slots)?;
        host_sampling.fill(RowSampling { top_p: 1.0, repetition_penalty: 1.0, ..RowSampling::default() });
        Ok(Self {
            words: DeviceBuffer::zeroed(&gpu, kernel.words_bytes as usize)?,
            processed: DeviceBuffer::uninitialised(&gpu, kernel.processed_bytes())?,
            counts: DeviceBuffer::zeroed(&gpu, slots * kernel.counts_bytes())?,
            sampling: DeviceBuffer::of(&gpu, &host_sampling)?,
            lists: DeviceBuffer::zeroed(&gpu, slots * LIST_WORDS * size_of::<u32>())?,
            stopped: DeviceBuffer::zeroed(&gpu, size_of::<u32>())?,
            host_sampling,
            host_lists: PinnedBuffer::zeroed(&gpu, slots * LIST_WORDS)?,
            host_tokens: PinnedBuffer::zeroed(&gpu, sizes.slot_pages * PAGE_POSITIONS)?,
            tokens_used: 0,
            kernel,
        })
    }

    /// Address of the word that ends a chain.
    pub fn stopped_address(&self) -> u64 {
        self.stopped.address()
    }

    /// Whether what a sequence asks for has its place; says what has none.
    ///
    /// # Errors
    /// A list is too long.
    pub fn check(sequence: &Slot) -> Result<(), String> {
        let biases = sequence.sampling().logit_bias.len();
        if biases > MOST_BIASES {
            return Err(format!("{biases} entries of logit_bias are more than {MOST_BIASES}"));
        }
        let suppressed = suppressed(sequence).len();
        if suppressed > MOST_SUPPRESSED {
            return Err(format!("{suppressed} stop tokens beside min_tokens are more than {MOST_SUPPRESSED}"));
        }
        Ok(())
    }

    /// A sequence, which [`Self::check`] has seen, has entered `slot`: launches behind this draw as it asks.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn admit(&mut self, slot: u32, sequence: &Slot, stream: &Stream) -> Result<(), CudaError> {
        let (params, slot) = (sequence.sampling(), slot as usize);
        let (first_bias, first_suppressed) = (slot * LIST_WORDS, slot * LIST_WORDS + 2 * MOST_BIASES);
        let (biases, suppressed) = (params.logit_bias.len(), suppressed(sequence));
        let bias_words = params.logit_bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]);
        self.host_lists[first_bias..].iter_mut().zip(bias_words).for_each(|(to, word)| *to = word);
        self.host_lists[first_suppressed..][..suppressed.len()].copy_from_slice(suppressed);
        let list = |first: usize| self.lists.address() + (first * size_of::<u32>()) as u64;
        self.host_sampling[slot] = RowSampling {
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            top_k: params.top_k,
            seed: [params.seed as u32, (params.seed >> 32) as u32],
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            flags: if sequence.logprobs().is_some() { WANT_LOGPROBS } else { 0 },
            top_logprobs: sequence.logprobs().unwrap_or(0),
            bias_count: biases as u32,
            suppress_count: suppressed.len() as u32,
            suppress_until: u32::try_from(sequence.prompt().len() + sequence.min_tokens()).unwrap_or(u32::MAX),
            bias: list(first_bias),
            suppress: list(first_suppressed),
        };
        // SAFETY: what is copied is written again only for a slot that was released meanwhile, which takes a plan after a
        // step of this one, and so a wait for the stream; or before a copy behind this one, of what then is right.
        unsafe {
            let (at, of) = (slot * size_of::<RowSampling>(), &self.host_sampling[slot..=slot]);
            self.sampling.write_async(at, of, stream)?;
            for (first, len) in [(first_bias, 2 * biases), (first_suppressed, suppressed.len())] {
                if len > 0 {
                    let words = &self.host_lists[first..first + len];
                    self.lists.write_async(first * size_of::<u32>(), words, stream)?;
                }
            }
        }
        match (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0) {
            true => Ok(()),
            false => self.count(slot, sequence, stream),
        }
    }

    /// Counts the tokens that a sequence brings along.
    #[allow(unsafe_code)]
    fn count(&mut self, slot: usize, sequence: &Slot, stream: &Stream) -> Result<(), CudaError> {
        let tokens = sequence.tokens();
        if self.tokens_used + tokens.len() > self.host_tokens.len() {
            // Counting is behind other admissions at most: no chain is under way.
            stream.wait()?;
            self.tokens_used = 0;
        }
        let first = self.tokens_used;
        self.tokens_used += tokens.len();
        self.host_tokens[first..self.tokens_used].copy_from_slice(tokens);
        let bytes = self.kernel.counts_bytes();
        self.counts.fill_async(slot * bytes, bytes, 0, stream)?;
        let mut counts = self.counts.address() + (slot * bytes) as u64;
        let mut from = self.host_tokens.device_address()? + (first * size_of::<u32>()) as u64;
        let (mut prompt, mut count) = (sequence.prompt().len() as u32, tokens.len() as u32);
        let mut parameters = [
            (&raw mut counts).cast::<c_void>(),
            (&raw mut from).cast(),
            (&raw mut prompt).cast(),
            (&raw mut count).cast(),
        ];
        let blocks = count.div_ceil(COUNT_THREADS).clamp(1, self.kernel.blocks);
        // SAFETY: the parameters have the kernel's types; the slot's counts and the tokens are where they say, and tokens are
        // written again only after the stream was waited for.
        let launched = unsafe {
            let (grid, block) = ((blocks, 1, 1), (COUNT_THREADS, 1, 1));
            result::launch_kernel(self.kernel.count, grid, block, 0, stream.raw, &mut parameters)
        };
        checked("cuLaunchKernel", launched)
    }

    /// Puts a launch into the stream, behind that of the decoder whose rows it draws for; fills in where its own memory is.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What the public fields of `launch` point to is as they say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, launch: SamplerLaunch, stream: &Stream) -> Result<(), CudaError> {
        assert!(
            launch.row_count as usize <= self.kernel.rows,
            "{} rows for a sampler of {}",
            launch.row_count,
            self.kernel.rows
        );
        let mut launch = SamplerLaunch {
            processed: self.processed.address(),
            counts: self.counts.address(),
            words: self.words.address(),
            sampling: self.sampling.address(),
            stopped: self.stopped.address(),
            ..launch
        };
        let mut parameters = [(&raw mut launch).cast::<c_void>()];
        // SAFETY: the kernel takes one parameter, a `SamplerLaunch`, which the call copies; the caller vouches for what it
        // points to.
        let launched = unsafe {
            let (grid, block) = ((self.kernel.blocks, 1, 1), (self.kernel.threads, 1, 1));
            result::launch_cooperative_kernel(self.kernel.sample, grid, block, 0, stream.raw, &mut parameters)
        };
        checked("cuLaunchCooperativeKernel", launched)
    }
}

/// Stop tokens, if there is a time when they must not be drawn.
fn suppressed(sequence: &Slot) -> &[u32] {
    if sequence.min_tokens() > 0 { sequence.stop_tokens() } else { &[] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_are_as_long_as_the_kernels() {
        let sizes = (size_of::<RowSampling>(), size_of::<RowLogprobs>(), size_of::<SamplerLaunch>());
        assert_eq!(sizes, (72, 168, 112));
    }

    #[test]
    fn log_probabilities_become_what_the_cpu_sampler_gives() {
        let mut of = RowLogprobs { logprob: -1.5, count: 2, ..RowLogprobs::default() };
        of.top[..3].copy_from_slice(&[1, 2, 3].map(|token| Likely { token, logprob: -(token as f32) }));
        assert_eq!(of.of(9), Sampled { token: 9, logprob: Some(-1.5), top: vec![(1, -1.0), (2, -2.0)] });
    }
}
