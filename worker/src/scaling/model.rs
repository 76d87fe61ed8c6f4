//! The calculation: what a block streams, what it waits for, and how much of the waiting its ring hides.
//!
//! A GPU's blocks share its read limit evenly. Each streams its weights, K and V through a ring, like water through a
//! tank: memory fills it at the block's share of the read limit whenever there is room, and consumers empty it faster
//! than that. A step is a sequence of phases; before each, consumers wait for an exchange (all blocks have ended the
//! phase before, and their words have come), while the tank fills. What an exchange costs is therefore what its wait is
//! longer than the tank takes to fill, and that the tanks of blocks with fewer bytes run full before the fullest block
//! has ended.
//!
//! ```text
//! layer   qkv <- sums of down (chip and ranks)   K and V <- q (chip)   o <- attention's leaves, its output (2 x chip)
//!         gate/up <- sums of o (chip and ranks)   down <- activation (chip)
//! step    layers, LM head <- sums of down, then: best token, embedding (2 x chip and ranks)
//! ```
//!
//! An exchange over the chip takes `exchange_us` and `value_us` for each thousand values that every block reads: the
//! columns of the pass times the hidden size for x, times a rank's share of heads and of the intermediate size for the
//! inputs of o and down, nothing for q and attention's leaves, which few blocks read. One across ranks takes `rank_us`
//! more, and the time in which a rank's link carries its sums to all others (one hop; bytes a value: `VALUE_BYTES`).
//! Microbenchmarks give the constants of [`Machine`], a fit those of [`Costs`].

use crate::cuda::{Layout, best_blocks, for_kernels};
use crate::model::ModelConfig;
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{Backend, ModelPlan, PlanError, Product};

/// Rows of the widest pass that is calculated; wider ones exchange in another way.
pub const MOST_ROWS: u32 = 8;
/// Bytes that a word between ranks takes for each value of a sum: 16 for two, with a tag, in passes of one row; for
/// four in passes of eight.
const VALUE_BYTES: [f64; 2] = [8.0, 4.0];

/// What microbenchmarks say of GPUs and links. [`Machine::H200`] has their figures; the read limit is measured in each
/// run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Multiprocessors of a GPU.
    pub sms: usize,
    /// Bytes of its memory.
    pub memory_bytes: f64,
    /// GB/s (10^9) at which a GPU reads its memory.
    pub read_gb_s: f64,
    /// Bytes of a block's ring.
    pub ring_bytes: f64,
    /// From a place of the ring that is free to the bytes that fill it, in us.
    pub latency_us: f64,
    /// How fast consumers empty the ring, over the read limit.
    pub drain: f64,
    /// GB/s that a GPU writes to all its peers together.
    pub link_gb_s: f64,
}

impl Machine {
    /// H200s of one host over NVLink. Measured 2026-11-20: plain 16-byte loads; 16 KiB in flight a multiprocessor at
    /// 3160 GB/s; a ring consumed from L2 at 8400 GB/s; peer writes. The ring is that of
    /// kernels/narrow/shared_memory.cuh.
    pub const H200: Self = Self {
        sms: 132,
        memory_bytes: 143_771.0 * 1024.0 * 1024.0,
        read_gb_s: 4653.0,
        ring_bytes: 192.0 * 1024.0,
        latency_us: 0.7,
        drain: 8400.0 / 4653.0,
        link_gb_s: 366.0,
    };
}

/// What a fit finds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Share of the read limit that a stream without waits reaches, in passes of one row.
    pub reach: f64,
    /// The same in passes of eight.
    pub reach_of_8: f64,
    /// An exchange over the chip, in us.
    pub exchange_us: f64,
    /// A thousand values of it, in us.
    pub value_us: f64,
    /// What an exchange across ranks takes longer, in us, but for its bytes.
    pub rank_us: f64,
    /// What a step takes beside all that, in us.
    pub step_us: f64,
}

