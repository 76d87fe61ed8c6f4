//! What both ends show each other: certificates, and a token that both know. Files are read again when they change.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ClientConfig, ServerConfig, crypto::ring, server::WebPkiClientVerifier, version::TLS13};
use subtle::ConstantTimeEq;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use crate::{
    pem,
    reload::{FileError, Reloaded},
};

const CERT_OPTION: &str = "--join-cert";
const KEY_OPTION: &str = "--join-key";
const CLIENT_CA_OPTION: &str = "--join-client-ca";
const CA_OPTION: &str = "--join-ca";
const TOKEN_OPTION: &str = "--join-token-file";

/// Metadata are read before any message.
const SHOWN_IN: &str = "authorization";

/// Files of mutual TLS.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// One's own certificate, with those that sign it.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Who signs the other end's.
    pub ca: PathBuf,
}

/// What both ends know.
#[derive(Clone)]
pub(super) struct Token(String);

impl Token {
    fn load(path: &Path) -> Result<Self, FileError> {
        let wrong = |what: &dyn ToString| FileError::new(TOKEN_OPTION, path, what.to_string());
        let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
        let token = text.trim();
        match token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => {
                Err(wrong(&"it must hold one token of visible ASCII characters, such as `openssl rand -hex 32` draws"))
            }
            false => Ok(Self(token.into())),
        }
    }

    /// Whether it is the one that a call shows; takes as long wherever they differ.
    pub(super) fn is_shown(&self, call: &MetadataMap) -> bool {
        let shown = call.get(SHOWN_IN).map_or(&b""[..], |shown| shown.as_bytes());
        self.bearer().as_bytes().ct_eq(shown).into()
    }

    /// Has a call show it.
    pub(super) fn show(&self, call: &mut MetadataMap) {
        let mut shown: AsciiMetadataValue = self.bearer().parse().expect("it is visible ASCII");
        shown.set_sensitive(true);
        call.insert(SHOWN_IN, shown);
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token")
    }
}

/// Of the end that listens, or that dials.
#[derive(Debug)]
pub(super) struct Secrets<Tls> {
    pub(super) token: Token,
    /// None on a loopback address.
    pub(super) tls: Option<Arc<Tls>>,
}

/// A front end's secrets.
#[derive(Debug, Clone)]
pub struct FrontSecrets(Arc<Reloaded<Secrets<ServerConfig>>>);

/// A host's secrets.
#[derive(Debug, Clone)]
pub struct HostSecrets(Arc<Reloaded<Secrets<ClientConfig>>>);

impl FrontSecrets {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the file that cannot be used.
    pub fn load(tls: Option<TlsFiles>, token: PathBuf) -> Result<Self, FileError> {
        Ok(Self(load(tls, token, server_config)?))
    }

    /// Those of now.
    pub(super) fn current(&self) -> Arc<Secrets<ServerConfig>> {
        self.0.current()
    }

    /// Keeps them true to their files, for ever.
    pub(super) async fn follow(self) {
        self.0.follow().await;
    }
}

impl HostSecrets {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the file that cannot be used.
    pub fn load(tls: Option<TlsFiles>, token: PathBuf) -> Result<Self, FileError> {
        Ok(Self(load(tls, token, client_config)?))
    }

    /// Those of now.
    pub(super) fn current(&self) -> Arc<Secrets<ClientConfig>> {
        self.0.current()
    }

    /// Keeps them true to their files, for ever.
    pub(super) async fn follow(self) {
        self.0.follow().await;
    }
}

fn load<Tls: Send + Sync + 'static>(
    tls: Option<TlsFiles>,
    token: PathBuf,
    config: fn(&TlsFiles) -> Result<Tls, FileError>,
) -> Result<Arc<Reloaded<Secrets<Tls>>>, FileError> {
    let mut files = vec![token.clone()];
    if let Some(TlsFiles { cert, key, ca }) = &tls {
        files.extend([cert.clone(), key.clone(), ca.clone()]);
    }
    let make = move |_: Option<&Secrets<Tls>>| {
        let tls = tls.as_ref().map(config).transpose()?.map(Arc::new);
        Ok(Secrets { token: Token::load(&token)?, tls })
    };
    Ok(Arc::new(Reloaded::new(files, make)?))
}

fn server_config(files: &TlsFiles) -> Result<ServerConfig, FileError> {
    let provider = Arc::new(ring::default_provider());
    let roots = Arc::new(pem::roots(CLIENT_CA_OPTION, &files.ca)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
    let verifier = verifier.map_err(|error| FileError::new(CLIENT_CA_OPTION, &files.ca, error))?;
    let chain = pem::certificates(CERT_OPTION, &files.cert)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("ring has what TLS 1.3 needs")
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, pem::private_key(KEY_OPTION, &files.key)?)
        .map_err(|error| mismatch(files, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn client_config(files: &TlsFiles) -> Result<ClientConfig, FileError> {
    let chain = pem::certificates(CERT_OPTION, &files.cert)?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .expect("ring has what TLS 1.3 needs")
        .with_root_certificates(pem::roots(CA_OPTION, &files.ca)?)
        .with_client_auth_cert(chain, pem::private_key(KEY_OPTION, &files.key)?)
        .map_err(|error| mismatch(files, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn mismatch(files: &TlsFiles, error: &rustls::Error) -> FileError {
    let what = format!("it does not go with {KEY_OPTION}, or neither can be used: {error}");
    FileError::new(CERT_OPTION, &files.cert, what)
}
