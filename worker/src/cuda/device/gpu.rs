//! The GPU of a rank: found without assuming that there is one, and what it has.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use crate::cuda::error::{CudaError, checked};

/// What a GPU has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its number among those that this process sees.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Its place on the PCI bus, as 0000:1b:00.0.
    pub pci: String,
    /// The driver's CUDA version: major and minor.
    pub driver: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: usize,
    /// Bytes of shared memory that a block may ask for.
    pub shared_bytes: usize,
}

/// An open GPU. Memory, streams and kernels hold on to it; the last one closes it.
#[derive(Debug)]
pub struct Gpu {
    /// What it has.
    pub facts: Facts,
    device: sys::CUdevice,
    context: sys::CUcontext,
}

/// A queue of work of a GPU.
#[derive(Debug)]
pub struct Stream {
    pub(in crate::cuda) raw: sys::CUstream,
    gpu: Arc<Gpu>,
}

// SAFETY: a device and its primary context are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for Gpu {}
// SAFETY: as above; a `Gpu` hands out nothing that changes it.
#[allow(unsafe_code)]
unsafe impl Sync for Gpu {}
// SAFETY: streams may be used from any thread in whose context they are made current.
#[allow(unsafe_code)]
unsafe impl Send for Stream {}

/// Looks at GPU `ordinal` of this process (as CUDA_VISIBLE_DEVICES numbers them) without opening it.
///
/// # Errors
/// Why it cannot be used.
#[allow(unsafe_code)]
pub fn probe(ordinal: usize) -> Result<Facts, CudaError> {
    // SAFETY: asks the loader whether the library is there; the driver's initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    match result::init() {
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err(CudaError::NoDevice { ordinal, count: 0 });
        }
        initialised => checked("cuInit", initialised)?,
    }
    let count = checked("cuDeviceGetCount", result::device::get_count())? as usize;
    if ordinal >= count {
        return Err(CudaError::NoDevice { ordinal, count });
    }
    let device = checked("cuDeviceGet", result::device::get(ordinal as i32))?;
    let name = checked("cuDeviceGetName", result::device::get_name(device))?;
    let attribute = |attribute| -> Result<u32, CudaError> {
        // SAFETY: the device is one that the driver named.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        checked("cuDeviceGetAttribute", value).map(|value| value.max(0) as u32)
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if (major, minor) != (9, 0) {
        return Err(CudaError::Generation { ordinal, name, major, minor });
    }
    let mut driver = 0;
    // SAFETY: the library is present and the pointer is to a live integer.
    checked("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut driver) }.result())?;
    Ok(Facts {
        ordinal,
        name,
        pci: pci_name(device)?,
        driver: (driver as u32 / 1000, driver as u32 % 1000 / 10),
        sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
    })
}

#[allow(unsafe_code)]
fn pci_name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name = [0u8; 32];
    // SAFETY: the device is one that the driver named, and the buffer is as long as the call is told.
    let asked = unsafe { sys::cuDeviceGetPCIBusId(name.as_mut_ptr().cast(), name.len() as i32, device) };
    checked("cuDeviceGetPCIBusId", asked.result())?;
    Ok(name.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect())
}

impl Gpu {
    /// Opens GPU `ordinal` and makes it the current thread's.
    ///
    /// # Errors
    /// Why it cannot be used.
    #[allow(unsafe_code)]
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let facts = probe(ordinal)?;
        let device = checked("cuDeviceGet", result::device::get(ordinal as i32))?;
        // SAFETY: the device is one that the driver named.
        let context = checked("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        let gpu = Self { facts, device, context };
        gpu.make_current()?;
        Ok(Arc::new(gpu))
    }

    /// Lets the calling thread use it.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        checked("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }

    /// Bytes of its memory: free, and in all.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.make_current()?;
        let (free, total) = checked("cuMemGetInfo", result::mem_get_info())?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Gpu {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: retained once in `open`, and whatever was made in the context held on to `self`.
        let released = unsafe { result::primary_ctx::release(self.device) };
        if let Err(error) = released {
            tracing::debug!("cuDevicePrimaryCtxRelease: {error}");
        }
    }
}

impl Stream {
    /// A queue that waits for no other.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        gpu.make_current()?;
        let raw = checked("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Sleeps until all its work is done.
    ///
    /// # Errors
    /// The work failed.
    #[allow(unsafe_code)]
    pub fn wait(&self) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        // SAFETY: the stream lives as long as `self`.
        checked("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }

    /// Whether all its work is done; does not wait.
    ///
    /// # Errors
    /// The work failed.
    #[allow(unsafe_code)]
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(self.raw) }.result() {
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            done => checked("cuStreamQuery", done).map(|()| true),
        }
    }
}

/// A point in a stream that others wait for.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    gpu: Arc<Gpu>,
}

// SAFETY: an event is a handle that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for Event {}

impl Event {
    /// An event that no stream has recorded: nobody waits for it.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        gpu.make_current()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Self { raw: checked("cuEventCreate", raw)?, gpu: gpu.clone() })
    }
}

impl Drop for Event {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made in `new`, and nobody else has the handle.
        let destroyed = self.gpu.make_current().map(|()| unsafe { result::event::destroy(self.raw) });
        if let Ok(Err(error)) = destroyed {
            tracing::debug!("cuEventDestroy: {error}");
        }
    }
}

impl Stream {
    /// Records an event behind all that was put so far, in place of where it was recorded before.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        checked("cuEventRecord", unsafe { result::event::record(event.raw, self.raw) })
    }

    /// What is put from now on begins when the stream that recorded an event last has come to it.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        checked("cuStreamWaitEvent", unsafe { result::stream::wait_event(self.raw, event.raw, flags) })
    }

    /// Copies bytes between addresses of GPUs, by a copy engine.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Both ranges are mapped, and stay so until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: as the caller vouches.
        checked("cuMemcpyDtoDAsync", unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw) })
    }

    /// Writes `value` to words, behind all that was put so far and after what that has written.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Self::copy`], of 4 bytes each.
    #[allow(unsafe_code)]
    pub unsafe fn write_words(&self, words: &[u64], value: u32) -> Result<(), CudaError> {
        let write = |address: &u64| sys::CUstreamBatchMemOpParams {
            writeValue: sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
                operation: sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32,
                address: *address,
                __bindgen_anon_1: sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 {
                    value,
                },
                flags: 0,
                alias: 0,
            },
        };
        let mut writes: Vec<_> = words.iter().map(write).collect();
        // SAFETY: as the caller vouches; the operations live until the call returns, which copies them.
        let put = unsafe { sys::cuStreamBatchMemOp_v2(self.raw, writes.len() as u32, writes.as_mut_ptr(), 0) };
        checked("cuStreamBatchMemOp", put.result())
    }
}

impl Drop for Stream {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made in `new`, and nobody else has the handle. What is still in the queue runs to its end.
        let destroyed = self.gpu.make_current().map(|()| unsafe { result::stream::destroy(self.raw) });
        if let Ok(Err(error)) = destroyed {
            tracing::debug!("cuStreamDestroy: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_told_so_and_nothing_panics() {
        // Where there is a GPU of the right kind, a number far beyond it is refused all the same.
        let refusal = probe(1000).unwrap_err();
        assert!(
            matches!(refusal, CudaError::NoDriver | CudaError::NoDevice { ordinal: 1000, .. } | CudaError::Call { .. }),
            "{refusal}"
        );
    }
}
