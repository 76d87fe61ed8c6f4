//! The search as one HTML page: latency over the load that was offered and over what was achieved.

use std::time::SystemTime;

use maud::{Markup, html};

use crate::report::page::{heading, notes, page, panel, tiles};
use crate::report::plot::{Axis, Mark, STEPS, Series};
use crate::saturate::step::{Step, Verdict};

const COLUMNS: [&str; 8] =
    ["offered / s", "answered / s", "tokens / s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "most in flight"];
const TIMES: [(&str, f64); 4] =
    [("ttft_from_intended", 50.0), ("ttft_from_intended", 99.0), ("itl", 50.0), ("itl", 99.0)];

pub struct Page<'a> {
    pub target: &'a str,
    pub model: &'a str,
    /// What a reader has to know to trust the figures.
    pub notes: &'a [String],
    /// Steps and what was asked for, in words.
    pub what: String,
    pub steps: &'a [Step],
    /// The highest rate that the server keeps up with, and the lowest at which it falls behind.
    pub keeps_up_with: Option<f64>,
    pub falls_behind_at: Option<f64>,
    pub date: SystemTime,
}

/// A rate that figures are drawn over.
struct Load {
    label: &'static str,
    of: fn(&Step) -> f64,
}

const OFFERED: Load = Load { label: "offered, requests / s", of: |step| step.rate_per_s };
const ACHIEVED: Load = Load { label: "achieved, output tokens / s", of: |step| step.tally.arrived_tokens_per_s() };

