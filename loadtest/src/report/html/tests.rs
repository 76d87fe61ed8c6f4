use super::*;
use crate::client::record::{Failure, RequestRecord};
use crate::figures::slo::Slo;
use crate::figures::spread::Spread;
use crate::figures::tally::{Tally, Window};
use crate::report::contents::{Report, Setup};
use crate::stats::distribution::Distribution;
use crate::testing::markup::{Element, elements, stands_alone, within};
use crate::testing::records::{MS, record};
use crate::testing::reports::{report, setup};
use std::time::{Duration, UNIX_EPOCH};

fn page_of(tally: Tally) -> String {
    let setup = Setup { model: "<script>alert('m')</script>".into(), notes: vec!["a & b".into()], ..setup() };
    Report { setup, ..report(tally) }.to_html(UNIX_EPOCH + Duration::from_secs(1_709_251_199))
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
    let page = page_of(forty_requests());
    let drawn = elements(&page);
    stands_alone(&page.replace("http://h:1", ""));
    assert!(page.contains("prefers-color-scheme: dark"));
    let text = |of: &dyn Fn(&Element) -> bool| -> Vec<String> {
        drawn.iter().filter(|element| of(element)).map(|element| element.text.clone()).collect()
    };
    assert_eq!(text(&|e| e.name == "h1"), ["Load test of &lt;script&gt;alert('m')&lt;/script&gt;"]);
    assert_eq!(text(&|e| e.name == "li")[0], "a &amp; b");
    assert!(page.contains("2024-02-29 23:59 UTC") && page.contains("error connection_lost"));
    assert!(page.contains("connection lost: &lt;reset&gt;") && page.contains("finish reason length</td><td>40<"));
    let heads = text(&|e| e.name == "th");
    assert_eq!(heads[..9], ["time", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"]);
}

#[test]
fn every_plot_has_named_axes_a_legend_and_its_lines_in_the_frame() {
    let drawn = elements(&page_of(forty_requests()));
    within(&drawn);
    let with_class = |class: &str| drawn.iter().filter(|e| e.class() == class).collect::<Vec<_>>();
    assert_eq!(drawn.iter().filter(|e| e.name == "svg").count(), 5);
    let titles =
        ["Time to first token", "Time between tokens", "End to end", "Requests in flight", "Output tokens a second"];
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
    let plain = page_of(forty_requests());
    assert!(plain.contains("not measured (--calibrate)") && !plain.contains("Over 2 runs"));
    let slo: Slo = "ttft=30ms,itl=1s".parse().expect("limits");
    let mut tally = Tally::new(Window::default(), Some(slo));
    tally.add(&RequestRecord { ended_ns: 500 * MS, ..record(0, 0, &[20, 40]) });
    let mut times = Distribution::default();
    times.record_ns(7 * MS);
    let calibration = Calibration { itl_error: times.clone(), ttft_error: times, ..Calibration::default() };
    let setup = Setup { calibration: Some(calibration), ..setup() };
    let spread = Some(Spread::of(&[&forty_requests(), &forty_requests()]));
    let page = Report { setup, spread, ..report(tally) }.to_html(UNIX_EPOCH);
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
    let page = page_of(Tally::default());
    elements(&page);
    assert!(page.contains("End to end: no answer to measure") && page.contains("No request ended."));
    assert!(!page.contains("NaN") && !page.contains("inf"));
}
