//! Looplane's load tester: sees the product only from outside.
//!
//! [`run`] asks the server for its model, fits prompts to how it counts tokens, warms it up, sends the load and reports.
//! Arrivals decide when a request is due, [`drive`] sends it, [`client`] follows its stream into a record, and
//! [`report`] counts records into figures as they come, so that memory does not grow with the run. [`compare`] sets two
//! reports side by side.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

mod answer;
mod args;
pub mod arrivals;
mod bootstrap;
pub mod client;
pub mod compare;
pub mod distribution;
pub mod drive;
mod html;
#[cfg(test)]
mod markup;
#[cfg(test)]
mod mock;
pub mod plot;
pub mod prompt;
pub mod record;
pub mod report;
mod sample;
pub mod sse;
mod table;
pub mod timeline;

pub use args::{ArgsError, ArrivalsArg, CompareArgs, LoadtestArgs, LoadtestCommand};

use client::Client;
use compare::Comparison;
use drive::{Endpoint, Extent, Load, Pacing, Running, Workload};
use html::Page;
use prompt::{Prompts, probe_words};
use record::{Clock, RequestRecord};
use report::{Setup, Tally};
use table::Table;

/// How often the progress line is renewed.
const PROGRESS_PERIOD: Duration = Duration::from_millis(500);

/// Runs the load that `args` describe against their target, prints the report on standard output and writes it to
/// `--json` and `--html`; or compares two reports where that is asked. Ctrl-C ends the run early, and what was measured until then is reported.
///
/// # Errors
/// Options that contradict each other, a target that cannot be used or names no model, a file that cannot be written,
/// and a run in which no request succeeded (after its report). Files to compare that are no reports.
pub async fn run(args: LoadtestArgs) -> anyhow::Result<()> {
    if let Some(LoadtestCommand::Compare(files)) = &args.command {
        let comparison = Comparison::read(&files.a, &files.b)?.to_string();
        return io::stdout().write_all(comparison.as_bytes()).context("cannot print the comparison");
    }
    let stop = CancellationToken::new();
    let on_ctrl_c = tokio::spawn({
        let stop = stop.clone();
        async move {
            if tokio::signal::ctrl_c().await.is_ok() {
                stop.cancel();
            }
        }
    });
    let outcome = measure(&args, &stop).await;
    on_ctrl_c.abort();
    outcome
}

async fn measure(args: &LoadtestArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let pacing = args.pacing()?;
    let client = Client::new(&args.target, args.api_key.as_deref(), args.timeout)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => tokio::select! {
            model = client.first_model() => model
                .with_context(|| format!("{} does not say which model it serves (or name one: --model)", client.base()))?,
            () = stop.cancelled() => bail!("stopped before the run began"),
        },
    };
    let files = Files {
        json: args.json.as_deref().map(open_for_report).transpose()?,
        html: args.html.as_deref().map(open_for_report).transpose()?,
    };
    let mut workload = Workload {
        client,
        endpoint: args.endpoint,
        model,
        prompts: Prompts::of_words(args.prompt_tokens as usize, args.seed),
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        timeout: args.timeout,
    };
    let mut setup = setup_of(args, &workload);
    tokio::select! {
        fitted = fit_prompts(&workload, args) => match fitted {
            Ok(prompts) => workload.prompts = prompts,
            Err(why) => setup.notes.push(format!("prompts have a word for each token asked for, as {why}")),
        },
        () = stop.cancelled() => bail!("stopped before the run began"),
    }
    let workload = Arc::new(workload);
    warm_up(&workload, args, stop, &mut setup).await;

    let load = Load { pacing, extent: args.extent(), first_index: args.warmup };
    let mut running = drive::start(workload, load, stop.clone());
    let tally = collect(&mut running, io::stderr().is_terminal()).await;
    report(&setup, &tally, running.peak_in_flight(), files)
}

fn setup_of(args: &LoadtestArgs, workload: &Workload) -> Setup {
    Setup {
        target: workload.client.base().to_owned(),
        backend: match args.endpoint {
            Endpoint::Chat => "openai-chat",
            Endpoint::Completions => "openai",
        },
        model: record::printable(&workload.model, 200),
        pacing: args.pacing_in_words(),
        rate_per_s: args.rate,
        burstiness: args.shape(),
        max_concurrency: args.max_concurrency(),
        seed: args.seed,
        prompt_tokens: args.prompt_tokens,
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        warmup: args.warmup,
        notes: Vec::new(),
    }
}

