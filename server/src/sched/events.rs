//! What goes into the scheduler and what comes out, besides submissions and plans.

use looplane_proto::worker::v1::Outcome;

use super::limits::GroupShape;
use super::request::{FinishReason, GeneratedToken};

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// Nobody wants the rest of a sequence. Unknown numbers are ignored: it may have ended on the way.
    Cancel {
        /// Its number.
        sequence: u64,
    },
    /// The reader of a sequence fell behind, or caught up. Unknown numbers are ignored.
    Reader {
        /// The sequence's number.
        sequence: u64,
        /// It has many tokens yet to take.
        behind: bool,
    },
    /// A group is ready for its first plan.
    GroupReady(GroupShape),
    /// The group reported a step.
    Outcome(Outcome),
}

/// What the owner of the scheduler has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// The prompt of a sequence was computed: its first token follows.
    Prompt {
        /// The sequence's number.
        sequence: u64,
        /// Tokens of the prompt that were not computed, since cached pages held them.
        cached_tokens: u32,
        /// The prompt's tokens from the second on with their log-probabilities, if these are wanted.
        logprobs: Vec<GeneratedToken>,
    },
    /// The next token of a sequence.
    Token {
        /// Its number.
        sequence: u64,
        /// The token.
        token: GeneratedToken,
    },
    /// The sequence ended by itself.
    Finished {
        /// Its number.
        sequence: u64,
        /// Why.
        reason: FinishReason,
    },
    /// The sequence was given up.
    Failed {
        /// Its number.
        sequence: u64,
        /// Why, in a sentence.
        reason: String,
    },
    /// The sequence has ended, because no token may follow: the request contradicts itself.
    Contradiction {
        /// Its number.
        sequence: u64,
    },
    /// The group broke the protocol, as the text says. Stop it and call [`super::Scheduler::group_lost`].
    Fault(String),
}

/// What a loss of the group is put down to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blame {
    /// Nothing that is known.
    Nobody,
    /// A sequence that was computed alone, on a group that had just proven itself. It has failed.
    Sequence {
        /// Its number.
        sequence: u64,
        /// [`super::SequenceRequest::fingerprint`] of its request.
        fingerprint: u64,
        /// Losses while it was computed, this one included.
        losses: u32,
    },
    /// The group itself: it could not compute the few tokens with which it was to prove itself.
    Group,
}
