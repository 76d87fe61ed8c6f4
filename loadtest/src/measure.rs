//! One measurement from its options to its report.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::args::LoadtestArgs;
use crate::calibrate::{self, CalibrateArgs};
use crate::client::Client;
use crate::drive::{self, Endpoint, Extent, Load, Pacing, Running, Workload};
use crate::html::Page;
use crate::json::request_line;
use crate::lengths::Shapes;
use crate::prompt::{Prompts, probe_words};
use crate::record::{self, Clock, RequestRecord};
use crate::report::{Setup, Tally};
use crate::spread::{self, Spread};
use crate::table::Table;

/// How often the progress line is renewed.
const PROGRESS_PERIOD: Duration = Duration::from_millis(500);
/// Index of the prompts that size the others, which no request of a run has.
const PROBE_INDEX: u64 = u64::MAX - 1;
/// How long `--calibrate` measures the load tester before the run.
const CALIBRATION_LENGTH: Duration = Duration::from_secs(5);
/// Most streams that `--calibrate` opens, whatever the run may.
const MAX_CALIBRATION_STREAMS: usize = 1000;

/// Measures what `args` describe; see [`crate::run`].
pub async fn run(args: &LoadtestArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let (_, window, trace) = (args.pacing(0)?, args.window()?, args.read_trace()?.map(Arc::new));
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
    let requests_file = args.requests_file.as_deref().map(|path| {
        let file = File::create(path).with_context(|| format!("cannot write requests to {}", path.display()));
        file.map(BufWriter::new)
    });
    let requests_file = requests_file.transpose()?;
    let mut workload = Workload {
        client,
        endpoint: args.endpoint,
        model,
        prompts: Prompts::of_words(args.seed).sharing(args.shared_prefix),
        shapes: match &trace {
            Some(trace) => Shapes::Trace { trace: trace.clone(), first_index: args.warmup },
            None => Shapes::Drawn { prompt: args.prompt_tokens, output: args.max_tokens, seed: args.seed },
        },
        min_tokens: args.min_tokens,
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
    if args.calibrate {
        setup.calibration = Some(calibrate::beside_a_mock(&calibration_of(args), stop).await?);
    }
    warm_up(&workload, args, stop, &mut setup).await;

    let mut requests = RequestLines { file: requests_file, failure: None };
    let mut tallies = Vec::new();
    let mut first_index = args.warmup;
    for run in 0..args.runs {
        let pacing = match &trace {
            Some(trace) => {
                Pacing::Open { arrivals: Box::new(trace.due_times()), max_in_flight: args.max_concurrency() }
            }
            None => args.pacing(run)?,
        };
        let load = Load { pacing, extent: args.extent(), first_index };
        let mut running = drive::start(workload.clone(), load, stop.clone());
        let mut tally = Tally::new(window, args.slo);
        collect(&mut running, &mut tally, io::stderr().is_terminal(), |record| {
            first_index = first_index.max(record.index + 1);
            requests.write(run, record);
        })
        .await;
        tallies.push(tally);
        if stop.is_cancelled() {
            setup.notes.push(format!("stopped by the user in run {} of {}", run + 1, args.runs));
            break;
        }
    }
    report(&setup, &chosen(tallies), files)?;
    requests.finish()
}

/// The run to show: the only one, or the one in the middle with the spread of all that were not cut short.
fn chosen(mut tallies: Vec<Tally>) -> Tally {
    let whole = tallies.iter().filter(|tally| tally.interrupted() == 0).count();
    if whole > 0 {
        tallies.retain(|tally| tally.interrupted() == 0);
    }
    let spread = Spread::of(&tallies);
    match spread::middle(&tallies) {
        Some(middle) if tallies.len() > 1 => {
            let mut tally = tallies.swap_remove(middle);
            tally.stand_for(spread);
            tally
        }
        _ => tallies.pop().unwrap_or_default(),
    }
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
        rate: args.rate,
        burstiness: args.shape(),
        max_concurrency: args.max_concurrency(),
        seed: args.seed,
        shapes: workload.shapes.clone(),
        min_tokens: args.min_tokens,
        shared_prefix: args.shared_prefix,
        ignore_eos: args.ignore_eos,
        warmup: args.warmup,
        calibration: None,
        notes: Vec::new(),
    }
}

/// The load tester's own error at as many streams as the run may have.
fn calibration_of(args: &LoadtestArgs) -> CalibrateArgs {
    CalibrateArgs {
        streams: args.max_concurrency().min(MAX_CALIBRATION_STREAMS) as u32,
        duration: CALIBRATION_LENGTH,
        ttft: Duration::from_millis(100),
        itl: Duration::from_millis(20),
        json: None,
    }
}

