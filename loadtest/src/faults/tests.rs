use std::time::Duration;

use serde_json::{Value, json};

use crate::client::http::Client;
use crate::client::record::{Clock, Failure, RequestRecord};
use crate::faults::args::{FaultArgs, FaultError};
use crate::faults::kill::{self, KillAt};
use crate::faults::report::FaultReport;
use crate::load::conduct::{Conduct, Conducts, ShareAt};
use crate::run::mock::{Fault, Mock};
use crate::testing::markup::{Element, elements};
use crate::testing::records::{MS, record};
use crate::testing::runs::{run_against, run_line};

const HTTP: &str = "http://h:1";

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

fn counts<const N: usize>(of: &Value, names: [&str; N]) -> [u64; N] {
    names.map(|name| count(&of[name]))
}

#[test]
fn shares_and_kills_are_read() {
    let cancel: ShareAt = "10%@500ms".parse().expect("valid");
    assert_eq!(cancel, ShareAt { share: 0.1, time: Duration::from_millis(500) });
    assert_eq!(cancel, "0.1@0.5".parse().expect("valid"));
    for text in ["", "10%", "@1s", "0@1s", "0%@1s", "101%@1s", "1.1@1s", "nan@1s", "10%@", "10%@0s", "-1%@1s"] {
        assert!(text.parse::<ShareAt>().is_err(), "{text}");
    }
    let kill: KillAt = "1@5s".parse().expect("valid");
    assert_eq!((kill, kill.to_string().as_str()), (KillAt { rank: 1, at: Duration::from_secs(5) }, "1@5s"));
    for text in ["", "1", "1@", "@5s", "-1@5s", "x@5s", "1@x"] {
        assert!(text.parse::<KillAt>().is_err(), "{text}");
    }
    let args = FaultArgs { kill_worker: vec![kill], ..FaultArgs::default() };
    assert_eq!((args.check(HTTP, None), args.check(HTTP, Some(Duration::from_secs(6)))), (Ok(()), Ok(())));
    assert_eq!(args.check(HTTP, Some(Duration::from_secs(5))), Err(FaultError::KillAfterEnd(kill)));
}

#[test]
fn a_request_has_one_fault_by_the_seed_and_all_shares_are_met() {
    let parse = |text: &str| Some(text.parse().expect("valid"));
    let args =
        FaultArgs { cancel: parse("20%@1s"), slow_readers: parse("30%@2s"), broken: Some(0.1), ..FaultArgs::default() };
    assert_eq!(args.check(HTTP, None), Ok(()));
    let mut met = [0u32; 6];
    for conduct in (0..10_000).map(|index| args.conducts(9).of(index)) {
        met[match conduct {
            Conduct::Usual => 0,
            Conduct::HangUp(_) => 1,
            Conduct::ReadSlowly(_) => 2,
            Conduct::SendBroken(breakage) => 3 + breakage as usize,
        }] += 1;
    }
    // Standard deviations are 49, 40, 46 and 18.
    for (count, (want, within)) in
        met.into_iter().zip([(4000, 200), (2000, 160), (3000, 190), (333, 75), (333, 75), (333, 75)])
    {
        assert!(count.abs_diff(want) <= within, "{met:?}");
    }
    let first = |seed: u64| (0..200).map(|index| args.conducts(seed).of(index)).collect::<Vec<_>>();
    assert!(first(9) == first(9) && first(9) != first(10));
    assert!((0..1000).all(|index| Conducts::default().of(index) == Conduct::Usual));
    let too_many = FaultArgs { broken: Some(0.6), ..args };
    assert!(matches!(too_many.check(HTTP, None), Err(FaultError::Shares(share)) if share > 1.0));
}

/// Over gRPC clients can hang up and workers be killed.
#[test]
fn faults_of_http_are_refused_over_grpc() {
    let (cancel, broken) = (Some("10%@1s".parse().expect("valid")), Some(0.1));
    let fits = FaultArgs { cancel, kill_worker: vec!["1@5s".parse().expect("valid")], ..FaultArgs::default() };
    assert_eq!(fits.check("grpc://h:1", None), Ok(()));
    for misfit in [
        FaultArgs { broken, ..FaultArgs::default() },
        FaultArgs { slow_readers: cancel, ..FaultArgs::default() },
        FaultArgs { half_open: Some(1), ..FaultArgs::default() },
    ] {
        assert_eq!((misfit.check("grpc://h:1", None), misfit.check(HTTP, None)), (Err(FaultError::NeedsHttp), Ok(())));
    }
}

