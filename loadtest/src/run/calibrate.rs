//! The load tester's own error: what it measures of a server whose times are known.
//!
//! A mock answers every stream at a fixed pace. Requests come at equal gaps, as many as keep the asked number of
//! streams open, and once the first ones have ended the difference between each time measured and the mock's is the
//! error of this client, of the mock and of the machine together: an upper bound of the client's.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::client::record::RequestRecord;
use crate::client::target::Target;
use crate::load::arrivals::{ArrivalProcess, Arrivals, Rate};
use crate::load::conduct::Conducts;
use crate::load::lengths::Lengths;
use crate::load::pacing::{Extent, Pacing};
use crate::load::shapes::Shapes;
use crate::run::drive::{self, Load};
use crate::run::live::Screen;
use crate::run::workload::Workload;
use crate::stats::distribution::Distribution;
use crate::text::parse_duration;

/// How long a stream of the calibration lasts, to the next token.
const STREAM_LENGTH: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(60);
/// Share of the mock's tokens that a client which follows receives in a window: a stream or two may begin beside it.
const FOLLOWED: f64 = 0.9;
/// p99 of the client's error from which on it is said, in milliseconds.
pub const TOLERATED_MS: f64 = 5.0;

/// Measures the load tester itself, against a mock in a process of its own.
#[derive(Debug, Clone, clap::Args)]
pub struct CalibrateArgs {
    /// Streams open at a time
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub streams: u32,

    /// How long to measure; opening the streams and letting them end takes up to 10 s more
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub duration: Duration,

    /// The mock's time to first token
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_duration)]
    pub ttft: Duration,

    /// The mock's time between tokens
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_duration)]
    pub itl: Duration,

    /// Show no progress
    #[arg(long)]
    pub quiet: bool,

    /// Write the error to this file too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(Debug, Clone, Default)]
pub struct Calibration {
    pub streams: u32,
    /// Tokens a second that all of them asked for.
    pub tokens_per_s_asked: f64,
    pub tokens_per_s: f64,
    /// Time to first token measured less the mock's, without sign.
    pub ttft_error: Distribution,
    /// Time between two tokens measured less the mock's, without sign.
    pub itl_error: Distribution,
}

/// Calibrates as `args` say, and prints the error.
///
/// # Errors
/// A mock that cannot be started or does not answer, and a file that cannot be written.
pub async fn run(args: &CalibrateArgs, stop: &CancellationToken) -> anyhow::Result<()> {
    let file = args.json.as_ref().map(|path| {
        File::create(path).with_context(|| format!("cannot write the error to {} (--json)", path.display()))
    });
    let file = file.transpose()?;
    let calibration = beside_a_mock(args, stop).await?;
    if let Some(mut file) = file {
        writeln!(file, "{:#}", calibration.to_json()).context("cannot write the error to --json")?;
    }
    writeln!(io::stdout(), "{calibration}").context("cannot print the error")
}

/// Calibrates against a mock in a process of its own, which shares nothing with the client but the machine.
///
/// # Errors
/// A mock that cannot be started or that does not answer.
pub async fn beside_a_mock(args: &CalibrateArgs, stop: &CancellationToken) -> anyhow::Result<Calibration> {
    let (base, mut mock) = start_mock(args).await.context("cannot start the mock to calibrate against")?;
    let calibration = measure(&base, args, STREAM_LENGTH, stop).await;
    mock.kill().await.context("cannot end the mock")?;
    calibration
}

async fn start_mock(args: &CalibrateArgs) -> anyhow::Result<(String, Child)> {
    let milliseconds = |time: Duration| format!("{}ms", time.as_secs_f64() * 1e3);
    let mut mock = Command::new(std::env::current_exe()?)
        .args(["loadtest", "mock", "--until-stdin-closes"])
        .args(["--ttft", &milliseconds(args.ttft), "--itl", &milliseconds(args.itl)])
        // Held open for as long as the mock is to live: it ends with this process, however that ends.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let said = mock.stdout.take().context("the mock has no standard output")?;
    let mut base = String::new();
    BufReader::new(said).read_line(&mut base).await?;
    ensure!(base.starts_with("http://"), "it ended before it said its address");
    Ok((base.trim().to_owned(), mock))
}

