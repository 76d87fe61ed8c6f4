//! When a server ends: signals, and the end of the process that started it.

use std::{future::pending, io};

use looplane_server::listener::StopSignal;
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
