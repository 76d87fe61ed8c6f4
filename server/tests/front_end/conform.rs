//! Holds every answer that a test here reads to the server's own document, `/openapi.json`.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex},
};

use jsonschema::Validator;
use looplane_server::http;
use serde_json::{Value, json};

use crate::client::Response;

static DOCUMENT: LazyLock<Value> = LazyLock::new(http::document);

/// The answer has the media type that the document names for its route and status, and the shape.
///
/// # Panics
/// It has not.
pub fn check(method: &str, path: &str, response: &Response) {
    let path = path.split('?').next().expect("there is a first part");
    let Some(operation) = operation(method, path) else { return };
    let status = response.status.to_string();
    let told = operation["responses"].get(&status).unwrap_or(&operation["responses"]["default"]);
    assert!(status == "200" || status == "503" || told == &operation["responses"]["default"], "{method} {path}");
    let content = match told["$ref"].as_str() {
        Some(at) => &DOCUMENT.pointer(&at[1..]).expect("what is referred to is there")["content"],
        None => &told["content"],
    };
    let kind = response.header("content-type").and_then(|kind| kind.split(';').next()).unwrap_or("none");
    let media = content.get(kind).unwrap_or_else(|| panic!("{method} {path}: {status} with {kind}, not in {content}"));
    match kind {
        "application/json" => hold(&media["schema"], &response.json(), path),
        "text/event-stream" => {
            let data = response.body.lines().filter_map(|line| line.strip_prefix("data: "));
            for data in data.filter(|data| *data != "[DONE]") {
                // A test may cut its connection.
                let Ok(event) = serde_json::from_str(data) else { continue };
                hold(&media["x-event-schema"], &event, path);
            }
        }
        _ => {}
    }
}

fn operation(method: &str, path: &str) -> Option<&'static Value> {
    let exact = DOCUMENT["paths"].get(path);
    let named = || {
        let action = ["/cancel", "/restart"].into_iter().find(|action| path.ends_with(action)).unwrap_or("");
        let (of, _) = path.strip_suffix(action).unwrap_or(path).rsplit_once('/')?;
        DOCUMENT["paths"].get(format!("{of}/{{id}}{action}"))
    };
    exact.or_else(named)?.get(method.to_ascii_lowercase())
}

fn hold(schema: &Value, value: &Value, path: &str) {
    static VALIDATORS: LazyLock<Mutex<HashMap<String, Arc<Validator>>>> = LazyLock::new(Mutex::default);
    let validator = VALIDATORS
        .lock()
        .unwrap()
        .entry(schema.to_string())
        .or_insert_with(|| {
            let whole = json!({"allOf": [schema], "components": DOCUMENT["components"]});
            Arc::new(jsonschema::draft202012::new(&whole).expect("the document's schemas are valid"))
        })
        .clone();
    let problems: Vec<String> =
        validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path)).collect();
    assert!(problems.is_empty(), "{path} answers {value}, not as {schema} has it: {problems:?}");
}