/// Measures the mock at `base`, whose times `args` say, with streams of at least `shortest`.
async fn measure(
    base: &str,
    args: &CalibrateArgs,
    shortest: Duration,
    stop: &CancellationToken,
) -> anyhow::Result<Calibration> {
    let gaps = (shortest.as_secs_f64() / args.itl.as_secs_f64()).ceil().max(1.0) as u32;
    let stream_length = args.ttft + args.itl * gaps;
    let rate_per_s = f64::from(args.streams) / stream_length.as_secs_f64();
    let shapes = Shapes::Drawn { prompt: Lengths::Constant(1), output: Lengths::Constant(gaps + 1), seed: 0 };
    let timeout = TIMEOUT + stream_length;
    let workload = Workload::plain(Target::new(base, None, timeout)?, "mock", shapes, timeout);
    let extent = Extent::Duration(stream_length + args.duration);
    let load = Load {
        pacing: Pacing::Open {
            arrivals: Box::new(Arrivals::new(ArrivalProcess::Constant, 1.0, Rate::constant(rate_per_s), 0)?),
            // A client that is too slow to keep up shows in the times; one that may not open streams would not.
            max_in_flight: 2 * args.streams as usize,
        },
        extent,
        first_index: 0,
        conducts: Conducts::default(),
    };
    let mut calibration = Calibration {
        streams: args.streams,
        tokens_per_s_asked: f64::from(args.streams) * f64::from(gaps + 1) / stream_length.as_secs_f64(),
        ..Calibration::default()
    };
    let known = Known {
        ttft_ns: args.ttft.as_nanos() as u64,
        itl_ns: args.itl.as_nanos() as u64,
        window: stream_length.as_nanos() as u64..(stream_length + args.duration).as_nanos() as u64,
    };
    let mut tokens = 0;
    let mut running = drive::start(Arc::new(workload), load, stop.clone());
    let _view = Screen::new(args.quiet).watch("calibration", extent, &running);
    while let Some(record) = running.records.recv().await {
        if let Some(failure) = &record.failure {
            anyhow::bail!("a stream of the calibration failed: {failure}");
        }
        tokens += known.compare(&record, &mut calibration);
    }
    Ok(Calibration { tokens_per_s: tokens as f64 / args.duration.as_secs_f64(), ..calibration })
}

/// The mock's times, and the part of the run, in nanoseconds, in which all streams are open.
struct Known {
    ttft_ns: u64,
    itl_ns: u64,
    window: std::ops::Range<u64>,
}

impl Known {
    /// Counts how far the times of `record` are from these; returns how many of its tokens came in the window.
    fn compare(&self, record: &RequestRecord, errors: &mut Calibration) -> usize {
        if let Some(first_ns) = record.first_token_ns().filter(|first_ns| self.window.contains(first_ns)) {
            errors.ttft_error.record_ns((first_ns - record.sent_ns).abs_diff(self.ttft_ns));
        }
        for pair in record.chunks_ns.windows(2).filter(|pair| self.window.contains(&pair[1])) {
            errors.itl_error.record_ns((pair[1] - pair[0]).abs_diff(self.itl_ns));
        }
        record.chunks_ns.iter().filter(|chunk_ns| self.window.contains(chunk_ns)).count()
    }
}

impl Calibration {
    /// Whether the client could not follow such a load: fewer tokens arrived than the mock was to send.
    pub fn is_bottleneck(&self) -> bool {
        self.tokens_per_s < FOLLOWED * self.tokens_per_s_asked
    }

    /// Whether times are right to [`TOLERATED_MS`] in all but one case of a hundred.
    pub fn is_precise(&self) -> bool {
        let is_right = |error: &Distribution| error.percentile_ms(99.0).is_some_and(|ms| ms <= TOLERATED_MS);
        is_right(&self.ttft_error) && is_right(&self.itl_error)
    }

    pub fn in_words(&self) -> String {
        let figures = |error: &Distribution| match (error.percentile_ms(50.0), error.percentile_ms(99.0)) {
            (Some(p50), Some(p99)) => format!("p50 {p50:.2} ms, p99 {p99:.2} ms"),
            _ => "nothing measured".into(),
        };
        let (ttft, itl) = (figures(&self.ttft_error), figures(&self.itl_error));
        let (streams, per_s) = (self.streams, self.tokens_per_s);
        format!("first token {ttft}; between tokens {itl} ({streams} streams, {per_s:.0} tokens a second)")
    }

