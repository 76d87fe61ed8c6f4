//! Requests, over HTTP and gRPC.

use serde_json::Value;

use crate::{
    client::{Response, post},
    conform,
    pick::Pick,
};

const GRPC_METHODS: [&str; 7] = ["Generate", "Chat", "Tokenize", "Detokenize", "Abort", "GetModel", "GetLoad"];
/// INTERNAL, UNKNOWN, UNAVAILABLE and DATA_LOSS: none of them is a client's to mend.
const SERVER_FAULTS: [&str; 4] = ["13", "2", "14", "15"];

pub fn chat(body: &[u8]) {
    ask("/v1/chat/completions", body);
}

pub fn completions(body: &[u8]) {
    ask("/v1/completions", body);
}

pub fn messages(body: &[u8]) {
    ask("/v1/messages", body);
}

pub fn responses(body: &[u8]) {
    ask("/v1/responses", body);
}

pub fn tokenize(body: &[u8]) {
    ask("/tokenize", body);
}

pub fn detokenize(body: &[u8]) {
    ask("/detokenize", body);
}

/// The answer has the shape that `/openapi.json` says, whole or as a stream. A refusal is the client's to mend, and
/// names the field.
fn ask(path: &str, body: &[u8]) {
    let response = post(path, "application/json", body.to_vec());
    conform::check("POST", path, &response);
    if response.status == 200 {
        return check_stream(path, &response);
    }
    assert!((400..500).contains(&response.status), "{path}: {} {}", response.status, response.body);
    let error = &response.json()["error"];
    let message = error["message"].as_str().unwrap_or_default();
    assert!(!message.is_empty() && message.len() < body.len() * 8 + 1000, "{path}: {error}");
    let Some(field) = error["param"].as_str() else { return };
    assert!(!field.is_empty() && message.contains(field), "{path}: the message does not name {field:?}: {error}");
    // What is missing, or too long as a whole, need not stand there.
    if matches!(error["code"].as_str(), Some("missing_required_parameter" | "context_length_exceeded")) {
        return;
    }
    let Ok(Value::Object(fields)) = serde_json::from_slice(body) else { return };
    let named =
        |key: &String| field.strip_prefix(key.as_str()).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric));
    assert!(fields.keys().any(named), "{path}: there is no field {field:?}: {error}");
}

/// A stream has an end in the way of its API.
fn check_stream(path: &str, response: &Response) {
    if response.header("content-type").is_none_or(|kind| !kind.starts_with("text/event-stream")) {
        return;
    }
    let last = match path {
        "/v1/messages" => "message_stop",
        "/v1/responses" => "response.",
        _ => "[DONE]",
    };
    let events: Vec<&str> = response.body.split_terminator("\n\n").collect();
    assert!(response.body.ends_with("\n\n") && events.last().is_some_and(|event| event.contains(last)), "{response:?}");
}

/// The first byte is the method, the rest its message. A refusal is the client's to mend, and has words.
pub fn grpc(bytes: &[u8]) {
    let mut pick = Pick(bytes);
    let method = pick.of(&GRPC_METHODS);
    let mut body = vec![0];
    body.extend((pick.0.len() as u32).to_be_bytes());
    body.extend(pick.0);
    let response = post(&format!("/looplane.inference.v1.Inference/{method}"), "application/grpc", body);
    assert_eq!(response.status, 200, "{method}: {response:?}");
    let told = |name: &str| {
        let value = response.trailers.get(name).or_else(|| response.headers.get(name));
        value.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let (code, message) = (told("grpc-status"), told("grpc-message"));
    assert!(!code.is_empty() && !SERVER_FAULTS.contains(&code.as_str()), "{method}: {code:?} {message}");
    assert!(code == "0" || !message.is_empty(), "{method}: {code} without words");
}