impl Costs {
    /// Nothing but the stream of the fullest block.
    pub const NONE: Self =
        Self { reach: 1.0, reach_of_8: 1.0, exchange_us: 0.0, value_us: 0.0, rank_us: 0.0, step_us: 0.0 };
}

/// A model that is cut for a group.
#[derive(Debug, Clone)]
pub struct Cut {
    /// Ranks that a rank exchanges sums with.
    peers: usize,
    config: ModelConfig,
    kv_heads: usize,
    /// Values of o's and of down's input.
    inputs: [usize; 2],
    /// Thread blocks of a GPU.
    blocks: usize,
    /// Bytes of qkv, o, gate/up, down and LM head of a block, each as often as once: blocks with the same bytes do the
    /// same.
    shares: Vec<[f64; 5]>,
    /// Of a block in the mean.
    mean: [f64; 5],
}

/// The rings of blocks that stream different bytes.
struct Tanks {
    /// Bytes that each holds.
    full: Vec<f64>,
    /// Bytes that one holds at most.
    most: f64,
    /// Bytes a us: memory into one, and consumers out of it while it is not empty.
    fill: f64,
    drain: f64,
    /// us since the first step began.
    time: f64,
    /// Of the phase under way: how long each consumes.
    times: Vec<f64>,
}

impl Cut {
    /// A model for a group of `ranks` GPUs with so many multiprocessors.
    ///
    /// # Errors
    /// The group's size does not divide what it has to.
    pub fn new(config: &ModelConfig, ranks: usize, sms: usize) -> Result<Self, PlanError> {
        let plan = ModelPlan::for_backend(Backend::Cuda, &for_kernels(config), ranks)?;
        let blocks = best_blocks(&plan, sms);
        let layout = Layout::new(&plan, 0, blocks, config.head_dim);
        let [qkv, out, gate_up, down] = LAYER_PRODUCTS;
        let panels = [qkv, out, gate_up, down, Product::LmHead].map(|product| layout.panel(product));
        let mut shares: Vec<_> =
            (0..blocks).map(|block| panels.map(|panel| panel.share(block, blocks) as f64)).collect();
        shares.sort_by(|a, b| a.partial_cmp(b).expect("bytes are numbers"));
        shares.dedup();
        let mean = panels.map(|panel| panel.bytes() as f64 / blocks as f64);
        Ok(Self {
            peers: ranks - 1,
            kv_heads: layout.rank().kv_heads.len(),
            inputs: [layout.rank().heads.len() * plan.config.head_dim, config.intermediate_size / ranks],
            config: plan.config.clone(),
            blocks,
            shares,
            mean,
        })
    }

    /// The same where only the first `ranks` are there, and exchange with each other.
    pub fn of_first(self, ranks: usize) -> Self {
        Self { peers: ranks - 1, ..self }
    }

    /// The same with bytes dealt evenly.
    pub fn even(&self) -> Self {
        Self { shares: vec![self.mean], ..self.clone() }
    }

    /// Bytes that a GPU reads in a step of `batch` sequences that see `context` positions each: weights, K and V.
    pub fn bytes(&self, batch: u32, context: f64) -> f64 {
        let [layer @ .., head] = self.mean;
        let layers = self.config.num_layers as f64;
        (layers * (layer.iter().sum::<f64>() + self.kv_bytes(batch, context)) + head) * self.blocks as f64
    }

    /// Whether a GPU holds its weights.
    pub fn fits(&self, machine: &Machine) -> bool {
        self.bytes(0, 0.0) < machine.memory_bytes
    }

    /// The least time of a step, in ms: its bytes at the read limit.
    pub fn floor_ms(&self, batch: u32, context: f64, machine: &Machine) -> f64 {
        self.bytes(batch, context) / machine.read_gb_s / 1e6
    }

