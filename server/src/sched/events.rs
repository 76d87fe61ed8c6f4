//! What goes into the scheduler and what comes out, besides plans.

use looplane_proto::worker::v1::Outcome;

use crate::engine::{FinishReason, GeneratedToken, SequenceRequest, SubmitError};

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A sequence arrived. Answered by [`Action::Queued`] or [`Action::Refused`].
    Submit {
        /// Its number, higher than all before.
        sequence: u64,
        /// What to generate.
        request: SequenceRequest,
    },
    /// Nobody wants the rest of a sequence. Unknown numbers are ignored: it may have ended on the way.
    Cancel {
        /// Its number.
        sequence: u64,
    },
    /// A group is ready for its first plan.
    GroupReady {
        /// Pages of its KV cache.
        kv_pages: u32,
        /// Positions a page holds, at least 1.
        page_positions: u32,
    },
    /// The group reported a step.
    Outcome(Outcome),
    /// The group is gone. Everything that ran waits again.
    GroupLost,
}

/// What the owner of the scheduler has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// The submission was taken.
    Queued {
        /// Its number.
        sequence: u64,
    },
    /// The submission was not taken; its number is forgotten.
    Refused {
        /// Its number.
        sequence: u64,
        /// Why.
        error: SubmitError,
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
    /// The group broke the protocol, as the text says. Stop it and report [`Event::GroupLost`].
    Fault(String),
}
