//! Where every weight lies in the packed stream of a GPU, one rank of a group: arithmetic only.
//!
//! The stream is one allocation: the products of each layer in order, then the LM head. A product is row tiles of 16
//! rows by k16 steps, in *fragments*: the A operand of `mma.m16n8k16`, 16 bytes a lane in bf16, 8 in E4M3, 4 in 4
//! bits. Steps that have their scales in common, or that a lane reads at a time, are a *run*: scales, then *pieces*
//! of up to 16 bytes a lane, `[piece][lane][step]`. In bf16 a run is a step. Tiles are dealt to thread blocks, and a
//! block takes its own as *units* of two, or of one: the runs of a unit lie `[leaf][run][tile]`, so that some steps
//! of a leaf are one contiguous copy.
//!
//! A rank has the rows of its heads, intermediate columns and vocabulary shard in the products over the hidden size,
//! and its leaves of K in o_proj and down_proj, whose rows it has all. All ranks' streams have the same shape.

use std::ops::Range;

use super::panel::Panel;
use crate::model::{LayerTensor, Tensor};
use crate::plan::stream::{LAYER_PRODUCTS, embedding_bytes};
use crate::plan::{ModelPlan, Product, ROW_TILE, RankPlan};

/// Rows of half a tile: the two rows of a lane are that far apart. They are the two dimensions of a rotation in q and
/// k, and a row of gate and the same of up.
const HALF_TILE: usize = ROW_TILE / 2;

/// Rows of a tile that follow each other in the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowRun {
    /// The first, in the tile.
    pub at: usize,
    /// The tensor in the checkpoint.
    pub tensor: Tensor,
    /// Rows of the tensor.
    pub rows: Range<usize>,
}

/// The stream of a rank on a number of thread blocks.
#[derive(Debug, Clone)]
pub struct Layout {
    plan: ModelPlan,
    rank: RankPlan,
    ranks: usize,
    blocks: usize,
    head_width: usize,
}

impl Layout {
    /// The stream of a rank of a model that was planned for GPUs, with heads that are padded from `head_width`
    /// dimensions.
    pub fn new(plan: &ModelPlan, rank: usize, blocks: usize, head_width: usize) -> Self {
        assert!(blocks > 0 && head_width <= plan.config.head_dim, "{blocks} blocks, heads of {head_width}");
        Self { plan: plan.clone(), rank: plan.rank(rank), ranks: plan.tensor_parallel, blocks, head_width }
    }

    /// The same stream in a group that has only the first `ranks` ranks of its plan.
    pub fn of_first(self, ranks: usize) -> Self {
        assert!(self.rank.rank < ranks && ranks <= self.plan.tensor_parallel, "{} of {ranks}", self.rank.rank);
        Self { ranks, ..self }
    }

    /// Ranks that exchange sums: all of the plan, but in a benchmark of some.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The plan.
    pub fn plan(&self) -> &ModelPlan {
        &self.plan
    }

    /// What the rank holds.
    pub fn rank(&self) -> &RankPlan {
        &self.rank
    }

    /// Dimensions of a head that are not padding.
    pub fn head_width(&self) -> usize {
        self.head_width
    }

    /// Thread blocks that share the stream.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// A product.
    pub fn panel(&self, product: Product) -> Panel {
        Panel::of(&self.plan, &self.rank, product)
    }

    /// Bytes of a layer.
    pub fn layer_bytes(&self) -> usize {
        LAYER_PRODUCTS.into_iter().map(|product| self.panel(product).bytes()).sum()
    }

    /// Rows of the embedding that the rank holds beside the stream: those of its vocabulary shard; none where the LM
    /// head, which is in the stream, is the embedding.
    pub fn embedding_rows(&self) -> Range<usize> {
        if self.plan.config.tied_embeddings { 0..0 } else { self.rank.real_vocab(&self.plan) }
    }

    /// Bytes of the rows of [`Layout::embedding_rows`].
    pub fn embedding_bytes(&self) -> usize {
        embedding_bytes(&self.plan, &self.rank)
    }

    /// Logits of a row, of all ranks, with those that fill up a tile.
    pub fn logits(&self) -> usize {
        self.plan.config.vocab_size.next_multiple_of(ROW_TILE)
    }

