//! Bodies of `/v1/responses` to raw requests.

use serde_json::{Value, json};

use super::{
    super::{
        error::{ApiError, wrong_type},
        fields::{Fields, Off},
        parse::{SERVICE_TIER, constraint, is_empty_list, labels, sampling, service_tier},
        tools::{is_function, needs_tools},
    },
    ResponseStore, find, items,
};
use crate::{
    request::{Chat, FieldError, Input, Level, LevelOf, RawRequest, RequestError, ToolChoice, ranges},
    text::{ChatMessage, Constraint, Function, TemplateOptions, Tool},
};

/// Fields that are not supported, each with the values that ask for nothing.
const UNSUPPORTED: [(&str, Off); 8] = [
    ("background", |value| *value == false),
    ("conversation", |_| false),
    ("context_management", is_empty_list),
    ("include", is_empty_list),
    ("max_tool_calls", |_| false),
    ("prompt", |_| false),
    ("top_logprobs", |value| *value == 0),
    ("truncation", |value| value == "disabled"),
];

/// What the answer depends on beside the request.
#[derive(Debug)]
pub(in crate::http) struct Asked {
    pub(super) stream: bool,
    pub(super) store: bool,
    /// What was said, without instructions.
    pub(super) messages: Vec<ChatMessage>,
    /// Fields of the request that the response has, too.
    pub(super) echo: Value,
    /// What they take in a response.
    pub(super) echo_bytes: usize,
}

/// Reads a body: the model's name (empty: the one that is served), the request, and what else the answer depends on.
pub(in crate::http) fn create(body: Value, kept: &ResponseStore) -> Result<(String, RawRequest, Asked), ApiError> {
    let mut echo = echo(&body);
    let mut fields = Fields::new(body, "")?;
    let model = fields.string("model")?.unwrap_or_default();
    let mut messages = match fields.string("previous_response_id")? {
        Some(id) => find(kept, &id, Some("previous_response_id"))?.messages.clone(),
        None => Vec::new(),
    };
    messages.extend(items::input(fields.required("input")?)?);
    let instructions = fields.string("instructions")?.map(|text| ChatMessage::new("system", text));
    let (tools, tool_choice) = tools(&mut fields)?;
    let one_call = fields.boolean("parallel_tool_calls")? == Some(false);
    let (constraint, verbosity) = text(&mut fields)?;
    let levels = effort(&mut fields)?.into_iter().chain(verbosity).collect();
    let chat = Chat {
        messages: instructions.into_iter().chain(messages.iter().cloned()).collect(),
        options: TemplateOptions { tools, ..TemplateOptions::default() },
        levels,
        tool_choice,
        one_call,
        in_parts: true,
        ..Chat::default()
    };
    let mut raw = RawRequest::new("input", Input::Chat(chat));
    raw.max_tokens_field = "max_output_tokens";
    raw.max_tokens = fields.integer("max_output_tokens", ranges::MAX_TOKENS)?;
    sampling(&mut fields, &mut raw)?;
    raw.constraint = constraint;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    if let Some(options) = fields.value("stream_options") {
        let mut options = Fields::new(options, "stream_options")?;
        options.unsupported(&[("include_obfuscation", |value| *value == false)])?;
        options.finish()?;
    }
    let store = fields.boolean("store")?.unwrap_or(true);
    labels(&mut fields)?;
    if service_tier(&mut fields)? {
        echo["service_tier"] = SERVICE_TIER.into();
    }
    fields.unsupported(&UNSUPPORTED)?;
    fields.finish()?;
    let echo_bytes = echo.to_string().len();
    Ok((model, raw, Asked { stream, store, messages, echo, echo_bytes }))
}

