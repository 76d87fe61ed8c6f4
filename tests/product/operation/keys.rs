//! API keys and pages of other origins, against real processes.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use futures::future::join_all;
use http_body_util::BodyExt;
use hyper::{HeaderMap, Method, Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use looplane_server::http::routes;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::{
    common::{Server, draw_key, fixture, signal, until},
    scrape::Scrape,
};

const KEY: &str = "sk-of-the-test";
const BEARER: (&str, &str) = ("authorization", "Bearer sk-of-the-test");
const HEALTH: [&str; 4] = ["/health/live", "/health/ready", "/health", "/ping"];

fn command(args: &[&str]) -> Command {
    let mut command = Server::command(Path::new(env!("CARGO_BIN_EXE_looplane")));
    command.arg("--model").arg(fixture("llama-tied")).args(["--tp", "1"]).args(args);
    command
}

async fn start(args: &[&str]) -> Server {
    let server = Server::spawn(&mut command(args));
    server.wait_ready().await;
    server
}

/// Status, headers and body.
async fn whole(response: Response<Incoming>) -> (u16, HeaderMap, Value) {
    let (head, body) = response.into_parts();
    let bytes = body.collect().await.expect("the body arrives whole").to_bytes();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (head.status.as_u16(), head.headers, serde_json::from_slice(&bytes).unwrap_or(Value::String(text)))
}

async fn status(server: &Server, path: &str, headers: &[(&str, &str)]) -> u16 {
    server.call(Method::GET, path, headers, "").await.status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_but_health_asks_for_a_key() {
    let server = start(&["--api-key", KEY]).await;
    let paths = routes().into_iter().map(|(path, _)| path.replace("{*id}", "some/model"));
    let paths: Vec<String> = paths.chain(["/nowhere".into(), "/health/else".into(), "//health".into()]).collect();
    assert!(paths.len() > 20);
    for path in &paths {
        let is_open = HEALTH.contains(&path.as_str());
        for method in [Method::GET, Method::POST, Method::OPTIONS, Method::PUT] {
            for wrong in
                [&[][..], &[("authorization", "Bearer wrong")], &[("authorization", KEY)], &[("x-api-key", "")]]
            {
                let (status, headers, body) = whole(server.call(method.clone(), path, wrong, "{}").await).await;
                assert_eq!(status == 401, !is_open, "{method} {path} {wrong:?}: {status}");
                assert_eq!(headers["x-content-type-options"], "nosniff", "{method} {path}");
                assert!(headers.contains_key("x-request-id") && !headers.contains_key("access-control-allow-origin"));
                if status == 401 {
                    assert_eq!(headers["www-authenticate"], "Bearer");
                    if method != Method::PUT {
                        assert_eq!(body["error"]["code"], "invalid_api_key", "{path}: {body}");
                    }
                }
            }
        }
        for right in [BEARER, ("authorization", "bearer  sk-of-the-test"), ("x-api-key", KEY)] {
            assert_ne!(status(&server, path, &[right]).await, 401, "{path} {right:?}");
        }
    }
    let (_, _, text) = whole(server.call(Method::GET, "/", &[BEARER], "").await).await;
    assert!(text.as_str().is_some_and(|text| text.contains("-H \"authorization: Bearer $OPENAI_API_KEY\"")), "{text}");
    // The page that asks for the key.
    let (status, headers, page) = whole(server.call(Method::GET, "/", &[("accept", "text/html")], "").await).await;
    assert_eq!((status, page.as_str().map(|page| page.contains("API key"))), (200, Some(true)));
    assert!(headers["content-security-policy"].to_str().unwrap().contains("frame-ancestors 'none'"));
    assert_eq!(headers["referrer-policy"], "no-referrer");
    assert_eq!(headers["x-frame-options"], "DENY");
    // gRPC, where the status is among the headers.
    for (path, is_open) in [
        ("/looplane.inference.v1.Inference/Generate", false),
        ("/looplane.inference.v1.Inference/GetModel", false),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", false),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", false),
        ("/some.Service/Method", false),
        ("/grpc.health.v1.Health/Nothing", true),
    ] {
        let headers = [("content-type", "application/grpc"), ("te", "trailers")];
        let (status, headers, _) = whole(server.call(Method::POST, path, &headers, "").await).await;
        assert_eq!((status, headers["grpc-status"] == "16"), (200, !is_open), "{path}");
    }
    // What a key lets in is served.
    let body = json!({"prompt": "a", "max_tokens": 2}).to_string();
    let headers = [("content-type", "application/json"), ("x-api-key", KEY)];
    let (status, _, answer) = whole(server.call(Method::POST, "/v1/completions", &headers, body).await).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_come_and_go_while_the_server_runs() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (path, log) = (dir.path().join("keys"), dir.path().join("log"));
    let write = |lines: &[&str]| {
        let newer = dir.path().join("newer");
        fs::write(&newer, lines.join("\n")).expect("the directory can be written");
        fs::rename(&newer, &path).expect("one directory");
    };
    let said = |words: &str| fs::read_to_string(&log).expect("the log is there").contains(words);
    let (alice, alices_line) = draw_key(&["alice"]);
    let (bob, bobs_line) = draw_key(&["bob", "--concurrent", "2", "--tokens-per-minute", "10000"]);
    assert!(bobs_line.ends_with(" concurrent=2 tokens_per_minute=10000"), "{bobs_line}");
    write(&[&alices_line]);
    let file = path.to_str().expect("UTF-8");
    let mut command = command(&["--api-key-file", file, "--metrics-without-key"]);
    let mut server = Server::spawn(command.stderr(fs::File::create(&log).expect("the directory can be written")));
    server.wait_ready().await;
    let lets_in = async |key: &str| status(&server, "/v1/models", &[("x-api-key", key)]).await == 200;
    assert!(lets_in(&alice).await && !lets_in(&bob).await);
    assert_eq!(status(&server, "/metrics", &[]).await, 200);

    write(&[&alices_line, &bobs_line]);
    until("bob is let in", async || lets_in(&bob).await).await;
    write(&["no line of a key"]);
    until("the wrong file is told", async || said("line 1: after the id")).await;
    assert!(said("what was read before still holds"));
    assert!(lets_in(&alice).await && lets_in(&bob).await);
    write(&[&bobs_line]);
    until("alice is kept out", async || !lets_in(&alice).await).await;
    assert!(lets_in(&bob).await);
    let before = fs::read_to_string(&log).expect("the log is there").matches("read anew").count();
    signal(server.pid(), Signal::HUP);
    let read = async || fs::read_to_string(&log).expect("the log is there").matches("read anew").count();
    until("it is read at SIGHUP", async || read().await > before).await;
    assert!(lets_in(&bob).await);
    assert!(server.still_runs());
}

/// With everything that can be logged; the model's own lines are those of its workers.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_has_the_id_of_a_key_and_neither_keys_nor_prompts() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (keys, log) = (dir.path().join("keys"), dir.path().join("log"));
    let (key, line) = draw_key(&["alice"]);
    fs::write(&keys, line).expect("the directory can be written");
    let mut command = command(&["--host", "0.0.0.0", "--api-key-file", keys.to_str().expect("UTF-8")]);
    command.env("LOOPLANE_API_KEY", KEY).env("LOOPLANE_LOG", "trace");
    let mut server = Server::spawn(command.stderr(fs::File::create(&log).expect("the directory can be written")));
    server.wait_ready().await;
    let prompt = "Xylophones play quietly";
    for (path, body) in [
        ("/v1/completions", json!({"prompt": prompt, "max_tokens": 2})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 2})),
        ("/v1/completions", json!({"prompt": prompt, "max_tokens": "two"})),
        ("/tokenize", json!({"prompt": prompt})),
    ] {
        for (name, key) in [("x-api-key", &*key), BEARER, ("authorization", "Bearer sk-nobodys")] {
            let headers = [("content-type", "application/json"), (name, key), ("x-request-id", "named-by-its-client")];
            server.call(Method::POST, path, &headers, body.to_string()).await;
        }
    }
    let address = server.base().strip_prefix("http://").expect("no TLS").to_owned();
    let stream = TcpStream::connect(&address).await.expect("it listens");
    let (mut requests, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("a connection");
    tokio::spawn(connection);
    for key in [&*key, "sk-nobodys"] {
        let request = Request::post(format!("http://{address}/v1/completions"));
        let request =
            request.header("content-type", "application/json").header("authorization", format!("Bearer {key}"));
        let body = json!({"prompt": prompt, "max_tokens": 2}).to_string();
        let request = request.header("x-request-id", "named-by-its-client").body(body).expect("a request");
        whole(requests.send_request(request).await.expect("an answer")).await;
    }
    drop(requests);
    server.terminate();
    assert_eq!(server.wait().await, Some(0));
    let log = fs::read_to_string(&log).expect("the log is UTF-8");
    for secret in [&*key, KEY, "sk-nobodys", prompt, "Xylophones"] {
        let line = log.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "{secret}: {line:?}");
    }
    let ends: Vec<&str> = log.lines().filter(|line| line.contains("request ended")).collect();
    let of = |key: &str| ends.iter().filter(|line| line.contains(&format!("key=\"{key}\""))).count();
    assert_eq!((ends.len(), of("alice"), of("api-key")), (9, 5, 4), "{ends:?}");
    assert!(ends.iter().all(|line| line.contains("request_id=\"named-by-its-client\"")), "{ends:?}");
    assert!(!log.contains("whoever can reach"), "there are keys");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_serves_everybody_is_told_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let log = dir.path().join("log");
    let stderr = Stdio::from(fs::File::create(&log).expect("the directory can be written"));
    let server = Server::spawn(command(&["--host", "0.0.0.0"]).stderr(stderr));
    server.wait_ready().await;
    let log = fs::read_to_string(&log).expect("the log is UTF-8");
    assert_eq!(log.matches("whoever can reach 0.0.0.0:").count(), 1, "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_the_origins_that_are_named_may_ask() {
    let page = "https://chat.example";
    let server = start(&["--api-key", KEY, "--cors-allow-origin", page]).await;
    let allowed = |headers: &HeaderMap| headers.get("access-control-allow-origin").map(|origin| origin == page);
    for (origin, is_allowed) in [(page, Some(true)), ("https://evil.example", None)] {
        // A browser asks without the key whether it may send it.
        let asks = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let preflight = server.call(Method::OPTIONS, "/v1/chat/completions", &asks, "").await;
        assert_eq!((preflight.status().as_u16(), allowed(preflight.headers())), (200, is_allowed));
        let headers = preflight.headers().get("access-control-allow-headers");
        assert_eq!(headers.and_then(|headers| headers.to_str().ok()), Some("authorization,content-type"));
        let (status, headers, _) =
            whole(server.call(Method::GET, "/v1/models", &[("origin", origin), BEARER], "").await).await;
        assert_eq!((status, allowed(&headers)), (200, is_allowed));
        let exposed = headers["access-control-expose-headers"].to_str().expect("ASCII");
        assert!(
            ["x-request-id", "x-looplane-seed", "retry-after"].iter().all(|name| exposed.contains(name)),
            "{exposed}"
        );
        // A refusal can be read as well.
        let refused = server.call(Method::GET, "/v1/models", &[("origin", origin)], "").await;
        assert_eq!((refused.status().as_u16(), allowed(refused.headers())), (401, is_allowed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_floods_the_server_does_not_delay_another_and_changes_none_of_its_bits() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("keys");
    let (flood, floods_line) = draw_key(&["flood"]);
    let (polite, polites_line) =
        draw_key(&["polite", "--weight", "1", "--priority=-1", "--requests-per-minute", "1000"]);
    assert!(polites_line.ends_with(" requests_per_minute=1000 weight=1 priority=-1"), "{polites_line}");
    fs::write(&path, [floods_line, polites_line].join("\n")).expect("the directory can be written");
    let server = start(&["--api-key-file", path.to_str().expect("UTF-8"), "--max-slots", "2"]).await;
    let done = AtomicUsize::new(0);
    let ask = async |key: &str, seed: u64| {
        let body = json!({"prompt": "a", "max_tokens": 48, "ignore_eos": true, "seed": seed}).to_string();
        let headers = [("content-type", "application/json"), ("x-api-key", key)];
        let (status, headers, answer) = whole(server.call(Method::POST, "/v1/completions", &headers, body).await).await;
        assert_eq!(status, 200, "{answer}");
        (headers, answer["choices"][0]["text"].clone())
    };
    let (headers, alone) = ask(&polite, 7).await;
    assert_eq!(headers["x-ratelimit-limit-requests"], "1000");
    let crowd = join_all((0..120).map(async |seed| {
        let (headers, text) = ask(&flood, seed).await;
        assert!(!headers.contains_key("x-ratelimit-limit-requests"));
        done.fetch_add(1, Relaxed);
        (seed, text)
    }));
    let visits = async {
        until("the flood waits", async || {
            let (_, _, text) = whole(server.call(Method::GET, "/metrics", &[("x-api-key", &polite)], "").await).await;
            Scrape::parse(text.as_str().expect("text")).value("num_requests_waiting", &[]) > 60.0
        })
        .await;
        for visit in 0..10 {
            let before = done.load(Relaxed);
            let (_, text) = ask(&polite, 7).await;
            assert_eq!(text, alone, "beside a flood as alone");
            // Those in the two slots, who comes as its answer begins, and beside it.
            let meanwhile = done.load(Relaxed) - before;
            assert!(meanwhile <= 6, "visit {visit} waited for {meanwhile} of the flood");
        }
        assert!(done.load(Relaxed) < 100, "the flood still waits");
    };
    let (texts, ()) = tokio::join!(crowd, visits);
    for (seed, text) in texts.into_iter().step_by(17) {
        assert_eq!(ask(&flood, seed).await.1, text, "alone as in the crowd");
    }
}
