//! Passes over the logits of one leaf: the largest value, the Gumbel-max draw, the k largest.
//!
//! All of them see *scaled* logits, `logit * (1 / temperature)` with NaN as minus infinity, and order tokens by value,
//! then by lower id.

use std::cmp::Ordering;

use super::noise::{GROUP, MAX_GUMBEL, Noise, gumbel, gumbel_bound};

/// A token and what it is ranked by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Entry {
    /// Never NaN.
    pub value: f32,
    pub token: u32,
}

impl Entry {
    /// Ranks below every token. (The id is none: vocabularies are far smaller.)
    pub const NONE: Self = Self { value: f32::NEG_INFINITY, token: u32::MAX };

    /// Ranks before `other`: a larger value, or the lower id on a tie.
    #[inline(always)]
    pub fn beats(&self, other: &Self) -> bool {
        self.value > other.value || (self.value == other.value && self.token < other.token)
    }

    /// Best first.
    pub fn rank(&self, other: &Self) -> Ordering {
        other.value.partial_cmp(&self.value).unwrap_or(Ordering::Equal).then(self.token.cmp(&other.token))
    }
}

/// Which tokens the filters keep: those above `value`, and those equal to it with an id below `tie_end`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cut {
    pub value: f32,
    pub tie_end: u32,
}

impl Cut {
    /// Keeps every token.
    pub const NOTHING: Self = Self { value: f32::NEG_INFINITY, tie_end: u32::MAX };

    #[inline(always)]
    pub fn keeps(&self, value: f32, token: u32) -> bool {
        (value > self.value) | ((value == self.value) & (token < self.tie_end))
    }
}

/// The logits of one leaf that are tokens (no padding).
#[derive(Debug, Clone, Copy)]
pub(super) struct Leaf<'a> {
    pub logits: &'a [f32],
    /// Id of the first one.
    pub first: u32,
    /// 1 / temperature; 1 where logits are ranked as they are.
    pub scale: f32,
}

/// The value by which a logit is ranked. Both zeros become plus zero.
#[inline(always)]
pub(super) fn scaled(logit: f32, scale: f32) -> f32 {
    let value = logit * scale;
    if value.is_nan() { f32::NEG_INFINITY } else { value + 0.0 }
}

/// The best token that `cut` keeps; [`Entry::NONE`] if there is none.
pub(super) fn best(leaf: &Leaf<'_>, cut: &Cut) -> Entry {
    let Leaf { logits, first, scale } = *leaf;
    let largest = if *cut == Cut::NOTHING {
        // NaN loses every comparison, so this loop needs to know of no special value.
        largest(logits, |value, _| value * scale)
    } else {
        largest(logits, |value, i| {
            let value = scaled(value, scale);
            if cut.keeps(value, first.wrapping_add(i as u32)) { value } else { f32::NEG_INFINITY }
        })
    };
    let is_best = |(i, logit): (usize, &f32)| {
        let value = scaled(*logit, scale);
        let token = first.wrapping_add(i as u32);
        (value == largest && cut.keeps(value, token)).then_some(Entry { value, token })
    };
    logits.iter().enumerate().find_map(is_best).unwrap_or(Entry::NONE)
}

