//! Which replica has computed which beginnings of prompts. A guess, by what was sent where: pages that a replica gave up
//! since are not known here, and answers are not either. It decides nothing but where a request goes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;

use lru::LruCache;

/// Tokens of a page, as in the caches of the replicas.
const PAGE: usize = 64;
/// Pages of a prompt that are looked at: with so many alike, it goes where they are.
const MOST_PAGES: usize = 256;
/// Pages that are remembered, of all replicas: four million tokens.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");

/// Keys of the full pages that a prompt begins with; each stands for all tokens up to its last.
pub(super) fn keys(prompt: &[u32], cache_salt: &str) -> Vec<u64> {
    let mut before = {
        let mut hasher = DefaultHasher::new();
        cache_salt.hash(&mut hasher);
        hasher.finish()
    };
    let pages = prompt.chunks_exact(PAGE).take(MOST_PAGES);
    let keys = pages.map(|page| {
        let mut hasher = DefaultHasher::new();
        (before, page).hash(&mut hasher);
        before = hasher.finish();
        before
    });
    keys.collect()
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
    /// Tokens of a prompt with these keys that each of the `replicas` has.
    pub(super) fn cached(&self, keys: &[u64], replicas: usize) -> Vec<u64> {
        let mut cached = vec![0; replicas];
        let mut holders = u64::MAX;
        for key in keys {
            holders &= self.0.peek(key).copied().unwrap_or(0);
            if holders == 0 {
                break;
            }
            let held = |(replica, _): &(usize, &mut u64)| holders >> replica & 1 == 1;
            cached.iter_mut().enumerate().filter(held).for_each(|(_, tokens)| *tokens += PAGE as u64);
        }
        cached
    }

    /// A prompt was sent to a replica.
    pub(super) fn sent(&mut self, keys: &[u64], replica: usize) {
        // The beginning comes last: it is forgotten last.
        for &key in keys.iter().rev() {
            *self.0.get_or_insert_mut(key, || 0) |= 1 << replica;
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
        let long = keys(&prompt(0..300), "");
        assert_eq!(long.len(), 4);
        prefixes.sent(&long, 0);
        prefixes.sent(&keys(&prompt(0..130), ""), 2);
        assert_eq!(prefixes.cached(&long, 3), [256, 0, 128]);
        let other_end = [prompt(0..200), prompt(900..1000)].concat();
        assert_eq!(prefixes.cached(&keys(&other_end, ""), 3), [192, 0, 128]);
        assert_eq!(prefixes.cached(&keys(&prompt(1..300), ""), 3), [0, 0, 0], "one token more in front");
        assert_eq!(prefixes.cached(&keys(&prompt(0..300), "salt"), 3), [0, 0, 0], "another salt");
        assert_eq!(prefixes.cached(&keys(&prompt(0..63), ""), 3), [0, 0, 0], "no full page");
        prefixes.forget(0);
        assert_eq!(prefixes.cached(&long, 3), [0, 0, 128]);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_oldest_goes_first() {
        let mut prefixes = Prefixes::default();
        let of = |number: u32| keys(&[number; 2 * PAGE], "");
        prefixes.sent(&of(0), 1);
        (1..REMEMBERED.get() as u32).for_each(|number| prefixes.sent(&of(number), 1));
        assert_eq!(prefixes.0.len(), REMEMBERED.get());
        assert_eq!(prefixes.cached(&of(0), 2), [0, 0]);
        assert_eq!(prefixes.cached(&of(REMEMBERED.get() as u32 - 1), 2), [0, 128]);
    }
}
