//! A choice as its client reads it: in parts, with names for its calls.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures::{Stream, StreamExt, stream::SelectAll};
use uuid::Uuid;

use super::{Choice, ChoiceEvent, GenerateError, Generation, Place};
use crate::{
    drafts::DraftStep,
    engine::{FinishReason, GeneratedToken},
    reply::{Format, Part, Reply, ToolFormat},
    request::ValidRequest,
    text::{OutputToken, Piece},
};

/// A request whose sequences are queued or running. Dropping it cancels them.
#[derive(Debug)]
pub struct Replies {
    /// What was admitted.
    pub request: ValidRequest,
    /// By index.
    pub choices: Vec<ReplyChoice>,
    /// Its place among the requests served at one time.
    pub place: Place,
}

impl Replies {
    /// `include_reasoning`: what was thought before an answer is told.
    pub fn new(generation: Generation, include_reasoning: bool) -> Self {
        let Generation { request, choices, place, .. } = generation;
        let reply = |choice: Choice| {
            let prompt = request.prompt_of(choice.index);
            ReplyChoice::new(choice, &request.format, prompt.thinks, include_reasoning)
        };
        let choices = choices.into_iter().map(reply).collect();
        Self { request, choices, place }
    }
}

/// One choice. Dropping it cancels the sequence.
#[derive(Debug)]
pub struct ReplyChoice {
    choice: Choice,
    reply: Reply,
    tools: Option<ToolFormat>,
    include_reasoning: bool,
    /// A call has been told of.
    called: bool,
    /// The end, known but not yet told.
    end: Option<ReplyEvent>,
}

/// What a choice made known.
#[derive(Debug)]
pub enum ReplyEvent {
    /// More output, and the tokens behind it; each may come without the other.
    Delta {
        /// In order.
        told: Vec<Told>,
        /// In order.
        tokens: Vec<OutputToken>,
        /// As in [`Piece`].
        generated: Vec<u32>,
    },
    /// The end.
    Finished {
        /// Why it ended.
        reason: ReplyEnd,
        /// What the output stopped at.
        stop_text: Option<String>,
        /// As in [`ChoiceEvent::Finished`].
        completion_tokens: u32,
        /// As in [`ChoiceEvent::Finished`].
        generated: Vec<u32>,
        /// As in [`ChoiceEvent::Finished`].
        cached_tokens: u32,
        /// As in [`ChoiceEvent::Finished`].
        drafts: Vec<DraftStep>,
        /// As in [`ChoiceEvent::Finished`].
        prompt_logprobs: Vec<GeneratedToken>,
    },
}

/// A part of an answer, or more of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// Text for the reader.
    Content(String),
    /// What was thought before it.
    Reasoning(String),
    /// A call begins.
    Call {
        /// Of the call in the answer, from 0.
        index: u32,
        /// Its name among the calls of a conversation.
        id: String,
        /// The tool's.
        name: String,
    },
    /// More of what a call hands over.
    Arguments {
        /// Of the call.
        index: u32,
        /// Of a JSON object, as the model wrote it.
        text: String,
    },
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyEnd {
    /// By itself, or at a stop text.
    Stop,
    /// At a limit, also where that cuts a call off.
    Length,
    /// With calls.
    ToolCalls,
}

