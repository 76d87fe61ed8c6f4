//! Prompts made of common words, sized in tokens by asking the server how many it counts.
//!
//! The load tester has no tokenizer: two probes of different length show how many tokens a word and the chat template
//! cost on this server, and the prompts are cut to match. Where words cost unequally much, a probe has all of them as
//! often as prompts have in the mean. The report prints the mean that the server counted.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Short common words: one token each in most large vocabularies. The first eight, a short probe, are as long in the
/// mean as all are.
const WORDS: [&str; 64] = [
    "time", "year", "people", "question", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program",
    "way", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact",
    "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head",
    "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city",
];

const SHORT_PROBE_WORDS: usize = 8;
/// Words in the longer probe, unless the prompts asked for are shorter themselves.
const LONG_PROBE_WORDS: usize = 136;

/// Makes the prompt of each request; the same seed, index and length give the same prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prompts {
    seed: u64,
    /// Words of a prompt of no tokens: less than none where the server adds tokens of its own.
    words_at_zero: f64,
    words_per_token: f64,
    /// Share of each prompt's words, from the first on, that all prompts have in common.
    shared: f64,
}

impl Prompts {
    pub fn of_words(seed: u64) -> Self {
        Self { seed, words_at_zero: 0.0, words_per_token: 1.0, shared: 0.0 }
    }

    /// Prompts for a server that counted `short_tokens` and `long_tokens` in [`probes`] for `longest` tokens. None
    /// where the counts say nothing, as a longer prompt was not counted as longer.
    pub fn fitted(longest: u32, short_tokens: u64, long_tokens: u64, seed: u64) -> Option<Self> {
        let (short_words, long_words) = probe_words(longest);
        let more_tokens = long_tokens.checked_sub(short_tokens).filter(|&more| more > 0)? as f64;
        let words_per_token = (long_words - short_words) as f64 / more_tokens;
        let words_at_zero = short_words as f64 - short_tokens as f64 * words_per_token;
        Some(Self { seed, words_at_zero, words_per_token, shared: 0.0 })
    }

    /// The same with the first `shared` (0 to 1) of each prompt in common, which a server's prefix cache may answer.
    pub fn sharing(self, shared: f64) -> Self {
        Self { shared, ..self }
    }

    /// The prompt of about `tokens` tokens of request `index`. But for what is shared prompts differ from their first
    /// word on, so that a server's prefix cache cannot answer one from another.
    pub fn text(&self, index: u64, tokens: u32) -> String {
        let words = self.words(tokens);
        let shared = (self.shared * words as f64).round() as usize;
        let seed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // No request has this index.
        let common = words_of(seed.wrapping_add(u64::MAX)).take(shared);
        let own = words_of(seed.wrapping_add(index)).take(words - shared);
        common.chain(own).collect::<Vec<_>>().join(" ")
    }

    /// Words of a prompt of `tokens` tokens: never more, as a word costs at least one.
    fn words(&self, tokens: u32) -> usize {
        let words = self.words_at_zero + self.words_per_token * f64::from(tokens);
        words.round().clamp(1.0, f64::from(tokens).max(1.0)) as usize
    }
}

fn words_of(seed: u64) -> impl Iterator<Item = &'static str> {
    let mut rng = StdRng::seed_from_u64(seed);
    std::iter::repeat_with(move || WORDS[rng.random_range(0..WORDS.len())])
}

/// The short and the long probe for prompts of `tokens` tokens.
pub fn probes(tokens: u32) -> [String; 2] {
    let (short, long) = probe_words(tokens);
    [short, long].map(|words| WORDS.into_iter().cycle().take(words).collect::<Vec<_>>().join(" "))
}

/// Words of the two probes; neither is much longer than what the run will send, which keeps them inside the context
/// wherever the run's own prompts are. What the long one has more is whole rounds of all words, where it is so long.
fn probe_words(tokens: u32) -> (usize, usize) {
    let long = (tokens as usize / 2).clamp(2 * SHORT_PROBE_WORDS, LONG_PROBE_WORDS);
    let rounds = long / WORDS.len();
    (SHORT_PROBE_WORDS, if rounds > 0 { SHORT_PROBE_WORDS + rounds * WORDS.len() } else { long })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_and_index_decide_the_prompt() {
        let prompts = Prompts::of_words(1);
        assert_eq!(prompts.text(3, 20), prompts.text(3, 20));
        assert_ne!(prompts.text(3, 20), prompts.text(4, 20));
        assert_ne!(prompts.text(3, 20), Prompts::of_words(2).text(3, 20));
        assert_eq!(prompts.text(0, 20).split(' ').count(), 20);
    }

    #[test]
    fn the_shared_part_is_the_same_and_the_rest_is_not() {
        let prompts = Prompts::of_words(1).sharing(0.75);
        let words = |index, tokens| {
            let text = prompts.text(index, tokens);
            text.split(' ').map(str::to_owned).collect::<Vec<_>>()
        };
        let (a, b, longer) = (words(0, 100), words(1, 100), words(2, 200));
        assert_eq!(a.len(), 100);
        assert_eq!((&a[..75], &longer[..75]), (&b[..75], &b[..75]));
        let same = (75..100).filter(|&word| a[word] == b[word]).count();
        assert!(same < 5, "{same} of 25 words agree, where chance makes one in 64");
        assert_eq!(Prompts::of_words(1).sharing(1.0).text(0, 9), Prompts::of_words(1).sharing(1.0).text(7, 9));
    }

    #[test]
    fn length_is_fitted_to_what_the_server_counts() {
        for (per_word, template) in [(1.0, 0.0), (1.0, 30.0), (2.5, 12.0)] {
            for tokens in [64u32, 128, 1000, 8000] {
                let count = |words: usize| (per_word * words as f64 + template).round() as u64;
                let (short, long) = probe_words(tokens);
                let prompts = Prompts::fitted(tokens, count(short), count(long), 0).expect("a growing count");
                for tokens in [tokens, tokens / 2 + 20] {
                    let words = prompts.words(tokens);
                    let error = count(words).abs_diff(u64::from(tokens)) as f64;
                    assert!(error <= 3.0 + 0.01 * f64::from(tokens), "{tokens} asked, {words} words");
                }
            }
        }
    }

    #[test]
    fn prompts_are_as_long_as_asked_in_the_mean_where_each_letter_is_a_token() {
        let count = |text: &str| text.split(' ').map(str::len).sum::<usize>() as u64 + 30;
        for tokens in [128, 300, 1024, 8192] {
            let [short, long] = probes(tokens).map(|probe| count(&probe));
            let prompts = Prompts::fitted(tokens, short, long, 7).expect("a growing count");
            let mean = (0..400).map(|index| count(&prompts.text(index, tokens))).sum::<u64>() as f64 / 400.0;
            // A word more or less, and what chance leaves of the mean.
            let error = (mean - f64::from(tokens)).abs();
            assert!(error <= 3.0 + 0.003 * f64::from(tokens), "{tokens} asked, {mean} in the mean");
        }
    }

    #[test]
    fn senseless_counts_are_refused_and_lengths_stay_in_bounds() {
        assert_eq!(Prompts::fitted(100, 9, 9, 0), None);
        assert_eq!(Prompts::fitted(100, 9, 3, 0), None);
        let words = |tokens, short, long| Prompts::fitted(tokens, short, long, 0).expect("counts").words(tokens);
        assert_eq!(words(4, 50, 90), 1);
        assert_eq!(words(100, 0, 1), 100);
        assert_eq!(words(1_000_000, u64::MAX - 1, u64::MAX), 1);
    }
}
