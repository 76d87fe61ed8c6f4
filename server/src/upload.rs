//! Bodies of requests, read within limits of size, time and memory, whatever their clients do.

use std::{
    collections::HashMap,
    error::Error,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body;
use tokio::{
    sync::Semaphore,
    task::yield_now,
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::engine::leaves_room;

/// So much of every body is not counted: a crowd of large bodies leaves room for small ones, whose memory the number of
/// requests bounds.
const FREE_BYTES: usize = 64 << 10;
/// Bytes that all bodies together may hold beyond that.
const MEMORY_BYTES: usize = 128 << 20;
/// At least so many of the largest bodies: an owner may take three quarters of what is free, and whoever comes then
/// three quarters of the rest. Those still hold a body of any size.
const LARGEST_BODIES: usize = 6;

/// Within the limit in time, a body that trickles in has so long, and a second for each of so many bytes that came: its
/// request holds a place meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
const LEAST_BYTES_PER_SECOND: usize = 32 << 10;
/// Longest time for which a refused request's body is read.
const DISCARD_LIMIT: Duration = Duration::from_secs(1);
/// So many refused requests' bodies are read at one time: whoever has no key must not keep connections busy.
const MAX_DISCARDS: usize = 64;

/// Others on the thread have their turn after so many bytes: a client on this machine sends gigabytes a second. And
/// bodies lie in blocks of so many: one that grows whole is copied again and again, without a turn for anybody.
const TURN_BYTES: usize = 128 << 10;
/// A body of more bytes is long, and a turn is not enough: a core that reads as fast as a client sends has no time for
/// streams, whose tokens waited up to 21 ms on two cores.
const LONG_BYTES: usize = 1 << 20;
/// After so many bytes of a long body none of them is read for a while.
const PAUSE_BYTES: usize = 256 << 10;
const PAUSE: Duration = Duration::from_millis(1);

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
    /// Bodies of the same owner hold as much of that memory as leaves enough to others.
    #[error(
        "the bodies of the API key {owner} take {held} bytes, and the rest of the {limit} that there are for bodies is \
         kept for other keys; send it again later"
    )]
    Share {
        /// The name of the key.
        owner: Arc<str>,
        /// Bytes that its bodies take.
        held: usize,
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
    memory: Arc<Memory>,
    discards: Semaphore,
    /// Of bodies that are read, and of those that are discarded: who is refused holds up nobody who is not.
    reading: Turns,
    discarding: Turns,
}

/// The turns of others while bodies come.
#[derive(Debug, Default)]
struct Turns {
    /// Held in a pause of a long body: those of several come one after the other.
    pause: tokio::sync::Mutex<()>,
}

impl Turns {
    /// Of a body that had `before` bytes and has `after`.
    async fn take(&self, before: usize, after: usize) {
        let passed = |bytes: usize| after / bytes > before / bytes;
        if after > LONG_BYTES && passed(PAUSE_BYTES) {
            let _alone = self.pause.lock().await;
            sleep(PAUSE).await;
        } else if passed(TURN_BYTES) {
            yield_now().await;
        }
    }
}

/// What all bodies together may hold.
#[derive(Debug)]
struct Memory {
    limit: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// Only of those who hold any.
    by_owner: HashMap<Arc<str>, usize>,
}

/// A body's part of the memory.
#[derive(Debug)]
struct Part {
    memory: Arc<Memory>,
    owner: Option<Arc<str>>,
    bytes: usize,
}

/// A whole body. Its memory counts until it is dropped.
#[derive(Debug)]
pub struct Upload {
    /// What the client sent; none of them is empty.
    pub blocks: Vec<Bytes>,
    _memory: Part,
}

impl Upload {
    /// Bytes of the body.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(Bytes::len).sum()
    }
}

/// Blocks that are filled one after the other.
#[derive(Default)]
struct Blocks {
    full: Vec<Bytes>,
    last: BytesMut,
}

impl Blocks {
    fn bytes(&self) -> usize {
        self.full.len() * TURN_BYTES + self.last.len()
    }

