//! What is cut where, which leaves sum what, in which tree: pure code, shared by every backend.
//!
//! Contract 4 (same bits) lives here. A product `y = W x` sums its K dimension in fixed *leaves*, each in ascending
//! order from zero in fp32; leaves combine by plain fp32 adds in a fixed order over their index ([`Backend::order`]);
//! bias and residual are added after the root. The number of leaves depends on the model alone, so that any
//! tensor-parallel cut owns whole leaves.

use std::ops::Range;

use crate::model::ModelConfig;

pub mod kv;
pub mod rounding;
pub mod runs;
pub mod stream;
pub mod tree;

pub use kv::KvLayout;
pub use runs::Runs;
pub use stream::{Product, Tile};

/// Positions a KV page holds. Also the attention leaf: scores, maximum, sum and output are computed a page at a time
/// and merged in page order.
pub const PAGE_POSITIONS: usize = 64;
/// Rows of a weight tile: the M of the tensor-core instruction, and of a 512-bit register of fp32 lanes.
pub const ROW_TILE: usize = 16;
/// Columns of a leaf are padded with zeros to a multiple of this.
pub const K_STEP: usize = 16;
/// Most leaves of one product, and most ranks.
pub const MAX_LEAVES: usize = 16;

/// What computes a plan. Tensor parallelism never cuts the K of the products over the hidden size, so the number of
/// their leaves is the backend's to choose; so are the places where values round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A team of threads: one leaf over the hidden size keeps one chain of accumulators in registers.
    Cpu,
    /// A GPU: each warp of a thread block sums a leaf.
    Cuda,
}

/// How the K dimension of one product is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaves {
    /// Number of leaves; a power of two, at most [`MAX_LEAVES`].
    pub count: usize,
    /// Columns of one leaf.
    pub len: usize,
    /// `len` rounded up to [`K_STEP`]; activations and packed weights hold zeros in between.
    pub padded: usize,
}

/// The cut of a model, the same for every rank and (but for `tensor_parallel`) for every group size.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPlan {
    /// Dimensions.
    pub config: ModelConfig,
    /// What computes it.
    pub backend: Backend,
    /// Ranks: 1, 2, 4, 8 or 16.
    pub tensor_parallel: usize,
    /// q, k, v, gate, up and LM head: K is the hidden size.
    pub hidden: Leaves,
    /// o_proj: K is cut by query heads.
    pub heads: Leaves,
    /// down_proj: K is cut by intermediate columns.
    pub intermediate: Leaves,
    /// Rows of the LM head with padding: [`MAX_LEAVES`] shards of a whole number of row tiles. Rows from
    /// `config.vocab_size` up do not exist: their logits are never looked at.
    pub padded_vocab: usize,
}

/// What one rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    /// This rank, from 0.
    pub rank: usize,
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads; where ranks outnumber KV heads, several ranks hold the same one.
    pub kv_heads: Range<usize>,
    /// Leaves of o_proj.
    pub head_leaves: Range<usize>,
    /// Intermediate columns (of gate, up, down).
    pub intermediate: Range<usize>,
    /// Leaves of down_proj.
    pub intermediate_leaves: Range<usize>,
    /// Rows of embedding and LM head, within `padded_vocab`.
    pub vocab: Range<usize>,
}

/// Why a model cannot be cut for a group size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Not a group size.
    #[error("tensor parallelism {0} is not one of 1, 2, 4, 8 and 16")]
    GroupSize(usize),
    /// The query heads, or their leaves, do not divide.
    #[error(
        "tensor parallelism {tensor_parallel} does not divide the {heads} attention heads of the model into equal \
         shards"
    )]
    Heads {
        /// Ranks.
        tensor_parallel: usize,
        /// `num_attention_heads`.
        heads: usize,
    },
    /// Neither of KV heads and ranks divides the other.
    #[error("tensor parallelism {tensor_parallel} and the {kv_heads} KV heads of the model do not divide each other")]
    KvHeads {
        /// Ranks.
        tensor_parallel: usize,
        /// `num_key_value_heads`.
        kv_heads: usize,
    },
    /// The columns of the MLP, or their leaves, do not divide.
    #[error("tensor parallelism {tensor_parallel} does not divide the intermediate size {intermediate} of the model")]
    Intermediate {
        /// Ranks.
        tensor_parallel: usize,
        /// `intermediate_size`.
        intermediate: usize,
    },
}

impl Backend {
    /// The order in which leaves are added, as the plan's hash names it. CPUs: a binary tree. GPUs: see "The order of
    /// sums" in `worker/kernels/README.md`.
    pub const fn order(self) -> &'static str {
        match self {
            Self::Cpu => "tree:neighbours-first",
            Self::Cuda => "quads:ascending,gate-up-head:ascending",
        }
    }

    /// Leaves of the products over the hidden size (q, k, v, gate, up, LM head).
    fn hidden_leaves(self, config: &ModelConfig) -> usize {
        match self {
            Self::Cpu => 1,
            // Whole k16 steps, so that no leaf over the hidden size is padded.
            Self::Cuda => most_leaves((config.hidden_size / K_STEP).max(1)),
        }
    }
}