/// Asks the server to count two prompts and sizes the run's prompts by its answers; says why not where it cannot.
async fn fit_prompts(workload: &Workload, args: &LoadtestArgs) -> Result<Prompts, String> {
    let longest = workload.shapes.longest_prompt();
    let (short, long) = probe_words(longest);
    let mut counts = [0; 2];
    for (count, words) in counts.iter_mut().zip([short, long]) {
        let body = workload.body(&Prompts::of_words(args.seed).text(PROBE_INDEX, words as u32), 1);
        let clock = Clock::start();
        let mut record = RequestRecord::new(0, 0, 0);
        workload.client.stream(workload.path(), body, clock, &mut record).await;
        if let Some(failure) = record.failure {
            return Err(format!("the request that was to size them failed: {failure}"));
        }
        *count = record.prompt_tokens.ok_or("the server does not count prompt tokens")?;
    }
    Prompts::fitted(longest, counts[0], counts[1], args.seed)
        .map(|prompts| prompts.sharing(args.shared_prefix))
        .ok_or_else(|| "the server counts a longer prompt as no longer".into())
}

/// Sends the requests that are not counted, as many at a time as the run itself may, and notes how many failed.
async fn warm_up(workload: &Arc<Workload>, args: &LoadtestArgs, stop: &CancellationToken, setup: &mut Setup) {
    let concurrency = args.max_concurrency().min(usize::try_from(args.warmup).unwrap_or(usize::MAX));
    let load = Load { pacing: Pacing::Closed { concurrency }, extent: Extent::Requests(args.warmup), first_index: 0 };
    let mut running = drive::start(workload.clone(), load, stop.clone());
    let mut tally = Tally::default();
    collect(&mut running, &mut tally, false, |_| ()).await;
    if tally.failed() > 0 {
        setup.notes.push(format!("{} of {} warm-up requests failed", tally.failed(), args.warmup));
    }
}

/// Counts records until the last request has ended; `each` sees them, too.
async fn collect(running: &mut Running, tally: &mut Tally, show_progress: bool, mut each: impl FnMut(&RequestRecord)) {
    let mut tick = tokio::time::interval(PROGRESS_PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            record = running.records.recv() => match record {
                Some(record) => {
                    each(&record);
                    tally.add(&record);
                }
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
    tally.close(running.peak_in_flight(), running.lags());
}

/// The file of `--requests-file`.
struct RequestLines {
    file: Option<BufWriter<File>>,
    failure: Option<io::Error>,
}

impl RequestLines {
    /// Appends a line. A file that cannot be written any more does not end the run, whose report is still to come:
    /// [`Self::finish`] tells.
    fn write(&mut self, run: u32, record: &RequestRecord) {
        if let Some(file) = &mut self.file
            && let Err(error) = writeln!(file, "{}", request_line(run, record))
        {
            self.failure = Some(error);
            self.file = None;
        }
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let flushed = self.file.as_mut().map_or(Ok(()), BufWriter::flush);
        self.failure.map_or(flushed, Err).context("--requests-file holds only some of the requests")
    }
}

/// Files that the report goes to beside standard output.
struct Files {
    json: Option<File>,
    html: Option<File>,
}

fn report(setup: &Setup, tally: &Tally, files: Files) -> anyhow::Result<()> {
    let table = Table { setup, tally }.to_string();
    // The files first: standard output may be a pipe that was closed.
    if let Some(file) = files.json {
        let text = format!("{:#}\n", tally.to_json(setup));
        replace(file, &text).context("cannot write the report to --json")?;
    }
    if let Some(file) = files.html {
        let page = Page { setup, tally, date: SystemTime::now() };
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
        None if tally.excluded().0 > 0 => {
            bail!("every request was due in a part of the run that is left out (--exclude-start, --exclude-end)")
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
    use crate::distribution::Distribution;
    use crate::mock::{Fault, Mock};
    use crate::{markup, run};
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
        assert_eq!(
            (&report["total_input_tokens"], &report["total_output_tokens"]),
            (&Value::from(153), &Value::from(9))
        );
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
        assert_eq!(
            (&report["prompt_tokens_asked"], &report["max_tokens"]),
            (&Value::from("33..73"), &Value::from("2..5"))
        );
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
            prompts: Prompts::of_words(0),
            shapes: Shapes::Drawn { prompt: args.prompt_tokens, output: args.max_tokens, seed: 0 },
            min_tokens: None,
            ignore_eos: false,
            timeout: args.timeout,
        };
        let setup = setup_of(&args, &workload);
        let mut tally = Tally::default();
        let empty = Table { setup: &setup, tally: &tally }.to_string();
        assert!(!empty.contains("NaN") && !empty.contains('\u{1b}'), "{empty}");
        let mut record = RequestRecord::new(0, 0, 1_000_000);
        record.chunks_ns = vec![3_000_000, 4_000_000];
        record.ended_ns = 5_000_000;
        tally.add(&record);
        let mut lags = Distribution::default();
        lags.record_ns(6_000_000);
        tally.close(1, lags);
        let table = Table { setup: &setup, tally: &tally }.to_string();
        for metric in tally.metrics() {
            let line = table.lines().find(|line| line.starts_with(metric.title)).expect(metric.title);
            assert!(!line.contains(" - "), "{line}");
        }
        assert!(table.contains("note: the load tester itself was late"), "{table}");
    }
}
