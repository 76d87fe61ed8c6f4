//! Several replicas of a model behind one handle: each request goes to the group that is done with it first, as far as
//! that is known, and what a lost group leaves goes on in another.
//!
//! One task, which sees requests and losses, and no token: streams lead from a group straight to their readers. A
//! sequence's cost is counted in rows of steps, its prompt's that are yet to be computed and some of its answer's
//! ([`choice`]), so that what a replica has to do, and what another would have to compute again ([`prefixes`]), are
//! figures of one kind. What a full replica refuses is tried at the others. All have the same bits, so that nobody can
//! tell from an answer where it was computed.

mod choice;
mod prefixes;
mod status;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use futures::future::join_all;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::engine::{
    Command, EngineHandle, EngineState, ModelInfo, Moved, Restart, RestartError, Returned, SequenceRequest,
    SequenceStream, Submission, SubmitError, Work, ping,
};
use crate::group::{self, Common, GroupConfig, GroupError, GroupTask, Launcher};
use choice::{Offer, Readiness, rows_to_come};
use prefixes::{Prefixes, beginnings};

/// Most replicas: they are named by the bits of a word.
pub const MAX_REPLICAS: u32 = 64;

/// The tasks of all groups, and of the router if there are several. Dropping it kills the workers.
#[derive(Debug)]
pub struct Replicas {
    groups: Vec<GroupTask>,
    router: Option<JoinHandle<()>>,
}

impl Replicas {
    /// Takes no new sequences, lets those at hand end within the limit, ends the workers, and returns when the last is
    /// gone; once `now` is there, the workers are killed.
    pub async fn shutdown_unless(mut self, now: impl Future<Output = ()>) {
        let now = now.shared();
        join_all(std::mem::take(&mut self.groups).into_iter().map(|group| group.shutdown_unless(now.clone()))).await;
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        if let Some(router) = &self.router {
            router.abort();
        }
    }
}

/// Starts all replicas of the configuration in the background, on the current tokio runtime; `launcher` starts the
/// workers of each. Behind them come `places`, replicas on other hosts. A replica that is alone is behind its own
/// handle: nothing stands in front of it.
///
/// # Errors
/// Names what is wrong in the configuration. A model that cannot be loaded shows as [`EngineState::Failed`].
pub fn spawn(
    config: GroupConfig,
    common: &Arc<Common>,
    places: Vec<EngineHandle>,
    launcher: impl Fn(u32) -> Arc<dyn Launcher>,
) -> Result<(EngineHandle, Replicas), GroupError> {
    let count = config.replicas + places.len() as u32;
    if !(1..=MAX_REPLICAS).contains(&count) {
        return Err(GroupError::Replicas(count));
    }
    let spawned = group::spawn_replicas(config, common, launcher)?;
    let (mut handles, groups): (Vec<_>, Vec<_>) = spawned.into_iter().unzip();
    handles.extend(places);
    if handles.len() == 1 {
        return Ok((handles.remove(0), Replicas { groups, router: None }));
    }
    let (handle, router) = join(&handles);
    Ok((handle, Replicas { groups, router: Some(tokio::spawn(router.run())) }))
}

/// A router in front of `handles`, and the handle to it.
fn join(handles: &[EngineHandle]) -> (EngineHandle, Router) {
    let (command_sender, commands) = mpsc::unbounded_channel();
    let (returned_sender, returned) = mpsc::unbounded_channel();
    let (changed_sender, changed) = mpsc::channel(1);
    let replicas: Vec<Member> = handles.iter().map(|handle| Member::new(handle, &changed_sender)).collect();
    let (state_sender, state) = watch::channel(status::of_all(replicas.iter().map(Member::state)));
    let (model_sender, model) = watch::channel(None);
    let views: Vec<_> = handles.iter().flat_map(EngineHandle::replicas).cloned().collect();
    let router = Router {
        replicas,
        prefixes: Prefixes::default(),
        turn: 0,
        restarting: None,
        commands,
        returned,
        returned_sender,
        changed,
        state: state_sender,
        model: model_sender,
    };
    (EngineHandle::in_front_of(views, command_sender, state, model), router)
}

