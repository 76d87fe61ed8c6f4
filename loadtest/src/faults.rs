//! Faults under load: clients that misbehave as the options of [`FaultArgs`] say, beside the rest of the load.
//!
//! A seeded draw decides which requests are touched. Figures are of the others, which a server must serve as if nothing
//! were; what became of the touched ones is a section of its own in the report.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::args::parse_duration;
use crate::target::is_grpc;

mod aftermath;
mod broken;
mod half_open;
mod kill;
mod report;
mod run;

pub use broken::Breakage;
pub use kill::{KillError, LocalServer};
pub use report::{FaultReport, Finding};
pub use run::FaultRun;

/// Sets the draw of a request's conduct apart from those of its prompt and its lengths.
const CONDUCT_STREAM: u64 = 0x6661_756c_7473;

/// What goes wrong beside the load.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Faults")]
pub struct FaultArgs {
    /// Hang up so many requests so long after they were sent, such as 10%@500ms
    #[arg(long, value_name = "SHARE@TIME", env = "LOOPLANE_LOADTEST_CANCEL")]
    pub cancel: Option<ShareAt>,

    /// Read the answers to so many requests slowly, an event each so often, through a small receive buffer: 5%@100ms
    #[arg(long, value_name = "SHARE@TIME", env = "LOOPLANE_LOADTEST_SLOW_READERS")]
    pub slow_readers: Option<ShareAt>,

    /// Send broken bodies in so many requests, such as 1%: invalid JSON, cut-off JSON, a wrong type
    #[arg(long, value_name = "SHARE", env = "LOOPLANE_LOADTEST_BROKEN", value_parser = parse_percent)]
    pub broken: Option<f64>,

    /// Hold so many connections that sent half of a request, and see when the server closes them
    #[arg(long, value_name = "N", env = "LOOPLANE_LOADTEST_HALF_OPEN",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub half_open: Option<u32>,

    /// Kill the worker of a rank with SIGKILL so long after the start of the run, such as 1@5s; several: 0@5s,1@12s. The
    /// server must be Looplane's and run on this machine
    #[arg(long, value_name = "RANK@TIME", value_delimiter = ',', env = "LOOPLANE_LOADTEST_KILL_WORKER")]
    pub kill_worker: Vec<KillAt>,

    /// Process id of the server whose workers are killed [default: the one that listens at --target's address]
    #[arg(long, value_name = "PID", requires = "kill_worker", env = "LOOPLANE_LOADTEST_SERVER_PID")]
    pub server_pid: Option<u32>,
}

/// Faults that cannot all be had.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FaultError {
    /// A request has one fault at most.
    #[error("--cancel, --slow-readers and --broken ask for {:.0} % of the requests: 100 % at most are there", 100.0 * .0)]
    Shares(f64),
    /// They are of HTTP.
    #[error("--slow-readers, --broken and --half-open are of HTTP: give an http:// target, or leave them out")]
    NeedsHttp,
    /// It would not happen.
    #[error("--kill-worker {0} is not due before the end of --duration")]
    KillAfterEnd(KillAt),
}

/// A share of requests and a time that belongs to each, written `10%@500ms` or `0.1@500ms`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareAt {
    /// Share of requests, over 0 up to 1.
    pub share: f64,
    /// The time.
    pub time: Duration,
}

/// A worker to kill, written `1@5s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KillAt {
    /// Its rank.
    pub rank: u32,
    /// When, from the start of the run.
    pub at: Duration,
}

/// How the client behaves in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Conduct {
    /// As it should.
    #[default]
    Usual,
    /// It hangs up so long after it sent the request.
    HangUp(Duration),
    /// It takes an event of the answer each so often, and no more from the network than it has room for.
    ReadSlowly(Duration),
    /// It sends a body that is wrong.
    SendBroken(Breakage),
}

/// Which requests are touched, and how: the same seed chooses the same ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conducts {
    seed: u64,
    cancel: Option<ShareAt>,
    slow_readers: Option<ShareAt>,
    broken: Option<f64>,
    keeps_texts: bool,
}

impl FaultArgs {
    /// Whether nothing is to go wrong.
    pub fn are_none(&self) -> bool {
        self.cancel.is_none()
            && self.slow_readers.is_none()
            && self.broken.is_none()
            && self.half_open.is_none()
            && self.kill_worker.is_empty()
    }

