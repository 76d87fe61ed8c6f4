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

use super::config::{GroupConfig, Timeouts};
use super::fault::{GRACE, StartError};
use super::sockets::remove_socket_dir;
use super::step_times::StepTime;
use super::timing::{self, time_steps};
use super::workers::Workers;
use crate::engine::ModelInfo;
use crate::sched::GroupShape;

/// Pause between two looks for a worker's socket.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);
/// Outcomes of all ranks on their way to the supervisor. When it is full the ranks' streams wait, and nothing is lost.
const EVENTS_BOUND: usize = 256;

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
    pub(super) shape: GroupShape,
    /// By rank.
    pub(super) traffic: Vec<Traffic>,
}

/// What a rank reads, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Traffic {
    /// Weights that stream in a pass.
    pub(super) stream_bytes: u64,
    /// Those of them of the LM head, which only steps that sample read.
    pub(super) head_bytes: u64,
    /// KV cache.
    pub(super) kv_bytes: u64,
    /// K and V of a position.
    pub(super) position_bytes: u64,
    /// At most, in a second; 0: not measured.
    pub(super) limit: u64,
}

impl Traffic {
    fn of(rank: &Loaded) -> Self {
        let Loaded { stream_bytes, head_bytes, kv_bytes, kv_pages, page_positions, read_limit: limit, .. } = *rank;
        let position_bytes = kv_bytes / (u64::from(kv_pages) * u64::from(page_positions));
        Self { stream_bytes, head_bytes, kv_bytes, position_bytes, limit }
    }

    /// By a step that reads K and V of so many positions, and samples or does not.
    pub(super) fn of_step(&self, positions: u64, samples: bool) -> u64 {
        let weights = self.stream_bytes.saturating_sub(if samples { 0 } else { self.head_bytes });
        weights.saturating_add(positions.saturating_mul(self.position_bytes))
    }
}

/// The streams of a group that runs.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) facts: GroupFacts,
    /// What steps took.
    pub(super) timed: Vec<StepTime>,
    /// To each rank. Dropping them all lets the workers drain.
    pub(super) plans: Vec<mpsc::Sender<Plan>>,
    /// From all ranks; ends when all streams have ended.
    pub(super) events: mpsc::Receiver<RankEvent>,
    /// To ask each rank how it is.
    pub(super) health: Vec<WorkerClient<Channel>>,
    pub(super) _readers: JoinSet<()>,
}

