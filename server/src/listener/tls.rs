//! TLS with a certificate of files, which may be renewed while the server runs.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ServerConfig, crypto::ring};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::connection::UNSENT_BYTES;
use crate::{
    pem,
    reload::{FileError, Reloaded},
};

const CERT_OPTION: &str = "--tls-cert";
const KEY_OPTION: &str = "--tls-key";

/// What a client may choose from.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The certificate and its key, as the next connection gets them.
#[derive(Debug, Clone)]
pub struct Tls(Arc<Reloaded<ServerConfig>>);

impl Tls {
    /// Reads the certificate, with those that sign it up to the root, and its key: both PEM.
    ///
    /// # Errors
    /// Names the file that cannot be used.
    pub fn load(cert: PathBuf, key: PathBuf) -> Result<Self, FileError> {
        let files = vec![cert.clone(), key.clone()];
        Ok(Self(Arc::new(Reloaded::new(files, move |_| config(&cert, &key))?)))
    }

    /// Keeps the certificate true to its files, for ever.
    pub(super) async fn follow(self) {
        self.0.follow().await;
    }

    /// The client's handshake. It fails for one that speaks anything else.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        // What waits here is unsent, too.
        let bounded =
            |connection: &mut rustls::ServerConnection| connection.set_buffer_limit(Some(UNSENT_BYTES as usize));
        TlsAcceptor::from(self.0.current()).accept_with(stream, bounded).await
    }
}

fn config(cert: &Path, key: &Path) -> Result<ServerConfig, FileError> {
    let wrong_cert = |what: String| FileError::new(CERT_OPTION, cert, what);
    let chain = pem::certificates(CERT_OPTION, cert)?;
    let key = pem::private_key(KEY_OPTION, key)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has what TLS 1.2 and 1.3 need")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| wrong_cert(format!("it does not go with {KEY_OPTION}, or neither can be used: {error}")))?;
    config.alpn_protocols = PROTOCOLS.map(Vec::from).into();
    Ok(config)
}
