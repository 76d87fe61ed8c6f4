//! Several replicas in one server: the same bits from each, and streams that survive the loss of one.

use rustix::process::Signal;
use serde_json::json;

use crate::{
    common::{Server, fixture, signal, until},
    scrape::Scrape,
};

/// A server of two replicas that are up.
pub async fn two_replicas(tp: &str) -> Server {
    let model = fixture("llama-tied");
    let args = ["--model", model.to_str().expect("UTF-8"), "--replicas", "2", "--tp", tp];
    let server = Server::start(&args).await;
    until("both replicas are up", async || ready(&server).await == [1.0; 2]).await;
    server
}

/// 1 for each replica that computes.
pub async fn ready(server: &Server) -> [f64; 2] {
    labelled(server, "engine_state", &[("state", "ready")]).await
}

pub async fn of_each(server: &Server, name: &str) -> [f64; 2] {
    labelled(server, name, &[]).await
}

/// The series of each replica that has these labels, too.
async fn labelled(server: &Server, name: &str, labels: &[(&str, &str)]) -> [f64; 2] {
    let (_, text) = server.get("/metrics").await;
    let scrape = Scrape::parse(text.as_str().expect("no JSON"));
    ["0", "1"].map(|engine| scrape.value(name, &[labels, &[("engine", engine)]].concat()))
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_killed_replica_go_on_in_the_other_with_the_same_bytes() {
    let server = two_replicas("1").await;
    let request = |seed: u32| json!({"prompt": "on and on", "max_tokens": 600, "ignore_eos": true, "temperature": 1.0, "seed": seed});
    let mut calm = Vec::new();
    for seed in 0..4 {
        calm.push(server.stream("/v1/completions", &request(seed)).await.text().await);
    }
    let mut streams = Vec::new();
    for seed in 0..4 {
        let mut stream = server.stream("/v1/completions", &request(seed)).await;
        let first = stream.next().await.expect("a first event");
        streams.push((first["choices"][0]["text"].as_str().unwrap_or_default().to_owned(), stream));
    }
    assert_eq!(of_each(&server, "num_requests_running").await, [2.0, 2.0], "they are shared out");
    let before = server.workers();
    assert_eq!(before.len(), 2);
    signal(before[0], Signal::KILL);
    let mut ended = Vec::new();
    for (first, mut stream) in streams {
        let (rest, reason) = stream.text().await;
        ended.push((first + &rest, reason));
        let (status, _) = server.get("/health/ready").await;
        assert_eq!(status, 200, "a replica is left");
    }
    assert_eq!(ended, calm);
    until("the lost replica is back", async || {
        let workers = server.workers();
        workers.len() == 2 && !workers.contains(&before[0]) && ready(&server).await == [1.0; 2]
    })
    .await;
    assert!(server.workers().contains(&before[1]), "the other was left alone");
    assert_eq!(of_each(&server, "worker_losses_total").await.iter().sum::<f64>(), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_answer_alike_and_a_request_of_many_prompts_uses_both() {
    let server = two_replicas("2").await;
    assert_eq!(server.workers().len(), 4);
    let prompts: Vec<String> = (0..8).map(|number| format!("number {number} of many")).collect();
    let body = json!({"prompt": prompts, "max_tokens": 40, "temperature": 0.8, "seed": 3});
    let answer = server.ok("/v1/completions", &body).await;
    let text = |answer: &serde_json::Value, choice: usize| answer["choices"][choice]["text"].clone();
    let steps = of_each(&server, "prompt_tokens_total").await;
    assert!(steps.iter().all(|tokens| *tokens > 0.0), "{steps:?}");
    for (place, prompt) in prompts.iter().enumerate() {
        let body = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0.8, "seed": 3});
        let alone = server.ok("/v1/completions", &body).await;
        assert_eq!(text(&answer, place), text(&alone, 0), "prompt {place}");
    }
}
