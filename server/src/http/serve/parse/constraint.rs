//! Fields that hold an answer to a form: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

use serde_json::Value;

use super::super::{
    error::{ApiError, wrong_type},
    fields::Fields,
};
use crate::{
    request::{FieldError, RequestError},
    text::Constraint,
};

/// Ways to say the same, each in a field of its own.
type Reader = fn(Value, &str) -> Result<Constraint, ApiError>;
const GUIDED: [(&str, Reader); 5] = [
    ("guided_json", json),
    ("guided_regex", regex),
    ("guided_choice", choice),
    ("guided_grammar", grammar),
    // llama.cpp's.
    ("grammar", grammar),
];

/// What the answer is held to, with the name of the field that says so.
pub(super) fn constraint(fields: &mut Fields) -> Result<Option<(String, Constraint)>, ApiError> {
    let mut found = Vec::new();
    if let Some(format) = fields.value("response_format") {
        found.extend(response_format(format)?);
    }
    if let Some(outputs) = fields.value("structured_outputs") {
        found.extend(structured_outputs(outputs)?);
    }
    for (name, read) in GUIDED {
        if let Some(value) = fields.value(name) {
            found.push((name.to_owned(), read(value, name)?));
        }
    }
    match found.get(1) {
        Some((field, _)) => {
            let message = format!("and {} exclude each other: an answer is held to one form", found[0].0);
            Err(RequestError::field(field, FieldError::Value, message).into())
        }
        None => Ok(found.pop()),
    }
}

fn response_format(value: Value) -> Result<Option<(String, Constraint)>, ApiError> {
    let mut fields = Fields::new(value, "response_format")?;
    let kind_path = fields.path("type");
    let Value::String(kind) = fields.required("type")? else { return Err(wrong_type(kind_path, "a string")) };
    let constraint = match kind.as_str() {
        "text" => None,
        "json_object" => {
            // Others than OpenAI take a schema here.
            let path = fields.path("schema");
            let schema = fields.value("schema").map(|schema| json(schema, &path)).transpose()?;
            Some((path, schema.unwrap_or_else(Constraint::json_object)))
        }
        "json_schema" => {
            let mut of = Fields::new(fields.required("json_schema")?, "response_format.json_schema")?;
            of.string("name")?;
            of.string("description")?;
            // Every schema is kept to.
            of.boolean("strict")?;
            let path = of.path("schema");
            let schema = of.value("schema").map(|schema| json(schema, &path)).transpose()?;
            of.finish()?;
            Some((path, schema.unwrap_or_else(Constraint::json_object)))
        }
        other => {
            let message = format!("{other:?} is none of text, json_object, json_schema");
            return Err(RequestError::field(kind_path, FieldError::Unsupported, message).into());
        }
    };
    fields.finish()?;
    Ok(constraint)
}

fn structured_outputs(value: Value) -> Result<Vec<(String, Constraint)>, ApiError> {
    let mut fields = Fields::new(value, "structured_outputs")?;
    let readers: [(&str, Reader); 4] = [("json", json), ("regex", regex), ("choice", choice), ("grammar", grammar)];
    let mut found = Vec::new();
    for (name, read) in readers {
        let path = fields.path(name);
        if let Some(value) = fields.value(name) {
            let constraint = read(value, &path)?;
            found.push((path, constraint));
        }
    }
    if fields.boolean("json_object")? == Some(true) {
        found.push((fields.path("json_object"), Constraint::json_object()));
    }
    fields.unsupported(&[
        ("structural_tag", |_| false),
        ("whitespace_pattern", |_| false),
        ("disable_fallback", Value::is_boolean),
        ("disable_any_whitespace", |value| *value == false),
        ("disable_additional_properties", |value| *value == false),
    ])?;
    fields.finish()?;
    Ok(found)
}

/// A schema: an object, true or false, or the text of one.
pub(in crate::http) fn json(value: Value, path: &str) -> Result<Constraint, ApiError> {
    let schema = match value {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            RequestError::field(path, FieldError::Value, format!("the text is not a schema in JSON: {error}"))
        })?,
        value => value,
    };
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(Constraint::Json(schema)),
        _ => Err(wrong_type(path, "a JSON schema")),
    }
}

fn regex(value: Value, path: &str) -> Result<Constraint, ApiError> {
    text(value, path).map(Constraint::Regex)
}

fn grammar(value: Value, path: &str) -> Result<Constraint, ApiError> {
    text(value, path).map(Constraint::Grammar)
}

fn text(value: Value, path: &str) -> Result<String, ApiError> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        _ => Err(wrong_type(path, "a string that is not empty")),
    }
}

fn choice(value: Value, path: &str) -> Result<Constraint, ApiError> {
    let expected = "a list of strings, none of them empty";
    let Value::Array(list) = value else { return Err(wrong_type(path, expected)) };
    let one = |value| match value {
        Value::String(choice) if !choice.is_empty() => Ok(choice),
        _ => Err(wrong_type(path, expected)),
    };
    match list.is_empty() {
        true => Err(wrong_type(path, expected)),
        false => Ok(Constraint::Choice(list.into_iter().map(one).collect::<Result<_, _>>()?)),
    }
}
