//! `looplane loadtest sweep` as a process: servers that it starts, and ends.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::common::{PATIENCE, fixture};
use looplane_loadtest::sweep::{Scaling, Sweep, predict};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// A sweep over a model with 8 heads, as short as can be.
fn sweep(out: &Path, line: &str) -> Command {
    // Tests may run under nohup, the sweep does not.
    let mut command = Command::new("env");
    command
        .args([
            "--default-signal=HUP",
            env!("CARGO_BIN_EXE_looplane"),
            "loadtest",
            "sweep",
            "--device",
            "cpu",
            "--model",
        ])
        .arg(fixture("llama-gqa"))
        .arg("--out")
        .arg(out);
    command.args("--endpoint completions --prompt-tokens 8 --max-tokens 8".split(' ')).args(line.split(' '));
    command
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("sweep.json")).expect("a report")).expect("JSON")
}

/// The server that a sweep has started, and its workers.
fn servers_of(pid: u32) -> Vec<u32> {
    let children = |pid: u32| -> Vec<u32> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
    };
    children(pid).into_iter().flat_map(|server| [vec![server], children(server)].concat()).collect()
}

fn words(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

#[test]
fn sizes_are_measured_one_after_the_other_and_one_that_cannot_be_served_says_why() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let line = "--tp 1,2,16 --concurrencies 1,3 --duration 1s";
    let output = sweep(out.path(), line).output().expect("looplane runs");
    let said = words(&output);
    assert!(output.status.success(), "{said}");
    let report = report(out.path());
    let sizes = report["sizes"].as_array().expect("sizes");
    assert_eq!(sizes.iter().map(|size| size["tp"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(2), Some(16)]);
    for size in &sizes[..2] {
        assert_eq!(size["not_measured"], Value::Null, "{said}");
        assert_eq!(size["measured"].as_array().map(Vec::len), Some(2), "{size}");
        for level in size["measured"].as_array().expect("levels") {
            assert!(level["output_throughput"].as_f64() > Some(1.0) && level["failed"] == 0, "{level}");
            let whole = fs::read(out.path().join(level["file"].as_str().expect("a name"))).expect("its own report");
            let whole: Value = serde_json::from_slice(&whole).expect("JSON");
            assert_eq!(whole["output_throughput"], level["output_throughput"]);
        }
        assert!(size["traffic"]["read_gb_s"].as_f64() > Some(0.0), "the bench ran: {said}");
    }
    let why = sizes[2]["not_measured"].as_str().expect("a reason");
    assert!(why.contains("does not divide the 8 attention heads") && why.contains("tp16.log"), "{why}");
    assert!(said.contains("TP 16 is not measured") && said.contains("/s a worker"), "{said}");
    let page = fs::read_to_string(out.path().join("sweep.html")).expect("a page");
    assert!(page.contains("Throughput against interactivity") && page.contains("does not divide the 8"));
}

#[test]
fn layouts_are_measured_with_their_replicas_and_compared() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let line = "--layout 2x1,1x1,1x2 --concurrency 4 --duration 1s";
    let output = sweep(out.path(), line).output().expect("looplane runs");
    let said = words(&output);
    assert!(output.status.success(), "{said}");
    let report = report(out.path());
    let sizes = report["sizes"].as_array().expect("sizes");
    let layouts = sizes.iter().map(|size| (size["replicas"].as_u64(), size["tp"].as_u64()));
    let wanted = [(1, 1), (1, 2), (2, 1)].map(|(replicas, tp)| (Some(replicas), Some(tp)));
    assert_eq!(layouts.collect::<Vec<_>>(), wanted);
    for size in sizes {
        let level = &size["measured"][0];
        assert!(level["output_throughput"].as_f64() > Some(1.0) && level["failed"] == 0, "{size}");
    }
    let log = fs::read_to_string(out.path().join("2xtp1.log")).expect("its log");
    assert!(log.contains("into 2 worker processes") && log.contains("replica{number=1}"), "{log}");
    assert!(said.contains("2 x TP 1 is measured") && said.contains("Which layout for which load"), "{said}");
}

#[test]
fn a_port_in_use_is_said_with_the_last_lines_of_the_servers_log() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let line = format!("--tp 1 --concurrency 1 --requests 2 -- --port {port}");
    let output = sweep(out.path(), &line).output().expect("looplane runs");
    let said = words(&output);
    assert!(!output.status.success() && said.contains("looplane: no size was measured"), "{said}");
    assert!(said.contains(&format!("\n  looplane: cannot listen on 127.0.0.1:{port} (--host, --port)")), "{said}");
    assert_eq!(report(out.path())["sizes"][0]["measured"], Value::Array(Vec::new()));
}

#[test]
fn a_sweep_that_is_stopped_keeps_what_it_has_and_leaves_no_server() {
    stop_a_sweep(Signal::INT);
}

