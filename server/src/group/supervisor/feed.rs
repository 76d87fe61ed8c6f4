//! A group that is up: plans out, reports in, and a watch on whether the reports keep coming.

use std::sync::Arc;
use std::time::Duration;

use looplane_proto::worker::v1::Plan;
use tokio::time::{Instant, sleep};

use super::super::fault::Fault;
use super::super::start::{Link, RankEvent};
use super::super::step_times::StepTime;
use super::super::watchdog::{Reports, answer, probe, stood_still, unresponsive};
use super::super::workers::Workers;
use super::{BURST, Supervisor, until};
use crate::engine::EngineState;

/// The loop takes a turn at least as often.
const TURN: Duration = Duration::from_millis(500);
/// A rank that is to be told from those that wait for it has so long to say how it is.
const ASK: Duration = Duration::from_millis(500);

impl Supervisor {
    /// Feeds the group until shutdown or its replacement (`Ok`), or until it is lost.
    pub(super) async fn feed(&mut self, link: &mut Link, workers: &mut Workers) -> Result<(), Fault> {
        let config = Arc::clone(&self.config);
        let timeouts = &config.timeouts;
        let mut reports = Reports::new(link.plans.len(), Instant::now());
        let mut probing = None;
        let mut is_late = false;
        let mut last_turn = Instant::now();
        loop {
            if stood_still(last_turn, TURN) {
                reports.start_again(Instant::now());
            }
            last_turn = Instant::now();
            self.send_plans(link)?;
            if self.drain_until.is_some() && self.delivery.is_idle() || self.may_be_replaced() {
                return Ok(());
            }
            let owed = self.delivery.is_outstanding();
            reports.owe(owed, Instant::now());
            // Reports show that a busy rank works; one that is idle, or has reported nothing for a while, is asked.
            let unreported = reports.overdue(timeouts.step_floor).map(|(at, _)| at);
            let is_quiet = !owed || unreported.is_some_and(|at| at <= Instant::now());
            let ask = || Box::pin(probe(link.health.clone(), timeouts.probe, timeouts.answer));
            probing = is_quiet.then(|| probing.take().unwrap_or_else(ask));
            let limit = self.times.limit(self.delivery.rows_ahead(), timeouts.step_floor, timeouts.step);
            let overdue = reports.overdue(limit);
            let late = reports.overdue(limit / 2);
            if is_late && late.is_none_or(|(at, _)| at > Instant::now()) {
                is_late = false;
                self.show_up();
            }
            let late = late.filter(|_| !is_late);
            tokio::select! {
                event = link.events.recv() => {
                    let more = std::iter::from_fn(|| link.events.try_recv().ok());
                    for event in event.into_iter().chain(more).take(BURST) {
                        self.rank_event(event, &mut reports)?;
                    }
                }
                command = self.channels.commands.recv() => self.commands(command),
                exit = workers.next_exit() => return Err(Fault::new(exit)),
                answered = answer(&mut probing) => {
                    answered.map_err(|(rank, words)| Fault::broken_stream(rank, &words))?;
                    probing = None;
                }
                () = until(unreported.filter(|_| !is_quiet)) => {}
                () = sleep(TURN) => {}
                () = self.channels.stop.cancelled(), if self.drain_until.is_none() => self.begin_drain(),
                () = until(self.drain_until) => return Ok(()),
                () = until(self.replacement.as_ref().map(|replacement| replacement.until)) => return Ok(()),
                () = until(overdue.map(|(at, _)| at)) => {
                    if stood_still(last_turn, TURN) {
                        continue;
                    }
                    let asking = Instant::now();
                    // Ranks wait for each other: the one that hangs is the one that does not answer either.
                    let asked = unresponsive(link.health.clone(), ASK.min(limit / 2)).await;
                    if stood_still(asking, ASK) {
                        continue;
                    }
                    // Reports that were on their way are here by now, from behind the answers.
                    if let Ok(event) = link.events.try_recv() {
                        self.rank_event(event, &mut reports)?;
                        continue;
                    }
                    return Err(self.hung(asked.or(overdue.map(|(_, rank)| rank)).unwrap_or(0), &reports));
                }
                () = until(late.map(|(at, _)| at)) => {
                    is_late = true;
                    let words = self.late(late.map_or(0, |(_, rank)| rank), &reports);
                    tracing::warn!("{words}; it counts as lost after {limit:.1?}");
                    self.show(EngineState::Recovering(words));
                }
            }
        }
    }

    fn rank_event(&mut self, event: RankEvent, reports: &mut Reports) -> Result<(), Fault> {
        match event {
            RankEvent::Outcome { rank, outcome } => {
                reports.reported(rank, (outcome.version, outcome.step), Instant::now());
                if outcome.ran_step {
                    let (time, wait) = (outcome.step_ns, outcome.wait_ns.map(Duration::from_nanos));
                    self.delivery.metrics().ranks.step(rank, Duration::from_nanos(time), wait);
                }
                // The other ranks sample the same tokens; that they keep pace is all else there is to know.
                if rank > 0 {
                    return Ok(());
                }
                if let Some(step) = self.delivery.outcome(outcome)? {
                    let (decode_rows, prompt_rows) = (step.decode_rows as u32, step.prompt_rows as u32);
                    tracing::trace!(decode_rows, prompt_rows, us = step.time.as_micros(), "step");
                    self.times.observe(&StepTime { decode_rows, prompt_rows, time: step.time });
                    self.delivery.limit_step_rows(self.times.rows());
                    self.delivery.set_step_times(self.times.table());
                }
                Ok(())
            }
            RankEvent::Ended { rank, words } => Err(Fault::broken_stream(rank, &words)),
        }
    }

    fn send_plans(&mut self, link: &Link) -> Result<(), Fault> {
        while let Some(plan) = self.delivery.next_plan() {
            let Plan { version, admit, prefill, decode, release, .. } = &plan;
            let prompt_rows = prefill.iter().map(|chunk| chunk.len).sum::<u32>();
            let (admit, decode, release) = (admit.len(), decode.len(), release.len());
            tracing::trace!(version, admit, prompt_rows, decode, release, "plan");
            for (rank, plans) in link.plans.iter().enumerate() {
                let refused = |_| Fault::broken_stream(rank, "does not take its plans");
                plans.try_send(plan.clone()).map_err(refused)?;
            }
        }
        Ok(())
    }

    /// In words that end a group.
    fn hung(&self, rank: usize, reports: &Reports) -> Fault {
        let late = self.late(rank, reports);
        Fault::new(format!("{late} (if its machine is only slow: raise --hang-limit-seconds)"))
    }

    /// What is waited for.
    fn late(&self, rank: usize, reports: &Reports) -> String {
        let report = reports.of(rank);
        let (version, step) = report.step;
        let expected = match self.times.expected(self.delivery.rows_ahead()) {
            Some(expected) => format!("a step should take {expected:.1?} at most"),
            None => "it is yet to report its first step".into(),
        };
        format!(
            "rank {rank} has reported nothing for {:.1?} after step {step} of plan {version}, and {expected}",
            report.when.elapsed()
        )
    }
}
