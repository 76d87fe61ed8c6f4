//! The binary as a user runs it: real workers, real checkpoints, real signals.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

#[allow(dead_code)]
#[path = "front_end/client.rs"]
mod client;

use client::{get, open, post, read, read_until};

/// Longest wait for anything that must happen; generous, for machines that are busy.
const SOON: Duration = Duration::from_secs(120);
const COMPLETION: &str = "/v1/completions";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures").join(name)
}

/// A running `looplane serve`, killed when dropped.
struct Looplane {
    child: Child,
    address: SocketAddr,
    /// What it said on standard output until it was ready.
    said: Vec<String>,
}

impl Looplane {
    fn start(model: &str, more: &[&str]) -> Self {
        let mut child = command(&fixture(model), more).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut said = Vec::new();
        while !said.last().is_some_and(|line: &String| line.starts_with("Try ")) {
            said.push(lines.next().expect("it says how to try it before it ends").unwrap());
        }
        let listening = said.iter().find(|line| line.starts_with("Listening")).expect("it says where it listens");
        let address = listening.split("http://").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        Self { child, address: address.parse().unwrap(), said }
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).unwrap();
    }

    fn workers(&self) -> Vec<u32> {
        children_of(self.child.id())
    }

    fn wait(&mut self) -> ExitStatus {
        wait(&mut self.child)
    }
}

impl Drop for Looplane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(model: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_looplane"));
    command.arg("serve").arg("--model").arg(model).args(["--port", "0"]).args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).env("LOOPLANE_LOG", "warn");
    command
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number as i32).expect("a process id is not 0")
}

fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status,
            None => assert!(start.elapsed() < SOON, "the process does not end"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn children_of(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_child = |id: &u32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name in parentheses may hold anything; after it come the state and the parent.
        let mut fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
        fields.next() != Some("Z") && fields.next() == Some(parent.to_string().as_str())
    };
    processes.filter(is_child).collect()
}

fn wait_until_gone(ids: &[u32]) {
    let start = Instant::now();
    let alive = |id: &u32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        !matches!(stat.rsplit(')').next().unwrap_or("").trim_start().chars().next(), None | Some('Z'))
    };
    while ids.iter().any(alive) {
        assert!(start.elapsed() < SOON, "workers {ids:?} still run");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs `looplane serve` to its end: its exit code and standard error.
fn run(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let mut text = String::new();
    stderr.read_to_string(&mut text).unwrap();
    (wait(&mut child).code(), text)
}

fn greedy(prompt: &Value, tokens: usize, stream: bool) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": stream})
}

