//! Everything between the front end and the scheduler: submissions and cancels in, plans out to whoever feeds the
//! group, outcomes in, tokens and ends out to the streams; and what of it is counted.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use looplane_proto::worker::v1::{Outcome, Plan, StepTime};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::common::Common;
use super::start::{GroupFacts, Traffic};
use crate::drafts::DraftStep;
use crate::engine::{
    Command, Life, Moved, Returned, SequenceEvent, SequenceRequest, SequenceSender, SequenceStream, Standing,
    Submission, SubmitError, Unwanted, Work, sequence,
};
use crate::metrics::{Ended, EngineMetrics, StepRun};
use crate::sched::{Action, Blame, Event, Scheduler, StepRows};

/// The delivery's end of a sequence.
#[derive(Debug)]
struct OwnedStream {
    sender: SequenceSender,
    life: Life,
    /// Taken off what this replica has to do as the sequence ends or leaves.
    work: Work,
}

/// The owner of the scheduler and of the streams of its sequences.
#[derive(Debug)]
pub(super) struct Delivery {
    scheduler: Scheduler,
    streams: HashMap<u64, OwnedStream>,
    /// Sequences whose readers are behind.
    behind: BTreeSet<u64>,
    /// For the streams handed out, which cancel through it.
    commands: mpsc::UnboundedSender<Command>,
    metrics: Arc<EngineMetrics>,
    /// Of all replicas.
    common: Arc<Common>,
    /// Why nothing is taken any more.
    closed: Option<String>,
    /// Of the group at hand, by rank.
    traffic: Vec<Traffic>,
    actions: Vec<Action>,
}

impl Delivery {
    /// No sequence yet. Streams cancel through `commands`.
    pub(super) fn new(
        scheduler: Scheduler,
        commands: mpsc::UnboundedSender<Command>,
        metrics: Arc<EngineMetrics>,
        common: Arc<Common>,
    ) -> Self {
        Self {
            scheduler,
            streams: HashMap::new(),
            behind: BTreeSet::new(),
            commands,
            metrics,
            common,
            closed: None,
            traffic: Vec::new(),
            actions: Vec::new(),
        }
    }

    /// What is counted.
    pub(super) fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    /// Sequences that have not ended.
    pub(super) fn sequences(&self) -> usize {
        self.scheduler.sequences()
    }

    /// No sequence is left, and no plan is on its way.
    pub(super) fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// As [`Scheduler::is_at_rest`].
    pub(super) fn is_at_rest(&self) -> bool {
        self.scheduler.is_at_rest()
    }

    /// The group owes a report.
    pub(super) fn is_outstanding(&self) -> bool {
        self.scheduler.is_outstanding()
    }

    /// Rows of the largest step that the group is yet to report.
    pub(super) fn rows_ahead(&self) -> u32 {
        self.scheduler.rows_ahead()
    }

    /// As [`Scheduler::limit_step_rows`].
    pub(super) fn limit_step_rows(&mut self, rows: StepRows) {
        self.scheduler.limit_step_rows(rows);
    }

    /// As [`Scheduler::set_step_times`].
    pub(super) fn set_step_times(&mut self, times: Vec<StepTime>) {
        self.scheduler.set_step_times(times);
    }

    /// Takes nothing more, and says why.
    pub(super) fn close(&mut self, reason: String) {
        self.closed = Some(reason);
    }

