//! The driver towards the workers: plans out, outcomes in, and what of both is counted.

use std::time::Duration;

use looplane_proto::worker::v1::{Outcome, Plan};
use tokio::time::Instant;

use super::driver::{Driver, Fault};
use super::start::{Link, RankEvent, Traffic};
use super::vitals::Heard;
use crate::metrics::StepRun;
use crate::sched::Event;

impl Driver {
    pub(super) fn rank_event(&mut self, event: RankEvent, ranks: &mut [Heard]) -> Result<(), Fault> {
        match event {
            RankEvent::Outcome { rank, outcome } => {
                ranks[rank] = Heard { when: Instant::now(), step: (outcome.version, outcome.step) };
                // The other ranks sample the same tokens; that they keep pace is all there is to know.
                if rank == 0 { Ok(self.outcome(outcome)?) } else { Ok(()) }
            }
            RankEvent::Ended { rank, words } => Err(Fault::broken_stream(rank, &words)),
        }
    }

    fn outcome(&mut self, outcome: Outcome) -> Result<(), String> {
        self.channels.metrics.generation_tokens.inc_by(outcome.tokens.len() as u64);
        let (ran_step, rows, positions) = (outcome.ran_step, u64::from(outcome.rows), outcome.positions);
        let samples = !outcome.tokens.is_empty();
        let (time, wait) = (Duration::from_nanos(outcome.step_ns), Duration::from_nanos(outcome.wait_ns));
        self.apply(Event::Outcome(outcome))?;
        if ran_step {
            let prompt_rows = u64::from(self.scheduler.prompt_rows()).min(rows);
            let Traffic { stream_bytes, head_bytes, position_bytes, .. } = self.traffic;
            let weights = stream_bytes.saturating_sub(if samples { 0 } else { head_bytes });
            let read_bytes = weights.saturating_add(positions.saturating_mul(position_bytes));
            let step = StepRun { decode_rows: rows - prompt_rows, prompt_rows, time, wait, read_bytes };
            self.channels.metrics.step(step);
        }
        Ok(())
    }

    pub(super) fn send_plans(&mut self, link: &Link) -> Result<(), Fault> {
        while let Some(plan) = self.scheduler.next_plan() {
            tracing::trace!(?plan, "plan");
            self.sent(&plan);
            for (rank, plans) in link.plans.iter().enumerate() {
                let refused = |_| Fault::broken_stream(rank, "does not take its plans");
                plans.try_send(plan.clone()).map_err(refused)?;
            }
        }
        Ok(())
    }

    /// Counts a plan, and the sequences that it gives a slot.
    fn sent(&mut self, plan: &Plan) {
        let (metrics, now) = (&self.channels.metrics, Instant::now());
        metrics.plans.inc();
        for admit in &plan.admit {
            if let Some(stream) = self.streams.get_mut(&admit.sequence) {
                stream.life.admitted(now, metrics);
            }
        }
        metrics.set_load(self.scheduler.load());
    }
}
