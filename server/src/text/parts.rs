//! Texts are cut into tokens in parts: that is a quarter faster, and the thread that does it may give its core to
//! others in between.
//!
//! A part ends at a *seam*: behind a letter, in front of a space or a punctuation mark. By every pattern that is known
//! here a word ends there: none has a match that holds both, and none looks further than at the next character. So the
//! tokens of the parts are those of the whole text.

use std::sync::LazyLock;

use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use serde_json::Value;
use tokenizers::{Result, Tokenizer};

use crate::give_way::{between_pieces, has_helpers, small_threads};

/// A part has so many bytes and what follows up to the next seam.
const PART_BYTES: usize = 2 << 10;
/// A text of so many bytes and more has helpers: a third of a millisecond's work for each of four.
const SHARED_BYTES: usize = 8 << 10;

/// Threads that cut the parts of one text at the same time, where this machine has cores for several. They have the
/// priority of the thread that needs them first.
static HELPERS: LazyLock<Option<ThreadPool>> =
    LazyLock::new(|| Some(small_threads()).filter(|threads| *threads > 1).and_then(helpers));

/// `None` where the system gives no threads.
fn helpers(threads: usize) -> Option<ThreadPool> {
    ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("text-{index}")).build().ok()
}

/// Patterns of `Split`: Llama 3's, Qwen 2's and 3's, Mistral's (Tekken). That of `ByteLevel` is GPT-2's.
const PATTERNS: [&str; 3] = [
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

/// Whether a text's parts have the control tokens and tokens of the text, by what a tokenizer does before its model.
pub(super) fn may_be_cut(tokenizer: &Tokenizer) -> bool {
    let stage = |value: serde_json::Result<Value>| value.unwrap_or_default();
    // Composition (NFC) changes nothing across a space or a punctuation mark.
    let normalizer = stage(serde_json::to_value(tokenizer.get_normalizer()));
    let added = tokenizer.get_added_tokens_decoder();
    (normalizer.is_null() || normalizer["type"] == "NFC")
        && added.values().all(|token| part_end(&token.content, 1) == token.content.len())
        && ends_words_at_seams(&stage(serde_json::to_value(tokenizer.get_pre_tokenizer()))) == Some(true)
}

/// Whether a pre-tokenizer ends a word at every seam; `None`: it may look further.
fn ends_words_at_seams(pre_tokenizer: &Value) -> Option<bool> {
    match pre_tokenizer["type"].as_str()? {
        "Sequence" => {
            let stages = pre_tokenizer["pretokenizers"].as_array()?;
            let ends = stages.iter().map(ends_words_at_seams).collect::<Option<Vec<bool>>>()?;
            // Behind `ByteLevel` a space is a letter.
            let first = stages.iter().position(|stage| stage["type"] != "Digits")?;
            Some(ends[first])
        }
        "ByteLevel" => (pre_tokenizer["add_prefix_space"] == false).then_some(pre_tokenizer["use_regex"] == true),
        "Digits" => Some(false),
        "Split" => {
            let pattern = pre_tokenizer["pattern"]["Regex"].as_str()?;
            (PATTERNS.contains(&pattern) && pre_tokenizer["behavior"] == "Isolated").then_some(true)
        }
        _ => None,
    }
}

/// The tokens of a text. In a thread that may have helpers a text that is long enough is shared out among them; the
/// others give way.
///
/// # Errors
/// The tokenizer's own.
pub(super) fn encode(tokenizer: &Tokenizer, text: &str, may_be_cut: bool) -> Result<Vec<u32>> {
    let shared = may_be_cut && text.len() >= SHARED_BYTES && has_helpers();
    match shared.then(|| HELPERS.as_ref()).flatten() {
        Some(helpers) => encode_shared(tokenizer, text, helpers),
        None => encode_in_turn(tokenizer, parts(text, may_be_cut)),
    }
}

fn encode_shared(tokenizer: &Tokenizer, text: &str, helpers: &ThreadPool) -> Result<Vec<u32>> {
    let parts: Vec<&str> = parts(text, true).collect();
    let shares = parts.par_chunks(parts.len().div_ceil(helpers.current_num_threads()));
    let encode = |share: &[&str]| encode_in_turn(tokenizer, share.iter().copied());
    helpers.install(|| shares.map(encode).collect::<Result<Vec<_>>>()).map(|ids| ids.concat())
}

fn encode_in_turn<'a>(tokenizer: &Tokenizer, parts: impl Iterator<Item = &'a str>) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for part in parts {
        ids.extend_from_slice(tokenizer.encode_fast(part, false)?.get_ids());
    }
    Ok(ids)
}

/// The parts of a text, or the whole as one; between them a long text's thread gives way.
pub(super) fn parts(text: &str, may_be_cut: bool) -> impl Iterator<Item = &str> {
    parts_of(text, if may_be_cut { PART_BYTES } else { text.len() }).inspect(|_| between_pieces(text.len()))
}

fn parts_of(text: &str, least: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (part, behind) = rest.split_at(part_end(rest, least));
        rest = behind;
        (!part.is_empty()).then_some(part)
    })
}

/// Where the first part of a text ends that has at least `least` bytes.
fn part_end(text: &str, least: usize) -> usize {
    let mut last = None;
    let seam = text.char_indices().skip_while(|(at, _)| at + 4 < least).find(|&(at, next)| {
        let before = last.replace(next);
        at >= least && before.is_some_and(is_letter) && is_mark(next)
    });
    seam.map_or(text.len(), |(at, _)| at)
}

/// Letters that compose with no mark behind them, which could then be another's letter: Latin, CJK, kana, Hangul.
fn is_letter(c: char) -> bool {
    c.is_ascii_alphabetic() || matches!(c, '\u{4e00}'..='\u{9fa5}' | '\u{3041}'..='\u{3096}' | '\u{ac00}'..='\u{d7a3}')
}

