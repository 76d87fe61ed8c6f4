//! The scheduler: one owner of all sequences, slots and KV pages of a group. Pure: events in, actions and plans out; no
//! IO, no clock, no async, so that a seed replays every run.
//!
//! Its owner hands it requests with [`Scheduler::submit`], feeds it with [`Scheduler::apply`], and asks for plans with
//! [`Scheduler::next_plan`] until there is none. Sequence numbers ascend in order of arrival, and that order decides
//! everything: the lowest waits least, is admitted first and never gives up its pages to a higher one, so it always
//! makes progress and nothing starves. Two things go before the order: a sequence whose reader is behind comes after
//! all others, and while it is unclear what loses the group, `trial` says who is computed.

mod build;
mod check;
mod events;
#[cfg(test)]
pub(crate) mod fake_worker;
mod limits;
mod pages;
mod pipeline;
mod request;
mod room;
mod sequence;
#[cfg(test)]
mod tests;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use looplane_proto::worker::v1::{Finish, Outcome, SampledToken};

pub use events::{Action, Blame, Event};
pub use limits::{Limits, LimitsError};
use pages::PagePool;
use pipeline::Pipeline;
pub use request::{FinishReason, GeneratedToken, SamplingParams, SequenceRequest, SubmitError};
use sequence::{Phase, Sequence};
use trial::Trials;

/// The owner of all sequences of a model replica.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    sequences: BTreeMap<u64, Sequence>,
    /// Sequences that wait; the lowest is admitted first.
    queue: BTreeSet<u64>,
    /// Those of them that were never admitted, and their prompt tokens: what the bounds of the queue count.
    fresh: BTreeSet<u64>,
    fresh_tokens: u64,
    running: BTreeSet<u64>,
    /// Preempted sequences whose last tokens may be on the way.
    leaving: BTreeSet<u64>,
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
    /// The number that the next sequence gets.
    next_sequence: u64,
    /// Bound on the rows of prompts in a step, besides that of all rows.
    max_prompt_rows: u32,
    preemptions: u64,
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
    /// KV pages of the group; 0 before there is one.
    pub kv_pages: u64,
    /// Times a sequence gave up its slot, so far: for want of pages, to others while its reader was behind, or for a trial.
    pub preemptions: u64,
}

