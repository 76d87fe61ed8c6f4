//! JSON bodies, in which every key stands once: of two values for a field one would be ignored in silence.

use std::{
    cell::RefCell,
    fmt,
    io::{self, BufReader, Read},
    slice,
};

use axum::http::StatusCode;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::ApiError;
use crate::{
    give_way::between_pieces,
    request::{FieldError, MAX_ALLOWED_TOKENS, MAX_MESSAGES, RequestError},
};

/// A body of so many bytes and more is read in pieces, which takes several times as long.
const LONG_BYTES: usize = 1 << 20;
const PIECE_BYTES: usize = 32 << 10;

/// Token ids that a list may have for each that the context has: a prompt may be longer, if it is truncated.
const IDS_OF_CONTEXT: usize = 4;

/// Reads a whole body, in blocks, for a context of `max_context` tokens. Values take many times the memory of their
/// text, so a list or an object is not kept when it gets longer than any can be that is valid.
///
/// # Errors
/// 400: what is no JSON, which key stands twice, or which list or object is too long.
pub(super) fn parse<B: AsRef<[u8]>>(body: &[B], max_context: u32) -> Result<Value, ApiError> {
    let found = RefCell::new(None);
    let context = max_context as usize;
    let max_numbers = MAX_ALLOWED_TOKENS.max(context.saturating_mul(IDS_OF_CONTEXT));
    let rules = Rules { max_items: MAX_MESSAGES.max(context), max_numbers, found: &found };
    let bytes = body.iter().map(|block| block.as_ref().len()).sum();
    let value = match body {
        [whole] if bytes < LONG_BYTES => read(serde_json::Deserializer::from_slice(whole.as_ref()), &rules),
        _ if bytes < LONG_BYTES => {
            let mut whole = Vec::with_capacity(bytes);
            body.iter().for_each(|block| whole.extend_from_slice(block.as_ref()));
            read(serde_json::Deserializer::from_slice(&whole), &rules)
        }
        _ => {
            let pieces = Pieces { bytes, block: &[], rest: body.iter() };
            read(serde_json::Deserializer::from_reader(BufReader::with_capacity(PIECE_BYTES, pieces)), &rules)
        }
    };
    value.map_err(|error| match found.take() {
        Some(Breach::Duplicate(key)) => {
            let message = format!("{key}: this key is given twice; leave one out");
            ApiError { param: Some(key), ..ApiError::new(StatusCode::BAD_REQUEST, "duplicate_key", message) }
        }
        Some(Breach::Tokens { field, count }) => {
            RequestError::ContextLength { field, prompt_tokens: count as u64, asked: 1, max_context }.into()
        }
        Some(Breach::Items { field, count }) => {
            let message = format!("{count} entries are more than it can have");
            RequestError::field(field, FieldError::Value, message).into()
        }
        None => ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not valid JSON: {error}")),
    })
}

fn read<'de, R: serde_json::de::Read<'de>>(
    mut deserializer: serde_json::Deserializer<R>,
    rules: &Rules<'_>,
) -> serde_json::Result<Value> {
    let value = Checked { at: &Place::Root, rules }.deserialize(&mut deserializer)?;
    deserializer.end().map(|()| value)
}

/// A long body, whose thread gives way between its pieces.
struct Pieces<'a, B> {
    /// Of the whole body.
    bytes: usize,
    /// What is left of a block, and the blocks behind it.
    block: &'a [u8],
    rest: slice::Iter<'a, B>,
}

impl<B: AsRef<[u8]>> Read for Pieces<'_, B> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        between_pieces(self.bytes);
        while self.block.is_empty()
            && let Some(next) = self.rest.next()
        {
            self.block = next.as_ref();
        }
        self.block.read(to)
    }
}

/// What is looked for while a body is read.
struct Rules<'a> {
    /// Most items of a list, or fields of an object.
    max_items: usize,
    /// Most items of a list that begins with a number, as token ids do.
    max_numbers: usize,
    found: &'a RefCell<Option<Breach>>,
}

/// A rule that is broken, and where.
enum Breach {
    Duplicate(String),
    /// Token ids of a prompt.
    Tokens {
        field: String,
        count: usize,
    },
    Items {
        field: String,
        count: usize,
    },
}

impl Rules<'_> {
    fn broken<E: Error>(&self, breach: Breach) -> E {
        *self.found.borrow_mut() = Some(breach);
        E::custom("a rule of this server is broken")
    }
}

/// Where a value stands; written out only for an error.
enum Place<'a> {
    Root,
    Field(&'a Place<'a>, &'a str),
    Item(&'a Place<'a>, usize),
}

impl Place<'_> {
    /// Of the token ids of a prompt, or of one of several.
    fn is_prompt(&self) -> bool {
        match self {
            Place::Field(Place::Root, name) => *name == "prompt",
            Place::Item(list, _) => list.is_prompt(),
            Place::Root | Place::Field(..) => false,
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Root => Ok(()),
            Place::Field(Place::Root, name) => f.write_str(name),
            Place::Field(object, name) => write!(f, "{object}.{name}"),
            Place::Item(list, index) => write!(f, "{list}[{index}]"),
        }
    }
}

/// Reads the value at a place, by the rules.
struct Checked<'a> {
    at: &'a Place<'a>,
    rules: &'a Rules<'a>,
}

