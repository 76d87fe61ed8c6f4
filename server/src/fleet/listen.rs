//! The front end's door: connections of hosts, what they have to show, and which place they get.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use looplane_proto::fleet::v1::fleet_server::{Fleet as FleetService, FleetServer};
use looplane_proto::fleet::v1::{FrontMessage, Hello, HostMessage, host_message};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status, Streaming};
use tower::ServiceExt;

use super::first::ShortFirst;
use super::place::Place;
use super::session::Session;
use super::wire::{self, HostStatus, Malformed};
use super::{FrontSecrets, HELLO_LIMIT, Io, MOST_MESSAGE_BYTES, VERSION, WINDOW_BYTES, with_causes};
use crate::engine::{EngineHandle, ModelInfo};
use crate::group::Common;

/// Connections beyond the places that may be shaking hands, or be refused, at one time.
const MOST_AT_THE_DOOR: usize = 64;
/// Characters of a host's value that are told.
const MOST_SHOWN: usize = 200;
/// Pause after a failed accept, such as one for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A connection that must close has so long to send what is written.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// An HTTP/2 connection is asked after so long without a frame whether its other end still lives, which has as long
/// again to answer.
const PING: Duration = Duration::from_secs(5);

/// Where hosts may join, and how many.
#[derive(Debug, Clone)]
pub struct ListenConfig {
    /// To listen on.
    pub address: SocketAddr,
    /// Most hosts at one time; each is a replica.
    pub places: u32,
    /// What they have to show, and are shown.
    pub secrets: FrontSecrets,
}

/// The tasks of the door and of all places. Dropping it ends them.
#[derive(Debug)]
pub struct Fleet {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Fleet {
    /// Opens the door on `listener`; the handles of all places, which are the replicas from `first` on.
    /// `vocabulary_digest` is that of [`super::vocabulary_digest`].
    pub fn open(
        listener: TcpListener,
        config: ListenConfig,
        first: u32,
        common: &Arc<Common>,
        vocabulary_digest: String,
    ) -> (Vec<EngineHandle>, Self) {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let (mut handles, mut doors) = (Vec::new(), Vec::new());
        for number in first..first + config.places {
            let (place, handle, to_place) = Place::new(number, common.clone());
            tasks.spawn(place.run(stop.clone()));
            handles.push(handle);
            doors.push(Door::new(to_place));
        }
        let house = House { common: common.clone(), vocabulary_digest, doors };
        let front = Front { secrets: config.secrets.clone(), house };
        tasks.spawn(accept(listener, Arc::new(front), stop.clone()));
        tasks.spawn(config.secrets.follow());
        (handles, Self { stop, tasks })
    }

    /// Tells all hosts, fails what they are computing, and returns when that is done.
    pub async fn close(mut self) {
        self.stop.cancel();
        // The door and the places; whoever follows files never ends.
        let ends = self.tasks.len() - 1;
        for _ in 0..ends {
            self.tasks.join_next().await;
        }
    }
}

/// What there is to know at the door.
struct Front {
    secrets: FrontSecrets,
    house: House,
}

/// The places, and what a host has to be for one of them.
pub(super) struct House {
    pub(super) common: Arc<Common>,
    pub(super) vocabulary_digest: String,
    pub(super) doors: Vec<Door>,
}

/// The way to a place. Its permit is held by the host that has it.
pub(super) struct Door {
    free: Arc<Semaphore>,
    to_place: mpsc::Sender<Session>,
}

impl Door {
    pub(super) fn new(to_place: mpsc::Sender<Session>) -> Self {
        Self { free: Arc::new(Semaphore::new(1)), to_place }
    }
}

/// Why a host is not let in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the token is wrong: --join-token-file has to have the same content on both ends")]
    Token,
    #[error("the {field} differs: the front end has {ours}, the host {theirs}; {remedy}")]
    Differs { field: &'static str, ours: String, theirs: String, remedy: &'static str },
    #[error("no place is left: all {0} are taken (--join-places)")]
    NoPlace(usize),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("its hello cannot be read: {0}")]
    Unreadable(String),
    #[error("the host did not say hello within {HELLO_LIMIT:?}")]
    Silent,
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let code = match refusal {
            Refusal::Token => Code::Unauthenticated,
            Refusal::Differs { .. } => Code::FailedPrecondition,
            Refusal::NoPlace(_) => Code::ResourceExhausted,
            Refusal::Malformed(_) | Refusal::Unreadable(_) => Code::InvalidArgument,
            Refusal::Silent => Code::DeadlineExceeded,
        };
        Status::new(code, refusal.to_string())
    }
}

