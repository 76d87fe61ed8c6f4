//! Options of hosts that join: where the front end lets them in, and how `looplane worker` finds it.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use axum::http::Uri;
use clap::Args;

use super::access::AccessArgs;
use super::engine::{Device, Engine, EngineArgs};
use super::error::ConfigError;
use crate::fleet::{FrontSecrets, HostSecrets, JoinConfig, ListenConfig, TlsFiles};
use crate::group::GroupConfig;
use crate::listener::ServeOptions;
use crate::router::MAX_REPLICAS;

/// Where hosts may join.
#[derive(Debug, Clone, Args)]
pub struct JoinListenArgs {
    /// Address and port where hosts may join (`looplane worker --join`), each as one more replica; over mutual TLS, or
    /// on a loopback address without [default: none may]
    #[arg(long, value_name = "ADDR:PORT", env = "LOOPLANE_JOIN_LISTEN")]
    pub join_listen: Option<SocketAddr>,

    /// Most hosts at one time [default: 1, where --join-listen is given]
    #[arg(long, value_name = "N", env = "LOOPLANE_JOIN_PLACES")]
    pub join_places: Option<u32>,

    /// Certificate that is shown to the other end of a join (PEM), with those that sign it behind it
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_CERT")]
    pub join_cert: Option<PathBuf>,

    /// Private key of --join-cert (PEM)
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_KEY")]
    pub join_key: Option<PathBuf>,

    /// Certificates that sign those of hosts (PEM)
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_CLIENT_CA")]
    pub join_client_ca: Option<PathBuf>,

    /// File of the token that front end and hosts have in common
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_TOKEN_FILE")]
    pub join_token_file: Option<PathBuf>,
}

impl JoinListenArgs {
    /// Reads the files; beside so many replicas of this machine.
    pub(super) fn check(self, replicas: u32) -> Result<Option<ListenConfig>, ConfigError> {
        let files = [&self.join_cert, &self.join_key, &self.join_client_ca, &self.join_token_file];
        let Some(address) = self.join_listen else {
            return match self.join_places.is_some() || files.iter().any(|file| file.is_some()) {
                true => Err(ConfigError::Together("hosts join nowhere: give --join-listen, or no option of theirs")),
                false => Ok(None),
            };
        };
        let places = self.join_places.unwrap_or(1);
        let most = MAX_REPLICAS.saturating_sub(replicas);
        if !(1..=most).contains(&places) {
            let rule = format!("1 to {most}: with --replicas there may be {MAX_REPLICAS}");
            return ConfigError::value("--join-places", &places, &rule);
        }
        let Some(token) = self.join_token_file else {
            return Err(ConfigError::Together(
                "--join-listen needs --join-token-file, the token that hosts have to show",
            ));
        };
        let tls = match (self.join_cert, self.join_key, self.join_client_ca) {
            (Some(cert), Some(key), Some(ca)) => Some(TlsFiles { cert, key, ca }),
            (None, None, None) if address.ip().is_loopback() => None,
            _ => {
                return Err(ConfigError::Together(
                    "--join-listen needs --join-cert, --join-key and --join-client-ca; on a loopback address all three \
                     may be left out",
                ));
            }
        };
        Ok(Some(ListenConfig { address, places, secrets: FrontSecrets::load(tls, token)? }))
    }
}

/// Options of `looplane worker`: a host that computes for a front end on another machine.
#[derive(Debug, Clone, Args)]
#[command(args_override_self = true)]
pub struct HostArgs {
    /// Where the front end lets hosts join (its --join-listen), such as https://front.example.org:7000; http:// on a
    /// loopback address
    #[arg(long, value_name = "URL", env = "LOOPLANE_JOIN")]
    pub join: Uri,

    /// Certificates that sign that of the front end (PEM)
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_CA")]
    pub join_ca: Option<PathBuf>,

    /// Certificate of this host (PEM), with those that sign it behind it
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_CERT")]
    pub join_cert: Option<PathBuf>,

    /// Private key of --join-cert (PEM)
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_KEY")]
    pub join_key: Option<PathBuf>,

    /// File of the token that front end and hosts have in common
    #[arg(long, value_name = "FILE", env = "LOOPLANE_JOIN_TOKEN_FILE")]
    pub join_token_file: PathBuf,

    /// Address and port where this host answers /metrics and /health, to whom the options of keys and TLS let in
    /// [default: nowhere]
    #[arg(long, value_name = "ADDR:PORT", env = "LOOPLANE_METRICS_LISTEN")]
    pub metrics_listen: Option<SocketAddr>,

    /// Who may read its metrics, and how safely.
    #[command(flatten)]
    pub access: AccessArgs,

    /// What computes, and its bounds.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Options of a host that can work, as far as can be known before anything is started.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Whom it joins.
    pub join: JoinConfig,
    /// The workers and their bounds.
    pub group: GroupConfig,
    /// Where it tells how it is, if anywhere, and whom.
    pub metrics: Option<(SocketAddr, ServeOptions)>,
}

