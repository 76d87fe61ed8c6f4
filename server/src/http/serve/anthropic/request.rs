//! Bodies of the Messages API to raw requests.

use serde_json::{Map, Value, json};

use super::{
    super::{
        error::{ApiError, wrong_type},
        fields::{Fields, Off},
        parse::{is_empty_list, texts},
        tools::needs_tools,
    },
    message::{self, cache_control},
};
use crate::{
    request::{Chat, FieldError, Input, RawRequest, RequestError, ToolChoice, ranges},
    text::{ChatMessage, Function, TemplateOptions, Tool},
};

/// Fields that are not supported, each with the values that ask for nothing.
const UNSUPPORTED: [(&str, Off); 7] = [
    ("service_tier", |value| value == "auto" || value == "standard_only"),
    ("container", |_| false),
    ("context_management", |_| false),
    ("inference_geo", |_| false),
    ("mcp_servers", is_empty_list),
    ("output_config", |_| false),
    ("output_format", |_| false),
];

/// Reads the body of `/v1/messages`: the model's name, the request, and whether its answer is a stream.
pub(in crate::http) fn messages(body: Value) -> Result<(String, RawRequest, bool), ApiError> {
    let mut fields = Fields::new(body, "")?;
    let model = fields.required_string("model")?;
    let mut raw = RawRequest::new("messages", Input::Chat(chat(&mut fields)?));
    let Some(max_tokens) = fields.integer("max_tokens", ranges::MAX_TOKENS)? else {
        return Err(RequestError::field("max_tokens", FieldError::Missing, "must be given").into());
    };
    raw.max_tokens = Some(max_tokens);
    raw.temperature = fields.number("temperature", ranges::TEMPERATURE)?;
    raw.top_p = fields.number("top_p", ranges::TOP_P)?;
    raw.top_k = fields.integer("top_k", ranges::TOP_K)?;
    raw.timeout_ms = fields.integer("timeout_ms", ranges::TIMEOUT_MS)?;
    raw.priority = fields.integer("priority", ranges::PRIORITY)?;
    if let Some(stops) = fields.value("stop_sequences") {
        raw.stop = texts(stops, "stop_sequences", "a list of strings")?;
    }
    let stream = fields.boolean("stream")?.unwrap_or(false);
    // A label for the caller's own records.
    fields.object("metadata")?;
    fields.unsupported(&UNSUPPORTED)?;
    fields.finish()?;
    Ok((model, raw, stream))
}

/// Reads what is left of the body of `/v1/messages/count_tokens` behind the model's name.
pub(in crate::http) fn counted(mut fields: Fields) -> Result<Chat, ApiError> {
    let chat = chat(&mut fields)?;
    fields.unsupported(&UNSUPPORTED)?;
    fields.finish()?;
    Ok(chat)
}

/// An answer goes on from the text of the assistant's message, if that is the last.
fn chat(fields: &mut Fields) -> Result<Chat, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = fields.value("system") {
        messages.push(ChatMessage::new("system", message::system(system)?));
    }
    let Value::Array(list) = fields.required("messages")? else {
        return Err(wrong_type("messages", "a list of messages"));
    };
    for (index, value) in list.into_iter().enumerate() {
        messages.extend(message::message(value, &format!("messages[{index}]"))?);
    }
    let goes_on = messages.last().is_some_and(|last| last.role == "assistant" && last.tool_calls.is_empty());
    let tools = tools(fields)?;
    let (tool_choice, one_call, none) = tool_choice(fields)?;
    if tools.is_empty() && tool_choice != ToolChoice::Auto {
        return Err(needs_tools());
    }
    let options = TemplateOptions {
        add_generation_prompt: !goes_on,
        kwargs: thinking(fields)?,
        tools: if none { Vec::new() } else { tools },
        ..TemplateOptions::default()
    };
    cache_control(fields)?;
    Ok(Chat {
        messages,
        options,
        continue_final_message: goes_on,
        tool_choice,
        one_call,
        in_parts: true,
        ..Chat::default()
    })
}

fn tools(fields: &mut Fields) -> Result<Vec<Tool>, ApiError> {
    let tool = |(index, value)| tool(value, &format!("tools[{index}]"));
    match fields.value("tools") {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.into_iter().enumerate().map(tool).collect(),
        Some(_) => Err(wrong_type("tools", "a list of tools")),
    }
}

fn tool(value: Value, path: &str) -> Result<Tool, ApiError> {
    let mut tool = Fields::new(value, path)?;
    if let Some(kind) = tool.string("type")?.filter(|kind| kind != "custom") {
        let message = format!("only \"custom\" is supported, not {kind:?}: this server runs no tools of its own");
        return Err(RequestError::field(tool.path("type"), FieldError::Unsupported, message).into());
    }
    let name = tool.required_string("name")?;
    let description = tool.string("description")?;
    let schema_path = tool.path("input_schema");
    let Value::Object(schema) = tool.required("input_schema")? else {
        return Err(wrong_type(schema_path, "an object: a JSON schema"));
    };
    let strict = tool.boolean("strict")?.unwrap_or(false);
    cache_control(&mut tool)?;
    tool.finish()?;
    Ok(Tool::Function(Function { name, description, parameters: Some(schema), strict }))
}

/// Which tools are called, whether only one, and whether the model is told of none.
fn tool_choice(fields: &mut Fields) -> Result<(ToolChoice, bool, bool), ApiError> {
    let Some(choice) = fields.value("tool_choice") else { return Ok((ToolChoice::Auto, false, false)) };
    let mut choice = Fields::new(choice, "tool_choice")?;
    let kind = choice.required_string("type")?;
    let one_call = choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let tool_choice = match kind.as_str() {
        "auto" | "none" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "tool" => ToolChoice::Named(choice.required_string("name")?),
        _ => {
            let message = format!("{kind:?} is none of auto, any, tool, none");
            return Err(RequestError::field(choice.path("type"), FieldError::Value, message).into());
        }
    };
    choice.finish()?;
    Ok((tool_choice, one_call, kind == "none"))
}

/// What the template is told. How long to think is the model's own to decide, and adaptive what the template does
/// unasked.
fn thinking(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = Map::new();
    let Some(thinking) = fields.value("thinking") else { return Ok(kwargs) };
    let mut thinking = Fields::new(thinking, "thinking")?;
    let kind = thinking.required_string("type")?;
    match kind.as_str() {
        "enabled" | "disabled" => kwargs.insert("enable_thinking".into(), json!(kind == "enabled")),
        "adaptive" => None,
        _ => {
            let message = format!("{kind:?} is none of enabled, disabled, adaptive");
            return Err(RequestError::field(thinking.path("type"), FieldError::Value, message).into());
        }
    };
    thinking.integer("budget_tokens", ranges::ANY)?;
    thinking.unsupported(&[("display", |value| value == "summarized")])?;
    thinking.finish()?;
    Ok(kwargs)
}
