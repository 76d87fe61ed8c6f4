//! What goes into the stream: rows, attention's items, and launches with the addresses of all they use.

use std::ops::Range;

use super::super::looped_decoder::Draws;
use super::{By, Chain, Engine, MATRIX_STEPS_AHEAD, STEPS_AHEAD, Ticket};
use crate::cuda::device::gpu::Stream;
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::fabric::MAX_RANKS;
use crate::cuda::kernels::items::{self, Bounds, Items, Last};
use crate::cuda::kernels::kernel::Kernel;
use crate::cuda::kernels::launch::{LAUNCH_LOGITS, LAUNCH_UNDRAWN, Launch, ROW_SAMPLE, Row};
use crate::cuda::kernels::matrix::Pass;
use crate::cuda::kernels::variants::FED_COLUMNS;
use crate::cuda::notes::gauge::Gauged;
use crate::cuda::sampler::launch::{RowLogprobs, SamplerLaunch};
use crate::sampling::Allowed;

/// A launch that is not in the stream yet.
struct Prepared {
    by: By,
    launch: Launch,
    ticket: Ticket,
    /// Whether rows sample.
    samples: bool,
}

impl Engine {
    /// Puts a launch of so many steps into the stream, and says which of those under way it is. Where the sampler draws
    /// it is a chain. Matrix passes whose rows sample are a chain in any case.
    pub(super) fn put(&mut self, rows: &[Row], steps: u32, draws: Draws) -> Result<usize, CudaError> {
        if self.finished {
            self.start_over();
        }
        let kernel = self.kernel_of(rows, steps);
        let Prepared { by, launch, ticket, samples } = self.prepare(rows, steps, draws, kernel, 0)?;
        self.chain = None;
        if samples && (draws != Draws::Decoder || kernel.is_none()) {
            let chain = self.chain(by, launch, &ticket, rows, steps)?;
            match draws {
                Draws::Masked => self.put_chain_decoder(&chain)?,
                Draws::Decoder | Draws::Sampler => {}
            }
            self.chain = Some(chain);
            if draws != Draws::Masked {
                self.extend(0)?;
            }
        } else {
            self.put_decoder(&by, launch, 0, false)?;
        }
        self.launches.push(ticket);
        Ok(self.launches.len() - 1)
    }

    /// Puts a launch of at most so many steps into the stream which is given rows step by step, these first.
    pub(super) fn put_fed(&mut self, rows: &[Row], steps: u32) -> Result<usize, CudaError> {
        if self.finished {
            self.start_over();
        }
        let kernel = self.kernel_of(rows, 1);
        let rows = padded(rows);
        let Prepared { by, launch, ticket, .. } = self.prepare(&rows, steps, Draws::Decoder, kernel, 0)?;
        self.chain = None;
        self.put_decoder(&by, Launch { fed: self.mailbox.rows_address(), ..launch }, 0, false)?;
        self.launches.push(ticket);
        Ok(self.launches.len() - 1)
    }

    /// Puts two matrix passes into the stream whose layers are computed together, and says which of those under way
    /// the second is.
    #[allow(unsafe_code)]
    pub(super) fn put_pair(&mut self, pair: [(&[Row], Draws); 2]) -> Result<usize, CudaError> {
        if self.finished {
            self.start_over();
        }
        let mut passes = Vec::with_capacity(pair.len());
        for (lane, (rows, draws)) in pair.into_iter().enumerate() {
            let Prepared { by, launch, ticket, samples } = self.prepare(rows, 1, draws, None, lane)?;
            let chain = samples.then(|| self.chain(by.clone(), launch, &ticket, rows, 1)).transpose()?;
            let launch = chain.as_ref().map_or(launch, |chain| Launch { tokens: chain.tokens(), ..chain.decoder });
            let (pass, last) = self.matrix_pass(&by, &launch, 0, false)?;
            passes.push(((launch, pass, last), chain));
            self.launches.push(ticket);
        }
        let matrix = self.matrix.as_ref().expect("matrix passes, as they are a pair");
        // SAFETY: as in `put_decoder`; the passes have words and inboxes of their own.
        unsafe { matrix.launch_layers([0, 1].map(|lane| passes[lane].0), &self.stream)? };
        for (lane, ((launch, pass, last), chain)) in passes.into_iter().enumerate() {
            let matrix = self.matrix.as_ref().expect("as above");
            // SAFETY: as above.
            unsafe { matrix.launch_head(launch, pass, last, lane > 0, &self.stream)? };
            if let Some(chain) = &chain {
                self.put_chain_sampler(chain, &[])?;
            }
            self.chain = chain.map(|chain| Chain { put: chain.steps, ..chain });
        }
        Ok(self.launches.len() - 1)
    }

