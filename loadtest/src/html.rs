//! The report as one HTML page that needs nothing but itself: no script, no font, no request.

use std::fmt::{self, Display};
use std::time::SystemTime;

use crate::calibrate::Calibration;
use crate::page::{head, heading, notes};
use crate::plot::{Axis, Escaped, Mark, Plot, STEPS, Series};
use crate::report::{Metric, PERCENTILES, Setup, Tally};
use crate::table::variation;
use crate::timeline::Moment;

/// Points of a cumulative distribution: every half percent up to the 99th, and a tenth of that in the tail.
const BODY_STEP: f64 = 0.5;
const TAIL_FROM: f64 = 99.0;
const TAIL_STEP: f64 = 0.05;
/// Percentile from which on an axis of times reaches.
const AXIS_FROM: f64 = 1.0;
/// Steps of the axis along a run, whose plots have the width of the page.
const TIMELINE_STEPS: u32 = 12;
/// Room above the highest value along a run, so that a steady load does not hide in the frame.
const HEADROOM: f64 = 1.05;
/// Percentiles marked on a distribution.
const MARKED: [f64; 3] = [50.0, 90.0, 99.0];
/// Which kinds of time share a plot: its title, and the key and name of each line.
const DISTRIBUTIONS: [(&str, [(&str, &str); 2]); 3] = [
    ("Time to first token", [("ttft", "from sending"), ("ttft_from_intended", "from when due")]),
    ("Time between tokens", [("itl", "each gap (ITL)"), ("tpot", "mean of a request (TPOT)")]),
    ("End to end", [("e2el", "from sending"), ("e2el_from_intended", "from when due")]),
];

/// Writes a run; see [`Display`].
pub struct Page<'a> {
    /// What was run.
    pub setup: &'a Setup,
    /// What came out.
    pub tally: &'a Tally,
    /// When the run ended.
    pub date: SystemTime,
}

impl Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = format!("Load test of {}", self.setup.model);
        let (target, what) = (&self.setup.target, &self.setup.pacing);
        head(f, &title, "")?;
        heading(f, &title, target, self.date, what)?;
        self.summary(f)?;
        notes(f, &self.tally.notes(self.setup))?;
        self.distributions(f)?;
        self.timeline(f)?;
        self.faults(f)?;
        self.times(f)?;
        self.spread(f)?;
        if let Some(server_side) = self.tally.server_side() {
            server_side.write_page(self.tally, f)?;
        }
        self.ends(f)?;
        self.settings(f)?;
        writeln!(f, "</body>\n</html>")
    }
}

