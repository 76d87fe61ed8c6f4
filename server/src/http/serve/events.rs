//! Streams of server-sent events. Events are written into one buffer, and sent as many at a time as are known: a write
//! to a socket costs more than all that is done for an event before it.

use std::{
    convert::Infallible,
    ops::ControlFlow,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::{BufMut, Bytes, BytesMut};
use hyper::body::{Body as HttpBody, Frame};
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

/// What keeps the connection alive is sent after so long without an event at most, and half of it at least, so that
/// nobody between takes the connection for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// No more is added to a frame of so many bytes.
const FRAME_BYTES: usize = 2 << 10;

/// Events that are written and not yet sent.
#[derive(Debug, Default)]
pub(in crate::http) struct Events(BytesMut);

impl Events {
    /// Events that were written elsewhere.
    pub(in crate::http) fn append(&mut self, more: Self) {
        match self.0.is_empty() {
            true => *self = more,
            false => self.0.put_slice(&more.0),
        }
    }

    /// An event whose data is `data` as JSON.
    pub(in crate::http) fn named(&mut self, name: &'static str, data: &impl Serialize) {
        self.0.put_slice(b"event: ");
        self.0.put_slice(name.as_bytes());
        self.0.put_slice(b"\n");
        self.data(|out| write_json(out, data));
    }

    /// An event without a name, whose data `write` writes; it must not hold a line's end.
    pub(in crate::http) fn data(&mut self, write: impl FnOnce(&mut BytesMut)) {
        self.0.put_slice(b"data: ");
        let begin = self.0.len();
        write(&mut self.0);
        debug_assert!(!self.0[begin..].contains(&b'\n'), "an event's data is one line");
        self.0.put_slice(b"\n\n");
    }
}

/// Writes a value as JSON, in one line.
pub(in crate::http) fn write_json(out: &mut BytesMut, value: &impl Serialize) {
    serde_json::to_writer(out.writer(), value).expect("strings and numbers with string keys are always JSON");
}

/// What makes the events of a stream. Dropping it means that nobody wants more of them.
pub(in crate::http) trait EventSource: Send + Unpin + 'static {
    /// What is sent where no event comes: as it stands, with the blank line at its end.
    const KEEP_ALIVE: &'static [u8];

    /// Waits for what becomes known next and writes its events, if it has any; says whether more may come.
    fn poll_events(&mut self, context: &mut Context<'_>, events: &mut Events) -> Poll<ControlFlow<()>>;
}

/// A response with these events, and then those of `source`.
pub(in crate::http) fn event_response<S: EventSource>(events: Events, source: S) -> Response {
    let timer = Box::pin(sleep(KEEP_ALIVE / 2));
    let body = Body::new(EventBody { events, source: Some(source), timer, is_quiet: false });
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would hold the events back until its buffer is full.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

struct EventBody<S> {
    events: Events,
    /// `None` once it has ended.
    source: Option<S>,
    /// Runs from one look at `is_quiet` to the next: it is not set anew with every event.
    timer: Pin<Box<Sleep>>,
    /// Nothing was sent since the timer was set.
    is_quiet: bool,
}

impl<S: EventSource> EventBody<S> {
    /// Waits until nothing has been sent for too long.
    fn poll_quiet(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            self.timer.as_mut().reset(Instant::now() + KEEP_ALIVE / 2);
            if std::mem::replace(&mut self.is_quiet, true) {
                return Poll::Ready(());
            }
        }
    }
}

impl<S: EventSource> HttpBody for EventBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Self { events, source, .. } = &mut *self;
        while events.0.len() < FRAME_BYTES
            && let Some(more) = source
        {
            match more.poll_events(context, events) {
                Poll::Ready(ControlFlow::Continue(())) => {}
                Poll::Ready(ControlFlow::Break(())) => *source = None,
                Poll::Pending => break,
            }
        }
        if events.0.is_empty() {
            if source.is_none() {
                return Poll::Ready(None);
            }
            ready!(self.poll_quiet(context));
            self.events.0.put_slice(S::KEEP_ALIVE);
        }
        self.is_quiet = false;
        Poll::Ready(Some(Ok(Frame::data(self.events.0.split().freeze()))))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use http_body_util::BodyExt;
    use tokio::sync::mpsc;

    use super::*;

    /// Events as they are told to it, by their number.
    struct Told(mpsc::UnboundedReceiver<u32>);

    impl EventSource for Told {
        const KEEP_ALIVE: &'static [u8] = b": still here\n\n";

        fn poll_events(&mut self, context: &mut Context<'_>, events: &mut Events) -> Poll<ControlFlow<()>> {
            Poll::Ready(match ready!(self.0.poll_recv(context)) {
                Some(0) => ControlFlow::Continue(()),
                Some(number) => {
                    events.named("number", &number);
                    ControlFlow::Continue(())
                }
                None => {
                    events.data(|out| out.put_slice(b"[DONE]"));
                    ControlFlow::Break(())
                }
            })
        }
    }

    async fn frame(body: &mut Body) -> Option<String> {
        let frame = body.frame().await?.expect("it never fails");
        Some(String::from_utf8(frame.into_data().expect("there are no trailers").to_vec()).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_known_is_one_frame_and_silence_is_broken() {
        let (told, source) = mpsc::unbounded_channel();
        let mut body = event_response(Events::default(), Told(source)).into_body();
        for number in [1, 0, 2] {
            told.send(number).unwrap();
        }
        assert_eq!(frame(&mut body).await.unwrap(), "event: number\ndata: 1\n\nevent: number\ndata: 2\n\n");
        let since = Instant::now();
        assert_eq!(frame(&mut body).await.unwrap(), ": still here\n\n");
        assert!((KEEP_ALIVE / 2..=KEEP_ALIVE + Duration::from_millis(2)).contains(&since.elapsed()));
        told.send(3).unwrap();
        drop(told);
        assert_eq!(frame(&mut body).await.unwrap(), "event: number\ndata: 3\n\ndata: [DONE]\n\n");
        assert_eq!(frame(&mut body).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn events_that_come_often_are_not_followed_by_others() {
        let (told, source) = mpsc::unbounded_channel();
        let mut body = event_response(Events::default(), Told(source)).into_body();
        // The body is polled all the while, so that it could break a silence.
        tokio::spawn(async move {
            for number in 1..=20 {
                sleep(KEEP_ALIVE / 3).await;
                told.send(number).unwrap();
            }
        });
        for number in 1..20 {
            assert_eq!(frame(&mut body).await.unwrap(), format!("event: number\ndata: {number}\n\n"));
        }
    }

    #[tokio::test]
    async fn a_frame_is_not_much_larger_than_its_bound() {
        let (told, source) = mpsc::unbounded_channel();
        (1..1000).for_each(|number| told.send(number).unwrap());
        drop(told);
        let mut body = event_response(Events::default(), Told(source)).into_body();
        let (mut lengths, mut whole) = (VecDeque::new(), String::new());
        while let Some(frame) = frame(&mut body).await {
            lengths.push_back(frame.len());
            whole.push_str(&frame);
        }
        assert!(lengths.iter().all(|length| *length < FRAME_BYTES + 32) && lengths.len() > 5, "{lengths:?}");
        assert!(whole.ends_with("event: number\ndata: 999\n\ndata: [DONE]\n\n"));
    }
}
