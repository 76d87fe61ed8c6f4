//! Clients of the TLS port that are slow or fall silent: the limits of plain connections hold for them.

use std::{sync::Arc, time::Duration};

use looplane_server::listener::{ClientLimits, ServeOptions, Tls};
use rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{SOON, Server, engine::Script, options};

const SHORT: Duration = Duration::from_millis(500);

/// A server that speaks TLS, and what its clients need for it.
async fn server(max_connections: usize, head: Duration) -> (Server, Script, TlsConnector) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("cert"), dir.path().join("key"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let client_limits = ClientLimits { head, ..ClientLimits::default() };
    let tls = Some(Tls::load(cert, key).unwrap());
    let (server, script) = Server::start(ServeOptions { tls, max_connections, client_limits, ..options() }).await;
    let mut trust = RootCertStore::empty();
    trust.add(made.cert.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(trust)
        .with_no_client_auth();
    (server, script, TlsConnector::from(Arc::new(config)))
}

async fn connect(server: &Server, connector: &TlsConnector) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(server.address).await.unwrap();
    connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap()
}

async fn asks(stream: &mut TlsStream<TcpStream>) {
    stream.write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"live\"}") {
        assert!(timeout(SOON, stream.read_buf(&mut answer)).await.expect("an answer").unwrap() > 0);
    }
}

#[tokio::test]
async fn a_client_has_the_limit_of_a_head_for_its_handshake_and_for_its_silence() {
    let (server, _script, connector) = server(64, SHORT).await;
    // No handshake, part of one, a whole one and nothing after it, and silence after an answer.
    for begin in [&b""[..], b"\x16\x03\x01\x02\x00\x01"] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(begin).await.unwrap();
        let _ = timeout(SOON, stream.read_to_end(&mut Vec::new())).await.expect("it is closed");
    }
    for has_asked in [false, true] {
        let mut stream = connect(&server, &connector).await;
        if has_asked {
            asks(&mut stream).await;
        }
        let _ = timeout(SOON, stream.read_to_end(&mut Vec::new())).await.expect("it is closed");
    }
}

#[tokio::test]
async fn idle_connections_within_tls_give_way_to_new_ones() {
    let (server, _script, connector) = server(2, SOON).await;
    let mut busy = connect(&server, &connector).await;
    asks(&mut busy).await;
    for _ in 0..3 {
        let mut idle = connect(&server, &connector).await;
        asks(&mut connect(&server, &connector).await).await;
        let _ = timeout(SOON, idle.read_to_end(&mut Vec::new())).await.expect("it gave way");
    }
}
