//! The output of one sequence: tokens in, text and the tokens behind it out, up to a stop text.

use std::{collections::VecDeque, sync::Arc};

use super::{Detokenizer, Start, StopMatcher, Stops, Tokenizer};
use crate::engine::GeneratedToken;

/// A token that is part of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// As it came out of the loop.
    pub token: GeneratedToken,
    /// Characters of output before it.
    pub text_offset: usize,
}

/// Output that became known.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// Whole characters; never part of a stop text.
    pub text: String,
    /// The tokens whose text (or its start) is now out, in order.
    pub tokens: Vec<OutputToken>,
    /// All tokens generated since the piece before, whatever becomes of their text. Their owner puts them here.
    pub generated: Vec<u32>,
}

impl Piece {
    /// A prompt as output: its tokens, the first of which has no log-probability, and its text, unless the client wrote
    /// another.
    pub fn echo(tokenizer: &Arc<Tokenizer>, tokens: Vec<GeneratedToken>, text: Option<String>) -> Self {
        let mut output = OutputText::new(tokenizer.clone(), Start::Beginning, Stops::default());
        let mut piece = Self::default();
        for token in tokens {
            piece.append(output.push(token).0);
        }
        piece.append(output.finish().0);
        piece.text = text.unwrap_or(piece.text);
        piece
    }

    /// What became known behind it.
    pub fn append(&mut self, more: Self) {
        self.text.push_str(&more.text);
        self.tokens.extend(more.tokens);
    }

    /// Whether no output became known.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

/// Turns tokens into output. A token is given out with the last of its text, so that text and tokens stay in step while
/// either is held back; of the tokens around a stop text, those with text before it are part of the output.
#[derive(Debug)]
pub struct OutputText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Tokens in whose text no stop is looked for yet.
    unchecked: u32,
    held_tokens: VecDeque<HeldToken>,
    decoded: Position,
    shown: Position,
}

/// A place in the decoded text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Position {
    bytes: usize,
    chars: usize,
}

#[derive(Debug)]
struct HeldToken {
    token: GeneratedToken,
    start: Position,
    /// Byte of the decoded text up to which its text must be shown before the token is.
    end: usize,
}

impl OutputText {
    /// For a sequence that starts at `start` and ends at any of `stops`.
    pub fn new(tokenizer: Arc<Tokenizer>, start: Start, stops: Stops) -> Self {
        let Stops { texts, shown, min_tokens } = stops;
        Self {
            unchecked: min_tokens,
            detokenizer: Detokenizer::new(tokenizer, start),
            stops: StopMatcher::new(texts, shown),
            held_tokens: VecDeque::new(),
            decoded: Position::default(),
            shown: Position::default(),
        }
    }

    /// The names of these control tokens are part of the output.
    pub fn showing(self, shown: Vec<u32>) -> Self {
        Self { detokenizer: self.detokenizer.showing(shown), ..self }
    }

    /// The stop text that ended the output.
    pub fn stop_text(&self) -> Option<&str> {
        self.stops.found()
    }

    /// Takes the next token: what became known, and whether a stop text ends the output here.
    pub fn push(&mut self, token: GeneratedToken) -> (Piece, bool) {
        let start = self.decoded;
        let text = self.detokenizer.push(token.id);
        self.decoded.advance(&text);
        // Bytes that wait belong to a character that will be shown after `decoded`.
        let end = self.decoded.bytes + usize::from(self.detokenizer.holds_bytes());
        self.held_tokens.push_back(HeldToken { token, start, end });

        let found = match self.unchecked {
            0 => self.stops.push(&text),
            _ => self.stops.pass(&text),
        };
        self.unchecked = self.unchecked.saturating_sub(1);
        self.shown.advance(&found.text);
        let shown = self.shown.bytes;
        let tokens = match found.stopped {
            true => self.take_tokens(|held| held.start.bytes < shown),
            false => self.take_tokens(|held| held.end <= shown),
        };
        (Piece { text: found.text, tokens, ..Piece::default() }, found.stopped)
    }

