//! Bodies of requests, read within limits of size, time and memory, whatever their clients do.

use std::{error::Error, pin::pin, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

/// So much of every body is not counted: a crowd of large bodies leaves room for small ones, whose memory the number of
/// requests bounds.
const FREE_BYTES: usize = 64 << 10;
/// Bytes that all bodies together may hold beyond that.
const MEMORY_BYTES: usize = 128 << 20;

/// Within the limit in time, a body that trickles in has so long, and a second for each of so many bytes that came: its
/// request holds a place meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
const LEAST_BYTES_PER_SECOND: usize = 32 << 10;
/// Longest time for which a refused request's body is read.
const DISCARD_LIMIT: Duration = Duration::from_secs(1);
/// So many refused requests' bodies are read at one time: whoever has no key must not keep connections busy.
const MAX_DISCARDS: usize = 64;

/// Why a body was not read to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UploadError {
    /// More bytes than one body may have.
    #[error("the body has more than the {limit} bytes allowed (--max-body-bytes)")]
    TooLarge {
        /// The bound.
        limit: usize,
    },
    /// Other requests' bodies hold all the memory that there is for bodies.
    #[error("the bodies of other requests take the {limit} bytes that there are for bodies; send it again later")]
    Crowded {
        /// The bound.
        limit: usize,
    },
    /// It came too slowly.
    #[error("the body did not arrive within {} s", .limit.as_secs_f32())]
    Timeout {
        /// The bound.
        limit: Duration,
    },
    /// The connection broke, or what came is not HTTP.
    #[error("the body could not be read: {0}")]
    Broken(String),
}

/// Reads bodies; shared by all requests, which is what bounds their memory.
#[derive(Debug)]
pub struct Uploads {
    max_bytes: usize,
    limit: Duration,
    memory: Arc<Semaphore>,
    memory_bytes: usize,
    discards: Semaphore,
}

/// A whole body. Its memory counts until it is dropped.
#[derive(Debug)]
pub struct Upload {
    /// What the client sent.
    pub bytes: Bytes,
    _memory: Option<OwnedSemaphorePermit>,
}

impl Uploads {
    /// For bodies of at most `max_bytes`, each of which must arrive within `limit`, and not too slowly before.
    pub fn new(max_bytes: usize, limit: Duration) -> Self {
        let memory_bytes = MEMORY_BYTES.max(max_bytes).min(Semaphore::MAX_PERMITS);
        let memory = Arc::new(Semaphore::new(memory_bytes));
        Self { max_bytes, limit, memory, memory_bytes, discards: Semaphore::new(MAX_DISCARDS) }
    }

