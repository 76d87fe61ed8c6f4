//! The rate from which on a server falls behind: doubled until it does, then halved into.
//!
//! A server that is offered more than it bears has a queue that grows for as long as it is: requests in flight grow
//! evenly, or the time to first token does. Both are looked at over the second half of each step, when a server that
//! keeps up has come to rest.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use serde_json::json;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::client::record::Failure;
use crate::figures::tally::{Tally, Window};
use crate::load::arrivals::RATE_RANGE;
use crate::load::conduct::Conducts;
use crate::load::pacing::{Extent, RateArg};
use crate::measure::args::LoadArgs;
use crate::measure::run::{Prepared, open_for_report, prepare, replace};
use crate::run::calibrate::TOLERATED_MS;
use crate::run::drive::{self, Load};
use crate::run::live::Screen;
use crate::run::workload::Workload;
use crate::saturate::page::Page;
use crate::saturate::step::{Growth, Step, Verdict};

/// How long a step sends where `--duration` does not say.
const STEP_LENGTH: Duration = Duration::from_secs(20);
/// How often requests in flight are counted.
const SAMPLE_PERIOD: Duration = Duration::from_millis(50);
/// Share of failed requests from which on a server does not keep up: it turns requests away instead of queueing them.
const TURNED_AWAY: f64 = 0.01;
/// Pause after a step that the server fell behind in, for its queue to empty.
const RECOVERY: Duration = Duration::from_secs(1);

/// Finds the highest rate that a server keeps up with.
#[derive(Debug, Clone, clap::Args)]
pub struct SaturateArgs {
    /// Rate to begin with, in requests a second; doubled until the server falls behind
    #[arg(long, value_name = "PER_SECOND", default_value_t = 1.0)]
    pub from: f64,

    /// Search until the rates that it keeps up with and falls behind at are so close
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = parse_precision)]
    pub precision: f64,

    /// What to measure
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Searches as `args` say and prints every step.
///
/// # Errors
/// Options that do not fit a search, a server that cannot be asked, a file that cannot be written, and a server that
/// falls behind at the first rate already or never does.
pub async fn run(args: &SaturateArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let load = &args.load;
    ensure!(
        load.rate.is_none() && load.concurrency.is_none() && load.requests.is_none() && load.trace.is_none(),
        "saturate chooses the rate itself: leave --rate, --concurrency, --requests and --trace out"
    );
    ensure!(
        load.requests_file.is_none() && load.runs == 1,
        "--requests-file and --runs are of a run at one rate: give that rate with --rate, without saturate"
    );
    ensure!(
        load.exclude_start.is_none() && load.exclude_end.is_none(),
        "a step counts whole and is judged by its second half: leave --exclude-start and --exclude-end out"
    );
    ensure!(
        load.read_limit.is_none(),
        "--read-limit is of what the server says of itself, and a search looks at it from outside: leave it out"
    );
    ensure!(
        !load.calibrate,
        "a search does not know beforehand how many streams it opens: measure the load tester itself with \
         `looplane loadtest calibrate --streams N`, and leave --calibrate out"
    );
    ensure!(load.turns == 1, "--turns is of a closed loop, and saturate sends in an open one");
    ensure!(load.faults.are_none(), "a rate is searched without faults: ask for them at one rate, without saturate");
    ensure!(RATE_RANGE.contains(&args.from), "--from is {}: give 0.001 to 100000 requests a second", args.from);
    let (json, html) = (open_for_report(load.json.as_deref())?, open_for_report(load.html.as_deref())?);
    let Prepared { workload, mut setup } = prepare(load, None, stop).await?;
    let mut out = io::stdout();
    writeln!(out, "{} · {} · {}", setup.target, setup.backend, setup.model).context("cannot print the search")?;
    for note in &setup.notes {
        writeln!(out, "note: {note}")?;
    }
    writeln!(out, "{HEAD}")?;

    let mut next_index = load.warmup();
    let mut steps: Vec<Step> = Vec::new();
    let mut search = Search { next: args.from, bears: None, falls_behind_at: None };
    while let Some(rate_per_s) = search.next_rate(args.precision) {
        let step = step(load, rate_per_s, &workload, next_index, stop).await?;
        if stop.is_cancelled() {
            break;
        }
        next_index += step.tally.completed + step.tally.failed + step.tally.interrupted + step.tally.excluded;
        writeln!(out, "{}", step.line())?;
        search.learn(rate_per_s, step.verdict == Verdict::KeepsUp);
        if step.verdict != Verdict::KeepsUp && search.next_rate(args.precision).is_some() {
            tokio::time::sleep(RECOVERY).await;
        }
        steps.push(step);
    }
    steps.sort_by(|a, b| a.rate_per_s.total_cmp(&b.rate_per_s));
    if let Some(note) = lateness(&steps) {
        writeln!(out, "note: {note}").context("cannot print the search")?;
        setup.notes.push(note);
    }
    if let Some(file) = json {
        let report = json!({
            "target": setup.target,
            "model_id": setup.model,
            "keeps_up_with": search.bears,
            "falls_behind_at": search.falls_behind_at,
            "notes": setup.notes,
            "steps": steps.iter().map(Step::to_json).collect::<Vec<_>>(),
        });
        replace(file, &format!("{report:#}\n")).context("cannot write the search to --json")?;
    }
    if let Some(file) = html {
        let (prompt_lengths, output_lengths) = setup.shapes.in_words();
        let length = load.duration.unwrap_or(STEP_LENGTH);
        let page = Page {
            target: &setup.target,
            model: &setup.model,
            notes: &setup.notes,
            what: format!(
                "steps of {length:?}, {prompt_lengths} prompt tokens, at most {output_lengths} output tokens"
            ),
            steps: &steps,
            keeps_up_with: search.bears,
            falls_behind_at: search.falls_behind_at,
            date: SystemTime::now(),
        };
        replace(file, &page.html()).context("cannot write the search to --html")?;
    }
    match (search.bears, search.falls_behind_at) {
        _ if stop.is_cancelled() => bail!("stopped before the search was over"),
        (Some(bears), Some(behind)) => {
            writeln!(out, "keeps up with {bears:.3} requests a second, falls behind at {behind:.3}")
                .context("cannot print the search")
        }
        (None, _) => bail!("it falls behind at {} requests a second already: begin lower (--from)", args.from),
        (Some(bears), None) => bail!("it keeps up with {bears} requests a second, and no more can be sent"),
    }
}

