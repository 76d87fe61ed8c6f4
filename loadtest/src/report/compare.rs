//! Two reports side by side: ratios of their figures, with intervals where the reports hold what those take.
//!
//! Reports of `vllm bench serve` can be read too, as the names are the same; they hold no times of single requests
//! under our name, so their ratios come without intervals.

use std::fmt::{self, Display};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::{Map, Value};

use crate::stats::bootstrap::{CONFIDENCE, MIN_BEYOND, Statistic, intervals_of_ratio};
use crate::text::printable;

const NAME_WIDTH: usize = 30;
const FIGURE_WIDTH: usize = 12;
/// Runs whose mean answers differ by more than this are said to.
const TOKENS_TOLERANCE: f64 = 0.01;
/// Figures of a whole run.
const RATES: [(&str, &str); 3] = [
    ("requests a second", "request_throughput"),
    ("output tokens a second", "output_throughput"),
    ("best second, output tokens", "max_output_tokens_per_s"),
];
/// Kinds of time, by their name in JSON fields.
const TIMES: [(&str, &str); 6] = [
    ("time to first token", "ttft"),
    ("first token from when due", "ttft_from_intended"),
    ("between tokens (ITL)", "itl"),
    ("per output token (TPOT)", "tpot"),
    ("end to end", "e2el"),
    ("end to end from when due", "e2el_from_intended"),
];
/// Figures of each kind of time, by their name in JSON fields.
const STATISTICS: [(&str, Statistic); 4] = [
    ("mean", Statistic::Mean),
    ("median", Statistic::Percentile(50.0)),
    ("p95", Statistic::Percentile(95.0)),
    ("p99", Statistic::Percentile(99.0)),
];
/// Settings in which two runs should agree, by their name in JSON.
const SETTINGS: [&str; 9] = [
    "backend",
    "model_id",
    "arrivals",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "prompt_tokens_asked",
    "max_tokens",
    "ignore_eos",
];

#[derive(Debug, Clone, clap::Args)]
pub struct CompareArgs {
    /// Report that is compared against
    #[arg(value_name = "A.json")]
    a: PathBuf,

    /// Report that is compared
    #[arg(value_name = "B.json")]
    b: PathBuf,
}

/// Two runs; prints as a table, see [`Display`].
pub struct Comparison {
    a: Run,
    b: Run,
}

struct Run {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl Comparison {
    /// Reads the reports of the run compared against and the one compared.
    ///
    /// # Errors
    /// Files that cannot be read, or are no reports.
    pub fn read(args: &CompareArgs) -> anyhow::Result<Self> {
        Ok(Self { a: Run::read(&args.a)?, b: Run::read(&args.b)? })
    }
}

impl Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = [("A", &self.a), ("B", &self.b)];
        for (letter, run) in runs {
            let [model, target, date] = ["model_id", "target", "date"].map(|name| run.word(name));
            writeln!(f, "{letter}  {} · {target} · {model} · {date}", run.path.display())?;
        }
        let percent = CONFIDENCE * 100.0;
        writeln!(
            f,
            "\n{:<NAME_WIDTH$}{:>FIGURE_WIDTH$}{:>FIGURE_WIDTH$}{:>10}   {percent}% interval",
            "", "A", "B", "B / A"
        )?;
        for (title, name) in RATES {
            self.row(f, title, name, None)?;
        }
        for (title, key) in TIMES {
            writeln!(f, "{title}, ms")?;
            let times = self.a.sampled(key).zip(self.b.sampled(key));
            let intervals = times.map(|(a, b)| intervals_of_ratio(&a, &b, STATISTICS.map(|(_, statistic)| statistic)));
            for ((figure, _), interval) in STATISTICS.into_iter().zip(intervals.unwrap_or_default()) {
                self.row(f, &format!("  {figure}"), &format!("{figure}_{key}_ms"), interval)?;
            }
        }
        writeln!(f)?;
        self.notes().iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

impl Comparison {
    /// One figure of both runs, with the interval of its ratio.
    fn row(&self, f: &mut fmt::Formatter<'_>, title: &str, name: &str, interval: Option<(f64, f64)>) -> fmt::Result {
        let (a, b) = (self.a.figure(name), self.b.figure(name));
        let shown = |figure: Option<f64>| figure.map_or_else(|| "-".into(), |figure| format!("{figure:.2}"));
        write!(f, "{title:<NAME_WIDTH$}{:>FIGURE_WIDTH$}{:>FIGURE_WIDTH$}", shown(a), shown(b))?;
        match ratio(a, b) {
            Some(ratio) => write!(f, "{ratio:>10.3}")?,
            None => write!(f, "{:>10}", "-")?,
        }
        match interval {
            Some((low, high)) if low > 1.0 || high < 1.0 => writeln!(f, "   {low:.3} to {high:.3}"),
            Some((low, high)) => writeln!(f, "   {low:.3} to {high:.3}  holds 1"),
            None => writeln!(f, "   -"),
        }
    }

