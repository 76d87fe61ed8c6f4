//! The team: the threads of one worker. The leader runs the loop; helpers take part in its `for_each`.
//!
//! Fork and join go through two counters. `round` (leader writes, helpers read) publishes the job; `busy` (helpers
//! write, leader reads) counts the helpers that have not left it. A helper touches the job only between seeing a new
//! `round` and leaving `busy`, and the leader returns only when `busy` is zero: so the job may live on the leader's
//! stack.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, sched_setaffinity};

use super::isa::FlushDenormals;
use crate::wait::Backoff;

/// Most threads of a team; bounds what a load request can start.
pub const MAX_THREADS: usize = 256;

/// Where the threads of a team run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Thread i of the team on core `cores[i]`.
    Pinned(Vec<usize>),
    /// Wherever the kernel puts them.
    Floating,
}

/// A team could not be started.
#[derive(Debug, thiserror::Error)]
pub enum TeamError {
    /// Not a size of a team.
    #[error("a worker of {0} threads cannot be started; use 1 to {MAX_THREADS}")]
    Size(usize),
    /// The operating system refused a thread.
    #[error("thread {index} of the worker cannot be started")]
    Spawn {
        /// Index in the team.
        index: usize,
        /// Why.
        source: std::io::Error,
    },
}

/// The units of a job that one thread has not begun yet: `first` in the low half, `end` in the high half. The owner
/// takes from the front, others from the back, so that a thread streams one contiguous run of the weights.
#[repr(align(64))]
struct Run(AtomicU64);

struct Helper {
    handle: JoinHandle<()>,
}

/// The body of a job. The lifetime is erased: see [`Team::for_each`].
type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    round: AtomicU32,
    busy: AtomicU32,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Written by the leader while `busy` is zero and before `round` changes; read by helpers after it changed.
    job: UnsafeCell<Option<Job>>,
    runs: Vec<Run>,
    asleep: Vec<AtomicBool>,
    crowded: bool,
}

// SAFETY: `job` is the only field that is not Sync by itself; who touches it when is said at its declaration and
// enforced by `round` and `busy`. The closure behind it is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is used only while the leader, whose stack it points to, waits in `for_each`.
unsafe impl Send for Shared {}

/// The threads of one worker.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<Helper>,
    placement: Placement,
    /// A job is running. A `Cell`, so that only the thread that holds the team leads it.
    forked: Cell<bool>,
}

/// Marks the thread that leads; restores its floating-point mode when dropped.
#[derive(Debug)]
pub struct Leading {
    _mode: FlushDenormals,
}