    /// Copies rows to the GPU, and says what a launch of them is given: of a kernel, or a matrix pass by itself or one
    /// of two (`lane`).
    fn prepare(
        &mut self,
        rows: &[Row],
        steps: u32,
        draws: Draws,
        kernel: Option<usize>,
        lane: usize,
    ) -> Result<Prepared, CudaError> {
        let epoch = self.epoch;
        self.epoch += self.tags(steps);
        let first_row = self.rows_used;
        let rows_address = self.put_rows(rows)?;
        let samples = rows.iter().any(|row| row.flags & ROW_SAMPLE != 0);
        let by = match kernel {
            Some(kernel) => By::Kernel(kernel),
            None => {
                By::Matrix { rows: first_row..self.rows_used, items: self.items_used, choose: draws == Draws::Decoder }
            }
        };
        let ticket = self.ticket(kernel, rows, samples, steps, epoch);
        let launch = Launch {
            weights: self.weights.stream.address(),
            gamma: self.weights.gamma.address(),
            embedding: self.weights.embedding.address(),
            bias: self.weights.bias.address(),
            scales: self.weights.scales.address(),
            qk_norm: self.weights.qk_norm.address(),
            rope: self.weights.rope.address(),
            kv: self.pools.kv.address(),
            k_scale: self.pools.k_scale.address(),
            words: kernel.map_or_else(|| self.matrix_address(lane), |kernel| self.pools.words[kernel].address()),
            page_table: self.pools.page_table.address(),
            logits: self.logits_address(),
            rows: rows_address,
            items: kernel.map_or(Ok(0), |kernel| self.put_items(kernel, rows, steps))?,
            tokens: self.mailbox.tokens_address(ticket.start),
            control: self.mailbox.control_address(),
            report: self.mailbox.report_address(),
            row_count: rows.len() as u32,
            steps,
            epoch,
            page_stride: self.sizes.slot_pages as u32,
            kv_pages: self.sizes.kv_pages as u32,
            rank: self.sizes.rank as u32,
            inbox: self.inboxes(kernel, lane),
            ..Launch::default()
        };
        Ok(Prepared { by, launch, ticket, samples })
    }

    /// The kernel for so many passes of these rows; `None`: matrix passes.
    pub(super) fn kernel_of(&self, rows: &[Row], steps: u32) -> Option<usize> {
        #[cfg(test)]
        if self.matrix_only {
            return None;
        }
        let columns = self.passes.columns_for(rows, steps);
        let kernel = self.kernels.iter().position(|kernel| kernel.variant.columns() >= columns);
        assert!(kernel.is_some() || self.matrix.is_some(), "passes are chosen so that a kernel holds {columns} rows");
        kernel
    }

    /// Takes room for the tokens of a launch, by a kernel or matrix passes.
    fn ticket(&mut self, kernel: Option<usize>, rows: &[Row], samples: bool, steps: u32, epoch: u32) -> Ticket {
        let (columns, tokens, samples) = match kernel {
            Some(kernel) => (if samples { self.kernels[kernel].variant.columns() } else { 0 }, rows.len(), None),
            None => {
                let samples: Vec<u32> = items::samples(rows).collect();
                (samples.len(), samples.len(), Some(samples))
            }
        };
        let ticket = Ticket { start: self.tokens_used, columns, tokens, samples, epoch };
        self.tokens_used += steps as usize * columns;
        for step in 0..steps {
            let tag = ticket.tag(self.sizes.layers, step);
            for word in 0..columns {
                self.mailbox.expect(ticket.start + step as usize * columns + word, tag);
            }
        }
        ticket
    }

    /// Copies rows to the GPU, and says where they are there.
    #[allow(unsafe_code)]
    fn put_rows(&mut self, rows: &[Row]) -> Result<u64, CudaError> {
        let first = self.rows_used;
        self.rows_used += rows.len();
        self.host_rows[first..self.rows_used].copy_from_slice(rows);
        let offset = first * size_of::<Row>();
        // SAFETY: these rows are written again only after `finish`.
        unsafe { self.pools.rows.write_async(offset, &self.host_rows[first..self.rows_used], &self.stream)? };
        Ok(self.pools.rows.address() + offset as u64)
    }

    /// Deals attention to a kernel's blocks; where on the GPU the launch will find that, or 0 if the kernel does so
    /// itself.
    #[allow(unsafe_code)]
    fn put_items(&mut self, kernel: usize, rows: &[Row], steps: u32) -> Result<u64, CudaError> {
        let Some(deal) = self.kernels[kernel].deal else { return Ok(0) };
        let dealt = deal.of(rows, steps);
        let first = self.items_used;
        self.items_used += dealt.len();
        let words = &mut self.host_items[first..self.items_used];
        words.copy_from_slice(&dealt);
        // SAFETY: these words are written again only after `finish`.
        unsafe { self.pools.items.write_async(first * size_of::<u32>(), words, &self.stream)? };
        Ok(self.pools.items.address() + (first * size_of::<u32>()) as u64)
    }

