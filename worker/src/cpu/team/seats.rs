//! Who of a team is on which core, and how a thread that waits gives its core to one that needs it.
//!
//! On a shared machine the kernel gives a core to another process for milliseconds, in the middle of a unit of tens of
//! microseconds. Soon all threads wait for that unit, each on a core that does nothing else. A thread that is pinned
//! cannot go there, and one that floats is moved late. So who waits swaps cores with it, which takes tens of
//! microseconds, and gets out of the way.
//!
//! What was tried, on a copy of the team that reads 8 layers of the 1b shape: 2 threads and a busy process on 2 cores
//! of a Xeon, ms of 60 steps, two runs. Without the process it is 24.5; three quarters of that speed would be 32.7.
//!
//! | waiting | pinned | median | p90 |
//! |---|---|---|---|
//! | spins, yields (before) | yes | 65, 68 | 80, 90 |
//! | spins, yields | no | 50, 54 | 69, 75 |
//! | spins only, as llama.cpp | no | 45, 45 | 157, 132 |
//! | spins 30 us, sleeps | no | 50, 50 | 80, 52 |
//! | swaps cores, yields | yes | 34, 34 | 40, 39 |
//! | swaps cores, sleeps | yes | 32, 33 | 35, 36 |
//!
//! Spinning 5 to 50 us before looking, and other time slices (`sched_setattr`, 0.1 and 20 ms), change nothing.

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, Pid, gettid, sched_setaffinity};

/// A thread that got no processor time for so long is not running: a multiple of what reading a clock takes.
const MOMENT: Duration = Duration::from_micros(5);

/// The cores of a team.
pub struct Seats {
    table: Mutex<Table>,
    /// Threads that have work: those that wait for nobody.
    busy: Vec<Busy>,
}

/// On a cache line of its own: its thread writes it several times a layer.
#[repr(align(64))]
struct Busy(AtomicBool);

struct Table {
    seats: Vec<Seat>,
    /// Whom the next thread that waits looks at first.
    next: usize,
}

struct Seat {
    /// None before the thread has started, and after it has ended: the kernel may give its number to another.
    thread: Option<Pid>,
    /// None where threads float.
    core: Option<usize>,
}

impl Seats {
    /// Seats of `threads` threads; thread i will be on core `cores[i]`, or float if there is none.
    pub fn new(threads: usize, cores: &[usize]) -> Self {
        let seats = (0..threads).map(|index| Seat { thread: None, core: cores.get(index).copied() }).collect();
        let busy = (0..threads).map(|_| Busy(AtomicBool::new(false))).collect();
        Self { table: Mutex::new(Table { seats, next: 0 }), busy }
    }

    /// The calling thread becomes thread `index`, and moves to its core.
    pub fn sit(&self, index: usize) {
        let seat = &mut self.table().seats[index];
        seat.thread = Some(gettid());
        // Best effort: a container may forbid it, and then the thread floats.
        if let Some(Err(error)) = seat.core.map(|core| place(None, core)) {
            tracing::warn!(?seat.core, %error, "a compute thread cannot be pinned to its core");
            seat.core = None;
        }
    }

    /// Thread `index` ends, or does other things.
    pub fn leave(&self, index: usize) {
        self.work(index, false);
        self.table().seats[index].thread = None;
    }

    /// Thread `index` has work, or waits.
    pub fn work(&self, index: usize, busy: bool) {
        // Relaxed: a hint. At worst a core is given to a thread that does not need it.
        self.busy[index].0.store(busy, Ordering::Relaxed);
    }

