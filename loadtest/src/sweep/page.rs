//! The sweep as one HTML page: plots in which measured, predicted and crowded sizes are told apart, and the tables.

use std::fmt::{self, Display};

use super::figures::{Device, How, Row, Sweep};
use super::table::{cells, heads, legend, line};
use crate::page::{head, notes, readable};
use crate::plot::{Axis, Escaped, Mark, Plot, STEPS, Series};

/// Rules of this page beside those of all reports.
const STYLE: &str = include_str!("page.css");
/// Size of a plot over sizes, and of the one over interactivity.
const SMALL: (f64, f64) = (400.0, 300.0);
const WIDE: (f64, f64) = (1180.0, 380.0);
/// Steps of their axes: of a small one's height, so that 100 % does not end at 150, and of a wide one's width.
const SMALL_STEPS: u32 = 6;
const WIDE_STEPS: u32 = 12;
/// Room above the highest point.
const HEADROOM: f64 = 1.05;

/// Writes a sweep; see [`Display`].
pub struct Page<'a>(pub &'a Sweep);

impl Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sweep = self.0;
        let model = sweep.model.as_deref().unwrap_or("no model");
        let title = format!("Scaling of {model}");
        head(f, &title, STYLE)?;
        writeln!(f, "<h1>{}</h1>", Escaped(&title))?;
        writeln!(f, r#"<p class="muted">{} · {}</p>"#, readable(&sweep.date), Escaped(&sweep.head()))?;
        notes(f, &self.notes())?;
        if sweep.sizes.iter().any(|size| !size.measured.is_empty()) {
            self.over_sizes(f)?;
            self.interactivity(f)?;
            self.tables(f)?;
        } else {
            writeln!(f, "<p>Nothing has been measured.</p>")?;
        }
        self.settings(f)?;
        writeln!(f, "</body>\n</html>")
    }
}