impl House {
    /// Checks what a host says, and gives it a place.
    pub(super) fn admit(&self, hello: Hello) -> Result<(&Door, OwnedSemaphorePermit, ModelInfo, HostStatus), Refusal> {
        let Hello { version, model, vocabulary_digest, status } = hello;
        same("protocol version", &VERSION, &version, "run the same Looplane on both")?;
        let model = wire::model_of(model.ok_or(Malformed("the model of a host"))?);
        let status = wire::status_of(status.ok_or(Malformed("the state of a host"))?)?;
        if let Some(known) = self.common.model() {
            check(known, &model)?;
        }
        let texts = "texts of the tokens (by their digest)";
        same(texts, &self.vocabulary_digest, &vocabulary_digest, "give both the same tokenizer.json")?;
        let free = |door: &Door| door.free.clone().try_acquire_owned().ok();
        let found = self.doors.iter().find_map(|door| Some((door, free(door)?)));
        let (door, place) = found.ok_or(Refusal::NoPlace(self.doors.len()))?;
        // Another may have been the first meanwhile.
        check(self.common.model_or(&model), &model)?;
        Ok((door, place, model, status))
    }
}

/// Refuses a host that would compute something else, or with other bits. By the contract of same bits the number of
/// its sockets is no part of that, and its context is told with its model.
fn check(known: &ModelInfo, now: &ModelInfo) -> Result<(), Refusal> {
    let ModelInfo { model_digest, architecture, vocab_size, max_context: _, tensor_parallel: _, bit_domain } = known;
    let files = "give both the same files of the model";
    same("model digest", model_digest, &now.model_digest, files)?;
    same("architecture", architecture, &now.architecture, files)?;
    same("vocabulary size", vocab_size, &now.vocab_size, files)?;
    let machines = "answers would differ in their bits: use devices of one kind, and the same --quantization";
    same("bit domain", bit_domain, &now.bit_domain, machines)
}

fn same<T: PartialEq + ToString>(
    field: &'static str,
    ours: &T,
    theirs: &T,
    remedy: &'static str,
) -> Result<(), Refusal> {
    match ours == theirs {
        true => Ok(()),
        false => {
            // A refusal travels in a header, which has to be short.
            let theirs = theirs.to_string().chars().take(MOST_SHOWN).collect();
            Err(Refusal::Differs { field, ours: ours.to_string(), theirs, remedy })
        }
    }
}