impl Leaves {
    fn of(total: usize, count: usize) -> Self {
        let len = total / count;
        Self { count, len, padded: len.next_multiple_of(K_STEP) }
    }

    /// Where column `column` of the unpadded K dimension (0 is the first column of leaf 0) lies in a vector of padded
    /// leaves.
    pub fn padded_column(&self, column: usize) -> usize {
        column / self.len * self.padded + column % self.len
    }

    /// Elements of a vector of `leaves` padded leaves.
    pub fn padded_len(&self, leaves: usize) -> usize {
        leaves * self.padded
    }

    /// Unpadded columns of leaf `leaf`.
    pub fn columns(&self, leaf: usize) -> Range<usize> {
        leaf * self.len..(leaf + 1) * self.len
    }
}

impl ModelPlan {
    /// Cuts a model for a group of `tensor_parallel` ranks on CPU sockets.
    ///
    /// # Errors
    /// The group size does not divide what it has to.
    pub fn new(config: &ModelConfig, tensor_parallel: usize) -> Result<Self, PlanError> {
        Self::for_backend(Backend::Cpu, config, tensor_parallel)
    }

    /// Cuts a model for a group of `tensor_parallel` ranks.
    ///
    /// # Errors
    /// The group size does not divide what it has to.
    pub fn for_backend(backend: Backend, config: &ModelConfig, tensor_parallel: usize) -> Result<Self, PlanError> {
        if !tensor_parallel.is_power_of_two() || tensor_parallel > MAX_LEAVES {
            return Err(PlanError::GroupSize(tensor_parallel));
        }
        let head_leaves = most_leaves(config.num_heads);
        let heads = Leaves::of(config.num_heads * config.head_dim, head_leaves);
        let intermediate = Leaves::of(config.intermediate_size, most_leaves(config.intermediate_size));
        if !heads.count.is_multiple_of(tensor_parallel) {
            return Err(PlanError::Heads { tensor_parallel, heads: config.num_heads });
        }
        let kv_heads = config.num_kv_heads;
        if !kv_heads.is_multiple_of(tensor_parallel) && !tensor_parallel.is_multiple_of(kv_heads) {
            return Err(PlanError::KvHeads { tensor_parallel, kv_heads });
        }
        if !intermediate.count.is_multiple_of(tensor_parallel) {
            return Err(PlanError::Intermediate { tensor_parallel, intermediate: config.intermediate_size });
        }
        Ok(Self {
            backend,
            tensor_parallel,
            hidden: Leaves::of(config.hidden_size, backend.hidden_leaves(config)),
            heads,
            intermediate,
            padded_vocab: config.vocab_size.next_multiple_of(MAX_LEAVES * ROW_TILE),
            config: config.clone(),
        })
    }

    /// What rank `rank` holds.
    ///
    /// # Panics
    /// If `rank` is not under `tensor_parallel`.
    pub fn rank(&self, rank: usize) -> RankPlan {
        let tp = self.tensor_parallel;
        assert!(rank < tp, "rank {rank} of {tp}");
        let share = |total: usize| rank * (total / tp)..(rank + 1) * (total / tp);
        let kv = self.config.num_kv_heads;
        let kv_heads = if kv >= tp {
            share(kv)
        } else {
            // tp / kv ranks share a KV head; heads are dealt to ranks in order, so it is the one their q heads read.
            let head = rank * kv / tp;
            head..head + 1
        };
        RankPlan {
            rank,
            heads: share(self.config.num_heads),
            kv_heads,
            head_leaves: share(self.heads.count),
            intermediate: share(self.config.intermediate_size),
            intermediate_leaves: share(self.intermediate.count),
            vocab: share(self.padded_vocab),
        }
    }

    /// Names the bit domain of results, such as `cpu-avx512bf16-1a2b3c4d-5e6f708192a3`: backend, instruction set, what
    /// its kernels were found to compute (`arithmetic`), and the hash of this plan.
    pub fn bit_domain(&self, backend: &str, isa: &str, arithmetic: &str) -> String {
        let hash = self.hash();
        let hex: String = hash[..6].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{backend}-{isa}-{arithmetic}-{hex}")
    }
}

impl RankPlan {
    /// Rows of `vocab` that exist; empty for a shard that is all padding.
    pub fn real_vocab(&self, plan: &ModelPlan) -> Range<usize> {
        self.vocab.start.min(plan.config.vocab_size)..self.vocab.end.min(plan.config.vocab_size)
    }

    /// The KV head that query head `head` reads; both as the whole model counts them.
    pub fn kv_head_of(&self, plan: &ModelPlan, head: usize) -> usize {
        head / (plan.config.num_heads / plan.config.num_kv_heads)
    }
}

