//! A product of a rank in the packed stream: its row tiles, its K, and which tiles a thread block is given. The same
//! arithmetic is in kernels/layout/shape.cuh.

use std::ops::Range;

use super::heads::for_kernels;
use crate::model::{ModelConfig, WeightFormat};
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{Backend, K_STEP, Leaves, ModelPlan, Product, ROW_TILE, RankPlan};

/// Weights of a fragment: 16 rows by 16 columns.
pub const FRAGMENT: usize = ROW_TILE * K_STEP;

/// One product in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panel {
    /// Row tiles.
    pub tiles: usize,
    /// How K is summed, over all ranks.
    pub k: Leaves,
    /// The first leaf of K that this rank holds.
    pub first_leaf: usize,
    /// Leaves that it holds.
    pub leaves: usize,
    /// How tiles are dealt to blocks.
    pub deal: Deal,
    /// How its weights are stored.
    pub format: WeightFormat,
    /// Tiles of a unit; what is left over at a block's end is a smaller one.
    pub unit: usize,
}

/// How the tiles of a product are dealt to blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deal {
    /// Evenly.
    Even,
    /// Gate and up: the two tiles of a k16 step of down stay together where no block gets fuller by it.
    Pairs,
    /// q, k and v of a rank of a group, whose tiles are as long as so many of gate and up: blocks with fewer of those
    /// get more.
    Beside(usize),
}

impl Panel {
    /// A product of a rank.
    pub fn of(plan: &ModelPlan, rank: &RankPlan, product: Product) -> Self {
        let c = &plan.config;
        let alone = plan.tensor_parallel == 1;
        let tiles = match product {
            Product::QueryKeyValue => (rank.heads.len() + 2 * rank.kv_heads.len()) * c.head_dim / ROW_TILE,
            Product::AttentionOut | Product::Down => c.hidden_size.div_ceil(ROW_TILE),
            Product::GateUp => 2 * plan.intermediate.padded_len(rank.intermediate_leaves.len()) / ROW_TILE,
            // The shards of a group are equally long, so they reach past the vocabulary.
            Product::LmHead => if alone { c.vocab_size } else { rank.vocab.len() }.div_ceil(ROW_TILE),
        };
        // On one GPU each warp of a block has a leaf, and works on two tiles at a time. A rank of a group has fewer
        // leaves than there are warps: others work on the next tiles meanwhile, so each tile comes by itself.
        let unit = if alone || !matches!(product, Product::AttentionOut | Product::Down) { 2 } else { 1 };
        let leaves = product.leaves(plan, rank);
        let deal = match product {
            Product::QueryKeyValue if !alone => Deal::Beside(Self::of(plan, rank, Product::GateUp).tiles),
            Product::GateUp => Deal::Pairs,
            _ => Deal::Even,
        };
        let format = product.format(plan);
        Self { deal, tiles, format, k: product.k(plan), first_leaf: leaves.start, leaves: leaves.len(), unit }
    }

    /// k16 steps of a leaf.
    pub fn steps(&self) -> usize {
        self.k.padded / K_STEP
    }

    /// k16 steps of a run: fragments of a tile behind the scales that all of them have.
    pub fn run_steps(&self) -> usize {
        run_steps(self.format, self.k).expect("the load refuses what has no runs")
    }

    /// k16 steps of a piece of a run: a lane has what it holds of their fragments, at most 16 bytes, side by side.
    pub fn piece_steps(&self) -> usize {
        (PIECE_BYTES / (self.fragment_bytes() / LANES)).min(self.run_steps())
    }

    /// Bytes of a run's scales and zero points.
    pub fn run_header(&self) -> usize {
        match (self.format.group(), self.format.has_zeros()) {
            (None, _) => 0,
            (Some(_), zeros) => ROW_TILE * size_of::<u16>() * if zeros { 2 } else { 1 },
        }
    }

    /// Bytes of a run.
    pub fn run_bytes(&self) -> usize {
        self.run_header() + self.run_steps() * self.fragment_bytes()
    }

    /// Bytes of a fragment.
    pub fn fragment_bytes(&self) -> usize {
        self.format.bytes(FRAGMENT)
    }

