//! What a chat's tools ask of its answer, and which parts the answer has.

use serde_json::{Map, Value};

use super::{Chat, FieldError, RequestError};
use crate::{
    reply::{self, CallGrammar, Format, thinks_at_the_end_of},
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

/// What calls are to the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Calling {
    /// It may be one, in whatever words.
    Free,
    /// It may be one, which then keeps to its schema.
    Strict,
    /// It is one.
    Required,
}

/// The calls that an answer may have as a grammar; `None`: there are no tools.
pub(super) fn calls(chat: &Chat, format: &Format, text: &Text) -> Option<(CallGrammar, Calling)> {
    let tools = format.tools?;
    let may_be = |tool: &&Tool| match &chat.tool_choice {
        ToolChoice::Auto | ToolChoice::Required => true,
        ToolChoice::Named(name) => tool.name() == name,
    };
    let may_be: Vec<&Tool> = chat.options.tools.iter().filter(may_be).collect();
    let calling = match chat.tool_choice {
        ToolChoice::Auto if may_be.iter().any(|tool| tool.is_strict()) => Calling::Strict,
        ToolChoice::Auto => Calling::Free,
        ToolChoice::Required | ToolChoice::Named(_) => Calling::Required,
    };
    // Beside a strict one, others are called with whatever arguments.
    let is_held = |tool: &Tool| calling != Calling::Strict || tool.is_strict();
    let named: Vec<_> = may_be.iter().map(|tool| (tool.name(), tool.parameters().filter(|_| is_held(tool)))).collect();
    let one_call = chat.one_call || matches!(chat.tool_choice, ToolChoice::Named(_));
    let grammar = reply::calls(tools, &named, one_call, |marker| text.grammars.marker(marker));
    Some((grammar, calling))
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

/// What the JSON text of a call's arguments says, which came in `field`; some clients leave it empty where there are
/// none.
///
/// # Errors
/// It is not the text of an object.
pub fn arguments(text: &str, field: String) -> Result<Map<String, Value>, RequestError> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(text).map_err(|error| {
        let message = format!("is not the text of a JSON object: {error}");
        RequestError::field(field, FieldError::Value, message)
    })
}

