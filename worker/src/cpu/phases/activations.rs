//! What a step writes.

use super::Shard;
use crate::cpu::expansions::Expansions;
use crate::cpu::inputs::Inputs;
use crate::cpu::memory::{Buffer, OutOfMemory};
use crate::plan::rounding::RoundingPoint;
use crate::plan::{ModelPlan, RankPlan};

/// What a step writes; mapped at load for the longest step.
pub struct Activations {
    /// `[rows, hidden]` fp32: the residual stream.
    pub(super) residual: Buffer<f32>,
    /// `[rows, hidden leaves]`: normalised residual.
    pub(super) attention_input: Inputs,
    /// `[rows, heads of this rank * head_dim]` fp32
    pub(super) queries: Buffer<f32>,
    /// `[rows, head leaves of this rank]`: attention's output.
    pub(super) attended: Inputs,
    /// `[rows, hidden leaves]`: normalised residual.
    pub(super) mlp_input: Inputs,
    /// `[rows, intermediate leaves of this rank]`: `silu(gate) * up`.
    pub(super) gated: Inputs,
    /// `[sampled rows, hidden leaves]`: normalised residual.
    pub(super) head_input: Inputs,
    /// `[rows, head_dim / 2]` (cosine, sine)
    pub(super) turns: Buffer<[f32; 2]>,
    /// `[sampled rows, vocabulary of this rank]` fp32
    pub(super) logits: Buffer<f32>,
    /// K and V of all sequences, laid out by [`KvLayout`].
    pub(super) pool: Buffer<f32>,
    /// Weights in groups as bf16, a unit a thread.
    pub(super) expansions: Expansions,
}

impl Activations {
    /// Buffers for steps of up to `max_rows` rows of which `max_samples` are sampled, on so many threads.
    ///
    /// The KV pool is address space: a page takes memory when a sequence first writes to it, and keeps it.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn new(shard: &Shard, max_rows: usize, max_samples: usize, threads: usize) -> Result<Self, OutOfMemory> {
        let (plan, rank) = (&shard.plan, &shard.rank);
        let c = &plan.config;
        let what = "the activations";
        let hidden = plan.hidden.padded_len(plan.hidden.count);
        let heads = plan.heads.padded_len(rank.head_leaves.len());
        let intermediate = plan.intermediate.padded_len(rank.intermediate_leaves.len());
        let pool_len = shard.kv.pool_len().unwrap_or(usize::MAX);
        let mut pool = Buffer::zeroed(pool_len, "the KV cache")?;
        if cfg!(test) {
            // What no sequence has written must not count: here every test would see it.
            pool.fill(f32::NAN);
        }
        Ok(Self {
            residual: Buffer::zeroed(max_rows * c.hidden_size, what)?,
            attention_input: Inputs::zeroed(RoundingPoint::AttentionInput, max_rows, hidden)?,
            queries: Buffer::zeroed(max_rows * rank.heads.len() * c.head_dim, what)?,
            attended: Inputs::zeroed(RoundingPoint::AttentionOutput, max_rows, heads)?,
            mlp_input: Inputs::zeroed(RoundingPoint::MlpInput, max_rows, hidden)?,
            gated: Inputs::zeroed(RoundingPoint::MlpProduct, max_rows, intermediate)?,
            head_input: Inputs::zeroed(RoundingPoint::LmHeadInput, max_samples, hidden)?,
            turns: Buffer::zeroed(max_rows * c.head_dim / 2, what)?,
            logits: Buffer::zeroed(max_samples * rank.vocab.len(), "the logits")?,
            pool,
            expansions: Expansions::new(plan, rank, threads)?,
        })
    }

    /// Bytes of the buffers beside the KV pool.
    pub fn bytes(plan: &ModelPlan, rank: &RankPlan, max_rows: usize, max_samples: usize) -> u64 {
        let c = &plan.config;
        let hidden = plan.hidden.padded_len(plan.hidden.count);
        let heads = plan.heads.padded_len(rank.head_leaves.len());
        let intermediate = plan.intermediate.padded_len(rank.intermediate_leaves.len());
        let rounded = Inputs::row_bytes;
        let row = (c.hidden_size + rank.heads.len() * c.head_dim + c.head_dim) * size_of::<f32>()
            + rounded(RoundingPoint::AttentionInput, hidden)
            + rounded(RoundingPoint::AttentionOutput, heads)
            + rounded(RoundingPoint::MlpInput, hidden)
            + rounded(RoundingPoint::MlpProduct, intermediate);
        let sample = rank.vocab.len() * size_of::<f32>() + rounded(RoundingPoint::LmHeadInput, hidden);
        (max_rows * row) as u64 + (max_samples * sample) as u64
    }

    /// Logits of the sampled rows of the step, `[samples, vocabulary of this rank]`.
    pub fn logits(&mut self, samples: usize, vocab: usize) -> &mut [f32] {
        &mut self.logits[..samples * vocab]
    }
}
