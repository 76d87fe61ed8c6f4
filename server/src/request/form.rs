//! What an answer is held to, put together from what a request says in several fields.

use super::{FieldError, RequestError, tools::Calling};
use crate::{
    reply::{CallGrammar, Format},
    text::{Body, Constraint, Form, Thinking},
};

/// What the answer is held to, with the field that says so: what the client says; calls; one or the other, where it may
/// call; or nothing up to a call, where that is strict. Thinking stands in front where the model thinks; `thinks`: the
/// prompt has begun it.
pub(super) fn form(
    constraint: Option<(String, Constraint)>,
    calls: Option<(CallGrammar, Calling)>,
    format: &Format,
    thinks: bool,
) -> Option<(String, Form)> {
    let (field, body) = match (constraint, calls) {
        // Nothing but a call is an answer then.
        (_, Some((calls, Calling::Required))) => ("tools".to_owned(), Body::Calls(calls)),
        (Some((field, constraint)), Some((calls, _))) => (field, Body::Either(constraint, calls)),
        (Some((field, constraint)), None) => (field, Body::Constraint(constraint)),
        // Calls that nothing announces are told from text by their end.
        (None, Some((calls, Calling::Strict))) if calls.marker.is_some() => {
            ("tools".to_owned(), Body::Announced(calls))
        }
        (None, _) => return None,
    };
    let thinking = format.reasoning.then_some(if thinks { Thinking::Begun } else { Thinking::Tagged });
    Some((field, Form { body, thinking }))
}

/// The form says where an answer ends, so nothing else may.
pub(super) fn check_end(min_tokens: u32, ignore_eos: bool) -> Result<(), RequestError> {
    let wrong = [("min_tokens", min_tokens > 0), ("ignore_eos", ignore_eos)].into_iter().find(|of| of.1);
    let message = "does not go with an answer that is held to a form, which says where it ends";
    wrong.map_or(Ok(()), |(field, _)| Err(RequestError::field(field, FieldError::Value, message)))
}