/// At which rate the load tester itself was latest, where that is more than a report can bear.
fn lateness(steps: &[Step]) -> Option<String> {
    let lags = steps.iter().filter_map(|step| Some((step.tally.percentile_ms("client_lag", 99.0)?, step.rate_per_s)));
    let (late_ms, rate_per_s) =
        lags.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(late_ms, _)| *late_ms > TOLERATED_MS)?;
    Some(format!(
        "the load tester itself was late: one in a hundred of its own timers by {late_ms:.1} ms or more at \
         {rate_per_s:.3} requests a second, and less at other rates; so may every time be, and the server may bear more: \
         measure from a quieter or larger machine"
    ))
}

const HEAD: &str =
    "requests a second   answered   tokens/s   first token p50, p99 ms   between p50, p99 ms   in flight   verdict";

/// The rates between which the server's limit lies.
struct Search {
    next: f64,
    bears: Option<f64>,
    falls_behind_at: Option<f64>,
}

impl Search {
    /// The rate to try next; none where the limit is known to `precision` or lies outside of what can be sent.
    fn next_rate(&self, precision: f64) -> Option<f64> {
        match (self.bears, self.falls_behind_at) {
            (Some(bears), Some(behind)) => (behind > bears * (1.0 + precision)).then_some((bears * behind).sqrt()),
            (None, Some(_)) => None,
            (_, None) => RATE_RANGE.contains(&self.next).then_some(self.next),
        }
    }

    fn learn(&mut self, rate_per_s: f64, keeps_up: bool) {
        if keeps_up {
            self.bears = Some(rate_per_s);
            self.next = 2.0 * rate_per_s;
        } else {
            self.falls_behind_at = Some(rate_per_s);
        }
    }
}

async fn step(
    load: &LoadArgs,
    rate_per_s: f64,
    workload: &Arc<Workload>,
    first_index: u64,
    stop: &CancellationToken,
) -> anyhow::Result<Step> {
    let length = load.duration.unwrap_or(STEP_LENGTH);
    let rate = RateArg { from_per_s: rate_per_s, to_per_s: rate_per_s };
    let paced = LoadArgs { rate: Some(rate), ..load.clone() };
    let max_in_flight = paced.max_concurrency();
    let step_stop = stop.child_token();
    let extent = Extent::Duration(length);
    let load_of_step = Load { pacing: paced.pacing(0)?, extent, first_index, conducts: Conducts::default() };
    let mut running = drive::start(workload.clone(), load_of_step, step_stop.clone());
    let _view = Screen::new(load.quiet).watch(&format!("{rate_per_s:.3} a second"), extent, &running);
    let mut tally = Tally::new(Window::default(), load.slo);
    let mut growth = Growth::default();
    let mut is_full = false;
    let mut tick = tokio::time::interval(SAMPLE_PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            record = running.records.recv() => match record {
                Some(record) => {
                    if let Some(first_ns) = record.first_token_ns() {
                        let wait_ns = first_ns.saturating_sub(record.intended_ns);
                        growth.first_token.push((record.intended_ns as f64 / 1e9, wait_ns as f64 / 1e9));
                    }
                    tally.add(&record);
                    if record.failure == Some(Failure::Interrupted) {
                        tally.add_cut_off(&record);
                    }
                }
                None => break,
            },
            _ = tick.tick() => {
                let elapsed_s = running.clock.now_ns() as f64 / 1e9;
                if elapsed_s < length.as_secs_f64() {
                    growth.in_flight.push((elapsed_s, running.meter.in_flight() as f64));
                } else if growth.verdict(rate_per_s, length) != Verdict::KeepsUp {
                    // What is still queued tells nothing more, and could take as long again.
                    step_stop.cancel();
                }
                if running.meter.in_flight() >= max_in_flight && !is_full {
                    is_full = true;
                    step_stop.cancel();
                }
            }
        }
    }
    tally.close(running.meter.peak_in_flight(), running.lags());
    let ended = tally.completed + tally.failed;
    let verdict = match growth.verdict(rate_per_s, length) {
        _ if is_full => Verdict::AllInFlight,
        _ if tally.failed as f64 > TURNED_AWAY * ended as f64 => Verdict::TurnsAway,
        verdict => verdict,
    };
    Ok(Step { rate_per_s, tally, verdict })
}

/// Reads a precision, 0.01 to 1.
fn parse_precision(text: &str) -> Result<f64, String> {
    let precision = text.parse().ok().filter(|precision| (0.01..=1.0).contains(precision));
    precision.ok_or_else(|| format!("'{text}' is no precision: give 0.01 to 1"))
}

#[cfg(test)]
mod tests;
