//! Response bodies between the handler that makes them and the connection that sends them.
//!
//! The connection draws a body as it has room for more of it. While its client takes nothing, a watcher draws a few
//! frames in its place. So the place that a response holds is free once the response is made and little of it is left
//! to send, however slowly its client reads; and a client that takes nothing for too long loses it, over HTTP/1, HTTP/2
//! and gRPC alike.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use axum::body::Body as InnerBody;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};

/// The watcher draws so many frames, and one more: only behind the last of a body is its end seen.
const QUEUE_FRAMES: usize = 16;
/// Bytes of one frame: larger ones are cut.
const FRAME_BYTES: usize = 4 << 10;
/// The watcher looks so often.
const LOOK: Duration = Duration::from_secs(1);

/// Why a body ends before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the response was given up")]
pub(super) struct GivenUp;

/// A response body as the connection sees it.
#[derive(Debug)]
pub(super) struct ResponseBody {
    drawing: Arc<Mutex<Drawing>>,
    /// Bytes still to come, where they were known from the start.
    left: Option<u64>,
    /// Dropped with the body: the connection has all of it, or nobody wants it any more.
    _taken: oneshot::Sender<()>,
}

/// A body that is being drawn.
#[derive(Debug)]
struct Drawing {
    /// `None` once it has ended, in one way or the other.
    inner: Option<InnerBody>,
    /// It has come to its end.
    whole: bool,
    /// Drawn, and not yet taken.
    queue: VecDeque<Frame<Bytes>>,
    /// How often the connection asked for a frame.
    asked: u64,
    /// The connection asked, and was told to wait.
    waits: bool,
}

impl Drawing {
    /// Draws a frame into the queue, in pieces if it is large; false: there is none any more.
    fn poll_draw(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(false) };
        match ready!(Pin::new(inner).poll_frame(context)) {
            Some(Ok(frame)) => {
                match frame.into_data() {
                    Ok(mut data) => {
                        while data.len() > FRAME_BYTES {
                            self.queue.push_back(Frame::data(data.split_to(FRAME_BYTES)));
                        }
                        self.queue.push_back(Frame::data(data));
                    }
                    Err(trailers) => self.queue.push_back(trailers),
                }
                return Poll::Ready(true);
            }
            Some(Err(error)) => tracing::debug!(%error, "a response broke off"),
            None => self.whole = true,
        }
        self.inner = None;
        Poll::Ready(false)
    }
}

/// A body that panicked is dropped with its connection.
fn lock(drawing: &Mutex<Drawing>) -> MutexGuard<'_, Drawing> {
    drawing.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ResponseBody {
    /// Draws `inner` to its end and drops it. If the connection asks for no frame for `limit`, the response is given
    /// up: `inner` is dropped, then `held`, then `stalled` is called. Otherwise `held` is dropped when the connection
    /// has everything, or the client has gone.
    pub(super) fn new<H: Send + 'static>(
        inner: InnerBody,
        limit: Duration,
        held: H,
        stalled: impl FnOnce() + Send + 'static,
    ) -> Self {
        let left = inner.size_hint().exact();
        let (_taken, taken) = oneshot::channel();
        let drawing = Drawing { inner: Some(inner), whole: false, queue: VecDeque::new(), asked: 0, waits: false };
        let drawing = Arc::new(Mutex::new(drawing));
        let watched = Arc::clone(&drawing);
        tokio::spawn(async move {
            let watching = watch(&watched, limit, taken).await;
            drop(held);
            if watching.is_err() {
                stalled();
            }
        });
        Self { drawing, left, _taken }
    }
}

