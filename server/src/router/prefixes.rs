//! Which replica has computed which beginnings of prompts. A guess, by what was sent where: pages that a replica gave up
//! since are not known here, and answers are not either. It decides nothing but where a request goes.

use std::hash::BuildHasher;
use std::num::NonZeroUsize;

use foldhash::fast::FixedState;
use lru::LruCache;

/// Tokens of a page, as in the caches of the replicas.
const PAGE: usize = 64;
/// Pages of a prompt that are looked at: with so many alike, it goes where they are.
const MOST_PAGES: usize = 256;
/// Each beginning is longer than the one before by a page, or by this part of it: what is taken for shared is that much
/// too short at most, and a long prompt costs some forty keys in place of 256.
const GROWTH: usize = 8;
/// Beginnings that are remembered, of all replicas.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");

/// What prompts may have in common: so many tokens, all up to the last of which the key stands for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beginning {
    key: u64,
    tokens: usize,
}

/// The beginnings of a prompt that are looked for, full pages each, the shortest first.
pub(super) fn beginnings(prompt: &[u32], cache_salt: &str) -> Vec<Beginning> {
    // Equal keys of different prompts would only send one of them to a replica that has not its pages.
    let hasher = FixedState::default();
    let mut key = hasher.hash_one(cache_salt);
    let pages = (prompt.len() / PAGE).min(MOST_PAGES);
    let longer = |pages: &usize| Some(pages + 1 + pages / GROWTH);
    let ends = std::iter::successors(Some(1), longer).take_while(|end| *end <= pages);
    let mut begin = 0;
    let beginnings = ends.map(|end| {
        let tokens = end * PAGE;
        key = hasher.hash_one((key, &prompt[begin..tokens]));
        begin = tokens;
        Beginning { key, tokens }
    });
    beginnings.collect()
}

/// Beginnings of prompts, and the replicas that they were sent to, as bits.
#[derive(Debug)]
pub(super) struct Prefixes(LruCache<u64, u64>);

impl Default for Prefixes {
    fn default() -> Self {
        Self(LruCache::new(REMEMBERED))
    }
}

impl Prefixes {
    /// Tokens of a prompt with these beginnings that each of the `replicas` has.
    pub(super) fn cached(&self, beginnings: &[Beginning], replicas: usize) -> Vec<u64> {
        let mut cached = vec![0; replicas];
        let mut holders = u64::MAX;
        for beginning in beginnings {
            holders &= self.0.peek(&beginning.key).copied().unwrap_or(0);
            if holders == 0 {
                break;
            }
            let held = |(replica, _): &(usize, &mut u64)| holders >> replica & 1 == 1;
            cached.iter_mut().enumerate().filter(held).for_each(|(_, tokens)| *tokens = beginning.tokens as u64);
        }
        cached
    }

    /// A prompt was sent to a replica.
    pub(super) fn sent(&mut self, beginnings: &[Beginning], replica: usize) {
        // The shortest comes last: it is forgotten last.
        for beginning in beginnings.iter().rev() {
            *self.0.get_or_insert_mut(beginning.key, || 0) |= 1 << replica;
        }
    }

    /// A replica lost its cache.
    pub(super) fn forget(&mut self, replica: usize) {
        self.0.iter_mut().for_each(|(_, holders)| *holders &= !(1 << replica));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: std::ops::Range<u32>) -> Vec<u32> {
        tokens.collect()
    }

    #[test]
    fn the_longest_beginning_in_common_is_found_by_replica() {
        let mut prefixes = Prefixes::default();
        let long = beginnings(&prompt(0..300), "");
        assert_eq!(long.len(), 4);
        prefixes.sent(&long, 0);
        prefixes.sent(&beginnings(&prompt(0..130), ""), 2);
        assert_eq!(prefixes.cached(&long, 3), [256, 0, 128]);
        let other_end = [prompt(0..200), prompt(900..1000)].concat();
        assert_eq!(prefixes.cached(&beginnings(&other_end, ""), 3), [192, 0, 128]);
        assert_eq!(prefixes.cached(&beginnings(&prompt(1..300), ""), 3), [0, 0, 0], "one token more in front");
        assert_eq!(prefixes.cached(&beginnings(&prompt(0..300), "salt"), 3), [0, 0, 0], "another salt");
        assert_eq!(prefixes.cached(&beginnings(&prompt(0..63), ""), 3), [0, 0, 0], "no full page");
        prefixes.forget(0);
        assert_eq!(prefixes.cached(&long, 3), [0, 0, 128]);
    }

    #[test]
    fn beginnings_in_common_are_found_within_an_eighth_and_up_to_a_bound() {
        let (mut prefixes, whole) = (Prefixes::default(), prompt(0..40_000));
        prefixes.sent(&beginnings(&whole, ""), 0);
        for common in [64, 640, 1000, 5000, 16_000, 30_000] {
            let other = [&whole[..common], &[77_777; 40_000]].concat();
            let found = prefixes.cached(&beginnings(&other, ""), 1)[0] as usize;
            let most = common.min(MOST_PAGES * PAGE);
            assert!(found <= most && found + PAGE + most / GROWTH > most, "{common} in common: {found}");
        }
        assert!(beginnings(&whole, "").len() < 40);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_oldest_goes_first() {
        let mut prefixes = Prefixes::default();
        let of = |number: u32| beginnings(&[number; 2 * PAGE], "");
        prefixes.sent(&of(0), 1);
        (1..REMEMBERED.get() as u32).for_each(|number| prefixes.sent(&of(number), 1));
        assert_eq!(prefixes.0.len(), REMEMBERED.get());
        assert_eq!(prefixes.cached(&of(0), 2), [0, 0]);
        assert_eq!(prefixes.cached(&of(REMEMBERED.get() as u32 - 1), 2), [0, 128]);
    }
}
