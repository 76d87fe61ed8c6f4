//! Who gets a slot and pages, and who gives them up.

use looplane_proto::worker::v1::{PageGrant, Plan};

use super::Scheduler;
use super::sequence::{Phase, Running, Turn};

/// Tokens that pages are granted for ahead of drafts that may hold. A sequence that gains more waits for the next plan.
const MOST_DRAFTED_AHEAD: u64 = 128;

impl Scheduler {
    /// Makes sure that every sequence that decodes has a page for the first step of the plan: in order of precedence,
    /// from the pool or from the last of all. The last itself sits out until pages are free.
    pub(super) fn make_room(&mut self, plan: &Plan) {
        if self.has_to_stand_aside() {
            while let Some(last) = self.last_running() {
                self.preempt(last, plan);
            }
        }
        if self.has_to_make_way() {
            while self.admissible().is_none() {
                let last = self.last_running().expect("once all whose readers are behind have left, another may enter");
                debug_assert!(last.behind, "nobody makes way whose reader keeps up");
                self.preempt(last, plan);
            }
        }
        let Some(pages) = &self.pages else { return };
        let ahead = |running: &Running| self.pipeline.plans_since(running.decodes_from);
        let lacks = |running: &Running| running.decodes() && !running.is_covered(ahead(running), pages);
        let lacking: Vec<Turn> = self.running().filter(|(_, running)| lacks(running)).map(|(turn, _)| turn).collect();
        for turn in lacking {
            while !self.grow(turn) {
                let last = self.last_running().expect("the sequence that needs a page runs");
                if last == turn {
                    break;
                }
                self.preempt(last, plan);
            }
        }
    }

    fn last_running(&self) -> Option<Turn> {
        self.running.last_key_value().map(|(&turn, _)| turn)
    }

    /// Sequences that were cleared run, but suspects are left that are to be computed alone.
    pub(super) fn has_to_stand_aside(&self) -> bool {
        self.trials.is_on() && self.trials.on_trial().is_none() && !self.running.is_empty()
    }

    fn preempt(&mut self, turn: Turn, plan: &Plan) {
        let mut sequence = self.sequences.remove(&turn.id).expect("only a sequence that runs is preempted");
        let Phase::Running { slot } = sequence.phase else { unreachable!("only a sequence that runs is preempted") };
        sequence.phase = Phase::Leaving { version: plan.version };
        self.preemptions += 1;
        self.running.remove(&turn);
        self.leaving.insert(turn);
        // Pages that it took for this plan are granted to nobody: that comes last.
        self.release(slot, &sequence);
        self.sequences.insert(turn.id, sequence);
    }

    /// Takes pages for the first step of the plan that is built; false if the pool ran out before. A sequence that was
    /// preempted for an earlier one needs none any more.
    fn grow(&mut self, turn: Turn) -> bool {
        let Some(&slot) = self.running.get(&turn) else { return true };
        let running = self.slots[slot as usize].as_mut().expect("the index of running sequences names slots in use");
        let pages = self.pages.as_mut().expect("a group that is up has pages");
        running.grow(self.pipeline.plans_since(running.decodes_from), pages)
    }

    /// The next of the queue, if it may enter: a slot is free, and so are pages for its prompt and its first step that
    /// it does not share, and one for each sequence that runs, so that it is not preempted at once. While there are
    /// suspects, the next of them, if nothing else runs.
    pub(super) fn admissible(&self) -> Option<Turn> {
        if self.trials.is_on() {
            // Nor is a step under way that may still compute one that was cancelled.
            let next = self.trials.next().filter(|_| self.is_at_rest());
            return next.map(|id| self.sequences[&id].turn(id)).filter(|turn| self.may_begin(turn));
        }
        if self.free_slots.is_empty() {
            return None;
        }
        let pages = self.pages.as_ref()?;
        let has_room = |turn: &Turn| {
            let needed = self.pages_to_enter(*turn) + self.running.len() as u64;
            needed <= pages.available() || needed - self.shared_pages(*turn, pages) <= pages.available()
        };
        let first = self.first_waiting().filter(|turn| !self.is_overtaking(turn));
        self.most_cached(pages).into_iter().chain(first).filter(|turn| self.may_begin(turn)).find(has_room)
    }

