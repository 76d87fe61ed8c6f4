//! Tools of a chat and their calls, from JSON.

use serde_json::Value;

use super::{
    error::{ApiError, wrong_type},
    fields::Fields,
};
use crate::{
    request::{FieldError, RequestError, ToolChoice, arguments, ranges},
    text::{Call, Function, Tool, ToolCall},
};

/// The tools that the model is told of, and which of them it calls. Where it must call none, it is told of none.
pub(in crate::http) fn tools(fields: &mut Fields) -> Result<(Vec<Tool>, ToolChoice), ApiError> {
    let tools = match fields.value("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => {
            let tool = |(index, value)| tool(value, &format!("tools[{index}]"));
            list.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(wrong_type("tools", "a list of tools")),
    };
    let choice = match fields.value("tool_choice") {
        None => ToolChoice::Auto,
        Some(value) if value == "none" => return Ok((Vec::new(), ToolChoice::Auto)),
        Some(_) if tools.is_empty() => {
            return Err(needs_tools());
        }
        Some(value) => choice(value)?,
    };
    Ok((tools, choice))
}

/// A choice among tools, of which there are none.
pub(in crate::http) fn needs_tools() -> ApiError {
    let message = "makes no sense without tools; give some, or leave it out";
    RequestError::field("tool_choice", FieldError::Value, message).into()
}

fn tool(value: Value, path: &str) -> Result<Tool, ApiError> {
    let mut tool = Fields::new(value, path)?;
    is_function(&mut tool)?;
    let mut function = Fields::new(tool.required("function")?, &tool.path("function"))?;
    tool.finish()?;
    let name = function.required_string("name")?;
    let description = function.string("description")?;
    let parameters = match function.value("parameters") {
        None => None,
        Some(Value::Object(schema)) => Some(schema),
        Some(_) => return Err(wrong_type(function.path("parameters"), "an object: a JSON schema")),
    };
    let strict = function.boolean("strict")?.unwrap_or(false);
    function.finish()?;
    Ok(Tool::Function(Function { name, description, parameters, strict }))
}

fn choice(value: Value) -> Result<ToolChoice, ApiError> {
    match value {
        Value::String(word) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            _ => {
                let message = format!("{word:?} is none of none, auto, required, and no function");
                Err(RequestError::field("tool_choice", FieldError::Value, message).into())
            }
        },
        Value::Object(_) => {
            let mut choice = Fields::new(value, "tool_choice")?;
            is_function(&mut choice)?;
            let mut function = Fields::new(choice.required("function")?, "tool_choice.function")?;
            choice.finish()?;
            let name = function.required_string("name")?;
            function.finish()?;
            Ok(ToolChoice::Named(name))
        }
        _ => Err(wrong_type("tool_choice", "\"none\", \"auto\", \"required\" or a function")),
    }
}

/// The calls of an assistant's message.
pub(in crate::http) fn tool_calls(message: &mut Fields) -> Result<Vec<ToolCall>, ApiError> {
    let path = message.path("tool_calls");
    match message.value("tool_calls") {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => {
            list.into_iter().enumerate().map(|(index, value)| tool_call(value, &format!("{path}[{index}]"))).collect()
        }
        Some(_) => Err(wrong_type(path, "a list of calls")),
    }
}

fn tool_call(value: Value, path: &str) -> Result<ToolCall, ApiError> {
    let mut call = Fields::new(value, path)?;
    let id = call.required_string("id")?;
    is_function(&mut call)?;
    // Clients that put a stream's deltas together leave it where it was.
    call.integer("index", ranges::ANY)?;
    let mut function = Fields::new(call.required("function")?, &call.path("function"))?;
    call.finish()?;
    let name = function.required_string("name")?;
    let path = function.path("arguments");
    let arguments = arguments(&function.required_string("arguments")?, path)?;
    function.finish()?;
    Ok(ToolCall { id, call: Call::Function { name, arguments } })
}

pub(in crate::http) fn is_function(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.required_string("type")?.as_str() {
        "function" => Ok(()),
        other => {
            let message = format!("only \"function\" is supported, not {other:?}");
            Err(RequestError::field(fields.path("type"), FieldError::Unsupported, message).into())
        }
    }
}
