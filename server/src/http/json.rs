//! JSON bodies, in which every key stands once: of two values for a field one would be ignored in silence.

use std::{cell::RefCell, fmt};

use axum::http::StatusCode;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::ApiError;

/// Reads a whole body.
///
/// # Errors
/// 400: what is no JSON, or which key stands twice.
pub(super) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    let duplicate = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let root = Unique { at: &Place::Root, duplicate: &duplicate };
    let value = root.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| match duplicate.take() {
        Some(key) => {
            let message = format!("{key}: this key is given twice; leave one out");
            ApiError { param: Some(key), ..ApiError::new(StatusCode::BAD_REQUEST, "duplicate_key", message) }
        }
        None => ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not valid JSON: {error}")),
    })
}

/// Where a value stands; written out only for an error.
enum Place<'a> {
    Root,
    Field(&'a Place<'a>, &'a str),
    Item(&'a Place<'a>, usize),
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

/// Reads the value at a place; a key that stands twice is an error and its path goes into `duplicate`.
struct Unique<'a> {
    at: &'a Place<'a>,
    duplicate: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
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
        let duplicate = self.duplicate;
        while let Some(item) = items.next_element_seed(Unique { at: &Place::Item(self.at, list.len()), duplicate })? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let at = Place::Field(self.at, &name);
            if map.contains_key(&name) {
                *self.duplicate.borrow_mut() = Some(at.to_string());
                return Err(A::Error::custom("a key is given twice"));
            }
            let value = fields.next_value_seed(Unique { at: &at, duplicate: self.duplicate })?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_every_key_once_is_read_as_serde_json_does() {
        for body in [
            r#"{"a": [1, -2, 1.5, 18446744073709551615, 1e3, "\u00e9\n", true, null, {}], "b": {"a": {"a": []}}}"#,
            "7",
            " [ ] ",
        ] {
            assert_eq!(parse(body.as_bytes()).unwrap(), serde_json::from_str::<Value>(body).unwrap());
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
            let error = parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.code, error.param.as_deref()), ("duplicate_key", Some(key)), "{body}");
            assert!(error.message.contains(key), "{}", error.message);
        }
    }

    #[test]
    fn what_is_no_json_is_told_with_its_place() {
        for body in ["", "{", "{} {}", "{\"a\": NaN}", "[1e999]", "{\"a\" 1}", "\"\\ud800\"", &"[".repeat(10_000)] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.code, error.param), ("invalid_json", None), "{body:.20}");
            assert!(error.message.contains("column"), "{}", error.message);
        }
    }
}