impl ReplyEnd {
    fn new(reason: FinishReason, called: bool) -> Self {
        match reason {
            FinishReason::Stop if called => Self::ToolCalls,
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }

    /// OpenAI's word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

impl ReplyChoice {
    /// `thinks`: the prompt has begun the thinking.
    fn new(choice: Choice, format: &Format, thinks: bool, include_reasoning: bool) -> Self {
        let (reply, tools) = (Reply::new(format, thinks), format.tools);
        Self { choice, reply, tools, include_reasoning, called: false, end: None }
    }

    /// Its number in the response.
    pub fn index(&self) -> u32 {
        self.choice.index
    }

    /// What becomes known next; `None` after the end or an error.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<ReplyEvent, GenerateError>>> {
        if let Some(end) = self.end.take() {
            return Poll::Ready(Some(Ok(end)));
        }
        let event = ready!(self.choice.poll_next(context));
        Poll::Ready(event.map(|event| event.map(|event| self.read(event))))
    }

    /// As [`ReplyChoice::poll_next`].
    pub async fn next(&mut self) -> Option<Result<ReplyEvent, GenerateError>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn read(&mut self, event: ChoiceEvent) -> ReplyEvent {
        match event {
            ChoiceEvent::Delta(Piece { text, tokens, generated }) => {
                let parts = self.reply.push(&text);
                if self.reply.is_over() {
                    self.choice.complete();
                }
                ReplyEvent::Delta { told: self.tell(parts), tokens, generated }
            }
            ChoiceEvent::Finished { reason, completion_tokens, generated, cached_tokens, drafts, prompt_logprobs } => {
                let parts = self.reply.finish();
                let told = self.tell(parts);
                let reason = ReplyEnd::new(reason, self.called);
                let stop_text = self.choice.stop_text().map(str::to_owned);
                let end = ReplyEvent::Finished {
                    reason,
                    stop_text,
                    completion_tokens,
                    generated,
                    cached_tokens,
                    drafts,
                    prompt_logprobs,
                };
                if told.is_empty() {
                    return end;
                }
                self.end = Some(end);
                ReplyEvent::Delta { told, tokens: Vec::new(), generated: Vec::new() }
            }
        }
    }

    fn tell(&mut self, parts: Vec<Part>) -> Vec<Told> {
        let told = parts.into_iter().filter_map(|part| match part {
            Part::Content(text) => Some(Told::Content(text)),
            Part::Reasoning(text) => self.include_reasoning.then_some(Told::Reasoning(text)),
            Part::Call { index, name } => {
                self.called = true;
                Some(Told::Call { index, id: call_id(self.tools), name })
            }
            Part::Arguments { index, text } => Some(Told::Arguments { index, text }),
            Part::CallEnd { .. } => None,
        });
        told.collect()
    }
}

/// With the choice's index.
impl Stream for ReplyChoice {
    type Item = (u32, Result<ReplyEvent, GenerateError>);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let index = self.index();
        Self::poll_next(&mut self, context).map(|event| event.map(|event| (index, event)))
    }
}

/// The choices of a response that is streamed, as they come. Dropping them cancels the sequences.
#[derive(Debug)]
pub enum Choices {
    /// A single one, as most requests have, need not be found among others.
    One(Box<ReplyChoice>),
    /// More of them.
    Several(SelectAll<ReplyChoice>),
}

impl From<Vec<ReplyChoice>> for Choices {
    fn from(mut choices: Vec<ReplyChoice>) -> Self {
        match choices.len() {
            1 => Self::One(Box::new(choices.remove(0))),
            _ => Self::Several(choices.into_iter().collect()),
        }
    }
}

/// With the choice's index.
impl Stream for Choices {
    type Item = (u32, Result<ReplyEvent, GenerateError>);

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.get_mut() {
            Self::One(choice) => choice.poll_next_unpin(context),
            Self::Several(choices) => choices.poll_next_unpin(context),
        }
    }
}

/// A new name for a call, random so that no two of a conversation are alike. Mistral's templates refuse any but nine
/// letters and digits.
fn call_id(format: Option<ToolFormat>) -> String {
    let id = Uuid::new_v4().simple().to_string();
    match format {
        Some(ToolFormat::Mistral) => id[..9].to_owned(),
        _ => format!("call_{id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calls_name_is_one_that_its_models_template_takes_back() {
        let of = |format| call_id(Some(format));
        assert!(of(ToolFormat::Hermes).starts_with("call_") && of(ToolFormat::Hermes) != of(ToolFormat::Hermes));
        let short = of(ToolFormat::Mistral);
        assert!(short.len() == 9 && short.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{short}");
    }
}
