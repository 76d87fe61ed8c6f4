//! The exchange between the ranks of a group, through shared memory: sums inside the loop, and words for the sampler.
//!
//! Every rank writes its own outbox and reads everybody's (its own included: one code path for 1 to 16 ranks). An
//! exchange has a number, its *epoch*. Its values are cut in slices; a slice is published by storing the epoch to its
//! flag:
//!
//! ```text
//! producer: writes the slice, then stores flag = epoch (release)   orders values before flag, between processes
//! consumer: loads flag (acquire) until it is not behind the epoch, then reads the slice
//! ```
//!
//! Two buffers, by the epoch's parity, suffice. Rank A overwrites in epoch e + 2 what it published in e. It begins e +
//! 2 after it has consumed all of e + 1, so it has seen a flag of e + 1 of every rank B. B stored that flag after it
//! had begun e + 1, which it does after all its threads have consumed all of e (the team joins in between). So B's
//! reads of A's epoch e happen before A's writes of e + 2. The same holds for words, which have boxes and flags of
//! their own. For the same reason a flag runs at most one epoch ahead of a waiting reader, and a flag that is ahead
//! still means that e is complete.
//!
//! Epochs wrap around and are compared by signed difference. They start a thousand before the wrap, so that every run
//! of the program passes it.

mod layout;
#[cfg(test)]
pub(super) mod tests;
mod waiting;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::ahead::Ahead;
use super::team::Team;
use crate::decoder::Fault;
use crate::shm::{Segment, ShmError};
use waiting::Failure;

pub use layout::{SLICE, Shape};

/// The epoch before the first.
const START: u32 = u32::MAX - 1000;

/// Where in the loop an exchange happens, for reports.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Step in the life of the worker.
    pub step: u64,
    /// Decoder layer, where it is in one.
    pub layer: Option<usize>,
    /// What is exchanged.
    pub what: &'static str,
}

/// What the debug hook is told, before it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg(test)]
pub enum Moment {
    /// Publishing a slice.
    Publish(usize),
    /// Waiting for a slice.
    Consume(usize),
}

/// Delays or permutes an exchange in tests.
#[cfg(test)]
pub type Hook = std::sync::Arc<dyn Fn(Moment) + Send + Sync>;

/// One rank's end of the exchange.
pub struct Fabric {
    shape: Shape,
    rank: usize,
    own: Segment,
    handle: String,
    /// Segments of the other ranks, by rank; the place of this rank stays empty.
    peers: Vec<Option<Segment>>,
    epoch: u32,
    gather_epoch: u32,
    gathered: Vec<u32>,
    wait_limit: Duration,
    crowded: bool,
    /// Nanoseconds that the leader waited since last asked.
    waited_ns: AtomicU64,
    /// Swaps two ranks' sums, to prove that the tests notice.
    #[cfg(test)]
    pub swap_leaves: bool,
    /// Uses one buffer in place of two, to prove that the second is needed.
    #[cfg(test)]
    pub one_buffer: bool,
    #[cfg(test)]
    pub hook: Option<Hook>,
}

impl Fabric {
    /// Makes this rank's exchange memory. With one rank it is complete; otherwise [`Fabric::join`] follows.
    ///
    /// # Errors
    /// The operating system refuses the memory.
    pub fn new(shape: Shape, rank: usize, wait_limit: Duration, crowded: bool) -> Result<Self, ShmError> {
        let (own, handle) = Segment::create(shape.bytes())?;
        own.word(shape.gather_flag()).store(START, Ordering::Relaxed);
        for slice in 0..shape.slices() {
            own.word(shape.slice_flag(slice)).store(START, Ordering::Relaxed);
        }
        for (index, word) in shape.header(rank).into_iter().enumerate() {
            own.word(index * 4).store(word, Ordering::Release);
        }
        Ok(Self {
            shape,
            rank,
            own,
            handle,
            peers: (0..shape.ranks).map(|_| None).collect(),
            epoch: START,
            gather_epoch: START,
            gathered: Vec::with_capacity(shape.max_words * shape.ranks),
            wait_limit,
            crowded,
            waited_ns: AtomicU64::new(0),
            #[cfg(test)]
            swap_leaves: false,
            #[cfg(test)]
            one_buffer: false,
            #[cfg(test)]
            hook: None,
        })
    }

