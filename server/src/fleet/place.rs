//! A place for a host: the other end of a replica's handle, which passes commands on to the host that has the place.
//! `readers` are told what comes of them, within `bounds`; `beats` knows when the host is lost.

mod beats;
mod bounds;
mod readers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use looplane_proto::fleet::v1::{Answer, HostMessage, Reader, Submit, Welcome, front_message, host_message};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::session::{Session, next};
use super::wire::{self, HostStatus, Malformed};
use super::{BEAT, with_causes};
use crate::engine::{
    Command, EngineHandle, EngineState, Handed, Life, ModelInfo, Moved, RestartError, Returned, SequenceEvent,
    Submission, SubmitError, Unwanted, Work, sequence,
};
use crate::group::Common;
use crate::metrics::{Ended, EngineMetrics};
use beats::goes_on;
use bounds::Fault;

/// Between two looks whether readers that are behind have caught up.
const LOOK: Duration = Duration::from_millis(50);
/// What readers are told at the end.
const SHUTTING_DOWN: &str = "the server is shutting down";

/// The task behind the handle of a replica on another machine.
pub(super) struct Place {
    number: u32,
    common: Arc<Common>,
    commands: mpsc::UnboundedReceiver<Command>,
    /// For the streams handed out, which cancel through it.
    own_commands: mpsc::UnboundedSender<Command>,
    sessions: mpsc::Receiver<Session>,
    state: watch::Sender<EngineState>,
    model: watch::Sender<Option<Arc<ModelInfo>>>,
    metrics: Arc<EngineMetrics>,
    session: Option<Session>,
    /// Beats since the host was heard last.
    silent: u32,
    /// Requests that the host has yet to answer, each with the number of its first sequence.
    submissions: HashMap<u64, (u64, Submission)>,
    sequences: BTreeMap<u64, Moved>,
    /// Those whose readers are behind.
    behind: BTreeSet<u64>,
    next_submission: u64,
    next_sequence: u64,
    /// Those that the host told last: of it only newer ones are counted.
    preemptions: u64,
    lost_at: Option<Instant>,
}

impl Place {
    /// The place of replica `number`, its handle, and where hosts are sent to that get it.
    pub(super) fn new(number: u32, common: Arc<Common>) -> (Self, EngineHandle, mpsc::Sender<Session>) {
        let (own_commands, commands) = mpsc::unbounded_channel();
        let (to_place, sessions) = mpsc::channel(1);
        let (state, state_seen) = watch::channel(EngineState::Loading("waiting for a host to join".into()));
        let (model, model_seen) = watch::channel(None);
        let metrics = Arc::new(EngineMetrics::default());
        let handle = EngineHandle::new(own_commands.clone(), state_seen, model_seen, metrics.clone());
        let place = Self {
            number,
            common,
            commands,
            own_commands,
            sessions,
            state,
            model,
            metrics,
            session: None,
            silent: 0,
            submissions: HashMap::new(),
            sequences: BTreeMap::new(),
            behind: BTreeSet::new(),
            next_submission: 0,
            next_sequence: 0,
            preemptions: 0,
            lost_at: None,
        };
        (place, handle, to_place)
    }

