//! The front end over real sockets, with an engine that the test plays.

mod anthropic;
mod client;
mod conform;
mod connections;
mod deadlines;
mod engine;
mod generation;
mod grpc;
mod hostile;
mod http2;
mod keys;
mod lifecycle;
mod log;
mod machine;
mod metrics;
mod refusals;
mod replicas;
mod responses;
mod routes;
#[path = "../common/scrape.rs"]
mod scrape;
mod shares;
mod tls;
mod tools;
mod traces;

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use looplane_server::{
    listener::{self, ServeError, ServeOptions, StopSignal},
    text::Text,
};
use tokio::{net::TcpListener, task::JoinHandle};

use engine::Script;

/// Longest wait for anything that must happen.
const SOON: Duration = Duration::from_secs(20);

/// A front end on a free port of this machine.
struct Server {
    address: SocketAddr,
    stop: StopSignal,
    task: JoinHandle<Result<(), ServeError>>,
}

fn options() -> ServeOptions {
    ServeOptions {
        model_id: "tiny".into(),
        max_connections: 64,
        max_concurrent_requests: 32,
        max_body_bytes: 1 << 20,
        drain: Duration::from_secs(20),
        ..ServeOptions::default()
    }
}

fn fixture() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")
}

fn text() -> Arc<Text> {
    Arc::new(Text::load(&fixture()).expect("the fixture is a whole model directory"))
}

impl Server {
    async fn start(options: ServeOptions) -> (Self, Script) {
        Self::start_with(options, text()).await
    }

    async fn start_with(options: ServeOptions, text: Arc<Text>) -> (Self, Script) {
        Self::start_whole("127.0.0.1:0", options, text).await
    }

    /// Listens at an address of the test's own.
    async fn start_at(address: &str, options: ServeOptions) -> (Self, Script) {
        Self::start_whole(address, options, text()).await
    }

    async fn start_whole(address: &str, options: ServeOptions, text: Arc<Text>) -> (Self, Script) {
        let (handle, script) = engine::script();
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = StopSignal::default();
        let task = tokio::spawn(listener::run(listener, handle, text, options, stop.clone()));
        (Self { address, stop, task }, script)
    }

    async fn ended(self) -> Result<(), ServeError> {
        tokio::time::timeout(SOON, self.task).await.expect("serve returns").expect("serve does not panic")
    }
}

/// Token ids that spell `text`, one a byte.
fn spell(text: &str) -> Vec<u32> {
    let tokenizer = self::text().tokenizer.clone();
    let id_of = |byte: u8| (0..768).find(|id| tokenizer.token_bytes(*id) == [byte]).expect("every byte is a token");
    text.bytes().map(id_of).collect()
}
