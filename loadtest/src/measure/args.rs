//! Options of the load tester, and what they mean together.

use std::path::PathBuf;
use std::time::Duration;

use crate::faults::args::FaultArgs;
use crate::figures::read_limit::ReadLimitArg;
use crate::figures::slo::Slo;
use crate::figures::tally::Window;
use crate::load::arrivals::{ArrivalError, ArrivalProcess, Arrivals, Rate};
use crate::load::lengths::Lengths;
use crate::load::pacing::{Extent, Pacing, RateArg};
use crate::load::trace::Trace;
use crate::run::workload::Endpoint;
use crate::text::{parse_duration, parse_share};

/// Requests sent where neither `--requests` nor `--duration` is given.
const DEFAULT_REQUESTS: u64 = 100;
/// Requests in flight where neither `--concurrency` nor `--rate` is given.
const DEFAULT_CONCURRENCY: u32 = 8;

/// A load, what it is sent to, and where its report goes.
#[derive(Debug, Clone, clap::Args)]
pub struct LoadArgs {
    /// Address of the server, without TLS: http://HOST:PORT (a trailing /v1 is allowed), or grpc://HOST:PORT for
    /// Looplane's own gRPC interface
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000", env = "LOOPLANE_LOADTEST_TARGET")]
    pub target: String,

    /// What to ask for; over gRPC the same call answers both
    #[arg(long, value_enum, default_value_t = Endpoint::Chat, env = "LOOPLANE_LOADTEST_ENDPOINT")]
    pub endpoint: Endpoint,

    /// Model id [default: the first one that /v1/models lists]
    #[arg(long, env = "LOOPLANE_LOADTEST_MODEL")]
    pub model: Option<String>,

    /// Key sent as a bearer token, for servers that ask for one
    #[arg(long, value_name = "KEY", env = "LOOPLANE_LOADTEST_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,

    /// Send so many requests [default: 100]
    #[arg(long, value_name = "N", conflicts_with = "duration", env = "LOOPLANE_LOADTEST_REQUESTS",
          value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub requests: Option<u64>,

    /// Send requests for so long (30s, 5m, 1h); those in flight then are waited for
    #[arg(long, value_name = "TIME", env = "LOOPLANE_LOADTEST_DURATION", value_parser = parse_duration)]
    pub duration: Option<Duration>,

    /// Closed loop: keep so many requests in flight [default: 8]
    #[arg(long, value_name = "N", conflicts_with = "rate", env = "LOOPLANE_LOADTEST_CONCURRENCY",
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub concurrency: Option<u32>,

    /// Open loop: send so many requests a second, whether or not earlier ones are answered; 1..20 rises evenly over
    /// --duration
    #[arg(long, value_name = "PER_SECOND", env = "LOOPLANE_LOADTEST_RATE")]
    pub rate: Option<RateArg>,

