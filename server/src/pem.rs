//! Certificates and keys of PEM files, for TLS of clients and of hosts that join.

use std::path::Path;

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

use crate::reload::FileError;

/// The certificates of a file, at least one.
///
/// # Errors
/// Names `option` and the file.
pub fn certificates(option: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let wrong = |what: String| FileError::new(option, path, what);
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let chain = chain.map_err(|error| wrong(error.to_string()))?;
    match chain.is_empty() {
        true => Err(wrong("there is no certificate (PEM) in it".into())),
        false => Ok(chain),
    }
}

/// The private key of a file.
///
/// # Errors
/// Names `option` and the file.
pub fn private_key(option: &'static str, path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| FileError::new(option, path, error))
}

/// Those whose signatures are trusted.
///
/// # Errors
/// Names `option` and the file.
pub fn roots(option: &'static str, path: &Path) -> Result<RootCertStore, FileError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(option, path)? {
        roots.add(certificate).map_err(|error| FileError::new(option, path, error))?;
    }
    Ok(roots)
}
