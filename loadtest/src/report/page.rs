//! What the load tester's pages have in common: the head, with the style of page and plots for light and dark, and
//! tables.

use std::time::SystemTime;

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};

use crate::report::plot::{Axis, Plot, STEPS, Series};
use crate::text::{readable, utc_date};

const STYLE: &str = include_str!("page.css");
/// Steps of the axis along a run, whose plots have the width of the page.
const TIMELINE_STEPS: u32 = 12;
/// Room above the highest value along a run, so that a steady load does not hide in the frame.
const HEADROOM: f64 = 1.05;

/// A whole page, which needs nothing but itself: no script, no font, no request. `style` is what its style sheet has
/// beside that of all pages.
pub fn page(title: &str, style: &str, body: Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(style)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// The heading, and below it what was done to which server and when.
pub fn heading(title: &str, target: &str, date: SystemTime, what: &str) -> Markup {
    let date = readable(&utc_date(date));
    html! {
        h1 { (title) }
        p class="muted" { (target) " · " (date) " · looplane " (env!("CARGO_PKG_VERSION")) " · " (what) }
    }
}

/// What a reader has to know to trust the figures, as a list where there is anything.
pub fn notes(notes: &[String]) -> Markup {
    html! {
        @if !notes.is_empty() {
            ul class="notes" { @for note in notes { li { (note) } } }
        }
    }
}

/// The main figures: name and value of each, and whether it is bad.
pub fn tiles(tiles: &[(&str, String, bool)]) -> Markup {
    html! {
        div class="tiles" {
            @for (name, value, is_bad) in tiles {
                div class="tile" { span { (name) } b class=[is_bad.then_some("bad")] { (value) } }
            }
        }
    }
}

pub fn pairs<N: Render, V: Render>(rows: impl IntoIterator<Item = (N, V)>) -> Markup {
    html! {
        div class="wide" {
            table { @for (name, value) in rows { tr { th { (name) } td { (value) } } } }
        }
    }
}

/// A table of this class: heads, and rows of cells.
pub fn table<C: Render>(class: Option<&str>, heads: &[&str], rows: impl IntoIterator<Item = Vec<C>>) -> Markup {
    html! {
        div class="wide" {
            table class=[class] {
                tr { @for head in heads { th { (head) } } }
                @for cells in rows { tr { @for cell in cells { td { (cell) } } } }
            }
        }
    }
}

/// A plot in its frame; where there are no axes, that there is nothing to draw.
pub fn panel(title: &str, axes: Option<(Axis, Axis)>, series: Vec<Series>) -> Markup {
    html! {
        div class="plot" {
            @match axes {
                Some((x, y)) => (Plot { title, width: 400.0, height: 300.0, x, y, series }.svg()),
                None => p { (title) ": no answer to measure" },
            }
        }
    }
}

/// A plot over the time of a run, which lasted `end_s`, with what happened in it.
pub fn timeline(title: &str, label: &str, series: Vec<Series>, end_s: f64, events: Vec<(f64, String)>) -> Markup {
    let highest = series.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    let x = Axis::linear("time since the start of the run, s", 0.0, end_s, TIMELINE_STEPS).with_events(events);
    let y = Axis::linear(label, 0.0, highest * HEADROOM, STEPS);
    html! { div class="plot wide" { (Plot { title, width: 1180.0, height: 240.0, x, y, series }.svg()) } }
}
