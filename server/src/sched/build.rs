//! Builds plans: whose prompt is computed, who decodes. Who gets a slot and pages is up to `room`.

use looplane_proto::worker::v1::{Plan, PrefillChunk};

use super::Scheduler;
use super::sequence::Running;

impl Scheduler {
    /// The plan to send now, if there is one. Ask again until there is none, after the events at hand were applied.
    ///
    /// A plan has at most `max_batch_tokens` rows in its first step, and there are never more than `plans_ahead` plans
    /// that the group has not begun. Without work there is no plan.
    pub fn next_plan(&mut self) -> Option<Plan> {
        let may_send = self.pipeline.unstarted().count() < self.limits.plans_ahead as usize;
        if !self.group_up || !may_send || !self.wants_plan() {
            return None;
        }
        let version = self.pipeline.next_version();
        let mut plan = Plan { version, steps: self.limits.steps_per_plan, ..Plan::default() };
        self.make_room(&mut plan);
        self.admit_all(&mut plan);
        let prefill = self.share_rows(&mut plan);
        let decode: Vec<u64> = self.decoding().map(|(id, _)| id).collect();
        plan.decode = self.decoding().map(|(_, running)| running.slot).collect();
        self.grant_ahead(&decode, &mut plan);
        plan.release = std::mem::take(&mut self.releases);
        self.pipeline.push(&plan, prefill, decode);
        debug_assert_eq!(self.check(), Ok(()));
        Some(plan)
    }

    /// A plan would change something: a slot to release, a sequence to admit, prompt tokens to compute, or the steps of
    /// the plans already sent are about to run out.
    fn wants_plan(&self) -> bool {
        // Half a plan is left when the next one is sent, so that the loop never waits for the server; and of plans of a
        // single step, one more than the one that may be running.
        let enough = (self.limits.steps_per_plan / 2).max(2);
        !self.releases.is_empty()
            || self.running().any(|(_, running)| !running.decodes())
            || self.has_to_stand_aside()
            || self.admissible().is_some()
            || self.admissible_by_eviction().is_some()
            || (!self.running.is_empty() && self.steps_left() < enough)
    }

    pub(super) fn running(&self) -> impl Iterator<Item = (u64, &Running)> {
        self.running.iter().map(|id| {
            let running = self.sequences.get(id).and_then(|sequence| sequence.running());
            (*id, running.expect("the index of running sequences names those in a slot"))
        })
    }

    pub(super) fn decoding(&self) -> impl Iterator<Item = (u64, &Running)> {
        self.running().filter(|(_, running)| running.decodes())
    }

    /// Shares the rows of the plan's first step among the prompts, and names the sequences that get some.
    ///
    /// Prompts that end within half of the rows, the shortest first, are computed beside the oldest: a short one does
    /// not wait behind the whole of a long one, and the long one is at most twice as slow. The rest is first come,
    /// first served.
    fn share_rows(&mut self, plan: &mut Plan) -> Vec<u64> {
        let decoding = self.decoding().count() as u32;
        let mut budget = (self.limits.max_batch_tokens - decoding).min(self.max_prompt_rows);
        let prompts = self.running().filter(|(_, running)| !running.decodes());
        let mut waiting: Vec<(u64, u32)> = prompts.map(|(id, running)| (id, running.prompt_left())).collect();
        let mut short: Vec<(u32, u64)> = waiting.iter().skip(1).map(|&(id, left)| (left, id)).collect();
        short.sort_unstable();
        let mut beside = budget / 2;
        let mut computed = Vec::new();
        for (left, id) in short {
            if left > beside {
                break;
            }
            beside -= left;
            budget -= left;
            self.prefill(id, left, plan);
            computed.push(id);
        }
        waiting.retain(|(id, _)| !computed.contains(id));
        for (id, left) in waiting {
            let rows = left.min(budget);
            if rows == 0 {
                break;
            }
            budget -= rows;
            self.prefill(id, rows, plan);
            computed.push(id);
        }
        computed
    }

    /// Plans the next `rows` rows of a prompt, at least 1. Their pages were granted at admission.
    fn prefill(&mut self, id: u64, rows: u32, plan: &mut Plan) {
        let sequence = self.sequences.get_mut(&id).expect("the index of running sequences names known ones");
        let running = sequence.running_mut().expect("the index of running sequences names those in a slot");
        plan.prefill.push(PrefillChunk { slot: running.slot, start: running.prefilled, len: rows });
        running.prefilled += rows;
    }
}
