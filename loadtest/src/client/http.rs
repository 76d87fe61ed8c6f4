//! Streaming client of one OpenAI-compatible server, over plain HTTP/1.1 with kept connections.
//!
//! It measures, so it takes the time of a chunk when its bytes arrive, before it looks into them. It trusts nothing
//! that it reads: events, error bodies and the number of chunks are bounded, and every way to fail is a [`Failure`].

use std::error::Error;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use crate::client::answer::{Answer, error_code_and_message};
use crate::client::record::{Clock, Failure, RequestRecord};
use crate::client::sse::SseParser;
use crate::text::{chain, printable};

/// Most bytes read of an answer that is no stream: an error body or the list of models.
const MAX_BODY_BYTES: usize = 1 << 20;
/// Receive buffer of a client that reads slowly, which the kernel doubles, and of what it has read but not taken: what
/// a server sends beyond it stays with the server.
const SLOW_READER_BYTES: usize = 8192;
/// How long the end of the body may come after `[DONE]` for the connection to be kept for the next request.
const CLOSING_GRACE: Duration = Duration::from_secs(1);

/// An address that cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error("the target '{0}' is not of the form http://HOST:PORT or grpc://HOST:PORT")]
    Form(String),
    #[error("the target '{0}' needs TLS, which the load tester does not speak: give the server's plain http address")]
    Https(String),
    #[error("the API key holds characters that an HTTP header cannot carry")]
    ApiKey,
}

type Http = legacy::Client<HttpConnector, Full<Bytes>>;

/// Client of one server. Cheap to share; requests run in parallel, each on a connection of its own while it lasts.
#[derive(Debug)]
pub struct Client {
    http: Http,
    slow_http: Http,
    /// Scheme, host and path prefix, without the trailing `/v1`.
    base: String,
    authorization: Option<HeaderValue>,
    timeout: Duration,
}

impl Client {
    /// A client of the server at `target` (`http://host:port`, with or without `/v1`), whose requests each end within
    /// `timeout`. Opens no connection yet.
    pub fn new(target: &str, api_key: Option<&str>, timeout: Duration) -> Result<Self, TargetError> {
        let base = base_of(target)?;
        let authorization = api_key
            .map(|key| {
                let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| TargetError::ApiKey)?;
                value.set_sensitive(true);
                Ok(value)
            })
            .transpose()?;
        let connector = |receive_buffer: Option<usize>| {
            let mut connector = HttpConnector::new();
            connector.set_nodelay(true);
            connector.set_connect_timeout(Some(timeout));
            connector.set_recv_buffer_size(receive_buffer);
            connector
        };
        let http = legacy::Client::builder(TokioExecutor::new()).build(connector(None));
        let slow_http = legacy::Client::builder(TokioExecutor::new())
            .http1_read_buf_exact_size(SLOW_READER_BYTES)
            .build(connector(Some(SLOW_READER_BYTES)));
        Ok(Self { http, slow_http, base, authorization, timeout })
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    pub fn address(&self) -> String {
        let uri: Uri = self.base.parse().expect("a base that was checked");
        let port = uri.port_u16().unwrap_or(80);
        format!("{}:{port}", uri.host().expect("a base that was checked"))
    }

    /// The head of a POST of `body_bytes` bytes of JSON to `path`, as it goes over the wire.
    pub fn head_bytes(&self, path: &str, body_bytes: usize) -> Vec<u8> {
        let uri: Uri = self.base.parse().expect("a base that was checked");
        let (authority, prefix) = (uri.authority().expect("a base that was checked"), uri.path().trim_end_matches('/'));
        let mut head = format!("POST {prefix}{path} HTTP/1.1\r\nhost: {authority}\r\n").into_bytes();
        if let Some(authorization) = &self.authorization {
            head.extend([b"authorization: ", authorization.as_bytes(), b"\r\n"].concat());
        }
        head.extend(format!("content-type: application/json\r\ncontent-length: {body_bytes}\r\n\r\n").bytes());
        head
    }

    pub async fn first_model(&self) -> Result<String, Failure> {
        let bytes = self.get("/v1/models").await?;
        let models: Value = serde_json::from_slice(&bytes).map_err(|error| Failure::BadJson(error.to_string()))?;
        let id = models.pointer("/data/0/id").and_then(Value::as_str);
        id.map(str::to_owned).ok_or_else(|| Failure::BadJson("no model id at /data/0/id".into()))
    }

    /// The text of `/metrics`, or as much of it as is read of any answer.
    pub async fn metrics(&self) -> Result<String, Failure> {
        Ok(String::from_utf8_lossy(&self.get("/metrics").await?).into_owned())
    }

    async fn get(&self, path: &str) -> Result<Bytes, Failure> {
        let ask = async {
            let response = self.send(&self.http, Method::GET, path, Bytes::new()).await?;
            read_bounded(response.into_body()).await
        };
        tokio::time::timeout(self.timeout, ask).await.unwrap_or(Err(Failure::Timeout))
    }