    fn extend(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let (part, rest) = data.split_at(data.len().min(TURN_BYTES - self.last.len()));
            self.last.extend_from_slice(part);
            data = rest;
            if self.last.len() == TURN_BYTES {
                let next = BytesMut::with_capacity(TURN_BYTES.min(rest.len()));
                self.full.push(std::mem::replace(&mut self.last, next).freeze());
            }
        }
    }

    fn finish(mut self) -> Vec<Bytes> {
        if !self.last.is_empty() {
            self.full.push(self.last.freeze());
        }
        self.full
    }
}

impl Uploads {
    /// For bodies of at most `max_bytes`, each of which must arrive within `limit`, and not too slowly before.
    pub fn new(max_bytes: usize, limit: Duration) -> Self {
        let bytes = MEMORY_BYTES.max(max_bytes.saturating_mul(LARGEST_BODIES));
        let memory = Arc::new(Memory { limit: bytes, taken: Mutex::default() });
        Self {
            max_bytes,
            limit,
            memory,
            discards: Semaphore::new(MAX_DISCARDS),
            reading: Turns::default(),
            discarding: Turns::default(),
        }
    }

    /// Bytes that all bodies together hold now, beyond what of each is not counted.
    pub fn bytes_held(&self) -> usize {
        self.memory.taken().all
    }

    /// Bytes that one body may have.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Reads a body to its end. `owner`: among whom the memory is shared; `None`: whoever may have all of it.
    ///
    /// # Errors
    /// Which limit it breaks, or that the connection did.
    pub async fn read<B>(&self, owner: Option<&Arc<str>>, body: B) -> Result<Upload, UploadError>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        // What content-length announces need not be waited for.
        if body.size_hint().lower() > self.max_bytes as u64 {
            return Err(UploadError::TooLarge { limit: self.max_bytes });
        }
        self.read_frames(owner, Limited::new(body, self.max_bytes)).await
    }

    /// Time from its start after which a body of which `bytes` bytes came is too slow.
    fn allowed(&self, bytes: usize) -> Duration {
        self.limit.min(PATIENCE + Duration::from_secs((bytes / LEAST_BYTES_PER_SECOND) as u64))
    }

    /// Reads what comes of a body, for a while, however large it is, and forgets it. A client over HTTP/1 that has not
    /// sent everything may lose an answer for which nobody read its body: closing then resets the connection.
    pub async fn discard<B: Body<Data = Bytes>>(&self, body: B) {
        let Ok(_permit) = self.discards.try_acquire() else { return };
        let frames = async {
            let mut body = pin!(body);
            let mut bytes = 0;
            while let Some(Ok(frame)) = body.frame().await {
                let before = bytes;
                bytes += frame.data_ref().map_or(0, Bytes::len);
                self.discarding.take(before, bytes).await;
            }
        };
        // One that takes longer reads its answer late, or not at all.
        let _ = timeout(self.limit.min(DISCARD_LIMIT), frames).await;
    }

    async fn read_frames<B>(&self, owner: Option<&Arc<str>>, body: Limited<B>) -> Result<Upload, UploadError>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let mut body = pin!(body);
        let mut blocks = Blocks::default();
        let mut memory = Part { memory: self.memory.clone(), owner: owner.cloned(), bytes: 0 };
        let start = Instant::now();
        loop {
            let before = blocks.bytes();
            let limit = self.allowed(before);
            let next = timeout_at(start + limit, body.frame()).await.map_err(|_| UploadError::Timeout { limit })?;
            let Some(frame) = next else { break };
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => UploadError::TooLarge { limit: self.max_bytes },
                false => UploadError::Broken(error.to_string()),
            })?;
            let Ok(data) = frame.into_data() else { continue };
            memory.grow((before + data.len()).saturating_sub(FREE_BYTES))?;
            blocks.extend(&data);
            self.reading.take(before, blocks.bytes()).await;
        }
        Ok(Upload { blocks: blocks.finish(), _memory: memory })
    }
}

