//! A server with a fixed time to first token and between tokens: what [`crate::run::calibrate`] measures the load
//! tester against, and with its faults what a client must survive.
//!
//! Every token has a due time of its own, counted from the request's arrival, so that a late one does not delay the
//! next. Text and counts are made up.

use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body_util::{BodyExt, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::signals::stdin_closed;
use crate::text::parse_duration;
use metrics::Counts;

mod metrics;
#[cfg(test)]
mod seen;

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Longest request that is read: a million tokens of prompt fit.
const MAX_REQUEST_BYTES: usize = 1 << 26;
/// Tokens of an answer where the request names no number.
const DEFAULT_TOKENS: u64 = 4;
/// Pause before a connection breaks: lets the last token leave.
const BREAK_AFTER: Duration = Duration::from_millis(50);

/// A server to measure the load tester against.
#[derive(Debug, Clone, clap::Args)]
pub struct MockArgs {
    /// Port of 127.0.0.1 to listen on; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    pub port: u16,

    /// Time from a request to its first token
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_duration)]
    pub ttft: Duration,

    /// Time between tokens
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_duration)]
    pub itl: Duration,

    /// End when standard input does
    #[arg(long, hide = true)]
    pub until_stdin_closes: bool,
}

/// What the mock does instead of answering well.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Nothing.
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
    /// Sends nothing from the first offset to the second, counted from the first request, and then all that was due.
    Pause(Duration, Duration),
    /// Answers the same prompt with another text each time.
    Fickle,
    /// Answers so many at a time; the others wait.
    Slots(usize),
    /// Has no `/metrics`.
    NoMetrics,
}

/// What the mock does.
#[derive(Debug, Clone, Copy)]
pub struct Mock {
    /// From the arrival of a request to its first token.
    pub ttft: Duration,
    /// Between the due times of two tokens.
    pub itl: Duration,
    /// What goes wrong.
    pub fault: Fault,
}

impl Default for Mock {
    fn default() -> Self {
        Self { ttft: Duration::ZERO, itl: Duration::ZERO, fault: Fault::None }
    }
}

struct State {
    mock: Mock,
    started: OnceLock<Instant>,
    slots: Arc<Semaphore>,
    counts: Arc<Counts>,
    #[cfg(test)]
    seen: seen::Seen,
}

/// What happens at a due time of an answer.
#[derive(Clone)]
enum Step {
    Send(Bytes),
    Break,
    HoldOpen,
}

/// Serves the mock that `args` describe until Ctrl-C; says its address on standard output first.
///
/// # Errors
/// A port that cannot be listened on, and a standard output that is closed.
pub async fn run(args: &MockArgs) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", args.port))
        .await
        .with_context(|| format!("the mock cannot listen on 127.0.0.1:{} (--port)", args.port))?;
    writeln!(io::stdout(), "http://{}", listener.local_addr()?).context("cannot say the mock's address")?;
    let serving = Mock { ttft: args.ttft, itl: args.itl, fault: Fault::None }.serve_on(listener);
    let end = async {
        match args.until_stdin_closes {
            true => stdin_closed().await,
            false => tokio::signal::ctrl_c().await.context("cannot wait for Ctrl-C")?,
        }
        Ok(())
    };
    tokio::select! {
        () = serving => Ok(()),
        ended = end => ended,
    }
}

impl Mock {
    /// Answers every connection to `listener`; never returns.
    pub async fn serve_on(self, listener: TcpListener) {
        State::new(self).serve(listener).await;
    }
}

impl State {
    fn new(mock: Mock) -> Arc<Self> {
        let slots = if let Fault::Slots(slots) = mock.fault { slots } else { Semaphore::MAX_PERMITS };
        Arc::new(Self {
            mock,
            started: OnceLock::new(),
            slots: Arc::new(Semaphore::new(slots)),
            counts: Arc::default(),
            #[cfg(test)]
            seen: seen::Seen::default(),
        })
    }

