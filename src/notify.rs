//! What the service manager is told (`sd_notify(3)`): what the server does, that it serves, that it stops, and, where a
//! watchdog waits for it, that the task which decides everything still takes its turns.
//!
//! Without `NOTIFY_SOCKET`, which systemd sets for services of `Type=notify`, nothing is.

use std::{
    env,
    ffi::OsStr,
    future::pending,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram as StdDatagram},
        },
    },
    process,
    time::Duration,
};

use looplane_server::{
    engine::{EngineHandle, EngineState},
    frontend::in_words,
    listener::{ServeError, StopSignal},
};
use tokio::{net::UnixDatagram, time::sleep};

/// Who started this process, and wants to know how it is.
pub struct ServiceManager {
    socket: UnixDatagram,
    /// Between two signs of life; none where nobody waits for them.
    period: Option<Duration>,
}

impl ServiceManager {
    /// That of the environment, if there is one. One that cannot be reached is none: the server serves without it.
    pub fn of_environment() -> Option<Self> {
        let address = env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty())?;
        let socket = match connect(&address) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!("the service manager is not told anything: NOTIFY_SOCKET is {address:?}: {error}");
                return None;
            }
        };
        let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(process::id()));
        let limit = number("WATCHDOG_USEC").filter(|limit| is_ours && *limit > 0);
        // Twice within it, as sd_watchdog_enabled(3) has it.
        let period = limit.map(|limit| Duration::from_micros(limit / 2));
        Some(Self { socket, period })
    }

    /// Tells all there is to tell, until the engine has ended; then it is there for last words.
    pub async fn keep_told(self, engine: EngineHandle, stop: StopSignal) -> Self {
        let stopping = async {
            stop.drain.cancelled().await;
            self.tell("STOPPING=1").await;
            pending().await
        };
        let life = async {
            if let Some(period) = self.period {
                while engine.ping().await.is_ok() {
                    self.tell("WATCHDOG=1").await;
                    sleep(period).await;
                }
            }
            pending().await
        };
        tokio::select! {
            () = self.tell_states(&engine) => {}
            () = stopping => {}
            () = life => {}
        }
        self
    }

    /// Tells why the server ends, which nobody asked it to.
    pub async fn last_words(&self, why: &ServeError) {
        self.tell(&status(&why.to_string())).await;
    }

    /// Tells every state up to the engine's last.
    async fn tell_states(&self, engine: &EngineHandle) {
        let mut state = engine.watch_state();
        loop {
            let (is_ready, words) = {
                let state = state.borrow_and_update();
                (*state == EngineState::Ready, in_words(&state))
            };
            let status = status(&words);
            self.tell(&if is_ready { format!("READY=1\n{status}") } else { status }).await;
            if state.changed().await.is_err() {
                return;
            }
        }
    }

    async fn tell(&self, message: &str) {
        if let Err(error) = self.socket.send(message.as_bytes()).await {
            tracing::debug!("the service manager was not told {message:?}: {error}");
        }
    }
}

/// A line ends a variable.
fn status(words: &str) -> String {
    format!("STATUS={}", words.replace('\n', " "))
}

/// The socket's name is a path, or behind an @ one that is no file.
fn connect(address: &OsStr) -> io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    let socket = StdDatagram::unbound()?;
    socket.connect_addr(&address)?;
    socket.set_nonblocking(true)?;
    UnixDatagram::from_std(socket)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use looplane_server::engine::Command;
    use tokio::sync::{mpsc, watch};

    use super::*;

    #[tokio::test]
    async fn signs_of_life_end_where_the_engine_takes_no_turns() {
        let (ours, socket) = UnixDatagram::pair().expect("the system has sockets");
        let manager = ServiceManager { socket, period: Some(Duration::from_millis(1)) };
        let (commands, mut asked) = mpsc::unbounded_channel();
        let (_state, state) = watch::channel(EngineState::Loading("reading\nweights".into()));
        let (_model, model) = watch::channel(None);
        let engine = EngineHandle::new(commands, state, model, Arc::default());
        tokio::spawn(manager.keep_told(engine, StopSignal::default()));

        let mut buffer = [0; 256];
        let mut next = async || {
            let length = ours.recv(&mut buffer).await.expect("a message");
            String::from_utf8(buffer[..length].to_vec()).expect("UTF-8")
        };
        assert_eq!(next().await, "STATUS=loading the model (reading weights)");
        for _ in 0..2 {
            let Some(Command::Ping(reply)) = asked.recv().await else { panic!("a ping was expected") };
            reply.send(()).expect("somebody waits");
            assert_eq!(next().await, "WATCHDOG=1");
        }
        // An answer that does not come is waited for, and nothing is told.
        let unanswered = asked.recv().await;
        assert!(matches!(unanswered, Some(Command::Ping(_))), "{unanswered:?}");
        assert!(tokio::time::timeout(Duration::from_millis(50), next()).await.is_err());
    }
}