fn tools(fields: &mut Fields) -> Result<(Vec<Tool>, ToolChoice), ApiError> {
    let tool = |(index, value)| tool(value, &format!("tools[{index}]"));
    let tools = match fields.value("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => list.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong_type("tools", "a list of tools")),
    };
    let choice = match fields.value("tool_choice") {
        None => ToolChoice::Auto,
        Some(value) if value == "auto" => ToolChoice::Auto,
        Some(value) if value == "none" => return Ok((Vec::new(), ToolChoice::Auto)),
        Some(value) if value == "required" => ToolChoice::Required,
        Some(value @ Value::Object(_)) => {
            let mut choice = Fields::new(value, "tool_choice")?;
            is_function(&mut choice)?;
            let name = choice.required_string("name")?;
            choice.finish()?;
            ToolChoice::Named(name)
        }
        Some(_) => return Err(wrong_type("tool_choice", "\"none\", \"auto\", \"required\" or a function")),
    };
    match tools.is_empty() && choice != ToolChoice::Auto {
        true => Err(needs_tools()),
        false => Ok((tools, choice)),
    }
}

fn tool(value: Value, path: &str) -> Result<Tool, ApiError> {
    let mut tool = Fields::new(value, path)?;
    is_function(&mut tool)?;
    let name = tool.required_string("name")?;
    let description = tool.string("description")?;
    let parameters = tool.object("parameters")?;
    let strict = tool.boolean("strict")?.unwrap_or(false);
    tool.finish()?;
    Ok(Tool::Function(Function { name, description, parameters, strict }))
}

/// How much is thought. Nobody sums thoughts up here: they are told as they are.
fn effort(fields: &mut Fields) -> Result<Option<Level>, ApiError> {
    let Some(reasoning) = fields.value("reasoning") else { return Ok(None) };
    let mut reasoning = Fields::new(reasoning, "reasoning")?;
    let effort = reasoning.string("effort")?;
    reasoning.unsupported(&[("summary", |_| false), ("generate_summary", |_| false)])?;
    reasoning.finish()?;
    Ok(effort.map(|value| Level { field: "reasoning.effort", of: LevelOf::Effort, value }))
}

/// What the answer is held to, with the name of the field that says so, and how much it says.
fn text(fields: &mut Fields) -> Result<(Held, Option<Level>), ApiError> {
    let Some(text) = fields.value("text") else { return Ok((None, None)) };
    let mut text = Fields::new(text, "text")?;
    let verbosity = text.string("verbosity")?;
    let verbosity = verbosity.map(|value| Level { field: "text.verbosity", of: LevelOf::Verbosity, value });
    let format = text.value("format");
    text.finish()?;
    Ok((format.map_or(Ok(None), held)?, verbosity))
}

type Held = Option<(String, Constraint)>;

fn held(format: Value) -> Result<Held, ApiError> {
    let mut format = Fields::new(format, "text.format")?;
    let found = match format.required_string("type")?.as_str() {
        "text" => None,
        "json_object" => Some((format.path("type"), Constraint::json_object())),
        "json_schema" => {
            format.required_string("name")?;
            format.string("description")?;
            // Every schema is kept to.
            format.boolean("strict")?;
            let path = format.path("schema");
            let schema = constraint::json(format.required("schema")?, &path)?;
            Some((path, schema))
        }
        other => {
            let message = format!("{other:?} is none of text, json_object, json_schema");
            return Err(RequestError::field(format.path("type"), FieldError::Unsupported, message).into());
        }
    };
    format.finish()?;
    Ok(found)
}

/// What a response says of its request, by OpenAI's defaults where it says nothing.
fn echo(given: &Value) -> Value {
    let mut echo = json!({
        "background": false, "instructions": null, "max_output_tokens": null, "metadata": {},
        "parallel_tool_calls": true, "previous_response_id": null, "reasoning": {"effort": null, "summary": null},
        "store": true, "temperature": null, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_p": null, "truncation": "disabled",
    });
    for (name, value) in echo.as_object_mut().into_iter().flatten() {
        match &given[name] {
            Value::Null => {}
            given => *value = given.clone(),
        }
    }
    echo
}
