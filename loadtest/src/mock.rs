//! A server for tests: OpenAI's streaming answers with a fixed time to first token and between tokens, and with every
//! fault that a client must survive.

use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

type Body = UnsyncBoxBody<Bytes, io::Error>;
type Frames = mpsc::Sender<Result<Frame<Bytes>, io::Error>>;

/// What the mock does instead of answering well.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    None,
    /// Answers with this status and body.
    Status(u16, &'static str),
    /// Breaks the connection after so many tokens.
    CloseAfter(usize),
    /// Ends the body in order after so many tokens, without finish reason.
    EndAfter(usize),
    /// Sends this data as the first event.
    Data(&'static str),
    /// Answers with another content type.
    ContentType(&'static str),
    /// Sends a line without end.
    EndlessLine,
    /// Leaves out `[DONE]`.
    NoDone,
    /// Keeps the body open after `[DONE]`.
    HoldOpen,
    /// Leaves out the usage chunk.
    NoUsage,
    /// Answers nothing from the first offset to the second, counted from the first request.
    Stall(Duration, Duration),
}

/// What the mock does.
#[derive(Debug, Clone, Copy)]
pub struct Mock {
    pub ttft: Duration,
    pub itl: Duration,
    pub fault: Fault,
}

impl Default for Mock {
    fn default() -> Self {
        Self { ttft: Duration::ZERO, itl: Duration::ZERO, fault: Fault::None }
    }
}

/// A mock that listens; it stops with the test's runtime.
pub struct Served {
    pub base: String,
    state: Arc<State>,
}

struct State {
    mock: Mock,
    started: Mutex<Option<Instant>>,
    requests: Mutex<Vec<Value>>,
    connections: AtomicUsize,
}

impl Mock {
    pub async fn serve(self) -> Served {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        let state = Arc::new(State {
            mock: self,
            started: Mutex::default(),
            requests: Mutex::default(),
            connections: AtomicUsize::new(0),
        });
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).expect("a fresh socket");
                shared.connections.fetch_add(1, Ordering::Relaxed);
                let state = shared.clone();
                let service = service_fn(move |request| answer(state.clone(), request));
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service),
                );
            }
        });
        Served { base, state }
    }
}

impl Served {
    /// Every generation request so far, in order of arrival, with its `path` and `authorization` added to the body.
    pub fn requests(&self) -> Vec<Value> {
        self.state.requests.lock().expect("no holder panics").clone()
    }

    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    if request.uri().path() == "/v1/models" {
        return Ok(whole(StatusCode::OK, r#"{"object":"list","data":[{"id":"mock"}]}"#));
    }
    let path = request.uri().path().to_owned();
    let authorization = request.headers().get(AUTHORIZATION).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let bytes = request.into_body().collect().await.expect("the client under test sends whole bodies").to_bytes();
    let mut body: Value = serde_json::from_slice(&bytes).expect("the client under test sends JSON");
    body["path"] = json!(path);
    body["authorization"] = json!(authorization);
    state.requests.lock().expect("no holder panics").push(body.clone());
    let started = *state.started.lock().expect("no holder panics").get_or_insert_with(Instant::now);

    let mock = state.mock;
    match mock.fault {
        Fault::Status(status, text) => return Ok(whole(StatusCode::from_u16(status).expect("a status"), text)),
        Fault::Stall(from, to) if (from..to).contains(&started.elapsed()) => {
            tokio::time::sleep_until(started + to).await;
        }
        _ => {}
    }
    let (frames, receiver) = mpsc::channel(1);
    tokio::spawn(stream(mock, body, frames));
    let content_type =
        if let Fault::ContentType(other) = mock.fault { other } else { "text/event-stream; charset=utf-8" };
    let body = StreamBody::new(ReceiverStream::new(receiver)).boxed_unsync();
    Ok(Response::builder().header(CONTENT_TYPE, content_type).body(body).expect("a constant head"))
}

/// Sends the events of one answer; stops when the client has gone.
async fn stream(mock: Mock, request: Value, frames: Frames) {
    let is_chat = request["path"] == "/v1/chat/completions";
    let choice = |text: &str, reason: Value| match is_chat {
        true => json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}),
        false => json!({"choices": [{"index": 0, "text": text, "finish_reason": reason}]}),
    };
    let tokens = request["max_tokens"].as_u64().unwrap_or(4) as usize;
    let prompt = request.pointer("/messages/0/content").or(request.get("prompt")).and_then(Value::as_str).unwrap_or("");
    // Two tokens a word and three for the template, so that words and tokens cannot be confused.
    let prompt_tokens = 3 + 2 * prompt.split_whitespace().count();

    let mut events = Vec::new();
    if is_chat {
        let role = json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]});
        events.push((Duration::ZERO, format!(": keep-alive\n\ndata: {role}\n\n")));
    }
    if let Fault::Data(data) = mock.fault {
        events.push((Duration::ZERO, format!("data: {data}\n\n")));
    }
    let tokens_sent = if let Fault::EndlessLine = mock.fault { 0 } else { tokens };
    for token in 0..tokens_sent {
        if matches!(mock.fault, Fault::CloseAfter(limit) | Fault::EndAfter(limit) if limit == token) {
            break;
        }
        let pause = if token == 0 { mock.ttft } else { mock.itl };
        events.push((pause, format!("data: {}\n\n", choice("word ", Value::Null))));
    }
    if !matches!(mock.fault, Fault::CloseAfter(_) | Fault::EndAfter(_) | Fault::EndlessLine) {
        events.push((Duration::ZERO, format!("data: {}\n\n", choice("", json!("length")))));
        if !matches!(mock.fault, Fault::NoUsage) {
            let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": tokens});
            events.push((Duration::ZERO, format!("data: {}\n\n", json!({"choices": [], "usage": usage}))));
        }
    }
    if !matches!(mock.fault, Fault::CloseAfter(_) | Fault::EndAfter(_) | Fault::EndlessLine | Fault::NoDone) {
        events.push((Duration::ZERO, "data: [DONE]\n\n".into()));
    }
    for (pause, event) in events {
        tokio::time::sleep(pause).await;
        if frames.send(Ok(Frame::data(event.into()))).await.is_err() {
            return;
        }
    }
    finish(mock.fault, frames).await;
}

async fn finish(fault: Fault, frames: Frames) {
    match fault {
        Fault::CloseAfter(_) => {
            // Lets the last token leave before the connection breaks.
            tokio::time::sleep(Duration::from_millis(50)).await;
            let _ = frames.send(Err(io::Error::other("the mock breaks off"))).await;
        }
        Fault::HoldOpen => frames.closed().await,
        Fault::EndlessLine => while frames.send(Ok(Frame::data(Bytes::from(vec![b'x'; 1 << 16])))).await.is_ok() {},
        _ => {}
    }
}

fn whole(status: StatusCode, text: &'static str) -> Response<Body> {
    let body = Full::new(Bytes::from_static(text.as_bytes())).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).header(CONTENT_TYPE, "application/json").body(body).expect("a constant head")
}