impl Page<'_> {
    pub fn html(&self) -> String {
        let title = format!("Saturation of {}", self.model);
        let [ttft, itl] = [("Time to first token", "ttft_from_intended"), ("Time between tokens", "itl")];
        let body = html! {
            (heading(&title, self.target, self.date, &self.what))
            (self.summary())
            (notes(self.notes))
            h2 { "Latency and throughput over load" }
            // Three in a row: a kind of time over both loads, then what was achieved.
            div class="plots" {
                (self.times(ttft, &OFFERED)) (self.times(ttft, &ACHIEVED)) (self.throughput())
                (self.times(itl, &OFFERED)) (self.times(itl, &ACHIEVED)) (self.interactivity())
            }
            p class="muted" {
                "A point for each rate that was tried; rings: rates at which it fell behind. Knee: the highest rate that "
                "it kept up with. Time to first token is from when a request was due. Tokens a second a user: 1 s over "
                "the median time per output token. Requests that were cut off when a step was ended count as far as they "
                "had come."
            }
            h2 { "Every rate that was tried" }
            p class="muted" { "Requests a second; times in milliseconds." }
            (self.table())
        };
        page(&title, "", body)
    }

    fn summary(&self) -> Markup {
        let rate = |rate: Option<f64>| rate.map_or_else(|| "–".into(), |rate| format!("{rate:.3}"));
        let ms = |key, percentile| {
            let ms = self.knee().and_then(|step| step.tally.percentile_ms(key, percentile));
            ms.map_or_else(|| "–".into(), |ms| format!("{ms:.1} ms"))
        };
        let tokens = self.knee().map(|step| format!("{:.1}", step.tally.arrived_tokens_per_s()));
        tiles(&[
            ("keeps up with, requests a second", rate(self.keeps_up_with), false),
            ("falls behind at", rate(self.falls_behind_at), false),
            ("output tokens a second at the knee", tokens.unwrap_or_else(|| "–".into()), false),
            ("first token at the knee, p50", ms("ttft_from_intended", 50.0), false),
            ("first token at the knee, p99", ms("ttft_from_intended", 99.0), false),
            ("between tokens at the knee, p99", ms("itl", 99.0), false),
        ])
    }

    /// Median and 99th percentile of a kind of time over a load, with the knee.
    fn times(&self, (title, key): (&str, &str), load: &Load) -> Markup {
        let series_of = |name, percentile| {
            let points = self.steps.iter().filter_map(|step| Some((step, step.tally.percentile_ms(key, percentile)?)));
            line(
                name,
                points.map(|(step, ms)| (step, ((load.of)(step), ms))).filter(|(_, (rate, _))| *rate > 0.0),
                |at| format!("{:.3} requests a second: {name} {:.1} ms", at.0, at.1),
            )
        };
        let mut series = vec![series_of("p50", 50.0), series_of("p99", 99.0)];
        let (rates, times) = (range(&series, |at| at.0), range(&series, |at| at.1));
        if let Some(knee) = self.knee() {
            let rate = (load.of)(knee);
            // From end to end of the axis, however far that reaches.
            series.push(Series { name: "knee", points: vec![(rate, 0.0), (rate, f64::INFINITY)], marks: Vec::new() });
        }
        let axes = rates.zip(times).map(|((first, last), (low, high))| {
            (Axis::of_times(load.label, first, last), Axis::of_times("time, ms", low, high))
        });
        panel(title, axes, series)
    }

    fn throughput(&self) -> Markup {
        let steps = self.steps.iter().map(|step| (step, ((OFFERED.of)(step), (ACHIEVED.of)(step))));
        let meaning = |at: (f64, f64)| format!("{:.3} requests a second: {:.1} tokens a second", at.0, at.1);
        from_zero("Throughput", OFFERED.label, line("output tokens a second", steps, meaning))
    }

    fn interactivity(&self) -> Markup {
        let steps = self.steps.iter().filter_map(|step| {
            let tokens_per_s_a_user = 1e3 / step.tally.percentile_ms("tpot", 50.0).filter(|&ms| ms > 0.0)?;
            Some((step, (tokens_per_s_a_user, step.tally.arrived_tokens_per_s())))
        });
        let meaning = |at: (f64, f64)| format!("{:.1} tokens a second, {:.1} a user", at.1, at.0);
        from_zero("Throughput against interactivity", "tokens / s a user", line("each rate", steps, meaning))
    }

    fn table(&self) -> Markup {
        let shown = |ms: Option<f64>| ms.map_or_else(|| "–".into(), |ms| format!("{ms:.1}"));
        html! {
            div class="wide" {
                table class="figures" {
                    tr { @for column in COLUMNS { th { (column) } } th class="words" { "verdict" } }
                    @for step in self.steps {
                        tr {
                            td { (format!("{:.3}", step.rate_per_s)) } td { (format!("{:.3}", step.tally.requests_per_s())) }
                            td { (format!("{:.1}", step.tally.arrived_tokens_per_s())) }
                            @for (key, percentile) in TIMES { td { (shown(step.tally.percentile_ms(key, percentile))) } }
                            td { (step.tally.peak_in_flight) }
                            @let class = if step.verdict == Verdict::KeepsUp { "words" } else { "words bad" };
                            td class=(class) { (step.verdict.in_words()) }
                        }
                    }
                }
            }
        }
    }

    fn knee(&self) -> Option<&Step> {
        self.steps.iter().find(|step| Some(step.rate_per_s) == self.keeps_up_with)
    }
}

/// A line through the points of steps, each marked: a ring where the server fell behind.
fn line<'a>(
    name: &'static str,
    points: impl Iterator<Item = (&'a Step, (f64, f64))>,
    meaning: impl Fn((f64, f64)) -> String,
) -> Series<'static> {
    let marks: Vec<Mark> =
        points.map(|(step, at)| Mark { at, meaning: meaning(at), hollow: step.verdict != Verdict::KeepsUp }).collect();
    Series { name, points: marks.iter().map(|mark| mark.at).collect(), marks }
}

/// Least and most of the points of all series; none for no points.
fn range(series: &[Series], of: fn((f64, f64)) -> f64) -> Option<(f64, f64)> {
    let values = || series.iter().flat_map(|series| series.points.iter().map(|&at| of(at)));
    values().next()?;
    Some((values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max)))
}

