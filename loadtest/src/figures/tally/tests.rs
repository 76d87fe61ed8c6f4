use super::*;
use crate::testing::records::{self, MS};
use crate::testing::reports::{report, tally};
use serde_json::{Value, json};
use std::time::Duration;

/// With the server's own count of what came.
fn record(due_ms: u64, sent_ms: u64, chunks_ms: &[u64]) -> RequestRecord {
    let mut record = records::record(due_ms, sent_ms, chunks_ms);
    record.finished_ns = record.chunks_ns.last().copied();
    record.completion_tokens = Some(chunks_ms.len() as u64);
    record.prompt_tokens = Some(10);
    record.finish_reason = Some("length".into());
    record
}

#[test]
fn figures_are_computed_as_defined() {
    let failed = RequestRecord { failure: Some(Failure::Timeout), ..record(0, 0, &[]) };
    let answered = [record(0, 100, &[300, 400, 500]), record(1000, 1000, &[1200, 1600, 2000])];
    let report = report(tally(answered.iter().chain([&failed]))).to_json();
    let near = |field: &str, want: f64| {
        let got = report[field].as_f64().unwrap_or_else(|| panic!("{field} is {}", report[field]));
        assert!((got - want).abs() <= want * 2e-3, "{field}: {got} for {want}");
    };
    near("duration", 2.0);
    near("completed", 2.0);
    near("failed", 1.0);
    near("num_prompts", 3.0);
    near("request_throughput", 1.0);
    near("output_throughput", 3.0);
    near("total_token_throughput", 13.0);
    near("max_output_tokens_per_s", 3.0);
    near("mean_ttft_ms", 200.0);
    near("mean_ttft_from_intended_ms", 250.0);
    near("mean_itl_ms", 250.0);
    near("p99_itl_ms", 400.0);
    near("p99.9_itl_ms", 400.0);
    near("mean_tpot_ms", 250.0);
    near("std_tpot_ms", 150.0);
    near("mean_e2el_ms", 700.0);
    near("mean_e2el_from_intended_ms", 750.0);
    near("mean_client_delay_ms", 50.0);
    near("max_client_delay_ms", 100.0);
    assert_eq!(report["request_rate"], "inf");
    assert_eq!(report["errors_by_kind"], json!({"timeout": 1}));
    assert_eq!(report["finish_reasons"], json!({"length": 2}));
    let notes = report["notes"].as_array().expect("a list of notes");
    let given_up = "given up for taking too long, and missing from the times: 1";
    assert!(notes.contains(&json!(given_up)), "{notes:?}");
}

/// A stream every second of ten tokens at 100 ms; the first and last two of ten seconds are left out.
#[test]
fn only_the_window_counts() {
    let slo = Slo { e2e: Some(Duration::from_millis(1000)), ..Slo::default() };
    let mut tally = Tally::new(Window { from_ns: 2000 * MS, to_ns: 8000 * MS }, Some(slo));
    for second in 0..10 {
        let start = second * 1000;
        let chunks: Vec<u64> = (1..=10).map(|token| start + token * 100).collect();
        let slow = if second == 5 { 50 } else { 0 };
        let mut record = record(start, start, &chunks);
        record.ended_ns += slow * MS;
        tally.add(&record);
    }
    let mut failed = record(500, 500, &[]);
    failed.failure = Some(Failure::Timeout);
    tally.add(&failed);
    assert_eq!((tally.completed, tally.failed, tally.excluded, tally.excluded_failed), (6, 0, 5, 1));
    assert_eq!((tally.good(), tally.good_requests_per_s()), (Some(5), Some(5.0 / 6.0)));
    // Tokens from 2.0 s to 7.9 s: the last of the second stream is in, that of the eighth is not.
    assert!((tally.output_tokens_per_s() - 10.0).abs() < 1e-9);
    assert!((tally.requests_per_s() - 1.0).abs() < 1e-9);
    assert_eq!((tally.duration_s(), tally.window_s()), (10.0, (2.0, 8.0)));
    let note = "counted from 2.0 s to 8.0 s of the run: 5 requests due outside of it are left out, 1 of them failed";
    let notes = report(tally).notes();
    assert!(notes.contains(&note.to_owned()), "{notes:?}");
}

