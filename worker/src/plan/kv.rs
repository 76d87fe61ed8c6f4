//! Where K and V of a position lie in the paged KV cache of a rank: arithmetic only.
//!
//! A pool holds, for each layer, page and KV head of this rank, one block of K and one of V. K is
//! `[head_dim][PAGE_POSITIONS]`, so that positions are the lanes when scores are computed. V is
//! `[PAGE_POSITIONS][head_dim]`: dimensions are the lanes when outputs are. Both are fp32 on the CPU backend: rounding
//! them to bf16 alone costs the logits of a model with sharp attention an error of 0.01. The GPU backend brings its own
//! layout, of bf16.

use super::{ModelPlan, PAGE_POSITIONS, RankPlan};

/// Bytes of an element, an fp32.
const ELEMENT_BYTES: usize = 4;

/// The layout of one rank's KV pool. All offsets are in elements from the start of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Decoder layers.
    pub layers: usize,
    /// KV heads of this rank.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Pages of the pool; every layer has all of them.
    pub pages: usize,
}

impl KvLayout {
    /// The layout of a rank with `pages` pages.
    pub fn new(plan: &ModelPlan, rank: &RankPlan, pages: usize) -> Self {
        let kv_heads = rank.kv_heads.len();
        Self { layers: plan.config.num_layers, kv_heads, head_dim: plan.config.head_dim, pages }
    }

    /// Elements of K, and also of V, of one page and KV head of one layer.
    pub fn block_len(&self) -> usize {
        PAGE_POSITIONS * self.head_dim
    }

    /// Bytes of one page of this rank: K and V, all KV heads, all layers.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.kv_heads * 2 * self.block_len() * ELEMENT_BYTES
    }

    /// Elements of the pool; `None` if that does not fit the address space.
    pub fn pool_len(&self) -> Option<usize> {
        self.pages
            .checked_mul(self.page_bytes())?
            .checked_div(ELEMENT_BYTES)
            .filter(|len| *len <= isize::MAX as usize / ELEMENT_BYTES)
    }

    /// Offset of the K block of a page; `kv_head` counts from the rank's first.
    pub fn k_block(&self, layer: usize, page: usize, kv_head: usize) -> usize {
        debug_assert!(layer < self.layers && page < self.pages && kv_head < self.kv_heads);
        ((layer * self.pages + page) * self.kv_heads + kv_head) * 2 * self.block_len()
    }

    /// Offset of the V block of a page; `kv_head` counts from the rank's first.
    pub fn v_block(&self, layer: usize, page: usize, kv_head: usize) -> usize {
        self.k_block(layer, page, kv_head) + self.block_len()
    }

    /// Offset within a K block of dimension `dim` of the position `in_page`.
    pub fn k_element(&self, in_page: usize, dim: usize) -> usize {
        dim * PAGE_POSITIONS + in_page
    }

    /// Offset within a V block of dimension `dim` of the position `in_page`.
    pub fn v_element(&self, in_page: usize, dim: usize) -> usize {
        in_page * self.head_dim + dim
    }

    /// The pages that `positions` positions need.
    pub fn pages_for(positions: usize) -> usize {
        positions.div_ceil(PAGE_POSITIONS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::config;

    #[test]
    fn every_element_has_its_own_place_and_the_pool_is_full() {
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 16, pages: 2 };
        let len = layout.pool_len().unwrap();
        assert_eq!(len * ELEMENT_BYTES, layout.pages * layout.page_bytes());
        let mut seen = vec![false; len];
        for layer in 0..2 {
            for page in 0..2 {
                for head in 0..3 {
                    for position in 0..PAGE_POSITIONS {
                        for dim in 0..16 {
                            let k = layout.k_block(layer, page, head) + layout.k_element(position, dim);
                            let v = layout.v_block(layer, page, head) + layout.v_element(position, dim);
                            assert!(!std::mem::replace(&mut seen[k], true));
                            assert!(!std::mem::replace(&mut seen[v], true));
                        }
                    }
                }
            }
        }
        assert!(seen.iter().all(|s| *s));
    }

    #[test]
    fn an_8b_shape_has_256_kib_a_position() {
        let mut config = config(32, 8, 14336, 128_256);
        config.num_layers = 32;
        config.head_dim = 128;
        for (tp, kib) in [(1, 256), (8, 32), (16, 32)] {
            let plan = ModelPlan::new(&config, tp).unwrap();
            let layout = KvLayout::new(&plan, &plan.rank(0), 1);
            assert_eq!(layout.page_bytes(), kib * 1024 * PAGE_POSITIONS);
        }
        let absurd = KvLayout { layers: 32, kv_heads: 8, head_dim: 128, pages: usize::MAX / 2 };
        assert_eq!(absurd.pool_len(), None);
    }
}