/// Draws the body while the connection does not, until it is `taken`. It is given up where that takes too long.
async fn watch(drawing: &Mutex<Drawing>, limit: Duration, mut taken: oneshot::Receiver<()>) -> Result<(), GivenUp> {
    let (look, mut asked, mut since) = (LOOK.min(limit / 4), 0, Instant::now());
    while timeout(look, &mut taken).await.is_err() {
        let mut drawing = lock(drawing);
        if drawing.waits || drawing.asked != asked {
            (asked, since) = (drawing.asked, Instant::now());
            continue;
        }
        // The connection relies on no waker: it will ask before it waits.
        let context = &mut Context::from_waker(Waker::noop());
        while drawing.queue.len() <= QUEUE_FRAMES && drawing.poll_draw(context) == Poll::Ready(true) {}
        if since.elapsed() >= limit {
            drawing.inner = None;
            return Err(GivenUp);
        }
    }
    Ok(())
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        lock(&self.drawing).inner = None;
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = GivenUp;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = {
            let mut drawing = lock(&self.drawing);
            drawing.asked += 1;
            drawing.waits = drawing.queue.is_empty() && drawing.poll_draw(context).is_pending();
            if drawing.waits {
                return Poll::Pending;
            }
            drawing.queue.pop_front().ok_or(drawing.whole)
        };
        Poll::Ready(match frame {
            Ok(frame) => {
                let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
                self.left = self.left.map(|left| left.saturating_sub(bytes));
                Some(Ok(frame))
            }
            Err(true) => None,
            Err(false) => Some(Err(GivenUp)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use http_body_util::BodyExt;
    use tokio::time::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(600);
    const SOON: Duration = Duration::from_secs(20);

    fn events(count: usize) -> InnerBody {
        InnerBody::from_stream(stream::iter((0..count).map(|_| Ok::<_, std::io::Error>("event"))))
    }

    /// What is held is seen to be dropped when the receiver ends.
    fn held() -> (oneshot::Sender<()>, oneshot::Receiver<()>) {
        oneshot::channel()
    }

    async fn dropped(receiver: oneshot::Receiver<()>) {
        let _ = timeout(SOON, receiver).await.expect("what is held is dropped");
    }

    #[tokio::test]
    async fn a_body_arrives_as_it_was_made() {
        let (held, released) = held();
        let body = ResponseBody::new(events(100), LIMIT, held, || {});
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), 500);
        dropped(released).await;
        // Large ones in pieces, with the length that they announce.
        let bytes: Bytes = (0..5 * FRAME_BYTES).map(|at| at as u8).collect();
        let mut body = ResponseBody::new(bytes.clone().into(), LIMIT, (), || {});
        assert_eq!(body.size_hint().exact(), Some(5 * FRAME_BYTES as u64));
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!((first.len(), body.size_hint().exact()), (FRAME_BYTES, Some(4 * FRAME_BYTES as u64)));
        assert_eq!(body.collect().await.unwrap().to_bytes(), bytes.slice(FRAME_BYTES..));
    }

    /// A body of so many events, and what ends when it is dropped.
    fn watched(count: usize) -> (InnerBody, oneshot::Receiver<()>) {
        let (inside, released) = held();
        let events = (0..count).map(move |_| {
            let _ = &inside;
            Ok::<_, std::io::Error>("event")
        });
        (InnerBody::from_stream(stream::iter(events)), released)
    }

    #[tokio::test]
    async fn a_body_of_which_little_is_left_is_dropped_before_its_client_reads() {
        let (inner, released) = watched(QUEUE_FRAMES);
        let body = ResponseBody::new(inner, SOON, (), || {});
        dropped(released).await;
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), 5 * QUEUE_FRAMES);
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_loses_the_response_and_never_takes_it_for_whole() {
        let (inner, released) = watched(QUEUE_FRAMES + 1);
        let (told, stalled) = oneshot::channel();
        let body = ResponseBody::new(inner, LIMIT, (), move || told.send(()).unwrap());
        timeout(SOON, stalled).await.expect("the limit holds").unwrap();
        dropped(released).await;
        assert_eq!(body.collect().await.unwrap_err(), GivenUp);
    }

    #[tokio::test]
    async fn a_client_that_never_takes_the_rest_is_told_of_too() {
        let (told, stalled) = oneshot::channel();
        let (held, released) = held();
        let _body = ResponseBody::new(events(1), LIMIT, held, move || told.send(()).unwrap());
        timeout(SOON, stalled).await.expect("the limit holds").unwrap();
        dropped(released).await;
    }

    #[tokio::test]
    async fn a_slow_client_has_the_limit_for_each_frame_anew() {
        let mut body = ResponseBody::new(events(QUEUE_FRAMES + 6), LIMIT, (), || panic!("it takes a frame in time"));
        for _ in 0..12 {
            sleep(LIMIT / 6).await;
            body.frame().await.unwrap().unwrap();
        }
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), 5 * (QUEUE_FRAMES + 6 - 12));
    }

    #[tokio::test]
    async fn a_client_that_goes_away_ends_the_body() {
        let (held, released) = held();
        let endless = InnerBody::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        drop(ResponseBody::new(endless, SOON, held, || {}));
        dropped(released).await;
    }
}
