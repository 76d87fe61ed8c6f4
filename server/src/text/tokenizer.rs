//! tokenizer.json: text to token ids, and for every id the bytes that it stands for.

use std::collections::HashMap;
use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{OffsetReferential, OffsetType};

use super::TextError;
use super::segments::Segments;

/// The mark that sentencepiece vocabularies write for a space.
const SPACE_MARK: char = '\u{2581}';

/// The tokenizer of one model.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    segments: Option<Segments>,
    /// Bytes of all tokens, by id, one after the other.
    bytes: Vec<u8>,
    /// Where in `bytes` each token ends; an id past the end stands for nothing.
    ends: Vec<usize>,
    /// Tokens that are control, not text, by id.
    special: Vec<bool>,
    leading_space: LeadingSpace,
    /// Bytes of text that a prompt may have for each token of the context.
    max_token_bytes: usize,
}

/// A normaliser may shorten a text before it is cut into tokens: Unicode composition makes one character of at most two
/// bytes of three of four bytes and more; this leaves room.
const NORMALIZER_SHRINK: usize = 8;

/// A tokenizer.json, of which the decoder is read whole.
#[derive(Deserialize)]
struct WithDecoder {
    #[serde(default, rename = "decoder")]
    _decoder: Value,
}

/// What the decoder does to spaces at the very start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeadingSpace {
    /// Nothing.
    Keep,
    /// Drops up to so many.
    Strip(usize),
    /// Drops the space marks of the first token.
    StripMarks,
}

/// How token strings become bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// Each character stands for one byte (GPT-2's table).
    ByteLevel,
    /// Text with marked spaces; with `byte_fallback`, `<0xNN>` is one byte.
    Sentencepiece { byte_fallback: bool },
}

impl Tokenizer {
    /// Reads the contents of a tokenizer.json for a model with `vocab_size` embedding rows.
    ///
    /// # Errors
    /// In words: what does not parse, which id the model does not have, or which decoder is not supported.
    pub fn from_json(json: &[u8], vocab_size: u32) -> Result<Self, String> {
        // The library panics where JSON is broken inside of its decoder, as in a file that was not downloaded whole.
        serde_json::from_slice::<WithDecoder>(json).map_err(|error| error.to_string())?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
        // A prompt is never cut or padded in silence, whatever the file asks for.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);

        let vocab = inner.get_vocab(true);
        if let Some((token, id)) = vocab.iter().max_by_key(|(_, id)| **id).filter(|(_, id)| **id >= vocab_size) {
            return Err(format!(
                "token {token:?} has id {id}, but config.json says vocab_size {vocab_size}: tokenizer and model do not \
                 belong together"
            ));
        }
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|error| error.to_string())?;
        let (alphabet, leading_space) = read_decoder(&decoder)?;
        let byte_of = byte_level_table();

        let segments = Segments::of(&inner);
        let (bytes, ends, special) = (Vec::new(), Vec::new(), Vec::new());
        let mut tokenizer = Self { inner, segments, bytes, ends, special, leading_space, max_token_bytes: 1 };
        let added = tokenizer.inner.get_added_tokens_decoder();
        for id in 0..vocab.values().max().map_or(0, |last| last + 1) {
            if let Some(token) = tokenizer.inner.id_to_token(id) {
                alphabet.append_bytes(&token, &byte_of, &mut tokenizer.bytes);
            }
            tokenizer.ends.push(tokenizer.bytes.len());
            tokenizer.special.push(added.get(&id).is_some_and(|token| token.special));
        }
        let shrink = if tokenizer.inner.get_normalizer().is_some() { NORMALIZER_SHRINK } else { 1 };
        let lens = (0..tokenizer.ends.len()).map(|id| tokenizer.token_bytes(id as u32).len());
        tokenizer.max_token_bytes = lens.max().unwrap_or(0).max(1) * shrink;
        Ok(tokenizer)
    }

    /// The most bytes of text that are looked at for a prompt of `tokens` tokens: all of them the longest that there
    /// is. (A tokenizer that knows less than every byte could make one "unknown" token of more, which nobody needs.)
    pub fn max_text_bytes(&self, tokens: u32) -> usize {
        self.max_token_bytes.saturating_mul(tokens as usize)
    }

    /// Token ids of a text. `special`: with what the model expects around a plain text, such as a begin token. Control
    /// tokens spelled out in the text are recognised either way, as Hugging Face's tokenizers do. Long texts between
    /// them are faster when they come again with the same `salt`.
    ///
    /// # Errors
    /// The tokenizer's own, on texts that it cannot represent.
    pub fn encode(&self, text: &str, special: bool, salt: &str) -> Result<Vec<u32>, TextError> {
        let ids = match &self.segments {
            Some(segments) => segments.encode(&self.inner, text, special, salt),
            None => self.inner.encode_fast(text, special).map(|encoding| encoding.get_ids().to_vec()),
        };
        ids.map_err(|error| TextError::Encode(error.to_string()))
    }

    /// The control tokens that a text holds, in order: found as [`Tokenizer::encode`] finds them, normaliser included,
    /// but without cutting the rest into tokens.
    pub fn special_tokens_in(&self, text: &str) -> Vec<u32> {
        let cut = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::None);
        let added = splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref()).flatten();
        added.map(|token| token.id).filter(|id| self.is_special(*id)).collect()
    }

    /// Where a text spells control tokens, in bytes, in order: as [`Tokenizer::special_tokens_in`] finds them.
    pub fn special_spans(&self, text: &str) -> Vec<Range<usize>> {
        let cut = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let of_split = |(_, (start, end), tokens): &(&str, (usize, usize), &Option<Vec<tokenizers::Token>>)| {
            let special = tokens.iter().flatten().any(|token| self.is_special(token.id));
            special.then_some(*start..*end)
        };
        splits.iter().filter_map(of_split).collect()
    }

    /// The text of all the tokens at once, as Hugging Face's tokenizers decode it. `special`: control tokens, too.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String, TextError> {
        self.inner.decode(ids, !special).map_err(|error| TextError::Encode(error.to_string()))
    }

    /// Token ids are under this.
    pub fn tokens(&self) -> u32 {
        self.ends.len() as u32
    }

    /// The bytes that a token stands for, a control token's name included; empty for an id without a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..*end]
    }

    /// Whether a token is control, not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// All control tokens.
    pub fn special(&self) -> impl Iterator<Item = u32> {
        (0..self.tokens()).filter(|id| self.is_special(*id))
    }

    /// The id of a token by its name.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub(super) fn leading_space(&self) -> LeadingSpace {
        self.leading_space
    }

    /// The bytes of a token without its space marks, for [`LeadingSpace::StripMarks`].
    pub(super) fn token_bytes_without_marks(&self, id: u32) -> Vec<u8> {
        let token = self.inner.id_to_token(id).unwrap_or_default();
        token.replace(SPACE_MARK, "").into_bytes()
    }
}