    /// Where other ranks find this rank's memory.
    pub fn handle(&self) -> &str {
        &self.handle
    }

    /// Maps the memory of all ranks; handles in rank order.
    ///
    /// # Errors
    /// There are too few handles, or one does not lead to the memory of that rank of this group.
    pub fn join(&mut self, handles: &[String]) -> Result<(), Fault> {
        let failed = |problem: String| Fault::Join { rank: self.rank, problem };
        if handles.len() != self.shape.ranks {
            return Err(failed(format!("{} handles for {} ranks", handles.len(), self.shape.ranks)));
        }
        let mut peers = Vec::with_capacity(handles.len());
        for (peer, handle) in handles.iter().enumerate() {
            if peer == self.rank {
                peers.push(None);
                continue;
            }
            let segment = Segment::open(handle, self.shape.bytes()).map_err(|error| failed(error.to_string()))?;
            let found: [u32; 8] = std::array::from_fn(|index| segment.word(index * 4).load(Ordering::Acquire));
            let expected = self.shape.header(peer);
            if found != expected {
                return Err(failed(format!(
                    "{handle} is not the exchange memory of rank {peer} with this model, settings, instruction set and \
                     build: its header is {found:x?}, not {expected:x?}"
                )));
            }
            peers.push(Some(segment));
        }
        self.peers = peers;
        Ok(())
    }

