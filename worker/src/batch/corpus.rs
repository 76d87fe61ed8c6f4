//! Answers that sequences before have ended with: what followed the same tokens in them may follow again.
//!
//! Every rank adds the same answers at the same boundaries, so that all draft alike. An answer is drafted from for
//! sequences of its own salt alone: that a draft holds tells its client what was in it.

use std::collections::VecDeque;

/// Tokens by which a place is found: answers of others go on alike more seldom than a sequence's own text.
const LEAST_MATCH: usize = 5;
/// A match is looked at no further back than that; of a prompt so many tokens are kept in front of its answer.
const MOST_MATCH: usize = 24;
/// Places that are looked at, the newest first.
const MOST_PLACES: usize = 8;
/// Tokens that a step makes findable at most: an answer that ends costs no step much.
const INDEXED_A_STEP: u64 = 256;
/// Stands between two answers; no token.
const BREAK: u32 = u32::MAX;
/// No place: positions count from 1.
const NONE: u64 = 0;

/// The newest answers, in a ring of tokens. Positions count over all that was ever written.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Corpus {
    tokens: Vec<u32>,
    /// By hash of the tokens in front of it: the newest place.
    newest: Vec<u64>,
    /// By place: how far before it the next older one of the same hash is; 0: there is none.
    older: Vec<u32>,
    end: u64,
    /// Up to which places can be found.
    indexed: u64,
    /// Where each answer begins, with its salt; oldest first.
    answers: VecDeque<(u64, Box<str>)>,
}

/// What followed a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Tokens that match in front of it.
    pub(super) matched: usize,
    at: u64,
}

impl Corpus {
    /// Of so many tokens, 12 to 16 bytes each; 0: of none.
    pub(super) fn new(tokens: usize) -> Self {
        let newest = if tokens == 0 { 0 } else { (tokens / 2).next_power_of_two() };
        Self {
            tokens: vec![BREAK; tokens],
            newest: vec![NONE; newest],
            older: vec![0; tokens],
            end: 1,
            indexed: 1,
            answers: VecDeque::new(),
        }
    }

    /// Adds an answer: the tokens from `begin` on, and of those in front of them as many as matches look at. A longer
    /// one than an eighth of the room is left out.
    pub(super) fn add(&mut self, salt: &str, tokens: &[u32], begin: usize) {
        let answer = &tokens[begin.saturating_sub(MOST_MATCH)..];
        if answer.len() <= LEAST_MATCH || answer.len() > self.tokens.len() / 8 {
            return;
        }
        self.answers.push_back((self.end, salt.into()));
        for &token in answer.iter().chain(&[BREAK]) {
            let at = self.index(self.end);
            self.tokens[at] = token;
            self.end += 1;
        }
        let oldest = self.end.saturating_sub(self.tokens.len() as u64);
        while self.answers.front().is_some_and(|(begin, _)| *begin < oldest) {
            self.answers.pop_front();
        }
        // Places that were overwritten before they could be found.
        self.indexed = self.indexed.max(oldest + LEAST_MATCH as u64);
    }

    /// Makes some of what was added findable. Called once a step.
    pub(super) fn step(&mut self) {
        for place in self.indexed..self.end.min(self.indexed + INDEXED_A_STEP) {
            let (at, mut before) = (self.index(place), [0; LEAST_MATCH]);
            let first = place.saturating_sub(LEAST_MATCH as u64).max(1);
            for (token, position) in before.iter_mut().zip(first..place) {
                *token = self.token(position);
            }
            self.older[at] = 0;
            if self.token(place) == BREAK || place - first < LEAST_MATCH as u64 || before.contains(&BREAK) {
                continue;
            }
            let slot = slot(&before, self.newest.len());
            let older = std::mem::replace(&mut self.newest[slot], place);
            self.older[at] = if older == NONE { 0 } else { u32::try_from(place - older).unwrap_or(0) };
        }
        self.indexed = self.end.min(self.indexed + INDEXED_A_STEP);
    }

    /// The longest match with the end of `tokens` in answers of `salt`; of several the newest.
    pub(super) fn find(&self, salt: &str, tokens: &[u32]) -> Option<Place> {
        if self.tokens.is_empty() || tokens.len() < LEAST_MATCH {
            return None;
        }
        // What lies in front of a place is there as long as it, a match and a bit.
        let oldest = (self.end + MOST_MATCH as u64).saturating_sub(self.tokens.len() as u64);
        let mut place = self.newest[slot(&tokens[tokens.len() - LEAST_MATCH..], self.newest.len())];
        let mut best: Option<Place> = None;
        for _ in 0..MOST_PLACES {
            if place == NONE || place <= oldest {
                break;
            }
            let before = (1..=MOST_MATCH as u64).map_while(|back| place.checked_sub(back).filter(|at| *at > 0));
            let pairs = before.map(|at| self.token(at)).zip(tokens.iter().rev());
            let matched = pairs.take_while(|(a, b)| a == *b).count();
            if matched >= LEAST_MATCH
                && best.is_none_or(|best| matched > best.matched)
                && self.salt_at(place) == Some(salt)
            {
                best = Some(Place { matched, at: place });
            }
            match self.older[self.index(place)] {
                0 => break,
                distance => place -= u64::from(distance),
            }
        }
        best
    }

