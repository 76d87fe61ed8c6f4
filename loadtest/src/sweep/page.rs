//! The sweep as one HTML page: plots in which measured, predicted and crowded sizes are told apart, and the tables.

use maud::{Markup, html};

use crate::report::page;
use crate::report::plot::{Axis, Mark, Plot, STEPS, Series};
use crate::sweep::figures::{Device, How, Row, Sweep};
use crate::sweep::layout::Layout;
use crate::sweep::table::{CHOICE_HEADS, cells, choice_cells, heads, legend, line};
use crate::text::readable;

const STYLE: &str = include_str!("page.css");
/// Size of a plot over sizes, and of the one over interactivity.
const SMALL: (f64, f64) = (400.0, 300.0);
const WIDE: (f64, f64) = (1180.0, 380.0);
/// Steps of their axes: of a small one's height, so that 100 % does not end at 150, and of a wide one's width.
const SMALL_STEPS: u32 = 6;
const WIDE_STEPS: u32 = 12;
const HEADROOM: f64 = 1.05;

/// The sweep as a page.
pub fn page(sweep: &Sweep) -> String {
    let title = format!("Scaling of {}", sweep.model.as_deref().unwrap_or("no model"));
    // Why sizes were not measured, and what else a reader has to know.
    let unmeasured = sweep.sizes.iter().filter(|size| size.not_measured.is_some());
    let notes: Vec<String> = unmeasured.map(|size| line(sweep, size)).chain(sweep.remarks()).collect();
    let settings = sweep.settings.iter().cloned();
    let ready = sweep.sizes.iter().map(|size| {
        let after = size.ready_s.map_or_else(|| "never".into(), |ready_s| format!("after {ready_s:.1} s"));
        (format!("server of {} ready", size.layout), after)
    });
    let body = html! {
        h1 { (title) }
        p class="muted" { (readable(&sweep.date)) " · " (sweep.head()) }
        (page::notes(&notes))
        @if sweep.sizes.iter().any(|size| !size.measured.is_empty()) {
            (over_sizes(sweep))
            (interactivity(sweep))
            (choices(sweep))
            (tables(sweep))
        } @else {
            p { "Nothing has been measured." }
        }
        h2 { "Settings" }
        (page::pairs(settings.chain(ready)))
    };
    page::page(&title, STYLE, body)
}

/// Tokens a second and efficiency over the sizes, a plot for each load.
fn over_sizes(sweep: &Sweep) -> Markup {
    let loads = || sweep.loads.iter().enumerate().map(|(load, point)| (sweep.rows(load), &point.name));
    let percent = |row: &Row| row.efficiency.map(|share| 100.0 * share);
    let other = match sweep.device {
        Device::Cpu => "Rings and dashed lines: more workers than cores, which is overhead and no scaling.",
        Device::Cuda => {
            "Rings and dashed lines: predicted by the scaling model, also where a disc says what was measured."
        }
    };
    html! {
        h2 { "Throughput" }
        div class="plots" {
            @for (rows, name) in loads() {
                @let title = format!("Output tokens a second, {name}");
                (over_size(sweep, &title, "tokens / s", &rows, |row| Some(row.tokens_per_s), |first, ratio| first * ratio))
            }
        }
        h2 { "Efficiency" }
        div class="plots" {
            @for (rows, name) in loads() {
                @let title = format!("Efficiency, {name}");
                (over_size(sweep, &title, "of linear scaling, %", &rows, percent, |first, _| first))
            }
        }
        p class="muted" {
            "Discs and solid lines: measured. " (other)
            " Thin lines: linear scaling from the smallest size that was measured."
            @if sweep.has_replicas() {
                " Marks without a line: replicas, those with rings on GPUs calculated from one under its share of the streams."
            }
        }
    }
}

/// One plot over sizes: what was measured, what was not measured so, and the ideal, which `linear` says of the first
/// value and a ratio of sizes.
fn over_size(
    sweep: &Sweep,
    title: &str,
    label: &str,
    rows: &[Row],
    value: impl Fn(&Row) -> Option<f64>,
    linear: impl Fn(f64, f64) -> f64,
) -> Markup {
    let size = |row: &Row| f64::from(row.layout.sockets());
    // The same axis under all loads.
    let sizes = || (0..sweep.loads.len()).flat_map(|load| sweep.rows(load)).map(|row| row.layout.sockets());
    let (Some(first), Some(smallest), Some(largest)) = (rows.first(), sizes().min(), sizes().max()) else {
        return html! { div class="plot" { p { (title) ": nothing was measured" } } };
    };
    let of_kind = |row: &Row, kind: How| match (row.how, row.model_error) {
        (how, _) if how == kind => value(row),
        // What was predicted of a size that was measured stands beside it.
        (_, Some(error)) if kind == How::Predicted => value(row).map(|measured| measured * (1.0 + error)),
        _ => None,
    };
    let mark = |row: &Row, kind: How| {
        let at = (size(row), of_kind(row, kind)?);
        let meaning = format!("{}: {:.1} {label}, {}", row.layout, at.1, kind.in_words());
        Some(Mark { at, meaning, hollow: kind != How::Measured })
    };
    let line = |kind: How| {
        let groups = rows.iter().filter(|row| row.layout.replicas == 1);
        let marks: Vec<Mark> = groups.filter_map(|row| mark(row, kind)).collect();
        Series { name: kind.in_short(), points: marks.iter().map(|mark| mark.at).collect(), marks }
    };
    // Several may have as many sockets: they are no line.
    let replicas = rows.iter().filter(|row| row.layout.replicas > 1);
    let replicas = replicas.filter_map(|row| mark(row, row.how)).collect();
    let replicas = Series { name: "replicas", points: Vec::new(), marks: replicas };
    let unlike = match sweep.device {
        Device::Cpu => How::Overhead,
        Device::Cuda => How::Predicted,
    };
    let from = value(first).unwrap_or(0.0);
    // Workers without a core of their own are not meant to scale.
    let last_of_its_own = rows.iter().rfind(|row| row.how != How::Overhead).unwrap_or(first);
    let ideal = [first, last_of_its_own].map(|row| (size(row), linear(from, size(row) / size(first))));
    // The legend has room for three.
    let linear = |name| Series { name, points: ideal.into(), marks: Vec::new() };
    let series = match sweep.has_replicas() {
        true => vec![line(How::Measured), line(unlike), linear(""), replicas],
        false => vec![line(How::Measured), line(unlike), linear("linear")],
    };
    let marked = series.iter().flat_map(|of| of.marks.iter().map(|mark| &mark.at));
    let highest = series.iter().flat_map(|of| &of.points).chain(marked).map(|at| at.1).fold(0.0, f64::max);
    let x = Axis::of_doublings(&format!("{}s", sweep.device.socket()), smallest, largest.max(2 * smallest));
    let y = Axis::linear(label, 0.0, highest, SMALL_STEPS);
    let plot = Plot { title, width: SMALL.0, height: SMALL.1, x, y, series };
    html! { div class="plot sizes" { (plot.svg()) } }
}

