//! Memory of the host that a kernel reads and writes while it runs: tokens out, rows and a wish to stop in, and why a
//! wait failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::cuda::device::gpu::Gpu;
use crate::cuda::device::memory::PinnedBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::launch::{REPORT_WORDS, Report, Row};
use crate::cuda::sampler::launch::RowLogprobs;

/// Places of `control`.
const STOP: usize = 0;
const STEPS_RUN: usize = 1;
const FED: usize = 2;

/// What launches under way and the host tell each other. No reference to the memory is ever taken, only atomic
/// accesses, and volatile ones that these order.
#[derive(Debug)]
pub struct Mailbox {
    tokens: PinnedBuffer<u64>,
    /// Of the tokens.
    logprobs: PinnedBuffer<RowLogprobs>,
    control: PinnedBuffer<u32>,
    report: PinnedBuffer<u32>,
    /// Of the steps of a launch that the host feeds.
    rows: PinnedBuffer<Row>,
    /// Addresses of tokens, control, report, log-probabilities and rows on the GPU.
    mapped: [u64; 5],
}

impl Mailbox {
    /// Room for `tokens` tokens, and for `rows` rows of all steps of a launch together.
    ///
    /// # Errors
    /// There is not so much memory that can be locked.
    pub fn new(gpu: &Arc<Gpu>, tokens: usize, rows: usize) -> Result<Self, CudaError> {
        let (tokens, logprobs) = (PinnedBuffer::zeroed(gpu, tokens)?, PinnedBuffer::zeroed(gpu, tokens)?);
        let (control, report) = (PinnedBuffer::zeroed(gpu, 3)?, PinnedBuffer::zeroed(gpu, REPORT_WORDS)?);
        let rows = PinnedBuffer::zeroed(gpu, rows)?;
        let [of_tokens, of_logprobs] = [tokens.device_address()?, logprobs.device_address()?];
        let mapped =
            [of_tokens, control.device_address()?, report.device_address()?, of_logprobs, rows.device_address()?];
        Ok(Self { tokens, logprobs, control, report, rows, mapped })
    }

    /// Address of a token on the GPU.
    pub fn tokens_address(&self, index: usize) -> u64 {
        self.mapped[0] + index as u64 * 8
    }

    /// Address of a token's log-probabilities on the GPU.
    pub fn logprobs_address(&self, index: usize) -> u64 {
        self.mapped[3] + (index * size_of::<RowLogprobs>()) as u64
    }

    /// Address of the control words on the GPU.
    pub fn control_address(&self) -> u64 {
        self.mapped[1]
    }

    /// Address of the report on the GPU.
    pub fn report_address(&self) -> u64 {
        self.mapped[2]
    }

    /// Address on the GPU of the rows that the host gives.
    pub fn rows_address(&self) -> u64 {
        self.mapped[4]
    }

    /// Gives a launch the rows of its step with this tag, from place `first` on.
    #[allow(unsafe_code)]
    pub fn feed(&self, first: usize, rows: &[Row], tag: u32) {
        for (place, row) in rows.iter().enumerate() {
            // SAFETY: the place is in the buffer; the kernel reads it behind the store below.
            unsafe { self.rows.pointer(first + place).write_volatile(*row) };
        }
        // Release: the rows are there.
        store_u32(&self.control, FED, tag);
    }

    /// Before a launch that writes token `index` with `tag`: whatever an earlier one left there is not taken for it.
    pub fn expect(&self, index: usize, tag: u32) {
        store_u64(&self.tokens, index, u64::from(!tag) << 32);
    }

    /// The tag and the token at `index`. Acquire: what the kernel wrote before it is there, too.
    pub fn token(&self, index: usize) -> (u32, u32) {
        let word = load_u64(&self.tokens, index);
        ((word >> 32) as u32, word as u32)
    }

    /// The log-probabilities of the token at `index`, once [`Self::token`] has given it: the kernel wrote them before
    /// it.
    #[allow(unsafe_code)]
    pub fn logprobs(&self, index: usize) -> RowLogprobs {
        // SAFETY: the record is in the buffer; its writer was done before the token, and writes again only after the
        // host has said that it expects another.
        unsafe { self.logprobs.pointer(index).read_volatile() }
    }

    /// Before launches: none is to stop, none has run a step, none was given rows (tags begin at 1).
    pub fn start_over(&self) {
        store_u32(&self.control, FED, 0);
        store_u32(&self.control, STOP, 0);
        store_u32(&self.control, STEPS_RUN, 0);
    }

    /// Asks the launch under way to end soon.
    pub fn stop(&self) {
        store_u32(&self.control, STOP, 1);
    }

    /// Steps that the launch has run, once it has ended; 0 before.
    pub fn steps_run(&self) -> u32 {
        load_u32(&self.control, STEPS_RUN)
    }

    /// Why a wait failed, if one did.
    pub fn report(&self) -> Option<Report> {
        Report::of(&std::array::from_fn(|word| load_u32(&self.report, word)))
    }
}

#[allow(unsafe_code)]
fn load_u64(buffer: &PinnedBuffer<u64>, index: usize) -> u64 {
    // SAFETY: the word is in the buffer, which the driver aligned to a page; the kernel writes it whole.
    unsafe { AtomicU64::from_ptr(buffer.pointer(index)) }.load(Ordering::Acquire)
}

#[allow(unsafe_code)]
fn store_u64(buffer: &PinnedBuffer<u64>, index: usize, value: u64) {
    // SAFETY: as in `load_u64`.
    unsafe { AtomicU64::from_ptr(buffer.pointer(index)) }.store(value, Ordering::Release);
}

#[allow(unsafe_code)]
fn load_u32(buffer: &PinnedBuffer<u32>, index: usize) -> u32 {
    // SAFETY: as in `load_u64`.
    unsafe { AtomicU32::from_ptr(buffer.pointer(index)) }.load(Ordering::Acquire)
}

#[allow(unsafe_code)]
fn store_u32(buffer: &PinnedBuffer<u32>, index: usize, value: u32) {
    // SAFETY: as in `load_u64`.
    unsafe { AtomicU32::from_ptr(buffer.pointer(index)) }.store(value, Ordering::Release);
}
