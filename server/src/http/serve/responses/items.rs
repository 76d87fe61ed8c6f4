//! The input of a response, which is items, to the messages of a chat.

use serde_json::Value;

use super::super::{
    error::{ApiError, wrong_type},
    fields::Fields,
    parse::is_empty_list,
};
use crate::{
    request::{FieldError, RequestError, arguments},
    text::{Call, ChatMessage, ToolCall},
};

/// A text of the user's, or items.
pub(super) fn input(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    let items = match value {
        Value::String(text) => return Ok(vec![ChatMessage::new("user", text)]),
        Value::Array(items) => items,
        _ => return Err(wrong_type("input", "a string or a list of items")),
    };
    let mut messages = Vec::new();
    for (index, value) in items.into_iter().enumerate() {
        item(Fields::new(value, &format!("input[{index}]"))?, &mut messages)?;
    }
    Ok(messages)
}

/// What the assistant thought, said and called in a row is one message.
fn item(mut item: Fields, messages: &mut Vec<ChatMessage>) -> Result<(), ApiError> {
    let kind = item.string("type")?;
    match kind.as_deref().unwrap_or("message") {
        "message" => {
            let message = message(&mut item)?;
            match messages.last_mut() {
                Some(last) if message.role == "assistant" && only_thought(last) => last.content = message.content,
                _ => messages.push(message),
            }
        }
        "reasoning" => {
            let path = item.path("content");
            let content = item.value("content").map(|content| texts(content, &path, "reasoning_text")).transpose()?;
            item.unsupported(&[("summary", is_empty_list), ("encrypted_content", |_| false)])?;
            messages.push(ChatMessage { reasoning_content: content, ..ChatMessage::new("assistant", "") });
        }
        "function_call" => {
            let (id, name) = (item.required_string("call_id")?, item.required_string("name")?);
            let path = item.path("arguments");
            let arguments = arguments(&item.required_string("arguments")?, path)?;
            let call = ToolCall { id, call: Call::Function { name, arguments } };
            match messages.last_mut() {
                Some(last) if last.role == "assistant" => last.tool_calls.push(call),
                _ => messages.push(ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", "") }),
            }
        }
        "function_call_output" => {
            let tool_call_id = Some(item.required_string("call_id")?);
            let path = item.path("output");
            let output = texts(item.required("output")?, &path, "input_text")?;
            messages.push(ChatMessage { tool_call_id, ..ChatMessage::new("tool", output) });
        }
        other => {
            let known = "message, reasoning, function_call and function_call_output";
            return Err(unsupported(&item, other, &format!("items of the types {known}")));
        }
    }
    // The server's own.
    item.string("id")?;
    item.string("status")?;
    item.finish()
}

fn only_thought(message: &ChatMessage) -> bool {
    message.reasoning_content.is_some() && message.content.is_empty() && message.tool_calls.is_empty()
}

fn message(item: &mut Fields) -> Result<ChatMessage, ApiError> {
    let (role, kind) = match item.required_string("role")?.as_str() {
        "system" | "developer" => ("system", "input_text"),
        "user" => ("user", "input_text"),
        "assistant" => ("assistant", "output_text"),
        role => {
            let message = format!("{role:?} is none of system, developer, user, assistant");
            return Err(RequestError::field(item.path("role"), FieldError::Value, message).into());
        }
    };
    let path = item.path("content");
    Ok(ChatMessage::new(role, texts(item.required("content")?, &path, kind)?))
}

/// A text, or parts of this type, which are one text in pieces.
fn texts(value: Value, path: &str, kind: &str) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(wrong_type(path, "a string or a list of parts")),
    };
    let mut text = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, &format!("{path}[{index}]"))?;
        let found = part.required_string("type")?;
        if found != kind {
            return Err(unsupported(&part, &found, &format!("parts of the type {kind}")));
        }
        text.push_str(&part.required_string("text")?);
        part.unsupported(&[("annotations", is_empty_list), ("logprobs", is_empty_list)])?;
        part.finish()?;
    }
    Ok(text)
}

fn unsupported(fields: &Fields, found: &str, known: &str) -> ApiError {
    let message = format!("only {known} are supported here, not {found:?}");
    RequestError::field(fields.path("type"), FieldError::Unsupported, message).into()
}
