//! References that lead back to themselves without a value between: no value keeps to such a schema, and llguidance
//! notices only where the value is to begin, which may be in the middle of an answer.

use std::collections::HashMap;

use serde_json::Value;

use super::{
    NOTHING,
    schema::{BY_NAME, VALUES},
};

/// # Errors
/// A schema inside of `root` begins with itself in every case: says where it stands.
pub(super) fn check(root: &Value) -> Result<(), String> {
    // All are held for endless until something is found to begin with.
    let mut endless = HashMap::new();
    collect(root, &mut endless);
    loop {
        let begins =
            |to: &&str| to.strip_prefix('#').and_then(|to| root.pointer(to)).is_none_or(|to| !is_endless(to, &endless));
        let begun: Vec<&str> = endless.keys().copied().filter(|to| endless[to] && begins(to)).collect();
        if begun.is_empty() {
            break;
        }
        endless.extend(begun.into_iter().map(|to| (to, false)));
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
