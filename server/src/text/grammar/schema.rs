//! A client's JSON schema as llguidance is to read it: what its grammars would allow beyond the schema is held tighter
//! here, or refused by the keyword.

use serde_json::{Map, Number, Value, json};

use super::{loops, multiples, pattern};

/// White space between the tokens of JSON. Its length is bounded: models that are lost write no end of it.
const SPACE: &str = "[ \\t\\n\\r]{1,64}";

/// Escapes in strings. Without `\u` a character is spelled in one way: the name of a property is known by its letters,
/// and free names are all but those.
const ESCAPES: &str = "nrbtf\\\"";

/// Formats of texts that llguidance knows. Any other says nothing of a value, as JSON Schema has it.
const KNOWN_FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Days that there are, of February by the year.
const DATE: &str = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])\
    |(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))\
    |(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)";

/// Without leap seconds, whose minute depends on the zone.
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?\
    (?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// Of a host's name; without two hyphens in the third place, where the rest would be Punycode.
const LABEL: &str = "(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9])?\
    |[a-zA-Z0-9][a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])";
const LONGEST_HOSTNAME: u64 = 253;

/// Bounds of integers from here on are not exact in llguidance, which has them as f64.
const EXACT: f64 = 9_007_199_254_740_992.0;
/// The largest f64 that is an i64, as which llguidance has the bounds of integers.
const LARGEST: f64 = 9_223_372_036_854_774_784.0;

/// Keywords whose values are schemas by names of the client's own.
pub(super) const BY_NAME: [&str; 5] = ["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"];
/// Keywords whose values are no schemas.
pub(super) const VALUES: [&str; 5] = ["const", "enum", "default", "example", "examples"];

/// The schema with what llguidance is told beside it. What the client tells it in `x-guidance` goes first.
///
/// # Errors
/// Names the keyword that cannot be followed, and where it stands.
pub(super) fn prepared(schema: &Value) -> Result<Value, String> {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        // `true` and `false` are schemas, too.
        other => json!({"allOf": [other]}),
    };
    hold(&mut schema, &mut Vec::new())?;
    multiples::check(&schema)?;
    loops::check(&schema)?;
    let fields = schema.as_object_mut().expect("an object, as made above");
    let told = fields.entry("x-guidance").or_insert_with(|| json!({}));
    let told = told.as_object_mut().ok_or("x-guidance: must be an object")?;
    if !told.contains_key("whitespace_flexible") {
        told.entry("whitespace_pattern").or_insert_with(|| SPACE.into());
    }
    told.entry("json_allowed_escapes").or_insert_with(|| ESCAPES.into());
    Ok(schema)
}

/// Holds a schema, and those inside of it, tighter. `path`: the names that lead to it.
fn hold(schema: &mut Value, path: &mut Vec<String>) -> Result<(), String> {
    if let Value::Array(list) = schema {
        return list.iter_mut().try_for_each(|schema| hold(schema, path));
    }
    let Value::Object(fields) = schema else { return Ok(()) };
    let at = |path: &[String], problem: String| match path.is_empty() {
        true => problem,
        false => format!("{}: {problem}", path.join(".")),
    };
    let held = refuse(fields).and_then(|()| hold_patterns(fields)).and_then(|()| hold_bounds(fields));
    held.map_err(|problem| at(path, problem))?;
    hold_format(fields);
    for (name, value) in fields.iter_mut().filter(|(name, _)| !VALUES.contains(&name.as_str())) {
        path.push(name.clone());
        match value {
            Value::Object(schemas) if BY_NAME.contains(&name.as_str()) => {
                for (name, schema) in schemas {
                    path.push(name.clone());
                    hold(schema, path)?;
                    path.pop();
                }
            }
            value => hold(value, path)?,
        }
        path.pop();
    }
    Ok(())
}

fn refuse(fields: &Map<String, Value>) -> Result<(), String> {
    // Drafts from 2019-09 on do not know it, so that llguidance would pass it over.
    if fields.contains_key("dependencies") {
        return Err("dependencies: this keyword is not supported".into());
    }
    for name in ["const", "enum"] {
        if let Some(control) = fields.get(name).and_then(control) {
            return Err(format!("{name}: a text with {control}: control characters are not supported"));
        }
    }
    let required = fields.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    match fields.get("minProperties").and_then(Value::as_u64) {
        Some(least) if least > required + 1 => Err(format!(
            "minProperties: {least} is not supported where {required} are required: at most one more, since no \
             grammar tells names that differ from one that is repeated"
        )),
        _ => Ok(()),
    }
}

