//! Builds plans: who gets pages, who gives them up, who enters, whose prompt is computed, who decodes.

use looplane_proto::worker::v1::{PageGrant, Plan, PrefillChunk};

use super::Scheduler;
use super::sequence::{Phase, Running};

impl Scheduler {
    /// The plan to send now, if there is one. Ask again until there is none, after the events at hand were applied.
    ///
    /// A plan has at most `max_batch_tokens` rows in its first step, and there are never more than `plans_ahead` plans
    /// that the group has not begun. Without work there is no plan.
    pub fn next_plan(&mut self) -> Option<Plan> {
        let room = self.pipeline.unstarted().count() < self.limits.plans_ahead as usize;
        if !self.group_up || !room || !self.wants_plan() {
            return None;
        }
        let version = self.pipeline.next_version();
        let mut plan = Plan { version, steps: self.limits.steps_per_plan, ..Plan::default() };
        self.make_room(&mut plan);
        let mut budget = u64::from(self.limits.max_batch_tokens) - self.decoding().count() as u64;
        for id in self.running.clone() {
            self.continue_prefill(id, &mut budget, &mut plan);
        }
        while budget > 0
            && let Some(id) = self.admissible()
        {
            self.admit(id, &mut plan);
            self.continue_prefill(id, &mut budget, &mut plan);
        }
        let decode: Vec<u64> = self.decoding().map(|(id, _)| id).collect();
        plan.decode = self.decoding().map(|(_, running)| running.slot).collect();
        self.grant_ahead(&decode, &mut plan);
        plan.release = std::mem::take(&mut self.releases);
        self.pipeline.push(&plan, decode);
        debug_assert_eq!(self.check(), Ok(()));
        Some(plan)
    }

    /// A plan would change something: a slot to release, a sequence to admit, prompt tokens to compute, or the steps of the
    /// plans already sent are about to run out.
    fn wants_plan(&self) -> bool {
        // Half a plan is left when the next one is sent, so that the loop never waits for the server; and of plans of a
        // single step, one more than the one that may be running.
        let enough = (self.limits.steps_per_plan / 2).max(2);
        !self.releases.is_empty()
            || self.running().any(|(_, running)| !running.decodes())
            || self.admissible().is_some()
            || (!self.running.is_empty() && self.steps_left() < enough)
    }

    fn running(&self) -> impl Iterator<Item = (u64, &Running)> {
        self.running.iter().map(|id| {
            let running = self.sequences.get(id).and_then(|sequence| sequence.running());
            (*id, running.expect("the index of running sequences names those in a slot"))
        })
    }

    fn decoding(&self) -> impl Iterator<Item = (u64, &Running)> {
        self.running().filter(|(_, running)| running.decodes())
    }

    /// Sees to it that every sequence that decodes has a page for the first step of the plan: in order of arrival, from the
    /// pool or from the latest of all. The latest itself sits out until pages are free.
    fn make_room(&mut self, plan: &mut Plan) {
        let decoding: Vec<u64> = self.decoding().map(|(id, _)| id).collect();
        for id in decoding {
            // A sequence that was preempted for an earlier one.
            let Some((sequence, _)) = self.in_slot(id) else { continue };
            let next = sequence.len() - 1 + self.pipeline.tokens_ahead(id);
            while !self.grow(id, next, plan) {
                let latest = *self.running.last().expect("the sequence that needs a page runs");
                if latest == id {
                    break;
                }
                self.preempt(latest, plan);
            }
        }
    }

    fn in_slot(&self, id: u64) -> Option<(&super::Sequence, &Running)> {
        let sequence = self.sequences.get(&id)?;
        Some((sequence, sequence.running()?))
    }

