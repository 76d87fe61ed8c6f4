//! The board on which the hosts of a group agree between launches: all offer a number, and all take the least, or the
//! bits that all have.
//!
//! A rank writes on a segment of shared memory of its own and reads those of all. Agreements are numbered: a *round*.
//!
//! ```text
//! each rank: writes its offer, then stores flag = round (release)   orders offer before flag, between processes
//!            loads every flag (acquire) until it is not behind the round, then reads that rank's offer
//! ```
//!
//! Two places for an offer, by the round's parity, suffice. Rank A overwrites in round n + 2 what it offered in n. It
//! begins n + 2 after it has ended n + 1, so it has seen the flag n + 1 of every rank B. B stored that flag after it
//! had ended n, in which it read A's offer. So B's read of A's offer of n happens before A's write of n + 2. For the
//! same reason a flag runs at most one round ahead of a reader that waits, and a flag that is ahead still means that
//! the offer waited for is there.
//!
//! Rounds wrap around and are compared by signed difference. They start a thousand before the wrap, so that every run
//! of the program passes it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::decoder::Fault;
use crate::shm::{Segment, ShmError};
use crate::wait::Backoff;

/// The round before the first.
const START: u32 = u32::MAX - 1000;
/// A segment, one cache line: the flag, a word that is not used, the offers [2] u64 in two words each. Offsets in
/// bytes.
const BYTES: usize = 64;
const FLAG: usize = 0;
const OFFERS: usize = 8;

/// What the debug hook is told, before it happens.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The offer of a round is stored, its flag is not.
    Post(u32),
    /// The flag of a rank has come; its offer is about to be read.
    Read(u32),
}

/// One rank's end of the board.
pub struct Board {
    rank: usize,
    own: Segment,
    /// Segments of the other ranks, by rank; the place of this rank stays empty.
    peers: Vec<Option<Segment>>,
    round: u32,
    wait_limit: Duration,
    /// Uses one place in place of two, to prove that the second is needed.
    #[cfg(test)]
    one_place: bool,
    #[cfg(test)]
    hook: Option<std::sync::Arc<dyn Fn(Moment) + Send + Sync>>,
}

impl Board {
    /// Makes this rank's part; a rank that does not come within `wait_limit` of a round is a fault.
    ///
    /// # Errors
    /// The operating system refuses the memory.
    pub fn new(rank: usize, ranks: usize, wait_limit: Duration) -> Result<Self, ShmError> {
        let (own, _) = Segment::create(BYTES)?;
        own.word(FLAG).store(START, Ordering::Release);
        Ok(Self {
            rank,
            own,
            peers: (0..ranks).map(|_| None).collect(),
            round: START,
            wait_limit,
            #[cfg(test)]
            one_place: false,
            #[cfg(test)]
            hook: None,
        })
    }

