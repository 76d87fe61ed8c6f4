//! Options of a sweep, and what they mean together.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use clap::builder::Resettable;
use procfs::{Current, LoadAverage};

use crate::figures::tally::Window;
use crate::measure::args::LoadArgs;
use crate::sweep::bench::Commands;
use crate::sweep::figures::{Device, LoadPoint, Sweep};
use crate::sweep::layout::{self, Layout};
use crate::text::utc_date;

/// How long each load is sent where neither `--duration` nor `--requests` says.
const LOAD_LENGTH: Duration = Duration::from_secs(30);
/// A machine whose load average, over its cores, is above this before the first server starts has other work to do.
const BUSY: f64 = 0.25;
/// Where a load goes that names no server: a sweep starts its own.
const NO_TARGET: &str = "http://127.0.0.1:8000";

/// Measures this program's server in several layouts, and predicts those that the machine has no sockets for.
#[derive(Debug, Clone, clap::Args)]
#[command(
    mut_arg("model", |arg| arg.value_name("DIR").env("LOOPLANE_MODEL")
        .help("Model directory as Hugging Face lays it out [default: the demo model that comes with Looplane]")),
    mut_arg("requests", |arg| arg.help("Send so many requests in each load [default: as many as 30 s take]")),
    mut_arg("concurrency", |arg| arg.help("Closed loop: a single load with so many requests in flight")),
    mut_arg("warmup", |arg| arg.help(
        "Requests to send before each load, which are not counted [default: as many as are in flight; 0 with --rate]")),
    mut_arg("ignore_eos", not_here), mut_arg("target", not_here), mut_arg("api_key", not_here),
    mut_arg("trace", not_here), mut_arg("runs", not_here), mut_arg("calibrate", not_here), mut_arg("json", not_here),
    mut_arg("read_limit", not_here),
    mut_arg("html", not_here), mut_arg("requests_file", not_here)
)]
pub struct SweepArgs {
    /// Sizes of the group: workers that share the model
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = parse_size)]
    pub tp: Vec<u32>,

    /// Instead: replicas times the workers of each, such as 1x1,2x1,4x1,1x4; which of them serves which load best
    #[arg(long, value_name = "RxT,..", value_delimiter = ',', conflicts_with = "tp")]
    pub layout: Vec<Layout>,

    /// Where the workers compute [default: cuda where there is a GPU, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<Device>,

    /// On CPUs: compute threads of each worker, the same for all sizes, so that more workers have more of the machine
    /// [default: the machine's cores divided by the largest size]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,

    /// Closed loop: keep so many requests in flight, one load after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8,32",
          conflicts_with_all = ["concurrency", "rate"], value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub concurrencies: Vec<u32>,

    /// Directory for the report (sweep.json, sweep.html), the report of each load, and logs; made if it is not there
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// What to measure
    #[command(flatten)]
    pub load: LoadArgs,

    /// Further options of `looplane serve`
    #[arg(last = true, value_name = "OPTIONS OF SERVE")]
    pub serve: Vec<OsString>,

    /// What this package cannot know: it sees the product from outside only.
    #[arg(skip)]
    pub machine: Machine,
}

impl SweepArgs {
    /// What is measured, each once and in the order of the report.
    pub fn layouts(&self) -> Vec<Layout> {
        match self.layout.is_empty() {
            true => layout::ascending(self.tp.iter().map(|tp| Layout::group(*tp))),
            false => layout::ascending(self.layout.iter().copied()),
        }
    }
}

/// Where a sweep runs.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// GPUs that workers can use.
    pub gpus: u32,
    /// Directory of the model that is served where nobody names one.
    pub demo_model: Option<PathBuf>,
}

pub struct Plan {
    /// What the product says of itself beside the servers; none where the model's directory is not known.
    pub commands: Option<Commands>,
    pub looplane: PathBuf,
    pub out: PathBuf,
    pub device: Device,
    /// Arguments of `serve` beside the size.
    pub serve: Vec<OsString>,
    /// The loads, by place in [`Sweep::loads`].
    pub loads: Vec<LoadArgs>,
    pub window: Window,
}

