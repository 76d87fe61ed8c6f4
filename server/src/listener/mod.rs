//! Runs the front end on a socket until it is told to stop. The caller owns the socket, the engine and the stop signal.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use tokio::{
    net::TcpListener,
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

mod connection;
mod places;
mod response;
mod tls;

pub use connection::ClientLimits;
pub use tls::Tls;

use connection::CLOSE_LIMIT;
use places::Places;

use crate::{
    drafts::DraftReport,
    engine::{EngineHandle, EngineState},
    frontend::{Frontend, LargeWork},
    grpc,
    http::{self, Access, App, ResponseStore, Settings},
    metrics::FrontMetrics,
    text::Text,
    trace::{Exporting, Otlp},
    upload::Uploads,
};

/// Pause after a failed accept, such as one for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The same, where an idle connection gives way.
const CLOSE_PAUSE: Duration = Duration::from_millis(1);
/// The same warning is given no more often than this.
const WARN_PAUSE: Duration = Duration::from_secs(10);

/// How the front end serves.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The name that requests call the model by.
    pub model_id: String,
    /// What answers tell of drafts, of which a step has so many at most.
    pub draft_report: (DraftReport, u32),
    /// Who may ask for what.
    pub access: Access,
    /// The certificate, where TLS is spoken.
    pub tls: Option<Tls>,
    /// Connections open at one time. Beyond it idle ones give way; where none is idle, only probes are answered.
    pub max_connections: usize,
    /// Requests for text served at one time; more are answered with 429.
    pub max_concurrent_requests: usize,
    /// Bytes of one request's body.
    pub max_body_bytes: usize,
    /// Responses that are kept; 0: none.
    pub response_store: usize,
    /// How long clients may take.
    pub client_limits: ClientLimits,
    /// How large bodies and texts share this machine's cores.
    pub large_work: LargeWork,
    /// Where traces go, if anywhere.
    pub otlp: Option<Otlp>,
    /// Running requests have so long to end once `StopSignal::drain` is set.
    pub drain: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            model_id: String::new(),
            draft_report: (DraftReport::None, 0),
            access: Access::default(),
            tls: None,
            max_connections: 4096,
            max_concurrent_requests: 1024,
            max_body_bytes: 8 << 20,
            response_store: 1000,
            client_limits: ClientLimits::default(),
            large_work: LargeWork::Shares,
            otlp: None,
            drain: Duration::from_secs(30),
        }
    }
}

impl ServeOptions {
    /// Says what whoever can reach the address may do, where nobody is asked for a key. `option`: says where to listen.
    fn warn_of_strangers(&self, address: SocketAddr, may: &str, option: &str) {
        if self.access.keys.is_none() && !address.ip().is_loopback() {
            tracing::warn!(
                "whoever can reach {address} may {may}: ask for keys (--api-key-file, --api-key), or listen on \
                 127.0.0.1 only ({option})"
            );
        }
    }

    /// What clients may know of them.
    fn settings(&self) -> Settings {
        Settings {
            max_connections: self.max_connections,
            max_concurrent_requests: self.max_concurrent_requests,
            max_body_bytes: self.max_body_bytes,
            response_store: self.response_store,
            drain_seconds: self.drain.as_secs(),
            tls: self.tls.is_some(),
            api_keys: self.access.keys.is_some(),
        }
    }
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
    let address = listener.local_addr()?;
    options.warn_of_strangers(address, "use this server", "--host");
    let drain = options.drain;
    let service = Service::new(address, engine, text, options, |app| {
        let grpc = grpc::router(app.frontend.clone());
        http::router(app, grpc)
    });
    let ended = tokio::select! {
        () = service.connections.accept(listener) => Ok(()),
        ended = until_stopped(&service.frontend, drain, &stop) => ended,
    };
    service.close().await;
    ended
}

/// Serves `/metrics` and health on `listener`, of a host that computes for another front end, until `stop.now`. From
/// `stop.drain` on it says that it shuts down.
///
/// # Errors
/// If the socket fails.
pub async fn watch(
    listener: TcpListener,
    engine: EngineHandle,
    text: Arc<Text>,
    options: ServeOptions,
    stop: StopSignal,
) -> Result<(), ServeError> {
    let address = listener.local_addr()?;
    options.warn_of_strangers(address, "read this host's metrics", "--metrics-listen");
    let service = Service::new(address, engine, text, options, http::probes_alone);
    tokio::select! {
        () = service.connections.accept(listener) => {}
        () = stop.now.cancelled() => {}
        () = async {
            stop.drain.cancelled().await;
            service.frontend.draining.cancel();
            std::future::pending().await
        } => {}
    }
    service.close().await;
    Ok(())
}

