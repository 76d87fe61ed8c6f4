//! Builds plans: whose prompt is computed, who decodes. Who gets a slot and pages is up to `room`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use looplane_proto::worker::v1::{Drafts, Plan, PrefillChunk};

use super::Scheduler;
use super::step_rows::Waiting;

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
        let rows = self.slots.len() as u32;
        let each = self.limits.drafts;
        let drafts = (each > 0).then(|| Drafts { each, rows, times: self.step_times.clone() });
        let mut plan = Plan { version, steps: self.limits.steps_per_plan, drafts, ..Plan::default() };
        self.make_room(&plan);
        self.admit_all(&mut plan);
        let prefill = self.share_rows(&mut plan);
        let decode = self.decode_and_grant(&mut plan);
        plan.release = std::mem::take(&mut self.releases);
        self.pipeline.push(&plan, prefill, decode);
        self.debug_check();
        Some(plan)
    }

    /// A plan would change something: a sequence to admit, prompt tokens to compute, slots to release and nobody who
    /// goes on, or the steps of the plans already sent are about to run out.
    fn wants_plan(&self) -> bool {
        // Half a plan is left when the next one is sent, so that the loop never waits for the server; and of plans of a
        // single step, one more than the one that may be running.
        let enough = (self.limits.steps_per_plan / 2).max(2);
        // A new plan ends the launch under way: not for a slot to release alone, while others go on.
        let has_to_release = !self.releases.is_empty() && self.running.is_empty();
        has_to_release
            || self.prompts > 0
            || self.has_to_stand_aside()
            || self.admissible().is_some()
            || self.has_to_make_way()
            || (!self.running.is_empty() && self.steps_left() < enough)
    }

    /// Shares the rows of the plan's first step among the prompts, and names the sequences that get some.
    ///
    /// The first has at least half of the rows. The other half goes to prompts that have at most half as much left, the
    /// shortest first: a short one does not wait behind the whole of a long one, and the long one is at most twice as
    /// slow. The rest is first come, first served.
    fn share_rows(&mut self, plan: &mut Plan) -> Vec<u64> {
        if self.prompts == 0 {
            return Vec::new();
        }
        let decoding = (self.running.len() - self.prompts) as u32;
        let prompts = self.prompts_to_compute();
        let begun = prompts.iter().map(|&(_, slot, _)| self.slot(slot));
        let tokens = begun.map(|running| u64::from(running.prefill_end - running.reused)).sum();
        let waiting = Waiting { prompts: self.prompts as u32, tokens };
        let wanted = self.step_rows.of_prompts(decoding, waiting, self.mix.per_token());
        let mut budget = wanted.min(self.max_batch_tokens - decoding);
        let mut rows = vec![0; prompts.len()];
        let left = prompts.iter().map(|&(.., left)| left).enumerate();
        let short = left.skip(1).filter(|&(_, left)| left <= prompts[0].2 / 2);
        let mut short: BinaryHeap<_> = short.map(|(index, left)| Reverse((left, index))).collect();
        let mut beside = budget / 2;
        while beside > 0
            && let Some(Reverse((left, index))) = short.pop()
        {
            rows[index] = left.min(beside);
            beside -= rows[index];
            budget -= rows[index];
        }
        let mut computed = Vec::new();
        // A step has room for the logits of as many rows as there are slots: one for each sequence, and what is left
        // for prompts whose log-probabilities are wanted.
        let mut samples = (self.slots.len() - self.running.len()) as u32;
        for ((id, slot, left), rows) in prompts.into_iter().zip(rows) {
            let more = (left - rows).min(budget);
            budget -= more;
            let mut rows = rows + more;
            if self.sequences[&id].request.prompt_logprobs.is_some() {
                rows = rows.min(samples + 1);
                samples -= rows.saturating_sub(1);
            }
            if rows > 0 {
                self.prefill(slot, rows, plan);
                computed.push(id);
            }
        }
        computed
    }

    /// Plans the next `rows` rows of a prompt, at least 1. Their pages were taken at admission.
    fn prefill(&mut self, slot: u32, rows: u32, plan: &mut Plan) {
        let running = self.slots[slot as usize].as_mut().expect("the index of running sequences names slots in use");
        plan.prefill.push(PrefillChunk { slot, start: running.prefilled, len: rows });
        running.prefilled += rows;
        self.mix.plan(rows);
        if running.decodes() {
            running.decodes_from = plan.version;
            self.prompts -= 1;
        }
    }
}