/// Checks the options, and begins the report that [`Plan::run`] goes on with.
///
/// # Errors
/// Options that do not fit a sweep or each other.
pub fn plan(args: &SweepArgs) -> anyhow::Result<(Plan, Sweep)> {
    let Machine { gpus, demo_model } = &args.machine;
    let load = LoadArgs { model: None, ..args.load.clone() };
    refuse_other_options(&load)?;
    let device = args.device.unwrap_or(if *gpus > 0 { Device::Cuda } else { Device::Cpu });
    ensure!(device == Device::Cpu || *gpus > 0, "--device cuda: this machine has no GPU that can be used");
    let named = args.load.model.as_ref().map(PathBuf::from);
    let looplane = std::env::current_exe().context("cannot find this program, to start its servers")?;
    let cores = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    let largest = args.layouts().iter().map(|layout| layout.sockets()).max().unwrap_or(1);
    let threads = match device {
        Device::Cpu => Some(args.threads.unwrap_or((cores / largest).max(1))),
        Device::Cuda => args.threads,
    };
    ensure!(device == Device::Cpu || threads.is_none(), "--threads is of CPUs: leave it out where GPUs compute");
    let mut serve: Vec<OsString> = ["--device", device.name(), "--port", "0"].map(OsString::from).into();
    serve.extend(threads.iter().flat_map(|threads| ["--threads".into(), threads.to_string().into()]));
    serve.extend(named.iter().flat_map(|model| ["--model".into(), model.clone().into_os_string()]));
    serve.extend(args.serve.iter().cloned());
    let loads = loads(args, load)?;
    let points = loads.iter().map(|load| LoadPoint {
        name: name_of(load),
        pacing: load.pacing_in_words(),
        streams: load.rate.is_none().then(|| load.max_concurrency() as u32),
    });
    let mut sweep = Sweep {
        version: env!("CARGO_PKG_VERSION").into(),
        date: utc_date(SystemTime::now()),
        model: None,
        device,
        processor: None,
        cores,
        gpus: *gpus,
        threads,
        settings: Vec::new(),
        loads: points.collect(),
        sizes: Vec::new(),
        notes: Vec::new(),
    };
    note_the_machine(&mut sweep, largest);
    let first = &loads[0];
    let window = first.window()?;
    // Answers that the end of a load is waited for leave places empty: the load is over by then.
    let to_ns = first.duration.map_or(window.to_ns, |length| window.to_ns.min(length.as_nanos() as u64));
    let commands = named.or_else(|| demo_model.clone()).map(|model| Commands {
        looplane: looplane.clone(),
        folder: args.out.clone(),
        model,
        device,
        threads,
    });
    let plan =
        Plan { commands, looplane, out: args.out.clone(), device, serve, loads, window: Window { to_ns, ..window } };
    Ok((plan, sweep))
}

/// Refuses options of a load that a sweep has no use for.
fn refuse_other_options(load: &LoadArgs) -> anyhow::Result<()> {
    ensure!(
        load.target == NO_TARGET && load.api_key.is_none(),
        "a sweep starts its own servers: leave --target and --api-key out"
    );
    ensure!(
        load.json.is_none() && load.html.is_none() && load.requests_file.is_none(),
        "a sweep writes its reports to --out: leave --json, --html and --requests-file out"
    );
    ensure!(
        load.trace.is_none() && load.runs == 1 && !load.calibrate,
        "--trace, --runs and --calibrate are of a single load: measure that without sweep"
    );
    ensure!(
        load.read_limit.is_none(),
        "a sweep has the read limit of each size from the bench, which it runs itself: leave --read-limit out"
    );
    ensure!(load.faults.are_none(), "a sweep measures servers that nothing happens to: ask for faults without sweep");
    Ok(())
}

fn note_the_machine(sweep: &mut Sweep, largest: u32) {
    let cores = sweep.cores;
    if sweep.is_crowded(largest) {
        sweep.notes.push(format!(
            "this machine has {cores} cores, and up to {largest} workers share them: those that have no core of their own \
             show what more workers cost and not what more sockets bring"
        ));
    }
    if let Some(busy) =
        LoadAverage::current().ok().map(|load| f64::from(load.one)).filter(|busy| *busy > BUSY * f64::from(cores))
    {
        sweep.notes.push(format!(
            "other work ran on this machine when the sweep began (load average {busy:.1} on {cores} cores): figures are \
             of what it left"
        ));
    }
}

fn loads(args: &SweepArgs, load: LoadArgs) -> anyhow::Result<Vec<LoadArgs>> {
    let duration = match (load.duration, load.requests) {
        (None, None) => Some(LOAD_LENGTH),
        (duration, _) => duration,
    };
    // Speeds compare only where all sizes generate as much.
    let load = LoadArgs { duration, ignore_eos: true, ..load };
    let mut loads: Vec<LoadArgs> = match (load.concurrency, load.rate) {
        (None, None) => {
            let mut concurrencies = args.concurrencies.clone();
            concurrencies.sort_unstable();
            concurrencies.dedup();
            concurrencies.into_iter().map(|n| LoadArgs { concurrency: Some(n), ..load.clone() }).collect()
        }
        _ => vec![load],
    };
    for load in &mut loads {
        load.pacing(0)?;
        load.window()?;
        if load.rate.is_none() {
            load.warmup.get_or_insert(load.max_concurrency() as u64);
        }
    }
    Ok(loads)
}

fn name_of(load: &LoadArgs) -> String {
    match load.rate {
        Some(rate) => format!("{rate} requests a second"),
        None if load.max_concurrency() == 1 => "1 stream".into(),
        None => format!("{} streams", load.max_concurrency()),
    }
}

fn not_here(arg: clap::Arg) -> clap::Arg {
    arg.hide(true).env(Resettable::Reset)
}

fn parse_size(text: &str) -> Result<u32, String> {
    layout::size(text).ok_or_else(|| format!("'{text}' is no size of a group: give 1, 2, 4, 8 or 16"))
}