/// Answers take 300 ms and a third of the clients wait for 120: the others are served as if nothing were.
#[tokio::test]
async fn clients_that_hang_up_are_no_errors_and_the_rest_is_undisturbed() {
    let mock = Mock { ttft: Duration::from_millis(50), itl: Duration::from_millis(50), ..Mock::default() };
    let line = "--requests 60 --concurrency 30 --max-tokens 6 --cancel 33%@120ms --seed 4";
    let (outcome, report, requests) = run_against(mock, line).await;
    outcome.expect("the rest succeeds");
    let cancel = &report["faults"]["cancel"];
    let [cancelled, drawn, answered] = counts(cancel, ["cancelled", "requests", "answered_before"]);
    assert!((cancelled, answered) == (drawn, 0) && (8..=32).contains(&cancelled), "{cancel}");
    assert_eq!((count(&report["completed"]) + cancelled, count(&report["failed"])), (60, 0));
    assert_eq!((requests.len(), &report["errors_by_kind"]), (2 + 60, &json!({})), "all were sent");
    // The times are of the rest alone: none is cut short.
    assert!(report["p50_e2el_ms"].as_f64() >= Some(299.0), "{}", report["p50_e2el_ms"]);
    let note = format!("{cancelled} requests met a client");
    assert!(report["notes"].to_string().contains(&note), "{}", report["notes"]);
}

#[tokio::test]
async fn requests_that_end_before_the_client_hangs_up_are_told_apart() {
    let lines = tempfile::NamedTempFile::new().expect("a temporary file");
    let line = format!("--requests 12 --cancel 100%@5s --requests-file {}", lines.path().display());
    let (outcome, report, _) = run_against(Mock::default(), &line).await;
    outcome.expect("a run of nothing but faults is no failure");
    assert_eq!(
        (counts(&report["faults"]["cancel"], ["answered_before", "cancelled"]), count(&report["completed"])),
        ([12, 0], 0)
    );
    let text = std::fs::read_to_string(lines.path()).expect("written");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(lines.len() == 12 && lines.iter().all(|line| line["fault"] == "cancel"), "{text}");

    let (outcome, report, _) = run_against(Mock::default(), "--requests 3").await;
    outcome.expect("all succeed");
    assert_eq!(report.get("faults"), None, "a report without faults does not speak of them");
    let mock = Mock { fault: Fault::Status(500, "oops"), ..Mock::default() };
    let (outcome, report, _) = run_against(mock, "--requests 3 --cancel 100%@5s").await;
    let error = outcome.expect_err("none was met by the server").to_string();
    assert!(error.contains("3 whose client misbehaved on purpose failed as http_500"), "{error}");
    assert_eq!(report["faults"]["cancel"]["failed"], 3);
}

/// Six events each 40 ms apart: a slow reader takes 200 ms or more where the others take none. Each 200 ms apart they
/// take longer than the client's own limit; an answer that never begins is the server's fault.
#[tokio::test]
async fn slow_readers_hold_nobody_up_and_their_own_time_limit_is_not_the_servers_fault() {
    let usual = "--requests 30 --concurrency 6 --max-tokens 6 --slow-readers 30%@40ms --seed 2";
    let limited = "--requests 4 --concurrency 4 --max-tokens 6 --timeout 500ms --slow-readers 100%@200ms";
    let silent = Mock { ttft: Duration::from_secs(60), ..Mock::default() };
    let (usual, cut, failed) = tokio::join!(
        run_against(Mock::default(), usual),
        run_against(Mock::default(), limited),
        run_against(silent, limited)
    );
    let (outcome, report, _) = usual;
    outcome.expect("the rest succeeds");
    let slow = &report["faults"]["slow_readers"];
    let [drawn, read, lost] = counts(slow, ["requests", "read_to_the_end", "failed"]);
    assert!((read, lost) == (drawn, 0) && (3..=18).contains(&drawn), "{slow}");
    assert!(slow["longest_ms"].as_f64() >= Some(200.0), "{slow}");
    assert_eq!(count(&report["completed"]) + drawn, 30);
    assert!(report["p50_e2el_ms"].as_f64() < Some(200.0), "{}", report["p50_e2el_ms"]);
    for ((outcome, report, _), want) in [(cut, [4, 4, 0]), (failed, [4, 0, 4])] {
        let slow = &report["faults"]["slow_readers"];
        assert_eq!(counts(slow, ["requests", "ended_by_timeout", "failed"]), want);
        assert_eq!(outcome.is_err(), want[2] > 0, "{outcome:?}");
    }
}