    /// Does what the front end asks.
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.submit(submission),
            Command::Cancel { sequence, taken, because } => self.cancel(sequence, taken, because),
            Command::HandOver(to) => self.hand_over(&to),
            Command::Adopt(moved) => moved.into_iter().for_each(|moved| self.adopt(moved)),
            // Whoever asked may have gone.
            Command::Ping(reply) => drop(reply.send(())),
            Command::Restart(_) => debug_assert!(false, "workers are the supervisor's"),
        }
    }

    fn submit(&mut self, submission: Submission) {
        if let Err(error) = self.room_for(&submission.requests, &submission.standing) {
            return submission.refuse(error);
        }
        let Submission { requests, standing, submitted, reply, work, .. } = submission;
        let streams = self.queue(requests, &standing, submitted, work);
        // Nobody waits for the answer any more: the streams in it cancel their sequences as they are dropped.
        let _ = reply.send(Ok(streams));
    }

    fn room_for(&mut self, requests: &[SequenceRequest], standing: &Standing) -> Result<(), SubmitError> {
        if let Some(reason) = &self.closed {
            return Err(SubmitError::Unavailable(reason.clone()));
        }
        self.common.admit(requests)?;
        self.scheduler.room_for(requests, standing)
    }

    fn queue(
        &mut self,
        requests: Vec<SequenceRequest>,
        standing: &Standing,
        submitted: Instant,
        work: Vec<Work>,
    ) -> Vec<SequenceStream> {
        let sizes: Vec<_> = requests.iter().map(|request| (request.prompt.len(), request.max_tokens)).collect();
        let numbers = self.scheduler.queue(requests, standing);
        let mut work = work.into_iter();
        let streams = numbers.zip(sizes).map(|(number, (prompt_tokens, max_tokens))| {
            let (sender, stream) = sequence(number, max_tokens, self.commands.clone());
            let life = Life::new(prompt_tokens, submitted);
            self.streams.insert(number, OwnedStream { sender, life, work: work.next().unwrap_or_default() });
            stream.counted_in(self.metrics.generation_tokens.clone())
        });
        let streams = streams.collect();
        self.metrics.set_load(self.scheduler.load());
        streams
    }

    /// Hands what this group does not compute and another can to who stands in front of the replicas.
    fn hand_over(&mut self, to: &mpsc::UnboundedSender<Returned>) {
        let mut moved = Vec::new();
        for (number, sequence) in self.scheduler.hand_over() {
            self.behind.remove(&number);
            if let Some(OwnedStream { sender, life, work }) = self.streams.remove(&number) {
                moved.push(Moved { sequence, sender, life, work });
            }
        }
        self.metrics.set_load(self.scheduler.load());
        if !moved.is_empty() {
            // Who takes it is gone only with the server: the readers learn of it as their senders are dropped.
            let _ = to.send(Returned::Moved(moved));
        }
    }

    fn adopt(&mut self, moved: Moved) {
        let Moved { sequence, sender, life, work } = moved;
        // One like it may have been found out meanwhile.
        let is_admitted = self.common.admit(std::slice::from_ref(&sequence.request)).map_err(|error| error.to_string());
        match is_admitted.and_then(|()| self.scheduler.adopt(sequence)) {
            Ok(number) => {
                let is_read = sender.move_to(number, self.commands.clone());
                self.streams.insert(number, OwnedStream { sender, life, work });
                if !is_read {
                    self.cancel(number, 0, Unwanted::Abandoned);
                }
            }
            Err(reason) => {
                sender.send(SequenceEvent::Failed(reason));
                life.end(Ended::Error, Instant::now(), &self.metrics);
            }
        }
        self.metrics.set_load(self.scheduler.load());
    }

    fn cancel(&mut self, sequence: u64, taken: u64, because: Unwanted) {
        if let Some(mut stream) = self.streams.remove(&sequence) {
            self.behind.remove(&sequence);
            stream.life.generated = taken;
            stream.life.end(because.into(), Instant::now(), &self.metrics);
        }
        self.apply(Event::Cancel { sequence }).expect("a cancel makes no fault");
    }

    /// A group is ready for its first plan.
    pub(super) fn group_ready(&mut self, facts: &GroupFacts) {
        let GroupFacts { shape, ref traffic, .. } = *facts;
        self.metrics.kv_bytes.set(traffic.iter().map(|rank| rank.kv_bytes).sum());
        self.metrics.stream_bytes.set(traffic.iter().map(|rank| rank.stream_bytes).sum());
        self.metrics.page_positions.set(shape.page_positions.into());
        self.metrics.ranks.set_present(traffic.len());
        for (rank, traffic) in self.metrics.ranks.iter().zip(traffic).filter(|(_, traffic)| traffic.limit > 0) {
            rank.set_read_limit(traffic.limit);
        }
        self.traffic.clone_from(traffic);
        self.apply(Event::GroupReady(shape)).expect("a new group has broken no rule");
    }

    /// The group is gone: what ran waits again. Says what the loss is put down to.
    pub(super) fn group_lost(&mut self) -> Blame {
        let mut actions = std::mem::take(&mut self.actions);
        let blame = self.scheduler.group_lost(&mut actions);
        self.actions = actions;
        self.act().expect("the loss of a group is no fault of it");
        self.metrics.losses.inc();
        if let Blame::Sequence { fingerprint, .. } = blame {
            self.common.quarantine(fingerprint);
        }
        blame
    }

    /// The group is to end soon: it finishes what it has begun, and begins nothing more.
    pub(super) fn group_ending(&mut self) {
        self.scheduler.group_ending();
    }

    /// The group goes on after all.
    pub(super) fn group_stays(&mut self) {
        self.scheduler.group_stays();
    }

    /// The group is ended: what ran waits again, and nobody is to blame.
    pub(super) fn group_ended(&mut self) {
        self.scheduler.group_ended();
        self.metrics.set_load(self.scheduler.load());
    }

    /// The plan to send now, if there is one.
    pub(super) fn next_plan(&mut self) -> Option<Plan> {
        let plan = self.scheduler.next_plan()?;
        let now = Instant::now();
        self.metrics.plans.inc();
        for admit in &plan.admit {
            if let Some(stream) = self.streams.get_mut(&admit.sequence) {
                stream.life.admitted(now, &self.metrics);
            }
        }
        self.metrics.set_load(self.scheduler.load());
        Some(plan)
    }

    /// Takes what rank 0 reports and hands its tokens on; returns the step, if one was run.
    ///
    /// # Errors
    /// A rule of the protocol that the group broke.
    pub(super) fn outcome(&mut self, outcome: Outcome) -> Result<Option<StepRun>, String> {
        let (ran_step, rows, positions) = (outcome.ran_step, u64::from(outcome.rows), outcome.positions);
        let samples = !outcome.tokens.is_empty();
        let drafts = self.drafts(&outcome)?;
        let (time, wait) = (Duration::from_nanos(outcome.step_ns), outcome.wait_ns.map(Duration::from_nanos));
        self.apply(Event::Outcome(outcome))?;
        self.notice_readers();
        if !ran_step {
            return Ok(None);
        }
        let prompt_rows = u64::from(self.scheduler.prompt_rows()).min(rows);
        let mut read_bytes = 0u64;
        for (traffic, rank) in self.traffic.iter().zip(self.metrics.ranks.iter()) {
            let bytes = traffic.of_step(positions, samples);
            rank.read(bytes);
            read_bytes = read_bytes.saturating_add(bytes);
        }
        let step = StepRun { decode_rows: rows - prompt_rows, prompt_rows, time, wait, read_bytes };
        self.metrics.step(step);
        drafts.iter().for_each(|step| self.metrics.drafts(*step));
        Ok(Some(step))
    }

    /// How a step's drafts fared; streams are told.
    fn drafts(&mut self, outcome: &Outcome) -> Result<Vec<DraftStep>, String> {
        let (mut drafts, now) = (Vec::with_capacity(outcome.drafted.len()), Instant::now());
        for of in &outcome.drafted {
            // The first token of a sequence needs no draft.
            let tokens = outcome.tokens.iter().filter(|token| token.sequence == of.sequence).count();
            let step = DraftStep { drafted: of.tokens, accepted: tokens.saturating_sub(1) as u32 };
            if step.accepted > step.drafted {
                let DraftStep { drafted, accepted } = step;
                return Err(format!("of {drafted} drafts of sequence {} {accepted} were accepted", of.sequence));
            }
            self.send(of.sequence, SequenceEvent::Drafts(step), now);
            drafts.push(step);
        }
        Ok(drafts)
    }

    /// Fails everything that has not ended.
    pub(super) fn fail_all(&mut self, reason: &str) {
        let mut sequences: Vec<u64> = self.streams.keys().copied().collect();
        sequences.sort_unstable();
        for sequence in sequences {
            self.send(sequence, SequenceEvent::Failed(reason.into()), Instant::now());
            self.apply(Event::Cancel { sequence }).expect("a cancel makes no fault");
        }
    }

    /// Applies an event and does what follows; the error is a fault of the group.
    fn apply(&mut self, event: Event) -> Result<(), String> {
        let mut actions = std::mem::take(&mut self.actions);
        self.scheduler.apply(event, &mut actions);
        self.actions = actions;
        self.act()
    }

    fn act(&mut self) -> Result<(), String> {
        let mut actions = std::mem::take(&mut self.actions);
        let (mut result, now) = (Ok(()), Instant::now());
        for action in actions.drain(..) {
            match action {
                Action::Prompt { sequence, cached_tokens, logprobs } => {
                    let Some(stream) = self.streams.get(&sequence) else { continue };
                    let times = Box::new(stream.life.times(now));
                    self.send(sequence, SequenceEvent::Prompt { cached_tokens, times, logprobs }, now);
                }
                Action::Token { sequence, token } => self.send(sequence, SequenceEvent::Token(token), now),
                Action::Finished { sequence, reason } => self.send(sequence, SequenceEvent::Finished(reason), now),
                Action::Failed { sequence, reason } => self.send(sequence, SequenceEvent::Failed(reason), now),
                Action::Contradiction { sequence } => self.send(sequence, SequenceEvent::Contradiction, now),
                Action::Fault(reason) => result = Err(format!("rank 0 broke the protocol: {reason}")),
            }
        }
        self.actions = actions;
        self.metrics.set_load(self.scheduler.load());
        result
    }

    fn send(&mut self, sequence: u64, event: SequenceEvent, now: Instant) {
        let Some(stream) = self.streams.get_mut(&sequence) else { return };
        let ended = event.count(&mut stream.life, now, &self.metrics);
        stream.sender.send(event);
        if let Some(how) = ended {
            self.behind.remove(&sequence);
            if let Some(stream) = self.streams.remove(&sequence) {
                stream.life.end(how, now, &self.metrics);
            }
        } else if stream.sender.is_behind() && self.behind.insert(sequence) {
            self.scheduler.apply(Event::Reader { sequence, behind: true }, &mut self.actions);
        }
    }

    /// Readers that have caught up get their turn again.
    fn notice_readers(&mut self) {
        let Self { behind, streams, scheduler, actions, .. } = self;
        behind.retain(|&sequence| {
            let is_behind = streams.get(&sequence).is_some_and(|stream| !stream.sender.has_caught_up());
            if !is_behind {
                scheduler.apply(Event::Reader { sequence, behind: false }, actions);
            }
            is_behind
        });
    }
}
