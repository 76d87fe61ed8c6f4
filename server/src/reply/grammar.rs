//! Tool calls as a grammar: what a model has to write so that [`super::Reply`] finds calls whose arguments keep to
//! their schemas.

use serde_json::{Map, Value, json};

use super::ToolFormat;

/// In front of calls.
const HERMES: &str = "<tool_call>";
const MISTRAL: &str = "[TOOL_CALLS]";

/// Rules in llguidance's Lark and the schemas that they name.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct CallGrammar {
    /// Defines the rule `calls`.
    pub rules: String,
    /// By the names that rules have for them, behind `@`.
    pub schemas: Vec<(String, Value)>,
    /// The name of each tool, and what its arguments keep to, which stands in `schemas`, too.
    #[serde(skip)]
    pub arguments: Vec<(String, Value)>,
    /// The text that announces calls, behind which the rule `announced` has the rest of one; `None`: none does.
    pub marker: Option<&'static str>,
    /// There is one call at most.
    pub one_call: bool,
}

/// The grammar of one or more calls of any of the tools, each a name and the schema of its arguments. `one_call`: of
/// exactly one. `marker`: how Lark names a text that may be a token of its own.
pub fn calls(
    format: ToolFormat,
    tools: &[(&str, Option<&Map<String, Value>>)],
    one_call: bool,
    marker: impl Fn(&str) -> Option<String>,
) -> CallGrammar {
    let spelled = |text: &str| marker(text).unwrap_or_else(|| json!(text).to_string());
    let held = tools.iter().map(|(name, parameters)| ((*name).to_owned(), self::arguments(*parameters))).collect();
    let grammar = |rules, schemas, marker| CallGrammar { rules, schemas, arguments: held, marker, one_call };
    match format {
        ToolFormat::Hermes => {
            let (open, close) = (spelled(HERMES), spelled("</tool_call>"));
            let more = if one_call { "" } else { " (\"\\n\" call)*" };
            let rest = format!("announced: \"\\n\" @call \"\\n\" {close}");
            let rules = format!("calls: call{more}\ncall: {open} announced\n{rest}\n");
            grammar(rules, vec![("call".into(), any_of(tools, "arguments"))], Some(HERMES))
        }
        ToolFormat::Llama3Json => {
            let more = if one_call { "" } else { " (\"; \" @call)*" };
            let rules = format!("calls: @call{more}\n");
            grammar(rules, vec![("call".into(), any_of(tools, "parameters"))], None)
        }
        ToolFormat::Mistral => match marker("[ARGS]") {
            // Those that have this token write the name in front of it.
            Some(args) => {
                let open = spelled(MISTRAL);
                let call = |(index, (name, _)): (usize, &(&str, _))| format!("{} {args} @tool{index}", json!(name));
                let each: Vec<String> = tools.iter().enumerate().map(call).collect();
                let more = if one_call { "" } else { "+" };
                let rules = format!("calls: call{more}\ncall: {open} announced\nannounced: {}\n", each.join(" | "));
                let schema = |(index, (_, parameters)): (usize, &(_, Option<&Map<_, _>>))| {
                    (format!("tool{index}"), arguments(*parameters))
                };
                grammar(rules, tools.iter().enumerate().map(schema).collect(), Some(MISTRAL))
            }
            None => {
                let most = if one_call { json!({"maxItems": 1}) } else { json!({}) };
                let mut list = json!({"type": "array", "minItems": 1});
                let call = any_of(tools, "arguments");
                let list_of = list.as_object_mut().expect("an object, as written above");
                list_of.insert("$defs".into(), call["$defs"].clone());
                list_of.insert("items".into(), json!({"anyOf": call["anyOf"]}));
                list_of.extend(most.as_object().cloned().unwrap_or_default());
                let rules = format!("calls: {} announced\nannounced: @calls_list\n", spelled(MISTRAL));
                grammar(rules, vec![("calls_list".into(), list)], Some(MISTRAL))
            }
        },
    }
}

/// An object with the name of one of the tools, and its arguments by `key`.
fn any_of(tools: &[(&str, Option<&Map<String, Value>>)], key: &str) -> Value {
    let (mut definitions, mut calls) = (Map::new(), Vec::new());
    for (index, (name, parameters)) in tools.iter().enumerate() {
        let place = format!("tool{index}");
        let mut schema = arguments(*parameters);
        move_references(&mut schema, &format!("#/$defs/{place}"));
        definitions.insert(place.clone(), schema);
        calls.push(json!({
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": format!("#/$defs/{place}")}},
            "required": ["name", key],
            "additionalProperties": false,
        }));
    }
    json!({"$defs": definitions, "anyOf": calls})
}

fn arguments(parameters: Option<&Map<String, Value>>) -> Value {
    parameters.map_or_else(|| json!({"type": "object"}), |parameters| Value::Object(parameters.clone()))
}

/// References within a schema, which now stands at `root` of another.
fn move_references(schema: &mut Value, root: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(to) if name == "$ref" && to.starts_with('#') => *to = format!("{root}{}", &to[1..]),
                    value => move_references(value, root),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| move_references(value, root)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_stay_within_their_tool() {
        let tool = json!({
            "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"items": [{"$ref": "#"}]}},
            "$defs": {"x": {"type": "string"}},
        });
        let tools = [("f", tool.as_object()), ("g", None)];
        let CallGrammar { schemas, .. } = calls(ToolFormat::Hermes, &tools, false, |_| None);
        let schema = &schemas[0].1;
        assert_eq!(schema["$defs"]["tool0"]["properties"]["a"]["$ref"], "#/$defs/tool0/$defs/x");
        assert_eq!(schema["$defs"]["tool0"]["properties"]["b"]["items"][0]["$ref"], "#/$defs/tool0");
        assert_eq!(schema["$defs"]["tool1"], json!({"type": "object"}));
        assert_eq!(schema["anyOf"][1]["properties"]["name"]["const"], "g");
    }
}
