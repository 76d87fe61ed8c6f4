//! `looplane loadtest` as a process: what needs the binary itself.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use crate::common::{Server, fixture};
use serde_json::{Value, json};

fn looplane() -> Command {
    Command::new(env!("CARGO_BIN_EXE_looplane"))
}

/// The mock runs in a process of its own, which is gone afterwards: its standard input was this process's to hold.
#[test]
fn calibrates_against_a_mock_of_its_own() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("error.json");
    let line = "loadtest calibrate --streams 5 --duration 1s --itl 100ms --json";
    let output = looplane().args(line.split(' ')).arg(&file).output().expect("looplane runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.starts_with("client's own error: first token p50 ") && said.contains("(5 streams, "), "{said}");
    let error: Value = serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
    assert_eq!(error["streams"], 5);
    let count = |of: &str| error[of]["count"].as_u64().expect("a count");
    // Fifty gaps a second, five streams' first tokens in five seconds: one or two in this one.
    assert!((35..=60).contains(&count("itl_error")) && (1..=2).contains(&count("ttft_error")), "{error}");
}

#[test]
fn a_mock_ends_with_its_standard_input() {
    let mut mock = looplane()
        .args(["loadtest", "mock", "--until-stdin-closes"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("looplane runs");
    let mut base = String::new();
    BufReader::new(mock.stdout.take().expect("piped")).read_line(&mut base).expect("readable");
    assert!(base.starts_with("http://127.0.0.1:"), "{base}");
    drop(mock.stdin.take());
    assert!(mock.wait().expect("it ends").success());
}

/// Clients that hang up, read slowly or send nonsense, sockets that send half a request, and a worker that is killed,
/// all at once: the other requests do not notice, and streams go on with the same text.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_stands_every_fault_at_once() {
    let model = fixture("llama-tied");
    let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--device", "cpu", "--tp", "2"]).await;
    let before = server.workers();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("report.json");
    let load = "--duration 5s --concurrency 6 --prompt-tokens 20 --max-tokens 400 --ignore-eos --endpoint completions";
    let faults = "--cancel 10%@20ms --slow-readers 10%@2ms --broken 20% --half-open 10 --kill-worker 1@1500ms";
    let output = looplane()
        .arg("loadtest")
        .args(load.split(' '))
        .args(faults.split(' '))
        .args(["--target", server.base(), "--json"])
        .arg(&file)
        .output()
        .expect("looplane runs");
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
    let faults = &report["faults"];
    assert_eq!(report["errors_by_kind"], json!({}), "{faults:#}");
    for fault in ["cancel", "slow_readers"] {
        assert_eq!(faults[fault]["failed"], 0, "{faults:#}");
    }
    let broken = &faults["broken_bodies"];
    assert!(broken["requests"].as_u64() > Some(0), "{faults:#}");
    assert_eq!(broken["answered_400"], broken["requests"], "{faults:#}");
    assert_eq!((&faults["half_open"]["connections"], &faults["half_open"]["not_opened"]), (&json!(10), &json!(0)));

    let kill = &faults["killed_workers"][0];
    assert_eq!((&kill["not_killed"], &kill["pid"]), (&Value::Null, &json!(before[1])), "{kill:#}");
    let lived = kill["live_streams_completed"].as_u64().expect("a count");
    assert!((1..=6).contains(&lived) && kill["recovery_ms"].is_number(), "{kill:#}");
    assert_eq!(kill["live_streams_failed_by_kind"], json!({}));
    assert_eq!(kill["asked_again"], json!({"same_text": lived, "other_text": 0, "unanswered": 0}));
}

/// One server, asked the same over both of its interfaces: greedy answers of a set length, so every count is the same.
#[tokio::test(flavor = "multi_thread")]
async fn measures_this_server_over_http_and_over_grpc() {
    let server = Server::start(&[]).await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let measure = |target: &str| -> Value {
        let file = directory.path().join("report.json");
        let line = "loadtest --requests 12 --concurrency 3 --prompt-tokens 24 --max-tokens 6 --ignore-eos --json";
        let output = looplane().args(line.split(' ')).arg(&file).args(["--target", target]).output().expect("it runs");
        assert!(output.status.success() && output.stderr.is_empty(), "no progress of a short run: {output:?}");
        serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON")
    };
    let (http, grpc) = (measure(server.base()), measure(&server.base().replace("http://", "grpc://")));
    assert_eq!((&http["backend"], &grpc["backend"]), (&"openai-chat".into(), &"looplane-grpc-chat".into()));
    for field in ["completed", "model_id", "total_input_tokens", "total_output_tokens", "finish_reasons", "failed"] {
        assert_eq!(http[field], grpc[field], "{field}");
    }
    assert_eq!((&grpc["completed"], &grpc["total_output_tokens"]), (&12.into(), &72.into()));
}