/// The largest power of two up to [`MAX_LEAVES`] that divides `n`.
fn most_leaves(n: usize) -> usize {
    (1 << n.trailing_zeros().min(MAX_LEAVES.trailing_zeros())).min(MAX_LEAVES)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::config::{Architecture, Rope};

    /// A config with the given heads, KV heads, intermediate size and vocabulary.
    pub(crate) fn config(heads: usize, kv_heads: usize, intermediate: usize, vocab: usize) -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Llama,
            hidden_size: 256,
            num_layers: 2,
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_dim: 64,
            intermediate_size: intermediate,
            vocab_size: vocab,
            max_positions: 2048,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 10_000.0, llama3: None },
            sliding_window: None,
            qkv_bias: false,
            qk_norm: false,
            tied_embeddings: false,
            layer_weights: crate::model::WeightFormat::Bf16,
            storage: crate::model::Storage::Plain,
        }
    }

    #[test]
    fn ranks_partition_the_model_at_every_group_size() {
        for (heads, kv, intermediate, vocab) in
            [(32, 8, 14336, 128_256), (16, 16, 384, 768), (64, 1, 320, 1), (14, 2, 4864, 151_936)]
        {
            let config = config(heads, kv, intermediate, vocab);
            for tp in [1, 2, 4, 8, 16] {
                let Ok(plan) = ModelPlan::new(&config, tp) else { continue };
                let ranks: Vec<_> = (0..tp).map(|r| plan.rank(r)).collect();
                let covers = |pick: &dyn Fn(&RankPlan) -> Range<usize>, total: usize| {
                    let mut next = 0;
                    for rank in &ranks {
                        assert_eq!(pick(rank).start, next);
                        next = pick(rank).end;
                    }
                    assert_eq!(next, total);
                };
                covers(&|r| r.heads.clone(), heads);
                covers(&|r| r.head_leaves.clone(), plan.heads.count);
                covers(&|r| r.intermediate.clone(), intermediate);
                covers(&|r| r.intermediate_leaves.clone(), plan.intermediate.count);
                covers(&|r| r.vocab.clone(), plan.padded_vocab);
                covers(&|r| r.real_vocab(&plan), vocab);
                for rank in &ranks {
                    assert_eq!(rank.vocab.len() % ROW_TILE, 0);
                    let columns = rank.head_leaves.start * plan.heads.len..rank.head_leaves.end * plan.heads.len;
                    assert_eq!(columns, rank.heads.start * 64..rank.heads.end * 64);
                    let columns = rank.intermediate_leaves.start * plan.intermediate.len
                        ..rank.intermediate_leaves.end * plan.intermediate.len;
                    assert_eq!(columns, rank.intermediate);
                    for head in rank.heads.clone() {
                        assert!(rank.kv_heads.contains(&rank.kv_head_of(&plan, head)), "{heads}/{kv} tp {tp} {rank:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn leaves_depend_on_the_model_alone() {
        let config = config(16, 4, 384, 1000);
        let one = ModelPlan::new(&config, 1).unwrap();
        for tp in [2, 4, 8, 16] {
            let other = ModelPlan::new(&config, tp).unwrap();
            assert_eq!(ModelPlan { tensor_parallel: 1, ..other }, one);
        }
        assert_eq!(one.intermediate, Leaves { count: 16, len: 24, padded: 32 });
        assert_eq!(one.heads, Leaves { count: 16, len: 64, padded: 64 });
        assert_eq!(one.padded_vocab, 1024);
        assert_eq!(one.intermediate.padded_column(25), 33);
        assert_eq!([1, 2, 3, 12, 16, 96, 1 << 40].map(most_leaves), [1, 2, 1, 4, 16, 16, 16]);
    }

    #[test]
    fn a_gpu_cuts_the_hidden_size_into_leaves_of_whole_steps() {
        for (hidden, count, len) in [(4096, 16, 256), (2048, 16, 128), (896, 8, 112), (256, 16, 16), (16, 1, 16)] {
            let config = ModelConfig { hidden_size: hidden, ..config(16, 4, 384, 1000) };
            let plan = ModelPlan::for_backend(Backend::Cuda, &config, 1).unwrap();
            assert_eq!(plan.hidden, Leaves { count, len, padded: len });
            let cpu = ModelPlan::new(&config, 1).unwrap();
            assert_eq!((plan.heads, plan.intermediate), (cpu.heads, cpu.intermediate));
        }
    }

    #[test]
    fn a_group_size_that_does_not_divide_is_refused_with_its_numbers() {
        let refused = |config: &ModelConfig, tp| ModelPlan::new(config, tp).unwrap_err();
        let base = config(16, 4, 384, 768);
        for tp in [0, 3, 6, 32] {
            assert_eq!(refused(&base, tp), PlanError::GroupSize(tp));
        }
        assert_eq!(refused(&config(14, 2, 384, 768), 4), PlanError::Heads { tensor_parallel: 4, heads: 14 });
        assert_eq!(refused(&config(12, 3, 384, 768), 2), PlanError::KvHeads { tensor_parallel: 2, kv_heads: 3 });
        let error = refused(&config(16, 4, 388, 768), 8);
        assert_eq!(error.to_string(), "tensor parallelism 8 does not divide the intermediate size 388 of the model");
    }
}