    /// Posts the JSON `body` to `path` and reads the streamed answer into `record`. What arrived before a failure stays
    /// in the record; its `failure` and `ended_ns` are set here.
    pub async fn stream(&self, path: &str, body: Bytes, clock: Clock, record: &mut RequestRecord) {
        let outcome = tokio::time::timeout(self.timeout, self.exchange(path, body, clock, record)).await;
        match outcome.unwrap_or(Err(Failure::Timeout)) {
            // The exchange took the time of [DONE] itself, before it waited for the connection to be free.
            Ok(ended_ns) => record.ended_ns = ended_ns,
            Err(failure) => {
                record.ended_ns = clock.now_ns();
                record.failure = Some(failure);
            }
        }
    }

    async fn exchange(
        &self,
        path: &str,
        body: Bytes,
        clock: Clock,
        record: &mut RequestRecord,
    ) -> Result<u64, Failure> {
        let pause = record.conduct.pause();
        let http = if pause.is_some() { &self.slow_http } else { &self.http };
        let response = self.send(http, Method::POST, path, body).await?;
        require_event_stream(&response)?;
        let mut body = response.into_body();
        let (mut parser, mut events) = (SseParser::default(), Vec::new());
        let mut answer = Answer::new(record);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Failure::ConnectionLost(chain(&error)))?;
            let now_ns = clock.now_ns();
            let Some(bytes) = frame.data_ref() else { continue };
            parser.push(bytes, &mut events)?;
            for event in events.drain(..) {
                answer.take_event(&event, now_ns)?;
                if let Some(pause) = pause {
                    tokio::time::sleep(pause).await;
                }
            }
            if answer.is_done() {
                // Reading on to the end of the body lets the connection serve the next request; dropping it would look
                // to the server like a client that went away.
                let _ =
                    tokio::time::timeout(CLOSING_GRACE, async { while let Some(Ok(_)) = body.frame().await {} }).await;
                return if answer.has_finish_reason() { Ok(now_ns) } else { Err(Failure::NoFinishReason) };
            }
        }
        if answer.has_finish_reason() && !parser.is_mid_event() { Ok(clock.now_ns()) } else { Err(Failure::Truncated) }
    }

    /// Sends one request and returns its answer if that is a 200.
    async fn send(&self, http: &Http, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| Failure::Connect(error.to_string()))?;
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let response = http.request(request).await.map_err(|error| failure_of(&error))?;
        if response.status() == StatusCode::OK { Ok(response) } else { Err(status_failure(response).await) }
    }
}

/// `target` without trailing slashes and `/v1`, checked to be something that can be connected to.
fn base_of(target: &str) -> Result<String, TargetError> {
    let malformed = || TargetError::Form(printable(target, 200));
    let uri: Uri = target.trim().parse().map_err(|_| malformed())?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err(TargetError::Https(printable(target, 200))),
        _ => return Err(malformed()),
    }
    let authority = uri.authority().ok_or_else(malformed)?;
    if uri.query().is_some() || authority.host().is_empty() || authority.as_str().contains('@') {
        return Err(malformed());
    }
    let path = uri.path().trim_end_matches('/');
    let prefix = path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/');
    Ok(format!("http://{authority}{prefix}"))
}

fn require_event_stream(response: &Response<Incoming>) -> Result<(), Failure> {
    let content_type = response.headers().get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if content_type.to_ascii_lowercase().starts_with(b"text/event-stream") {
        return Ok(());
    }
    Err(Failure::NotAnEventStream(printable(&String::from_utf8_lossy(content_type), 80)))
}

async fn status_failure(response: Response<Incoming>) -> Failure {
    let status = response.status();
    // The status is the finding; a body that cannot be read in full only costs its message.
    let (bytes, lost) = match read_bounded(response.into_body()).await {
        Ok(bytes) => (bytes, None),
        Err(failure) => (Bytes::new(), Some(failure)),
    };
    let (code, message) = match serde_json::from_slice::<Value>(&bytes) {
        Ok(body) => error_code_and_message(body.get("error").unwrap_or(&body)),
        Err(_) => (None, printable(&String::from_utf8_lossy(&bytes), 200)),
    };
    Failure::Status { status, code, message: lost.map_or(message, |failure| failure.to_string()) }
}

/// The first [`MAX_BODY_BYTES`] of a body.
async fn read_bounded(mut body: Incoming) -> Result<Bytes, Failure> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Failure::ConnectionLost(chain(&error)))?;
        let data = frame.data_ref().map_or(&[][..], |data| data);
        let room = MAX_BODY_BYTES - bytes.len();
        bytes.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            break;
        }
    }
    Ok(bytes.freeze())
}

fn failure_of(error: &legacy::Error) -> Failure {
    if error.is_connect() {
        return Failure::Connect(chain(error));
    }
    let parse_error = error.source().and_then(|source| source.downcast_ref::<hyper::Error>()).filter(|e| e.is_parse());
    match parse_error {
        Some(error) => Failure::NotHttp(chain(error)),
        None => Failure::ConnectionLost(chain(error)),
    }
}

#[cfg(test)]
mod tests;
