//! Launches on a GPU: what they read is copied in front of them, what they answer is watched in mapped memory.

mod put;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::looped_decoder::{Draws, Launcher};
use super::mailbox::Mailbox;
use super::passes::Passes;
use super::pools::{InboxPlan, Pools};
use crate::batch::Slot;
use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::PinnedBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::fabric::Fabric;
use crate::cuda::kernels::kernel::Kernel;
use crate::cuda::kernels::launch::{Launch, NO_TOKEN, Report, Row, site_name};
use crate::cuda::kernels::matrix::Matrix;
#[cfg(test)]
use crate::cuda::kernels::matrix::Pass;
use crate::cuda::kernels::sizes::{MOST_STEPS, Sizes};
use crate::cuda::kernels::unlooped::UNLOOPED_STEPS;
use crate::cuda::kernels::variants::{FED_COLUMNS, LoopMode, Width};
use crate::cuda::notes::gauge::Gauged;
use crate::cuda::sampler::draw::Sampler;
use crate::cuda::sampler::launch::SamplerLaunch;
use crate::cuda::weights::upload::Weights;
use crate::decoder::Fault;
use crate::sampling::{Allowed, Sampled};

/// How often a wait polls the driver whether the kernel still runs.
const DRIVER_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Share of the time of the last step that a wait for the next one sleeps through, in percent.
const SLEEP_PERCENT: u32 = 70;
/// Shorter sleeps than this end late.
const SHORTEST_SLEEP: Duration = Duration::from_micros(400);
/// Between two polls whether passes of prompt tokens have ended, which take milliseconds.
const STREAM_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Steps of a chain that are in the stream at a time, the one that the host waits for included.
const STEPS_AHEAD: u32 = 4;
/// The same of matrix passes, which take longer, and run to their end though the chain has ended meanwhile.
pub(super) const MATRIX_STEPS_AHEAD: u32 = 2;

/// Where a launch under way puts its tokens.
#[derive(Debug, Clone)]
struct Ticket {
    /// First of its `[steps][columns]` words.
    start: usize,
    /// 0: no row samples, and no token is written.
    columns: usize,
    /// Words that are written in a step: the first.
    tokens: usize,
    /// Of a matrix pass, whose logits and tokens are those of rows that sample: these rows. `None`: of all rows.
    samples: Option<Vec<u32>>,
    epoch: u32,
}

impl Ticket {
    /// Tag of the first layer of a step.
    fn tag(&self, layers: usize, step: u32) -> u32 {
        self.epoch + step * (layers as u32 + 1)
    }

    /// The column of a row.
    fn column(&self, row: usize) -> usize {
        let sampled = |samples: &Vec<u32>| samples.binary_search(&(row as u32)).expect("a row that samples");
        self.samples.as_ref().map_or(row, sampled)
    }
}

/// What computes a pass.
#[derive(Debug, Clone)]
enum By {
    /// This one of the kernels.
    Kernel(usize),
    /// Matrix passes.
    Matrix {
        /// Their rows among those that the host keeps.
        rows: Range<usize>,
        /// First of the words for their items, [`Bounds::most_words`] for each step that is in the stream.
        items: usize,
        /// Whether they choose the tokens themselves.
        choose: bool,
    },
}

/// Steps that the sampler draws: each is a launch of the decoder and one of the sampler, which makes the rows of the
/// next. Or steps of matrix passes that choose the tokens and make the rows themselves. The host puts them into the
/// stream some steps ahead, so that nothing waits for it.
struct Chain {
    by: By,
    /// Of the first step.
    decoder: Launch,
    /// `None`: the decoder chooses.
    sampler: Option<SamplerLaunch>,
    /// Words from the tokens of a step to those of the next.
    columns: usize,
    steps: u32,
    /// Steps that are in the stream.
    put: u32,
}

impl Chain {
    /// Words for the tokens of the step that is put next.
    fn tokens(&self) -> u64 {
        self.decoder.tokens + (self.put as usize * self.columns * size_of::<u64>()) as u64
    }
}

/// Where the ranks of a group meet, and what lies where in their inboxes.
pub struct Ties {
    /// The ranks' memory for each other.
    pub fabric: Fabric,
    /// In each inbox.
    pub inbox: InboxPlan,
}

