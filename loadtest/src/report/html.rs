//! The report as one HTML page.

use std::time::SystemTime;

use maud::{Markup, html};

use crate::figures::tally::{Metric, PERCENTILES};
use crate::figures::timeline::Moment;
use crate::report::contents::Report;
use crate::report::page::{heading, notes, page, pairs, panel, table, tiles, timeline};
use crate::report::plot::{Axis, Mark, STEPS, Series};
use crate::report::server_side;
use crate::report::table::variation;
use crate::run::calibrate::Calibration;

/// Points of a cumulative distribution: every half percent up to the 99th, and a tenth of that in the tail.
const BODY_STEP: f64 = 0.5;
const TAIL_FROM: f64 = 99.0;
const TAIL_STEP: f64 = 0.05;
/// Percentile from which on an axis of times reaches.
const AXIS_FROM: f64 = 1.0;
const MARKED: [f64; 3] = [50.0, 90.0, 99.0];
/// Which kinds of time share a plot: its title, and the key and name of each line.
const DISTRIBUTIONS: [(&str, [(&str, &str); 2]); 3] = [
    ("Time to first token", [("ttft", "from sending"), ("ttft_from_intended", "from when due")]),
    ("Time between tokens", [("itl", "each gap (ITL)"), ("tpot", "mean of a request (TPOT)")]),
    ("End to end", [("e2el", "from sending"), ("e2el_from_intended", "from when due")]),
];

impl Report {
    /// The report of a run that ended at `date` as a page.
    pub fn to_html(&self, date: SystemTime) -> String {
        let Self { setup, .. } = self;
        let title = format!("Load test of {}", setup.model);
        let body = html! {
            (heading(&title, &setup.target, date, &setup.pacing))
            (self.summary())
            (notes(&self.notes()))
            (self.distributions())
            (self.over_the_run())
            @if let Some(faults) = &self.faults {
                h2 { "Faults" }
                div class="wide" {
                    table {
                        @for finding in &faults.lines {
                            tr { th { (finding.name) } td class=[finding.is_bad.then_some("bad")] { (finding.text) } }
                        }
                    }
                }
            }
            (self.times())
            (self.variation())
            (server_side::section(self))
            (self.ends())
            h2 { "Settings" }
            (self.settings())
        };
        page(&title, "", body)
    }

    fn summary(&self) -> Markup {
        let tally = &self.tally;
        let time = |key, percentile| tally.percentile_ms(key, percentile);
        let ms = |ms: Option<f64>| ms.map_or_else(|| "–".into(), |ms| format!("{ms:.1} ms"));
        let mut figures = vec![
            ("output tokens a second", format!("{:.1}", tally.output_tokens_per_s()), false),
            ("requests a second", format!("{:.2}", tally.requests_per_s()), false),
            ("first token, median", ms(time("ttft", 50.0)), false),
            ("between tokens, median", ms(time("itl", 50.0)), false),
            ("between tokens, p99", ms(time("itl", 99.0)), false),
            ("end to end, p99", ms(time("e2el", 99.0)), false),
            ("requests answered", tally.completed.to_string(), false),
        ];
        let within = tally.slo.map(|slo| format!("requests a second within {slo}")).unwrap_or_default();
        figures.extend(tally.good_requests_per_s().map(|good| (within.as_str(), format!("{good:.2}"), false)));
        figures.push(("failed", tally.failed.to_string(), tally.failed > 0));
        tiles(&figures)
    }

    fn distributions(&self) -> Markup {
        html! {
            h2 { "How long" }
            div class="plots" {
                @for (title, lines) in DISTRIBUTIONS { (self.distribution(title, lines)) }
            }
            p class="muted" {
                "Of requests that succeeded. Marked: p50, p90, p99. Times that an axis does not reach lie on its left edge."
            }
        }
    }

    fn distribution(&self, title: &str, lines: [(&str, &str); 2]) -> Markup {
        let metrics = self.tally.metrics();
        let line = |(key, name)| cumulative(metrics.iter().find(|metric| metric.key == key)?, name);
        let series: Vec<Series> = lines.into_iter().filter_map(line).collect();
        let points = || series.iter().flat_map(|series| &series.points);
        // One gap of no length would stretch a logarithmic axis over decades that hold nothing else.
        let most = points().filter(|(_, percent)| *percent >= AXIS_FROM).map(|(ms, _)| *ms);
        let (low, high) = (most.fold(f64::INFINITY, f64::min), points().fold(0.0, |high, (ms, _)| ms.max(high)));
        let axes = (!series.is_empty())
            .then(|| (Axis::of_times("time, ms", low, high), Axis::linear("took at most this, %", 0.0, 100.0, STEPS)));
        panel(title, axes, series)
    }

