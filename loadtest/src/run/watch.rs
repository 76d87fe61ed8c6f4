//! The server's own side of a run: what its `/metrics` says before, every second, and after.
//!
//! [`Watch`] asks while the load is on. A server without `/metrics`, or with other names, is measured all the same, and
//! the report says what is not known.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::client::http::Client;
use crate::client::metrics::Snapshot;
use crate::client::record::Clock;

/// Between two questions, until there are too many answers to keep.
pub const PERIOD: Duration = Duration::from_secs(1);
/// Most answers kept: when there are more, every second one is dropped, and the next come at twice the distance.
const MAX_KEPT: usize = 1024;
/// A server under load may take its time, but not the run's.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq)]
pub enum ServerSide {
    Unknown(String),
    Seen(Series),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Seconds of the run, and what was said then; at least one, the first from before the run.
    pub said: Vec<(f64, Snapshot)>,
    pub missed: u64,
    /// How fast all of the server's memory can be read, in GB/s (10^9), where the user knows.
    pub read_limit_gb_s: Option<f64>,
}

/// What a server said before a run, with which the questions begin.
pub struct Before(Result<(Client, Snapshot), String>);

/// Asks a server again and again until the run is over.
pub struct Watch {
    over: CancellationToken,
    task: JoinHandle<ServerSide>,
}

impl Before {
    /// Asks the server at `target` for the first time.
    pub async fn ask(target: &str, api_key: Option<&str>) -> Self {
        // Looplane's gRPC interface has the port of its HTTP one.
        let target = target.replacen("grpc://", "http://", 1);
        Self(match Client::new(&target, api_key, ANSWER_LIMIT) {
            Ok(client) => ask(&client).await.map(|said| (client, said)),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Goes on asking, each `period`, while the run is on whose clock this is.
    pub fn watch(self, period: Duration, clock: Clock, read_limit_gb_s: Option<f64>) -> Watch {
        let over = CancellationToken::new();
        let task = tokio::spawn(follow(self, period, clock, read_limit_gb_s, over.clone()));
        Watch { over, task }
    }
}

impl Watch {
    /// Asks for the last time and returns what was said.
    pub async fn end(self) -> ServerSide {
        self.over.cancel();
        self.task.await.unwrap_or_else(|error| ServerSide::Unknown(format!("reading its /metrics broke off: {error}")))
    }
}

async fn follow(
    Before(before): Before,
    mut period: Duration,
    clock: Clock,
    read_limit_gb_s: Option<f64>,
    over: CancellationToken,
) -> ServerSide {
    let (client, first) = match before {
        Ok(before) => before,
        Err(why) => return ServerSide::Unknown(why),
    };
    let mut series = Series { said: vec![(0.0, first)], missed: 0, read_limit_gb_s };
    let each = |period| {
        let mut due = tokio::time::interval_at(Instant::now() + period, period);
        due.set_missed_tick_behavior(MissedTickBehavior::Skip);
        due
    };
    let mut due = each(period);
    loop {
        // A look that is under way when the run is over is given up for the last one: a server that does not answer
        // must not keep the report waiting twice.
        let look = over.run_until_cancelled(async {
            due.tick().await;
            ask(&client).await
        });
        let (is_last, said) = match look.await {
            Some(said) => (false, said),
            None => (true, ask(&client).await),
        };
        match said {
            Ok(snapshot) => series.said.push((clock.now_ns() as f64 / 1e9, snapshot)),
            Err(_) => series.missed += 1,
        }
        if is_last {
            return ServerSide::Seen(series);
        }
        if series.said.len() > MAX_KEPT {
            series.thin();
            period *= 2;
            due = each(period);
        }
    }
}

impl Series {
    /// Keeps every second answer, and the first.
    fn thin(&mut self) {
        let mut place = 0..;
        self.said.retain(|_| place.next().is_some_and(|place| place % 2 == 0));
    }

    pub fn in_words(&self) -> String {
        let missed = match self.missed {
            0 => String::new(),
            missed => format!(", {missed} more were not answered"),
        };
        format!("read from /metrics with {}'s names, {} times over the run{missed}", self.dialect(), self.said.len())
    }

    pub fn dialect(&self) -> &'static str {
        self.said[0].1.dialect
    }
}

async fn ask(client: &Client) -> Result<Snapshot, String> {
    let text = client.metrics().await.map_err(|failure| format!("it has no /metrics to read ({failure})"))?;
    Snapshot::read(&text).ok_or_else(|| "its /metrics has none of the names of Looplane or vLLM".into())
}

#[cfg(test)]
mod tests;
