//! inference/v1 `Chat` to the chat that it is.

use looplane_proto::inference::v1 as proto;
use proto::tool_choice::{Choice, Mode};

use crate::{
    request::{Chat, FieldError, Level, LevelOf, RequestError, ToolChoice, arguments},
    text::{Call, ChatMessage, Function, TemplateOptions, Tool, ToolCall},
};

/// The messages and what else makes their prompt, as in `field`.
pub(super) fn chat(chat: proto::Chat, field: &str) -> Result<Chat, RequestError> {
    let proto::Chat {
        messages,
        tools,
        chat_template_kwargs,
        add_generation_prompt,
        continue_final_message,
        reasoning_effort,
        verbosity,
        documents,
    } = chat;
    let wrong = |name: &str, message: &str| RequestError::field(format!("{field}.{name}"), FieldError::Value, message);
    if continue_final_message && add_generation_prompt == Some(true) {
        let message = "and add_generation_prompt exclude each other: an answer goes on, or begins";
        return Err(wrong("continue_final_message", message));
    }
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(index, of)| message(of, &format!("{field}.messages[{index}]")));
    let messages = messages.collect::<Result<_, _>>()?;
    let tools = tools.into_iter().enumerate().map(|(index, of)| tool(of, &format!("{field}.tools[{index}]")));
    let documents = documents.iter().enumerate();
    let documents = documents.map(|(index, text)| arguments(text, format!("{field}.documents[{index}]")));
    let options = TemplateOptions {
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        kwargs: arguments(&chat_template_kwargs, format!("{field}.chat_template_kwargs"))?,
        tools: tools.collect::<Result<_, _>>()?,
        documents: documents.collect::<Result<_, _>>()?,
    };
    let levels =
        [("reasoning_effort", LevelOf::Effort, reasoning_effort), ("verbosity", LevelOf::Verbosity, verbosity)];
    let levels = levels.into_iter().filter(|(.., value)| !value.is_empty());
    let levels = levels.map(|(field, of, value)| Level { field, of, value }).collect();
    Ok(Chat { options, levels, continue_final_message, in_parts: true, ..Chat::new(messages) })
}

/// Which of a chat's tools are called. Where none is to be, the model is told of none.
pub(super) fn choose(chat: &mut Chat, choice: Option<proto::ToolChoice>) -> Result<(), RequestError> {
    let Some(choice) = choice.and_then(|choice| choice.choice) else { return Ok(()) };
    let wrong = |message: String| RequestError::field("tool_choice", FieldError::Value, message);
    chat.tool_choice = match choice {
        Choice::Mode(mode) => match Mode::try_from(mode).map_err(|_| wrong(format!("{mode} is no mode")))? {
            Mode::Unspecified => ToolChoice::Auto,
            Mode::None => {
                chat.options.tools.clear();
                return Ok(());
            }
            Mode::Required => ToolChoice::Required,
        },
        Choice::Function(name) => ToolChoice::Named(name),
    };
    match chat.options.tools.is_empty() && chat.tool_choice != ToolChoice::Auto {
        true => Err(wrong("makes no sense without tools; give some, or leave it out".into())),
        false => Ok(()),
    }
}

fn message(message: proto::ChatMessage, path: &str) -> Result<ChatMessage, RequestError> {
    let proto::ChatMessage { role, content, name, reasoning, tool_calls, tool_call_id } = message;
    let role = match role.as_str() {
        // OpenAI's newer name for the same role; models' templates know the older one.
        "developer" => "system".to_owned(),
        "system" | "user" | "assistant" | "tool" => role,
        _ => {
            let message = format!("{role:?} is none of system, developer, user, assistant, tool");
            return Err(RequestError::field(format!("{path}.role"), FieldError::Value, message));
        }
    };
    let of_assistant = [("reasoning", !reasoning.is_empty()), ("tool_calls", !tool_calls.is_empty())];
    let misplaced = match role.as_str() {
        "assistant" => [("tool_call_id", !tool_call_id.is_empty())].into_iter().find(|(_, is_there)| *is_there),
        "tool" if tool_call_id.is_empty() => {
            let message = "must be given: it names the call that the message answers";
            return Err(RequestError::field(format!("{path}.tool_call_id"), FieldError::Missing, message));
        }
        "tool" => of_assistant.into_iter().find(|(_, is_there)| *is_there),
        _ => {
            of_assistant.into_iter().chain([("tool_call_id", !tool_call_id.is_empty())]).find(|(_, is_there)| *is_there)
        }
    };
    if let Some((field, _)) = misplaced {
        let message = format!("is not for messages of the role {role}; leave it out");
        return Err(RequestError::field(format!("{path}.{field}"), FieldError::Unsupported, message));
    }
    let calls = tool_calls.into_iter().enumerate();
    let calls = calls.map(|(index, of)| call(of, &format!("{path}.tool_calls[{index}]")));
    Ok(ChatMessage {
        role,
        content,
        name: given(name),
        reasoning_content: given(reasoning),
        tool_calls: calls.collect::<Result<_, _>>()?,
        tool_call_id: given(tool_call_id),
    })
}

fn call(call: proto::ToolCall, path: &str) -> Result<ToolCall, RequestError> {
    let proto::ToolCall { id, name, arguments: text } = call;
    let arguments = arguments(&text, format!("{path}.arguments"))?;
    Ok(ToolCall { id, call: Call::Function { name, arguments } })
}

fn tool(tool: proto::Tool, path: &str) -> Result<Tool, RequestError> {
    let proto::Tool { name, description, parameters, strict } = tool;
    let parameters = match parameters.is_empty() {
        true => None,
        false => Some(arguments(&parameters, format!("{path}.parameters"))?),
    };
    Ok(Tool::Function(Function { name, description: given(description), parameters, strict }))
}

/// In proto3 a text that is empty was left out.
pub(super) fn given(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}
