//! Texts of a chat set apart from everything around them, to see which control tokens stand in the template itself.

use serde_json::{Map, Value};

use super::tools::is_word;
use crate::text::{Call, ChatMessage, Function, Tool, ToolCall};

/// Stands at both ends of a fenced text. Unicode keeps this code point from ever being a character, so no token spells
/// it and no template looks for it.
pub(super) const FENCE: char = '\u{fdd0}';

/// The message with fences around its texts.
pub(super) fn fenced(message: &ChatMessage) -> ChatMessage {
    ChatMessage {
        role: message.role.clone(),
        content: text(&message.content),
        name: message.name.as_ref().map(text),
        reasoning_content: message.reasoning_content.as_ref().map(text),
        tool_calls: message.tool_calls.iter().map(call).collect(),
        tool_call_id: message.tool_call_id.as_ref().map(phrase),
    }
}

/// The tool with fences around its texts.
pub(super) fn fenced_tool(tool: &Tool) -> Tool {
    let Tool::Function(Function { name, description, parameters }) = tool;
    Tool::Function(Function {
        name: phrase(name),
        description: description.as_ref().map(text),
        parameters: parameters.as_ref().map(|schema| object(schema, phrase)),
    })
}

fn call(ToolCall { id, call: Call::Function { name, arguments } }: &ToolCall) -> ToolCall {
    let call = Call::Function { name: phrase(name), arguments: object(arguments, text) };
    ToolCall { id: phrase(id), call }
}

/// Blank ones form no token, and templates ask for them.
fn text(text: &String) -> String {
    match text.trim().is_empty() {
        true => text.clone(),
        false => format!("{FENCE}{text}{FENCE}"),
    }
}

/// Templates ask for words, such as the types of a schema, its keys and the length of a call's id; and control tokens
/// are more than words.
fn phrase(phrase: &String) -> String {
    if is_word(phrase) { phrase.clone() } else { text(phrase) }
}

fn object(fields: &Map<String, Value>, fence: fn(&String) -> String) -> Map<String, Value> {
    fields.iter().map(|(key, field)| (fence(key), value(field, fence))).collect()
}

fn value(any: &Value, fence: fn(&String) -> String) -> Value {
    match any {
        Value::String(text) => fence(text).into(),
        Value::Array(list) => list.iter().map(|item| value(item, fence)).collect(),
        Value::Object(fields) => object(fields, fence).into(),
        Value::Null | Value::Bool(_) | Value::Number(_) => any.clone(),
    }
}
