//! What came of the host's sequences, to their readers; and readers that are behind.

use looplane_proto::fleet::v1::{Events, Reader, front_message};
use tokio::time::Instant;

use super::super::wire::{self, Passed};
use super::Place;
use super::bounds::{Fault, check};
use crate::engine::{Moved, SequenceEvent};
use crate::metrics::Ended;

impl Place {
    pub(super) fn events(&mut self, Events { sequence: number, events }: Events) -> Result<(), Fault> {
        let events: Vec<Passed> = events.into_iter().map(wire::event_of).collect::<Result<_, _>>()?;
        let vocab_size = self.session.as_ref().map_or(0, |session| session.model.vocab_size);
        // One that was cancelled while this was on its way.
        let Some(Moved { sequence, .. }) = self.sequences.get(&number) else { return Ok(()) };
        check(&events, sequence, vocab_size)?;
        events.into_iter().for_each(|event| self.event(number, event));
        Ok(())
    }

    fn event(&mut self, number: u64, passed: Passed) {
        let Some(Moved { sequence, sender, life, .. }) = self.sequences.get_mut(&number) else { return };
        let (now, metrics) = (Instant::now(), &self.metrics);
        let event = match passed {
            Passed::Prompt { cached_tokens, prefill, logprobs } => {
                life.admitted(now.checked_sub(prefill).unwrap_or(now), metrics);
                (sequence.was_admitted, sequence.cached_tokens) = (true, cached_tokens);
                SequenceEvent::Prompt { cached_tokens, times: Box::new(life.times(now)), logprobs }
            }
            Passed::Drafts(step) => {
                metrics.drafts(step);
                SequenceEvent::Drafts(step)
            }
            Passed::Token(token) => {
                sequence.token(token.id);
                SequenceEvent::Token(token)
            }
            Passed::Finished(reason) => SequenceEvent::Finished(reason),
            Passed::Failed(reason) => SequenceEvent::Failed(reason),
            Passed::Contradiction => SequenceEvent::Contradiction,
        };
        let ended = event.count(life, now, metrics);
        sender.send(event);
        if let Some(how) = ended {
            self.end(number, how);
        } else if sender.is_behind() && self.behind.insert(number) {
            self.send(front_message::Message::Reader(Reader { sequence: number, behind: true }));
        }
    }

    /// Readers that have caught up are sent more.
    pub(super) fn notice_readers(&mut self) {
        let Self { behind, sequences, session, .. } = self;
        behind.retain(|&sequence| {
            let is_behind = sequences.get(&sequence).is_some_and(|moved| !moved.sender.has_caught_up());
            if let Some(session) = session.as_ref().filter(|_| !is_behind) {
                session.send(front_message::Message::Reader(Reader { sequence, behind: false }));
            }
            is_behind
        });
    }

    pub(super) fn end(&mut self, number: u64, how: Ended) {
        self.behind.remove(&number);
        if let Some(moved) = self.sequences.remove(&number) {
            moved.life.end(how, Instant::now(), &self.metrics);
        }
    }
}
