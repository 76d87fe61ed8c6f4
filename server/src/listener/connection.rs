//! One connection, from its first byte to its end.

use std::{convert::Infallible, future::pending, io, pin::pin, sync::Arc, time::Duration};

use axum::{Router, body::Body};
use futures::{StreamExt, stream::FuturesUnordered};
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use rustix::net::sockopt;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, join, split},
    net::TcpStream,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::{places::Connection, response::ResponseBody, tls::Tls};
use crate::http;

/// What every HTTP/2 connection begins with.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Concurrent requests of one HTTP/2 connection.
const MAX_STREAMS: u32 = 256;
/// An HTTP/2 connection is asked after so long without a frame whether its client still lives.
const HTTP2_PING: Duration = Duration::from_secs(30);
/// Bytes of a response that may wait in an HTTP/2 connection for the socket: the rest waits where it is counted.
const HTTP2_SEND_BYTES: usize = 8 << 10;
/// Bytes of a request's head over HTTP/1, and of what is read or written at once.
const HTTP1_BUFFER_BYTES: usize = 64 << 10;
/// Bytes that the kernel holds of a request that nobody has read yet, where the system allows so many. When a client
/// on this machine sends a large body, the core that reads has the work of all that is on its way: megabytes, if the
/// kernel may choose. (Of a client that is 100 ms away come 2.6 MB a second at most.)
const SOCKET_RECEIVE_BYTES: usize = 256 << 10;
/// Bytes that the kernel holds for a client that does not read. (It takes twice as much memory.)
const SOCKET_SEND_BYTES: usize = 128 << 10;
/// Of them, bytes that are not on their way yet: few, so that the scheduler soon knows whose reader is behind.
pub(super) const UNSENT_BYTES: u32 = 16 << 10;
/// Keepalive probes of an idle connection: the first after so long, so many at most, so far apart.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBES: u32 = 3;
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// A connection beyond the limit has so long for its probe.
const RESERVED_LIMIT: Duration = Duration::from_secs(5);
/// A connection that must close has so long to send what is written.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// How long a client may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientLimits {
    /// To its first byte, that after the handshake of TLS; over HTTP/1 to the end of each request's head, and over
    /// HTTP/2 to its first request.
    pub head: Duration,
    /// To the end of a request's body.
    pub body: Duration,
    /// Between two reads of a response; one that takes nothing for longer loses it, and its requests are cancelled.
    pub progress: Duration,
    /// Between two requests of an HTTP/2 connection. (HTTP/1 has the limit of a head.)
    pub idle: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { head: seconds(30), body: seconds(30), progress: seconds(60), idle: seconds(300) }
    }
}

