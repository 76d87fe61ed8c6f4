//! Clients that misbehave: which requests they spoil, by a seeded draw, and how.

use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::load::broken::Breakage;
use crate::text::parse_duration;

/// Sets the draw of a request's conduct apart from those of its prompt and its lengths.
const CONDUCT_STREAM: u64 = 0x6661_756c_7473;

/// A share of requests and a time that belongs to each, written `10%@500ms` or `0.1@500ms`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareAt {
    /// Share of requests, over 0 up to 1.
    pub share: f64,
    pub time: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Conduct {
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
    pub seed: u64,
    pub cancel: Option<ShareAt>,
    pub slow_readers: Option<ShareAt>,
    pub broken: Option<f64>,
    /// Whether records keep what the server answered: to compare it with its answers on another day.
    pub keeps_texts: bool,
}

impl Conducts {
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

/// Reads `10%` or `0.1`, more than nothing and at most all.
pub fn parse_percent(text: &str) -> Result<f64, String> {
    let (number, whole) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().ok().map(|number| number / whole);
    share
        .filter(|&share| share > 0.0 && share <= 1.0)
        .ok_or_else(|| format!("'{text}' is no share: give more than 0 and at most 100%"))
}
