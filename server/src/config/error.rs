//! Why options cannot work.

use std::path::PathBuf;

use crate::reload::FileError;

/// Why options cannot work; one sentence that says what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The configuration file cannot be used.
    #[error("the configuration file {}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        what: String,
    },
    /// No model is given and there is no demo model.
    #[error("the demo model is not at {}; name a model directory with --model DIR", .0.display())]
    NoDemoModel(PathBuf),
    /// The model directory is none.
    #[error("--model {}: {what}", path.display())]
    Model {
        /// The directory, or a name.
        path: PathBuf,
        /// What is missing, and how to get it.
        what: String,
    },
    /// A file of keys or of a certificate cannot be used.
    #[error(transparent)]
    Access(#[from] FileError),
    /// The API key is none. It is not shown.
    #[error("--api-key (LOOPLANE_API_KEY) must be of visible ASCII characters, without spaces, and at least one")]
    ApiKey,
    /// A certificate without a key, or the other way round.
    #[error("--tls-cert and --tls-key go together: give both, or neither")]
    HalfOfTls,
    /// Options that are of no use alone.
    #[error("{0}")]
    Together(&'static str),
    /// An option has a value that cannot work.
    #[error("{option} is {value}, but must be {rule}")]
    Value {
        /// With its dashes.
        option: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        rule: String,
    },
}

impl ConfigError {
    /// An option whose value cannot work, and what it must be.
    pub(super) fn value<T>(option: &'static str, value: &dyn ToString, rule: &str) -> Result<T, Self> {
        Err(Self::Value { option, value: value.to_string(), rule: rule.into() })
    }
}
