//! A front end and hosts in one process, with scripted workers, and a network between them that a test may cut or let
//! vanish.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use looplane_proto::fleet::v1::fleet_client::FleetClient;
use looplane_proto::fleet::v1::{Answer, Events, FrontMessage, Hello, HostMessage, front_message, host_message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use super::wire::{HostStatus, Passed};
use super::*;
use crate::drafts::DraftStep;
use crate::engine::{
    EngineHandle, EngineState, FinishReason, GeneratedToken, Load, ModelInfo, SequenceEvent, SequenceStream, Standing,
    SubmitError, Unwanted,
};
use crate::group::fake::{FakeLauncher, Script, Trouble};
use crate::group::tests::{config, read, submit, until};
use crate::group::{Common, GroupConfig};
use crate::listener::StopSignal;
use crate::router::{self, Replicas};
use crate::sched::fake_worker::{expected, request};

/// Nothing here takes longer, on a machine that is busy with other tests.
const LIMIT: Duration = Duration::from_secs(60);

/// What the network does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Net {
    /// Carries bytes, each this much later.
    Up(Duration),
    /// Takes bytes and carries none: nobody is told.
    Black,
    /// Ends connections, and takes none.
    Cut,
}

/// A proxy in front of the front end.
struct Proxy {
    port: u16,
    net: watch::Sender<Net>,
}

impl Proxy {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy =
            Self { port: listener.local_addr().unwrap().port(), net: watch::Sender::new(Net::Up(Duration::ZERO)) };
        let net = proxy.net.subscribe();
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                if *net.borrow() == Net::Cut {
                    continue;
                }
                let far = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                tokio::spawn(carry(near_read, far_write, net.clone()));
                tokio::spawn(carry(far_read, near_write, net.clone()));
            }
        });
        proxy
    }
}