#[test]
fn a_sweep_whose_terminal_ends_leaves_no_server() {
    stop_a_sweep(Signal::HUP);
}

#[test]
fn a_sweep_that_is_killed_leaves_no_server() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let (child, processes) = sweep_at_its_second_size(out.path());
    kill_process(pid_of(&child), Signal::KILL).expect("it runs");
    assert!(!child.wait_with_output().expect("it ends").status.success());
    let begun = Instant::now();
    while let Some(process) = processes.iter().find(|process| lives(**process)) {
        assert!(begun.elapsed() < PATIENCE, "process {process} lives on");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A sweep whose second server is ready, and the process numbers of that and its workers.
fn sweep_at_its_second_size(out: &Path) -> (Child, Vec<u32>) {
    let line = "--tp 1,2 --concurrency 2 --duration 4s";
    let child = sweep(out, line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let begun = Instant::now();
    let log = out.join("tp2.log");
    while !fs::read_to_string(&log).is_ok_and(|said| said.contains(" Listening ")) {
        assert!(begun.elapsed() < PATIENCE, "the second server is not ready");
        std::thread::sleep(Duration::from_millis(20));
    }
    let processes = servers_of(child.id());
    assert!(processes.len() >= 3, "a server and its two workers: {processes:?}");
    (child, processes)
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(child.id() as i32).expect("a process")
}

fn lives(process: u32) -> bool {
    Path::new(&format!("/proc/{process}/exe")).exists()
}

fn stop_a_sweep(signal: Signal) {
    let out = tempfile::tempdir().expect("a temporary directory");
    let (child, processes) = sweep_at_its_second_size(out.path());
    kill_process(pid_of(&child), signal).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    let said = words(&output);
    assert!(output.status.success() && said.contains("TP 2 is not measured: stopped by the user"), "{said}");
    let sizes = &report(out.path())["sizes"];
    assert!(sizes[0]["measured"][0]["output_throughput"].as_f64() > Some(1.0), "{sizes}");
    assert_eq!(sizes[1]["measured"], Value::Array(Vec::new()));
    for process in processes {
        assert!(!lives(process), "process {process} lives on");
    }
}

/// What `looplane scaling` writes is what a sweep reads: figures of GPUs, without any, from those in docs/scaling.
#[test]
fn sizes_that_a_machine_lacks_are_predicted_from_what_scaling_writes() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let file = out.path().join("scaling.json");
    let figures = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/scaling");
    let mut command = Command::new(env!("CARGO_BIN_EXE_looplane"));
    command.arg("scaling");
    for run in ["8b_tp1", "8b_tp2", "8b_tp4", "llama-1b_tp1", "llama-1b_tp2"] {
        command.arg(figures.join(format!("{run}_batch1-8.json")));
    }
    command.args("--shapes 8b --batch 1 --context 192 --json".split(' ')).arg(&file);
    let output = command.output().expect("looplane runs");
    assert!(output.status.success(), "{}", words(&output));
    let scaling: Scaling = serde_json::from_slice(&fs::read(&file).expect("written")).expect("all that a sweep reads");

    let size = |tp: u32, output_throughput: f64, mean_tpot_ms: f64| {
        let level = json!({"load": 0, "completed": 9, "failed": 0, "request_throughput": 1.0,
            "output_throughput": output_throughput, "mean_tpot_ms": mean_tpot_ms, "median_ttft_ms": 9.0,
            "p99_ttft_ms": 9.0,
            "p99_itl_ms": 9.0, "p99_client_lag_ms": 0.1, "mean_context": 192.0, "file": "x"});
        json!({"tp": tp, "not_measured": null, "ready_s": 1.0, "measured": [level], "predicted": [], "traffic": null})
    };
    let lacking =
        json!({"tp": 8, "not_measured": "lacking", "ready_s": null, "measured": [], "predicted": [], "traffic": null});
    let sweep = json!({"version": "0.1.0", "date": "20240229-235900", "model": "m", "device": "cuda", "processor": null,
        "cores": 1, "gpus": 4, "threads": null, "settings": [], "notes": [],
        "loads": [{"name": "1 stream", "pacing": "closed loop", "streams": 1}],
        "sizes": [size(1, 290.0, 3.34), size(2, 520.0, 1.84), size(4, 870.0, 1.09), lacking]});
    let mut sweep: Sweep = serde_json::from_value(sweep).expect("the fields of a report");
    predict(&mut sweep, &scaling);
    let rows = sweep.rows(0);
    // The step on 8 GPUs takes 0.6 to 0.7 ms, and serving it takes somewhat longer.
    assert!(rows[3].tpot_ms.is_some_and(|ms| (0.6..0.9).contains(&ms)), "{:?}", rows[3]);
    assert!(rows[2].model_error.is_some_and(|error| error.abs() < 0.15) && !rows[2].model_fitted, "{:?}", rows[2]);
}
