//! Workers inside the test's process that speak worker/v1 over real Unix sockets and do what a script says.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use looplane_proto::worker::v1::worker_server::{Worker, WorkerServer};
use looplane_proto::worker::v1::{
    Admit, HealthRequest, HealthResponse, JoinRequest, JoinResponse, LoadEvent, LoadProgress, LoadRequest, Loaded,
    Outcome, Plan, load_event,
};
use tokio::net::UnixListener;
use tokio::sync::{Barrier, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::{Launcher, WorkerExit};
use crate::sched::fake_worker::{FakeWorker, Shape};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What one worker does besides working.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    pub(crate) load_error: Option<Status>,
    pub(crate) load_hangs: bool,
    pub(crate) bit_domain: &'static str,
    pub(crate) model_digest: &'static str,
    pub(crate) kv_pages: u32,
    /// Time of a step.
    pub(crate) step: Duration,
    /// After so many steps: exit, break the stream, say nothing more, or lie.
    pub(crate) after: Option<(u64, Trouble)>,
    /// Exits in a step that brings a token for a prompt which begins with this one.
    pub(crate) poison: Option<u32>,
    /// Exits after this time, whatever it does.
    pub(crate) lifetime: Option<Duration>,
    /// Exits instead of opening its socket.
    pub(crate) exits_at_once: bool,
    /// From a kill to the end.
    pub(crate) kill_takes: Duration,
    /// Does not answer the question how it is.
    pub(crate) is_deaf: bool,
    /// Does not exit when its plans end.
    pub(crate) ignores_drain: bool,
    /// Its plans may end before its sequences do.
    pub(crate) may_be_cut_off: bool,
}

/// From a broken stream to the exit, where that takes its time.
pub(crate) const SLOW_END: Duration = Duration::from_millis(800);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    Exit,
    BreakStream,
    /// Breaks the stream, and exits [`SLOW_END`] later.
    EndSlowly,
    Hang,
    /// Takes this much longer, once.
    Pause(Duration),
    Lie,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            load_error: None,
            load_hangs: false,
            bit_domain: "fake",
            model_digest: "digest",
            kv_pages: 64,
            step: Duration::from_micros(200),
            after: None,
            poison: None,
            lifetime: None,
            exits_at_once: false,
            kill_takes: Duration::ZERO,
            is_deaf: false,
            ignores_drain: false,
            may_be_cut_off: false,
        }
    }
}

/// Starts fake workers; `script` is asked with the number of the start, from 0, and the rank.
pub(crate) struct FakeLauncher<F> {
    pub(crate) script: F,
    pub(crate) starts: AtomicU32,
    pub(crate) alive: Arc<AtomicUsize>,
    ranks: u32,
    exchange: Mutex<Arc<Exchange>>,
}

impl<F: Fn(u32, u32) -> Script + Send + Sync + 'static> FakeLauncher<F> {
    pub(crate) fn new(ranks: u32, script: F) -> Arc<Self> {
        let exchange = Mutex::new(Arc::new(Exchange::new(ranks)));
        Arc::new(Self { script, starts: AtomicU32::new(0), alive: Arc::default(), ranks, exchange })
    }
}

/// Where the ranks of a group meet at every token boundary, and learn which plans all of them hold.
struct Exchange {
    held: Vec<AtomicU64>,
    offered: Barrier,
    read: Barrier,
}

impl Exchange {
    fn new(ranks: u32) -> Self {
        let barrier = || Barrier::new(ranks as usize);
        Self { held: (0..ranks).map(|_| AtomicU64::new(0)).collect(), offered: barrier(), read: barrier() }
    }

    async fn all_hold(&self, rank: u32, version: u64) -> u64 {
        self.held[rank as usize].store(version, Ordering::SeqCst);
        self.offered.wait().await;
        let least = self.held.iter().map(|held| held.load(Ordering::SeqCst)).min();
        self.read.wait().await;
        least.expect("a group has ranks")
    }
}

