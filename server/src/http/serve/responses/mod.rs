//! `/v1/responses`, as OpenAI has it: answers, and those of them that are kept.

use std::{cell::Cell, sync::Arc};

use axum::{
    Json,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{
    App, Named,
    completions::{admit, enter},
    dialect,
    error::ApiError,
};
use crate::frontend::{Place, unix_seconds};

mod answer;
mod items;
pub(in crate::http) mod request;
mod store;

pub use store::ResponseStore;

use answer::Responses;
use request::Asked;
use store::Stored;

pub(in crate::http) async fn create(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let place = enter(&app, "/v1/responses", &request)?;
    let record = place.record.clone();
    generate(app, place, request).await.inspect_err(|error| record.failed(error.code))
}

async fn generate(app: App, place: Place, request: Request) -> Result<Response, ApiError> {
    let store = app.responses.clone();
    let (generation, asked) = admit(&app, place, request, move |body| request::create(body, &store)).await?;
    let Asked { stream, store, messages, echo, echo_bytes } = asked;
    let responses = Responses {
        id: Uuid::new_v4().simple().to_string(),
        created_at: unix_seconds(),
        model: app.frontend.model_id.clone(),
        echo,
        echo_bytes,
        store: store.then(|| (app.responses.clone(), messages)),
        sequence_number: Cell::new(0),
    };
    dialect::answer(&app.frontend, generation, stream, responses).await
}

pub(in crate::http) async fn get(State(app): State<App>, Named(id): Named) -> Result<Response, ApiError> {
    let stored = find(&app.responses, &id, None)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], stored.body.clone()).into_response())
}

pub(in crate::http) async fn delete(State(app): State<App>, Named(id): Named) -> Result<Json<Value>, ApiError> {
    if app.responses.delete(&id) {
        return Ok(Json(json!({"id": id, "object": "response", "deleted": true})));
    }
    Err(not_kept(&id, None))
}

/// What is kept has ended.
pub(in crate::http) async fn cancel(State(app): State<App>, Named(id): Named) -> Result<Response, ApiError> {
    find(&app.responses, &id, None)?;
    let message = "only responses in the background can be cancelled, and there are none here: close the connection";
    Err(ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message))
}

/// `param`: the field that names it.
fn find(store: &ResponseStore, id: &str, param: Option<&str>) -> Result<Arc<Stored>, ApiError> {
    store.get(id).ok_or_else(|| not_kept(id, param))
}

fn not_kept(id: &str, param: Option<&str>) -> ApiError {
    let message = format!("no response {id:?} is kept: of those with store: true the last are (--response-store)");
    let error = ApiError::new(StatusCode::NOT_FOUND, "response_not_found", message);
    ApiError { param: param.map(str::to_owned), ..error }
}
