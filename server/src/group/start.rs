//! Brings a group from started processes to the first plan: connect, Load, agree, Join, Run.

use std::path::Path;
use std::time::Duration;

use futures::future::try_join_all;
use looplane_proto::worker::v1::load_event::Event;
use looplane_proto::worker::v1::worker_client::WorkerClient;
use looplane_proto::worker::v1::{JoinRequest, LoadProgress, LoadRequest, Loaded, Outcome, Plan};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::GroupConfig;
use super::launch::{Workers, remove_socket_dir};
use crate::engine::ModelInfo;

/// Pause between two looks for a worker's socket.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);
/// A worker's answer and its exit come by different ways; how long the one is waited for after the other.
pub(super) const GRACE: Duration = Duration::from_secs(1);
/// Outcomes of all ranks on their way to the driver. When it is full the ranks' streams wait, and nothing is lost.
const EVENTS_BOUND: usize = 256;

/// Why a group did not start.
#[derive(Debug)]
pub(super) struct StartError {
    /// Starting again would end the same way.
    pub(super) is_final: bool,
    pub(super) reason: String,
}

impl StartError {
    fn fault(reason: String) -> Self {
        Self { is_final: false, reason }
    }

    fn refusal(reason: String) -> Self {
        Self { is_final: true, reason }
    }

    fn status(rank: usize, doing: &str, status: &Status) -> Self {
        match status.code() {
            Code::InvalidArgument | Code::ResourceExhausted => {
                Self::refusal(format!("rank {rank}: {}", status.message()))
            }
            code => Self::fault(format!("rank {rank} failed while {doing}: {code:?}: {}", status.message())),
        }
    }
}

/// What a rank said.
#[derive(Debug)]
pub(super) enum RankEvent {
    /// A step was run.
    Outcome { rank: usize, outcome: Outcome },
    /// Its stream of outcomes is over, as the words say.
    Ended { rank: usize, words: String },
}

/// What the ranks agree on.
#[derive(Debug, Clone)]
pub(super) struct GroupFacts {
    pub(super) model: ModelInfo,
    /// The least of all ranks.
    pub(super) kv_pages: u32,
    pub(super) page_positions: u32,
}

/// The streams of a group that runs.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) facts: GroupFacts,
    /// To each rank. Dropping them all lets the workers drain.
    pub(super) plans: Vec<mpsc::Sender<Plan>>,
    /// From all ranks; ends when all streams have ended.
    pub(super) events: mpsc::Receiver<RankEvent>,
    _readers: JoinSet<()>,
}

/// Brings `workers` to the point where they take plans; `progress` hears what is being done.
pub(super) async fn start(
    config: &GroupConfig,
    workers: &mut Workers,
    progress: impl Fn(String),
) -> Result<Link, StartError> {
    let sockets = workers.sockets.clone();
    let mut bring_up = std::pin::pin!(bring_up(config, &sockets, &progress));
    let exit = tokio::select! {
        biased;
        started = &mut bring_up => match started {
            // A broken connection says less than the worker's exit, which is about to be known.
            Err(error) if !error.is_final => match timeout(GRACE, workers.next_exit()).await {
                Ok(exit) => exit,
                Err(_) => return Err(error),
            },
            started => return started,
        },
        exit = workers.next_exit() => match timeout(GRACE, &mut bring_up).await {
            // The worker gave its reason before it exited.
            Ok(Err(error)) if error.is_final => return Err(error),
            _ => exit,
        },
    };
    Err(StartError::fault(format!("{exit}, before the group was up")))
}

