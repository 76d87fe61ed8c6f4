//! Looplane's load tester: sees the product only from outside.
//!
//! [`run`] asks the server for its model, fits prompts to how it counts tokens, warms it up, sends the load and reports.
//! Arrivals decide when a request is due, [`drive`] sends it, [`client`] (over HTTP) or [`grpc`] follows its stream into a record, and
//! [`report`] counts records into figures as they come, so that memory does not grow with the run; [`server_side`] reads
//! what the server says of itself meanwhile, and [`faults`] go wrong beside the load. [`compare`] sets two
//! reports side by side, [`saturate`] searches the rate that a server bears, [`calibrate`] measures the load tester itself, against a [`mock`].
//! [`sweep`] starts servers of several sizes itself, as processes, and puts the same loads on each.
//! [`live`] shows what a run is doing.
#![forbid(unsafe_code)]

use std::fs;
use std::future::pending;
use std::io::{self, Write};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

mod answer;
mod args;
pub mod arrivals;
mod bootstrap;
pub mod calibrate;
pub mod client;
pub mod compare;
pub mod distribution;
pub mod drive;
pub mod faults;
pub mod grpc;
mod html;
mod json;
mod lag;
pub mod lengths;
pub mod live;
#[cfg(test)]
mod markup;
mod measure;
pub mod meter;
pub mod mock;
mod page;
pub mod plot;
pub mod prompt;
pub mod record;
pub mod report;
mod sample;
pub mod saturate;
pub mod server_side;
pub mod slo;
pub mod spread;
pub mod sse;
pub mod sweep;
mod table;
pub mod target;
pub mod timeline;
pub mod trace;

pub use args::{ArgsError, ArrivalsArg, CompareArgs, LoadArgs, LoadtestArgs, LoadtestCommand, RateArg};

use compare::Comparison;

/// Runs the load that `args` describe against their target, prints the report on standard output and writes it to
/// `--json` and `--html`; or does what the subcommand says instead. Ctrl-C, SIGTERM or SIGHUP ends a run early, and what
/// was measured until then is reported.
///
/// # Errors
/// Options that contradict each other, a target that cannot be used or names no model, a file that cannot be written,
/// and a run in which no request succeeded (after its report). Files to compare that are no reports. A mock that cannot
/// be started.
pub async fn run(args: LoadtestArgs) -> anyhow::Result<()> {
    match &args.command {
        None => until_signal(async |stop| measure::run(&args.load, stop).await).await,
        Some(LoadtestCommand::Compare(files)) => {
            let comparison = Comparison::read(&files.a, &files.b)?.to_string();
            io::stdout().write_all(comparison.as_bytes()).context("cannot print the comparison")
        }
        Some(LoadtestCommand::Saturate(args)) => until_signal(async |stop| saturate::run(args, stop).await).await,
        Some(LoadtestCommand::Sweep(args)) => until_signal(async |stop| sweep::run(args, stop).await).await,
        Some(LoadtestCommand::Calibrate(args)) => until_signal(async |stop| calibrate::run(args, stop).await).await,
        Some(LoadtestCommand::Mock(args)) => mock::run(args).await,
    }
}

/// Runs `work` with a token that Ctrl-C cancels, or SIGTERM, or the end of the terminal (SIGHUP).
async fn until_signal<T>(work: impl AsyncFnOnce(&CancellationToken) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    // Under nohup the run is to outlive its terminal.
    let hang_up = (!ignores_hang_up()).then(|| signal(SignalKind::hangup()));
    let mut hang_up = hang_up.transpose().context("cannot listen for SIGHUP")?;
    let on_signal = tokio::spawn({
        let stop = stop.clone();
        async move {
            let hung_up = async {
                match &mut hang_up {
                    Some(hang_up) => hang_up.recv().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                pressed = tokio::signal::ctrl_c() => if pressed.is_err() { return },
                _ = terminate.recv() => {}
                _ = hung_up => {}
            }
            stop.cancel();
        }
    });
    let outcome = work(&stop).await;
    on_signal.abort();
    outcome
}

/// Completes when standard input ends, as it does where it is a pipe from the process that started this one, however that ends.
pub async fn stdin_closed() {
    let (closed, ended) = oneshot::channel();
    // A thread of its own: reading standard input cannot be cancelled.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = closed.send(());
    });
    let _ = ended.await;
}

/// Whether whoever started this process had it ignore SIGHUP, the first bit of Linux's mask.
fn ignores_hang_up() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
