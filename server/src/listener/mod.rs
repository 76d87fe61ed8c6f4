//! Runs the front end on a socket until it is told to stop. The caller owns the socket, the engine and the stop signal.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use rustix::net::sockopt;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    engine::{EngineHandle, EngineState},
    frontend::Frontend,
    grpc,
    http::{self, App},
    text::Text,
};

/// A client has so long to send its first byte and, over HTTP/1, each request's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Concurrent requests of one HTTP/2 connection.
const MAX_STREAMS: u32 = 256;
/// An idle HTTP/2 connection is asked after so long whether it still lives.
const HTTP2_PING: Duration = Duration::from_secs(30);
/// A client that takes no bytes, or does not acknowledge them, for so long is gone, and its requests are cancelled.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// Keepalive probes of an idle connection: the first after so long, so many at most, so far apart.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBES: u32 = 3;
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// At the end, connections have so long to send what is written.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed accept, such as one for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Failed accepts are told no more often than this.
const WARN_PAUSE: Duration = Duration::from_secs(10);

/// How the front end serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeOptions {
    /// The name that requests call the model by.
    pub model_id: String,
    /// Connections open at one time; more wait to be accepted.
    pub max_connections: usize,
    /// Requests for text served at one time; more are answered with 429.
    pub max_concurrent_requests: usize,
    /// Bytes of one request's body.
    pub max_body_bytes: usize,
    /// Running requests have so long to end once `StopSignal::drain` is set.
    pub drain: Duration,
}

/// How the caller ends the service.
#[derive(Debug, Clone, Default)]
pub struct StopSignal {
    /// Take no new requests, let those that run end, within `ServeOptions::drain`.
    pub drain: CancellationToken,
    /// End running requests too.
    pub now: CancellationToken,
}

/// Why serving ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket is not usable.
    #[error("the listening socket failed: {0}")]
    Socket(#[from] std::io::Error),
    /// The model cannot be served any more.
    #[error("the model cannot be served: {0}")]
    Engine(String),
}

/// Serves HTTP and gRPC on `listener` until `stop`. While it drains, health is still answered and new requests are
/// refused. It returns when every connection is closed.
///
/// # Errors
/// If the engine fails for good, or the socket does.
pub async fn run(
    listener: TcpListener,
    engine: EngineHandle,
    text: Arc<Text>,
    options: ServeOptions,
    stop: StopSignal,
) -> Result<(), ServeError> {
    let base_url = base_url(listener.local_addr()?).into();
    let frontend = Arc::new(Frontend::new(engine, text, options.model_id, options.max_concurrent_requests));
    let grpc = grpc::router(frontend.clone(), options.max_body_bytes);
    let app = App { frontend: frontend.clone(), max_body_bytes: options.max_body_bytes, base_url };
    let connections = Connections {
        router: http::router(app, grpc),
        open: Arc::new(Semaphore::new(options.max_connections)),
        max_open: options.max_connections,
        finish: CancellationToken::new(),
        abort: CancellationToken::new(),
    };

    let ended = tokio::select! {
        () = connections.accept(listener) => Ok(()),
        ended = until_stopped(&frontend, options.drain, &stop) => ended,
    };
    frontend.draining.cancel();
    frontend.closing.cancel();
    connections.close().await;
    ended
}

/// `http://` and where clients on this machine reach the address.
pub fn base_url(address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("http://localhost:{}", address.port()),
        false => format!("http://{address}"),
    }
}

/// Returns once no request is left to wait for.
async fn until_stopped(frontend: &Frontend, drain: Duration, stop: &StopSignal) -> Result<(), ServeError> {
    tokio::select! {
        () = stop.drain.cancelled() => {}
        () = stop.now.cancelled() => {}
        why = engine_failed(&frontend.engine) => return Err(ServeError::Engine(why)),
    }
    frontend.draining.cancel();
    tokio::select! {
        () = frontend.idle() => Ok(()),
        () = stop.now.cancelled() => Ok(()),
        () = sleep(drain) => {
            tracing::warn!(drain_s = drain.as_secs(), "requests still run after the drain time and are ended");
            Ok(())
        }
        why = engine_failed(&frontend.engine) => Err(ServeError::Engine(why)),
    }
}

async fn engine_failed(engine: &EngineHandle) -> String {
    let mut state = engine.watch_state();
    match state.wait_for(|state| matches!(state, EngineState::Failed(_))).await {
        Ok(state) => match &*state {
            EngineState::Failed(why) => why.clone(),
            other => unreachable!("waited for Failed, got {other:?}"),
        },
        Err(_) => "it ended without saying why".into(),
    }
}

struct Connections {
    router: Router,
    /// A place for each connection, held while it is open.
    open: Arc<Semaphore>,
    max_open: usize,
    /// Set: answer what has been asked, then close.
    finish: CancellationToken,
    /// Set: close.
    abort: CancellationToken,
}

impl Connections {
    async fn accept(&self, listener: TcpListener) {
        let mut warned: Option<Instant> = None;
        loop {
            let place = self.open.clone().acquire_owned().await.expect("nobody closes this semaphore");
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if warned.is_none_or(|at| at.elapsed() > WARN_PAUSE) {
                        tracing::warn!("no connection can be accepted: {error}");
                        warned = Some(Instant::now());
                    }
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let connection = serve_connection(stream, self.router.clone(), self.finish.clone());
            let abort = self.abort.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = connection => {}
                    () = abort.cancelled() => {}
                }
                drop(place);
            });
        }
    }

    async fn close(&self) {
        self.finish.cancel();
        if timeout(CLOSE_TIMEOUT, self.all_closed()).await.is_err() {
            self.abort.cancel();
            self.all_closed().await;
        }
    }

    async fn all_closed(&self) {
        let all = self.open.acquire_many(self.max_open as u32).await;
        drop(all.expect("nobody closes this semaphore"));
    }
}

/// One connection, to its end. Its errors are the client's: gone, or not speaking HTTP.
async fn serve_connection(stream: TcpStream, router: Router, finish: CancellationToken) {
    if let Err(error) = tune(&stream) {
        tracing::debug!(%error, "a connection ended before its first byte");
        return;
    }
    tokio::select! {
        first_byte = timeout(HEADER_TIMEOUT, stream.readable()) => match first_byte {
            Ok(Ok(())) => {}
            _ => return,
        },
        () = finish.cancelled() => return,
    }
    let mut builder = Builder::new(TokioExecutor::new());
    // Without `half_close`: a client that is gone and one that only sends no more look alike until something is written to
    // them, which a response that is not streamed is only at its end. A client must keep its side open to be answered.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(MAX_STREAMS).keep_alive_interval(HTTP2_PING);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = finish.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
}

fn tune(stream: &TcpStream) -> std::io::Result<()> {
    // A token is one small write, and must not wait for the next.
    stream.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(stream, SEND_TIMEOUT.as_millis() as u32)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}
