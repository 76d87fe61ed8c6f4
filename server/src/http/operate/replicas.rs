//! `/replicas`: how each replica is, and new workers for one of them.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Request, State},
    http::StatusCode,
};
use serde_json::{Value, json};

use super::{
    App, Named, completions::check_content_type, error::ApiError, fields::Fields, json::parse as parse_json, metrics,
    nothing_at,
};
use crate::{
    frontend::in_words,
    keys::Key,
    request::{ranges, ranges::RESTART_LIMIT_SECONDS},
};

pub(in crate::http) async fn list(State(app): State<App>) -> Json<Value> {
    let all: Vec<Value> = (0..app.frontend.engine.replicas().len()).map(|replica| describe(&app, replica)).collect();
    Json(json!({"replicas": all}))
}

/// Answers once the restart has begun: the end shows in the list.
pub(in crate::http) async fn restart(
    State(app): State<App>,
    Named(number): Named,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let key = request.extensions().get::<Arc<Key>>().cloned();
    app.may_operate(key.as_deref())?;
    let replica: usize = number.parse().map_err(|_| nothing_at(request.uri().path()))?;
    check_content_type(request.headers())?;
    let (head, body) = request.into_parts();
    let body = app.frontend.read(head.extensions.get(), body).await?;
    let asked = read_restart(parse_json(&body.blocks, 0)?)?;
    let limit = asked.limit_seconds.unwrap_or(app.settings.drain_seconds);
    let key = key.as_ref().map(|key| &*key.id);
    tracing::info!(key, "replica {replica} is asked to restart");
    app.frontend.engine.restart(replica, Duration::from_secs(limit), asked.even_if_last).await?;
    Ok(Json(describe(&app, replica)))
}

/// What `/replicas/{id}/restart` is asked.
pub(in crate::http) struct Restart {
    limit_seconds: Option<u64>,
    even_if_last: bool,
}

pub(in crate::http) fn read_restart(body: Value) -> Result<Restart, ApiError> {
    let mut fields = Fields::new(body, "")?;
    let limit = fields.integer("limit_seconds", RESTART_LIMIT_SECONDS)?;
    let limit = limit.map(|limit| ranges::integer("limit_seconds", limit, &RESTART_LIMIT_SECONDS)).transpose()?;
    let even_if_last = fields.boolean("even_if_last")?.unwrap_or(false);
    fields.finish()?;
    Ok(Restart { limit_seconds: limit.map(i64::unsigned_abs), even_if_last })
}

fn describe(app: &App, replica: usize) -> Value {
    let of = &app.frontend.engine.replicas()[replica];
    let state = app.frontend.state_of(of);
    let load = of.metrics.load();
    json!({
        "id": replica, "state": metrics::word(&state), "detail": in_words(&state),
        "running": load.running, "waiting": load.waiting,
    })
}

impl App {
    /// Whether who asks may change how the server runs: with a key that is marked for it, or where there are none from
    /// this machine.
    fn may_operate(&self, key: Option<&Key>) -> Result<(), ApiError> {
        let message = match (&self.access.keys, key) {
            (Some(_), Some(key)) if key.is_admin() => return Ok(()),
            (Some(_), _) => "this API key may not: `looplane key ID --admin` draws one that may",
            (None, _) if self.is_local => return Ok(()),
            (None, _) => {
                "whoever reaches this server could: ask for keys (--api-key-file, --api-key), or listen on 127.0.0.1 \
                 only (--host)"
            }
        };
        Err(ApiError::new(StatusCode::FORBIDDEN, "not_allowed", message))
    }
}
