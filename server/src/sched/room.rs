//! Who gets a slot and pages, and who gives them up.

use looplane_proto::worker::v1::{PageGrant, Plan};

use super::Scheduler;
use super::sequence::{Phase, Running};

impl Scheduler {
    /// Makes sure that every sequence that decodes has a page for the first step of the plan: in order of precedence,
    /// from the pool or from the last of all. The last itself sits out until pages are free.
    pub(super) fn make_room(&mut self, plan: &mut Plan) {
        if self.has_to_stand_aside() {
            for id in self.running.clone() {
                self.preempt(id, plan);
            }
        }
        while let Some(last) = self.admissible_by_eviction() {
            self.preempt(last, plan);
        }
        let mut decoding: Vec<u64> = self.decoding().map(|(id, _)| id).collect();
        decoding.sort_by_key(|&id| self.precedence(id));
        for id in decoding {
            // A sequence that was preempted for an earlier one.
            let Some((sequence, _)) = self.in_slot(id) else { continue };
            let next = sequence.len() - 1 + self.pipeline.tokens_ahead(id);
            while !self.grow(id, next, plan) {
                let last = self.last_running().expect("the sequence that needs a page runs");
                if last == id {
                    break;
                }
                self.preempt(last, plan);
            }
        }
    }

    /// Lower goes first: those whose readers keep up, then by arrival.
    fn precedence(&self, id: u64) -> (bool, u64) {
        (self.sequences[&id].reader_behind, id)
    }

    fn last_running(&self) -> Option<u64> {
        self.running.iter().copied().max_by_key(|&id| self.precedence(id))
    }

    fn in_slot(&self, id: u64) -> Option<(&super::Sequence, &Running)> {
        let sequence = self.sequences.get(&id)?;
        Some((sequence, sequence.running()?))
    }

    /// Sequences that were cleared run, but suspects are left that are to be computed alone.
    pub(super) fn has_to_stand_aside(&self) -> bool {
        self.trials.is_on() && self.trials.on_trial().is_none() && !self.running.is_empty()
    }

    fn preempt(&mut self, id: u64, plan: &Plan) {
        let sequence = self.sequences.get_mut(&id).expect("only a sequence that runs is preempted");
        let phase = std::mem::replace(&mut sequence.phase, Phase::Leaving { version: plan.version });
        let Phase::Running(running) = phase else { unreachable!("only a sequence that runs is preempted") };
        // The last has not had its turn for pages in this plan, so nothing is granted to a slot that is given up.
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

    /// Who waits first, whatever it needs: the lowest whose reader keeps up, or else the lowest.
    fn first_waiting(&self) -> Option<u64> {
        let keeps_up = self.queue.iter().find(|id| !self.sequences[id].reader_behind);
        keeps_up.or(self.queue.first()).copied()
    }

    /// The first of the queue, if it may enter: a slot is free, and so are pages for its prompt and its first step, and
    /// one for each sequence that runs, so that it is not preempted at once. While there are suspects, the next of
    /// them, if nothing else runs.
    pub(super) fn admissible(&self) -> Option<u64> {
        if self.trials.is_on() {
            // Nor is a step under way that may still compute one that was cancelled.
            let alone = self.running.is_empty() && self.leaving.is_empty() && !self.is_outstanding();
            return self.trials.next().filter(|_| alone);
        }
        let id = self.first_waiting().filter(|&id| !self.is_overtaking(id))?;
        let pages = self.pages.as_ref()?;
        let room = self.pages_to_enter(id) + self.running.len() as u64 <= pages.available();
        (room && !self.free_slots.is_empty()).then_some(id)
    }

    /// A sequence in a slot whose reader is behind, while one whose reader keeps up could enter once such have left.
    pub(super) fn admissible_by_eviction(&self) -> Option<u64> {
        // Most of the time there is nobody.
        let last = self.last_running().filter(|id| self.sequences[id].reader_behind)?;
        let id = self.first_waiting().filter(|id| !self.sequences[id].reader_behind && !self.is_overtaking(*id))?;
        if self.trials.is_on() || self.admissible().is_some() {
            return None;
        }
        let behind = || self.running().filter(|(id, _)| self.sequences[id].reader_behind);
        let their_pages: u64 = behind().map(|(_, running)| running.pages.len() as u64).sum();
        let others = (self.running.len() - behind().count()) as u64;
        let available = self.pages.as_ref()?.available() + their_pages;
        (self.pages_to_enter(id) + others <= available).then_some(last)
    }

    /// Nobody goes before a sequence that was preempted and takes precedence.
    fn is_overtaking(&self, id: u64) -> bool {
        self.leaving.iter().any(|&leaving| self.precedence(leaving) < self.precedence(id))
    }

    fn pages_to_enter(&self, id: u64) -> u64 {
        let sequence = &self.sequences[&id];
        let pages = self.pages.as_ref().expect("a group that is up has pages");
        pages.pages_for((sequence.len() + 1).min(sequence.positions()))
    }

    /// Everybody who may enter does. Their prompts share the rows of this step and those that follow.
    pub(super) fn admit_all(&mut self, plan: &mut Plan) {
        while let Some(id) = self.admissible() {
            self.admit(id, plan);
            if self.trials.is_on() {
                self.trials.begin(id);
            }
        }
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
    pub(super) fn grant_ahead(&mut self, decode: &[u64], plan: &mut Plan) {
        let steps = self.pipeline.steps_ahead() + u64::from(plan.steps);
        for &id in decode {
            let last = self.sequences[&id].len() - 1 + steps;
            if !self.grow(id, last, plan) {
                break;
            }
        }
    }
}
