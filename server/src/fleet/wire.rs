//! fleet/v1's messages as the seam's own types, and back. Every type is taken apart by all of its fields, so that one
//! that is added cannot be forgotten here.

use std::time::Duration;

use looplane_proto::fleet::v1 as wire;
use wire::submit_error::{Error as WireError, NeverFits, Quarantined, QueueFull, TooLarge};

use crate::drafts::DraftStep;
use crate::engine::{
    EngineState, FinishReason, GeneratedToken, Handed, Load, ModelInfo, SamplingParams, SequenceEvent, SequenceRequest,
    Standing, SubmitError, TokenBounds, Unwanted,
};

/// Of anything that a host counts: the sum over all hosts stays a number.
const MOST_OF_ANY: u64 = 1 << 56;
/// What a host says of its state.
const MOST_WORDS_BYTES: usize = 64 << 10;

/// A message lacks what it cannot be without, or has a value that this protocol does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is missing or unknown in a message of fleet/v1: both ends have to be of one version")]
pub(super) struct Malformed(pub(super) &'static str);

/// What is asked for.
pub(super) fn request(of: &SequenceRequest) -> wire::SequenceRequest {
    let SequenceRequest {
        prompt,
        max_tokens,
        min_tokens,
        stop_tokens,
        sampling,
        logprobs,
        cache_salt,
        grammar,
        token_bounds,
        prompt_logprobs,
    } = of;
    let TokenBounds { allowed, forbidden } = &**token_bounds;
    wire::SequenceRequest {
        prompt: prompt.clone(),
        max_tokens: *max_tokens,
        min_tokens: *min_tokens,
        stop_tokens: stop_tokens.clone(),
        sampling: Some(sampling_params(sampling)),
        logprobs: *logprobs,
        cache_salt: cache_salt.to_string(),
        grammar: grammar.as_deref().map(str::to_owned),
        allowed_tokens: allowed.clone(),
        forbidden_tokens: forbidden.iter().map(|ids| wire::Tokens { ids: ids.clone() }).collect(),
        prompt_logprobs: *prompt_logprobs,
    }
}

/// As [`request`], back.
pub(super) fn request_of(of: wire::SequenceRequest) -> Result<SequenceRequest, Malformed> {
    let wire::SequenceRequest {
        prompt,
        max_tokens,
        min_tokens,
        stop_tokens,
        sampling,
        logprobs,
        cache_salt,
        grammar,
        allowed_tokens,
        forbidden_tokens,
        prompt_logprobs,
    } = of;
    if prompt.is_empty() || max_tokens == 0 {
        return Err(Malformed("the prompt or max_tokens of a request"));
    }
    let forbidden = forbidden_tokens.into_iter().map(|wire::Tokens { ids }| ids).collect();
    Ok(SequenceRequest {
        prompt,
        max_tokens,
        min_tokens,
        stop_tokens,
        sampling: sampling_params_of(sampling.ok_or(Malformed("how tokens are drawn"))?),
        logprobs,
        cache_salt: cache_salt.into(),
        grammar: grammar.map(Into::into),
        token_bounds: TokenBounds { allowed: allowed_tokens, forbidden }.into(),
        prompt_logprobs,
    })
}

fn sampling_params(of: &SamplingParams) -> wire::Sampling {
    let SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        ref logit_bias,
    } = *of;
    wire::Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logit_bias: scored(logit_bias),
    }
}

fn sampling_params_of(of: wire::Sampling) -> SamplingParams {
    let wire::Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logit_bias,
    } = of;
    SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logit_bias: scored_of(logit_bias),
    }
}

fn scored(of: &[(u32, f32)]) -> Vec<wire::Scored> {
    of.iter().map(|&(id, value)| wire::Scored { id, value }).collect()
}

fn scored_of(of: Vec<wire::Scored>) -> Vec<(u32, f32)> {
    of.into_iter().map(|wire::Scored { id, value }| (id, value)).collect()
}

/// Whose sequences are, and how urgent.
pub(super) fn standing(of: &Standing) -> wire::Standing {
    let Standing { priority, owner, weight } = of;
    wire::Standing { priority: *priority, owner: owner.as_deref().map(str::to_owned), weight: *weight }
}

/// As [`standing`], back.
pub(super) fn standing_of(of: Option<wire::Standing>) -> Result<Standing, Malformed> {
    let wire::Standing { priority, owner, weight } = of.ok_or(Malformed("the standing of a request"))?;
    Ok(Standing { priority, owner: owner.map(Into::into), weight })
}

/// A sequence that was begun elsewhere, under its number.
pub(super) fn adopt(sequence: u64, of: &Handed) -> wire::Adopt {
    let Handed {
        request: asked,
        standing: whose,
        generated,
        prompt_logprobs,
        cached_tokens,
        was_admitted,
        losses,
        tokens_since_loss,
    } = of;
    wire::Adopt {
        sequence,
        request: Some(request(asked)),
        standing: Some(standing(whose)),
        generated: generated.clone(),
        prompt_logprobs: prompt_logprobs.iter().cloned().map(token).collect(),
        cached_tokens: *cached_tokens,
        was_admitted: *was_admitted,
        losses: *losses,
        tokens_since_loss: *tokens_since_loss,
    }
}