struct Alive(Arc<AtomicUsize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<F: Fn(u32, u32) -> Script + Send + Sync + 'static> Launcher for FakeLauncher<F> {
    fn launch(&self, rank: u32, socket: &Path, kill: CancellationToken) -> io::Result<BoxFuture<'static, WorkerExit>> {
        if rank == 0 {
            self.starts.fetch_add(1, Ordering::SeqCst);
            *self.exchange.lock().expect("no test panics with it") = Arc::new(Exchange::new(self.ranks));
        }
        let exchange = Arc::clone(&self.exchange.lock().expect("no test panics with it"));
        let script = (self.script)(self.starts.load(Ordering::SeqCst) - 1, rank);
        self.alive.fetch_add(1, Ordering::SeqCst);
        let alive = Alive(Arc::clone(&self.alive));
        let exit = |success, words: &str| WorkerExit { success, words: words.into(), killed: false };
        if script.exits_at_once {
            drop(alive);
            return Ok(Box::pin(async move { exit(false, "exited with code 1, after: no such luck") }));
        }
        let (exits, mut exited) = mpsc::unbounded_channel();
        let kill_takes = script.kill_takes;
        let lifetime = script.lifetime.unwrap_or(Duration::MAX);
        let listener = UnixListenerStream::new(UnixListener::bind(socket)?);
        let service = FakeService { script, rank, exchange, kill: kill.clone(), exits };
        let server = tonic::transport::Server::builder().add_service(WorkerServer::new(service));
        Ok(Box::pin(async move {
            let _alive = alive;
            tokio::select! {
                ended = server.serve_with_incoming(listener) => exit(false, &format!("{ended:?}")),
                success = exited.recv() => match success {
                    Some(true) => exit(true, "exited with code 0"),
                    _ => exit(false, "was killed by signal 9"),
                },
                () = kill.cancelled() => {
                    tokio::time::sleep(kill_takes).await;
                    WorkerExit { killed: true, ..exit(false, "was killed by signal 9") }
                }
                () = tokio::time::sleep(lifetime) => exit(false, "exited with code 101"),
            }
        }))
    }
}

struct FakeService {
    script: Script,
    rank: u32,
    exchange: Arc<Exchange>,
    kill: CancellationToken,
    exits: mpsc::UnboundedSender<bool>,
}

#[tonic::async_trait]
impl Worker for FakeService {
    type LoadStream = Answers<LoadEvent>;
    type RunStream = Answers<Outcome>;

    async fn load(&self, request: Request<LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let request = request.into_inner();
        assert_eq!(request.rank, self.rank);
        if let Some(status) = &self.script.load_error {
            return Err(status.clone());
        }
        let progress = LoadProgress { phase: "packing weights".into(), bytes_done: 2, bytes_total: 5 };
        let loaded = Loaded {
            architecture: "FakeForCausalLM".into(),
            vocab_size: 1000,
            max_context: 4096,
            page_positions: 4,
            max_slots: request.max_slots,
            max_batch_tokens: request.max_batch_tokens,
            // Rank 0 has room to spare: the group uses the least.
            kv_pages: self.script.kv_pages + u32::from(self.rank == 0),
            bit_domain: self.script.bit_domain.into(),
            model_digest: self.script.model_digest.into(),
            stream_bytes: 1000,
            head_bytes: 100,
            kv_bytes: u64::from(self.script.kv_pages + u32::from(self.rank == 0)) * 4 * 10,
            fabric_handle: format!("fabric-{}", self.rank),
            notes: vec!["a note".into()],
            ..Loaded::default()
        };
        let (sender, events) = mpsc::unbounded_channel();
        let send = |event| sender.send(Ok(LoadEvent { event: Some(event) })).expect("the stream is read");
        send(load_event::Event::Progress(progress));
        if self.script.load_hangs {
            // Keeps the stream open and says nothing.
            tokio::spawn(async move { sender.closed().await });
        } else {
            send(load_event::Event::Loaded(loaded));
        }
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(events))))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let handles = request.into_inner().fabric_handles;
        let expected: Vec<String> = (0..handles.len()).map(|rank| format!("fabric-{rank}")).collect();
        assert_eq!(handles, expected);
        Ok(Response::new(JoinResponse {}))
    }

    async fn run(&self, request: Request<Streaming<Plan>>) -> Result<Response<Self::RunStream>, Status> {
        let mut incoming = request.into_inner();
        let (plan_sender, plans) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(plan)) = incoming.message().await {
                if plan_sender.send(plan).is_err() {
                    break;
                }
            }
        });
        let (sender, outcomes) = mpsc::channel(4);
        let exchange = Arc::clone(&self.exchange);
        let run = run(self.script.clone(), self.rank, exchange, plans, sender, self.exits.clone());
        let kill = self.kill.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = run => {}
                () = kill.cancelled() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outcomes))))
    }

    async fn health(&self, _: Request<HealthRequest>) -> Result<Response<HealthResponse>, Status> {
        if self.script.is_deaf {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(HealthResponse::default()))
    }
}