    /// Bytes of the stream: what one token reads of weights.
    pub fn bytes(&self) -> usize {
        self.plan.config.num_layers * self.layer_bytes() + self.panel(Product::LmHead).bytes()
    }

    /// First byte of a product; `layer` is not looked at for the LM head.
    pub fn start(&self, layer: usize, product: Product) -> usize {
        let place = LAYER_PRODUCTS.iter().position(|p| *p == product);
        let layer = if place.is_some() { layer } else { self.plan.config.num_layers };
        let before = &LAYER_PRODUCTS[..place.unwrap_or(0)];
        layer * self.layer_bytes() + before.iter().map(|p| self.panel(*p).bytes()).sum::<usize>()
    }

    /// [`Panel::fragments`] of all products: those of a layer in order, then the LM head.
    pub fn tiles(&self) -> Vec<u32> {
        let products = LAYER_PRODUCTS.into_iter().chain([Product::LmHead]);
        products.flat_map(|product| self.panel(product).fragments(self.blocks)).collect()
    }

    /// Which rows of which tensors a tile of a product holds; those that are in no run are zero. `layer` is not looked
    /// at for the LM head.
    pub fn rows(&self, layer: usize, product: Product, tile: usize) -> Vec<RowRun> {
        let c = &self.plan.config;
        let of_layer = |tensor| Tensor::Layer(layer, tensor);
        let whole = |tensor, first: usize, end: usize| {
            vec![RowRun { at: 0, tensor, rows: first.min(end)..(first + ROW_TILE).min(end) }]
        };
        let mut runs = match product {
            Product::QueryKeyValue => self.head_rows(layer, tile),
            Product::GateUp => self.gate_up_rows(layer, tile),
            Product::AttentionOut => whole(of_layer(LayerTensor::AttentionOut), tile * ROW_TILE, c.hidden_size),
            Product::Down => whole(of_layer(LayerTensor::Down), tile * ROW_TILE, c.hidden_size),
            Product::LmHead => whole(Tensor::LmHead, self.rank.vocab.start + tile * ROW_TILE, c.vocab_size),
        };
        runs.retain(|run| !run.rows.is_empty());
        runs
    }

    /// Two tiles have gate and up of a k16 step of down: 0 to 3 and 8 to 11 of it the first, the others the second. So
    /// each has the whole of what a lane holds of the step's activations.
    fn gate_up_rows(&self, layer: usize, tile: usize) -> Vec<RowRun> {
        let (k, column) = (self.plan.intermediate, tile / 2 * ROW_TILE);
        let (leaf, within) = (self.rank.intermediate_leaves.start + column / k.padded, column % k.padded);
        let run = |part: usize, at: usize, tensor| {
            let first = (within + tile % 2 * 4 + part * HALF_TILE).min(k.len);
            let rows = leaf * k.len + first..leaf * k.len + (first + 4).min(k.len);
            RowRun { at: at + part * 4, tensor: Tensor::Layer(layer, tensor), rows }
        };
        [(0, LayerTensor::Gate), (HALF_TILE, LayerTensor::Up)]
            .into_iter()
            .flat_map(|(at, tensor)| [0, 1].map(|part| run(part, at, tensor)))
            .collect()
    }

    /// Of each KV head: its query heads, its k, its v. Tiles of q and k hold the two dimensions of a rotation in rows i
    /// and i + 8.
    fn head_rows(&self, layer: usize, tile: usize) -> Vec<RowRun> {
        let c = &self.plan.config;
        let (heads, kv_heads) = (&self.rank.heads, &self.rank.kv_heads);
        let (head_tiles, group) = (c.head_dim / ROW_TILE, heads.len() / kv_heads.len());
        let (head, r) = (tile / head_tiles, tile % head_tiles);
        let (kv_head, place) = (head / (group + 2), head % (group + 2));
        let (tensor, head) = match place.checked_sub(group) {
            None => (LayerTensor::Query, heads.start + kv_head * group + place),
            Some(0) => (LayerTensor::Key, kv_heads.start + kv_head),
            Some(_) => (LayerTensor::Value, kv_heads.start + kv_head),
        };
        let start = head * c.head_dim;
        let halves = match tensor {
            LayerTensor::Value => [r * ROW_TILE, r * ROW_TILE + HALF_TILE],
            _ => [r * HALF_TILE, r * HALF_TILE + c.head_dim / 2],
        };
        let run = |(at, first)| RowRun {
            at,
            tensor: Tensor::Layer(layer, tensor),
            rows: start + first..start + first + HALF_TILE,
        };
        [0, HALF_TILE].into_iter().zip(halves).map(run).collect()
    }

