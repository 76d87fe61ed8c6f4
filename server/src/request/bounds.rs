//! Tokens that an answer may have, from what a request says of ids and of words.

use std::{collections::BTreeSet, sync::Arc};

use super::{FieldError, MAX_ALLOWED_TOKENS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, RequestError};
use crate::{
    engine::{ModelInfo, TokenBounds},
    text::Text,
};

/// What the rest of the request asks of the tokens that are left.
#[derive(Clone, Copy)]
pub(super) struct Needs<'a> {
    pub(super) stop_tokens: &'a [u32],
    /// No stop token is the first.
    pub(super) min_tokens: u32,
    /// The answer ends with a stop token, where its form says.
    pub(super) has_form: bool,
}

/// The tokens of an answer: `allowed` alone, if any are named, and none of the words.
///
/// # Errors
/// Names the field that is wrong, or that leaves nothing to draw.
pub(super) fn bounds(
    allowed: Option<&[u32]>,
    words: &[String],
    needs: &Needs<'_>,
    model: &ModelInfo,
    text: &Text,
) -> Result<Arc<TokenBounds>, RequestError> {
    let allowed = allowed.map(|ids| allowed_tokens(ids, model)).transpose()?.unwrap_or_default();
    let forbidden = forbidden(words, text)?;
    let never = |token: u32| forbidden.iter().any(|tokens| tokens.as_slice() == [token]);
    if !allowed.is_empty() {
        let left: Vec<u32> = allowed.iter().copied().filter(|token| !never(*token)).collect();
        let stops = left.iter().filter(|token| needs.stop_tokens.contains(token)).count();
        if left.is_empty() {
            return Err(wrong("bad_words", "forbid every token of allowed_token_ids".into()));
        }
        if needs.min_tokens > 0 && stops == left.len() {
            let message = "are nothing but tokens that end an answer, which min_tokens does not let be the first";
            return Err(wrong("allowed_token_ids", message.into()));
        }
        if needs.has_form && stops == 0 {
            let ends = needs.stop_tokens;
            let message =
                format!("lack a token that ends an answer ({ends:?}), which one that is held to a form needs");
            return Err(wrong("allowed_token_ids", message));
        }
    }
    if needs.has_form && needs.stop_tokens.iter().all(|token| never(*token)) {
        let message = "forbid every token that ends an answer, which one that is held to a form needs";
        return Err(wrong("bad_words", message.into()));
    }
    Ok(Arc::new(TokenBounds { allowed, forbidden }))
}

fn wrong(field: &str, message: String) -> RequestError {
    RequestError::field(field, FieldError::Value, message)
}

/// Each once, ascending.
fn allowed_tokens(ids: &[u32], model: &ModelInfo) -> Result<Vec<u32>, RequestError> {
    let wrong = |message| Err(wrong("allowed_token_ids", message));
    if ids.is_empty() {
        return wrong("are none, so no token could be drawn; leave the field out for any".into());
    }
    if ids.len() > MAX_ALLOWED_TOKENS {
        return wrong(format!("{} tokens are more than {MAX_ALLOWED_TOKENS}", ids.len()));
    }
    if let Some(id) = ids.iter().find(|id| **id >= model.vocab_size) {
        return wrong(format!("token {id} does not exist; the vocabulary has {} tokens", model.vocab_size));
    }
    Ok(BTreeSet::from_iter(ids.iter().copied()).into_iter().collect())
}