/// Serves one connection to its end; with `finish`, to the end of what has been asked; with `abort`, no further. Its
/// errors are the client's: gone, or not speaking HTTP.
pub(super) async fn serve(
    stream: TcpStream,
    tls: Option<Tls>,
    router: Router,
    connection: Arc<Connection>,
    limits: ClientLimits,
    (finish, abort): (CancellationToken, CancellationToken),
) {
    let closes = async {
        let reserved = async {
            match connection.reserved {
                true => sleep(RESERVED_LIMIT).await,
                false => pending().await,
            }
        };
        tokio::select! {
            () = abort.cancelled() => {}
            () = reserved => {}
            () = connection.gave_way() => {}
        }
    };
    let opened = async {
        tokio::select! {
            streams = open(stream, tls, limits.progress) => streams,
            () = sleep(limits.head) => Err(io::ErrorKind::TimedOut.into()),
            () = finish.cancelled() => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    };
    // Pinned: a future that is handed on by value has room wherever it passes, four times over in the end.
    let served = pin!(async {
        match opened.await {
            Ok(opened) => exchange(opened, router, &connection, limits, &finish).await,
            Err(error) => tracing::debug!(%error, "a connection ended before its first request"),
        }
    });
    let _ = before(closes, served).await;
}

/// Does `work`, unless `end` comes before. What may end a connection is many things, and it is polled only when one of
/// them stirs, not with every token.
async fn before<T, E>(end: impl Future<Output = E>, work: impl Future<Output = T>) -> Result<T, E> {
    let mut end: FuturesUnordered<_> = [end].into_iter().collect();
    tokio::select! {
        biased;
        result = work => Ok(result),
        Some(why) = end.next() => Err(why),
    }
}

/// A connection whose client has begun to speak.
struct Opened {
    /// As many as it takes to see which HTTP it is.
    first: Vec<u8>,
    read: Reader,
    write: Writer,
}

type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// The handshake, where there is one, and the first bytes: all that a client may be slow with before its first request.
async fn open(stream: TcpStream, tls: Option<Tls>, progress: Duration) -> io::Result<Opened> {
    tune(&stream, progress)?;
    let (mut read, write): (Reader, Writer) = match tls {
        Some(tls) => {
            let (read, write) = split(tls.accept(stream).await?);
            (Box::new(read), Box::new(write))
        }
        None => {
            let (read, write) = stream.into_split();
            (Box::new(read), Box::new(write))
        }
    };
    Ok(Opened { first: first_bytes(&mut read).await?, read, write })
}

async fn exchange(
    opened: Opened,
    router: Router,
    connection: &Arc<Connection>,
    limits: ClientLimits,
    finish: &CancellationToken,
) {
    let Opened { first, read, write } = opened;
    let builder = builder(first == HTTP2_PREFACE, connection.reserved, limits);
    let io = TokioIo::new(join(io::Cursor::new(first).chain(read), write));
    let service = service_fn(|request| respond(router.clone(), connection.clone(), limits.progress, request));
    let mut serving = pin!(builder.serve_connection(io, service));
    // And how long what is under way may still take.
    let ends = async {
        tokio::select! {
            () = finish.cancelled() => None,
            () = connection.idle_for(limits.head, limits.idle) => Some(CLOSE_LIMIT),
        }
    };
    let result = match before(ends, serving.as_mut()).await {
        Ok(result) => result,
        Err(limit) => {
            serving.as_mut().graceful_shutdown();
            match timeout(limit.unwrap_or(Duration::MAX), serving).await {
                Ok(result) => result,
                Err(_) => return,
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// The first bytes, as many as it takes to see which HTTP the client speaks.
async fn first_bytes(read: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut first = Vec::with_capacity(HTTP2_PREFACE.len());
    while first.len() < HTTP2_PREFACE.len() && HTTP2_PREFACE.starts_with(&first) {
        let missing = (HTTP2_PREFACE.len() - first.len()) as u64;
        if (&mut *read).take(missing).read_buf(&mut first).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(first)
}

fn builder(http2: bool, reserved: bool, limits: ClientLimits) -> Builder<TokioExecutor> {
    let builder = Builder::new(TokioExecutor::new());
    let mut builder = if http2 { builder.http2_only() } else { builder.http1_only() };
    // Without `half_close`: a client that is gone and one that only sends no more look alike until something is written
    // to them, which a response that is not streamed is only at its end. A client must keep its side open to be
    // answered.
    let mut http1 = builder.http1();
    http1.timer(TokioTimer::new()).header_read_timeout(limits.head);
    http1.max_buf_size(HTTP1_BUFFER_BYTES).keep_alive(!reserved);
    let mut http2 = builder.http2();
    http2.timer(TokioTimer::new()).keep_alive_interval(HTTP2_PING);
    http2.max_concurrent_streams(MAX_STREAMS).max_send_buf_size(HTTP2_SEND_BYTES);
    builder
}

async fn respond(
    router: Router,
    connection: Arc<Connection>,
    progress: Duration,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let probe = http::is_probe(request.uri().path());
    let in_progress = connection.begin(probe);
    let mut response = match connection.reserved && !probe {
        true => http::too_many_connections(),
        false => router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {}),
    };
    http::protect(response.headers_mut());
    let stalled = move || {
        tracing::debug!("a client took nothing of its response for too long");
        // HTTP/2 has no way to end a stream that waits for its client, but nothing else may run on the connection.
        if connection.is_idle() {
            connection.close.cancel();
        }
    };
    Ok(response.map(|body| ResponseBody::new(body, progress, in_progress, stalled)))
}

fn tune(stream: &TcpStream, progress: Duration) -> io::Result<()> {
    // A token is one small write, and must not wait for the next.
    stream.set_nodelay(true)?;
    // A client that takes no bytes, or does not acknowledge them, for so long is gone.
    sockopt::set_tcp_user_timeout(stream, progress.as_millis() as u32)?;
    sockopt::set_socket_send_buffer_size(stream, SOCKET_SEND_BYTES)?;
    sockopt::set_socket_recv_buffer_size(stream, SOCKET_RECEIVE_BYTES)?;
    SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}
