//! The messages of a chat, and what else makes its prompt.

use serde_json::{Map, Value};

use super::{
    error::{ApiError, wrong_type},
    fields::{Fields, Off},
    parse::is_empty_list,
    tools,
};
use crate::{
    request::{Chat, FieldError, Level, LevelOf, RequestError},
    text::{ChatMessage, TemplateOptions, ToolCall},
};

const UNSUPPORTED: [(&str, Off); 5] = [
    ("function_call", |_| false),
    ("audio", |_| false),
    ("refusal", |_| false),
    ("annotations", is_empty_list),
    // What litellm's proxy adds to the answers that it passes on, and its clients send back.
    ("provider_specific_fields", |_| true),
];

/// The messages of a chat, and how they become a prompt.
pub(in crate::http) fn conversation(fields: &mut Fields) -> Result<Chat, ApiError> {
    let messages = messages(fields.required("messages")?)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    if continue_final_message && add_generation_prompt == Some(true) {
        let message = "and add_generation_prompt exclude each other: an answer goes on, or begins";
        return Err(RequestError::field("continue_final_message", FieldError::Value, message).into());
    }
    let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let add_generation_prompt = add_generation_prompt.unwrap_or(!continue_final_message);
    let (tools, tool_choice) = tools::tools(fields)?;
    let one_call = fields.boolean("parallel_tool_calls")? == Some(false);
    let documents = documents(fields)?;
    let level = |field, of, value: Option<String>| value.map(|value| Level { field, of, value });
    let effort = level("reasoning_effort", LevelOf::Effort, fields.string("reasoning_effort")?);
    let verbosity = level("verbosity", LevelOf::Verbosity, fields.string("verbosity")?);
    let levels = effort.into_iter().chain(verbosity).collect();
    let options = TemplateOptions { add_generation_prompt, kwargs, tools, documents };
    Ok(Chat { messages, options, levels, continue_final_message, tool_choice, one_call, in_parts: true })
}

fn documents(fields: &mut Fields) -> Result<Vec<Map<String, Value>>, ApiError> {
    let list = fields.list("documents", "a list of objects", "object")?.unwrap_or_default();
    let document = |(index, value)| match value {
        Value::Object(document) => Ok(document),
        _ => Err(wrong_type(format!("documents[{index}]"), "an object")),
    };
    list.into_iter().enumerate().map(document).collect()
}

fn messages(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    let Value::Array(list) = value else { return Err(wrong_type("messages", "a list of messages")) };
    list.into_iter().enumerate().map(|(index, value)| message(value, &format!("messages[{index}]"))).collect()
}

fn message(value: Value, path: &str) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::new(value, path)?;
    let role = match fields.required_string("role")?.as_str() {
        // OpenAI's newer name for the same role; models' templates know the older one.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        "function" => {
            let message = "functions are not supported; a tool answers with the role tool";
            return Err(RequestError::field(fields.path("role"), FieldError::Unsupported, message).into());
        }
        role => {
            let message = format!("{role:?} is none of system, developer, user, assistant, tool");
            return Err(RequestError::field(fields.path("role"), FieldError::Value, message).into());
        }
    };
    fields.unsupported(&UNSUPPORTED)?;
    let (mut tool_calls, mut tool_call_id, mut reasoning_content) = (Vec::new(), None, None);
    match role {
        "assistant" => {
            tool_calls = tools::tool_calls(&mut fields)?;
            reasoning_content = reasoning(&mut fields)?;
        }
        "tool" => tool_call_id = Some(fields.required_string("tool_call_id")?),
        _ => {}
    }
    let content = said(&mut fields, &tool_calls)?;
    let name = fields.string("name")?;
    // Of other roles they ask for nothing only if they are empty.
    fields.unsupported(&[("tool_calls", is_empty_list), ("tool_call_id", |_| false)])?;
    fields.finish()?;
    Ok(ChatMessage { role: role.into(), content, name, reasoning_content, tool_calls, tool_call_id })
}

/// What the assistant thought before, by the name of DeepSeek and older clients of vLLM, or the newer one: both, as the
/// server's own answers have it, or one of them.
fn reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let (older, newer) = (fields.string("reasoning_content")?, fields.string("reasoning")?);
    if older.is_some() && newer.is_some() && older != newer {
        let message = "differs from reasoning_content; give one of them";
        return Err(RequestError::field(fields.path("reasoning"), FieldError::Value, message).into());
    }
    Ok(older.or(newer))
}

/// A message's text. Calls need none; templates get an empty one, as vLLM gives it: many add it to other texts without
/// asking.
fn said(fields: &mut Fields, tool_calls: &[ToolCall]) -> Result<String, ApiError> {
    let path = fields.path("content");
    match fields.value("content") {
        Some(value) => content(value, &path),
        None if !tool_calls.is_empty() => Ok(String::new()),
        None => Err(RequestError::field(path, FieldError::Missing, "must be given").into()),
    }
}

/// A text, or a list of text parts, which are one text in pieces.
fn content(value: Value, path: &str) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) if !parts.is_empty() => parts,
        _ => return Err(wrong_type(path, "a string or a list of text parts")),
    };
    let mut text = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, &format!("{path}[{index}]"))?;
        let type_path = part.path("type");
        if part.required("type")? != "text" {
            let message = "only parts of type \"text\" are supported";
            return Err(RequestError::field(type_path, FieldError::Unsupported, message).into());
        }
        let text_path = part.path("text");
        match part.required("text")? {
            Value::String(piece) => text.push_str(&piece),
            _ => return Err(wrong_type(text_path, "a string")),
        }
        part.finish()?;
    }
    Ok(text)
}