/// The text of a stream's events, which must end well.
fn streamed_text(body: &str) -> String {
    assert!(body.ends_with("data: [DONE]\n\n"), "{}", &body[body.len().saturating_sub(300)..]);
    let events = body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")?.parse::<Value>().ok());
    events.filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_says_what_it_serves_answers_and_drains() {
    let mut server = Looplane::start("llama-gqa", &["--tp", "2"]);
    let said = server.said.join("\n");
    for what in ["llama-gqa", "LlamaForCausalLM", "tensor parallelism 2", "curl http://127.0.0.1:"] {
        assert!(said.contains(what), "{said}");
    }
    assert_eq!(get(server.address, "/health/ready").await.status, 200);
    let workers = server.workers();
    assert_eq!(workers.len(), 2);

    // Greedy tokens are those that Hugging Face transformers computes, as far as the margin decides them.
    let expected: Value = serde_json::from_slice(&fs::read(fixture("llama-gqa/expected.json")).unwrap()).unwrap();
    let recorded = &expected["prompts"][0];
    let margins = recorded["margin"].as_array().unwrap();
    let sure = margins.iter().take_while(|margin| margin.as_f64().unwrap() > 0.02).count();
    let request = json!({"prompt": recorded["ids"], "max_tokens": margins.len(), "temperature": 0, "ignore_eos": true,
        "logprobs": 0});
    let response = post(server.address, COMPLETION, request).await.json();
    let tokenizer = looplane_server::text::Text::load(&fixture("llama-gqa")).unwrap().tokenizer;
    let got = response["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    assert_eq!(got.len(), margins.len());
    for step in 0..sure {
        let id = recorded["greedy"][step].as_u64().unwrap() as u32;
        if let Ok(text) = str::from_utf8(tokenizer.token_bytes(id)) {
            assert_eq!(got[step], text, "step {step} of {sure} sure ones");
        }
    }

    // A stream that runs when the signal comes ends well, with what it would have been.
    let whole = post(server.address, COMPLETION, greedy(&json!([5, 6]), 600, false)).await.json();
    let mut stream = open(server.address, COMPLETION, &greedy(&json!([5, 6]), 600, true).to_string()).await;
    let start = read_until(&mut stream, "data: ").await;
    server.signal(Signal::TERM);
    let rest = read_until(&mut stream, "[DONE]").await;
    let text: String = (start + &rest)
        .lines()
        .filter_map(|line| line.strip_prefix("data: ")?.parse::<Value>().ok())
        .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    assert_eq!(server.wait().code(), Some(0));
    wait_until_gone(&workers);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_costs_no_token() {
    let server = Looplane::start("llama-tied", &["--tp", "2"]);
    let whole = post(server.address, COMPLETION, greedy(&json!([5, 6]), 800, false)).await.json();
    let mut stream = open(server.address, COMPLETION, &greedy(&json!([5, 6]), 800, true).to_string()).await;
    let mut body = read_until(&mut stream, "data: ").await;
    let before = server.workers();
    kill_process(pid(before[1]), Signal::KILL).unwrap();
    body.push_str(&read_until(&mut stream, "[DONE]").await);
    let events = body.lines().filter_map(|line| line.strip_prefix("data: ")?.parse::<Value>().ok());
    let text: String = events.filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    let after = server.workers();
    assert!(after.len() == 2 && after.iter().all(|id| !before.contains(id)), "{before:?} {after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_at_once_and_leaves_nothing_behind() {
    let mut server = Looplane::start("llama-tied", &["--tp", "2", "--drain-seconds", "600"]);
    let workers = server.workers();
    let request = json!({"prompt": [5], "max_tokens": 2000, "ignore_eos": true, "n": 16, "stream": true});
    let mut stream = open(server.address, COMPLETION, &request.to_string()).await;
    read_until(&mut stream, "data: ").await;
    server.signal(Signal::INT);
    server.signal(Signal::TERM);
    server.wait();
    wait_until_gone(&workers);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_leaves_no_workers() {
    let mut server = Looplane::start("llama-tied", &["--tp", "2"]);
    let workers = server.workers();
    server.signal(Signal::KILL);
    assert_eq!(server.wait().code(), None);
    wait_until_gone(&workers);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_get_what_they_would_get_alone() {
    let server = Looplane::start("llama-gqa", &["--tp", "2", "--max-slots", "4"]);
    let address = server.address;
    let request = |seed: u64| json!({"prompt": [5, 6, seed + 7], "max_tokens": 40, "seed": seed, "stream": true});
    let mut alone = Vec::new();
    for seed in 0..12 {
        alone.push(streamed_text(&post(address, COMPLETION, request(seed)).await.body));
    }
    let clients: Vec<_> = (0..12)
        .map(|seed| {
            let body = request(seed).to_string();
            tokio::spawn(async move { read(open(address, COMPLETION, &body).await).await.body })
        })
        .collect();
    for (seed, client) in clients.into_iter().enumerate() {
        assert_eq!(streamed_text(&client.await.unwrap()), alone[seed], "seed {seed}");
    }
}

#[test]
fn what_cannot_be_served_ends_with_one_sentence_and_a_code() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, said) = run(command(&fixture("llama-gqa"), &["--port", &port]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&port) && said.contains("--port") && said.trim().lines().count() == 1, "{said}");

    let (code, said) = run(command(&fixture("llama-gqa"), &["--tp", "3"]));
    assert_eq!((code, said.trim()), (Some(2), "looplane: --tp is 3, but must be 1, 2, 4, 8 or 16"));

    let broken = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture("llama-tied")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), broken.path().join(file.file_name())).unwrap();
    }
    fs::write(broken.path().join("model.safetensors"), b"\xff\xff\xff\xff\xff\xff\xff\x7f{}").unwrap();
    let (code, said) = run(command(broken.path(), &[]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.trim().lines().last().unwrap().contains("model.safetensors"), "{said}");

    fs::remove_file(broken.path().join("tokenizer.json")).unwrap();
    let (code, said) = run(command(broken.path(), &[]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("tokenizer.json") && said.trim().lines().count() == 1, "{said}");
}