impl Team {
    /// Starts `threads - 1` helpers; the caller's thread leads.
    ///
    /// `crowded`: there are fewer cores than threads on this machine's workers, so that a waiting thread yields at
    /// once.
    ///
    /// # Errors
    /// The size is out of range, or a thread cannot be started.
    pub fn new(threads: usize, placement: Placement, crowded: bool) -> Result<Self, TeamError> {
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(TeamError::Size(threads));
        }
        let shared = Arc::new(Shared {
            round: AtomicU32::new(0),
            busy: AtomicU32::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            runs: (0..threads).map(|_| Run(AtomicU64::new(0))).collect(),
            asleep: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            crowded,
        });
        let mut team = Self { shared, helpers: Vec::with_capacity(threads - 1), placement, forked: Cell::new(false) };
        for index in 1..threads {
            let (shared, core) = (Arc::clone(&team.shared), team.core(index));
            let handle = std::thread::Builder::new()
                .name(format!("looplane-{index}"))
                .spawn(move || {
                    pin(core);
                    let _mode = FlushDenormals::enter();
                    shared.help(index);
                })
                .map_err(|source| TeamError::Spawn { index, source })?;
            team.helpers.push(Helper { handle });
        }
        Ok(team)
    }

    /// Threads, the leader included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Makes the calling thread the leader: on its core, with denormals flushed. To be held while it computes.
    pub fn lead(&self) -> Leading {
        pin(self.core(0));
        Leading { _mode: FlushDenormals::enter() }
    }

    /// Runs `unit(i)` once for every `i` under `units`, on all threads, and returns when all are done. Each thread
    /// begins with a contiguous run of units of its own; who runs out takes from the ends of other runs.
    ///
    /// # Panics
    /// If a unit panicked, or a unit calls this.
    pub fn for_each(&self, units: usize, unit: impl Fn(usize) + Sync) {
        self.for_each_then(units, unit, |_| ());
    }

    /// As [`Team::for_each`]; a thread that finds no unit left runs `idle(its run's index)` once before the join. Meant
    /// for prefetching what the thread will need next.
    ///
    /// # Panics
    /// If a unit panicked, or a unit calls this.
    pub fn for_each_then(&self, units: usize, unit: impl Fn(usize) + Sync, idle: impl Fn(usize) + Sync) {
        self.fork(units, unit, idle, || ());
    }

    /// As [`Team::for_each`]; the leader calls `between` after each of its own units.
    ///
    /// # Panics
    /// If a unit panicked, or a unit calls this.
    pub fn for_each_between(&self, units: usize, unit: impl Fn(usize) + Sync, between: impl FnMut()) {
        self.fork(units, unit, |_| (), between);
    }

    fn fork(&self, units: usize, unit: impl Fn(usize) + Sync, idle: impl Fn(usize) + Sync, mut between: impl FnMut()) {
        assert!(u32::try_from(units).is_ok(), "{units} units");
        assert!(!self.forked.replace(true), "a unit of work started another job");
        let _joined = Reset(&self.forked);
        if self.helpers.is_empty() || units <= 1 {
            (0..units).for_each(|index| {
                unit(index);
                between();
            });
            return idle(0);
        }
        let shared = &*self.shared;
        let threads = self.helpers.len() + 1;
        for (index, run) in shared.runs.iter().enumerate() {
            let (first, end) = (units * index / threads, units * (index + 1) / threads);
            run.0.store(first as u64 | (end as u64) << 32, Ordering::Relaxed);
        }
        let body = |index: usize| {
            while let Some(next) = shared.take(index) {
                unit(next);
            }
            idle(index);
        };
        let job: &(dyn Fn(usize) + Sync) = &body;
        // SAFETY: only the lifetime changes. Helpers use the job until they leave `busy`; this call returns, or
        // unwinds, only after `busy` is zero (`JoinOnDrop`), so the job outlives every use. Writing the cell is
        // exclusive: `busy` is zero here, and helpers read it only once `round` has changed below (release, paired with
        // their acquire).
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job));
        }
        shared.busy.store(self.helpers.len() as u32, Ordering::Relaxed);
        // SeqCst against `asleep`: either the helper sees the new round before it sleeps, or we see it asleep and wake
        // it.
        shared.round.fetch_add(1, Ordering::SeqCst);
        for (helper, asleep) in self.helpers.iter().zip(&shared.asleep[1..]) {
            if asleep.load(Ordering::SeqCst) {
                helper.handle.thread().unpark();
            }
        }
        let join = JoinOnDrop(shared);
        while let Some(next) = shared.take(0) {
            unit(next);
            between();
        }
        idle(0);
        drop(join);
        assert!(
            !shared.panicked.load(Ordering::Relaxed),
            "a unit of work panicked on a helper thread; its message is above"
        );
    }

    fn core(&self, index: usize) -> Option<usize> {
        match &self.placement {
            Placement::Pinned(cores) => cores.get(index).copied(),
            Placement::Floating => None,
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.round.fetch_add(1, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.handle.thread().unpark();
            // A helper that panicked outside a unit has printed why; there is nobody left to tell.
            let _ = helper.handle.join();
        }
    }
}

struct Reset<'a>(&'a Cell<bool>);

impl Drop for Reset<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Waits for the helpers to leave the job, also when the leader's own unit panics.
struct JoinOnDrop<'a>(&'a Shared);