/// A front end with its connections, and the tasks that keep it true to its files.
struct Service {
    frontend: Arc<Frontend>,
    connections: Connections,
    all_closed: mpsc::Receiver<()>,
    exporting: Option<Exporting>,
    _followers: JoinSet<()>,
}

impl Service {
    fn new(
        address: SocketAddr,
        engine: EngineHandle,
        text: Arc<Text>,
        options: ServeOptions,
        router: impl FnOnce(App) -> Router,
    ) -> Self {
        let (is_local, base_url) = (address.ip().is_loopback(), base_url(address, options.tls.is_some()).into());
        let settings = options.settings();
        let uploads = Uploads::new(options.max_body_bytes, options.client_limits.body);
        let ServeOptions { model_id, draft_report, max_concurrent_requests, access, tls, response_store, otlp, .. } =
            options;
        let mut frontend =
            Frontend::new(engine, text, model_id, draft_report, max_concurrent_requests, uploads, options.large_work);
        let exporting = otlp.map(|otlp| {
            let (traces, exporting) = otlp.start(frontend.model_id.clone(), frontend.metrics.spans.clone());
            frontend.traces = Some(traces);
            exporting
        });
        let frontend = Arc::new(frontend);
        let mut followers = JoinSet::new();
        if let Some(keys) = &access.keys {
            followers.spawn(keys.clone().follow());
        }
        if let Some(tls) = &tls {
            followers.spawn(tls.clone().follow());
        }
        let app = App::new(frontend.clone(), base_url, is_local, access, ResponseStore::new(response_store), settings);
        let (open, all_closed) = mpsc::channel(1);
        let connections = Connections {
            router: router(app),
            tls,
            limits: options.client_limits,
            places: Arc::new(Places::new(options.max_connections)),
            metrics: frontend.metrics.clone(),
            open,
            finish: CancellationToken::new(),
            abort: CancellationToken::new(),
        };
        Self { frontend, connections, all_closed, exporting, _followers: followers }
    }

    /// Ends what still runs, and all connections.
    async fn close(self) {
        self.frontend.draining.cancel();
        self.frontend.closing.cancel();
        self.connections.close(self.all_closed).await;
        if let Some(exporting) = self.exporting {
            exporting.finish().await;
        }
    }
}

/// `http://` or `https://`, and where clients on this machine reach the address.
pub fn base_url(address: SocketAddr, tls: bool) -> String {
    let scheme = if tls { "https" } else { "http" };
    match address.ip().is_unspecified() {
        true => format!("{scheme}://localhost:{}", address.port()),
        false => format!("{scheme}://{address}"),
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

/// When a warning was last given.
#[derive(Default)]
struct Seldom(Option<Instant>);

impl Seldom {
    fn say(&mut self, warn: impl FnOnce()) {
        if self.0.is_none_or(|last| last.elapsed() > WARN_PAUSE) {
            warn();
            self.0 = Some(Instant::now());
        }
    }
}

struct Connections {
    router: Router,
    tls: Option<Tls>,
    limits: ClientLimits,
    places: Arc<Places>,
    metrics: FrontMetrics,
    /// Held by each connection while it is open; nothing is sent.
    open: mpsc::Sender<()>,
    /// Set: answer what has been asked, then close.
    finish: CancellationToken,
    /// Set: close.
    abort: CancellationToken,
}

impl Connections {
    async fn accept(&self, listener: TcpListener) {
        let (mut no_accept, mut no_place) = (Seldom::default(), Seldom::default());
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    no_accept.say(|| tracing::warn!("no connection can be accepted: {error}"));
                    // It may be file descriptors that are wanting. That of an idle connection is free in a moment.
                    sleep(if self.places.give_way() { CLOSE_PAUSE } else { ACCEPT_PAUSE }).await;
                    continue;
                }
            };
            let place = self.places.take();
            if place.connection.reserved {
                no_place.say(|| tracing::warn!("no connection is idle: only probes are answered (--max-connections)"));
            }
            let (tls, router, limits) = (self.tls.clone(), self.router.clone(), self.limits);
            let (connection, ends) = (place.connection.clone(), (self.finish.clone(), self.abort.clone()));
            let held = (place, self.metrics.connected(), self.open.clone());
            tokio::spawn(async move {
                connection::serve(stream, tls, router, connection, limits, ends).await;
                drop(held);
            });
        }
    }

    async fn close(self, mut all_closed: mpsc::Receiver<()>) {
        let Self { open, finish, abort, .. } = self;
        drop(open);
        finish.cancel();
        if timeout(CLOSE_LIMIT, all_closed.recv()).await.is_err() {
            abort.cancel();
            all_closed.recv().await;
        }
    }
}
