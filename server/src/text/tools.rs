//! Tools and their calls, in the shape that chat templates expect: Hugging Face's, which is OpenAI's but for the
//! arguments of a call.

use serde::Serialize;
use serde_json::{Map, Value};

/// What a model may call. Its keys stand in the order of what models are trained with, whatever the client's was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "function", rename_all = "lowercase")]
pub enum Tool {
    /// A function of the client's.
    Function(Function),
}

impl Tool {
    /// JSON schema of its arguments, if it takes any that it names.
    pub fn parameters(&self) -> Option<&Map<String, Value>> {
        match self {
            Self::Function(function) => function.parameters.as_ref(),
        }
    }

    /// Calls keep to the schema wherever the model decides to call.
    pub fn is_strict(&self) -> bool {
        match self {
            Self::Function(function) => function.strict,
        }
    }

    /// What calls name it by.
    pub fn name(&self) -> &str {
        match self {
            Self::Function(function) => &function.name,
        }
    }
}

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Function {
    /// Letters, digits, `_` and `-`.
    pub name: String,
    /// What it does and when to call it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON schema of its arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Map<String, Value>>,
    /// Calls keep to the schema wherever the model decides to call. The model is not told.
    #[serde(skip)]
    pub strict: bool,
}

/// A call in an assistant's message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// The tool's answer names it.
    pub id: String,
    /// What is called.
    #[serde(flatten)]
    pub call: Call,
}

/// What is called, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "function", rename_all = "lowercase")]
pub enum Call {
    /// A function of the client's.
    Function {
        /// Its name.
        name: String,
        /// An object: clients send its JSON as a text, but templates write it as JSON (`tojson`), or go through it key
        /// by key. A text would come out as a text with escapes, as no model has seen it. transformers asks for an
        /// object, and vLLM makes it one.
        arguments: Map<String, Value>,
    },
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::{ChatMessage, ChatTemplate, TemplateOptions};

    /// Qwen2.5-Coder 0.5B's own.
    const QWEN: &str = include_str!("../../tests/fixtures/templates/qwen2.5-coder.jinja");
    /// SmolLM2 135M's own, which knows no tools.
    const SMOLLM: &str = include_str!("../../tests/fixtures/templates/smollm2.jinja");
    /// What Llama 3's templates do with tools, in short.
    const LLAMA: &str = include_str!("../../tests/fixtures/templates/llama-style.jinja");

    fn tool() -> Tool {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let parameters = schema.as_object().cloned();
        Tool::Function(Function {
            name: "get_weather".into(),
            description: Some("The <weather>".into()),
            parameters,
            strict: false,
        })
    }

    fn history() -> Vec<ChatMessage> {
        let arguments = json!({"city": "Zürich \"City\"", "days": [1, 2.5]});
        let arguments = arguments.as_object().unwrap().clone();
        let call = Call::Function { name: "get_weather".into(), arguments };
        let calls = vec![ToolCall { id: "call_1".into(), call }];
        let answer =
            ChatMessage { tool_call_id: Some("call_1".into()), ..ChatMessage::new("tool", "{\"sky\": \"clear\"}") };
        vec![
            ChatMessage::new("user", "Weather?"),
            ChatMessage { tool_calls: calls, ..ChatMessage::new("assistant", "") },
            answer,
        ]
    }

    fn render(template: &str, messages: &[ChatMessage], tools: Vec<Tool>) -> String {
        let template = ChatTemplate::new(template, "<s>", "</s>").unwrap();
        template.render(messages, &TemplateOptions { tools, ..TemplateOptions::default() }, 1 << 16).unwrap()
    }

    const QWEN_TOOL: &str = "{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \
                             \"description\": \"The <weather>\", \"parameters\": {\"type\": \"object\", \
                             \"properties\": {\"city\": {\"type\": \"string\"}}}}}";

    #[test]
    fn qwens_template_gets_tools_calls_and_answers_as_transformers_gives_them() {
        let prompt = render(QWEN, &history(), vec![tool()]);
        let expected = format!(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\n\
             You may call one or more functions to assist with the user query.\n\nYou are provided with function \
             signatures within <tools></tools> XML tags:\n<tools>\n{QWEN_TOOL}\n</tools>\n\nFor each function call, \
             return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n\
             <tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call><|im_end|>\n\
             <|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{{\"name\": \"get_weather\", \
             \"arguments\": {{\"city\": \"Zürich \\\"City\\\"\", \"days\": [1, 2.5]}}}}\n</tool_call><|im_end|>\n\
             <|im_start|>user\n<tool_response>\n{{\"sky\": \"clear\"}}\n</tool_response><|im_end|>\n\
             <|im_start|>assistant\n"
        );
        assert_eq!(prompt, expected);
        let plain = render(QWEN, &history()[..1], Vec::new());
        assert!(!plain.contains("Tools"), "{plain}");
    }

    #[test]
    fn a_template_of_llamas_style_takes_them_too() {
        let prompt = render(LLAMA, &history(), vec![tool()]);
        for part in [
            "    \"function\": {\n        \"name\": \"get_weather\",",
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich \\\"City\\\"\", \
             \"days\": [1, 2.5]}}<|eot_id|>",
            "<|start_header_id|>ipython<|end_header_id|>\n\n{\"output\": \"{\\\"sky\\\": \\\"clear\\\"}\"}<|eot_id|>",
        ] {
            assert!(prompt.contains(part), "{part} in {prompt}");
        }
    }

    #[test]
    fn which_templates_take_tools_is_known() {
        let takes = |template: &str| ChatTemplate::new(template, "<s>", "</s>").unwrap().takes_tools();
        assert_eq!((takes(QWEN), takes(LLAMA), takes(SMOLLM)), (true, true, false));
        assert!(!takes("{% if tools %}{{ raise_exception('no tools') }}{% endif %}"));
    }
}
