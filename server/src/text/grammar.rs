//! Grammars that an answer may be held to: a client's schema, regular expression or grammar in the form that workers
//! follow, or what is wrong with it. llguidance compiles them.

use std::sync::{Arc, OnceLock};

use llguidance::ParserFactory;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use looplane_proto::worker::v1::Vocabulary;
use serde_json::{Value, json};

use super::Tokenizer;
use crate::reply::{CallGrammar, THINKING_CLOSES, THINKING_OPENS};

/// In front of a control token's name in a [`Vocabulary`]: no text has this byte.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What an answer is held to.
#[derive(Debug, Clone, PartialEq)]
pub struct Form {
    /// Its text, but for thinking in front.
    pub body: Body,
    /// Thinking may stand in front.
    pub thinking: Option<Thinking>,
}

/// How the thinking in front of a form begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    /// With its tag, or there is none.
    Tagged,
    /// The prompt has begun it.
    Begun,
}

/// What the text of an answer is held to.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// What the client says.
    Constraint(Constraint),
    /// Tool calls.
    Calls(CallGrammar),
    /// One or the other.
    Either(Constraint, CallGrammar),
}

/// What a client may hold an answer to.
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

/// What defines a rule in grammars that are not in Lark.
const EBNF: &str = "::=";

/// White space between the tokens of JSON. Its length is bounded: models that are lost write no end of it.
const JSON_SPACE: &str = "[ \\t\\n\\r]{1,64}";

/// Formats of texts that grammars know. Any other says nothing of a value, as JSON Schema has it.
const KNOWN_FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Takes formats out of a schema that no grammar knows.
fn leave_out_formats(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            let is_unknown = |format: &Value| format.as_str().is_some_and(|format| !KNOWN_FORMATS.contains(&format));
            if fields.get("format").is_some_and(is_unknown) {
                fields.shift_remove("format");
            }
            // The others hold values, not schemas.
            let is_schema = |name: &str| !matches!(name, "const" | "enum" | "default" | "example" | "examples");
            fields.iter_mut().filter(|(name, _)| is_schema(name)).for_each(|(_, value)| leave_out_formats(value));
        }
        Value::Array(list) => list.iter_mut().for_each(leave_out_formats),
        _ => {}
    }
}

/// JSON that a schema allows, with white space that the schema itself may say something of (`x-guidance`).
fn json(schema: &Value) -> GrammarWithLexer {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        // `true` and `false` are schemas, too.
        other => json!({"allOf": [other]}),
    };
    leave_out_formats(&mut schema);
    let fields = schema.as_object_mut().expect("an object, as made above");
    fields.entry("x-guidance").or_insert_with(|| json!({"whitespace_pattern": JSON_SPACE}));
    GrammarWithLexer::from_json_schema(schema)
}

impl Constraint {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    fn grammar(&self) -> GrammarWithLexer {
        match self {
            Self::Json(schema) => self::json(schema),
            Self::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Self::Choice(choices) => {
                // A string of Lark is one of JSON.
                let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                GrammarWithLexer::from_lark(format!("start: {}", choices.join(" | ")))
            }
            Self::Lark(grammar) => GrammarWithLexer::from_lark(grammar.clone()),
        }
    }
}

impl Form {
    fn is_lark_with(&self, text: &str) -> bool {
        let (Body::Constraint(constraint) | Body::Either(constraint, _)) = &self.body else { return false };
        matches!(constraint, Constraint::Lark(grammar) if grammar.contains(text))
    }