/// No apostrophe: by GPT-4o's pattern "'s" belongs to the word before.
fn is_mark(c: char) -> bool {
    matches!(c, ' ' | '.' | ',' | ';' | ':' | '(' | ')' | '\u{3001}' | '\u{3002}' | '\u{ff0c}')
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::LazyLock};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A tokenizer of bytes with these stages, and a vocabulary that joins letters, spaces and marks where it may.
    fn tokenizer(normalizer: Value, pre_tokenizer: Value) -> Tokenizer {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
        json["normalizer"] = normalizer;
        json["pre_tokenizer"] = pre_tokenizer;
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    fn byte_level(use_regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
    }

    fn split(pattern: &str) -> Value {
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]})
    }

    /// GPT-2's and SmolLM's, and those of all patterns, each with and without composition.
    static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
        let digits = json!({"type": "Digits", "individual_digits": true});
        let smol = json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]});
        let stages = [byte_level(true), smol].into_iter().chain(PATTERNS.map(split));
        let forms = || [Value::Null, json!({"type": "NFC"})];
        stages.flat_map(|stages| forms().map(|form| tokenizer(form, stages.clone()))).collect()
    });

    /// What each stage makes of a text: cuts that no merge hides.
    fn words(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        use tokenizers::{
            NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
        };
        let mut text = NormalizedString::from(text);
        if let Some(normalizer) = tokenizer.get_normalizer() {
            normalizer.normalize(&mut text).unwrap();
        }
        let mut text = PreTokenizedString::from(text);
        tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut text).unwrap();
        let splits = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
        splits.into_iter().map(|(word, ..)| word.to_owned()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn parts_have_the_words_and_tokens_of_the_whole(
            text in prop::collection::vec(
                prop_oneof![
                    4 => "[a-zA-Z]{1,6}",
                    4 => "[ .,;:()\u{3001}\u{3002}\u{ff0c}]",
                    1 => "[ \t\r\n]{1,4}",
                    1 => "'(s|t|re|ve|m|ll|d|S|T|RE|\u{17f})",
                    1 => "[0-9\u{b2}\u{663}]{1,5}",
                    1 => "[\u{4e00}-\u{4e20}\u{3041}-\u{3096}\u{ac00}-\u{ac20}]{1,4}",
                    1 => "[\u{300}\u{301}\u{327}\u{3099}\u{11a8}\u{200d}\u{1f3fd}]{1,2}",
                    1 => "\\PC{0,6}",
                ],
                0..60,
            ),
            least in 4usize..24,
        ) {
            let text = text.concat();
            for tokenizer in &*TOKENIZERS {
                prop_assert!(may_be_cut(tokenizer));
                let whole = words(tokenizer, &text);
                let parts = || parts_of(&text, least);
                prop_assert_eq!(parts().flat_map(|part| words(tokenizer, part)).collect::<Vec<_>>(), whole);
                let tokens = |text: &str| tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
                prop_assert_eq!(parts().flat_map(tokens).collect::<Vec<_>>(), tokens(&text));
            }
        }
    }

    #[test]
    fn parts_are_as_long_as_they_shall_be() {
        let text = "Lorem ipsum, dolor sit amet. ".repeat(4000);
        let lens = parts(&text, true).map(str::len).collect::<Vec<_>>();
        let (last, others) = lens.split_last().unwrap();
        assert!(others.iter().all(|len| (PART_BYTES..PART_BYTES + 8).contains(len)), "{others:?}");
        assert_eq!((others.iter().sum::<usize>() + last, part_end("no seam", 100)), (text.len(), 7));
    }

    #[test]
    fn helpers_have_the_tokens_of_the_whole_in_order() {
        let (tokenizer, helpers) = (&TOKENIZERS[0], helpers(3).expect("a test can have a few threads"));
        let text = (0..16_000).map(|number| format!("w{number}, ")).collect::<String>();
        for bytes in [PART_BYTES, SHARED_BYTES, 3 * SHARED_BYTES, 64 << 10] {
            let text = &text[..bytes];
            let whole = tokenizer.encode_fast(text, false).unwrap();
            assert_eq!(encode_shared(tokenizer, text, &helpers).unwrap(), whole.get_ids(), "{bytes}");
            assert_eq!(encode(tokenizer, text, true).unwrap(), whole.get_ids(), "{bytes}");
        }
    }

    #[test]
    fn stages_that_may_look_further_are_left_alone() {
        let digits = || json!({"type": "Digits", "individual_digits": true});
        let sequence = |stages: &[Value]| json!({"type": "Sequence", "pretokenizers": stages});
        let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let known = split(PATTERNS[0])["pretokenizers"][0].clone();
        let (mut merged, mut other) = (known.clone(), known.clone());
        merged["behavior"] = json!("MergedWithPrevious");
        other["pattern"]["Regex"] = json!("(?<=a) b");
        let metaspace =
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "never", "split": true});
        let unknown = [
            Value::Null,
            prefixed,
            merged.clone(),
            other,
            metaspace,
            byte_level(false),
            digits(),
            sequence(&[]),
            sequence(&[byte_level(false), known.clone()]),
            sequence(&[known.clone(), merged]),
        ];
        for stages in unknown {
            assert_ne!(ends_words_at_seams(&stages), Some(true), "{stages}");
        }
        assert_eq!(ends_words_at_seams(&sequence(&[digits(), known])), Some(true));
        let lower = tokenizer(json!({"type": "NFKC"}), byte_level(true));
        assert!(!may_be_cut(&lower));
    }
}
