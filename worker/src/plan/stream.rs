//! The order in which a rank's weights stream: products of a layer in order, row tiles of a product in order, and
//! within a tile its leaves in order.
//!
//! A product's packed weights are `[tiles][leaves of this rank][padded columns][ROW_TILE]` elements in some order that
//! the backend chooses for the innermost two. A tile never straddles a head, nor the border between q, k and v; gate
//! and up alternate tile by tile (on a GPU by eight rows), so that whoever streams tile pair i has both factors of the
//! same 16 columns of the product.

use std::ops::Range;

use super::{Leaves, ModelPlan, ROW_TILE, RankPlan, Runs};
use crate::model::WeightFormat;
use crate::model::tensors::{LayerTensor, Tensor};

/// A product whose weights stream, in the order of a layer; the LM head follows the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// Rows: q heads, then k heads, then v heads of this rank. K: hidden.
    QueryKeyValue,
    /// Rows: hidden. K: heads of this rank, by leaf.
    AttentionOut,
    /// Row tiles: gate, up, gate, up... of this rank's columns, each padded to whole tiles; on a GPU half a tile of
    /// each. K: hidden.
    GateUp,
    /// Rows: hidden. K: intermediate columns of this rank, by leaf.
    Down,
    /// Rows: vocabulary of this rank, with padding. K: hidden.
    LmHead,
}

/// The products of a layer, in stream order.
pub const LAYER_PRODUCTS: [Product; 4] =
    [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down];

/// One row tile of a product: which rows of which tensor its up to [`ROW_TILE`] rows are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// The tensor in the checkpoint.
    pub tensor: Tensor,
    /// Rows of the whole tensor; fewer than [`ROW_TILE`] at an edge, where the remaining rows of the tile are zero.
    pub rows: Range<usize>,
}

impl Product {
    /// How K is summed.
    pub fn k(self, plan: &ModelPlan) -> Leaves {
        match self {
            Self::QueryKeyValue | Self::GateUp | Self::LmHead => plan.hidden,
            Self::AttentionOut => plan.heads,
            Self::Down => plan.intermediate,
        }
    }

    /// How its weights are stored.
    pub fn format(self, plan: &ModelPlan) -> WeightFormat {
        if self == Self::LmHead { WeightFormat::Bf16 } else { plan.config.layer_weights }
    }

    /// The leaves of K that this rank holds. Their columns in the tensor are `k.columns(leaf)`.
    pub fn leaves(self, plan: &ModelPlan, rank: &RankPlan) -> Range<usize> {
        match self {
            Self::QueryKeyValue | Self::GateUp | Self::LmHead => 0..plan.hidden.count,
            Self::AttentionOut => rank.head_leaves.clone(),
            Self::Down => rank.intermediate_leaves.clone(),
        }
    }

    /// Row tiles of this rank.
    pub fn tiles(self, plan: &ModelPlan, rank: &RankPlan) -> usize {
        let head_tiles = plan.config.head_dim / ROW_TILE;
        match self {
            Self::QueryKeyValue => (rank.heads.len() + 2 * rank.kv_heads.len()) * head_tiles,
            Self::AttentionOut | Self::Down => plan.config.hidden_size.div_ceil(ROW_TILE),
            Self::GateUp => 2 * rank.intermediate.len().div_ceil(ROW_TILE),
            Self::LmHead => rank.vocab.len() / ROW_TILE,
        }
    }

    /// Packed elements of one tile of this rank, padding of the leaves included.
    pub fn tile_len(self, plan: &ModelPlan, rank: &RankPlan) -> usize {
        self.k(plan).padded_len(self.leaves(plan, rank).len()) * ROW_TILE
    }

    /// The runs of its leaves on this rank; `None` where CPUs have none for the model ([`Runs::new`]).
    pub fn runs(self, plan: &ModelPlan, rank: &RankPlan) -> Option<Runs> {
        Runs::new(self.format(plan), self.k(plan), self.leaves(plan, rank).start)
    }

    /// Bytes of a tile as CPUs pack it: weights, and the scales and zero points of groups.
    pub fn tile_bytes(self, plan: &ModelPlan, rank: &RankPlan) -> usize {
        let (format, leaves) = (self.format(plan), self.leaves(plan, rank).len());
        let runs = self.runs(plan, rank);
        runs.map_or_else(|| format.bytes(self.tile_len(plan, rank)), |runs| runs.bytes(format, leaves))
    }

    /// Bytes of one whose weights in groups have become bf16.
    pub fn expanded_tile_bytes(self, plan: &ModelPlan, rank: &RankPlan) -> usize {
        let leaves = self.leaves(plan, rank).len();
        self.runs(plan, rank).map_or(0, |runs| runs.expanded_bytes(self.format(plan), leaves))
    }