    /// Bytes of a tile: all leaves of the rank.
    pub fn tile_bytes(&self) -> usize {
        self.leaves * self.steps() / self.run_steps() * self.run_bytes()
    }

    /// Bytes of the product.
    pub fn bytes(&self) -> usize {
        self.tiles * self.tile_bytes()
    }

    /// The tiles of a block.
    pub fn tiles_of(&self, block: usize, blocks: usize) -> Range<usize> {
        let before = |block: usize| match self.deal {
            Deal::Even => block * self.tiles / blocks,
            Deal::Pairs => before_in_pairs(self.tiles, block, blocks),
            Deal::Beside(others) if self.dealt_together(others, blocks) => self.before_together(others, block, blocks),
            Deal::Beside(_) => self.before_apart(block, blocks),
        };
        before(block)..before(block + 1)
    }

    /// Tiles before a block, if its share of this product and of the other is even together.
    fn before_together(&self, others: usize, block: usize, blocks: usize) -> usize {
        block * (self.tiles + others) / blocks - before_in_pairs(others, block, blocks)
    }

    /// Tiles before a block, if they are spread by themselves: the first blocks of a round have one more, where the
    /// last ones have more of the other product.
    fn before_apart(&self, block: usize, blocks: usize) -> usize {
        (block * self.tiles).div_ceil(blocks)
    }

    /// Attention waits for the block with the most tiles of q, k and v: they are dealt apart if that makes them fewer
    /// and no block fuller, or if together a block would have to give one back.
    fn dealt_together(&self, others: usize, blocks: usize) -> bool {
        let most = |before: &dyn Fn(usize) -> usize| (0..blocks).map(|block| before(block + 1) - before(block)).max();
        let fullest = |before: &dyn Fn(usize) -> usize| {
            (most(before), most(&|block| before(block) + before_in_pairs(others, block, blocks)))
        };
        if (self.tiles + others) / blocks < others.div_ceil(blocks) {
            return false;
        }
        let together = fullest(&|block| self.before_together(others, block, blocks));
        let apart = fullest(&|block| self.before_apart(block, blocks));
        together.0 <= apart.0 || together.1 < apart.1
    }

    /// Bytes of a block.
    pub fn share(&self, block: usize, blocks: usize) -> usize {
        self.tiles_of(block, blocks).len() * self.tile_bytes()
    }

    /// The units of all blocks, as ranges of tiles, in stream order.
    pub fn units(&self, blocks: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let panel = *self;
        (0..blocks).flat_map(move |block| {
            let tiles = panel.tiles_of(block, blocks);
            tiles.clone().step_by(panel.unit).map(move |first| first..(first + panel.unit).min(tiles.end))
        })
    }

    /// Of each tile, where its first run lies, in runs from the product's begin: `<< 1`, and 1 where it shares a unit
    /// with another, so that its next run is two further on.
    pub fn fragments(&self, blocks: usize) -> impl Iterator<Item = u32> + use<> {
        let runs = self.leaves * self.steps() / self.run_steps();
        self.units(blocks).flat_map(move |unit| {
            let first = unit.start * runs;
            (0..unit.len()).map(move |place| ((first + place) << 1 | (unit.len() - 1)) as u32)
        })
    }

    /// Bytes of the largest share of so many blocks next to each other.
    pub fn largest_share(&self, blocks: usize, together: usize) -> usize {
        let share = |first: usize| (first..(first + together).min(blocks)).map(|block| self.share(block, blocks)).sum();
        (0..blocks).step_by(together).map(share).max().unwrap_or(0)
    }
}

/// Most k16 steps of a run: no unit of work of any pass has fewer.
const MOST_RUN_STEPS: usize = 4;
/// Lanes of a warp, and what one reads of shared memory at a time.
pub const LANES: usize = 32;
const PIECE_BYTES: usize = 16;

