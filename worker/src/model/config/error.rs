//! What is wrong with a `config.json`.

use std::path::PathBuf;

/// Why a `config.json` is refused: one sentence with file, field and value.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no JSON object.
    #[error("{}: is not a JSON object: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        problem: String,
    },
    /// A field that has no default is not there.
    #[error("{}: field `{field}` is missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
    },
    /// A field has a value that no model of this architecture can have.
    #[error("{}: `{field}` is {value}, but has to be {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// A valid model that Looplane does not compute.
    #[error("{}: `{field}` is {value}, which is not supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What is.
        supported: String,
    },
    /// More context was asked for than the model has.
    #[error(
        "a context of {requested} positions was asked for, but the model has {available} (`max_position_embeddings`)"
    )]
    Context {
        /// Positions asked for.
        requested: usize,
        /// Positions of the model.
        available: usize,
    },
    /// No prompt would leave room for an answer.
    #[error("a context of 1 position was asked for; a prompt and its answer take 2 at least")]
    NoRoom,
}
