//! Line plots as SVG. They hold positions and class names; the page's style sheet gives colours and line styles, so
//! that a plot follows the page into dark mode. A [`Picture`] of plots brings a style sheet of its own.

use std::fmt::{self, Display};

use maud::{Markup, PreEscaped, html};

/// Room around the frame, in units of the picture: title and legend above, ticks and labels left and below.
const TOP: f64 = 52.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 48.0;
const LEFT: f64 = 64.0;
/// Width of a character of a legend at the page's font size, generous.
const CHAR_WIDTH: f64 = 6.6;
/// Length of the line beside a legend's text, and the space around it.
const SWATCH: f64 = 22.0;
/// Room for a line of text below a picture.
const NOTE_HEIGHT: f64 = 18.0;
/// Height of the name of an event, and how many stand below each other before the next is at the top again.
const EVENT_HEIGHT: f64 = 15.0;
const EVENT_HEIGHTS: usize = 4;
/// Steps that a linear axis is divided into, about, where its plot does not ask for more.
pub const STEPS: u32 = 5;
/// From this ratio of the longest to the shortest on, times are drawn on a logarithmic axis.
const LOG_FROM_RATIO: f64 = 10.0;
/// Most a logarithmic axis spans: shorter times than this are drawn at its left edge.
const LOG_MAX_RATIO: f64 = 1e4;

/// One picture.
pub struct Plot<'a> {
    /// Name above it.
    pub title: &'a str,
    /// Width of the picture in its own units, about pixels.
    pub width: f64,
    /// Height of the picture.
    pub height: f64,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Lines, told apart by their place in this list.
    pub series: Vec<Series<'a>>,
}

/// A named line.
#[derive(Default)]
pub struct Series<'a> {
    /// Name in the legend; empty: the text around says what it is.
    pub name: &'a str,
    /// Points that straight lines join.
    pub points: Vec<(f64, f64)>,
    /// Points marked on the line.
    pub marks: Vec<Mark>,
}

/// A point that is marked.
pub struct Mark {
    /// Where.
    pub at: (f64, f64),
    /// What a pointer that rests on it is told.
    pub meaning: String,
    /// Drawn as a ring, not as a disc: a point of another kind.
    pub hollow: bool,
}

/// Plots side by side in rows, as a file of its own that is readable on light and dark grounds.
pub struct Picture<'a> {
    /// All of one size, [`Plot::width`] and [`Plot::height`] of the first.
    pub rows: Vec<Vec<Plot<'a>>>,
    /// Lines of text below.
    pub notes: Vec<String>,
}

/// A scale with ticks; the first and last tick are its ends.
pub struct Axis {
    label: String,
    ticks: Vec<(f64, String)>,
    is_log: bool,
    events: Vec<(f64, String)>,
}

impl Axis {
    /// A linear axis named `label`, unit included, that holds `low` to `high` between round ends in about `steps`
    /// steps.
    pub fn linear(label: &str, low: f64, high: f64, steps: u32) -> Self {
        let span = if high > low { high - low } else { high.abs().max(1.0) };
        let step = round_step(span / f64::from(steps));
        let digits = (-step.log10().floor()).max(0.0) as usize;
        let first = (low / step).floor() as i64;
        let last = ((high / step).ceil() as i64).max(first + 1);
        let tick = |n: i64| (n as f64 * step, format!("{:.digits$}", n as f64 * step));
        Self { label: label.into(), ticks: (first..=last).map(tick).collect(), is_log: false, events: Vec::new() }
    }

    /// An axis of times from `low` to `high`: logarithmic where they differ by an order of magnitude.
    pub fn of_times(label: &str, low: f64, high: f64) -> Self {
        if high < LOG_FROM_RATIO * low || high <= 0.0 {
            return Self::linear(label, low, high, STEPS);
        }
        let low = low.max(high / LOG_MAX_RATIO);
        let mantissas: &[u32] = if high <= 100.0 * low { &[1, 2, 5] } else { &[1] };
        let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
        // Through text, which gives the double nearest to a power of ten.
        let value = |mantissa: &u32, decade: i32| format!("{mantissa}e{decade}").parse().unwrap_or(f64::NAN);
        let candidates: Vec<f64> = decades.flat_map(|decade| mantissas.iter().map(move |m| value(m, decade))).collect();
        let first = candidates.iter().rposition(|&tick| tick <= low).unwrap_or(0);
        let last = candidates.iter().position(|&tick| tick >= high).unwrap_or(candidates.len() - 1);
        let ticks = candidates[first..=last].iter().map(|&tick| (tick, tick.to_string())).collect();
        Self { label: format!("{label}, logarithmic"), ticks, is_log: true, events: Vec::new() }
    }