    /// The time of a step, in ms.
    ///
    /// # Panics
    /// If the batch is over [`MOST_ROWS`].
    pub fn step_ms(&self, batch: u32, context: f64, machine: &Machine, costs: &Costs) -> f64 {
        assert!(batch <= MOST_ROWS, "{batch} rows");
        let [of_1, of_8] = VALUE_BYTES;
        let (columns, reach, value_bytes) =
            if batch == 1 { (1.0, costs.reach, of_1) } else { (8.0, costs.reach_of_8, of_8) };
        let chip = |values: usize| costs.exchange_us + costs.value_us * columns * values as f64 / 1e3;
        let hidden = self.config.hidden_size;
        let link = self.peers as f64 * columns * hidden as f64 * value_bytes / machine.link_gb_s / 1e3;
        let both = chip(hidden) + if self.peers > 0 { costs.rank_us + link } else { 0.0 };
        let [attention, activation] = self.inputs.map(chip);
        let kv = self.kv_bytes(batch, context);

        let mut tanks = Tanks::new(self.shares.len(), reach * machine.read_gb_s * 1e3 / self.blocks as f64, machine);
        let mut step = || {
            let begun = tanks.time;
            for _ in 0..self.config.num_layers {
                tanks.phase(both, self.shares.iter().map(|share| share[0]));
                tanks.phase(chip(0), self.shares.iter().map(|_| kv));
                tanks.phase(chip(0) + attention, self.shares.iter().map(|share| share[1]));
                tanks.phase(both, self.shares.iter().map(|share| share[2]));
                tanks.phase(activation, self.shares.iter().map(|share| share[3]));
            }
            tanks.phase(both, self.shares.iter().map(|share| share[4]));
            tanks.phase(2.0 * both + costs.step_us, self.shares.iter().map(|_| 0.0));
            tanks.time - begun
        };
        // The first finds the tanks as no step leaves them.
        step();
        step() / 1e3
    }

    /// Bytes of K and V of a layer that a block reads in the mean.
    fn kv_bytes(&self, batch: u32, context: f64) -> f64 {
        let position = (self.kv_heads * self.config.head_dim * 2 * 2) as f64;
        f64::from(batch) * context * position / self.blocks as f64
    }
}

impl Tanks {
    fn new(count: usize, fill: f64, machine: &Machine) -> Self {
        // While bytes are on their way into a ring that had been full, nothing comes in.
        let most = (machine.ring_bytes - machine.latency_us * fill).max(0.0);
        Self { full: vec![0.0; count], most, fill, drain: machine.drain * fill, time: 0.0, times: vec![0.0; count] }
    }