async fn run(
    script: Script,
    rank: u32,
    exchange: Arc<Exchange>,
    mut plans: mpsc::UnboundedReceiver<Plan>,
    outcomes: mpsc::Sender<Result<Outcome, Status>>,
    exits: mpsc::UnboundedSender<bool>,
) {
    // The shape's bounds are those of `tests::config`.
    let kv_pages = script.kv_pages + 1;
    let mut worker = FakeWorker::new(Shape { max_slots: 4, max_batch_tokens: 8, kv_pages, page_positions: 4 });
    let mut steps = 0;
    let mut poisoned = HashSet::new();
    let receive = |worker: &mut FakeWorker, plan: Plan, poisoned: &mut HashSet<u64>| {
        let begins = |admit: &&Admit| Some(admit.tokens[0]) == script.poison;
        poisoned.extend(plan.admit.iter().filter(begins).map(|admit| admit.sequence));
        worker.receive(plan);
    };
    loop {
        while let Ok(plan) = plans.try_recv() {
            receive(&mut worker, plan, &mut poisoned);
        }
        if worker.rests() {
            let Some(plan) = plans.recv().await else { break };
            receive(&mut worker, plan, &mut poisoned);
        }
        let all_hold = exchange.all_hold(rank, worker.last_version()).await;
        let Some(mut outcome) = worker.run(all_hold) else { continue };
        steps += 1;
        if outcome.tokens.iter().any(|token| poisoned.contains(&token.sequence)) {
            let _ = exits.send(false);
            return;
        }
        if let Some((limit, trouble)) = script.after
            && steps > limit
        {
            match trouble {
                // Whoever listened may be gone already: a kill is as good.
                Trouble::Exit => {
                    let _ = exits.send(false);
                    return;
                }
                Trouble::BreakStream => {
                    let _ = outcomes.send(Err(Status::data_loss("out of luck"))).await;
                    return;
                }
                Trouble::EndSlowly => {
                    let _ = outcomes.send(Err(Status::data_loss("out of luck"))).await;
                    tokio::time::sleep(SLOW_END).await;
                    let _ = exits.send(false);
                    return;
                }
                Trouble::Hang => std::future::pending::<()>().await,
                Trouble::Pause(time) if steps == limit + 1 => tokio::time::sleep(time).await,
                Trouble::Pause(_) => {}
                Trouble::Lie => outcome.version += 7,
            }
        }
        if rank != 0 {
            outcome.tokens.clear();
        }
        tokio::time::sleep(script.step).await;
        if outcomes.send(Ok(outcome)).await.is_err() {
            return;
        }
    }
    if script.ignores_drain {
        std::future::pending::<()>().await;
    }
    let is_told = script.may_be_cut_off || worker.slots_in_use() == 0;
    assert!(is_told, "a drained worker was told of every release");
    drop(outcomes);
    let _ = exits.send(true);
}
