//! Chat templates.

use looplane_server::text::{Call, ChatMessage, ChatTemplate, Function, TemplateOptions, TextError, Tool, ToolCall};
use serde_json::{Map, json};

/// Bytes of a prompt.
const MOST: usize = 1 << 16;
/// The variable of a client.
const FLAG: &str = "enable_thinking";

/// Up to the first zero byte a template, then what a user says.
pub fn template(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let (source, said) = text.split_once('\0').unwrap_or((text, "Hi"));
    let template = match ChatTemplate::new(source, "<s>", "</s>") {
        Ok(template) => template,
        Err(problem) => return assert!(!problem.is_empty()),
    };
    template.takes_tools();
    let function = Function {
        name: "f".into(),
        description: Some("It".into()),
        parameters: json!({"type": "object", "properties": {"a": {"type": "integer"}}}).as_object().cloned(),
        strict: false,
    };
    let plain = TemplateOptions::default();
    let with_tools = TemplateOptions { tools: vec![Tool::Function(function)], ..TemplateOptions::default() };
    let call = Call::Function { name: "f".into(), arguments: Map::new() };
    let messages = [
        ChatMessage::new("system", "Be brief."),
        ChatMessage::new("user", said),
        ChatMessage { tool_calls: vec![ToolCall { id: "call_1".into(), call }], ..ChatMessage::new("assistant", "") },
        ChatMessage { tool_call_id: Some("call_1".into()), ..ChatMessage::new("tool", "{\"a\": 1}") },
        ChatMessage::new("user", said),
    ];
    for options in [plain, with_tools] {
        let prompt = render(&template, &messages, &options);
        // By the clock, or by what lies where in memory.
        let varies = ["now", "debug", "random", "shuffle"].iter().any(|name| source.contains(name));
        if varies || template.reads(FLAG, &options) {
            continue;
        }
        let kwargs = [(FLAG.to_owned(), json!("on"))].into_iter().collect();
        let given = render(&template, &messages, &TemplateOptions { kwargs, ..options });
        assert_eq!(given, prompt, "it is said not to read {FLAG}");
    }
}

/// The prompt, within its bound, or why there is none.
fn render(template: &ChatTemplate, messages: &[ChatMessage], options: &TemplateOptions) -> Result<String, String> {
    match template.render(messages, options, MOST) {
        Ok(prompt) => {
            assert!(prompt.len() <= MOST);
            Ok(prompt)
        }
        Err(TextError::TooLong { max_bytes }) => Err(format!("more than {max_bytes}")),
        Err(TextError::Template(reason)) => Err(reason),
        Err(other) => panic!("{other}"),
    }
}