    /// The dimension of a head that row `row` of its packed q or k is.
    pub fn packed_dim(&self, row: usize) -> usize {
        let (tile, row) = (row / ROW_TILE, row % ROW_TILE);
        tile * HALF_TILE + row % HALF_TILE + row / HALF_TILE * (self.plan.config.head_dim / 2)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use crate::plan::Backend;

    pub(crate) const PRODUCTS: [Product; 5] =
        [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down, Product::LmHead];

    pub(crate) fn layout(config: &ModelConfig, blocks: usize) -> Layout {
        Layout::new(&ModelPlan::for_backend(Backend::Cuda, config, 1).unwrap(), 0, blocks, config.head_dim)
    }

    /// The ranks of a group; empty where it cannot be cut so.
    pub(crate) fn group(config: &ModelConfig, tensor_parallel: usize, blocks: usize) -> Vec<Layout> {
        let plan = ModelPlan::for_backend(Backend::Cuda, config, tensor_parallel);
        let rank = |rank| Layout::new(plan.as_ref().expect("ranks are of a plan"), rank, blocks, config.head_dim);
        if plan.is_err() { Vec::new() } else { (0..tensor_parallel).map(rank).collect() }
    }

    pub(crate) fn config(heads: usize, kv: usize, intermediate: usize, vocab: usize) -> ModelConfig {
        crate::plan::tests::config(heads, kv, intermediate, vocab)
    }

    pub(crate) fn llama_8b() -> ModelConfig {
        ModelConfig { hidden_size: 4096, head_dim: 128, num_layers: 32, ..config(32, 8, 14336, 128_256) }
    }

    pub(crate) fn llama_70b() -> ModelConfig {
        ModelConfig { hidden_size: 8192, head_dim: 128, num_layers: 80, ..config(64, 8, 28_672, 128_256) }
    }

    #[test]
    fn an_8b_shape_streams_its_weights_evenly_over_128_blocks() {
        let layout = layout(&llama_8b(), 128);
        let gigabytes = layout.bytes() as f64 / 1e9;
        assert!((15.0..15.02).contains(&gigabytes), "{gigabytes}");
        for product in PRODUCTS {
            let panel = layout.panel(product);
            let mean = panel.bytes() as f64 / 128.0;
            assert!(panel.largest_share(128, 1) as f64 / mean < 1.01, "{product:?}");
        }
    }

    #[test]
    fn starts_follow_each_other_and_rotation_pairs_are_rows_i_and_i_plus_8() {
        let layout = layout(&config(16, 4, 400, 1000), 7);
        let mut end = 0;
        for layer in 0..2 {
            for product in LAYER_PRODUCTS {
                assert_eq!(layout.start(layer, product), end);
                end += layout.panel(product).bytes();
            }
        }
        assert_eq!(layout.start(9, Product::LmHead), end);
        assert_eq!(layout.bytes(), end + layout.panel(Product::LmHead).bytes());
        let dims: Vec<_> = (0..64).map(|row| layout.packed_dim(row)).collect();
        assert_eq!(dims[..17], [0, 1, 2, 3, 4, 5, 6, 7, 32, 33, 34, 35, 36, 37, 38, 39, 8]);
        let mut sorted = dims.clone();
        sorted.sort();
        assert_eq!(sorted, (0..64).collect::<Vec<_>>());
        // Tile 1 of the second query head of the second KV head (4 query heads and k and v a KV head, 4 tiles a head).
        let rows = layout.rows(0, Product::QueryKeyValue, (6 + 1) * 4 + 1);
        let query = Tensor::Layer(0, LayerTensor::Query);
        let run = |at, first: usize| RowRun { at, tensor: query, rows: 320 + first..328 + first };
        assert_eq!(rows, [run(0, 8), run(8, 40)]);
    }
}
