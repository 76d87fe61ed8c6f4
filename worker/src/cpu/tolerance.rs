//! Tolerances against references, and why they are what they are.

/// Relative L2 error of a position's logits against transformers computing in fp32 on the same bf16 weights.
///
/// Activations round to bf16 at the plan's six rounding points: 2^-9 = 0.002 relative each, random in sign. The inputs of
/// the products, K, V and the attention output of 2 to 3 layers add about ten such roundings in quadrature to what reaches
/// the logits: 0.002 * sqrt(10) = 0.006. The bound leaves half as much again.
pub const LOGITS_RELATIVE_L2: f64 = 1e-2;

/// A greedy step counts as decided if its margin exceeds this many times the largest logit error seen in its prompt: both
/// of the two largest logits may be off, in opposite directions.
pub const MARGIN_ERRORS: f64 = 2.0;