/// A group, as the router sees it.
#[derive(Debug)]
struct Member {
    commands: mpsc::UnboundedSender<Command>,
    state: watch::Receiver<EngineState>,
    model: watch::Receiver<Option<Arc<ModelInfo>>>,
    /// Rows that it has yet to compute, of sequences that have not ended.
    work: Arc<AtomicU64>,
    was_ready: bool,
}

impl Member {
    /// Whoever watches is told by `changed` when there is something to see.
    fn new(handle: &EngineHandle, changed: &mpsc::Sender<()>) -> Self {
        let (mut state, mut model, changed) = (handle.watch_state(), handle.watch_model(), changed.clone());
        tokio::spawn(async move {
            loop {
                let alive = tokio::select! {
                    alive = state.changed() => alive,
                    alive = model.changed() => alive,
                };
                // A message that is there already stands for this one, too.
                if alive.is_err() || matches!(changed.try_send(()), Err(mpsc::error::TrySendError::Closed(()))) {
                    return;
                }
            }
        });
        let (commands, work) = (handle.commands().clone(), Arc::default());
        Self { commands, state: handle.watch_state(), model: handle.watch_model(), work, was_ready: false }
    }

    fn state(&self) -> EngineState {
        self.state.borrow().clone()
    }

    fn work(&self) -> u64 {
        // Relaxed: a figure to compare by.
        self.work.load(Ordering::Relaxed)
    }
}

/// The task in front of the replicas.
#[derive(Debug)]
struct Router {
    replicas: Vec<Member>,
    prefixes: Prefixes,
    /// Whose turn it is among equals.
    turn: usize,
    /// The replica that gets new workers, and what is cancelled when it has them.
    restarting: Option<(usize, CancellationToken)>,
    commands: mpsc::UnboundedReceiver<Command>,
    returned: mpsc::UnboundedReceiver<Returned>,
    returned_sender: mpsc::UnboundedSender<Returned>,
    changed: mpsc::Receiver<()>,
    state: watch::Sender<EngineState>,
    model: watch::Sender<Option<Arc<ModelInfo>>>,
}

impl Router {
    /// Runs until nobody holds the handle any more.
    async fn run(mut self) {
        self.look();
        loop {
            tokio::select! {
                // What happened to the replicas goes before what is to be sent to them.
                biased;
                Some(()) = self.changed.recv() => self.look(),
                Some(returned) = self.returned.recv() => self.returned(returned),
                command = self.commands.recv() => match command {
                    Some(Command::Submit(submission)) => self.submit(submission),
                    Some(Command::Ping(reply)) => self.ping(reply),
                    Some(Command::Restart(restart)) => self.restart(restart),
                    // Those of another front end, where this is a host that joined it.
                    Some(Command::Adopt(moved)) => self.moved(moved),
                    // Of one on its way from another front end: who adopts it sees that its reader is gone.
                    Some(Command::Cancel { .. }) => {}
                    Some(Command::HandOver(_)) => debug_assert!(false, "nobody takes over from here"),
                    None => return,
                },
            }
        }
    }

    /// Looks how the replicas are: the world is told, and what one cannot go on with goes to those that can.
    fn look(&mut self) {
        let states: Vec<EngineState> = self.replicas.iter().map(Member::state).collect();
        let is_any_ready = states.contains(&EngineState::Ready);
        let is_any_left = !states.iter().all(EngineState::is_failed);
        for (index, (replica, state)) in self.replicas.iter_mut().zip(&states).enumerate() {
            let is_ready = *state == EngineState::Ready;
            if replica.was_ready && !is_ready {
                self.prefixes.forget(index);
            }
            replica.was_ready = is_ready;
            // Only one whose group is lost, or about to end, does: the others go on by themselves.
            let can_go_on = is_any_ready || (is_any_left && state.is_failed());
            if can_go_on && !is_ready && *state != EngineState::Draining && replica.work() > 0 {
                // One that is gone has nothing left.
                let _ = replica.commands.send(Command::HandOver(self.returned_sender.clone()));
            }
        }
        // Before the state: who sees that it is ready asks for the model.
        let model = status::model_of_all(self.replicas.iter().filter_map(|replica| replica.model.borrow().clone()));
        self.model.send_if_modified(|known| {
            let changed = *known != model;
            *known = model;
            changed
        });
        self.state.send_if_modified(|state| status::show(state, status::of_all(states.into_iter())));
    }