/// Brings `workers` to the point where they take plans, and times steps for `timing`; `progress` is told what is being
/// done.
pub(super) async fn start(
    config: &GroupConfig,
    timing: Duration,
    workers: &mut Workers,
    progress: impl Fn(String),
) -> Result<Link, StartError> {
    let sockets = workers.sockets.clone();
    let mut bring_up = std::pin::pin!(bring_up(config, timing, &sockets, &progress));
    let exit = tokio::select! {
        biased;
        started = &mut bring_up => match started {
            // A broken connection says less than the worker's exit, which is about to be known.
            Err(error) if !error.is_final => {
                let exit = match error.ending {
                    Some(rank) => workers.end_beside(rank, GRACE).await,
                    None => timeout(GRACE, workers.next_exit()).await.ok(),
                };
                exit.ok_or(error)?
            }
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
    timing: Duration,
    sockets: &[std::path::PathBuf],
    progress: &impl Fn(String),
) -> Result<Link, StartError> {
    let started = Instant::now();
    progress("starting the workers".into());
    let clients = sockets.iter().enumerate().map(|(rank, socket)| connect(rank, socket, &config.timeouts));
    let mut clients = try_join_all(clients).await?;
    remove_socket_dir(sockets);
    // A group that comes back is waited for, and shares the machine with others that compute.
    let measure = !timing.is_zero();
    let loads = clients.iter_mut().enumerate().map(|(rank, client)| load(rank, client, config, measure, progress));
    let loaded = try_join_all(loads).await?;
    let facts = agree(&loaded)?;
    progress("joining the ranks".into());
    let fabric_handles: Vec<String> = loaded.iter().map(|loaded| loaded.fabric_handle.clone()).collect();
    let joins = clients.iter_mut().enumerate().map(|(rank, client)| {
        let request = JoinRequest { fabric_handles: fabric_handles.clone() };
        let limit = config.timeouts.start;
        async move {
            let joined = timeout(limit, client.join(request)).await;
            let joined = joined.map_err(|_| StartError::fault(format!("rank {rank} did not join within {limit:?}")))?;
            joined.map_err(|status| StartError::status(rank, "joining", &status))
        }
    });
    try_join_all(joins).await?;
    log_loaded(config, &loaded, &facts, started.elapsed());
    let mut link = run(clients, facts, config.limits.plans_ahead);
    if !timing.is_zero() {
        progress("timing steps".into());
        link.timed = time_steps(&mut link, timing, config.timeouts.step).await?;
        tracing::info!("{}", timing::in_words(&link.timed));
    }
    Ok(link)
}

async fn connect(rank: usize, socket: &Path, timeouts: &Timeouts) -> Result<WorkerClient<Channel>, StartError> {
    let limit = timeouts.start;
    let address = format!("unix://{}", socket.display());
    let endpoint = Endpoint::from_shared(address).map_err(|error| {
        StartError::refusal(format!("the socket path {} cannot be used: {error}", socket.display()))
    })?;
    // A process that is stopped, or whose machine hangs, keeps its sockets open: only its answers tell.
    let endpoint =
        endpoint.http2_keep_alive_interval(timeouts.ping).keep_alive_timeout(timeouts.pong).keep_alive_while_idle(true);
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
    measure_read_limit: bool,
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
        wait_limit_ms: u32::try_from(config.timeouts.step.as_millis()).unwrap_or(u32::MAX),
        max_context: config.max_context,
        device: config.device.into(),
        unlooped: config.unlooped,
        draft_corpus_tokens: config.draft_corpus_tokens,
        vocabulary: config.vocabulary.as_deref().cloned(),
        quantization: config.quantization.into(),
        socket: config.replica * config.tensor_parallel + rank as u32,
        sockets: config.replicas * config.tensor_parallel,
        measure_read_limit,
    };
    let limit = config.timeouts.load;
    let timed_out = |_| StartError::fault(format!("rank {rank} said nothing for {limit:?} while loading"));
    // Before the load has begun, what is exhausted is the machine (no thread to load with); later, the model does not
    // fit.
    let refused = |status: Status| StartError::load(rank, &status, |code| code == Code::InvalidArgument);
    let failed = |status: Status| {
        StartError::load(rank, &status, |code| matches!(code, Code::InvalidArgument | Code::ResourceExhausted))
    };
    let mut events = timeout(limit, client.load(request)).await.map_err(timed_out)?.map_err(refused)?.into_inner();
    while let Some(event) = timeout(limit, events.message()).await.map_err(timed_out)?.map_err(failed)? {
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
        if other.model_digest != first.model_digest {
            let words = format!("rank {rank} has read another model than rank 0: its files were changed meanwhile");
            // Read again, they may be whole.
            return Err(StartError::fault(words));
        }
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
        if other.max_slots == 0 || other.max_batch_tokens < other.max_slots {
            let Loaded { max_slots, max_batch_tokens, .. } = other;
            let words = format!("rank {rank} offers {max_slots} slots and {max_batch_tokens} rows a step");
            return Err(StartError::refusal(words));
        }
    }
    let least = |of: fn(&Loaded) -> u32| loaded.iter().map(of).min().unwrap_or(0);
    let [kv_pages, max_slots] = [least(|rank| rank.kv_pages), least(|rank| rank.max_slots)];
    let max_batch_tokens = least(|rank| rank.max_batch_tokens);
    let page_positions = first.page_positions;
    // A longer sequence could never be admitted.
    let max_context = first.max_context.min(kv_pages.saturating_mul(page_positions));
    if max_context < first.max_context {
        tracing::warn!(
            "the KV cache holds {max_context} tokens, which bounds prompt and output of a request; the model could take \
             {} (--kv-pages, --kv-memory-mib)",
            first.max_context
        );
    }
    Ok(GroupFacts {
        model: ModelInfo {
            architecture: first.architecture.clone(),
            vocab_size: first.vocab_size,
            max_context,
            tensor_parallel: loaded.len() as u32,
            bit_domain: first.bit_domain.clone(),
            model_digest: first.model_digest.clone(),
        },
        shape: GroupShape { kv_pages, page_positions, max_slots, max_batch_tokens, first_version: 1 },
        traffic: loaded.iter().map(Traffic::of).collect(),
    })
}

fn log_loaded(config: &GroupConfig, loaded: &[Loaded], facts: &GroupFacts, took: Duration) {
    let most_mb = |bytes: fn(&Loaded) -> u64| loaded.iter().map(bytes).max().unwrap_or(0) as f64 / 1e6;
    let GroupFacts { model, shape, .. } = facts;
    let GroupShape { kv_pages, page_positions, max_slots, max_batch_tokens, .. } = shape;
    tracing::info!(
        "loaded {} in {:.1} s: {}, {} layers, context {}; tensor parallelism {}, threads a rank: {}; at most {:.1} MB \
         of weights and {:.1} MB of KV cache a rank ({kv_pages} pages of {page_positions} tokens); {max_slots} slots, \
         steps of at most {max_batch_tokens} rows; bits {}",
        config.model_dir.display(),
        took.as_secs_f64(),
        model.architecture,
        loaded[0].num_layers,
        model.max_context,
        model.tensor_parallel,
        config.threads,
        most_mb(|rank| rank.weight_bytes),
        most_mb(|rank| rank.kv_bytes),
        model.bit_domain,
    );
    if loaded.iter().all(|rank| rank.read_limit > 0) {
        let gb_s = |rank: &Loaded| format!("{:.1}", rank.read_limit as f64 / 1e9);
        tracing::info!(
            "GB/s that memory is read at, by rank: {}",
            loaded.iter().map(gb_s).collect::<Vec<_>>().join(", ")
        );
    }
    let notes: Vec<&[String]> = loaded.iter().map(|rank| rank.notes.as_slice()).collect();
    note_lines(&notes).iter().for_each(|line| tracing::info!("{line}"));
}

/// Each note once, with the ranks that it comes from. Ranks read the same files: what one notices, most do.
fn note_lines(notes: &[&[String]]) -> Vec<String> {
    let mut by_note: Vec<(&String, Vec<String>)> = Vec::new();
    for (rank, notes) in notes.iter().enumerate() {
        for note in *notes {
            match by_note.iter_mut().find(|(known, _)| *known == note) {
                Some((_, ranks)) => ranks.push(rank.to_string()),
                None => by_note.push((note, vec![rank.to_string()])),
            }
        }
    }
    let line = |(note, ranks): (&String, Vec<String>)| match ranks.len() {
        1 => format!("rank {}: {note}", ranks[0]),
        count if count == notes.len() => format!("all ranks: {note}"),
        _ => format!("ranks {}: {note}", ranks.join(", ")),
    };
    by_note.into_iter().map(line).collect()
}

/// Opens the streams of all ranks. A rank that does not answer is found by the watchdog.
fn run(clients: Vec<WorkerClient<Channel>>, facts: GroupFacts, plans_ahead: u32) -> Link {
    let (sender, events) = mpsc::channel(EVENTS_BOUND);
    let mut readers = JoinSet::new();
    let mut plans = Vec::new();
    let health = clients.clone();
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
            // Fails only if the supervisor has let go of the group.
            let _ = sender.send(RankEvent::Ended { rank, words }).await;
        });
    }
    Link { facts, timed: Vec::new(), plans, events, health, _readers: readers }
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
            // What the connection says where pings are not answered, but also where it breaks in the middle of a message.
            Err(status) if status.message().starts_with("h2 protocol error") => {
                return "does not answer pings, or broke its connection (if its machine stands still for seconds: raise \
                        --hang-limit-seconds)"
                    .into();
            }
            Err(status) => return format!("broke its outcomes off: {}", status.message()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_say_whose_they_are() {
        let notes = [["rounded", "core 0"].map(String::from), ["rounded", "core 1"].map(String::from)];
        let lines = note_lines(&[&notes[0], &notes[1]]);
        assert_eq!(lines, ["all ranks: rounded", "rank 0: core 0", "rank 1: core 1"]);
        let lines = note_lines(&[&notes[0], &notes[0], &notes[1][1..]]);
        assert_eq!(lines, ["ranks 0, 1: rounded", "ranks 0, 1: core 0", "rank 2: core 1"]);
    }

    #[test]
    fn only_what_says_something_of_the_model_is_final() {
        let full = Status::resource_exhausted("no thread for join");
        assert!(!StartError::status(0, "joining", &full).is_final);
        assert!(!StartError::load(0, &full, |code| code == Code::InvalidArgument).is_final);
        let wrong = Status::invalid_argument("config.json: hidden_size is -1");
        let error = StartError::load(3, &wrong, |code| code == Code::InvalidArgument);
        assert_eq!((error.is_final, error.reason.as_str()), (true, "rank 3: config.json: hidden_size is -1"));
    }
}