    /// Time the leader has waited for other ranks since this was last asked.
    pub fn take_waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.swap(0, Ordering::Relaxed))
    }

    /// Exchanges rows of `width` values, slice by slice: `produce(slice, out)` fills this rank's `[max_rows][SLICE]`
    /// (as many rows and columns of it as it likes), `consume(slice, of_ranks)` gets everybody's, in rank order. Slices
    /// are consumed as they arrive while others are still being produced; each is produced and consumed once, by some
    /// thread. While a thread waits it walks `ahead`.
    ///
    /// # Errors
    /// A rank did not publish within the wait limit.
    pub fn exchange(
        &mut self,
        team: &Team,
        at: Place,
        ahead: &Ahead<'_>,
        produce: impl Fn(usize, &mut [f32]) + Sync,
        consume: impl Fn(usize, &[&[f32]]) + Sync,
    ) -> Result<(), Fault> {
        self.epoch = self.epoch.wrapping_add(1);
        let this = &*self;
        let next = AtomicUsize::new(0);
        let failure = Failure::default();
        let publish = |slice: usize| {
            produce(slice, this.own_slice(slice));
            this.hook_publish(slice);
            this.own.word(this.shape.slice_flag(slice)).store(this.epoch, Ordering::Release);
        };
        let (threads, seats) = (team.threads(), team.seats());
        let drain = |thread: usize| {
            let mut ahead = ahead.of_thread(thread, threads);
            loop {
                // Relaxed: deals out numbers; the values are ordered by the flags.
                let slice = next.fetch_add(1, Ordering::Relaxed);
                if slice >= this.shape.slices() {
                    break;
                }
                this.hook_consume(slice);
                if let Err(fault) = this.await_slice(slice, (seats, thread), at, &mut ahead, &failure) {
                    failure.report(fault);
                    return;
                }
                let mut of_ranks = [&[][..]; crate::plan::MAX_LEAVES];
                for (rank, values) in of_ranks[..this.shape.ranks].iter_mut().enumerate() {
                    *values = this.read_slice(rank, slice);
                }
                this.swap_two(&mut of_ranks);
                consume(slice, &of_ranks[..this.shape.ranks]);
            }
            ahead.finish();
        };
        team.for_each_then(self.shape.slices(), publish, drain);
        failure.into_result()
    }

    /// Gives `mine` to all ranks and returns everybody's words, concatenated in rank order. All ranks give equally
    /// many.
    ///
    /// # Errors
    /// A rank did not publish within the wait limit.
    ///
    /// # Panics
    /// If there are more than `max_words`.
    pub fn all_gather(&mut self, mine: &[u32], at: Place) -> Result<&[u32], Fault> {
        assert!(mine.len() <= self.shape.max_words, "{} words, at most {}", mine.len(), self.shape.max_words);
        self.gather_epoch = self.gather_epoch.wrapping_add(1);
        let words = self.shape.words(self.gather_epoch);
        // Relaxed: the flag's release publishes them.
        for (index, word) in mine.iter().enumerate() {
            self.own.word(words + index * 4).store(*word, Ordering::Relaxed);
        }
        self.own.word(self.shape.gather_flag()).store(self.gather_epoch, Ordering::Release);
        let (failure, mut nothing) = (Failure::default(), Ahead::nothing().of_thread(0, 1));
        for rank in 0..self.shape.ranks {
            let flag = self.segment(rank).word(self.shape.gather_flag());
            self.await_flag(flag, self.gather_epoch, rank, true, at, &mut nothing, &|| (), &failure)?;
        }
        self.gathered.clear();
        for rank in 0..self.shape.ranks {
            let segment = if rank == self.rank { &self.own } else { self.peers[rank].as_ref().expect(JOINED) };
            let of_rank = (0..mine.len()).map(|index| segment.word(words + index * 4).load(Ordering::Relaxed));
            self.gathered.extend(of_rank);
        }
        Ok(&self.gathered)
    }

    fn segment(&self, rank: usize) -> &Segment {
        if rank == self.rank { &self.own } else { self.peers[rank].as_ref().expect(JOINED) }
    }

    #[allow(unsafe_code, clippy::mut_from_ref)]
    fn own_slice(&self, slice: usize) -> &mut [f32] {
        // SAFETY: each slice is produced by one unit of one exchange, and by the argument at the top of the file no
        // rank still reads what it held two epochs ago; nobody reads it before its flag, which is stored after this
        // unit.
        unsafe { self.own.write(self.slice_offset(slice), self.shape.slice_len()) }
    }

    #[allow(unsafe_code)]
    fn read_slice(&self, rank: usize, slice: usize) -> &[f32] {
        // SAFETY: `await_slice` saw the flags of all ranks (acquire), and by the argument at the top of the file the
        // owner does not write the slice again before this exchange has been consumed here.
        unsafe { self.segment(rank).read(self.slice_offset(slice), self.shape.slice_len()) }
    }

    fn slice_offset(&self, slice: usize) -> usize {
        #[cfg(test)]
        if self.one_buffer {
            return self.shape.slice(0, slice);
        }
        self.shape.slice(self.epoch, slice)
    }

    #[cfg(test)]
    fn hook_publish(&self, slice: usize) {
        self.hook.iter().for_each(|hook| hook(Moment::Publish(slice)));
    }
    #[cfg(not(test))]
    fn hook_publish(&self, _slice: usize) {}

    #[cfg(test)]
    fn hook_consume(&self, slice: usize) {
        self.hook.iter().for_each(|hook| hook(Moment::Consume(slice)));
    }
    #[cfg(not(test))]
    fn hook_consume(&self, _slice: usize) {}

    #[cfg(test)]
    fn swap_two(&self, of_ranks: &mut [&[f32]]) {
        if self.swap_leaves {
            of_ranks.swap(0, 2);
        }
    }
    #[cfg(not(test))]
    fn swap_two(&self, _of_ranks: &mut [&[f32]]) {}
}

const JOINED: &str = "all ranks' memory, because control calls join before run";
