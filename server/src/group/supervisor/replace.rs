//! New workers on request: the group takes no new sequences, those at hand have until a deadline to end, and then it is
//! ended and started again. What it has not finished goes to other replicas, or waits. No loss is counted for it.

use tokio::time::Instant;

use super::super::start::Link;
use super::super::workers::Workers;
use super::Supervisor;
use crate::engine::{EngineState, Restart, RestartError, UnderWay};

/// What is being done, in words.
const ON_REQUEST: &str = "restarting on request";

/// A request for new workers, until they are up.
pub(super) struct Replacement {
    /// When sequences that still run are taken from the group.
    pub(super) until: Instant,
    /// For whoever waits for the end.
    _under_way: UnderWay,
}

impl Supervisor {
    /// Begins to end the group, unless there is none that takes plans, or nobody else could serve.
    pub(super) fn replace(&mut self, restart: Restart) {
        let Restart { limit, even_if_last, reply, under_way, .. } = restart;
        let replica = self.config.replica as usize;
        let is_ready = *self.channels.state.borrow() == EngineState::Ready;
        let begun = match (&self.replacement, is_ready) {
            (Some(_), _) => Err(RestartError::UnderWay { replica }),
            (None, false) => Err(RestartError::NotReady { replica }),
            (None, true) if !even_if_last => Err(RestartError::LastReady { replica }),
            (None, true) => Ok(()),
        };
        if begun.is_ok() {
            let (count, limit_s) = (self.delivery.sequences(), limit.as_secs_f64());
            tracing::info!("{ON_REQUEST}: {count} sequences have {limit_s} s to end, or to go on elsewhere");
            self.delivery.group_ending();
            self.replacement = Some(Replacement { until: Instant::now() + limit, _under_way: under_way });
            self.show_up();
        }
        // Whoever asked may have gone.
        let _ = reply.send(begun);
    }

    /// A group that is up says that it is ready, or that it is about to be replaced.
    pub(super) fn show_up(&self) {
        self.show(match &self.replacement {
            None => EngineState::Ready,
            Some(_) => EngineState::Recovering(format!("{ON_REQUEST}; sequences at hand are ending")),
        });
    }

    /// The group is to be replaced, and everything that it has begun has ended.
    pub(super) fn may_be_replaced(&self) -> bool {
        self.replacement.is_some() && self.delivery.is_at_rest()
    }

    /// Ends the group.
    pub(super) async fn end_replaced(&mut self, link: Link, workers: Workers) {
        // First of all, so that what is left goes on elsewhere while the workers end.
        self.delivery.group_ended();
        self.lost = Some(ON_REQUEST.into());
        self.show_start()("ending the workers".into());
        self.end(link, workers).await;
        tracing::info!("the workers have ended on request and are started again");
    }
}
