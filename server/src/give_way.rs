//! Long work in pieces, between which its thread gives its core to others.
//!
//! Threads of SCHED_IDLE lose their core to whoever wakes. But where a thread is preempted while it runs, Linux (6.6
//! and later) may give its core to one of SCHED_IDLE until the next tick, 4 ms later: it has run less than its share.
//! One that yields often has had its share, and the other runs on.

/// Work on more bytes than these is large, and waits for large work alone: a few milliseconds are the most that the
/// threads for small work take at a time.
pub(crate) const LARGE_BYTES: usize = 64 << 10;

/// Between two pieces of work on `bytes` bytes, each less than half a millisecond's.
pub(crate) fn between_pieces(bytes: usize) {
    if bytes > LARGE_BYTES {
        std::thread::yield_now();
    }
}