/// A text that JSON spells with a number: llguidance passes over such characters in texts that are given.
fn control(value: &Value) -> Option<String> {
    let is_control = |char: &char| char.is_control() && *char < '\u{80}' && !"\u{8}\u{c}\n\r\t".contains(*char);
    match value {
        Value::String(text) => text.chars().find(is_control).map(|char| char.escape_debug().to_string()),
        Value::Array(list) => list.iter().find_map(control),
        Value::Object(fields) => fields.values().find_map(control),
        _ => None,
    }
}

fn hold_patterns(fields: &mut Map<String, Value>) -> Result<(), String> {
    let translated = |pattern: &str| pattern::translated(pattern).map_err(|problem| format!("{pattern:?}: {problem}"));
    if let Some(Value::String(pattern)) = fields.get_mut("pattern") {
        *pattern = translated(pattern).map_err(|problem| format!("pattern: {problem}"))?;
    }
    if let Some(Value::Object(schemas)) = fields.get_mut("patternProperties") {
        let held = std::mem::take(schemas).into_iter().map(|(name, schema)| Ok((translated(&name)?, schema)));
        *schemas = held.collect::<Result<_, String>>().map_err(|problem| format!("patternProperties: {problem}"))?;
    }
    Ok(())
}

/// Of an integer: puts the next bound inside that llguidance has exactly in the place of one that it has not.
fn hold_bounds(fields: &mut Map<String, Value>) -> Result<(), String> {
    if fields.get("type").is_none_or(|kind| kind != "integer") {
        return Ok(());
    }
    for (name, inwards, exclusive) in
        [("minimum", 1, false), ("exclusiveMinimum", 1, true), ("maximum", -1, false), ("exclusiveMaximum", -1, true)]
    {
        let Some(Value::Number(bound)) = fields.get_mut(name) else { continue };
        let Some(near) = bound.as_f64().filter(|near| near.abs() >= EXACT) else { continue };
        // As if all were minima.
        let mut least = near * f64::from(inwards);
        let whole = bound.as_i64().map(i128::from).or(bound.as_u64().map(i128::from));
        if whole.is_some_and(|whole| (least as i128) < whole * i128::from(inwards)) {
            least = least.next_up();
        }
        if exclusive {
            least = least.next_up();
        }
        if least > LARGEST {
            return Err(format!("{name}: {bound} is beyond the bounds that integers may have here, of 63 bits"));
        }
        let held = least.max(-LARGEST) * f64::from(inwards);
        // As an integer, which every reader of JSON reads exactly.
        *bound = Number::from(held as i64);
    }
    Ok(())
}

/// Puts a pattern in the place of a format that llguidance takes too widely, and nothing in that of one that no grammar
/// knows.
fn hold_format(fields: &mut Map<String, Value>) {
    let tighter = match fields.get("format").and_then(Value::as_str) {
        Some("date") => json!({"pattern": format!("^{DATE}$")}),
        Some("time") => json!({"pattern": format!("^{TIME}$")}),
        Some("date-time") => json!({"pattern": format!("^{DATE}[tT]{TIME}$")}),
        Some("hostname") => json!({"pattern": format!("^{LABEL}(?:\\.{LABEL})*$"), "maxLength": LONGEST_HOSTNAME}),
        // Beside the format, which says what may stand there.
        Some("email") => {
            let tighter = json!({"pattern": format!("^[^@]{{1,64}}@(?:{LABEL}(?:\\.{LABEL})*|\\[[0-9.]+\\])$")});
            return add(fields, tighter);
        }
        Some(format) if !KNOWN_FORMATS.contains(&format) => {
            fields.shift_remove("format");
            return;
        }
        _ => return,
    };
    fields.shift_remove("format");
    add(fields, tighter);
}

fn add(fields: &mut Map<String, Value>, tighter: Value) {
    let all = fields.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(all) = all {
        all.push(tighter);
    }
}
