//! Prompts made of common words, sized in tokens by asking the server how many it counts.
//!
//! The load tester has no tokenizer: two probes of different length show how many tokens a word and the chat template
//! cost on this server, and the prompts are cut to match. The report prints the mean that the server counted.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Short common words: one token each in most large vocabularies.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program",
    "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind",
    "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
    "city",
];

/// Words in the shorter probe.
const SHORT_PROBE_WORDS: usize = 8;
/// Words in the longer probe, unless the prompts asked for are shorter themselves.
const LONG_PROBE_WORDS: usize = 136;

/// Makes the prompt of each request; the same seed and index give the same prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompts {
    seed: u64,
    words: usize,
}

impl Prompts {
    /// Prompts of `words` words.
    pub fn of_words(words: usize, seed: u64) -> Self {
        Self { seed, words }
    }

    /// Prompts of about `tokens` tokens for a server that counted `short_tokens` and `long_tokens` in prompts of
    /// [`probe_words`]. None where the counts say nothing, as a longer prompt was not counted as longer.
    pub fn fitted(tokens: u32, short_tokens: u64, long_tokens: u64, seed: u64) -> Option<Self> {
        let (short_words, long_words) = probe_words(tokens);
        let tokens_per_word =
            long_tokens.checked_sub(short_tokens).filter(|&more| more > 0)? as f64 / (long_words - short_words) as f64;
        let words = short_words as f64 + (f64::from(tokens) - short_tokens as f64) / tokens_per_word;
        // Never more words than tokens were asked for: a word costs at least one.
        Some(Self::of_words(words.round().clamp(1.0, f64::from(tokens).max(1.0)) as usize, seed))
    }

    /// The prompt of request `index`. Prompts differ from their first word on, so that a server's prefix cache cannot
    /// answer one from another.
    pub fn text(&self, index: u64) -> String {
        let mut rng = StdRng::seed_from_u64(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index));
        let words: Vec<&str> = (0..self.words).map(|_| WORDS[rng.random_range(0..WORDS.len())]).collect();
        words.join(" ")
    }
}

/// Words of the two probes for prompts of `tokens` tokens; neither is much longer than what the run will send, which
/// keeps them inside the context wherever the run's own prompts are.
pub fn probe_words(tokens: u32) -> (usize, usize) {
    let long = (tokens as usize / 2).clamp(2 * SHORT_PROBE_WORDS, LONG_PROBE_WORDS);
    (SHORT_PROBE_WORDS, long)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_and_index_decide_the_prompt() {
        let prompts = Prompts::of_words(20, 1);
        assert_eq!(prompts.text(3), prompts.text(3));
        assert_ne!(prompts.text(3), prompts.text(4));
        assert_ne!(prompts.text(3), Prompts::of_words(20, 2).text(3));
        assert_eq!(prompts.text(0).split(' ').count(), 20);
    }

    #[test]
    fn length_is_fitted_to_what_the_server_counts() {
        for (per_word, template) in [(1.0, 0.0), (1.0, 30.0), (2.5, 12.0)] {
            for tokens in [64u32, 128, 1000, 8000] {
                let count = |words: usize| (per_word * words as f64 + template).round() as u64;
                let (short, long) = probe_words(tokens);
                let prompts = Prompts::fitted(tokens, count(short), count(long), 0).expect("a growing count");
                let error = count(prompts.words).abs_diff(u64::from(tokens)) as f64;
                assert!(error <= 3.0 + 0.01 * f64::from(tokens), "{tokens} asked, {} words", prompts.words);
            }
        }
    }

    #[test]
    fn senseless_counts_are_refused_and_lengths_stay_in_bounds() {
        assert_eq!(Prompts::fitted(100, 9, 9, 0), None);
        assert_eq!(Prompts::fitted(100, 9, 3, 0), None);
        assert_eq!(Prompts::fitted(4, 50, 90, 0), Some(Prompts::of_words(1, 0)));
        assert_eq!(Prompts::fitted(100, 0, 1, 0), Some(Prompts::of_words(100, 0)));
        assert_eq!(Prompts::fitted(1_000_000, u64::MAX - 1, u64::MAX, 0), Some(Prompts::of_words(1, 0)));
    }
}