/// As [`adopt`], back.
pub(super) fn adopted(of: wire::Adopt) -> Result<(u64, Handed), Malformed> {
    let wire::Adopt {
        sequence,
        request,
        standing,
        generated,
        prompt_logprobs,
        cached_tokens,
        was_admitted,
        losses,
        tokens_since_loss,
    } = of;
    let handed = Handed {
        request: request_of(request.ok_or(Malformed("the request of a sequence"))?)?,
        standing: standing_of(standing)?,
        generated,
        prompt_logprobs: prompt_logprobs.into_iter().map(token_of).collect(),
        cached_tokens,
        was_admitted,
        losses,
        tokens_since_loss,
    };
    Ok((sequence, handed))
}

fn token(of: GeneratedToken) -> wire::Token {
    let GeneratedToken { id, logprob, top } = of;
    wire::Token { id, logprob, top: scored(&top) }
}

fn token_of(of: wire::Token) -> GeneratedToken {
    let wire::Token { id, logprob, top } = of;
    GeneratedToken { id, logprob, top: scored_of(top) }
}

/// An event on its way to the front end. Clocks of machines differ: times cross as durations.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Passed {
    /// [`SequenceEvent::Prompt`].
    Prompt { cached_tokens: u32, prefill: Duration, logprobs: Vec<GeneratedToken> },
    /// [`SequenceEvent::Drafts`].
    Drafts(DraftStep),
    /// [`SequenceEvent::Token`].
    Token(GeneratedToken),
    /// [`SequenceEvent::Finished`].
    Finished(FinishReason),
    /// [`SequenceEvent::Failed`].
    Failed(String),
    /// [`SequenceEvent::Contradiction`].
    Contradiction,
}

impl From<SequenceEvent> for Passed {
    fn from(event: SequenceEvent) -> Self {
        match event {
            SequenceEvent::Prompt { cached_tokens, times, logprobs } => {
                Self::Prompt { cached_tokens, prefill: times.computed - times.admitted, logprobs }
            }
            SequenceEvent::Drafts(step) => Self::Drafts(step),
            SequenceEvent::Token(token) => Self::Token(token),
            SequenceEvent::Finished(reason) => Self::Finished(reason),
            SequenceEvent::Failed(reason) => Self::Failed(reason),
            SequenceEvent::Contradiction => Self::Contradiction,
        }
    }
}

/// What came of a sequence.
pub(super) fn event(of: Passed) -> wire::Event {
    use wire::event::{Event, Finish};
    let event = match of {
        Passed::Prompt { cached_tokens, prefill, logprobs } => Event::Prompt(wire::Prompt {
            cached_tokens,
            prefill_ns: u64::try_from(prefill.as_nanos()).unwrap_or(u64::MAX),
            logprobs: logprobs.into_iter().map(token).collect(),
        }),
        Passed::Drafts(DraftStep { drafted, accepted }) => Event::Drafts(wire::Drafts { drafted, accepted }),
        Passed::Token(of) => Event::Token(token(of)),
        Passed::Finished(FinishReason::Stop) => Event::Finished(Finish::Stop.into()),
        Passed::Finished(FinishReason::Length) => Event::Finished(Finish::Length.into()),
        Passed::Failed(reason) => Event::Failed(reason),
        Passed::Contradiction => Event::Finished(Finish::Contradiction.into()),
    };
    wire::Event { event: Some(event) }
}

/// As [`event`], back.
pub(super) fn event_of(of: wire::Event) -> Result<Passed, Malformed> {
    use wire::event::{Event, Finish};
    let wire::Event { event } = of;
    Ok(match event.ok_or(Malformed("an event"))? {
        Event::Prompt(wire::Prompt { cached_tokens, prefill_ns, logprobs }) => Passed::Prompt {
            cached_tokens,
            prefill: Duration::from_nanos(prefill_ns),
            logprobs: logprobs.into_iter().map(token_of).collect(),
        },
        Event::Drafts(wire::Drafts { drafted, accepted }) => Passed::Drafts(DraftStep { drafted, accepted }),
        Event::Token(of) => Passed::Token(token_of(of)),
        Event::Finished(reason) => match Finish::try_from(reason) {
            Ok(Finish::Stop) => Passed::Finished(FinishReason::Stop),
            Ok(Finish::Length) => Passed::Finished(FinishReason::Length),
            Ok(Finish::Contradiction) => Passed::Contradiction,
            Ok(Finish::Unspecified) | Err(_) => return Err(Malformed("the reason of an end")),
        },
        Event::Failed(reason) => Passed::Failed(reason),
    })
}

