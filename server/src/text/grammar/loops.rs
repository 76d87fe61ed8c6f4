//! References that lead back to themselves without a value between: no value keeps to such a schema, and llguidance
//! notices only where the value is to begin, which may be in the middle of an answer.

use std::collections::HashMap;

use serde_json::Value;

use super::{
    NOTHING,
    schema::{BY_NAME, VALUES},
};

/// Schemas that are referred to, at most: checking them may take the square of it.
const MOST: usize = 4096;

/// # Errors
/// A schema inside of `root` begins with itself in every case: says where it stands. Or too many are referred to.
pub(super) fn check(root: &Value) -> Result<(), String> {
    // All are held for endless until something is found to begin with.
    let mut endless = HashMap::new();
    collect(root, &mut endless);
    if endless.len() > MOST {
        return Err(format!("$ref: {} schemas are referred to, of {MOST} at most", endless.len()));
    }
    let target = |to: &str| to.strip_prefix('#').and_then(|to| root.pointer(to));
    // Of each, those that may begin once it does.
    let mut followers: HashMap<&str, Vec<&str>> = HashMap::new();
    for &to in endless.keys() {
        each_head(target(to), &mut |head| followers.entry(head).or_default().push(to));
    }
    let mut left: Vec<&str> = endless.keys().copied().collect();
    while let Some(to) = left.pop() {
        if endless[to] && target(to).is_none_or(|schema| !is_endless(schema, &endless)) {
            endless.insert(to, false);
            left.extend(followers.get(to).into_iter().flatten());
        }
    }
    let none = endless.values().all(|endless| !endless);
    if none { Ok(()) } else { check_inside(root, &endless, &mut Vec::new()) }
}

/// What is referred to.
fn collect<'a>(value: &'a Value, all: &mut HashMap<&'a str, bool>) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| collect(value, all)),
        Value::Object(fields) => {
            all.extend(fields.get("$ref").and_then(Value::as_str).map(|to| (to, true)));
            fields.values().for_each(|value| collect(value, all));
        }
        _ => {}
    }
}

/// What a value that keeps to the schema may begin with, by reference.
fn each_head<'a>(schema: Option<&'a Value>, to: &mut impl FnMut(&'a str)) {
    let Some(schema) = schema else { return };
    schema["$ref"].as_str().into_iter().for_each(&mut *to);
    for name in ["anyOf", "oneOf", "allOf"] {
        schema[name].as_array().into_iter().flatten().for_each(|schema| each_head(Some(schema), to));
    }
}

/// Whether a value that keeps to the schema has no beginning, by what is known of references.
fn is_endless(schema: &Value, endless: &HashMap<&str, bool>) -> bool {
    let list = |name: &str| schema[name].as_array().map_or(&[][..], Vec::as_slice);
    let each = |name: &str| !list(name).is_empty() && list(name).iter().all(|schema| is_endless(schema, endless));
    let refers = schema["$ref"].as_str().is_some_and(|to| endless.get(to) == Some(&true));
    refers || each("anyOf") || each("oneOf") || list("allOf").iter().any(|schema| is_endless(schema, endless))
}

/// `path`: the names that lead to the schema.
fn check_inside<'a>(schema: &'a Value, endless: &HashMap<&str, bool>, path: &mut Vec<&'a str>) -> Result<(), String> {
    let fields = match schema {
        Value::Array(list) => return list.iter().try_for_each(|schema| check_inside(schema, endless, path)),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    if is_endless(schema, endless) {
        return Err(if path.is_empty() { NOTHING.into() } else { format!("{}: {NOTHING}", path.join(".")) });
    }
    for (name, value) in fields.iter().filter(|(name, _)| !VALUES.contains(&name.as_str())) {
        path.push(name);
        match value {
            Value::Object(schemas) if BY_NAME.contains(&name.as_str()) => {
                for (name, schema) in schemas {
                    path.push(name);
                    check_inside(schema, endless, path)?;
                    path.pop();
                }
            }
            value => check_inside(value, endless, path)?,
        }
        path.pop();
    }
    Ok(())
}
