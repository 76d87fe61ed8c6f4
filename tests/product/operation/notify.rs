//! What the product tells a service manager, which the test plays.

use std::{
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    path::Path,
    process::{Command, Stdio},
};

use rustix::process::Signal;
use serde_json::json;

use crate::common::{PATIENCE, Server, copy_of, fixture, signal};

/// The messages of a server, as they come.
struct Told(UnixDatagram);

impl Told {
    fn next(&self) -> String {
        let mut buffer = [0; 4096];
        let length = self.0.recv(&mut buffer).expect("the service is told something");
        str::from_utf8(&buffer[..length]).expect("UTF-8").to_owned()
    }

    /// All up to the first that is so, with it.
    fn until(&self, is_so: impl Fn(&str) -> bool) -> Vec<String> {
        let mut messages = Vec::new();
        while !messages.last().is_some_and(|last: &String| is_so(last)) {
            messages.push(self.next());
        }
        messages
    }
}

/// A server's command line as a manager starts it, and the manager's socket: `address` in the server's environment,
/// `bound` for the test.
fn managed(address: &str, bound: &SocketAddr, model: &Path) -> (Told, Command) {
    let socket = UnixDatagram::bind_addr(bound).expect("nobody has this address");
    socket.set_read_timeout(Some(PATIENCE)).expect("a limit");
    (Told(socket), command(address, model))
}

fn command(address: &str, model: &Path) -> Command {
    let mut command = Server::command(Path::new(env!("CARGO_BIN_EXE_looplane")));
    command.args(["--tp", "1", "--device", "cpu", "--model"]).arg(model).env("NOTIFY_SOCKET", address);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_is_ready_once_it_serves_and_says_how_it_is() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("notify");
    let address = SocketAddr::from_pathname(&path).expect("a short path");
    let (told, mut command) = managed(path.to_str().expect("UTF-8"), &address, &fixture("llama-tied"));
    let mut server = Server::spawn(command.env("WATCHDOG_USEC", "200000"));
    let start = told.until(|message| message.contains("READY=1"));
    let (ready, before) = start.split_last().expect("at least one");
    assert_eq!(ready, "READY=1\nSTATUS=ready");
    // It is no sooner told than true.
    assert_eq!(server.get("/health/ready").await.0, 200);
    let is_sign = |message: &&String| *message == "WATCHDOG=1";
    let phases: Vec<&String> = before.iter().filter(|message| !is_sign(message)).collect();
    assert!(!phases.is_empty(), "{start:?}");
    assert!(phases.iter().all(|phase| phase.starts_with("STATUS=loading the model (")), "{start:?}");

    // The watchdog is fed without requests, and through the loss of a worker, which shows.
    told.until(|message| message == "WATCHDOG=1");
    signal(server.workers()[0], Signal::KILL);
    let lost = told.until(|message| message == "READY=1\nSTATUS=ready");
    let mut states = lost[..lost.len() - 1].iter().filter(|message| !is_sign(message));
    assert!(states.all(|state| state.starts_with("STATUS=recovering (")), "{lost:?}");

    // Stopping is told while a request still runs to its end.
    let mut stream = server.stream("/v1/completions", &json!({"prompt": "on", "max_tokens": 100})).await;
    stream.next().await.expect("a first event");
    server.terminate();
    told.until(|message| message == "STOPPING=1");
    stream.text().await;
    assert_eq!(server.wait().await, Some(0));
}

/// A name that is no file, as managers in containers have it; a model that cannot be loaded is never ready.
#[test]
fn a_service_that_cannot_serve_says_why_and_is_never_ready() {
    let model = copy_of("llama-tied");
    std::fs::remove_file(model.path().join("model.safetensors")).expect("the fixture has one");
    let name = format!("looplane-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a short name");
    let (told, mut command) = managed(&format!("@{name}"), &address, model.path());
    let mut server = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary under test starts");
    let all = told.until(|message| message.starts_with("STATUS=the model cannot be served: "));
    assert!(all.iter().all(|message| message.starts_with("STATUS=")), "{all:?}");
    assert_eq!(server.wait().expect("it ends").code(), Some(1));
}

/// What cannot be told is not: the server serves all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_is_not_there_is_done_without() {
    let server = Server::spawn(command("/nowhere/notify", &fixture("llama-tied")).stderr(Stdio::null()));
    server.wait_ready().await;
}
