//! Memory of the GPU, and of the host as the GPU sees it.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result;
use cudarc::driver::sys;

use super::gpu::{Gpu, Stream};
use crate::cuda::error::{CudaError, checked};

/// Memory of a GPU. It is given back when it is dropped, which waits for kernels that still run.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
    gpu: Arc<Gpu>,
}

/// Memory of the host that copies to and from the GPU need not pass through another buffer for, and that kernels can
/// read and write in place.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    host: *mut T,
    len: usize,
    gpu: Arc<Gpu>,
    values: PhantomData<T>,
}

// SAFETY: the buffer owns its memory, and page-locked memory belongs to no thread.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for PinnedBuffer<T> {}

impl DeviceBuffer {
    /// Takes `bytes` of memory (none for 0), filled with zeros.
    ///
    /// # Errors
    /// There is not so much.
    #[allow(unsafe_code)]
    pub fn zeroed(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let buffer = Self::uninitialised(gpu, bytes)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// Takes `bytes` of memory (none for 0) that hold anything.
    ///
    /// # Errors
    /// There is not so much.
    #[allow(unsafe_code)]
    pub fn uninitialised(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        gpu.make_current()?;
        let address = match bytes {
            0 => 0,
            // SAFETY: whoever reads it first has to write it first, which is what the type's name says.
            bytes => checked("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?,
        };
        Ok(Self { address, bytes, gpu: gpu.clone() })
    }

    /// Takes memory for a copy of `values`.
    ///
    /// # Errors
    /// There is not so much.
    pub fn of<T: Pod>(gpu: &Arc<Gpu>, values: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::uninitialised(gpu, size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Sets every byte, and waits until that is done.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        if self.bytes == 0 {
            return Ok(());
        }
        self.gpu.make_current()?;
        // SAFETY: the range is this buffer's.
        checked("cuMemsetD8", unsafe { result::memset_d8_sync(self.address, byte, self.bytes) })?;
        // The call returns before the memory is set.
        checked("cuCtxSynchronize", result::ctx::synchronize())
    }

    /// Copies `values` to byte `offset`, and waits until they are there.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn write<T: Pod>(&self, offset: usize, values: &[T]) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "{offset} + {} of {}", size_of_val(values), self.bytes);
        if values.is_empty() {
            return Ok(());
        }
        self.gpu.make_current()?;
        // SAFETY: the range is in this buffer, and the call returns when `values` may change again.
        checked("cuMemcpyHtoD", unsafe { result::memcpy_htod_sync(self.address + offset as u64, values) })
    }

    /// Copies `values` to byte `offset` in the stream's order.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// `values` stay as they are, and where they are, until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn write_async<T: Pod>(&self, offset: usize, values: &[T], stream: &Stream) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "{offset} + {} of {}", size_of_val(values), self.bytes);
        // SAFETY: the range is in this buffer; the caller keeps `values`.
        let copied = unsafe { result::memcpy_htod_async(self.address + offset as u64, values, stream.raw) };
        checked("cuMemcpyHtoDAsync", copied)
    }

    /// Sets `bytes` bytes from `offset` on, in the stream's order.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn fill_async(&self, offset: usize, bytes: usize, byte: u8, stream: &Stream) -> Result<(), CudaError> {
        assert!(offset + bytes <= self.bytes, "{offset} + {bytes} of {}", self.bytes);
        // SAFETY: the range is in this buffer.
        let set = unsafe { result::memset_d8_async(self.address + offset as u64, byte, bytes, stream.raw) };
        checked("cuMemsetD8Async", set)
    }

    /// Copies from byte `offset` to `values`, and waits until they are there.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn read<T: Pod>(&self, offset: usize, values: &mut [T]) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "{offset} + {} of {}", size_of_val(values), self.bytes);
        self.gpu.make_current()?;
        // SAFETY: the range is in this buffer, and the call returns when `values` are there.
        checked("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(values, self.address + offset as u64) })
    }

    /// Copies from byte `offset` to `values` in the stream's order.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Nobody looks at `values`, and they stay where they are, until the stream has come that far.
    #[cfg(test)]
    #[allow(unsafe_code)]
    pub unsafe fn read_async<T: Pod>(&self, offset: usize, values: &mut [T], stream: &Stream) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "{offset} + {} of {}", size_of_val(values), self.bytes);
        // SAFETY: the range is in this buffer; the caller keeps `values`.
        let copied = unsafe { result::memcpy_dtoh_async(values, self.address + offset as u64, stream.raw) };
        checked("cuMemcpyDtoHAsync", copied)
    }

    /// Its address on the GPU; 0 for a buffer of no bytes.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // SAFETY: taken in `uninitialised`, and nobody else gives it back. The driver waits for kernels that run.
        let freed = self.gpu.make_current().map(|()| unsafe { result::free_sync(self.address) });
        if let Ok(Err(error)) = freed {
            tracing::debug!("cuMemFree: {error}");
        }
    }
}

impl<T: Pod> PinnedBuffer<T> {
    /// Takes room for `len` values, zeros.
    ///
    /// # Errors
    /// There is not so much memory that can be locked.
    #[allow(unsafe_code)]
    pub fn zeroed(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        gpu.make_current()?;
        // Portable: any thread's copies. Mapped: kernels read and write it. Not write-combined: the host reads it, too.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the memory is zeroed before anybody reads it.
        let host = checked("cuMemHostAlloc", unsafe { result::malloc_host(bytes, flags) })?;
        // SAFETY: the allocation has that many bytes.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { host: host.cast(), len, gpu: gpu.clone(), values: PhantomData })
    }

    /// Its address as kernels see it.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn device_address(&self) -> Result<u64, CudaError> {
        self.gpu.make_current()?;
        let mut address = 0;
        // SAFETY: the memory was allocated as mapped, and the pointer is to a live integer.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.host.cast::<c_void>(), 0) };
        checked("cuMemHostGetDevicePointer", mapped.result())?;
        Ok(address)
    }

    /// Where value `index` lies: for values that a kernel changes meanwhile, which no reference may be taken to.
    pub fn pointer(&self, index: usize) -> *mut T {
        assert!(index < self.len, "value {index} of {}", self.len);
        self.host.wrapping_add(index)
    }
}

impl<T: Pod> Deref for PinnedBuffer<T> {
    type Target = [T];

    #[allow(unsafe_code)]
    fn deref(&self) -> &[T] {
        // SAFETY: the allocation holds `len` values, zeros at first, and any bits are a value of a `Pod`. Alignment:
        // the driver allocates pages.
        unsafe { std::slice::from_raw_parts(self.host, self.len) }
    }
}

impl<T: Pod> DerefMut for PinnedBuffer<T> {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.len) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: taken in `zeroed`, and nobody else gives it back.
        let freed = self.gpu.make_current().map(|()| unsafe { result::free_host(self.host.cast::<c_void>()) });
        if let Ok(Err(error)) = freed {
            tracing::debug!("cuMemFreeHost: {error}");
        }
    }
}
