//! `loadtest sweep`: what more sockets buy, as one report.
//!
//! For each layout it starts a server of this program, puts the same loads on it, ends it, and lets the
//! bench say what the steps of a group read. Layouts that the machine lacks are [`predict`]ed. The report is written
//! after each, so that a sweep that is interrupted keeps what it has.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, anyhow, bail, ensure};
use tokio_util::sync::CancellationToken;

use crate::figures::server_side::worker_losses;
use crate::figures::tally::Tally;
use crate::load::conduct::Conducts;
use crate::measure::args::LoadArgs;
use crate::measure::run::{Prepared, collect, prepare};
use crate::report::contents::Report;
use crate::run::drive::{self, Load};
use crate::run::live::Screen;
use crate::run::watch::{self, Before};
use crate::sweep::child::{Child, STOPPED};
use crate::sweep::figures::{Device, Level, Size, Sweep};
use crate::sweep::layout::Layout;
use crate::sweep::page::page;
use crate::sweep::plan::{Plan, SweepArgs, plan};
use crate::sweep::predict::{FITTED, MOST_STREAMS, predict, predict_replicas};
use crate::sweep::table;

const JSON_FILE: &str = "sweep.json";
const PAGE_FILE: &str = "sweep.html";

/// Sweeps as `args` say, and prints the report and writes it to `--out`.
///
/// # Errors
/// Options that do not fit a sweep, a directory that cannot be written, and a sweep in which no size was measured
/// (after its report, which says why).
pub async fn run(args: &SweepArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let (plan, mut sweep) = plan(args)?;
    fs::create_dir_all(&plan.out)
        .with_context(|| format!("cannot make the directory {} (--out)", plan.out.display()))?;
    plan.run(&args.layouts(), &mut sweep, stop).await
}

impl Plan {
    /// Measures all `layouts` and predicts those that it cannot; keeps the report after each.
    async fn run(&self, layouts: &[Layout], sweep: &mut Sweep, stop: &CancellationToken) -> anyhow::Result<()> {
        self.keep(sweep)?;
        for &layout in layouts {
            if stop.is_cancelled() {
                break;
            }
            let mut size = Size { layout, ..Size::default() };
            let is_lacking = self.device == Device::Cuda && layout.sockets() > sweep.gpus;
            let measured = match is_lacking {
                true => Err(anyhow!("this machine has {} GPUs", sweep.gpus)),
                false => self.measure(&mut size, sweep, stop).await,
            };
            size.not_measured = measured.err().map(|error| format!("{error:#}"));
            say(&table::line(sweep, &size))?;
            sweep.sizes.push(size);
            self.keep(sweep)?;
        }
        if let Err(error) = self.predict(sweep, stop).await {
            sweep.notes.push(format!("no size is predicted: {error:#}"));
        }
        predict_replicas(sweep);
        if stop.is_cancelled() {
            sweep.notes.push("the sweep was stopped by the user; loads under way then are left out".into());
        }
        self.keep(sweep)?;
        say(&sweep.to_string())?;
        ensure!(sweep.sizes.iter().any(|size| !size.measured.is_empty()), "no size was measured");
        say(&format!("Report: {}", self.out.join(PAGE_FILE).display()))
    }

    /// Measures a size under all loads, and then what its steps read.
    async fn measure(&self, size: &mut Size, sweep: &mut Sweep, stop: &CancellationToken) -> anyhow::Result<()> {
        let Layout { replicas, tp } = size.layout;
        let log = self.out.join(format!("{}.log", size.layout.stem()));
        let mut arguments = ["serve", "--until-stdin-closes", "--tp"].map(OsString::from).to_vec();
        arguments.push(tp.to_string().into());
        if replicas > 1 {
            arguments.extend(["--replicas".into(), replicas.to_string().into()]);
        }
        let arguments = arguments.iter().chain(&self.serve);
        let begun = Instant::now();
        let mut server = Child::start(format!("looplane serve, {}", size.layout), &self.looplane, arguments, &log)?;
        let measured = self.put_loads(&mut server, begun, size, sweep, stop).await;
        server.end().await;
        measured?;
        // Replicas compute what one alone does.
        let Some(commands) = self.commands.as_ref().filter(|_| replicas == 1) else { return Ok(()) };
        let streams = sweep.loads.iter().filter_map(|load| load.streams);
        match commands.bench(tp, streams, context_of(size), stop).await {
            Ok(bench) => {
                size.traffic = bench.traffic();
                sweep.processor = bench.processor;
            }
            Err(_) if stop.is_cancelled() => {}
            Err(error) => sweep.notes.push(format!("TP {tp}: what its steps read is not known: {error:#}")),
        }
        Ok(())
    }

    async fn put_loads(
        &self,
        server: &mut Child,
        begun: Instant,
        size: &mut Size,
        sweep: &mut Sweep,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let base = server.ready(stop).await?;
        size.ready_s = Some(begun.elapsed().as_secs_f64());
        for (place, load) in self.loads.iter().enumerate() {
            let level = self.put_load(&base, size.layout, place, load, sweep, stop).await;
            if stop.is_cancelled() {
                bail!(STOPPED);
            }
            // A server that is gone says why; what its clients saw of it says less.
            server.check()?;
            let level = level?;
            say(&format!(
                "{}, {}: {:.1} tokens a second",
                size.layout, sweep.loads[place].name, level.output_throughput
            ))?;
            size.measured.push(level);
        }
        Ok(())
    }

