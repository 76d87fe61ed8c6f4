//! What ties the ranks of a group together, one process and GPU each: memory that all of them write to, and a board on
//! which their hosts agree.
//!
//! [`inbox`] is a rank's memory on its GPU: peers map it, and their kernels and copy engines store to it, over NVLink
//! or PCIe, while this rank's kernel polls it. [`meeting`] hands the ranks each other's descriptors, [`header`] says
//! whose they are, [`topology`] says which GPUs reach each other. [`board`] is memory of the host. NVLink multicast is
//! never used.
//!
//! ```text
//! load    Fabric::new      inbox and board are made, the meeting's socket listens; handle() goes to the server
//! join    Fabric::join     all ranks at the same time: every one sends its descriptors to all and maps theirs
//! run     addresses()      for the kernel; agree() between launches
//! drop                     unmaps; a rank's inbox goes when the last process that maps it has ended, killed or not
//! ```

mod board;
mod group;
mod header;
mod inbox;
mod meeting;
mod topology;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::cuda::device::gpu::Gpu;
use crate::cuda::error::CudaError;
use crate::decoder::{Fault, LoadError};
use board::Board;
use header::Header;
use inbox::{Inbox, Mapping};
use meeting::{Arrival, Meeting};
use topology::Device;

pub use group::{Group, MAX_RANKS};
pub use topology::survey;

/// How long the ranks of a group may join after each other. The server, which lets all of them join at once, waits
/// longer, so that it is told which rank was missing.
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// One rank's end of what ties the group together.
pub struct Fabric {
    group: Group,
    gpu: Arc<Gpu>,
    device: Device,
    inbox: Inbox,
    /// Inboxes of the other ranks, by rank; the place of this rank stays empty.
    peers: Vec<Option<Mapping>>,
    board: Board,
    /// Until the ranks have met.
    meeting: Option<Meeting>,
}

impl Fabric {
    /// Takes `inbox_bytes` of zeroed memory on the GPU and listens for the other ranks. A rank that does not come to an
    /// agreement within `wait_limit` is a fault.
    ///
    /// # Errors
    /// There is not so much memory, or the system refuses a socket or shared memory.
    ///
    /// # Panics
    /// If the group is larger than [`MAX_RANKS`], or the rank is not in it.
    pub fn new(gpu: &Arc<Gpu>, group: Group, inbox_bytes: usize, wait_limit: Duration) -> Result<Self, LoadError> {
        assert!(group.rank < group.ranks && group.ranks <= MAX_RANKS, "rank {} of {}", group.rank, group.ranks);
        let devices = Device::all()?;
        let system = |what, error: Box<dyn std::error::Error + Send + Sync>| LoadError::System {
            what,
            source: std::io::Error::other(error),
        };
        Ok(Self {
            device: devices[gpu.facts.ordinal].clone(),
            inbox: Inbox::zeroed(gpu, inbox_bytes)?,
            peers: (0..group.ranks).map(|_| None).collect(),
            board: Board::new(group.rank, group.ranks, wait_limit)
                .map_err(|error| system("the board of the group", error.into()))?,
            meeting: Some(Meeting::open().map_err(|error| system("the meeting of the group", error.into()))?),
            gpu: gpu.clone(),
            group,
        })
    }

    /// Where the other ranks find this one, until it has joined.
    ///
    /// # Panics
    /// If it has joined.
    pub fn handle(&self) -> String {
        self.meeting.as_ref().expect(NOT_JOINED).handle()
    }

    /// Meets the other ranks and maps their memory; handles in rank order. Returns once all have come, so all have to
    /// join at the same time.
    ///
    /// # Errors
    /// A rank does not come, is of another group, or its GPU is not reached.
    ///
    /// # Panics
    /// If it has joined before.
    pub fn join(&mut self, handles: &[String]) -> Result<(), Fault> {
        let rank = self.group.rank;
        let meeting = self.meeting.take().expect(NOT_JOINED);
        self.meet(meeting, handles, JOIN_TIMEOUT).map_err(|problem| Fault::Join { rank, problem })
    }

    fn meet(&mut self, meeting: Meeting, handles: &[String], limit: Duration) -> Result<(), String> {
        let own = Header::new(&self.group, self.inbox.mapping().bytes() as u64, self.device.uuid);
        let descriptors = [self.inbox.descriptor().expect(NOT_JOINED), self.board.descriptor()];
        let arrivals = meeting
            .exchange((self.group.rank, self.group.ranks), &own, descriptors, handles, limit)
            .map_err(|error| error.to_string())?;
        let devices = Device::all().map_err(|error| error.to_string())?;
        let mut reached = Vec::with_capacity(arrivals.len());
        for Arrival { rank, header, descriptors: [inbox, board] } in &arrivals {
            let link = self.map(*rank, &devices, header, inbox).map_err(|error| error.to_string())?;
            self.board.map(*rank, board).map_err(|error| error.to_string())?;
            reached.push(link);
        }
        self.inbox.end_export();
        tracing::info!("rank {} on {} reaches {}", self.group.rank, self.device, reached.join("; "));
        Ok(())
    }

    /// Maps a rank's inbox, and says in words how it is reached.
    fn map(&mut self, rank: usize, devices: &[Device], header: &Header, inbox: &OwnedFd) -> Result<String, CudaError> {
        let device = topology::find(devices, &header.gpu, rank)?;
        let link = self.device.link(device)?;
        self.peers[rank] = Some(Mapping::import(&self.gpu, inbox, self.inbox.mapping().bytes())?);
        Ok(format!("rank {rank} on {device} {link}"))
    }

    /// Addresses of all ranks' inboxes for this rank's GPU, its own included; 0 where there is no rank.
    ///
    /// # Panics
    /// If the ranks have not joined.
    pub fn addresses(&self) -> [u64; MAX_RANKS] {
        std::array::from_fn(|rank| match self.peers.get(rank) {
            Some(_) if rank == self.group.rank => self.inbox.mapping().address(),
            Some(peer) => peer.as_ref().expect("all inboxes, because control calls join before run").address(),
            None => 0,
        })
    }

    /// A rank's inbox as this one maps it.
    #[cfg(test)]
    pub fn inbox(&self, rank: usize) -> &Mapping {
        self.peers[rank].as_ref().unwrap_or(self.inbox.mapping())
    }

    /// Zeroes the inbox, once no rank's kernel writes to it any more and before one does again: every rank calls it at
    /// the same place, with no launch under way. `step` is for reports.
    ///
    /// # Errors
    /// A rank did not come within the limit, or the driver refuses.
    pub fn clear(&mut self, step: u64) -> Result<(), Fault> {
        self.board.agree(step, 0)?;
        let cleared = self.inbox.mapping().fill(0);
        cleared.map_err(|error| Fault::Cuda { rank: self.group.rank, step, error })?;
        self.board.agree(step, 0).map(drop)
    }

    /// Offers the newest plan that this rank has and returns the newest that all have; see [`Board::agree`].
    ///
    /// # Errors
    /// A rank did not come within the limit.
    pub fn agree(&mut self, step: u64, newest: u64) -> Result<u64, Fault> {
        self.board.agree(step, newest)
    }

    /// Offers bits and returns those that all ranks offer; see [`Board::all`].
    ///
    /// # Errors
    /// A rank did not come within the limit.
    pub fn all(&mut self, step: u64, bits: u64) -> Result<u64, Fault> {
        self.board.all(step, bits)
    }
}

const NOT_JOINED: &str = "ranks join once, because control calls it so";
