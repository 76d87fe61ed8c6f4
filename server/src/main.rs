//! The one binary: `serve`, `worker`, `bench`, `scaling` and `loadtest`. Only this file and `scaling.rs` name the other crates.

mod scaling;

use std::{
    env,
    ffi::OsString,
    future::pending,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use looplane_loadtest::{LoadtestArgs, LoadtestCommand, sweep::Machine};
use looplane_server::{
    config::{Config, Device, ServeArgs, demo_model, file_arguments, without_empty_variables},
    engine::{EngineHandle, EngineState},
    group::{self, ProcessLauncher},
    http,
    listener::{self, StopSignal, base_url},
    text::Text,
};
use looplane_worker::{WorkerArgs, bench::BenchArgs, scaling::ScalingArgs};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{Signal, SignalKind, signal},
};
use tracing_subscriber::EnvFilter;

/// Exit code where the options cannot work, as clap has it.
const EXIT_USAGE: u8 = 2;
/// Threads for work that would hold up the async ones, such as tokenising long prompts.
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
    /// One worker of a model; `serve` starts these itself
    #[command(hide = true)]
    Worker(WorkerArgs),
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
    start_log(matches!(cli.command, Command::Worker(_)));
    match cli.command {
        Command::Serve(args) => match with_gpu(*args).check() {
            Ok(config) => finish(runtime().and_then(|runtime| runtime.block_on(run_server(config)))),
            Err(error) => report(&error.into(), EXIT_USAGE),
        },
        Command::Worker(args) => {
            // `ps` would show "exe", after the link that the server started it by.
            if let Err(error) = rustix::thread::set_name(c"looplane") {
                tracing::debug!("the process keeps its name: {error}");
            }
            looplane_worker::run(&args)
        }
        Command::Bench(args) => finish(run_bench(&args)),
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
    if let Some(path) = serve.and_then(|serve| serve.get_one::<PathBuf>("config")) {
        let from_file = file_arguments(&ServeArgs::augment_args(clap::Command::new("serve")), path)?;
        let after_subcommand = 2;
        words.splice(after_subcommand..after_subcommand, from_file.into_iter().map(OsString::from));
    }
    Ok(Cli::from_arg_matches(&command.get_matches_from(words)).unwrap_or_else(|error| error.exit()))
}

/// A GPU that nobody has ruled out computes the model alone, unless the group's size is given.
fn with_gpu(mut args: ServeArgs) -> ServeArgs {
    if args.device == Device::Auto && args.tp.is_none() && looplane_worker::cuda::probe(0).is_ok() {
        args.tp = Some(1);
    }
    args
}

/// A sweep starts servers of this program, and learns here what it cannot see from outside.
fn with_machine(mut args: LoadtestArgs) -> LoadtestArgs {
    if let Some(LoadtestCommand::Sweep(sweep)) = &mut args.command {
        let gpus = (0..).take_while(|gpu| looplane_worker::cuda::probe(*gpu).is_ok()).count() as u32;
        sweep.machine = Machine { gpus, demo_model: demo_model().ok() };
    }
    args
}

/// Logs go to standard error: standard output is for what the user asked for.
fn start_log(in_worker: bool) {
    let given = env::var("LOOPLANE_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = given.and_then(|filter| EnvFilter::try_new(filter).ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match in_worker {
        // The server passes these lines on, with the time and the rank.
        true => log.without_time().with_target(false).with_ansi(false).init(),
        false => log.with_ansi(io::stderr().is_terminal()).init(),
    }
}

fn runtime() -> anyhow::Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().max_blocking_threads(MAX_BLOCKING_THREADS).build().context("cannot start the async runtime")
}

fn run_bench(args: &BenchArgs) -> anyhow::Result<()> {
    let report = looplane_worker::bench::run(args)?;
    say(report.to_string().trim_end());
    Ok(())
}

fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, 1),
    }
}

fn report(error: &anyhow::Error, code: u8) -> ExitCode {
    // Standard error may be closed, and there is nowhere else to say it.
    let _ = writeln!(io::stderr(), "looplane: {error:#}");
    ExitCode::from(code)
}

fn counted(count: u32, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

async fn run_server(config: Config) -> anyhow::Result<()> {
    let signals = Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? };
    let text = Arc::new(Text::load(&config.group.model_dir)?);
    let address = (config.host.as_str(), config.port);
    let listener = TcpListener::bind(address).await.with_context(|| cannot_listen(&config))?;
    let url = base_url(listener.local_addr()?);
    let group = &config.group;
    say(&format!(
        "Looplane {}: loading {} into {}, {} each",
        env!("CARGO_PKG_VERSION"),
        group.model_dir.display(),
        counted(group.tensor_parallel, "worker process", "worker processes"),
        counted(group.threads, "compute thread", "compute threads"),
    ));

    let launcher = Arc::new(ProcessLauncher::this_binary(Vec::new()));
    let (engine, group) = group::spawn(config.group.clone(), launcher)?;
    let stop = StopSignal::default();
    tokio::spawn(follow_signals(signals, config.until_stdin_closes, stop.clone()));
    tokio::spawn(announce(engine.clone(), config.clone(), url));
    let served = listener::run(listener, engine, text, config.serve, stop.clone()).await;
    group.shutdown_unless(stop.now.cancelled()).await;
    anyhow::ensure!(!stop.now.is_cancelled(), "ended at once, as a second signal asked; running requests were cut off");
    Ok(served?)
}

fn cannot_listen(config: &Config) -> String {
    format!("cannot listen on {}:{} (--host, --port)", config.host, config.port)
}

/// Says what was loaded and how to use it, once it can be used.
async fn announce(engine: EngineHandle, config: Config, url: String) {
    let mut state = engine.watch_state();
    if state.wait_for(|state| *state == EngineState::Ready).await.is_err() {
        return;
    }
    let Some(model) = engine.model() else { return };
    let id = &config.serve.model_id;
    say(&format!(
        "Serving   {id}: {}, vocabulary {}, context {}, tensor parallelism {}, bits {}\n\
         Listening {url} (HTTP and gRPC; open it in a browser to chat)\n\
         Try       {}",
        model.architecture,
        model.vocab_size,
        model.max_context,
        model.tensor_parallel,
        model.bit_domain,
        http::example(&url, id),
    ));
}

/// A line for the user. A standard output that was closed takes nothing away from serving.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The first signal drains, the second ends at once. So does, as a first one, the end of standard input if it is to.
async fn follow_signals(mut signals: Signals, until_stdin_closes: bool, stop: StopSignal) {
    let parent_ended = async {
        match until_stdin_closes {
            true => looplane_loadtest::stdin_closed().await,
            false => pending().await,
        }
    };
    tokio::select! {
        () = signals.next() => {}
        () = parent_ended => {}
    }
    tracing::info!("stopping: running requests may end; a second signal ends them at once");
    stop.drain.cancel();
    signals.next().await;
    stop.now.cancel();
}
