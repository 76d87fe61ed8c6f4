//! How blocks divide the products of a matrix pass, and what a pass of so many rows takes by that
//! (kernels/matrix/product.cuh).

use crate::cuda::kernels::variants::TOKEN_BLOCK;
use crate::cuda::weights::layout::Layout;
use crate::plan::Product;
use crate::plan::stream::LAYER_PRODUCTS;

/// Rows of weights of a tile of a product. It has [`TOKEN_BLOCK`] tokens.
const TILE: usize = 128;
/// Tokens of a pass at most where K of long products is cut although that saves no round.
const MOST_CUT: u32 = 4 * TOKEN_BLOCK as u32;
/// k16 steps that such a product has at least: 8B on an H200, 257 to 512 rows: down (896 steps) 4 to 13 % faster, o
/// (256) 9 to 10 % slower.
const LONG: u32 = 512;
/// Leaves of K that a product has at least whose K can be cut.
const QUAD_LEAVES: usize = 4;

/// How neighbouring blocks divide a product's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// Two blocks have neighbouring tokens, and all of K.
    Pair,
    /// Two such pairs have half of K each.
    Halves,
    /// Four blocks have the same tile, and a quarter of K each.
    Quads,
}

/// The products of a layer, in stream order, by so many blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Products {
    of: [Size; 4],
    blocks: u32,
}

/// Groups of [`TILE`] rows of weights, k16 steps, and whether K has the leaves to be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    groups: u32,
    steps: u32,
    cuttable: bool,
}

impl Products {
    /// Of a rank.
    pub(super) fn of(layout: &Layout, blocks: u32) -> Self {
        let size = |product: Product| {
            let panel = layout.panel(product);
            // Ranks have a part of the leaves of o and of down.
            let cuttable = panel.leaves >= QUAD_LEAVES && panel.leaves == panel.k.count;
            let groups = (panel.tiles * 16).div_ceil(TILE) as u32;
            // Gate and up are summed ascending.
            Size {
                groups,
                steps: (panel.leaves * panel.steps()) as u32,
                cuttable: cuttable && product != Product::GateUp,
            }
        };
        Self { of: LAYER_PRODUCTS.map(size), blocks }
    }

    /// What takes least time for `rows` tokens, of each product.
    pub(super) fn cuts(&self, rows: u32) -> [Cut; 4] {
        self.of.map(|size| size.cut(rows, self.blocks).0)
    }

    /// What a layer's products of `rows` tokens take, in k16 steps of half a round of tiles.
    pub fn time(&self, rows: usize) -> u64 {
        let time = |size: &Size| u64::from(size.cut(rows as u32, self.blocks).1) * u64::from(size.steps);
        self.of.iter().map(time).sum()
    }
}

impl Size {
    /// What takes least time for `rows` tokens, by `blocks` blocks, and how many rounds of half of K that is.
    fn cut(&self, rows: u32, blocks: u32) -> (Cut, u32) {
        let Self { groups, steps, cuttable } = *self;
        let tokens = rows.div_ceil(TOKEN_BLOCK as u32);
        // Two neighbouring tiles, of the last tokens by themselves two groups.
        let units = groups * (tokens / 2) + if tokens.is_multiple_of(2) { 0 } else { groups.div_ceil(2) };
        let (pairs, halves) = (2 * units.div_ceil(blocks / 2), units.div_ceil(blocks / 4));
        let as_long = halves == pairs && steps >= LONG && rows <= MOST_CUT;
        match tokens {
            _ if !cuttable => (Cut::Pair, pairs),
            0 | 1 => (Cut::Quads, groups.div_ceil(blocks / 4).div_ceil(2)),
            _ if halves < pairs || as_long => (Cut::Halves, halves),
            _ => (Cut::Pair, pairs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Products {
        pub const LLAMA_8B: Self = Self { of: [QKV, OUT, GATE_UP, DOWN], blocks: 132 };
        /// Of one of four ranks.
        pub const LLAMA_8B_RANK: Self = Self {
            of: [
                Size { groups: 12, ..QKV },
                Size { steps: 64, cuttable: false, ..OUT },
                Size { groups: 56, ..GATE_UP },
                Size { steps: 224, cuttable: false, ..DOWN },
            ],
            blocks: 132,
        };
    }

    const GATE_UP: Size = Size { groups: 224, steps: 256, cuttable: false };
    const QKV: Size = Size { groups: 48, steps: 256, cuttable: true };
    const OUT: Size = Size { groups: 32, steps: 256, cuttable: true };
    const DOWN: Size = Size { groups: 32, steps: 896, cuttable: true };

    #[test]
    fn k_is_cut_where_blocks_would_idle() {
        let cuts =
            |size: Size| [1, 128, 129, 257, 385, 512, 513, 641, 769, 1280, 2048].map(|rows| size.cut(rows, 132).0);
        use Cut::{Halves, Pair, Quads};
        // By 66 pairs or 33 fours. Up to 512 rows 32, 48 and 64 units: 1, 1, 1 rounds or 1, 2, 2 of half as long; then
        // 80, 96, 112, 160 and 256: 2, 2, 2, 3, 4 or 3, 3, 4, 5, 8.
        assert_eq!(cuts(OUT), [Quads, Quads, Halves, Pair, Pair, Pair, Halves, Halves, Pair, Halves, Pair]);
        assert_eq!(cuts(DOWN), [Quads, Quads, Halves, Halves, Halves, Halves, Halves, Halves, Pair, Halves, Pair]);
        // 48, 72 and 96 units: 1, 2, 2 rounds or 2, 3, 3; then 120, 144, 168, 240 and 384: 2, 3, 3, 4, 6 or 4, 5, 6, 8,
        // 12.
        assert_eq!(cuts(QKV), [Quads, Quads, Pair, Halves, Halves, Halves, Pair, Halves, Pair, Pair, Pair]);
    }

    #[test]
    fn time_is_of_whole_rounds() {
        // 512 rows: 1.5 rounds of qkv, 1 of o, 7 of gate and up, 1 of down.
        assert_eq!(Products::LLAMA_8B.time(512), 3 * 256 + 2 * 256 + 14 * 256 + 2 * 896);
        assert_eq!(
            Products::LLAMA_8B.time(1),
            256 + 256 + 4 * 256 + 896,
            "one row is a tile; two rounds of quarters are one of halves"
        );
    }
}