    /// Which rows tile `tile` of this rank holds. `layer` is not looked at for the LM head.
    ///
    /// # Panics
    /// If `tile` is not under [`Product::tiles`].
    pub fn tile(self, plan: &ModelPlan, rank: &RankPlan, layer: usize, tile: usize) -> Tile {
        assert!(tile < self.tiles(plan, rank), "tile {tile} of {self:?}");
        let of_layer = |tensor| Tensor::Layer(layer, tensor);
        let cut = |tensor, first: usize, index: usize, end: usize| {
            let start = (first + index * ROW_TILE).min(end);
            Tile { tensor, rows: start..(start + ROW_TILE).min(end) }
        };
        let head_dim = plan.config.head_dim;
        match self {
            Self::QueryKeyValue => {
                let head_tiles = head_dim / ROW_TILE;
                let (q, kv) = (rank.heads.len() * head_tiles, rank.kv_heads.len() * head_tiles);
                let kv_start = rank.kv_heads.start * head_dim;
                let (tensor, first, index) = if tile < q {
                    (LayerTensor::Query, rank.heads.start * head_dim, tile)
                } else if tile < q + kv {
                    (LayerTensor::Key, kv_start, tile - q)
                } else {
                    (LayerTensor::Value, kv_start, tile - q - kv)
                };
                cut(of_layer(tensor), first, index, usize::MAX)
            }
            Self::AttentionOut => cut(of_layer(LayerTensor::AttentionOut), 0, tile, plan.config.hidden_size),
            Self::Down => cut(of_layer(LayerTensor::Down), 0, tile, plan.config.hidden_size),
            Self::GateUp => {
                let tensor = if tile.is_multiple_of(2) { LayerTensor::Gate } else { LayerTensor::Up };
                cut(of_layer(tensor), rank.intermediate.start, tile / 2, rank.intermediate.end)
            }
            Self::LmHead => cut(Tensor::LmHead, rank.vocab.start, tile, plan.config.vocab_size),
        }
    }
}

/// Bytes of a rank's weights as CPUs pack them, with their scales: all layers and the LM head, padding included.
pub fn packed_bytes(plan: &ModelPlan, rank: &RankPlan) -> usize {
    let of = |product: Product| {
        let rows = product.tiles(plan, rank) * ROW_TILE;
        let scales = if product.format(plan).has_row_scales() { rows * size_of::<f32>() } else { 0 };
        product.tiles(plan, rank) * product.tile_bytes(plan, rank) + scales
    };
    plan.config.num_layers * LAYER_PRODUCTS.into_iter().map(of).sum::<usize>() + of(Product::LmHead)
}

/// Bytes (bf16) of the rows of the embedding that a rank holds beside its packed weights: none where the LM head, which
/// is packed, is the embedding.
pub fn embedding_bytes(plan: &ModelPlan, rank: &RankPlan) -> usize {
    if plan.config.tied_embeddings { 0 } else { rank.real_vocab(plan).len() * plan.config.hidden_size * 2 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::plan::tests::config;

    const PRODUCTS: [Product; 5] =
        [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down, Product::LmHead];

    #[test]
    fn the_ranks_tiles_hold_every_weight() {
        for (heads, kv, intermediate, vocab) in [(16, 16, 384, 768), (16, 2, 400, 1000), (4, 1, 320, 100)] {
            let config = config(heads, kv, intermediate, vocab);
            for tp in [1, 2, 4, 8, 16] {
                let Ok(plan) = ModelPlan::new(&config, tp) else { continue };
                let mut held: HashMap<Tensor, Vec<u32>> = HashMap::new();
                for rank in (0..tp).map(|r| plan.rank(r)) {
                    for product in PRODUCTS {
                        for tile in (0..product.tiles(&plan, &rank)).map(|t| product.tile(&plan, &rank, 1, t)) {
                            let shape = tile.tensor.shape(&config);
                            let leaves = product.leaves(&plan, &rank);
                            let columns = product.k(&plan).columns(leaves.start).start
                                ..product.k(&plan).columns(leaves.end - 1).end;
                            let counts = held.entry(tile.tensor).or_insert_with(|| vec![0; shape[0] * shape[1]]);
                            for row in tile.rows {
                                counts[row * shape[1]..][columns.clone()].iter_mut().for_each(|c| *c += 1);
                            }
                        }
                    }
                }
                let copies = tp.div_ceil(kv) as u32;
                for (tensor, counts) in &held {
                    let key_or_value = matches!(tensor, Tensor::Layer(_, LayerTensor::Key | LayerTensor::Value));
                    let expected = if key_or_value { copies } else { 1 };
                    assert!(counts.iter().all(|c| *c == expected), "{tensor:?} at tp {tp}");
                }
                assert_eq!(held.len(), 8);
            }
        }
    }

    #[test]
    fn an_8b_shape_packs_to_its_weight_bytes() {
        let mut config = config(32, 8, 14336, 128_256);
        config.hidden_size = 4096;
        config.head_dim = 128;
        config.num_layers = 32;
        let plan = ModelPlan::new(&config, 1).unwrap();
        let gigabytes = packed_bytes(&plan, &plan.rank(0)) as f64 / 1e9;
        assert!((15.0..15.02).contains(&gigabytes), "{gigabytes}");
    }
}
