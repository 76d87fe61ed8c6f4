//! The sampler on a GPU: how the tokens of each slot are drawn, and launches that draw them.
//!
//! What a sequence asks for is copied to the GPU when it enters its slot, and stays; what it has generated is counted
//! there, for sequences with penalties.

use std::ffi::c_void;

use cudarc::driver::result;

use super::kernel::{STOPPED_BYTES, SamplerKernel};
use super::launch::{LIST_WORDS, MOST_BIASES, MOST_SUPPRESSED, RowLogprobs, RowSampling, SamplerLaunch, WANT_LOGPROBS};
use crate::batch::Slot;
use crate::cuda::device::gpu::Stream;
use crate::cuda::device::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::error::{CudaError, checked};
use crate::cuda::kernels::launch::Row;
use crate::cuda::kernels::sizes::Sizes;
use crate::plan::PAGE_POSITIONS;
use crate::sampling::Allowed;

/// Threads of a block that counts tokens.
const COUNT_THREADS: u32 = 256;

/// The kernels with their memory.
#[derive(Debug)]
pub struct Sampler {
    kernel: SamplerKernel,
    words: DeviceBuffer,
    processed: DeviceBuffer,
    counts: DeviceBuffer,
    sampling: DeviceBuffer,
    lists: DeviceBuffer,
    /// Whether the chain has ended; behind it a word that stays 0.
    stopped: DeviceBuffer,
    host_sampling: PinnedBuffer<RowSampling>,
    host_lists: PinnedBuffer<u32>,
    /// What rows under way may draw: of each launch which mask a row has, and the masks.
    masks: DeviceBuffer,
    host_masks: PinnedBuffer<u32>,
    masks_used: usize,
    /// Tokens to be counted: read by the GPU, and written anew only when it has.
    host_tokens: PinnedBuffer<u32>,
    tokens_used: usize,
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
            stopped: DeviceBuffer::zeroed(&gpu, STOPPED_BYTES)?,
            host_sampling,
            host_lists: PinnedBuffer::zeroed(&gpu, slots * LIST_WORDS)?,
            masks: DeviceBuffer::zeroed(&gpu, kernel.masks_words(slots, sizes.max_batch_tokens) * size_of::<u32>())?,
            host_masks: PinnedBuffer::zeroed(&gpu, kernel.masks_words(slots, sizes.max_batch_tokens))?,
            masks_used: 0,
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
        // Rows of the prompt and of the output get as many; each tells those that are wanted.
        let logprobs = sequence.logprobs().max(sequence.prompt_logprobs());
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
            flags: if logprobs.is_some() { WANT_LOGPROBS } else { 0 },
            top_logprobs: logprobs.unwrap_or(0),
            bias_count: biases as u32,
            suppress_count: suppressed.len() as u32,
            suppress_until: u32::try_from(sequence.prompt().len() + sequence.min_tokens()).unwrap_or(u32::MAX),
            bias: list(first_bias),
            suppress: list(first_suppressed),
        };
        // SAFETY: what is copied is written again only for a slot that was released meanwhile, which takes a plan after
        // a step of this one, and so a wait for the stream; or before a copy behind this one, of what then is right.
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
        if !params.has_penalties() {
            return Ok(());
        }
        let bytes = self.kernel.counts_bytes();
        self.counts.fill_async(slot * bytes, bytes, 0, stream)?;
        self.count(slot, sequence.tokens(), sequence.prompt().len(), stream)
    }

    /// Counts tokens of a sequence, the first `prompt` of which are its prompt.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn count(&mut self, slot: usize, tokens: &[u32], prompt: usize, stream: &Stream) -> Result<(), CudaError> {
        if self.tokens_used + tokens.len() > self.host_tokens.len() {
            // Counting is behind admissions and other counting at most: no chain is under way.
            stream.wait()?;
            self.tokens_used = 0;
        }
        let first = self.tokens_used;
        self.tokens_used += tokens.len();
        self.host_tokens[first..self.tokens_used].copy_from_slice(tokens);
        let bytes = self.kernel.counts_bytes();
        let mut counts = self.counts.address() + (slot * bytes) as u64;
        let mut from = self.host_tokens.device_address()? + (first * size_of::<u32>()) as u64;
        let (mut prompt, mut count) = (prompt as u32, tokens.len() as u32);
        let mut parameters = [
            (&raw mut counts).cast::<c_void>(),
            (&raw mut from).cast(),
            (&raw mut prompt).cast(),
            (&raw mut count).cast(),
        ];
        let blocks = count.div_ceil(COUNT_THREADS).clamp(1, self.kernel.blocks);
        // SAFETY: the parameters have the kernel's types; the slot's counts and the tokens are where they say, and
        // tokens are written again only after the stream was waited for.
        let launched = unsafe {
            let (grid, block) = ((blocks, 1, 1), (COUNT_THREADS, 1, 1));
            result::launch_kernel(self.kernel.count, grid, block, 0, stream.raw, &mut parameters)
        };
        checked("cuLaunchKernel", launched)
    }

    /// No launch is under way: masks that launches were given are of no use any more.
    pub fn forget_masks(&mut self) {
        self.masks_used = 0;
    }

    /// Copies what rows of a launch are allowed behind what is in the stream: the launch with it. All rows of launches
    /// under way that sample are at most as many as slots.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn with_masks(
        &mut self,
        launch: SamplerLaunch,
        allowed: &[(usize, Allowed<'_>)],
        stream: &Stream,
    ) -> Result<SamplerLaunch, CudaError> {
        let (first, rows, words) = (self.masks_used, launch.row_count as usize, self.kernel.mask_words());
        let end = first + rows + allowed.len() * words;
        let (mask_of, of_rows) = self.host_masks[first..end].split_at_mut(rows);
        mask_of.fill(0);
        for (number, (&(row, allowed), to)) in (1..).zip(allowed.iter().zip(of_rows.chunks_exact_mut(words))) {
            mask_of[row] = number;
            match allowed {
                Allowed::These(mask) => to.copy_from_slice(mask),
                Allowed::Only(token) => {
                    to.fill(0);
                    to[token as usize / 32] = 1 << (token % 32);
                }
                Allowed::All | Allowed::Late | Allowed::Nothing => to.fill(u32::MAX),
            }
        }
        self.masks_used = end;
        let address = |word: usize| self.masks.address() + (word * size_of::<u32>()) as u64;
        // SAFETY: these words are written again only once no launch is under way.
        unsafe { self.masks.write_async(first * size_of::<u32>(), &self.host_masks[first..end], stream)? };
        Ok(SamplerLaunch { mask_of: address(first), masks: address(first + rows), ..launch })
    }

    /// Puts launches into the stream, behind that of the decoder whose rows they draw for: one for as many rows as the
    /// kernel takes. Fills in where its own memory is.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What the public fields of `launch` point to is as they say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, launch: SamplerLaunch, stream: &Stream) -> Result<(), CudaError> {
        let all = u64::from(launch.row_count);
        for first in (0..all).step_by(self.kernel.rows) {
            let rows = (all - first).min(self.kernel.rows as u64);
            let part = SamplerLaunch {
                logits: launch.logits + first * (self.kernel.padded_vocab * size_of::<f32>()) as u64,
                rows: launch.rows + first * size_of::<Row>() as u64,
                tokens: launch.tokens + first * size_of::<u64>() as u64,
                logprobs: launch.logprobs + first * size_of::<RowLogprobs>() as u64,
                // The step's last launch ends the chain: those behind one that does would do nothing.
                stop: if first + rows == all { launch.stop } else { self.stopped.address() + 4 },
                mask_of: if launch.mask_of == 0 { 0 } else { launch.mask_of + first * size_of::<u32>() as u64 },
                row_count: rows as u32,
                rows_before: first as u32,
                ..launch
            };
            // SAFETY: as the caller vouches; a part's rows are among those of the whole.
            unsafe { self.launch_part(part, stream)? };
        }
        Ok(())
    }

    /// Puts a launch of as many rows as the kernel takes into the stream.
    ///
    /// # Safety
    /// As [`Self::launch`].
    #[allow(unsafe_code)]
    unsafe fn launch_part(&self, launch: SamplerLaunch, stream: &Stream) -> Result<(), CudaError> {
        let mut launch = SamplerLaunch {
            processed: self.processed.address(),
            counts: self.counts.address(),
            words: self.words.address(),
            sampling: self.sampling.address(),
            stopped: self.stopped.address(),
            ..launch
        };
        let mut parameters = [(&raw mut launch).cast::<c_void>()];
        // SAFETY: the kernel takes one parameter, a `SamplerLaunch`, which the call copies; the caller vouches for what
        // it points to.
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
