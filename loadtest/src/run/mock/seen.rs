//! What a mock of a test was asked and sent.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::header::AUTHORIZATION;
use hyper::http::request::Parts;
use serde_json::{Value, json};

#[derive(Default)]
pub struct Seen {
    requests: Mutex<Vec<Value>>,
    connections: AtomicUsize,
    frames: AtomicUsize,
}

impl Seen {
    pub fn add_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_frame(&self) {
        self.frames.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_request(&self, head: &Parts, body: &Value) {
        let mut request = body.clone();
        request["path"] = json!(head.uri.path());
        request["authorization"] = json!(head.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()));
        self.requests.lock().expect("no holder panics").push(request);
    }

    /// Every generation request so far, in order of arrival, with its `path` and `authorization` added to the body.
    pub fn requests(&self) -> Vec<Value> {
        self.requests.lock().expect("no holder panics").clone()
    }

    /// Frames of answers that were handed to connections so far.
    pub fn frames(&self) -> usize {
        self.frames.load(Ordering::Relaxed)
    }

    /// Connections that were made so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}
