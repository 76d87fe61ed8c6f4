//! The events of a sequence, from who computes it to who asked for it. Both ends know where it is computed: that may
//! change while it lives.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::command::Command;
use crate::drafts::DraftStep;
use crate::sched::{FinishReason, GeneratedToken};

/// What a sequence's owner receives, in order; `Finished` or `Failed` is last.
#[derive(Debug, Clone, PartialEq)]
pub enum SequenceEvent {
    /// The prompt was computed; once, before the first token. [`SequenceStream`] keeps it.
    Prompt {
        /// Tokens of it that were not computed, since cached pages held them.
        cached_tokens: u32,
        /// When it came how far.
        times: Times,
        /// The prompt's tokens from the second on with their log-probabilities, if these are wanted.
        logprobs: Vec<GeneratedToken>,
    },
    /// A step had drafts; before its tokens. [`SequenceStream`] keeps it.
    Drafts(DraftStep),
    /// The next token.
    Token(GeneratedToken),
    /// The end.
    Finished(FinishReason),
    /// The sequence was given up; the text says why.
    Failed(String),
}

/// When a sequence came how far, as the engine has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Handed over.
    pub submitted: Instant,
    /// Got its first slot.
    pub admitted: Instant,
    /// Had its first token.
    pub computed: Instant,
}

/// Why nobody wants the rest of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwanted {
    /// Its owner has what it needs: a stop text was found.
    Complete,
    /// Its owner went away.
    Abandoned,
    /// The server gives its request up: another of its sequences failed, or the server ends.
    GivenUp,
}

/// Where a sequence is computed: its number there, and to whom a cancel goes.
#[derive(Debug)]
struct Home {
    sequence: u64,
    commands: mpsc::UnboundedSender<Command>,
}

/// Makes the two ends of a sequence that `sequence` numbers where `commands` go, and that may get `max_tokens`.
pub fn sequence(
    sequence: u64,
    max_tokens: u32,
    commands: mpsc::UnboundedSender<Command>,
) -> (SequenceSender, SequenceStream) {
    // Room for every token, each in a step with drafts, for the prompt and the end: the engine never waits for a slow
    // reader, and the buffer is bounded.
    let (events, receiver) = mpsc::channel(2 * max_tokens as usize + 3);
    let stream = SequenceStream::new(sequence, receiver, commands);
    (SequenceSender { events, home: stream.home.clone() }, stream)
}

/// The engine's end of a sequence.
#[derive(Debug)]
pub struct SequenceSender {
    events: mpsc::Sender<SequenceEvent>,
    home: Arc<Mutex<Home>>,
}

impl SequenceSender {
    /// Hands an event on; a reader that went away cancels by itself.
    pub fn send(&self, event: SequenceEvent) {
        let sent = self.events.try_send(event);
        debug_assert!(!matches!(sent, Err(mpsc::error::TrySendError::Full(_))), "there is room for every event");
    }

    /// Events that the reader is yet to take.
    pub fn unread(&self) -> usize {
        self.events.max_capacity() - self.events.capacity()
    }

    /// The sequence is computed by another from now on, as its number `sequence`. False if its reader is gone, who
    /// said so where it was computed before.
    #[must_use]
    pub fn move_to(&self, sequence: u64, commands: mpsc::UnboundedSender<Command>) -> bool {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Home { sequence, commands };
        // Behind the lock: a reader that goes closes the channel before it asks where to cancel.
        !self.events.is_closed()
    }
}

/// The events of one sequence. Dropping it cancels the sequence: slot and pages are free one step later.
#[derive(Debug)]
pub struct SequenceStream {
    home: Arc<Mutex<Home>>,
    events: mpsc::Receiver<SequenceEvent>,
    /// Tokens that the reader took, and of all readers.
    taken: u64,
    all_taken: Counter,
    cached_tokens: u32,
    times: Option<Times>,
    prompt_logprobs: Vec<GeneratedToken>,
    drafts: Vec<DraftStep>,
    ended: bool,
    because: Unwanted,
}

impl SequenceStream {
    /// The events of the sequence that is number `sequence` where `commands` go; [`sequence`] makes both ends.
    pub fn new(sequence: u64, events: mpsc::Receiver<SequenceEvent>, commands: mpsc::UnboundedSender<Command>) -> Self {
        Self {
            home: Arc::new(Mutex::new(Home { sequence, commands })),
            events,
            taken: 0,
            all_taken: Counter::default(),
            cached_tokens: 0,
            times: None,
            prompt_logprobs: Vec::new(),
            drafts: Vec::new(),
            ended: false,
            because: Unwanted::Abandoned,
        }
    }

    /// Counts every token that the reader takes in `counter`, too: what clients are told of is what is counted.
    pub fn counted_in(mut self, counter: Counter) -> Self {
        self.all_taken = counter;
        self
    }

    /// Tokens of the prompt that were not computed, since cached pages held them; known with the first token.
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// When it came how far; known with the first token.
    pub fn times(&self) -> Option<Times> {
        self.times
    }

    /// The prompt's tokens from the second on with their log-probabilities, if these are wanted; known with the first
    /// token, once.
    pub fn take_prompt_logprobs(&mut self) -> Vec<GeneratedToken> {
        std::mem::take(&mut self.prompt_logprobs)
    }

    /// Steps with drafts, up to that of the last token taken; once.
    pub fn take_drafts(&mut self) -> Vec<DraftStep> {
        std::mem::take(&mut self.drafts)
    }

    /// The next token or the end; `None` after it, or if the engine is gone.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<SequenceEvent>> {
        let event = loop {
            match ready!(self.events.poll_recv(context)) {
                Some(SequenceEvent::Prompt { cached_tokens, times, logprobs }) => {
                    (self.cached_tokens, self.times, self.prompt_logprobs) = (cached_tokens, Some(times), logprobs);
                }
                Some(SequenceEvent::Drafts(step)) => self.drafts.push(step),
                event => break event,
            }
        };
        self.ended = !matches!(event, Some(SequenceEvent::Token(_)));
        if !self.ended {
            self.taken += 1;
            self.all_taken.inc();
        }
        Poll::Ready(event)
    }

    /// As [`SequenceStream::poll_next`].
    pub async fn next(&mut self) -> Option<SequenceEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Lets the sequence go and says why, where dropping it says that nobody is there any more.
    pub fn let_go(mut self, because: Unwanted) {
        self.because = because;
    }
}

impl Drop for SequenceStream {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // Before it is asked where to: `SequenceSender::move_to` says why.
        self.events.close();
        let (taken, because) = (self.taken, self.because);
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        // An engine that is gone has nothing left to cancel.
        let _ = home.commands.send(Command::Cancel { sequence: home.sequence, taken, because });
    }
}
