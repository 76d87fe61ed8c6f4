//! Looplane's load tester: sees the product only from outside.
//!
//! Its rooms, each of which knows those before it only:
//!
//! * `stats`: distributions and intervals; `text`: words of options and of servers.
//! * `load`: when requests are due, how long they are and what they say, and which of them a client spoils on purpose.
//! * `client`: one request over HTTP or gRPC, from its bytes to its `client::record::RequestRecord`.
//! * `run`: sends a load, meters and shows it, watches the server's `/metrics`, and calibrates itself against a mock.
//! * `figures`: counts records into figures as they come, so that memory does not grow with the run.
//! * `report`: the figures as text, JSON and page, plots, and two reports side by side.
//! * `faults`: sockets left half open and workers killed, and what came of them.
//! * `measure`: one measurement; `saturate`: many, for the rate that a server bears; `sweep`: on servers of several
//!   sizes, which it starts itself.
#![forbid(unsafe_code)]

use std::io::{self, Write};

use anyhow::Context;

mod args;
mod client;
mod faults;
mod figures;
mod load;
mod measure;
mod report;
mod run;
mod saturate;
mod signals;
mod stats;
pub mod sweep;
#[cfg(test)]
mod testing;
mod text;

pub use args::{LoadtestArgs, LoadtestCommand};
pub use report::plot;
pub use run::mock;
pub use signals::stdin_closed;

use report::compare::Comparison;
use signals::until_signal;

/// Runs the load that `args` describe against their target, prints the report on standard output and writes it to
/// `--json` and `--html`; or does what the subcommand says instead. Ctrl-C, SIGTERM or SIGHUP ends a run early, and
/// what was measured until then is reported.
///
/// # Errors
/// Options that contradict each other, a target that cannot be used or names no model, a file that cannot be written,
/// and a run in which no request succeeded (after its report). Files to compare that are no reports. A mock that cannot
/// be started.
pub async fn run(args: LoadtestArgs) -> anyhow::Result<()> {
    match &args.command {
        None => until_signal(async |stop| measure::run::run(&args.load, stop).await).await,
        Some(LoadtestCommand::Compare(files)) => {
            let comparison = Comparison::read(files)?.to_string();
            io::stdout().write_all(comparison.as_bytes()).context("cannot print the comparison")
        }
        Some(LoadtestCommand::Saturate(args)) => {
            until_signal(async |stop| saturate::search::run(args, stop).await).await
        }
        Some(LoadtestCommand::Sweep(args)) => until_signal(async |stop| sweep::run::run(args, stop).await).await,
        Some(LoadtestCommand::Calibrate(args)) => {
            until_signal(async |stop| run::calibrate::run(args, stop).await).await
        }
        Some(LoadtestCommand::Mock(args)) => mock::run(args).await,
    }
}