impl Alphabet {
    fn append_bytes(self, token: &str, byte_of: &HashMap<char, u8>, out: &mut Vec<u8>) {
        match self {
            Alphabet::ByteLevel => match token.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<Vec<u8>>>() {
                Some(bytes) => out.extend(bytes),
                // An added token may be any text.
                None => out.extend(token.as_bytes()),
            },
            Alphabet::Sentencepiece { byte_fallback } => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                match hex.filter(|hex| byte_fallback && hex.len() == 2).map(|hex| u8::from_str_radix(hex, 16)) {
                    Some(Ok(byte)) => out.push(byte),
                    _ => out.extend(token.replace(SPACE_MARK, " ").as_bytes()),
                }
            }
        }
    }
}

/// Reads the `decoder` of tokenizer.json; only decoders whose output can be streamed exactly are taken.
fn read_decoder(decoder: &Value) -> Result<(Alphabet, LeadingSpace), String> {
    let mut steps = Vec::new();
    flatten_steps(decoder, &mut steps);
    let unsupported = || format!("the decoder {decoder} is not supported (ByteLevel and sentencepiece-style ones are)");
    if let [step] = steps[..]
        && step["type"] == "ByteLevel"
    {
        return Ok((Alphabet::ByteLevel, LeadingSpace::Keep));
    }
    let (mut spaces, mut byte_fallback, mut leading_space) = (false, false, LeadingSpace::Keep);
    for step in steps {
        match step["type"].as_str() {
            Some("Replace") if step["pattern"]["String"] == "\u{2581}" && step["content"] == " " => spaces = true,
            Some("ByteFallback") => byte_fallback = true,
            Some("Fuse") => {}
            Some("Strip") if step["content"] == " " && step["stop"] == 0 => {
                leading_space = LeadingSpace::Strip(step["start"].as_u64().ok_or_else(unsupported)? as usize);
            }
            Some("Metaspace") if step["replacement"] == "\u{2581}" => {
                spaces = true;
                if step["prepend_scheme"] != "never" {
                    leading_space = LeadingSpace::StripMarks;
                }
            }
            _ => return Err(unsupported()),
        }
    }
    if spaces { Ok((Alphabet::Sentencepiece { byte_fallback }, leading_space)) } else { Err(unsupported()) }
}

fn flatten_steps<'a>(decoder: &'a Value, steps: &mut Vec<&'a Value>) {
    match decoder["decoders"].as_array() {
        Some(nested) => nested.iter().for_each(|step| flatten_steps(step, steps)),
        None => steps.push(decoder),
    }
}

/// GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on, in byte order.
fn byte_level_table() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let mut table = HashMap::with_capacity(256);
    for byte in 0..=u8::MAX {
        let code = if printable(byte) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        table.insert(char::from_u32(code).expect("below U+0200, where every code is a character"), byte);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_decoder(decoder: Value) -> Result<Tokenizer, String> {
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": null, "decoder": decoder,
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "\u{2581}": 2}, "merges": [], "unk_token": null},
        });
        Tokenizer::from_json(json.to_string().as_bytes(), 3)
    }

    #[test]
    fn prompts_are_never_truncated() {
        let tokenizer = with_decoder(serde_json::json!({"type": "ByteLevel", "add_prefix_space": true,
            "trim_offsets": true, "use_regex": true}))
        .unwrap();
        assert_eq!(tokenizer.encode("abab", false, "").unwrap(), [0, 1, 0, 1]);
    }

    #[test]
    fn a_decoder_that_cannot_be_streamed_is_refused_by_name() {
        let error = with_decoder(serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true}));
        assert!(error.unwrap_err().contains("WordPiece"));
        assert!(with_decoder(Value::Null).is_err());
    }

    #[test]
    fn ids_outside_the_tokenizer_stand_for_nothing() {
        let tokenizer = with_decoder(serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}",
            "prepend_scheme": "always", "split": true}))
        .unwrap();
        assert_eq!(tokenizer.token_bytes(2), b" ");
        assert_eq!(tokenizer.token_bytes(3), b"");
        assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
        assert!(!tokenizer.is_special(u32::MAX));
    }
}