    /// A logarithmic axis of counts that double from `first` to `last`, with a tick at each.
    pub fn of_doublings(label: &str, first: u32, last: u32) -> Self {
        let counts = std::iter::successors(Some(first), |count| Some(count * 2)).take_while(|count| *count <= last);
        Self {
            label: label.into(),
            ticks: counts.map(|count| (f64::from(count), count.to_string())).collect(),
            is_log: true,
            events: Vec::new(),
        }
    }

    /// The same with named places along it, each drawn as a line across the plot where this is its horizontal axis.
    pub fn with_events(self, events: Vec<(f64, String)>) -> Self {
        Self { events, ..self }
    }

    /// Where `value` lies from 0 to 1 along the axis; what the axis does not reach lies at its end.
    fn position(&self, value: f64) -> f64 {
        let scaled = |value: f64| if self.is_log { value.ln() } else { value };
        let (low, high) = (scaled(self.ticks[0].0), scaled(self.ticks[self.ticks.len() - 1].0));
        ((scaled(value) - low) / (high - low)).clamp(0.0, 1.0)
    }
}

impl Plot<'_> {
    /// The picture as an element of a page.
    pub fn svg(&self) -> Markup {
        let Self { title, width, height, x, y, series } = self;
        let (right, bottom) = (width - RIGHT, height - BOTTOM);
        let (centre, middle) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
        html! {
            svg viewBox={ "0 0 " (width) " " (height) } role="img" aria-label=(title) {
                text class="plot-title" x=(LEFT) y="16" { (title) }
                (self.legend())
                @for (at, label) in x.ticks.iter().map(|(value, label)| (units(self.across(*value)), label)) {
                    line class="grid" x1=(at) y1=(TOP) x2=(at) y2=(bottom) {}
                    text class="tick x" x=(at) y=(bottom + 20.0) { (label) }
                }
                @for (at, label) in y.ticks.iter().map(|(value, label)| (self.up(*value), label)) {
                    line class="grid" x1=(LEFT) y1=(units(at)) x2=(right) y2=(units(at)) {}
                    text class="tick y" x=(LEFT - 7.0) y=(units(at + 4.0)) { (label) }
                }
                text class="axis x" x=(centre) y=(height - 10.0) { (x.label) }
                text class="axis y" x="14" y=(middle) transform={ "rotate(-90 14 " (middle) ")" } { (y.label) }
                rect class="frame" x=(LEFT) y=(TOP) width=(right - LEFT) height=(bottom - TOP) {}
                @for at in x.events.iter().map(|(value, _)| units(self.across(*value))) {
                    line class="event" x1=(at) y1=(TOP) x2=(at) y2=(bottom) {}
                }
                @for (number, line) in series.iter().enumerate() { (self.line(number, line)) }
                (self.event_names())
            }
        }
    }

    fn across(&self, x: f64) -> f64 {
        LEFT + self.x.position(x) * (self.width - LEFT - RIGHT)
    }

    fn up(&self, y: f64) -> f64 {
        self.height - BOTTOM - self.y.position(y) * (self.height - TOP - BOTTOM)
    }

    fn legend(&self) -> Markup {
        let mut at = LEFT;
        let mut places = Vec::new();
        for (number, Series { name, .. }) in self.series.iter().enumerate().filter(|(_, of)| !of.name.is_empty()) {
            places.push((number, at, at + SWATCH, at + SWATCH + 6.0, name));
            at += SWATCH + 6.0 + name.chars().count() as f64 * CHAR_WIDTH + 14.0;
        }
        html! {
            @for (number, from, to, text_at, name) in places {
                line class={ "line s" (number) } x1=(units(from)) y1="35" x2=(units(to)) y2="35" {}
                text class="legend" x=(units(text_at)) y="39" { (name) }
            }
        }
    }

    fn line(&self, number: usize, Series { points, marks, .. }: &Series) -> Markup {
        let point = |&(x, y): &(f64, f64)| format!("{:.1},{:.1} ", self.across(x), self.up(y));
        html! {
            polyline class={ "line s" (number) } points=(points.iter().map(point).collect::<String>()) {}
            @for Mark { at: (x, y), meaning, hollow } in marks {
                @let class = if *hollow { "mark hollow s" } else { "mark s" };
                circle class={ (class) (number) } cx=(units(self.across(*x))) cy=(units(self.up(*y))) r="3.5" {
                    title { (meaning) }
                }
            }
        }
    }

    /// The name of each event beside its line and over what is drawn, at several heights in turn so that neighbours can
    /// be read.
    fn event_names(&self) -> Markup {
        let middle = (LEFT + self.width - RIGHT) / 2.0;
        html! {
            @for (number, (value, name)) in self.x.events.iter().enumerate() {
                @let at = self.across(*value);
                @let (text_at, anchor) = if at > middle { (at - 5.0, "end") } else { (at + 5.0, "start") };
                @let y = TOP + EVENT_HEIGHT * (1 + number % EVENT_HEIGHTS) as f64;
                text class="event" x=(units(text_at)) y=(y) text-anchor=(anchor) { (name) }
            }
        }
    }
}

