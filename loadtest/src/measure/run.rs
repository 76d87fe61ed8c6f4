//! One measurement from its options to its report.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use tokio_util::sync::CancellationToken;

use crate::client::record::{Clock, RequestRecord};
use crate::client::target::Target;
use crate::faults::report::FaultReport;
use crate::faults::run::FaultRun;
use crate::figures::spread::{self, Spread};
use crate::figures::tally::Tally;
use crate::load::conduct::Conducts;
use crate::load::pacing::{Extent, Pacing};
use crate::load::prompt::{Prompts, probes};
use crate::load::shapes::Shapes;
use crate::load::trace::Trace;
use crate::measure::args::LoadArgs;
use crate::report::contents::{Report, Setup};
use crate::report::json::request_line;
use crate::run::calibrate::{self, CalibrateArgs};
use crate::run::drive::{self, Load, Running};
use crate::run::live::Screen;
use crate::run::watch::{self, Before, ServerSide};
use crate::run::workload::{Endpoint, Workload};
use crate::text::printable;

/// How long `--calibrate` measures the load tester before the run.
const CALIBRATION_LENGTH: Duration = Duration::from_secs(5);
/// Most streams that `--calibrate` opens, whatever the run may.
const MAX_CALIBRATION_STREAMS: usize = 1000;

pub struct Prepared {
    pub workload: Arc<Workload>,
    pub setup: Setup,
}

/// Measures what `args` describe; see [`crate::run`].
pub async fn run(args: &LoadArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let (_, window, trace) = (args.pacing(0)?, args.window()?, args.read_trace()?.map(Arc::new));
    args.faults.check(&args.target, args.duration)?;
    let read_limit_gb_s = args.read_limit.as_ref().map(|limit| limit.gb_s()).transpose()?;
    let (json, html) = (open_for_report(args.json.as_deref())?, open_for_report(args.html.as_deref())?);
    let requests_file = args.requests_file.as_deref().map(|path| {
        let file = File::create(path).with_context(|| format!("cannot write requests to {}", path.display()));
        file.map(BufWriter::new)
    });
    let mut requests = RequestLines { file: requests_file.transpose()?, failure: None };
    let target = Target::new(&args.target, None, args.timeout)?;
    let victim = args.faults.victim(&target.address()).await?;
    let Prepared { workload, mut setup } = prepare(args, trace.clone(), stop).await?;

    let screen = Screen::new(args.quiet);
    let mut runs = Vec::new();
    let mut first_index = args.warmup();
    for run in 0..args.runs {
        let pacing = match &trace {
            Some(trace) => {
                // Lengths follow the index: each run begins with the trace's first, even if the last one was cut.
                first_index = args.warmup() + u64::from(run) * trace.count();
                Pacing::Open { arrivals: Box::new(trace.due_times()), max_in_flight: args.max_concurrency() }
            }
            None => args.pacing(run)?,
        };
        let extent = trace.as_ref().map_or(args.extent(), |trace| args.extent().at_most(trace.count()));
        let load = Load { pacing, extent, first_index, conducts: args.faults.conducts(args.seed) };
        let before = Before::ask(&args.target, args.api_key.as_deref()).await;
        let mut faults = FaultRun::start(&args.faults, victim, &workload).await;
        let mut running = drive::start(workload.clone(), load, stop.clone());
        faults.begin(&args.faults, running.clock);
        let watch = before.watch(watch::PERIOD, running.clock, read_limit_gb_s);
        let title = if args.runs > 1 { format!("run {} of {}", run + 1, args.runs) } else { "run".into() };
        let view = screen.watch(&title, extent, &running);
        let mut tally = Tally::new(window, args.slo);
        collect(&mut running, &mut tally, |record| {
            first_index = first_index.max(record.index + 1);
            requests.write(run, record);
            faults.observe(record);
        })
        .await;
        drop(view);
        let server_side = watch.end().await;
        let faults = match args.faults.are_none() {
            true => None,
            false => Some(faults.finish(&workload, stop).await),
        };
        runs.push(Run { tally, faults, server_side });
        if stop.is_cancelled() {
            setup.notes.push(format!("stopped by the user in run {} of {}", run + 1, args.runs));
            break;
        }
    }
    let (spread, run) = chosen(runs);
    let (faults, server_side) = (run.faults.as_ref().map(FaultReport::findings), Some(run.server_side));
    let report = Report { setup, tally: run.tally, spread, faults, server_side };
    write(&report, json, html)?;
    check(&report.tally, run.faults.as_ref())?;
    requests.finish()
}

struct Run {
    tally: Tally,
    faults: Option<FaultReport>,
    server_side: ServerSide,
}

/// The run to show: the only one, or the one in the middle with the spread of all that were not cut short.
fn chosen(mut runs: Vec<Run>) -> (Option<Spread>, Run) {
    if runs.iter().any(|run| run.tally.interrupted == 0) {
        runs.retain(|run| run.tally.interrupted == 0);
    }
    let tallies: Vec<&Tally> = runs.iter().map(|run| &run.tally).collect();
    let spread = (runs.len() > 1).then(|| Spread::of(&tallies));
    let middle = spread::middle(&tallies).expect("there is at least one run");
    (spread, runs.swap_remove(middle))
}