/// The mock has 5 MB to send at once. A client that takes 50 ms for each event lets it send what the buffers of the two
/// sockets hold; one that reads takes all of it.
#[tokio::test]
async fn a_slow_reader_leaves_the_rest_with_the_server() {
    const EVENTS: usize = 70_000;
    let read = async |conduct, limit| {
        let mock = Mock::default().serve().await;
        let client = Client::new(&mock.base, None, limit).expect("valid");
        let body = json!({ "max_tokens": EVENTS }).to_string().into();
        let mut record = RequestRecord { conduct, ..RequestRecord::new(0, 0, 0) };
        client.stream("/v1/completions", body, Clock::start(), &mut record).await;
        (record.chunks_ns.len(), mock.frames())
    };
    let (read_all, sent_all) = read(Conduct::Usual, Duration::from_secs(60)).await;
    assert!(read_all == EVENTS && sent_all >= EVENTS, "{read_all} read, {sent_all} sent");
    let (read, sent) = read(Conduct::ReadSlowly(Duration::from_millis(50)), Duration::from_millis(700)).await;
    assert!(read <= 15 && sent < EVENTS, "{read} read, {sent} sent");
}

#[tokio::test]
async fn broken_bodies_are_refused_by_a_server_that_does_right_and_one_that_does_not_is_told() {
    let (outcome, report, _) = run_against(Mock::default(), "--requests 40 --broken 50% --max-tokens 2").await;
    outcome.expect("the rest succeeds");
    let broken = &report["faults"]["broken_bodies"];
    let [refused, drawn] = counts(broken, ["answered_400", "requests"]);
    assert!(refused == drawn && (10..=30).contains(&drawn), "{broken}");
    assert!(broken["by_form"].as_object().is_some_and(|forms| forms.values().all(|form| count(&form["requests"]) > 0)));
    assert_eq!((count(&report["completed"]) + drawn, count(&report["failed"])), (40, 0));

    let mock = Mock { fault: Fault::Status(500, "oops"), ..Mock::default() };
    let (outcome, report, _) = run_against(mock, "--requests 30 --broken 50%").await;
    outcome.expect_err("nothing succeeds");
    let broken = &report["faults"]["broken_bodies"];
    // The mock refuses what is no JSON before its fault.
    let wrong = &broken["by_form"]["wrong_type"];
    assert_eq!(wrong["otherwise_by_kind"]["http_500"], wrong["requests"], "{broken}");
    assert_eq!(count(&broken["answered_400"]) + count(&wrong["requests"]), count(&broken["requests"]));
}

#[tokio::test]
async fn half_open_sockets_disturb_nobody_and_are_told() {
    let line = "--requests 20 --concurrency 4 --half-open 30";
    let (outcome, report, _) = run_against(Mock::default(), line).await;
    outcome.expect("all succeed");
    let names = ["connections", "still_open", "closed_by_server", "not_opened"];
    assert_eq!((counts(&report["faults"]["half_open"], names), count(&report["completed"])), ([30, 30, 0, 0], 20));
}

/// The mock stands in for a server whose group is lost at 300 ms and answers again at 1000 ms; a process that looks
/// like its worker is killed meanwhile. Streams of 1200 ms are live then.
async fn kill_in_a_run(fault: Fault, rank: u32, line: &str) -> (anyhow::Result<()>, Value) {
    let mut worker = kill::tests::stand_in(std::process::id(), rank);
    let mock = Mock { itl: Duration::from_millis(20), fault, ..Mock::default() };
    let line = format!("--duration 1200ms --concurrency 3 --max-tokens 60 --kill-worker {rank}@300ms {line}");
    let (outcome, report, _) = run_against(mock, &line).await;
    let status = worker.wait().expect("it was killed");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    (outcome, report["faults"]["killed_workers"][0].clone())
}

