//! Which format a model's replies have: read off its chat template, or as the operator says.

use clap::ValueEnum;

use super::thinking;

/// Ends the thinking of a reply.
pub const THINKING_CLOSES: &str = thinking::CLOSE;
/// Begins it.
pub const THINKING_OPENS: &str = thinking::OPEN;

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
    Hermes,
    /// Llama 3: `{"name": .., "parameters": {..}}`, behind `<|python_tag|>` or alone, several with `;` between them.
    Llama3Json,
    /// Mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, and newer `[TOOL_CALLS]name[ARGS]{..}`.
    Mistral,
}

impl ToolFormat {
    /// What calls stand behind.
    pub(super) fn marker(self) -> &'static str {
        match self {
            Self::Hermes => "<tool_call>",
            Self::Llama3Json => "<|python_tag|>",
            Self::Mistral => "[TOOL_CALLS]",
        }
    }

    /// By what a chat template has the model write.
    fn of_template(source: &str) -> Option<Self> {
        let holds = |text| source.contains(text);
        // Llama's later templates do not write the marker, but tell the model what calls look like.
        let llama = holds(Self::Llama3Json.marker()) || holds("\"parameters\": dictionary of argument");
        match () {
            () if holds(Self::Mistral.marker()) => Some(Self::Mistral),
            () if llama => Some(Self::Llama3Json),
            // Others have the same tags around XML.
            () if holds(Self::Hermes.marker()) && holds("\"arguments") => Some(Self::Hermes),
            () => None,
        }
    }
}

/// What is told apart in a reply; nothing: all of it is content.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Format {
    /// Tool calls, in this format.
    pub tools: Option<ToolFormat>,
    /// Names of the request's tools.
    pub names: Vec<String>,
    /// The reply ends with its first call.
    pub one_call: bool,
    /// Thinking.
    pub reasoning: bool,
}

impl Format {
    /// Texts that tell the parts apart. Where they are control tokens, they must be part of the reply's text.
    pub fn markers(&self) -> Vec<&'static str> {
        let tools: &[&str] = match self.tools {
            None => &[],
            Some(ToolFormat::Hermes) => &["<tool_call>", "</tool_call>"],
            Some(ToolFormat::Llama3Json) => &["<|python_tag|>"],
            Some(ToolFormat::Mistral) => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        };
        let reasoning: &[&str] = if self.reasoning { &[thinking::OPEN, thinking::CLOSE] } else { &[] };
        [tools, reasoning].concat()
    }
}

/// `--tool-call-parser`: how tool calls are found in replies. The names are vLLM's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ToolCallParser {
    /// As the chat template has the model write them.
    #[default]
    Auto,
    /// Not at all: requests with tools are refused.
    None,
    /// Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
    Hermes,
    /// Llama 3: `{"name": .., "parameters": {..}}`.
    #[value(name = "llama3_json")]
    Llama3Json,
    /// Mistral: `[TOOL_CALLS]`, then a list of calls, or a name and `[ARGS]`.
    Mistral,
}

/// `--reasoning-parser`: how thinking is found in replies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ReasoningParser {
    /// By its tags, where the chat template or the tokenizer knows them.
    #[default]
    Auto,
    /// Not at all: it is content.
    None,
    /// By `<think>` and `</think>`.
    Think,
}

/// How the server is told to read replies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parsers {
    /// Tool calls.
    pub tool_calls: ToolCallParser,
    /// Thinking.
    pub reasoning: ReasoningParser,
}

impl Parsers {
    /// How a model with this chat template writes tool calls; `None`: that is not known.
    pub fn tool_format(self, template: &str) -> Option<ToolFormat> {
        match self.tool_calls {
            ToolCallParser::Auto => ToolFormat::of_template(template),
            ToolCallParser::None => None,
            ToolCallParser::Hermes => Some(ToolFormat::Hermes),
            ToolCallParser::Llama3Json => Some(ToolFormat::Llama3Json),
            ToolCallParser::Mistral => Some(ToolFormat::Mistral),
        }
    }

    /// Whether thinking is told apart, for a model with this chat template. `is_token`: a text is a token of its own.
    pub fn thinks(self, template: &str, is_token: impl Fn(&str) -> bool) -> bool {
        match self.reasoning {
            ReasoningParser::Auto => {
                template.contains(thinking::CLOSE) || is_token(thinking::OPEN) && is_token(thinking::CLOSE)
            }
            ReasoningParser::None => false,
            ReasoningParser::Think => true,
        }
    }
}

/// Whether a prompt that ends with `text` has begun the reply's thinking: its last tag opens it. `whole`: all of `text`
/// belongs to the reply; else only a tag at its very end counts, since others may have written what stands before.
pub fn thinks_at_the_end_of(text: &str, whole: bool) -> bool {
    match text.rsplit_once(thinking::OPEN) {
        Some((_, behind)) if whole => !behind.contains(thinking::CLOSE),
        Some((_, behind)) => behind.trim().is_empty(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_templates_markers_say_what_its_models_write() {
        let format = |template| Parsers::default().tool_format(template);
        let hermes = r#"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"#;
        assert_eq!(format(hermes), Some(ToolFormat::Hermes));
        assert_eq!(format("<tool_call>\n<function=example>\n<parameter=a>"), None, "tags around XML");
        assert_eq!(format("{{ '[TOOL_CALLS]' }}"), Some(ToolFormat::Mistral));
        assert_eq!(format("'<|python_tag|>' + call.name"), Some(ToolFormat::Llama3Json));
        let told = r#"{"name": function name, "parameters": dictionary of argument name and its value}"#;
        assert_eq!(format(told), Some(ToolFormat::Llama3Json));
        assert_eq!(format("{{ messages }}"), None);
        let given = |tool_calls| Parsers { tool_calls, ..Parsers::default() }.tool_format("[TOOL_CALLS]");
        assert_eq!((given(ToolCallParser::None), given(ToolCallParser::Hermes)), (None, Some(ToolFormat::Hermes)));
    }

    #[test]
    fn thinking_is_told_apart_where_its_tags_are_known() {
        let thinks = |reasoning, template, known: &'static [&'static str]| {
            Parsers { reasoning, ..Parsers::default() }.thinks(template, |text| known.contains(&text))
        };
        assert!(thinks(ReasoningParser::Auto, "content.split('</think>')", &[]));
        assert!(thinks(ReasoningParser::Auto, "", &["<think>", "</think>"]));
        assert!(!thinks(ReasoningParser::Auto, "", &["<think>"]));
        assert!(thinks(ReasoningParser::Think, "", &[]));
        assert!(!thinks(ReasoningParser::None, "</think>", &["<think>", "</think>"]));
    }

    #[test]
    fn the_end_of_the_prompt_says_whether_the_reply_begins_in_its_thinking() {
        for (text, whole, thinks) in [
            ("<|im_start|>assistant\n<think>\n", false, true),
            ("<|im_start|>assistant\n<think>\n\n</think>\n\n", false, false),
            ("<|im_start|>assistant\n", false, false),
            ("what is <think>?<|im_end|>assistant\n", false, false),
            ("<think>so far", true, true),
            ("<think>done</think>so far", true, false),
            ("so far", true, false),
        ] {
            assert_eq!(thinks_at_the_end_of(text, whole), thinks, "{text}");
        }
    }
}
