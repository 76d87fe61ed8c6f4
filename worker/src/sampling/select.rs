//! top_k and top_p over a sharded vocabulary: an exact radix select.
//!
//! Each round looks at eight bits of an order-preserving key of the scaled logit, from the top. Every rank adds up, for
//! each of the 256 digits, the amount (tokens for top_k, integer weights for top_p) of its tokens that share the digits
//! found so far; all ranks see all sums and so find the digit in which the amount asked for is reached. After four
//! rounds the value at the threshold is known exactly, and as the sums came rank by rank, so is how many of the tokens
//! tied at it each rank keeps. Integer sums have no order, hence no rounding that could depend on it.

use super::draw::{Cut, Leaf, any, scaled};
use super::logprobs::share;
use super::noise::GROUP;

/// Digits of a key.
pub(super) const DIGITS: u32 = 4;
/// Values of a digit.
pub(super) const BINS: usize = 256;
/// Sets of bins that neighbouring tokens are spread over: tokens often share a bin, and each sum would wait for the
/// last.
const PARTS: usize = 4;
/// The weight of the most likely token. Sums over 2^22 tokens stay below 2^63, and tokens less likely by more than
/// e^27.7 weigh nothing.
const UNIT_WEIGHT: f32 = (1u64 << 40) as f32;

/// What is counted against the limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Limit {
    /// Tokens.
    TopK(u32),
    /// Share of the sum of the weights.
    TopP(f32),
}

/// A selection in progress.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Selection {
    limit: Limit,
    /// The largest scaled logit of the row, to which weights relate.
    max: f32,
    /// Digits found.
    digit: u32,
    /// They themselves, as the low bits.
    prefix: u32,
    /// Amount still to be reached among tokens with this prefix.
    remaining: u64,
}

/// What a round of a selection showed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Progress {
    /// One more digit is known.
    Next(Selection),
    /// The limit keeps everything that was kept before.
    KeepsAll,
    /// The tokens above `value` are kept, and of those tied at it this rank's first `mine`, of the `tied` it has.
    Found { value: f32, mine: u64, tied: u64 },
}

impl Selection {
    pub fn new(limit: Limit, max: f32) -> Self {
        Self { limit, max, digit: 0, prefix: 0, remaining: 0 }
    }

    /// Adds the amounts of one leaf's tokens (of those that `cut` keeps) to their bins.
    #[inline(always)]
    pub fn measure(&self, leaf: &Leaf<'_>, cut: &Cut, bins: &mut [u64; BINS]) {
        let shift = 24 - 8 * self.digit;
        // A shift by all 32 bits would be none: the first digit has no digits before it, and all of none match.
        let prefix_of = |key: u32| if self.digit == 0 { self.prefix } else { key >> (shift + 8) };
        // What is not kept is NaN.
        let counts = |value: f32| !value.is_nan() & (prefix_of(key_of(value)) == self.prefix);
        let (mut values, mut shares) = ([0.0; GROUP], [0.0; GROUP]);
        let (mut amounts, mut digits) = ([0; GROUP], [0u8; GROUP]);
        let mut parts = [[0u64; BINS]; PARTS];
        for group in leaf.groups() {
            leaf.group(group, cut, &mut values);
            if !any(&values, |_, value| counts(value)) {
                continue;
            }
            // What does not count adds nothing to some bin: a branch for each token would be guessed wrong too often.
            // One loop a step: so they vectorise.
            if let Limit::TopP(_) = self.limit {
                for (share_of, &value) in shares.iter_mut().zip(&values) {
                    *share_of = share(value, self.max);
                }
                for (amount, &share) in amounts.iter_mut().zip(&shares) {
                    *amount = weight_of(share);
                }
            }
            for (digit, &value) in digits.iter_mut().zip(&values) {
                *digit = (key_of(value) >> shift) as u8;
            }
            for (amount, &value) in amounts.iter_mut().zip(&values) {
                let weight = if let Limit::TopP(_) = self.limit { *amount } else { 1 };
                *amount = if counts(value) { weight } else { 0 };
            }
            for (digits, amounts) in digits.as_chunks::<PARTS>().0.iter().zip(amounts.as_chunks::<PARTS>().0) {
                for (part, (digit, amount)) in parts.iter_mut().zip(digits.iter().zip(amounts)) {
                    let bin = &mut part[usize::from(*digit)];
                    *bin = bin.wrapping_add(*amount);
                }
            }
        }
        for part in &parts {
            bins.iter_mut().zip(part).for_each(|(bin, amount)| *bin = bin.wrapping_add(*amount));
        }
    }

