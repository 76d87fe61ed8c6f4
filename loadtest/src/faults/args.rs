//! Options of faults under load, and what they mean together.
//!
//! A seeded draw decides which requests are touched. Figures are of the others, which a server must serve as if nothing
//! were; what became of the touched ones is a section of its own in the report.

use std::time::Duration;

use crate::client::target::is_grpc;
use crate::faults::kill::{KillAt, KillError, LocalServer};
use crate::load::conduct::{Conducts, ShareAt, parse_percent};

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

    /// Kill the worker of a rank with SIGKILL so long after the start of the run, such as 1@5s; several: 0@5s,1@12s.
    /// The server must be Looplane's and run on this machine
    #[arg(long, value_name = "RANK@TIME", value_delimiter = ',', env = "LOOPLANE_LOADTEST_KILL_WORKER")]
    pub kill_worker: Vec<KillAt>,

    /// Process id of the server whose workers are killed [default: the one that listens at --target's address]
    #[arg(long, value_name = "PID", requires = "kill_worker", env = "LOOPLANE_LOADTEST_SERVER_PID")]
    pub server_pid: Option<u32>,
}

/// Faults that cannot all be had.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FaultError {
    #[error("--cancel, --slow-readers and --broken ask for {:.0} % of the requests: 100 % at most are there", 100.0 * .0)]
    Shares(f64),
    #[error("--slow-readers, --broken and --half-open are of HTTP: give an http:// target, or leave them out")]
    NeedsHttp,
    #[error("--kill-worker {0} is not due before the end of --duration")]
    KillAfterEnd(KillAt),
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