async fn bring_up(
    config: &GroupConfig,
    sockets: &[std::path::PathBuf],
    progress: &impl Fn(String),
) -> Result<Link, StartError> {
    let started = Instant::now();
    progress("starting the workers".into());
    let clients = sockets.iter().enumerate().map(|(rank, socket)| connect(rank, socket, config.waits.start));
    let mut clients = try_join_all(clients).await?;
    remove_socket_dir(sockets);
    let loads = clients.iter_mut().enumerate().map(|(rank, client)| load(rank, client, config, progress));
    let loaded = try_join_all(loads).await?;
    let facts = agree(&loaded)?;
    progress("joining the ranks".into());
    let fabric_handles: Vec<String> = loaded.iter().map(|loaded| loaded.fabric_handle.clone()).collect();
    let joins = clients.iter_mut().enumerate().map(|(rank, client)| {
        let request = JoinRequest { fabric_handles: fabric_handles.clone() };
        let limit = config.waits.start;
        async move {
            let joined = timeout(limit, client.join(request)).await;
            let joined = joined.map_err(|_| StartError::fault(format!("rank {rank} did not join within {limit:?}")))?;
            joined.map_err(|status| StartError::status(rank, "joining", &status))
        }
    });
    try_join_all(joins).await?;
    log_loaded(config, &loaded, &facts, started.elapsed());
    Ok(run(clients, facts, config.limits.plans_ahead))
}

async fn connect(rank: usize, socket: &Path, limit: Duration) -> Result<WorkerClient<Channel>, StartError> {
    let address = format!("unix://{}", socket.display());
    let endpoint = Endpoint::from_shared(address).map_err(|error| {
        StartError::refusal(format!("the socket path {} cannot be used: {error}", socket.display()))
    })?;
    let connected = timeout(limit, async {
        loop {
            if let Ok(channel) = endpoint.connect().await {
                return channel;
            }
            sleep(CONNECT_PAUSE).await;
        }
    });
    let channel = connected.await;
    let channel = channel.map_err(|_| StartError::fault(format!("rank {rank} opened no socket within {limit:?}")))?;
    Ok(WorkerClient::new(channel))
}

async fn load(
    rank: usize,
    client: &mut WorkerClient<Channel>,
    config: &GroupConfig,
    progress: &impl Fn(String),
) -> Result<Loaded, StartError> {
    let limits = &config.limits;
    let request = LoadRequest {
        model_dir: config.model_dir.to_string_lossy().into_owned(),
        rank: rank as u32,
        tensor_parallel: config.tensor_parallel,
        threads: config.threads,
        max_slots: limits.max_slots,
        max_batch_tokens: limits.max_batch_tokens,
        kv_pages: config.kv_pages,
        kv_bytes_limit: config.kv_bytes_limit,
        wait_limit_ms: u32::try_from(config.waits.peer.as_millis()).unwrap_or(u32::MAX),
        max_context: config.max_context,
    };
    let limit = config.waits.load;
    let silent = |_| StartError::fault(format!("rank {rank} said nothing for {limit:?} while loading"));
    let failed = |status: Status| StartError::status(rank, "loading", &status);
    let mut events = timeout(limit, client.load(request)).await.map_err(silent)?.map_err(failed)?.into_inner();
    while let Some(event) = timeout(limit, events.message()).await.map_err(silent)?.map_err(failed)? {
        match event.event {
            Some(Event::Progress(done)) => progress(format!("rank {rank}: {}", progress_words(&done))),
            Some(Event::Loaded(loaded)) => return Ok(loaded),
            None => return Err(StartError::fault(format!("rank {rank} sent an empty load event"))),
        }
    }
    Err(StartError::fault(format!("rank {rank} ended its load without a result")))
}

fn progress_words(progress: &LoadProgress) -> String {
    match (progress.bytes_done * 100).checked_div(progress.bytes_total) {
        Some(percent) => format!("{} {percent} %", progress.phase),
        None => progress.phase.clone(),
    }
}

