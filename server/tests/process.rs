//! The product as processes: clients that go away, signals, orphans, idleness.

mod common;

use std::time::{Duration, Instant};

use common::{Server, fixture, runs};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_frees_its_slot() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2", "--max-slots", "1"]).await;
    let endless = json!({"prompt": "again and again", "max_tokens": 2000, "ignore_eos": true});
    let short = json!({"prompt": "a", "max_tokens": 2});
    let start = Instant::now();
    server.ok("/v1/completions", &endless).await;
    let whole = start.elapsed();
    for streaming in [true, false] {
        let start = Instant::now();
        if streaming {
            let mut stream = server.stream("/v1/completions", &endless).await;
            stream.next().await.expect("a first event");
        } else {
            let call = server.ok("/v1/completions", &endless);
            assert!(tokio::time::timeout(whole / 20, call).await.is_err(), "the call is cut off in the middle");
        }
        // The one slot is free again long before the endless request would have ended.
        server.ok("/v1/completions", &short).await;
        assert!(start.elapsed() < whole / 2, "streaming {streaming}: {:?} of {whole:?}", start.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_leaves_no_worker() {
    let model = fixture("llama-tied");
    let mut server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "4"]).await;
    let workers = server.workers();
    assert_eq!(workers.len(), 4);
    server.kill();
    let start = Instant::now();
    while workers.iter().any(|pid| runs(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(5), "orphans: {workers:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_server_ends_its_streams_and_exits_with_0() {
    let model = fixture("llama-tied");
    let mut server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2"]).await;
    let request = json!({"prompt": "on", "max_tokens": 1000, "ignore_eos": true});
    let mut stream = server.stream("/v1/completions", &request).await;
    stream.next().await.expect("a first event");
    let workers = server.workers();
    server.terminate();
    let (_, reason) = stream.text().await;
    assert_eq!(reason, "length", "a stream that runs is brought to its end");
    assert_eq!(server.wait(Duration::from_secs(20)), Some(0));
    assert!(workers.iter().all(|pid| !runs(*pid)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_at_once() {
    let model = fixture("llama-tied");
    let args = ["--model", model.to_str().expect("UTF-8"), "--tp", "2", "--drain-seconds", "600"];
    let mut server = Server::start(&args).await;
    let endless = json!({"prompt": "on", "max_tokens": 2000, "ignore_eos": true, "n": 16});
    let mut stream = server.stream("/v1/completions", &endless).await;
    stream.next().await.expect("a first event");
    let workers = server.workers();
    server.terminate();
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.terminate();
    server.wait(Duration::from_secs(5));
    assert!(workers.iter().all(|pid| !runs(*pid)), "{workers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_server_uses_next_to_no_cpu() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "4"]).await;
    server.ok("/v1/completions", &json!({"prompt": "a", "max_tokens": 8})).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let pids: Vec<u32> = std::iter::once(server.pid()).chain(server.workers()).collect();
    let before: u64 = pids.iter().map(|pid| cpu_ticks(*pid)).sum();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let used = pids.iter().map(|pid| cpu_ticks(*pid)).sum::<u64>() - before;
    // 100 ticks a second: at most 2 % of a core over five processes.
    assert!(used <= 4, "{used} ticks of 10 ms in 2 s");
}

/// User and system time of a process, in clock ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // After the name come state (field 3 of proc(5)) and so on: utime is field 14, stime 15.
    [11, 12].iter().map(|i| fields[*i].parse::<u64>().expect("a number")).sum()
}
