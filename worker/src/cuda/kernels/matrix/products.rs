//! How blocks divide the products of a matrix pass, and what a pass of so many rows takes by that
//! (kernels/matrix/product.cuh).

use crate::cuda::kernels::variants::TOKEN_BLOCK;
use crate::cuda::weights::layout::Layout;
use crate::plan::Product;
use crate::plan::stream::LAYER_PRODUCTS;

/// Rows of weights of a tile of a product. It has [`TOKEN_BLOCK`] tokens.
const TILE: usize = 128;
/// Tokens of a pass at most, and k16 steps of a product at least, where halves take no longer than their k16 steps: 8B
/// on an H200, down with 257 to 512 rows (2 to 13 % faster than pairs in as many rounds, where o was 9 to 10 % slower).
const MOST_CUT: u32 = 4 * TOKEN_BLOCK as u32;
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
    /// Four such pairs have a quarter of K each.
    Quads,
}

impl Cut {
    fn parts(self) -> u32 {
        match self {
            Self::Pair => 1,
            Self::Halves => 2,
            Self::Quads => 4,
        }
    }

    /// What blocks tell each other of a tile, in k16 steps that take as long: 8B on an H200, of o with 128 to 640 rows.
    fn exchange(self) -> u32 {
        match self {
            Self::Pair => 0,
            Self::Halves => 16,
            Self::Quads => 36,
        }
    }
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

    /// What a layer's products of `rows` tokens take, in k16 steps of a tile.
    pub fn time(&self, rows: usize) -> u64 {
        self.of.iter().map(|size| u64::from(size.cut(rows as u32, self.blocks).1)).sum()
    }
}

impl Size {
    /// What takes least time for `rows` tokens, by `blocks` blocks, and how many k16 steps that is.
    fn cut(&self, rows: u32, blocks: u32) -> (Cut, u32) {
        let Self { groups, steps, cuttable } = *self;
        let tokens = rows.div_ceil(TOKEN_BLOCK as u32);
        // Two neighbouring tiles, of the last tokens by themselves two groups.
        let units = groups * (tokens / 2) + if tokens.is_multiple_of(2) { 0 } else { groups.div_ceil(2) };
        let time = |cut: Cut| {
            let hidden = cut == Cut::Halves && steps >= LONG && rows <= MOST_CUT;
            let exchange = if hidden { 0 } else { cut.exchange() };
            units.div_ceil(blocks / (2 * cut.parts())) * (steps / cut.parts() + exchange)
        };
        let cuts: &[Cut] = match blocks {
            _ if !cuttable => &[Cut::Pair],
            8.. => &[Cut::Halves, Cut::Pair, Cut::Quads],
            _ => &[Cut::Halves, Cut::Pair],
        };
        cuts.iter().map(|&cut| (cut, time(cut))).min_by_key(|(_, time)| *time).expect("there is a cut")
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
        // By 66 pairs, 33 fours or 16 eights, units of 1 to 16 blocks of tokens: 16, 32, 48, 64, 80, 96, 112, 160, 256.
        assert_eq!(cuts(OUT), [Quads, Quads, Halves, Pair, Pair, Pair, Halves, Halves, Pair, Halves, Pair]);
        assert_eq!(cuts(DOWN), [Quads, Quads, Halves, Quads, Halves, Halves, Quads, Halves, Pair, Halves, Pair]);
        // 24, 48, 72, 96, 120, 144, 168, 240, 384.
        assert_eq!(cuts(QKV), [Halves, Halves, Pair, Halves, Halves, Halves, Pair, Halves, Pair, Pair, Pair]);
    }

    #[test]
    fn time_is_of_whole_rounds() {
        // 512 rows: 3 rounds of halves of qkv, 1 round of o, 7 of gate and up, 2 of halves of down.
        assert_eq!(Products::LLAMA_8B.time(512), 3 * (128 + 16) + 256 + 7 * 256 + 2 * 448);
        assert_eq!(Products::LLAMA_8B.time(1), 144 + 100 + 2 * 256 + 260, "one row is a tile");
    }
}