    fn preempt(&mut self, id: u64, plan: &Plan) {
        let sequence = self.sequences.get_mut(&id).expect("only a sequence that runs is preempted");
        let phase = std::mem::replace(&mut sequence.phase, Phase::Leaving { version: plan.version });
        let Phase::Running(running) = phase else { unreachable!("only a sequence that runs is preempted") };
        // The latest has not had its turn for pages in this plan, so nothing is granted to a slot that is given up.
        debug_assert!(plan.grants.iter().all(|grant| grant.slot != running.slot));
        self.preemptions += 1;
        self.running.remove(&id);
        self.leaving.insert(id);
        self.release(running);
    }

    /// Grants pages up to `position`, or to the sequence's last; false if the pool ran out before.
    fn grow(&mut self, id: u64, position: u64, plan: &mut Plan) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("only a sequence that runs grows");
        let position = position.min(sequence.positions() - 1);
        let running = sequence.running_mut().expect("only a sequence that runs grows");
        let pages = self.pages.as_mut().expect("a group that is up has pages");
        let before = running.pages.len();
        while !pages.covers(running.pages.len(), position) {
            let Some(page) = pages.take() else { break };
            running.pages.push(page);
        }
        if running.pages.len() > before {
            let granted = &running.pages[before..];
            // Grants of one plan to one slot are one message, whichever rule gave them.
            match plan.grants.iter_mut().find(|grant| grant.slot == running.slot) {
                Some(grant) => grant.pages.extend_from_slice(granted),
                None => plan.grants.push(PageGrant { slot: running.slot, pages: granted.to_vec() }),
            }
        }
        pages.covers(running.pages.len(), position)
    }

    /// Plans the next chunk of a prompt. Its pages were granted at admission.
    fn continue_prefill(&mut self, id: u64, budget: &mut u64, plan: &mut Plan) {
        let sequence = self.sequences.get_mut(&id).expect("the index of running sequences names known ones");
        let running = sequence.running_mut().expect("the index of running sequences names those in a slot");
        let left = u64::from(running.prefill_end - running.prefilled);
        let len = left.min(*budget) as u32;
        if len > 0 {
            plan.prefill.push(PrefillChunk { slot: running.slot, start: running.prefilled, len });
            running.prefilled += len;
            *budget -= u64::from(len);
        }
    }

    /// The first of the queue, if it may enter: a slot is free, and so are pages for its prompt and its first step, and one
    /// for each sequence that runs, so that it is not preempted at once. Nobody overtakes a sequence that was preempted.
    fn admissible(&self) -> Option<u64> {
        let pages = self.pages.as_ref()?;
        let id = *self.queue.first()?;
        if self.free_slots.is_empty() || self.leaving.first().is_some_and(|&leaving| leaving < id) {
            return None;
        }
        let sequence = &self.sequences[&id];
        let needed = pages.pages_for((sequence.len() + 1).min(sequence.positions()));
        (needed + self.running.len() as u64 <= pages.available()).then_some(id)
    }

    fn admit(&mut self, id: u64, plan: &mut Plan) {
        self.queue.remove(&id);
        let slot = self.free_slots.pop().expect("an admissible sequence finds a free slot");
        let sequence = self.sequences.get_mut(&id).expect("the queue names known sequences");
        if self.fresh.remove(&id) {
            self.fresh_tokens -= sequence.request.prompt.len() as u64;
        }
        plan.admit.push(sequence.admit(id, slot));
        let prefill_end = sequence.len() as u32;
        sequence.phase = Phase::Running(Running { slot, pages: Vec::new(), prefill_end, prefilled: 0 });
        self.running.insert(id);
        let covered = self.grow(id, u64::from(prefill_end), plan);
        debug_assert!(covered, "an admissible sequence finds its pages");
    }

    /// Grants what every step before the plan after this one may need, as far as pages are free.
    fn grant_ahead(&mut self, decode: &[u64], plan: &mut Plan) {
        let steps = self.pipeline.steps_ahead() + u64::from(plan.steps);
        for &id in decode {
            let last = self.sequences[&id].len() - 1 + steps;
            if !self.grow(id, last, plan) {
                break;
            }
        }
    }
}
