//! New workers for one replica at a time, as an operator asks for them, while the others serve.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{Command, EngineHandle, EngineState};

/// The request for new workers of a replica.
#[derive(Debug)]
pub struct Restart {
    /// Whose.
    pub replica: usize,
    /// Its sequences have so long to end; then the others go on with them.
    pub limit: Duration,
    /// It is to be, though no other replica is ready: requests wait until it is back.
    pub even_if_last: bool,
    /// Answered once: it has begun, or why it has not.
    pub reply: oneshot::Sender<Result<(), RestartError>>,
    /// Kept until the new workers are up.
    pub under_way: UnderWay,
}

/// Kept while a replica restarts. Whoever waits for the end learns of it as this is dropped.
#[derive(Debug, Default)]
pub struct UnderWay(CancellationToken);

impl UnderWay {
    /// Cancelled at the end: new workers are up, or cannot be had, or the server shuts down.
    pub fn over(&self) -> CancellationToken {
        self.0.clone()
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Why a replica is not restarted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestartError {
    /// Replicas are numbered from 0.
    #[error("there is no replica {asked}: the last is replica {last}; GET /replicas lists them")]
    NoSuchReplica {
        /// The number that was asked for.
        asked: usize,
        /// The largest that there is.
        last: usize,
    },
    /// One at a time.
    #[error("replica {replica} is being restarted, and one is at a time: GET /replicas tells when it is ready again")]
    UnderWay {
        /// That one.
        replica: usize,
    },
    /// It computes nothing now: its workers are being started anyway, or cannot be had.
    #[error("replica {replica} is not ready, so that it cannot be restarted: GET /replicas tells how it is")]
    NotReady {
        /// Its number.
        replica: usize,
    },
    /// Nothing would be computed meanwhile.
    #[error(
        "no replica but {replica} is ready, and requests would wait until it is back: wait for another to be ready, or \
         set even_if_last to true"
    )]
    LastReady {
        /// Its number.
        replica: usize,
    },
    /// Its workers are another machine's.
    #[error("replica {replica} is computed by a host that joined: restart it there")]
    OfAHost {
        /// Its number.
        replica: usize,
    },
    /// The server ends.
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl EngineHandle {
    /// Has the workers of a replica replaced: it takes no new sequences; those at hand have `limit` to end, and then go
    /// on elsewhere; then its workers are ended and started again. Returns when that has begun, with what is cancelled
    /// when it is over.
    ///
    /// # Errors
    /// Says why it is not to be: see [`RestartError`].
    pub async fn restart(
        &self,
        replica: usize,
        limit: Duration,
        even_if_last: bool,
    ) -> Result<CancellationToken, RestartError> {
        let last = self.replicas().len() - 1;
        if replica > last {
            return Err(RestartError::NoSuchReplica { asked: replica, last });
        }
        let (reply, answer) = oneshot::channel();
        let under_way = UnderWay::default();
        let over = under_way.over();
        let restart = Restart { replica, limit, even_if_last, reply, under_way };
        self.commands().send(Command::Restart(restart)).map_err(|_| RestartError::ShuttingDown)?;
        answer.await.unwrap_or(Err(RestartError::ShuttingDown)).map(|()| over)
    }

    /// Restarts all replicas but those of hosts that joined, each once the one before is ready again.
    ///
    /// # Errors
    /// As [`EngineHandle::restart`], of the first that is not restarted, or is not ready afterwards. Those behind it
    /// are left alone.
    pub async fn restart_all(&self, limit: Duration) -> Result<(), RestartError> {
        for replica in 0..self.replicas().len() {
            match self.restart(replica, limit, false).await {
                Err(RestartError::OfAHost { .. }) => continue,
                begun => begun?.cancelled().await,
            }
            if *self.replicas()[replica].state.borrow() != EngineState::Ready {
                return Err(RestartError::NotReady { replica });
            }
        }
        Ok(())
    }
}
