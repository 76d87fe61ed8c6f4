//! Token ids to text, token by token, in whole UTF-8 characters.

use std::sync::Arc;

use super::tokenizer::{LeadingSpace, Tokenizer};

/// Where in a text the first token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At its start: a leading space that the tokenizer's decoder would drop is dropped.
    Beginning,
    /// After other text: every space counts.
    Middle,
}

/// Decodes one sequence. What it returns, joined, is the decoding of all tokens at once: bytes that are not UTF-8
/// become U+FFFD, control tokens nothing. (Where broken UTF-8 is spelled in `<0xNN>` tokens, Hugging Face's decoder
/// also replaces the whole characters of that run, and only once it has ended; here they are text as soon as they are
/// whole.)
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The first bytes of a character that is not whole yet: at most 3 between calls.
    pending: Vec<u8>,
    leading_space: LeadingSpace,
    /// Control tokens that are text all the same.
    shown: Vec<u32>,
}

impl Detokenizer {
    /// For a sequence that starts at `start`.
    pub fn new(tokenizer: Arc<Tokenizer>, start: Start) -> Self {
        let leading_space = match start {
            Start::Beginning => tokenizer.leading_space(),
            Start::Middle => LeadingSpace::Keep,
        };
        Self { tokenizer, pending: Vec::new(), leading_space, shown: Vec::new() }
    }

    /// The names of these control tokens are part of the text.
    pub fn showing(self, shown: Vec<u32>) -> Self {
        Self { shown, ..self }
    }

    /// The text that became whole with this token.
    pub fn push(&mut self, id: u32) -> String {
        if self.tokenizer.is_special(id) && !self.shown.contains(&id) {
            return String::new();
        }
        let mut bytes = self.tokenizer.token_bytes(id);
        match self.leading_space {
            LeadingSpace::Keep => self.pending.extend(bytes),
            LeadingSpace::StripMarks => {
                self.pending.extend(self.tokenizer.token_bytes_without_marks(id));
                self.leading_space = LeadingSpace::Keep;
            }
            LeadingSpace::Strip(mut left) => {
                while left > 0 && bytes.first() == Some(&b' ') {
                    bytes = &bytes[1..];
                    left -= 1;
                }
                let done = left == 0 || !bytes.is_empty();
                self.leading_space = if done { LeadingSpace::Keep } else { LeadingSpace::Strip(left) };
                self.pending.extend(bytes);
            }
        }
        self.take_whole()
    }

    /// What is left at the end: U+FFFD for a character that never became whole.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }

    /// Whether bytes wait for the rest of their character.
    pub fn holds_bytes(&self) -> bool {
        !self.pending.is_empty()
    }

    fn take_whole(&mut self) -> String {
        let mut text = String::new();
        let mut rest = &self.pending[..];
        loop {
            match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, broken) = rest.split_at(error.valid_up_to());
                    text.push_str(str::from_utf8(valid).expect("valid up to here, says from_utf8"));
                    rest = broken;
                    match error.error_len() {
                        Some(len) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &rest[len..];
                        }
                        // The last character lacks bytes that may still come.
                        None => break,
                    }
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn byte_level() -> Arc<Tokenizer> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa/tokenizer.json");
        Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap(), 768).unwrap())
    }

    /// Llama-2's kind: marked spaces, byte fallback, one leading space stripped.
    fn sentencepiece(decoder: serde_json::Value) -> Arc<Tokenizer> {
        let mut vocab = serde_json::Map::new();
        for token in ["<unk>", "<s>", "</s>"] {
            vocab.insert(token.into(), vocab.len().into());
        }
        for byte in 0..=255u8 {
            vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
        }
        for token in ["\u{2581}", "\u{2581}\u{2581}", "\u{2581}Hello", "Hello", "\u{2581}wörld", "é", "日", "!"] {
            vocab.insert(token.into(), vocab.len().into());
        }
        let special = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let size = vocab.len() as u32;
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": decoder,
            "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true},
        });
        Arc::new(Tokenizer::from_json(json.to_string().as_bytes(), size).unwrap())
    }

    fn llama2_decoder() -> serde_json::Value {
        json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]})
    }

    fn metaspace_decoder() -> serde_json::Value {
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true})
    }

    fn increments(tokenizer: &Arc<Tokenizer>, start: Start, ids: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), start);
        let mut pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
        pieces.push(detokenizer.finish());
        pieces
    }

    proptest! {
        #[test]
        fn byte_level_increments_are_the_full_decoding(ids in prop::collection::vec(0u32..768, 0..200)) {
            let tokenizer = byte_level();
            prop_assert_eq!(increments(&tokenizer, Start::Beginning, &ids).concat(), tokenizer.decode(&ids, false).unwrap());
        }

        #[test]
        fn multi_byte_text_survives_in_increments(text in "\\PC{0,60}") {
            prop_assume!(!text.contains(char::REPLACEMENT_CHARACTER));
            let tokenizer = byte_level();
            let ids = tokenizer.encode(&text, true, "").unwrap();
            let pieces = increments(&tokenizer, Start::Beginning, &ids);
            prop_assert_eq!(pieces.concat(), text);
            prop_assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)));
        }

        #[test]
        fn sentencepiece_increments_are_the_full_decoding(ids in prop::collection::vec(
            prop_oneof![0u32..3, 259u32..267, 3u32 + 0x20..3 + 0x80], 0..60,
        )) {
            for decoder in [llama2_decoder(), metaspace_decoder()] {
                let metaspace = decoder["type"] == "Metaspace";
                let tokenizer = sentencepiece(decoder);
                // A Metaspace decoder knows no bytes.
                let ids: Vec<u32> = ids.iter().copied().filter(|id| !metaspace || !(3..259).contains(id)).collect();
                let whole = tokenizer.decode(&ids, false).unwrap();
                prop_assert_eq!(increments(&tokenizer, Start::Beginning, &ids).concat(), whole);
            }
        }
    }

    #[test]
    fn a_character_spelled_in_byte_tokens_comes_out_once_and_whole() {
        let tokenizer = sentencepiece(llama2_decoder());
        let ids: Vec<u32> = "🦀".bytes().map(|byte| u32::from(byte) + 3).collect();
        assert_eq!(increments(&tokenizer, Start::Middle, &ids), ["", "", "", "🦀", ""]);
        assert_eq!(increments(&tokenizer, Start::Middle, &ids[..2]), ["", "", "\u{fffd}"]);
    }

    #[test]
    fn the_leading_space_is_dropped_at_the_beginning_only() {
        let tokenizer = sentencepiece(llama2_decoder());
        let hello = tokenizer.id("\u{2581}Hello").unwrap();
        assert_eq!(increments(&tokenizer, Start::Beginning, &[1, hello, hello]).concat(), "Hello Hello");
        assert_eq!(increments(&tokenizer, Start::Middle, &[hello, hello]).concat(), " Hello Hello");
    }
}
