//! The texts that a client wrote into a chat, changed one by one: set apart from everything around them, or marked
//! where they spell control tokens.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::tools::is_word;
use crate::text::{Call, ChatMessage, Function, TemplateOptions, Tokenizer, Tool, ToolCall};

/// Stands at both ends of a fenced text, and within a control token that a text spells. Unicode keeps this code point
/// from ever being a character, so no token spells it and no template looks for it.
pub(super) const FENCE: char = '\u{fdd0}';

/// Changes a text of a client's.
type Change<'a> = &'a dyn Fn(&str) -> String;

/// The texts with fences at both ends. Blank ones form no token, and templates ask for them.
pub(super) fn fenced(text: &str) -> String {
    match text.trim().is_empty() {
        true => text.to_owned(),
        false => format!("{FENCE}{text}{FENCE}"),
    }
}

/// The text with a mark behind the first character of each control token that it spells: it spells none any more.
pub(super) fn marked(text: &str, tokenizer: &Tokenizer) -> String {
    let mut marked = Cow::from(text);
    // A mark may lay bare another token, which began within the first.
    while let spans = tokenizer.special_spans(&marked)
        && !spans.is_empty()
    {
        let (mut next, mut end) = (String::with_capacity(marked.len() + 8), 0);
        for span in spans {
            let first = marked[span.clone()].chars().next().map_or(0, char::len_utf8);
            next.push_str(&marked[end..span.start + first]);
            next.push(FENCE);
            end = span.start + first;
        }
        next.push_str(&marked[end..]);
        marked = next.into();
    }
    marked.into_owned()
}

/// The message with its texts changed.
pub(super) fn message(of: &ChatMessage, change: Change<'_>) -> ChatMessage {
    ChatMessage {
        role: of.role.clone(),
        content: change(&of.content),
        name: of.name.as_deref().map(change),
        reasoning_content: of.reasoning_content.as_deref().map(change),
        tool_calls: of.tool_calls.iter().map(|of| call(of, change)).collect(),
        tool_call_id: of.tool_call_id.as_deref().map(|id| phrase(id, change)),
    }
}

/// The options with the texts of tools and documents changed.
pub(super) fn options(of: &TemplateOptions, change: Change<'_>) -> TemplateOptions {
    let phrases = |text: &str| phrase(text, change);
    TemplateOptions {
        add_generation_prompt: of.add_generation_prompt,
        kwargs: of.kwargs.clone(),
        tools: of.tools.iter().map(|of| tool(of, change)).collect(),
        documents: of.documents.iter().map(|of| object(of, &phrases)).collect(),
    }
}

fn tool(Tool::Function(function): &Tool, change: Change<'_>) -> Tool {
    let Function { name, description, parameters, strict } = function;
    Tool::Function(Function {
        name: phrase(name, change),
        description: description.as_deref().map(change),
        parameters: parameters.as_ref().map(|schema| object(schema, &|text| phrase(text, change))),
        strict: *strict,
    })
}

fn call(ToolCall { id, call: Call::Function { name, arguments } }: &ToolCall, change: Change<'_>) -> ToolCall {
    let call = Call::Function { name: phrase(name, change), arguments: object(arguments, change) };
    ToolCall { id: phrase(id, change), call }
}

/// Templates ask for words, such as the types of a schema, its keys and the length of a call's id; and control tokens
/// are more than words.
fn phrase(phrase: &str, change: Change<'_>) -> String {
    if is_word(phrase) { phrase.to_owned() } else { change(phrase) }
}

fn object(fields: &Map<String, Value>, change: Change<'_>) -> Map<String, Value> {
    fields.iter().map(|(key, field)| (change(key), value(field, change))).collect()
}

fn value(any: &Value, change: Change<'_>) -> Value {
    match any {
        Value::String(text) => change(text).into(),
        Value::Array(list) => list.iter().map(|item| value(item, change)).collect(),
        Value::Object(fields) => object(fields, change).into(),
        Value::Null | Value::Bool(_) | Value::Number(_) => any.clone(),
    }
}
