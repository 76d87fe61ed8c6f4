//! Replicas that get new workers while clients stream: on request, and all of them at a signal.

use http_body_util::BodyExt;
use hyper::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    common::{EventStream, Server, draw_key, fixture, runs, signal, until},
    faults::replicas::{of_each, ready, two_replicas},
};

fn request(seed: u32) -> Value {
    json!({"prompt": "on and on", "max_tokens": 600, "ignore_eos": true, "temperature": 1.0, "seed": seed})
}

/// What undisturbed streams say.
async fn calm(server: &Server) -> Vec<(String, String)> {
    let mut calm = Vec::new();
    for seed in 0..4 {
        calm.push(server.stream("/v1/completions", &request(seed)).await.text().await);
    }
    calm
}

/// The same streams with their first words, all of them under way, shared out among both replicas.
async fn under_way(server: &Server) -> Vec<(String, EventStream)> {
    let mut streams = Vec::new();
    for seed in 0..4 {
        let mut stream = server.stream("/v1/completions", &request(seed)).await;
        let first = stream.next().await.expect("a first event");
        streams.push((first["choices"][0]["text"].as_str().unwrap_or_default().to_owned(), stream));
    }
    assert_eq!(of_each(server, "num_requests_running").await, [2.0, 2.0], "they are shared out");
    streams
}

async fn ends(streams: Vec<(String, EventStream)>) -> Vec<(String, String)> {
    let mut ended = Vec::new();
    for (first, mut stream) in streams {
        let (rest, reason) = stream.text().await;
        ended.push((first + &rest, reason));
    }
    ended
}

async fn is_ready(server: &Server) {
    assert_eq!(server.get("/health/ready").await.0, 200, "a replica is left");
}

async fn replicas(server: &Server) -> Vec<Value> {
    let (status, answer) = server.get("/replicas").await;
    assert_eq!(status, 200);
    answer["replicas"].as_array().expect("a list").clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_replaces_all_workers_and_no_stream_notices() {
    let server = two_replicas("2").await;
    let calm = calm(&server).await;
    let (before, streams) = (server.workers(), under_way(&server).await);
    let ended = tokio::spawn(ends(streams));
    signal(server.pid(), Signal::USR1);
    until("all workers are new, and up", async || {
        is_ready(&server).await;
        let now = server.workers();
        now.len() == 4 && before.iter().all(|pid| !now.contains(pid)) && ready(&server).await == [1.0; 2]
    })
    .await;
    assert_eq!(ended.await.expect("no stream breaks off"), calm);
    assert!(before.iter().all(|pid| !runs(*pid)), "the old ones have ended");
    assert_eq!(of_each(&server, "worker_losses_total").await, [0.0; 2]);
    assert_eq!(self::calm(&server).await, calm, "the new ones have the same bits");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_time_to_end_streams_go_on_in_the_other_replica_and_one_restarts_at_a_time() {
    let server = two_replicas("1").await;
    let calm = calm(&server).await;
    let (before, streams) = (server.workers(), under_way(&server).await);
    let (status, begun) = server.post("/replicas/0/restart", &json!({"limit_seconds": 0})).await;
    assert_eq!((status, &begun["state"]), (200, &json!("recovering")), "{begun}");
    let (status, refused) = server.post("/replicas/1/restart", &json!({})).await;
    let message = refused["error"]["message"].as_str().unwrap_or_default();
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("restart_under_way")));
    assert!(message.starts_with("replica 0 is being restarted"), "{message}");
    until("the other has all streams", async || {
        let list = replicas(&server).await;
        list[0]["running"] == 0 && list[0]["waiting"] == 0
    })
    .await;
    is_ready(&server).await;
    assert_eq!(ends(streams).await, calm);
    until("it is back, with a new worker", async || ready(&server).await == [1.0; 2]).await;
    let now = server.workers();
    let stayed = now.iter().filter(|pid| before.contains(pid)).count();
    assert_eq!((now.len(), stayed), (2, 1), "{before:?}, {now:?}");
    assert_eq!(of_each(&server, "worker_losses_total").await, [0.0; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_while_its_replica_drains_and_a_shutdown_meanwhile_cost_no_stream() {
    let mut server = two_replicas("1").await;
    let calm = calm(&server).await;
    // The worker that is new is that of replica 0.
    let before = server.workers();
    assert_eq!(server.post("/replicas/0/restart", &json!({})).await.0, 200);
    let mut first = None;
    until("it has a new worker", async || {
        first = server.workers().into_iter().find(|pid| !before.contains(pid));
        first.is_some() && ready(&server).await == [1.0; 2]
    })
    .await;
    let streams = under_way(&server).await;
    assert_eq!(server.post("/replicas/0/restart", &json!({"limit_seconds": 600})).await.0, 200);
    signal(first.expect("it was found"), Signal::KILL);
    is_ready(&server).await;
    assert_eq!(ends(streams).await, calm);
    until("it is back", async || ready(&server).await == [1.0; 2]).await;
    assert_eq!(of_each(&server, "worker_losses_total").await, [1.0, 0.0]);
    let streams = under_way(&server).await;
    assert_eq!(server.post("/replicas/1/restart", &json!({"limit_seconds": 600})).await.0, 200);
    server.terminate();
    assert_eq!(ends(streams).await, calm);
    assert_eq!(server.wait().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_one_replica_keeps_its_streams_through_a_restart_that_says_it_may() {
    let model = fixture("llama-tied");
    let (key, line) = draw_key(&["alice"]);
    let (admin, admins_line) = draw_key(&["operator", "--admin"]);
    let keys = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(keys.path(), format!("{line}\n{admins_line}\n")).expect("writable");
    let [model, keys] = [&model, &keys.path().to_path_buf()].map(|path| path.to_str().expect("UTF-8").to_owned());
    let server = Server::start(&["--model", &model, "--tp", "1", "--api-key-file", &keys]).await;
    let before = server.workers();
    let call = async |method: Method, key: &str, path: &str, body: String| {
        let bearer = format!("Bearer {key}");
        let headers = [("content-type", "application/json"), ("authorization", bearer.as_str())];
        let response = server.call(method, path, &headers, body).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.expect("a whole body").to_bytes();
        (status, serde_json::from_slice::<Value>(&bytes).expect("JSON"))
    };
    let ask = async |key: &str, path: &str, body: &Value| call(Method::POST, key, path, body.to_string()).await;
    let (path, restart) = ("/replicas/0/restart", json!({"limit_seconds": 0, "even_if_last": true}));
    let code = |answer: &Value| answer["error"]["code"].as_str().unwrap_or_default().to_owned();
    let (status, refused) = ask(&key, path, &restart).await;
    assert_eq!((status, code(&refused)), (403, "not_allowed".into()));
    let (status, refused) = ask(&admin, path, &json!({})).await;
    assert_eq!((status, code(&refused)), (409, "last_ready_replica".into()));
    let calm = ask(&key, "/v1/completions", &request(1)).await;
    assert_eq!(calm.0, 200);
    let body = request(1);
    let (answer, ()) = tokio::join!(ask(&key, "/v1/completions", &body), async {
        until("it runs", async || {
            call(Method::GET, &key, "/replicas", String::new()).await.1["replicas"][0]["running"] == 1
        })
        .await;
        assert_eq!(ask(&admin, path, &restart).await.0, 200);
    });
    assert_eq!(answer.1["choices"], calm.1["choices"]);
    until("the worker is new", async || {
        let now = server.workers();
        now.len() == 1 && now != before
    })
    .await;
    server.wait_ready().await;
}
