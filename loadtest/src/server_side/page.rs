//! The server's own side as part of the report's page.

use std::fmt;

use super::{Field, Series, ServerSide, Snapshot};
use crate::plot::{Axis, Escaped, Plot, STEPS, Series as Line};
use crate::report::Tally;

/// Steps of the axis along a run.
const TIMELINE_STEPS: u32 = 12;
/// Room above the highest value.
const HEADROOM: f64 = 1.05;

/// A plot along the run: title, label of its vertical axis, and its lines.
type Timeline<'a> = (&'static str, &'static str, Vec<Line<'a>>);

impl ServerSide {
    /// Writes a heading, the figures of the counted part of the run, and plots over all of it.
    pub fn write_page(&self, tally: &Tally, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "<h2>The server's own side</h2>")?;
        let series = match self {
            ServerSide::Unknown(why) => return writeln!(f, r#"<p class="muted">Not known: {}.</p>"#, Escaped(why)),
            ServerSide::Seen(series) => series,
        };
        for (title, label, lines) in series.timelines() {
            plot(title, label, lines, tally, f)?;
        }
        let figures = series.figures(tally.window_s());
        writeln!(f, r#"<div class="wide"><table>"#)?;
        for (name, value) in figures.in_words(tally, series.read_limit_gb_s) {
            writeln!(f, "<tr><th>{name}</th><td>{}</td></tr>", Escaped(&value))?;
        }
        writeln!(f, "</table></div>\n<p class=\"muted\">Figures {}.</p>", series.in_words())
    }
}

impl Series {
    /// Where the figures come from.
    pub fn in_words(&self) -> String {
        let missed = match self.missed {
            0 => String::new(),
            missed => format!(", {missed} more were not answered"),
        };
        format!("read from /metrics with {}'s names, {} times over the run{missed}", self.dialect(), self.said.len())
    }

    fn timelines(&self) -> Vec<Timeline<'_>> {
        let line = |name, points: Vec<(f64, f64)>| Line { name, points, marks: Vec::new() };
        let looks = |field: Field, times: f64| -> Vec<(f64, f64)> {
            self.said.iter().filter_map(|(time_s, said)| Some((*time_s, times * said.get(field)?))).collect()
        };
        let sequences = vec![line("running", looks(Field::Running, 1.0)), line("waiting", looks(Field::Waiting, 1.0))];
        let mut timelines = vec![
            ("Sequences in the server", "sequences", sequences),
            ("KV cache in use", "% of all pages", vec![line("at each look", looks(Field::KvUsage, 100.0))]),
            ("Time of a step", "ms", vec![line("mean between two looks", self.between(step_ms))]),
        ];
        for (_, _, lines) in &mut timelines {
            // What was said before and after a short run is no course of it.
            lines.retain(|line| line.points.len() > 2);
        }
        timelines.retain(|(_, _, lines)| !lines.is_empty());
        timelines
    }

    /// A value of each interval between two looks, drawn as a step.
    fn between(&self, value: impl Fn(&Snapshot, &Snapshot) -> Option<f64>) -> Vec<(f64, f64)> {
        let intervals = self.said.windows(2).filter_map(|pair| {
            let value = value(&pair[0].1, &pair[1].1)?;
            Some([(pair[0].0, value), (pair[1].0, value)])
        });
        intervals.flatten().collect()
    }
}

fn step_ms(before: &Snapshot, after: &Snapshot) -> Option<f64> {
    let steps = after.since(before, Field::Steps).filter(|steps| *steps > 0.0)?;
    Some(1e3 * after.since(before, Field::StepSeconds)? / steps)
}

fn plot(title: &str, label: &str, series: Vec<Line>, tally: &Tally, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let points = || series.iter().flat_map(|line| line.points.iter());
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    let end_s = points().map(|point| point.0).fold(tally.duration_s(), f64::max);
    let x = Axis::linear("time since the start of the run, s", 0.0, end_s, TIMELINE_STEPS).with_events(tally.events());
    let y = Axis::linear(label, 0.0, highest * HEADROOM, STEPS);
    let plot = Plot { title, width: 1180.0, height: 240.0, x, y, series };
    writeln!(f, "<div class=\"plot wide\">\n{plot}</div>")
}