    /// The rest, at the end of a sequence that no stop text ended; the flag says that one did after all.
    pub fn finish(&mut self) -> (Piece, bool) {
        let found = self.stops.push(&self.detokenizer.finish());
        let mut text = found.text;
        if !found.stopped {
            text.push_str(&self.stops.finish());
        }
        self.shown.advance(&text);
        let shown = self.shown.bytes;
        let tokens = self.take_tokens(|held| !found.stopped || held.start.bytes < shown);
        (Piece { text, tokens, ..Piece::default() }, found.stopped)
    }

    fn take_tokens(&mut self, known: impl Fn(&HeldToken) -> bool) -> Vec<OutputToken> {
        let mut tokens = Vec::new();
        while let Some(held) = self.held_tokens.pop_front_if(|held| known(held)) {
            tokens.push(OutputToken { token: held.token, text_offset: held.start.chars });
        }
        tokens
    }
}

impl Position {
    fn advance(&mut self, text: &str) {
        self.bytes += text.len();
        self.chars += text.chars().count();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa/tokenizer.json");
        Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap(), 768).unwrap())
    }

    fn token(id: u32) -> GeneratedToken {
        GeneratedToken { id, logprob: None, top: Vec::new() }
    }

    /// One token a byte, as the byte-level alphabet allows.
    fn byte_tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let id_of = |byte: u8| (0..768).find(|id| tokenizer.token_bytes(*id) == [byte]).unwrap();
        text.bytes().map(id_of).collect()
    }

    fn run(stops: &[&str], text: &str) -> (Vec<(String, Vec<usize>)>, bool) {
        let tokenizer = tokenizer();
        let texts = stops.iter().map(|stop| stop.to_string()).collect();
        let stops = Stops { texts, ..Stops::default() };
        let mut output = OutputText::new(tokenizer.clone(), Start::Beginning, stops);
        let mut pieces = Vec::new();
        let mut keep = |piece: Piece| {
            if !piece.is_empty() {
                pieces.push((piece.text, piece.tokens.iter().map(|token| token.text_offset).collect()));
            }
        };
        for id in byte_tokens(&tokenizer, text) {
            let (piece, stopped) = output.push(token(id));
            keep(piece);
            if stopped {
                return (pieces, true);
            }
        }
        let (piece, stopped) = output.finish();
        keep(piece);
        (pieces, stopped)
    }

    #[test]
    fn tokens_come_out_with_the_last_of_their_text() {
        let (pieces, stopped) = run(&[], "aé🦀");
        assert_eq!(pieces, [("a".into(), vec![0]), ("é".into(), vec![1, 1]), ("🦀".into(), vec![2, 2, 2, 2])]);
        assert!(!stopped);
    }

    #[test]
    fn tokens_of_a_stop_text_are_not_output() {
        let (pieces, stopped) = run(&["<end>"], "x<e<end>y");
        assert_eq!(pieces, [("x".into(), vec![0]), ("<e".into(), vec![1, 2])]);
        assert!(stopped);
    }

    #[test]
    fn what_was_held_for_a_stop_that_never_came_is_output() {
        assert_eq!(run(&["<end>"], "x<en").0, [("x".into(), vec![0]), ("<en".into(), vec![1, 2, 3])]);
    }

    #[test]
    fn control_tokens_are_output_without_text_unless_they_are_shown() {
        let mut output = OutputText::new(tokenizer(), Start::Beginning, Stops::default());
        let (piece, _) = output.push(token(4));
        assert_eq!((piece.text.as_str(), piece.tokens.len()), ("", 1));
        let mut output = OutputText::new(tokenizer(), Start::Beginning, Stops::default()).showing(vec![4]);
        assert_eq!(output.push(token(4)).0.text, "<|eot_id|>");
        assert_eq!(output.push(token(3)).0.text, "");
    }
}
