//! What crosses the seam: commands go in, and the events of each sequence come out. Both ends of a sequence know where it
//! is computed, to cancel it there: that may change while it lives.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use prometheus_client::metrics::counter::Counter;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::life::{Life, Times, Unwanted};
use super::restart::Restart;
use super::work::Work;
use crate::drafts::DraftStep;
use crate::metrics::{Ended, EngineMetrics};
use crate::sched::{FinishReason, GeneratedToken, Handed, SequenceRequest, Standing, SubmitError};

/// What a sequence's owner receives, in order; `Finished` or `Failed` is last.
#[derive(Debug, Clone, PartialEq)]
pub enum SequenceEvent {
    /// The prompt was computed; once, before the first token. [`SequenceStream`] keeps it.
    Prompt {
        /// Tokens of it that were not computed, since cached pages held them.
        cached_tokens: u32,
        /// When it came how far. Apart, so that tokens are no larger for it.
        times: Box<Times>,
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
    /// The end, because no token may follow: the request contradicts itself.
    Contradiction,
}

impl SequenceEvent {
    /// Takes note of it in the life of its sequence, and counts it; how the sequence ended, if it is the end.
    pub fn count(&self, life: &mut Life, now: Instant, metrics: &EngineMetrics) -> Option<Ended> {
        match self {
            SequenceEvent::Prompt { cached_tokens, .. } => life.prompt(*cached_tokens, now, metrics),
            SequenceEvent::Drafts(_) => {}
            SequenceEvent::Token(_) => life.token(now, metrics),
            SequenceEvent::Finished(reason) => return Some((*reason).into()),
            SequenceEvent::Failed(_) | SequenceEvent::Contradiction => return Some(Ended::Error),
        }
        None
    }
}

/// What the handle sends to the engine.
#[derive(Debug)]
pub enum Command {
    /// A new request.
    Submit(Submission),
    /// Nobody wants the rest of a sequence.
    Cancel {
        /// Its number.
        sequence: u64,
        /// Tokens that its reader took.
        taken: u64,
        /// Why not.
        because: Unwanted,
    },
    /// Another replica can go on with what this one cannot compute now: it is to be handed over.
    HandOver(mpsc::UnboundedSender<Returned>),
    /// Sequences that another replica handed over.
    Adopt(Vec<Moved>),
    /// A replica is to get new workers.
    Restart(Restart),
    /// Whether the task that does all this still takes its turns; answered in its turn.
    Ping(oneshot::Sender<()>),
}

/// Waits until the task behind `commands` takes its next turn: for ever, if it hangs.
///
/// # Errors
/// The task has ended.
pub async fn ping(commands: &mpsc::UnboundedSender<Command>) -> Result<(), oneshot::error::RecvError> {
    let (reply, answer) = oneshot::channel();
    // What cannot be sent is dropped, and the reply in it.
    let _ = commands.send(Command::Ping(reply));
    answer.await
}

/// The sequences of one request on their way to the scheduler.
#[derive(Debug)]
pub struct Submission {
    /// What to generate, at least one.
    pub requests: Vec<SequenceRequest>,
    /// Whose they are, and how urgent.
    pub standing: Standing,
    /// When they were handed over.
    pub submitted: Instant,
    /// Answered once: all are queued, in this order, or why none is.
    pub reply: oneshot::Sender<Result<Vec<SequenceStream>, SubmitError>>,
    /// What each of them adds to the work of who takes it; none where nobody counts it.
    pub work: Vec<Work>,
    /// Who tries elsewhere what is not taken; nobody where there is one replica.
    pub elsewhere: Option<mpsc::UnboundedSender<Returned>>,
    /// The replicas that did not take it, as bits.
    pub tried: u64,
}

impl Submission {
    /// Of a front end that hands its request to whoever is there.
    pub fn new(
        requests: Vec<SequenceRequest>,
        standing: Standing,
        submitted: Instant,
        reply: oneshot::Sender<Result<Vec<SequenceStream>, SubmitError>>,
    ) -> Self {
        Self { requests, standing, submitted, reply, work: Vec::new(), elsewhere: None, tried: 0 }
    }

    /// Hands it to who tries elsewhere, or answers, if nobody does.
    pub fn refuse(self, error: SubmitError) {
        // Who is gone is gone with the server, or waits for no answer any more.
        match self.elsewhere.clone() {
            Some(elsewhere) => drop(elsewhere.send(Returned::Refused { submission: self, error })),
            None => drop(self.reply.send(Err(error))),
        }
    }
}

/// What a replica sends back to who stands in front of it.
#[derive(Debug)]
pub enum Returned {
    /// It does not take a request.
    Refused {
        /// The request.
        submission: Submission,
        /// Why.
        error: SubmitError,
    },
    /// Sequences that it cannot go on with.
    Moved(Vec<Moved>),
}

/// A sequence on its way from one replica to another: what was asked, what came of it, and its reader.
#[derive(Debug)]
pub struct Moved {
    /// The scheduler's part.
    pub sequence: Handed,
    /// To its reader.
    pub sender: SequenceSender,
    /// Its times so far.
    pub life: Life,
    /// What it adds to the work of who takes it.
    pub work: Work,
}

impl Moved {
    /// Gives the sequence up.
    pub fn fail(self, reason: &str) {
        self.sender.send(SequenceEvent::Failed(reason.into()));
    }
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

/// A reader with so many tokens yet to take is behind: its sequence gives up its slot to those who wait.
const BEHIND: usize = 32;
/// It has caught up once it has no more than this.
const CAUGHT_UP: usize = 8;

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
    fn unread(&self) -> usize {
        self.events.max_capacity() - self.events.capacity()
    }

    /// The reader is so far behind that its sequence gives way to those who wait.
    pub fn is_behind(&self) -> bool {
        self.unread() >= BEHIND
    }

    /// A reader that was behind has caught up.
    pub fn has_caught_up(&self) -> bool {
        self.unread() <= CAUGHT_UP
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
        loop {
            match ready!(self.poll_event(context)) {
                Some(SequenceEvent::Prompt { cached_tokens, times, logprobs }) => {
                    (self.cached_tokens, self.times, self.prompt_logprobs) = (cached_tokens, Some(*times), logprobs);
                }
                Some(SequenceEvent::Drafts(step)) => self.drafts.push(step),
                event => return Poll::Ready(event),
            }
        }
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<SequenceEvent>> {
        let event = ready!(self.events.poll_recv(context));
        match event {
            Some(SequenceEvent::Prompt { .. } | SequenceEvent::Drafts(_)) => {}
            Some(SequenceEvent::Token(_)) => {
                self.taken += 1;
                self.all_taken.inc();
            }
            Some(SequenceEvent::Finished(_) | SequenceEvent::Failed(_) | SequenceEvent::Contradiction) | None => {
                self.ended = true;
            }
        }
        Poll::Ready(event)
    }

    /// For who passes a sequence on: the next event as it came, prompt and drafts too, of which this then keeps none.
    pub async fn next_event(&mut self) -> Option<SequenceEvent> {
        poll_fn(|context| self.poll_event(context)).await
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
