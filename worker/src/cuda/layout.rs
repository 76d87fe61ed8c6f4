//! Where every weight lies in the packed stream of a GPU: arithmetic only.
//!
//! The stream is one allocation: the products of each layer in order, then the LM head. A product is row tiles of 16 rows
//! by k16 steps, in *fragments* of 512 bytes: the A operand of `mma.m16n8k16`, lane by lane. Tiles are dealt to thread blocks
//! in *groups* (a tile; of gate and up a pair), and a block takes its groups two by two, as *units*: the fragments of a unit
//! lie `[leaf][step][tile]`, so that a run of steps of a leaf is one contiguous copy.

use std::ops::Range;

use crate::model::{LayerTensor, Tensor};
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{K_STEP, Leaves, ModelPlan, Product, ROW_TILE};

/// Bytes of a fragment: 16 rows by 16 columns of bf16.
pub const FRAGMENT_BYTES: usize = ROW_TILE * K_STEP * 2;
/// Rows of half a tile: the two rows of a lane are that far apart.
const HALF_TILE: usize = ROW_TILE / 2;

/// One product in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panel {
    /// Row tiles.
    pub tiles: usize,
    /// How K is summed.
    pub k: Leaves,
    /// Tiles that a block cannot be given one without the other: 2 for gate and up, else 1.
    pub group: usize,
}

/// The rows of a tile: `[0]` from its first row on, `[1]` from its ninth on (empty where the rows are one run). Rows of the
/// tile that are in neither are zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileRows {
    /// The tensor in the checkpoint.
    pub tensor: Tensor,
    /// Rows of the tensor.
    pub runs: [Range<usize>; 2],
}

/// The stream of a model on a number of thread blocks.
#[derive(Debug, Clone)]
pub struct Layout {
    plan: ModelPlan,
    blocks: usize,
    head_width: usize,
}

impl Panel {
    /// A product of a model.
    pub fn of(plan: &ModelPlan, product: Product) -> Self {
        let c = &plan.config;
        let (tiles, group) = match product {
            Product::QueryKeyValue => ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim / ROW_TILE, 1),
            Product::AttentionOut | Product::Down => (c.hidden_size.div_ceil(ROW_TILE), 1),
            Product::GateUp => (2 * plan.intermediate.padded_len(plan.intermediate.count) / ROW_TILE, 2),
            Product::LmHead => (c.vocab_size.div_ceil(ROW_TILE), 1),
        };
        Self { tiles, k: product.k(plan), group }
    }

    /// k16 steps of a leaf.
    pub fn steps(&self) -> usize {
        self.k.padded / K_STEP
    }

    /// Bytes of a tile: all leaves.
    pub fn tile_bytes(&self) -> usize {
        self.k.count * self.steps() * FRAGMENT_BYTES
    }

    /// Bytes of the product.
    pub fn bytes(&self) -> usize {
        self.tiles * self.tile_bytes()
    }

    /// The groups of a block.
    pub fn groups_of(&self, block: usize, blocks: usize) -> Range<usize> {
        let groups = self.tiles / self.group;
        block * groups / blocks..(block + 1) * groups / blocks
    }

    /// The units of all blocks, as ranges of tiles, in stream order.
    pub fn units(&self, blocks: usize) -> impl Iterator<Item = Range<usize>> {
        let panel = *self;
        (0..blocks).flat_map(move |block| {
            let groups = panel.groups_of(block, blocks);
            let tiles = groups.start * panel.group..groups.end * panel.group;
            tiles.clone().step_by(2).map(move |first| first..(first + 2).min(tiles.end))
        })
    }

    /// Bytes of the largest share of a block.
    pub fn largest_share(&self, blocks: usize) -> usize {
        let groups = self.tiles / self.group;
        groups.div_ceil(blocks) * self.group * self.tile_bytes()
    }
}

impl Layout {
    /// The stream of a model that was planned for GPUs, with heads that are padded from `head_width` dimensions.
    pub fn new(plan: &ModelPlan, blocks: usize, head_width: usize) -> Self {
        assert!(blocks > 0 && head_width <= plan.config.head_dim, "{blocks} blocks, heads of {head_width}");
        Self { plan: plan.clone(), blocks, head_width }
    }

    /// The plan.
    pub fn plan(&self) -> &ModelPlan {
        &self.plan
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
        Panel::of(&self.plan, product)
    }