    /// Sequences whose readers are behind are in slots, and one whose reader keeps up could enter once such have left.
    pub(super) fn has_to_make_way(&self) -> bool {
        // Most of the time there is nobody.
        let is_behind = self.last_running().is_some_and(|turn| turn.behind);
        let may_enter = |turn: &Turn| !turn.behind && !self.is_overtaking(turn) && self.may_begin(turn);
        let first = self.first_waiting().filter(may_enter);
        let (true, Some(first), Some(pages)) = (is_behind, first, &self.pages) else { return false };
        if self.trials.is_on() || self.admissible().is_some() {
            return false;
        }
        let behind = self.running.range(Turn::first_behind()..).map(|(_, &slot)| self.slot(slot));
        // Pages that others hold, too, stay theirs.
        let own = |running: &Running| running.pages.iter().filter(|&&page| !pages.is_shared(page)).count() as u64;
        let (count, their_pages) = behind.fold((0, 0), |(count, pages), running| (count + 1, pages + own(running)));
        let others = self.running.len() as u64 - count;
        self.pages_to_enter(first) + others <= pages.available() + their_pages
    }

    /// The first of the queue.
    pub(super) fn first_waiting(&self) -> Option<Turn> {
        let first = *self.queue.first()?;
        if first.is_fresh() { self.shares.first().map(Turn::fresh) } else { Some(first) }
    }

    /// Nobody goes before a sequence that was preempted and takes precedence.
    fn is_overtaking(&self, turn: &Turn) -> bool {
        self.leaving.first().is_some_and(|leaving| leaving < turn)
    }

    fn pages_to_enter(&self, turn: Turn) -> u64 {
        let sequence = &self.sequences[&turn.id];
        let pages = self.pages.as_ref().expect("a group that is up has pages");
        pages.pages_for((sequence.len() + 1).min(sequence.positions()))
    }

    /// Everybody who may enter does. Their prompts share the rows of this step and those that follow.
    pub(super) fn admit_all(&mut self, plan: &mut Plan) {
        while let Some(turn) = self.admissible() {
            self.admit(turn, plan);
            if self.trials.is_on() {
                self.trials.begin(turn.id);
            }
        }
    }

    fn admit(&mut self, turn: Turn, plan: &mut Plan) {
        if !self.trials.is_on() {
            self.overtake(turn);
        }
        self.queue.remove(&turn);
        let slot = self.free_slots.pop().expect("an admissible sequence finds a free slot");
        let pages = self.pages.as_mut().expect("a group that is up has pages");
        let sequence = self.sequences.get_mut(&turn.id).expect("the queue names known sequences");
        if turn.is_fresh() {
            let claim = sequence.claim.as_mut().expect("what was never admitted has a claim");
            self.shares.admitted(turn.id, claim);
            sequence.ticket = self.next_ticket;
            self.next_ticket += 1;
        }
        let turn = sequence.turn(turn.id);
        plan.admit.push(sequence.admit(turn.id, slot));
        sequence.phase = Phase::Running { slot };
        let mut running = Running::new(slot, sequence);
        running.reuse(sequence, pages);
        running.take_tail(sequence, pages);
        let covered = running.grow(1, pages);
        debug_assert!(covered, "an admissible sequence finds its pages");
        self.slots[slot as usize] = Some(running);
        self.running.insert(turn, slot);
        self.prompts += 1;
    }

    /// Names who decodes, and grants pages: those that were taken for the plan, and what every step before the plan
    /// after it may need, as far as pages are free.
    pub(super) fn decode_and_grant(&mut self, plan: &mut Plan) -> Vec<u64> {
        // A step may bring several tokens. Few sequences gain that many, and pages held for nothing keep others out.
        let steps = self.pipeline.steps_ahead() + u64::from(plan.steps);
        let ahead = steps + (steps * u64::from(self.limits.drafts)).min(MOST_DRAFTED_AHEAD);
        let pages = self.pages.as_mut().expect("a group that is up has pages");
        let mut is_short = false;
        let mut decode = Vec::with_capacity(self.running.len());
        plan.decode.reserve(self.running.len());
        for (turn, &slot) in &self.running {
            let running =
                self.slots[slot as usize].as_mut().expect("the index of running sequences names slots in use");
            if running.decodes() {
                decode.push(turn.id);
                plan.decode.push(slot);
                is_short = is_short || !running.grow(ahead, pages);
            }
            // Of a prompt those that are filled by now: of the others, somebody else may fill the same before.
            let due = match running.decodes() {
                true => running.pages.len(),
                false => pages.pages_for(running.prefilled.into()) as usize,
            };
            if running.granted < due {
                let (first, pages) = (running.granted as u32, running.pages[running.granted..due].to_vec());
                plan.grants.push(PageGrant { slot, first, pages });
                running.granted = due;
            }
        }
        decode
    }
}
