//! What the server is and how busy it is: `/server_info`, `/load`, `/version`.

use axum::{Json, extract::State};
use serde::Serialize;
use serde_json::{Value, json};

use super::{App, can_chat, metrics};

/// What `/server_info` tells of the options: nothing that is secret.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Settings {
    /// Connections open at one time.
    pub max_connections: usize,
    /// Requests served at one time.
    pub max_concurrent_requests: usize,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Responses that are kept.
    pub response_store: usize,
    /// Running requests have so long to end when the server does, in seconds.
    pub drain_seconds: u64,
    /// TLS is spoken.
    pub tls: bool,
    /// Requests need a key.
    pub api_keys: bool,
}

/// vLLM's has the names of its own configuration; these are ours.
pub(in crate::http) async fn server_info(State(app): State<App>) -> Json<Value> {
    let frontend = &app.frontend;
    let model = frontend.engine.model().map(|model| {
        json!({
            "architecture": model.architecture, "digest": model.model_digest, "vocab_size": model.vocab_size,
            "max_model_len": model.max_context, "tensor_parallel_size": model.tensor_parallel,
            "system_fingerprint": model.bit_domain,
        })
    });
    let text = &frontend.text;
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"), "state": metrics::word(&frontend.state()),
        "started": frontend.started, "model_id": frontend.model_id, "model": model,
        "chat": {"template": can_chat(&app), "tools": text.takes_tools, "reasoning": text.thinks},
        "settings": app.settings,
    }))
}

/// Requests that are being served, queued ones among them; as vLLM has it.
pub(in crate::http) async fn load(State(app): State<App>) -> Json<Value> {
    Json(json!({"server_load": app.frontend.requests().0}))
}

/// This server's.
pub(in crate::http) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}
