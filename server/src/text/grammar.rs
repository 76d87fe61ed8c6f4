//! Grammars that an answer may be held to: a client's schema, regular expression or grammar in the form that workers
//! follow, or what is wrong with it. llguidance compiles them.

use std::sync::{Arc, OnceLock};

use llguidance::ParserFactory;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use looplane_proto::worker::v1::Vocabulary;
use serde_json::{Value, json};

use super::Tokenizer;

/// In front of a control token's name in a [`Vocabulary`]: no text has this byte.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What an answer is held to.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// JSON that a schema allows.
    Json(Value),
    /// A regular expression that matches all of it, in the syntax of Rust's `regex`.
    Regex(String),
    /// One of these texts, at least one.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark, from `start` on.
    Lark(String),
}

impl Constraint {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    fn grammar(&self) -> TopLevelGrammar {
        let grammar = match self {
            Self::Json(schema) => GrammarWithLexer::from_json_schema(schema.clone()),
            Self::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Self::Choice(choices) => {
                // A string of Lark is one of JSON.
                let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                GrammarWithLexer::from_lark(format!("start: {}", choices.join(" | ")))
            }
            Self::Lark(grammar) => GrammarWithLexer::from_lark(grammar.clone()),
        };
        TopLevelGrammar::from_grammar(grammar)
    }
}

/// Compiles what answers are held to, for one tokenizer. What that takes is made when the first one comes.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// `None`: the model has none.
    end: Option<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("end", &self.end).finish_non_exhaustive()
    }
}

impl Grammars {
    /// `end`: a token that ends answers.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, end: Option<u32>) -> Self {
        Self { tokenizer, end, factory: OnceLock::new() }
    }

    /// What workers need to follow grammars; `None`: no token ends an answer, so none can be followed to its end.
    pub fn vocabulary(&self) -> Option<Vocabulary> {
        let (mut texts, mut lengths) = (Vec::new(), Vec::new());
        for id in 0..self.tokenizer.tokens() {
            let before = texts.len();
            if self.tokenizer.is_special(id) {
                texts.push(CONTROL);
            }
            texts.extend(self.tokenizer.token_bytes(id));
            lengths.push((texts.len() - before) as u32);
        }
        self.end.map(|end| Vocabulary { texts, lengths, end })
    }

    /// The grammar as workers read it. Takes milliseconds: not for an async thread.
    ///
    /// # Errors
    /// In words: what is wrong with it, or too much about it.
    pub fn compile(&self, constraint: &Constraint) -> Result<Arc<str>, String> {
        let factory = self.factory.get_or_init(|| self.factory()).as_ref()?;
        let grammar = constraint.grammar();
        let parser = factory.create_parser(grammar.clone());
        parser.map_err(|error| error.to_string())?;
        let text = serde_json::to_string(&grammar).map_err(|error| error.to_string())?;
        Ok(text.into())
    }

    fn factory(&self) -> Result<ParserFactory, String> {
        let Vocabulary { texts, lengths, end } =
            self.vocabulary().ok_or("the model names no token that ends an answer, so no grammar can be followed")?;
        let mut left = &texts[..];
        let word = |length: &u32| {
            let (word, rest) = left.split_at(*length as usize);
            left = rest;
            word.to_owned()
        };
        let words: Vec<Vec<u8>> = lengths.iter().map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
        factory.quiet();
        Ok(factory)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::Text;

    fn grammars() -> Grammars {
        Text::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")).unwrap().grammars
    }

    #[test]
    fn the_vocabulary_has_every_token_and_marks_control() {
        let grammars = grammars();
        let Vocabulary { texts, lengths, end } = grammars.vocabulary().unwrap();
        assert_eq!(lengths.len(), 768);
        assert_eq!(lengths.iter().sum::<u32>() as usize, texts.len());
        assert_eq!(end, 1);
        assert_eq!(&texts[..lengths[0] as usize], b"\xff<|begin_of_text|>");
        assert!(texts.split(|byte| *byte == CONTROL).count() > 3);
    }

    #[test]
    fn what_can_be_followed_compiles_and_the_rest_says_why_not() {
        let grammars = grammars();
        let object = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
        for good in [
            Constraint::json_object(),
            Constraint::Json(object),
            Constraint::Json(json!({})),
            Constraint::Regex("[a-z]{3}\\d+".into()),
            Constraint::Choice(vec!["yes \"indeed\"".into(), "no\n".into()]),
            Constraint::Lark("start: \"a\" start | \"b\"".into()),
        ] {
            let grammar = grammars.compile(&good).unwrap();
            assert!(serde_json::from_str::<TopLevelGrammar>(&grammar).is_ok());
        }
        for (bad, says) in [
            (Constraint::Json(json!({"type": "nonsense"})), "nonsense"),
            (Constraint::Regex("(".into()), "regex"),
            (Constraint::Lark("start: nothing".into()), "nothing"),
        ] {
            let problem = grammars.compile(&bad).unwrap_err();
            assert!(problem.contains(says), "{problem}");
        }
    }
}