/// Why a request is not taken.
pub(super) fn refusal(of: SubmitError) -> wire::SubmitError {
    let error = match of {
        SubmitError::QueueFull { waiting, limit, what } => {
            WireError::QueueFull(QueueFull { waiting, limit, what: what.into() })
        }
        SubmitError::TooLarge { needed, available } => WireError::TooLarge(TooLarge { needed, available }),
        SubmitError::NeverFits { asked, limit, what, option } => {
            WireError::NeverFits(NeverFits { asked, limit, what: what.into(), option: option.into() })
        }
        SubmitError::Quarantined { seconds_left } => WireError::Quarantined(Quarantined { seconds_left }),
        SubmitError::Unavailable(why) => WireError::Unavailable(why),
    };
    wire::SubmitError { error: Some(error) }
}

/// As [`refusal`], back.
pub(super) fn refusal_of(of: wire::SubmitError) -> Result<SubmitError, Malformed> {
    let wire::SubmitError { error } = of;
    Ok(match error.ok_or(Malformed("the reason of a refusal"))? {
        WireError::QueueFull(QueueFull { waiting, limit, what }) => {
            SubmitError::QueueFull { waiting, limit, what: what.into() }
        }
        WireError::TooLarge(TooLarge { needed, available }) => SubmitError::TooLarge { needed, available },
        WireError::NeverFits(NeverFits { asked, limit, what, option }) => {
            SubmitError::NeverFits { asked, limit, what: what.into(), option: option.into() }
        }
        WireError::Quarantined(Quarantined { seconds_left }) => SubmitError::Quarantined { seconds_left },
        WireError::Unavailable(why) => SubmitError::Unavailable(why),
    })
}

/// A reader's word that a sequence is not wanted.
pub(super) fn cancel(sequence: u64, because: Unwanted) -> wire::Cancel {
    use wire::cancel::Unwanted as Wire;
    let because = match because {
        Unwanted::Complete => Wire::Complete,
        Unwanted::Abandoned => Wire::Abandoned,
        Unwanted::GivenUp => Wire::GivenUp,
    };
    wire::Cancel { sequence, because: because.into() }
}

/// As [`cancel`], back.
pub(super) fn cancelled(of: wire::Cancel) -> Result<(u64, Unwanted), Malformed> {
    use wire::cancel::Unwanted as Wire;
    let wire::Cancel { sequence, because } = of;
    let because = match Wire::try_from(because) {
        Ok(Wire::Complete) => Unwanted::Complete,
        Ok(Wire::Abandoned) => Unwanted::Abandoned,
        Ok(Wire::GivenUp) => Unwanted::GivenUp,
        Ok(Wire::Unspecified) | Err(_) => return Err(Malformed("the reason of a cancel")),
    };
    Ok((sequence, because))
}

/// What is computed.
pub(super) fn model(of: &ModelInfo) -> wire::Model {
    let ModelInfo { model_digest, architecture, vocab_size, max_context, tensor_parallel, bit_domain } = of.clone();
    wire::Model { model_digest, architecture, vocab_size, max_context, tensor_parallel, bit_domain }
}

/// As [`model`], back.
pub(super) fn model_of(of: wire::Model) -> ModelInfo {
    let wire::Model { model_digest, architecture, vocab_size, max_context, tensor_parallel, bit_domain } = of;
    ModelInfo { model_digest, architecture, vocab_size, max_context, tensor_parallel, bit_domain }
}

/// How a host is, as it says.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HostStatus {
    pub(super) state: EngineState,
    pub(super) load: Load,
    pub(super) page_positions: u64,
    pub(super) kv_bytes: u64,
}

/// How a host is.
pub(super) fn status(of: HostStatus) -> wire::Status {
    use wire::status::State;
    let HostStatus { state, load, page_positions, kv_bytes } = of;
    let Load { running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions } = load;
    let (state, words) = match state {
        EngineState::Loading(words) => (State::Loading, words),
        EngineState::Ready => (State::Ready, String::new()),
        EngineState::Recovering(words) => (State::Recovering, words),
        EngineState::Draining => (State::Draining, String::new()),
        EngineState::Failed(words) => (State::Failed, words),
    };
    let load = wire::Load { running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions };
    wire::Status { state: state.into(), words, load: Some(load), page_positions, kv_bytes }
}

/// As [`status`], back.
pub(super) fn status_of(of: wire::Status) -> Result<HostStatus, Malformed> {
    use wire::status::State;
    let wire::Status { state, words, load, page_positions, kv_bytes } = of;
    let load = load.ok_or(Malformed("the load of a host"))?;
    let wire::Load { running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions } = load;
    let counts = [running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions, page_positions, kv_bytes];
    if counts.iter().any(|&count| count > MOST_OF_ANY) || words.len() > MOST_WORDS_BYTES {
        return Err(Malformed("a load that a host can have, or what it says in few words"));
    }
    let state = match State::try_from(state) {
        Ok(State::Loading) => EngineState::Loading(words),
        Ok(State::Ready) => EngineState::Ready,
        Ok(State::Recovering) => EngineState::Recovering(words),
        Ok(State::Draining) => EngineState::Draining,
        Ok(State::Failed) => EngineState::Failed(words),
        Ok(State::Unspecified) | Err(_) => return Err(Malformed("the state of a host")),
    };
    let load = Load { running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions };
    Ok(HostStatus { state, load, page_positions, kv_bytes })
}

#[cfg(test)]
mod tests;