    /// A chain of which nothing is in the stream yet.
    fn chain(
        &mut self,
        by: By,
        decoder: Launch,
        ticket: &Ticket,
        rows: &[Row],
        steps: u32,
    ) -> Result<Chain, CudaError> {
        let chooses = matches!(by, By::Matrix { choose: true, .. });
        let (mut sampled_rows, mut row_count, mut steps) = (decoder.rows, decoder.row_count, steps);
        if let Some(samples) = &ticket.samples {
            // Rows of matrix passes do not idle: the first that ends is the end of the chain.
            let left = rows.iter().map(|row| row.last_position - row.position + 1).min();
            steps = steps.min(left.unwrap_or(1));
            // If all sample, the sampler makes the rows of the next step in their place.
            if samples.len() < rows.len() && !chooses {
                let sampled: Vec<Row> = samples.iter().map(|row| rows[*row as usize]).collect();
                sampled_rows = self.put_rows(&sampled)?;
            }
            row_count = samples.len() as u32;
        }
        let decoder = Launch { steps: 1, flags: LAUNCH_LOGITS | LAUNCH_UNDRAWN, ..decoder };
        let sampler = SamplerLaunch {
            logits: decoder.logits,
            rows: sampled_rows,
            logprobs: self.mailbox.logprobs_address(ticket.start),
            control: decoder.control,
            // The decoder says there whether all hosts want the chain to end.
            stop: if self.ties.is_some() { decoder.inbox[self.sizes.rank] } else { decoder.control },
            report: decoder.report,
            row_count,
            ..SamplerLaunch::default()
        };
        let sampler = (!chooses).then_some(sampler);
        Ok(Chain { by, decoder, sampler, columns: ticket.columns, steps, put: 0 })
    }

    /// Puts the steps of the chain under way into the stream that are to be there while the host waits for step
    /// `waited`, and are not yet.
    pub(super) fn extend(&mut self, waited: u32) -> Result<(), CudaError> {
        let Some(mut chain) = self.chain.take() else { return Ok(()) };
        let ahead = if matches!(chain.by, By::Kernel(_)) { STEPS_AHEAD } else { MATRIX_STEPS_AHEAD };
        while chain.put < (waited + ahead).min(chain.steps) {
            self.put_chain_decoder(&chain)?;
            self.put_chain_sampler(&chain, &[])?;
            chain.put += 1;
        }
        self.chain = Some(chain);
        Ok(())
    }

