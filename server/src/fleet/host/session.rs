//! One stream to the front end, from the hello to its end: messages in, sequences computed, what came of them out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use looplane_proto::fleet::v1::fleet_client::FleetClient;
use looplane_proto::fleet::v1::{
    Answer, Events, FrontMessage, Hello, HostMessage, Reader, Submit, Welcome, front_message, host_message,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use super::super::wire::{self, HostStatus, Malformed, Passed};
use super::super::{BEAT, HELLO_LIMIT, MOST_SILENT, VERSION, with_causes};
use super::JoinConfig;
use super::dial::dial;
use crate::engine::{
    Command, EngineHandle, EngineState, Handed, Life, Moved, SequenceEvent, SequenceRequest, SequenceStream, Standing,
    SubmitError, Unwanted, Work, sequence,
};
use crate::listener::StopSignal;

/// Messages on their way to the front end; the rest waits in the sequences, where it is bounded.
const OUTGOING: usize = 256;
/// The front end has so long to read the last of a host that leaves.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Events of one message.
const MOST_EVENTS: usize = 64;

/// Where the connection breaks at once: a handshake is over for a host before the front end has seen its certificate.
const UNKNOWN_CERTIFICATE: &str =
    " (if its log says that the TLS handshake failed: its --join-client-ca has to have signed this --join-cert)";

/// How a stream ended.
pub(super) enum End {
    /// This host is shut down.
    Stopped,
    /// The front end would refuse it again.
    Refused(String),
    /// The workers cannot be had any more.
    Engine(String),
    /// Another may follow.
    Lost { words: String, had_joined: bool },
}

/// Joins once.
pub(super) async fn session(engine: &EngineHandle, config: &JoinConfig, stop: &StopSignal) -> End {
    let (to_front, outgoing) = mpsc::channel(OUTGOING);
    let joined = tokio::select! {
        joined = say_hello(engine, config, (to_front.clone(), outgoing)) => joined,
        () = stop.drain.cancelled() => return End::Stopped,
        () = stop.now.cancelled() => return End::Stopped,
    };
    // The connection lives as long as the client.
    let (_client, messages, replica) = match joined {
        Ok(joined) => joined,
        Err(end) => return end,
    };
    tracing::info!("joined the front end at {} as its replica {replica}", config.address());
    let ways = Ways { engine: engine.clone(), to_front, wishes: Wishes::default() };
    let mut session = Session { ways, messages, tasks: JoinSet::new(), leave_at: None, silent: 0 };
    let end = match session.run(config.drain, stop).await {
        Ok(()) => End::Stopped,
        Err(Broken::Engine(why)) => End::Engine(why),
        Err(Broken::Stream(why)) => {
            let words = format!("the stream to the front end at {} is lost: {why}", config.address());
            return End::Lost { words, had_joined: true };
        }
    };
    tokio::select! {
        () = session.leave() => {}
        () = stop.now.cancelled() => {}
    }
    end
}

type Outgoing = (mpsc::Sender<HostMessage>, mpsc::Receiver<HostMessage>);

async fn say_hello(
    engine: &EngineHandle,
    config: &JoinConfig,
    (to_front, outgoing): Outgoing,
) -> Result<(FleetClient<Channel>, Streaming<FrontMessage>, u32), End> {
    let lost = |words: String| End::Lost { words, had_joined: false };
    let mut client = dial(config).await.map_err(lost)?;
    let hello = Hello {
        version: VERSION,
        model: engine.model().map(|model| wire::model(&model)),
        vocabulary_digest: config.vocabulary_digest.clone(),
        status: Some(wire::status(status(engine, false))),
    };
    let hello = HostMessage { message: Some(host_message::Message::Hello(hello)) };
    to_front.try_send(hello).expect("the channel is empty");
    let refused = |status: Status| {
        let words = in_words(&status);
        match status.code() {
            // What this host is, and what it has to show, is the same the next time.
            Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument | Code::Unimplemented => {
                End::Refused(words)
            }
            _ => {
                let broke = std::error::Error::source(&status).is_some();
                let hint = if broke { UNKNOWN_CERTIFICATE } else { "" };
                lost(format!("the front end at {} does not let this host join: {words}{hint}", config.address()))
            }
        }
    };
    let mut call = Request::new(ReceiverStream::new(outgoing));
    config.secrets.current().token.show(call.metadata_mut());
    let welcomed = timeout(HELLO_LIMIT, async {
        let mut messages = client.join(call).await?.into_inner();
        match messages.message().await? {
            Some(FrontMessage { message: Some(front_message::Message::Welcome(Welcome { replica })) }) => {
                Ok((messages, replica))
            }
            _ => Err(Status::invalid_argument("it sends no welcome")),
        }
    });
    match welcomed.await {
        Ok(Ok((messages, replica))) => Ok((client, messages, replica)),
        Ok(Err(status)) => Err(refused(status)),
        Err(_) => Err(lost(format!("the front end at {} did not answer within {HELLO_LIMIT:?}", config.address()))),
    }
}

/// What a status says, and what broke the connection, if that is what it is about.
fn in_words(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(source) => format!("{}: {}", status.message(), with_causes(source)),
        None => status.message().into(),
    }
}

