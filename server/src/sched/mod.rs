//! The scheduler: one owner of all sequences, slots and KV pages of a group. Pure: events in, actions and plans out; no
//! IO, no clock, no async, so that a seed replays every run.
//!
//! Its owner hands it requests with [`Scheduler::submit`], feeds it with [`Scheduler::apply`], and asks for plans with
//! [`Scheduler::next_plan`] until there is none. Who enters a slot first is decided by `shares`: among API keys by what
//! they have had, of one by priority and arrival. From then on the order of first admissions decides everything: the
//! earliest is admitted again first and never gives up its pages to a later one, so it always makes progress and
//! nothing starves. Two things go before the order: a sequence whose reader is behind comes after all others (see
//! `Turn`), and while it is unclear what loses the group, `trial` says who is computed.
//!
//! A plan costs a few looks at each slot, an outcome one at each of its tokens: what plans need of a sequence lies in
//! its slot, and all orders are kept rather than made.

mod build;
mod check;
mod ending;
mod events;
#[cfg(test)]
pub(crate) mod fake_worker;
mod hand_over;
mod limits;
mod pages;
mod pipeline;
mod prefix;
mod request;
mod room;
mod sequence;
mod shares;
mod step_rows;
#[cfg(test)]
mod tests;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use looplane_proto::worker::v1::{Finish, Outcome, SampledToken, StepTime};

pub use events::{Action, Blame, Event};
pub use hand_over::Handed;
use hand_over::too_large;
pub use limits::{GroupShape, Limits, LimitsError};
use pages::PagePool;
use pipeline::Pipeline;
pub use request::{FinishReason, GeneratedToken, SamplingParams, SequenceRequest, SubmitError, TokenBounds};
use sequence::{Phase, Running, Sequence, Turn};
pub use shares::{MAX_WEIGHT, PRIORITIES, PRIORITY_TOKENS, Standing, leaves_room};
use shares::{Shares, most_of};
use step_rows::Mix;
pub use step_rows::{StepRows, StepSize};
use trial::Trials;

/// The owner of all sequences of a model replica.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    sequences: BTreeMap<u64, Sequence>,
    /// Sequences that wait; the first is admitted first, and of those that never were the one whose turn it is.
    queue: BTreeSet<Turn>,
    /// Those that were never admitted: what the bounds of the queue count.
    shares: Shares,
    /// The ticket of the sequence that is admitted for the first time next.
    next_ticket: u64,
    /// The slots of the group, and who is in them.
    slots: Vec<Option<Running>>,
    /// Sequences in slots, and in which.
    running: BTreeMap<Turn, u32>,
    /// How many of them have prompt left that no plan was sent for.
    prompts: usize,
    /// Preempted sequences whose last tokens may be on the way.
    leaving: BTreeSet<Turn>,
    /// Slots that the next plan releases; their pages are in the pool already, as a plan releases before it grants.
    releases: Vec<u32>,
    /// Free slots; the last is given next.
    free_slots: Vec<u32>,
    /// `None` until the first group is ready.
    pages: Option<PagePool>,
    pipeline: Pipeline,
    trials: Trials,
    /// A group takes plans.
    group_up: bool,
    /// It finishes what it has begun, and begins nothing more.
    is_ending: bool,
    /// The number that the next sequence gets.
    next_sequence: u64,
    /// Bound on the rows of any step of the group.
    max_batch_tokens: u32,
    /// Bounds on those of a step with prompts.
    step_rows: StepRows,
    /// What they were made of.
    mix: Mix,
    /// What steps of the group take.
    step_times: Vec<StepTime>,
    preemptions: u64,
    /// The invariants are not checked after each event: somebody takes times.
    #[cfg(test)]
    is_unchecked: bool,
}

/// What a scheduler has at hand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences in slots.
    pub running: u64,
    /// Sequences that wait for a slot, those preempted included.
    pub waiting: u64,
    /// KV pages that sequences hold.
    pub kv_pages_used: u64,
    /// KV pages that nobody holds, with tokens that a prompt may begin with: they can be taken at any time.
    pub kv_pages_cached: u64,
    /// KV pages of the group; 0 before there is one.
    pub kv_pages: u64,
    /// Times a sequence gave up its slot, so far: for want of pages, to others while its reader was behind, or for a
    /// trial.
    pub preemptions: u64,
}

