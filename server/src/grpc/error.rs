//! The one place where an error becomes a gRPC status.

use tonic::{Code, Status};

use crate::{engine::SubmitError, frontend::GenerateError, request::RequestError, upload::UploadError};

pub(super) fn status(error: GenerateError) -> Status {
    let code = match &error {
        GenerateError::Request(RequestError::ModelNotFound { .. }) => Code::NotFound,
        GenerateError::Request(_)
        | GenerateError::Submit(SubmitError::TooLarge { .. } | SubmitError::NeverFits { .. }) => Code::InvalidArgument,
        GenerateError::Submit(SubmitError::Quarantined { .. }) => Code::FailedPrecondition,
        GenerateError::Upload(UploadError::TooLarge { .. }) => Code::OutOfRange,
        GenerateError::Upload(UploadError::Timeout { .. }) | GenerateError::DeadlineExceeded { .. } => {
            Code::DeadlineExceeded
        }
        GenerateError::Upload(UploadError::Broken(_)) => Code::Cancelled,
        GenerateError::Upload(UploadError::Crowded { .. })
        | GenerateError::Submit(SubmitError::QueueFull { .. })
        | GenerateError::Busy { .. }
        | GenerateError::Key(_) => Code::ResourceExhausted,
        GenerateError::Submit(SubmitError::Unavailable(_))
        | GenerateError::NotReady(_)
        | GenerateError::ShuttingDown => Code::Unavailable,
        GenerateError::Failed(_) | GenerateError::Internal(_) => Code::Internal,
    };
    Status::new(code, error.to_string())
}