impl Memory {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        // No code that may panic runs under the lock.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    /// Takes as much more as makes it so many bytes.
    fn grow(&mut self, bytes: usize) -> Result<(), UploadError> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let limit = self.memory.limit;
        let mut taken = self.memory.taken();
        let free = limit - taken.all;
        if more > free {
            return Err(UploadError::Crowded { limit });
        }
        if let Some(owner) = &self.owner {
            let held = taken.by_owner.get(owner).copied().unwrap_or(0);
            // Of what is free once this is taken: a frame may be large.
            if !leaves_room((held + more) as u64, 0, (free - more) as u64) {
                return Err(UploadError::Share { owner: owner.clone(), held, limit });
            }
            taken.by_owner.insert(owner.clone(), held + more);
        }
        taken.all += more;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut taken = self.memory.taken();
        taken.all -= self.bytes;
        let Some(owner) = &self.owner else { return };
        if let Some(held) = taken.by_owner.get_mut(owner) {
            *held -= self.bytes;
            if *held == 0 {
                taken.by_owner.remove(owner);
            }
        }
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

    /// In frames of 64 KiB.
    fn frames(bytes: usize) -> impl Body<Data = Bytes, Error = std::io::Error> {
        let frame = || Ok(Frame::data(Bytes::from(vec![b'x'; 64 << 10])));
        StreamBody::new(stream::iter((0..bytes >> 16).map(move |_| frame())))
    }

