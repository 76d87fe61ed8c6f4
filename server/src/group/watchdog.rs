//! Whether the ranks of a group still work: a busy one reports its steps, within the time that steps have been taking;
//! an idle one is asked. Besides, every connection answers pings (`start`).

use std::time::Duration;

use futures::future::{join_all, try_join_all};
use looplane_proto::worker::v1::HealthRequest;
use looplane_proto::worker::v1::worker_client::WorkerClient;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;

/// What takes so much longer than it may shows that the server itself stood still.
const STANDSTILL: Duration = Duration::from_millis(500);

/// Whether what began at `begun` and takes `most` at most took so long that the server stood still meanwhile, with all
/// its clocks running on: then nothing is late yet.
pub(super) fn stood_still(begun: Instant, most: Duration) -> bool {
    begun.elapsed() > most + STANDSTILL
}

/// When a rank last reported a step, and which.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    pub(super) when: Instant,
    /// Plan, and step in it.
    pub(super) step: (u64, u32),
}

/// The newest report of each rank of a group.
#[derive(Debug)]
pub(super) struct Reports {
    ranks: Vec<Report>,
    /// Since when the group has owed one.
    owed_since: Option<Instant>,
}

impl Reports {
    /// Nothing was reported yet.
    pub(super) fn new(ranks: usize, now: Instant) -> Self {
        Self { ranks: vec![Report { when: now, step: (0, 0) }; ranks], owed_since: None }
    }

    /// A rank reports a step.
    pub(super) fn reported(&mut self, rank: usize, step: (u64, u32), now: Instant) {
        self.ranks[rank] = Report { when: now, step };
    }

    /// Whether the group owes a report now.
    pub(super) fn owe(&mut self, owed: bool, now: Instant) {
        self.owed_since = owed.then(|| self.owed_since.unwrap_or(now));
    }

    /// The server itself stood still, while clocks ran on: nothing is late yet.
    pub(super) fn start_again(&mut self, now: Instant) {
        self.ranks.iter_mut().for_each(|report| report.when = now);
        self.owed_since = self.owed_since.map(|_| now);
    }

    /// A rank's newest report.
    pub(super) fn of(&self, rank: usize) -> Report {
        self.ranks[rank]
    }

    /// When the first rank has reported nothing for `limit` although it should have, and which. A rank owes a report
    /// while the group does, and while it is behind rank 0.
    pub(super) fn overdue(&self, limit: Duration) -> Option<(Instant, usize)> {
        let first = self.ranks[0];
        let owing = self.ranks.iter().enumerate().filter_map(|(rank, report)| match self.owed_since {
            Some(since) => Some((report.when.max(since) + limit, rank)),
            None => (report.step < first.step).then_some((report.when.max(first.when) + limit, rank)),
        });
        owing.min()
    }
}

/// Asks all ranks whether they are still there, `pause` from now; each has twice `limit` to answer, time in which the
/// server itself stood still left out.
///
/// # Errors
/// Names a rank that does not answer, or answers with an error, in words that follow "rank 3 ".
pub(super) async fn probe(
    ranks: Vec<WorkerClient<Channel>>,
    pause: Duration,
    limit: Duration,
) -> Result<(), (usize, String)> {
    sleep(pause).await;
    let probes = ranks.into_iter().enumerate().map(async |(rank, mut client)| {
        let mut unanswered = 0;
        while unanswered < 2 {
            let asking = Instant::now();
            match timeout(limit, client.health(HealthRequest {})).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(status)) => return Err((rank, format!("is not well: {}", status.message()))),
                Err(_) => unanswered += u32::from(!stood_still(asking, limit)),
            }
        }
        Err((rank, format!("does not answer: nothing for {:?} to the question how it is", 2 * limit)))
    });
    try_join_all(probes).await.map(|_| ())
}

/// The first rank that does not say how it is within `limit`.
pub(super) async fn unresponsive(ranks: Vec<WorkerClient<Channel>>, limit: Duration) -> Option<usize> {
    let asked = ranks.into_iter().map(async |mut client| timeout(limit, client.health(HealthRequest {})).await.is_ok());
    join_all(asked).await.iter().position(|answered| !answered)
}

/// The end of a probe; pending where there is none. Cancel-safe.
pub(super) async fn answer(
    probing: &mut Option<impl Future<Output = Result<(), (usize, String)>> + Unpin>,
) -> Result<(), (usize, String)> {
    match probing {
        Some(probe) => probe.await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_late_while_the_group_owes_or_others_are_ahead() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let limit = Duration::from_millis(100);
        let mut reports = Reports::new(2, start);
        assert_eq!(reports.overdue(limit), None);
        reports.owe(true, at(50));
        reports.reported(1, (1, 0), at(70));
        assert_eq!(reports.overdue(limit), Some((at(150), 0)));
        reports.reported(0, (1, 1), at(90));
        reports.owe(false, at(90));
        assert_eq!(reports.overdue(limit), Some((at(190), 1)), "rank 1 is a step behind");
        reports.reported(1, (1, 1), at(95));
        assert_eq!(reports.overdue(limit), None);
        reports.owe(true, at(100));
        reports.start_again(at(5000));
        assert_eq!(reports.overdue(limit), Some((at(5100), 0)));
    }
}