impl<'de> DeserializeSeed<'de> for Checked<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Checked<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        let rules = self.rules;
        loop {
            let numbers = matches!(list.first(), Some(Value::Number(_)));
            if list.len() >= if numbers { rules.max_numbers } else { rules.max_items } {
                break;
            }
            match items.next_element_seed(Checked { at: &Place::Item(self.at, list.len()), rules })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
        let mut count = list.len();
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        if count == list.len() {
            return Ok(Value::Array(list));
        }
        let (field, prompt) = (self.at.to_string(), self.at.is_prompt());
        Err(rules.broken(if prompt { Breach::Tokens { field, count } } else { Breach::Items { field, count } }))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let at = Place::Field(self.at, &name);
            if map.contains_key(&name) {
                return Err(self.rules.broken(Breach::Duplicate(at.to_string())));
            }
            if map.len() >= self.rules.max_items {
                let (field, count) = (self.at.to_string(), map.len() + 1);
                return Err(self.rules.broken(Breach::Items { field, count }));
            }
            let value = fields.next_value_seed(Checked { at: &at, rules: self.rules })?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: u32 = 4096;

    #[test]
    fn lists_and_objects_are_kept_up_to_a_length() {
        let ids = |count: usize| format!("{{\"prompt\": [[1], {:?}]}}", vec![7; count]);
        assert!(parse(&[ids(4 * 4096)], CONTEXT).is_ok(), "it may be truncated");
        let error = parse(&[ids(20_000)], CONTEXT).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), ("context_length_exceeded", Some("prompt[1]")));
        assert!(error.message.contains("20000"), "{}", error.message);
        // Numbers that are no prompt have a bound of their own, and what is said of more is not of the context.
        let numbers = |count: usize| format!("{{\"allowed_token_ids\": {:?}}}", vec![7; count]);
        assert!(parse(&[numbers(MAX_ALLOWED_TOKENS)], 512).is_ok());
        let error = parse(&[numbers(MAX_ALLOWED_TOKENS + 1)], 512).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), ("invalid_value", Some("allowed_token_ids")));
        // Below, every other rule has its say first.
        assert!(parse(&[ids(2000)], 512).is_ok());
        let texts = format!("{{\"stop\": {:?}}}", vec!["x"; 4097]);
        let fields: String = (0..4097).map(|key| format!("\"{key}\": 1, ")).collect();
        for (body, param) in [(texts, "stop"), (format!("{{\"logit_bias\": {{{fields}\"x\": 1}}}}"), "logit_bias")] {
            let error = parse(&[body], CONTEXT).unwrap_err();
            assert_eq!((error.code, error.param.as_deref()), ("invalid_value", Some(param)));
        }
    }

    #[test]
    fn what_has_every_key_once_is_read_as_serde_json_does() {
        for body in [
            r#"{"a": [1, -2, 1.5, 18446744073709551615, 1e3, "\u00e9\n", true, null, {}], "b": {"a": {"a": []}}}"#,
            "7",
            " [ ] ",
        ] {
            assert_eq!(parse(&[body], CONTEXT).unwrap(), serde_json::from_str::<Value>(body).unwrap());
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_named_with_its_path() {
        for (body, key) in [
            (r#"{"n": 1, "n": 1}"#, "n"),
            (r#"{"n": 1, "x": {"n": 2}, "n": null}"#, "n"),
            (
                r#"{"messages": [{"role": "user"}, {"role": "user", "content": "a", "content": "b"}]}"#,
                "messages[1].content",
            ),
            (r#"{"logit_bias": {"5": 1, "\u0035": 2}}"#, "logit_bias.5"),
            (r#"[[{"a": 1}, {"a": 1, "a": 1}]]"#, "[0][1].a"),
        ] {
            let error = parse(&[body], CONTEXT).unwrap_err();
            assert_eq!((error.code, error.param.as_deref()), ("duplicate_key", Some(key)), "{body}");
            assert!(error.message.contains(key), "{}", error.message);
        }
    }

    #[test]
    fn what_is_no_json_is_told_with_its_place() {
        for body in ["", "{", "{} {}", "{\"a\": NaN}", "[1e999]", "{\"a\" 1}", "\"\\ud800\"", &"[".repeat(10_000)] {
            let error = parse(&[body], CONTEXT).unwrap_err();
            assert_eq!((error.code, error.param), ("invalid_json", None), "{body:.20}");
            assert!(error.message.contains("column"), "{}", error.message);
        }
    }

    /// In pieces, by another reader of the library's.
    #[test]
    fn long_bodies_are_read_as_short_ones_are() {
        let text = format!("{{\"prompt\": \"{}\"}}", "a\\n\\u00e9 \u{e9}\u{1f600}".repeat(LONG_BYTES / 16));
        assert!(text.len() > LONG_BYTES);
        let told = |body: &[u8]| {
            let whole = parse(&[body], CONTEXT).map_err(|error| (error.code, error.param, error.message));
            for bytes in [7, 100_000] {
                let blocks: Vec<_> = body.chunks(bytes).collect();
                let told = parse(&blocks, CONTEXT).map_err(|error| (error.code, error.param, error.message));
                assert_eq!(told, whole);
            }
            whole
        };
        assert_eq!(told(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(&text).unwrap());
        let stop = format!("{{\"stop\": {:?}}}", vec!["x"; 4097]);
        for body in [
            r#"{"a": [1, -2, 1.5, 18446744073709551615, 1e3, "\u00e9\n", true, null, {}], "b": {"a": {"a": []}}}"#,
            r#"{"n": 1, "x": {"n": 2}, "n": null}"#,
            "{\"a\": NaN}",
            "{} {}",
            "\"\\ud800\"",
            &stop,
            &"[".repeat(10_000),
        ] {
            let padded = format!("{body}{}", " ".repeat(LONG_BYTES));
            assert_eq!(told(padded.as_bytes()), told(body.as_bytes()));
        }
        let mut broken = vec![b' '; LONG_BYTES];
        broken.extend_from_slice(b"\"\xff\"");
        assert_eq!(told(&broken).unwrap_err().0, "invalid_json");
    }
}
