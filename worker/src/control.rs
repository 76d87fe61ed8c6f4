//! The worker/v1 service: load, join, run plans, report outcomes, drain. Knows no device.
//!
//! Tasks and threads: the gRPC server's tasks on one async thread; a thread that loads; and, while `Run` lasts, the
//! decoder's thread, fed by one task (plans) and drained by another (outcomes), each through a bounded channel of its
//! own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use looplane_proto::worker::v1;
use looplane_proto::worker::v1::health_response::State;
use looplane_proto::worker::v1::worker_server::{Worker, WorkerServer};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

use crate::batch::PlanFault;
use crate::convert;
use crate::cuda::error::CudaError;
use crate::decoder::{Decoder, Fault, Load, LoadError, Outcome, PlanFeed, Vitals, outcome_stream, plan_stream};

/// Largest plan on the wire: 512 sequences admitted at once with 128k tokens each are under it.
const MAX_PLAN_BYTES: usize = 256 << 20;
/// Load events that wait for the server; further progress is dropped, the end is not.
const LOAD_EVENTS: usize = 64;
/// Once the decoder has ended, how long the last outcomes and the status may take to be sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one worker on `listener` until its run ends: `Ok` after a drain.
///
/// # Errors
/// The fault that ended the worker; the server has been told the same as a status if it still listens.
pub async fn serve(listener: UnixListener, rank: usize, load: Arc<Load>) -> Result<(), Fault> {
    let (ended, mut end) = mpsc::channel(1);
    let control =
        Control(Arc::new(Shared { rank, load, stage: Mutex::new(Stage::Empty), vitals: Arc::default(), ended }));
    let service = WorkerServer::new(control).max_decoding_message_size(MAX_PLAN_BYTES);
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tonic::transport::Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async { stopped.await.unwrap_or(()) });
    tokio::pin!(server);
    let result = tokio::select! {
        served = &mut server => {
            let problem = served.err().map_or("it closed".into(), |error| error.to_string());
            return Err(Fault::Socket(problem));
        }
        result = end.recv() => result.expect("the service, which lives as long as its server, holds a sender"),
    };
    drop(stop);
    if tokio::time::timeout(FLUSH_TIMEOUT, server).await.is_err() {
        tracing::warn!(rank, limit = ?FLUSH_TIMEOUT, "the server did not take the last outcomes in time");
    }
    result
}

/// Where the worker is in its life; it never goes back.
enum Stage {
    Empty,
    Loading,
    Loaded(Box<dyn Decoder>),
    Joining,
    Joined(Box<dyn Decoder>),
    Running,
    Draining,
    /// A fault ended it; the process is about to exit.
    Ended,
}

impl Stage {
    fn state(&self) -> State {
        match self {
            Self::Empty => State::Empty,
            Self::Loading => State::Loading,
            Self::Loaded(_) | Self::Joining => State::Loaded,
            Self::Joined(_) => State::Joined,
            Self::Running => State::Running,
            Self::Draining | Self::Ended => State::Draining,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Empty => "has not loaded",
            Self::Loading => "is loading",
            Self::Loaded(_) => "has loaded but not joined",
            Self::Joining => "is joining its group",
            Self::Joined(_) => "has joined",
            Self::Running => "is running",
            Self::Draining => "is draining",
            Self::Ended => "has ended",
        }
    }
}

struct Shared {
    rank: usize,
    load: Arc<Load>,
    stage: Mutex<Stage>,
    vitals: Arc<Vitals>,
    /// The end of the worker's life; the first one counts.
    ended: mpsc::Sender<Result<(), Fault>>,
}

