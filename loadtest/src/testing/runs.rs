//! Whole command lines, against a mock.

use clap::Parser;
use serde_json::Value;

use crate::args::LoadtestArgs;
use crate::run::mock::Mock;

#[derive(Parser)]
struct Cli<T: clap::Args> {
    #[command(flatten)]
    args: T,
}

pub fn parse<T: clap::Args>(line: &str) -> Result<T, clap::Error> {
    Cli::try_parse_from(["loadtest"].into_iter().chain(line.split_whitespace())).map(|cli| cli.args)
}

pub async fn run_line(line: &str) -> anyhow::Result<()> {
    crate::run(parse::<LoadtestArgs>(line).expect("valid options")).await
}

/// Runs against `mock` with options `line` and returns the outcome, the report and the requests that were seen.
pub async fn run_against(mock: Mock, line: &str) -> (anyhow::Result<()>, Value, Vec<Value>) {
    let mock = mock.serve().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("report.json");
    std::fs::write(&file, "x".repeat(1 << 16)).expect("writable");
    let outcome = run_line(&format!("--target {} --json {} {line}", mock.base, file.display())).await;
    let text = std::fs::read_to_string(&file).expect("the report was written");
    (outcome, serde_json::from_str(&text).expect("the report is JSON and nothing else"), mock.requests())
}
