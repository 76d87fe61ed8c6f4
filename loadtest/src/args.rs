//! The command line of the load tester: the rooms' own options, put together.

use crate::measure::args::LoadArgs;
use crate::report::compare::CompareArgs;
use crate::run::calibrate::CalibrateArgs;
use crate::run::mock::MockArgs;
use crate::saturate::search::SaturateArgs;
use crate::sweep::plan::SweepArgs;

/// Measures a server that speaks OpenAI's interface, this one or any other, or this one over gRPC.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct LoadtestArgs {
    /// What to do instead of measuring
    #[command(subcommand)]
    pub command: Option<LoadtestCommand>,

    /// What to measure
    #[command(flatten)]
    pub load: LoadArgs,
}

/// What is done instead of measuring a server.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum LoadtestCommand {
    /// Set two reports of --json side by side: ratios of B to A, with intervals
    Compare(CompareArgs),
    /// Find the rate of requests from which on the server falls behind
    Saturate(Box<SaturateArgs>),
    /// Find what more sockets buy: starts a server of each size, puts the same loads on it, and predicts larger ones
    Sweep(Box<SweepArgs>),
    /// Measure the load tester's own error, against a mock whose times are known
    Calibrate(CalibrateArgs),
    /// Serve made-up text at a fixed pace, for trying load testers out
    Mock(MockArgs),
}
