//! Grammars that an answer may be held to: a client's schema, regular expression or grammar in the form that workers
//! follow, or what is wrong with it. llguidance compiles them.

use std::sync::{Arc, OnceLock};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use looplane_proto::worker::v1::Vocabulary;
use serde::Serialize;
use serde_json::{Value, json};

use self::kept::Kept;
use super::Tokenizer;
use crate::reply::{CallGrammar, THINKING_CLOSES, THINKING_OPENS};

mod gbnf;
mod kept;
mod loops;
mod multiples;
mod pattern;
mod schema;

/// In front of a control token's name in a [`Vocabulary`]: no text has this byte.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What clients are told of rules and schemas without an end.
const NOTHING: &str = "no text keeps to this: what it refers to begins with itself, or is nothing";

/// What an answer is held to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Form {
    /// Its text, but for thinking in front.
    pub body: Body,
    /// Thinking may stand in front.
    pub thinking: Option<Thinking>,
}

/// How the thinking in front of a form begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Thinking {
    /// With its tag, or there is none.
    Tagged,
    /// The prompt has begun it.
    Begun,
}

/// What the text of an answer is held to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Body {
    /// What the client says.
    Constraint(Constraint),
    /// Tool calls.
    Calls(CallGrammar),
    /// One or the other.
    Either(Constraint, CallGrammar),
    /// Any text, but tool calls behind what announces them.
    Announced(CallGrammar),
}

/// What a client may hold an answer to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Constraint {
    /// JSON that a schema allows.
    Json(Value),
    /// A regular expression that matches all of it, in the syntax of Rust's `regex`.
    Regex(String),
    /// One of these texts, at least one.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark, from `start` on, or in llama.cpp's GBNF, from `root` on.
    Grammar(String),
}

/// JSON that a schema allows.
fn json(schema: &Value) -> Result<GrammarWithLexer, String> {
    schema::prepared(schema).map(GrammarWithLexer::from_json_schema)
}

impl Constraint {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    fn grammar(&self) -> Result<GrammarWithLexer, String> {
        Ok(match self {
            Self::Json(schema) => self::json(schema)?,
            Self::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Self::Choice(choices) => {
                // A string of Lark is one of JSON.
                let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                GrammarWithLexer::from_lark(format!("start: {}", choices.join(" | ")))
            }
            Self::Grammar(grammar) if gbnf::is_gbnf(grammar) => GrammarWithLexer::from_lark(gbnf::to_lark(grammar)?),
            Self::Grammar(grammar) => GrammarWithLexer::from_lark(grammar.clone()),
        })
    }
}

impl Form {
    /// What the client says, if it says something.
    fn constraint(&self) -> Option<&Constraint> {
        match &self.body {
            Body::Constraint(constraint) | Body::Either(constraint, _) => Some(constraint),
            Body::Calls(_) | Body::Announced(_) => None,
        }
    }

    /// The calls that an answer may have, if it may.
    fn calls(&self) -> Option<&CallGrammar> {
        match &self.body {
            Body::Calls(calls) | Body::Either(_, calls) | Body::Announced(calls) => Some(calls),
            Body::Constraint(_) => None,
        }
    }

    /// An answer may begin with something else than what the client says.
    fn body_begins_elsewhere(&self) -> bool {
        self.thinking.is_some() || matches!(self.body, Body::Either(..))
    }

    /// An answer ends where this says so; free text may go on.
    pub fn says_the_end(&self) -> bool {
        !matches!(self.body, Body::Announced(_))
    }

    /// `marker`: how Lark names a text that may be a token of its own.
    fn grammar(&self, marker: impl Fn(&str) -> Option<String>) -> Result<TopLevelGrammar, String> {
        let (constraint, calls, body) = match &self.body {
            Body::Constraint(constraint) if self.thinking.is_none() => {
                return constraint.grammar().map(TopLevelGrammar::from_grammar);
            }
            Body::Constraint(constraint) => (Some(constraint), None, "@form"),
            Body::Calls(calls) => (None, Some(calls), "calls"),
            Body::Either(constraint, calls) => (Some(constraint), Some(calls), "@form | calls"),
            Body::Announced(calls) => (None, Some(calls), "free"),
        };
        let is_free = !self.says_the_end();
        // A free text that begins with the tag would be thought.
        let unthought = is_free && self.thinking == Some(Thinking::Tagged) && marker(THINKING_OPENS).is_none();
        let free = match calls {
            Some(calls) if is_free => announced(calls, unthought, &marker),
            _ => String::new(),
        };
        let spelled = |text: &str| marker(text).unwrap_or_else(|| json!(text).to_string());
        let thought = match (self.thinking, marker(THINKING_CLOSES)) {
            (None, _) => String::new(),
            (Some(_), Some(close)) => format!("thought: /(?s:.*)/ {close} BLANK\n"),
            (Some(_), None) => format!("thought: closed BLANK\nclosed[suffix={}]: /(?s:.*)/\n", json!(THINKING_CLOSES)),
        };
        let start = match self.thinking {
            None => format!("start: {body}"),
            Some(Thinking::Begun) => format!("start: thought ({body})\nBLANK: /\\s*/"),
            Some(Thinking::Tagged) if unthought => {
                format!("start: {} thought free | unthought\nBLANK: /\\s*/", spelled(THINKING_OPENS))
            }
            Some(Thinking::Tagged) => {
                format!("start: ({} thought)? ({body})\nBLANK: /\\s*/", spelled(THINKING_OPENS))
            }
        };
        let rules = calls.map_or("", |calls| &calls.rules);
        let mut grammars = vec![GrammarWithLexer::from_lark(format!("{start}\n{thought}{free}{rules}"))];
        let named = |name: &str, grammar| GrammarWithLexer { name: Some(name.to_owned()), ..grammar };
        if let Some(constraint) = constraint {
            grammars.push(named("form", constraint.grammar()?));
        }
        for (name, schema) in calls.iter().flat_map(|calls| &calls.schemas) {
            grammars.push(named(name, json(schema)?));
        }
        Ok(TopLevelGrammar { grammars, max_tokens: None })
    }
}

