//! The fields of a JSON object, read with the sentences that refuse them.

use std::path::Path;

use serde_json::{Map, Value};

use super::ConfigError;

/// A JSON object of the file, with the names that messages need.
pub(super) struct Fields<'a> {
    pub path: &'a Path,
    pub prefix: &'static str,
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The field, unless it is absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    pub fn object(&self, field: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { path: self.path, prefix: field, map })),
            Some(_) => Err(self.value(field, "an object or null")),
        }
    }

    pub fn count(&self, field: &str, max: usize) -> Result<usize, ConfigError> {
        let value = self.get(field).ok_or_else(|| self.missing(field))?;
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
        count
            .filter(|n| (1..=max).contains(n))
            .ok_or_else(|| self.value(field, format!("a whole number from 1 to {max}")))
    }

    pub fn count_or(&self, field: &str, max: usize, default: usize) -> Result<usize, ConfigError> {
        if self.get(field).is_some() { self.count(field, max) } else { Ok(default) }
    }

    pub fn number(&self, field: &str, min: f64, max: f64) -> Result<f64, ConfigError> {
        let value = self.get(field).ok_or_else(|| self.missing(field))?;
        let number = value.as_f64().filter(|n| (min..=max).contains(n));
        number.ok_or_else(|| self.value(field, format!("a number from {min} to {max}")))
    }

    pub fn number_or(&self, field: &str, min: f64, max: f64, default: f64) -> Result<f64, ConfigError> {
        if self.get(field).is_some() { self.number(field, min, max) } else { Ok(default) }
    }

    pub fn bool_or(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.value(field, "true or false")),
        }
    }

    fn named(&self, field: &str) -> String {
        if self.prefix.is_empty() { field.into() } else { format!("{}.{field}", self.prefix) }
    }

    pub fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { path: self.path.into(), field: self.named(field) }
    }

    pub fn value(&self, field: &str, expected: impl Into<String>) -> ConfigError {
        let value = shown(self.map.get(field).unwrap_or(&Value::Null));
        ConfigError::Value { path: self.path.into(), field: self.named(field), value, expected: expected.into() }
    }

    pub fn unsupported(&self, field: &str, supported: impl Into<String>) -> ConfigError {
        let value = shown(self.map.get(field).unwrap_or(&Value::Null));
        ConfigError::Unsupported {
            path: self.path.into(),
            field: self.named(field),
            value,
            supported: supported.into(),
        }
    }
}

/// A value as a message shows it: a hostile file must not fill the log.
pub(super) fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