impl Scheduler {
    /// A scheduler without a group.
    ///
    /// # Errors
    /// As [`Limits::validate`].
    pub fn new(limits: Limits) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            free_slots: (0..limits.max_slots).rev().collect(),
            limits,
            sequences: BTreeMap::new(),
            queue: BTreeSet::new(),
            fresh: BTreeSet::new(),
            fresh_tokens: 0,
            running: BTreeSet::new(),
            leaving: BTreeSet::new(),
            releases: Vec::new(),
            pages: None,
            pipeline: Pipeline::new(),
            trials: Trials::default(),
            group_up: false,
            next_sequence: 1,
            max_prompt_rows: u32::MAX,
            preemptions: 0,
        })
    }

    /// Queues the sequences of one request, all or none, and returns their numbers.
    ///
    /// # Errors
    /// Which bound they would exceed, or that there is no group yet.
    pub fn submit(&mut self, requests: Vec<SequenceRequest>) -> Result<Range<u64>, SubmitError> {
        self.room_for(&requests)?;
        let first = self.next_sequence;
        for request in requests {
            let id = self.next_sequence;
            self.next_sequence += 1;
            self.fresh_tokens += request.prompt.len() as u64;
            self.sequences.insert(id, Sequence::new(request));
            self.queue.insert(id);
            self.fresh.insert(id);
        }
        debug_assert_eq!(self.check(), Ok(()));
        Ok(first..self.next_sequence)
    }

    /// Takes note of an event and appends what follows from it to `actions`.
    pub fn apply(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Cancel { sequence } => {
                self.remove(sequence);
            }
            Event::Reader { sequence, behind } => {
                if let Some(sequence) = self.sequences.get_mut(&sequence) {
                    sequence.reader_behind = behind;
                }
            }
            Event::GroupReady { kv_pages, page_positions } => self.group_ready(kv_pages, page_positions, actions),
            Event::Outcome(outcome) => {
                if let Err(reason) = self.outcome(outcome, actions) {
                    actions.push(Action::Fault(reason));
                }
            }
        }
        debug_assert_eq!(self.check(), Ok(()));
    }

    /// Bounds the rows of prompts in the steps of plans to come, at least 1: long steps delay those who decode.
    pub fn limit_prompt_rows(&mut self, rows: u32) {
        self.max_prompt_rows = rows.max(1);
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

    fn room_for(&self, requests: &[SequenceRequest]) -> Result<(), SubmitError> {
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
        let several = requests.len() > 1;
        let (sequences, waiting) = (requests.len() as u64, self.fresh.len() as u64);
        for (what, option, brings, waits, limit, is_bound) in [
            ("sequences", "--max-queued-requests", sequences, waiting, max_waiting_requests, true),
            // The context bounds a single prompt, and an empty queue takes it.
            (
                "prompt tokens",
                "--max-queued-tokens",
                tokens,
                self.fresh_tokens,
                max_waiting_tokens,
                several || waiting > 0,
            ),
        ] {
            if is_bound && waits + brings > limit {
                return Err(match brings > limit && several {
                    true => SubmitError::NeverFits { asked: brings, limit, what, option },
                    false => SubmitError::QueueFull { waiting: waits, limit, what },
                });
            }
        }
        Ok(())
    }

    fn group_ready(&mut self, kv_pages: u32, page_positions: u32, actions: &mut Vec<Action>) {
        debug_assert!(!self.group_up, "a group is announced once, and its loss before the next");
        let pages = PagePool::new(kv_pages, page_positions);
        // The cache of a group that came back may be smaller than what was promised at submission.
        let needs = self.sequences.iter().map(|(&id, sequence)| (id, pages.pages_for(sequence.positions())));
        let too_large: Vec<(u64, u64)> = needs.filter(|&(_, needed)| needed > pages.total()).collect();
        self.pages = Some(pages);
        self.pipeline = Pipeline::new();
        self.group_up = true;
        for (sequence, needed) in too_large {
            self.remove(sequence);
            let reason = format!("the request needs {needed} KV pages, but the cache has only {kv_pages} now");
            actions.push(Action::Failed { sequence, reason });
        }
        self.queue_self_test();
    }

    /// Nothing runs any more: what ran waits again.
    fn forget_group(&mut self) {
        self.group_up = false;
        self.pipeline = Pipeline::new();
        self.releases.clear();
        self.free_slots = (0..self.limits.max_slots).rev().collect();
        if let Some(pages) = &mut self.pages {
            *pages = pages.emptied();
        }
        self.leaving.append(&mut self.running);
        for id in std::mem::take(&mut self.leaving) {
            let sequence = self.sequences.get_mut(&id).expect("running and leaving name known sequences");
            sequence.phase = Phase::Waiting;
            self.queue.insert(id);
        }
    }

    fn outcome(&mut self, outcome: Outcome, actions: &mut Vec<Action>) -> Result<(), String> {
        if !self.group_up {
            return Err("an outcome without a group".into());
        }
        self.pipeline.report(&outcome)?;
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
        self.leaving.retain(|id| {
            let sequence = sequences.get_mut(id).expect("leaving names known sequences");
            let gone = matches!(sequence.phase, Phase::Leaving { version } if version <= applied);
            if gone {
                sequence.phase = Phase::Waiting;
                queue.insert(*id);
            }
            !gone
        });
    }

    fn token(&mut self, version: u64, token: SampledToken, actions: &mut Vec<Action>) -> Result<(), String> {
        let id = token.sequence;
        // Cancelled or failed: the step ran before the release took effect.
        let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(()) };
        match sequence.phase {
            Phase::Running(_) => {}
            Phase::Leaving { version: released } if version < released => {}
            _ => return Err(format!("plan {version} brought a token for sequence {id}, which is not in a slot")),
        }
        let finish = Finish::try_from(token.finish)
            .map_err(|_| format!("a token of sequence {id} has the unknown finish {}", token.finish))?;
        let full = sequence.generated.len() + 1 >= sequence.request.max_tokens as usize;
        if full && finish == Finish::None {
            return Err(format!("sequence {id} goes on past its {} tokens", sequence.request.max_tokens));
        }
        sequence.generated.push(token.token);
        // Nobody reads what the group proves itself with.
        let is_read = self.trials.self_test != Some(id);
        if is_read {
            let top = token.top.iter().map(|entry| (entry.token, entry.logprob)).collect();
            let token = GeneratedToken { id: token.token, logprob: token.logprob, top };
            actions.push(Action::Token { sequence: id, token });
        }
        self.clear_if_due(id);
        let reason = match finish {
            Finish::None => return Ok(()),
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
        let mut sequence = self.sequences.remove(&id)?;
        self.trials.end(id);
        match std::mem::replace(&mut sequence.phase, Phase::Waiting) {
            Phase::Waiting => {
                self.queue.remove(&id);
                if self.fresh.remove(&id) {
                    self.fresh_tokens -= sequence.request.prompt.len() as u64;
                }
            }
            Phase::Leaving { .. } => {
                self.leaving.remove(&id);
            }
            Phase::Running(running) => {
                self.running.remove(&id);
                self.release(running);
            }
        }
        Some(sequence)
    }

    /// Gives back slot and pages; the plan built next tells the workers.
    fn release(&mut self, running: sequence::Running) {
        self.releases.push(running.slot);
        self.free_slots.push(running.slot);
        self.pages.as_mut().expect("a sequence runs on pages of the pool").give_back(running.pages);
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
        let (Some(sequence), Some(pages)) = (self.sequences.get(&id), &self.pages) else { return false };
        sequence.running().is_some_and(|running| pages.covers(running.pages.len(), sequence.len() - 1))
    }
}
