//! The one binary: reads the command line and hands it to the crate that has the command. Only this package names them
//! all.

mod host;
mod key;
mod log;
mod notify;
mod output;
mod progress;
mod scaling;
mod serve;
mod signals;

use std::{env, ffi::OsString, path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, parser::ValueSource};
use looplane_loadtest::{LoadtestArgs, LoadtestCommand, sweep::Machine};
use looplane_server::config::{HostArgs, LogFormat, ServeArgs, demo_model, file_arguments, without_empty_variables};
use looplane_worker::{WorkerArgs, bench::BenchArgs, scaling::ScalingArgs};
use tokio::runtime::Runtime;

use key::KeyArgs;
use output::{EXIT_FAILURE, finish, report, say};

/// Exit code where the options cannot work, as clap has it.
const EXIT_USAGE: u8 = 2;
/// Threads for work that would hold up the async ones: files, and what starts workers again.
const MAX_BLOCKING_THREADS: usize = 4;

/// Serves large language models over tensor-parallel workers.
#[derive(Debug, Parser)]
#[command(name = "looplane", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over HTTP (OpenAI-style) and gRPC
    Serve(Box<ServeArgs>),
    /// Draw an API key: the key goes to standard error, and the line for --api-key-file to standard output
    Key(KeyArgs),
    /// Compute for a front end on another machine, which uses this one as one more replica
    Worker(Box<HostArgs>),
    /// One worker of a model; `serve` and `worker` start these themselves
    #[command(hide = true)]
    Rank(WorkerArgs),
    /// Measure how fast a model decodes on this machine
    Bench(Box<BenchArgs>),
    /// Predict how a model decodes on groups of GPUs
    Scaling(ScalingArgs),
    /// Measure a server under load
    Loadtest(Box<LoadtestArgs>),
}

fn main() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => return report(&error, EXIT_USAGE),
    };
    let log = match &cli.command {
        Command::Rank(_) => log::start_in_worker(),
        Command::Serve(args) => log::start(args.engine.log),
        Command::Worker(args) => log::start(args.engine.log),
        Command::Key(_) | Command::Bench(_) | Command::Scaling(_) | Command::Loadtest(_) => log::start(LogFormat::Text),
    };
    if let Err(error) = log {
        return report(&error, EXIT_USAGE);
    }
    match cli.command {
        Command::Serve(args) => run_server(*args),
        Command::Worker(args) => run_host(*args),
        Command::Rank(args) => {
            // `ps` would show "exe", after the link that the server started it by.
            if let Err(error) = rustix::thread::set_name(c"looplane") {
                tracing::debug!("the process keeps its name: {error}");
            }
            looplane_worker::run(&args)
        }
        Command::Key(args) => finish(key::draw(&args)),
        Command::Bench(args) => finish(bench(&args)),
        Command::Scaling(args) => finish(scaling::report(&args, say)),
        Command::Loadtest(args) => {
            let args = with_machine(*args);
            finish(runtime().and_then(|runtime| runtime.block_on(looplane_loadtest::run(args))))
        }
    }
}

/// The command line, with the options of `serve --config` before those typed, which win.
fn parse() -> anyhow::Result<Cli> {
    let mut words: Vec<OsString> = env::args_os().collect();
    let command = without_empty_variables(Cli::command());
    let matches = command.clone().get_matches_from(&words);
    let serve = matches.subcommand_matches("serve");
    if let Some((serve, path)) = serve.and_then(|serve| Some((serve, serve.get_one::<PathBuf>("config")?))) {
        let given =
            |id: &str| matches!(serve.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        let from_file = file_arguments(&ServeArgs::augment_args(clap::Command::new("serve")), given, path)?;
        let after_subcommand = 2;
        words.splice(after_subcommand..after_subcommand, from_file.into_iter().map(OsString::from));
    }
    Ok(Cli::from_arg_matches(&command.get_matches_from(words)).unwrap_or_else(|error| error.exit()))
}

fn run_server(args: ServeArgs) -> ExitCode {
    let format = args.engine.log;
    let ended = args.check(serve::group_size).map_err(|error| (error.into(), EXIT_USAGE)).and_then(|config| {
        let served = runtime().and_then(|runtime| runtime.block_on(serve::run(config, format)));
        served.map_err(|error| (error, EXIT_FAILURE))
    });
    end(ended, format)
}

fn run_host(args: HostArgs) -> ExitCode {
    let format = args.engine.log;
    let ended = args.check(serve::group_size).map_err(|error| (error.into(), EXIT_USAGE)).and_then(|config| {
        let computed = runtime().and_then(|runtime| runtime.block_on(host::run(config, format)));
        computed.map_err(|error| (error, EXIT_FAILURE))
    });
    end(ended, format)
}

/// The code of what ran until it was told to end; its error in the format of the log.
fn end(ended: Result<(), (anyhow::Error, u8)>, format: LogFormat) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err((error, code)) if format == LogFormat::Json => {
            tracing::error!("{error:#}");
            ExitCode::from(code)
        }
        Err((error, code)) => report(&error, code),
    }
}

/// A sweep starts servers of this program, and learns here what it cannot see from outside.
fn with_machine(mut args: LoadtestArgs) -> LoadtestArgs {
    if let Some(LoadtestCommand::Sweep(sweep)) = &mut args.command {
        let gpus = (0..).take_while(|gpu| looplane_worker::cuda::probe(*gpu).is_ok()).count() as u32;
        sweep.machine = Machine { gpus, demo_model: demo_model().ok() };
    }
    args
}

fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let report = looplane_worker::bench::run(args)?;
    say(report.to_string().trim_end());
    Ok(())
}

fn runtime() -> anyhow::Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().max_blocking_threads(MAX_BLOCKING_THREADS).build().context("cannot start the async runtime")
}