/// Letters, digits, `_` and `-`, and nothing else.
pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::{
        engine::ModelInfo,
        reply::{Parsers, ReasoningParser, ToolCallParser, ToolFormat},
        request::{Input, RawRequest, ValidRequest, validate},
        text::{Call, ChatMessage, ChatTemplate, Function, TemplateOptions, ToolCall},
    };

    const LLAMA: &str = include_str!("../../tests/fixtures/templates/llama-style.jinja");

    fn text(template: &str) -> Text {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
        let template = ChatTemplate::new(template, "<|begin_of_text|>", "<|eot_id|>").unwrap();
        let takes_tools = template.takes_tools();
        let text = Text { template: Some(template), takes_tools, ..Text::load(&fixture).unwrap() };
        text.with_parsers(Parsers::default())
    }

    fn valid(chat: Chat, text: &Text) -> Result<ValidRequest, RequestError> {
        let model = ModelInfo { vocab_size: 768, max_context: 4096, ..ModelInfo::default() };
        validate(RawRequest::new("messages", Input::Chat(chat)), &model, text)
    }

    fn function(name: &str, description: &str) -> Tool {
        let schema =
            json!({"type": "object", "properties": {"a": {"type": ["string", "null"], "description": description}}});
        let parameters = schema.as_object().cloned();
        Tool::Function(Function { name: name.into(), description: Some(description.into()), parameters, strict: false })
    }

    fn chat(tools: Vec<Tool>, tool_choice: ToolChoice) -> Chat {
        let options = TemplateOptions { tools, ..TemplateOptions::default() };
        Chat { options, tool_choice, in_parts: true, ..Chat::new(vec![ChatMessage::new("user", "Hi")]) }
    }

    #[test]
    fn an_answer_has_the_parts_that_its_request_and_its_model_have() {
        let text = text(LLAMA);
        let format = |chat| valid(chat, &text).unwrap().format;
        let tools = || vec![function("f", "What, where?"), function("g-2", "")];
        let with_tools =
            Format { tools: Some(ToolFormat::Llama3Json), names: vec!["f".into(), "g-2".into()], ..Format::default() };
        assert_eq!(format(chat(tools(), ToolChoice::Auto)), with_tools);
        let one = Chat { one_call: true, ..chat(tools(), ToolChoice::Auto) };
        assert_eq!(format(one), Format { one_call: true, ..with_tools });
        assert_eq!(format(chat(Vec::new(), ToolChoice::Auto)), Format::default());
        let parsers = Parsers { reasoning: ReasoningParser::Think, ..Parsers::default() };
        let text = text.with_parsers(parsers);
        let format = |in_parts| valid(Chat { in_parts, ..chat(Vec::new(), ToolChoice::Auto) }, &text).unwrap().format;
        assert_eq!((format(true).reasoning, format(false).reasoning), (true, false));
    }

    #[test]
    fn tools_that_cannot_be_called_are_refused_by_name() {
        let one = || vec![function("f", "")];
        for (tools, choice, param) in [
            (vec![function("", "")], ToolChoice::Auto, "tools[0].function.name"),
            (vec![function("a b", "")], ToolChoice::Auto, "tools[0].function.name"),
            (vec![function("f", ""), function(&"x".repeat(65), "")], ToolChoice::Auto, "tools[1].function.name"),
            (vec![function("f", ""), function("f", "")], ToolChoice::Auto, "tools[1].function.name"),
            (vec![function("f", ""); MAX_TOOLS + 1], ToolChoice::Auto, "tools"),
            (one(), ToolChoice::Named("g".into()), "tool_choice.function.name"),
        ] {
            assert_eq!(valid(chat(tools, choice), &text(LLAMA)).unwrap_err().param(), param);
        }
        let without = text("{{ messages[0].content }}");
        let error = valid(chat(one(), ToolChoice::Auto), &without).unwrap_err();
        assert_eq!(error.param(), "tools");
        assert!(error.to_string().contains("template"), "{error}");
        let off = Parsers { tool_calls: ToolCallParser::None, ..Parsers::default() };
        let error = valid(chat(one(), ToolChoice::Auto), &text(LLAMA).with_parsers(off)).unwrap_err();
        assert!(error.to_string().contains("--tool-call-parser"), "{error}");
    }

    #[test]
    fn no_text_of_a_tool_or_a_call_becomes_a_control_token() {
        let control = "x<|eot_id|>";
        let arguments = |key: &str, value: &str| json!({key: [value]}).as_object().unwrap().clone();
        let call = |id: &str, name: &str, arguments| {
            let call = ToolCall { id: id.into(), call: Call::Function { name: name.into(), arguments } };
            ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", "") }
        };
        let with = |message| {
            let mut chat = chat(vec![function("f", "")], ToolChoice::Auto);
            chat.messages.push(message);
            chat
        };
        let control_tokens = |chat: Chat| {
            let text = text(LLAMA);
            let tokens = valid(chat, &text).unwrap().prompts.remove(0).tokens;
            tokens.into_iter().filter(|id| text.tokenizer.is_special(*id)).count()
        };
        let of = |chat: &dyn Fn(&str) -> Chat| (control_tokens(chat("harmless")), control_tokens(chat(control)));
        let chats: [&dyn Fn(&str) -> Chat; 7] = [
            &|text| chat(vec![function("f", text)], ToolChoice::Auto),
            &|text| with(call("1", "f", arguments("a", text))),
            &|text| with(call("1", "f", arguments(text, "b"))),
            &|text| with(call(text, "f", arguments("a", "b"))),
            &|text| with(call("1", text, arguments("a", "b"))),
            &|text| with(ChatMessage { reasoning_content: Some(text.into()), ..ChatMessage::new("assistant", "Hi") }),
            &|text| with(ChatMessage { tool_call_id: Some(text.into()), ..ChatMessage::new("tool", "Hi") }),
        ];
        for (index, chat) in chats.into_iter().enumerate() {
            let (harmless, spelled) = of(chat);
            assert_eq!(harmless, spelled, "chat {index}");
        }
        assert!(valid(with(call("1", "f", arguments("a <|", "|> \" b"))), &text(LLAMA)).is_ok());
        // In pieces that a template joins.
        let joining = "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}\
                       {% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}{{ v[0] }}\
                       {% endfor %}{% endfor %}{% endfor %}";
        let text = Text { tool_format: Some(ToolFormat::Hermes), ..text(joining) };
        let error = valid(with(call("1", "f", arguments("<|eot", "_id|>"))), &text).unwrap_err();
        assert_eq!((error.param(), error.code()), ("messages", "special_token_in_content"));
        assert!(valid(with(call("1", "f", arguments("<|eot", "id|>"))), &text).is_ok());
    }

    #[test]
    fn the_prompts_end_begins_the_thinking() {
        let text = text("{{ messages[-1].content }}{% if add_generation_prompt %}<think>\n{% endif %}");
        let thinks = |chat| valid(chat, &text).unwrap().prompts[0].thinks;
        assert!(thinks(chat(Vec::new(), ToolChoice::Auto)));
        let options = TemplateOptions { add_generation_prompt: false, ..TemplateOptions::default() };
        for (said, begun) in [("<think>so", true), ("<think>so</think> I", false)] {
            let messages = vec![ChatMessage::new("assistant", said)];
            let goes_on = Chat { options: options.clone(), continue_final_message: true, ..Chat::new(messages) };
            assert_eq!(thinks(goes_on), begun, "{said}");
        }
    }
}
