//! Memory that the ranks of a group share: a rank creates a segment, names it by a path, and maps those of its peers.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A segment of shared memory cannot be made or mapped.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// The operating system refused to make one.
    #[error("{bytes} bytes of shared memory for the exchange cannot be made: {source}")]
    Create {
        /// Size.
        bytes: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A handle leads nowhere.
    #[error(
        "the exchange memory {handle} cannot be mapped: {source}; all workers have to run as one user with a readable \
         /proc, and their program without setuid or file capabilities"
    )]
    Open {
        /// The handle as given.
        handle: String,
        /// Why.
        source: std::io::Error,
    },
    /// A handle leads to something else.
    #[error(
        "the exchange memory {handle} has {found} bytes, not {expected}: its rank has loaded another model or settings"
    )]
    Size {
        /// The handle as given.
        handle: String,
        /// Bytes expected.
        expected: usize,
        /// Bytes found.
        found: u64,
    },
}

/// A mapped segment. Writing goes through atomics or [`Segment::write`]; a peer's segment is only read.
#[derive(Debug)]
pub struct Segment {
    start: NonNull<u8>,
    bytes: usize,
    writable: bool,
    /// Of this rank's own: keeps the memory reachable by its path for as long as this rank lives.
    file: Option<OwnedFd>,
}

// SAFETY: the mapping is plain memory; how threads and processes may touch it is the contract of the methods.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes a zeroed segment and its handle, a path that other processes of this user can open while this one lives.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn create(bytes: usize) -> Result<(Self, String), ShmError> {
        let failed = |errno: rustix::io::Errno| ShmError::Create { bytes, source: errno.into() };
        let file = memfd_create("looplane-fabric", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        ftruncate(&file, bytes as u64).map_err(failed)?;
        // Its memory is taken now: later a write that finds none would be a bus error.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64).map_err(failed)?;
        // Nobody can shrink it under a mapping, which would turn a load into a bus error.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        let handle = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let start = map(&file, bytes, ProtFlags::READ | ProtFlags::WRITE).map_err(failed)?;
        Ok((Self { start, bytes, writable: true, file: Some(file) }, handle))
    }

    /// Maps a peer's segment for reading.
    ///
    /// # Errors
    /// The handle leads nowhere, or to a segment of another size.
    pub fn open(handle: &str, bytes: usize) -> Result<Self, ShmError> {
        let failed = |source: std::io::Error| ShmError::Open { handle: handle.to_owned(), source };
        Self::of(&File::open(Path::new(handle)).map_err(failed)?, handle, bytes)
    }

    /// Maps a peer's segment by a descriptor of it for reading; `handle` names it in errors.
    ///
    /// # Errors
    /// The descriptor is of something else.
    pub fn of(file: impl AsFd, handle: &str, bytes: usize) -> Result<Self, ShmError> {
        let failed = |errno: rustix::io::Errno| ShmError::Open { handle: handle.to_owned(), source: errno.into() };
        let found = fstat(&file).map_err(failed)?.st_size as u64;
        if found != bytes as u64 {
            return Err(ShmError::Size { handle: handle.to_owned(), expected: bytes, found });
        }
        let start = map(&file, bytes, ProtFlags::READ).map_err(failed)?;
        Ok(Self { start, bytes, writable: false, file: None })
    }

    /// What a peer maps with [`Segment::of`], if it is passed there.
    ///
    /// # Panics
    /// If the segment is a peer's.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("a rank passes its own segment on").as_fd()
    }

    /// The word at byte `offset`, shared with other processes.
    ///
    /// # Panics
    /// If the offset is out of bounds or not a multiple of 4.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        self.check(offset, 4);
        // SAFETY: in bounds and aligned; every process touches flag words through atomics only. Peers' segments are
        // mapped read-only, and only their own rank stores to their words.
        unsafe { &*self.start.as_ptr().add(offset).cast::<AtomicU32>() }
    }

    /// `len` fp32 at byte `offset`, for reading.
    ///
    /// # Safety
    /// The rank that owns the segment does not write them before the returned slice is given up: its flag said that
    /// they are complete (acquire), and the protocol keeps it from reusing them so long.
    ///
    /// # Panics
    /// If the range is out of bounds or not aligned.
    pub unsafe fn read(&self, offset: usize, len: usize) -> &[f32] {
        self.check(offset, len * 4);
        // SAFETY: in bounds and aligned, any bits are an fp32, and the caller vouches for the owner.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), len) }
    }

    /// `len` fp32 at byte `offset` of this rank's own segment, for writing.
    ///
    /// # Safety
    /// Nobody reads or writes them meanwhile, in any process.
    ///
    /// # Panics
    /// If the range is out of bounds or not aligned, or the segment is a peer's.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write(&self, offset: usize, len: usize) -> &mut [f32] {
        assert!(self.writable, "a peer's segment is only read");
        self.check(offset, len * 4);
        // SAFETY: in bounds, aligned and mapped writable; the caller vouches for everybody else.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(offset).cast(), len) }
    }

    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes);
        assert!(
            offset.is_multiple_of(4) && end.is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} of {}",
            self.bytes
        );
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing borrows it any more.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

fn map(file: impl AsFd, bytes: usize, access: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
    // SAFETY: a fresh mapping at an address the kernel picks aliases nothing in this process.
    let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }?;
    Ok(NonNull::new(start.cast()).expect("an address, because mmap does not map page 0 by itself"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_peer_sees_what_the_owner_wrote() {
        let (own, handle) = Segment::create(8192).unwrap();
        let peer = Segment::open(&handle, 8192).unwrap();
        // SAFETY: one thread, and the slices do not live at the same time.
        unsafe {
            own.write(4096, 2).copy_from_slice(&[1.5, -2.0]);
            own.word(64).store(9, Ordering::Release);
            assert_eq!(peer.word(64).load(Ordering::Acquire), 9);
            assert_eq!(peer.read(4096, 2), [1.5, -2.0]);
        }
    }

    #[test]
    fn a_descriptor_does_as_well_as_a_path() {
        let (own, _) = Segment::create(4096).unwrap();
        let peer = Segment::of(own.descriptor().try_clone_to_owned().unwrap(), "of rank 1", 4096).unwrap();
        own.word(8).store(3, Ordering::Release);
        assert_eq!(peer.word(8).load(Ordering::Acquire), 3);
        let error = Segment::of(own.descriptor(), "of rank 1", 8192).unwrap_err().to_string();
        assert!(error.contains("of rank 1 has 4096 bytes, not 8192"), "{error}");
    }

    #[test]
    fn wrong_handles_are_refused_by_name() {
        let (_own, handle) = Segment::create(4096).unwrap();
        let error = Segment::open(&handle, 8192).unwrap_err().to_string();
        assert!(error.contains("has 4096 bytes, not 8192"), "{error}");
        let error = Segment::open("/proc/self/fd/99999", 4096).unwrap_err().to_string();
        assert!(error.starts_with("the exchange memory /proc/self/fd/99999 cannot be mapped"), "{error}");
    }

    #[test]
    #[should_panic(expected = "only read")]
    fn a_peer_cannot_write() {
        let (_own, handle) = Segment::create(4096).unwrap();
        let peer = Segment::open(&handle, 4096).unwrap();
        // SAFETY: refused before anything is touched.
        let _ = unsafe { peer.write(0, 1) };
    }
}
