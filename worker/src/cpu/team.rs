//! The team: the threads of one worker. The leader runs the loop; helpers take part in its `for_each`.
//!
//! Fork and join go through one word, the *gate*: the number of the job, whether it is open, and how many helpers are
//! inside. The leader opens it with a job; a helper enters while it is open, at most once a job; the leader closes it
//! once it finds no unit left, and returns when nobody is inside. A helper touches the job only while it is inside: so
//! the job may live on the leader's stack.
//!
//! A thread that has no core holds the others as little as can be. Before it enters a job it holds nobody. Units that
//! it has not begun are taken by others. In a unit it gets the core of one that waits ([`seats`]). A wait is: spin
//! about 20 us, then yield and look who needs the core; sleep after 2 ms, and as soon as the core is given away.
#![allow(unsafe_code)]

mod seats;

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

use super::kernels::isa::FlushDenormals;
use crate::wait::Backoff;
pub use seats::Seats;

/// Most threads of a team; bounds what a load request can start.
pub const MAX_THREADS: usize = 256;
/// Index of the leader in the team.
const LEADER: usize = 0;

/// Where the threads of a team run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Thread i of the team on core `cores[i]`; they may swap.
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

/// The body of a job. The lifetime is erased: see [`Team::for_each`].
type Job = *const (dyn Fn(usize) + Sync);

/// In the gate: helpers may enter. Above it (the high half) is the number of the job, below it the helpers inside.
const OPEN: u64 = 1 << 31;

fn job_number(gate: u64) -> u32 {
    (gate >> 32) as u32
}

struct Shared {
    gate: AtomicU64,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Written by the leader while the gate is closed and nobody is inside; read by helpers inside.
    job: UnsafeCell<Option<Job>>,
    runs: Vec<Run>,
    seats: Seats,
    asleep: Vec<AtomicBool>,
    /// Whom to wake when the leader sleeps; set before it says that it is asleep.
    leader: Mutex<Option<Thread>>,
    crowded: bool,
    /// Keeps helpers outside, as a kernel that gives them no core would.
    #[cfg(test)]
    held: AtomicBool,
}

// SAFETY: `job` is the only field that is not Sync by itself; who touches it when is said at its declaration and
// enforced by the gate. The closure behind it is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is used only while the leader, whose stack it points to, waits in `for_each`.
unsafe impl Send for Shared {}

/// The threads of one worker.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// A job is running. A `Cell`, so that only the thread that holds the team leads it.
    forked: Cell<bool>,
}

/// Marks the thread that leads; restores its floating-point mode when dropped.
pub struct Leading {
    shared: Arc<Shared>,
    _mode: FlushDenormals,
}

impl Drop for Leading {
    fn drop(&mut self) {
        self.shared.seats.leave(LEADER);
    }
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
        let cores: &[usize] = match &placement {
            Placement::Pinned(cores) => cores,
            Placement::Floating => &[],
        };
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            runs: (0..threads).map(|_| Run(AtomicU64::new(0))).collect(),
            seats: Seats::new(threads, cores),
            asleep: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            leader: Mutex::new(None),
            crowded,
            #[cfg(test)]
            held: AtomicBool::new(false),
        });
        let mut team = Self { shared, helpers: Vec::with_capacity(threads - 1), forked: Cell::new(false) };
        for index in 1..threads {
            let shared = Arc::clone(&team.shared);
            let helper = std::thread::Builder::new()
                .name(format!("looplane-{index}"))
                .spawn(move || {
                    shared.seats.sit(index);
                    let _mode = FlushDenormals::enter();
                    shared.help(index);
                })
                .map_err(|source| TeamError::Spawn { index, source })?;
            team.helpers.push(helper);
        }
        Ok(team)
    }

    /// Threads, the leader included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Makes the calling thread the leader: on its core, with denormals flushed. To be held while it computes.
    pub fn lead(&self) -> Leading {
        self.shared.seats.sit(LEADER);
        self.shared.seats.work(LEADER, true);
        Leading { shared: Arc::clone(&self.shared), _mode: FlushDenormals::enter() }
    }

    /// The cores of the team, for a thread that waits within a job for another.
    pub fn seats(&self) -> &Seats {
        &self.shared.seats
    }

    /// Runs `unit(i)` once for every `i` under `units`, on all threads that have a core, and returns when all are done.
    /// Each thread begins with a contiguous run of units of its own; who runs out takes from the ends of other runs.
    ///
    /// # Panics
    /// If a unit panicked, or a unit calls this.
    pub fn for_each(&self, units: usize, unit: impl Fn(usize) + Sync) {
        self.for_each_then(units, unit, |_| ());
    }

    /// As [`Team::for_each`]; a thread that finds no unit left runs `idle(its run's index)` once before the join, the
    /// leader always, another if it comes in time. Meant for prefetching what the thread will need next.
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
        // SAFETY: only the lifetime changes. Helpers use the job while they are inside; this call returns, or unwinds,
        // only when the gate is closed and nobody is (`JoinOnDrop`), so the job outlives every use. Writing the cell is
        // exclusive: nobody is inside now, and helpers enter only once the gate is open below (a release, paired with
        // their acquire).
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job));
        }
        let number = job_number(shared.gate.load(Ordering::Relaxed)).wrapping_add(1);
        // SeqCst against `asleep`, as everywhere at the gate: either who waits sees the change before it sleeps, or who
        // changes the gate sees it asleep and wakes it.
        shared.gate.store(u64::from(number) << 32 | OPEN, Ordering::SeqCst);
        for (helper, asleep) in self.helpers.iter().zip(&shared.asleep[1..]) {
            if asleep.load(Ordering::SeqCst) {
                helper.thread().unpark();
            }
        }
        let join = JoinOnDrop(shared);
        while let Some(next) = shared.take(LEADER) {
            unit(next);
            between();
        }
        idle(LEADER);
        drop(join);
        assert!(
            !shared.panicked.load(Ordering::Relaxed),
            "a unit of work panicked on a helper thread; its message is above"
        );
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper that panicked outside a unit has printed why; there is nobody left to tell.
            let _ = helper.join();
        }
    }
}

