//! Whether the ranks of a group still work: a busy one reports its steps, within the time that steps have been taking;
//! an idle one is asked. Besides, every connection answers pings (`start`).

use std::collections::VecDeque;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use looplane_proto::worker::v1::HealthRequest;
use looplane_proto::worker::v1::worker_client::WorkerClient;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;

/// A step is late after this many times what it should take.
const LATE: u32 = 4;
/// Steps that are remembered.
const REMEMBERED: usize = 64;
/// A step of this many rows may take twice as long as one of a single row, on any backend.
const ROWS_OF_A_UNIT: u64 = 4;
/// What a step with rows of prompts should take at most, where nobody says otherwise.
const PROMPT_STEP: Duration = Duration::from_millis(500);
/// Rows of prompts in a step before any was timed, and the least: steps of fewer would spend their time on reading
/// weights.
const MIN_PROMPT_ROWS: u32 = 64;
/// Rows that the CPU backend computes together.
const PANEL_ROWS: u32 = 16;

/// What steps have been taking, over all groups of a replica.
#[derive(Debug)]
pub(super) struct StepTimes {
    /// The newest steps, in nanoseconds of a step of one row.
    units: VecDeque<u64>,
    /// Rows of prompts that a step may have, so that nobody waits long for the next.
    prompt_rows: u32,
    /// Rows that a step may have at all.
    max_rows: u32,
}

impl StepTimes {
    /// Nothing was timed yet. Steps have at most `max_rows` rows.
    pub(super) fn new(max_rows: u32) -> Self {
        Self { units: VecDeque::new(), prompt_rows: MIN_PROMPT_ROWS.min(max_rows), max_rows }
    }

    /// A step was run. It computed `rows` rows, `prompt_rows` of them of prompts.
    pub(super) fn observe(&mut self, rows: u64, prompt_rows: u64, time: Duration) {
        let time_ns = time.as_nanos() as u64;
        if self.units.len() == REMEMBERED {
            self.units.pop_front();
        }
        self.units.push_back(time_ns * ROWS_OF_A_UNIT / (ROWS_OF_A_UNIT + rows));
        // A step that had far fewer rows than it might says nothing of one that has them all.
        if prompt_rows > 0 && 2 * rows >= u64::from(self.prompt_rows) {
            // Towards the time that is wanted, whatever part of it does not depend on the rows.
            let scale = (PROMPT_STEP.as_secs_f64() / time.as_secs_f64().max(1e-9)).clamp(0.25, 8.0);
            let rows = (rows as f64 * scale) as u32 / PANEL_ROWS * PANEL_ROWS;
            self.prompt_rows = rows.max(MIN_PROMPT_ROWS).min(self.max_rows);
        }
    }

    /// What a step of `rows` rows should take at most; `None` before any was run.
    pub(super) fn expected(&self, rows: u32) -> Option<Duration> {
        let unit = self.units.iter().max()?;
        Some(Duration::from_nanos(unit * (ROWS_OF_A_UNIT + u64::from(rows)) / ROWS_OF_A_UNIT))
    }

    /// After how long a step of `rows` rows counts as hung: several times what it should take, within bounds.
    pub(super) fn limit(&self, rows: u32, floor: Duration, cap: Duration) -> Duration {
        self.expected(rows).map_or(cap, |expected| (expected * LATE).max(floor).min(cap))
    }

    /// Rows of prompts that a step may have, so that nobody waits long for the next.
    pub(super) fn prompt_rows(&self) -> u32 {
        self.prompt_rows
    }
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

/// Asks all ranks whether they are still there, `pause` from now; each has twice `limit` to answer. (Twice, for a
/// server that stood still itself finds its own clock run out first.)
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
        for _ in 0..2 {
            match timeout(limit, client.health(HealthRequest {})).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(status)) => return Err((rank, format!("is not well: {}", status.message()))),
                Err(_) => {}
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

    const FLOOR: Duration = Duration::from_secs(3);
    const CAP: Duration = Duration::from_secs(120);

    /// Steps of one row that took `one`.
    fn times(one: Duration) -> StepTimes {
        let mut times = StepTimes::new(512);
        (0..10).for_each(|_| times.observe(1, 0, one));
        times
    }

    #[test]
    fn a_hang_is_noticed_by_what_steps_have_been_taking() {
        assert_eq!(StepTimes::new(512).limit(1, FLOOR, CAP), CAP, "nothing is known yet");
        // The demo model and an 8B model on a GPU; chunks of 512 rows.
        for one in [Duration::from_micros(900), Duration::from_micros(3300)] {
            assert_eq!(times(one).limit(512, FLOOR, CAP), FLOOR);
        }
        // A 1B model on two cores: 512 rows take some 4 s there.
        let limit = times(Duration::from_millis(60)).limit(512, FLOOR, CAP);
        assert!(limit > Duration::from_secs(16) && limit < Duration::from_secs(60), "{limit:?}");
        assert_eq!(times(Duration::from_secs(2)).limit(512, FLOOR, CAP), CAP);
    }

    #[test]
    fn prompts_have_as_many_rows_as_half_a_second_computes() {
        // Microseconds of a step without rows, and of a row, on a machine that others use in between: a 1B model on two
        // cores, an 8B model on a GPU.
        for (base, row, quiet, busy) in [(60_000, 6600, 64, 64), (60_000, 2000, 208, 64), (4000, 300, 512, 320)] {
            let mut times = StepTimes::new(512);
            let mut run = |slower: u64| {
                let rows = u64::from(times.prompt_rows()).min(512);
                times.observe(rows, rows, Duration::from_micros(slower * (base + row * rows)));
                times.prompt_rows()
            };
            let rows = [1, 5, 1].map(|slower| (0..40).map(|_| run(slower)).last());
            assert_eq!(rows, [Some(quiet), Some(busy), Some(quiet)]);
        }
        let mut times = StepTimes::new(512);
        times.observe(512, 512, Duration::from_millis(30));
        let rows = times.prompt_rows();
        times.observe(20, 3, Duration::from_secs(1));
        assert_eq!((rows, times.prompt_rows()), (512, 512), "a step of few rows says little of one of many");
    }

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
