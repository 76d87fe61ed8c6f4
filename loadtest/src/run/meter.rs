//! What a run is doing while it does it: counts and times that every stream adds to and that [`crate::run::live`] looks
//! at.
//!
//! The report is not made of these: they hold what arrived, of whichever requests, not what was counted.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::client::record::{Failure, RequestRecord, Watch};
use crate::load::conduct::Conduct;
use crate::stats::distribution::Distribution;

/// Counts of one run, added to by its streams as they go.
#[derive(Debug, Default)]
pub struct Meter {
    in_flight: AtomicUsize,
    peak_in_flight: AtomicUsize,
    succeeded: AtomicU64,
    failed: AtomicU64,
    /// Of which the client misbehaved on purpose: neither of the above.
    misused: AtomicU64,
    /// Tokens and chunks of the answers that are complete: how many tokens a chunk stands for.
    complete_tokens: AtomicU64,
    complete_chunks: AtomicU64,
    arrivals: Mutex<Arrivals>,
}

#[derive(Debug, Clone)]
pub struct Arrivals {
    pub answers: u64,
    pub chunks: u64,
    /// From when a request was due to its first chunk.
    pub first_token: Distribution,
    pub gaps: Distribution,
}

impl Default for Arrivals {
    fn default() -> Self {
        Self { answers: 0, chunks: 0, first_token: Distribution::coarse(), gaps: Distribution::coarse() }
    }
}

impl Meter {
    /// Counts a request that is sent now.
    pub fn begin(&self) {
        let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak_in_flight.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts the end of a request that was sent.
    pub fn end(&self, record: &RequestRecord) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        match &record.failure {
            Some(Failure::Interrupted) => {}
            // What its client spoiled is no failure of the server's.
            _ if record.conduct != Conduct::Usual => {
                self.misused.fetch_add(1, Ordering::Relaxed);
            }
            None => self.answer(record),
            Some(_) => self.fail(),
        }
    }

    /// Counts a request that failed, maybe without having been sent.
    pub fn fail(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    fn answer(&self, record: &RequestRecord) {
        self.succeeded.fetch_add(1, Ordering::Relaxed);
        self.complete_tokens.fetch_add(record.output_tokens(), Ordering::Relaxed);
        self.complete_chunks.fetch_add(record.chunks_ns.len() as u64, Ordering::Relaxed);
        self.arrivals().answers += 1;
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub fn peak_in_flight(&self) -> usize {
        self.peak_in_flight.load(Ordering::Relaxed)
    }

    /// Requests that ended well and that did not, so far.
    pub fn ended(&self) -> (u64, u64) {
        (self.succeeded.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Requests that ended, however, so far, whose client misbehaved on purpose.
    pub fn misused(&self) -> u64 {
        self.misused.load(Ordering::Relaxed)
    }

    /// Tokens that a chunk stands for, by the answers that are complete; 1 before there are any.
    pub fn tokens_a_chunk(&self) -> f64 {
        match self.complete_chunks.load(Ordering::Relaxed) {
            0 => 1.0,
            chunks => self.complete_tokens.load(Ordering::Relaxed) as f64 / chunks as f64,
        }
    }

    /// Exchanges what arrived since the last look for `fresh`, which is empty: streams wait for no longer than that.
    pub fn take(&self, fresh: Arrivals) -> Arrivals {
        std::mem::replace(&mut *self.arrivals(), fresh)
    }

    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Meter {
    fn chunk(&self, is_first: bool, since_ns: u64) {
        let mut arrivals = self.arrivals();
        arrivals.chunks += 1;
        let times = if is_first { &mut arrivals.first_token } else { &mut arrivals.gaps };
        times.record_ns(since_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_record_tells_its_meter_what_arrives() {
        let meter = Arc::new(Meter::default());
        let mut record = RequestRecord::new(0, 10_000_000, 30_000_000);
        record.watch = Some(meter.clone());
        meter.begin();
        for time_ns in [110_000_000, 112_000_000, 120_000_000] {
            record.add_chunk(time_ns).expect("few");
        }
        assert_eq!((meter.in_flight(), meter.peak_in_flight(), meter.ended()), (1, 1, (0, 0)));
        record.completion_tokens = Some(6);
        assert_eq!(meter.tokens_a_chunk(), 1.0, "nothing is known yet");
        meter.end(&record);
        record.failure = Some(Failure::Truncated);
        meter.begin();
        meter.end(&record);
        meter.fail();
        record.failure = Some(Failure::Interrupted);
        meter.begin();
        meter.end(&record);
        assert_eq!((meter.in_flight(), meter.peak_in_flight(), meter.ended()), (0, 1, (1, 2)));
        assert_eq!(meter.tokens_a_chunk(), 2.0, "a failed answer is not complete");

        let seen = meter.take(Arrivals::default());
        assert_eq!((seen.answers, seen.chunks), (1, 3));
        let near = |ms: Option<f64>, want: f64| assert!((ms.expect("times") / want - 1.0).abs() < 0.01, "{ms:?}");
        near(seen.first_token.percentile_ms(50.0), 100.0);
        near(seen.gaps.percentile_ms(50.0), 2.0);
        near(seen.gaps.percentile_ms(99.0), 8.0);
        let nothing = meter.take(Arrivals::default());
        assert_eq!((nothing.chunks, nothing.gaps.percentile_ms(50.0)), (0, None));
    }
}
