//! Tolerances against references, and why they are what they are.

/// Relative L2 error of a position's logits against transformers computing in fp32 on the same bf16 weights.
///
/// The fixtures' random weights make attention sharp: scores up to 12, so that a relative error of 0.002 in a score
/// moves a weight by 2 %. So q, K, V and the scores are fp32, and the inputs of products keep 16 bits where the plan
/// splits them. Largest error of a position, by which inputs are split in two bf16 (all with K and V in fp32):
///
/// The plan stands at the third column.
///
/// | fixture | q, k, v | and o_proj | and LM head | and gate, up | and down: all |
/// |---|---|---|---|---|---|
/// | llama-gqa | 0.0054 | 0.0042 | 0.0038 | 0.0026 | 0.00001 |
/// | llama31-scaled | 0.0053 | 0.0042 | 0.0039 | 0.0022 | 0.00001 |
/// | llama-tied | 0.0107 | 0.0099 | 0.0096 | 0.0040 | 0.00003 |
/// | llama-mha16 | 0.0057 | 0.0049 | 0.0045 | 0.0026 | 0.00001 |
/// | qwen2-bias | 0.0055 | 0.0047 | 0.0044 | 0.0024 | 0.00002 |
/// | qwen3-qknorm | 0.0067 | 0.0050 | 0.0047 | 0.0024 | 0.00001 |
/// | mistral-window | 0.0080 | 0.0074 | 0.0073 | 0.0034 | 0.00003 |
pub const LOGITS_RELATIVE_L2: f64 = 1e-2;

/// The same of checkpoints in groups. Their references have weights that were rounded to bf16, with their scales; CPUs
/// do not round them, and rounding alone is worth 0.012 to 0.030 (worker/tests/fixtures/README.md). Measured: 0.012
/// (tiny-fp8-blocks), 0.013 (tiny-gptq, tiny-packed-zeros), 0.019 (tiny-awq), 0.026 (tiny-packed).
pub const GROUPS_LOGITS_RELATIVE_L2: f64 = 3e-2;

/// Relative L2 error of a position's logits of a checkpoint in groups against the same in bf16, where the scales are
/// powers of two, so that no weight rounds: what differs is the order of additions, and what that rounds of the inputs.
pub const ORDER_LOGITS_RELATIVE_L2: f64 = 5e-3;

/// Least share of greedy steps that must be decided (their margin exceeds the largest error of their own logits), or
/// the comparison of tokens would say little. Measured: 0.964 (llama-gqa), 0.969 (mistral-window), 0.979
/// (llama31-scaled, llama-tied, llama-mha16, qwen2-bias), 0.995 (qwen3-qknorm).
pub const DECIDED_SHARE: f64 = 0.95;
/// The same of checkpoints in groups. Measured: 0.938 (tiny-packed-zeros), 0.979 and more of others.
pub const GROUPS_DECIDED_SHARE: f64 = 0.9;
