//! Why a request was not served, and the stable code of each reason.

use crate::{engine::SubmitError, keys::KeyLimitError, request::RequestError, upload::UploadError};

/// Why a request was not served, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The request is at fault.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Its body was not read to the end.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// The engine did not take it.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// As many requests are being served as the front end allows.
    #[error("the limit of {limit} requests at one time is reached (--max-concurrent-requests)")]
    Busy {
        /// The bound.
        limit: usize,
    },
    /// As much is being used by the request's key as its limits allow.
    #[error(transparent)]
    Key(#[from] KeyLimitError),
    /// No new requests are taken: the server ends.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The model has not been loaded yet, or cannot be.
    #[error("the server is {0}")]
    NotReady(String),
    /// The time that the client gave it is over.
    #[error(
        "the request's {timeout_ms} ms are over (timeout_ms, or the deadline of the call): give it more, or try again \
         when the server has less to do"
    )]
    DeadlineExceeded {
        /// The time from its arrival.
        timeout_ms: u64,
    },
    /// Its client had it ended, by its name.
    #[error("the request was ended by its id (Abort over gRPC, DELETE /requests/ID over HTTP)")]
    Aborted,
    /// What the request asks for cannot be: the grammar may be one that turns out too complex to be followed.
    #[error(
        "no token may follow: the grammar that the answer is held to is too complex to be followed, or \
         allowed_token_ids and bad_words leave none of its tokens"
    )]
    Contradiction,
    /// The engine gave the sequence up.
    #[error("the request was given up: {0}")]
    Failed(String),
    /// A bug: the request was not answered.
    #[error("internal error: {0}")]
    Internal(String),
}

impl GenerateError {
    /// The stable code that clients and operators see.
    pub fn code(&self) -> &'static str {
        match self {
            GenerateError::Request(error) => error.code(),
            GenerateError::Upload(UploadError::TooLarge { .. }) => "body_too_large",
            GenerateError::Upload(UploadError::Timeout { .. }) => "body_timeout",
            GenerateError::Upload(UploadError::Broken(_)) => "invalid_body",
            GenerateError::Upload(UploadError::Crowded { .. } | UploadError::Share { .. })
            | GenerateError::Submit(SubmitError::QueueFull { .. })
            | GenerateError::Busy { .. }
            | GenerateError::Key(_) => "rate_limit_exceeded",
            GenerateError::Submit(SubmitError::TooLarge { .. } | SubmitError::NeverFits { .. }) => "request_too_large",
            GenerateError::Submit(SubmitError::Quarantined { .. }) => "request_quarantined",
            GenerateError::Submit(SubmitError::Unavailable(_)) | GenerateError::NotReady(_) => "not_ready",
            GenerateError::ShuttingDown => "shutting_down",
            GenerateError::DeadlineExceeded { .. } => "deadline_exceeded",
            GenerateError::Aborted => "request_aborted",
            GenerateError::Contradiction => "no_token_may_follow",
            GenerateError::Failed(_) => "generation_failed",
            GenerateError::Internal(_) => "internal_error",
        }
    }

    /// Seconds after which trying again may help; `None`: it does not.
    pub fn retry_after_s(&self) -> Option<u32> {
        match self {
            GenerateError::Key(limit) => Some(limit.retry_after_s()),
            GenerateError::Upload(UploadError::Crowded { .. } | UploadError::Share { .. })
            | GenerateError::Submit(SubmitError::QueueFull { .. })
            | GenerateError::Busy { .. } => Some(1),
            GenerateError::Submit(SubmitError::Unavailable(_))
            | GenerateError::NotReady(_)
            | GenerateError::ShuttingDown => Some(5),
            _ => None,
        }
    }
}