    /// All wait for `wait_us`, then each consumes its bytes; it has ended when the last has.
    fn phase(&mut self, wait_us: f64, bytes: impl Iterator<Item = f64>) {
        // A byte that is drained makes room in which so much of another comes.
        let comes = self.fill / self.drain;
        let mut longest = 0f64;
        for ((bytes, full), time) in bytes.zip(&mut self.full).zip(&mut self.times) {
            *full = (*full + wait_us * self.fill).min(self.most);
            let quick = bytes.min(*full / (1.0 - comes));
            *full = (*full - quick * (1.0 - comes)).max(0.0);
            *time = quick / self.drain + (bytes - quick) / self.fill;
            longest = longest.max(*time);
        }
        for (full, time) in self.full.iter_mut().zip(&self.times) {
            *full = (*full + (longest - time) * self.fill).min(self.most);
        }
        self.time += wait_us + longest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Shape;

    const H200: Machine = Machine::H200;

    fn cut(shape: Shape, ranks: usize) -> Cut {
        Cut::new(&shape.config(), ranks, H200.sms).unwrap()
    }

    #[test]
    fn bytes_are_those_of_the_stream_and_of_k_and_v() {
        // 32 layers, 8 KV heads of 128 dimensions, K and V in bf16.
        let position = 32.0 * 8.0 * 128.0 * 4.0;
        let one = cut(Shape::B8, 1);
        assert!((one.bytes(1, 0.0) / 15.009e9 - 1.0).abs() < 1e-3, "{}", one.bytes(1, 0.0));
        let kv = |ranks| cut(Shape::B8, ranks).bytes(8, 512.0) - cut(Shape::B8, ranks).bytes(8, 0.0);
        for (ranks, copies) in [(1, 1.0), (2, 1.0), (8, 1.0), (16, 2.0)] {
            assert!((kv(ranks) * ranks as f64 / (8.0 * 512.0 * position * copies) - 1.0).abs() < 1e-9, "{ranks}");
        }
        assert!((one.floor_ms(1, 512.0, &H200) - 3.24).abs() < 0.005);
        assert!(cut(Shape::B70, 1).fits(&H200) && !cut(Shape::B405, 4).fits(&H200) && cut(Shape::B405, 8).fits(&H200));
    }

    #[test]
    fn a_step_without_waits_takes_as_long_as_its_bytes() {
        for ranks in [1, 2, 4] {
            let even = cut(Shape::B70, ranks).even();
            let ratio = even.step_ms(1, 512.0, &H200, &Costs::NONE) / even.floor_ms(1, 512.0, &H200);
            assert!((ratio - 1.0).abs() < 1e-3, "{ranks}: {ratio}");
            // Blocks of uneven shares wait for each other.
            assert!(
                cut(Shape::B70, ranks).step_ms(1, 512.0, &H200, &Costs::NONE)
                    >= even.step_ms(1, 512.0, &H200, &Costs::NONE)
            );
        }
        let half = Costs { reach: 0.5, ..Costs::NONE };
        let even = cut(Shape::B8, 1).even();
        assert!((even.step_ms(1, 9.0, &H200, &half) / even.floor_ms(1, 9.0, &H200) - 2.0).abs() < 1e-3);
    }

    #[test]
    fn the_ring_hides_waits_that_are_shorter_than_it_takes_to_fill() {
        // A layer of 94 us, in which six waits leave room for the ring to be drained again.
        let even = cut(Shape::B8, 1).even();
        let ms = |exchange_us| even.step_ms(1, 0.0, &H200, &Costs { exchange_us, ..Costs::NONE });
        let (none, short, long) = (ms(0.0), ms(0.5), ms(20.0));
        assert!(short < none * 1.005, "{short} against {none}");
        // Six exchanges, of which the ring hides 192 KiB less those on their way: 4.7 us of each at most.
        let waits = 32.0 * 6.0 * 20.0 / 1e3;
        let hidden = 32.0 * 6.0 * 4.7 / 1e3;
        assert!(long > none + waits - hidden && long < none + waits, "{long} against {none} + {waits}");
        let shallow = Machine { ring_bytes: 0.0, ..H200 };
        let unhidden = even.step_ms(1, 0.0, &shallow, &Costs { exchange_us: 20.0, ..Costs::NONE });
        // Three more a step: before the LM head, and after it the best token and the embedding.
        assert!((unhidden - none - waits - 3.0 * 20.0 / 1e3).abs() < 1e-3 * none, "{unhidden}");
    }

    #[test]
    fn ranks_pay_for_exchanges_and_links() {
        let costs = Costs { exchange_us: 1.0, rank_us: 1.0, ..Costs::NONE };
        let group = cut(Shape::B8, 8).even();
        let alone = group.step_ms(8, 512.0, &H200, &Costs { rank_us: 0.0, ..costs });
        let narrow = Machine { link_gb_s: 36.6, ..H200 };
        let [step, dear, slow] = [
            group.step_ms(8, 512.0, &H200, &costs),
            group.step_ms(8, 512.0, &H200, &Costs { rank_us: 9.0, ..costs }),
            group.step_ms(8, 512.0, &narrow, &costs),
        ];
        assert!(alone <= step && step < dear && step < slow, "{alone} {step} {dear} {slow}");
    }
}
