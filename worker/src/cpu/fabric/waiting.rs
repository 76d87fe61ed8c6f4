//! How a rank waits for the flags of the others, and how a wait that fails ends the job.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use super::{Fabric, Place};
use crate::cpu::ahead::Walk;
use crate::cpu::team::Seats;
use crate::decoder::Fault;
use crate::wait::Backoff;

/// Whether `seen` is `epoch` or after it.
pub(super) fn reached(seen: u32, epoch: u32) -> bool {
    seen.wrapping_sub(epoch).cast_signed() >= 0
}

impl Fabric {
    /// Thread `thread` of the team waits until all ranks have published a slice of this epoch.
    pub(super) fn await_slice(
        &self,
        slice: usize,
        (seats, thread): (&Seats, usize),
        at: Place,
        ahead: &mut Walk<'_>,
        failure: &Failure,
    ) -> Result<(), Fault> {
        for step in 0..self.shape.ranks {
            // Own slice first, then the neighbours: ranks do not all hang on rank 0's line.
            let rank = (self.rank + step) % self.shape.ranks;
            let flag = self.segment(rank).word(self.shape.slice_flag(slice));
            // This rank's own slices wait for a thread of the team.
            let meanwhile = || {
                if rank == self.rank {
                    seats.give_way(thread);
                }
            };
            self.await_flag(flag, self.epoch, rank, thread == 0, at, ahead, &meanwhile, failure)?;
        }
        Ok(())
    }

    /// Waits until `flag` has reached `epoch`: walks ahead, spins, yields and calls `meanwhile`, gives up at the limit.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn await_flag(
        &self,
        flag: &AtomicU32,
        epoch: u32,
        peer: usize,
        leader: bool,
        at: Place,
        ahead: &mut Walk<'_>,
        meanwhile: &dyn Fn(),
        failure: &Failure,
    ) -> Result<(), Fault> {
        if reached(flag.load(Ordering::Acquire), epoch) {
            return Ok(());
        }
        let begun = Instant::now();
        let mut backoff = Backoff::new(self.crowded);
        loop {
            let seen = flag.load(Ordering::Acquire);
            if reached(seen, epoch) {
                if leader {
                    self.waited_ns.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
                }
                return Ok(());
            }
            if ahead.step() {
                continue;
            }
            backoff.pause();
            if !backoff.yielded().is_zero() {
                meanwhile();
            }
            if backoff.yielded() > self.wait_limit || failure.reported() {
                return Err(Fault::WaitLimit {
                    rank: self.rank,
                    peer,
                    step: at.step,
                    phase: at.layer.map_or_else(|| at.what.to_owned(), |layer| format!("layer {layer} {}", at.what)),
                    expected: u64::from(epoch),
                    seen: u64::from(seen),
                    waited_ms: begun.elapsed().as_millis() as u64,
                });
            }
        }
    }
}

/// The first fault of a job; other threads stop waiting when they see it.
#[derive(Default)]
pub(super) struct Failure {
    reported: AtomicBool,
    first: Mutex<Option<Fault>>,
}

impl Failure {
    pub fn reported(&self) -> bool {
        self.reported.load(Ordering::Relaxed)
    }

    pub fn report(&self, fault: Fault) {
        let mut first = self.first.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        first.get_or_insert(fault);
        self.reported.store(true, Ordering::Relaxed);
    }

    pub fn into_result(self) -> Result<(), Fault> {
        self.first.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).map_or(Ok(()), Err)
    }
}