    /// Serves one host after another until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let (mut beat, mut look) = (interval(BEAT), interval(LOOK));
        // A server that stood still counts one beat, and hears first what came meanwhile.
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return self.close(),
                message = next(&mut self.session) => self.heard(message),
                Some(session) = self.sessions.recv(), if self.session.is_none() => self.joined(session),
                Some(command) = self.commands.recv() => self.command(command),
                _ = beat.tick() => self.beat(),
                _ = look.tick(), if !self.behind.is_empty() => self.notice_readers(),
            }
        }
    }

    pub(super) fn joined(&mut self, session: Session) {
        let (number, host) = (self.number, &session.host);
        tracing::info!("host {host} computes as replica {number}, with {}", goes_on(self.sequences.len()));
        session.send(front_message::Message::Welcome(Welcome { replica: number }));
        let is_too_long = |_: &u64, moved: &mut Moved| !session.model.holds(&moved.sequence.request);
        for (number, moved) in self.sequences.extract_if(.., is_too_long).collect::<Vec<_>>() {
            self.behind.remove(&number);
            self.fail(moved, &format!("its host was lost, and the context of the next, {host}, is too small for it"));
        }
        for (number, moved) in &self.sequences {
            session.send(front_message::Message::Adopt(wire::adopt(*number, &moved.sequence)));
        }
        for &sequence in &self.behind {
            session.send(front_message::Message::Reader(Reader { sequence, behind: true }));
        }
        self.model.send_replace(Some(Arc::new(session.model.clone())));
        (self.silent, self.lost_at) = (0, None);
        self.preemptions = session.status.load.preemptions;
        let status = session.status.clone();
        self.session = Some(session);
        self.status(status);
    }

    pub(super) fn heard(&mut self, message: Result<Option<HostMessage>, Status>) {
        self.silent = 0;
        let understood = match message {
            Ok(Some(HostMessage { message: Some(host_message::Message::Answer(answer)) })) => self.answer(answer),
            Ok(Some(HostMessage { message: Some(host_message::Message::Events(events)) })) => self.events(events),
            Ok(Some(HostMessage { message: Some(host_message::Message::Status(status)) })) => {
                wire::status_of(status).map(|status| self.status(status)).map_err(Fault::from)
            }
            Ok(Some(HostMessage { message: Some(host_message::Message::Hello(_)) | None })) => {
                Err(Malformed("an answer, events or a status").into())
            }
            Ok(None) => return self.lost("it ended its stream"),
            Err(status) => return self.lost(&format!("its stream broke: {}", with_causes(&status))),
        };
        if let Err(fault) = understood {
            self.lost(&fault.to_string());
        }
    }

    fn answer(&mut self, Answer { submission, refused }: Answer) -> Result<(), Fault> {
        let (first, submission) = self.submissions.remove(&submission).ok_or(Malformed("the number of a request"))?;
        if let Some(error) = refused {
            submission.refuse(wire::refusal_of(error)?);
            return Ok(());
        }
        let Submission { requests, standing, submitted, reply, work, .. } = submission;
        let mut work = work.into_iter();
        let streams = (first..).zip(requests).map(|(number, request)| {
            let (sender, stream) = sequence(number, request.max_tokens, self.own_commands.clone());
            let life = Life::new(request.prompt.len(), submitted);
            let work: Work = work.next().unwrap_or_default();
            let sequence = Handed::new(request, standing.clone());
            self.sequences.insert(number, Moved { sequence, sender, life, work });
            stream.counted_in(self.metrics.generation_tokens.clone())
        });
        // Nobody waits for the answer any more: the streams in it cancel their sequences as they are dropped.
        let _ = reply.send(Ok(streams.collect()));
        Ok(())
    }

    fn status(&mut self, status: HostStatus) {
        let Some(session) = &mut self.session else { return };
        let (HostStatus { state, load, page_positions, kv_bytes }, host) = (status.clone(), &session.host);
        let mut load = load;
        let newer = load.preemptions.saturating_sub(self.preemptions);
        self.preemptions = load.preemptions;
        load.preemptions = self.metrics.load().preemptions.saturating_add(newer);
        self.metrics.set_load(load);
        self.metrics.page_positions.set(page_positions);
        self.metrics.kv_bytes.set(kv_bytes);
        let state = match state {
            EngineState::Ready => EngineState::Ready,
            EngineState::Recovering(words) => EngineState::Recovering(format!("host {host}: {words}")),
            EngineState::Loading(words) => EngineState::Loading(format!("host {host}: {words}")),
            // Only this server's own end is shown as that.
            EngineState::Draining => EngineState::Loading(format!("host {host} is shutting down")),
            EngineState::Failed(why) => return self.lost(&format!("its workers are given up: {why}")),
        };
        session.status = status;
        self.show(state);
    }

    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.submit(submission),
            Command::Cancel { sequence, taken, because } => self.cancel(sequence, taken, because),
            Command::HandOver(to) => self.hand_over(&to),
            Command::Adopt(moved) => moved.into_iter().for_each(|moved| self.adopt(moved)),
            // Whoever asked may have gone.
            Command::Ping(reply) => drop(reply.send(())),
            Command::Restart(restart) => {
                drop(restart.reply.send(Err(RestartError::OfAHost { replica: restart.replica })));
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let state = self.state.borrow().clone();
        let is_up = matches!(state, EngineState::Ready | EngineState::Recovering(_));
        let Some(session) = self.session.as_ref().filter(|_| is_up) else {
            let words = match state {
                EngineState::Loading(words) => format!("without a host that computes ({words})"),
                _ => "shutting down".into(),
            };
            return submission.refuse(SubmitError::Unavailable(words));
        };
        if let Err(error) = self.common.admit(&submission.requests) {
            return submission.refuse(error);
        }
        let (number, first) = (self.next_submission, self.next_sequence);
        self.next_submission += 1;
        self.next_sequence += submission.requests.len() as u64;
        session.send(front_message::Message::Submit(Submit {
            submission: number,
            first_sequence: first,
            requests: submission.requests.iter().map(wire::request).collect(),
            standing: Some(wire::standing(&submission.standing)),
        }));
        self.submissions.insert(number, (first, submission));
    }

    fn cancel(&mut self, sequence: u64, taken: u64, because: Unwanted) {
        // It may have ended on the way.
        let Some(moved) = self.sequences.get_mut(&sequence) else { return };
        moved.life.generated = taken;
        self.end(sequence, because.into());
        self.send(front_message::Message::Cancel(wire::cancel(sequence, because)));
    }

    /// Without a host, hands all on. A host that has lost its workers goes on by itself.
    fn hand_over(&mut self, to: &mpsc::UnboundedSender<Returned>) {
        if self.session.is_none() && !self.sequences.is_empty() {
            self.behind.clear();
            let moved = std::mem::take(&mut self.sequences).into_values().collect();
            // Who takes it is gone only with the server: the readers learn of it as their senders are dropped.
            let _ = to.send(Returned::Moved(moved));
        }
    }

    fn adopt(&mut self, moved: Moved) {
        if let Err(error) = self.common.admit(std::slice::from_ref(&moved.sequence.request)) {
            return self.fail(moved, &error.to_string());
        }
        let number = self.next_sequence;
        self.next_sequence += 1;
        if !moved.sender.move_to(number, self.own_commands.clone()) {
            return moved.life.end(Ended::Abort, Instant::now(), &self.metrics);
        }
        // It waits for a host as long as one that was lost here.
        if self.session.is_none() && self.sequences.is_empty() {
            self.lost_at = Some(Instant::now());
        }
        self.send(front_message::Message::Adopt(wire::adopt(number, &moved.sequence)));
        self.sequences.insert(number, moved);
    }

    fn fail(&self, moved: Moved, reason: &str) {
        let Moved { sender, life, .. } = moved;
        sender.send(SequenceEvent::Failed(reason.into()));
        life.end(Ended::Error, Instant::now(), &self.metrics);
    }

    fn fail_all(&mut self, reason: &str) {
        self.behind.clear();
        for (_, moved) in std::mem::take(&mut self.sequences) {
            self.fail(moved, reason);
        }
    }

    fn close(mut self) {
        self.state.send_replace(EngineState::Draining);
        self.fail_all(SHUTTING_DOWN);
        for (_, (_, submission)) in std::mem::take(&mut self.submissions) {
            submission.refuse(SubmitError::Unavailable("shutting down".into()));
        }
        if let Some(session) = &self.session {
            session.end(SHUTTING_DOWN.into());
        }
    }

    pub(super) fn has_host(&self) -> bool {
        self.session.is_some()
    }

    fn send(&self, message: front_message::Message) {
        if let Some(session) = &self.session {
            session.send(message);
        }
    }

    fn show(&self, next: EngineState) {
        self.state.send_if_modified(|state| {
            let changed = *state != next;
            *state = next;
            changed
        });
    }
}
