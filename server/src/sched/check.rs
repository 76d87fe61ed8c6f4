//! The invariants of the scheduler, checked after each event in tests and debug builds.

use super::Scheduler;
use super::prefix::MOST_OVERTAKEN;
use super::sequence::{Phase, Sequence, Turn};

impl Scheduler {
    /// In debug builds, panics if the invariants do not hold.
    pub(super) fn debug_check(&self) {
        #[cfg(test)]
        if self.is_unchecked {
            return;
        }
        debug_assert_eq!(self.check(), Ok(()));
    }

    /// Whether every slot and page has one owner, every sequence is where its phase says, and the bounds hold.
    ///
    /// # Errors
    /// Names the invariant that is broken.
    pub fn check(&self) -> Result<(), String> {
        let placed = self.queue.len() + self.running.len() + self.leaving.len();
        hold(placed == self.sequences.len(), "every sequence waits, is in a slot, or is leaving one")?;
        for (&id, sequence) in &self.sequences {
            let turn = sequence.turn(id);
            let (is_there, invariant) = match sequence.phase {
                Phase::Waiting => (self.queue.contains(&turn), "the queue holds what waits"),
                Phase::Running { slot } => (self.running.get(&turn) == Some(&slot), "running names what is in a slot"),
                Phase::Leaving { .. } => (self.leaving.contains(&turn), "leaving names what was preempted"),
            };
            hold(is_there, invariant)?;
        }
        let waits = |id: u64| self.queue.contains(&Turn::fresh(id));
        let claims = self.sequences.values().filter(|sequence| sequence.claim.is_some()).count() as u64;
        hold(
            self.shares.check(waits, claims),
            "what was never admitted waits, by owner, and all that is left is counted",
        )?;
        let fresh: Vec<&Turn> = self.queue.iter().filter(|turn| turn.is_fresh()).collect();
        let prompt = |turn: &&Turn| self.sequences[&turn.id].request.prompt.len() as u64;
        let counted = (fresh.len() as u64, fresh.iter().map(prompt).sum::<u64>());
        hold(self.shares.waiting() == counted, "sequences and prompt tokens that wait are counted")?;
        let is_bounded = |sequence: &Sequence| sequence.overtaken <= MOST_OVERTAKEN;
        hold(self.sequences.values().all(is_bounded), "nobody is overtaken more often than that")?;
        hold(self.shares.waiting().0 <= self.limits.max_waiting_requests, "the queue is bounded")?;
        hold(self.trials.are_known(|id| self.sequences.contains_key(&id)), "suspects have not ended")?;
        let alone = self
            .trials
            .on_trial()
            .is_none_or(|id| self.running.keys().map(|turn| turn.id).eq([id]) && self.leaving.is_empty());
        hold(alone, "who is on trial runs alone")?;
        let unstarted = self.pipeline.unstarted().count();
        hold(unstarted <= self.limits.plans_ahead as usize, "the plans ahead are bounded")?;
        hold(self.group_up || self.running.is_empty() && self.leaving.is_empty(), "nothing runs without a group")?;
        self.check_slots()?;
        self.check_pages()
    }

    fn check_slots(&self) -> Result<(), String> {
        let mut owned: Vec<bool> = self.slots.iter().map(Option::is_some).collect();
        hold(owned.iter().filter(|&&owned| owned).count() == self.running.len(), "every slot in use has one owner")?;
        for &slot in &self.free_slots {
            let first = owned.get_mut(slot as usize).is_some_and(|owned| !std::mem::replace(owned, true));
            hold(first, "every slot is free or in use")?;
        }
        hold(owned.iter().all(|&owned| owned), "no slot is lost")?;
        for (turn, &slot) in &self.running {
            let (Some(running), Some(sequence)) = (&self.slots[slot as usize], self.sequences.get(&turn.id)) else {
                return hold(false, "a slot in use has a sequence");
            };
            let facts = (running.slot, running.tokens, running.positions);
            hold(facts == (slot, sequence.len(), sequence.positions()), "a slot knows its sequence")?;
            hold(running.decodes() == (running.decodes_from > 0), "who decodes began with a plan")?;
        }
        let prompts = self.running().filter(|(_, running)| !running.decodes()).count();
        hold(prompts == self.prompts, "the prompts that are left are counted")
    }

    fn check_pages(&self) -> Result<(), String> {
        let Some(pool) = &self.pages else {
            return hold(self.sequences.is_empty(), "nothing is queued before the first group");
        };
        let mut held = vec![0; pool.total() as usize];
        for sequence in self.sequences.values() {
            let below_limit = sequence.generated.len() < sequence.request.max_tokens as usize;
            hold(below_limit, "a sequence with all its tokens has ended")?;
            hold(pool.pages_for(sequence.positions()) <= pool.total(), "every sequence fits the cache")?;
        }
        for (_, running) in self.running() {
            running.pages.iter().for_each(|&page| held[page as usize] += 1);
            hold(running.prefilled <= running.prefill_end, "no prompt token is computed twice")?;
            let prompt = pool.covers(running.pages.len(), u64::from(running.prefill_end) - 1);
            hold(prompt, "a sequence in a slot has pages for its prompt")?;
            hold(running.pages.len() as u64 <= pool.pages_for(running.positions), "no page beyond the last position")?;
            hold(running.granted <= running.pages.len(), "only pages that a slot holds are granted to it")?;
            let cached = running.computed() / u64::from(pool.page_positions());
            hold(running.cached as u64 <= cached, "only full pages are cached")?;
        }
        pool.check(&held).map_err(|invariant| format!("broken invariant: {invariant}"))
    }
}

fn hold(condition: bool, invariant: &str) -> Result<(), String> {
    condition.then_some(()).ok_or_else(|| format!("broken invariant: {invariant}"))
}