fn status(engine: &EngineHandle, is_leaving: bool) -> HostStatus {
    let metrics = || engine.replicas().iter().map(|replica| &replica.metrics);
    HostStatus {
        state: if is_leaving { EngineState::Draining } else { engine.state() },
        load: engine.load(),
        page_positions: metrics().map(|metrics| metrics.page_positions.get()).max().unwrap_or(0),
        kv_bytes: metrics().map(|metrics| metrics.kv_bytes.get()).sum(),
    }
}

/// Why a stream that was joined ended.
enum Broken {
    Engine(String),
    Stream(String),
}

impl From<Malformed> for Broken {
    fn from(error: Malformed) -> Self {
        Self::Stream(error.to_string())
    }
}

/// What the front end wants of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// What comes of it.
    Send,
    /// Nothing for now: its reader is behind. The scheduler sees it, as what is not taken here stays unread.
    Hold,
    /// Nothing more.
    LetGo(Unwanted),
}

/// By the front end's numbers, of the sequences that have not ended.
#[derive(Debug, Clone, Default)]
struct Wishes(Arc<Mutex<HashMap<u64, watch::Sender<Wish>>>>);

impl Wishes {
    fn add(&self, sequence: u64) -> watch::Receiver<Wish> {
        let (sender, receiver) = watch::channel(Wish::Send);
        self.locked(|all| all.insert(sequence, sender));
        receiver
    }

    /// Sequences that have ended are nobody's wish any more.
    fn tell(&self, sequence: u64, wish: Wish) {
        self.locked(|all| all.get(&sequence).map(|sender| sender.send_replace(wish)));
    }

    fn forget(&self, sequence: u64) {
        self.locked(|all| all.remove(&sequence));
    }

