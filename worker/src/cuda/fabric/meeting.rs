//! The meeting of a group's ranks, once, before they run: each hands every other a header and descriptors of its
//! memory.
//!
//! A rank listens on a socket from the start and names it in its handle. When it joins it sends one message to every
//! other rank's socket and then takes one from each off its own:
//!
//! ```text
//! rank a: connect to b, send {header of a, descriptors of a}, close  for every b; waits for nobody: b listens already,
//!         accept, receive {header of b, descriptors of b}            and the kernel keeps the message until b joins
//! ```
//!
//! Nobody waits for an answer, so the order in which ranks join does not matter, but all have to join at some time.
//!
//! The sockets have abstract names: they leave no files behind and vanish with their process, however it ends. A name
//! holds 128 random bits, and each end of a connection checks that the other is a process of its own user.

use std::fmt::Write;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::header::{self, Header};

/// Descriptors of a message: the inbox and the board.
pub const DESCRIPTORS: usize = 2;
/// In front of a socket's name in a handle. Inboxes that are named by something else get another word.
const KIND: &str = "fd:";
/// In front of the random part of a name.
const NAME: &str = "looplane-";
/// Random bytes of a name.
const NAME_BYTES: usize = 16;
/// Connections that wait to be accepted: more than there are ranks.
const BACKLOG: i32 = 64;