    async fn put_load(
        &self,
        base: &str,
        layout: Layout,
        place: usize,
        load: &LoadArgs,
        sweep: &mut Sweep,
        stop: &CancellationToken,
    ) -> anyhow::Result<Level> {
        let load = LoadArgs { target: base.to_owned(), ..load.clone() };
        let name = sweep.loads[place].name.clone();
        let title = format!("{layout}, {name}");
        let Prepared { workload, setup } = prepare(&load, None, stop).await?;
        sweep.notes.extend(setup.notes.iter().map(|note| format!("{title}: {note}")));
        let (prompt_lengths, output_lengths) = setup.shapes.in_words();
        sweep.model = Some(setup.model.clone());
        sweep.settings = vec![
            ("interface".into(), setup.backend.into()),
            ("prompt tokens".into(), prompt_lengths),
            ("output tokens".into(), format!("exactly {output_lengths}")),
            ("shared by all prompts".into(), format!("{:.0} %", 100.0 * setup.shared_prefix)),
            ("seed".into(), setup.seed.to_string()),
        ];
        sweep.settings.extend(sweep.threads.map(|n| ("compute threads of a worker".into(), n.to_string())));
        let (pacing, extent, conducts) = (load.pacing(0)?, load.extent(), Conducts::default());
        let pacing = Load { pacing, extent, first_index: load.warmup(), conducts };
        let before = Before::ask(&load.target, None).await;
        let mut running = drive::start(workload, pacing, stop.clone());
        let watch = before.watch(watch::PERIOD, running.clock, None);
        let view = Screen::new(load.quiet).watch(&title, extent, &running);
        let mut tally = Tally::new(self.window, load.slo);
        collect(&mut running, &mut tally, |_| ()).await;
        drop(view);
        let server_side = watch.end().await;
        if tally.completed == 0 {
            match tally.worst_error() {
                Some((kind, _, example)) => bail!("{name}: no request succeeded: {kind}: {example}"),
                None => bail!("{name}: no request was answered in time: measure longer (--duration)"),
            }
        }
        let file = format!("{}-{}.json", layout.stem(), name.replace([' ', '/'], "-"));
        let path = self.out.join(&file);
        let report = Report { setup, tally, spread: None, faults: None, server_side: Some(server_side) };
        fs::write(&path, format!("{:#}\n", report.to_json()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Level::new(place, &report, file))
    }

    /// Predicts what was not measured, where there is a model for it, and what was, to test the model.
    async fn predict(&self, sweep: &mut Sweep, stop: &CancellationToken) -> anyhow::Result<()> {
        let streams: Vec<u32> =
            sweep.loads.iter().filter_map(|load| load.streams).filter(|streams| *streams <= MOST_STREAMS).collect();
        let benched: Vec<u32> =
            sweep.sizes.iter().filter(|size| size.traffic.is_some()).map(|size| size.layout.tp).collect();
        let is_fitted = FITTED.iter().all(|tp| benched.contains(tp));
        let is_lacking = sweep.sizes.iter().any(|size| size.measured.is_empty());
        let can_be_tested = is_fitted && !streams.is_empty();
        if self.device == Device::Cpu || !(is_lacking || can_be_tested) {
            return Ok(());
        }
        ensure!(!streams.is_empty(), "the scaling model calculates closed loops of up to {MOST_STREAMS} streams");
        ensure!(is_fitted, "that takes measured sizes 1 and 2");
        let commands = self.commands.as_ref().context("the model's directory is not known: name it with --model")?;
        let context = sweep.sizes.iter().map(context_of).fold(0.0, f64::max);
        let scaling = commands.scaling(&benched, &streams, context, stop).await?;
        predict(sweep, &scaling);
        Ok(())
    }

    fn keep(&self, sweep: &Sweep) -> anyhow::Result<()> {
        let json = sweep.to_json().context("a sweep cannot be written as JSON")?;
        replace(&self.out.join(JSON_FILE), &format!("{json:#}\n"))?;
        replace(&self.out.join(PAGE_FILE), &page(sweep))
    }
}

impl Level {
    fn new(load: usize, report: &Report, file: String) -> Self {
        let tally = &report.tally;
        Self {
            load,
            completed: tally.completed,
            failed: tally.failed,
            request_throughput: tally.requests_per_s(),
            output_throughput: tally.output_tokens_per_s(),
            mean_tpot_ms: tally.times("tpot").and_then(|times| times.mean_ms()),
            median_ttft_ms: tally.percentile_ms("ttft", 50.0),
            p99_ttft_ms: tally.percentile_ms("ttft", 99.0),
            p99_itl_ms: tally.percentile_ms("itl", 99.0),
            p99_client_lag_ms: tally.percentile_ms("client_lag", 99.0),
            worker_losses: report.server_side.as_ref().and_then(worker_losses),
            mean_context: (tally.prompt_tokens as f64 + tally.output_tokens as f64 / 2.0) / tally.completed as f64,
            file,
        }
    }
}

/// Positions that sequences saw in the mean, over the loads of a size.
fn context_of(size: &Size) -> f64 {
    let contexts = size.measured.iter().map(|level| level.mean_context);
    contexts.sum::<f64>() / (size.measured.len() as f64).max(1.0)
}

/// Replaces a file as a whole: whoever reads it meanwhile, or after a power cut, finds the old one or the new one.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
    fs::rename(&new, path).with_context(|| format!("cannot replace {}", path.display()))
}

fn say(line: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{line}").context("cannot print the sweep")
}

#[cfg(test)]
mod tests;
