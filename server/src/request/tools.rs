//! What a chat's tools ask of its answer, and which parts the answer has.

use super::{Chat, FieldError, RequestError};
use crate::{
    reply::{Format, thinks_at_the_end_of},
    text::{Text, Tool},
};

/// Tools of one request.
pub const MAX_TOOLS: usize = 128;
/// Bytes of a tool's name.
const MAX_NAME_BYTES: usize = 64;

/// Which tools are called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// At least one, whichever it is.
    Required,
    /// The one of this name.
    Named(String),
}

/// What is told apart in the answer to a chat.
///
/// # Errors
/// Names the tool that is wrong, or says why the model cannot be given tools, or not be made to call one.
pub(super) fn format(chat: &Chat, text: &Text) -> Result<Format, RequestError> {
    let tools = &chat.options.tools;
    let reasoning = chat.in_parts && text.thinks;
    if tools.is_empty() {
        return Ok(Format { reasoning, ..Format::default() });
    }
    check(tools, &chat.tool_choice)?;
    check_template(chat, text)?;
    let Some(format) = text.tool_format else {
        let message = "it is not known how this model writes tool calls; leave them out, or let the server's operator \
                       name the format with --tool-call-parser";
        return Err(RequestError::field("tools", FieldError::Unsupported, message));
    };
    constrain(&chat.tool_choice)?;
    let names = tools.iter().map(|tool| tool.name().to_owned()).collect();
    Ok(Format { tools: Some(format), names, one_call: chat.one_call, reasoning })
}

/// The chat template passes on the tools that there are.
pub(super) fn check_template(chat: &Chat, text: &Text) -> Result<(), RequestError> {
    if chat.options.tools.is_empty() || text.takes_tools {
        return Ok(());
    }
    let message = "the model's chat template takes no tools; leave them out, or serve a model that calls tools";
    Err(RequestError::field("tools", FieldError::Unsupported, message))
}

/// Whether the prompt of a chat has begun the thinking of its answer: the template's end, or the text that goes on.
pub(super) fn thinks(chat: &Chat, prompt: &str) -> bool {
    match chat.messages.last() {
        Some(last) if chat.continue_final_message => thinks_at_the_end_of(&last.content, true),
        _ => thinks_at_the_end_of(prompt, false),
    }
}

/// Makes the model call a tool where the request says that it must.
///
/// # Errors
/// Names `tool_choice`: decoding would have to be constrained to calls. **This is the one place that refuses it.**
fn constrain(choice: &ToolChoice) -> Result<(), RequestError> {
    match choice {
        ToolChoice::Auto => Ok(()),
        ToolChoice::Required | ToolChoice::Named(_) => {
            let message = "only \"auto\" and \"none\" are supported: the model cannot be made to call a tool";
            Err(RequestError::field("tool_choice", FieldError::Unsupported, message))
        }
    }
}

/// Names are such that no template and no parser mistakes them, and the choice is one of them.
fn check(tools: &[Tool], choice: &ToolChoice) -> Result<(), RequestError> {
    let wrong = |field: String, message: String| Err(RequestError::field(field, FieldError::Value, message));
    if tools.len() > MAX_TOOLS {
        return wrong("tools".into(), format!("{} tools are more than {MAX_TOOLS}", tools.len()));
    }
    for (index, tool) in tools.iter().enumerate() {
        let (name, field) = (tool.name(), format!("tools[{index}].function.name"));
        if !is_word(name) || name.len() > MAX_NAME_BYTES {
            let message = format!("{name:?} is not a name of 1 to {MAX_NAME_BYTES} letters, digits, _ and -");
            return wrong(field, message);
        }
        if tools[..index].iter().any(|earlier| earlier.name() == name) {
            return wrong(field, format!("{name:?} is the name of an earlier tool"));
        }
    }
    match choice {
        ToolChoice::Named(name) if tools.iter().all(|tool| tool.name() != name) => {
            wrong("tool_choice.function.name".into(), format!("{name:?} is none of the tools"))
        }
        _ => Ok(()),
    }
}

/// Letters, digits, `_` and `-`, and nothing else.
pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}
