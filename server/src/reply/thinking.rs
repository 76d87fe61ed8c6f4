//! Tells the thinking at the start of a reply from what follows it.

use super::{Parts, marker::Marker};

/// Begins the thinking, at the very start of a reply or as the end of its prompt.
pub(super) const OPEN: &str = "<think>";
/// Ends it.
pub(super) const CLOSE: &str = "</think>";

/// Where in a reply.
#[derive(Debug)]
pub(super) enum Thinking {
    /// At its start, where it may begin.
    Start(Marker),
    /// In it. Whitespace between it and its tags only sets it apart.
    Inside(Marker),
    /// Right behind it.
    Behind,
    /// Behind it, or there is none: tags are text like any other.
    Answer,
}

impl Thinking {
    /// `begun`: in the prompt, from whose last character it goes on.
    pub(super) fn new(begun: bool) -> Self {
        if begun { Self::Inside(Marker::new(CLOSE)) } else { Self::Start(Marker::new(OPEN)) }
    }

    /// Takes a character; what is known not to be thinking is returned.
    pub(super) fn push(&mut self, c: char, parts: &mut Parts) -> String {
        let mut passed = String::new();
        match self {
            Self::Start(open) => {
                if open.push(c, &mut passed).is_some() {
                    *self = Self::Inside(Marker::behind(CLOSE));
                } else if !passed.is_empty() {
                    passed.push_str(&open.release());
                    *self = Self::Answer;
                }
                passed
            }
            Self::Inside(close) => {
                let ended = close.push(c, &mut passed).is_some();
                parts.reasoning(&passed);
                if ended {
                    *self = Self::Behind;
                }
                String::new()
            }
            Self::Behind if c.is_whitespace() => String::new(),
            Self::Behind | Self::Answer => {
                *self = Self::Answer;
                c.into()
            }
        }
    }

    /// What was held, at the end of the reply, and is not thinking.
    pub(super) fn finish(&mut self, parts: &mut Parts) -> String {
        match self {
            Self::Start(open) => open.release(),
            Self::Inside(close) => {
                parts.reasoning(close.release().trim_end());
                String::new()
            }
            Self::Behind | Self::Answer => String::new(),
        }
    }
}
