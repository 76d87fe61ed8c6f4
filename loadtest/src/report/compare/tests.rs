use super::*;
use crate::client::record::RequestRecord;
use crate::figures::tally::Tally;
use crate::testing::reports;
use serde_json::json;

/// A report of `requests` requests with times of about 20 ms to the first token, times `slowness`.
fn report(requests: u64, slowness: f64) -> Value {
    let mut tally = Tally::default();
    for index in 0..requests {
        let scatter = 1.0 + (index * 7919 % 101) as f64 / 100.0;
        let at = |ms: f64| (ms * slowness * scatter * 1e6) as u64;
        let mut record = RequestRecord::new(index, 0, 0);
        record.chunks_ns = vec![at(20.0), at(25.0), at(30.0)];
        record.ended_ns = at(31.0);
        tally.add(&record);
    }
    reports::report(tally).to_json()
}

fn compared(a: &Value, b: &Value) -> String {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let files = [(a, "a.json"), (b, "b.json")].map(|(report, name)| {
        let path = directory.path().join(name);
        fs::write(&path, report.to_string()).expect("writable");
        path
    });
    Comparison::read(&CompareArgs { a: files[0].clone(), b: files[1].clone() }).expect("two reports").to_string()
}

/// The words of the row `figure` under the heading `kind`.
fn row<'a>(table: &'a str, kind: &str, figure: &str) -> Vec<&'a str> {
    let mut lines = table.lines().skip_while(|line| !line.starts_with(kind));
    let line = lines.find(|line| line.trim_start().starts_with(figure)).unwrap_or_else(|| panic!("{table}"));
    line.trim_start().trim_start_matches(figure).split_whitespace().collect()
}

#[test]
fn a_known_ratio_is_found_and_its_interval_holds_it() {
    let table = compared(&report(200, 1.0), &report(200, 1.5));
    for kind in ["time to first token", "per output token", "end to end,"] {
        for figure in ["mean", "median", "p95"] {
            let words = row(&table, kind, figure);
            let number = |at: usize| words[at].parse::<f64>().unwrap_or_else(|_| panic!("{words:?}"));
            assert!((number(2) - 1.5).abs() < 5e-3, "{kind} {figure}: {words:?}");
            assert_eq!(words[4], "to");
            let (low, high) = (number(3), number(5));
            assert!((1.2..=1.5).contains(&low) && (1.5..1.8).contains(&high), "{kind} {figure}: {words:?}");
        }
        assert_eq!(row(&table, kind, "p99")[3], "-", "two requests of 200 lie beyond p99");
    }
    assert_eq!(row(&table, "between tokens (ITL)", "mean")[2..], ["1.500", "-"]);
    assert_eq!(row(&table, "requests a second", "requests a second")[2..], ["0.667", "-"]);
}

#[test]
fn a_run_beside_itself_differs_in_nothing() {
    let same = report(100, 1.0);
    let table = compared(&same, &same);
    let words = row(&table, "time to first token", "mean");
    assert_eq!((words[2], &words[6..]), ("1.000", &["holds", "1"][..]));
    assert!(!table.contains("differ in"), "{table}");
}

#[test]
fn what_cannot_be_told_is_said() {
    let (a, mut b) = (report(50, 1.0), report(50, 1.0));
    b["max_tokens"] = json!(64);
    b["failed"] = json!(7);
    b["total_output_tokens"] = json!(300);
    b["model_id"] = json!("m\u{1b}[2J");
    b["faults"] = json!({"cancel": {}, "half_open\u{1b}": {}});
    b.as_object_mut().expect("an object").remove("sampled_requests");
    let table = compared(&a, &b);
    for want in [
        "the runs differ in max_tokens: 3 and 64",
        "7 of 57 requests of B did not succeed",
        "answers of B are 2.00 times as long",
        "B holds no times of single requests",
        "B ran with faults (cancel, half_open ): its rates",
    ] {
        assert!(table.contains(want), "{want} in\n{table}");
    }
    assert!(!table.contains('\u{1b}') && !table.contains("A holds no times"), "{table}");
    assert_eq!(row(&table, "time to first token", "mean")[2..], ["1.000", "-"]);
}

#[test]
fn a_run_without_success_compares_without_nan() {
    let table = compared(&report(0, 1.0), &report(50, 1.0));
    assert!(!table.contains("NaN") && !table.contains("inf"), "{table}");
    assert_eq!(row(&table, "time to first token", "mean")[0], "-");
}

#[test]
fn files_that_are_no_reports_are_refused_by_name() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.json");
    let refusal = || {
        Comparison::read(&CompareArgs { a: path.clone(), b: path.clone() })
            .map(|_| ())
            .expect_err("no report")
            .to_string()
    };
    assert!(refusal().starts_with("cannot read ") && refusal().contains("x.json"));
    for text in ["", "[]", "{\"a\": 1}"] {
        fs::write(&path, text).expect("writable");
        assert!(refusal().contains("x.json is no report"), "{text}: {}", refusal());
    }
}
