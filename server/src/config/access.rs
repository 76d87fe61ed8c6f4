//! Options of who may ask, and how safely: API keys, TLS, pages of other origins.

use std::path::PathBuf;

use axum::http::{HeaderValue, Uri};
use clap::{ArgAction, Args};

use super::error::ConfigError;
use crate::{
    http::Access,
    keys::{Keys, PlainKey},
    listener::Tls,
};

/// Who may ask, and how safely.
#[derive(Debug, Clone, Args)]
pub struct AccessArgs {
    /// API key that requests must have, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Other users of the machine
    /// see command lines: better set the variable
    #[arg(long, value_name = "KEY", env = "LOOPLANE_API_KEY", hide_env_values = true)]
    pub api_key: Option<PlainKey>,

    /// File of API keys, with a line `ID SHA256 [concurrent=N] [tokens_per_minute=N] [admin]` for each; `looplane key`
    /// makes one. It is read again when it changes
    #[arg(long, value_name = "FILE", env = "LOOPLANE_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,

    /// Answer /metrics without a key
    #[arg(
        long,
        value_name = "BOOL",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = false,
        default_missing_value = "true",
        env = "LOOPLANE_METRICS_WITHOUT_KEY"
    )]
    pub metrics_without_key: bool,

    /// Certificate for TLS (PEM), with those that sign it behind it; HTTP and gRPC are then only spoken within TLS. It
    /// is read again when it changes
    #[arg(long, value_name = "FILE", env = "LOOPLANE_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", env = "LOOPLANE_TLS_KEY")]
    pub tls_key: Option<PathBuf>,

    /// Origin such as https://chat.example.org whose pages may ask from browsers, or * for all; several after commas
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',', env = "LOOPLANE_CORS_ALLOW_ORIGIN")]
    pub cors_allow_origin: Vec<String>,
}

impl AccessArgs {
    /// Reads the files.
    pub(super) fn check(self) -> Result<(Access, Option<Tls>), ConfigError> {
        if self.api_key.as_ref().is_some_and(|key| !key.is_usable()) {
            // Not by its value, which may be a slip of a real one.
            return Err(ConfigError::ApiKey);
        }
        let tls = match (self.tls_cert, self.tls_key) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some(Tls::load(cert, key)?),
            _ => return Err(ConfigError::HalfOfTls),
        };
        let access = Access {
            keys: Keys::load(self.api_key_file, self.api_key)?,
            metrics_without_key: self.metrics_without_key,
            cors_origins: self.cors_allow_origin.iter().map(|text| origin(text)).collect::<Result<_, _>>()?,
        };
        Ok((access, tls))
    }
}

/// An origin as browsers send it.
fn origin(text: &str) -> Result<HeaderValue, ConfigError> {
    let of_a_page = |uri: Uri| uri.scheme().is_some() && uri.path() == "/" && uri.query().is_none();
    let usable = text == "*" || (!text.ends_with('/') && text.parse().is_ok_and(of_a_page));
    let header = text.parse().ok().filter(|_| usable);
    header.ok_or_else(|| ConfigError::Value {
        option: "--cors-allow-origin",
        value: if text.is_empty() { "empty".into() } else { text.into() },
        rule: "an origin without a path, such as https://chat.example.org, or *".into(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::tests::parse;

    fn check(arguments: &[&str]) -> Result<(Access, Option<Tls>), String> {
        parse(arguments).access.check().map_err(|error| error.to_string())
    }

    #[test]
    fn nobody_is_asked_for_a_key_unless_there_is_one() {
        let (access, tls) = check(&[]).unwrap();
        assert!(access.keys.is_none() && tls.is_none() && access.cors_origins.is_empty());
        let (access, _) = check(&["--api-key", "secret", "--metrics-without-key"]).unwrap();
        assert!(access.keys.unwrap().current().find(b"secret").is_some() && access.metrics_without_key);
        assert!(!check(&["--metrics-without-key=false"]).unwrap().0.metrics_without_key);
    }

    #[test]
    fn origins_are_repeated_or_after_commas() {
        let origins = |arguments: &[&str]| check(arguments).unwrap().0.cors_origins;
        let [a, b] = ["https://a.example", "http://localhost:3000"];
        assert_eq!(origins(&["--cors-allow-origin", a, "--cors-allow-origin", b]), [a, b]);
        assert_eq!(origins(&["--cors-allow-origin", &format!("{a},{b}")]), [a, b]);
        assert_eq!(origins(&["--cors-allow-origin", "*"]), ["*"]);
    }

    #[test]
    fn what_cannot_work_is_told_without_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        fs::write(&path, "alice sk-secret").unwrap();
        let file = path.to_str().unwrap();
        for (arguments, says) in [
            (&["--api-key", "a secret"][..], "--api-key"),
            (&["--api-key-file", file], "line 1: after the id"),
            (&["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"),
            (&["--tls-cert", file], "--tls-key"),
            (&["--tls-cert", file, "--tls-key", file], "there is no certificate"),
            (&["--cors-allow-origin", "https://a.example/"], "--cors-allow-origin is https://a.example/"),
            (&["--cors-allow-origin", "https://a.example/page"], "--cors-allow-origin"),
            (&["--cors-allow-origin", "a.example"], "--cors-allow-origin"),
        ] {
            let error = check(arguments).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }
}
