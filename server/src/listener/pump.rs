//! Response bodies between the handler that makes them and the connection that sends them.
//!
//! A task draws each body and hands it on in small pieces, through a queue of a few. So the place that a response holds
//! is free once the response is made and little of it is left to send, however slowly its client reads; and a client
//! that takes nothing for too long loses it, over HTTP/1, HTTP/2 and gRPC alike.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Body as InnerBody;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::{
    sync::{
        mpsc::{self, error::TrySendError},
        oneshot,
    },
    time::timeout,
};

/// Frames that wait for the client; an event of a stream is one.
const QUEUE_FRAMES: usize = 16;
/// Bytes of one frame: larger ones are cut.
const FRAME_BYTES: usize = 4 << 10;

/// Why a body ends before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the response was given up")]
pub(super) struct GivenUp;

/// A response body as the connection sees it.
#[derive(Debug)]
pub(super) struct ResponseBody {
    frames: mpsc::Receiver<Frame<Bytes>>,
    progress: Arc<Progress>,
    /// Bytes still to come, where they were known from the start.
    left: Option<u64>,
    /// Dropped with the body: the connection has all of it, or nobody wants it any more.
    _taken: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Frames that the connection has taken.
    frames: AtomicUsize,
    /// The queue ends where the body does. Set before the queue's end can be seen.
    whole: AtomicBool,
}

impl ResponseBody {
    /// Draws `inner` to its end and drops it; what is left then is the queue. If the connection takes no frame for
    /// `limit`, the response is given up: `inner` is dropped, then `held`, then `stalled` is called. Otherwise `held`
    /// is dropped when the connection has everything, or the client has gone.
    pub(super) fn new<H: Send + 'static>(
        inner: InnerBody,
        limit: Duration,
        held: H,
        stalled: impl FnOnce() + Send + 'static,
    ) -> Self {
        let left = inner.size_hint().exact();
        let (sender, frames) = mpsc::channel(QUEUE_FRAMES);
        let (taken_sender, taken) = oneshot::channel();
        let progress = Arc::new(Progress::default());
        let pump = Pump { frames: sender, progress: progress.clone(), limit };
        tokio::spawn(async move {
            let ended = pump.run(inner, taken).await;
            drop(held);
            if ended.is_err_and(|ended| ended == Ended::Stalled) {
                stalled();
            }
        });
        Self { frames, progress, left, _taken: taken_sender }
    }
}

/// Why not all of a body was sent.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Stalled,
    ClientGone,
    Broken,
}

struct Pump {
    frames: mpsc::Sender<Frame<Bytes>>,
    progress: Arc<Progress>,
    limit: Duration,
}

impl Pump {
    async fn run(self, inner: InnerBody, mut taken: oneshot::Receiver<()>) -> Result<(), Ended> {
        self.draw(inner).await?;
        let Self { frames, progress, limit } = self;
        progress.whole.store(true, Ordering::Release);
        drop(frames);
        loop {
            let before = progress.frames.load(Ordering::Relaxed);
            if timeout(limit, &mut taken).await.is_ok() {
                return Ok(());
            }
            if progress.frames.load(Ordering::Relaxed) == before {
                return Err(Ended::Stalled);
            }
        }
    }

    /// Draws the body into the queue, and drops it.
    async fn draw(&self, mut inner: InnerBody) -> Result<(), Ended> {
        loop {
            let frame = tokio::select! {
                biased;
                () = self.frames.closed() => return Err(Ended::ClientGone),
                frame = inner.frame() => frame,
            };
            let frame = match frame {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => {
                    tracing::debug!(%error, "a response broke off");
                    return Err(Ended::Broken);
                }
                None => return Ok(()),
            };
            match frame.into_data() {
                Ok(mut data) => {
                    while data.len() > FRAME_BYTES {
                        self.send(Frame::data(data.split_to(FRAME_BYTES))).await?;
                    }
                    self.send(Frame::data(data)).await?;
                }
                Err(trailers) => self.send(trailers).await?,
            }
        }
    }

    async fn send(&self, frame: Frame<Bytes>) -> Result<(), Ended> {
        match self.frames.try_send(frame) {
            Ok(()) => Ok(()),
            Err(TrySendError::Closed(_)) => Err(Ended::ClientGone),
            Err(TrySendError::Full(frame)) => match timeout(self.limit, self.frames.send(frame)).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => Err(Ended::ClientGone),
                Err(_) => Err(Ended::Stalled),
            },
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = GivenUp;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(match ready!(self.frames.poll_recv(context)) {
            Some(frame) => {
                self.progress.frames.fetch_add(1, Ordering::Relaxed);
                let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
                self.left = self.left.map(|left| left.saturating_sub(bytes));
                Some(Ok(frame))
            }
            None if self.progress.whole.load(Ordering::Acquire) => None,
            None => Some(Err(GivenUp)),
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
    use tokio::{sync::oneshot, time::sleep};

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
