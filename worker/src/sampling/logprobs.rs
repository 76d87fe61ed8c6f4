//! Log-probabilities: the log-sum-exp of the vocabulary as a tree over its leaves.

use super::draw::scaled;
use crate::math::{exp, ln};

/// Sum of `e^(x - max)` over some tokens. Tokens at the maximum count 1 each, also where it is infinite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LogSum {
    pub max: f32,
    pub sum: f32,
}

impl LogSum {
    /// No tokens.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Of one leaf: sixteen running sums over every sixteenth token, added as a tree.
    #[inline(always)]
    pub fn of(logits: &[f32]) -> Self {
        const LANES: usize = 16;
        let (whole, rest) = logits.as_chunks::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in whole {
            for (lane, &logit) in lanes.iter_mut().zip(chunk) {
                *lane = if logit > *lane { logit } else { *lane };
            }
        }
        for (lane, &logit) in lanes.iter_mut().zip(rest) {
            *lane = if logit > *lane { logit } else { *lane };
        }
        let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max) + 0.0;
        let mut sums = [0.0; LANES];
        for chunk in whole {
            for (sum, &logit) in sums.iter_mut().zip(chunk) {
                *sum += share(scaled(logit, 1.0), max);
            }
        }
        for (sum, &logit) in sums.iter_mut().zip(rest) {
            *sum += share(scaled(logit, 1.0), max);
        }
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                sums[lane] += sums[lane + width];
            }
            width /= 2;
        }
        Self { max, sum: sums[0] }
    }

    /// Of two neighbouring runs of leaves.
    pub fn merge(self, right: Self) -> Self {
        let max = self.max.max(right.max);
        Self { max, sum: self.sum * share(self.max, max) + right.sum * share(right.max, max) }
    }

    /// Merges a power of two of neighbours as a binary tree. Overwrites them.
    pub fn tree(sums: &mut [Self]) -> Self {
        let mut count = sums.len();
        while count > 1 {
            count /= 2;
            for i in 0..count {
                sums[i] = sums[2 * i].merge(sums[2 * i + 1]);
            }
        }
        sums[0]
    }

    /// Natural logarithm of the probability of a token with this raw logit.
    pub fn logprob(&self, logit: f32) -> f32 {
        let logit = scaled(logit, 1.0);
        let below_max = if logit == self.max { 0.0 } else { logit - self.max };
        below_max - ln(self.sum)
    }
}

/// `e^(x - max)` for `x <= max`; 1 where they are equal, also if infinite.
#[inline(always)]
pub(super) fn share(x: f32, max: f32) -> f32 {
    let share = exp(x - max);
    if x == max { 1.0 } else { share }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_of_leaves_is_near_the_sum_in_double_precision() {
        let logits: Vec<f32> = (0..16 * 500).map(|i| ((i * 7919) % 4001) as f32 / 200.0 - 10.0).collect();
        let mut leaves: Vec<LogSum> = logits.chunks(500).map(LogSum::of).collect();
        let total = LogSum::tree(&mut leaves);
        let exact = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
        assert!((f64::from(total.logprob(1.5)) - (1.5 - exact)).abs() < 3e-6);
    }

    #[test]
    fn infinities_are_defined() {
        let (inf, neg) = (f32::INFINITY, f32::NEG_INFINITY);
        let with_inf = LogSum::of(&[1.0, inf, f32::NAN, inf]);
        assert_eq!(with_inf.logprob(inf), -ln(2.0));
        assert_eq!(with_inf.logprob(1.0), neg);
        let nothing = LogSum::of(&[neg, f32::NAN]);
        assert_eq!(nothing.logprob(neg), -ln(2.0));
        let all = nothing.merge(LogSum::of(&[0.0])).merge(LogSum::EMPTY);
        assert_eq!((all.logprob(0.0), all.logprob(f32::NAN)), (0.0, neg));
    }
}
