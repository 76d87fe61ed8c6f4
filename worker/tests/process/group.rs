//! A group of workers, each a process, and their client.

use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use looplane_proto::worker::v1::load_event::Event;
use looplane_proto::worker::v1::worker_client::WorkerClient;
use looplane_proto::worker::v1::{
    Admit, JoinRequest, LoadRequest, Loaded, Outcome, PageGrant, Plan, PrefillChunk, Sampling,
};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{TIMEOUT, command};

/// A worker and a client of it.
pub struct Rank {
    pub process: Child,
    pub client: WorkerClient<Channel>,
}

impl Rank {
    pub async fn start(dir: &Path, rank: usize) -> Self {
        let socket = dir.join(format!("{rank}.sock"));
        let process = command("worker", &socket, rank, std::process::id()).spawn().unwrap();
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        let begun = Instant::now();
        loop {
            match endpoint.connect().await {
                Ok(channel) => return Self { process, client: WorkerClient::new(channel) },
                Err(error) => assert!(begun.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn load(&mut self, model_dir: &Path, rank: usize, ranks: usize, kv_pages: u32) -> Result<Loaded, Status> {
        let request = LoadRequest {
            model_dir: model_dir.display().to_string(),
            rank: rank as u32,
            tensor_parallel: ranks as u32,
            threads: 1,
            max_slots: 2,
            max_batch_tokens: 64,
            kv_pages,
            wait_limit_ms: TIMEOUT.as_millis() as u32,
            ..Default::default()
        };
        let mut events = self.client.load(request).await?.into_inner();
        while let Some(event) = events.message().await? {
            if let Some(Event::Loaded(loaded)) = event.event {
                return Ok(loaded);
            }
        }
        Err(Status::internal("no result"))
    }

    pub async fn exit(mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < TIMEOUT, "the worker does not exit");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// What a group generated, and what it took.
pub struct Generated {
    pub tokens: Vec<u32>,
    pub loaded: Vec<Loaded>,
    /// Peak of each rank's resident memory, in bytes.
    pub peaks: Vec<u64>,
}

/// KV pages of a rank that wants few.
pub const FEW_PAGES: u32 = 4;

/// Loads a group, each rank with `kv_pages`, and generates 8 greedy tokens for a prompt, which take one page.
pub async fn generate(model_dir: &Path, ranks: usize, kv_pages: u32) -> Generated {
    let dir = tempfile::tempdir().unwrap();
    let (mut group, mut loaded) = (Vec::new(), Vec::new());
    for rank in 0..ranks {
        let mut worker = Rank::start(dir.path(), rank).await;
        loaded.push(worker.load(model_dir, rank, ranks, kv_pages).await.unwrap());
        group.push(worker);
    }
    let handles: Vec<_> = loaded.iter().map(|loaded| loaded.fabric_handle.clone()).collect();
    let joins = group.iter_mut().map(|rank| rank.client.join(JoinRequest { fabric_handles: handles.clone() }));
    for joined in futures::future::join_all(joins).await {
        joined.unwrap();
    }
    let runs = group.iter_mut().map(|rank| async {
        let mut stream = rank.client.run(tokio_stream::iter(plans())).await.unwrap().into_inner();
        let (mut outcomes, mut peak): (Vec<Outcome>, _) = (Vec::new(), 0);
        while let Some(outcome) = stream.message().await.unwrap() {
            outcomes.push(outcome);
            // It may be on its way out after the last outcome, and then has no memory.
            peak = peak.max(peak_bytes(&rank.process.id().to_string()).unwrap_or(0));
        }
        (outcomes, peak)
    });
    let (outcomes, peaks): (Vec<_>, Vec<_>) = futures::future::join_all(runs).await.into_iter().unzip();
    for rank in group {
        assert_eq!(rank.exit().await.code(), Some(0), "a drained worker exits with 0");
    }
    assert!(outcomes[1..].iter().flatten().all(|o| o.tokens.is_empty()), "only rank 0 reports tokens");
    let tokens = outcomes[0].iter().flat_map(|o| &o.tokens).map(|t| t.token).collect();
    Generated { tokens, loaded, peaks }
}

/// The largest resident memory that a process (`self` or its id) has had, mapped files and shared memory included.
pub fn peak_bytes(process: &str) -> Option<u64> {
    let status = std::fs::read_to_string(Path::new("/proc").join(process).join("status")).ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix(" kB")?;
    kib.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A prompt in two chunks, then decode over two plans.
fn plans() -> Vec<Plan> {
    let sampling = Sampling { top_p: 1.0, repetition_penalty: 1.0, ..Default::default() };
    let tokens: Vec<u32> = vec![0, 308, 364, 270, 12, 323];
    let admit =
        Admit { sequence: 1, tokens, prompt_tokens: 6, max_tokens: 8, sampling: Some(sampling), ..Default::default() };
    let chunk = |start, len| vec![PrefillChunk { slot: 1, start, len }];
    vec![
        Plan {
            version: 1,
            steps: 1,
            admit: vec![Admit { slot: 1, ..admit }],
            grants: vec![PageGrant { slot: 1, first: 0, pages: vec![2] }],
            prefill: chunk(0, 4),
            ..Default::default()
        },
        Plan { version: 2, steps: 3, prefill: chunk(4, 2), decode: vec![1], ..Default::default() },
        Plan { version: 3, steps: 100, decode: vec![1], ..Default::default() },
    ]
}
