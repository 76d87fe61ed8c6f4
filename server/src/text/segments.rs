//! Texts that come again are cut into tokens once: what lies between two control tokens is a *segment*, such as a
//! message of a conversation, and tokenizers cut each for itself. The tokens of long segments are kept for a while.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use lru::LruCache;
use serde_json::Value;
use tokenizers::{OffsetReferential, OffsetType, Result, Tokenizer};

use super::parts::{encode, may_be_cut, parts};

/// Shorter segments are cut as fast as they are found.
const LEAST_BYTES: usize = 256;
/// Bound on the memory of texts and tokens that are kept.
const MOST_BYTES: usize = 64 << 20;

/// The segments that came last, and what a tokenizer puts around a whole text.
#[derive(Debug)]
pub(super) struct Segments {
    kept: Mutex<Kept>,
    before: Vec<u32>,
    after: Vec<u32>,
    may_be_cut: bool,
}

#[derive(Debug)]
struct Kept {
    /// Tokens by salt and text; the last is the one used longest ago.
    tokens: LruCache<Arc<str>, Arc<[u32]>>,
    bytes: usize,
}

impl Segments {
    /// `None` for a tokenizer of which it is not known that segments are cut independently, one by one as in their
    /// text.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let has_normalizer = tokenizer.get_normalizer().is_some();
        let looks_around = |token: &tokenizers::AddedToken| {
            token.single_word || token.lstrip || token.rstrip || token.normalized && has_normalizer
        };
        let added = tokenizer.get_added_tokens_decoder();
        if !cuts_anywhere_alike(&pre_tokenizer) || added.values().any(looks_around) {
            return None;
        }
        let probe = "a";
        let cut = |special| tokenizer.encode_fast(probe, special).map(|encoding| encoding.get_ids().to_vec());
        let (alone, whole) = (cut(false).ok()?, cut(true).ok()?);
        let mut places = (0..=whole.len().checked_sub(alone.len())?).filter(|&at| whole[at..].starts_with(&alone));
        let (first, None) = (places.next()?, places.next()) else { return None };
        let kept = Mutex::new(Kept { tokens: LruCache::unbounded(), bytes: 0 });
        let (before, after) = (whole[..first].to_vec(), whole[first + alone.len()..].to_vec());
        Some(Self { kept, before, after, may_be_cut: may_be_cut(tokenizer) })
    }

    /// As `tokenizer` itself encodes a text. Only texts of the same `salt` are known again, so that nobody learns from
    /// the time what others sent.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str, special: bool, salt: &str) -> Result<Vec<u32>> {
        let mut ids = if special { self.before.clone() } else { Vec::new() };
        for (place, control) in self.cuts(tokenizer, text) {
            let text = &text[place];
            match control {
                Some(tokens) => ids.extend(tokens),
                None if text.len() < LEAST_BYTES => ids.extend(tokenizer.encode_fast(text, false)?.get_ids()),
                None => ids.extend_from_slice(&self.segment(tokenizer, text, salt)?),
            }
        }
        ids.extend_from_slice(if special { &self.after } else { &[] });
        Ok(ids)
    }

    /// Where a text's control tokens are, with their ids, and its segments, in order.
    fn cuts(&self, tokenizer: &Tokenizer, text: &str) -> Vec<(Range<usize>, Option<Vec<u32>>)> {
        let mut cuts: Vec<(Range<usize>, Option<Vec<u32>>)> = Vec::new();
        let mut at = 0;
        for part in parts(text, self.may_be_cut) {
            let cut = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), part);
            for (_, (begin, end), control) in cut.get_splits(OffsetReferential::Original, OffsetType::Byte) {
                match cuts.last_mut() {
                    Some((place, None)) if control.is_none() => place.end = at + end,
                    _ => {
                        let tokens = control.as_ref().map(|tokens| tokens.iter().map(|token| token.id).collect());
                        cuts.push((at + begin..at + end, tokens));
                    }
                }
            }
            at += part.len();
        }
        cuts
    }

    fn segment(&self, tokenizer: &Tokenizer, text: &str, salt: &str) -> Result<Arc<[u32]>> {
        let key = format!("{} {salt}{text}", salt.len());
        // Whatever panics elsewhere leaves the map whole.
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tokens) = kept().tokens.get(key.as_str()) {
            return Ok(tokens.clone());
        }
        let tokens: Arc<[u32]> = encode(tokenizer, text, self.may_be_cut)?.into();
        kept().put(key.into(), tokens.clone());
        Ok(tokens)
    }
}