/// The rule `free`: any text, in which calls stand behind what announces them. `unthought`: the rule of this name, too,
/// the same for a text that does not begin with the tag of thinking.
fn announced(calls: &CallGrammar, unthought: bool, marker: impl Fn(&str) -> Option<String>) -> String {
    let text = calls.marker.expect("calls are announced by something");
    // No text spells a control token. Any other marker ends the text where it stands first.
    let (until, before, plain) = match marker(text) {
        Some(marker) => (marker, "/(?s:.*)/".to_owned(), "/(?s:.*)/".to_owned()),
        None => {
            let text = literal(text);
            let before = format!("/(?s:.*){text}/ & ~/(?s:.*{text}.+)/");
            (String::new(), before, format!("/(?s:.*)/ & ~/(?s:.*{text}.*)/"))
        }
    };
    let times = if calls.one_call { "?" } else { "*" };
    let mut rules = format!(
        "free: (BEFORE {until} announced){times} PLAIN\n\
         BEFORE: {before}\n\
         PLAIN: {plain}\n"
    );
    if unthought {
        let thought = format!("~/(?s:{}.*)/", literal(THINKING_OPENS));
        let behind = if calls.one_call { "PLAIN" } else { "free" };
        rules.push_str(&format!(
            "unthought: FIRST {until} announced {behind} | ONLY\n\
             FIRST: {before} & {thought}\n\
             ONLY: {plain} & {thought}\n"
        ));
    }
    rules
}

/// What clients are told of an error of llguidance: it catches its own panics, and tells them with a backtrace.
fn told(error: &str) -> String {
    match error.strip_prefix("panic: ") {
        Some(panic) => {
            tracing::warn!("llguidance failed on a grammar: {panic}");
            "this grammar cannot be compiled: its compiler failed on it; write it in another way".into()
        }
        None => error.split("\n<backtrace>").next().unwrap_or_default().to_owned(),
    }
}

/// Refuses a grammar that cannot be followed, and one that allows no text, such as of rules without an end.
fn check_begin(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<(), String> {
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    let first = matcher.get_error().map_or_else(|| matcher.compute_mask_or_eos().map_err(|e| e.to_string()), Err);
    match first {
        Ok(_) => Ok(()),
        // What llguidance says of it, in front of its state.
        Err(error) if error.starts_with("NoExtensionBias") => Err(NOTHING.into()),
        Err(error) => Err(told(&error)),
    }
}

/// What is wrong with the arguments of a tool, with its name, which the whole grammar does not tell.
fn wrong_tool(factory: &ParserFactory, form: &Form) -> Option<String> {
    form.calls()?.arguments.iter().find_map(|(name, schema)| {
        let checked = json(schema).and_then(|only| check_begin(factory, TopLevelGrammar::from_grammar(only)));
        checked.err().map(|problem| format!("the parameters of {name}: {problem}"))
    })
}

/// A text as a regular expression of Lark.
fn literal(text: &str) -> String {
    text.chars().map(|char| format!("\\x{{{:x}}}", u32::from(char))).collect()
}

/// Compiles what answers are held to, for one tokenizer. What that takes is made when the first one comes.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// `None`: the model has none.
    end: Option<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
    kept: Kept,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("end", &self.end).finish_non_exhaustive()
    }
}

impl Grammars {
    /// `end`: a token that ends answers.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, end: Option<u32>) -> Self {
        Self { tokenizer, end, factory: OnceLock::new(), kept: Kept::default() }
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

    /// The grammar as workers read it. Takes milliseconds where it is not kept: not for an async thread.
    ///
    /// # Errors
    /// In words: what is wrong with it, or too much about it.
    pub fn compile(&self, form: &Form) -> Result<Arc<str>, String> {
        // By its text, in which properties have an order; values that are equal need not have the same.
        let text = serde_json::to_string(form).map_err(|error| error.to_string())?;
        self.kept.get(text, || self.compiled(form))
    }

    fn compiled(&self, form: &Form) -> Result<Arc<str>, String> {
        let factory = self.factory.get_or_init(|| self.factory()).as_ref()?;
        let whole = form.grammar(|text| self.marker(text));
        let checked = whole.and_then(|grammar| check_begin(factory, grammar.clone()).map(|()| grammar));
        let grammar = checked.map_err(|problem| wrong_tool(factory, form).unwrap_or(problem))?;
        // What may stand in front of it, or in its place, may begin in any case.
        if let Some(constraint) = form.constraint().filter(|_| form.body_begins_elsewhere()) {
            check_begin(factory, TopLevelGrammar::from_grammar(constraint.grammar()?))?;
        }
        let text = serde_json::to_string(&grammar).map_err(|error| error.to_string())?;
        Ok(text.into())
    }

    /// How Lark names a text that is a control token, which no other text spells; `None`: it is not.
    pub fn marker(&self, text: &str) -> Option<String> {
        let id = self.tokenizer.id(text).filter(|id| self.tokenizer.is_special(*id));
        id.map(|id| format!("<[{id}]>"))
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
mod tests;
