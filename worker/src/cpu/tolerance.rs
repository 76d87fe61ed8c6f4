//! Tolerances against references, and why they are what they are.

/// Relative L2 error of a position's logits against transformers computing in fp32 on the same bf16 weights.
///
/// Activations round to bf16 at the plan's six rounding points, 2^-9 = 0.002 relative each. The fixtures' random weights
/// make attention sharp (scores up to 12, so that a relative error of 0.002 in a score moves a weight by 2 %), which
/// amplifies the roundings of the input of q, k, v and of q and k themselves. An fp32 computation in PyTorch that rounds at
/// these points and nowhere else errs by 0.009 (llama-gqa) to 0.027 (llama-tied) on them, by less than 1e-5 if it does not
/// round. The bound is that with an eighth to spare; what a wrong kernel does is larger: 0.05 and up.
pub const LOGITS_RELATIVE_L2: f64 = 3e-2;

/// A greedy step counts as decided if its margin exceeds this many times the largest logit error seen in its prompt, a
/// maximum over 16 positions of 768 logits: about four standard deviations of one logit's error, three of the difference of
/// two.
pub const MARGIN_ERRORS: f64 = 1.0;

/// Least share of greedy steps that must be decided, or the comparison of tokens would say little. With the errors above,
/// 0.79 (llama-tied) to 0.99 (qwen3-qknorm) of them are.
pub const DECIDED_SHARE: f64 = 0.75;