    /// The tokens from a place on, to the end of its answer.
    pub(super) fn tokens_from(&self, place: Place) -> impl Iterator<Item = u32> {
        (place.at..self.end).map(|at| self.token(at)).take_while(|token| *token != BREAK)
    }

    fn salt_at(&self, place: u64) -> Option<&str> {
        let after = self.answers.partition_point(|(begin, _)| *begin <= place);
        after.checked_sub(1).map(|answer| &*self.answers[answer].1)
    }

    fn token(&self, position: u64) -> u32 {
        self.tokens[self.index(position)]
    }

    fn index(&self, position: u64) -> usize {
        (position % self.tokens.len() as u64) as usize
    }
}

/// Where in a table of `len`, a power of two, tokens are.
fn slot(tokens: &[u32], len: usize) -> usize {
    let hash = tokens.iter().fold(0u64, |hash, &token| (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (hash >> 32) as usize & (len - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drafted(corpus: &Corpus, salt: &str, tokens: &[u32]) -> (usize, Vec<u32>) {
        let place = corpus.find(salt, tokens);
        place.map_or((0, vec![]), |place| (place.matched, corpus.tokens_from(place).collect()))
    }

    fn corpus(room: usize, answers: &[(&str, &[u32])]) -> Corpus {
        let mut corpus = Corpus::new(room);
        for (salt, tokens) in answers {
            corpus.add(salt, tokens, 0);
            (0..tokens.len() / INDEXED_A_STEP as usize + 1).for_each(|_| corpus.step());
        }
        corpus
    }

    #[test]
    fn an_answer_is_found_by_what_its_prompt_ended_with() {
        let mut corpus = Corpus::new(1000);
        let tokens: Vec<u32> = (0..100).collect();
        corpus.add("", &tokens, 60);
        assert_eq!(drafted(&corpus, "", &tokens[..60]), (0, vec![]), "not before a step");
        corpus.step();
        assert_eq!(drafted(&corpus, "", &tokens[..60]), (24, tokens[60..].to_vec()));
        assert_eq!(drafted(&corpus, "", &[1, 2, 55, 56, 57, 58, 59]), (5, tokens[60..].to_vec()));
        assert_eq!(drafted(&corpus, "", &[56, 57, 58, 59]), (0, vec![]), "four tokens are no match");
        assert_eq!(drafted(&corpus, "", &tokens), (0, vec![]), "nothing followed its end");
        assert_eq!(drafted(&corpus, "mine", &tokens[..60]), (0, vec![]), "another's");
    }

    #[test]
    fn the_longest_match_counts_and_of_equals_the_newest() {
        let corpus = corpus(
            1000,
            &[
                ("", &[9, 1, 2, 3, 4, 5, 10]),
                ("", &[1, 2, 3, 4, 5, 20]),
                ("", &[7, 1, 2, 3, 4, 5, 30]),
                ("mine", &[9, 1, 2, 3, 4, 5, 40]),
            ],
        );
        assert_eq!(drafted(&corpus, "", &[9, 1, 2, 3, 4, 5]), (6, vec![10]));
        assert_eq!(drafted(&corpus, "", &[8, 1, 2, 3, 4, 5]), (5, vec![30]));
        assert_eq!(drafted(&corpus, "mine", &[8, 1, 2, 3, 4, 5]), (5, vec![40]));
    }

    #[test]
    fn no_room_is_no_corpus() {
        let corpus = corpus(0, &[("", &[1, 2, 3, 4, 5, 6])]);
        assert_eq!(drafted(&corpus, "", &[1, 2, 3, 4, 5]), (0, vec![]));
    }

    proptest! {
        /// Whatever was overwritten meanwhile: what is drafted did follow a match in an answer of the salt, which is one
        /// of the last; and the newest answer is always found.
        #[test]
        fn what_is_drafted_was_answered(
            answers in prop::collection::vec((any::<bool>(), prop::collection::vec(0u32..3, 1..30)), 1..80),
            room in 60usize..400,
        ) {
            let mut corpus = Corpus::new(room);
            for (number, (mine, tokens)) in answers.iter().enumerate() {
                corpus.add(if *mine { "mine" } else { "" }, tokens, 0);
                corpus.step();
                for salt in ["", "mine"] {
                    let end = &tokens[..tokens.len() - 1];
                    let (matched, drafted) = drafted(&corpus, salt, end);
                    let found: Vec<u32> = end[end.len() - matched..].iter().chain(&drafted).copied().collect();
                    let was_answered = answers[..=number].iter().rev().any(|(mine, tokens)| {
                        (*mine == (salt == "mine")) && tokens.ends_with(&found)
                    });
                    prop_assert!(matched == 0 || was_answered, "{found:?}");
                    let fits = tokens.len() <= room / 8 && tokens.len() > LEAST_MATCH;
                    prop_assert!(matched > 0 || !fits || *mine != (salt == "mine") , "{tokens:?}");
                }
            }
        }
    }
}