    #[tokio::test(start_paused = true)]
    async fn long_bodies_have_pauses_one_after_the_other_and_refused_ones_theirs_beside() {
        const LONG: usize = 8 << 20;
        let (uploads, begun) = (Uploads::new(LONG, LIMIT), Instant::now());
        uploads.read(None, frames(LONG_BYTES)).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO, "a prompt of usual length has none");
        let pauses = PAUSE * ((LONG - LONG_BYTES) / PAUSE_BYTES) as u32;
        uploads.read(None, frames(LONG)).await.unwrap();
        assert_eq!(begun.elapsed(), pauses);
        let read = || uploads.read(None, frames(LONG));
        let (one, other, ()) = futures::join!(read(), read(), uploads.discard(frames(LONG)));
        assert_eq!((one.unwrap().bytes(), other.unwrap().bytes()), (LONG, LONG));
        assert_eq!(begun.elapsed(), pauses * 3);
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
        assert_eq!(uploads.read(None, body(10)).await.unwrap().bytes(), 10);
        assert_eq!(uploads.read(None, body(11)).await.unwrap_err(), UploadError::TooLarge { limit: 10 });
        let frame = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"1234")));
        let unannounced = StreamBody::new(stream::iter([frame(), frame(), frame()]));
        assert_eq!(uploads.read(None, unannounced).await.unwrap_err(), UploadError::TooLarge { limit: 10 });
        let limit = Duration::from_millis(20);
        let silent = StreamBody::new(stream::pending::<Result<Frame<Bytes>, std::io::Error>>());
        assert_eq!(Uploads::new(10, limit).read(None, silent).await.unwrap_err(), UploadError::Timeout { limit });
    }

    #[tokio::test]
    async fn others_have_their_turn_while_a_large_body_comes() {
        let uploads = Uploads::new(8 << 20, LIMIT);
        assert!(uploads.read(None, frames(64 << 10)).now_or_never().is_some());
        assert!(uploads.read(None, frames(192 << 10)).now_or_never().is_none());
        assert!(uploads.discard(frames(192 << 10)).now_or_never().is_none());
        assert_eq!(uploads.read(None, frames(2 << 20)).await.unwrap().bytes(), 2 << 20);
    }

    #[tokio::test]
    async fn a_body_lies_in_blocks_as_it_came() {
        let uploads = Uploads::new(8 << 20, LIMIT);
        for (frame, frames) in [(0, 1), (1, 1), (1000, 3), (TURN_BYTES, 2), (TURN_BYTES + 1, 3), (300_001, 5)] {
            let all: Vec<u8> = (0..frame * frames).map(|at| (at % 251) as u8).collect();
            let parts: Vec<_> = all.chunks(frame.max(1)).map(|part| Ok::<_, std::io::Error>(part.to_vec())).collect();
            let parts = parts.into_iter().map(|part| part.map(|part| Frame::data(Bytes::from(part))));
            let upload = uploads.read(None, StreamBody::new(stream::iter(parts))).await.unwrap();
            assert_eq!((upload.bytes(), upload.blocks.concat()), (all.len(), all), "{frames} frames of {frame}");
            let (last, full) = upload.blocks.split_last().map_or((None, &[][..]), |(last, full)| (Some(last), full));
            assert!(full.iter().all(|block| block.len() == TURN_BYTES));
            assert!(last.is_none_or(|block| (1..=TURN_BYTES).contains(&block.len())));
        }
    }

    #[test]
    fn a_body_that_trickles_in_has_less_time_than_one_that_flows() {
        let uploads = Uploads::new(8 << 20, LIMIT);
        for (bytes, allowed_s) in [(0, 5), (1000, 5), (32 << 10, 6), (320 << 10, 15), (8 << 20, 30)] {
            assert_eq!(uploads.allowed(bytes), Duration::from_secs(allowed_s), "{bytes}");
        }
    }

    /// A sixth of the memory beside what is not counted.
    const LARGE: usize = 32 << 20;

    /// The memory of bodies of at most `LARGE` bytes and what is not counted.
    fn large() -> (Uploads, usize) {
        let uploads = Uploads::new(LARGE + FREE_BYTES, LIMIT);
        let limit = uploads.memory.limit;
        assert_eq!(limit, LARGEST_BODIES * (LARGE + FREE_BYTES));
        (uploads, limit)
    }

    #[tokio::test]
    async fn large_bodies_share_what_memory_there_is_and_leave_room_for_small_ones() {
        let (uploads, limit) = large();
        let mut held = Vec::new();
        for _ in 0..6 {
            held.push(uploads.read(None, body(LARGE + FREE_BYTES)).await.unwrap());
        }
        assert_eq!(uploads.bytes_held(), 6 * LARGE);
        let crowded = UploadError::Crowded { limit };
        assert_eq!(uploads.read(None, body(LARGE)).await.unwrap_err(), crowded);
        assert_eq!(uploads.bytes_held(), 6 * LARGE, "what is refused holds nothing");
        uploads.read(None, body(FREE_BYTES)).await.unwrap();
        held.pop();
        uploads.read(None, body(LARGE)).await.unwrap();
        held.clear();
        assert_eq!(uploads.bytes_held(), 0);
    }

    #[tokio::test]
    async fn an_owner_of_many_bodies_leaves_room_for_the_largest_of_another() {
        let (uploads, limit) = large();
        let [hostile, other] = ["hostile", "other"].map(Arc::<str>::from);
        // In frames as small as those of a connection, so that it takes what it can get.
        let frames = || {
            let frame = || Ok::<_, std::io::Error>(Frame::data(Bytes::from(vec![b'x'; 16 << 10])));
            StreamBody::new(stream::iter((0..(LARGE + FREE_BYTES) >> 14).map(move |_| frame())))
        };
        let mut held = Vec::new();
        let refused = loop {
            match uploads.read(Some(&hostile), frames()).await {
                Ok(upload) => held.push(upload),
                Err(refused) => break refused,
            }
        };
        assert_eq!(held.len(), 4, "three quarters of the memory and no more");
        let UploadError::Share { owner, limit: told, .. } = refused else { panic!("{refused}") };
        assert_eq!((owner, told), (hostile.clone(), limit));
        let others = uploads.read(Some(&other), frames()).await.unwrap();
        // Small ones need no share.
        uploads.read(Some(&hostile), body(FREE_BYTES)).await.unwrap();
        assert_eq!(uploads.bytes_held(), 5 * LARGE);
        drop((held, others));
        assert_eq!(uploads.bytes_held(), 0);
        assert!(uploads.memory.taken().by_owner.is_empty());
        uploads.read(Some(&hostile), frames()).await.unwrap();
    }
}
