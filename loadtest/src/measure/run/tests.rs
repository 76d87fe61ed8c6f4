use super::*;
use crate::args::LoadtestArgs;
use crate::report::contents::Report;
use crate::run::mock::{Fault, Mock};
use crate::run::workload::Workload;
use crate::stats::distribution::Distribution;
use crate::testing::markup::{elements, within};
use crate::testing::reports;
use crate::testing::runs::{parse, run_against, run_line};
use serde_json::Value;

/// The notes of a report, but for the one that a machine busy with other tests may give cause for.
fn notes(report: &Value) -> Vec<&str> {
    let notes = report["notes"].as_array().expect("a list").iter();
    notes
        .map(|note| note.as_str().expect("a text"))
        .filter(|note| !note.contains(" ms late or more") && !note.contains("itself was late"))
        .collect()
}

#[tokio::test]
async fn a_whole_run_counts_what_it_sent() {
    let mock = Mock { ttft: Duration::from_millis(30), itl: Duration::from_millis(10), fault: Fault::None };
    let line = "--requests 20 --concurrency 4 --warmup 6 --prompt-tokens 101 --max-tokens 6 --ignore-eos --seed 3";
    let (outcome, report, requests) = run_against(mock, line).await;
    outcome.expect("all requests succeed");
    assert_eq!(requests.len(), 2 + 6 + 20, "two to size the prompts, six to warm up");
    assert!(requests.iter().all(|request| request["model"] == "mock" && request["path"] == "/v1/chat/completions"));
    for (field, want) in [
        ("completed", 20),
        ("failed", 0),
        ("num_prompts", 20),
        ("total_output_tokens", 120),
        // The mock counts two tokens a word and three for its template.
        ("total_input_tokens", 20 * 101),
        ("max_concurrent_requests", 4),
        ("max_concurrency", 4),
        ("warmup_requests", 6),
    ] {
        assert_eq!(report[field], want, "{field}");
    }
    assert_eq!(notes(&report), [""; 0]);
    let ms = |field: &str| report[field].as_f64().unwrap_or_else(|| panic!("{field} is {}", report[field]));
    // A late first token shortens the gaps after it: only the sum has a lower bound, but for the histogram's 0.1 %.
    assert!(ms("median_ttft_ms") >= 29.9 && ms("median_e2el_ms") >= 79.9);
    assert!(ms("mean_itl_ms") > 0.0 && ms("mean_tpot_ms") > 0.0);
    let seconds = report["duration"].as_f64().expect("a number");
    assert!((ms("request_throughput") - 20.0 / seconds).abs() < 1e-6);
    assert!((ms("output_throughput") - 120.0 / seconds).abs() < 1e-6);
}

#[tokio::test]
async fn a_run_writes_its_page_and_compares_with_itself() {
    let mock = Mock { ttft: Duration::from_millis(5), itl: Duration::from_millis(2), fault: Fault::None };
    let mock = mock.serve().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let [page, json] = ["run.html", "run.json"].map(|name| directory.path().join(name).display().to_string());
    run_line(&format!("--requests 12 --target {} --html {page} --json {json}", mock.base))
        .await
        .expect("all requests succeed");
    let drawn = elements(&std::fs::read_to_string(&page).expect("the page was written"));
    within(&drawn);
    assert_eq!(drawn.iter().filter(|element| element.name == "polyline").count(), 3 * 2 + 2);
    run_line(&format!("compare {json} {json}")).await.expect("two reports");
    let refusal = run_line(&format!("compare {json} {page}")).await.expect_err("a page");
    assert!(refusal.to_string().contains("run.html is no report"), "{refusal}");
}

#[tokio::test]
async fn several_runs_have_a_spread_limits_and_a_line_for_each_request() {
    let lines = tempfile::NamedTempFile::new().expect("a temporary file");
    let line = "--runs 3 --requests 10 --concurrency 2 --max-tokens 3 --slo ttft=1h,e2e=1ms --requests-file";
    let mock = Mock { ttft: Duration::from_millis(5), ..Mock::default() };
    let (outcome, report, requests) = run_against(mock, &format!("{line} {}", lines.path().display())).await;
    outcome.expect("all requests succeed");
    assert_eq!((&report["completed"], &report["good_requests"]), (&Value::from(10), &Value::from(0)));
    assert_eq!(report["slo"], "ttft 3600s, e2e 1ms");
    let throughput = &report["spread"]["figures"]["output_throughput"];
    let mut values: Vec<f64> = serde_json::from_value(throughput["values"].clone()).expect("numbers");
    values.sort_by(f64::total_cmp);
    assert_eq!((values.len(), values[1]), (3, report["output_throughput"].as_f64().expect("a number")));
    assert!(throughput["cv"].is_number(), "{throughput}");

    let text = std::fs::read_to_string(lines.path()).expect("the lines were written");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 30);
    assert!((0..3).all(|run| lines.iter().filter(|line| line["run"] == run).count() == 10));
    assert!(lines.iter().all(|line| line["itl_ms"].as_array().is_some_and(|gaps| gaps.len() == 2)));
    assert!(lines.iter().all(|line| line["error"].is_null() && line["ttft_ms"].as_f64() >= Some(5.0)));
    let mut prompts: Vec<String> = requests.iter().map(|request| request["messages"].to_string()).collect();
    prompts.sort();
    prompts.dedup();
    assert_eq!(prompts.len(), 2 + 30, "runs do not repeat prompts");
}