impl Page<'_> {
    fn summary(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tally = self.tally;
        let metrics = tally.metrics();
        let time = |key: &str, percentile: f64| {
            let metric = metrics.iter().find(|metric| metric.key == key);
            let ms = metric.and_then(|metric| metric.times.percentile_ms(percentile));
            ms.map_or_else(|| "–".into(), |ms| format!("{ms:.1} ms"))
        };
        let failed = if tally.failed() > 0 { r#" class="bad""# } else { "" };
        writeln!(f, r#"<div class="tiles">"#)?;
        for (name, value) in [
            ("output tokens a second", format!("{:.1}", tally.output_tokens_per_s())),
            ("requests a second", format!("{:.2}", tally.requests_per_s())),
            ("first token, median", time("ttft", 50.0)),
            ("between tokens, median", time("itl", 50.0)),
            ("between tokens, p99", time("itl", 99.0)),
            ("end to end, p99", time("e2el", 99.0)),
            ("requests answered", tally.completed().to_string()),
        ] {
            writeln!(f, r#"<div class="tile"><span>{name}</span><b>{value}</b></div>"#)?;
        }
        if let (Some(slo), Some(good_per_s)) = (tally.slo(), tally.good_requests_per_s()) {
            let name = format!("requests a second within {slo}");
            writeln!(f, r#"<div class="tile"><span>{name}</span><b>{good_per_s:.2}</b></div>"#)?;
        }
        writeln!(f, r#"<div class="tile"><span>failed</span><b{failed}>{}</b></div>"#, tally.failed())?;
        writeln!(f, "</div>")
    }

    fn distributions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "<h2>How long</h2>\n<div class=\"plots\">")?;
        let metrics = self.tally.metrics();
        for (title, lines) in DISTRIBUTIONS {
            let series: Vec<Series> = lines
                .into_iter()
                .filter_map(|(key, name)| cumulative(metrics.iter().find(|metric| metric.key == key)?, name))
                .collect();
            let points = || series.iter().flat_map(|series| series.points.iter());
            // One gap of no length would stretch a logarithmic axis over decades that hold nothing else.
            let most = points().filter(|&&(_, percent)| percent >= AXIS_FROM).map(|&(ms, _)| ms);
            let (low, high) = (most.fold(f64::INFINITY, f64::min), points().fold(0.0, |high, &(ms, _)| ms.max(high)));
            if series.is_empty() {
                writeln!(f, r#"<div class="plot"><p>{title}: no answer to measure</p></div>"#)?;
                continue;
            }
            let (x, y) =
                (Axis::of_times("time, ms", low, high), Axis::linear("took at most this, %", 0.0, 100.0, STEPS));
            let plot = Plot { title, width: 400.0, height: 300.0, x, y, series };
            writeln!(f, "<div class=\"plot\">\n{plot}</div>")?;
        }
        writeln!(
            f,
            "</div>\n<p class=\"muted\">Of requests that succeeded. Marked: p50, p90, p99. Times that an axis \
             does not reach lie on its left edge.</p>"
        )
    }

    fn timeline(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let moments = self.tally.moments();
        writeln!(f, "<h2>Over the run</h2>")?;
        let Some(last) = moments.last() else {
            return writeln!(f, "<p>No request ended.</p>");
        };
        let steps = |value: fn(&Moment) -> f64| -> Vec<(f64, f64)> {
            moments.iter().flat_map(|moment| [(moment.from_s, value(moment)), (moment.to_s, value(moment))]).collect()
        };
        let in_flight = steps(|moment| moment.in_flight);
        let tokens = steps(|moment| moment.tokens_per_s);
        for (title, label, name, points) in [
            ("Requests in flight", "requests", "mean of each interval", in_flight),
            ("Output tokens a second", "tokens / s", "arrived in each interval, of requests that succeeded", tokens),
        ] {
            let highest = points.iter().map(|&(_, value)| value).fold(0.0, f64::max);
            let (x, y) = (
                Axis::linear("time since the start of the run, s", 0.0, last.to_s, TIMELINE_STEPS)
                    .with_events(self.tally.events()),
                Axis::linear(label, 0.0, highest * HEADROOM, STEPS),
            );
            let series = vec![Series { name, points, marks: Vec::new() }];
            let plot = Plot { title, width: 1180.0, height: 240.0, x, y, series };
            writeln!(f, "<div class=\"plot wide\">\n{plot}</div>")?;
        }
        let interval_ms = (moments[0].to_s - moments[0].from_s) * 1e3;
        let peak = self.tally.peak_in_flight();
        writeln!(
            f,
            r#"<p class="muted">Intervals of {interval_ms:.0} ms. At most {peak} requests in flight at once.</p>"#
        )
    }

    fn faults(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(faults) = self.tally.faults() else { return Ok(()) };
        writeln!(f, "<h2>Faults</h2>\n<div class=\"wide\"><table>")?;
        for finding in faults.findings() {
            let bad = if finding.is_bad { r#" class="bad""# } else { "" };
            writeln!(f, "<tr><th>{}</th><td{bad}>{}</td></tr>", Escaped(&finding.name), Escaped(&finding.text))?;
        }
        writeln!(f, "</table></div>")
    }

    fn times(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "<h2>Times in milliseconds</h2>\n<div class=\"wide\"><table class=\"figures\">\n\
             <tr><th>time</th><th>count</th><th>mean</th>"
        )?;
        for (name, _) in PERCENTILES {
            write!(f, "<th>{name}</th>")?;
        }
        writeln!(f, "<th>max</th></tr>")?;
        for Metric { title, times, .. } in self.tally.metrics() {
            let part = if title.starts_with(' ') { r#" class="part""# } else { "" };
            write!(f, "<tr><td{part}>{}</td><td>{}</td>", title.trim(), times.count())?;
            let percentiles = PERCENTILES.map(|(_, percentile)| times.percentile_ms(percentile));
            for figure in [times.mean_ms()].into_iter().chain(percentiles).chain([times.max_ms()]) {
                match figure {
                    Some(ms) => write!(f, "<td>{ms:.2}</td>")?,
                    None => write!(f, "<td>–</td>")?,
                }
            }
            writeln!(f, "</tr>")?;
        }
        writeln!(f, "</table></div>")
    }

    fn spread(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(spread) = self.tally.spread() else { return Ok(()) };
        writeln!(
            f,
            "<h2>Over {} runs</h2>\n<p class=\"muted\">Everything else is of the run in the middle by output tokens a \
             second.</p>\n<div class=\"wide\"><table class=\"figures\">\n\
             <tr><th>figure</th><th>mean</th><th>variation (CV)</th></tr>",
            spread.runs
        )?;
        for figure in &spread.figures {
            let (title, mean, cv) = (figure.title, figure.mean(), variation(figure));
            writeln!(f, "<tr><td>{title}</td><td>{mean:.2}</td><td>{cv}</td></tr>")?;
        }
        writeln!(f, "</table></div>")
    }

    fn ends(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "<h2>How requests ended</h2>\n<div class=\"wide\"><table>\n\
             <tr><th>end</th><th>requests</th><th>example</th></tr>"
        )?;
        for (reason, count) in self.tally.finish_reasons() {
            writeln!(f, "<tr><td>finish reason {}</td><td>{count}</td><td></td></tr>", Escaped(reason))?;
        }
        for (kind, (count, example)) in self.tally.errors() {
            let (kind, example) = (Escaped(kind), Escaped(example));
            writeln!(f, r#"<tr><td class="bad">error {kind}</td><td>{count}</td><td>{example}</td></tr>"#)?;
        }
        if self.tally.interrupted() > 0 {
            writeln!(f, "<tr><td>stopped unfinished</td><td>{}</td><td></td></tr>", self.tally.interrupted())?;
        }
        writeln!(f, "</table></div>")
    }

    fn settings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (setup, tally) = (self.setup, self.tally);
        let mean = |tokens: u64| tokens as f64 / tally.completed().max(1) as f64;
        let unmeasured = || "not measured (--calibrate)".into();
        let client_error = setup.calibration.as_ref().map_or_else(unmeasured, Calibration::in_words);
        let (prompt_lengths, output_lengths) = setup.shapes.in_words();
        let past_end = if setup.ignore_eos { "yes" } else { "no" };
        writeln!(f, "<h2>Settings</h2>\n<div class=\"wide\"><table>")?;
        for (name, value) in [
            ("server", setup.target.clone()),
            ("interface", setup.backend.to_owned()),
            ("model", setup.model.clone()),
            ("load", setup.pacing.clone()),
            ("most requests in flight", setup.max_concurrency.to_string()),
            (
                "prompt tokens",
                format!("{} asked for, {:.1} a request counted", prompt_lengths, mean(tally.prompt_tokens())),
            ),
            (
                "output tokens",
                format!("at most {}, {:.1} a request counted", output_lengths, mean(tally.output_tokens())),
            ),
            ("of each prompt shared by all", format!("{:.0} %", 100.0 * setup.shared_prefix)),
            ("least output tokens", setup.min_tokens.map_or_else(|| "not set".into(), |least| least.to_string())),
            ("past the model's own end", past_end.to_owned()),
            ("seed", setup.seed.to_string()),
            ("warm-up requests, not counted", setup.warmup.to_string()),
            ("client's own error", client_error),
            ("length of the run", format!("{:.2} s", tally.duration_s())),
        ] {
            writeln!(f, "<tr><th>{name}</th><td>{}</td></tr>", Escaped(&value))?;
        }
        writeln!(f, "</table></div>")
    }
}

/// The share of times that are at most so long, in percent; none for no times.
fn cumulative<'a>(metric: &Metric<'_>, name: &'a str) -> Option<Series<'a>> {
    let body = (0..198).map(|step| f64::from(step) * BODY_STEP);
    let tail = (0..=20).map(|step| TAIL_FROM + f64::from(step) * TAIL_STEP);
    let point = |percent: f64| metric.times.percentile_ms(percent).map(|ms| (ms, percent));
    let points = body.chain(tail).map(point).collect::<Option<Vec<_>>>()?;
    let mark = |percent: f64| {
        let at = point(percent)?;
        Some(Mark { at, meaning: format!("{name}: p{percent} {:.2} ms", at.0), hollow: false })
    };
    Some(Series { name, points, marks: MARKED.into_iter().filter_map(mark).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::Distribution;
    use crate::lengths::{Lengths, Shapes};
    use crate::markup::{Element, elements, within};
    use crate::record::{Failure, RequestRecord};
    use crate::report::Window;
    use crate::slo::Slo;
    use crate::spread::Spread;
    use std::time::{Duration, UNIX_EPOCH};

    const MS: u64 = 1_000_000;

    fn setup() -> Setup {
        Setup {
            target: "http://h:1".into(),
            backend: "openai-chat",
            model: "<script>alert('m')</script>".into(),
            pacing: "closed loop, 4 at a time, 40 requests".into(),
            rate: None,
            burstiness: None,
            max_concurrency: 4,
            seed: 0,
            shapes: Shapes::Drawn { prompt: Lengths::Constant(10), output: Lengths::Constant(8), seed: 0 },
            min_tokens: None,
            shared_prefix: 0.0,
            ignore_eos: true,
            warmup: 3,
            calibration: None,
            notes: vec!["a & b".into()],
        }
    }

    fn page_of(tally: &Tally) -> String {
        let date = UNIX_EPOCH + Duration::from_secs(1_709_251_199);
        Page { setup: &setup(), tally, date }.to_string()
    }

    fn forty_requests() -> Tally {
        let mut tally = Tally::default();
        for index in 0..40 {
            let sent_ns = index * 100 * MS;
            let mut record = RequestRecord::new(index, sent_ns, sent_ns + index % 3 * MS);
            record.chunks_ns = (1..=8).map(|chunk| sent_ns + (20 + index + chunk * (5 + index % 4)) * MS).collect();
            record.ended_ns = record.chunks_ns[7] + MS;
            record.finish_reason = Some("length".into());
            tally.add(&record);
        }
        let mut failed = RequestRecord::new(40, 0, 0);
        failed.failure = Some(Failure::ConnectionLost("<reset>".into()));
        tally.add(&failed);
        tally
    }

    #[test]
    fn the_page_shows_the_run_and_needs_nothing_else() {
        let page = page_of(&forty_requests());
        let drawn = elements(&page);
        for outside in ["http://", "https://", "url(", "@import", "<script", "<link", " src=", " href="] {
            let page = page.replace("http://h:1", "");
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("prefers-color-scheme: dark"));
        let text = |of: &dyn Fn(&Element) -> bool| -> Vec<String> {
            drawn.iter().filter(|element| of(element)).map(|element| element.text.clone()).collect()
        };
        assert_eq!(text(&|e| e.name == "h1"), ["Load test of &lt;script&gt;alert(&#39;m&#39;)&lt;/script&gt;"]);
        assert_eq!(text(&|e| e.name == "li")[0], "a &amp; b");
        assert!(page.contains("2024-02-29 23:59 UTC") && page.contains("error connection_lost"));
        assert!(page.contains("connection lost: &lt;reset&gt;") && page.contains("finish reason length</td><td>40<"));
        let heads = text(&|e| e.name == "th");
        assert_eq!(heads[..9], ["time", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"]);
    }

    #[test]
    fn every_plot_has_named_axes_a_legend_and_its_lines_in_the_frame() {
        let drawn = elements(&page_of(&forty_requests()));
        within(&drawn);
        let with_class = |class: &str| drawn.iter().filter(|e| e.class() == class).collect::<Vec<_>>();
        assert_eq!(drawn.iter().filter(|e| e.name == "svg").count(), 5);
        let titles = [
            "Time to first token",
            "Time between tokens",
            "End to end",
            "Requests in flight",
            "Output tokens a second",
        ];
        assert!(with_class("plot-title").iter().map(|e| &e.text).eq(titles));
        assert_eq!(with_class("legend").len(), 3 * 2 + 2);
        for axis in ["axis x", "axis y"] {
            let labels = with_class(axis);
            assert_eq!(labels.len(), 5);
            assert!(labels.iter().all(|label| label.text.contains(", ") || label.text.ends_with("s")), "{labels:?}");
        }
        let units: Vec<&str> = with_class("axis x").iter().map(|e| e.text.rsplit(", ").next().unwrap_or("")).collect();
        assert_eq!(units[3..], ["s", "s"]);
        assert!(with_class("axis x")[..3].iter().all(|e| e.text.contains("ms")));
        for line in drawn.iter().filter(|e| e.name == "polyline") {
            assert!(line.attributes["points"].split_whitespace().count() > 20, "{line:?}");
        }
    }

    #[test]
    fn limits_calibration_and_spread_are_shown_where_there_are_any() {
        let plain = page_of(&forty_requests());
        assert!(plain.contains("not measured (--calibrate)") && !plain.contains("Over 2 runs"));
        let slo: Slo = "ttft=30ms,itl=1s".parse().expect("limits");
        let mut tally = Tally::new(Window::default(), Some(slo));
        let mut record = RequestRecord::new(0, 0, 0);
        record.chunks_ns = vec![20 * MS, 40 * MS];
        record.ended_ns = 500 * MS;
        tally.add(&record);
        let spread = Spread::of(&[forty_requests(), forty_requests()]);
        tally.stand_for(spread);
        let mut times = Distribution::default();
        times.record_ns(7 * MS);
        let calibration = Calibration {
            streams: 4,
            tokens_per_s_asked: 200.0,
            tokens_per_s: 200.0,
            ttft_error: times.clone(),
            itl_error: times,
        };
        let setup = Setup { calibration: Some(calibration), ..setup() };
        let page = Page { setup: &setup, tally: &tally, date: UNIX_EPOCH }.to_string();
        elements(&page);
        assert!(page.contains("requests a second within ttft 30ms, itl 1s</span><b>2.00</b>"));
        assert!(page.contains("<h2>Over 2 runs</h2>") && page.contains("<td>0.00 %</td>"));
        assert!(page.contains("p50 7.00 ms") && page.contains("own error is over 5 ms"));
    }

    /// The picture says what the figures say.
    #[test]
    fn marks_stand_where_their_percentile_is() {
        let tally = forty_requests();
        let metrics = tally.metrics();
        let metric = metrics.iter().find(|metric| metric.key == "e2el").expect("a metric");
        let series = cumulative(metric, "x").expect("times");
        assert!(series.points.is_sorted_by(|a, b| a.0 <= b.0 && a.1 < b.1));
        assert_eq!(series.points.first().map(|point| point.1), Some(0.0));
        assert_eq!(series.points.last().copied(), metric.times.max_ms().map(|ms| (ms, 100.0)));
        let median = metric.times.percentile_ms(50.0).expect("times");
        assert_eq!(series.marks[0].at, (median, 50.0));
        assert_eq!(series.marks[0].meaning, format!("x: p50 {median:.2} ms"));
    }

    #[test]
    fn an_empty_run_makes_a_page_that_says_so() {
        let page = page_of(&Tally::default());
        elements(&page);
        assert!(page.contains("End to end: no answer to measure") && page.contains("No request ended."));
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }
}
