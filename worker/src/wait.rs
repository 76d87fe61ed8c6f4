//! How a thread waits for another: it spins a bounded time, then yields, and says when it has waited long.

use std::time::{Duration, Instant};

/// Spins before the first yield where every thread has a core: about 20 us, more than a phase's imbalance or a peer's
/// partial sum takes.
const SPINS: u32 = 512;
/// Spins before the first yield where threads share cores: who is waited for may need this very core.
const CROWDED_SPINS: u32 = 16;
/// Yields for this long make a wait a long one: helpers of an idle worker go to sleep.
const LONG: Duration = Duration::from_millis(2);

/// One wait.
#[derive(Debug)]
pub struct Backoff {
    spins_left: u32,
    /// When spinning ended.
    yielding_since: Option<Instant>,
}

impl Backoff {
    /// `crowded`: threads share cores.
    pub fn new(crowded: bool) -> Self {
        Self { spins_left: if crowded { CROWDED_SPINS } else { SPINS }, yielding_since: None }
    }

    /// Lets a moment pass.
    pub fn pause(&mut self) {
        if self.spins_left > 0 {
            self.spins_left -= 1;
            std::hint::spin_loop();
            return;
        }
        self.yielding_since.get_or_insert_with(Instant::now);
        std::thread::yield_now();
    }

    /// The wait has become a long one.
    pub fn exhausted(&self) -> bool {
        self.yielded() > LONG
    }

    /// Time since spinning ended.
    pub fn yielded(&self) -> Duration {
        self.yielding_since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