    /// What the other ranks need of this one.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.own.descriptor()
    }

    /// Maps the part of another rank.
    ///
    /// # Errors
    /// The descriptor is of something else.
    pub fn map(&mut self, peer: usize, descriptor: &OwnedFd) -> Result<(), ShmError> {
        self.peers[peer] = Some(Segment::of(descriptor, &format!("(board) of rank {peer}"), BYTES)?);
        Ok(())
    }

    /// Offers `offer` and returns the least offer of all ranks, the same to each: the newest plan that every rank has.
    /// Rounds of all ranks happen in the same order; `step` is for reports.
    ///
    /// # Errors
    /// A rank did not come within the limit.
    pub fn agree(&mut self, step: u64, offer: u64) -> Result<u64, Fault> {
        self.meet(step, offer, u64::min)
    }

    /// Offers bits and returns those that all ranks offer, the same to each. A round, as of [`Self::agree`].
    ///
    /// # Errors
    /// A rank did not come within the limit.
    pub fn all(&mut self, step: u64, bits: u64) -> Result<u64, Fault> {
        self.meet(step, bits, |a, b| a & b)
    }

    fn meet(&mut self, step: u64, offer: u64, both: fn(u64, u64) -> u64) -> Result<u64, Fault> {
        self.round = self.round.wrapping_add(1);
        // Relaxed: the flag's release publishes them.
        self.own.word(self.place()).store(offer as u32, Ordering::Relaxed);
        self.own.word(self.place() + 4).store((offer >> 32) as u32, Ordering::Relaxed);
        #[cfg(test)]
        self.told(Moment::Post);
        self.own.word(FLAG).store(self.round, Ordering::Release);
        let mut agreed = offer;
        for (peer, segment) in self.peers.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            let segment = segment.as_ref().expect("all ranks' parts, because control calls join before run");
            self.await_round(peer, segment, step)?;
            #[cfg(test)]
            self.told(Moment::Read);
            let [low, high] = [0, 4].map(|half| segment.word(self.place() + half).load(Ordering::Relaxed));
            agreed = both(agreed, u64::from(low) | u64::from(high) << 32);
        }
        Ok(agreed)
    }

    fn await_round(&self, peer: usize, segment: &Segment, step: u64) -> Result<(), Fault> {
        let (begun, mut backoff) = (Instant::now(), Backoff::new(false));
        loop {
            let seen = segment.word(FLAG).load(Ordering::Acquire);
            if seen.wrapping_sub(self.round).cast_signed() >= 0 {
                return Ok(());
            }
            backoff.pause();
            if backoff.yielded() > self.wait_limit {
                return Err(Fault::WaitLimit {
                    rank: self.rank,
                    peer,
                    step,
                    phase: "agreeing between launches".into(),
                    expected: u64::from(self.round),
                    seen: u64::from(seen),
                    waited_ms: begun.elapsed().as_millis() as u64,
                });
            }
        }
    }

    fn place(&self) -> usize {
        #[cfg(test)]
        if self.one_place {
            return OFFERS;
        }
        OFFERS + self.round as usize % 2 * 8
    }

    #[cfg(test)]
    fn told(&self, moment: fn(u32) -> Moment) {
        self.hook.iter().for_each(|hook| hook(moment(self.round)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::{Arc, Mutex, mpsc};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn group(ranks: usize, limit: Duration) -> Vec<Board> {
        let mut group: Vec<_> = (0..ranks).map(|rank| Board::new(rank, ranks, limit).unwrap()).collect();
        let parts: Vec<_> = group.iter().map(|board| board.descriptor().try_clone_to_owned().unwrap()).collect();
        for board in &mut group {
            let rank = board.rank;
            let others = parts.iter().enumerate().filter(|(peer, _)| *peer != rank);
            others.for_each(|(peer, part)| board.map(peer, part).unwrap());
        }
        group
    }

    /// What a rank offers in a round: both halves vary, and the least is now this rank's, now that one's.
    fn offer(rank: usize, round: usize) -> u64 {
        ((rank * 7919 + round * 104_729) as u64 % 1009) << 32 | ((rank * 31 + round * 17) as u64 % 257)
    }

    /// Sleeps or yields at moments that a counter picks.
    fn delays(seed: u64) -> Arc<dyn Fn(Moment) + Send + Sync> {
        let counter = AtomicU64::new(seed);
        Arc::new(move |_| {
            let mixed = counter.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
            match mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56 {
                0..2 => std::thread::sleep(Duration::from_micros(300)),
                2..40 => std::thread::yield_now(),
                _ => {}
            }
        })
    }

    #[test]
    fn all_take_the_least_across_the_wrap_and_under_delays() {
        for ranks in [1, 2, 5, 16] {
            // More rounds than there are before the wrap.
            let rounds = if ranks == 16 { 200 } else { 1200 };
            std::thread::scope(|scope| {
                for mut board in group(ranks, LIMIT) {
                    scope.spawn(move || {
                        board.hook = Some(delays(board.rank as u64 + 1));
                        for round in 0..rounds {
                            let offers = (0..ranks).map(|rank| offer(rank, round));
                            // Rounds of both kinds, in turns.
                            let (agreed, expected) = match round % 3 {
                                0 => (board.all(round as u64, offer(board.rank, round)), offers.fold(!0, |a, b| a & b)),
                                _ => (board.agree(round as u64, offer(board.rank, round)), offers.fold(!0, u64::min)),
                            };
                            assert_eq!(agreed.unwrap(), expected, "rank {} of {ranks}, round {round}", board.rank);
                        }
                        assert_eq!(board.round, START.wrapping_add(rounds as u32));
                    });
                }
            });
        }
    }

    /// Rank 0 dawdles before it reads the first round; rank 1 goes on as far as the protocol lets it, which is to post
    /// the second. Returns what rank 0 takes in the first.
    fn read_late(one_place: bool) -> u64 {
        let mut group = group(2, LIMIT);
        let (mut second, mut first) = (group.pop().unwrap(), group.pop().unwrap());
        (first.one_place, second.one_place) = (one_place, one_place);
        let (posted, seen) = mpsc::channel();
        let (begun, seen) = (START.wrapping_add(1), Mutex::new(seen));
        second.hook = Some(Arc::new(move |moment| {
            if moment == Moment::Post(begun + 1) {
                posted.send(()).unwrap();
            }
        }));
        first.hook = Some(Arc::new(move |moment| {
            if moment == Moment::Read(begun) {
                seen.lock().unwrap().recv_timeout(LIMIT).unwrap();
            }
        }));
        std::thread::scope(|scope| {
            scope.spawn(|| [10, 20].map(|offer| second.agree(0, offer).unwrap()));
            [30, 40].map(|offer| first.agree(0, offer).unwrap())[0]
        })
    }

    #[test]
    fn a_late_reader_needs_the_second_place() {
        assert_eq!(read_late(false), 10);
        // The control: with one place the peer has overwritten it.
        assert_eq!(read_late(true), 20);
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let mut group = group(3, Duration::from_millis(50));
        let mut last = group.pop().unwrap();
        let mut first = group.swap_remove(0);
        // Rank 2 comes, rank 1 does not.
        std::thread::scope(|scope| {
            scope.spawn(|| last.agree(9, 5).unwrap_err());
            let fault = first.agree(9, 7).unwrap_err();
            let Fault::WaitLimit { rank: 0, peer: 1, step: 9, phase, expected, seen, waited_ms } = fault else {
                panic!("{fault}");
            };
            assert_eq!((expected, seen), (u64::from(START) + 1, u64::from(START)));
            assert!(phase == "agreeing between launches" && waited_ms >= 50, "{phase}, {waited_ms}");
        });
    }
}