/// Tokens a second of each socket over those of each user: a curve for each size, with a point for each load.
fn interactivity(sweep: &Sweep) -> Markup {
    let socket = sweep.device.socket();
    let mut curves: Vec<(Layout, How, Vec<Mark>)> = Vec::new();
    let name_of = |layout: Layout, how: How| match how {
        How::Measured => layout.to_string(),
        How::Predicted => format!("{layout}, predicted"),
        How::Overhead => format!("{layout} on {} cores", sweep.cores),
    };
    for (load, point) in sweep.loads.iter().enumerate() {
        for row in sweep.rows(load) {
            let Some(of_user) = row.tokens_per_s_a_user else { continue };
            let (name, of_socket) = (name_of(row.layout, row.how), row.tokens_per_s_a_socket);
            let meaning = format!("{name}, {}: {of_user:.1} tokens / s a user, {of_socket:.1} a {socket}", point.name);
            let mark = Mark { at: (of_user, of_socket), meaning, hollow: row.how != How::Measured };
            match curves.iter_mut().find(|(layout, how, _)| (*layout, *how) == (row.layout, row.how)) {
                Some((_, _, marks)) => marks.push(mark),
                None => curves.push((row.layout, row.how, vec![mark])),
            }
        }
    }
    curves.sort_by_key(|(layout, how, _)| (layout.sockets(), layout.replicas, *how != How::Measured));
    let names: Vec<String> = curves.iter().map(|(layout, how, _)| name_of(*layout, *how)).collect();
    let dashed = curves.iter().enumerate().filter(|(_, (_, how, _))| *how != How::Measured);
    let dashed: String = dashed.map(|(number, _)| format!(" dash{number}")).collect();
    let series = names.iter().zip(curves).map(|(name, (_, _, marks))| Series {
        name,
        points: marks.iter().map(|mark| mark.at).collect(),
        marks,
    });
    let series: Vec<Series> = series.collect();
    let highest = |of: fn(&(f64, f64)) -> f64| series.iter().flat_map(|of| &of.points).map(of).fold(0.0, f64::max);
    let x = Axis::linear("tokens / s a user", 0.0, highest(|at| at.0) * HEADROOM, WIDE_STEPS);
    let y = Axis::linear(&format!("tokens / s a {socket}"), 0.0, highest(|at| at.1) * HEADROOM, STEPS);
    let title = format!("Throughput of a {socket} against interactivity");
    let loads: Vec<&str> = sweep.loads.iter().map(|load| load.name.as_str()).collect();
    html! {
        @if loads.len() > 1 {
            h2 { "Throughput against interactivity" }
            div class={ "plot wide curves" (dashed) } {
                (Plot { title: &title, width: WIDE.0, height: WIDE.1, x, y, series }.svg())
            }
            p class="muted" {
                "A mark for each load: " (loads.join(", ")) ". Up: cheaper; right: faster for each user."
            }
        }
    }
}

/// Which layout of as many sockets is the best under each load.
fn choices(sweep: &Sweep) -> Markup {
    let choices = sweep.choices();
    html! {
        @if !choices.is_empty() {
            h2 { "Which layout for which load" }
            div class="wide" {
                table class="figures" {
                    tr { @for head in CHOICE_HEADS { th { (head) } } }
                    @for choice in &choices {
                        tr { @for cell in choice_cells(sweep, choice) { td { (cell) } } }
                    }
                }
            }
            p class="muted" { "Layouts of as many sockets are compared; replicas x workers that share the model." }
        }
    }
}

fn tables(sweep: &Sweep) -> Markup {
    html! {
        @for (load, point) in sweep.loads.iter().enumerate() {
            h2 { (point.name) }
            p class="muted" { (point.pacing) }
            div class="wide" {
                table class="figures" {
                    tr { @for head in heads(sweep.device.socket()) { th { (head) } } th { "figures are" } }
                    @for row in sweep.rows(load) {
                        tr class=(if row.how == How::Measured { "measured" } else { "unlike" }) {
                            @for cell in cells(&row) { td { (cell) } }
                            td { (row.how.in_words()) }
                        }
                    }
                }
            }
        }
        p class="muted" { (legend(sweep.device)) }
    }
}
