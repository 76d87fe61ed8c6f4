//! The server's own side as part of a report: its JSON, and its part of the page.

use maud::{Markup, html};
use serde::Serialize;
use serde_json::{Value, json};

use crate::client::metrics::{Field, Snapshot};
use crate::figures::server_side::Figures;
use crate::figures::tally::Tally;
use crate::report::contents::Report;
use crate::report::page::{pairs, timeline};
use crate::report::plot::Series as Line;
use crate::run::watch::{Series, ServerSide};

/// A plot along the run: title, label of its vertical axis, and its lines.
type Timeline<'a> = (&'static str, &'static str, Vec<Line<'a>>);

impl ServerSide {
    /// The part of the report's JSON about the counted part of a run, and what was said at each look.
    pub fn to_json(&self, tally: &Tally) -> Value {
        let series = match self {
            ServerSide::Unknown(why) => return json!({ "unknown": why }),
            ServerSide::Seen(series) => series,
        };
        let said = &series.said;
        let look = |field| said.iter().map(|(_, said)| said.get(field)).collect::<Vec<_>>();
        let timeline = json!({
            "time_s": said.iter().map(|(time_s, _)| *time_s).collect::<Vec<_>>(),
            "running": look(Field::Running),
            "waiting": look(Field::Waiting),
            "kv_cache_usage": look(Field::KvUsage),
            "steps": look(Field::Steps),
            "step_seconds": look(Field::StepSeconds),
        });
        json!(Side {
            names: series.dialect(),
            looks: said.len(),
            missed_looks: series.missed,
            figures: Figures::of(series, tally.window_s()),
            timeline
        })
    }
}

#[derive(Serialize)]
struct Side {
    names: &'static str,
    looks: usize,
    missed_looks: u64,
    #[serde(flatten)]
    figures: Figures,
    timeline: Value,
}

/// A heading, plots over all of the run, and the figures of its counted part.
pub fn section(report: &Report) -> Markup {
    let tally = &report.tally;
    html! {
        @match &report.server_side {
            None => {}
            Some(ServerSide::Unknown(why)) => {
                h2 { "The server's own side" }
                p class="muted" { "Not known: " (why) "." }
            }
            Some(ServerSide::Seen(series)) => {
                h2 { "The server's own side" }
                @for (title, label, lines) in timelines(series) {
                    @let times = lines.iter().flat_map(|line| &line.points).map(|point| point.0);
                    @let end_s = times.fold(tally.duration_s(), f64::max);
                    (timeline(title, label, lines, end_s, report.events()))
                }
                (pairs(Figures::of(series, tally.window_s()).in_words(tally)))
                p class="muted" { "Figures " (series.in_words()) "." }
            }
        }
    }
}

fn timelines(series: &Series) -> Vec<Timeline<'_>> {
    let line = |name, points: Vec<(f64, f64)>| Line { name, points, ..Line::default() };
    let looks = |field: Field, times: f64| -> Vec<(f64, f64)> {
        series.said.iter().filter_map(|(time_s, said)| Some((*time_s, times * said.get(field)?))).collect()
    };
    let sequences = vec![line("running", looks(Field::Running, 1.0)), line("waiting", looks(Field::Waiting, 1.0))];
    // Each interval between two looks is drawn as a step.
    let steps = series.said.windows(2).filter_map(|pair| {
        let ms = step_ms(&pair[0].1, &pair[1].1)?;
        Some([(pair[0].0, ms), (pair[1].0, ms)])
    });
    let mut timelines = vec![
        ("Sequences in the server", "sequences", sequences),
        ("KV cache in use", "% of all pages", vec![line("at each look", looks(Field::KvUsage, 100.0))]),
        ("Time of a step", "ms", vec![line("mean between two looks", steps.flatten().collect())]),
    ];
    for (_, _, lines) in &mut timelines {
        // What was said before and after a short run is no course of it.
        lines.retain(|line| line.points.len() > 2);
    }
    timelines.retain(|(_, _, lines)| !lines.is_empty());
    timelines
}

fn step_ms(before: &Snapshot, after: &Snapshot) -> Option<f64> {
    let steps = after.since(before, Field::Steps).filter(|steps| *steps > 0.0)?;
    Some(1e3 * after.since(before, Field::StepSeconds)? / steps)
}

#[cfg(test)]
mod tests;
