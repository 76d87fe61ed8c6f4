//! What each rank of a group does in its steps: how even they are, and who waits for whom.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::snapshot::{RankSnapshot, StepSnapshot};

/// Ranks of the largest group.
const MOST_RANKS: usize = 16;

/// The ranks of a group, by their number; counted on where a group follows another.
#[derive(Debug, Default)]
pub struct Ranks {
    present: AtomicUsize,
    all: [Rank; MOST_RANKS],
}

/// What one rank counts.
#[derive(Debug, Default)]
pub struct Rank {
    step_ns: AtomicU64,
    wait_ns: AtomicU64,
    /// A GPU does not tell what it waits.
    tells_waits: AtomicBool,
    read_bytes: AtomicU64,
    /// Bytes a second; 0: not measured.
    read_limit: AtomicU64,
    newest_step_ns: AtomicU64,
    newest_wait_ns: AtomicU64,
    newest_read_bytes: AtomicU64,
}

impl Ranks {
    /// The group has so many.
    pub fn set_present(&self, ranks: usize) {
        self.present.store(ranks.min(MOST_RANKS), Relaxed);
    }

    /// Those of the group.
    pub fn iter(&self) -> impl Iterator<Item = &Rank> {
        self.all.iter().take(self.present.load(Relaxed))
    }

    /// Counts a step of a rank: its time, and of that what it waited for others.
    pub fn step(&self, rank: usize, time: Duration, wait: Option<Duration>) {
        let Some(rank) = self.all.get(rank) else { return };
        rank.step_ns.fetch_add(time.as_nanos() as u64, Relaxed);
        rank.newest_step_ns.store(time.as_nanos() as u64, Relaxed);
        if let Some(wait) = wait {
            rank.wait_ns.fetch_add(wait.as_nanos() as u64, Relaxed);
            rank.newest_wait_ns.store(wait.as_nanos() as u64, Relaxed);
            rank.tells_waits.store(true, Relaxed);
        }
    }
}

impl Rank {
    /// Counts what it had to read at least.
    pub fn read(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Relaxed);
        self.newest_read_bytes.store(bytes, Relaxed);
    }

    /// Its socket can read so many bytes a second.
    pub fn set_read_limit(&self, limit: u64) {
        self.read_limit.store(limit, Relaxed);
    }

    /// Bytes a second that its socket can read, where that was measured.
    pub(super) fn read_limit(&self) -> Option<u64> {
        Some(self.read_limit.load(Relaxed)).filter(|limit| *limit > 0)
    }

    /// As counted so far.
    pub(super) fn snapshot(&self) -> RankSnapshot {
        let [seconds, wait] = [&self.newest_step_ns, &self.newest_wait_ns].map(|ns| ns.load(Relaxed) as f64 / 1e9);
        let newest_step = StepSnapshot {
            seconds,
            wait_seconds: self.tells_waits.load(Relaxed).then_some(wait),
            read_bytes: self.newest_read_bytes.load(Relaxed),
        };
        RankSnapshot {
            step_seconds: self.step_seconds(),
            wait_seconds: self.wait_seconds(),
            read_bytes: self.read_bytes(),
            read_limit: self.read_limit(),
            newest_step,
        }
    }

    /// Seconds in steps.
    pub(super) fn step_seconds(&self) -> f64 {
        self.step_ns.load(Relaxed) as f64 / 1e9
    }

    /// Seconds of these in which it waited for others, where it tells.
    pub(super) fn wait_seconds(&self) -> Option<f64> {
        self.tells_waits.load(Relaxed).then(|| self.wait_ns.load(Relaxed) as f64 / 1e9)
    }

    /// Bytes that it had to read at least.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Relaxed)
    }
}