/// The tokens of each word, as it begins a text and as it stands behind a space. White space alone is taken as it is.
fn forbidden(words: &[String], text: &Text) -> Result<Vec<Vec<u32>>, RequestError> {
    if words.len() > MAX_BAD_WORDS {
        return Err(wrong("bad_words", format!("{} words are more than {MAX_BAD_WORDS}", words.len())));
    }
    let mut forbidden = BTreeSet::new();
    for (index, word) in words.iter().enumerate() {
        let field = format!("bad_words[{index}]");
        if !(1..=MAX_BAD_WORD_BYTES).contains(&word.len()) {
            let message = format!("has {} bytes; a word must have 1 to {MAX_BAD_WORD_BYTES}", word.len());
            return Err(wrong(&field, message));
        }
        let bare = word.trim_start();
        let spellings = if bare.is_empty() { vec![word.clone()] } else { vec![bare.into(), format!(" {bare}")] };
        for spelling in spellings {
            let encoded = text.tokenizer.encode(&spelling, false, "");
            let tokens = encoded.map_err(|error| wrong(&field, error.to_string()))?;
            if tokens.is_empty() {
                return Err(wrong(&field, format!("{word:?} has no tokens")));
            }
            forbidden.insert(tokens);
        }
    }
    Ok(forbidden.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn text() -> Text {
        Text::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")).unwrap()
    }

    fn model() -> ModelInfo {
        ModelInfo { vocab_size: 768, max_context: 32, ..ModelInfo::default() }
    }

    fn free() -> Needs<'static> {
        Needs { stop_tokens: &[1, 4], min_tokens: 0, has_form: false }
    }

    fn of(allowed: Option<&[u32]>, words: &[&str], needs: &Needs<'_>) -> Result<Arc<TokenBounds>, RequestError> {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        bounds(allowed, &words, needs, &model(), &text())
    }

    #[test]
    fn a_word_is_forbidden_with_and_without_a_space_in_front() {
        let text = text();
        let tokens = |word: &str| text.tokenizer.encode(word, false, "").unwrap();
        for word in ["cat", "  cat"] {
            let found = of(None, &[word], &free()).unwrap();
            let mut expected = vec![tokens("cat"), tokens(" cat")];
            expected.sort();
            assert_eq!(found.forbidden, expected);
        }
        assert_eq!(of(None, &["\n"], &free()).unwrap().forbidden, [tokens("\n")]);
        assert_eq!(of(Some(&[9, 5, 9]), &[], &free()).unwrap().allowed, [5, 9]);
        assert_eq!(of(None, &[], &free()).unwrap(), Arc::default());
    }

    #[test]
    fn what_leaves_nothing_to_draw_is_refused_by_name() {
        let a = text().tokenizer.encode("a", false, "").unwrap();
        let [a] = a[..] else { panic!("a letter is a token") };
        let many = vec!["a"; MAX_BAD_WORDS + 1];
        let long = "a".repeat(MAX_BAD_WORD_BYTES + 1);
        let forced = Needs { min_tokens: 1, ..free() };
        let formed = Needs { has_form: true, ..free() };
        let ends_once = Needs { stop_tokens: &[4], ..formed };
        for (allowed, words, needs, field, says) in [
            (Some(&[][..]), &[][..], &free(), "allowed_token_ids", "leave the field out"),
            (Some(&[768]), &[], &free(), "allowed_token_ids", "768 does not exist"),
            (Some(&vec![5; MAX_ALLOWED_TOKENS + 1]), &[], &free(), "allowed_token_ids", "more than"),
            (Some(&[a]), &["a"], &free(), "bad_words", "every token"),
            (Some(&[1, 4]), &[], &forced, "allowed_token_ids", "min_tokens"),
            (Some(&[1, 4, a]), &["a"], &forced, "allowed_token_ids", "min_tokens"),
            (Some(&[a]), &[], &formed, "allowed_token_ids", "form"),
            (None, &["<|eot_id|>"], &ends_once, "bad_words", "form"),
            (None, &["a", ""], &free(), "bad_words[1]", "0 bytes"),
            (None, &[&long], &free(), "bad_words[0]", "1 to"),
            (None, &many, &free(), "bad_words", "more than"),
        ] {
            let error = of(allowed, words, needs).expect_err(says).to_string();
            assert!(error.contains(field) && error.contains(says), "{error}");
        }
        assert!(of(Some(&[1, a]), &[], &forced).is_ok() && of(Some(&[1, a]), &[], &formed).is_ok());
    }
}
