//! The product as processes: clients that go away, signals, orphans, idleness.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::{
    common::{Server, fixture, runs, signal, until},
    scrape::Scrape,
};
use rustix::process::Signal;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_frees_its_slot() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2", "--max-slots", "1"]).await;
    let endless = json!({"prompt": "again and again", "max_tokens": 2000, "ignore_eos": true});
    let short = json!({"prompt": "a", "max_tokens": 2});
    for streaming in [true, false] {
        let before = generated(&server).await;
        if streaming {
            let mut stream = server.stream("/v1/completions", &endless).await;
            stream.next().await.expect("a first event");
        } else {
            let computed = until("it is computed", async || generated(&server).await > before);
            tokio::select! {
                answer = server.ok("/v1/completions", &endless) => panic!("ended before it was cut off: {answer}"),
                () = computed => {}
            }
        }
        // Waits for the one slot.
        server.ok("/v1/completions", &short).await;
        let tokens = generated(&server).await - before;
        assert!(tokens < 2000.0, "streaming {streaming}: {tokens} tokens were generated, most of them for nobody");
    }
}

/// Tokens that the server has generated so far.
async fn generated(server: &Server) -> f64 {
    let (_, text) = server.get("/metrics").await;
    Scrape::parse(text.as_str().expect("no JSON")).value("generation_tokens_total", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_leaves_no_worker() {
    let model = fixture("llama-tied");
    let mut server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "4"]).await;
    let workers = server.workers();
    assert_eq!(workers.len(), 4);
    server.kill();
    until("no orphan is left", async || !workers.iter().any(|pid| runs(*pid))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_worker_is_recovered_within_what_steps_take() {
    let model = fixture("llama-tied");
    let request = json!({"prompt": "on", "max_tokens": 1500, "ignore_eos": true, "temperature": 1.0, "seed": 4});
    let mut calm = None;
    for (tp, victims) in [("1", 0..1), ("2", 0..2)] {
        let args = ["--model", model.to_str().expect("UTF-8"), "--tp", tp];
        let server = Server::start(&args).await;
        if calm.is_none() {
            calm = Some(server.stream("/v1/completions", &request).await.text().await);
        }
        for victim in victims {
            let mut stream = server.stream("/v1/completions", &request).await;
            let first = stream.next().await.expect("a first event");
            let before = server.workers();
            signal(before[victim], Signal::STOP);
            let start = Instant::now();
            until("other workers", async || !server.workers().iter().any(|pid| before.contains(pid))).await;
            // By --hang-limit-seconds, 3 s, or the pings' 4 s; a single step might take 120 s.
            let took = start.elapsed();
            assert!(took > Duration::from_secs(1) && took < Duration::from_secs(30), "{took:?}");
            let (rest, reason) = stream.text().await;
            let text = first["choices"][0]["text"].as_str().unwrap_or_default().to_owned() + &rest;
            assert_eq!(calm, Some((text, reason)), "--tp {tp}: rank {victim} was stopped");
            server.wait_ready().await;
        }
    }
}

/// Its clock runs on meanwhile: all limits are over when it wakes.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stood_still_keeps_its_workers() {
    let model = fixture("llama-tied");
    let request = json!({"prompt": "on", "max_tokens": 1500, "ignore_eos": true});
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2"]).await;
    let before = server.workers();
    let mut stream = server.stream("/v1/completions", &request).await;
    for _ in 0..3 {
        stream.next().await.expect("the stream goes on");
        signal(server.pid(), Signal::STOP);
        tokio::time::sleep(Duration::from_secs(4)).await;
        signal(server.pid(), Signal::CONT);
    }
    stream.text().await;
    assert_eq!(server.workers(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_under_a_running_server_changes_nothing() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let binary = dir.path().join("looplane");
    std::fs::copy(env!("CARGO_BIN_EXE_looplane"), &binary).expect("the binary can be copied");
    let model = fixture("llama-tied");
    let server = Server::start_binary(&binary, &["--model", model.to_str().expect("UTF-8"), "--tp", "2"]).await;
    // As an installer does it: another file takes the name.
    let newer = dir.path().join("newer");
    std::fs::copy("/bin/false", &newer).expect("every system has a false");
    std::fs::rename(&newer, &binary).expect("one directory");
    let before = server.workers();
    signal(before[1], Signal::KILL);
    server.ok("/v1/completions", &json!({"prompt": "a", "max_tokens": 8})).await;
    let after = server.workers();
    assert!(after.len() == 2 && before.iter().all(|pid| !after.contains(pid)));
    for pid in after {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("the worker runs");
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("the worker runs");
        assert_eq!(name.trim(), "looplane");
        assert!(line.starts_with("looplane\0rank\0"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_server_ends_its_streams_and_exits_with_0() {
    let model = fixture("llama-tied");
    // Longer than a thousand tokens take, however much else this machine does.
    let args = ["--model", model.to_str().expect("UTF-8"), "--tp", "2", "--drain-seconds", "600"];
    let mut server = Server::start(&args).await;
    let request = json!({"prompt": "on", "max_tokens": 1000, "ignore_eos": true});
    let mut stream = server.stream("/v1/completions", &request).await;
    stream.next().await.expect("a first event");
    let workers = server.workers();
    server.terminate();
    let (_, reason) = stream.text().await;
    assert_eq!(reason, "length", "a stream that runs is brought to its end");
    assert_eq!(server.wait().await, Some(0));
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
    // Signals that come closely one after the other may count as one.
    until("the server ended", async || {
        server.terminate();
        !server.still_runs()
    })
    .await;
    assert_eq!(server.wait().await, Some(1), "streams were cut off");
    // Not even as zombies: the server waited for them.
    assert!(workers.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()), "{workers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_context_is_what_the_kv_cache_holds() {
    let model = fixture("llama-tied");
    // Two pages of 64 positions; the model itself could take 2048.
    let args = ["--model", model.to_str().expect("UTF-8"), "--tp", "2", "--kv-pages", "2"];
    let server = Server::start(&args).await;
    let ask = |prompt: usize, max: u32| json!({"prompt": vec![5; prompt], "max_tokens": max, "ignore_eos": true});
    let answer = server.ok("/v1/completions", &ask(28, 100)).await;
    assert_eq!(answer["usage"]["total_tokens"], 128, "the last position is used too");
    for (prompt, max) in [(29, 100), (128, 1), (500, 1)] {
        let (status, answer) = server.post("/v1/completions", &ask(prompt, max)).await;
        let error = &answer["error"];
        assert_eq!(
            (status, &error["code"], &error["param"]),
            (400, &json!("context_length_exceeded"), &json!("prompt"))
        );
        assert!(error["message"].as_str().is_some_and(|text| text.contains("room for 128 tokens")), "{error}");
    }
}

/// Soon after the last request, over the server and all its workers: it wakes some 24 times a second, which takes 0.2 %
/// of a core, 0.6 % in a debug build. A thread that polls wakes hundreds of times. Wake-ups are the program's own; how
/// long each takes is also the machine's, whose caches and cores other tests use.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_server_rarely_wakes_and_uses_next_to_no_cpu() {
    const WINDOW_S: u64 = 6;
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "4"]).await;
    server.ok("/v1/completions", &json!({"prompt": "a", "max_tokens": 8})).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let pids: Vec<u32> = std::iter::once(server.pid()).chain(server.workers()).collect();
    assert_eq!(pids.len(), 5);
    let ticks = || pids.iter().map(|pid| cpu_ticks(*pid)).sum::<u64>();
    let wakeups = || pids.iter().flat_map(|pid| wakeups(*pid)).collect::<BTreeMap<_, _>>();
    let (ticks_before, wakeups_before) = (ticks(), wakeups());
    tokio::time::sleep(Duration::from_secs(WINDOW_S)).await;
    let since = |(thread, count)| count - wakeups_before.get(&thread).unwrap_or(&0);
    let (ticks, wakeups) = (ticks() - ticks_before, wakeups().into_iter().map(since).sum::<u64>());
    // Linux counts 100 ticks a second towards user space, so 1 % of a core is a tick a second.
    let figures = format!("{wakeups} wake-ups and {ticks} ticks of 10 ms in {WINDOW_S} s");
    println!("{figures}");
    assert!(wakeups < 50 * WINDOW_S && ticks < 3 * WINDOW_S, "{figures}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_worker_of_an_idle_server_is_recovered_without_a_request() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "2"]).await;
    let before = server.workers();
    signal(before[1], Signal::STOP);
    let start = Instant::now();
    // Asked after 1 s, given twice 2 s to answer.
    until("the stopped worker is gone", async || !server.workers().iter().any(|pid| before.contains(pid))).await;
    server.wait_ready().await;
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    server.ok("/v1/completions", &json!({"prompt": "a", "max_tokens": 2})).await;
}

/// User and system time of a process, in clock ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // After the name come state (field 3 of proc(5)) and so on: utime is field 14, stime 15.
    [11, 12].iter().map(|i| fields[*i].parse::<u64>().expect("a number")).sum()
}

/// How often each thread of a process gave up its core to wait for something.
fn wakeups(pid: u32) -> Vec<(PathBuf, u64)> {
    let of_thread = |thread: PathBuf| {
        // It may end meanwhile.
        let status = std::fs::read_to_string(thread.join("status")).ok()?;
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        Some((thread, count.and_then(|count| count.trim().parse().ok()).expect("Linux has it")))
    };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    threads.flatten().filter_map(|thread| of_thread(thread.path())).collect()
}
