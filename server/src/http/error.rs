//! Errors in OpenAI's shape; the one place where an error becomes an HTTP status.

use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::{
    engine::{RestartError, SubmitError},
    frontend::GenerateError,
    request::{FieldError, RequestError},
    upload::UploadError,
};

/// An error on its way to an HTTP client.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`: stable, for programs.
    pub code: &'static str,
    /// The field that is wrong.
    pub param: Option<String>,
    /// For people: what is wrong and what to do.
    pub message: String,
    /// Seconds after which trying again may help.
    pub retry_after_s: Option<u32>,
}

/// What OpenAI's and Anthropic's clients obey before they look at the status.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Left on an answer for whoever counts errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct ErrorCode(pub(super) &'static str);

impl ApiError {
    /// An error of the request as a whole.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
        Self { status, kind, code, param: None, message: message.into(), retry_after_s: None }
    }

    pub(super) fn retry(self, kind: &'static str, after_s: u32) -> Self {
        Self { kind, retry_after_s: Some(after_s), ..self }
    }

    /// The response, with a body in the shape of some API.
    pub(super) fn response(&self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        response.extensions_mut().insert(ErrorCode(self.code));
        // Clients repeat what is answered with 5xx by themselves; nobody waits for this any more.
        if self.status == StatusCode::GATEWAY_TIMEOUT {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// The body, also of an event in the middle of a stream.
    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<GenerateError> for ApiError {
    fn from(error: GenerateError) -> Self {
        let (message, code, retry_after_s) = (error.to_string(), error.code(), error.retry_after_s());
        let new = |status| ApiError { retry_after_s, ..ApiError::new(status, code, message) };
        match error {
            GenerateError::Request(error) => error.into(),
            GenerateError::Upload(UploadError::TooLarge { .. }) => new(StatusCode::PAYLOAD_TOO_LARGE),
            GenerateError::Upload(UploadError::Timeout { .. }) => new(StatusCode::REQUEST_TIMEOUT),
            GenerateError::Upload(UploadError::Broken(_)) => new(StatusCode::BAD_REQUEST),
            GenerateError::Upload(UploadError::Crowded { .. } | UploadError::Share { .. })
            | GenerateError::Submit(SubmitError::QueueFull { .. })
            | GenerateError::Busy { .. }
            | GenerateError::Key(_) => ApiError { kind: "rate_limit_error", ..new(StatusCode::TOO_MANY_REQUESTS) },
            GenerateError::Submit(SubmitError::TooLarge { .. } | SubmitError::NeverFits { .. }) => {
                new(StatusCode::BAD_REQUEST)
            }
            GenerateError::Contradiction => new(StatusCode::BAD_REQUEST),
            // Clients repeat what is answered with 429 and 5xx by themselves: this is not to be.
            GenerateError::Submit(SubmitError::Quarantined { .. }) => new(StatusCode::UNPROCESSABLE_ENTITY),
            GenerateError::Submit(SubmitError::Unavailable(_))
            | GenerateError::NotReady(_)
            | GenerateError::ShuttingDown => {
                ApiError { kind: "service_unavailable_error", ..new(StatusCode::SERVICE_UNAVAILABLE) }
            }
            // As nginx calls what its client ended. Clients repeat 409 and 5xx by themselves, but not this.
            GenerateError::Aborted => new(StatusCode::from_u16(499).expect("it has three digits")),
            GenerateError::DeadlineExceeded { .. } => new(StatusCode::GATEWAY_TIMEOUT),
            GenerateError::Failed(_) | GenerateError::Internal(_) => new(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let status = match &error {
            RequestError::ModelNotFound { .. } | RequestError::NoSuchRequest { .. } => StatusCode::NOT_FOUND,
            RequestError::Field { .. } | RequestError::ContextLength { .. } | RequestError::PromptBytes { .. } => {
                StatusCode::BAD_REQUEST
            }
        };
        Self { param: Some(error.param().to_owned()), ..ApiError::new(status, error.code(), error.to_string()) }
    }
}

impl From<RestartError> for ApiError {
    fn from(error: RestartError) -> Self {
        let (status, code) = match error {
            RestartError::NoSuchReplica { .. } => (StatusCode::NOT_FOUND, "replica_not_found"),
            RestartError::UnderWay { .. } => (StatusCode::CONFLICT, "restart_under_way"),
            RestartError::NotReady { .. } => (StatusCode::CONFLICT, "replica_not_ready"),
            RestartError::LastReady { .. } => (StatusCode::CONFLICT, "last_ready_replica"),
            RestartError::OfAHost { .. } => (StatusCode::CONFLICT, "replica_of_a_host"),
            RestartError::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
        };
        Self::new(status, code, error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(self.body())
    }
}

/// A field with a wrong type.
pub(super) fn wrong_type(field: impl Into<String>, expected: &str) -> ApiError {
    RequestError::field(field, FieldError::Type, format!("must be {expected}")).into()
}