/// One GPU with a model, or with a rank of one.
pub struct Engine {
    sizes: Sizes,
    /// By columns, ascending.
    kernels: Vec<Kernel>,
    /// For passes that none of them holds.
    matrix: Option<Matrix>,
    /// Matrix passes compute whatever they can.
    #[cfg(test)]
    pub(in crate::cuda) matrix_only: bool,
    /// The matrix pass that was put last.
    #[cfg(test)]
    pub(in crate::cuda) attended: Pass,
    /// What tests want of fed launches.
    #[cfg(test)]
    pub(in crate::cuda) feeding: Arc<Feeding>,
    loop_mode: LoopMode,
    /// Others, while somebody measures.
    pub(in crate::cuda) gauged: Option<Gauged>,
    /// To the other ranks, if there are any.
    pub(in crate::cuda) ties: Option<Ties>,
    sampler: Sampler,
    passes: Passes,
    weights: Weights,
    pools: Pools,
    host_pages: PinnedBuffer<u32>,
    host_rows: PinnedBuffer<Row>,
    host_items: PinnedBuffer<u32>,
    #[cfg(test)]
    host_logits: PinnedBuffer<f32>,
    mailbox: Mailbox,
    stream: Stream,
    launches: Vec<Ticket>,
    /// The launch put last, if it is one.
    chain: Option<Chain>,
    /// Nothing of `launches` is under way any more.
    finished: bool,
    rows_used: usize,
    items_used: usize,
    tokens_used: usize,
    /// The next tag.
    pub(in crate::cuda) epoch: u32,
    /// Steps in the life of the worker.
    steps: u64,
    last_step: Duration,
    /// What the next step takes at least.
    expected: Duration,
    since: Instant,
}