/// A reader that takes its time does not make the run longer for the others, but stands on the timeline.
#[test]
fn requests_with_a_fault_are_in_no_figure() {
    let conduct = Conduct::ReadSlowly(Duration::from_secs(1));
    let tally = tally([&record(0, 0, &[500, 1000]), &RequestRecord { conduct, ..record(0, 0, &[500, 4000]) }]);
    assert_eq!((tally.completed, tally.failed, tally.misused), (1, 0, 1));
    assert_eq!((tally.duration_s(), tally.output_tokens_per_s()), (1.0, 2.0));
    let moments = tally.moments();
    assert_eq!((moments[5].in_flight, moments[20].in_flight, moments[39].to_s), (2.0, 1.0, 4.0));
    assert!(report(tally).notes()[0].starts_with("1 requests met a client that misbehaved"));
}

/// Two tokens a chunk, where they were counted.
#[test]
fn what_was_cut_off_counts_as_far_as_it_came() {
    let mut tally = Tally::default();
    assert_eq!(tally.arrived_tokens_per_s(), 0.0);
    let cut_off = |due_ms, chunks_ms| RequestRecord {
        failure: Some(Failure::Interrupted),
        ended_ns: 2000 * MS,
        ..records::record(due_ms, due_ms, chunks_ms)
    };
    tally.add(&RequestRecord { completion_tokens: Some(4), ..records::record(0, 0, &[100, 110]) });
    tally.add_cut_off(&cut_off(0, &[100, 150]));
    tally.add_cut_off(&cut_off(1000, &[]));
    // One that failed says nothing of the others' times.
    tally.add(&RequestRecord { failure: Some(Failure::Truncated), ended_ns: 9000 * MS, ..records::record(0, 0, &[1]) });
    for (key, percentile, want) in [
        ("ttft_from_intended", 50.0, 100.0),
        ("ttft_from_intended", 99.0, 1000.0),
        ("itl", 99.0, 50.0),
        ("tpot", 99.0, 50.0),
    ] {
        let ms = tally.percentile_ms(key, percentile).expect(key);
        assert!((ms / want - 1.0).abs() < 2e-3, "{key}: {ms} for {want}");
    }
    assert_eq!(tally.times("ttft").map(Distribution::count), Some(3));
    assert!((tally.arrived_tokens_per_s() - 4.0 * 2.0 / 2.0).abs() < 1e-9, "four chunks of two tokens in 2 s");
}

#[test]
fn a_run_without_success_has_nulls_and_no_nan() {
    let report = report(Tally::default()).to_json();
    assert_eq!(report["mean_ttft_ms"], Value::Null);
    assert_eq!(report["request_throughput"], 0.0);
}

#[test]
fn the_cached_share_is_of_the_prompts_whose_server_says_it() {
    let said = |all, cached| RequestRecord { prompt_tokens: Some(all), cached_tokens: cached, ..record(0, 0, &[10]) };
    assert_eq!(tally(&[said(100, None)]).cached_share(), None);
    assert_eq!(tally(&[said(100, None), said(300, Some(0)), said(100, Some(40))]).cached_share(), Some(0.1));
    let report = report(tally(&[said(100, Some(25))]));
    assert_eq!(report.to_json()["cached_input_share"], 0.25);
    assert!(report.to_string().contains("25.0 % cached"), "{report}");
}

#[test]
fn servers_cannot_fill_the_memory_with_names() {
    let mut tally = Tally::default();
    for i in 0..1000 {
        let mut failed = record(0, 0, &[]);
        failed.failure = Some(Failure::StreamError { code: Some(format!("code{i}")), message: "x".repeat(1000) });
        tally.add(&failed);
        let mut reason = record(0, 0, &[1]);
        reason.finish_reason = Some(format!("reason{i}"));
        tally.add(&reason);
    }
    assert_eq!((tally.errors.len(), tally.finish_reasons.len()), (MAX_KINDS + 1, MAX_KINDS + 1));
    assert_eq!(tally.errors.values().map(|(count, _)| count).sum::<u64>(), 1000);
}

#[test]
fn several_tokens_a_chunk_and_missing_usage_are_said() {
    let notes = |records: &[RequestRecord]| report(tally(records)).notes();
    let two_a_chunk = RequestRecord { completion_tokens: Some(4), ..record(0, 0, &[10, 20]) };
    let uncounted = RequestRecord { completion_tokens: None, ..record(0, 0, &[]) };
    let said = notes(std::slice::from_ref(&two_a_chunk));
    assert!(said[0].starts_with("2.00 tokens a chunk"), "{said:?}");
    let said = notes(&[two_a_chunk, uncounted, record(0, 50, &[60])]);
    let [usage, text, late] = &said[..] else { panic!("{said:?}") };
    assert!(usage.contains("came without usage") && text.contains("held no text"), "{said:?}");
    assert!(late.contains("50.0 ms late"), "{said:?}");
}