/// What all ranks have to say alike. A difference would not go away with another start.
fn agree(loaded: &[Loaded]) -> Result<GroupFacts, StartError> {
    let first = &loaded[0];
    for (rank, other) in loaded.iter().enumerate() {
        let pairs = [
            ("architecture", first.architecture.clone(), other.architecture.clone()),
            ("vocab_size", first.vocab_size.to_string(), other.vocab_size.to_string()),
            ("max_context", first.max_context.to_string(), other.max_context.to_string()),
            ("num_layers", first.num_layers.to_string(), other.num_layers.to_string()),
            ("hidden_size", first.hidden_size.to_string(), other.hidden_size.to_string()),
            ("page_positions", first.page_positions.to_string(), other.page_positions.to_string()),
            ("bit_domain", first.bit_domain.clone(), other.bit_domain.clone()),
        ];
        if let Some((name, ours, theirs)) = pairs.iter().find(|(_, ours, theirs)| ours != theirs) {
            let words = format!("the ranks disagree on {name}: rank 0 says {ours}, rank {rank} says {theirs}");
            return Err(StartError::refusal(words));
        }
        if other.kv_pages == 0 || other.page_positions == 0 {
            return Err(StartError::refusal(format!("rank {rank} has no KV pages: raise the bytes of its KV cache")));
        }
    }
    Ok(GroupFacts {
        model: ModelInfo {
            architecture: first.architecture.clone(),
            vocab_size: first.vocab_size,
            max_context: first.max_context,
            tensor_parallel: loaded.len() as u32,
            bit_domain: first.bit_domain.clone(),
        },
        kv_pages: loaded.iter().map(|rank| rank.kv_pages).min().unwrap_or(0),
        page_positions: first.page_positions,
    })
}

fn log_loaded(config: &GroupConfig, loaded: &[Loaded], facts: &GroupFacts, took: Duration) {
    let most = |bytes: fn(&Loaded) -> u64| loaded.iter().map(bytes).max().unwrap_or(0) as f64 / 1e6;
    tracing::info!(
        model = %config.model_dir.display(),
        architecture = facts.model.architecture,
        layers = loaded[0].num_layers,
        context = facts.model.max_context,
        tensor_parallel = facts.model.tensor_parallel,
        threads = config.threads,
        weights_mb_a_rank = most(|rank| rank.weight_bytes),
        kv_mb_a_rank = most(|rank| rank.kv_bytes),
        kv_pages = facts.kv_pages,
        page_positions = facts.page_positions,
        bit_domain = facts.model.bit_domain,
        seconds = took.as_secs_f64(),
        "loaded"
    );
    // Ranks read the same files: what one notices, most do.
    let mut notes: Vec<&String> = loaded.iter().flat_map(|rank| &rank.notes).collect();
    notes.sort();
    notes.dedup();
    notes.iter().for_each(|note| tracing::info!("{note}"));
}

/// Opens the streams of all ranks. A rank that does not answer shows in the driver's limit on silence.
fn run(clients: Vec<WorkerClient<Channel>>, facts: GroupFacts, plans_ahead: u32) -> Link {
    let (sender, events) = mpsc::channel(EVENTS_BOUND);
    let mut readers = JoinSet::new();
    let mut plans = Vec::new();
    for (rank, mut client) in clients.into_iter().enumerate() {
        // The scheduler sends no more than this ahead of what rank 0 reports; one more for a rank that reports later.
        let (plan_sender, plan_receiver) = mpsc::channel(plans_ahead as usize + 2);
        plans.push(plan_sender);
        let sender = sender.clone();
        readers.spawn(async move {
            let words = match client.run(ReceiverStream::new(plan_receiver)).await {
                Ok(response) => forward_outcomes(rank, response.into_inner(), &sender).await,
                Err(status) => format!("refused to run: {}", status.message()),
            };
            // Fails only if the driver has let go of the group.
            let _ = sender.send(RankEvent::Ended { rank, words }).await;
        });
    }
    Link { facts, plans, events, _readers: readers }
}

async fn forward_outcomes(
    rank: usize,
    mut outcomes: tonic::Streaming<Outcome>,
    sender: &mpsc::Sender<RankEvent>,
) -> String {
    loop {
        match outcomes.message().await {
            Ok(Some(outcome)) => {
                if sender.send(RankEvent::Outcome { rank, outcome }).await.is_err() {
                    return "is not listened to any more".into();
                }
            }
            Ok(None) => return "ended its outcomes".into(),
            Err(status) => return format!("broke its outcomes off: {}", status.message()),
        }
    }
}
