//! Starts the real binary and speaks HTTP to it, as a client would.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, body::Incoming};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// What takes longer than this does not happen at all: a bound for a machine that is busy with other tests, no
/// expectation.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks for something that is waited for.
pub const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// A checkpoint of the worker's fixtures.
pub fn fixture(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("worker/tests/fixtures").join(name);
    assert!(path.is_dir(), "{} is not there", path.display());
    path
}

/// A copy of a checkpoint that a test may damage.
pub fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    for entry in fs::read_dir(fixture(name)).expect("the fixture is there").flatten() {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("the fixture can be copied");
    }
    dir
}

/// Changes what a file of JSON says.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).expect("the file is there")).expect("it is JSON");
    edit(&mut value);
    fs::write(path, value.to_string()).expect("the copy can be written");
}

/// A number from the environment: `just gpu` storms longer, on the groups that its GPUs can be.
pub fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |number| number.parse().unwrap_or_else(|e| panic!("{name}={number}: {e}")))
}

/// Random numbers that a seed repeats.
pub struct Rng(pub u64);

impl Rng {
    /// Those of one of many things that a seed decides.
    pub fn of(seed: u64, number: u64) -> Self {
        Self(mix(seed ^ mix(number)))
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % bound
    }
}

/// A step of splitmix64.
pub fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Draws an API key with `looplane key`; the key, and its line.
pub fn draw_key(args: &[&str]) -> (String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_looplane")).arg("key").args(args).output().expect("the binary runs");
    assert!(output.status.success());
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8").trim().to_owned();
    (text(output.stderr), text(output.stdout))
}

/// A running `looplane serve`; killed when dropped.
pub struct Server {
    child: Child,
    base: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Server {
    /// Starts `looplane serve` on a free port with a thread a worker and these further arguments, and waits until it is
    /// ready.
    pub async fn start(args: &[&str]) -> Self {
        Self::start_binary(Path::new(env!("CARGO_BIN_EXE_looplane")), args).await
    }

    /// As [`Server::start`], with a binary of the test's own.
    pub async fn start_binary(binary: &Path, args: &[&str]) -> Self {
        let server = Self::spawn(Self::command(binary).args(args));
        server.wait_ready().await;
        server
    }

    /// What starts a server, to be completed.
    pub fn command(binary: &Path) -> Command {
        let mut command = Command::new(binary);
        // Other tests have servers of their own: with a thread each, on any core, they get out of each other's way.
        command.args(["serve", "--port", "0", "--threads", "1"]).env("LOOPLANE_CPU_PIN", "0");
        command
    }

    /// Starts a server and waits until it says where it listens.
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the binary under test starts");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let (found, base) = mpsc::channel();
        std::thread::spawn(move || {
            // Reads to the end, so that the server never blocks on a full pipe.
            for line in stdout.lines().map_while(Result::ok) {
                let url = line.split_whitespace().find(|word| word.starts_with("http"));
                if let Some(url) = url {
                    let _ = found.send(url.trim_end_matches(['/', ',', '.']).to_owned());
                }
            }
        });
        let base = base.recv_timeout(PATIENCE).expect("the server says where it listens");
        Self { base, child, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Waits until `/health/ready` answers 200.
    pub async fn wait_ready(&self) {
        until("the server is ready", async || self.get("/health/ready").await.0 == 200).await;
    }

    /// Its address, `http://HOST:PORT` or `https://`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Process ids of the workers, in rank order (they are started in that order).
    pub fn workers(&self) -> Vec<u32> {
        let children = format!("/proc/{0}/task", self.pid());
        let mut pids: Vec<u32> = fs::read_dir(children)
            .expect("the server runs")
            .flatten()
            .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
            .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>())
            .collect();
        pids.sort_unstable();
        pids
    }

    /// Sends SIGKILL to the server itself and waits for its end.
    pub fn kill(&mut self) {
        self.child.kill().expect("the server runs");
        self.child.wait().expect("a killed process ends");
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        signal(self.pid(), rustix::process::Signal::TERM);
    }

    /// Waits for the server's end; its exit code.
    pub async fn wait(&mut self) -> Option<i32> {
        let mut status = None;
        until("the server ended", async || {
            status = self.child.try_wait().expect("the child is ours");
            status.is_some()
        })
        .await;
        status.and_then(|status| status.code())
    }

    /// Whether it has not ended yet.
    pub fn still_runs(&mut self) -> bool {
        self.child.try_wait().expect("the child is ours").is_none()
    }

    /// GET; status and body, JSON where it is JSON.
    pub async fn get(&self, path: &str) -> (u16, Value) {
        self.request(Method::GET, path, Bytes::new()).await
    }

    /// POST of a JSON body; status and body.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.request(Method::POST, path, body.to_string().into()).await
    }

    /// POST that must succeed.
    pub async fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// POST of bytes as they are; status and body.
    pub async fn request(&self, method: Method, path: &str, body: Bytes) -> (u16, Value) {
        let response = self.send(method, path, body).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.expect("the body arrives whole").to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::String(text)))
    }

    /// POST with `"stream": true`; the events, to be read one by one.
    pub async fn stream(&self, path: &str, body: &Value) -> EventStream {
        let mut body = body.clone();
        body["stream"] = Value::Bool(true);
        let response = self.send(Method::POST, path, body.to_string().into()).await;
        assert_eq!(response.status(), 200);
        EventStream { body: response.into_body(), buffer: Vec::new() }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> hyper::Response<Incoming> {
        self.call(method, path, &[("content-type", "application/json")], body).await
    }

    /// A request with these headers.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> hyper::Response<Incoming> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let request = request.body(Full::new(body.into())).expect("method, path and headers are valid");
        self.client.request(request).await.expect("the server answers")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error here means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Server-sent events of one response. Dropping it closes the connection.
pub struct EventStream {
    body: Incoming,
    buffer: Vec<u8>,
}

impl EventStream {
    /// The next `data:` payload; `None` after `[DONE]` or the end.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event).expect("events are UTF-8");
                match event.trim().strip_prefix("data: ") {
                    Some("[DONE]") => return None,
                    Some(data) => return Some(serde_json::from_str(data).expect("events are JSON")),
                    None => continue, // a comment: keep-alive
                }
            }
            let frame = self.body.frame().await?.expect("the stream does not break off");
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }

    /// Text of all remaining events of choice 0, chat or completion, and the finish reason.
    pub async fn text(&mut self) -> (String, String) {
        let (mut text, mut reason) = (String::new(), String::new());
        while let Some(event) = self.next().await {
            let Some(choice) = event["choices"].get(0) else { continue };
            text.push_str(choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default());
            if let Some(finish) = choice["finish_reason"].as_str() {
                reason = finish.to_owned();
            }
        }
        (text, reason)
    }
}

/// Looks again and again until `is_so`; fails with `what` if it never is.
pub async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < PATIENCE, "not in {PATIENCE:?}: {what}");
        tokio::time::sleep(LOOK_PERIOD).await;
    }
}

/// Sends a signal to a process of the test.
pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a pid is a positive i32");
    rustix::process::kill_process(pid, signal).expect("the process is ours and runs");
}

/// Whether a process runs (a zombie does not).
pub fn runs(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        let state = stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
        state.is_some_and(|state| state != 'Z')
    })
}