/// Output tokens a second over what `label` says, on axes from zero.
fn from_zero(title: &str, label: &str, line: Series) -> Markup {
    let series = vec![line];
    let axes = range(&series, |at| at.0).zip(range(&series, |at| at.1)).map(|((_, most), (_, high))| {
        (Axis::linear(label, 0.0, most, STEPS), Axis::linear("output tokens / s", 0.0, high, STEPS))
    });
    panel(title, axes, series)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::RequestRecord;
    use crate::testing::markup::{Element, elements, within};
    use crate::testing::records::record;
    use crate::testing::reports::tally;
    use std::time::UNIX_EPOCH;

    /// A second of a step in which each answer took `ttft_ms` and then 10 ms a token.
    fn step(rate_per_s: u64, ttft_ms: u64, verdict: Verdict) -> Step {
        let answer = |due_ms| record(due_ms, due_ms, &[0, 10, 20].map(|later| due_ms + ttft_ms + later));
        let records: Vec<RequestRecord> = (0..rate_per_s).map(|index| answer(index * 1000 / rate_per_s)).collect();
        Step { rate_per_s: rate_per_s as f64, tally: tally(&records), verdict }
    }

    fn page_of(steps: &[Step], (keeps_up_with, falls_behind_at): (Option<f64>, Option<f64>)) -> String {
        let (target, model, notes) = ("http://h:1", "<m>", &["a & b".to_owned()]);
        let (what, date) = ("steps of 1 s".into(), UNIX_EPOCH);
        Page { target, model, notes, what, steps, keeps_up_with, falls_behind_at, date }.html()
    }

    #[test]
    fn latency_is_drawn_over_both_loads_with_the_knee() {
        let steps =
            [step(2, 50, Verdict::KeepsUp), step(4, 60, Verdict::KeepsUp), step(8, 4000, Verdict::FirstTokenGrows)];
        let drawn = elements(&page_of(&steps, (Some(4.0), Some(8.0))));
        within(&drawn);
        let with_class = |class: &str| drawn.iter().filter(|e| e.class() == class).collect::<Vec<&Element>>();
        let texts = |class: &str| with_class(class).iter().map(|e| e.text.clone()).collect::<Vec<_>>();
        let [ttft, itl] = ["Time to first token", "Time between tokens"];
        let titles = [ttft, ttft, "Throughput", itl, itl, "Throughput against interactivity"];
        assert_eq!(texts("plot-title"), titles);
        assert_eq!(texts("axis x")[..2], ["offered, requests / s", "achieved, output tokens / s"]);
        assert_eq!(texts("axis y")[0], "time, ms, logarithmic");
        assert_eq!(texts("legend")[..3], ["p50", "p99", "knee"]);
        assert_eq!((with_class("mark s0").len(), with_class("mark hollow s0").len()), (6 * 2, 6));
        // The knee stands across the whole frame at the second of three rates.
        let knee = drawn.iter().find(|e| e.name == "polyline" && e.class() == "line s2").expect("a knee");
        let frame = with_class("frame")[0];
        let ends: Vec<Vec<f64>> = knee.attributes["points"]
            .split_whitespace()
            .map(|at| at.split(',').map(|number| number.parse().expect("a number")).collect())
            .collect();
        assert_eq!((ends[0][1], ends[1][1]), (frame.number("y") + frame.number("height"), frame.number("y")));
        assert_eq!(ends[0][0], with_class("mark s0")[1].number("cx"));
        let tiles: Vec<&str> = drawn.iter().filter(|e| e.name == "b").map(|e| e.text.as_str()).collect();
        assert_eq!((tiles[0], tiles[1], tiles[3]), ("4.000", "8.000", "60.0 ms"));
        assert_eq!(drawn.iter().filter(|e| e.name == "tr").count(), 1 + 3);
    }

    #[test]
    fn a_search_that_found_nothing_makes_a_page_that_says_so() {
        let page = page_of(&[step(0, 0, Verdict::TurnsAway)], (None, Some(1.0)));
        elements(&page);
        assert!(page.contains("Time to first token: no answer to measure") && page.contains("turns requests away"));
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        elements(&page_of(&[], (None, None)));
    }
}