    /// Whether all of them can be had together, of this target and in a run of this length, if it is known.
    ///
    /// # Errors
    /// [`FaultError`] where not.
    pub fn check(&self, target: &str, duration: Option<Duration>) -> Result<(), FaultError> {
        let needs_http = self.slow_readers.is_some() || self.broken.is_some() || self.half_open.is_some();
        if needs_http && is_grpc(target) {
            return Err(FaultError::NeedsHttp);
        }
        let of = |fault: Option<ShareAt>| fault.map_or(0.0, |fault| fault.share);
        let touched = of(self.cancel) + of(self.slow_readers) + self.broken.unwrap_or(0.0);
        // Shares such as 0.7, 0.2 and 0.1 may add up to all but for a rounding.
        if touched > 1.0 + 1e-9 {
            return Err(FaultError::Shares(touched));
        }
        let late = self.kill_worker.iter().find(|kill| duration.is_some_and(|duration| kill.at >= duration));
        late.map_or(Ok(()), |&kill| Err(FaultError::KillAfterEnd(kill)))
    }

    /// The server at `address` (`HOST:PORT`) whose workers are to be killed, if any are: all of them are there.
    ///
    /// # Errors
    /// [`KillError`] where one of them cannot be found.
    pub async fn victim(&self, address: &str) -> Result<Option<LocalServer>, KillError> {
        if self.kill_worker.is_empty() {
            return Ok(None);
        }
        let server = match self.server_pid {
            Some(pid) => LocalServer::of_pid(pid),
            None => LocalServer::behind(address).await?,
        };
        self.kill_worker.iter().try_for_each(|kill| server.worker(kill.rank).map(|_| ()))?;
        Ok(Some(server))
    }

    /// The conduct of each request of a load of this seed.
    pub fn conducts(&self, seed: u64) -> Conducts {
        let keeps_texts = !self.kill_worker.is_empty();
        Conducts { seed, cancel: self.cancel, slow_readers: self.slow_readers, broken: self.broken, keeps_texts }
    }
}

impl Conducts {
    /// Conduct of request `index`.
    pub fn of(&self, index: u64) -> Conduct {
        let mut rng = StdRng::seed_from_u64(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ CONDUCT_STREAM ^ index);
        let mut left: f64 = rng.random();
        // Whether the draw falls into the next `share` of what there is to draw.
        let mut falls_into = |share: f64| {
            left -= share;
            left < 0.0
        };
        if let Some(cancel) = self.cancel.filter(|cancel| falls_into(cancel.share)) {
            return Conduct::HangUp(cancel.time);
        }
        if let Some(slow) = self.slow_readers.filter(|slow| falls_into(slow.share)) {
            return Conduct::ReadSlowly(slow.time);
        }
        if self.broken.is_some_and(falls_into) {
            return Conduct::SendBroken(Breakage::ALL[rng.random_range(0..Breakage::ALL.len())]);
        }
        Conduct::Usual
    }

    /// Whether records keep what the server answered: to compare it with its answers on another day.
    pub fn keeps_texts(&self) -> bool {
        self.keeps_texts
    }
}

impl Conduct {
    /// Name of the fault in the lines of `--requests-file`.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Conduct::Usual => None,
            Conduct::HangUp(_) => Some("cancel"),
            Conduct::ReadSlowly(_) => Some("slow_reader"),
            Conduct::SendBroken(_) => Some("broken_body"),
        }
    }

    /// What is sent of the JSON object `body`.
    pub fn body(self, body: Bytes) -> Bytes {
        match self {
            Conduct::SendBroken(breakage) => breakage.of(&body),
            _ => body,
        }
    }

    /// Time between two events of the answer that the client takes its time for.
    pub fn pause(self) -> Option<Duration> {
        match self {
            Conduct::ReadSlowly(pause) => Some(pause),
            _ => None,
        }
    }

    /// Returns when the client hangs up, counted from the call.
    pub async fn hangs_up(self) {
        match self {
            Conduct::HangUp(after) => tokio::time::sleep(after).await,
            _ => std::future::pending().await,
        }
    }
}

impl FromStr for ShareAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (share, time) =
            text.split_once('@').ok_or_else(|| format!("'{text}' is not of the form SHARE@TIME, such as 10%@500ms"))?;
        Ok(Self { share: parse_percent(share)?, time: parse_duration(time)? })
    }
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("'{text}' is not of the form RANK@TIME, such as 1@5s");
        let (rank, time) = text.split_once('@').ok_or_else(malformed)?;
        Ok(Self { rank: rank.trim().parse().map_err(|_| malformed())?, at: parse_duration(time)? })
    }
}

impl Display for KillAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{:?}", self.rank, self.at)
    }
}

/// Reads `10%` or `0.1`, more than nothing and at most all.
fn parse_percent(text: &str) -> Result<f64, String> {
    let (number, whole) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().ok().map(|number| number / whole);
    share
        .filter(|&share| share > 0.0 && share <= 1.0)
        .ok_or_else(|| format!("'{text}' is no share: give more than 0 and at most 100%"))
}

#[cfg(test)]
mod tests;