impl Page<'_> {
    /// Why sizes were not measured, and what else a reader has to know.
    fn notes(&self) -> Vec<String> {
        let sweep = self.0;
        let unmeasured = sweep.sizes.iter().filter(|size| size.not_measured.is_some());
        let mut notes: Vec<String> = unmeasured.map(|size| line(sweep, size)).collect();
        notes.extend(sweep.remarks());
        notes
    }

    /// Tokens a second and efficiency over the sizes, a plot for each load.
    fn over_sizes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "<h2>Throughput</h2>\n<div class=\"plots\">")?;
        for (load, point) in self.0.loads.iter().enumerate() {
            let rows = self.0.rows(load);
            let title = format!("Output tokens a second, {}", point.name);
            self.plot(f, &title, "tokens / s", &rows, |row| Some(row.tokens_per_s), |first, ratio| first * ratio)?;
        }
        writeln!(f, "</div>\n<h2>Efficiency</h2>\n<div class=\"plots\">")?;
        for (load, point) in self.0.loads.iter().enumerate() {
            let rows = self.0.rows(load);
            let title = format!("Efficiency, {}", point.name);
            let percent = |row: &Row| row.efficiency.map(|share| 100.0 * share);
            self.plot(f, &title, "of linear scaling, %", &rows, percent, |first, _| first)?;
        }
        let other = match self.0.device {
            Device::Cpu => "Rings and dashed lines: more workers than cores, which is overhead and no scaling.",
            Device::Cuda => {
                "Rings and dashed lines: predicted by the scaling model, also where a disc says what was measured."
            }
        };
        writeln!(
            f,
            "</div>\n<p class=\"muted\">Discs and solid lines: measured. {other} Thin lines: linear scaling from the \
             smallest size that was measured.</p>"
        )
    }

    /// One plot over sizes: what was measured, what was not measured so, and the ideal, which `linear` says of the first
    /// value and a ratio of sizes.
    fn plot(
        &self,
        f: &mut fmt::Formatter<'_>,
        title: &str,
        label: &str,
        rows: &[Row],
        value: impl Fn(&Row) -> Option<f64>,
        linear: impl Fn(f64, f64) -> f64,
    ) -> fmt::Result {
        let size = |row: &Row| f64::from(row.tp);
        // The same axis under all loads.
        let sizes = || (0..self.0.loads.len()).flat_map(|load| self.0.rows(load)).map(|row| row.tp);
        let (Some(first), Some(smallest), Some(largest)) = (rows.first(), sizes().min(), sizes().max()) else {
            return writeln!(f, r#"<div class="plot"><p>{}: nothing was measured</p></div>"#, Escaped(title));
        };
        let of_kind = |row: &Row, kind: How| match (row.how, row.model_error) {
            (how, _) if how == kind => value(row),
            // What was predicted of a size that was measured stands beside it.
            (_, Some(error)) if kind == How::Predicted => value(row).map(|measured| measured * (1.0 + error)),
            _ => None,
        };
        let line = |kind: How| {
            let points: Vec<(f64, f64)> =
                rows.iter().filter_map(|row| Some((size(row), of_kind(row, kind)?))).collect();
            let mark = |&at: &(f64, f64)| Mark {
                at,
                meaning: format!("TP {}: {:.1} {label}, {}", at.0, at.1, kind.in_words()),
                hollow: kind != How::Measured,
            };
            Series { name: kind.in_short(), marks: points.iter().map(mark).collect(), points }
        };
        let unlike = match self.0.device {
            Device::Cpu => How::Overhead,
            Device::Cuda => How::Predicted,
        };
        let from = value(first).unwrap_or(0.0);
        // Workers without a core of their own are not meant to scale.
        let last_of_its_own = rows.iter().rfind(|row| row.how != How::Overhead).unwrap_or(first);
        let ideal = [first, last_of_its_own].map(|row| (size(row), linear(from, size(row) / size(first))));
        let linear = Series { name: "linear", points: ideal.to_vec(), marks: Vec::new() };
        let series = vec![line(How::Measured), line(unlike), linear];
        let highest = series.iter().flat_map(|of| &of.points).map(|at| at.1).fold(0.0, f64::max);
        let plot = Plot {
            title,
            width: SMALL.0,
            height: SMALL.1,
            x: Axis::of_doublings(&format!("{}s", self.0.device.socket()), smallest, largest.max(2 * smallest)),
            y: Axis::linear(label, 0.0, highest, SMALL_STEPS),
            series,
        };
        writeln!(f, "<div class=\"plot sizes\">\n{plot}</div>")
    }

    /// Tokens a second of each socket over those of each user: a curve for each size, with a point for each load.
    fn interactivity(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sweep = self.0;
        if sweep.loads.len() < 2 {
            return Ok(());
        }
        let socket = sweep.device.socket();
        let mut curves: Vec<Curve> = Vec::new();
        for (load, point) in sweep.loads.iter().enumerate() {
            for row in sweep.rows(load) {
                let Some(of_user) = row.tokens_per_s_a_user else { continue };
                let place = curves.iter().position(|curve| (curve.tp, curve.how) == (row.tp, row.how));
                let place = place.unwrap_or_else(|| {
                    let name = match row.how {
                        How::Measured => format!("TP {}", row.tp),
                        How::Predicted => format!("TP {}, predicted", row.tp),
                        How::Overhead => format!("TP {} on {} cores", row.tp, sweep.cores),
                    };
                    curves.push(Curve { tp: row.tp, how: row.how, name, points: Vec::new() });
                    curves.len() - 1
                });
                curves[place].points.push((of_user, row.tokens_per_s_a_socket, point.name.as_str()));
            }
        }
        curves.sort_by_key(|curve| (curve.tp, curve.how != How::Measured));
        let series = curves.iter().map(|curve| Series {
            name: &curve.name,
            points: curve.points.iter().map(|&(x, y, _)| (x, y)).collect(),
            marks: curve.marks(socket),
        });
        let series: Vec<Series> = series.collect();
        let highest = |of: fn(&(f64, f64)) -> f64| series.iter().flat_map(|of| &of.points).map(of).fold(0.0, f64::max);
        let dashed = curves.iter().enumerate().filter(|(_, curve)| curve.how != How::Measured);
        let dashed: String = dashed.map(|(number, _)| format!(" dash{number}")).collect();
        let title = format!("Throughput of a {socket} against interactivity");
        let plot = Plot {
            title: &title,
            width: WIDE.0,
            height: WIDE.1,
            x: Axis::linear("tokens / s a user", 0.0, highest(|at| at.0) * HEADROOM, WIDE_STEPS),
            y: Axis::linear(&format!("tokens / s a {socket}"), 0.0, highest(|at| at.1) * HEADROOM, STEPS),
            series,
        };
        writeln!(
            f,
            "<h2>Throughput against interactivity</h2>\n<div class=\"plot wide curves{dashed}\">\n{plot}</div>"
        )?;
        let loads: Vec<&str> = sweep.loads.iter().map(|load| load.name.as_str()).collect();
        writeln!(
            f,
            "<p class=\"muted\">A mark for each load: {}. Up: cheaper; right: faster for each user.</p>",
            Escaped(&loads.join(", "))
        )
    }

    fn tables(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sweep = self.0;
        for (load, point) in sweep.loads.iter().enumerate() {
            writeln!(f, "<h2>{}</h2>\n<p class=\"muted\">{}</p>", Escaped(&point.name), Escaped(&point.pacing))?;
            writeln!(f, "<div class=\"wide\"><table class=\"figures\">\n<tr>")?;
            for head in heads(sweep.device.socket()) {
                write!(f, "<th>{head}</th>")?;
            }
            writeln!(f, "<th>figures are</th></tr>")?;
            for row in sweep.rows(load) {
                write!(f, r#"<tr class="{}">"#, if row.how == How::Measured { "measured" } else { "unlike" })?;
                for cell in cells(&row) {
                    write!(f, "<td>{cell}</td>")?;
                }
                writeln!(f, "<td>{}</td></tr>", row.how.in_words())?;
            }
            writeln!(f, "</table></div>")?;
        }
        writeln!(f, r#"<p class="muted">{}</p>"#, Escaped(&legend(sweep.device)))
    }

    fn settings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "<h2>Settings</h2>\n<div class=\"wide\"><table>")?;
        for (name, value) in &self.0.settings {
            writeln!(f, "<tr><th>{}</th><td>{}</td></tr>", Escaped(name), Escaped(value))?;
        }
        for size in &self.0.sizes {
            let ready = size.ready_s.map_or_else(|| "never".into(), |ready_s| format!("after {ready_s:.1} s"));
            writeln!(f, "<tr><th>server of TP {} ready</th><td>{ready}</td></tr>", size.tp)?;
        }
        writeln!(f, "</table></div>")
    }
}

/// The loads of one size in the plot of interactivity.
struct Curve<'a> {
    tp: u32,
    how: How,
    name: String,
    /// Tokens a second of a user, and of a socket, and the load's name.
    points: Vec<(f64, f64, &'a str)>,
}

impl Curve<'_> {
    fn marks(&self, socket: &str) -> Vec<Mark> {
        let mark = |&(x, y, load): &(f64, f64, &str)| Mark {
            at: (x, y),
            meaning: format!("{}, {load}: {x:.1} tokens / s a user, {y:.1} a {socket}", self.name),
            hollow: self.how != How::Measured,
        };
        self.points.iter().map(mark).collect()
    }
}