    /// Bytes of a layer.
    pub fn layer_bytes(&self) -> usize {
        LAYER_PRODUCTS.into_iter().map(|product| self.panel(product).bytes()).sum()
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

    /// Which rows of which tensor a tile of a product holds; `layer` is not looked at for the LM head.
    pub fn rows(&self, layer: usize, product: Product, tile: usize) -> TileRows {
        let c = &self.plan.config;
        let run = |tensor, rows| TileRows { tensor, runs: [rows, 0..0] };
        let whole = |tensor| run(tensor, tile * ROW_TILE..((tile + 1) * ROW_TILE).min(c.hidden_size));
        match product {
            Product::QueryKeyValue => self.head_rows(layer, tile),
            Product::AttentionOut => whole(Tensor::Layer(layer, LayerTensor::AttentionOut)),
            Product::Down => whole(Tensor::Layer(layer, LayerTensor::Down)),
            Product::GateUp => {
                let (k, column) = (self.plan.intermediate, tile / 2 * ROW_TILE);
                let (leaf, within) = (column / k.padded, column % k.padded);
                let tensor = if tile.is_multiple_of(2) { LayerTensor::Gate } else { LayerTensor::Up };
                let rows = leaf * k.len + within..leaf * k.len + k.len.min(within + ROW_TILE);
                run(Tensor::Layer(layer, tensor), rows)
            }
            Product::LmHead => run(Tensor::LmHead, tile * ROW_TILE..((tile + 1) * ROW_TILE).min(c.vocab_size)),
        }
    }

    /// Of each KV head: its query heads, its k, its v. Tiles of q and k hold the two dimensions of a rotation in rows i and
    /// i + 8, so that one lane has both.
    fn head_rows(&self, layer: usize, tile: usize) -> TileRows {
        let c = &self.plan.config;
        let (head_tiles, group) = (c.head_dim / ROW_TILE, c.num_heads / c.num_kv_heads);
        let (head, r) = (tile / head_tiles, tile % head_tiles);
        let (kv_head, place) = (head / (group + 2), head % (group + 2));
        let (tensor, head) = match place.checked_sub(group) {
            None => (LayerTensor::Query, kv_head * group + place),
            Some(0) => (LayerTensor::Key, kv_head),
            Some(_) => (LayerTensor::Value, kv_head),
        };
        let start = head * c.head_dim;
        let runs = if tensor == LayerTensor::Value {
            [start + r * ROW_TILE..start + (r + 1) * ROW_TILE, 0..0]
        } else {
            let low = start + r * HALF_TILE;
            let high = low + c.head_dim / 2;
            [low..low + HALF_TILE, high..high + HALF_TILE]
        };
        TileRows { tensor: Tensor::Layer(layer, tensor), runs }
    }

    /// The dimension of a head that row `row` of its packed q or k is.
    pub fn packed_dim(&self, row: usize) -> usize {
        let (tile, row) = (row / ROW_TILE, row % ROW_TILE);
        tile * HALF_TILE + row % HALF_TILE + row / HALF_TILE * (self.plan.config.head_dim / 2)
    }
}

/// How many thread blocks stream a model best: memory is shared evenly among them, so the time of a phase is that of the
/// block with the most bytes. Fewer than nine tenths of the SMs cannot ask for enough at a time.
pub fn best_blocks(plan: &ModelPlan, sms: usize) -> usize {
    let products = LAYER_PRODUCTS.map(|product| (Panel::of(plan, product), plan.config.num_layers));
    let head = (Panel::of(plan, Product::LmHead), 1);
    let cost = |blocks: usize| -> usize {
        let of = |(panel, times): &(Panel, usize)| panel.largest_share(blocks) * blocks * times;
        products.iter().chain([&head]).map(of).sum()
    };
    (sms - sms / 10..=sms).rev().min_by_key(|blocks| cost(*blocks)).unwrap_or(sms)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use crate::plan::Backend;

    const PRODUCTS: [Product; 5] =
        [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down, Product::LmHead];

    pub(crate) fn layout(config: &ModelConfig, blocks: usize) -> Layout {
        Layout::new(&ModelPlan::for_backend(Backend::Cuda, config, 1).unwrap(), blocks, config.head_dim)
    }

    pub(crate) fn config(heads: usize, kv: usize, intermediate: usize, vocab: usize) -> ModelConfig {
        crate::plan::tests::config(heads, kv, intermediate, vocab)
    }

    fn llama_8b() -> ModelConfig {
        ModelConfig { hidden_size: 4096, head_dim: 128, num_layers: 32, ..config(32, 8, 14336, 128_256) }
    }

    #[test]
    fn an_8b_shape_streams_its_weights_evenly_over_128_blocks() {
        let layout = layout(&llama_8b(), 128);
        let gigabytes = layout.bytes() as f64 / 1e9;
        assert!((15.0..15.02).contains(&gigabytes), "{gigabytes}");
        assert_eq!(best_blocks(layout.plan(), 132), 128);
        for product in PRODUCTS {
            let panel = layout.panel(product);
            let mean = panel.bytes() as f64 / 128.0;
            assert!(panel.largest_share(128) as f64 / mean < 1.01, "{product:?}");
        }
        assert_eq!(best_blocks(layout.plan(), 1), 1);
    }

    #[test]
    fn units_hold_every_tile_once_and_pairs_stay_together() {
        for blocks in [1, 3, 64, 128, 132, 5000] {
            let layout = layout(&config(16, 4, 400, 1000), blocks);
            for product in PRODUCTS {
                let panel = layout.panel(product);
                let units: Vec<_> = panel.units(blocks).collect();
                assert!(units.iter().all(|unit| (1..=2).contains(&unit.len())), "{product:?}");
                assert_eq!(units.iter().cloned().flatten().collect::<Vec<_>>(), (0..panel.tiles).collect::<Vec<_>>());
                if panel.group == 2 {
                    assert!(units.iter().all(|unit| unit.len() == 2 && unit.start % 2 == 0));
                }
            }
        }
    }

    #[test]
    fn tiles_hold_every_row_of_every_tensor_once() {
        for config in [config(16, 4, 400, 1000), config(4, 1, 388, 33), config(8, 8, 384, 768)] {
            let layout = layout(&config, 7);
            let mut held = std::collections::HashMap::new();
            for product in PRODUCTS {
                for tile in 0..layout.panel(product).tiles {
                    let rows = layout.rows(1, product, tile);
                    let shape = rows.tensor.shape(&config);
                    let counts = held.entry(rows.tensor).or_insert_with(|| vec![0; shape[0]]);
                    rows.runs.into_iter().flatten().for_each(|row| counts[row] += 1);
                }
            }
            assert_eq!(held.len(), 8);
            assert!(held.values().flatten().all(|count| *count == 1), "{held:?}");
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
        assert_eq!(rows.runs, [5 * 64 + 8..5 * 64 + 16, 5 * 64 + 40..5 * 64 + 48]);
    }
}
