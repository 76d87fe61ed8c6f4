//! `looplane scaling`: the worker's calculation as text, as JSON, and as a picture drawn by the load tester's plots.

use std::path::Path;

use anyhow::Context;
use looplane_loadtest::plot::{Axis, Mark, Picture, Plot, STEPS, Series};
use looplane_worker::scaling::{Compared, Predicted, Report, ScalingArgs, Steps, run};

/// Size of one plot.
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 300.0;
/// Batches with a column of plots each, with their titles.
const COLUMNS: [(u32, &str, &str); 2] =
    [(1, "Batch 1: a step", "Batch 1: of the floor's rate"), (8, "Batch 8: a step", "Batch 8: of the floor's rate")];

/// Calculates, says the report, and then writes it and draws it if asked to.
///
/// # Errors
/// Files that are no figures, or a file that cannot be written.
pub fn report(args: &ScalingArgs, say: impl FnOnce(&str)) -> anyhow::Result<()> {
    let report = run(args)?;
    say(report.to_string().trim_end());
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", report.to_json()))
            .with_context(|| format!("--json {}", path.display()))?;
    }
    if let Some(path) = &args.plot {
        write(path, &report).with_context(|| format!("--plot {}", path.display()))?;
    }
    Ok(())
}

fn write(path: &Path, report: &Report) -> std::io::Result<()> {
    let steps = |batch, title| {
        let low = report.predicted.iter().map(|of| of.step_ms).fold(f64::INFINITY, f64::min);
        let high = report.predicted.iter().map(|of| of.step_ms).fold(0.0, f64::max);
        plot(report, batch, title, Axis::of_times("ms a token", low, high), |of| of.step_ms, |ms, _| ms)
    };
    let shares = |batch, title| {
        let axis = Axis::linear("of the floor's rate, %", 0.0, 100.0, STEPS);
        plot(report, batch, title, axis, |of| of.floor_ms / of.step_ms * 100.0, |ms, floor_ms| floor_ms / ms * 100.0)
    };
    let fitted = report.fitted_gpus;
    let percent = |steps| report.worst(steps).map_or("-".to_owned(), |worst| format!("{:.1} %", worst * 100.0));
    let picture = Picture {
        rows: vec![
            COLUMNS.map(|(batch, title, _)| steps(batch, title)).into(),
            COLUMNS.map(|(batch, _, title)| shares(batch, title)).into(),
        ],
        notes: vec![
            format!(
                "Discs: measured. Rings and lines: calculated, from what was measured on 1 to {fitted} GPUs. \
                 bf16, 512 tokens of context."
            ),
            format!(
                "Largest error: {} on 1 to {fitted} GPUs, {} on larger groups that were measured, {} on shards of them.",
                percent(Steps::Fitted),
                percent(Steps::Larger),
                percent(Steps::Shards)
            ),
            "Floor: a GPU's bytes at 4653 GB/s.".into(),
        ],
    };
    std::fs::write(path, picture.to_string())
}

/// A line for each shape with a mark for each group: a disc where it was measured, else a ring.
fn plot<'a>(
    report: &'a Report,
    batch: u32,
    title: &'a str,
    y: Axis,
    calculated: fn(&Predicted) -> f64,
    measured: fn(f64, f64) -> f64,
) -> Plot<'a> {
    let mut series: Vec<Series> = Vec::new();
    for of in report.predicted.iter().filter(|of| of.batch == batch) {
        let (name, gpus) = (of.model.as_str(), f64::from(of.ranks as u32));
        if series.last().is_none_or(|line| line.name != name) {
            series.push(Series { name, points: Vec::new(), marks: Vec::new() });
        }
        let line = series.last_mut().expect("one was pushed");
        line.points.push((gpus, calculated(of)));
        let same = |other: &&Compared| {
            (&other.model, other.ranks, other.measured.batch, other.shard_of) == (&of.model, of.ranks, batch, None)
        };
        let (at, how) = match report.compared.iter().find(same) {
            Some(step) => (measured(step.measured.step_ms, of.floor_ms), "measured"),
            None => (calculated(of), "predicted"),
        };
        let meaning = format!("{name} on {gpus}: {at:.3}, {how}");
        line.marks.push(Mark { at: (gpus, at), meaning, hollow: how == "predicted" });
    }
    Plot { title, width: WIDTH, height: HEIGHT, x: Axis::of_doublings("GPUs", 1, 16), y, series }
}
