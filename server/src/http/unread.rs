//! What nobody read of a request's body. A client over HTTP/1 that sends all before it reads would lose the answer:
//! where a connection is closed with bytes of its client unread, it is reset.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::header,
    middleware::Next,
    response::Response,
};
use hyper::body::{Body as HttpBody, Frame, SizeHint};

use crate::frontend::Frontend;

/// Reads what is left of the body behind the answer, within the limits for that.
pub(super) async fn discard(State(frontend): State<Arc<Frontend>>, request: Request, next: Next) -> Response {
    // Who waits to be told to go on sends nothing unasked.
    if request.body().is_end_stream() || request.headers().contains_key(header::EXPECT) {
        return next.run(request).await;
    }
    let (head, body) = request.into_parts();
    let body = Lent(Arc::new(Mutex::new(Some(body))));
    let response = next.run(Request::from_parts(head, Body::new(body.clone()))).await;
    if !body.is_end_stream() {
        // Beside the answer, which nobody has to wait for.
        tokio::spawn(async move { frontend.uploads.discard(body).await });
    }
    response
}

/// A body that is still there when its reader has dropped it; `None` at its end.
#[derive(Clone)]
struct Lent(Arc<Mutex<Option<Body>>>);

impl Lent {
    fn with<T>(&self, look: impl FnOnce(&mut Option<Body>) -> T) -> T {
        // A body that panicked has not come to its end, and is dropped with its connection.
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.with(|lent| {
            let Some(body) = lent else { return Poll::Ready(None) };
            let frame = ready!(Pin::new(body).poll_frame(context));
            if !matches!(frame, Some(Ok(_))) {
                *lent = None;
            }
            Poll::Ready(frame)
        })
    }

    fn is_end_stream(&self) -> bool {
        self.with(|lent| lent.as_ref().is_none_or(HttpBody::is_end_stream))
    }

    fn size_hint(&self) -> SizeHint {
        self.with(|lent| lent.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint))
    }
}
