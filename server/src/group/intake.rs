//! The driver towards the front end: submissions and cancels in, tokens and ends out.

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::driver::{BURST, Driver, OwnedStream};
use super::life::{Life, unwanted};
use crate::engine::{Command, SequenceEvent, SequenceRequest, SequenceStream, Submission, SubmitError};
use crate::metrics::Ended;
use crate::sched::{Action, Event};

impl Driver {
    /// Takes `first` and what else is there.
    pub(super) fn commands(&mut self, first: Option<Command>) -> Result<(), String> {
        let mut next = first;
        let mut taken = 0;
        while let Some(command) = next {
            match command {
                Command::Submit(submission) => self.submit(submission),
                Command::Cancel { sequence, because } => {
                    if let Some(stream) = self.streams.remove(&sequence)
                        && let Some(how) = unwanted(because)
                    {
                        stream.life.end(how, Instant::now(), &self.channels.metrics);
                    }
                    self.apply(Event::Cancel { sequence })?;
                }
            }
            taken += 1;
            // What is taken out of the channel is handled: nothing more is taken once the burst is full.
            next = if taken < BURST { self.channels.commands.try_recv().ok() } else { None };
        }
        Ok(())
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { request, submitted, reply } = submission;
        let answer = self.queue(request, submitted);
        // Nobody waits for the answer any more: the stream in it cancels the sequence as it is dropped.
        let _ = reply.send(answer);
    }

    fn queue(&mut self, request: SequenceRequest, submitted: Instant) -> Result<SequenceStream, SubmitError> {
        if let Some(reason) = &self.closed {
            return Err(SubmitError::Unavailable(reason.clone()));
        }
        let room = request.max_tokens as usize + 2;
        let life = Life::new(request.prompt.len(), submitted);
        let sequence = self.last_sequence + 1;
        self.last_sequence = sequence;
        let mut actions = Vec::new();
        self.scheduler.apply(Event::Submit { sequence, request }, &mut actions);
        for action in actions {
            if let Action::Refused { error, .. } = action {
                return Err(error);
            }
        }
        let (sender, events) = mpsc::channel(room);
        self.streams.insert(sequence, OwnedStream { events: sender, life });
        self.channels.metrics.set_load(self.scheduler.load());
        Ok(SequenceStream::new(sequence, events, self.channels.commands_back.clone()))
    }

    /// Applies an event and does what follows; the error is a fault of the group.
    pub(super) fn apply(&mut self, event: Event) -> Result<(), String> {
        let mut actions = std::mem::take(&mut self.actions);
        self.scheduler.apply(event, &mut actions);
        let (mut result, now) = (Ok(()), Instant::now());
        for action in actions.drain(..) {
            match action {
                Action::Token { sequence, token } => self.send(sequence, SequenceEvent::Token(token), now),
                Action::Finished { sequence, reason } => self.send(sequence, SequenceEvent::Finished(reason), now),
                Action::Failed { sequence, reason } => self.send(sequence, SequenceEvent::Failed(reason), now),
                Action::Fault(reason) => result = Err(format!("rank 0 broke the protocol: {reason}")),
                Action::Queued { .. } | Action::Refused { .. } => {
                    unreachable!("submissions are answered where they arrive")
                }
            }
        }
        self.actions = actions;
        self.channels.metrics.set_load(self.scheduler.load());
        result
    }

    fn send(&mut self, sequence: u64, event: SequenceEvent, now: Instant) {
        let Some(stream) = self.streams.get_mut(&sequence) else { return };
        let ended = match &event {
            SequenceEvent::Token(_) => {
                stream.life.token(now, &self.channels.metrics);
                None
            }
            SequenceEvent::Finished(reason) => Some(Ended::from(*reason)),
            SequenceEvent::Failed(_) => Some(Ended::Error),
        };
        // A reader that went away cancels by itself; the channel has room for every token and the end.
        let sent = stream.events.try_send(event);
        debug_assert!(!matches!(sent, Err(mpsc::error::TrySendError::Full(_))), "sequence {sequence} has no room");
        if let Some(how) = ended
            && let Some(stream) = self.streams.remove(&sequence)
        {
            stream.life.end(how, now, &self.channels.metrics);
        }
    }

    pub(super) fn fail_all(&mut self, reason: &str) {
        let mut sequences: Vec<u64> = self.streams.keys().copied().collect();
        sequences.sort_unstable();
        for sequence in sequences {
            self.send(sequence, SequenceEvent::Failed(reason.into()), Instant::now());
            self.apply(Event::Cancel { sequence }).expect("a cancel makes no fault");
        }
    }
}
