//! HTTP/2 by hand: bodies that do not come, windows that do not open.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use bytes::Bytes;
use futures::channel::mpsc;
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    HeaderMap, Request, Response,
    body::{Frame, Incoming},
    client::conn::http2::{self, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::SOON;

/// Frames that a test sends when it likes.
pub type Frames = mpsc::UnboundedSender<Result<Frame<Bytes>, Infallible>>;
type Body = StreamBody<mpsc::UnboundedReceiver<Result<Frame<Bytes>, Infallible>>>;

/// A connection whose responses may have so many bytes before they are read: `None`, as many as usual.
pub struct Connection {
    address: SocketAddr,
    requests: SendRequest<Body>,
}

impl Connection {
    pub async fn open(address: SocketAddr, window: Option<u32>) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(window);
        let (requests, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self { address, requests }
    }

    /// Sends the head of a request; its body is what is sent to the frames, until they are dropped.
    pub fn request(
        &mut self,
        path: &str,
        content_type: &str,
    ) -> (Frames, impl Future<Output = hyper::Result<Response<Incoming>>> + use<>) {
        let (frames, body) = mpsc::unbounded();
        let request = Request::post(format!("http://{}{path}", self.address)).header("content-type", content_type);
        (frames, self.requests.send_request(request.body(StreamBody::new(body)).unwrap()))
    }

    /// Sends a whole request and waits for the head of its response.
    pub async fn send(&mut self, path: &str, content_type: &str, body: impl Into<Bytes>) -> Response<Incoming> {
        let (frames, response) = self.request(path, content_type);
        frames.unbounded_send(Ok(Frame::data(body.into()))).unwrap();
        drop(frames);
        timeout(SOON, response).await.expect("an answer comes").unwrap()
    }

    /// Waits until the server has closed the connection.
    pub async fn closed(&mut self) {
        while !self.requests.is_closed() {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The gRPC status of a response: among its headers, or else its trailers.
pub async fn grpc_status(response: Response<Incoming>) -> i32 {
    let status = |headers: &HeaderMap| headers.get("grpc-status")?.to_str().ok()?.parse().ok();
    if let Some(status) = status(response.headers()) {
        return status;
    }
    let body = timeout(SOON, response.into_body().collect()).await.expect("the response ends").unwrap();
    body.trailers().and_then(status).expect("a status ends every response")
}
