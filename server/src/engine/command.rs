//! What the engine is told, and what it tells back that is not for a reader.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::life::Life;
use super::stream::{SequenceEvent, SequenceSender, SequenceStream, Unwanted};
use crate::sched::{Handed, SequenceRequest, Standing, SubmitError};

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

/// A share of the work that a replica has yet to do. It is taken off as it is dropped.
#[derive(Debug, Default)]
pub struct Work(Option<(Arc<AtomicU64>, u64)>);

impl Work {
    /// Adds `amount` to `all`.
    pub fn add(all: &Arc<AtomicU64>, amount: u64) -> Self {
        // Relaxed: a figure to compare replicas by.
        all.fetch_add(amount, Ordering::Relaxed);
        Self(Some((all.clone(), amount)))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some((all, amount)) = self.0.take() {
            all.fetch_sub(amount, Ordering::Relaxed);
        }
    }
}
