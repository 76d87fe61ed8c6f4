//! The report for people: one screen of plain text.

use std::fmt::{self, Display};

use crate::figures::server_side::Figures;
use crate::figures::spread::Figure;
use crate::figures::tally::{Metric, PERCENTILES};
use crate::report::contents::Report;
use crate::run::watch::ServerSide;

const NAME_WIDTH: usize = 24;
const FIGURE_WIDTH: usize = 10;

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setup, tally, .. } = self;
        writeln!(f, "{} · {} · {}", setup.target, setup.backend, setup.model)?;
        writeln!(f, "{}, seed {}, {} warm-up requests not counted", setup.pacing, setup.seed, setup.warmup)?;
        writeln!(f)?;
        let interrupted = match tally.interrupted {
            0 => String::new(),
            count => format!(", {count} stopped unfinished"),
        };
        let (completed, failed) = (tally.completed, tally.failed);
        row(f, "requests", format!("{completed} ok, {failed} failed{interrupted} in {:.2} s", tally.duration_s()))?;
        row(f, "in flight", format!("at most {}", tally.peak_in_flight))?;
        let (requests_per_s, tokens_per_s) = (tally.requests_per_s(), tally.output_tokens_per_s());
        let peak = tally.peak_tokens_per_s();
        row(f, "requests a second", format!("{requests_per_s:.2}"))?;
        if let (Some(slo), Some(good), Some(good_per_s)) = (tally.slo, tally.good(), tally.good_requests_per_s()) {
            row(f, "good requests a second", format!("{good_per_s:.2} ({good} of {completed} within {slo})"))?;
        }
        row(f, "output tokens a second", format!("{tokens_per_s:.1} (best second {peak:.0})"))?;
        let mean = |tokens: u64| tokens as f64 / completed.max(1) as f64;
        let (prompt, output) = (mean(tally.prompt_tokens), mean(tally.output_tokens));
        let (prompt_lengths, output_lengths) = setup.shapes.in_words();
        let cached = tally.cached_share().map_or_else(String::new, |share| format!(", {:.1} % cached", 100.0 * share));
        row(f, "prompt tokens", format!("{prompt:.1} a request ({prompt_lengths} asked for){cached}"))?;
        row(f, "output tokens", format!("{output:.1} a request (at most {output_lengths})"))?;
        let reasons: Vec<String> = tally.finish_reasons.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
        row(f, "finish reasons", if reasons.is_empty() { "-".into() } else { reasons.join(", ") })?;
        writeln!(f)?;
        self.write_times(f)?;
        self.write_faults(f)?;
        self.write_spread(f)?;
        self.write_server_side(f)?;
        if let Some(calibration) = &setup.calibration {
            writeln!(f, "client's own error: {}", calibration.in_words())?;
        }
        for (kind, (count, example)) in &tally.errors {
            writeln!(f, "error {kind} × {count}: {example}")?;
        }
        for note in self.notes() {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}

impl Report {
    fn write_faults(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(faults) = &self.faults else { return Ok(()) };
        for finding in &faults.lines {
            row(f, &finding.name, &finding.text)?;
        }
        writeln!(f)
    }

    fn write_server_side(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let series = match &self.server_side {
            None => return Ok(()),
            Some(ServerSide::Unknown(why)) => return writeln!(f, "server's own side: not known, {why}\n"),
            Some(ServerSide::Seen(series)) => series,
        };
        writeln!(f, "server's own side, {}", series.in_words())?;
        for (name, value) in Figures::of(series, self.tally.window_s()).in_words(&self.tally) {
            row(f, name, value)?;
        }
        writeln!(f)
    }

    fn write_spread(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(spread) = &self.spread else { return Ok(()) };
        writeln!(f, "over {} runs, of which the one in the middle by output tokens a second is above", spread.runs)?;
        writeln!(f, "{:<NAME_WIDTH$}{:>FIGURE_WIDTH$}{:>FIGURE_WIDTH$}", "", "mean", "CV")?;
        for figure in &spread.figures {
            let (mean, cv) = (figure.mean(), variation(figure));
            writeln!(f, "{:<NAME_WIDTH$}{mean:>FIGURE_WIDTH$.2}{cv:>FIGURE_WIDTH$}", figure.title)?;
        }
        writeln!(f)
    }

    fn write_times(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<NAME_WIDTH$}", "milliseconds")?;
        for name in ["mean"].into_iter().chain(PERCENTILES.map(|(name, _)| name)).chain(["max"]) {
            write!(f, "{name:>FIGURE_WIDTH$}")?;
        }
        writeln!(f)?;
        for Metric { title, times, .. } in self.tally.metrics() {
            write!(f, "{title:<NAME_WIDTH$}")?;
            let percentiles = PERCENTILES.map(|(_, percentile)| times.percentile_ms(percentile));
            for figure in [times.mean_ms()].into_iter().chain(percentiles).chain([times.max_ms()]) {
                match figure {
                    Some(ms) => write!(f, "{ms:>FIGURE_WIDTH$.2}")?,
                    None => write!(f, "{:>FIGURE_WIDTH$}", "-")?,
                }
            }
            writeln!(f)?;
        }
        writeln!(f)
    }
}

/// "3.21 %", or nothing to say of one run.
pub fn variation(figure: &Figure) -> String {
    figure.cv().map_or_else(|| "-".into(), |cv| format!("{:.2} %", 100.0 * cv))
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, value: impl Display) -> fmt::Result {
    writeln!(f, "{name:<NAME_WIDTH$}{value}")
}
