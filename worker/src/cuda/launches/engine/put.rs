//! What goes into the stream: rows, attention's items, and launches with the addresses of all they use.

use super::{Chain, Engine, STEPS_AHEAD, Ticket};
use crate::cuda::device::gpu::Stream;
use crate::cuda::error::CudaError;
use crate::cuda::fabric::MAX_RANKS;
use crate::cuda::kernels::kernel::Kernel;
use crate::cuda::kernels::launch::{LAUNCH_LOGITS, LAUNCH_UNDRAWN, Launch, ROW_SAMPLE, Row};
use crate::cuda::kernels::variants::Width;
use crate::cuda::notes::gauge::Gauged;
use crate::cuda::sampler::launch::SamplerLaunch;

impl Engine {
    /// Puts a launch of so many steps into the stream, and says which of those under way it is. `sampled`: a chain,
    /// whose tokens the sampler draws.
    #[allow(unsafe_code)]
    pub(super) fn put(&mut self, rows: &[Row], steps: u32, sampled: bool) -> Result<usize, CudaError> {
        if self.finished {
            self.start_over();
        }
        let epoch = self.epoch;
        self.epoch += self.tags(steps);
        let samples = rows.iter().any(|row| row.flags & ROW_SAMPLE != 0);
        let holds = |width: Width| width.columns >= rows.len() && (width.samples || !samples);
        let variant = self.kernels.iter().position(|kernel| holds(kernel.variant.width));
        let variant = variant.expect("a kernel that holds the rows, because passes are chosen so");
        let columns = if samples { self.kernels[variant].variant.columns() } else { 0 };
        let (first_row, start) = (self.rows_used, self.tokens_used);
        self.rows_used += rows.len();
        self.tokens_used += steps as usize * columns;
        self.host_rows[first_row..self.rows_used].copy_from_slice(rows);
        let ticket = Ticket { start, columns, rows: rows.len(), epoch };
        for step in 0..steps {
            let tag = ticket.tag(self.sizes.layers, step);
            for word in 0..columns {
                self.mailbox.expect(start + step as usize * columns + word, tag);
            }
        }
        let offset = first_row * size_of::<Row>();
        // SAFETY: these rows are written again only after `finish`.
        unsafe { self.pools.rows.write_async(offset, &self.host_rows[first_row..self.rows_used], &self.stream)? };
        let items = self.put_items(variant, rows, steps)?;
        let launch = Launch {
            weights: self.weights.stream.address(),
            gamma: self.weights.gamma.address(),
            embedding: self.weights.embedding.address(),
            bias: self.weights.bias.address(),
            qk_norm: self.weights.qk_norm.address(),
            rope: self.weights.rope.address(),
            kv: self.pools.kv.address(),
            k_scale: self.pools.k_scale.address(),
            words: self.pools.words[variant].address(),
            page_table: self.pools.page_table.address(),
            logits: self.logits_address(),
            rows: self.pools.rows.address() + offset as u64,
            items,
            tokens: self.mailbox.tokens_address(start),
            control: self.mailbox.control_address(),
            report: self.mailbox.report_address(),
            row_count: rows.len() as u32,
            steps,
            epoch,
            page_stride: self.sizes.slot_pages as u32,
            kv_pages: self.sizes.kv_pages as u32,
            rank: self.sizes.rank as u32,
            inbox: self.inboxes(variant),
            ..Launch::default()
        };
        self.launches.push(ticket);
        if sampled && samples {
            self.chain = Some(Chain { ticket, variant, decoder: launch, steps, put: 0 });
            self.extend(STEPS_AHEAD)?;
            return Ok(self.launches.len() - 1);
        }
        self.chain = None;
        // SAFETY: all addresses are of buffers that `self` owns, with the sizes that the kernel was compiled for; rows
        // name slots and pages that the batch has checked.
        unsafe { run(&mut self.kernels[variant], &mut self.gauged, launch, &self.stream)? };
        Ok(self.launches.len() - 1)
    }

