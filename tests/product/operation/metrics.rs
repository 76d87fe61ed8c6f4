//! `/metrics` of the product as processes: real workers, one of them killed under a stream.

use std::process::Command;

use crate::common::{Server, fixture, signal, until};
use crate::scrape::Scrape;
use rustix::process::Signal;
use serde_json::{Value, json};

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
    let mut recovering = false;
    until("the worker is back", async || {
        let now = scrape(&server).await;
        recovering |= now.value("engine_state", &[("state", "recovering")]) == 1.0;
        now.value("worker_recovery_seconds_count", &[]) == 1.0
    })
    .await;
    assert_eq!(scrape(&server).await.value("worker_losses_total", &[]), 1.0);
    assert!(recovering, "the engine was down between two scrapes");
    stream.text().await;
    assert_eq!(finished(&scrape(&server).await), 4.0, "the stream went on to its end");
}

/// The load tester's figures of the server's own side are those of the server, and agree with its own.
#[tokio::test(flavor = "multi_thread")]
async fn the_load_tester_reports_the_servers_own_side() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2", "--max-slots", "2"]).await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let [json, page] = ["run.json", "run.html"].map(|name| directory.path().join(name));
    let line = "loadtest --duration 3s --concurrency 3 --prompt-tokens 20 --max-tokens 60 --ignore-eos \
                --endpoint completions --read-limit 1000";
    let output = Command::new(env!("CARGO_BIN_EXE_looplane"))
        .args(line.split(' ').filter(|word| !word.is_empty()))
        .args(["--target", server.base()])
        .arg("--json")
        .arg(&json)
        .arg("--html")
        .arg(&page)
        .output()
        .expect("looplane runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("\nserver's own side, read from /metrics with Looplane's names, "), "{said}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).expect("written")).expect("JSON");
    let side = &report["server_side"];
    let of = |name: &str| side[name].as_f64().unwrap_or_else(|| panic!("{name} in {side}"));
    let client = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name} in {report}"));
    assert!(
        (2.0..=2.001).contains(&of_range(side, "running", "max")) && of_range(side, "waiting", "max") >= 1.0,
        "{side}"
    );
    assert!(of("mean_step_ms") > 0.0 && of("busy_share") <= 1.0 && of("decode_rows_per_step") <= 2.0, "{side}");
    // The server counts up to a step after the client's last token; the part that is counted ends with a look after it.
    let (server_tokens, client_tokens) = (of("generation_throughput") * of("length_s"), client("total_output_tokens"));
    assert!((server_tokens - client_tokens).abs() < 1.0, "{server_tokens} {client_tokens}");
    assert!(of("mean_queue_ms") <= of("mean_ttft_ms") && of("mean_ttft_ms") <= client("mean_ttft_ms"), "{side}");
    assert!((of("share_of_read_limit") - of("read_gb_s") / 1000.0).abs() < 1e-9, "{side}");
    let page = std::fs::read_to_string(&page).expect("written");
    for title in ["Sequences in the server", "KV cache in use", "Time of a step"] {
        assert!(page.contains(&format!("aria-label=\"{title}\"")), "{title}");
    }
}

fn of_range(side: &Value, name: &str, which: &str) -> f64 {
    side[name][which].as_f64().unwrap_or_else(|| panic!("{name} in {side}"))
}