impl std::iter::Sum for Load {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            running: sum.running + one.running,
            waiting: sum.waiting + one.waiting,
            kv_pages_used: sum.kv_pages_used + one.kv_pages_used,
            kv_pages_cached: sum.kv_pages_cached + one.kv_pages_cached,
            kv_pages: sum.kv_pages + one.kv_pages,
            preemptions: sum.preemptions + one.preemptions,
        })
    }
}

impl Scheduler {
    /// A scheduler without a group.
    ///
    /// # Errors
    /// As [`Limits::validate`].
    pub fn new(limits: Limits) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            limits,
            sequences: BTreeMap::new(),
            queue: BTreeSet::new(),
            shares: Shares::default(),
            next_ticket: 1,
            slots: Vec::new(),
            running: BTreeMap::new(),
            prompts: 0,
            leaving: BTreeSet::new(),
            releases: Vec::new(),
            free_slots: Vec::new(),
            pages: None,
            pipeline: Pipeline::new(1),
            trials: Trials::default(),
            group_up: false,
            is_ending: false,
            next_sequence: 1,
            max_batch_tokens: 0,
            step_rows: StepRows::default(),
            mix: Mix::default(),
            step_times: Vec::new(),
            preemptions: 0,
            #[cfg(test)]
            is_unchecked: false,
        })
    }

    /// From now on the invariants are not checked after each event: somebody takes times, or has many events.
    #[cfg(test)]
    pub(crate) fn leave_unchecked(&mut self) {
        self.is_unchecked = true;
    }

    /// Queues the sequences of one request, all or none, and returns their numbers.
    ///
    /// # Errors
    /// As [`Scheduler::room_for`].
    pub fn submit(&mut self, requests: Vec<SequenceRequest>, standing: &Standing) -> Result<Range<u64>, SubmitError> {
        self.room_for(&requests, standing)?;
        Ok(self.queue(requests, standing))
    }

    /// Queues the sequences of one request, for which there is room, and returns their numbers.
    pub fn queue(&mut self, requests: Vec<SequenceRequest>, standing: &Standing) -> Range<u64> {
        let first = self.next_sequence;
        for request in requests {
            let id = self.next_sequence;
            self.next_sequence += 1;
            let claim = self.shares.queued(id, standing, request.prompt.len() as u64, request.max_tokens.into());
            let mut sequence = Sequence::new(request, Some(claim), self.limits.prefix_cache);
            self.extend_keys(&mut sequence);
            self.queue.insert(sequence.turn(id));
            self.sequences.insert(id, sequence);
        }
        self.debug_check();
        first..self.next_sequence
    }

    /// Takes note of an event and appends what follows from it to `actions`.
    pub fn apply(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Cancel { sequence } => {
                self.remove(sequence);
            }
            Event::Reader { sequence, behind } => self.reader(sequence, behind),
            Event::GroupReady(shape) => self.group_ready(&shape, actions),
            Event::Outcome(outcome) => {
                if let Err(reason) = self.outcome(outcome, actions) {
                    actions.push(Action::Fault(reason));
                }
            }
        }
        self.debug_check();
    }

    /// Bounds the rows of steps with prompts in plans to come: long steps delay those who decode.
    pub fn limit_step_rows(&mut self, rows: StepRows) {
        self.step_rows = rows;
    }

    /// What steps take, by rows ascending: in plans to come sequences draft as far as that is worth it. Before the
    /// first call they draft nothing.
    pub fn set_step_times(&mut self, times: Vec<StepTime>) {
        self.step_times = times;
    }

    /// No sequence is left, and no plan is on its way.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && !self.is_outstanding()
    }

    /// Sequences that have not ended.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// What is at hand now.
    pub fn load(&self) -> Load {
        let kv_pages = self.pages.as_ref().map_or(0, PagePool::total);
        Load {
            running: self.running.len() as u64,
            waiting: (self.queue.len() + self.leaving.len()) as u64,
            kv_pages_used: kv_pages - self.pages.as_ref().map_or(0, PagePool::available),
            kv_pages_cached: self.pages.as_ref().map_or(0, PagePool::idle),
            kv_pages,
            preemptions: self.preemptions,
        }
    }

    /// Rows of prompts in the step that was reported last: plans compute them in their first.
    pub fn prompt_rows(&self) -> u32 {
        self.pipeline.started().filter(|plan| plan.reported == 1).map_or(0, |plan| plan.prompt_rows)
    }

    /// Rows of the largest step that the group owes a report of, or will once plans that are under way begin.
    pub fn rows_ahead(&self) -> u32 {
        self.pipeline.rows_ahead()
    }

    /// The group owes an outcome, or will once a release reaches it.
    pub fn is_outstanding(&self) -> bool {
        let owes = || self.pipeline.unstarted().next().is_some() || self.steps_left() > 0;
        self.group_up && (!self.releases.is_empty() || owes())
    }

    /// Whether the queue takes the sequences of a request.
    ///
    /// # Errors
    /// Which bound they would exceed, or that there is no group yet.
    pub fn room_for(&self, requests: &[SequenceRequest], standing: &Standing) -> Result<(), SubmitError> {
        let Some(pages) = &self.pages else {
            return Err(SubmitError::Unavailable("loading the model".into()));
        };
        for request in requests {
            let needed = pages.pages_for(request.positions());
            if needed > pages.total() {
                return Err(SubmitError::TooLarge { needed, available: pages.total() });
            }
        }
        let tokens = requests.iter().map(|request| request.prompt.len() as u64).sum();
        let Limits { max_waiting_requests, max_waiting_tokens, .. } = self.limits;
        let (sequences, (waiting, waiting_tokens)) = (requests.len() as u64, self.shares.waiting());
        let (own, own_tokens) = self.shares.waiting_of(&standing.owner);
        // The context bounds a single prompt, and an empty queue takes it.
        let tokens_are_bound = requests.len() > 1 || waiting > 0;
        for (what, of_owner, option, brings, waits, own, limit, is_bound) in [
            (
                "sequences",
                "sequences of this API key",
                "--max-queued-requests",
                sequences,
                waiting,
                own,
                max_waiting_requests,
                true,
            ),
            (
                "prompt tokens",
                "prompt tokens of this API key",
                "--max-queued-tokens",
                tokens,
                waiting_tokens,
                own_tokens,
                max_waiting_tokens,
                tokens_are_bound,
            ),
        ] {
            let free = limit.saturating_sub(waits);
            if is_bound && brings > limit && sequences > 1 {
                return Err(SubmitError::NeverFits { asked: brings, limit, what: what.into(), option: option.into() });
            }
            if is_bound && brings > free {
                return Err(SubmitError::QueueFull { waiting: waits, limit, what: what.into() });
            }
            if is_bound && standing.owner.is_some() && !leaves_room(own, brings, free) {
                return Err(SubmitError::QueueFull { waiting: own, limit: most_of(free), what: of_owner.into() });
            }
        }
        Ok(())
    }

    fn reader(&mut self, id: u64, behind: bool) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let before = sequence.turn(id);
        if before.is_fresh() {
            // It has no token that its reader could be behind with.
            return;
        }
        sequence.reader_behind = behind;
        let now = sequence.turn(id);
        match sequence.phase {
            Phase::Waiting => {
                self.queue.remove(&before);
                self.queue.insert(now);
            }
            Phase::Running { slot } => {
                self.running.remove(&before);
                self.running.insert(now, slot);
            }
            Phase::Leaving { .. } => {
                self.leaving.remove(&before);
                self.leaving.insert(now);
            }
        }
    }

    fn group_ready(&mut self, shape: &GroupShape, actions: &mut Vec<Action>) {
        debug_assert!(!self.group_up, "a group is announced once, and its loss before the next");
        let pages = PagePool::new(shape.kv_pages, shape.page_positions);
        // The cache of a group that came back may be smaller than what was promised at submission.
        let reasons = self.sequences.iter().map(|(&id, sequence)| (id, too_large(&sequence.request, &pages)));
        let too_large: Vec<(u64, String)> = reasons.filter_map(|(id, reason)| Some((id, reason?))).collect();
        let page_positions = self.pages.replace(pages).map(|before| before.page_positions());
        if page_positions.is_some_and(|before| before != shape.page_positions) {
            let mut sequences = std::mem::take(&mut self.sequences);
            sequences.values_mut().for_each(|sequence| {
                sequence.keys.clear();
                self.extend_keys(sequence);
            });
            self.sequences = sequences;
        }
        self.pipeline = Pipeline::new(shape.first_version);
        self.slots = (0..shape.max_slots).map(|_| None).collect();
        self.free_slots = (0..shape.max_slots).rev().collect();
        self.max_batch_tokens = shape.max_batch_tokens;
        self.group_up = true;
        for (sequence, reason) in too_large {
            self.remove(sequence);
            actions.push(Action::Failed { sequence, reason });
        }
        self.queue_self_test();
    }

    /// Nothing runs any more: what ran waits again.
    fn forget_group(&mut self) {
        self.group_up = false;
        self.is_ending = false;
        self.pipeline = Pipeline::new(1);
        self.releases.clear();
        self.slots.iter_mut().for_each(|slot| *slot = None);
        self.free_slots = (0..self.slots.len() as u32).rev().collect();
        self.prompts = 0;
        if let Some(pages) = &mut self.pages {
            *pages = pages.emptied();
        }
        let ran = std::mem::take(&mut self.running).into_keys();
        for turn in ran.chain(std::mem::take(&mut self.leaving)) {
            let sequence = self.sequences.get_mut(&turn.id).expect("running and leaving name known sequences");
            sequence.phase = Phase::Waiting;
            self.queue.insert(turn);
        }
    }

    fn outcome(&mut self, outcome: Outcome, actions: &mut Vec<Action>) -> Result<(), String> {
        if !self.group_up {
            return Err("an outcome without a group".into());
        }
        self.pipeline.report(&outcome)?;
        self.mix.step(outcome.tokens.len());
        for token in outcome.prompt {
            if let Some(sequence) = self.sequences.get_mut(&token.sequence) {
                sequence.take_prompt_token(token);
            }
        }
        for token in outcome.tokens {
            self.token(outcome.version, token, actions)?;
        }
        self.requeue_preempted(outcome.version);
        Ok(())
    }

    /// Preempted sequences whose release took effect: nothing more comes for them.
    fn requeue_preempted(&mut self, applied: u64) {
        let sequences = &mut self.sequences;
        let queue = &mut self.queue;
        self.leaving.retain(|turn| {
            let sequence = sequences.get_mut(&turn.id).expect("leaving names known sequences");
            let gone = matches!(sequence.phase, Phase::Leaving { version } if version <= applied);
            if gone {
                sequence.phase = Phase::Waiting;
                queue.insert(*turn);
            }
            !gone
        });
    }

    fn token(&mut self, version: u64, token: SampledToken, actions: &mut Vec<Action>) -> Result<(), String> {
        let id = token.sequence;
        // Cancelled or failed: the step ran before the release took effect.
        let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(()) };
        let slot = match sequence.phase {
            Phase::Running { slot } => Some(slot),
            Phase::Leaving { version: released } if version < released => None,
            _ => return Err(format!("plan {version} brought a token for sequence {id}, which is not in a slot")),
        };
        let finish = Finish::try_from(token.finish)
            .map_err(|_| format!("a token of sequence {id} has the unknown finish {}", token.finish))?;
        if finish == Finish::Nothing {
            self.remove(id);
            actions.push(Action::Contradiction { sequence: id });
            return Ok(());
        }
        let full = sequence.generated.len() + 1 >= sequence.request.max_tokens as usize;
        if full && finish == Finish::None {
            return Err(format!("sequence {id} goes on past its {} tokens", sequence.request.max_tokens));
        }
        sequence.generated.push(token.token);
        let is_cleared = sequence.is_cleared();
        let pages = self.pages.as_mut().expect("a group that is up has pages");
        sequence.extend_keys(pages.page_positions());
        if let Some(running) = slot.and_then(|slot| self.slots[slot as usize].as_mut()) {
            running.tokens += 1;
            running.publish(sequence, pages);
        }
        // Nobody reads what the group proves itself with.
        let is_read = self.trials.self_test != Some(id);
        if is_read && sequence.generated.len() == 1 {
            let logprobs = std::mem::take(&mut sequence.prompt_logprobs);
            actions.push(Action::Prompt { sequence: id, cached_tokens: sequence.cached_tokens, logprobs });
        }
        if is_read {
            let top = token.top.iter().map(|entry| (entry.token, entry.logprob)).collect();
            let token = GeneratedToken { id: token.token, logprob: token.logprob, top };
            actions.push(Action::Token { sequence: id, token });
        }
        if is_cleared {
            self.trials.end(id);
        }
        let reason = match finish {
            Finish::None | Finish::Nothing => return Ok(()),
            Finish::Stop => FinishReason::Stop,
            Finish::Length => FinishReason::Length,
        };
        self.remove(id);
        if is_read {
            actions.push(Action::Finished { sequence: id, reason });
        }
        Ok(())
    }

    /// Forgets a sequence, wherever it is; its slot is released by the next plan.
    fn remove(&mut self, id: u64) -> Option<Sequence> {
        let sequence = self.sequences.remove(&id)?;
        let turn = sequence.turn(id);
        self.trials.end(id);
        if let Some(claim) = &sequence.claim {
            self.shares.ended(id, claim, sequence.cached_tokens.into(), sequence.generated.len() as u64);
        }
        match sequence.phase {
            Phase::Waiting => {
                self.queue.remove(&turn);
            }
            Phase::Leaving { .. } => {
                self.leaving.remove(&turn);
            }
            Phase::Running { slot } => {
                self.running.remove(&turn);
                self.release(slot, &sequence);
            }
        }
        Some(sequence)
    }

    /// Gives back slot and pages of a sequence; the plan built next tells the workers.
    fn release(&mut self, slot: u32, sequence: &Sequence) {
        let mut running = self.slots[slot as usize].take().expect("only a slot in use is released");
        self.prompts -= usize::from(!running.decodes());
        self.releases.push(slot);
        self.free_slots.push(slot);
        let pages = self.pages.as_mut().expect("a sequence runs on pages of the pool");
        running.publish(sequence, pages);
        running.keep_tail(sequence, pages);
        running.pages.into_iter().rev().for_each(|page| pages.let_go(page));
    }

    fn extend_keys(&self, sequence: &mut Sequence) {
        if let Some(pages) = &self.pages {
            sequence.extend_keys(pages.page_positions());
        }
    }

    /// Steps that the newest plan still guarantees to the sequences that decode; 0 if the loop may have come to rest.
    fn steps_left(&self) -> u32 {
        if let Some(newest) = self.pipeline.unstarted().last() {
            return newest.steps;
        }
        let Some(plan) = self.pipeline.started() else { return 0 };
        let has_rows = || plan.decode.iter().any(|id| self.can_step(*id));
        if plan.idle || !has_rows() { 0 } else { plan.steps - plan.reported }
    }

    /// Whether the next position of a sequence that decodes has a page, as far as is known.
    fn can_step(&self, id: u64) -> bool {
        let Some(Phase::Running { slot }) = self.sequences.get(&id).map(|sequence| sequence.phase) else {
            return false;
        };
        let pages = self.pages.as_ref().expect("a sequence runs on pages of the pool");
        self.slot(slot).is_covered(0, pages)
    }

    fn slot(&self, slot: u32) -> &Running {
        self.slots[slot as usize].as_ref().expect("the index of running sequences names slots in use")
    }

    /// Sequences in slots, the first to be served first.
    fn running(&self) -> impl Iterator<Item = (Turn, &Running)> {
        self.running.iter().map(|(&turn, &slot)| (turn, self.slot(slot)))
    }
}
