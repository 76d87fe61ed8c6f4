//! Launches on a GPU: what they read is copied in front of them, what they answer is watched in mapped memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{Gpu, Stream};
use super::error::CudaError;
use super::gauge::Gauged;
use super::kernel::Kernel;
use super::launch::{LAUNCH_LOGITS, Launch, ROW_SAMPLE, Report, Row, site_name};
use super::looped_decoder::Launcher;
use super::mailbox::Mailbox;
use super::memory::PinnedBuffer;
use super::passes::{Passes, Width};
use super::pools::{MOST_STEPS, Pools, Sizes};
use super::unlooped::UNLOOPED_STEPS;
use super::variants::LoopMode;
use super::weights::Weights;
use crate::decoder::Fault;

/// How often a wait asks the driver whether the kernel still runs.
const ASK_EVERY: Duration = Duration::from_millis(2);
/// Share of the time of the last step that a wait for the next one sleeps through, in percent.
const SLEEP_PERCENT: u32 = 70;
/// Shorter sleeps than this end late.
const SHORTEST_SLEEP: Duration = Duration::from_micros(400);
/// Between two looks at whether passes of prompt tokens have ended, which take milliseconds.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Where a launch under way puts its tokens.
#[derive(Debug, Clone, Copy)]
struct Ticket {
    /// First of its `[steps][columns]` words.
    start: usize,
    /// 0: no row samples, and no token is written.
    columns: usize,
    rows: usize,
    epoch: u32,
}

/// One GPU with a model.
pub struct Engine {
    sizes: Sizes,
    /// By columns, ascending.
    kernels: Vec<Kernel>,
    /// Others, while somebody measures.
    pub(super) gauged: Option<Gauged>,
    passes: Passes,
    weights: Weights,
    pools: Pools,
    host_pages: PinnedBuffer<u32>,
    host_rows: PinnedBuffer<Row>,
    host_logits: PinnedBuffer<f32>,
    mailbox: Mailbox,
    stream: Stream,
    launches: Vec<Ticket>,
    /// Nothing of `launches` is under way any more.
    finished: bool,
    rows_used: usize,
    tokens_used: usize,
    /// The next tag.
    pub(super) epoch: u32,
    /// Steps in the life of the worker.
    steps: u64,
    last_step: Duration,
    /// What the next step takes at least.
    expected: Duration,
    since: Instant,
}

impl Engine {
    /// An engine that waits for launches.
    ///
    /// # Errors
    /// There is not so much memory that can be locked.
    pub fn new(sizes: Sizes, kernels: Vec<Kernel>, weights: Weights, pools: Pools) -> Result<Self, CudaError> {
        let gpu = kernels[0].gpu().clone();
        let widths: Vec<Width> = kernels.iter().map(|kernel| kernel.variant.width).collect();
        let passes = Passes::new(&widths, sizes.max_batch_tokens);
        let mailbox = Mailbox::new(&gpu, sizes.ring(passes.columns()))?;
        fn pinned<T: bytemuck::Pod>(gpu: &Arc<Gpu>, len: usize) -> Result<PinnedBuffer<T>, CudaError> {
            PinnedBuffer::zeroed(gpu, len)
        }
        Ok(Self {
            host_pages: pinned(&gpu, sizes.max_slots * sizes.slot_pages)?,
            host_rows: pinned(&gpu, sizes.max_batch_tokens)?,
            host_logits: pinned(&gpu, sizes.max_slots * sizes.padded_vocab)?,
            stream: Stream::new(&gpu)?,
            sizes,
            kernels,
            gauged: None,
            passes,
            weights,
            pools,
            mailbox,
            launches: Vec::new(),
            finished: true,
            rows_used: 0,
            tokens_used: 0,
            epoch: 1,
            steps: 0,
            last_step: Duration::ZERO,
            expected: Duration::ZERO,
            since: Instant::now(),
        })
    }

