//! Passes over the logits of one leaf: the largest value, the Gumbel-max draw, the k largest.
//!
//! All of them see *scaled* logits, `logit * (1 / temperature)` with NaN as minus infinity, and order tokens by value,
//! then by lower id.

use std::cmp::Ordering;
use std::ops::Range;

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

impl Leaf<'_> {
    /// Groups of [`GROUP`] ids that the leaf has a part in.
    pub fn groups(&self) -> Range<usize> {
        let (first, end) = (self.first as usize, self.first as usize + self.logits.len());
        first / GROUP..end.div_ceil(GROUP)
    }

    /// Writes the scaled logits of a group of ids. What is not of this leaf, or `cut` does not keep, becomes NaN, which
    /// loses every comparison.
    #[inline(always)]
    pub fn group(&self, group: usize, cut: &Cut, values: &mut [f32; GROUP]) {
        let first = self.first as usize;
        let start = group * GROUP;
        let ids = first.max(start)..(first + self.logits.len()).min(start + GROUP);
        let logits = &self.logits[ids.start - first..ids.end - first];
        // The whole group is the common case; its length is known to the compiler, so the loops over it vectorise.
        if let Ok(logits) = <&[f32; GROUP]>::try_from(logits) {
            for (value, &logit) in values.iter_mut().zip(logits) {
                *value = scaled(logit, self.scale);
            }
        } else {
            values.fill(f32::NAN);
            for (value, &logit) in values[ids.start - start..].iter_mut().zip(logits) {
                *value = scaled(logit, self.scale);
            }
        }
        if *cut != Cut::NOTHING {
            for (i, value) in values.iter_mut().enumerate() {
                *value = if cut.keeps(*value, (start as u32).wrapping_add(i as u32)) { *value } else { f32::NAN };
            }
        }
    }
}

/// The value by which a logit is ranked. Both zeros become plus zero.
#[inline(always)]
pub(super) fn scaled(logit: f32, scale: f32) -> f32 {
    let value = logit * scale + 0.0;
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

/// Some value of the group passes; evaluates all, so that the loop vectorises.
#[inline(always)]
pub(super) fn any(values: &[f32; GROUP], passes: impl Fn(usize, f32) -> bool) -> bool {
    let mut hits = [0u32; GROUP];
    for (i, (hit, &value)) in hits.iter_mut().zip(values).enumerate() {
        *hit = u32::from(passes(i, value));
    }
    hits.into_iter().fold(0, |any, hit| any | hit) != 0
}

/// The best token that `cut` keeps; [`Entry::NONE`] if there is none.
#[inline(always)]
pub(super) fn best(leaf: &Leaf<'_>, cut: &Cut) -> Entry {
    let mut values = [0.0; GROUP];
    let mut lanes = [f32::NEG_INFINITY; GROUP];
    for group in leaf.groups() {
        leaf.group(group, cut, &mut values);
        for (lane, &value) in lanes.iter_mut().zip(&values) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let value = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    for group in leaf.groups() {
        leaf.group(group, cut, &mut values);
        if any(&values, |_, other| other == value) {
            let first = values.iter().position(|other| *other == value);
            return first.map_or(Entry::NONE, |i| Entry { value, token: (group * GROUP + i) as u32 });
        }
    }
    Entry::NONE
}

/// The Gumbel-max draw: the token that `cut` keeps with the largest sum of value and noise, ranked by that sum.
///
/// Noise costs more than everything else together. The best token by value alone gives a first sum to beat; a token is
/// looked at more closely only if the largest noise there is, then a cheap bound on its own noise, could beat it. That
/// skips work, but changes no result.
#[inline(always)]
pub(super) fn draw(leaf: &Leaf<'_>, cut: &Cut, noise: &Noise) -> Entry {
    let top = best(leaf, cut);
    if !top.value.is_finite() {
        // Noise decides nothing between infinite values: the lowest id among the largest.
        return top;
    }
    let mut winner = Entry { value: top.value + noise.gumbel(top.token), token: top.token };
    let mut values = [0.0; GROUP];
    for group in leaf.groups() {
        leaf.group(group, cut, &mut values);
        if !any(&values, |_, value| value + MAX_GUMBEL >= winner.value) {
            continue;
        }
        let bits = noise.group_bits(group as u32);
        let bits: &[u32] = bits.as_flattened();
        if any(&values, |i, value| value + gumbel_bound(bits[i]) >= winner.value) {
            for (i, &value) in values.iter().enumerate() {
                if value + gumbel_bound(bits[i]) >= winner.value {
                    let candidate = Entry { value: value + gumbel(bits[i]), token: (group * GROUP + i) as u32 };
                    winner = if candidate.beats(&winner) { candidate } else { winner };
                }
            }
        }
    }
    winner
}

/// Tokens of which [`TopList::fill`] notes the largest value.
const CHUNK: usize = 32;

/// Up to `limit` tokens, best first.
#[derive(Debug)]
pub(super) struct TopList {
    limit: usize,
    entries: Vec<Entry>,
    /// Scratch: the largest value of every chunk of a leaf, as they come and sorted.
    maxima: Vec<f32>,
    sorted: Vec<f32>,
}

impl TopList {
    /// A list of at most `capacity` tokens, to be filled from leaves of at most `leaf_len`. Allocates nothing later.
    pub fn new(capacity: usize, leaf_len: usize) -> Self {
        let chunks = leaf_len.div_ceil(CHUNK);
        let (maxima, sorted) = (Vec::with_capacity(chunks), Vec::with_capacity(chunks));
        Self { limit: 0, entries: Vec::with_capacity(capacity), maxima, sorted }
    }

    /// Bytes that [`Self::new`] takes for a list.
    pub fn bytes(capacity: usize, leaf_len: usize) -> usize {
        capacity * size_of::<Entry>() + 2 * leaf_len.div_ceil(CHUNK) * size_of::<f32>()
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
    #[inline(always)]
    pub fn fill(&mut self, leaf: &Leaf<'_>, limit: usize) {
        self.reset(limit);
        if limit == 0 {
            return;
        }
        self.maxima.clear();
        self.maxima.extend(leaf.logits.chunks(CHUNK).map(|chunk| largest(chunk, leaf.scale)));
        // As many tokens as there are chunks with a maximum from here up are this good: what is below is not listed.
        let mut floor = f32::NEG_INFINITY;
        if limit <= self.maxima.len() {
            self.sorted.clear();
            self.sorted.extend_from_slice(&self.maxima);
            floor = *self.sorted.select_nth_unstable_by(limit - 1, |a, b| b.total_cmp(a)).1;
        }
        for (chunk_index, chunk) in leaf.logits.chunks(CHUNK).enumerate() {
            // Ids ascend, so in a full list a tie with the last entry loses.
            let full = self.entries.len() == limit;
            if self.maxima[chunk_index] < floor || full && self.maxima[chunk_index] <= self.entries[limit - 1].value {
                continue;
            }
            for (i, &logit) in chunk.iter().enumerate() {
                let value = scaled(logit, leaf.scale);
                if value >= floor {
                    self.offer(Entry { value, token: leaf.first + (chunk_index * CHUNK + i) as u32 });
                }
            }
        }
    }
}

/// The largest scaled logit of a chunk.
#[inline(always)]
fn largest(chunk: &[f32], scale: f32) -> f32 {
    const LANES: usize = 8;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = chunk.as_chunks::<LANES>();
    for values in whole {
        for (lane, &logit) in lanes.iter_mut().zip(values) {
            let value = scaled(logit, scale);
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let rest = rest.iter().map(|logit| scaled(*logit, scale));
    lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, f32::max)
}
