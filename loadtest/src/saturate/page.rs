//! The search as one HTML page: latency over the load that was offered and over what was achieved.

use std::fmt::{self, Display};
use std::time::SystemTime;

use super::{Step, Verdict};
use crate::page::{head, heading, notes};
use crate::plot::{Axis, Mark, Plot, STEPS, Series};

/// Columns of the table of steps.
const COLUMNS: [&str; 8] =
    ["offered / s", "answered / s", "tokens / s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "most in flight"];

/// Writes a search; see [`Display`].
pub(super) struct Page<'a> {
    pub target: &'a str,
    pub model: &'a str,
    /// What a reader has to know to trust the figures.
    pub notes: &'a [String],
    /// Steps and what was asked for, in words.
    pub what: String,
    /// In the order of their rates.
    pub steps: Vec<&'a Step>,
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
const ACHIEVED: Load = Load { label: "achieved, output tokens / s", of: |step| step.arrived.output_tokens_per_s() };

impl Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = format!("Saturation of {}", self.model);
        head(f, &title, "")?;
        heading(f, &title, self.target, self.date, &self.what)?;
        self.summary(f)?;
        notes(f, self.notes)?;
        self.plots(f)?;
        self.table(f)?;
        writeln!(f, "</body>\n</html>")
    }
}

