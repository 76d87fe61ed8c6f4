//! Drafts: which tokens may follow, by what followed the same tokens earlier in the sequence.
//!
//! A step computes drafted tokens as further rows of their sequence, and every row samples. A drafted token counts if
//! it is the one that was sampled in front of it, so drafts change no token, only how many come out of a step. They are
//! a function of the sequence's tokens and of how its earlier drafts fared: every rank drafts the same.
//!
//! The end of a sequence is looked up by its last three tokens, as in LZ77: a table has the newest position of each
//! three by their hash, and links lead from there to older ones.

use super::draft_rows::SURE;

/// Tokens by which an earlier place is found: fewer match by chance.
const LEAST_MATCH: usize = 3;
/// A match is looked at no further back than that; the longest decides.
const MOST_MATCH: usize = 24;
/// Earlier places that are looked at, the newest first: bounds the time of a draft in a text that repeats itself.
const MOST_PLACES: usize = 8;
/// No place.
const NONE: u32 = u32::MAX;

/// Where each three tokens of a sequence were last.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Drafter {
    /// By hash: the position behind the last occurrence.
    newest: Vec<u32>,
    /// By position: the occurrence before of the three tokens in front of it.
    older: Vec<u32>,
}

impl Drafter {
    /// Begins a sequence of at most `longest` tokens, 4 to 8 bytes each. What comes later takes no memory.
    pub(super) fn begin(&mut self, longest: usize) {
        self.newest.clear();
        self.newest.resize((longest / 2).next_power_of_two(), NONE);
        self.older.clear();
        self.older.reserve(longest + 1);
    }

    /// Takes note of the tokens that came since the last time; `tokens` are all of the sequence.
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        for end in self.older.len()..=tokens.len() {
            let older = match end.checked_sub(LEAST_MATCH) {
                None => NONE,
                Some(start) => {
                    let slot = slot(&tokens[start..end], self.newest.len());
                    std::mem::replace(&mut self.newest[slot], end as u32)
                }
            };
            self.older.push(older);
        }
    }

    /// The longest match of the end of `tokens`, all of which it has taken note of, with what is before: how long it is,
    /// and the position behind it. Of several the newest.
    pub(super) fn find(&self, tokens: &[u32]) -> Option<(usize, usize)> {
        let end = tokens.len();
        let (mut place, mut best) = (self.older[end], (0, 0));
        for _ in 0..MOST_PLACES {
            if place == NONE {
                break;
            }
            let at = place as usize;
            let pairs = tokens[..at].iter().rev().zip(tokens.iter().rev());
            let matched = pairs.take(MOST_MATCH).take_while(|(a, b)| a == b).count();
            if matched > best.0 {
                best = (matched, at);
            }
            place = self.older[at];
        }
        Some(best).filter(|(matched, _)| *matched >= LEAST_MATCH)
    }

    /// Appends at most `most` tokens to `tokens`: those from `at` on, in front of which so many tokens match.
    pub(super) fn draft(tokens: &mut Vec<u32>, (matched, at): (usize, usize), most: usize) {
        // A short match says little of what comes far behind it. What repeats itself goes on into the draft.
        for next in at..at + most.min(matched) {
            tokens.push(tokens[next]);
        }
    }
}