    /// Takes the bins of all ranks (`bin(rank, digit)`) and finds the next digit.
    pub fn advance(mut self, ranks: usize, rank: usize, bin: impl Fn(usize, usize) -> u64) -> Progress {
        let of_digit = |digit| (0..ranks).map(|rank| bin(rank, digit)).sum::<u64>();
        if self.digit == 0 {
            let total = (0..BINS).map(of_digit).sum();
            match self.limit {
                Limit::TopK(k) if total <= u64::from(k) => return Progress::KeepsAll,
                Limit::TopK(k) => self.remaining = u64::from(k),
                Limit::TopP(p) => self.remaining = mass_of(p, total),
            }
        }
        let mut digit = BINS - 1;
        let mut reached = of_digit(digit);
        while reached < self.remaining && digit > 0 {
            self.remaining -= reached;
            digit -= 1;
            reached = of_digit(digit);
        }
        self.prefix = self.prefix << 8 | digit as u32;
        self.digit += 1;
        if self.digit < DIGITS {
            return Progress::Next(self);
        }
        // All tokens of the bin have the same value, hence the same amount, which is over 0: they reach a limit over 0.
        let value = value_of(self.prefix);
        let amount = self.amount(value).max(1);
        let before: u64 = (0..rank).map(|rank| bin(rank, digit) / amount).sum();
        let tied = bin(rank, digit) / amount;
        let mine = self.remaining.div_ceil(amount).saturating_sub(before).min(tied);
        Progress::Found { value, mine, tied }
    }

    fn amount(&self, value: f32) -> u64 {
        match self.limit {
            Limit::TopK(_) => 1,
            Limit::TopP(_) => weight(value, self.max),
        }
    }
}

/// `e^(value - max)` as a multiple of 2^-40, rounded down.
#[inline(always)]
pub(super) fn weight(value: f32, max: f32) -> u64 {
    weight_of(share(value, max))
}

/// A share of the most likely token's probability as an integer. (By way of a signed one, to which processors convert.)
#[inline(always)]
fn weight_of(share: f32) -> u64 {
    (share * UNIT_WEIGHT) as i64 as u64
}

/// The smallest weight that is a share of at least `p` of `total`; at least 1, at most `total`.
pub(super) fn mass_of(p: f32, total: u64) -> u64 {
    ((f64::from(p) * total as f64).ceil() as u64).clamp(1, total.max(1))
}

/// The smallest scaled logit that is at least `min_p` times as likely as `max`.
pub(super) fn min_p_threshold(min_p: f32, max: f32) -> f32 {
    max + crate::math::ln(min_p)
}

/// The cut that keeps the first `mine` of this rank's tokens tied at `value`. `leaf` holds all of the rank's logits.
pub(super) fn cut_at(leaf: &Leaf<'_>, before: &Cut, value: f32, mine: u64, tied: u64) -> Cut {
    let limit = if value == before.value { before.tie_end } else { u32::MAX };
    let tie_end = match mine {
        0 => 0,
        _ if mine == tied => limit,
        _ => {
            let ties = leaf.logits.iter().zip(leaf.first..).filter(|(logit, _)| scaled(**logit, leaf.scale) == value);
            ties.map(|(_, token)| token).nth(mine as usize).unwrap_or(limit).min(limit)
        }
    };
    Cut { value, tie_end }
}

/// A key that orders like the value, which is neither NaN nor minus zero.
#[inline(always)]
fn key_of(value: f32) -> u32 {
    let bits = value.to_bits();
    bits ^ (((bits as i32) >> 31) as u32 | 1 << 31)
}

fn value_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key ^ 1 << 31 } else { !key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_like_values() {
        let values = [f32::NEG_INFINITY, f32::MIN, -1.5, -1e-45, 0.0, 1e-45, 1.0, 1.0000001, f32::MAX, f32::INFINITY];
        assert!(values.windows(2).all(|pair| key_of(pair[0]) < key_of(pair[1])));
        assert!(values.iter().all(|&value| value_of(key_of(value)) == value));
    }

    #[test]
    fn weights_and_masses_at_the_edges() {
        assert_eq!(weight(f32::INFINITY, f32::INFINITY), 1 << 40);
        assert_eq!(weight(f32::NEG_INFINITY, f32::NEG_INFINITY), 1 << 40);
        assert_eq!(weight(1.0, f32::INFINITY), 0);
        assert_eq!(weight(-40.0, 0.0), 0);
        assert!(weight(-27.0, 0.0) > 0);
        assert_eq!(mass_of(f32::MIN_POSITIVE, 1 << 40), 1);
        assert_eq!(mass_of(1.0, u64::MAX >> 1), u64::MAX >> 1);
        assert_eq!(mass_of(0.5, 9), 5);
    }
}