impl Kept {
    fn put(&mut self, key: Arc<str>, tokens: Arc<[u32]>) {
        self.bytes += bytes(&key, &tokens);
        // Two threads may have cut the same.
        if let Some(before) = self.tokens.put(key.clone(), tokens) {
            self.bytes -= bytes(&key, &before);
        }
        while self.bytes > MOST_BYTES
            && let Some((key, tokens)) = self.tokens.pop_lru()
        {
            self.bytes -= bytes(&key, &tokens);
        }
    }
}

fn bytes(key: &str, tokens: &[u32]) -> usize {
    // The map's own, about.
    const EACH: usize = 128;
    key.len() + size_of_val(tokens) + EACH
}

/// Whether a pre-tokenizer cuts a segment as if it were a whole text. (Metaspace puts a mark before the first alone.)
fn cuts_anywhere_alike(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("Sequence") => {
            pre_tokenizer["pretokenizers"].as_array().is_some_and(|all| all.iter().all(cuts_anywhere_alike))
        }
        Some("ByteLevel") => pre_tokenizer["add_prefix_space"] == false,
        Some("Split" | "Digits" | "Punctuation" | "Whitespace" | "WhitespaceSplit") => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn tokenizer() -> Tokenizer {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa/tokenizer.json");
        Tokenizer::from_file(fixture).unwrap()
    }

    fn whole(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
        tokenizer.encode_fast(text, special).unwrap().get_ids().to_vec()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn texts_in_segments_are_cut_as_whole_texts(
            parts in prop::collection::vec(
                prop_oneof![
                    "<\\|begin_of_text\\|>|<\\|eot_id\\|>|<\\|start_header_id\\|>| +|\n+",
                    "\\PC{0,40}",
                    "[a-z ,.\n\u{e9}]{200,400}",
                ],
                0..12,
            ),
            special: bool,
        ) {
            let (tokenizer, text) = (tokenizer(), parts.concat());
            let segments = Segments::of(&tokenizer).expect("Llama's tokenizer cuts segments independently");
            for _ in 0..2 {
                let ids = segments.encode(&tokenizer, &text, special, "").unwrap();
                prop_assert_eq!(ids, whole(&tokenizer, &text, special));
            }
        }
    }

    #[test]
    fn texts_are_known_again_within_their_salt() {
        let tokenizer = tokenizer();
        let segments = Segments::of(&tokenizer).unwrap();
        let (long, short) = ("word ".repeat(60), "word");
        for (text, salt, kept) in
            [(&long[..], "", 1), (&long, "", 1), (&long, "1 ", 2), (&long, "1 ", 2), (short, "", 2)]
        {
            segments.encode(&tokenizer, text, true, salt).unwrap();
            assert_eq!(segments.kept.lock().unwrap().tokens.len(), kept, "{salt:?}");
        }
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_latest() {
        let tokenizer = tokenizer();
        let segments = Segments::of(&tokenizer).unwrap();
        let text = |number: u32| format!("{number:09} {}", "word ".repeat(100_000));
        for number in 0..60 {
            segments.kept.lock().unwrap().put(text(number).into(), vec![number; 200_000].into());
        }
        let kept = segments.kept.lock().unwrap();
        let sum: usize = kept.tokens.iter().map(|(text, tokens)| bytes(text, tokens)).sum();
        assert!(
            kept.bytes == sum && sum <= MOST_BYTES && kept.tokens.len() > 40,
            "{} of {sum} bytes",
            kept.tokens.len()
        );
        assert!(kept.tokens.contains(text(59).as_str()) && !kept.tokens.contains(text(0).as_str()));
    }

    #[test]
    fn tokenizers_that_mark_the_first_segment_are_left_alone() {
        let metaspace = serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first"});
        let prefixed = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true});
        let sequence = serde_json::json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, prefixed]});
        for pre_tokenizer in [metaspace, prefixed, sequence, Value::Null] {
            assert!(!cuts_anywhere_alike(&pre_tokenizer), "{pre_tokenizer}");
        }
    }
}