    async fn serve(self: Arc<Self>, listener: TcpListener) {
        loop {
            let Ok((socket, _)) = listener.accept().await else {
                // Out of sockets: some will be free again.
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            // A token that waits for the next one would be measured late; a socket that is gone already needs none.
            let _ = socket.set_nodelay(true);
            #[cfg(test)]
            self.seen.add_connection();
            let state = self.clone();
            let service = service_fn(move |request| answer(state.clone(), request));
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service));
        }
    }
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let arrived = Instant::now();
    let started = *state.started.get_or_init(|| arrived);
    let is_chat = match request.uri().path() {
        "/v1/chat/completions" => true,
        "/v1/completions" => false,
        "/v1/models" => return Ok(whole(StatusCode::OK, r#"{"object":"list","data":[{"id":"mock"}]}"#)),
        "/metrics" if !matches!(state.mock.fault, Fault::NoMetrics) => {
            let text = Full::new(state.counts.text().into()).map_err(|never| match never {});
            return Ok(Response::new(text.boxed_unsync()));
        }
        _ => return Ok(whole(StatusCode::NOT_FOUND, r#"{"error":{"message":"the mock has no such path"}}"#)),
    };
    let (head, body) = request.into_parts();
    let bytes = Limited::new(body, MAX_REQUEST_BYTES).collect().await.map(|body| body.to_bytes());
    let Some(body) = bytes.ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()) else {
        let error = r#"{"error":{"message":"the request's body is no JSON","type":"invalid_request_error"}}"#;
        return Ok(whole(StatusCode::BAD_REQUEST, error));
    };
    #[cfg(test)]
    state.seen.add_request(&head, &body);
    #[cfg(not(test))]
    drop(head);

    let mock = state.mock;
    let mut begun = arrived;
    match mock.fault {
        Fault::Status(status, text) => {
            return Ok(whole(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), text));
        }
        Fault::Stall(from, to) if (from..to).contains(&started.elapsed()) => {
            begun = started + to;
            tokio::time::sleep_until(begun).await;
        }
        _ => {}
    }
    if !body["max_tokens"].is_null() && !body["max_tokens"].is_u64() {
        let error = r#"{"error":{"message":"max_tokens is no number","type":"invalid_request_error"}}"#;
        return Ok(whole(StatusCode::BAD_REQUEST, error));
    }
    let waiting = state.counts.arrive();
    let slot = state.slots.clone().acquire_owned().await;
    let answering = waiting.begin(prompt_tokens(&body) as u64, tokens(&body).into());
    if matches!(mock.fault, Fault::Slots(_)) {
        begun = Instant::now();
    }
    // The answer holds its slot until it has ended, however it does.
    let held = stream::once(async move { drop((slot, answering)) }).filter_map(async |()| None);
    let word = if matches!(mock.fault, Fault::Fickle) { format!("{:?} ", started.elapsed()) } else { "word ".into() };
    let frames = stream::iter(mock.steps(&body, is_chat, &word)).then(move |(after, step)| async move {
        tokio::time::sleep_until(begun + after).await;
        if let Fault::Pause(from, to) = mock.fault
            && (from..to).contains(&started.elapsed())
        {
            tokio::time::sleep_until(started + to).await;
        }
        match step {
            Step::Send(data) => Ok(Frame::data(data)),
            Step::Break => Err(io::Error::other("the mock breaks off")),
            Step::HoldOpen => std::future::pending().await,
        }
    });
    let content_type =
        if let Fault::ContentType(other) = mock.fault { other } else { "text/event-stream; charset=utf-8" };
    #[cfg(test)]
    let frames = frames.inspect(move |_| state.seen.add_frame());
    let body = StreamBody::new(frames.chain(held)).boxed_unsync();
    Ok(Response::builder().header(CONTENT_TYPE, content_type).body(body).expect("a constant head"))
}

impl Mock {
    /// What is sent for `request`, each with its time after the request's arrival; each token says `word`.
    fn steps(self, request: &Value, is_chat: bool, word: &str) -> Vec<(Duration, Step)> {
        let choice = |text: &str, reason: Value| match is_chat {
            true => json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}),
            false => json!({"choices": [{"index": 0, "text": text, "finish_reason": reason}]}),
        };
        let event = |data: &Value| Step::Send(format!("data: {data}\n\n").into());
        let tokens = tokens(request);

        let mut steps = Vec::new();
        if is_chat {
            let role = json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]});
            steps.push((Duration::ZERO, Step::Send(format!(": keep-alive\n\ndata: {role}\n\n").into())));
        }
        if let Fault::Data(data) = self.fault {
            steps.push((Duration::ZERO, Step::Send(format!("data: {data}\n\n").into())));
        }
        if let Fault::EndlessLine = self.fault {
            let part = Bytes::from(vec![b'x'; 1 << 16]);
            steps.extend(std::iter::repeat_n((Duration::ZERO, Step::Send(part)), 64));
            return steps;
        }
        let sent = match self.fault {
            Fault::CloseAfter(limit) | Fault::EndAfter(limit) => tokens.min(limit as u32),
            _ => tokens,
        };
        let token = event(&choice(word, Value::Null));
        steps.extend((0..sent).map(|index| (self.ttft + self.itl * index, token.clone())));
        let end = self.ttft + self.itl * sent.saturating_sub(1);
        match self.fault {
            Fault::EndAfter(_) => return steps,
            Fault::CloseAfter(_) => {
                steps.push((end + BREAK_AFTER, Step::Break));
                return steps;
            }
            _ => {}
        }
        steps.push((end, event(&choice("", json!("length")))));
        if !matches!(self.fault, Fault::NoUsage) {
            let usage = json!({"prompt_tokens": prompt_tokens(request), "completion_tokens": tokens});
            steps.push((end, event(&json!({"choices": [], "usage": usage}))));
        }
        if !matches!(self.fault, Fault::NoDone) {
            steps.push((end, Step::Send(Bytes::from_static(b"data: [DONE]\n\n"))));
        }
        if matches!(self.fault, Fault::HoldOpen) {
            steps.push((end, Step::HoldOpen));
        }
        steps
    }
}

/// Tokens of the answer to `request`.
fn tokens(request: &Value) -> u32 {
    request["max_tokens"].as_u64().unwrap_or(DEFAULT_TOKENS) as u32
}

/// Two tokens a word and three for the template, so that words and tokens cannot be confused.
fn prompt_tokens(request: &Value) -> usize {
    let prompt = request.pointer("/messages/0/content").or(request.get("prompt")).and_then(Value::as_str).unwrap_or("");
    3 + 2 * prompt.split_whitespace().count()
}

fn whole(status: StatusCode, text: &'static str) -> Response<Body> {
    let body = Full::new(Bytes::from_static(text.as_bytes())).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).header(CONTENT_TYPE, "application/json").body(body).expect("a constant head")
}

/// A mock of a test that listens; it stops with the test's runtime.
#[cfg(test)]
pub struct Served {
    /// Its address.
    pub base: String,
    state: Arc<State>,
}

#[cfg(test)]
impl std::ops::Deref for Served {
    type Target = seen::Seen;

    fn deref(&self) -> &Self::Target {
        &self.state.seen
    }
}

#[cfg(test)]
impl Mock {
    /// Starts to answer on a free port.
    pub async fn serve(self) -> Served {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        let state = State::new(self);
        tokio::spawn(state.clone().serve(listener));
        Served { base, state }
    }
}