impl Page<'_> {
    fn summary(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |rate: Option<f64>| rate.map_or_else(|| "–".into(), |rate| format!("{rate:.3}"));
        let ms = |key, percentile| {
            let ms = self.knee().and_then(|step| step.time_ms(key, percentile));
            ms.map_or_else(|| "–".into(), |ms| format!("{ms:.1} ms"))
        };
        let tokens = self.knee().map(|step| step.arrived.output_tokens_per_s());
        writeln!(f, r#"<div class="tiles">"#)?;
        for (name, value) in [
            ("keeps up with, requests a second", rate(self.keeps_up_with)),
            ("falls behind at", rate(self.falls_behind_at)),
            ("output tokens a second at the knee", tokens.map_or_else(|| "–".into(), |tokens| format!("{tokens:.1}"))),
            ("first token at the knee, p50", ms("ttft_from_intended", 50.0)),
            ("first token at the knee, p99", ms("ttft_from_intended", 99.0)),
            ("between tokens at the knee, p99", ms("itl", 99.0)),
        ] {
            writeln!(f, r#"<div class="tile"><span>{name}</span><b>{value}</b></div>"#)?;
        }
        writeln!(f, "</div>")
    }

    fn plots(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "<h2>Latency and throughput over load</h2>\n<div class=\"plots\">")?;
        // Three in a row: a kind of time over both loads, then what was achieved.
        for load in [OFFERED, ACHIEVED] {
            self.times(f, "Time to first token", "ttft_from_intended", &load)?;
        }
        self.throughput(f)?;
        for load in [OFFERED, ACHIEVED] {
            self.times(f, "Time between tokens", "itl", &load)?;
        }
        self.interactivity(f)?;
        writeln!(
            f,
            "</div>\n<p class=\"muted\">A point for each rate that was tried; rings: rates at which it fell behind. Knee: the \
             highest rate that it kept up with. Time to first token is from when a request was due. Tokens a second a user: \
             1 s over the median time per output token. Requests that were cut off when a step was ended count as far as they \
             had come.</p>"
        )
    }

    /// Median and 99th percentile of the times called `key` over a load, with the knee.
    fn times(&self, f: &mut fmt::Formatter<'_>, title: &str, key: &str, load: &Load) -> fmt::Result {
        let series_of = |name, percentile| {
            let points = self.steps.iter().filter_map(|step| Some((*step, step.time_ms(key, percentile)?)));
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
        panel(f, title, axes, series)
    }

    fn throughput(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps.iter().map(|step| (*step, ((OFFERED.of)(step), (ACHIEVED.of)(step))));
        let meaning = |at: (f64, f64)| format!("{:.3} requests a second: {:.1} tokens a second", at.0, at.1);
        let series = vec![line("output tokens a second", steps, meaning)];
        let axes = range(&series, |at| at.0).zip(range(&series, |at| at.1)).map(|((_, most), (_, high))| {
            (Axis::linear(OFFERED.label, 0.0, most, STEPS), Axis::linear("output tokens / s", 0.0, high, STEPS))
        });
        panel(f, "Throughput", axes, series)
    }

    fn interactivity(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps.iter().filter_map(|step| {
            let tokens_per_s_a_user = 1e3 / step.time_ms("tpot", 50.0).filter(|&ms| ms > 0.0)?;
            Some((*step, (tokens_per_s_a_user, step.arrived.output_tokens_per_s())))
        });
        let meaning = |at: (f64, f64)| format!("{:.1} tokens a second, {:.1} a user", at.1, at.0);
        let series = vec![line("each rate", steps, meaning)];
        let axes = range(&series, |at| at.0).zip(range(&series, |at| at.1)).map(|((_, most), (_, high))| {
            (Axis::linear("tokens / s a user", 0.0, most, STEPS), Axis::linear("output tokens / s", 0.0, high, STEPS))
        });
        panel(f, "Throughput against interactivity", axes, series)
    }

    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "<h2>Every rate that was tried</h2>\n<p class=\"muted\">Requests a second; times in milliseconds.</p>\n\
             <div class=\"wide\"><table class=\"figures\">\n<tr>"
        )?;
        for column in COLUMNS {
            write!(f, "<th>{column}</th>")?;
        }
        writeln!(f, r#"<th class="words">verdict</th></tr>"#)?;
        for step in &self.steps {
            let ms =
                |key, percentile| step.time_ms(key, percentile).map_or_else(|| "–".into(), |ms| format!("{ms:.1}"));
            write!(f, "<tr><td>{:.3}</td><td>{:.3}</td>", step.rate_per_s, step.tally.requests_per_s())?;
            write!(f, "<td>{:.1}</td>", step.arrived.output_tokens_per_s())?;
            for (key, percentile) in
                [("ttft_from_intended", 50.0), ("ttft_from_intended", 99.0), ("itl", 50.0), ("itl", 99.0)]
            {
                write!(f, "<td>{}</td>", ms(key, percentile))?;
            }
            let bad = if step.verdict == Verdict::KeepsUp { "" } else { " bad" };
            let (peak, verdict) = (step.tally.peak_in_flight(), step.verdict.in_words());
            writeln!(f, r#"<td>{peak}</td><td class="words{bad}">{verdict}</td></tr>"#)?;
        }
        writeln!(f, "</table></div>")
    }

    fn knee(&self) -> Option<&Step> {
        self.steps.iter().find(|step| Some(step.rate_per_s) == self.keeps_up_with).copied()
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

/// A plot in its frame, or that there is nothing to draw.
fn panel(f: &mut fmt::Formatter<'_>, title: &str, axes: Option<(Axis, Axis)>, series: Vec<Series>) -> fmt::Result {
    match axes {
        Some((x, y)) => {
            let plot = Plot { title, width: 400.0, height: 300.0, x, y, series };
            writeln!(f, "<div class=\"plot\">\n{plot}</div>")
        }
        None => writeln!(f, r#"<div class="plot"><p>{title}: no answer to measure</p></div>"#),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markup::{Element, elements, within};
    use crate::record::RequestRecord;
    use crate::report::{Tally, Window};
    use crate::saturate::Arrived;
    use std::time::UNIX_EPOCH;

    const MS: u64 = 1_000_000;

    /// A second of a step in which each answer took `ttft_ms` and then 10 ms a token.
    fn step(rate_per_s: u64, ttft_ms: u64, verdict: Verdict) -> Step {
        let (mut tally, mut arrived) = (Tally::new(Window::default(), None), Arrived::default());
        for index in 0..rate_per_s {
            let due_ns = index * 1000 * MS / rate_per_s;
            let mut record = RequestRecord::new(index, due_ns, due_ns);
            record.chunks_ns = (0..3).map(|chunk| due_ns + (ttft_ms + 10 * chunk) * MS).collect();
            record.ended_ns = record.chunks_ns[2];
            tally.add(&record);
            arrived.add(&record);
        }
        Step { rate_per_s: rate_per_s as f64, tally, arrived, verdict }
    }

    fn page_of(steps: &[Step], limits: (Option<f64>, Option<f64>)) -> String {
        let (keeps_up_with, falls_behind_at) = limits;
        let steps = steps.iter().collect();
        let what = "steps of 1 s".to_owned();
        let (target, model, notes) = ("http://h:1", "<m>", &["a & b".to_owned()]);
        Page { target, model, notes, what, steps, keeps_up_with, falls_behind_at, date: UNIX_EPOCH }.to_string()
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