impl Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (width, height) = self.rows.iter().flatten().next().map_or((0.0, 0.0), |plot| (plot.width, plot.height));
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0) as f64;
        let below = self.rows.len() as f64 * height;
        let (all, high) = (columns * width, below + (self.notes.len() as f64 + 0.5) * NOTE_HEIGHT);
        let picture = html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (all) " " (high) } width=(all) height=(high) {
                style { (PreEscaped(include_str!("picture.css"))) }
                rect class="ground" width=(all) height=(high) {}
                @for (number, row) in self.rows.iter().enumerate() {
                    @for (place, plot) in row.iter().enumerate() {
                        svg x=(place as f64 * width) y=(number as f64 * height) width=(width) height=(height) {
                            (plot.svg())
                        }
                    }
                }
                @for (number, note) in self.notes.iter().enumerate() {
                    text class="note" x=(LEFT) y=(units(below + (number as f64 + 0.8) * NOTE_HEIGHT)) { (note) }
                }
            }
        };
        f.write_str(&picture.into_string())
    }
}

/// A place in the picture.
fn units(at: f64) -> String {
    format!("{at:.1}")
}

/// The least of 1, 2 and 5 times a power of ten that is at least `raw`.
fn round_step(raw: f64) -> f64 {
    let power = 10f64.powi(raw.log10().floor() as i32);
    let mantissa = [1.0, 2.0, 5.0].into_iter().find(|mantissa| mantissa * power >= raw).unwrap_or(10.0);
    mantissa * power
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::markup::{Element, elements, within};

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_and_hold_the_range() {
        assert_eq!(labels(&Axis::linear("x", 0.0, 9.3, STEPS)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(
            labels(&Axis::linear("x", 10.02, 10.21, STEPS)),
            ["10.00", "10.05", "10.10", "10.15", "10.20", "10.25"]
        );
        assert_eq!(labels(&Axis::linear("x", 0.0, 12.1, 12)), ["0", "2", "4", "6", "8", "10", "12", "14"]);
        assert_eq!(labels(&Axis::linear("x", 7.0, 7.0, STEPS)), ["6", "8"]);
        assert_eq!(labels(&Axis::linear("x", 0.0, 0.0, STEPS)), ["0.0", "0.2"]);
        assert_eq!(labels(&Axis::of_times("x", 3.0, 31.0)), ["2", "5", "10", "20", "50"]);
        assert_eq!(labels(&Axis::of_times("x", 0.3, 310.0)), ["0.1", "1", "10", "100", "1000"]);
        assert_eq!(labels(&Axis::of_times("x", 0.0, 50.0)), ["0.001", "0.01", "0.1", "1", "10", "100"]);
        assert_eq!(labels(&Axis::of_times("x", 3.0, 4.0)), ["3.0", "3.2", "3.4", "3.6", "3.8", "4.0"]);
        assert_eq!(labels(&Axis::of_times("x", 0.0, 0.0)), ["0.0", "0.2"]);
    }

    #[test]
    fn a_logarithmic_axis_gives_each_decade_the_same_room() {
        let axis = Axis::of_times("x", 1.0, 1000.0);
        let near = |value: f64, want: f64| assert!((axis.position(value) - want).abs() < 1e-12, "{value}");
        near(1.0, 0.0);
        near(10.0, 1.0 / 3.0);
        near(1000.0, 1.0);
        near(0.0, 0.0);
        near(1e9, 1.0);
    }

    #[test]
    fn every_axis_is_labelled_and_every_point_lies_in_the_frame() {
        let points: Vec<(f64, f64)> = (0..50).map(|n| (f64::from(n * n), f64::from(n % 7))).collect();
        let mark = |at, hollow| Mark { at, meaning: "p<50>".to_owned(), hollow };
        let marks = vec![mark((9.0, 3.0), false), mark((16.0, 4.0), true)];
        let plot = Plot {
            title: "a & b",
            width: 420.0,
            height: 300.0,
            x: Axis::of_times("time, ms", 0.5, 2401.0),
            y: Axis::linear("requests", 0.0, 6.0, STEPS),
            series: vec![Series { name: "one", points, marks }, Series { name: "two", points: vec![], marks: vec![] }],
        };
        let drawn = elements(&plot.svg().into_string());
        let with_class = |class: &str| drawn.iter().filter(|e| e.class() == class).collect::<Vec<&Element>>();
        let text = |class: &str| with_class(class).iter().map(|e| e.text.clone()).collect::<Vec<_>>();
        assert_eq!(text("plot-title"), ["a &amp; b"]);
        assert_eq!((text("axis x"), text("axis y")), (vec!["time, ms, logarithmic".into()], vec!["requests".into()]));
        assert_eq!(text("legend"), ["one", "two"]);
        assert_eq!(text("tick x"), ["0.1", "1", "10", "100", "1000", "10000"]);
        assert_eq!(text("tick y"), ["0", "2", "4", "6"]);
        assert_eq!(with_class("line s0").len(), 2, "the line and its legend");
        assert_eq!((with_class("mark s0").len(), with_class("mark hollow s0").len()), (1, 1));
        within(&drawn);
    }

    #[test]
    fn a_picture_holds_its_plots_side_by_side_and_its_own_style() {
        let plot = |title| Plot {
            title,
            width: 400.0,
            height: 300.0,
            x: Axis::of_doublings("GPUs", 1, 16),
            y: Axis::of_times("ms", 0.2, 40.0),
            series: vec![Series { name: "one", points: vec![(1.0, 40.0), (16.0, 0.2)], marks: vec![] }],
        };
        let picture = Picture { rows: vec![vec![plot("a"), plot("b")], vec![plot("c")]], notes: vec!["x < y".into()] };
        let drawn = elements(&picture.to_string());
        assert_eq!((drawn[0].number("width"), drawn[0].number("height")), (800.0, 600.0 + 1.5 * NOTE_HEIGHT));
        let places = drawn.iter().filter(|e| e.name == "svg" && e.attributes.contains_key("x"));
        let places: Vec<_> = places.map(|e| (e.number("x"), e.number("y"))).collect();
        assert_eq!(places, [(0.0, 0.0), (400.0, 0.0), (0.0, 300.0)]);
        assert!(drawn.iter().any(|e| e.name == "style" && e.text.contains("prefers-color-scheme: dark")));
        assert!(drawn.iter().any(|e| e.class() == "note" && e.text == "x &lt; y"));
        within(&drawn);
        let ticks = labels(&Axis::of_doublings("GPUs", 1, 16)).len();
        assert_eq!((ticks, Axis::of_doublings("GPUs", 1, 16).position(4.0)), (5, 0.5));
    }

    #[test]
    fn events_stand_along_the_axis_with_their_names() {
        let events = vec![(2.0, "rank 1 <killed>".to_owned()), (8.0, "tokens again".to_owned())];
        let (x, y) =
            (Axis::linear("time, s", 0.0, 10.0, STEPS).with_events(events), Axis::linear("n", 0.0, 1.0, STEPS));
        let plot = Plot { title: "a", width: 1000.0, height: 200.0, x, y, series: vec![] };
        let drawn = elements(&plot.svg().into_string());
        let with_name =
            |name: &str| drawn.iter().filter(|e| e.class() == "event" && e.name == name).collect::<Vec<_>>();
        let (lines, names) = (with_name("line"), with_name("text"));
        let frame = 1000.0 - LEFT - RIGHT;
        for (line, share) in lines.iter().zip([0.2, 0.8]) {
            assert!((line.number("x1") - LEFT - share * frame).abs() < 0.06, "{line:?}");
        }
        assert!(lines.len() == 2 && lines.iter().all(|e| (e.number("y1"), e.number("y2")) == (TOP, 200.0 - BOTTOM)));
        assert_eq!(
            names.iter().map(|e| e.text.as_str()).collect::<Vec<_>>(),
            ["rank 1 &lt;killed&gt;", "tokens again"]
        );
        let anchors: Vec<&str> = names.iter().map(|e| e.attributes["text-anchor"].as_str()).collect();
        assert_eq!(anchors, ["start", "end"], "names stay inside");
        assert!(names[0].number("y") < names[1].number("y"), "neighbours do not cover each other");
    }

    /// The control of what the tests above find within frames: a point beside one is found.
    #[test]
    #[should_panic(expected = "beside the frame")]
    fn a_point_beside_the_frame_is_seen() {
        within(&elements(
            r#"<svg><rect class="frame" x="10" y="10" width="5" height="5"/><polyline points="12,12 16,12 "/></svg>"#,
        ));
    }
}
