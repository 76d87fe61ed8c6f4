use super::*;
use crate::load::arrivals::{ArrivalProcess, Arrivals, Rate};
use crate::load::lengths::Lengths;
use crate::run::mock::{Fault, Mock};
use crate::stats::distribution::Distribution;
use crate::testing::runs;
use serde_json::Value;

fn parse(line: &str) -> SaturateArgs {
    runs::parse(line).expect("valid options")
}

/// What a server shows that serves Poisson requests in turn, `served_per_s` at most, for 20 s.
fn growth(rate_per_s: f64, served_per_s: f64, seed: u64) -> Growth {
    let mut free_s = 0.0f64;
    let mut served = Vec::new();
    for due in Arrivals::new(ArrivalProcess::Poisson, 1.0, Rate::constant(rate_per_s), seed).expect("in range") {
        if due >= STEP_LENGTH {
            break;
        }
        let begun_s = free_s.max(due.as_secs_f64());
        free_s = begun_s + 1.0 / served_per_s;
        served.push((due.as_secs_f64(), begun_s, free_s));
    }
    let in_flight_at = |now_s: f64| served.iter().filter(|s| s.0 <= now_s && now_s < s.2).count() as f64;
    Growth {
        in_flight: (0..400).map(|sample| f64::from(sample) * 0.05).map(|now_s| (now_s, in_flight_at(now_s))).collect(),
        first_token: served.iter().map(|&(due_s, begun_s, _)| (due_s, begun_s - due_s)).collect(),
    }
}

#[test]
fn a_queue_that_grows_is_told_from_one_that_varies() {
    for seed in 0..10 {
        let calm = growth(50.0, 100.0, seed).verdict(50.0, STEP_LENGTH);
        assert_eq!(calm, Verdict::KeepsUp, "half of what it can, seed {seed}");
        let behind = growth(130.0, 100.0, seed).verdict(130.0, STEP_LENGTH);
        assert_eq!(behind, Verdict::InFlightGrows, "a third more than it can, seed {seed}");
    }
    // A server that takes few requests and lets the others wait outside shows it in the first token alone.
    let waiting = Growth { in_flight: Vec::new(), ..growth(130.0, 100.0, 0) };
    assert_eq!(waiting.verdict(130.0, STEP_LENGTH), Verdict::FirstTokenGrows);
    assert_eq!(Growth::default().verdict(1.0, STEP_LENGTH), Verdict::KeepsUp);
}

#[test]
fn a_load_tester_that_was_late_is_said_with_its_worst_rate() {
    let step = |rate_per_s: f64, late_ms: u64| {
        let (mut tally, mut lags) = (Tally::default(), Distribution::default());
        lags.record_ns(late_ms * 1_000_000);
        tally.close(1, lags);
        Step { rate_per_s, tally, verdict: Verdict::KeepsUp }
    };
    assert_eq!(lateness(&[step(1.0, 1), step(2.0, 4)]), None);
    let note = lateness(&[step(1.0, 1), step(2.0, 30), step(4.0, 9)]).expect("late");
    assert!(note.contains("by 30.0 ms or more at 2.000 requests a second"), "{note}");
}

#[test]
fn rates_are_doubled_and_then_halved_into() {
    let mut search = Search { next: 1.0, bears: None, falls_behind_at: None };
    let mut tried = Vec::new();
    while let Some(rate) = search.next_rate(0.1) {
        tried.push(rate);
        search.learn(rate, rate <= 10.0);
    }
    assert_eq!(tried[..5], [1.0, 2.0, 4.0, 8.0, 16.0]);
    let (bears, behind) = (search.bears.expect("bears some"), search.falls_behind_at.expect("not all"));
    assert!(bears <= 10.0 && behind > 10.0 && behind <= 1.1 * bears, "{bears} to {behind}");
    assert_eq!(tried.len(), 8);
    let mut hopeless = Search { next: 1.0, bears: None, falls_behind_at: None };
    hopeless.learn(1.0, false);
    assert_eq!(hopeless.next_rate(0.1), None);
}

/// Eight at a time, 50 ms each: 160 a second. 50 and 100 are borne, 200 is not.
#[tokio::test]
async fn the_limit_of_a_server_is_found() {
    let mock = Mock { ttft: Duration::from_millis(50), fault: Fault::Slots(8), ..Mock::default() }.serve().await;
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let line = "--from 50 --precision 1 --duration 1200ms --arrivals constant --max-tokens 1";
    let args = parse(&format!("{line} --target {} --json {}", mock.base, file.path().display()));
    assert_eq!(args.load.max_tokens, Lengths::Constant(1));
    run(&args, &CancellationToken::new()).await.expect("a limit is found");
    let report: Value = serde_json::from_slice(&std::fs::read(file.path()).expect("written")).expect("JSON");
    assert_eq!((&report["keeps_up_with"], &report["falls_behind_at"]), (&json!(100.0), &json!(200.0)), "{report}");
    assert_eq!(report["steps"].as_array().map(Vec::len), Some(3));
    assert!(report["steps"][0]["request_throughput"].as_f64() > Some(40.0), "{report}");
}

#[tokio::test]
async fn a_server_that_turns_all_away_and_options_that_do_not_fit_are_errors() {
    let mock = Mock { fault: Fault::Status(429, "{}"), ..Mock::default() }.serve().await;
    for (line, why) in [
        (
            &*format!("--from 20 --duration 500ms --target {}", mock.base),
            "falls behind at 20 requests a second already",
        ),
        ("--rate 5", "chooses the rate itself"),
        ("--requests-file x", "--requests-file"),
        ("--cancel 10%@1s", "without faults"),
        ("--turns 2", "--turns"),
        ("--exclude-start 1s", "judged by its second half"),
        ("--exclude-end 1s --duration 5s", "judged by its second half"),
        ("--read-limit 40", "--read-limit"),
        ("--calibrate", "loadtest calibrate"),
        ("--from 0", "--from is 0"),
    ] {
        let refusal = run(&parse(line), &CancellationToken::new()).await.expect_err(line).to_string();
        assert!(refusal.contains(why), "{line}: {refusal}");
    }
}