    /// For thread `own`, which waits: looks at a thread that has work. If that is ready to run and yet does not, the
    /// two swap cores. Whether they have.
    pub fn give_way(&self, own: usize) -> bool {
        // Whoever finds the table taken would look at the same threads.
        let Ok(mut table) = self.table.try_lock() else { return false };
        let count = table.seats.len();
        let busy = |index: &usize| *index != own && self.busy[*index].0.load(Ordering::Relaxed);
        let Some(other) = (table.next..table.next + count).map(|index| index % count).find(busy) else { return false };
        table.next = other + 1;
        let [mine, theirs] = [own, other].map(|index| (table.seats[index].thread, table.seats[index].core));
        let ((Some(_), Some(core)), (Some(thread), Some(their_core))) = (mine, theirs) else { return false };
        if !starves(thread) || place(None, their_core).is_err() {
            return false;
        }
        if place(Some(thread), core).is_err() {
            // Best effort: it was here before.
            let _ = place(None, core);
            return false;
        }
        (table.seats[own].core, table.seats[other].core) = (Some(their_core), Some(core));
        true
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Restricts a thread, the calling one if none is named, to a core.
fn place(thread: Option<Pid>, core: usize) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        set.set(core);
    }
    sched_setaffinity(thread, &set)
}

/// Whether the kernel would let a thread run, and yet it does not.
fn starves(thread: Pid) -> bool {
    let Some(before) = processor_time(thread) else { return false };
    let begun = Instant::now();
    while begun.elapsed() < MOMENT {
        std::hint::spin_loop();
    }
    processor_time(thread) == Some(before) && is_ready(thread)
}

/// Processor time that a thread of this process has used.
fn processor_time(thread: Pid) -> Option<Duration> {
    /// `struct timespec` of 64-bit Linux.
    #[repr(C)]
    struct Time {
        seconds: c_long,
        nanoseconds: c_long,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: c_int, time: *mut Time) -> c_int;
    }
    // The kernel's number of a thread's clock, as `pthread_getcpuclockid` makes it up.
    let clock = !thread.as_raw_nonzero().get() << 3 | 6;
    let mut time = Time { seconds: 0, nanoseconds: 0 };
    // SAFETY: the call writes `time`, which has the layout it expects, and nothing else.
    let refused = unsafe { clock_gettime(clock, &raw mut time) } != 0;
    (!refused).then(|| Duration::new(time.seconds as u64, time.nanoseconds as u32))
}

/// Whether a thread of this process runs or could: it does not sleep.
fn is_ready(thread: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero()));
    // "number (name) state ..."
    stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('R')))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rustix::thread::sched_getaffinity;

    use super::*;

    fn cores() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
    }

    fn spin_until(done: impl Fn() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed().as_secs() < 20, "it does not happen");
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_thread_that_starves_gets_the_core_of_one_that_waits() {
        let [mine, theirs, ..] = cores()[..] else {
            eprintln!("skipped: there is one core");
            return;
        };
        let (seats, stop) = (Seats::new(2, &[mine, theirs]), AtomicBool::new(false));
        let stopped = || stop.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                seats.sit(1);
                seats.work(1, true);
                spin_until(stopped);
                assert_eq!(cores(), [mine]);
                seats.leave(1);
            });
            // The neighbour: the two starve in turns.
            scope.spawn(|| {
                place(None, theirs).unwrap();
                spin_until(stopped);
            });
            scope.spawn(|| {
                seats.sit(0);
                spin_until(|| seats.give_way(0));
                assert_eq!(cores(), [theirs]);
                stop.store(true, Ordering::Relaxed);
            });
        });
    }

    #[test]
    fn threads_that_sleep_wait_or_float_get_no_core() {
        let all = cores();
        if all.len() < 2 {
            eprintln!("skipped: there is one core");
            return;
        }
        for (pinned, busy) in [(true, true), (true, false), (false, true)] {
            let seats = Seats::new(2, if pinned { &all[..] } else { &[] });
            let ((tell, told), (wake, sleep)) = (mpsc::channel(), mpsc::channel::<()>());
            std::thread::scope(|scope| {
                let seats = &seats;
                scope.spawn(move || {
                    seats.sit(1);
                    seats.work(1, busy);
                    tell.send(gettid()).unwrap();
                    sleep.recv().unwrap_err();
                });
                let thread = told.recv().unwrap();
                assert!(processor_time(thread).is_some() && is_ready(gettid()));
                spin_until(|| !is_ready(thread));
                scope.spawn(move || {
                    seats.sit(0);
                    for _ in 0..100 {
                        assert!(!seats.give_way(0));
                    }
                    drop(wake);
                });
            });
        }
    }
}