impl Drop for JoinOnDrop<'_> {
    fn drop(&mut self) {
        let mut backoff = Backoff::new(self.0.crowded);
        // Acquire, paired with the helpers' release: what their units wrote is visible from here on.
        while self.0.busy.load(Ordering::Acquire) != 0 {
            backoff.pause();
        }
    }
}

impl Shared {
    /// The next unit for the thread: the front of its own run, else the back of another's.
    fn take(&self, index: usize) -> Option<usize> {
        let threads = self.runs.len();
        let split = |run: u64| (run as u32, (run >> 32) as u32);
        for victim in (0..threads).map(|step| (index + step) % threads) {
            let own = victim == index;
            // Relaxed: the runs deal out numbers; the data of units is ordered by `round` and `busy`.
            let taken = self.runs[victim].0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |run| {
                let (first, end) = split(run);
                (first < end).then(|| if own { run + 1 } else { run - (1 << 32) })
            });
            if let Ok(run) = taken {
                let (first, end) = split(run);
                return Some(if own { first } else { end - 1 } as usize);
            }
        }
        None
    }

    fn help(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.await_round(index, &mut seen);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: `round` has changed (acquire), so the leader has written the job and waits until we leave `busy`.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            let job = job.expect("a job, because the leader writes it before it opens the round");
            if catch_unwind(AssertUnwindSafe(|| job(index))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a round other than `seen`: spins, then yields, then sleeps, so that an idle worker uses no processor.
    fn await_round(&self, index: usize, seen: &mut u32) {
        let mut backoff = Backoff::new(self.crowded);
        loop {
            let round = self.round.load(Ordering::Acquire);
            if round != *seen {
                *seen = round;
                return;
            }
            if !backoff.exhausted() {
                backoff.pause();
                continue;
            }
            self.asleep[index].store(true, Ordering::SeqCst);
            while self.round.load(Ordering::SeqCst) == *seen {
                std::thread::park();
            }
            self.asleep[index].store(false, Ordering::Relaxed);
        }
    }
}

/// Best effort: a container may forbid it, and then the thread floats.
fn pin(core: Option<usize>) {
    let Some(core) = core.filter(|core| *core < CpuSet::MAX_CPU) else { return };
    let mut set = CpuSet::new();
    set.set(core);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(core, %error, "a compute thread cannot be pinned to its core");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_unit_runs_once_whatever_the_team() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads, Placement::Floating, true).unwrap();
            for round in 0..200 {
                let counts: Vec<_> = (0..round % 37).map(|_| AtomicUsize::new(0)).collect();
                let idle = AtomicUsize::new(0);
                team.for_each_then(
                    counts.len(),
                    |i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    },
                    |_| {
                        idle.fetch_add(1, Ordering::Relaxed);
                    },
                );
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                assert!((1..=threads).contains(&idle.load(Ordering::Relaxed)));
            }
        }
    }

    #[test]
    fn sleeping_helpers_are_woken() {
        let team = Team::new(3, Placement::Floating, false).unwrap();
        for _ in 0..3 {
            let asleep = |team: &Team| team.shared.asleep[1..].iter().all(|asleep| asleep.load(Ordering::SeqCst));
            let begun = std::time::Instant::now();
            while !asleep(&team) {
                assert!(begun.elapsed().as_secs() < 20, "helpers never sleep");
                std::thread::yield_now();
            }
            let sum = AtomicUsize::new(0);
            team.for_each(100, |i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 4950);
        }
    }

    #[test]
    fn a_panic_in_a_unit_reaches_the_leader_and_the_team_goes_on() {
        for bad in [0, 99] {
            let team = Team::new(2, Placement::Floating, true).unwrap();
            let result = catch_unwind(AssertUnwindSafe(|| team.for_each(100, |i| assert_ne!(i, bad, "on purpose"))));
            assert!(result.is_err());
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        assert!(matches!(Team::new(0, Placement::Floating, true), Err(TeamError::Size(0))));
        assert!(matches!(Team::new(MAX_THREADS + 1, Placement::Floating, true), Err(TeamError::Size(_))));
    }
}