    fn over_the_run(&self) -> Markup {
        let moments = self.tally.moments();
        let (Some(first), Some(last)) = (moments.first(), moments.last()) else {
            return html! { h2 { "Over the run" } p { "No request ended." } };
        };
        let steps = |name, value: fn(&Moment) -> f64| {
            let ends = |moment: &Moment| [(moment.from_s, value(moment)), (moment.to_s, value(moment))];
            vec![Series { name, points: moments.iter().flat_map(ends).collect(), ..Series::default() }]
        };
        let in_flight = steps("mean of each interval", |moment| moment.in_flight);
        let tokens = steps("arrived in each interval, of requests that succeeded", |moment| moment.tokens_per_s);
        let interval_ms = (first.to_s - first.from_s) * 1e3;
        html! {
            h2 { "Over the run" }
            (timeline("Requests in flight", "requests", in_flight, last.to_s, self.events()))
            (timeline("Output tokens a second", "tokens / s", tokens, last.to_s, self.events()))
            p class="muted" {
                "Intervals of " (format!("{interval_ms:.0}")) " ms. At most " (self.tally.peak_in_flight)
                " requests in flight at once."
            }
        }
    }

    fn times(&self) -> Markup {
        let ms = |ms: Option<f64>| ms.map_or_else(|| "–".into(), |ms| format!("{ms:.2}"));
        html! {
            h2 { "Times in milliseconds" }
            div class="wide" {
                table class="figures" {
                    tr {
                        th { "time" } th { "count" } th { "mean" }
                        @for (name, _) in PERCENTILES { th { (name) } }
                        th { "max" }
                    }
                    @for Metric { title, times, .. } in self.tally.metrics() {
                        tr {
                            td class=[title.starts_with(' ').then_some("part")] { (title.trim()) }
                            td { (times.count()) } td { (ms(times.mean_ms())) }
                            @for (_, percentile) in PERCENTILES { td { (ms(times.percentile_ms(percentile))) } }
                            td { (ms(times.max_ms())) }
                        }
                    }
                }
            }
        }
    }

    fn variation(&self) -> Markup {
        html! {
            @if let Some(spread) = &self.spread {
                h2 { "Over " (spread.runs) " runs" }
                p class="muted" { "Everything else is of the run in the middle by output tokens a second." }
                @let figures = spread.figures.iter();
                (table(Some("figures"), &["figure", "mean", "variation (CV)"], figures.map(|figure| {
                    vec![figure.title.to_owned(), format!("{:.2}", figure.mean()), variation(figure)]
                })))
            }
        }
    }

    fn ends(&self) -> Markup {
        let tally = &self.tally;
        html! {
            h2 { "How requests ended" }
            div class="wide" {
                table {
                    tr { th { "end" } th { "requests" } th { "example" } }
                    @for (reason, count) in &tally.finish_reasons {
                        tr { td { "finish reason " (reason) } td { (count) } td {} }
                    }
                    @for (kind, (count, example)) in &tally.errors {
                        tr { td class="bad" { "error " (kind) } td { (count) } td { (example) } }
                    }
                    @if tally.interrupted > 0 {
                        tr { td { "stopped unfinished" } td { (tally.interrupted) } td {} }
                    }
                }
            }
        }
    }

    fn settings(&self) -> Markup {
        let Self { setup, tally, .. } = self;
        let mean = |tokens: u64| tokens as f64 / tally.completed.max(1) as f64;
        let (prompt, output) = (mean(tally.prompt_tokens), mean(tally.output_tokens));
        let (prompts, outputs) = setup.shapes.in_words();
        let cached = tally.cached_share().map_or_else(String::new, |share| format!(", {:.1} % cached", 100.0 * share));
        let client_error = setup.calibration.as_ref().map(Calibration::in_words);
        pairs([
            ("server", setup.target.clone()),
            ("interface", setup.backend.into()),
            ("model", setup.model.clone()),
            ("load", setup.pacing.clone()),
            ("most requests in flight", setup.max_concurrency.to_string()),
            ("prompt tokens", format!("{prompts} asked for, {prompt:.1} a request counted{cached}")),
            ("output tokens", format!("at most {outputs}, {output:.1} a request counted")),
            ("of each prompt shared by all", format!("{:.0} %", 100.0 * setup.shared_prefix)),
            ("least output tokens", setup.min_tokens.map_or_else(|| "not set".into(), |least| least.to_string())),
            ("past the model's own end", if setup.ignore_eos { "yes" } else { "no" }.into()),
            ("seed", setup.seed.to_string()),
            ("warm-up requests, not counted", setup.warmup.to_string()),
            ("client's own error", client_error.unwrap_or_else(|| "not measured (--calibrate)".into())),
            ("length of the run", format!("{:.2} s", tally.duration_s())),
        ])
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
mod tests;
