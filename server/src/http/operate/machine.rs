//! `/machine`: what the server does now, for the page at `/`, and the end of requests by their ids. Totals are
//! everybody's; of requests a key sees and ends its own.

use std::{sync::Arc, time::Duration};

use axum::{Extension, Json, extract::State, http::header, response::IntoResponse};
use serde::Serialize;
use serde_json::{Value, json};

use super::{App, Named, error::ApiError, metrics};
use crate::{
    engine::EngineState,
    frontend::{OfKey, Progress, in_words},
    keys::Key,
    metrics::Snapshot,
    request::RequestError,
};

/// Requests that are told of one by one: the newest that run, and as many that ended.
const MOST_TOLD: usize = 32;

/// A group of workers, with all that it counts.
#[derive(Serialize)]
struct Replica {
    state: &'static str,
    detail: String,
    #[serde(flatten)]
    counted: Snapshot,
}

/// Whose request it is: of a key where keys are asked for, and else nobody's.
type Caller = Option<Extension<Arc<Key>>>;

/// What the server does now. What is counted is told as counted so far: whoever asks again has the rates.
pub(in crate::http) async fn machine(State(app): State<App>, key: Caller) -> impl IntoResponse {
    let frontend = &app.frontend;
    let state = frontend.state();
    let is_draining = state == EngineState::Draining;
    let replicas = frontend.engine.replicas().iter().map(|replica| {
        let own = replica.state.borrow().clone();
        let state = if is_draining { &state } else { &own };
        Replica { state: metrics::word(state), detail: in_words(state), counted: replica.metrics.snapshot() }
    });
    let replicas: Vec<Replica> = replicas.collect();
    let (_, limit) = frontend.requests();
    let OfKey { of_all, running, newest, ended } = frontend.of_key(key.as_deref(), MOST_TOLD);
    let told = |of: &[Progress]| of.iter().map(request).collect::<Vec<_>>();
    let machine = json!({
        "version": env!("CARGO_PKG_VERSION"), "model_id": frontend.model_id, "state": metrics::word(&state),
        "detail": in_words(&state), "replicas": replicas,
        "requests": {
            "served": of_all, "limit": limit, "own": running, "newest": told(&newest), "ended": told(&ended),
        },
    });
    ([(header::CACHE_CONTROL, "no-store")], Json(machine))
}

/// A request, with the seconds from its arrival that it took to each point of its way.
fn request(of: &Progress) -> Value {
    let Progress { id, route, total, phases, choices, prompt_tokens, completion_tokens, reason } = of;
    let seconds = |at: Option<Duration>| at.map(|at| at.as_secs_f64());
    json!({
        "id": id.as_str(), "route": route, "choices": choices, "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens, "reason": reason,
        "seconds": {
            "submitted": seconds(phases.submitted), "admitted": seconds(phases.admitted),
            "computed": seconds(phases.computed), "ended": seconds(phases.ended), "total": total.as_secs_f64(),
        },
    })
}

/// Ends the requests of the caller's key that have this id.
pub(in crate::http) async fn abort(
    State(app): State<App>,
    key: Caller,
    Named(id): Named,
) -> Result<Json<Value>, ApiError> {
    match app.frontend.abort(key.as_deref(), &id) {
        0 => Err(RequestError::NoSuchRequest { id }.into()),
        requests => Ok(Json(json!({"requests": requests}))),
    }
}