    /// Open loop: send requests when, and as long as, this file says: lines of JSON with time_s, prompt_tokens and
    /// output_tokens (or Mooncake's timestamp, input_length and output_length)
    #[arg(long, value_name = "FILE", env = "LOOPLANE_LOADTEST_TRACE",
          conflicts_with_all = ["rate", "concurrency", "requests", "burstiness"])]
    pub trace: Option<PathBuf>,

    /// Open loop: how the gaps between requests are distributed
    #[arg(long, value_enum, default_value_t = ArrivalProcess::Poisson, env = "LOOPLANE_LOADTEST_ARRIVALS")]
    pub arrivals: ArrivalProcess,

    /// Open loop with gamma arrivals: under 1 is bursty, 1 is Poisson, large approaches constant [default: 1]
    #[arg(long, value_name = "SHAPE", env = "LOOPLANE_LOADTEST_BURSTINESS")]
    pub burstiness: Option<f64>,

    /// Open loop: most requests in flight; those that are due beyond it wait, and their wait counts
    #[arg(long, value_name = "N", default_value_t = 512, env = "LOOPLANE_LOADTEST_MAX_IN_FLIGHT",
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_in_flight: u32,

    /// Seed of arrivals and prompts: the same seed sends the same load
    #[arg(long, default_value_t = 0, env = "LOOPLANE_LOADTEST_SEED")]
    pub seed: u64,

    /// Length of prompts in tokens, fitted to how the server counts them: N, LOW..HIGH (uniform),
    /// normal:MEAN,DEVIATION,LOW..HIGH or lognormal:MEDIAN,SIGMA,LOW..HIGH
    #[arg(long, value_name = "LENGTHS", default_value = "128", env = "LOOPLANE_LOADTEST_PROMPT_TOKENS")]
    pub prompt_tokens: Lengths,

    /// Share of each prompt, 0 to 1, that all prompts begin with
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, env = "LOOPLANE_LOADTEST_SHARED_PREFIX",
          value_parser = parse_share)]
    pub shared_prefix: f64,

    /// Most tokens to generate for a request, in the forms of --prompt-tokens
    #[arg(long, value_name = "LENGTHS", default_value = "128", env = "LOOPLANE_LOADTEST_MAX_TOKENS")]
    pub max_tokens: Lengths,

    /// Least tokens to generate, where --max-tokens allows so many (not every server knows this field)
    #[arg(long, value_name = "N", env = "LOOPLANE_LOADTEST_MIN_TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub min_tokens: Option<u32>,

    /// Chats of so many turns, each sent with the server's own answers to the ones before; closed loop and chat only
    #[arg(long, value_name = "N", default_value_t = 1, env = "LOOPLANE_LOADTEST_TURNS",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub turns: u32,

    /// Generate exactly --max-tokens tokens, past the model's own end (not every server knows this field)
    #[arg(long, env = "LOOPLANE_LOADTEST_IGNORE_EOS", value_parser = clap::builder::BoolishValueParser::new())]
    pub ignore_eos: bool,

    /// Requests to send before the run, which are not counted [default: 0]
    #[arg(long, value_name = "N", env = "LOOPLANE_LOADTEST_WARMUP",
          value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    pub warmup: Option<u64>,

    /// Leave out requests due in the first part of each run
    #[arg(long, value_name = "TIME", env = "LOOPLANE_LOADTEST_EXCLUDE_START", value_parser = parse_duration)]
    pub exclude_start: Option<Duration>,

    /// Leave out requests due in the last part of each run, which is as long as --duration says
    #[arg(long, value_name = "TIME", env = "LOOPLANE_LOADTEST_EXCLUDE_END", value_parser = parse_duration)]
    pub exclude_end: Option<Duration>,

    /// Limits that make a request good: ttft and e2e from when it was due, itl of every gap, tpot of the mean
    #[arg(long, value_name = "ttft=200ms,itl=50ms,tpot=..,e2e=..", env = "LOOPLANE_LOADTEST_SLO")]
    pub slo: Option<Slo>,

    /// Repeat the run and say how much its figures differ
    #[arg(long, value_name = "N", default_value_t = 1, env = "LOOPLANE_LOADTEST_RUNS",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,

    /// Time limit of each request
    #[arg(long, value_name = "TIME", default_value = "120s", env = "LOOPLANE_LOADTEST_TIMEOUT",
          value_parser = parse_duration)]
    pub timeout: Duration,

    /// Measure the load tester's own error first, against a mock, at as many streams as the run may have (up to 1000);
    /// takes some 15 s
    #[arg(long, env = "LOOPLANE_LOADTEST_CALIBRATE", value_parser = clap::builder::BoolishValueParser::new())]
    pub calibrate: bool,

    /// How fast all memory that the server reads can be read, in GB/s, or a file of `looplane bench --json` that says
    /// so for the same group: the report tells the share that the server's steps reach
    #[arg(long, value_name = "GB/S|FILE", env = "LOOPLANE_LOADTEST_READ_LIMIT")]
    pub read_limit: Option<ReadLimitArg>,

    /// Show no progress; the report is printed all the same
    #[arg(long, env = "LOOPLANE_LOADTEST_QUIET", value_parser = clap::builder::BoolishValueParser::new())]
    pub quiet: bool,

    /// Write the report to this file too, with the field names of `vllm bench serve`
    #[arg(long, value_name = "FILE", env = "LOOPLANE_LOADTEST_JSON")]
    pub json: Option<PathBuf>,

    /// Write the report to this file too, as one HTML page with plots
    #[arg(long, value_name = "FILE", env = "LOOPLANE_LOADTEST_HTML")]
    pub html: Option<PathBuf>,

    /// Write every request to this file as it ends, as one line of JSON
    #[arg(long, value_name = "FILE", env = "LOOPLANE_LOADTEST_REQUESTS_FILE")]
    pub requests_file: Option<PathBuf>,

    /// What goes wrong meanwhile
    #[command(flatten)]
    pub faults: FaultArgs,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ArgsError {
    #[error("--burstiness needs --rate and --arrivals gamma: other arrivals have no shape to set")]
    BurstinessWithoutGamma,
    #[error("--turns needs a closed loop (--concurrency) and --endpoint chat")]
    TurnsWithoutChat,
    #[error("a --rate of {0} needs --duration, over which it changes")]
    RampWithoutDuration(RateArg),
    #[error("--exclude-end needs --duration: without it nobody knows when the run will end")]
    EndOfOpenRun,
    #[error("--exclude-start and --exclude-end leave nothing of --duration")]
    NothingCounted,
    #[error(transparent)]
    Arrivals(#[from] ArrivalError),
}

impl LoadArgs {
    pub fn read_trace(&self) -> anyhow::Result<Option<Trace>> {
        self.trace.as_deref().map(Trace::read).transpose()
    }

    /// How requests of run number `run` (from 0) are paced where no trace says it: each run has a seed of its own.
    pub fn pacing(&self, run: u32) -> Result<Pacing, ArgsError> {
        if self.burstiness.is_some() && (self.rate.is_none() || self.arrivals != ArrivalProcess::Gamma) {
            return Err(ArgsError::BurstinessWithoutGamma);
        }
        if self.turns > 1 && (self.rate.is_some() || self.trace.is_some() || self.endpoint != Endpoint::Chat) {
            return Err(ArgsError::TurnsWithoutChat);
        }
        let Some(rate) = self.rate else {
            return Ok(Pacing::Closed { concurrency: self.closed_concurrency() });
        };
        let over = match (rate.is_ramp(), self.duration) {
            (false, _) => Duration::ZERO,
            (true, Some(duration)) => duration,
            (true, None) => return Err(ArgsError::RampWithoutDuration(rate)),
        };
        let rate = Rate { from_per_s: rate.from_per_s, to_per_s: rate.to_per_s, over };
        let arrivals = Box::new(Arrivals::new(
            self.arrivals,
            self.burstiness.unwrap_or(1.0),
            rate,
            self.seed.wrapping_add(run.into()),
        )?);
        Ok(Pacing::Open { arrivals, max_in_flight: self.max_in_flight as usize })
    }

    pub fn extent(&self) -> Extent {
        match self.duration {
            Some(duration) => Extent::Duration(duration),
            None if self.trace.is_some() => Extent::Requests(u64::MAX),
            None => Extent::Requests(self.requests.unwrap_or(DEFAULT_REQUESTS)),
        }
    }

    pub fn window(&self) -> Result<Window, ArgsError> {
        let from = self.exclude_start.unwrap_or_default();
        // Without --exclude-end the answers that the end is waited for count, too.
        let to = match (self.exclude_end, self.duration) {
            (None, _) => None,
            (Some(_), None) => return Err(ArgsError::EndOfOpenRun),
            (Some(end), Some(duration)) => Some(duration.saturating_sub(end)),
        };
        if to.or(self.duration).is_some_and(|end| from >= end) {
            return Err(ArgsError::NothingCounted);
        }
        Ok(Window { from_ns: from.as_nanos() as u64, to_ns: to.map_or(u64::MAX, |to| to.as_nanos() as u64) })
    }

    pub fn warmup(&self) -> u64 {
        self.warmup.unwrap_or(0)
    }

    pub fn max_concurrency(&self) -> usize {
        if self.rate.is_some() || self.trace.is_some() {
            self.max_in_flight as usize
        } else {
            self.closed_concurrency()
        }
    }

    /// Shape of the gaps in vLLM's sense; none for a closed loop and for constant gaps, which have no finite one.
    pub fn shape(&self) -> Option<f64> {
        self.rate.and(match self.arrivals {
            ArrivalProcess::Constant => None,
            ArrivalProcess::Poisson => Some(1.0),
            ArrivalProcess::Gamma => Some(self.burstiness.unwrap_or(1.0)),
        })
    }

    pub fn pacing_in_words(&self) -> String {
        let extent = match self.extent() {
            Extent::Requests(u64::MAX) => "to its end".into(),
            Extent::Requests(requests) => format!("{requests} requests"),
            Extent::Duration(duration) => format!("{duration:?}"),
        };
        if let Some(trace) = &self.trace {
            return format!("trace {}, {extent}", trace.display());
        }
        match (self.rate, self.arrivals) {
            (None, _) if self.turns > 1 => {
                let (chats, turns) = (self.closed_concurrency(), self.turns);
                format!("closed loop, {chats} chats of {turns} turns at a time, {extent}")
            }
            (None, _) => format!("closed loop, {} at a time, {extent}", self.closed_concurrency()),
            (Some(rate), ArrivalProcess::Constant) => format!("open loop, {rate} a second at equal gaps, {extent}"),
            (Some(rate), ArrivalProcess::Poisson) => format!("open loop, {rate} a second (Poisson), {extent}"),
            (Some(rate), ArrivalProcess::Gamma) => {
                let burstiness = self.burstiness.unwrap_or(1.0);
                format!("open loop, {rate} a second (gamma, burstiness {burstiness}), {extent}")
            }
        }
    }

    fn closed_concurrency(&self) -> usize {
        self.concurrency.unwrap_or(DEFAULT_CONCURRENCY) as usize
    }
}

#[cfg(test)]
mod tests;
