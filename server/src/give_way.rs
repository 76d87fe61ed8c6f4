//! Long work in pieces, between which its thread gives its core to others.
//!
//! Threads of SCHED_IDLE lose their core to whoever wakes. But where a thread is preempted while it runs, Linux (6.6
//! and later) may give its core to one of SCHED_IDLE until the next tick, 4 ms later: it has run less than its share.
//! One that yields often has had its share, and the other runs on.

use std::cell::Cell;

thread_local! {
    static HAS_HELPERS: Cell<bool> = const { Cell::new(false) };
}

/// Work on more bytes than these is large, and waits for large work alone: a few milliseconds are the most that the
/// threads for small work take at a time.
pub(crate) const LARGE_BYTES: usize = 64 << 10;

/// Between two pieces of work on `bytes` bytes.
pub(crate) fn between_pieces(bytes: usize) {
    if bytes > LARGE_BYTES {
        std::thread::yield_now();
    }
}

/// By so much the threads give way to others where they must not wait for a core that nobody else uses.
pub(crate) const NICE: i32 = 5;

/// Where cores are few, a stream's next token goes before a stranger's prompt. (On Linux the calling thread's alone.) A
/// system that forbids it serves all the same.
pub(crate) fn give_way_a_little() {
    let _ = rustix::process::nice(NICE);
}

/// The calling thread does small work, and so may have the help of others with it.
pub(crate) fn let_be_helped() {
    HAS_HELPERS.set(true);
}

/// Whether the calling thread does.
pub(crate) fn has_helpers() -> bool {
    HAS_HELPERS.get()
}

/// Threads for work that is small: a quarter of this machine's cores, within bounds. The others are the workers'.
pub(crate) fn small_threads() -> usize {
    const MOST: usize = 6;
    std::thread::available_parallelism().map_or(1, |count| (count.get() / 4).clamp(1, MOST))
}