struct Reset<'a>(&'a Cell<bool>);

impl Drop for Reset<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Closes the gate and waits for the helpers inside to leave, also when the leader's own unit panics.
struct JoinOnDrop<'a>(&'a Shared);

impl Drop for JoinOnDrop<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!OPEN, Ordering::SeqCst);
        // Acquires, paired with the helpers' releases: what their units wrote is visible from here on.
        self.0.wait(LEADER, || self.0.gate.load(Ordering::SeqCst) as u32 == 0);
    }
}

impl Shared {
    /// The next unit for the thread: the front of its own run, else the back of another's.
    fn take(&self, index: usize) -> Option<usize> {
        let threads = self.runs.len();
        let split = |run: u64| (run as u32, (run >> 32) as u32);
        for victim in (0..threads).map(|step| (index + step) % threads) {
            let own = victim == index;
            // Relaxed: the runs deal out numbers; the data of units is ordered by the gate.
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
        let mut last = 0;
        let stop = || self.stop.load(Ordering::SeqCst);
        loop {
            self.wait(index, || stop() || self.is_open(self.gate.load(Ordering::SeqCst), last));
            if stop() {
                self.seats.leave(index);
                return;
            }
            let enter = |gate| self.is_open(gate, last).then_some(gate + 1);
            let Ok(gate) = self.gate.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter) else { continue };
            last = job_number(gate);
            // SAFETY: we are inside (acquire), so the leader has written the job and waits until we leave.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            let job = job.expect("a job, because the leader writes it before it opens the gate");
            if catch_unwind(AssertUnwindSafe(|| job(index))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            let before = self.gate.fetch_sub(1, Ordering::SeqCst);
            if before as u32 == 1 && self.asleep[LEADER].load(Ordering::SeqCst) {
                let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
                leader.iter().for_each(Thread::unpark);
            }
        }
    }

    /// Whether a helper that has taken part in job `last` may enter.
    fn is_open(&self, gate: u64, last: u32) -> bool {
        #[cfg(test)]
        if self.held.load(Ordering::Relaxed) {
            return false;
        }
        gate & OPEN != 0 && job_number(gate) != last
    }

    /// Waits until `done`, which looks at the gate or at `stop`.
    fn wait(&self, index: usize, done: impl Fn() -> bool) {
        self.seats.work(index, false);
        let mut backoff = Backoff::new(self.crowded);
        while !done() {
            backoff.pause();
            let gave_way = !backoff.yielded().is_zero() && self.seats.give_way(index);
            if gave_way || backoff.exhausted() {
                self.sleep(index, &done);
                // A helper that comes too late for the job that woke it is in time for the next.
                backoff = Backoff::new(self.crowded);
            }
        }
        self.seats.work(index, true);
    }

    /// Sleeps until woken, unless `done`.
    fn sleep(&self, index: usize, done: &impl Fn() -> bool) {
        if index == LEADER {
            *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        }
        self.asleep[index].store(true, Ordering::SeqCst);
        if !done() {
            std::thread::park();
        }
        self.asleep[index].store(false, Ordering::Relaxed);
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
    fn a_helper_that_has_no_core_holds_no_job() {
        let team = Team::new(3, Placement::Floating, false).unwrap();
        team.shared.held.store(true, Ordering::Relaxed);
        let leader = std::thread::current().id();
        team.for_each(100, |_| assert_eq!(std::thread::current().id(), leader));
        // It comes back: who was held takes part in later jobs.
        team.shared.held.store(false, Ordering::Relaxed);
        let helped = AtomicBool::new(false);
        let begun = std::time::Instant::now();
        while !helped.load(Ordering::Relaxed) {
            assert!(begun.elapsed().as_secs() < 20, "helpers never come back");
            team.for_each(100, |_| helped.store(std::thread::current().id() != leader, Ordering::Relaxed));
        }
    }

    #[test]
    fn a_helper_that_stays_in_a_unit_holds_only_that_unit() {
        let team = Team::new(2, Placement::Floating, false).unwrap();
        let leader = std::thread::current().id();
        let (shared, others, helping) = (&*team.shared, AtomicUsize::new(0), AtomicBool::new(false));
        team.for_each(100, |_| {
            let begun = std::time::Instant::now();
            let limit = || assert!(begun.elapsed().as_secs() < 20, "the threads wait for each other");
            if std::thread::current().id() == leader {
                while !helping.load(Ordering::Relaxed) {
                    limit();
                    std::thread::yield_now();
                }
                others.fetch_add(1, Ordering::Relaxed);
            } else if !helping.swap(true, Ordering::Relaxed) {
                while others.load(Ordering::Relaxed) < 99 {
                    limit();
                    std::thread::yield_now();
                }
                // The leader has begun to wait, and sleeps.
                while !shared.asleep[LEADER].load(Ordering::SeqCst) {
                    limit();
                    std::thread::yield_now();
                }
            }
        });
        assert_eq!(others.load(Ordering::Relaxed), 99);
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
