//! The shape of `/machine`.

use serde_json::{Value, json};

use super::{list, object, one_of, or_null, text};

/// Everything that the page at `/` shows of the machine.
pub(super) fn schema() -> Value {
    let (text, count) = (&text(), &json!({"type": "integer", "minimum": 0}));
    let seconds = &json!({"type": "number", "minimum": 0});
    let maybe = &or_null(seconds);
    let state = &one_of(&["ready", "loading", "recovering", "draining", "failed"]);
    let times = &object(&[("count", count), ("seconds", seconds)]);
    let step = object(&[("seconds", seconds), ("wait_seconds", maybe), ("read_bytes", count)]);
    let rank = object(&[
        ("step_seconds", seconds),
        ("wait_seconds", maybe),
        ("read_bytes", count),
        ("read_limit", &or_null(count)),
        ("newest_step", &step),
    ]);
    let replica = object(&[
        ("state", state),
        ("detail", text),
        ("running", count),
        ("waiting", count),
        ("preemptions", count),
        ("losses", count),
        ("kv_pages", count),
        ("kv_pages_used", count),
        ("kv_pages_cached", count),
        ("prompt_tokens", count),
        ("generated_tokens", count),
        ("cache_queries", count),
        ("cache_hits", count),
        ("drafted_tokens", count),
        ("accepted_tokens", count),
        ("first_token", times),
        ("inter_token", times),
        ("steps", times),
        ("ranks", &list(&rank)),
    ]);
    let reached =
        object(&[("submitted", maybe), ("admitted", maybe), ("computed", maybe), ("ended", maybe), ("total", seconds)]);
    let request = object(&[
        ("id", text),
        ("route", text),
        ("choices", count),
        ("prompt_tokens", count),
        ("completion_tokens", count),
        ("reason", &or_null(text)),
        ("seconds", &reached),
    ]);
    let requests = object(&[
        ("served", count),
        ("limit", count),
        ("own", count),
        ("newest", &list(&request)),
        ("ended", &list(&request)),
    ]);
    object(&[
        ("version", text),
        ("model_id", text),
        ("state", state),
        ("detail", text),
        ("replicas", &list(&replica)),
        ("requests", &requests),
    ])
}