    /// What the table cannot tell, and what makes the runs hard to compare.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for name in SETTINGS {
            let (a, b) = (self.a.word(name), self.b.word(name));
            if a != b {
                notes.push(format!("the runs differ in {name}: {a} and {b}"));
            }
        }
        if let Some(ratio) = ratio(self.a.tokens_per_answer(), self.b.tokens_per_answer())
            && (ratio - 1.0).abs() > TOKENS_TOLERANCE
        {
            notes.push(format!("answers of B are {ratio:.2} times as long as those of A: end to end says so too"));
        }
        for (letter, run) in [("A", &self.a), ("B", &self.b)] {
            let count = |name: &str| run.figure(name).unwrap_or(0.0);
            let left_out = count("failed") + count("interrupted");
            if left_out > 0.0 {
                let all = count("completed") + left_out;
                notes.push(format!("{left_out} of {all} requests of {letter} did not succeed and are in no time"));
            }
            if let Some(faults) = run.fields.get("faults").and_then(Value::as_object) {
                let names: Vec<&str> = faults.keys().map(String::as_str).collect();
                let names = printable(&names.join(", "), 200);
                notes.push(format!("{letter} ran with faults ({names}): its rates leave the requests with one out"));
            }
            match run.sampled("e2el") {
                Some(times) if (times.len() as f64) < count("completed") => {
                    let used = times.len();
                    notes.push(format!(
                        "intervals use a uniform sample of {used} of {letter}'s {} requests",
                        count("completed")
                    ));
                }
                Some(_) => {}
                None => notes.push(format!(
                    "{letter} holds no times of single requests (sampled_requests): there are ratios, but no intervals"
                )),
            }
        }
        notes.push(format!(
            "no interval: of rates, which are one figure a run; of ITL, whose gaps hang together within a request (TPOT \
             is a figure a request); of percentiles with fewer than {MIN_BEYOND} requests beyond them in either run"
        ));
        notes.push(
            "intervals come from drawing the requests again (bootstrap) as if each stood alone: they say how far chance \
             among the requests of these two runs reaches, not how far one run of a server differs from the next; for \
             that run each several times"
                .into(),
        );
        notes
    }
}

impl Run {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        let fields = serde_json::from_str(&text).with_context(|| format!("{shown} is no report of --json"))?;
        let run = Self { path: path.to_owned(), fields };
        ensure!(
            run.figure("request_throughput").is_some(),
            "{shown} is no report of --json: it has no request_throughput"
        );
        Ok(run)
    }

    fn figure(&self, name: &str) -> Option<f64> {
        self.fields.get(name)?.as_f64()
    }

    /// A field as people read it; `-` where it is missing or null.
    fn word(&self, name: &str) -> String {
        match self.fields.get(name) {
            None | Some(Value::Null) => "-".into(),
            Some(Value::String(text)) => printable(text, 200),
            Some(other) => printable(&other.to_string(), 200),
        }
    }

    /// Times of single requests in milliseconds; none where the report has none of this kind.
    fn sampled(&self, key: &str) -> Option<Vec<f64>> {
        let list = self.fields.get("sampled_requests")?.get(format!("{key}_ms"))?.as_array()?;
        list.iter().map(Value::as_f64).collect()
    }

    fn tokens_per_answer(&self) -> Option<f64> {
        ratio(self.figure("completed"), self.figure("total_output_tokens"))
    }
}

/// `b / a`; none where either is missing or the ratio is no number.
fn ratio(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    Some(b? / a?).filter(|ratio| ratio.is_finite())
}

#[cfg(test)]
mod tests;
