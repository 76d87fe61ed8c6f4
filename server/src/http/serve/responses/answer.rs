//! Responses as OpenAI's Responses API writes them: whole ones, and the events of a stream.

use std::{cell::Cell, sync::Arc};

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    super::{
        dialect::{Answer, Block, BlockKind, Dialect},
        error::ApiError,
        events::Events,
    },
    ResponseStore, Stored,
};
use crate::{
    frontend::ReplyEnd,
    text::{Call, ChatMessage, ToolCall},
};

/// Writes one response, and keeps it.
#[derive(Debug)]
pub(super) struct Responses {
    /// Without a prefix: the items' names begin with it, too.
    pub(super) id: String,
    pub(super) created_at: u64,
    pub(super) model: String,
    /// Fields of the request.
    pub(super) echo: Value,
    /// What they take in a response.
    pub(super) echo_bytes: usize,
    /// Where it is kept, and what was said before it; `None`: it is not.
    pub(super) store: Option<(Arc<ResponseStore>, Vec<ChatMessage>)>,
    /// Of the next event.
    pub(super) sequence_number: Cell<u64>,
}

#[derive(Serialize)]
struct Response<'a> {
    id: String,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    model: &'a str,
    output: Vec<Item<'a>>,
    usage: Option<Value>,
    #[serde(flatten)]
    echo: &'a Value,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Item<'a> {
    Message { id: String, status: &'static str, role: &'static str, content: Vec<Part<'a>> },
    Reasoning { id: String, status: &'static str, summary: [Part<'a>; 0], content: Vec<Part<'a>> },
    FunctionCall { id: String, status: &'static str, call_id: &'a str, name: &'a str, arguments: &'a str },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part<'a> {
    OutputText { text: &'a str, annotations: [u8; 0], logprobs: [u8; 0] },
    ReasoningText { text: &'a str },
}

/// An event, with the fields that it has.
#[derive(Serialize, Default)]
struct StreamEvent<'a> {
    r#type: &'static str,
    sequence_number: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<Response<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item: Option<Item<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Part<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[u8; 0]>,
}

impl Responses {
    fn response<'a>(&'a self, answer: &'a Answer) -> Response<'a> {
        let ended = answer.end.as_ref();
        let status = ended.map_or("in_progress", |_| status_of(answer, true));
        let incomplete = status == "incomplete";
        let usage = ended.map(|end| {
            json!({
                "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": end.cached_tokens},
                "output_tokens": end.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": answer.thinking_tokens},
                "total_tokens": answer.prompt_tokens + end.completion_tokens,
            })
        });
        let last = answer.blocks.len().saturating_sub(1);
        let item = |(index, block)| self.item(index, block, &block.text, status_of(answer, index == last));
        Response {
            id: format!("resp_{}", self.id),
            object: "response",
            created_at: self.created_at,
            status,
            error: None,
            incomplete_details: incomplete.then(|| json!({"reason": "max_output_tokens"})),
            model: &self.model,
            output: answer.blocks.iter().enumerate().map(item).collect(),
            usage,
            echo: &self.echo,
        }
    }

    fn item<'a>(&self, index: usize, block: &'a Block, text: &'a str, status: &'static str) -> Item<'a> {
        let id = self.item_id(index, block);
        let content = if text.is_empty() { None } else { part(block, text) }.into_iter().collect();
        match &block.kind {
            BlockKind::Text => Item::Message { id, status, role: "assistant", content },
            BlockKind::Thinking => Item::Reasoning { id, status, summary: [], content },
            BlockKind::Call { id: call_id, name } => Item::FunctionCall { id, status, call_id, name, arguments: text },
        }
    }

    fn item_id(&self, index: usize, block: &Block) -> String {
        let prefix = match block.kind {
            BlockKind::Text => "msg",
            BlockKind::Thinking => "rs",
            BlockKind::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{index}", self.id)
    }

    /// An event about an item's text or arguments.
    fn of_text<'a>(&self, index: usize, block: &Block) -> StreamEvent<'a> {
        let is_call = matches!(block.kind, BlockKind::Call { .. });
        StreamEvent {
            item_id: Some(self.item_id(index, block)),
            output_index: Some(index),
            content_index: (!is_call).then_some(0),
            logprobs: (block.kind == BlockKind::Text).then_some([]),
            ..StreamEvent::default()
        }
    }

    /// Keeps a whole response.
    fn keep(&mut self, answer: &Answer, body: impl FnOnce(&Self) -> String) {
        if let Some((store, mut messages)) = self.store.take() {
            messages.push(said(answer));
            store.put(&format!("resp_{}", self.id), Stored::new(body(self), messages));
        }
    }
}

impl Dialect for Responses {
    const KEEP_ALIVE: &'static [u8] = b": keep-alive\n\n";

    fn head_bytes(&self) -> usize {
        self.echo_bytes
    }