impl Engine {
    /// An engine that waits for launches of kernels in a mode.
    ///
    /// # Errors
    /// There is not so much memory that can be locked.
    pub fn new(
        sizes: Sizes,
        kernels: Vec<Kernel>,
        matrix: Option<Matrix>,
        loop_mode: LoopMode,
        sampler: Sampler,
        weights: Weights,
        pools: Pools,
    ) -> Result<Self, CudaError> {
        let gpu = kernels[0].gpu().clone();
        let widths = kernels.iter().map(|kernel| kernel.variant.width);
        let widths: Vec<Width> = widths.chain(matrix.as_ref().map(|matrix| matrix.width)).collect();
        let products = matrix.as_ref().map(Matrix::products);
        let passes = Passes::new(&widths, sizes.max_batch_tokens, sizes.attention).by(products);
        let mailbox = Mailbox::new(&gpu, sizes.ring(passes.columns()), MOST_STEPS * FED_COLUMNS)?;
        fn pinned<T: bytemuck::Pod>(gpu: &Arc<Gpu>, len: usize) -> Result<PinnedBuffer<T>, CudaError> {
            PinnedBuffer::zeroed(gpu, len)
        }
        Ok(Self {
            host_pages: pinned(&gpu, sizes.max_slots * sizes.slot_pages)?,
            host_rows: pinned(&gpu, sizes.rows)?,
            host_items: pinned(&gpu, sizes.item_words)?,
            #[cfg(test)]
            host_logits: pinned(&gpu, sizes.max_slots * sizes.kernel_vocab)?,
            stream: Stream::new(&gpu)?,
            sizes,
            kernels,
            matrix,
            #[cfg(test)]
            matrix_only: false,
            #[cfg(test)]
            attended: Pass::default(),
            #[cfg(test)]
            feeding: Arc::default(),
            loop_mode,
            gauged: None,
            ties: None,
            sampler,
            passes,
            weights,
            pools,
            mailbox,
            launches: Vec::new(),
            chain: None,
            finished: true,
            rows_used: 0,
            items_used: 0,
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
            Some(Report { block, thread, site, expected, seen, missing }) => {
                let site = format!("{} (site {site})", site_name(site));
                Fault::KernelWait { rank, step, missing, block, thread, site, expected, seen }
            }
            None => Fault::Cuda { rank, step, error },
        }
    }

    fn timed_out(&self, waited: Duration) -> Fault {
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        Fault::KernelTimeout { rank: self.sizes.rank, step: self.steps, waited_ms }
    }

    /// Before a launch of `steps` steps. Tags only count up; before they would wrap, all words start again.
    fn renew_tags(&mut self, steps: u32) -> Result<(), Fault> {
        if self.epoch.checked_add(self.tags(steps)).is_some() {
            return Ok(());
        }
        // In the order of the stream, behind the launches that still read them.
        let words = &self.pools.words;
        let zeroed = self.stream.wait().and_then(|()| words.iter().try_for_each(|words| words.fill(0)));
        zeroed.map_err(|error| self.failed(error))?;
        self.epoch = 1;
        self.ties.as_mut().map_or(Ok(()), |ties| ties.fabric.clear(self.steps))
    }

    /// Tags of so many steps.
    fn tags(&self, steps: u32) -> u32 {
        steps * (self.sizes.layers as u32 + 1)
    }

    fn start_over(&mut self) {
        self.launches.clear();
        (self.rows_used, self.items_used, self.tokens_used, self.finished) = (0, 0, 0, false);
        self.sampler.forget_masks();
        self.mailbox.start_over();
        self.steps += 1;
        self.since = Instant::now();
    }

    /// Whether all rows of a step have their tokens.
    fn has_step(&self, ticket: &Ticket, step: u32) -> bool {
        let tag = ticket.tag(self.sizes.layers, step);
        let first = ticket.start + step as usize * ticket.columns;
        (first..first + ticket.tokens).all(|word| self.mailbox.token(word).0 == tag)
    }

    /// Polls, the driver too now and then; `false` if the kernels ended without it.
    fn wait_until(&self, mut reached: impl FnMut() -> bool, limit: Duration) -> Result<bool, Fault> {
        let begun = Instant::now();
        let mut polled = begun;
        loop {
            for _ in 0..64 {
                if reached() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if polled.elapsed() > DRIVER_POLL_INTERVAL {
                polled = Instant::now();
                if self.stream.is_done().map_err(|error| self.failed(error))? {
                    // It may have come between the two polls.
                    return Ok(reached());
                }
            }
            let waited = begun.elapsed();
            if waited > limit {
                return Err(self.timed_out(waited));
            }
            std::thread::yield_now();
        }
    }

    /// How the phases of the next step become launches.
    fn mode(&self) -> LoopMode {
        self.gauged.as_ref().map_or(self.loop_mode, Gauged::mode)
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
        match self.mode() {
            LoopMode::On => MOST_STEPS as u32,
            LoopMode::Off | LoopMode::Overlapped => UNLOOPED_STEPS,
        }
    }

    #[allow(unsafe_code)]
    fn write_pages(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), Fault> {
        let start = slot as usize * self.sizes.slot_pages + first;
        self.host_pages[start..start + pages.len()].copy_from_slice(pages);
        let entries = &self.host_pages[start..start + pages.len()];
        // SAFETY: entries are written again only for a slot that was released meanwhile, which takes a plan after a
        // step of this one, and so a `finish`; or by a copy behind this one, of what then is right.
        let copied = unsafe { self.pools.page_table.write_async(start * 4, entries, &self.stream) };
        copied.map_err(|error| self.failed(error))
    }

    fn agree(&mut self, newest: u64) -> Result<u64, Fault> {
        match &mut self.ties {
            Some(ties) => ties.fabric.agree(self.steps, newest),
            None => Ok(newest),
        }
    }

    fn admit(&mut self, slot: u32, sequence: &Slot) -> Result<(), Fault> {
        Sampler::check(sequence).map_err(|problem| Fault::Broken { rank: self.sizes.rank, problem })?;
        self.sampler.admit(slot, sequence, &self.stream).map_err(|error| self.failed(error))
    }

    fn held(&mut self, slot: u32, tokens: &[u32]) -> Result<(), Fault> {
        self.sampler.count(slot as usize, tokens, 0, &self.stream).map_err(|error| self.failed(error))
    }

    fn all_know(&mut self, known: u64) -> Result<u64, Fault> {
        match &mut self.ties {
            Some(ties) => ties.fabric.all(self.steps, known),
            None => Ok(known),
        }
    }

    fn launch(&mut self, rows: &[Row], steps: u32, draws: Draws) -> Result<usize, Fault> {
        self.renew_tags(steps)?;
        self.put(rows, steps, draws).map_err(|error| self.failed(error))
    }

    fn is_alone(&self) -> bool {
        self.ties.is_none()
    }

    fn feeds(&self, rows: &[Row]) -> bool {
        let fed = |kernel: usize| self.kernels[kernel].variant.columns() == FED_COLUMNS;
        self.mode() == LoopMode::On && rows.len() <= FED_COLUMNS && self.kernel_of(rows, 1).is_some_and(fed)
    }

    fn launch_fed(&mut self, rows: &[Row], steps: u32) -> Result<usize, Fault> {
        self.renew_tags(steps)?;
        self.put_fed(rows, steps).map_err(|error| self.failed(error))
    }

    fn feed(&mut self, launch: usize, step: u32, rows: &[Row]) {
        #[cfg(test)]
        self.feeding.feed();
        let tag = self.launches[launch].tag(self.sizes.layers, step);
        self.mailbox.feed(step as usize * FED_COLUMNS, &put::padded(rows), tag);
    }

    fn launch_pair(&mut self, pair: [(&[Row], Draws); 2]) -> Result<usize, Fault> {
        self.renew_tags(2)?;
        self.put_pair(pair).map_err(|error| self.failed(error))
    }

    fn draw(&mut self, allowed: &[(usize, Allowed<'_>)]) -> Result<(), Fault> {
        let ticket = self.launches.last().expect("the launch whose rows are drawn");
        let allowed: Vec<_> = allowed.iter().map(|&(row, allowed)| (ticket.column(row), allowed)).collect();
        self.put_masked_sampler(&allowed).map_err(|error| self.failed(error))
    }

    fn wait_step(&mut self, launch: usize, step: u32, superseded: &dyn Fn() -> bool) -> Result<bool, Fault> {
        if self.chain.as_ref().is_some_and(|chain| step >= chain.steps) {
            return Ok(false);
        }
        self.extend(step).map_err(|error| self.failed(error))?;
        let ticket = &self.launches[launch];
        // A launch that was asked to stop says how many steps it runs before it runs the last.
        let ended = || (1..=step).contains(&self.mailbox.steps_run());
        if !self.has_step(ticket, step) && !ended() {
            self.pace();
        }
        // A matrix pass that is in the stream already would run, and its tokens be of no use.
        let stops = !self.chain.as_ref().is_some_and(|chain| matches!(chain.by, By::Matrix { .. }));
        let reached = || {
            if stops && superseded() {
                self.mailbox.stop();
            }
            self.has_step(ticket, step) || ended()
        };
        let limit = self.sizes.wait_limit.saturating_mul(self.launches.len() as u32);
        let found = self.wait_until(reached, limit)?;
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
        // Ranks must put the same steps, and they agree on the end in the kernel: so they go on by what they have seen,
        // which is the same.
        if let (Some(chain), None) = (&mut self.chain, &self.ties) {
            chain.steps = chain.put;
        }
    }

    fn finish(&mut self) -> Result<(), Fault> {
        let limit = self.sizes.wait_limit.saturating_mul(self.launches.len().max(1) as u32);
        let begun = Instant::now();
        while !self.stream.is_done().map_err(|error| self.failed(error))? {
            let waited = begun.elapsed();
            if waited > limit {
                return Err(self.timed_out(waited));
            }
            match waited < SHORTEST_SLEEP {
                true => std::thread::yield_now(),
                false => std::thread::sleep(STREAM_POLL_INTERVAL),
            }
        }
        self.finished = true;
        let collected = self.gauged.as_mut().map_or(Ok(()), Gauged::collect);
        collected.map_err(|error| self.failed(error))
    }

    fn sampled(&self, launch: usize, step: u32, row: usize, logprobs: Option<u32>) -> Sampled {
        let ticket = &self.launches[launch];
        let index = ticket.start + step as usize * ticket.columns + ticket.column(row);
        let token = self.mailbox.token(index).1;
        match logprobs.filter(|_| token != NO_TOKEN) {
            Some(top) => self.mailbox.logprobs(index).of(token, top),
            None => Sampled { token, logprob: None, top: Vec::new() },
        }
    }
}

/// How fed launches are fed under test.
#[cfg(test)]
#[derive(Debug, Default)]
pub struct Feeding {
    /// Steps that were given rows.
    pub steps: std::sync::atomic::AtomicUsize,
    /// How late the next of them is.
    pub late: std::sync::Mutex<Duration>,
}

#[cfg(test)]
impl Feeding {
    fn feed(&self) {
        self.steps.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        std::thread::sleep(std::mem::take(&mut *self.late.lock().expect("a duration")));
    }
}

#[cfg(test)]
impl Engine {
    /// Keeps the logits of a row of the sampled launch put last, as the `place`-th row of [`Self::logits`].
    #[allow(unsafe_code)]
    pub fn keep_logits(&mut self, row: usize, place: usize) -> Result<(), Fault> {
        let column = self.launches.last().expect("a launch").column(row);
        let len = self.sizes.kernel_vocab;
        let row = &mut self.host_logits[place * len..][..len];
        // SAFETY: `logits` is looked at only after `finish`.
        let copied = unsafe {
            self.pools.logits.as_ref().expect("logits of a rank that is alone").read_async(
                column * len * 4,
                row,
                &self.stream,
            )
        };
        copied.map_err(|error| self.failed(error))
    }

    /// Fills the memory of matrix passes with ones, and the words of wide passes, but for those that each launch
    /// zeroes. (Words of narrow passes carry tags, and ones would be a newer one.)
    pub fn poison_words(&self) -> Result<(), CudaError> {
        let wide = self.kernels.iter().zip(&self.pools.words).filter(|(kernel, _)| kernel.variant.columns() > 8);
        wide.map(|(_, words)| words).chain(&self.pools.matrix).try_for_each(|words| words.fill(0xff))
    }

    /// As if a KV head had so many sets of warps: with few of them rows that decode are whole, with many they are cut.
    pub fn attend_by(&mut self, sets: usize) {
        self.matrix.as_mut().expect("matrix passes").at_once.rows = sets;
    }

    /// Most rows of a launch that walks all phases.
    pub fn widest_loop(&self) -> usize {
        self.kernels.iter().map(|kernel| kernel.variant.columns()).max().expect("narrow kernels")
    }

    /// Kept logits, `[rows][vocabulary padded to tiles]`.
    pub fn logits(&mut self, rows: usize) -> &mut [f32] {
        &mut self.host_logits[..rows * self.sizes.kernel_vocab]
    }
}
