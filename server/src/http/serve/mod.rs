//! What answers requests for text, and shows what they become: OpenAI's and Anthropic's shapes.

pub(super) mod anthropic;
pub(super) mod completions;
mod dialect;
mod events;
pub(super) mod message;
pub(super) mod messages;
pub(super) mod parse;
pub(super) mod render;
pub(super) mod responses;
pub(super) mod tokens;
pub(super) mod tools;
pub(super) mod wire;

// What the rooms of `http` have in common.
use super::*;
