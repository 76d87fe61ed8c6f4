//! The one place where an error becomes a gRPC status.

use std::{collections::HashMap, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{engine::SubmitError, frontend::GenerateError, request::RequestError, upload::UploadError};

/// Whose codes the reasons of errors are.
const DOMAIN: &str = "looplane";

/// A status with a stable code as its reason.
pub fn refusal(code: Code, reason: &str, message: impl Into<String>) -> Status {
    Status::with_error_details(code, message, details(reason))
}

fn details(reason: &str) -> ErrorDetails {
    ErrorDetails::with_error_info(reason, DOMAIN, HashMap::<String, String>::new())
}

/// With the stable code, the field that is wrong, and the time after which trying again may help.
pub(super) fn status(error: GenerateError) -> Status {
    let code = match &error {
        GenerateError::Request(RequestError::ModelNotFound { .. } | RequestError::NoSuchRequest { .. }) => {
            Code::NotFound
        }
        GenerateError::Request(_)
        | GenerateError::Contradiction
        | GenerateError::Submit(SubmitError::TooLarge { .. } | SubmitError::NeverFits { .. }) => Code::InvalidArgument,
        GenerateError::Submit(SubmitError::Quarantined { .. }) => Code::FailedPrecondition,
        GenerateError::Upload(UploadError::TooLarge { .. }) => Code::OutOfRange,
        GenerateError::Upload(UploadError::Timeout { .. }) | GenerateError::DeadlineExceeded { .. } => {
            Code::DeadlineExceeded
        }
        GenerateError::Upload(UploadError::Broken(_)) | GenerateError::Aborted => Code::Cancelled,
        GenerateError::Upload(UploadError::Crowded { .. } | UploadError::Share { .. })
        | GenerateError::Submit(SubmitError::QueueFull { .. })
        | GenerateError::Busy { .. }
        | GenerateError::Key(_) => Code::ResourceExhausted,
        GenerateError::Submit(SubmitError::Unavailable(_))
        | GenerateError::NotReady(_)
        | GenerateError::ShuttingDown => Code::Unavailable,
        GenerateError::Failed(_) | GenerateError::Internal(_) => Code::Internal,
    };
    let (message, mut details) = (error.to_string(), details(error.code()));
    if let GenerateError::Request(error) = &error {
        details.add_bad_request_violation(error.param(), &message);
    }
    if let Some(seconds) = error.retry_after_s() {
        details.set_retry_info(Some(Duration::from_secs(seconds.into())));
    }
    Status::with_error_details(code, message, details)
}
