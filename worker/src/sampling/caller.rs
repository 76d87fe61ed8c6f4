//! What the sampler asks of its caller: exchanges with the other ranks, and threads.

use std::convert::Infallible;

/// Carries words between the ranks of a group.
pub trait Exchange {
    /// Why an exchange failed: another rank is gone, or the wait passed its limit.
    type Error;

    /// Gives this rank's words to all ranks and returns those of all ranks, concatenated in rank order.
    ///
    /// Every rank calls this equally often with equally many words, at most
    /// [`Sampler::max_words`](super::Sampler::max_words).
    fn all_gather(&mut self, mine: &[u32]) -> Result<&[u32], Self::Error>;
}

/// Spreads independent units of work over a caller's threads.
pub trait ParallelFor {
    /// Calls `work` once with each of `0..units`, on any threads in any order, and returns when all calls have.
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync));
}

/// Runs all units on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl ParallelFor for Serial {
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..units).for_each(work);
    }
}

/// The exchange of a group of one rank.
#[derive(Debug, Clone, Default)]
pub struct Alone {
    words: Vec<u32>,
}

impl Exchange for Alone {
    type Error = Infallible;

    fn all_gather(&mut self, mine: &[u32]) -> Result<&[u32], Infallible> {
        self.words.clear();
        self.words.extend_from_slice(mine);
        Ok(&self.words)
    }
}
