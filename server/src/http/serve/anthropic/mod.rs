//! `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them.

use axum::{
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{
    App,
    completions::{admit, enter},
    dialect,
    error::ApiError,
    tokens,
};
use crate::{
    frontend::Place,
    request::{Input, encode},
};

mod answer;
mod message;
pub(in crate::http) mod request;

use answer::Messages;

/// An error in Anthropic's shape.
#[derive(Debug)]
pub(in crate::http) struct AnthropicError(ApiError);

pub(in crate::http) async fn messages(State(app): State<App>, request: Request) -> Result<Response, AnthropicError> {
    let place = enter(&app, "/v1/messages", &request)?;
    let record = place.record.clone();
    Ok(generate(app, place, request).await.inspect_err(|error| record.failed(error.code))?)
}

async fn generate(app: App, place: Place, request: Request) -> Result<Response, ApiError> {
    let (generation, stream) = admit(&app, place, request, request::messages).await?;
    let id = format!("msg_{}", Uuid::new_v4().simple());
    let messages = Messages { id, model: app.frontend.model_id.clone() };
    dialect::answer(&app.frontend, generation, stream, messages).await
}

pub(in crate::http) async fn count_tokens(
    State(app): State<App>,
    request: Request,
) -> Result<Response, AnthropicError> {
    let counted = tokens::answer(app, "/v1/messages/count_tokens", request, |fields, model, text| {
        let input = Input::Chat(request::counted(fields)?);
        let tokens = encode(input, "messages", true, model, text)?;
        Ok(json!({"input_tokens": tokens.len()}))
    });
    Ok(counted.await?)
}

/// Also of an event.
fn error_body(error: &ApiError) -> Value {
    let kind = match error.status {
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

impl From<ApiError> for AnthropicError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        self.0.response(error_body(&self.0))
    }
}