#[tokio::test]
async fn a_trace_decides_when_and_how_long_each_request_is() {
    let mut trace = tempfile::NamedTempFile::new().expect("a temporary file");
    for (time_s, prompt_tokens, output_tokens) in [(0.0, 51, 2), (0.1, 31, 3), (0.2, 71, 4)] {
        let line =
            serde_json::json!({"time_s": time_s, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens});
        writeln!(trace, "{line}").expect("writable");
    }
    let line = format!("--trace {} --warmup 2 --min-tokens 3 --runs 2", trace.path().display());
    let (outcome, report, requests) = run_against(Mock::default(), &line).await;
    outcome.expect("all requests succeed");
    assert_eq!((&report["completed"], &report["prompt_tokens_asked"]), (&Value::from(3), &Value::from("trace")));
    assert_eq!((&report["total_input_tokens"], &report["total_output_tokens"]), (&Value::from(153), &Value::from(9)));
    assert!(report["duration"].as_f64() >= Some(0.2), "{}", report["duration"]);
    // Two that size the prompts, two to warm up, and the trace twice.
    let lengths = |field: &str| requests[4..].iter().map(|request| request[field].clone()).collect::<Vec<_>>();
    assert_eq!(lengths("max_tokens"), [2, 3, 4, 2, 3, 4].map(Value::from));
    assert_eq!(lengths("min_tokens"), [2, 3, 3, 2, 3, 3].map(Value::from));
}

#[tokio::test]
async fn drawn_lengths_and_a_shared_beginning_reach_the_server() {
    let line = "--requests 40 --prompt-tokens 33..73 --max-tokens 2..5 --shared-prefix 0.5 --endpoint completions";
    let (outcome, report, requests) = run_against(Mock::default(), line).await;
    outcome.expect("all requests succeed");
    assert_eq!((&report["prompt_tokens_asked"], &report["max_tokens"]), (&Value::from("33..73"), &Value::from("2..5")));
    let tokens: Vec<u64> = requests[2..].iter().map(|r| r["max_tokens"].as_u64().expect("a number")).collect();
    assert!((2..=5).all(|length| tokens.contains(&length)), "{tokens:?}");
    let prompts: Vec<&str> = requests[2..].iter().map(|r| r["prompt"].as_str().expect("text")).collect();
    let words: Vec<usize> = prompts.iter().map(|prompt| prompt.split(' ').count()).collect();
    // Two tokens a word and three for the template.
    assert!(words.iter().all(|words| (15..=35).contains(words)) && words.iter().max() > words.iter().min());
    let beginning = |prompt: &str| prompt.split(' ').take(7).collect::<Vec<_>>().join(" ");
    assert!(prompts.iter().all(|prompt| beginning(prompt) == beginning(prompts[0])));
}

#[tokio::test]
async fn a_chat_goes_on_with_the_servers_answers() {
    let line = "--turns 3 --concurrency 1 --requests 7 --prompt-tokens 20 --max-tokens 2";
    let (outcome, report, requests) = run_against(Mock::default(), line).await;
    outcome.expect("all requests succeed");
    assert_eq!(report["arrivals"], "closed loop, 1 chats of 3 turns at a time, 7 requests");
    let chats: Vec<&Vec<Value>> = requests[2..].iter().map(|r| r["messages"].as_array().expect("messages")).collect();
    assert_eq!(chats.iter().map(|chat| chat.len()).collect::<Vec<_>>(), [1, 3, 5, 1, 3, 5, 1]);
    assert_eq!((&chats[2][..1], &chats[2][..3]), (&chats[0][..], &chats[1][..]), "a turn begins with those before it");
    assert_eq!(chats[1][1], serde_json::json!({"role": "assistant", "content": "word word "}));
    assert!(chats[2][4]["role"] == "user" && chats[2][4] != chats[2][0]);
}

