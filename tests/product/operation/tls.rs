//! TLS on the one port, against real processes: each protocol, certificates that are renewed, clients that do not speak
//! it.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use http_body_util::Empty;
use hyper::{
    Request,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use looplane_proto::inference::v1::{GetModelRequest, inference_client::InferenceClient};
use rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::Endpoint;
use tower::service_fn;

use crate::common::{PATIENCE, Server, fixture, until};

const HTTP1: &[u8] = b"http/1.1";
const HTTP2: &[u8] = b"h2";

/// A certificate, its key, and what a client trusts for it.
struct Certificate {
    cert: String,
    key: String,
    trust: RootCertStore,
}

impl Certificate {
    fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a name is all it takes");
        let mut trust = RootCertStore::empty();
        trust.add(made.cert.der().clone()).expect("a certificate");
        Self { cert: made.cert.pem(), key: made.signing_key.serialize_pem(), trust }
    }

    /// A TLS connection of a client that trusts this certificate alone, with one protocol to choose from.
    async fn connect(&self, address: SocketAddr, protocol: &[u8]) -> io::Result<TlsStream<TcpStream>> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has them")
            .with_root_certificates(self.trust.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = ServerName::try_from("localhost").expect("a name");
        TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await
    }
}

/// A server with files of a certificate, and its log.
struct Secured {
    server: Server,
    address: SocketAddr,
    dir: TempDir,
}

impl Secured {
    async fn start(certificate: &Certificate, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| dir.path().join(name);
        write(dir.path(), certificate);
        let mut command = Server::command(Path::new(env!("CARGO_BIN_EXE_looplane")));
        command.arg("--model").arg(fixture("llama-tied")).args(["--tp", "1"]).args(args);
        command.arg("--tls-cert").arg(path("cert")).arg("--tls-key").arg(path("key"));
        let server = Server::spawn(command.stderr(fs::File::create(path("log")).expect("a writable directory")));
        let address = server.base().strip_prefix("https://").expect("it says that it speaks TLS");
        let address = address.parse().expect("an address");
        let secured = Self { server, address, dir };
        until("it is ready", async || secured.status(certificate, "/health/ready").await == 200).await;
        secured
    }

    /// Of a GET over HTTP/1.1.
    async fn status(&self, certificate: &Certificate, path: &str) -> u16 {
        let stream = certificate.connect(self.address, HTTP1).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(HTTP1));
        let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await.expect("a connection");
        tokio::spawn(connection);
        let request = Request::get(path).header("host", "localhost").body(Empty::<Bytes>::new()).expect("a request");
        requests.send_request(request).await.expect("an answer").status().as_u16()
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }
}

fn write(dir: &Path, certificate: &Certificate) {
    fs::write(dir.join("cert"), &certificate.cert).expect("a writable directory");
    fs::write(dir.join("key"), &certificate.key).expect("a writable directory");
}

#[tokio::test(flavor = "multi_thread")]
async fn http_and_grpc_are_spoken_within_tls() {
    let certificate = Arc::new(Certificate::new());
    let secured = Secured::start(&certificate, &[]).await;
    assert_eq!(secured.status(&certificate, "/v1/models").await, 200);

    let stream = certificate.connect(secured.address, HTTP2).await.expect("a handshake");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(HTTP2));
    let (mut requests, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("a connection");
    tokio::spawn(connection);
    let request = Request::get("https://localhost/v1/models").body(Empty::<Bytes>::new()).expect("a request");
    assert_eq!(requests.send_request(request).await.expect("an answer").status(), 200);

    let address = secured.address;
    let connector = service_fn(move |_| {
        let certificate = certificate.clone();
        async move { certificate.connect(address, HTTP2).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.expect("connected");
    let model = InferenceClient::new(channel).get_model(GetModelRequest::default()).await.expect("an answer");
    assert!(model.metadata().contains_key("x-request-id"));
    assert_eq!(model.into_inner().id, "llama-tied");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_what_new_connections_get() {
    let (first, second) = (Certificate::new(), Certificate::new());
    let secured = Secured::start(&first, &[]).await;
    assert!(second.connect(secured.address, HTTP1).await.is_err());
    let mut old = first.connect(secured.address, HTTP1).await.expect("a handshake");
    write(secured.dir.path(), &second);
    until("the new one is used", async || second.connect(secured.address, HTTP1).await.is_ok()).await;
    assert!(first.connect(secured.address, HTTP1).await.is_err());
    // What was connected stays so.
    old.write_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .expect("writable");
    let mut answer = String::new();
    old.read_to_string(&mut answer).await.expect("an answer, and an end in order");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // A key of another certificate.
    fs::write(secured.dir.path().join("key"), &first.key).expect("a writable directory");
    let told = async || {
        let log = fs::read_to_string(secured.log()).expect("the log is UTF-8");
        log.contains("what was read before still holds")
    };
    until("the wrong pair is told", told).await;
    assert_eq!(secured.status(&second, "/health/live").await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_speak_tls_is_closed_and_slow_handshakes_give_way() {
    let certificate = Certificate::new();
    let secured = Secured::start(&certificate, &["--max-connections", "4"]).await;
    for plain in ["GET / HTTP/1.1\r\nhost: x\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\0\0\0\0\0\0\0\0"] {
        let mut stream = TcpStream::connect(secured.address).await.expect("it listens");
        stream.write_all(plain.as_bytes()).await.expect("writable");
        let mut answer = Vec::new();
        let _ = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("it is closed");
        assert!(!answer.starts_with(b"HTTP"));
    }
    // The beginning of a handshake, and nothing at all: as many as there are places, many times over.
    let mut slow = Vec::new();
    for begin in [&b"\x16\x03\x01\x02\x00\x01"[..], b""].repeat(20) {
        let mut stream = TcpStream::connect(secured.address).await.expect("it listens");
        stream.write_all(begin).await.expect("writable");
        slow.push(stream);
    }
    assert_eq!(secured.status(&certificate, "/v1/models").await, 200);
    assert_eq!(fs::read_to_string(secured.log()).expect("the log is UTF-8").matches("panicked").count(), 0);
    drop((slow, secured.server));
}