    /// What a reader of figures has to know of it, if anything.
    pub fn note(&self) -> Option<String> {
        let remedy = "measure from a quieter or larger machine, or with fewer streams";
        if self.is_bottleneck() {
            return Some(format!(
                "at {} streams the load tester is itself the bottleneck: {:.0} of {:.0} tokens a second arrived; {remedy}",
                self.streams, self.tokens_per_s, self.tokens_per_s_asked
            ));
        }
        (!self.is_precise()).then(|| {
            format!(
                "at {} streams the load tester's own error is over {TOLERATED_MS} ms in one case of a hundred: such \
                 differences say nothing of the server; {remedy}",
                self.streams
            )
        })
    }

    /// The error as JSON; times in milliseconds, null where nothing was measured.
    pub fn to_json(&self) -> Value {
        let figures = |error: &Distribution| {
            json!({
                "count": error.count(),
                "mean_ms": error.mean_ms(),
                "p50_ms": error.percentile_ms(50.0),
                "p99_ms": error.percentile_ms(99.0),
                "p99.9_ms": error.percentile_ms(99.9),
                "max_ms": error.max_ms(),
            })
        };
        json!({
            "streams": self.streams,
            "tokens_per_s_asked": self.tokens_per_s_asked,
            "tokens_per_s": self.tokens_per_s,
            "ttft_error": figures(&self.ttft_error),
            "itl_error": figures(&self.itl_error),
            "is_bottleneck": self.is_bottleneck(),
            "is_precise": self.is_precise(),
        })
    }
}

impl Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client's own error: {}", self.in_words())?;
        write!(f, "\n{:.0} tokens a second were asked of the mock", self.tokens_per_s_asked)?;
        match self.note() {
            Some(note) => write!(f, "\nnote: {note}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::mock::Mock;

    /// Against a mock that says its first token comes after 50 ms.
    async fn calibrate(mock_ttft_ms: u64) -> Calibration {
        let [ttft, said, itl, duration] = [mock_ttft_ms, 50, 100, 500].map(Duration::from_millis);
        let mock = Mock { ttft, itl, ..Mock::default() }.serve().await;
        let args = CalibrateArgs { streams: 10, duration, ttft: said, itl, json: None, quiet: true };
        let measured = measure(&mock.base, &args, Duration::from_millis(500), &CancellationToken::new()).await;
        measured.expect("the mock answers")
    }

    /// The windows hold what they should: six tokens in 550 ms of each of ten streams. The control, a server that is
    /// 100 ms later than it says, is found to be.
    #[tokio::test]
    async fn the_error_is_what_the_mock_does_not_explain() {
        let (exact, late) = tokio::join!(calibrate(50), calibrate(150));
        assert!((80.0..=140.0).contains(&exact.tokens_per_s), "{}", exact.tokens_per_s);
        assert!((exact.tokens_per_s_asked - 10.0 * 6.0 / 0.55).abs() < 1e-9, "{}", exact.tokens_per_s_asked);
        assert!(exact.itl_error.percentile_ms(50.0).expect("gaps") < 20.0, "{exact}");
        let ms = late.ttft_error.percentile_ms(50.0).expect("first tokens");
        assert!((99.0..200.0).contains(&ms), "{ms}");
        assert!(!late.is_precise() && late.to_string().contains("own error is over 5 ms"), "{late}");
        assert_eq!(late.to_json()["is_precise"], false);
    }

    #[test]
    fn errors_have_no_sign_and_count_in_the_window_only() {
        let (known, mut errors) = (Known { ttft_ns: 50, itl_ns: 20, window: 100..200 }, Calibration::default());
        let mut record = RequestRecord::new(0, 0, 60);
        record.chunks_ns = vec![99, 120, 139, 200];
        assert_eq!(known.compare(&record, &mut errors), 2);
        assert_eq!((errors.ttft_error.count(), errors.itl_error.count()), (0, 2));
        record.chunks_ns = vec![100];
        assert_eq!((known.compare(&record, &mut errors), errors.ttft_error.count()), (1, 1));
    }

    #[test]
    fn nothing_measured_is_no_good_calibration() {
        let nothing = Calibration { streams: 1, tokens_per_s_asked: 1.0, ..Calibration::default() };
        assert!(nothing.is_bottleneck() && !nothing.is_precise() && nothing.in_words().contains("nothing measured"));
        assert!(nothing.to_string().contains("itself the bottleneck: 0 of 1 tokens"), "{nothing}");
    }
}