/// Ranks did not find together.
#[derive(Debug, thiserror::Error)]
pub enum MeetingError {
    /// No socket to meet at.
    #[error("a socket for the other ranks cannot be made: {0}")]
    Open(#[source] std::io::Error),
    /// The list of handles is not of this group.
    #[error("{found} handles came for {ranks} ranks, or the handle of this rank is not in its place")]
    Handles {
        /// Handles given.
        found: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// A handle names no socket.
    #[error("the handle {handle:?} of rank {peer} names no socket: all workers have to be of one build of Looplane")]
    Handle {
        /// Whose.
        peer: usize,
        /// As given.
        handle: String,
    },
    /// A rank cannot be reached.
    #[error(
        "rank {peer} is not reached at {handle} ({source}): its worker has ended, or runs in another network namespace"
    )]
    Gone {
        /// Which.
        peer: usize,
        /// Its handle.
        handle: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A socket belongs to somebody else.
    #[error("the socket of rank {peer} belongs to user {uid}: all workers have to run as one user")]
    Stranger {
        /// Which.
        peer: usize,
        /// Whose it is.
        uid: u32,
    },
    /// Ranks did not join.
    #[error("{} did not join within {limit:?}: look for what their workers logged", ranks_named(.ranks))]
    Missing {
        /// Which.
        ranks: Vec<usize>,
        /// How long they were waited for.
        limit: Duration,
    },
    /// A rank of another group came, or two of one number.
    #[error("{0}")]
    Refused(String),
    /// A message broke.
    #[error("a message of process {pid} cannot be taken: {problem}")]
    Message {
        /// Whose.
        pid: i32,
        /// What is wrong with it.
        problem: String,
    },
}

fn ranks_named(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("{} {list}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

/// A rank that listens for the others.
#[derive(Debug)]
pub struct Meeting {
    socket: OwnedFd,
    name: String,
}

/// What another rank handed over.
#[derive(Debug)]
pub struct Arrival {
    /// Who it is.
    pub rank: usize,
    /// What it says of itself, checked against what this rank says.
    pub header: Header,
    /// Its descriptors.
    pub descriptors: [OwnedFd; DESCRIPTORS],
}

impl Meeting {
    /// Listens.
    ///
    /// # Errors
    /// The system refuses a socket.
    pub fn open() -> Result<Self, MeetingError> {
        let mut random = [0; NAME_BYTES];
        let read = File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut random));
        read.map_err(MeetingError::Open)?;
        let name = random.iter().fold(NAME.to_owned(), |mut name, byte| {
            write!(name, "{byte:02x}").expect("a string takes any text");
            name
        });
        let failed = |errno: Errno| MeetingError::Open(errno.into());
        let socket = socket().map_err(failed)?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
        rustix::net::bind(&socket, &address).and_then(|()| rustix::net::listen(&socket, BACKLOG)).map_err(failed)?;
        Ok(Self { socket, name })
    }

    /// Where the other ranks find this one.
    pub fn handle(&self) -> String {
        format!("{KIND}{}", self.name)
    }

    /// Hands `descriptors` to all other ranks and takes theirs, in the order in which they come. `handles` are those of
    /// all ranks, in rank order.
    ///
    /// # Errors
    /// A rank cannot be reached, does not join within `limit`, or is of another group.
    pub fn exchange(
        self,
        (rank, ranks): (usize, usize),
        own: &Header,
        descriptors: [BorrowedFd<'_>; DESCRIPTORS],
        handles: &[String],
        limit: Duration,
    ) -> Result<Vec<Arrival>, MeetingError> {
        let deadline = Instant::now() + limit;
        if handles.len() != ranks || handles[rank] != self.handle() {
            return Err(MeetingError::Handles { found: handles.len(), ranks });
        }
        for (peer, handle) in handles.iter().enumerate().filter(|(peer, _)| *peer != rank) {
            deliver(peer, handle, own, &descriptors, deadline)?;
        }
        let mut arrivals: Vec<Arrival> = Vec::with_capacity(ranks - 1);
        while arrivals.len() < ranks - 1 {
            let Some(arrival) = self.next(own, deadline)? else {
                let came = |rank: usize| arrivals.iter().any(|arrival| arrival.rank == rank);
                let missing = (0..ranks).filter(|other| *other != rank && !came(*other)).collect();
                return Err(MeetingError::Missing { ranks: missing, limit });
            };
            if arrivals.iter().any(|other| other.rank == arrival.rank) {
                return Err(MeetingError::Refused(format!("two workers say that they are rank {}", arrival.rank)));
            }
            arrivals.push(arrival);
        }
        Ok(arrivals)
    }

    /// The next rank that comes; `None` at the deadline.
    fn next(&self, own: &Header, deadline: Instant) -> Result<Option<Arrival>, MeetingError> {
        loop {
            if !bound(&self.socket, Timeout::Recv, deadline).map_err(|errno| MeetingError::Open(errno.into()))? {
                return Ok(None);
            }
            let connection = match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(connection) => connection,
                // The timeout, which the next turn says; or a signal, or who came has left again.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => return Err(MeetingError::Open(errno.into())),
            };
            let who = socket_peercred(&connection).map_err(|errno| MeetingError::Open(errno.into()))?;
            if who.uid != rustix::process::geteuid() {
                tracing::warn!(
                    "process {:?} of user {} is sent away from the ranks' meeting",
                    who.pid,
                    who.uid.as_raw()
                );
                continue;
            }
            return receive(&connection, own, deadline)
                .map(Some)
                .map_err(|problem| MeetingError::Message { pid: who.pid.as_raw_nonzero().get(), problem });
        }
    }
}

fn socket() -> rustix::io::Result<OwnedFd> {
    // SEQPACKET keeps a message whole, and its descriptors with it.
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Lets calls on the socket wait until the deadline; false if it has passed.
fn bound(socket: &OwnedFd, what: Timeout, deadline: Instant) -> rustix::io::Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    // The system takes whole microseconds, and 0 as no bound at all.
    let left = (left >= Duration::from_micros(1)).then_some(left);
    left.map_or(Ok(false), |left| set_socket_timeout(socket, what, Some(left)).map(|()| true))
}

/// Leaves this rank's message at another's socket.
fn deliver(
    peer: usize,
    handle: &str,
    own: &Header,
    descriptors: &[BorrowedFd<'_>; DESCRIPTORS],
    deadline: Instant,
) -> Result<(), MeetingError> {
    let wrong = || MeetingError::Handle { peer, handle: handle.to_owned() };
    let name = handle.strip_prefix(KIND).filter(|name| name.starts_with(NAME)).ok_or_else(wrong)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| wrong())?;
    let gone = |errno: Errno| MeetingError::Gone { peer, handle: handle.to_owned(), source: errno.into() };
    let socket = socket().map_err(gone)?;
    bound(&socket, Timeout::Send, deadline).map_err(gone)?;
    rustix::net::connect(&socket, &address).map_err(gone)?;
    let uid = socket_peercred(&socket).map_err(gone)?.uid;
    if uid != rustix::process::geteuid() {
        return Err(MeetingError::Stranger { peer, uid: uid.as_raw() });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "the space is for that many descriptors");
    let message = [IoSlice::new(bytemuck::bytes_of(own))];
    rustix::net::sendmsg(&socket, &message, &mut control, SendFlags::NOSIGNAL).map_err(gone)?;
    Ok(())
}

/// Takes another rank's message; the error is in words.
fn receive(connection: &OwnedFd, own: &Header, deadline: Instant) -> Result<Arrival, String> {
    if !bound(connection, Timeout::Recv, deadline).map_err(|errno| errno.to_string())? {
        return Err("it came too late".into());
    }
    // One more than expected: a longer message is not taken for a whole one.
    let mut bytes = [0; header::BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut message = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(connection, &mut message, &mut control, RecvFlags::CMSG_CLOEXEC);
    let received = received.map_err(|errno| match errno {
        Errno::AGAIN => "it connected and said nothing".to_owned(),
        errno => errno.to_string(),
    })?;
    let descriptors: Vec<OwnedFd> = control
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    let (rank, header) = own.peer(&bytes[..received.bytes])?;
    let count = descriptors.len();
    let descriptors = descriptors.try_into().ok().filter(|_| !received.flags.contains(ReturnFlags::CTRUNC));
    let descriptors = descriptors.ok_or_else(|| {
        format!("rank {rank} sent {count} descriptors, not {DESCRIPTORS}, or this process may open no more (ulimit -n)")
    })?;
    Ok(Arrival { rank, header, descriptors })
}

#[cfg(test)]
mod tests;
