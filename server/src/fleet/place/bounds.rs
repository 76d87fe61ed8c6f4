//! What a host may say of a sequence: no more than an engine could. One that says more is broken, and is given up.

use super::super::wire::{Malformed, Passed};
use crate::drafts::{DraftStep, MOST_DRAFTS};
use crate::engine::{GeneratedToken, Handed};

/// Why a message of a host cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum Fault {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("it broke the protocol: {0}")]
    Impossible(String),
}

/// Holds the events of one message to what was asked for `sequence`, and to a vocabulary of so many tokens. With it all
/// that a host can have this end keep of a sequence is bounded.
///
/// # Errors
/// Says what no engine would send.
pub(in super::super) fn check(events: &[Passed], sequence: &Handed, vocab_size: u32) -> Result<(), Fault> {
    let (request, told) = (&sequence.request, sequence.generated.len());
    let left = (request.max_tokens as usize).saturating_sub(told);
    let (mut tokens, mut drafts) = (0, 0);
    for (place, event) in events.iter().enumerate() {
        match event {
            Passed::Prompt { cached_tokens, logprobs, prefill: _ } => {
                holds(place == 0 && told == 0, || "a prompt that was computed, behind its first token".into())?;
                let (cached, most) = (*cached_tokens as usize, request.prompt.len());
                holds(cached <= most, || format!("{cached} cached tokens of a prompt of {most}"))?;
                let most = request.prompt_logprobs.map_or(0, |_| most - 1);
                let known = logprobs.len();
                holds(known <= most, || {
                    format!("log-probabilities of {known} tokens of a prompt, where {most} may be")
                })?;
                logprobs.iter().try_for_each(|token| scored(token, request.prompt_logprobs, vocab_size))?;
            }
            Passed::Drafts(DraftStep { drafted, accepted }) => {
                drafts += 1;
                let can_be = (1..=MOST_DRAFTS).contains(drafted) && accepted <= drafted;
                holds(can_be, || format!("{accepted} of {drafted} drafts accepted, where a step has {MOST_DRAFTS}"))?;
            }
            Passed::Token(token) => {
                tokens += 1;
                scored(token, request.logprobs, vocab_size)?;
            }
            Passed::Finished(_) | Passed::Failed(_) | Passed::Contradiction => {
                holds(place + 1 == events.len(), || "more of a sequence behind its end".into())?;
            }
        }
    }
    holds(tokens <= left, || format!("{} tokens, where {} were asked for", told + tokens, request.max_tokens))?;
    let is_whole = !matches!(events.last(), None | Some(Passed::Prompt { .. } | Passed::Drafts(_)));
    holds(is_whole, || "a prompt or drafts without what follows them".into())?;
    // Of a step that came to nothing, the end follows.
    holds(drafts <= tokens.max(1), || format!("{drafts} steps with drafts for {tokens} tokens"))
}

/// A token of the vocabulary, with no more likely ones than were asked for.
fn scored(token: &GeneratedToken, asked: Option<u32>, vocab_size: u32) -> Result<(), Fault> {
    let (count, most) = (token.top.len(), asked.unwrap_or(0));
    holds(count <= most as usize, || format!("the {count} most likely tokens, where {most} were asked for"))?;
    let mut ids = token.top.iter().map(|(id, _)| *id).chain([token.id]);
    ids.try_for_each(|id| holds(id < vocab_size, || format!("token {id} of a vocabulary of {vocab_size}")))
}

fn holds(rule: bool, words: impl FnOnce() -> String) -> Result<(), Fault> {
    if rule { Ok(()) } else { Err(Fault::Impossible(words())) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::{FinishReason, Standing};
    use crate::sched::fake_worker::request;

    fn token(id: u32, top: &[u32]) -> Passed {
        Passed::Token(GeneratedToken { id, logprob: None, top: top.iter().map(|&id| (id, -1.0)).collect() })
    }

    fn drafts(drafted: u32, accepted: u32) -> Passed {
        Passed::Drafts(DraftStep { drafted, accepted })
    }

    fn prompt(cached_tokens: u32, logprobs: usize) -> Passed {
        let logprobs = vec![GeneratedToken { id: 1, logprob: Some(-1.0), top: Vec::new() }; logprobs];
        Passed::Prompt { cached_tokens, prefill: Duration::ZERO, logprobs }
    }

    #[test]
    fn what_no_engine_would_send_is_named() {
        let mut asked = request(1, 4, 6, vec![]);
        (asked.logprobs, asked.prompt_logprobs) = (Some(2), Some(0));
        let fresh = Handed::new(asked, Standing::default());
        let begun = Handed { generated: vec![1, 2, 3, 4], ..fresh.clone() };
        let end = || Passed::Finished(FinishReason::Length);
        let failed = || Passed::Failed("why".into());
        for (sequence, events) in [
            (&fresh, vec![prompt(4, 3), token(99, &[0, 99]), drafts(32, 1), token(1, &[]), token(2, &[])]),
            (&begun, vec![drafts(1, 0), token(1, &[]), token(2, &[]), end()]),
            (&begun, vec![end()]),
            (&fresh, vec![prompt(0, 0), failed()]),
            (&begun, vec![drafts(3, 0), failed()]),
        ] {
            check(&events, sequence, 100).unwrap();
        }
        for (sequence, events, says) in [
            (&fresh, vec![token(100, &[])], "token 100 of a vocabulary of 100"),
            (&fresh, vec![token(1, &[2, 100])], "token 100 of a vocabulary of 100"),
            (&fresh, vec![token(1, &[1, 2, 3])], "the 3 most likely tokens, where 2 were asked for"),
            (&fresh, vec![prompt(5, 0), token(1, &[])], "5 cached tokens of a prompt of 4"),
            (&fresh, vec![prompt(0, 4), token(1, &[])], "of 4 tokens of a prompt, where 3 may be"),
            (&fresh, vec![token(1, &[]), prompt(0, 0), token(1, &[])], "behind its first token"),
            (&begun, vec![prompt(0, 0), token(1, &[])], "behind its first token"),
            (&begun, vec![token(1, &[]), token(1, &[]), token(1, &[])], "7 tokens, where 6 were asked for"),
            (&begun, vec![drafts(33, 0), token(1, &[])], "0 of 33 drafts accepted, where a step has 32"),
            (&begun, vec![drafts(0, 0), token(1, &[])], "0 of 0 drafts accepted"),
            (&begun, vec![drafts(2, 3), token(1, &[])], "3 of 2 drafts accepted"),
            (&begun, vec![drafts(2, 1), drafts(2, 1), token(1, &[])], "2 steps with drafts for 1 tokens"),
            (&begun, vec![drafts(2, 1)], "without what follows them"),
            (&begun, vec![], "without what follows them"),
            (&begun, vec![end(), token(1, &[])], "behind its end"),
        ] {
            let error = check(&events, sequence, 100).unwrap_err().to_string();
            assert!(error.contains("it broke the protocol") && error.contains(says), "{error}");
        }
    }
}