impl Shared {
    /// Held for the length of a move, never while anything waits.
    fn stage(&self) -> MutexGuard<'_, Stage> {
        // A poisoned stage is a whole stage: every write to it is one move.
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves to `next` if `from` accepts the stage now; `from` gets the stage back with its decoder.
    fn advance<T>(&self, next: Stage, rpc: &str, from: impl FnOnce(Stage) -> Result<T, Stage>) -> Result<T, Status> {
        let mut stage = self.stage();
        match from(std::mem::replace(&mut *stage, next)) {
            Ok(taken) => Ok(taken),
            Err(unchanged) => {
                let message = format!("{rpc}: rank {} {}", self.rank, unchanged.name());
                *stage = unchanged;
                Err(Status::failed_precondition(message))
            }
        }
    }

    fn end(&self, result: Result<(), Fault>) {
        *self.stage() = Stage::Ended;
        // Full: an earlier end counts, and is what the process exits with.
        let _ = self.ended.try_send(result);
    }
}

/// The service; a type of its own so that clones of `Shared` can go to threads.
struct Control(Arc<Shared>);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Control {
    type LoadStream = Events<v1::LoadEvent>;
    type RunStream = Events<v1::Outcome>;

    async fn load(&self, request: Request<v1::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let shared = self.0.clone();
        let request = convert::load_request(request.into_inner()).map_err(|e| load_status(&e))?;
        if request.rank != shared.rank {
            let message = format!("rank {} was started, but rank {} is to load", shared.rank, request.rank);
            return Err(Status::invalid_argument(message));
        }
        shared.advance(Stage::Loading, "Load", |stage| match stage {
            Stage::Empty => Ok(()),
            other => Err(other),
        })?;
        let (events, stream) = mpsc::channel(LOAD_EVENTS);
        let work = move || {
            // A server that does not keep up misses progress, which is stale by then, and gets the end.
            let mut report = |progress| drop(events.try_send(Ok(convert::progress(progress))));
            let loaded = guarded(shared.rank, || (shared.load)(&request, &mut report).map_err(Fault::Load));
            let last = match loaded {
                Ok(decoder) => {
                    let event = convert::loaded(decoder.loaded(), decoder.fabric_handle());
                    *shared.stage() = Stage::Loaded(decoder);
                    Ok(event)
                }
                Err(fault) => {
                    let status = fault_status(&fault);
                    shared.end(Err(fault));
                    Err(status)
                }
            };
            // A server that went away while the worker loaded does not need the answer.
            let _ = events.blocking_send(last);
        };
        spawn("load", work)?;
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
        let shared = self.0.clone();
        let handles = request.into_inner().fabric_handles;
        let mut decoder = shared.advance(Stage::Joining, "Join", |stage| match stage {
            Stage::Loaded(decoder) => Ok(decoder),
            other => Err(other),
        })?;
        let (answer, joined) = oneshot::channel();
        let work = move || {
            let result = guarded(shared.rank, || decoder.join(&handles).map(|()| decoder));
            let result = result.map(|decoder| *shared.stage() = Stage::Joined(decoder));
            let status = result.as_ref().map(|()| v1::JoinResponse {}).map_err(fault_status);
            if let Err(fault) = result {
                shared.end(Err(fault));
            }
            // A server that went away does not need the answer.
            let _ = answer.send(status);
        };
        spawn("join", work)?;
        let response = joined.await.map_err(|_| Status::internal("the join was given up"))??;
        Ok(Response::new(response))
    }