/// Asks the server for its model, sizes prompts by how it counts them, calibrates where that is asked, and warms up.
///
/// # Errors
/// An address that cannot be used, a server that names no model, a mock that cannot be started.
pub async fn prepare(args: &LoadArgs, trace: Option<Arc<Trace>>, stop: &CancellationToken) -> anyhow::Result<Prepared> {
    let target = Target::new(&args.target, args.api_key.as_deref(), args.timeout)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => tokio::select! {
            model = target.first_model() => model
                .with_context(|| format!("{} does not say which model it serves (or name one: --model)", target.base()))?,
            () = stop.cancelled() => bail!("stopped before the run began"),
        },
    };
    let mut workload = Workload {
        target,
        endpoint: args.endpoint,
        model,
        prompts: Prompts::of_words(args.seed).sharing(args.shared_prefix),
        shapes: match trace {
            Some(trace) => Shapes::Trace { trace, first_index: args.warmup() },
            None => Shapes::Drawn { prompt: args.prompt_tokens, output: args.max_tokens, seed: args.seed },
        },
        min_tokens: args.min_tokens,
        turns: args.turns,
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
    Ok(Prepared { workload, setup })
}

fn setup_of(args: &LoadArgs, workload: &Workload) -> Setup {
    Setup {
        target: workload.target.base().to_owned(),
        backend: match (&workload.target, args.endpoint) {
            (Target::Http(_), Endpoint::Chat) => "openai-chat",
            (Target::Http(_), Endpoint::Completions) => "openai",
            (Target::Grpc(_), Endpoint::Chat) => "looplane-grpc-chat",
            (Target::Grpc(_), Endpoint::Completions) => "looplane-grpc",
        },
        model: printable(&workload.model, 200),
        pacing: args.pacing_in_words(),
        rate: args.rate,
        burstiness: args.shape(),
        max_concurrency: args.max_concurrency(),
        seed: args.seed,
        shapes: workload.shapes.clone(),
        min_tokens: args.min_tokens,
        shared_prefix: args.shared_prefix,
        ignore_eos: args.ignore_eos,
        warmup: args.warmup(),
        calibration: None,
        notes: Vec::new(),
    }
}

/// The load tester's own error at as many streams as the run may have.
fn calibration_of(args: &LoadArgs) -> CalibrateArgs {
    CalibrateArgs {
        streams: args.max_concurrency().min(MAX_CALIBRATION_STREAMS) as u32,
        duration: CALIBRATION_LENGTH,
        ttft: Duration::from_millis(100),
        itl: Duration::from_millis(20),
        json: None,
        quiet: args.quiet,
    }
}

/// Asks the server to count two prompts and sizes the run's prompts by its answers; says why not where it cannot.
async fn fit_prompts(workload: &Workload, args: &LoadArgs) -> Result<Prompts, String> {
    let longest = workload.shapes.longest_prompt();
    let mut counts = [0; 2];
    for (count, probe) in counts.iter_mut().zip(probes(longest)) {
        let clock = Clock::start();
        let mut record = RequestRecord::new(0, 0, 0);
        workload.request(&[], &probe, 1).send(clock, &mut record).await;
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
async fn warm_up(workload: &Arc<Workload>, args: &LoadArgs, stop: &CancellationToken, setup: &mut Setup) {
    let concurrency = args.max_concurrency().min(usize::try_from(args.warmup()).unwrap_or(usize::MAX));
    let load = Load {
        pacing: Pacing::Closed { concurrency },
        extent: Extent::Requests(args.warmup()),
        first_index: 0,
        conducts: Conducts::default(),
    };
    let mut running = drive::start(workload.clone(), load, stop.clone());
    let mut tally = Tally::default();
    let _view = Screen::new(args.quiet).watch("warm-up", Extent::Requests(args.warmup()), &running);
    collect(&mut running, &mut tally, |_| ()).await;
    if tally.failed > 0 {
        setup.notes.push(format!("{} of {} warm-up requests failed", tally.failed, args.warmup()));
    }
}

/// Counts records until the last request has ended; `each` sees them, too.
pub async fn collect(running: &mut Running, tally: &mut Tally, mut each: impl FnMut(&RequestRecord)) {
    while let Some(record) = running.records.recv().await {
        each(&record);
        tally.add(&record);
    }
    tally.close(running.meter.peak_in_flight(), running.lags());
}

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

fn write(report: &Report, json: Option<File>, html: Option<File>) -> anyhow::Result<()> {
    // The files first: standard output may be a pipe that was closed.
    if let Some(file) = json {
        replace(file, &format!("{:#}\n", report.to_json())).context("cannot write the report to --json")?;
    }
    if let Some(file) = html {
        replace(file, &report.to_html(SystemTime::now())).context("cannot write the report to --html")?;
    }
    io::stdout().write_all(report.to_string().as_bytes()).context("cannot print the report")
}

/// An error where no request succeeded and none was spoilt by a fault as it should be.
fn check(tally: &Tally, faults: Option<&FaultReport>) -> anyhow::Result<()> {
    let faults_went_well = tally.failed == 0 && faults.is_some_and(FaultReport::any_went_well);
    if tally.completed > 0 || faults_went_well {
        return Ok(());
    }
    if let Some((kind, count, example)) = tally.worst_error() {
        bail!("no request succeeded; {count} of {} failed as {kind}: {example}", tally.failed);
    }
    match faults.and_then(FaultReport::worst) {
        Some((kind, count, example)) => {
            bail!("no request succeeded; {count} whose client misbehaved on purpose failed as {kind}: {example}")
        }
        None if tally.excluded > 0 => {
            bail!("every request was due in a part of the run that is left out (--exclude-start, --exclude-end)")
        }
        None => bail!("the run was stopped before any request was answered"),
    }
}

/// Opens the report's file, where one is named, before the run, so that a bad path does not cost one; what it holds
/// stays until the report is there.
pub fn open_for_report(path: Option<&Path>) -> anyhow::Result<Option<File>> {
    let Some(path) = path else { return Ok(None) };
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    opened.map(Some).with_context(|| format!("cannot write the report to {}", path.display()))
}

pub fn replace(mut file: File, text: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests;
