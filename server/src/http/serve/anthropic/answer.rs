//! Answers as Anthropic's Messages API writes them.

use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    super::{
        dialect::{Answer, Block, BlockKind, Dialect},
        error::ApiError,
        events::Events,
    },
    error_body,
};
use crate::frontend::ReplyEnd;

/// Writes one answer.
#[derive(Debug)]
pub(super) struct Messages {
    /// With its prefix.
    pub(super) id: String,
    pub(super) model: String,
}

#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Content<'a>>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Usage,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Content<'a> {
    Text {
        text: &'a str,
    },
    /// Nothing is signed.
    Thinking {
        thinking: &'a str,
        signature: &'static str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: Map<String, Value>,
    },
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum StreamEvent<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Content<'a> },
    ContentBlockDelta { index: usize, delta: Delta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Ending<'a>, usage: Usage },
    MessageStop,
}

#[derive(Serialize)]
struct Ending<'a> {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
}

#[derive(Serialize)]
struct Usage {
    /// Of the prompt, those that were computed.
    input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
}

impl Messages {
    fn message<'a>(&'a self, answer: &'a Answer) -> Message<'a> {
        let Ending { stop_reason, stop_sequence } = ending(answer);
        Message {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content: answer.blocks.iter().map(content).collect(),
            stop_reason,
            stop_sequence,
            usage: usage(answer),
        }
    }
}

impl Dialect for Messages {
    const KEEP_ALIVE: &'static [u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

    fn begin(&mut self, answer: &Answer, events: &mut Events) {
        events.named("message_start", &StreamEvent::MessageStart { message: self.message(answer) });
    }

    fn begin_block(&mut self, index: usize, block: &Block, events: &mut Events) {
        let content_block = content(block);
        events.named("content_block_start", &StreamEvent::ContentBlockStart { index, content_block });
    }

    fn delta(&mut self, index: usize, block: &Block, text: &str, events: &mut Events) {
        let delta = match block.kind {
            BlockKind::Text => Delta::Text { text },
            BlockKind::Thinking => Delta::Thinking { thinking: text },
            BlockKind::Call { .. } => Delta::InputJson { partial_json: text },
        };
        events.named("content_block_delta", &StreamEvent::ContentBlockDelta { index, delta });
    }

    fn end_block(&mut self, answer: &Answer, events: &mut Events) {
        let index = answer.blocks.len() - 1;
        events.named("content_block_stop", &StreamEvent::ContentBlockStop { index });
    }

    fn end(&mut self, answer: &Answer, events: &mut Events) {
        events.named("message_delta", &StreamEvent::MessageDelta { delta: ending(answer), usage: usage(answer) });
        events.named("message_stop", &StreamEvent::MessageStop);
    }

    fn fail(&mut self, _: &Answer, error: &ApiError, events: &mut Events) {
        events.named("error", &error_body(error));
    }

    fn whole(self, answer: &Answer) -> String {
        serde_json::to_string(&self.message(answer)).expect("strings and numbers with string keys are always JSON")
    }
}

fn content(block: &Block) -> Content<'_> {
    match &block.kind {
        BlockKind::Text => Content::Text { text: &block.text },
        BlockKind::Thinking => Content::Thinking { thinking: &block.text, signature: "" },
        // Arguments that a limit cut off are no JSON: the reason of the end tells of it.
        BlockKind::Call { id, name } => {
            Content::ToolUse { id, name, input: serde_json::from_str(&block.text).unwrap_or_default() }
        }
    }
}

fn ending(answer: &Answer) -> Ending<'_> {
    let Some(end) = &answer.end else { return Ending { stop_reason: None, stop_sequence: None } };
    let (reason, stop_sequence) = match (end.reason, &end.stop_text) {
        (ReplyEnd::ToolCalls, _) => ("tool_use", None),
        (ReplyEnd::Length, _) => ("max_tokens", None),
        (ReplyEnd::Stop, Some(text)) => ("stop_sequence", Some(text.as_str())),
        (ReplyEnd::Stop, None) => ("end_turn", None),
    };
    Ending { stop_reason: Some(reason), stop_sequence }
}

/// How much was cached is known at the end.
fn usage(answer: &Answer) -> Usage {
    let (cached, output_tokens) = answer.end.as_ref().map_or((0, 0), |end| (end.cached_tokens, end.completion_tokens));
    Usage { input_tokens: answer.prompt_tokens - cached, cache_read_input_tokens: cached, output_tokens }
}
