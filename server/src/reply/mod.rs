//! What a chat's reply is made of: content, reasoning and tool calls, told apart as the text comes. Pure: pieces of
//! text in, parts out; what comes out does not depend on where the pieces are cut.
//!
//! Nothing is taken back. Text that may still become a marker is held until that is decided; a call that is malformed
//! before its arguments begin is content, whole. Arguments go out as they come, byte for byte the model's own.

mod calls;
mod format;
mod grammar;
mod marker;
mod object;
mod thinking;

pub use format::{
    Format, Parsers, ReasoningParser, THINKING_CLOSES, THINKING_OPENS, ToolCallParser, ToolFormat, thinks_at_the_end_of,
};
pub use grammar::{CallGrammar, calls};

use calls::Calls;
use thinking::Thinking;

/// A part of a reply, or more of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text for the reader.
    Content(String),
    /// Text that was thought before.
    Reasoning(String),
    /// A tool call begins.
    Call {
        /// Its number in the reply, from 0.
        index: u32,
        /// The tool's.
        name: String,
    },
    /// More of the arguments' JSON text.
    Arguments {
        /// The call's number.
        index: u32,
        /// As the model wrote it.
        text: String,
    },
    /// A tool call ends: no more arguments come.
    CallEnd {
        /// The call's number.
        index: u32,
    },
}

/// Reads one reply.
#[derive(Debug)]
pub struct Reply {
    thinking: Option<Thinking>,
    calls: Option<Calls>,
}

impl Reply {
    /// A reply in this format. `thinks`: the prompt has begun the thinking already.
    pub fn new(format: &Format, thinks: bool) -> Self {
        let calls = format.tools.map(|tools| Calls::new(tools, format.names.clone(), format.one_call));
        Self { thinking: format.reasoning.then(|| Thinking::new(thinks)), calls }
    }

    /// Takes the next piece of text: what is known by it.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Parts::default();
        // Most replies have nothing to tell apart.
        if self.thinking.is_none() && self.calls.is_none() {
            parts.content(text);
            return parts.0;
        }
        for c in text.chars() {
            match &mut self.thinking {
                Some(thinking) => {
                    for c in thinking.push(c, &mut parts).chars() {
                        answer(&mut self.calls, c, &mut parts);
                    }
                }
                None => answer(&mut self.calls, c, &mut parts),
            }
        }
        parts.0
    }

    /// What was held, at the end of the reply.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Parts::default();
        let rest = self.thinking.as_mut().map(|thinking| thinking.finish(&mut parts)).unwrap_or_default();
        for c in rest.chars() {
            answer(&mut self.calls, c, &mut parts);
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut parts);
        }
        parts.0
    }

    /// Whether nothing more can come: the only call that is wanted has ended.
    pub fn is_over(&self) -> bool {
        self.calls.as_ref().is_some_and(Calls::is_over)
    }
}

/// A character that is not thinking.
fn answer(calls: &mut Option<Calls>, c: char, parts: &mut Parts) {
    match calls {
        Some(calls) => calls.push(c, parts),
        None => parts.content(c.encode_utf8(&mut [0; 4])),
    }
}

/// Parts that became known; neighbours of a kind are one.
#[derive(Debug, Default)]
struct Parts(Vec<Part>);

impl Parts {
    fn content(&mut self, more: &str) {
        match self.0.last_mut() {
            Some(Part::Content(text)) => text.push_str(more),
            _ if more.is_empty() => {}
            _ => self.0.push(Part::Content(more.into())),
        }
    }

    fn reasoning(&mut self, more: &str) {
        match self.0.last_mut() {
            Some(Part::Reasoning(text)) => text.push_str(more),
            _ if more.is_empty() => {}
            _ => self.0.push(Part::Reasoning(more.into())),
        }
    }

    fn arguments(&mut self, index: u32, more: &str) {
        match self.0.last_mut() {
            Some(Part::Arguments { text, .. }) => text.push_str(more),
            _ => self.0.push(Part::Arguments { index, text: more.into() }),
        }
    }
}

#[cfg(test)]
mod tests;