    /// Has a replica replace its workers, unless another does, or nobody is left to serve meanwhile.
    fn restart(&mut self, restart: Restart) {
        let replica = restart.replica;
        let is_other_ready = (0..self.replicas.len()).any(|other| other != replica && self.is_ready(other));
        let refused = match self.restarting() {
            Some(replica) => RestartError::UnderWay { replica },
            None if !is_other_ready && !restart.even_if_last => RestartError::LastReady { replica },
            None => {
                self.restarting = Some((replica, restart.under_way.over()));
                // Who is the last is known here. One that is gone drops the reply: who asked learns of it.
                let restart = Restart { even_if_last: true, ..restart };
                return drop(self.replicas[replica].commands.send(Command::Restart(restart)));
            }
        };
        // Whoever asked may have gone.
        let _ = restart.reply.send(Err(refused));
    }

    /// The replica that is being restarted. What it was sent before its state told of it, it hands over.
    fn restarting(&self) -> Option<usize> {
        self.restarting.as_ref().filter(|(_, over)| !over.is_cancelled()).map(|(replica, _)| *replica)
    }

    fn is_ready(&self, replica: usize) -> bool {
        *self.replicas[replica].state.borrow() == EngineState::Ready
    }

    /// Answers once every replica has; never, if one has ended.
    fn ping(&self, reply: oneshot::Sender<()>) {
        let replicas: Vec<_> = self.replicas.iter().map(|replica| replica.commands.clone()).collect();
        tokio::spawn(async move {
            if join_all(replicas.iter().map(ping)).await.iter().all(Result::is_ok) {
                // Whoever asked may have gone.
                let _ = reply.send(());
            }
        });
    }

    fn returned(&mut self, returned: Returned) {
        match returned {
            Returned::Refused { submission, error } => self.refused(submission, error),
            Returned::Moved(moved) => self.moved(moved),
        }
    }

    /// Sends each sequence of a request where it is done first. Several are queued all or none.
    fn submit(&mut self, submission: Submission) {
        let Submission { requests, standing, submitted, reply, tried, .. } = submission;
        let mut parts: Vec<Part> = Vec::new();
        for (place, request) in requests.into_iter().enumerate() {
            let Some((replica, work)) = self.choose(&request, 0, tried) else {
                let reason = "unable to serve the model: no replica is left".into();
                // Nobody waits for it any more.
                return drop(reply.send(Err(SubmitError::Unavailable(reason))));
            };
            let index = parts.iter().position(|part| part.replica == replica).unwrap_or_else(|| {
                parts.push(Part { replica, places: Vec::new(), requests: Vec::new(), work: Vec::new() });
                parts.len() - 1
            });
            let part = &mut parts[index];
            part.places.push(place);
            part.requests.push(request);
            part.work.push(work);
        }
        if parts.len() == 1 {
            let Part { replica, requests, work, .. } = parts.remove(0);
            let whole = Submission::new(requests, standing, submitted, reply);
            return self.send(replica, Submission { tried, work, ..whole });
        }
        let mut answers = Vec::new();
        for Part { replica, places, requests, work } in parts {
            let (part_reply, answer) = oneshot::channel();
            let part = Submission::new(requests, standing.clone(), submitted, part_reply);
            self.send(replica, Submission { tried, work, ..part });
            answers.push((places, answer));
        }
        tokio::spawn(async move {
            // Nobody waits for the answer any more: the streams in it cancel their sequences as they are dropped.
            let _ = reply.send(all_or_none(answers).await);
        });
    }

