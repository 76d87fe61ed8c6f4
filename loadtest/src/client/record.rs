//! What one request did: its times, its tokens, and how it ended.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::time::Instant;
use tonic::Code;

use crate::load::conduct::Conduct;

/// Most token times kept for one request; a stream with more chunks than this is refused as [`Failure::TooManyChunks`].
pub const MAX_CHUNKS: usize = 1 << 20;

/// Most bytes of text kept of one answer; a longer one is refused as [`Failure::TextTooLong`].
pub const MAX_TEXT_BYTES: usize = 1 << 22;

/// The clock of one run: nanoseconds since its start.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn now_ns(self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }

    /// Sleeps until `offset` after the start; returns at once if that is past.
    pub async fn sleep_until(self, offset: Duration) {
        tokio::time::sleep_until(self.0 + offset).await;
    }
}

/// Looks on while requests are answered.
pub trait Watch: Debug + Send + Sync {
    /// A chunk arrived `since_ns` after the chunk before it, or after its request was due if it is the first.
    fn chunk(&self, is_first: bool, since_ns: u64);
}

/// One request, from the moment it was due to its last byte. All times are nanoseconds since the start of the run.
#[derive(Debug, Clone, Default)]
pub struct RequestRecord {
    /// Position in the sequence of requests, from 0.
    pub index: u64,
    /// When the request was meant to be sent. In a closed loop: when its slot became free.
    pub intended_ns: u64,
    /// When it was handed to the connection, or given up where it never was.
    pub sent_ns: u64,
    /// When each chunk that carries text arrived. Two chunks of one network read have the same time.
    pub chunks_ns: Vec<u64>,
    /// When generation ended: arrival of the finish reason, which may come after the last text.
    pub finished_ns: Option<u64>,
    /// When the request was over: end of the stream, or its failure.
    pub ended_ns: u64,
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    /// Tokens of the prompt that the server did not compute, as it had them cached.
    pub cached_tokens: Option<u64>,
    /// Why generation ended, in the server's word (`stop`, `length`).
    pub finish_reason: Option<String>,
    pub turn: u32,
    /// What the server answered; kept only where a later turn or a comparison needs it.
    pub text: Option<String>,
    pub conduct: Conduct,
    pub failure: Option<Failure>,
    /// Who is told of each chunk as it comes; none where nobody looks on.
    pub watch: Option<Arc<dyn Watch>>,
}

impl RequestRecord {
    /// A request that is due at `intended_ns` and about to be sent at `sent_ns`.
    pub fn new(index: u64, intended_ns: u64, sent_ns: u64) -> Self {
        Self { index, intended_ns, sent_ns, ended_ns: sent_ns, ..Self::default() }
    }

    pub fn first_token_ns(&self) -> Option<u64> {
        self.chunks_ns.first().copied()
    }

    /// Adds a chunk that carries text and arrived at `now_ns`.
    ///
    /// # Errors
    /// [`Failure::TooManyChunks`].
    pub fn add_chunk(&mut self, now_ns: u64) -> Result<(), Failure> {
        if self.chunks_ns.len() == MAX_CHUNKS {
            return Err(Failure::TooManyChunks);
        }
        if let Some(watch) = &self.watch {
            let before_ns = self.chunks_ns.last().copied();
            watch.chunk(before_ns.is_none(), now_ns.saturating_sub(before_ns.unwrap_or(self.intended_ns)));
        }
        self.chunks_ns.push(now_ns);
        Ok(())
    }

    /// Keeps what the server answered, where a later turn needs it.
    ///
    /// # Errors
    /// [`Failure::TextTooLong`].
    pub fn keep_text(&mut self, content: &str) -> Result<(), Failure> {
        if let Some(kept) = &mut self.text {
            if kept.len() + content.len() > MAX_TEXT_BYTES {
                return Err(Failure::TextTooLong);
            }
            kept.push_str(content);
        }
        Ok(())
    }

    /// Tokens generated: the server's count, or the number of chunks where it gave none.
    pub fn output_tokens(&self) -> u64 {
        self.completion_tokens.unwrap_or(self.chunks_ns.len() as u64)
    }

    /// Mean time of a token after the first, in nanoseconds: `(end of generation - first token) / (tokens - 1)`. None
    /// for fewer than two tokens.
    pub fn time_per_output_token_ns(&self) -> Option<u64> {
        let last = self.finished_ns.or(self.chunks_ns.last().copied())?;
        let gaps = self.output_tokens().checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some(last.saturating_sub(self.first_token_ns()?) / gaps)
    }
}

