//! `/metrics` of the product as processes: real workers, one of them killed under a stream.

mod common;
#[path = "common/scrape.rs"]
mod scrape;

use std::time::{Duration, Instant};

use common::{Server, fixture, signal};
use rustix::process::Signal;
use scrape::Scrape;
use serde_json::json;

async fn scrape(server: &Server) -> Scrape {
    let (status, text) = server.get("/metrics").await;
    assert_eq!(status, 200);
    Scrape::parse(text.as_str().expect("no JSON"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_tells_what_was_served_and_survives_a_worker() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2"]).await;
    let (mut prompt, mut generated) = (0, 0);
    for _ in 0..3 {
        let request = json!({"prompt": "again", "max_tokens": 20, "ignore_eos": true});
        let usage = server.ok("/v1/completions", &request).await["usage"].clone();
        prompt += usage["prompt_tokens"].as_u64().expect("a count");
        generated += usage["completion_tokens"].as_u64().expect("a count");
    }
    let calm = scrape(&server).await;
    let finished = |scrape: &Scrape| scrape.value("request_success_total", &[("finished_reason", "length")]);
    assert_eq!(finished(&calm), 3.0);
    assert_eq!(calm.value("prompt_tokens_total", &[]), prompt as f64);
    assert_eq!(calm.value("generation_tokens_total", &[]), generated as f64);
    // One sequence at a time: a step a token, and each streams all weights, and K and V of some positions.
    let steps = calm.value("step_duration_seconds_count", &[]);
    assert_eq!(steps, generated as f64);
    let (read, weights) = (calm.value("step_read_bytes_total", &[]), calm.value("weight_stream_bytes", &[]));
    assert!(weights > 1e5 && read > steps * weights && read < 1.5 * steps * weights, "{read} of {weights}");
    assert!(calm.value("step_duration_seconds_sum", &[]) <= calm.value("e2e_request_latency_seconds_sum", &[]));
    assert!(calm.value("kv_cache_size_bytes", &[]) > calm.value("kv_cache_pages", &[]));

    let request = json!({"prompt": "on", "max_tokens": 1500, "ignore_eos": true});
    let mut stream = server.stream("/v1/completions", &request).await;
    stream.next().await.expect("a first event");
    let before = server.workers();
    signal(before[1], Signal::KILL);
    // Answered at every moment of the restart, which shows in between.
    let (start, mut recovering) = (Instant::now(), false);
    loop {
        let asked = Instant::now();
        let now = scrape(&server).await;
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?} for a scrape", asked.elapsed());
        recovering |= now.value("engine_state", &[("state", "recovering")]) == 1.0;
        if now.value("worker_recovery_seconds_count", &[]) == 1.0 {
            assert_eq!(now.value("worker_losses_total", &[]), 1.0);
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no recovery");
    }
    assert!(recovering, "the engine was down between two scrapes");
    stream.text().await;
    assert_eq!(finished(&scrape(&server).await), 4.0, "the stream went on to its end");
}
