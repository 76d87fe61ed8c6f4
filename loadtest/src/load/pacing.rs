//! How requests are paced, and when a load is over.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Duration;

/// A rate on the command line: `5`, or `1..20` for one that changes over the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateArg {
    /// At the start, in requests a second.
    pub from_per_s: f64,
    pub to_per_s: f64,
}

/// When requests are due, counted from the start of the run, never decreasing. The run ends with it.
pub type Schedule = Box<dyn Iterator<Item = Duration> + Send>;

pub enum Pacing {
    /// So many at a time, each slot sending its next request when the last one ended.
    Closed { concurrency: usize },
    Open {
        arrivals: Schedule,
        /// Most requests in flight: what bounds the sockets and memory of the load tester.
        max_in_flight: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Extent {
    Requests(u64),
    /// With the last request due before this time; those in flight are waited for.
    Duration(Duration),
}

impl RateArg {
    pub fn mean_per_s(self) -> f64 {
        (self.from_per_s + self.to_per_s) / 2.0
    }

    pub fn is_ramp(self) -> bool {
        self.from_per_s != self.to_per_s
    }
}

impl FromStr for RateArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<f64>().map_err(|_| format!("'{text}' is no number"));
        let (from, to) = text.split_once("..").unwrap_or((text, text));
        Ok(Self { from_per_s: number(from)?, to_per_s: number(to)? })
    }
}

impl Display for RateArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_ramp() {
            true => write!(f, "{}..{}", self.from_per_s, self.to_per_s),
            false => write!(f, "{}", self.from_per_s),
        }
    }
}

impl Extent {
    /// The same, where there are only so many requests to send.
    pub fn at_most(self, requests: u64) -> Self {
        match self {
            Extent::Requests(limit) => Extent::Requests(limit.min(requests)),
            Extent::Duration(_) => self,
        }
    }

    /// Whether the request number `offset` (from 0) that is due at `due` belongs to the run.
    pub fn includes(self, offset: u64, due: Duration) -> bool {
        match self {
            Extent::Requests(requests) => offset < requests,
            Extent::Duration(duration) => due < duration,
        }
    }
}