    /// `marker`: how Lark names a text that may be a token of its own.
    fn grammar(&self, marker: impl Fn(&str) -> Option<String>) -> TopLevelGrammar {
        let (constraint, calls) = match &self.body {
            Body::Constraint(constraint) if self.thinking.is_none() => {
                return TopLevelGrammar::from_grammar(constraint.grammar());
            }
            Body::Constraint(constraint) => (Some(constraint), None),
            Body::Calls(calls) => (None, Some(calls)),
            Body::Either(constraint, calls) => (Some(constraint), Some(calls)),
        };
        let bodies = [constraint.map(|_| "@form"), calls.map(|_| "calls")];
        let body = bodies.into_iter().flatten().collect::<Vec<_>>().join(" | ");
        let spelled = |text: &str| marker(text).unwrap_or_else(|| json!(text).to_string());
        let thought = match (self.thinking, marker(THINKING_CLOSES)) {
            (None, _) => String::new(),
            (Some(_), Some(close)) => format!("thought: /(?s:.*)/ {close} BLANK\n"),
            (Some(_), None) => format!("thought: closed BLANK\nclosed[suffix={}]: /(?s:.*)/\n", json!(THINKING_CLOSES)),
        };
        let start = match self.thinking {
            None => format!("start: {body}"),
            Some(Thinking::Begun) => format!("start: thought ({body})\nBLANK: /\\s*/"),
            Some(Thinking::Tagged) => {
                format!("start: ({} thought)? ({body})\nBLANK: /\\s*/", spelled(THINKING_OPENS))
            }
        };
        let rules = calls.map_or("", |calls| &calls.rules);
        let mut grammars = vec![GrammarWithLexer::from_lark(format!("{start}\n{thought}{rules}"))];
        let named = |name: &str, grammar| GrammarWithLexer { name: Some(name.to_owned()), ..grammar };
        grammars.extend(constraint.map(|constraint| named("form", constraint.grammar())));
        let schemas = calls.iter().flat_map(|calls| &calls.schemas);
        grammars.extend(schemas.map(|(name, schema)| named(name, json(schema))));
        TopLevelGrammar { grammars, max_tokens: None }
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
    pub fn compile(&self, form: &Form) -> Result<Arc<str>, String> {
        let factory = self.factory.get_or_init(|| self.factory()).as_ref()?;
        let grammar = form.grammar(|text| self.marker(text));
        let parser = factory.create_parser(grammar.clone());
        parser.map_err(|error| match form.is_lark_with(EBNF) {
            true => format!("{error}; a grammar is to be in Lark (rule: definition), not in EBNF or GBNF ({EBNF})"),
            false => error.to_string(),
        })?;
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
mod tests {
    use std::path::Path;

    use super::*;
    use crate::reply::{ToolFormat, calls};
    use crate::text::Text;

    fn grammars() -> Grammars {
        Text::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")).unwrap().grammars
    }

    fn form(constraint: Constraint) -> Form {
        Form { body: Body::Constraint(constraint), thinking: None }
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
            // It writes rules, and has none of these.
            Constraint::Lark("start: /[a-z]+/ \" ::= \" /[a-z]+/".into()),
        ] {
            let grammar = grammars.compile(&form(good)).unwrap();
            assert!(serde_json::from_str::<TopLevelGrammar>(&grammar).is_ok());
        }
        for (bad, says) in [
            (Constraint::Json(json!({"type": "nonsense"})), "nonsense"),
            (Constraint::Regex("(".into()), "regex"),
            (Constraint::Lark("start: nothing".into()), "nothing"),
            (Constraint::Lark("root ::= \"a\"".into()), "not in EBNF"),
        ] {
            let problem = grammars.compile(&form(bad)).unwrap_err();
            assert!(problem.contains(says), "{problem}");
        }
    }

    /// What llguidance says of a text that a grammar is to allow, followed to its end.
    fn allows(form: &Form, text: &str) -> bool {
        static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
        let grammars = GRAMMARS.get_or_init(grammars);
        let grammar: TopLevelGrammar = serde_json::from_str(&grammars.compile(form).unwrap()).unwrap();
        let mut parser = grammars.factory.get().unwrap().as_ref().unwrap().create_parser(grammar).unwrap();
        parser.start_without_prompt();
        let bytes: Vec<u32> = text.bytes().map(|byte| id_of(grammars, byte)).collect();
        let followed = bytes
            .iter()
            .all(|&token| parser.validate_token(token).unwrap_or(false) && parser.consume_token(token).is_ok());
        followed && parser.is_accepting()
    }

    fn id_of(grammars: &Grammars, byte: u8) -> u32 {
        (0..768).find(|id| grammars.tokenizer.token_bytes(*id) == [byte]).unwrap()
    }

    #[test]
    fn calls_are_held_to_their_format_and_schemas() {
        let schema = json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"],
            "additionalProperties": false, "$defs": {"n": {"type": "integer"}}});
        let tools = [("f", schema.as_object()), ("g", None)];
        let held = |format, one_call, thinking| {
            let calls = calls(format, &tools, one_call, |_| None);
            Form { body: Body::Calls(calls), thinking }
        };
        let hermes = |text: &str| format!("<tool_call>\n{text}\n</tool_call>");
        let (f, g) = (r#"{"name": "f", "arguments": {"n": 5}}"#, r#"{"name": "g", "arguments": {"a": []}}"#);
        for (form, text, expected) in [
            (held(ToolFormat::Hermes, false, None), hermes(f), true),
            (held(ToolFormat::Hermes, false, None), format!("{}\n{}", hermes(f), hermes(g)), true),
            (held(ToolFormat::Hermes, true, None), format!("{}\n{}", hermes(f), hermes(g)), false),
            (held(ToolFormat::Hermes, true, None), hermes(r#"{"name": "f", "arguments": {"n": "5"}}"#), false),
            (held(ToolFormat::Hermes, true, None), hermes(r#"{"name": "h", "arguments": {}}"#), false),
            (held(ToolFormat::Hermes, true, None), "Hi".into(), false),
            (held(ToolFormat::Llama3Json, false, None), f.replace("arguments", "parameters"), true),
            (held(ToolFormat::Llama3Json, true, None), f.into(), false),
            (held(ToolFormat::Mistral, false, None), format!("[TOOL_CALLS][{f},{g}]"), true),
            (held(ToolFormat::Mistral, true, None), format!("[TOOL_CALLS][{f},{g}]"), false),
            (held(ToolFormat::Hermes, true, Some(Thinking::Tagged)), hermes(f), true),
            (
                held(ToolFormat::Hermes, true, Some(Thinking::Tagged)),
                format!("<think>so\n</think>\n{}", hermes(f)),
                true,
            ),
            (held(ToolFormat::Hermes, true, Some(Thinking::Begun)), format!("so\n</think>\n\n{}", hermes(f)), true),
            (held(ToolFormat::Hermes, true, Some(Thinking::Begun)), hermes(f), false),
        ] {
            assert_eq!(allows(&form, &text), expected, "{text} by {form:?}");
        }
    }

    /// A public suite: of the schemas that are taken, no value is allowed that is not valid. Valid ones may be missing:
    /// properties come in the schema's order.
    #[test]
    fn no_schema_allows_what_is_not_valid() {
        let suite = include_str!("../../tests/fixtures/schemas/suite.json");
        let suite: Vec<Value> = serde_json::from_str(suite).unwrap();
        let (mut taken, mut valid, mut found) = (0, 0, 0);
        let (mut wrong, grammars) = (Vec::new(), grammars());
        for group in &suite {
            let held = form(Constraint::Json(group["schema"].clone()));
            if let Err(problem) = grammars.compile(&held) {
                println!("{}: {}", group["of"], problem.lines().next().unwrap_or_default());
                continue;
            }
            taken += 1;
            for test in group["tests"].as_array().unwrap() {
                let allowed = allows(&held, &test[1].to_string());
                let is_valid = test[0] == true;
                (valid, found) = (valid + usize::from(is_valid), found + usize::from(is_valid && allowed));
                if allowed && !is_valid {
                    wrong.push(format!("{}: {} allows {}", group["of"], group["schema"], test[1]));
                }
            }
        }
        println!("{taken} of {} schemas are taken; {found} of {valid} valid values are allowed", suite.len());
        assert!(wrong.is_empty(), "{} values:\n{}", wrong.len(), wrong.join("\n"));
        assert!(taken >= 175 && found >= 360, "{taken} are taken, and {found} values of {valid} allowed");
    }

    #[test]
    fn white_space_of_json_has_an_end() {
        let list = form(Constraint::Json(json!({"type": "array", "items": {"type": "integer"}})));
        assert!(allows(&list, &format!("[1,{}2]", " ".repeat(64))) && allows(&list, "[\n  1,\n  2\n]"));
        assert!(!allows(&list, &format!("[1,{}2]", " ".repeat(65))));
        for (schema, text) in [(json!(true), "[1, 2]"), (json!({}), "{\"a\": null}")] {
            assert!(allows(&form(Constraint::Json(schema)), text));
        }
    }

    #[test]
    fn a_form_may_stand_behind_thinking_or_beside_calls() {
        let json = || Constraint::Json(json!({"type": "integer"}));
        let behind = |thinking| Form { body: Body::Constraint(json()), thinking: Some(thinking) };
        assert!(allows(&behind(Thinking::Tagged), "7") && allows(&behind(Thinking::Tagged), "<think>a</think>7"));
        assert!(allows(&behind(Thinking::Begun), "a</think> 7") && !allows(&behind(Thinking::Begun), "7"));
        let calls = calls(ToolFormat::Hermes, &[("f", None)], false, |_| None);
        let either = Form { body: Body::Either(json(), calls), thinking: None };
        assert!(allows(&either, "12") && !allows(&either, "Hi"));
        assert!(allows(&either, "<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>"));
    }
}
