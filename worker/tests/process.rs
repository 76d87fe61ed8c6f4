//! The worker as a process of its own: it serves a group over sockets, exits with the right code, and does not outlive
//! the process that started it.
//!
//! The processes are this test binary again, told by `ROLE` to play a part.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use looplane_proto::worker::v1::load_event::Event;
use looplane_proto::worker::v1::worker_client::WorkerClient;
use looplane_proto::worker::v1::{
    Admit, JoinRequest, LoadRequest, Loaded, Outcome, PageGrant, Plan, PrefillChunk, Sampling,
};
use looplane_worker::{EXIT_FAULT, WorkerArgs};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

const ROLE: &str = "LOOPLANE_TEST_ROLE";
const SOCKET: &str = "LOOPLANE_TEST_SOCKET";
const RANK: &str = "LOOPLANE_TEST_RANK";
const PARENT: &str = "LOOPLANE_TEST_PARENT";
/// Far more than any of this takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn command(role: &str, socket: &Path, rank: usize, parent: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_part_in_another_test", "--nocapture"]);
    command.env(ROLE, role).env(SOCKET, socket).env(RANK, rank.to_string()).env(PARENT, parent.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

#[test]
fn a_part_in_another_test() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let var = |name| std::env::var(name).unwrap();
    let socket = PathBuf::from(var(SOCKET));
    if role == "server" {
        // Starts a worker, says its process id, and waits to be killed.
        let mut worker = command("worker", &socket, 0, std::process::id()).spawn().unwrap();
        println!("worker {}", worker.id());
        std::thread::sleep(PATIENCE);
        worker.kill().unwrap();
        worker.wait().unwrap();
        return;
    }
    let args = WorkerArgs { socket, rank: var(RANK).parse().unwrap(), parent: Some(var(PARENT).parse().unwrap()) };
    let code = looplane_worker::run(&args);
    let known = [0, EXIT_FAULT].into_iter().find(|known| code == ExitCode::from(*known));
    std::process::exit(known.unwrap_or(1).into());
}

struct Rank {
    process: Child,
    client: WorkerClient<Channel>,
}

impl Rank {
    async fn start(dir: &Path, rank: usize) -> Self {
        let socket = dir.join(format!("{rank}.sock"));
        let process = command("worker", &socket, rank, std::process::id()).spawn().unwrap();
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        let begun = Instant::now();
        loop {
            match endpoint.connect().await {
                Ok(channel) => return Self { process, client: WorkerClient::new(channel) },
                Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn load(&mut self, model: &str, rank: usize, ranks: usize) -> Result<Loaded, Status> {
        let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
        let request = LoadRequest {
            model_dir: model_dir.display().to_string(),
            rank: rank as u32,
            tensor_parallel: ranks as u32,
            threads: 1,
            max_slots: 2,
            max_batch_tokens: 64,
            kv_pages: 4,
            wait_limit_ms: PATIENCE.as_millis() as u32,
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

    async fn exit(mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "the worker does not exit");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Loads a group and generates 8 greedy tokens for a prompt.
async fn generate(model: &str, ranks: usize) -> Vec<u32> {
    let dir = tempfile::tempdir().unwrap();
    let mut group = Vec::new();
    let mut handles = Vec::new();
    for rank in 0..ranks {
        let mut worker = Rank::start(dir.path(), rank).await;
        handles.push(worker.load(model, rank, ranks).await.unwrap().fabric_handle);
        group.push(worker);
    }
    let joins = group.iter_mut().map(|rank| rank.client.join(JoinRequest { fabric_handles: handles.clone() }));
    for joined in futures::future::join_all(joins).await {
        joined.unwrap();
    }
    let runs = group.iter_mut().map(|rank| async {
        let mut stream = rank.client.run(tokio_stream::iter(plans())).await.unwrap().into_inner();
        let mut outcomes: Vec<Outcome> = Vec::new();
        while let Some(outcome) = stream.message().await.unwrap() {
            outcomes.push(outcome);
        }
        outcomes
    });
    let outcomes = futures::future::join_all(runs).await;
    for rank in group {
        assert_eq!(rank.exit().await.code(), Some(0), "a drained worker exits with 0");
    }
    assert!(outcomes[1..].iter().flatten().all(|o| o.tokens.is_empty()), "only rank 0 reports tokens");
    outcomes[0].iter().flat_map(|o| &o.tokens).map(|t| t.token).collect()
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
            grants: vec![PageGrant { slot: 1, pages: vec![2] }],
            prefill: chunk(0, 4),
            ..Default::default()
        },
        Plan { version: 2, steps: 3, prefill: chunk(4, 2), decode: vec![1], ..Default::default() },
        Plan { version: 3, steps: 100, decode: vec![1], ..Default::default() },
    ]
}

#[tokio::test]
async fn groups_of_processes_generate_the_same_tokens_and_exit_with_0() {
    let alone = generate("llama-gqa", 1).await;
    assert_eq!(alone.len(), 8);
    assert_eq!(generate("llama-gqa", 2).await, alone);
}

#[tokio::test]
async fn a_refused_model_exits_with_the_fault_code() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Rank::start(dir.path(), 0).await;
    let status = worker.load("no-such-model", 0, 1).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert!(status.message().contains("no-such-model/config.json: cannot be read"), "{status}");
    assert_eq!(worker.exit().await.code(), Some(EXIT_FAULT.into()));
}

#[test]
fn a_socket_that_exists_is_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("taken");
    std::fs::write(&socket, "").unwrap();
    let status = command("worker", &socket, 0, std::process::id()).status().unwrap();
    assert_eq!(status.code(), Some(EXIT_FAULT.into()));
}

#[test]
fn a_worker_whose_server_is_gone_already_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let not_the_parent = std::process::id() + 1;
    let status = command("worker", &dir.path().join("s"), 0, not_the_parent).status().unwrap();
    assert_eq!(status.code(), Some(EXIT_FAULT.into()));
}

#[test]
fn a_worker_dies_with_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut server = command("server", &socket, 0, std::process::id()).spawn().unwrap();
    let lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let mut pids = lines.filter_map(|line| line.unwrap().rsplit_once("worker ").map(|(_, pid)| pid.to_owned()));
    let worker = Path::new("/proc").join(pids.next().expect("the server says the worker's process id"));
    let begun = Instant::now();
    while !socket.exists() {
        assert!(begun.elapsed() < PATIENCE, "the worker does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(alive(&worker));
    server.kill().unwrap();
    server.wait().unwrap();
    let begun = Instant::now();
    while alive(&worker) {
        assert!(begun.elapsed() < PATIENCE, "the worker lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A zombie that nobody has reaped yet is dead.
fn alive(process: &Path) -> bool {
    let status = std::fs::read_to_string(process.join("status"));
    status.is_ok_and(|status| !status.contains("State:\tZ") && !status.contains("State:\tX"))
}