async fn accept(listener: TcpListener, front: Arc<Front>, stop: CancellationToken) {
    let room = Arc::new(Semaphore::new(MOST_AT_THE_DOOR + front.house.doors.len()));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = async {
                // Its permit is taken before it is accepted: more wait in the system's queue.
                let permit = room.clone().acquire_owned().await.expect("the semaphore is never closed");
                (listener.accept().await, permit)
            } => accepted,
            Some(_) = connections.join_next() => continue,
            () = stop.cancelled() => break,
        };
        match accepted {
            (Ok((stream, peer)), permit) => {
                let serving = connection(stream, peer, front.clone());
                connections.spawn(async move {
                    serving.await;
                    drop(permit);
                });
            }
            (Err(error), _) => {
                tracing::warn!("no connection of a host can be accepted: {error}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // Places tell their hosts; connections have a moment to carry that.
    let closed = async { while connections.join_next().await.is_some() {} };
    let _ = timeout(CLOSE_LIMIT, closed).await;
}

async fn connection(stream: TcpStream, peer: SocketAddr, front: Arc<Front>) {
    let _ = stream.set_nodelay(true);
    let tls = front.secrets.current().tls.clone();
    let shaken = timeout(HELLO_LIMIT, async {
        Ok::<Box<dyn Io>, std::io::Error>(match tls {
            Some(config) => Box::new(TlsAcceptor::from(config).accept(stream).await?),
            None => Box::new(stream),
        })
    });
    let io = match shaken.await {
        Ok(Ok(io)) => io,
        Ok(Err(error)) => return tracing::warn!("a host at {peer} is refused, as its TLS handshake failed: {error}"),
        Err(_) => return tracing::warn!("a host at {peer} is refused: no TLS handshake within {HELLO_LIMIT:?}"),
    };
    let (closing, joined) = (CancellationToken::new(), CancellationToken::new());
    let visitor = Visitor { front, peer, closing: closing.clone(), joined: joined.clone() };
    let service = FleetServer::new(visitor).max_decoding_message_size(MOST_MESSAGE_BYTES);
    let service = service.map_request(|call: hyper::Request<Incoming>| call.map(ShortFirst::new));
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING).max_concurrent_streams(1);
    builder.initial_stream_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
    let mut serving = pin!(builder.serve_connection(TokioIo::new(io), TowerToHyperService::new(service)));
    let does_not_join = async {
        tokio::select! {
            () = sleep(2 * HELLO_LIMIT) => {}
            () = joined.cancelled() => std::future::pending().await,
        }
    };
    tokio::select! {
        served = &mut serving => return drop(served.inspect_err(|error| tracing::debug!(%error, "a host"))),
        () = closing.cancelled() => {}
        () = does_not_join => {}
    }
    serving.as_mut().graceful_shutdown();
    let _ = timeout(CLOSE_LIMIT, serving).await;
}

/// A connection that asks to join.
struct Visitor {
    front: Arc<Front>,
    peer: SocketAddr,
    /// Ends the connection.
    closing: CancellationToken,
    /// It has a place, and keeps the connection.
    joined: CancellationToken,
}

#[tonic::async_trait]
impl FleetService for Visitor {
    type JoinStream = UnboundedReceiverStream<Result<FrontMessage, Status>>;

    async fn join(&self, request: Request<Streaming<HostMessage>>) -> Result<Response<Self::JoinStream>, Status> {
        let peer = self.peer;
        let closing = self.closing.clone().drop_guard();
        let (call, _, mut messages) = request.into_parts();
        let (door, place, model, status) = match self.greet(&call, &mut messages).await {
            Ok(admitted) => admitted,
            Err(refusal) => {
                tracing::warn!("a host at {peer} is refused: {refusal}");
                // Without it the stream would be reset, perhaps before the host has read why.
                tokio::spawn(async move {
                    sleep(CLOSE_LIMIT).await;
                    drop(messages);
                });
                return Err(refusal.into());
            }
        };
        let (to_host, from_place) = mpsc::unbounded_channel();
        let session =
            Session { host: peer.to_string(), model, status, messages, to_host, _place: place, _connection: closing };
        // Who holds the permit is the only one who sends. A place that has ended takes nobody.
        door.to_place.try_send(session).map_err(|_| Status::unavailable("the front end is shutting down"))?;
        self.joined.cancel();
        Ok(Response::new(UnboundedReceiverStream::new(from_place)))
    }
}

impl Visitor {
    /// Looks at the token, then at the hello.
    async fn greet(
        &self,
        call: &MetadataMap,
        messages: &mut Streaming<HostMessage>,
    ) -> Result<(&Door, OwnedSemaphorePermit, ModelInfo, HostStatus), Refusal> {
        if !self.front.secrets.current().token.is_shown(call) {
            return Err(Refusal::Token);
        }
        let hello = timeout(HELLO_LIMIT, messages.message()).await.map_err(|_| Refusal::Silent)?;
        match hello.map_err(|status| Refusal::Unreadable(with_causes(&status)))? {
            Some(HostMessage { message: Some(host_message::Message::Hello(hello)) }) => self.front.house.admit(hello),
            _ => Err(Malformed("the hello of a host").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_with_both_values_and_sockets_and_context_may() {
        let known = ModelInfo {
            model_digest: "a".into(),
            architecture: "llama".into(),
            vocab_size: 100,
            max_context: 512,
            tensor_parallel: 1,
            bit_domain: "cpu".into(),
        };
        assert_eq!(check(&known, &ModelInfo { max_context: 64, tensor_parallel: 4, ..known.clone() }), Ok(()));
        for (other, words) in [
            (
                ModelInfo { model_digest: "b".into(), ..known.clone() },
                "the model digest differs: the front end has a, the host b",
            ),
            (
                ModelInfo { architecture: "qwen".into(), ..known.clone() },
                "the architecture differs: the front end has llama, the host qwen",
            ),
            (
                ModelInfo { vocab_size: 99, ..known.clone() },
                "the vocabulary size differs: the front end has 100, the host 99",
            ),
            (
                ModelInfo { bit_domain: "gpu".into(), ..known.clone() },
                "the bit domain differs: the front end has cpu, the host gpu",
            ),
        ] {
            let refusal = check(&known, &other).unwrap_err();
            assert!(refusal.to_string().starts_with(words), "{refusal}");
            assert_eq!(Status::from(refusal).code(), Code::FailedPrecondition);
        }
    }
}
