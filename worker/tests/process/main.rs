//! The worker as a process of its own: it serves a group over sockets, exits with the right code, and does not outlive
//! the process that started it.
//!
//! The processes are this test binary again, told by `ROLE` to play a part.

mod group;
mod memory;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use looplane_worker::{EXIT_FAULT, WorkerArgs};

use group::{FEW_PAGES, Rank, generate};

const ROLE: &str = "LOOPLANE_TEST_ROLE";
const SOCKET: &str = "LOOPLANE_TEST_SOCKET";
const RANK: &str = "LOOPLANE_TEST_RANK";
const PARENT: &str = "LOOPLANE_TEST_PARENT";
/// Far more than any of this takes on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);

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
    if role == "hoarder" {
        return memory::hoard(&socket);
    }
    if role == "server" {
        // Starts a worker, says its process id, and waits to be killed.
        let mut worker = command("worker", &socket, 0, std::process::id()).spawn().unwrap();
        println!("worker {}", worker.id());
        std::thread::sleep(TIMEOUT);
        worker.kill().unwrap();
        worker.wait().unwrap();
        return;
    }
    let args = WorkerArgs { socket, rank: var(RANK).parse().unwrap(), parent: Some(var(PARENT).parse().unwrap()) };
    let code = looplane_worker::run(&args);
    let known = [0, EXIT_FAULT].into_iter().find(|known| code == ExitCode::from(*known));
    std::process::exit(known.unwrap_or(1).into());
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[tokio::test]
async fn groups_of_processes_generate_the_same_tokens_and_exit_with_0() {
    let model = fixture("llama-gqa");
    let alone = generate(&model, 1, FEW_PAGES).await.tokens;
    assert_eq!(alone.len(), 8);
    assert_eq!(generate(&model, 2, FEW_PAGES).await.tokens, alone);
}

#[tokio::test]
async fn a_refused_model_exits_with_the_fault_code() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = Rank::start(dir.path(), 0).await;
    let status = worker.load(&fixture("no-such-model"), 0, 1, FEW_PAGES).await.unwrap_err();
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
        assert!(begun.elapsed() < TIMEOUT, "the worker does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(alive(&worker));
    server.kill().unwrap();
    server.wait().unwrap();
    let begun = Instant::now();
    while alive(&worker) {
        assert!(begun.elapsed() < TIMEOUT, "the worker lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A zombie that nobody has reaped yet is dead.
fn alive(process: &Path) -> bool {
    let status = std::fs::read_to_string(process.join("status"));
    status.is_ok_and(|status| !status.contains("State:\tZ") && !status.contains("State:\tX"))
}