    async fn run(&self, request: Request<Streaming<v1::Plan>>) -> Result<Response<Self::RunStream>, Status> {
        let shared = self.0.clone();
        let decoder = shared.advance(Stage::Running, "Run", |stage| match stage {
            Stage::Joined(decoder) => Ok(decoder),
            other => Err(other),
        })?;
        let (feed, plans) = plan_stream();
        let (sink, outcomes) = outcome_stream(shared.vitals.clone());
        let (done, status) = oneshot::channel();
        let for_decoder = shared.clone();
        let work = move || {
            let result = guarded(for_decoder.rank, || decoder.run(plans, sink));
            // The status first: `end` lets the process exit as soon as the streams have.
            let _ = done.send(result.as_ref().copied().map_err(fault_status));
            for_decoder.end(result);
        };
        spawn("decoder", work)?;
        tokio::spawn(feed_plans(request.into_inner(), feed, shared));
        Ok(Response::new(outcome_events(outcomes, status)))
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Result<Response<v1::HealthResponse>, Status> {
        Ok(Response::new(v1::HealthResponse {
            state: self.0.stage().state().into(),
            version: self.0.vitals.version.load(Ordering::Relaxed),
            steps: self.0.vitals.steps.load(Ordering::Relaxed),
        }))
    }
}

/// Hands plans to the decoder as they come. It waits for room in the channel, and with it the stream's flow control.
async fn feed_plans(mut stream: Streaming<v1::Plan>, feed: PlanFeed, shared: Arc<Shared>) {
    let mut version = 0;
    let fault = loop {
        let message = tokio::select! {
            message = stream.message() => message,
            // Returning drops the request stream: an open one would keep the process from ending after a fault.
            () = feed.closed() => return,
        };
        let plan = match message {
            Ok(Some(plan)) => plan,
            Ok(None) => {
                let mut stage = shared.stage();
                if matches!(*stage, Stage::Running) {
                    *stage = Stage::Draining;
                }
                return;
            }
            Err(status) => break Fault::PlanStream(status.message().into()),
        };
        version += 1;
        let plan = match convert::plan(plan) {
            Ok(plan) if plan.version == version => plan,
            Ok(plan) => break PlanFault::Version { expected: version, got: plan.version }.into(),
            Err(fault) => break fault.into(),
        };
        if !feed.push(plan).await {
            return;
        }
    };
    feed.fail(fault).await;
}

/// Outcomes until the decoder drops its end, then the status that it ended with.
fn outcome_events(
    outcomes: mpsc::Receiver<Outcome>,
    status: oneshot::Receiver<Result<(), Status>>,
) -> Events<v1::Outcome> {
    Box::pin(unfold(Some((outcomes, status)), |state| async {
        let (mut outcomes, status) = state?;
        if let Some(outcome) = outcomes.recv().await {
            return Some((Ok(convert::outcome(outcome)), Some((outcomes, status))));
        }
        match status.await {
            Ok(Ok(())) => None,
            Ok(Err(status)) => Some((Err(status), None)),
            Err(_) => Some((Err(Status::internal("the decoder ended without a word")), None)),
        }
    }))
}

/// Runs backend code; a panic in it becomes a fault.
fn guarded<T>(rank: usize, work: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    // Unwind safety: what a panicking backend leaves half done is dropped, and the worker ends.
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Fault::Broken { rank, problem: panic_message(panic.as_ref()) }))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".into())
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Status> {
    // Not joined: each ends by itself and reports through a channel.
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).map_err(|error| Status::resource_exhausted(format!("no thread for {name}: {error}")))
}

fn load_status(error: &LoadError) -> Status {
    let message = error.to_string();
    match error {
        LoadError::TooLarge { .. } => Status::resource_exhausted(message),
        LoadError::System { .. } | LoadError::Cuda(CudaError::Call { .. }) => Status::internal(message),
        LoadError::Config(_)
        | LoadError::Checkpoint(_)
        | LoadError::Plan(_)
        | LoadError::Request(_)
        | LoadError::Cuda(_) => Status::invalid_argument(message),
    }
}

fn fault_status(fault: &Fault) -> Status {
    match fault {
        Fault::Load(error) => load_status(error),
        Fault::Plan(_) => Status::invalid_argument(fault.to_string()),
        Fault::WaitLimit { .. } | Fault::KernelWait { .. } | Fault::KernelTimeout { .. } => {
            Status::deadline_exceeded(fault.to_string())
        }
        _ => Status::internal(fault.to_string()),
    }
}

#[cfg(test)]
mod tests;
