//! On how many thread blocks a model is laid out.

use std::cmp::Reverse;

use super::variants::variants_of;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::panel::Panel;
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{ModelPlan, Product};

/// The crowd that attention's share of a block is weighed with.
const ROWS: usize = 32;
const POSITIONS: usize = 512;

/// How many thread blocks stream any rank of a model best: memory is shared evenly among them, so the time of a phase
/// is that of the block with the most bytes; in wide passes, of what pairs own, of the pair with the most, and of
/// attention of the block with the most rows of a KV head. Narrow and wide passes count alike. In a group narrow passes
/// do not count: there the ring evens out what blocks have of a layer (70b on four GPUs: the fullest of 128 blocks has
/// 6 % more than the mean, of 132 1 %; a step of 8 rows takes no longer on 128). Fewer than nine tenths of the SMs
/// cannot ask for enough at a time; of a group's rank, whose rings have to last while it waits for others, all but a few
/// take part. Before that it counts how many kernels take them: wide ones take an even number.
pub fn best_blocks(plan: &ModelPlan, sms: usize) -> usize {
    let panel = |product| (product, Panel::of(plan, &plan.rank(0), product));
    let layer = LAYER_PRODUCTS.map(|product| (panel(product), plan.config.num_layers));
    let all = || layer.into_iter().chain([(panel(Product::LmHead), 1)]);
    let of_pairs = |product| matches!(product, Product::QueryKeyValue | Product::AttentionOut | Product::Down);
    let attention = |blocks: usize| {
        let rows = ROWS.div_ceil((blocks / plan.rank(0).kv_heads.len()).max(1));
        rows * POSITIONS * plan.config.head_dim * 2 * size_of::<u16>() * plan.config.num_layers
    };
    let cost = |blocks: usize| {
        let narrow = match plan.tensor_parallel {
            1 => all().map(|((_, panel), times)| panel.largest_share(blocks, 1) * times).sum(),
            _ => 0,
        };
        let wide = all().map(|((product, panel), times)| {
            let together = if of_pairs(product) { 2 } else { 1 };
            panel.largest_share(blocks, together) * times / together
        });
        blocks * (narrow + wide.sum::<usize>() + attention(blocks))
    };
    let spared = if plan.tensor_parallel == 1 { sms / 10 } else { sms / 32 };
    let kernels = |blocks| variants_of(&Layout::new(plan, 0, blocks, plan.config.head_dim)).len();
    let best = (sms - spared..=sms).rev().min_by_key(|blocks| (Reverse(kernels(*blocks)), cost(*blocks)));
    best.unwrap_or(sms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Shape;
    use crate::cuda::weights::layout::tests::{group, layout, llama_8b, llama_70b};

    /// Multiprocessors of an H200.
    const SMS: usize = 132;

    #[test]
    fn as_many_blocks_take_part_as_all_kernels_want() {
        assert_eq!(best_blocks(layout(&llama_8b(), 1).plan(), SMS), 128);
        for (config, ranks) in [llama_8b(), llama_70b()].iter().flat_map(|config| [2, 4, 8, 16].map(|n| (config, n))) {
            assert_eq!(best_blocks(group(config, ranks, 1)[0].plan(), SMS), 128, "{ranks} ranks of {config:?}");
        }
    }

    #[test]
    fn blocks_and_pairs_have_even_shares() {
        // Of 192 row tiles of o and down 64 pairs of blocks own three each. Of 120 blocks none owns more than two,
        // either, which is the smaller loss in narrow passes, but in wide ones some pairs have four.
        let config = Shape::B3.config();
        let of = |ranks| best_blocks(group(&config, ranks, 1)[0].plan(), SMS);
        assert_eq!([1, 2, 4].map(of), [128, 128, 128]);
        assert_eq!(best_blocks(layout(&llama_8b(), 1).plan(), 1), 1);
    }
}