#[tokio::test]
async fn a_worker_is_killed_and_clients_say_what_they_saw() {
    let pause = Fault::Pause(Duration::from_millis(300), Duration::from_millis(1000));
    let (chat, completions, fickle) = tokio::join!(
        kill_in_a_run(pause, 80, "--endpoint chat"),
        kill_in_a_run(pause, 83, "--endpoint completions"),
        kill_in_a_run(Fault::Fickle, 82, "--endpoint completions")
    );
    for (outcome, kill) in [chat, completions] {
        outcome.expect("all succeed");
        let ms = |name: &str| kill[name].as_f64().unwrap_or_else(|| panic!("{name} of {kill}"));
        assert!((300.0..1000.0).contains(&ms("killed_ms")), "{kill}");
        // The mock's clock starts a few requests before that of the run, and a machine in use is late with everything.
        assert!((800.0..2000.0).contains(&(ms("killed_ms") + ms("recovery_ms"))), "{kill}");
        assert!((650.0..2000.0).contains(&ms("longest_gap_ms")), "{kill}");
        assert_eq!(kill["live_streams_completed"], 3, "{kill}");
        assert_eq!(kill["live_streams_failed_by_kind"], json!({}));
        assert_eq!(kill["asked_again"], json!({"same_text": 3, "other_text": 0, "unanswered": 0}));
    }
    fickle.0.expect("all succeed");
    assert_eq!(fickle.1["asked_again"], json!({"same_text": 0, "other_text": 3, "unanswered": 0}));
}

#[tokio::test]
async fn streams_that_do_not_survive_a_kill_are_told() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let page = directory.path().join("run.html");
    let (outcome, kill) = kill_in_a_run(Fault::CloseAfter(58), 81, &format!("--html {}", page.display())).await;
    outcome.expect_err("every stream breaks off");
    let page = elements(&std::fs::read_to_string(page).expect("written"));
    let texts =
        |of: &dyn Fn(&Element) -> bool| page.iter().filter(|e| of(e)).map(|e| e.text.clone()).collect::<Vec<_>>();
    assert!(texts(&|e| e.name == "h2").contains(&"Faults".to_owned()));
    let bad = texts(&|e| e.name == "td" && e.class() == "bad");
    let failed = "3: 0 went on to their end, 3 failed (connection_lost × 3)".to_owned();
    assert!(bad.contains(&failed), "{bad:?}");
    let events = texts(&|e| e.name == "text" && e.class() == "event");
    let killed = events.iter().filter(|event| *event == "rank 81 killed").count();
    assert!(killed >= 2, "on every plot along the run: {events:?}");
    let failed = json!({"connection_lost": 3});
    assert_eq!((&kill["live_streams_completed"], &kill["live_streams_failed_by_kind"]), (&json!(0), &failed));
}

/// Its last token came within half a second of the kill, its end 35 ms later.
#[test]
fn streams_that_end_well_soon_after_a_kill_are_no_bad_finding() {
    for (failure, bad) in [(None, [false, false]), (Some(Failure::Truncated), [true, true])] {
        let kill = "1@1s".parse().expect("valid");
        let mut report = FaultReport::of(&FaultArgs { kill_worker: vec![kill], ..FaultArgs::default() });
        report.kills[0].strike(Ok((1000 * MS, 7)));
        report.count(&RequestRecord { ended_ns: 1045 * MS, failure, ..record(800, 800, &[1002, 1010]) });
        let findings = report.findings().lines;
        assert_eq!(findings.iter().map(|finding| finding.is_bad).collect::<Vec<_>>(), bad, "{findings:?}");
    }
}

#[tokio::test]
async fn a_worker_that_is_not_there_is_told_before_the_run() {
    let mock = Mock::default().serve().await;
    let own = format!("process {} has no worker of rank 90", std::process::id());
    for (line, why) in [
        ("--kill-worker 90@1s", own.as_str()),
        ("--kill-worker 90@1s --server-pid 1", "process 1 has no worker of rank 90"),
        ("--duration 1s --kill-worker 0@2s", "0@2s is not due before"),
    ] {
        let refusal = run_line(&format!("--target {} {line}", mock.base)).await.expect_err("no worker");
        assert!(format!("{refusal:#}").contains(why), "{refusal:#}");
    }
}