/// Where in a table of `len`, a power of two, three tokens are.
fn slot(tokens: &[u32], len: usize) -> usize {
    let hash = tokens.iter().fold(0u64, |hash, &token| (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (hash >> 32) as usize & (len - 1)
}

/// How likely a sequence's drafts hold, by those before. Integers, so that all ranks know the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trust {
    /// Chance that a drafted token holds if those before it did, in parts of [`SURE`].
    chance: u32,
    /// Steps until drafts are tried where none is worth its cost, and of the pause after that.
    wait: u32,
    pause: u32,
}

/// Steps between two drafts of a sequence whose drafts never hold.
const LONGEST_PAUSE: u32 = 128;

impl Default for Trust {
    fn default() -> Self {
        Self { chance: SURE / 2, wait: 0, pause: 8 }
    }
}

impl Trust {
    /// Chance that a drafted token holds if those before it did.
    pub(super) fn chance(&self) -> u32 {
        self.chance
    }

    /// It was long enough without drafts.
    pub(super) fn tries(&self) -> bool {
        self.wait == 0
    }

    /// A step has no drafts of the sequence.
    pub(super) fn pass(&mut self) {
        self.wait = self.wait.saturating_sub(1);
    }

    /// Of so many drafted tokens, at least one, so many held before the first that did not.
    pub(super) fn learn(&mut self, drafted: usize, held: usize) {
        for _ in 0..held {
            self.chance += (SURE - self.chance) / 8;
        }
        if held < drafted {
            self.chance -= self.chance / 8;
        }
        if held > 0 {
            self.pause = 8;
        } else {
            self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        }
        self.wait = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    fn drafted(tokens: &[u32], most: usize) -> Vec<u32> {
        let mut drafter = Drafter::default();
        drafter.begin(tokens.len());
        drafter.extend(tokens);
        drafted_by(&drafter, tokens, most)
    }

    fn drafted_by(drafter: &Drafter, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut all = tokens.to_vec();
        if let Some(found) = drafter.find(tokens) {
            Drafter::draft(&mut all, found, most);
        }
        all.split_off(tokens.len())
    }

    #[test]
    fn what_followed_the_longest_match_is_drafted() {
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 7), [4, 5, 9], "no more than match");
        assert_eq!(drafted(&[8, 1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1, 2, 3], 7), [4, 7, 1, 2], "longer, though older");
        assert_eq!(drafted(&[7, 1, 2, 3, 4, 6, 1, 2, 3, 5, 8, 1, 2, 3], 7), [5, 8, 1], "the newest of equals");
        assert_eq!(drafted(&[1, 2, 1, 2, 1, 2, 1, 2], 7), [1, 2, 1, 2, 1, 2], "on into the draft");
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 1, 2], 7), [0; 0], "two tokens are no match");
        assert_eq!((drafted(&[], 7), drafted(&[1], 7), drafted(&[1, 1, 1, 1], 2)), (vec![], vec![], vec![1, 1]));
    }

    /// The slow definition: every earlier place, the newest first.
    fn expected(tokens: &[u32], most: usize) -> Vec<u32> {
        let end = tokens.len();
        let matched = |at: usize| (1..=MOST_MATCH.min(at)).take_while(|k| tokens[at - k] == tokens[end - k]).count();
        let places = (0..end).rev().filter(|&at| matched(at) >= LEAST_MATCH).take(MOST_PLACES);
        let Some((_, Reverse(_), at)) = places.enumerate().map(|(n, at)| (matched(at), Reverse(n), at)).max() else {
            return vec![];
        };
        let mut all = tokens.to_vec();
        for next in at..at + most.min(matched(at)) {
            all.push(all[next]);
        }
        all.split_off(end)
    }

    proptest! {
        #[test]
        fn drafts_are_those_of_the_slow_definition(
            tokens in prop::collection::vec(0u32..4, 0..200), most in 0usize..20,
        ) {
            // Small alphabets have no two hashes alike in a table of this size.
            let mut drafter = Drafter::default();
            drafter.begin(1 << 16);
            let mut so_far = Vec::new();
            for &token in &tokens {
                so_far.push(token);
                drafter.extend(&so_far);
            }
            drafter.extend(&so_far);
            prop_assert_eq!(drafted_by(&drafter, &so_far, most), expected(&so_far, most));
        }
    }

    #[test]
    fn a_text_that_repeats_itself_takes_no_more_time_than_another() {
        let begun = Instant::now();
        for period in [1, 2, 3, 1000] {
            let tokens: Vec<u32> = (0..100_000).map(|at| at % period).collect();
            assert_eq!(drafted(&tokens, 7).len(), 7);
        }
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn drafts_that_never_hold_become_rare() {
        let (mut trust, mut tried) = (Trust::default(), 0);
        for _ in 0..10_000 {
            if trust.tries() {
                trust.learn(7, 0);
                tried += 1;
            } else {
                trust.pass();
            }
        }
        assert!((70..100).contains(&tried), "{tried} times");
        let rare = trust.chance();
        assert!(rare < SURE / 1000);
        (0..4).for_each(|_| trust.learn(7, 7));
        assert!(trust.chance() > SURE * 9 / 10, "and often soon once they hold");
    }
}
