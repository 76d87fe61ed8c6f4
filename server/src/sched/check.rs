//! The invariants of the scheduler, checked after each event in tests and debug builds.

use super::sequence::Phase;
use super::{Scheduler, Sequence};

impl Scheduler {
    /// Whether every slot and page has one owner, every sequence is where its phase says, and the bounds hold.
    ///
    /// # Errors
    /// Names the invariant that is broken.
    pub fn check(&self) -> Result<(), String> {
        let placed = self.queue.len() + self.running.len() + self.leaving.len();
        hold(placed == self.sequences.len(), "every sequence waits, is in a slot, or is leaving one")?;
        for (id, sequence) in &self.sequences {
            let (index, invariant) = match sequence.phase {
                Phase::Waiting => (&self.queue, "the queue holds what waits"),
                Phase::Running(_) => (&self.running, "running names what is in a slot"),
                Phase::Leaving { .. } => (&self.leaving, "leaving names what was preempted"),
            };
            hold(index.contains(id), invariant)?;
        }
        hold(self.fresh.is_subset(&self.queue), "what was never admitted waits")?;
        let fresh_tokens: u64 = self.fresh.iter().map(|id| self.sequences[id].request.prompt.len() as u64).sum();
        hold(self.fresh_tokens == fresh_tokens, "the prompt tokens that wait are counted")?;
        hold(self.fresh.len() as u64 <= self.limits.max_waiting_requests, "the queue is bounded")?;
        hold(self.trials.are_known(|id| self.sequences.contains_key(&id)), "suspects have not ended")?;
        let alone = self.trials.on_trial().is_none_or(|id| self.running.iter().eq([&id]) && self.leaving.is_empty());
        hold(alone, "who is on trial runs alone")?;
        let unstarted = self.pipeline.unstarted().count();
        hold(unstarted <= self.limits.plans_ahead as usize, "the plans ahead are bounded")?;
        hold(self.group_up || self.running.is_empty() && self.leaving.is_empty(), "nothing runs without a group")?;
        self.check_slots()?;
        self.check_pages()
    }

    fn check_slots(&self) -> Result<(), String> {
        let mut owned = vec![false; self.limits.max_slots as usize];
        let in_use = self.running.iter().filter_map(|id| self.sequences[id].running()).map(|running| running.slot);
        for slot in self.free_slots.iter().copied().chain(in_use) {
            let first = owned.get_mut(slot as usize).is_some_and(|owned| !std::mem::replace(owned, true));
            hold(first, "every slot is free or has one owner")?;
        }
        hold(owned.iter().all(|&owned| owned), "no slot is lost")
    }

    fn check_pages(&self) -> Result<(), String> {
        let Some(pool) = &self.pages else {
            return hold(self.sequences.is_empty(), "nothing is queued before the first group");
        };
        let mut owned = vec![false; pool.total() as usize];
        let mut own = |page: u32| {
            let first = owned.get_mut(page as usize).is_some_and(|owned| !std::mem::replace(owned, true));
            hold(first, "every page is free or has one owner")
        };
        pool.free_pages().iter().try_for_each(|&page| own(page))?;
        for sequence in self.sequences.values() {
            self.check_sequence(sequence)?;
            sequence.running().into_iter().flat_map(|running| &running.pages).try_for_each(|&page| own(page))?;
        }
        hold(owned.iter().all(|&owned| owned), "no page is lost")
    }

    fn check_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let pool = self.pages.as_ref().expect("checked by the caller");
        let below_limit = sequence.generated.len() < sequence.request.max_tokens as usize;
        hold(below_limit, "a sequence with all its tokens has ended")?;
        hold(pool.pages_for(sequence.positions()) <= pool.total(), "every sequence fits the cache")?;
        let Some(running) = sequence.running() else { return Ok(()) };
        hold(running.prefilled <= running.prefill_end, "no prompt token is computed twice")?;
        let prompt = pool.covers(running.pages.len(), u64::from(running.prefill_end) - 1);
        hold(prompt, "a sequence in a slot has pages for its prompt")?;
        hold(running.pages.len() as u64 <= pool.pages_for(sequence.positions()), "no page beyond the last position")
    }
}

fn hold(condition: bool, invariant: &str) -> Result<(), String> {
    condition.then_some(()).ok_or_else(|| format!("broken invariant: {invariant}"))
}