    /// Puts the sampler of a chain of one step into the stream, whose decoder is there: some rows draw what they
    /// are allowed.
    pub(super) fn put_masked_sampler(&mut self, allowed: &[(usize, Allowed<'_>)]) -> Result<(), CudaError> {
        let mut chain = self.chain.take().expect("a launch whose rows have masks is a chain");
        self.put_chain_sampler(&chain, allowed)?;
        chain.put = chain.steps;
        self.chain = Some(chain);
        Ok(())
    }

    /// Puts the decoder of the chain's next step into the stream.
    fn put_chain_decoder(&mut self, chain: &Chain) -> Result<(), CudaError> {
        let step = chain.put;
        let decoder = Launch {
            stopped: if step > 0 { self.sampler.stopped_address() } else { 0 },
            tokens: chain.tokens(),
            epoch: chain.decoder.epoch + self.tags(step),
            ..chain.decoder
        };
        self.put_decoder(&chain.by, decoder, step, step + 1 < chain.steps)
    }

    /// Puts the sampler of the chain's next step into the stream, if it has one. Some rows may draw what
    /// they are allowed alone.
    #[allow(unsafe_code)]
    fn put_chain_sampler(&mut self, chain: &Chain, allowed: &[(usize, Allowed<'_>)]) -> Result<(), CudaError> {
        let Some(sampler) = chain.sampler else { return Ok(()) };
        let (step, before) = (chain.put, chain.put as usize * chain.columns);
        let mut sampler = SamplerLaunch {
            tokens: chain.tokens(),
            logprobs: sampler.logprobs + (before * size_of::<RowLogprobs>()) as u64,
            tag: chain.decoder.epoch + self.tags(step),
            step,
            ..sampler
        };
        if !allowed.is_empty() {
            sampler = self.sampler.with_masks(sampler, allowed, &self.stream)?;
        }
        // SAFETY: logits and rows are those of the launch in front of the sampler's.
        unsafe { self.sampler.launch(sampler, &self.stream) }
    }

    /// Puts a launch of the decoder into the stream: of a chain, for its step `step`, perhaps with more behind it.
    #[allow(unsafe_code)]
    fn put_decoder(&mut self, by: &By, launch: Launch, step: u32, more: bool) -> Result<(), CudaError> {
        match by {
            // SAFETY: all addresses are of buffers that `self` owns, with the sizes that the kernel was compiled for;
            // rows name slots and pages that the batch has checked.
            By::Kernel(kernel) => unsafe { run(&mut self.kernels[*kernel], &mut self.gauged, launch, &self.stream) },
            By::Matrix { .. } => {
                let (pass, last) = self.matrix_pass(by, &launch, step, more)?;
                let matrix = self.matrix.as_ref().expect("matrix passes, as none of the kernels holds the rows");
                // SAFETY: as above.
                unsafe { matrix.launch(launch, pass, last, &self.stream) }
            }
        }
    }

    /// What a matrix pass is given beside its launch, for step `step`, perhaps with more behind it.
    fn matrix_pass(&mut self, by: &By, launch: &Launch, step: u32, more: bool) -> Result<(Pass, Last), CudaError> {
        let By::Matrix { rows, items, choose } = by else { unreachable!("a matrix pass") };
        let pass = Pass {
            stopped: if *choose { self.sampler.stopped_address() } else { 0 },
            next: if more { launch.rows } else { 0 },
            step,
            ..Pass::default()
        };
        self.put_pass_items(pass, rows.clone(), *items)
    }

    /// Adds the items of rows `rows` of the host's to `pass`, and says which of them its last layer needs. Those of
    /// steps that are in the stream together take turns in the words from `first` on.
    #[allow(unsafe_code)]
    fn put_pass_items(&mut self, pass: Pass, rows: Range<usize>, first: usize) -> Result<(Pass, Last), CudaError> {
        let matrix = self.matrix.as_ref().expect("matrix passes, as none of the kernels holds the rows");
        let items = matrix.bounds.items(&self.host_rows[rows.clone()], pass.step, matrix.at_once);
        let first = first + (pass.step % MATRIX_STEPS_AHEAD) as usize * self.step_words(rows.len());
        let Items { tiles, tile_blocks, spans, merges, samples, last } = &items;
        let mut end = first;
        let mut place = |words: &[u32]| {
            self.host_items[end..end + words.len()].copy_from_slice(words);
            let address = self.pools.items.address() + (end * size_of::<u32>()) as u64;
            end += words.len();
            address
        };
        let pass = Pass {
            attend_spans: place(bytemuck::cast_slice(spans)),
            merges: place(bytemuck::cast_slice(merges)),
            attend_tiles: place(bytemuck::cast_slice(tiles)),
            samples: place(samples),
            tile_count: tiles.len() as u32,
            cut: items.is_cut().into(),
            tile_blocks: *tile_blocks,
            span_count: spans.len() as u32,
            merge_count: merges.len() as u32,
            sample_count: samples.len() as u32,
            ..pass
        };
        #[cfg(test)]
        {
            self.attended = pass;
        }
        self.items_used = self.items_used.max(end.next_multiple_of(2));
        // SAFETY: the words are written again only after `finish`, or once the pass that reads them has its tokens.
        unsafe { self.pools.items.write_async(first * size_of::<u32>(), &self.host_items[first..end], &self.stream)? };
        Ok((pass, *last))
    }

    /// Words for the items of a step of so many rows.
    fn step_words(&self, rows: usize) -> usize {
        Bounds::most_words(rows, self.sizes.visible_pages)
    }

    /// Logits of the launch put last, where the sampler finds them.
    fn logits_address(&self) -> u64 {
        match (&self.pools.logits, &self.ties) {
            (Some(logits), _) => logits.address(),
            (None, Some(ties)) => ties.fabric.addresses()[self.sizes.rank] + ties.inbox.logits,
            (None, None) => unreachable!("a rank that is alone has logits of its own"),
        }
    }

    /// What the launches of a matrix pass share, of the first of a pair or the second.
    fn matrix_address(&self, lane: usize) -> u64 {
        self.pools.matrix.as_ref().map_or_else(|| self.inboxes(None, lane)[self.sizes.rank], DeviceBuffer::address)
    }

    /// The inboxes of all ranks for a kernel, or for matrix passes.
    fn inboxes(&self, kernel: Option<usize>, lane: usize) -> [u64; MAX_RANKS] {
        let Some(ties) = &self.ties else { return [0; MAX_RANKS] };
        let first = kernel.map_or(ties.inbox.matrix[lane], |kernel| ties.inbox.kernels[kernel]);
        ties.fabric.addresses().map(|address| if address == 0 { 0 } else { address + first })
    }
}

/// Rows of a launch that is given rows step by step: as many as its kernel has columns, the last ones idle.
pub(super) fn padded(rows: &[Row]) -> [Row; FED_COLUMNS] {
    std::array::from_fn(|column| rows.get(column).copied().unwrap_or(Row::IDLE))
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