/// Why a request failed. What servers said, codes and messages, is made safe to print.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("no connection: {0}")]
    Connect(String),
    #[error("connection lost: {0}")]
    ConnectionLost(String),
    #[error("no complete answer within the time limit")]
    Timeout,
    #[error("HTTP {status}: {message}")]
    Status { status: StatusCode, code: Option<String>, message: String },
    #[error("gRPC {code:?}: {message}")]
    Grpc { code: Code, message: String },
    #[error("a message of the answer holds no event that this load tester knows: it is older than the server")]
    BadMessage,
    #[error("the answer's content type is '{0}', not text/event-stream")]
    NotAnEventStream(String),
    #[error("the server does not speak HTTP: {0}")]
    NotHttp(String),
    #[error("unreadable answer: {0}")]
    BadJson(String),
    #[error("{0}")]
    EventTooLong(#[from] crate::client::sse::EventTooLong),
    #[error("more than {MAX_CHUNKS} chunks in one answer")]
    TooManyChunks,
    #[error("more than {MAX_TEXT_BYTES} bytes of text in one answer")]
    TextTooLong,
    #[error("error in the stream: {message}")]
    StreamError { code: Option<String>, message: String },
    #[error("the stream ended before the answer did")]
    Truncated,
    #[error("[DONE] came without a finish reason: the server cut the answer off")]
    NoFinishReason,
    #[error("not sent: --max-in-flight others were unanswered for the whole time limit")]
    NotSent,
    #[error("cancelled by the client")]
    Cancelled,
    #[error("stopped by the user")]
    Interrupted,
}

impl Failure {
    /// Short stable name to count by, with the HTTP status and the server's own code where there is one.
    pub fn kind(&self) -> String {
        let with_code = |kind: String, code: &Option<String>| match code {
            Some(code) => format!("{kind}:{code}"),
            None => kind,
        };
        match self {
            Failure::Connect(_) => "connect".into(),
            Failure::ConnectionLost(_) => "connection_lost".into(),
            Failure::Timeout => "timeout".into(),
            Failure::Status { status, code, .. } => with_code(format!("http_{}", status.as_u16()), code),
            Failure::Grpc { code, .. } => format!("grpc_{}", snake_case(&format!("{code:?}"))),
            Failure::BadMessage => "bad_message".into(),
            Failure::NotAnEventStream(_) => "not_an_event_stream".into(),
            Failure::NotHttp(_) => "not_http".into(),
            Failure::BadJson(_) => "bad_json".into(),
            Failure::EventTooLong(_) => "event_too_long".into(),
            Failure::TooManyChunks => "too_many_chunks".into(),
            Failure::TextTooLong => "text_too_long".into(),
            Failure::StreamError { code, .. } => with_code("stream_error".into(), code),
            Failure::Truncated => "truncated".into(),
            Failure::NoFinishReason => "no_finish_reason".into(),
            Failure::NotSent => "not_sent".into(),
            Failure::Cancelled => "cancelled".into(),
            Failure::Interrupted => "interrupted".into(),
        }
    }
}

/// `ResourceExhausted` as `resource_exhausted`.
fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_per_token_counts_the_servers_tokens_up_to_the_finish() {
        let mut record = RequestRecord::new(0, 0, 0);
        assert_eq!(record.time_per_output_token_ns(), None);
        record.chunks_ns = vec![100, 200, 300];
        assert_eq!(record.time_per_output_token_ns(), Some(100));
        // Eleven tokens, most of them without text, the last at 1100.
        record.completion_tokens = Some(11);
        record.finished_ns = Some(1100);
        assert_eq!(record.time_per_output_token_ns(), Some(100));
        record.completion_tokens = Some(1);
        assert_eq!(record.time_per_output_token_ns(), None);
    }

    #[test]
    fn kinds_carry_status_and_code() {
        let failure = Failure::Status {
            status: StatusCode::TOO_MANY_REQUESTS,
            code: Some("queue_full".into()),
            message: "".into(),
        };
        assert_eq!(failure.kind(), "http_429:queue_full");
        let failure = Failure::Grpc { code: Code::ResourceExhausted, message: "queue full".into() };
        assert_eq!(
            (failure.kind().as_str(), failure.to_string().as_str()),
            ("grpc_resource_exhausted", "gRPC ResourceExhausted: queue full")
        );
        assert_eq!(Failure::StreamError { code: None, message: "x".into() }.kind(), "stream_error");
    }
}
