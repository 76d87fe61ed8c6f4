//! What nobody read of a request's body. A client over HTTP/1 that sends all before it reads would lose the answer:
//! where a connection is closed with bytes of its client unread, it is reset.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::{Version, header},
    middleware::Next,
    response::Response,
};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::runtime::Handle;

use crate::frontend::Frontend;

/// Reads what is left of a body once its reader has dropped it, beside the answer, within the limits for that. Over
/// HTTP/2 it is the stream that ends, and nothing is lost.
pub(super) async fn discard(State(frontend): State<Arc<Frontend>>, request: Request, next: Next) -> Response {
    // Who waits to be told to go on sends nothing unasked.
    let waits = request.headers().contains_key(header::EXPECT);
    if request.version() > Version::HTTP_11 || request.body().is_end_stream() || waits {
        return next.run(request).await;
    }
    next.run(request.map(|body| Body::new(Lent { body: Some(body), frontend }))).await
}

/// A body that is read to its end when its reader has dropped it.
struct Lent {
    /// `None` once it has ended.
    body: Option<Body>,
    frontend: Arc<Frontend>,
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.body = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let left = self.body.take().filter(|body| !body.is_end_stream());
        // Without a runtime the server has ended, and its connections with it.
        if let (Some(body), Ok(runtime)) = (left, Handle::try_current()) {
            let frontend = self.frontend.clone();
            runtime.spawn(async move { frontend.uploads.discard(body).await });
        }
    }
}
