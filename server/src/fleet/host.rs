//! The host that joins: dials the front end, again and again, and computes for it while a stream lasts. `session` is
//! what it does meanwhile, `dial` how it gets there.

mod dial;
mod session;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::HostSecrets;
use crate::engine::{EngineHandle, EngineState};
use crate::listener::StopSignal;
use session::{End, session};

/// Before the first attempt that follows another, and the most between two.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// Whom a host joins, and how.
#[derive(Debug, Clone)]
pub struct JoinConfig {
    /// The front end's name or address, which its certificate has.
    pub front: String,
    /// Its port.
    pub port: u16,
    /// What is shown to it, and what it has to show.
    pub secrets: HostSecrets,
    /// As [`super::vocabulary_digest`] has it; empty until the texts of the tokens are known.
    pub vocabulary_digest: String,
    /// From the request to shut down until the stream ends, if sequences still run.
    pub drain: Duration,
}

impl JoinConfig {
    fn address(&self) -> String {
        format!("{}:{}", self.front, self.port)
    }
}

/// Why a host ends by itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// It would be refused again.
    #[error("{front} refuses this host: {why}")]
    Refused {
        /// Address of the front end.
        front: String,
        /// Its words.
        why: String,
    },
    /// Its workers cannot be had.
    #[error("the model cannot be computed: {0}")]
    Engine(String),
}

/// Computes for the front end of `config` with `engine` until `stop`: joins once the model is loaded, and again
/// whenever the stream is lost. What the front end refuses for good ends it; all else is tried again, with pauses that
/// double up to a quarter of a minute.
///
/// # Errors
/// The front end refuses this host for good, or the workers fail for good.
pub async fn join(engine: EngineHandle, config: JoinConfig, stop: StopSignal) -> Result<(), HostError> {
    // It ends with this function.
    let mut followers = JoinSet::new();
    followers.spawn(config.secrets.clone().follow());
    let mut failures = 0;
    loop {
        let ready = tokio::select! {
            ready = until_ready(&engine) => ready,
            () = stop.drain.cancelled() => return Ok(()),
            () = stop.now.cancelled() => return Ok(()),
        };
        ready?;
        let (words, had_joined) = match session(&engine, &config, &stop).await {
            End::Stopped => return Ok(()),
            End::Refused(why) => return Err(HostError::Refused { front: config.address(), why }),
            End::Engine(why) => return Err(HostError::Engine(why)),
            End::Lost { words, had_joined } => (words, had_joined),
        };
        failures = if had_joined { 0 } else { failures + 1 };
        let pause = pause(failures, RandomState::new().hash_one(failures));
        tracing::warn!("{words}; trying again in {:.1} s", pause.as_secs_f64());
        tokio::select! {
            () = sleep(pause) => {}
            () = stop.drain.cancelled() => return Ok(()),
            () = stop.now.cancelled() => return Ok(()),
        }
    }
}

async fn until_ready(engine: &EngineHandle) -> Result<(), HostError> {
    let mut state = engine.watch_state();
    let settled = |state: &EngineState| matches!(state, EngineState::Ready | EngineState::Failed(_));
    let gone = |_| HostError::Engine("it ended without saying why".into());
    if let EngineState::Failed(why) = &*state.wait_for(settled).await.map_err(gone)? {
        return Err(HostError::Engine(why.clone()));
    }
    Ok(())
}

/// Between two attempts, after so many in a row that failed: doubles up to the longest, and of that half to all, so
/// that hosts which lost their front end together do not come back together.
fn pause(failures: u32, random: u64) -> Duration {
    let whole = FIRST_PAUSE.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE);
    whole / 2 + whole.mul_f64((random >> 11) as f64 / (1u64 << 53) as f64 / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_and_differ() {
        for (failures, whole_ms) in [(0, 250), (1, 500), (3, 2000), (5, 8000), (6, 15_000), (u32::MAX, 15_000)] {
            let whole = Duration::from_millis(whole_ms);
            assert_eq!(pause(failures, 0), whole / 2);
            let longest = pause(failures, u64::MAX);
            assert!(longest <= whole && longest > whole.mul_f64(0.99), "{longest:?}");
        }
    }
}