/// k16 steps of a run of a product, whose groups of columns and leaves have whole runs; `None`: they do not. Of E4M3
/// without groups as many as a lane reads at a time, where leaves are whole eights of steps (kernels/layout/shape.cuh
/// says why).
fn run_steps(format: WeightFormat, k: Leaves) -> Option<usize> {
    let Some(columns) = format.group() else {
        return Some(if format == WeightFormat::E4m3 && (k.padded / K_STEP).is_multiple_of(8) { 2 } else { 1 });
    };
    let whole = |steps: &usize| k.len.is_multiple_of(steps * K_STEP) && columns.is_multiple_of(steps * K_STEP);
    [MOST_RUN_STEPS, 2, 1].into_iter().find(whole)
}

/// Whether there are kernels for the format of a model's weights: groups must have whole runs in all leaves, and heads
/// no padding.
pub fn takes(config: &ModelConfig) -> bool {
    let Ok(plan) = ModelPlan::for_backend(Backend::Cuda, config, 1) else { return true };
    let has_runs = |product: Product| run_steps(product.format(&plan), product.k(&plan)).is_some();
    config.layer_weights.group().is_none()
        || for_kernels(config).head_dim == config.head_dim && LAYER_PRODUCTS.into_iter().all(has_runs)
}

/// Tiles before a block, which are dealt in twos if no block gets fuller by it.
fn before_in_pairs(tiles: usize, block: usize, blocks: usize) -> usize {
    let pairs = tiles / 2;
    if 2 * pairs.div_ceil(blocks) == tiles.div_ceil(blocks) {
        block * pairs / blocks * 2
    } else {
        block * tiles / blocks
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{PRODUCTS, config, group, layout, llama_8b, llama_70b};
    use super::*;

    #[test]
    fn ranks_deal_qkv_to_few_tiles_a_block_where_no_block_gets_fuller_by_it() {
        // Most tiles of qkv, and with those of gate and up, of a block.
        let most = |config: &ModelConfig, ranks: usize, blocks: usize| {
            let layout = group(config, ranks, blocks).remove(0);
            let [qkv, gate_up] = [Product::QueryKeyValue, Product::GateUp].map(|product| layout.panel(product));
            let tiles = |block: usize| {
                let own = qkv.tiles_of(block, blocks).len();
                (own, own + gate_up.tiles_of(block, blocks).len())
            };
            let (own, both): (Vec<_>, Vec<_>) = (0..blocks).map(tiles).unzip();
            (own.into_iter().max().unwrap(), both.into_iter().max().unwrap())
        };
        assert_eq!(most(&llama_8b(), 2, 128), (2, 9));
        assert_eq!(most(&llama_8b(), 4, 128), (1, 5), "together it would be 2 and 5");
        assert_eq!(most(&llama_70b(), 4, 128), (2, 9));
    }

    #[test]
    fn gate_and_up_stay_in_pairs_where_no_block_gets_fuller_by_it() {
        let shares = |config: &ModelConfig, ranks: usize| {
            let panel = group(config, ranks, 128).remove(0).panel(Product::GateUp);
            (0..4).map(|block| panel.tiles_of(block, 128).len()).collect::<Vec<_>>()
        };
        assert_eq!(shares(&llama_8b(), 2), [7; 4]);
        assert_eq!(shares(&llama_8b(), 4), [2, 4, 4, 4], "singly 3 and 4");
        assert_eq!(shares(&llama_70b(), 4), [7; 4]);
    }

    #[test]
    fn units_hold_every_tile_once() {
        let config = config(16, 4, 400, 1000);
        let layouts =
            [1, 3, 64, 128, 132, 5000].map(|blocks| [layout(&config, blocks), group(&config, 4, blocks).remove(1)]);
        for layout in layouts.iter().flatten() {
            let blocks = layout.blocks();
            for product in PRODUCTS {
                let panel = layout.panel(product);
                let units: Vec<_> = panel.units(blocks).collect();
                let whole = layout.plan().tensor_parallel == 1 || panel.k == layout.plan().hidden;
                let most = if whole { 2 } else { 1 };
                assert!(units.iter().all(|unit| (1..=most).contains(&unit.len())), "{product:?}");
                assert_eq!(units.iter().cloned().flatten().collect::<Vec<_>>(), (0..panel.tiles).collect::<Vec<_>>());
            }
        }
    }
}
