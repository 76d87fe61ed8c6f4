//! Memory of a worker: large buffers on huge pages, mapped once at load, and views that let units of one job write
//! disjoint parts of a buffer.
//!
//! The system gives a mapping its memory page by page, when a page is first written. A load is refused where the
//! machine has less than all of it (`budget`); what other programs take later, it cannot know. Under strict overcommit
//! (`vm.overcommit_memory=2`) mappings are reservations and nothing can go wrong any more; else the system kills a
//! process once memory runs out, and if that is a worker, the server starts its group again.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use bytemuck::Pod;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Mappings are rounded up to this, so that a large buffer can be huge pages throughout.
const HUGE_PAGE: usize = 2 << 20;
/// Buffers under this size stay on small pages.
const HUGE_FROM: usize = 4 << 20;

/// The operating system refused memory.
#[derive(Debug, thiserror::Error)]
#[error("{bytes} bytes for {what} cannot be mapped: {source}; use a smaller model, fewer KV pages or more ranks")]
pub struct OutOfMemory {
    /// What it was for.
    pub what: &'static str,
    /// How much.
    pub bytes: usize,
    /// Why not.
    pub source: std::io::Error,
}

/// A slice in a mapping of its own, zeros until it is written; starts on a page boundary, so 64-byte lines of it are
/// cache lines.
#[derive(Debug)]
pub struct Buffer<T> {
    start: NonNull<T>,
    len: usize,
    mapped_bytes: usize,
}

// SAFETY: a buffer owns its mapping as a Vec owns its memory.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn zeroed(len: usize, what: &'static str) -> Result<Self, OutOfMemory> {
        let bytes = len.saturating_mul(size_of::<T>());
        let align = if bytes >= HUGE_FROM { HUGE_PAGE } else { 4096 };
        let refused = |source: std::io::Error| OutOfMemory { what, bytes, source };
        let mapped_bytes = bytes.max(1).checked_next_multiple_of(align).filter(|mapped| *mapped <= isize::MAX as usize);
        let mapped_bytes = mapped_bytes.ok_or_else(|| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: a fresh private mapping at an address the kernel picks aliases nothing.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), mapped_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let start = start.map_err(|errno| refused(errno.into()))?;
        if align == HUGE_PAGE {
            // Only advice: without huge pages everything works, with more misses in the page tables' caches.
            // SAFETY: the range is the mapping just made, and this advice changes no contents.
            let _ = unsafe { madvise(start, mapped_bytes, Advice::LinuxHugepage) };
        }
        let start = NonNull::new(start.cast()).expect("an address, because mmap does not map page 0 by itself");
        Ok(Self { start, len, mapped_bytes })
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` initialised (zeroed, plain) values until `self` is dropped.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `zeroed` with this length, and nothing borrows it any more.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// A slice whose parts the units of one job write, each its own.
#[derive(Debug)]
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    _borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out parts of an exclusively borrowed slice; that parts in use do not overlap is the contract of
// `part`.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for the duration of a job.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), _borrowed: PhantomData }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// No other part that overlaps `range` is in use, on any thread.
    ///
    /// # Panics
    /// If `range` is out of bounds.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds; the caller vouches that nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_writable_and_aligned() {
        for len in [0, 1, 1000, 3 << 20] {
            let mut buffer = Buffer::<u32>::zeroed(len, "a test").unwrap();
            assert!(buffer.len() == len && buffer.iter().all(|value| *value == 0));
            assert_eq!(buffer.as_ptr() as usize % 4096, 0);
            buffer.fill(7);
            assert!(buffer.iter().all(|value| *value == 7));
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let error = Buffer::<u64>::zeroed(usize::MAX / 4, "the KV cache").unwrap_err();
        assert!(error.to_string().contains("for the KV cache cannot be mapped"), "{error}");
        assert!(Buffer::<u8>::zeroed(1 << 60, "the KV cache").is_err());
    }

    #[test]
    #[should_panic(expected = "of 4")]
    fn parts_stay_in_bounds() {
        let mut values = [0; 4];
        let values = Disjoint::new(&mut values);
        // SAFETY: the only part.
        let _ = unsafe { values.part(2..5) };
    }
}