    /// The calling thread will launch.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn enter(&self) -> Result<(), CudaError> {
        self.stream.gpu().make_current()
    }

    fn failed(&self, error: CudaError) -> Fault {
        let (rank, step) = (self.sizes.rank, self.steps);
        // What the kernel said before it trapped is worth more than what the driver says of it.
        match self.mailbox.report() {
            Some(Report { block, thread, site, expected, seen }) => {
                let site = format!("{} (site {site})", site_name(site));
                Fault::KernelWait { rank, step, block, thread, site, expected, seen }
            }
            None => Fault::Cuda { rank, step, error },
        }
    }

    fn silent(&self, waited: Duration) -> Fault {
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        Fault::KernelSilent { rank: self.sizes.rank, step: self.steps, waited_ms }
    }

    /// The first tag of a launch of `steps` steps. Tags only count up; before they would wrap, all words start again.
    fn next_epoch(&mut self, steps: u32) -> Result<u32, CudaError> {
        let tags = steps * (self.sizes.layers as u32 + 1);
        if self.epoch.checked_add(tags).is_none() {
            // In the order of the stream, behind the launches that still read them.
            self.stream.wait()?;
            self.pools.words.iter().try_for_each(|words| words.fill(0))?;
            self.epoch = 1;
        }
        let epoch = self.epoch;
        self.epoch += tags;
        Ok(epoch)
    }

    #[allow(unsafe_code)]
    fn put(&mut self, rows: &[Row], steps: u32, logits: bool) -> Result<usize, CudaError> {
        if self.finished {
            self.start_over();
        }
        let epoch = self.next_epoch(steps)?;
        let samples = rows.iter().any(|row| row.flags & ROW_SAMPLE != 0);
        let holds = |width: Width| width.columns >= rows.len() && (width.samples || !samples);
        let variant = self.kernels.iter().position(|kernel| holds(kernel.variant.width));
        let variant = variant.expect("a kernel that holds the rows, because passes are chosen so");
        let columns = if samples { self.kernels[variant].variant.columns() } else { 0 };
        let (first_row, start) = (self.rows_used, self.tokens_used);
        self.rows_used += rows.len();
        self.tokens_used += steps as usize * columns;
        self.host_rows[first_row..self.rows_used].copy_from_slice(rows);
        for step in 0..steps {
            let tag = self.tag(epoch, step);
            for word in 0..columns {
                self.mailbox.expect(start + step as usize * columns + word, tag);
            }
        }
        let offset = first_row * size_of::<Row>();
        // SAFETY: these rows are written again only after `finish`.
        unsafe { self.pools.rows.write_async(offset, &self.host_rows[first_row..self.rows_used], &self.stream)? };
        let usual = &mut self.kernels[variant];
        let instead = self.gauged.as_mut().map(|gauged| gauged.instead(usual.variant, steps)).transpose()?.flatten();
        let (kernel, trace) = instead.unwrap_or((usual, 0));
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
            logits: self.pools.logits.address(),
            rows: self.pools.rows.address() + offset as u64,
            tokens: self.mailbox.tokens_address(start),
            control: self.mailbox.control_address(),
            report: self.mailbox.report_address(),
            trace,
            row_count: rows.len() as u32,
            steps,
            epoch,
            page_stride: self.sizes.slot_pages as u32,
            kv_pages: self.sizes.kv_pages as u32,
            flags: if logits { LAUNCH_LOGITS } else { 0 },
            ..Launch::default()
        };
        // SAFETY: all addresses are of buffers that `self` owns, with the sizes that the kernel was compiled for; rows name
        // slots and pages that the batch has checked.
        unsafe { kernel.launch(launch, &self.stream)? };
        self.launches.push(Ticket { start, columns, rows: rows.len(), epoch });
        Ok(self.launches.len() - 1)
    }

    fn start_over(&mut self) {
        self.launches.clear();
        (self.rows_used, self.tokens_used, self.finished) = (0, 0, false);
        self.mailbox.start_over();
        self.steps += 1;
        self.since = Instant::now();
    }

    fn tag(&self, epoch: u32, step: u32) -> u32 {
        epoch + step * (self.sizes.layers as u32 + 1)
    }

    /// Whether all rows of a step have their tokens.
    fn has_step(&self, ticket: Ticket, step: u32) -> bool {
        let tag = self.tag(ticket.epoch, step);
        let first = ticket.start + step as usize * ticket.columns;
        (first..first + ticket.rows).all(|word| self.mailbox.token(word).0 == tag)
    }

    /// Looks again and again, asking the driver now and then; `false` if the kernels ended without it.
    fn wait_until(&self, mut reached: impl FnMut() -> bool, limit: Duration) -> Result<bool, Fault> {
        let begun = Instant::now();
        let mut asked = begun;
        loop {
            for _ in 0..64 {
                if reached() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if asked.elapsed() > ASK_EVERY {
                asked = Instant::now();
                if self.stream.is_done().map_err(|error| self.failed(error))? {
                    // It may have come between the look and the question.
                    return Ok(reached());
                }
            }
            let waited = begun.elapsed();
            if waited > limit {
                return Err(self.silent(waited));
            }
            std::thread::yield_now();
        }
    }

    /// Leaves the core to others while nothing can have come.
    fn pace(&self) {
        let sleep = (self.expected / 100 * SLEEP_PERCENT).saturating_sub(self.since.elapsed());
        if sleep >= SHORTEST_SLEEP {
            std::thread::sleep(sleep);
        }
    }
}

