//! How late the load tester itself is: what its own timers say about the times that it takes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::stats::distribution::Distribution;

/// Time between two beats. Timers are right to a millisecond.
const PERIOD: Duration = Duration::from_millis(10);

/// A task that asks to be woken every 10 ms and counts how late it is. It waits for the same threads as those that read
/// the streams, so a client that is too busy to read in time is as late here.
pub struct LagMeter {
    lags: Arc<Mutex<Distribution>>,
    task: AbortHandle,
}

impl LagMeter {
    pub fn start() -> Self {
        let lags = Arc::<Mutex<Distribution>>::default();
        let task = tokio::spawn({
            let lags = lags.clone();
            async move {
                loop {
                    let due = Instant::now() + PERIOD;
                    tokio::time::sleep_until(due).await;
                    let lag_ns = due.elapsed().as_nanos() as u64;
                    lags.lock().unwrap_or_else(PoisonError::into_inner).record_ns(lag_ns);
                }
            }
        });
        Self { lags, task: task.abort_handle() }
    }

    pub fn lags(&self) -> Distribution {
        self.lags.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LagMeter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_is_held_up_shows() {
        let meter = LagMeter::start();
        tokio::time::sleep(Duration::from_millis(50)).await;
        std::thread::sleep(Duration::from_millis(200));
        tokio::time::sleep(Duration::from_millis(50)).await;
        let lags = meter.lags();
        assert!(lags.count() >= 3, "{} beats", lags.count());
        assert!(lags.max_ms().expect("beats") >= 185.0, "{:?}", lags.max_ms());
    }
}