/// Asks the server to count two prompts and sizes the run's prompts by its answers; says why not where it cannot.
async fn fit_prompts(workload: &Workload, args: &LoadtestArgs) -> Result<Prompts, String> {
    let (short, long) = probe_words(args.prompt_tokens);
    let mut counts = [0; 2];
    for (count, words) in counts.iter_mut().zip([short, long]) {
        let body = workload.body(&Prompts::of_words(words, args.seed).text(u64::MAX), 1);
        let clock = Clock::start();
        let mut record = RequestRecord::new(0, 0, 0);
        workload.client.stream(workload.path(), body, clock, &mut record).await;
        if let Some(failure) = record.failure {
            return Err(format!("the request that was to size them failed: {failure}"));
        }
        *count = record.prompt_tokens.ok_or("the server does not count prompt tokens")?;
    }
    Prompts::fitted(args.prompt_tokens, counts[0], counts[1], args.seed)
        .ok_or_else(|| "the server counts a longer prompt as no longer".into())
}

/// Sends the requests that are not counted, as many at a time as the run itself may, and notes how many failed.
async fn warm_up(workload: &Arc<Workload>, args: &LoadtestArgs, stop: &CancellationToken, setup: &mut Setup) {
    let concurrency = args.max_concurrency().min(usize::try_from(args.warmup).unwrap_or(usize::MAX));
    let load = Load { pacing: Pacing::Closed { concurrency }, extent: Extent::Requests(args.warmup), first_index: 0 };
    let mut running = drive::start(workload.clone(), load, stop.clone());
    let tally = collect(&mut running, false).await;
    if tally.failed() > 0 {
        setup.notes.push(format!("{} of {} warm-up requests failed", tally.failed(), args.warmup));
    }
}

/// Counts records until the last request has ended.
async fn collect(running: &mut Running, show_progress: bool) -> Tally {
    let mut tally = Tally::default();
    let mut tick = tokio::time::interval(PROGRESS_PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            record = running.records.recv() => match record {
                Some(record) => tally.add(&record),
                None => break,
            },
            _ = tick.tick(), if show_progress => {
                let elapsed_s = running.clock.now_ns() as f64 / 1e9;
                // A progress line that cannot be shown is no reason to stop.
                let _ = write!(
                    io::stderr(),
                    "\r{elapsed_s:.0} s: {} ok, {} failed, {} tokens ",
                    tally.completed(), tally.failed(), tally.output_tokens()
                );
            }
        }
    }
    if show_progress {
        let _ = writeln!(io::stderr());
    }
    tally
}

/// Files that the report goes to beside standard output.
struct Files {
    json: Option<File>,
    html: Option<File>,
}

fn report(setup: &Setup, tally: &Tally, peak_in_flight: usize, files: Files) -> anyhow::Result<()> {
    let table = Table { setup, tally, peak_in_flight }.to_string();
    // The files first: standard output may be a pipe that was closed.
    if let Some(file) = files.json {
        let text = format!("{:#}\n", tally.to_json(setup, peak_in_flight));
        replace(file, &text).context("cannot write the report to --json")?;
    }
    if let Some(file) = files.html {
        let page = Page { setup, tally, peak_in_flight, date: SystemTime::now() };
        replace(file, &page.to_string()).context("cannot write the report to --html")?;
    }
    io::stdout().write_all(table.as_bytes()).context("cannot print the report")?;
    if tally.completed() > 0 {
        return Ok(());
    }
    match tally.errors().iter().max_by_key(|(_, (count, _))| count) {
        Some((kind, (count, example))) => {
            bail!("no request succeeded; {count} of {} failed as {kind}: {example}", tally.failed())
        }
        None => bail!("the run was stopped before any request was answered"),
    }
}

/// Opens the report's file before the run, so that a bad path does not cost one; what it holds stays until the report
/// is there.
fn open_for_report(path: &Path) -> anyhow::Result<File> {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    opened.with_context(|| format!("cannot write the report to {}", path.display()))
}

