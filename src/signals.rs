//! What signals do: end the server, as the end of the process that started it does, or restart its replicas.

use std::{future::pending, io, time::Duration};

use looplane_server::{engine::EngineHandle, listener::StopSignal};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT and SIGTERM of this process, which no longer end it by themselves.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Takes the signals from now on.
    ///
    /// # Errors
    /// The system refuses.
    pub fn take() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// The first signal drains, the second ends at once. So does, as a first one, the end of standard input if it is
    /// to.
    pub async fn follow(mut self, until_stdin_closes: bool, stop: StopSignal) {
        let parent_ended = async {
            match until_stdin_closes {
                true => looplane_loadtest::stdin_closed().await,
                false => pending().await,
            }
        };
        tokio::select! {
            () = self.next() => {}
            () = parent_ended => {}
        }
        tracing::info!("stopping: running requests may end; a second signal ends them at once");
        stop.drain.cancel();
        self.next().await;
        stop.now.cancel();
    }
}

/// SIGUSR1, at which all replicas are restarted, one after the other. (SIGHUP comes where a terminal closes, too, and
/// ends the server then.)
pub struct RestartSignal(Signal);

impl RestartSignal {
    /// Takes the signal from now on.
    ///
    /// # Errors
    /// The system refuses.
    pub fn take() -> io::Result<Self> {
        Ok(Self(signal(SignalKind::user_defined1())?))
    }

    /// Restarts the replicas at each signal; their sequences have `limit` to end. A signal that comes meanwhile is one
    /// for the next time.
    pub async fn follow(mut self, engine: EngineHandle, limit: Duration) {
        while self.0.recv().await.is_some() {
            tracing::info!("all replicas are restarted, one after the other");
            match engine.restart_all(limit).await {
                Ok(()) => tracing::info!("all replicas have been restarted"),
                Err(error) => tracing::warn!("the restart of all replicas has stopped: {error}"),
            }
        }
    }
}
