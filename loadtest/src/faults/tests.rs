use super::*;
use crate::measure::tests::run_against;
use crate::mock::Mock;
use serde_json::{Value, json};

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

#[test]
fn shares_are_read_and_written() {
    let cancel: ShareAt = "10%@500ms".parse().expect("valid");
    assert_eq!(cancel, ShareAt { share: 0.1, time: Duration::from_millis(500) });
    assert_eq!((cancel, cancel.to_string().as_str()), ("0.1@0.5".parse().expect("valid"), "10%@500ms"));
    for text in ["", "10%", "@1s", "0@1s", "0%@1s", "101%@1s", "1.1@1s", "nan@1s", "10%@", "10%@0s", "-1%@1s"] {
        assert!(text.parse::<ShareAt>().is_err(), "{text}");
    }
}

/// Of 10 000 requests a tenth is 1000 with a standard deviation of 30.
#[test]
fn the_seed_chooses_the_share_that_is_touched() {
    let chosen = |seed: u64| {
        let args = FaultArgs { cancel: Some("10%@1s".parse().expect("valid")), ..FaultArgs::default() };
        let conducts = args.conducts(seed);
        (0..10_000).filter(|&index| conducts.of(index) != Conduct::Usual).collect::<Vec<u64>>()
    };
    assert!((880..=1120).contains(&chosen(1).len()), "{}", chosen(1).len());
    assert_eq!(chosen(1), chosen(1));
    assert_ne!(chosen(1), chosen(2));
    assert!((0..1000).all(|index| Conducts::default().of(index) == Conduct::Usual));
}

/// Answers take 300 ms and a third of the clients wait for 100: the others are served as if nothing were.
#[tokio::test]
async fn clients_that_hang_up_are_no_errors_and_the_rest_is_undisturbed() {
    let mock = Mock { ttft: Duration::from_millis(50), itl: Duration::from_millis(50), ..Mock::default() };
    let line = "--requests 60 --concurrency 10 --max-tokens 6 --cancel 33%@120ms --seed 4";
    let (outcome, report, requests) = run_against(mock, line).await;
    outcome.expect("the rest succeeds");
    let cancel = &report["faults"]["cancel"];
    assert_eq!((&cancel["cancelled"], &cancel["answered_before"]), (&cancel["requests"], &json!(0)), "{cancel}");
    let cancelled = count(&cancel["cancelled"]);
    assert!((8..=32).contains(&cancelled), "{cancel}");
    assert_eq!((count(&report["completed"]) + cancelled, count(&report["failed"])), (60, 0));
    assert_eq!(requests.len(), 2 + 60, "all were sent");
    assert_eq!(report["errors_by_kind"], json!({}));
    // The times are of the rest alone: none is cut short.
    assert!(report["p50_e2el_ms"].as_f64() >= Some(299.0), "{}", report["p50_e2el_ms"]);
    let note = format!("{cancelled} requests met a client");
    assert!(report["notes"].to_string().contains(&note), "{}", report["notes"]);
}

#[tokio::test]
async fn requests_that_end_before_the_client_hangs_up_are_told_apart() {
    let line = "--requests 12 --cancel 100%@5s --requests-file";
    let lines = tempfile::NamedTempFile::new().expect("a temporary file");
    let (outcome, report, _) = run_against(Mock::default(), &format!("{line} {}", lines.path().display())).await;
    outcome.expect("a run of nothing but faults is no failure");
    let cancel = &report["faults"]["cancel"];
    assert_eq!(
        (&cancel["answered_before"], &cancel["cancelled"], &report["completed"]),
        (&json!(12), &json!(0), &json!(0))
    );
    let text = std::fs::read_to_string(lines.path()).expect("written");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(lines.len() == 12 && lines.iter().all(|line| line["fault"] == "cancel"), "{text}");
}

#[tokio::test]
async fn a_report_without_faults_does_not_speak_of_them() {
    let (outcome, report, _) = run_against(Mock::default(), "--requests 3").await;
    outcome.expect("all succeed");
    assert_eq!(report.get("faults"), None);
}