impl Launcher for Engine {
    fn passes(&self) -> &Passes {
        &self.passes
    }

    fn most_steps(&self) -> u32 {
        match self.gauged.as_ref().map_or(LoopMode::On, Gauged::mode) {
            LoopMode::On => MOST_STEPS as u32,
            LoopMode::Off | LoopMode::Overlapped => UNLOOPED_STEPS,
        }
    }

    #[allow(unsafe_code)]
    fn write_pages(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), Fault> {
        let start = slot as usize * self.sizes.slot_pages + first;
        self.host_pages[start..start + pages.len()].copy_from_slice(pages);
        let entries = &self.host_pages[start..start + pages.len()];
        // SAFETY: entries are written again only for a slot that was released meanwhile, which takes a plan after a step
        // of this one, and so a `finish`; or by a copy behind this one, of what then is right.
        let copied = unsafe { self.pools.page_table.write_async(start * 4, entries, &self.stream) };
        copied.map_err(|error| self.failed(error))
    }

    fn launch(&mut self, rows: &[Row], steps: u32, logits: bool) -> Result<usize, Fault> {
        self.put(rows, steps, logits).map_err(|error| self.failed(error))
    }

    #[allow(unsafe_code)]
    fn keep_logits(&mut self, column: usize, place: usize) -> Result<(), Fault> {
        let len = self.sizes.kernel_vocab;
        let row = &mut self.host_logits[place * self.sizes.padded_vocab..][..len];
        // SAFETY: `logits` is looked at only after `finish`.
        let copied = unsafe { self.pools.logits.read_async(column * len * 4, row, &self.stream) };
        copied.map_err(|error| self.failed(error))
    }

    fn wait_step(&mut self, launch: usize, step: u32) -> Result<bool, Fault> {
        let ticket = self.launches[launch];
        // A launch that was asked to stop says how many steps it runs before it runs the last.
        let ended = || (1..=step).contains(&self.mailbox.steps_run());
        if !self.has_step(ticket, step) && !ended() {
            self.pace();
        }
        let found = self.wait_until(|| self.has_step(ticket, step) || ended(), self.sizes.wait_limit)?;
        if !self.has_step(ticket, step) {
            let run = self.mailbox.steps_run();
            if !found && run == 0 {
                let problem = format!("the kernel ended without the tokens of step {step}");
                return Err(Fault::Broken { rank: self.sizes.rank, problem });
            }
            return Ok(false);
        }
        self.steps += u64::from(step > 0);
        let now = Instant::now();
        let took = now - std::mem::replace(&mut self.since, now);
        // A step that began with its launch, or was seen late, says little about the next.
        self.expected = took.min(std::mem::replace(&mut self.last_step, took));
        Ok(true)
    }

    fn stop(&mut self) {
        self.mailbox.stop();
    }

    fn finish(&mut self) -> Result<(), Fault> {
        let limit = self.sizes.wait_limit.saturating_mul(self.launches.len().max(1) as u32);
        let begun = Instant::now();
        while !self.stream.is_done().map_err(|error| self.failed(error))? {
            let waited = begun.elapsed();
            if waited > limit {
                return Err(self.silent(waited));
            }
            match waited < SHORTEST_SLEEP {
                true => std::thread::yield_now(),
                false => std::thread::sleep(LOOK_EVERY),
            }
        }
        self.finished = true;
        let collected = self.gauged.as_mut().map_or(Ok(()), Gauged::collect);
        collected.map_err(|error| self.failed(error))
    }

    fn token(&self, launch: usize, step: u32, column: usize) -> u32 {
        let ticket = self.launches[launch];
        self.mailbox.token(ticket.start + step as usize * ticket.columns + column).1
    }

    fn logits(&mut self, rows: usize) -> &mut [f32] {
        &mut self.host_logits[..rows * self.sizes.padded_vocab]
    }
}