    /// Deals attention to a kernel's blocks; where on the GPU the launch will find that, or 0 if the kernel does so
    /// itself.
    #[allow(unsafe_code)]
    fn put_items(&mut self, variant: usize, rows: &[Row], steps: u32) -> Result<u64, CudaError> {
        let Some(deal) = self.kernels[variant].deal else { return Ok(0) };
        let dealt = deal.of(rows, steps);
        let first = self.items_used;
        self.items_used += dealt.len();
        let words = &mut self.host_items[first..self.items_used];
        words.copy_from_slice(&dealt);
        // SAFETY: these words are written again only after `finish`.
        unsafe { self.pools.items.write_async(first * size_of::<u32>(), words, &self.stream)? };
        Ok(self.pools.items.address() + (first * size_of::<u32>()) as u64)
    }

    /// Puts the steps of the chain under way into the stream that are not there yet, up to step `end`.
    #[allow(unsafe_code)]
    pub(super) fn extend(&mut self, end: u32) -> Result<(), CudaError> {
        let Some(chain) = &mut self.chain else { return Ok(()) };
        while chain.put < end.min(chain.steps) {
            let Chain { ticket, variant, decoder, put: step, .. } = *chain;
            let tag = ticket.tag(self.sizes.layers, step);
            let tokens = ticket.start + step as usize * ticket.columns;
            let decoder = Launch {
                stopped: if step > 0 { self.sampler.stopped_address() } else { 0 },
                steps: 1,
                epoch: tag,
                flags: LAUNCH_LOGITS | LAUNCH_UNDRAWN,
                ..decoder
            };
            let sampler = SamplerLaunch {
                logits: decoder.logits,
                rows: decoder.rows,
                tokens: self.mailbox.tokens_address(tokens),
                logprobs: self.mailbox.logprobs_address(tokens),
                control: decoder.control,
                // The decoder says there whether all hosts want the chain to end.
                stop: if self.ties.is_some() { decoder.inbox[self.sizes.rank] } else { decoder.control },
                report: decoder.report,
                row_count: decoder.row_count,
                tag,
                step,
                ..SamplerLaunch::default()
            };
            // SAFETY: as for a launch of the decoder alone; logits and rows are those of the launch in front of the
            // sampler's.
            unsafe {
                run(&mut self.kernels[variant], &mut self.gauged, decoder, &self.stream)?;
                self.sampler.launch(sampler, &self.stream)?;
            }
            chain.put += 1;
        }
        Ok(())
    }

    /// Logits of the launch put last, where the sampler finds them.
    fn logits_address(&self) -> u64 {
        match (&self.pools.logits, &self.ties) {
            (Some(logits), _) => logits.address(),
            (None, Some(ties)) => ties.fabric.addresses()[self.sizes.rank] + ties.inbox.logits,
            (None, None) => unreachable!("a rank that is alone has logits of its own"),
        }
    }

    /// The inboxes of all ranks for a kernel.
    fn inboxes(&self, kernel: usize) -> [u64; MAX_RANKS] {
        let Some(ties) = &self.ties else { return [0; MAX_RANKS] };
        ties.fabric.addresses().map(|address| if address == 0 { 0 } else { address + ties.inbox.kernels[kernel] })
    }
}

/// Launches a kernel, or what somebody who measures has in its place.
///
/// # Safety
/// As [`Kernel::launch`].
#[allow(unsafe_code)]
unsafe fn run(
    usual: &mut Kernel,
    gauged: &mut Option<Gauged>,
    launch: Launch,
    stream: &Stream,
) -> Result<(), CudaError> {
    let instead = gauged.as_mut().map(|gauged| gauged.instead(usual.variant, launch.steps)).transpose()?.flatten();
    let (kernel, trace) = instead.unwrap_or((usual, 0));
    // SAFETY: as the caller vouches; the notes are as long as the kernel writes them.
    unsafe { kernel.launch(Launch { trace, ..launch }, stream) }
}