    /// Bytes that one body may have.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Reads a body to its end.
    ///
    /// # Errors
    /// Which limit it breaks, or that the connection did.
    pub async fn read<B>(&self, body: B) -> Result<Upload, UploadError>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        // What content-length announces need not be waited for.
        if body.size_hint().lower() > self.max_bytes as u64 {
            return Err(UploadError::TooLarge { limit: self.max_bytes });
        }
        self.read_frames(Limited::new(body, self.max_bytes)).await
    }

    /// Time from its start after which a body of which `bytes` bytes came is too slow.
    fn allowed(&self, bytes: usize) -> Duration {
        self.limit.min(PATIENCE + Duration::from_secs((bytes / LEAST_BYTES_PER_SECOND) as u64))
    }

    /// Reads what comes of a body, within limits, and forgets it. A client over HTTP/1 that has not sent everything may
    /// lose an answer for which nobody read its body: closing then resets the connection.
    pub async fn discard<B: Body<Data = Bytes>>(&self, body: B) {
        let Ok(_permit) = self.discards.try_acquire() else { return };
        let frames = async {
            let mut body = pin!(body);
            let mut bytes = 0;
            while let Some(Ok(frame)) = body.frame().await {
                bytes += frame.data_ref().map_or(0, Bytes::len);
                if bytes > self.max_bytes {
                    return;
                }
            }
        };
        // One that takes longer reads its answer late, or not at all.
        let _ = timeout(self.limit.min(DISCARD_LIMIT), frames).await;
    }

    async fn read_frames<B>(&self, body: Limited<B>) -> Result<Upload, UploadError>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let mut body = pin!(body);
        let mut bytes = BytesMut::new();
        let mut memory: Option<OwnedSemaphorePermit> = None;
        let start = Instant::now();
        loop {
            let limit = self.allowed(bytes.len());
            let next = timeout_at(start + limit, body.frame()).await.map_err(|_| UploadError::Timeout { limit })?;
            let Some(frame) = next else { break };
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => UploadError::TooLarge { limit: self.max_bytes },
                false => UploadError::Broken(error.to_string()),
            })?;
            let Ok(data) = frame.into_data() else { continue };
            let counted = memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let more = (bytes.len() + data.len()).saturating_sub(FREE_BYTES + counted);
            if more > 0 {
                let taken = self.memory.clone().try_acquire_many_owned(more as u32);
                let taken = taken.map_err(|_| UploadError::Crowded { limit: self.memory_bytes })?;
                match &mut memory {
                    Some(memory) => memory.merge(taken),
                    None => memory = Some(taken),
                }
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Upload { bytes: bytes.freeze(), _memory: memory })
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, stream};
    use http_body_util::{Full, StreamBody};
    use hyper::body::Frame;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn body(bytes: usize) -> Full<Bytes> {
        Full::new(vec![b'x'; bytes].into())
    }

    #[tokio::test]
    async fn so_many_refused_bodies_are_read_at_one_time_and_no_more() {
        let uploads = Uploads::new(10, LIMIT);
        let silent = || StreamBody::new(stream::pending::<Result<Frame<Bytes>, std::io::Error>>());
        let mut reading: Vec<_> = (0..MAX_DISCARDS).map(|_| Box::pin(uploads.discard(silent()))).collect();
        assert!(reading.iter_mut().all(|reading| reading.now_or_never().is_none()));
        assert!(uploads.discard(silent()).now_or_never().is_some());
        drop(reading);
        assert!(uploads.discard(silent()).now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_body_has_so_many_bytes_and_so_much_time() {
        let uploads = Uploads::new(10, LIMIT);
        assert_eq!(uploads.read(body(10)).await.unwrap().bytes.len(), 10);
        assert_eq!(uploads.read(body(11)).await.unwrap_err(), UploadError::TooLarge { limit: 10 });
        let frame = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"1234")));
        let unannounced = StreamBody::new(stream::iter([frame(), frame(), frame()]));
        assert_eq!(uploads.read(unannounced).await.unwrap_err(), UploadError::TooLarge { limit: 10 });
        let limit = Duration::from_millis(20);
        let silent = StreamBody::new(stream::pending::<Result<Frame<Bytes>, std::io::Error>>());
        assert_eq!(Uploads::new(10, limit).read(silent).await.unwrap_err(), UploadError::Timeout { limit });
    }

    #[test]
    fn a_body_that_trickles_in_has_less_time_than_one_that_flows() {
        let uploads = Uploads::new(8 << 20, LIMIT);
        for (bytes, allowed_s) in [(0, 5), (1000, 5), (32 << 10, 6), (320 << 10, 15), (8 << 20, 30)] {
            assert_eq!(uploads.allowed(bytes), Duration::from_secs(allowed_s), "{bytes}");
        }
    }

    #[tokio::test]
    async fn large_bodies_share_what_memory_there_is_and_leave_room_for_small_ones() {
        let size = MEMORY_BYTES / 2 + FREE_BYTES;
        let uploads = Uploads::new(size, LIMIT);
        let (first, _second) = (uploads.read(body(size)).await.unwrap(), uploads.read(body(size)).await.unwrap());
        let crowded = UploadError::Crowded { limit: MEMORY_BYTES };
        assert_eq!(uploads.read(body(FREE_BYTES + 1)).await.unwrap_err(), crowded);
        uploads.read(body(FREE_BYTES)).await.unwrap();
        drop(first);
        uploads.read(body(size)).await.unwrap();
    }
}
