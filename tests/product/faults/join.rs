//! Hosts that join a front end, as processes with certificates: the same bytes, what is left of a host that dies or
//! stands still, and refusals on both ends.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    common::{Server, fixture, runs, signal, until},
    scrape::Scrape,
};

const BINARY: &str = env!("CARGO_BIN_EXE_looplane");

/// Files of both ends, and the port where hosts join.
struct Site {
    dir: TempDir,
    port: u16,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let site = Self { dir, port: listener.local_addr().expect("bound").port() };
        for end in ["front", "host", "stranger"] {
            let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a name is all it takes");
            site.write(&format!("{end}.pem"), &made.cert.pem());
            site.write(&format!("{end}.key"), &made.signing_key.serialize_pem());
        }
        site.write("token", "what-both-know");
        site.write("wrong", "what-one-knows");
        site
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).expect("a writable directory");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("the log is UTF-8")
    }

    /// A front end with one place, that says where it listens.
    fn front(&self, replicas: &str) -> Server {
        let mut command = Server::command(Path::new(BINARY));
        command.arg("--model").arg(fixture("llama-tied")).args(["--tp", "1", "--replicas", replicas]);
        command.args(["--join-listen", &format!("127.0.0.1:{}", self.port)]);
        command.arg("--join-cert").arg(self.path("front.pem")).arg("--join-key").arg(self.path("front.key"));
        command.arg("--join-client-ca").arg(self.path("host.pem")).arg("--join-token-file").arg(self.path("token"));
        Server::spawn(command.stderr(fs::File::create(self.path("front.log")).expect("a writable directory")))
    }

    /// A host with this certificate, token and model, whose log is `NAME.log`.
    fn host(&self, name: &str, certificate: &str, token: &str, model: &str) -> Host {
        self.host_with(name, certificate, token, model, &[])
    }

    fn host_with(&self, name: &str, certificate: &str, token: &str, model: &str, more: &[&str]) -> Host {
        let mut command = Command::new(BINARY);
        command.args(["worker", "--threads", "1", "--join", &format!("https://localhost:{}", self.port)]);
        command.arg("--model").arg(fixture(model)).args(["--tp", "2"]).env("LOOPLANE_CPU_PIN", "0");
        command.arg("--join-cert").arg(self.path(&format!("{certificate}.pem")));
        command.arg("--join-key").arg(self.path(&format!("{certificate}.key")));
        command.arg("--join-ca").arg(self.path("front.pem")).arg("--join-token-file").arg(self.path(token));
        command.args(more).stdout(fs::File::create(self.path("host.out")).expect("a writable directory"));
        command.stderr(fs::File::create(self.path(&format!("{name}.log"))).expect("a writable directory"));
        Host(command.spawn().expect("the binary under test starts"))
    }

    fn usual_host(&self) -> Host {
        self.host("host", "host", "token", "llama-tied")
    }
}

/// A running `looplane worker`; killed when dropped.
struct Host(Child);

