//! Faults under load: clients that misbehave as the options of [`FaultArgs`] say, beside the rest of the load.
//!
//! A seeded draw decides which requests are touched. Figures are of the others, which a server must serve as if nothing
//! were; what became of the touched ones is a section of its own in the report.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::args::parse_duration;

mod report;
mod run;

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
}

/// A share of requests and a time that belongs to each, written `10%@500ms` or `0.1@500ms`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareAt {
    /// Share of requests, over 0 up to 1.
    pub share: f64,
    /// The time.
    pub time: Duration,
}

/// How the client behaves in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Conduct {
    /// As it should.
    #[default]
    Usual,
    /// It hangs up so long after it sent the request.
    HangUp(Duration),
}

/// Which requests are touched, and how: the same seed chooses the same ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conducts {
    seed: u64,
    cancel: Option<ShareAt>,
}

impl FaultArgs {
    /// Whether nothing is to go wrong.
    pub fn are_none(&self) -> bool {
        self.cancel.is_none()
    }

    /// The conduct of each request of a load of this seed.
    pub fn conducts(&self, seed: u64) -> Conducts {
        Conducts { seed, cancel: self.cancel }
    }
}

impl Conducts {
    /// Conduct of request `index`.
    pub fn of(&self, index: u64) -> Conduct {
        let mut rng = StdRng::seed_from_u64(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ CONDUCT_STREAM ^ index);
        let drawn: f64 = rng.random();
        match self.cancel {
            Some(cancel) if drawn < cancel.share => Conduct::HangUp(cancel.time),
            _ => Conduct::Usual,
        }
    }
}

impl Conduct {
    /// Name of the fault in the lines of `--requests-file`.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Conduct::Usual => None,
            Conduct::HangUp(_) => Some("cancel"),
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

impl Display for ShareAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%@{:?}", 100.0 * self.share, self.time)
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