    fn locked<T>(&self, of: impl FnOnce(&mut HashMap<u64, watch::Sender<Wish>>) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the tasks of sequences have in common.
#[derive(Debug, Clone)]
struct Ways {
    engine: EngineHandle,
    to_front: mpsc::Sender<HostMessage>,
    wishes: Wishes,
}

/// A stream that was joined. What it computes is cancelled as it is dropped.
struct Session {
    ways: Ways,
    messages: Streaming<FrontMessage>,
    /// One for each request and each sequence that was begun elsewhere.
    tasks: JoinSet<()>,
    /// When this host goes, once it is told to.
    leave_at: Option<Instant>,
    /// Beats since the front end was heard last.
    silent: u32,
}

impl Session {
    /// Returns once this host is shut down and all sequences have ended, or the time for that is up.
    async fn run(&mut self, drain: Duration, stop: &StopSignal) -> Result<(), Broken> {
        let mut state = self.ways.engine.watch_state();
        let mut beat = interval(BEAT);
        // A host that stood still counts one beat, and hears first what came meanwhile.
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.leave_at.is_some() && self.tasks.is_empty() {
                return Ok(());
            }
            tokio::select! {
                message = self.messages.message() => match message {
                    Ok(Some(message)) => self.message(message)?,
                    Ok(None) => return Err(Broken::Stream("the front end ended it".into())),
                    Err(status) => return Err(Broken::Stream(in_words(&status))),
                },
                _ = beat.tick() => self.beat()?,
                changed = state.changed() => {
                    if let EngineState::Failed(why) = self.ways.engine.state() {
                        return Err(Broken::Engine(why));
                    }
                    changed.map_err(|_| Broken::Engine("it ended without saying why".into()))?;
                    self.say_how();
                }
                Some(ended) = self.tasks.join_next() => {
                    ended.map_err(|error| Broken::Stream(format!("the task of a sequence failed: {error}")))?;
                }
                () = stop.drain.cancelled(), if self.leave_at.is_none() => {
                    self.leave_at = Some(Instant::now() + drain);
                    self.say_how();
                }
                () = stop.now.cancelled() => return Ok(()),
                () = until(self.leave_at) => return Ok(()),
            }
        }
    }

    /// Ends the stream behind its last message, and returns once the front end has read that, or the time for it is up:
    /// a token that is lost on the way would be computed again.
    async fn leave(mut self) {
        // What still runs goes on elsewhere.
        self.tasks.shutdown().await;
        let Self { ways: Ways { engine, to_front, .. }, mut messages, .. } = self;
        let read = async {
            let is_leaving = !engine.state().is_failed();
            send(&to_front, host_message::Message::Status(wire::status(status(&engine, is_leaving)))).await;
            drop(to_front);
            while let Ok(Some(_)) = messages.message().await {}
        };
        if timeout(READ_WITHIN, read).await.is_err() {
            tracing::warn!("the front end did not read this host's last messages within {READ_WITHIN:?}");
        }
    }

    fn message(&mut self, FrontMessage { message }: FrontMessage) -> Result<(), Malformed> {
        self.silent = 0;
        match message.ok_or(Malformed("a message of the front end"))? {
            front_message::Message::Submit(submit) => self.submit(submit),
            front_message::Message::Adopt(adopt) => {
                let (number, handed) = wire::adopted(adopt)?;
                self.adopt(number, handed);
                Ok(())
            }
            front_message::Message::Cancel(cancel) => {
                let (sequence, because) = wire::cancelled(cancel)?;
                self.ways.wishes.tell(sequence, Wish::LetGo(because));
                Ok(())
            }
            front_message::Message::Reader(Reader { sequence, behind }) => {
                self.ways.wishes.tell(sequence, if behind { Wish::Hold } else { Wish::Send });
                Ok(())
            }
            front_message::Message::Beat(_) => Ok(()),
            front_message::Message::Welcome(_) => Err(Malformed("anything but a second welcome")),
        }
    }

    fn submit(&mut self, submit: Submit) -> Result<(), Malformed> {
        let Submit { submission, first_sequence, requests, standing } = submit;
        let requests: Vec<SequenceRequest> = requests.into_iter().map(wire::request_of).collect::<Result<_, _>>()?;
        let standing: Standing = wire::standing_of(standing)?;
        let ways = self.ways.clone();
        let is_leaving = self.leave_at.is_some();
        self.tasks.spawn(async move {
            let submitted = match is_leaving {
                true => Err(SubmitError::Unavailable("shutting down".into())),
                false => ways.engine.submit(requests, standing).await,
            };
            let (streams, refused) = match submitted {
                Ok(streams) => (streams, None),
                Err(error) => (Vec::new(), Some(wire::refusal(error))),
            };
            // The front end may ask for what it knows of: they are known here before.
            let wanted: Vec<_> = (first_sequence..)
                .zip(streams)
                .map(|(number, stream)| (number, stream, ways.wishes.add(number)))
                .collect();
            send(&ways.to_front, host_message::Message::Answer(Answer { submission, refused })).await;
            join_all(wanted.into_iter().map(|(number, stream, wish)| ways.clone().pass_on(number, stream, wish))).await;
        });
        Ok(())
    }

    fn adopt(&mut self, number: u64, handed: Handed) {
        let commands = self.ways.engine.commands().clone();
        // Where it is computed is said by who adopts it.
        let (sender, stream) = sequence(0, handed.request.max_tokens, commands.clone());
        let life = Life::new(handed.request.prompt.len(), Instant::now());
        let moved = Moved { sequence: handed, sender, life, work: Work::default() };
        // An engine that is gone drops it: the stream ends.
        let _ = commands.send(Command::Adopt(vec![moved]));
        let wish = self.ways.wishes.add(number);
        self.tasks.spawn(self.ways.clone().pass_on(number, stream, wish));
    }

    fn beat(&mut self) -> Result<(), Broken> {
        self.silent += 1;
        if self.silent > MOST_SILENT {
            return Err(Broken::Stream(format!("the front end said nothing for {:?}", BEAT * MOST_SILENT)));
        }
        self.say_how();
        Ok(())
    }

    /// Where messages are waiting already, these are a sign of life, and the next beat says the rest.
    fn say_how(&self) {
        let status = wire::status(status(&self.ways.engine, self.leave_at.is_some()));
        let _ = self.ways.to_front.try_send(HostMessage { message: Some(host_message::Message::Status(status)) });
    }
}

async fn send(to_front: &mpsc::Sender<HostMessage>, message: host_message::Message) {
    // A stream that has ended is noticed where it is read.
    let _ = to_front.send(HostMessage { message: Some(message) }).await;
}

impl Ways {
    /// Sends what comes of a sequence to its end, as the front end wishes.
    async fn pass_on(self, number: u64, mut stream: SequenceStream, mut wish: watch::Receiver<Wish>) {
        let mut has_ended = false;
        while !has_ended {
            let now = *wish.borrow_and_update();
            match now {
                Wish::LetGo(because) => {
                    stream.let_go(because);
                    break;
                }
                // Whoever wishes goes with the session, as this does.
                Wish::Hold => {
                    if wish.changed().await.is_err() {
                        break;
                    }
                }
                Wish::Send => {
                    let first = tokio::select! {
                        first = stream.next_event() => first,
                        changed = wish.changed() => match changed {
                            Ok(()) => continue,
                            Err(_) => break,
                        },
                    };
                    let told = more(first, &mut stream).await;
                    let Some((events, is_last)) = told.filter(|(events, _)| !self.is_for_want_of_workers(events))
                    else {
                        // The stream is about to end: at the front end it goes on elsewhere.
                        return std::future::pending().await;
                    };
                    let events = Events { sequence: number, events: events.into_iter().map(wire::event).collect() };
                    send(&self.to_front, host_message::Message::Events(events)).await;
                    has_ended = is_last;
                }
            }
        }
        self.wishes.forget(number);
    }

    /// The end is that no workers are left here.
    fn is_for_want_of_workers(&self, events: &[Passed]) -> bool {
        let is_failed = matches!(events.last(), Some(Passed::Failed(_)));
        is_failed && self.engine.replicas().iter().all(|replica| replica.state.borrow().is_failed())
    }
}

/// An event and those that are there by now, up to a token or the end; whether that is the end. None if the engine is
/// gone.
async fn more(first: Option<SequenceEvent>, stream: &mut SequenceStream) -> Option<(Vec<Passed>, bool)> {
    let (mut events, mut next) = (Vec::new(), first);
    loop {
        let event = next?;
        let is_token = matches!(event, SequenceEvent::Token(_));
        let is_last = matches!(event, SequenceEvent::Finished(_) | SequenceEvent::Failed(_));
        events.push(event.into());
        if is_last {
            return Some((events, true));
        }
        next = if !is_token {
            // A prompt or drafts are told with the token that follows them at once.
            stream.next_event().await
        } else if events.len() >= MOST_EVENTS {
            return Some((events, false));
        } else {
            match stream.next_event().now_or_never() {
                Some(next) => next,
                None => return Some((events, false)),
            }
        };
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