impl Host {
    async fn end(&mut self) -> ExitStatus {
        let mut status = None;
        until("the host ended", async || {
            status = self.0.try_wait().expect("the child is ours");
            status.is_some()
        })
        .await;
        status.expect("it has ended")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // An error here means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The value of a series of a replica.
async fn of(server: &Server, replica: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let (_, text) = server.get("/metrics").await;
    Scrape::parse(text.as_str().expect("no JSON")).value(name, &[labels, &[("engine", replica)]].concat())
}

async fn is_ready(server: &Server, replica: &str) -> bool {
    of(server, replica, "engine_state", &[("state", "ready")]).await == 1.0
}

fn long(seed: u32) -> Value {
    json!({"prompt": "on and on", "max_tokens": 600, "ignore_eos": true, "temperature": 1.0, "seed": seed})
}

/// Texts of four streams, to the end of which `meanwhile` is done once all have begun.
async fn texts_while(server: &Server, meanwhile: impl AsyncFnOnce()) -> Vec<(String, String)> {
    let mut streams = Vec::new();
    for seed in 0..4 {
        let mut stream = server.stream("/v1/completions", &long(seed)).await;
        let first = stream.next().await.expect("a first event");
        streams.push((first["choices"][0]["text"].as_str().unwrap_or_default().to_owned(), stream));
    }
    meanwhile().await;
    let mut ended = Vec::new();
    for (first, mut stream) in streams {
        let (rest, reason) = stream.text().await;
        ended.push((first + &rest, reason));
    }
    ended
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_killed_or_stopped_under_streams_loses_no_byte_and_comes_back() {
    let site = Site::new();
    let server = site.front("1");
    server.wait_ready().await;
    let calm = texts_while(&server, async || {}).await;
    let mut host = site.usual_host();
    for round in 0..2 {
        until("the host has joined", async || is_ready(&server, "1").await).await;
        let before = of(&server, "1", "prompt_tokens_total", &[]).await;
        let disturbed = texts_while(&server, async || {
            assert!(of(&server, "1", "prompt_tokens_total", &[]).await > before, "it computes some of them");
            let began = Instant::now();
            match round {
                0 => host.0.kill().expect("it runs"),
                _ => signal(host.0.id(), Signal::STOP),
            }
            until("the host is lost", async || !is_ready(&server, "1").await).await;
            // A broken connection is seen at once; one that is silent, within five beats of a second, and the next.
            let limit = Duration::from_secs(if round == 0 { 3 } else { 9 });
            assert!(began.elapsed() < limit, "round {round}: {:?}", began.elapsed());
        });
        assert_eq!(disturbed.await, calm, "round {round}");
        assert_eq!(of(&server, "1", "worker_losses_total", &[]).await, f64::from(round + 1));
        match round {
            0 => host = site.usual_host(),
            _ => signal(host.0.id(), Signal::CONT),
        }
    }
    until("the host has joined again by itself", async || is_ready(&server, "1").await).await;
    assert_eq!(texts_while(&server, async || {}).await, calm);
    signal(host.0.id(), Signal::TERM);
    assert_eq!(host.end().await.code(), Some(0));
    until("it has left", async || !is_ready(&server, "1").await).await;
    assert!(site.log("host.log").contains("the stream to the front end"), "{}", site.log("host.log"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_end_without_workers_answers_as_one_that_has_them() {
    let site = Site::new();
    // It tries until the front end is there, which says where it listens once it can be used.
    let host = site.usual_host();
    let server = site.front("0");
    server.wait_ready().await;
    assert!(server.workers().is_empty());
    let model = fixture("llama-tied");
    let other = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "1"]).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let sampled = json!({"prompt": ["one", "two"], "n": 2, "max_tokens": 40, "temperature": 1.0, "seed": 5});
    let mut bodies = vec![sampled.clone()];
    for more in [
        json!({"logprobs": 3, "echo": true}),
        json!({"logit_bias": {"40": 5.0}, "frequency_penalty": 0.5, "min_tokens": 20}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}),
    ] {
        let mut body = sampled.clone();
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        bodies.push(body);
    }
    for body in bodies {
        let (here, there) = (server.ok("/v1/completions", &body).await, other.ok("/v1/completions", &body).await);
        assert_eq!(here["choices"], there["choices"], "{body}");
        assert_eq!(here["usage"]["completion_tokens"], there["usage"]["completion_tokens"]);
        assert_eq!(here["system_fingerprint"], there["system_fingerprint"]);
    }
    drop(host);
    until("nothing computes", async || server.get("/health/ready").await.0 == 503).await;
    let (status, error) = server.post("/v1/completions", &sampled).await;
    assert_eq!(status, 503, "{error}");
    assert!(error.to_string().contains("waiting for a host to join"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_tells_its_own_metrics_to_whom_it_lets_in() {
    let site = Site::new();
    let address = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound");
    let more = ["--metrics-listen", &address.to_string(), "--api-key", "a-key"];
    let mut host = site.host_with("host", "host", "token", "llama-tied", &more);
    let server = site.front("0");
    let client = Client::builder(TokioExecutor::new()).build_http();
    let ask = async |path: &str, key: Option<&str>| {
        let request = Request::get(format!("http://{address}{path}"));
        let request = key.into_iter().fold(request, |request, key| request.header("x-api-key", key));
        let request = request.body(Empty::<Bytes>::new()).expect("path and key are valid");
        let (head, body) = client.request(request).await.ok()?.into_parts();
        let bytes = body.collect().await.expect("the body arrives whole").to_bytes();
        Some((head.status.as_u16(), String::from_utf8(bytes.into()).expect("a text")))
    };
    server.wait_ready().await;
    let (status, health) = ask("/health/ready", None).await.expect("it listens");
    assert_eq!(status, 200, "{health}");
    server.ok("/v1/completions", &json!({"prompt": "one", "max_tokens": 20, "ignore_eos": true})).await;
    let (_, text) = ask("/metrics", Some("a-key")).await.expect("it listens");
    let scrape = Scrape::parse(&text);
    assert_eq!(scrape.value("engine_state", &[("state", "ready"), ("engine", "0")]), 1.0);
    // What the front end cannot know of it.
    assert!(scrape.value("rank_read_bytes_total", &[("engine", "0"), ("rank", "1")]) > 0.0, "{text}");
    assert!(of(&server, "0", "generation_tokens_total", &[]).await == 20.0);
    for (path, key, expected) in
        [("/metrics", None, 401), ("/metrics", Some("no-key"), 401), ("/v1/models", Some("a-key"), 404)]
    {
        let (status, text) = ask(path, key).await.expect("it listens");
        assert_eq!(status, expected, "{path}: {text}");
    }
    signal(host.0.id(), Signal::TERM);
    assert_eq!(host.end().await.code(), Some(0));
    assert!(ask("/health/live", None).await.is_none(), "nobody listens any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_business_here_is_refused_on_both_ends() {
    let site = Site::new();
    let mut early = site.usual_host();
    until("it says that it tries again", async || site.log("host.log").matches("trying again").count() > 1).await;
    assert!(site.log("host.log").contains("cannot reach the front end at localhost"), "{}", site.log("host.log"));
    signal(early.0.id(), Signal::TERM);
    assert_eq!(early.end().await.code(), Some(0));

    let server = site.front("1");
    server.wait_ready().await;
    for (name, token, model, says) in [
        ("token", "wrong", "llama-tied", "the token is wrong"),
        ("model", "token", "llama-gqa", "the model digest differs"),
    ] {
        let mut host = site.host(name, "host", token, model);
        assert_eq!(host.end().await.code(), Some(1));
        for log in [site.log(&format!("{name}.log")), site.log("front.log")] {
            assert!(log.contains(says) && !log.contains("what-both-know"), "{log}");
        }
    }
    let stranger = site.host("stranger", "stranger", "token", "llama-tied");
    until("it is told", async || site.log("stranger.log").matches("trying again").count() > 1).await;
    let (log, front) = (site.log("stranger.log"), site.log("front.log"));
    assert!(log.contains("its --join-client-ca has to have signed this --join-cert"), "{log}");
    assert!(front.contains("its TLS handshake failed"), "{front}");
    let pid = stranger.0.id();
    drop(stranger);
    until("it is gone", async || !runs(pid)).await;
    assert!(!is_ready(&server, "1").await);
}
