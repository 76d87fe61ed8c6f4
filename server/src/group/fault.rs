//! Why a group did not start, and why one was lost.

use std::time::Duration;

use tonic::{Code, Status};

/// A worker's answer and its exit come by different ways; how long the one is waited for after the other.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// Why a group did not start.
#[derive(Debug)]
pub(super) struct StartError {
    /// Starting again would end the same way.
    pub(super) is_final: bool,
    pub(super) reason: String,
    /// The rank whose connection broke, perhaps because it ends.
    pub(super) ending: Option<u32>,
}

impl StartError {
    pub(super) fn fault(reason: String) -> Self {
        Self { is_final: false, reason, ending: None }
    }

    pub(super) fn refusal(reason: String) -> Self {
        Self { is_final: true, reason, ending: None }
    }

    /// `words` follow "rank 3 ".
    pub(super) fn broken_stream(rank: usize, words: &str) -> Self {
        Self { ending: Some(rank as u32), ..Self::fault(format!("rank {rank} {words}")) }
    }

    /// A status that says nothing about the model: the next start may go better.
    pub(super) fn status(rank: usize, doing: &str, status: &Status) -> Self {
        let reason = format!("rank {rank} failed while {doing}: {:?}: {}", status.code(), status.message());
        Self { ending: Some(rank as u32), ..Self::fault(reason) }
    }

    /// A status of Load, where some say that the model cannot be served.
    pub(super) fn load(rank: usize, status: &Status, is_final: impl Fn(Code) -> bool) -> Self {
        match is_final(status.code()) {
            true => Self::refusal(format!("rank {rank}: {}", status.message())),
            false => Self::status(rank, "loading", status),
        }
    }
}

/// Why a group was lost.
pub(super) struct Fault {
    pub(super) words: String,
    /// The rank whose stream broke, perhaps because it ends: its exit says more.
    pub(super) ending: Option<u32>,
}

impl Fault {
    pub(super) fn new(words: String) -> Self {
        Self { words, ending: None }
    }

    /// `words` follow "rank 3 ".
    pub(super) fn broken_stream(rank: usize, words: &str) -> Self {
        Self { words: format!("rank {rank} {words}"), ending: Some(rank as u32) }
    }
}

impl From<String> for Fault {
    fn from(words: String) -> Self {
        Self::new(words)
    }
}
