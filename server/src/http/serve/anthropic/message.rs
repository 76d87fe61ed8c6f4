//! Messages of the Messages API, which are blocks, to those of a chat.

use serde_json::Value;

use super::super::{
    error::{ApiError, wrong_type},
    fields::{Fields, Off},
    parse::is_empty_list,
};
use crate::{
    request::{FieldError, RequestError},
    text::{Call, ChatMessage, ToolCall},
};

/// What blocks of text may bring beside it.
const UNSUPPORTED_TEXT: [(&str, Off); 1] = [("citations", is_empty_list)];

/// The system prompt: a text, or text blocks, which are one text in pieces.
pub(super) fn system(value: Value) -> Result<String, ApiError> {
    texts(value, "system")
}

/// A message: of the results of tools in it each becomes a message of its own.
pub(super) fn message(value: Value, path: &str) -> Result<Vec<ChatMessage>, ApiError> {
    let mut fields = Fields::new(value, path)?;
    let role = fields.required_string("role")?;
    if !["user", "assistant"].contains(&role.as_str()) {
        let message = format!("{role:?} is none of user, assistant; the system prompt has a field of its own");
        return Err(RequestError::field(fields.path("role"), FieldError::Value, message).into());
    }
    let (content, path) = (fields.required("content")?, fields.path("content"));
    fields.finish()?;
    let blocks = match content {
        Value::String(text) => return Ok(vec![ChatMessage::new(role, text)]),
        Value::Array(blocks) if !blocks.is_empty() => blocks,
        _ => return Err(wrong_type(path, "a string or a list of blocks")),
    };
    let block = |(index, block)| Fields::new(block, &format!("{path}[{index}]"));
    let blocks = blocks.into_iter().enumerate().map(block);
    if role == "user" { user(blocks) } else { Ok(vec![assistant(blocks)?]) }
}

fn user(blocks: impl Iterator<Item = Result<Fields, ApiError>>) -> Result<Vec<ChatMessage>, ApiError> {
    let mut messages: Vec<ChatMessage> = Vec::new();
    for block in blocks {
        let mut block = block?;
        match block.required_string("type")?.as_str() {
            "text" => {
                let text = text(&mut block)?;
                match messages.last_mut() {
                    Some(last) if last.role == "user" => last.content.push_str(&text),
                    _ => messages.push(ChatMessage::new("user", text)),
                }
            }
            "tool_result" => {
                let tool_call_id = Some(block.required_string("tool_use_id")?);
                let path = block.path("content");
                let content = block.value("content").map(|content| texts(content, &path)).transpose()?;
                // The content says so, too, and templates know no flag.
                block.boolean("is_error")?;
                messages.push(ChatMessage { tool_call_id, ..ChatMessage::new("tool", content.unwrap_or_default()) });
            }
            kind => return Err(unsupported(&block, kind, "text and tool_result")),
        }
        cache_control(&mut block)?;
        block.finish()?;
    }
    Ok(messages)
}

fn assistant(blocks: impl Iterator<Item = Result<Fields, ApiError>>) -> Result<ChatMessage, ApiError> {
    let mut message = ChatMessage::new("assistant", "");
    for block in blocks {
        let mut block = block?;
        match block.required_string("type")?.as_str() {
            "text" => message.content.push_str(&text(&mut block)?),
            "thinking" => {
                let thinking = block.required_string("thinking")?;
                // The server's own is empty, and none is checked.
                block.string("signature")?;
                message.reasoning_content.get_or_insert_default().push_str(&thinking);
            }
            "tool_use" => {
                let (id, name) = (block.required_string("id")?, block.required_string("name")?);
                let path = block.path("input");
                let Value::Object(arguments) = block.required("input")? else {
                    return Err(wrong_type(path, "an object"));
                };
                message.tool_calls.push(ToolCall { id, call: Call::Function { name, arguments } });
            }
            kind => return Err(unsupported(&block, kind, "text, thinking and tool_use")),
        }
        cache_control(&mut block)?;
        block.finish()?;
    }
    Ok(message)
}

/// A text, or text blocks.
fn texts(value: Value, path: &str) -> Result<String, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(text),
        Value::Array(blocks) => blocks,
        _ => return Err(wrong_type(path, "a string or a list of text blocks")),
    };
    let mut whole = String::new();
    for (index, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::new(block, &format!("{path}[{index}]"))?;
        match block.required_string("type")?.as_str() {
            "text" => whole.push_str(&text(&mut block)?),
            kind => return Err(unsupported(&block, kind, "text")),
        }
        cache_control(&mut block)?;
        block.finish()?;
    }
    Ok(whole)
}

fn text(block: &mut Fields) -> Result<String, ApiError> {
    block.unsupported(&UNSUPPORTED_TEXT)?;
    block.required_string("text")
}

/// Prompts are cached unasked.
pub(super) fn cache_control(fields: &mut Fields) -> Result<(), ApiError> {
    fields.object("cache_control").map(drop)
}

fn unsupported(block: &Fields, kind: &str, known: &str) -> ApiError {
    let message = format!("only blocks of {known} are supported here, not {kind:?}");
    RequestError::field(block.path("type"), FieldError::Unsupported, message).into()
}
