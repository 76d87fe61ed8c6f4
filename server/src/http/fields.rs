//! The fields of a JSON object, taken one by one: each with its type checked, and none left over in silence.

use serde_json::{Map, Value};

use self::asked::Kind;
use super::error::{ApiError, wrong_type};
use crate::request::{
    FieldError, RequestError,
    ranges::{Numbers, Whole},
};

/// Says which values of an unsupported field ask for nothing.
pub(super) type Off = fn(&Value) -> bool;

/// A JSON object whose fields are taken out by name. A field that is null counts as left out.
#[derive(Debug)]
pub(super) struct Fields {
    fields: Map<String, Value>,
    /// What comes before a field's name in errors, such as `messages[2].`.
    prefix: String,
}

impl Fields {
    pub(super) fn new(value: Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => {
                let prefix = if path.is_empty() { String::new() } else { format!("{path}.") };
                Ok(Self { fields, prefix })
            }
            _ if path.is_empty() => Err(wrong_type("body", "a JSON object")),
            _ => Err(wrong_type(path, "an object")),
        }
    }

    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn value(&mut self, name: &str) -> Option<Value> {
        asked::note(|| self.path(name), Kind::Any);
        self.fields.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn required(&mut self, name: &str) -> Result<Value, ApiError> {
        self.value(name)
            .ok_or_else(|| RequestError::field(self.path(name), FieldError::Missing, "must be given").into())
    }

    /// A finite number, of which the request's check says whether it is in the range.
    pub(super) fn number(&mut self, name: &str, range: Numbers) -> Result<Option<f64>, ApiError> {
        self.typed(name, "a number", Kind::Number(range), |value| value.as_f64())
    }

    /// A whole number that fits 64 bits, as [`Self::number`] has them; `1.0` is none.
    pub(super) fn integer(&mut self, name: &str, range: Whole) -> Result<Option<i64>, ApiError> {
        self.typed(name, "a whole number", Kind::Integer(*range.start(), *range.end()), |value| {
            // Larger ones are out of every range anyway.
            value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX))
        })
    }

    /// A seed: any 64 bits, signed or not.
    pub(super) fn seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        self.typed(name, "a whole number of at most 64 bits", Kind::Of("integer"), |value| {
            value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned))
        })
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Kind::Of("boolean"), Value::as_bool)
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", Kind::Of("string"), |value| value.as_str().map(str::to_owned))
    }

    pub(super) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        asked::note(|| self.path(name), Kind::Of("object"));
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(_) => Err(wrong_type(self.path(name), "an object")),
        }
    }

    /// A list, whose items are of the kind that JSON schema calls so, as their reader finds.
    pub(super) fn list(
        &mut self,
        name: &str,
        expected: &str,
        items: &'static str,
    ) -> Result<Option<Vec<Value>>, ApiError> {
        asked::note(|| self.path(name), Kind::List(items));
        match self.value(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(wrong_type(self.path(name), expected)),
        }
    }

    pub(super) fn required_string(&mut self, name: &str) -> Result<String, ApiError> {
        asked::note(|| self.path(name), Kind::Of("string"));
        match self.required(name)? {
            Value::String(text) => Ok(text),
            _ => Err(wrong_type(self.path(name), "a string")),
        }
    }

    /// Takes fields of the API that are not supported; only values that ask for nothing pass.
    pub(super) fn unsupported(&mut self, table: &[(&'static str, Off)]) -> Result<(), ApiError> {
        for (name, asks_for_nothing) in table {
            asked::note(|| self.path(name), Kind::Unsupported);
            match self.value(name) {
                Some(value) if !asks_for_nothing(&value) => {
                    let message = "this server does not support it; leave the field out";
                    return Err(RequestError::field(self.path(name), FieldError::Unsupported, message).into());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Every field has been taken, or else the first that is left is unknown.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        match self.fields.keys().next() {
            Some(name) => {
                let message = "no such field is known";
                Err(RequestError::field(self.path(name), FieldError::Unknown, message).into())
            }
            None => Ok(()),
        }
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        kind: Kind,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        asked::note(|| self.path(name), kind);
        match self.value(name) {
            None => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(wrong_type(self.path(name), expected)),
            },
        }
    }
}

/// The names that are asked for, by the paths of errors, each with the kind of its values: the document at
/// `/openapi.json` says what the parsers read, and tests hold other documents to it.
pub(super) mod asked {
    use std::{cell::RefCell, collections::BTreeMap};

    use crate::request::ranges::Numbers;

    /// What values a field has.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub(in crate::http) enum Kind {
        /// Of several kinds, or checked by the field's own reader.
        Any,
        /// Only those that ask for nothing are taken.
        Unsupported,
        /// In JSON schema's word.
        Of(&'static str),
        /// Of lists: that of the items.
        List(&'static str),
        /// From the least to the most.
        Integer(i64, i64),
        Number(Numbers),
    }

    thread_local!(static NAMES: RefCell<Option<BTreeMap<String, Kind>>> = const { RefCell::new(None) });

    /// The first kind that is noted is the field's.
    pub(super) fn note(path: impl FnOnce() -> String, kind: Kind) {
        NAMES.with_borrow_mut(|names| {
            if let Some(names) = names {
                names.entry(path()).or_insert(kind);
            }
        });
    }

    /// Those that `read` asks for on this thread.
    pub(in crate::http) fn during<T>(read: impl FnOnce() -> T) -> (T, BTreeMap<String, Kind>) {
        NAMES.set(Some(BTreeMap::new()));
        let read = read();
        (read, NAMES.take().unwrap_or_default())
    }
}