fn replace(mut file: File, text: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{Fault, Mock};
    use clap::Parser;
    use serde_json::Value;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: LoadtestArgs,
    }

    /// Runs against `mock` with options `line` and returns the outcome, the report and the requests that were seen.
    async fn run_against(mock: Mock, line: &str) -> (anyhow::Result<()>, Value, Vec<Value>) {
        let mock = mock.serve().await;
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = directory.path().join("report.json");
        std::fs::write(&file, "x".repeat(1 << 16)).expect("writable");
        let line = format!("loadtest --target {} --json {} {line}", mock.base, file.display());
        let args = Cli::try_parse_from(line.split_whitespace()).expect("valid options").args;
        let outcome = run(args).await;
        let text = std::fs::read_to_string(&file).expect("the report was written");
        (outcome, serde_json::from_str(&text).expect("the report is JSON and nothing else"), mock.requests())
    }

    /// The notes of a report, but for the one that a machine busy with other tests may give cause for.
    fn notes(report: &Value) -> Vec<&str> {
        let notes = report["notes"].as_array().expect("a list").iter();
        notes.map(|note| note.as_str().expect("a text")).filter(|note| !note.contains(" ms late or more")).collect()
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
        assert!(ms("median_ttft_ms") >= 30.0 && ms("mean_itl_ms") >= 9.0 && ms("mean_tpot_ms") >= 9.0);
        assert!(ms("median_e2el_ms") >= 80.0);
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
        let line = ["loadtest", "--requests", "12", "--target", &mock.base, "--html", &page, "--json", &json];
        run(Cli::try_parse_from(line).expect("valid options").args).await.expect("all requests succeed");
        let drawn = markup::elements(&std::fs::read_to_string(&page).expect("the page was written"));
        markup::within(&drawn);
        assert_eq!(drawn.iter().filter(|element| element.name == "polyline").count(), 3 * 2 + 2);
        let compare = ["loadtest", "compare", &json, &json];
        run(Cli::try_parse_from(compare).expect("valid options").args).await.expect("two reports");
        let no_report = ["loadtest", "compare", &json, &page];
        let refusal = run(Cli::try_parse_from(no_report).expect("valid options").args).await.expect_err("a page");
        assert!(refusal.to_string().contains("run.html is no report"), "{refusal}");
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
        let refusal = async |line: &str| {
            let words = ["loadtest"].into_iter().chain(line.split_whitespace());
            let args = Cli::try_parse_from(words).expect("valid options").args;
            format!("{:#}", run(args).await.expect_err(line))
        };
        assert!(refusal("--target https://localhost").await.contains("TLS"));
        assert!(refusal("--rate 0").await.contains("requests a second"));
        assert!(refusal("--target http://127.0.0.1:1").await.contains("--model"));
        let no_directory = refusal("--model m --target http://127.0.0.1:1 --json /no/such/dir/x.json").await;
        assert!(no_directory.contains("/no/such/dir/x.json"), "{no_directory}");
    }

    #[test]
    fn the_table_shows_every_figure_and_survives_an_empty_run() {
        let args = Cli::try_parse_from(["loadtest"]).expect("defaults").args;
        let client = Client::new(&args.target, None, args.timeout).expect("valid");
        let workload = Workload {
            client,
            endpoint: Endpoint::Chat,
            model: "m\u{1b}[2J".into(),
            prompts: Prompts::of_words(1, 0),
            max_tokens: 1,
            ignore_eos: false,
            timeout: args.timeout,
        };
        let setup = setup_of(&args, &workload);
        let mut tally = Tally::default();
        let empty = Table { setup: &setup, tally: &tally, peak_in_flight: 0 }.to_string();
        assert!(!empty.contains("NaN") && !empty.contains('\u{1b}'), "{empty}");
        let mut record = RequestRecord::new(0, 0, 1_000_000);
        record.chunks_ns = vec![3_000_000, 4_000_000];
        record.ended_ns = 5_000_000;
        tally.add(&record);
        let table = Table { setup: &setup, tally: &tally, peak_in_flight: 1 }.to_string();
        for metric in tally.metrics() {
            let line = table.lines().find(|line| line.starts_with(metric.title)).expect(metric.title);
            assert!(!line.contains(" - "), "{line}");
        }
    }
}