/// One way of a connection. A stretch that fell into a black hole never comes out.
async fn carry(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    net: watch::Receiver<Net>,
) {
    let mut cut = net.clone();
    let (queue, mut delayed) = tokio::sync::mpsc::channel::<(Instant, Vec<u8>)>(1024);
    let write = async move {
        while let Some((due, bytes)) = delayed.recv().await {
            tokio::time::sleep_until(due).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    let read = async move {
        let mut bytes = vec![0; 64 << 10];
        let mut is_lost = false;
        loop {
            let count = from.read(&mut bytes).await.unwrap_or(0);
            let now = *net.borrow();
            is_lost |= now == Net::Black;
            match now {
                Net::Up(delay) if count > 0 && !is_lost => {
                    let _ = queue.send((Instant::now() + delay, bytes[..count].to_vec())).await;
                }
                _ if count > 0 => {}
                // An end is carried as little as bytes.
                _ if is_lost => std::future::pending().await,
                _ => return,
            }
        }
    };
    let cut = async move { drop(cut.wait_for(|net| *net == Net::Cut).await.map(drop)) };
    // What is cut, or ends, loses what is under way.
    tokio::select! {
        () = write => {}
        () = read => {}
        () = cut => {}
    }
}

/// A front end with places for hosts, beside replicas of its own.
struct FrontEnd {
    handle: EngineHandle,
    port: u16,
    dir: tempfile::TempDir,
    fleet: Option<Fleet>,
    _replicas: Replicas,
}

fn token(dir: &tempfile::TempDir, name: &str, content: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn slow() -> Script {
    Script { step: Duration::from_millis(2), ..Script::default() }
}

impl FrontEnd {
    async fn start(replicas: u32, places: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let secrets = FrontSecrets::load(None, token(&dir, "token", "secret")).unwrap();
        let config = GroupConfig { replicas, ..config(1) };
        let common = Arc::new(Common::new(config.timeouts.quarantine));
        let listen = ListenConfig { address, places, secrets };
        let (handles, fleet) = Fleet::open(listener, listen, replicas, &common, String::new());
        let (handle, replicas) =
            router::spawn(config, &common, handles, |_| FakeLauncher::new(1, |_, _| slow())).unwrap();
        Self { handle, port: address.port(), dir, fleet: Some(fleet), _replicas: replicas }
    }

    /// How the replica of a number is.
    fn state(&self, replica: usize) -> EngineState {
        self.handle.replicas()[replica].state.borrow().clone()
    }

    async fn until(&self, replica: usize, wanted: impl Fn(&EngineState) -> bool) -> Duration {
        let (began, mut state) = (Instant::now(), self.handle.replicas()[replica].state.clone());
        let found = timeout(LIMIT, state.wait_for(|state| wanted(state))).await;
        let is_so = found.is_ok();
        drop(found);
        assert!(is_so, "replica {replica} stays {:?}", self.state(replica));
        began.elapsed()
    }

    /// Tokens of prompts that a replica has computed.
    fn prompted(&self, replica: usize) -> u64 {
        self.handle.replicas()[replica].metrics.prompt_tokens.get()
    }

    /// Until it has computed more than `before`.
    async fn computes(&self, replica: usize, before: u64) {
        let computed = async {
            while self.prompted(replica) == before {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, computed).await.expect("it computes");
    }

    async fn ready(&self, replica: usize) {
        self.until(replica, |state| *state == EngineState::Ready).await;
    }
}

/// A host with a group of its own. Dropping it is its sudden end.
struct Host {
    handle: EngineHandle,
    stop: StopSignal,
    ended: Option<JoinHandle<Result<(), HostError>>>,
    _replicas: Replicas,
}

impl Host {
    async fn start(front: &FrontEnd, port: u16) -> Self {
        Self::start_with(front, port, "secret", String::new(), slow()).await
    }

    async fn start_with(front: &FrontEnd, port: u16, word: &str, vocabulary_digest: String, script: Script) -> Self {
        Self::start_as(front, port, word, vocabulary_digest, config(1), move |_| script.clone()).await
    }

    /// `script` is asked with the number of a start of the workers, from 0.
    async fn start_as(
        front: &FrontEnd,
        port: u16,
        word: &str,
        vocabulary_digest: String,
        config: GroupConfig,
        script: impl Fn(u32) -> Script + Send + Sync + 'static,
    ) -> Self {
        let secrets = HostSecrets::load(None, token(&front.dir, &format!("token-{word}"), word)).unwrap();
        let common = Arc::new(Common::new(Duration::from_secs(600)));
        let launcher = FakeLauncher::new(1, move |start, _| script(start));
        let (handle, replicas) = router::spawn(config, &common, Vec::new(), |_| launcher.clone()).unwrap();
        let stop = StopSignal::default();
        let drain = Duration::from_secs(30);
        let join_config = JoinConfig { front: "127.0.0.1".into(), port, secrets, vocabulary_digest, drain };
        let ended = tokio::spawn(join(handle.clone(), join_config, stop.clone()));
        Self { handle, stop, ended: Some(ended), _replicas: replicas }
    }

    async fn end(&mut self) -> Result<(), HostError> {
        timeout(LIMIT, self.ended.take().unwrap()).await.expect("the host ends").unwrap()
    }

    /// Until nothing is left of what it computed.
    async fn idle(&self) {
        let idle = async {
            while self.handle.load().running + self.handle.load().waiting > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, idle).await.expect("the host has nothing left");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(task) = &self.ended {
            task.abort();
        }
    }
}

/// Streams of many requests, and what has to come of each.
async fn many(front: &FrontEnd, count: u64, tokens: u32) -> Vec<(SequenceStream, Vec<u32>)> {
    let mut streams = Vec::new();
    for seed in 0..count {
        let request = request(seed, 6 + seed as u32 % 20, tokens, vec![]);
        let stream = submit(&front.handle, request.clone()).await.unwrap();
        streams.push((stream, expected(&request).0));
    }
    streams
}

async fn all_whole(streams: Vec<(SequenceStream, Vec<u32>)>) {
    for (stream, wanted) in streams {
        let wanted = (wanted, SequenceEvent::Finished(FinishReason::Length));
        assert_eq!(timeout(LIMIT, read(stream)).await.unwrap(), wanted, "none is missing, none comes twice");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_alone_computes_all_in_a_crowd_with_cancels_over_a_slow_network() {
    let front = FrontEnd::start(0, 1).await;
    let refused = submit(&front.handle, request(1, 5, 5, vec![])).await.unwrap_err();
    assert!(refused.to_string().contains("waiting for a host to join"), "{refused}");
    let proxy = Proxy::to(front.port).await;
    proxy.net.send_replace(Net::Up(Duration::from_millis(50)));
    let host = Host::start(&front, proxy.port).await;
    front.ready(0).await;
    assert_eq!(front.handle.model(), host.handle.model());
    let mut streams = many(&front, 60, 60).await;
    // Every third reader goes away at some token, or before the first.
    for number in (0..60).rev().filter(|number| number % 3 == 0) {
        let (mut stream, wanted) = streams.remove(number);
        for token in &wanted[..number % 5] {
            assert!(matches!(stream.next().await, Some(SequenceEvent::Token(of)) if of.id == *token));
        }
        stream.let_go(Unwanted::Abandoned);
    }
    all_whole(streams).await;
    host.idle().await;
    // Its state is told once a second.
    let told = async {
        while front.handle.load() != host.handle.load() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, told).await.expect("the front end knows the host's load");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_ends_loses_no_token_and_comes_back() {
    let front = FrontEnd::start(1, 1).await;
    front.ready(0).await;
    let mut host = Host::start(&front, front.port).await;
    for round in 0..3 {
        front.ready(1).await;
        let before = front.prompted(1);
        let streams = many(&front, 12, 150).await;
        front.computes(1, before).await;
        drop(host);
        let took = front.until(1, |state| matches!(state, EngineState::Loading(_))).await;
        assert!(took < Duration::from_secs(3), "round {round}: a broken stream is noticed at once, not after {took:?}");
        all_whole(streams).await;
        assert_eq!(front.handle.replicas()[1].metrics.losses.get(), round + 1);
        host = Host::start(&front, front.port).await;
    }
    front.ready(1).await;
    all_whole(many(&front, 8, 30).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_vanishes_loses_the_host_in_time_and_late_tokens_reach_nobody() {
    let front = FrontEnd::start(1, 1).await;
    let proxy = Proxy::to(front.port).await;
    // Slow enough not to be done when it is given up.
    let script = Script { step: Duration::from_millis(60), ..Script::default() };
    let host = Host::start_with(&front, proxy.port, "secret", String::new(), script).await;
    front.ready(0).await;
    front.ready(1).await;
    let before = front.prompted(1);
    let streams = many(&front, 8, 230).await;
    front.computes(1, before).await;
    proxy.net.send_replace(Net::Black);
    let took = front.until(1, |state| matches!(state, EngineState::Loading(_))).await;
    let stated = BEAT * (MOST_SILENT + 1);
    assert!(took > BEAT * 3 && took < stated + Duration::from_secs(2), "{took:?}");
    let EngineState::Loading(words) = front.state(1) else { panic!("{:?}", front.state(1)) };
    assert!(words.contains("said nothing for 5s"), "{words}");
    // The host notices by itself, and cancels what belonged to the stream.
    host.idle().await;
    proxy.net.send_replace(Net::Up(Duration::ZERO));
    all_whole(streams).await;
    front.ready(1).await;
    all_whole(many(&front, 8, 30).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_the_only_host_wait_for_it_where_the_network_was_cut() {
    let front = FrontEnd::start(0, 1).await;
    let proxy = Proxy::to(front.port).await;
    let host = Host::start(&front, proxy.port).await;
    front.ready(0).await;
    let streams = many(&front, 8, 200).await;
    for _ in 0..3 {
        proxy.net.send_replace(Net::Cut);
        front.until(0, |state| matches!(state, EngineState::Loading(_))).await;
        host.idle().await;
        proxy.net.send_replace(Net::Up(Duration::ZERO));
        front.ready(0).await;
        sleep(Duration::from_millis(50)).await;
    }
    all_whole(streams).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_shut_down_ends_what_it_has_and_is_no_loss() {
    let front = FrontEnd::start(1, 1).await;
    front.ready(0).await;
    let mut host = Host::start(&front, front.port).await;
    front.ready(1).await;
    let streams = many(&front, 8, 200).await;
    host.stop.drain.cancel();
    let words = |state: &EngineState| matches!(state, EngineState::Loading(words) if words.contains("shutting down"));
    front.until(1, words).await;
    all_whole(streams).await;
    assert_eq!(host.end().await, Ok(()));
    front.until(1, |state| matches!(state, EngineState::Loading(words) if words.contains("has left"))).await;
    assert_eq!(front.handle.replicas()[1].metrics.losses.get(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_messages_of_a_host_that_leaves_are_read_over_a_slow_network() {
    let front = Arc::new(FrontEnd::start(1, 1).await);
    front.ready(0).await;
    let proxy = Proxy::to(front.port).await;
    let (started, starting) = oneshot::channel();
    // As a process of its own: with its end its connection is closed, and what is under way is lost.
    let host = spawn_blocking({
        let (front, port) = (front.clone(), proxy.port);
        move || {
            let runtime = Runtime::new().unwrap();
            let ended = runtime.block_on(async {
                let mut host = Host::start(&front, port).await;
                started.send(host.stop.clone()).unwrap();
                host.end().await
            });
            runtime.shutdown_background();
            ended
        }
    });
    let stop = starting.await.unwrap();
    front.ready(1).await;
    let before = front.prompted(0);
    // One on each: that of the host is under way to its end as it leaves.
    let streams = many(&front, 2, 40).await;
    proxy.net.send_replace(Net::Up(Duration::from_millis(300)));
    stop.drain.cancel();
    all_whole(streams).await;
    assert_eq!(host.await.unwrap(), Ok(()));
    let computed = front.prompted(0) - before;
    assert!(computed < 8, "nothing is computed again: {computed} tokens of prompts, beside one of 6 or 7");
    assert_eq!(front.handle.replicas()[1].metrics.losses.get(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_host_whose_workers_are_given_up_go_on_elsewhere() {
    let front = FrontEnd::start(1, 1).await;
    front.ready(0).await;
    let mut config = config(1);
    config.timeouts.loss_window = Duration::from_millis(100);
    let script = |start| match start {
        0 => Script { after: Some((60, Trouble::Exit)), ..slow() },
        _ => Script { exits_at_once: true, ..slow() },
    };
    let mut host = Host::start_as(&front, front.port, "secret", String::new(), config, script).await;
    front.ready(1).await;
    let streams = many(&front, 8, 100).await;
    let lost = |state: &EngineState| matches!(state, EngineState::Loading(words) if words.contains("are given up"));
    front.until(1, lost).await;
    all_whole(streams).await;
    let ended = host.end().await;
    assert!(matches!(&ended, Err(HostError::Engine(why)) if why.contains("failed 3 times in a row")), "{ended:?}");
    assert_eq!(front.handle.replicas()[1].metrics.losses.get(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_next_host_cannot_hold_fails_by_name_and_the_rest_goes_on() {
    let front = FrontEnd::start(0, 1).await;
    let host = Host::start(&front, front.port).await;
    front.ready(0).await;
    let long = submit(&front.handle, request(1, 5, 200, vec![])).await.unwrap();
    let short = many(&front, 1, 50).await;
    drop(host);
    front.until(0, |state| matches!(state, EngineState::Loading(_))).await;
    // Room for 100 positions.
    let script = Script { kv_pages: 24, ..slow() };
    let _host = Host::start_with(&front, front.port, "secret", String::new(), script).await;
    let (_, end) = timeout(LIMIT, read(long)).await.unwrap();
    let SequenceEvent::Failed(why) = end else { panic!("{end:?}") };
    assert!(why.contains("the context of the next, 127.0.0.1:") && why.contains("is too small for it"), "{why}");
    all_whole(short).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_on_both_ends_and_a_full_house_is_asked_again() {
    let mut front = FrontEnd::start(1, 1).await;
    front.ready(0).await;
    let other = |digest: &'static str, bits: &'static str| Script { model_digest: digest, bit_domain: bits, ..slow() };
    for (word, vocabulary, script, says) in [
        ("wrong", "", slow(), "the token is wrong"),
        ("secret", "", other("another", "fake"), "model digest differs: the front end has digest, the host another"),
        ("secret", "", other("digest", "bits"), "bit domain differs: the front end has fake, the host bits"),
        (
            "secret",
            "texts",
            slow(),
            "texts of the tokens (by their digest) differs: the front end has , the host texts",
        ),
    ] {
        let mut host = Host::start_with(&front, front.port, word, vocabulary.into(), script).await;
        let Err(HostError::Refused { why, .. }) = host.end().await else { panic!("it is refused: {says}") };
        assert!(why.contains(says), "{why}");
    }
    assert_eq!(front.state(1), EngineState::Loading("waiting for a host to join".into()));
    let first = Host::start(&front, front.port).await;
    front.ready(1).await;
    let second = Host::start(&front, front.port).await;
    until(&second.handle, |state| *state == EngineState::Ready).await;
    sleep(Duration::from_millis(500)).await;
    assert!(!second.ended.as_ref().unwrap().is_finished(), "it tries again");
    drop(first);
    let lost = async {
        while front.handle.replicas()[1].metrics.losses.get() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, lost).await.expect("the first is lost, and its place is free");
    front.ready(1).await;
    all_whole(many(&front, 8, 30).await).await;
    // The front end ends, and its hosts try again.
    front.fleet.take().unwrap().close().await;
    assert_eq!(front.state(1), EngineState::Draining);
    second.idle().await;
    assert!(!second.ended.as_ref().unwrap().is_finished());
    second.stop.drain.cancel();
}

/// Calls `Join` as no host of ours does: with this token, and what comes out of a channel.
async fn call(
    front: &FrontEnd,
    word: &str,
    outgoing: mpsc::UnboundedReceiver<HostMessage>,
) -> Result<Streaming<FrontMessage>, Status> {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://127.0.0.1:{}", front.port)).unwrap();
    let mut client = FleetClient::new(channel.connect().await.unwrap());
    let mut call = Request::new(UnboundedReceiverStream::new(outgoing));
    call.metadata_mut().insert("authorization", format!("Bearer {word}").parse().unwrap());
    let messages = client.join(call).await?.into_inner();
    // The connection lives as long as the client.
    tokio::spawn(async move {
        let _client = client;
        sleep(LIMIT).await;
    });
    Ok(messages)
}

/// The hello of a host that fits, of which the vocabulary's digest, which is looked at last, has so many bytes.
fn hello(vocabulary_bytes: usize) -> HostMessage {
    let model = ModelInfo {
        model_digest: "digest".into(),
        architecture: "FakeForCausalLM".into(),
        vocab_size: 1000,
        max_context: 260,
        tensor_parallel: 1,
        bit_domain: "fake".into(),
    };
    let status = HostStatus { state: EngineState::Ready, load: Load::default(), page_positions: 4, kv_bytes: 0 };
    say(host_message::Message::Hello(Hello {
        version: VERSION,
        model: Some(wire::model(&model)),
        vocabulary_digest: "a".repeat(vocabulary_bytes),
        status: Some(wire::status(status)),
    }))
}

fn say(message: host_message::Message) -> HostMessage {
    HostMessage { message: Some(message) }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_message_is_read_without_the_token_and_none_that_is_long_before_a_host_has_its_place() {
    let front = FrontEnd::start(0, 1).await;
    let (to_front, outgoing) = mpsc::unbounded_channel();
    // Nothing is ever said, and yet there is an answer: the token is looked at before.
    let refused = timeout(HELLO_LIMIT / 2, call(&front, "wrong", outgoing)).await.unwrap().unwrap_err();
    assert_eq!((refused.code(), refused.message().contains("the token is wrong")), (Code::Unauthenticated, true));
    drop(to_front);
    for (bytes, code, says) in [
        (64 << 10, Code::InvalidArgument, "bytes, and may have 65536"),
        (63 << 10, Code::FailedPrecondition, "texts of the tokens"),
    ] {
        let (to_front, outgoing) = mpsc::unbounded_channel();
        to_front.send(hello(bytes)).unwrap();
        let refused = call(&front, "secret", outgoing).await.unwrap_err();
        assert!(refused.code() == code && refused.message().contains(says), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_says_what_no_engine_would_is_lost_and_both_ends_say_why() {
    let front = FrontEnd::start(0, 1).await;
    let event = |event| wire::event(event);
    let token = |id| event(Passed::Token(GeneratedToken { id, logprob: None, top: Vec::new() }));
    let drafts = |drafted, accepted| event(Passed::Drafts(DraftStep { drafted, accepted }));
    let much = Load { waiting: u64::MAX, ..Load::default() };
    let status = HostStatus { state: EngineState::Ready, load: much, page_positions: 4, kv_bytes: 0 };
    let events = |events| host_message::Message::Events(Events { sequence: 0, events });
    for (message, says) in [
        (events(vec![drafts(u32::MAX, 0), token(1)]), "0 of 4294967295 drafts accepted, where a step has 32"),
        (events(vec![token(1000)]), "token 1000 of a vocabulary of 1000"),
        (events((0..21).map(token).collect()), "21 tokens, where 20 were asked for"),
        (host_message::Message::Status(wire::status(status)), "a load that a host can have"),
    ] {
        let (to_front, outgoing) = mpsc::unbounded_channel();
        to_front.send(hello(0)).unwrap();
        let mut messages = call(&front, "secret", outgoing).await.unwrap();
        front.ready(0).await;
        let asked = tokio::spawn({
            let handle = front.handle.clone();
            async move { submit(&handle, request(1, 5, 20, vec![])).await }
        });
        let submitted = loop {
            match messages.message().await.unwrap().unwrap().message {
                Some(front_message::Message::Submit(submitted)) => break submitted,
                _ => continue,
            }
        };
        let answer = Answer { submission: submitted.submission, refused: None };
        to_front.send(say(host_message::Message::Answer(answer))).unwrap();
        let stream = asked.await.unwrap().unwrap();
        // Numbers go on from host to host.
        let message = match message {
            host_message::Message::Events(events) => {
                host_message::Message::Events(Events { sequence: submitted.first_sequence, ..events })
            }
            other => other,
        };
        to_front.send(say(message)).unwrap();
        front.until(0, |state| matches!(state, EngineState::Loading(words) if words.contains(says))).await;
        let status = loop {
            match messages.message().await {
                Ok(Some(_)) => continue,
                Ok(None) => panic!("it is told why"),
                Err(status) => break status,
            }
        };
        assert!(status.message().contains("given up by the front end") && status.message().contains(says), "{status}");
        drop(stream);
    }
    assert_eq!(front.handle.replicas()[0].metrics.losses.get(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_behind_holds_up_nobody_and_its_sequence_gives_way() {
    let front = FrontEnd::start(0, 1).await;
    // Pages for all that is asked for: nobody gives way for want of them.
    let script = Script { kv_pages: 1100, ..slow() };
    let host = Host::start_with(&front, front.port, "secret", String::new(), script).await;
    front.ready(0).await;
    // As many as there are slots, read by nobody, and others that wait for these.
    let unread = many(&front, 4, 1000).await;
    let read_on = many(&front, 12, 60).await;
    all_whole(read_on).await;
    let load = host.handle.load();
    assert!(load.preemptions > 0 && load.running + load.waiting == 4, "who reads goes before who does not: {load:?}");
    all_whole(unread).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_full_on_the_host_is_told_with_its_bound() {
    let front = FrontEnd::start(0, 1).await;
    let _host = Host::start(&front, front.port).await;
    front.ready(0).await;
    // More pages than its cache has.
    let error = submit(&front.handle, request(1, 200, 100, vec![])).await.unwrap_err();
    assert_eq!(error, SubmitError::TooLarge { needed: 75, available: 65 });
    let many = (0..2000).map(|seed| request(seed, 1, 5, vec![])).collect();
    let error = front.handle.submit(many, Standing::default()).await.unwrap_err();
    assert!(matches!(error, SubmitError::NeverFits { asked: 2000, limit: 1024, .. }), "{error}");
}
