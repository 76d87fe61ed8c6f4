//! What the ranks of a group hold of a model, and how evenly their blocks share it.

use std::collections::HashMap;

use crate::cuda::kernels::blocks::best_blocks;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::layout::tests::{PRODUCTS, config, group, layout, llama_8b, llama_70b};
use crate::cuda::weights::panel::Panel;
use crate::model::{LayerTensor, ModelConfig, Tensor};
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{Backend, ModelPlan, Product};

#[test]
fn the_tiles_of_a_group_hold_every_weight_once_and_a_kv_head_once_in_each_rank_that_reads_it() {
    let mut groups = 0;
    for (config, ranks) in [config(16, 4, 400, 1000), config(4, 1, 388, 33), config(16, 16, 384, 768)]
        .iter()
        .flat_map(|config| [1, 2, 4, 8, 16].map(|ranks| (config, ranks)))
    {
        let mut held = HashMap::new();
        for (layout, product) in group(config, ranks, 7).iter().flat_map(|of| PRODUCTS.map(|p| (of, p))) {
            let panel = layout.panel(product);
            let columns =
                panel.k.columns(panel.first_leaf).start..panel.k.columns(panel.first_leaf + panel.leaves).start;
            for tile in 0..panel.tiles {
                for run in layout.rows(1, product, tile) {
                    let shape = run.tensor.shape(config);
                    let counts = held.entry(run.tensor).or_insert_with(|| vec![0; shape[0] * shape[1]]);
                    for row in run.rows {
                        counts[row * shape[1]..][columns.clone()].iter_mut().for_each(|count| *count += 1);
                    }
                }
            }
        }
        groups += usize::from(!held.is_empty());
        for (tensor, counts) in held {
            let kv = matches!(tensor, Tensor::Layer(_, LayerTensor::Key | LayerTensor::Value));
            let times = if kv { ranks.div_ceil(config.num_kv_heads) } else { 1 };
            assert!(counts.iter().all(|count| *count == times), "{tensor:?}, {ranks} ranks");
        }
    }
    assert_eq!(groups, 5 + 3 + 5, "4 heads and 388 columns are cut by 1, 2 and 4");
}

#[test]
fn all_ranks_have_streams_of_one_shape_and_their_shards_of_the_embedding_follow_each_other() {
    for (vocab, tied) in [(1000, false), (33, false), (1000, true)] {
        let config = ModelConfig { tied_embeddings: tied, ..config(16, 4, 400, vocab) };
        for ranks in [2, 4, 8, 16] {
            let group = group(&config, ranks, 7);
            let mut next = 0;
            for layout in &group {
                for product in PRODUCTS {
                    let first = Panel { first_leaf: 0, ..layout.panel(product) };
                    assert_eq!(first, group[0].panel(product));
                }
                let rows = layout.embedding_rows();
                assert_eq!(layout.embedding_bytes(), rows.len() * 256 * 2);
                assert!(rows.start == next || tied);
                next = rows.end;
                assert_eq!(layout.logits(), vocab.next_multiple_of(16));
            }
            assert_eq!(next, if tied { 0 } else { vocab });
        }
        assert_eq!(layout(&config, 7).logits(), vocab.next_multiple_of(16));
    }
}

/// Bytes of each block in a layer and in all, the largest over the mean.
fn uneven(layout: &Layout) -> [f64; 2] {
    let of = |product, block| layout.panel(product).share(block, layout.blocks());
    let layers: Vec<usize> = (0..layout.blocks()).map(|b| LAYER_PRODUCTS.map(|p| of(p, b)).iter().sum()).collect();
    let times = layout.plan().config.num_layers;
    let all: Vec<usize> = layers.iter().enumerate().map(|(b, l)| l * times + of(Product::LmHead, b)).collect();
    [(layers, layout.layer_bytes()), (all, layout.bytes())].map(|(shares, bytes)| {
        assert_eq!(shares.iter().sum::<usize>(), bytes);
        let largest = shares.into_iter().max().unwrap_or(0);
        (largest * layout.blocks()) as f64 / bytes as f64
    })
}

/// Whole tiles are dealt, so a rank's few of qkv and gate/up do not always come out even. The first design's aim was
/// 1.02; ARCHITECTURE.md says why it is not met.
#[test]
fn the_largest_share_of_a_block_is_what_is_written_here() {
    let shares_8b =
        [(128, 1.0, 1.000), (128, 1.038, 1.037), (128, 1.115, 1.109), (128, 1.269, 1.252), (128, 1.519, 1.485)];
    let shares_70b =
        [(128, 1.0, 1.000), (128, 1.020, 1.020), (128, 1.059, 1.058), (128, 1.137, 1.136), (128, 1.269, 1.266)];
    for (name, config, shares) in [("8B", llama_8b(), shares_8b), ("70B", llama_70b(), shares_70b)] {
        for ((blocks, layer, all), ranks) in shares.into_iter().zip([1, 2, 4, 8, 16]) {
            let plan = ModelPlan::for_backend(Backend::Cuda, &config, ranks).unwrap();
            assert_eq!(best_blocks(&plan, 132), blocks, "{name}, {ranks} ranks");
            for layout in group(&config, ranks, blocks) {
                let [in_layer, in_all] = uneven(&layout);
                println!("{name}, rank {} of {ranks}, {blocks} blocks: {in_layer:.4} {in_all:.4}", layout.rank().rank);
                assert!((in_layer - layer).abs() < 6e-4 && (in_all - all).abs() < 6e-4, "{in_layer} {in_all}");
            }
        }
    }
}