    fn begin(&mut self, answer: &Answer, events: &mut Events) {
        for name in ["response.created", "response.in_progress"] {
            let event = StreamEvent { response: Some(self.response(answer)), ..StreamEvent::default() };
            send(name, event, &self.sequence_number, events);
        }
    }

    fn begin_block(&mut self, index: usize, block: &Block, events: &mut Events) {
        let item = Some(self.item(index, block, "", "in_progress"));
        let event = StreamEvent { output_index: Some(index), item, ..StreamEvent::default() };
        send("response.output_item.added", event, &self.sequence_number, events);
        if let part @ Some(_) = part(block, "") {
            let event = StreamEvent { part, logprobs: None, ..self.of_text(index, block) };
            send("response.content_part.added", event, &self.sequence_number, events);
        }
    }

    fn delta(&mut self, index: usize, block: &Block, text: &str, events: &mut Events) {
        let name = match block.kind {
            BlockKind::Text => "response.output_text.delta",
            BlockKind::Thinking => "response.reasoning_text.delta",
            BlockKind::Call { .. } => "response.function_call_arguments.delta",
        };
        let event = StreamEvent { delta: Some(text), ..self.of_text(index, block) };
        send(name, event, &self.sequence_number, events);
    }

    fn end_block(&mut self, answer: &Answer, events: &mut Events) {
        let Some((block, before)) = answer.blocks.split_last() else { return };
        let (index, text) = (before.len(), block.text.as_str());
        let mut event = self.of_text(index, block);
        let name = match &block.kind {
            BlockKind::Text => "response.output_text.done",
            BlockKind::Thinking => "response.reasoning_text.done",
            BlockKind::Call { name, .. } => {
                event.name = Some(name);
                "response.function_call_arguments.done"
            }
        };
        let is_call = event.name.is_some();
        (event.text, event.arguments) = if is_call { (None, Some(text)) } else { (Some(text), None) };
        send(name, event, &self.sequence_number, events);
        if let part @ Some(_) = part(block, text) {
            let event = StreamEvent { part, logprobs: None, ..self.of_text(index, block) };
            send("response.content_part.done", event, &self.sequence_number, events);
        }
        let item = Some(self.item(index, block, text, status_of(answer, true)));
        let event = StreamEvent { output_index: Some(index), item, ..StreamEvent::default() };
        send("response.output_item.done", event, &self.sequence_number, events);
    }

    fn end(&mut self, answer: &Answer, events: &mut Events) {
        let response = self.response(answer);
        let name = if response.status == "incomplete" { "response.incomplete" } else { "response.completed" };
        let event = StreamEvent { response: Some(response), ..StreamEvent::default() };
        send(name, event, &self.sequence_number, events);
        self.keep(answer, |responses| written(&responses.response(answer)));
    }

    fn fail(&mut self, answer: &Answer, error: &ApiError, events: &mut Events) {
        let error = Some(json!({"code": "server_error", "message": error.message}));
        let response = Response { status: "failed", error, ..self.response(answer) };
        let event = StreamEvent { response: Some(response), ..StreamEvent::default() };
        send("response.failed", event, &self.sequence_number, events);
    }

    fn whole(mut self, answer: &Answer) -> String {
        let body = written(&self.response(answer));
        self.keep(answer, |_| body.clone());
        body
    }
}

fn send(name: &'static str, event: StreamEvent<'_>, next: &Cell<u64>, events: &mut Events) {
    let sequence_number = next.replace(next.get() + 1);
    events.named(name, &StreamEvent { r#type: name, sequence_number, ..event });
}

fn written(response: &Response<'_>) -> String {
    serde_json::to_string(response).expect("strings and numbers with string keys are always JSON")
}

/// Of an item, which is the last or not, or of the response. A limit cuts the last item off.
fn status_of(answer: &Answer, is_last: bool) -> &'static str {
    let cut_off = answer.end.as_ref().is_some_and(|end| end.reason == ReplyEnd::Length);
    if cut_off && is_last { "incomplete" } else { "completed" }
}

/// Calls have none.
fn part<'a>(block: &Block, text: &'a str) -> Option<Part<'a>> {
    match block.kind {
        BlockKind::Text => Some(Part::OutputText { text, annotations: [], logprobs: [] }),
        BlockKind::Thinking => Some(Part::ReasoningText { text }),
        BlockKind::Call { .. } => None,
    }
}

/// An answer as a message of the conversation that goes on from it.
fn said(answer: &Answer) -> ChatMessage {
    let mut message = ChatMessage::new("assistant", "");
    for Block { kind, text } in &answer.blocks {
        match kind {
            BlockKind::Text => message.content.push_str(text),
            BlockKind::Thinking => message.reasoning_content.get_or_insert_default().push_str(text),
            BlockKind::Call { id, name } => {
                // Arguments that a limit cut off are no JSON.
                let arguments = serde_json::from_str(text).unwrap_or_default();
                let call = Call::Function { name: name.clone(), arguments };
                message.tool_calls.push(ToolCall { id: id.clone(), call });
            }
        }
    }
    message
}