/// The largest of `value_of(logit, index)`, NaN ignored.
#[inline(always)]
fn largest(logits: &[f32], value_of: impl Fn(f32, usize) -> f32) -> f32 {
    const LANES: usize = 32;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = logits.chunks_exact(LANES);
    let (tail, tail_start) = (chunks.remainder(), logits.len() - chunks.remainder().len());
    for (chunk_index, chunk) in chunks.enumerate() {
        for lane in 0..LANES {
            let value = value_of(chunk[lane], chunk_index.wrapping_mul(LANES).wrapping_add(lane));
            lanes[lane] = if value > lanes[lane] { value } else { lanes[lane] };
        }
    }
    for (lane, &logit) in tail.iter().enumerate() {
        let value = value_of(logit, tail_start + lane);
        lanes[lane] = if value > lanes[lane] { value } else { lanes[lane] };
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// The Gumbel-max draw: the token that `cut` keeps with the largest sum of value and noise, ranked by that sum.
///
/// Noise costs more than everything else together. The best token by value alone gives a first sum to beat; a token is
/// looked at more closely only if the largest noise there is, then a cheap bound on its own noise, could beat it. That
/// skips work, but changes no result.
pub(super) fn draw(leaf: &Leaf<'_>, cut: &Cut, noise: &Noise) -> Entry {
    let top = best(leaf, cut);
    if !top.value.is_finite() {
        // Noise decides nothing between infinite values: the lowest id among the largest.
        return top;
    }
    let mut winner = Entry { value: top.value + noise.gumbel(top.token), token: top.token };
    let (first, end) = (leaf.first as usize, leaf.first as usize + leaf.logits.len());
    for group in first / GROUP..end.div_ceil(GROUP) {
        let start = group * GROUP;
        let tokens = first.max(start)..end.min(start + GROUP);
        // What is not kept, or not of this leaf, is NaN and loses every comparison.
        let mut values = [f32::NAN; GROUP];
        let logits = &leaf.logits[tokens.start - first..tokens.end - first];
        for (i, (value, &logit)) in values[tokens.start - start..].iter_mut().zip(logits).enumerate() {
            let scaled = scaled(logit, leaf.scale);
            *value = if cut.keeps(scaled, (tokens.start as u32).wrapping_add(i as u32)) { scaled } else { f32::NAN };
        }
        if !any(&values, |_, value| value + MAX_GUMBEL >= winner.value) {
            continue;
        }
        let bits: [[u32; 16]; 4] = noise.group_bits(group as u32);
        let bits = bits.as_flattened();
        if any(&values, |i, value| value + gumbel_bound(bits[i]) >= winner.value) {
            for (i, &value) in values.iter().enumerate() {
                if value + gumbel_bound(bits[i]) >= winner.value {
                    let candidate = Entry { value: value + gumbel(bits[i]), token: (start + i) as u32 };
                    if candidate.beats(&winner) {
                        winner = candidate;
                    }
                }
            }
        }
    }
    winner
}

/// Some value of the group passes; evaluates all, so that the loop vectorises.
#[inline(always)]
fn any(values: &[f32; GROUP], passes: impl Fn(usize, f32) -> bool) -> bool {
    let mut hits = 0u32;
    for (i, &value) in values.iter().enumerate() {
        hits |= u32::from(passes(i, value));
    }
    hits != 0
}

/// Up to `limit` tokens, best first. Allocates once.
#[derive(Debug)]
pub(super) struct TopList {
    limit: usize,
    entries: Vec<Entry>,
}

impl TopList {
    pub fn with_capacity(capacity: usize) -> Self {
        Self { limit: 0, entries: Vec::with_capacity(capacity) }
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Empties the list, which then takes at most `limit`.
    pub fn reset(&mut self, limit: usize) {
        debug_assert!(limit <= self.entries.capacity());
        self.limit = limit;
        self.entries.clear();
    }

    pub fn offer(&mut self, entry: Entry) {
        if self.entries.len() == self.limit {
            match self.entries.last() {
                Some(last) if entry.beats(last) => self.entries.pop(),
                _ => return,
            };
        }
        let at = self.entries.partition_point(|other| other.beats(&entry));
        self.entries.insert(at, entry);
    }

    /// Replaces the list by the best `limit` tokens of a leaf.
    pub fn fill(&mut self, leaf: &Leaf<'_>, limit: usize) {
        self.reset(limit);
        if limit == 0 {
            return;
        }
        const CHUNK: usize = 32;
        for (chunk_index, chunk) in leaf.logits.chunks(CHUNK).enumerate() {
            if self.entries.len() == limit {
                // Ids ascend, so a tie with the last entry loses.
                let last = self.entries[limit - 1].value;
                if chunk.iter().fold(0, |hits, &logit| hits | u32::from(logit * leaf.scale > last)) == 0 {
                    continue;
                }
            }
            for (i, &logit) in chunk.iter().enumerate() {
                let token = leaf.first + (chunk_index * CHUNK + i) as u32;
                self.offer(Entry { value: scaled(logit, leaf.scale), token });
            }
        }
    }
}
