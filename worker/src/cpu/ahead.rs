//! What a thread does while it waits: it asks for the first weights of its next product, so that memory does not idle.
#![allow(unsafe_code)]

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;
/// Most bytes that a thread asks for ahead: a quarter of a small L2, which also holds the activations.
const MOST_BYTES: usize = 256 << 10;
/// Lines asked for between two looks at a flag: about what the core's miss buffers hold.
const LINES_A_STEP: usize = 8;
/// Lines asked for by a thread that has nothing to wait for but the join.
const LINES_AT_JOIN: usize = 32;

/// The weights that stream next, cut in units as the next job will deal them.
#[derive(Debug, Clone, Copy)]
pub struct Ahead<'a> {
    weights: &'a [u8],
    units: usize,
}

/// One thread's walk over the start of its run of the next job.
#[derive(Debug)]
pub struct Walk<'a> {
    left: &'a [u8],
}

impl<'a> Ahead<'a> {
    /// `weights` will be dealt as `units` equal units.
    pub fn new(weights: &'a [u8], units: usize) -> Self {
        Self { weights, units }
    }

    /// Nothing to ask for.
    pub fn nothing() -> Self {
        Self { weights: &[], units: 1 }
    }

    /// The walk of one thread of the team, from the first unit the team will deal to it.
    pub fn of_thread(&self, thread: usize, threads: usize) -> Walk<'a> {
        let first_unit = self.units * thread / threads;
        let run = &self.weights[(self.weights.len() / self.units.max(1) * first_unit).min(self.weights.len())..];
        Walk { left: &run[..run.len().min(MOST_BYTES)] }
    }
}

impl Walk<'_> {
    /// Asks for a few more lines; false if there are none left.
    pub fn step(&mut self) -> bool {
        if self.left.is_empty() {
            return false;
        }
        self.lines(LINES_A_STEP);
        true
    }

    /// Asks for the last few lines before the join.
    pub fn finish(&mut self) {
        self.lines(LINES_AT_JOIN);
    }

    fn lines(&mut self, lines: usize) {
        let (now, left) = self.left.split_at(self.left.len().min(lines * LINE_BYTES));
        self.left = left;
        for line in now.chunks(LINE_BYTES) {
            prefetch(line.as_ptr().cast());
        }
    }
}

/// Asks for the cache line at `line`, which need not exist, into L2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn prefetch(line: *const u16) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
}

/// Nothing: other processors ask ahead by themselves.
#[cfg(not(target_arch = "x86_64"))]
pub fn prefetch(_line: *const u16) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_starts_at_the_threads_own_run_and_ends() {
        let weights = vec![0; 10 * 2000];
        let ahead = Ahead::new(&weights, 10);
        for (thread, start) in [(0, 0), (1, 6000), (2, 12_000)] {
            let mut walk = ahead.of_thread(thread, 3);
            assert_eq!(walk.left.len(), 20_000 - start);
            let mut steps = 0;
            while walk.step() {
                steps += 1;
            }
            assert_eq!(steps, (20_000 - start).div_ceil(LINES_A_STEP * LINE_BYTES));
            walk.finish();
        }
        assert!(!Ahead::nothing().of_thread(3, 4).step());
    }
}