    /// Chooses the replica for a request of which so many tokens are known, if any is left that was not tried and whose
    /// context holds it, and counts it there.
    fn choose(&mut self, request: &SequenceRequest, generated: usize, tried: u64) -> Option<(usize, Work)> {
        let beginnings = beginnings(&request.prompt, &request.cache_salt);
        let cached = self.prefixes.cached(&beginnings, self.replicas.len());
        let offers = self.replicas.iter().zip(cached).enumerate().filter(|(index, _)| tried >> index & 1 == 0);
        let offers = offers.filter_map(|(index, (replica, cached_tokens))| {
            let readiness = match &*replica.state.borrow() {
                EngineState::Ready => Readiness::Ready,
                EngineState::Recovering(_) => Readiness::Recovering,
                EngineState::Loading(_) | EngineState::Draining => Readiness::Loading,
                EngineState::Failed(_) => return None,
            };
            let is_held = |model: &Arc<ModelInfo>| model.holds(request);
            replica.model.borrow().as_ref().is_none_or(is_held).then_some(())?;
            Some(Offer { replica: index, readiness, work: replica.work(), cached_tokens })
        });
        let chosen = choice::best(offers, self.turn, self.replicas.len())?;
        self.turn = (chosen + 1) % self.replicas.len();
        self.prefixes.sent(&beginnings, chosen);
        Some((chosen, Work::add(&self.replicas[chosen].work, rows_to_come(request, generated))))
    }

    fn send(&mut self, replica: usize, submission: Submission) {
        let tried = submission.tried | 1 << replica;
        let submission = Submission { tried, elsewhere: Some(self.returned_sender.clone()), ..submission };
        let sent = self.replicas[replica].commands.send(Command::Submit(submission));
        if let Err(mpsc::error::SendError(Command::Submit(submission))) = sent {
            self.refused(submission, SubmitError::Unavailable("shutting down".into()));
        }
    }

    /// Tries elsewhere what a replica had no room for.
    fn refused(&mut self, submission: Submission, error: SubmitError) {
        let is_final = match error {
            SubmitError::QueueFull { .. } | SubmitError::TooLarge { .. } | SubmitError::Unavailable(_) => false,
            SubmitError::NeverFits { .. } | SubmitError::Quarantined { .. } => true,
        };
        let is_left = |replica: usize| submission.tried >> replica & 1 == 0 && self.is_ready(replica);
        if is_final || !(0..self.replicas.len()).any(is_left) {
            // Nobody waits for it any more.
            return drop(submission.reply.send(Err(error)));
        }
        self.submit(submission);
    }

    /// Sends sequences that a replica cannot go on with to others.
    fn moved(&mut self, moved: Vec<Moved>) {
        let mut by_replica: Vec<Vec<Moved>> = self.replicas.iter().map(|_| Vec::new()).collect();
        let count = moved.len();
        for mut moved in moved {
            match self.choose(&moved.sequence.request, moved.sequence.generated.len(), 0) {
                Some((replica, work)) => {
                    moved.work = work;
                    by_replica[replica].push(moved);
                }
                None => moved.fail("the workers were lost, and no replica is left that could go on with it"),
            }
        }
        for (replica, moved) in by_replica.into_iter().enumerate().filter(|(_, moved)| !moved.is_empty()) {
            tracing::info!("{} of {count} sequences that were begun elsewhere go on in replica {replica}", moved.len());
            // One that is gone drops the senders: the readers learn of it.
            let _ = self.replicas[replica].commands.send(Command::Adopt(moved));
        }
    }
}

/// What one replica is sent of a request.
struct Part {
    replica: usize,
    /// Of its sequences in the request.
    places: Vec<usize>,
    requests: Vec<SequenceRequest>,
    work: Vec<Work>,
}

/// Places in a request, and the answer of who was sent what belongs there.
type PartAnswer = (Vec<usize>, oneshot::Receiver<Result<Vec<SequenceStream>, SubmitError>>);

/// The streams of a request whose parts were sent to several replicas, in its order; the first error ends them all.
async fn all_or_none(parts: Vec<PartAnswer>) -> Result<Vec<SequenceStream>, SubmitError> {
    let (places, answers): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let mut streams = Vec::new();
    for (places, answer) in places.into_iter().zip(join_all(answers).await) {
        let gone = |_| SubmitError::Unavailable("without a replica: it ended before it answered".into());
        streams.extend(places.into_iter().zip(answer.map_err(gone)??));
    }
    streams.sort_by_key(|(place, _)| *place);
    Ok(streams.into_iter().map(|(_, stream)| stream).collect())
}
