//! Matrix passes on a GPU: every row has the bits that it has alone in narrow passes, whatever the model's shape, the
//! chunks of its prompt and the rows beside it.

mod bits;
mod chosen;
mod controls;
mod plans;

use crate::cuda::Options;
use crate::cuda::tests::wide::{Model, load_rows, random};
use crate::model::ModelConfig;

pub(super) use chosen::Echo;

/// Sequences of a test: more than other passes hold.
const SLOTS: usize = 88;
/// Those from here on are never computed: their pages hold NaN.
const FIRST_EMPTY: usize = 72;
const BATCH_TOKENS: usize = 512;
/// Spans are of 1024 positions.
const CONTEXT: usize = 1536;
const VOCAB: usize = 2048;
/// Sets of warps of a KV head with which rows that decode are items, computed behind tiles, and with which each of the
/// spans of long ones is, computed beside tiles.
const WHOLE_ROWS: usize = 1;
const CUT_ROWS: usize = 1000;

pub(super) fn shape(hidden_size: usize, heads: (usize, usize, usize), intermediate: usize) -> ModelConfig {
    let (heads, kv_heads, head_dim) = heads;
    let shape = crate::plan::tests::config(heads, kv_heads, intermediate, VOCAB);
    ModelConfig { hidden_size, head_dim, max_positions: CONTEXT, ..shape }
}

/// SmolLM 135M: 36 row tiles of the hidden state, 3 query heads of a KV head.
pub(super) fn smol() -> ModelConfig {
    ModelConfig { tied_embeddings: true, ..shape(576, (9, 3, 64), 1536) }
}

/// Qwen 2.5 0.5B: 7 query heads of a KV head.
fn qwen_half() -> ModelConfig {
    ModelConfig { tied_embeddings: true, qkv_bias: true, ..shape(896, (14, 2, 64), 4864) }
}

/// Llama 3.2 3B.
fn llama_3b() -> ModelConfig {
    ModelConfig { tied_embeddings: true, ..shape(3072, (24, 8, 128), 8192) }
}

/// Qwen 2.5 1.5B: 6 query heads of a KV head.
fn qwen_1_5b() -> ModelConfig {
    ModelConfig { tied_embeddings: true, qkv_bias: true, ..shape(1536, (12, 2, 128), 8960) }
}

/// Qwen 3 0.6B.
fn qwen3() -> ModelConfig {
    ModelConfig { tied_embeddings: true, qk_norm: true, ..shape(1024, (16, 8, 128), 3072) }
}

fn llama_8b() -> ModelConfig {
    shape(4096, (32, 8, 128), 14_336)
}

/// Everything at once, with a window that reaches over spans, and heads that are padded.
fn features(head_dim: usize, window: usize) -> ModelConfig {
    let shape = shape(512, (16, 2, head_dim), 1000);
    ModelConfig { qkv_bias: true, qk_norm: true, sliding_window: Some(window), ..shape }
}

fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed * 977 + i * 37 + i * i % 101) % VOCAB as u32).collect()
}

fn model(config: &ModelConfig, options: Options) -> Model {
    Model::new(load_rows(config, random(config), (SLOTS, BATCH_TOKENS), false, options), SLOTS)
}

/// From now on whatever can be is a matrix pass; or as the product chooses.
fn matrix_only(model: &mut Model, only: bool) {
    model.decoder.decoder.launcher.matrix_only = only;
}