#[tokio::test]
async fn a_chat_that_a_request_failed_in_begins_again() {
    let mock = Mock { fault: Fault::EndAfter(1), ..Mock::default() };
    let (_, report, requests) = run_against(mock, "--turns 3 --concurrency 1 --requests 4").await;
    assert_eq!(report["failed"], 4);
    assert!(requests.iter().all(|request| request["messages"].as_array().map(Vec::len) == Some(1)));
}

#[tokio::test]
async fn a_window_without_requests_is_an_error() {
    let (outcome, ..) = run_against(Mock::default(), "--requests 5 --exclude-start 1h").await;
    assert!(outcome.expect_err("nothing counted").to_string().contains("--exclude-start"));
}

#[tokio::test]
async fn prompts_differ_and_the_seed_repeats_them() {
    let prompts = |requests: Vec<Value>| {
        let mut prompts: Vec<String> =
            requests.iter().map(|request| request["prompt"].as_str().expect("a text prompt").to_owned()).collect();
        prompts.sort();
        prompts
    };
    let line = "--endpoint completions --requests 12 --max-tokens 1 --rate 200 --arrivals constant";
    let (outcome, report, requests) = run_against(Mock::default(), line).await;
    outcome.expect("all requests succeed");
    assert_eq!((&report["request_rate"], &report["backend"]), (&Value::from(200.0), &Value::from("openai")));
    let first = prompts(requests);
    let mut distinct = first.clone();
    distinct.dedup();
    assert_eq!(distinct.len(), 14);
    let (_, _, again) = run_against(Mock::default(), line).await;
    assert_eq!(prompts(again), first);
}

#[tokio::test]
async fn a_run_without_success_reports_and_fails() {
    let fault = Fault::Status(429, r#"{"error":{"message":"queue is full","code":"queue_full"}}"#);
    let (outcome, report, _) = run_against(Mock { fault, ..Mock::default() }, "--requests 5 --concurrency 2").await;
    let message = outcome.expect_err("nothing succeeded").to_string();
    assert!(message.contains("5 of 5") && message.contains("http_429:queue_full"), "{message}");
    assert_eq!(report["errors_by_kind"], serde_json::json!({"http_429:queue_full": 5}));
    assert_eq!((&report["failed"], &report["mean_ttft_ms"]), (&Value::from(5), &Value::Null));
}

#[tokio::test]
async fn a_server_that_does_not_count_is_measured_with_a_note() {
    let mock = Mock { fault: Fault::NoUsage, ..Mock::default() };
    let (outcome, report, _) = run_against(mock, "--requests 3 --max-tokens 7").await;
    outcome.expect("all requests succeed");
    assert_eq!(report["total_output_tokens"], 21, "chunks stand in for tokens");
    let notes = notes(&report);
    let [prompts, answers] = &notes[..] else { panic!("{notes:?}") };
    assert!(prompts.contains("does not count prompt tokens"), "{prompts}");
    assert!(answers.starts_with("3 answers came without usage"), "{answers}");
}

#[tokio::test]
async fn bad_targets_and_files_are_refused_before_any_load() {
    let refusal = async |line: &str| format!("{:#}", run_line(line).await.expect_err(line));
    assert!(refusal("--target https://localhost").await.contains("TLS"));
    assert!(refusal("--rate 0").await.contains("requests a second"));
    assert!(refusal("--target http://127.0.0.1:1").await.contains("--model"));
    let no_directory = refusal("--model m --target http://127.0.0.1:1 --json /no/such/dir/x.json").await;
    assert!(no_directory.contains("/no/such/dir/x.json"), "{no_directory}");
}

#[test]
fn the_table_shows_every_figure_and_survives_an_empty_run() {
    let args = parse::<LoadtestArgs>("").expect("defaults").load;
    let target = Target::new(&args.target, None, args.timeout).expect("valid");
    let shapes = Shapes::Drawn { prompt: args.prompt_tokens, output: args.max_tokens, seed: 0 };
    let workload = Workload::plain(target, "m\u{1b}[2J", shapes, args.timeout);
    let report = |tally| Report { setup: setup_of(&args, &workload), ..reports::report(tally) };
    let empty = report(Tally::default()).to_string();
    assert!(!empty.contains("NaN") && !empty.contains('\u{1b}'), "{empty}");
    let mut record = RequestRecord::new(0, 0, 1_000_000);
    record.chunks_ns = vec![3_000_000, 4_000_000];
    record.ended_ns = 5_000_000;
    let mut tally = reports::tally([&record]);
    let mut lags = Distribution::default();
    lags.record_ns(6_000_000);
    tally.close(1, lags);
    let report = report(tally);
    let table = report.to_string();
    for metric in report.tally.metrics() {
        let line = table.lines().find(|line| line.starts_with(metric.title)).expect(metric.title);
        assert!(!line.contains(" - "), "{line}");
    }
    assert!(table.contains("note: the load tester itself was late"), "{table}");
}
