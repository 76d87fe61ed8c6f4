//! On how many thread blocks a model is laid out.

use std::cmp::Reverse;

use super::variants::variants_of;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::panel::Panel;
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{ModelPlan, Product};

/// How many thread blocks stream any rank of a model best: memory is shared evenly among them, so the time of a phase
/// is that of the block with the most bytes; of a layer of a group, where few tiles are dealt and the ring evens them
/// out, that of the block with the most in all its phases. Fewer than nine tenths of the SMs cannot ask for enough at a
/// time; of a group's rank, whose rings have to last while it waits for others, all but a few take part. Before that it
/// counts how many kernels take them: passes of many rows are worth more than an even share (70b on four GPUs: the
/// fullest of 128 blocks has 6 % more than the mean, of 132 1 %; a step of 8 rows takes no longer on 128).
pub fn best_blocks(plan: &ModelPlan, sms: usize) -> usize {
    let panel = |product| Panel::of(plan, &plan.rank(0), product);
    let products = LAYER_PRODUCTS.map(|product| (panel(product), plan.config.num_layers));
    let head = (panel(Product::LmHead), 1);
    let all = || products.iter().chain([&head]);
    let cost = |blocks: usize| {
        let share = |block| all().map(|(panel, times)| panel.share(block, blocks) * times).sum();
        let largest: usize = match plan.tensor_parallel {
            1 => all().map(|(panel, times)| panel.largest_share(blocks) * times).sum(),
            _ => (0..blocks).map(share).max().unwrap_or(0),
        };
        largest * blocks
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
    fn where_wide_passes_take_no_number_shares_are_even() {
        // 192 row tiles of o and down are no multiple of 128.
        let config = Shape::B3.config();
        let of = |ranks| best_blocks(group(&config, ranks, 1)[0].plan(), SMS);
        assert_eq!([1, 2, 4].map(of), [119, 128, 128]);
        assert_eq!(best_blocks(layout(&llama_8b(), 1).plan(), 1), 1);
    }
}