impl HostArgs {
    /// Checks the options and reads the files. `group_size` is as that of [`super::ServeArgs::check`].
    ///
    /// # Errors
    /// Names the option to change.
    pub fn check(self, group_size: impl FnOnce(&Path, Device) -> u32) -> Result<HostConfig, ConfigError> {
        let wrong = |rule: &str| ConfigError::value("--join", &self.join, rule);
        let (Some(scheme), Some(front), Some(port)) = (self.join.scheme_str(), self.join.host(), self.join.port_u16())
        else {
            return wrong("an address with its port, such as https://front.example.org:7000");
        };
        let front = front.trim_start_matches('[').trim_end_matches(']').to_owned();
        let is_loopback = front == "localhost" || front.parse().is_ok_and(|address: IpAddr| address.is_loopback());
        let tls = match (scheme, self.join_cert, self.join_key, self.join_ca) {
            ("https", Some(cert), Some(key), Some(ca)) => Some(TlsFiles { cert, key, ca }),
            ("https", ..) => {
                return Err(ConfigError::Together("--join https:// needs --join-cert, --join-key and --join-ca"));
            }
            ("http", None, None, None) if is_loopback => None,
            ("http", ..) => {
                return wrong("https:// with --join-cert, --join-key and --join-ca, but on a loopback address");
            }
            _ => return wrong("https:// or, on a loopback address, http://"),
        };
        let secrets = HostSecrets::load(tls, self.join_token_file)?;
        let Engine { group, model_id, .. } = self.engine.check(1, group_size)?;
        let drain = group.timeouts.drain;
        let metrics = match self.metrics_listen {
            None => None,
            Some(address) => {
                let (access, tls) = self.access.check()?;
                Some((address, ServeOptions { model_id, access, tls, ..ServeOptions::default() }))
            }
        };
        let join = JoinConfig { front, port, secrets, vocabulary_digest: String::new(), drain };
        Ok(HostConfig { join, group, metrics })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::{Command, FromArgMatches};

    use super::*;
    use crate::config::tests::parse;

    #[test]
    fn what_cannot_work_is_said_before_anything_is_started() {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        fs::write(&token, "secret\n").unwrap();
        let token = token.to_str().unwrap();
        let front = |arguments: &[&str]| {
            let listen = parse(arguments).join.check(60).map_err(|error| error.to_string());
            listen.map(|listen| listen.map(|listen| listen.places))
        };
        assert_eq!(front(&[]), Ok(None));
        let listen = ["--join-listen", "127.0.0.1:7000", "--join-token-file", token];
        assert_eq!(front(&listen), Ok(Some(1)));
        assert_eq!(front(&[&listen[..], &["--join-places", "4"]].concat()), Ok(Some(4)));
        for (arguments, says) in [
            (&["--join-places", "2"][..], "hosts join nowhere"),
            (&["--join-listen", "127.0.0.1:7000"], "needs --join-token-file"),
            (&[&listen[..], &["--join-places", "5"]].concat(), "--join-places is 5, but must be 1 to 4"),
            (&[&listen[..], &["--join-cert", token]].concat(), "--join-client-ca"),
            (&["--join-listen", "0.0.0.0:7000", "--join-token-file", token], "needs --join-cert"),
            (
                &["--join-listen", "127.0.0.1:7000", "--join-token-file", "/nowhere"],
                "--join-token-file /nowhere: No such",
            ),
        ] {
            let error = front(arguments).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_host_needs_a_front_end_that_it_can_trust() {
        let dir = tempfile::tempdir().unwrap();
        let (token, empty) = (dir.path().join("token"), dir.path().join("empty"));
        fs::write(&token, "secret\n").unwrap();
        fs::write(&empty, "\n").unwrap();
        let model = format!("{}/../worker/tests/fixtures/llama-gqa", env!("CARGO_MANIFEST_DIR"));
        let host = |token: &Path, join: &str, more: &[&str]| {
            let command = HostArgs::augment_args(Command::new("worker"));
            let given = ["worker", "--join", join, "--model", &model, "--join-token-file", token.to_str().unwrap()];
            let matches = command.try_get_matches_from([&given, more].concat()).unwrap();
            let config = HostArgs::from_arg_matches(&matches).unwrap().check(|_, _| 4);
            config.map(|config| (config.join.front, config.join.port, config.group.tensor_parallel))
        };
        assert_eq!(host(&token, "http://127.0.0.1:7000", &[]), Ok(("127.0.0.1".into(), 7000, 4)));
        assert_eq!(host(&token, "http://[::1]:7000", &["--tp", "1"]), Ok(("::1".into(), 7000, 1)));
        for (token, join, says) in [
            (&token, "http://10.0.0.1:7000", "--join is http://10.0.0.1:7000/, but must be https://"),
            (&token, "https://front:7000", "--join https:// needs --join-cert"),
            (&token, "https://front", "an address with its port"),
            (&token, "front:7000", "an address with its port"),
            (&empty, "http://127.0.0.1:7000", "it must hold one token"),
        ] {
            let error = host(token, join, &[]).unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains("secret"), "{error}");
        }
    }
}
