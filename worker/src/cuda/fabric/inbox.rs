//! Memory of a GPU that other processes map: made, exported, imported.
//!
//! The driver's virtual memory management keeps addresses and memory apart: memory lives for as long as anybody has it
//! mapped or holds a handle or descriptor of it, in whatever process. So a rank that is killed leaves the mappings of
//! the others whole, and the last of them that ends gives the memory back.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType,
    CUmemLocation, CUmemLocationType,
};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::cuda::device::gpu::Gpu;
use crate::cuda::error::{CudaError, checked};

/// How memory is named to other processes. One way so far; ranks on several hosts of one NVLink domain take another:
/// `CU_MEM_HANDLE_TYPE_FABRIC`, whose 64 bytes travel in a rank's handle itself, with no socket between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// A file descriptor: processes of one host.
    Descriptor,
}

/// This rank's memory that the others write to.
#[derive(Debug)]
pub struct Inbox {
    mapping: Mapping,
    /// What it is exported as; closed when all have it.
    descriptor: Option<OwnedFd>,
}

/// Memory of a GPU at addresses where this one reads and writes it. Unmapped when dropped; nothing may use it any more.
#[derive(Debug)]
pub struct Mapping {
    addresses: Addresses,
}

/// Addresses that are set aside.
#[derive(Debug)]
struct Addresses {
    start: u64,
    bytes: usize,
    gpu: Arc<Gpu>,
}

/// The driver's handle of memory, which keeps it as a mapping does.
struct Memory {
    handle: sys::CUmemGenericAllocationHandle,
    gpu: Arc<Gpu>,
}

impl Sharing {
    fn handle_type(self) -> CUmemAllocationHandleType {
        match self {
            Self::Descriptor => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        }
    }

    fn attribute(self) -> CUdevice_attribute {
        match self {
            Self::Descriptor => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        }
    }
}

impl Inbox {
    /// Takes at least `bytes` of memory, zeros, exported.
    ///
    /// # Errors
    /// There is not so much, or the GPU does not share memory.
    pub fn zeroed(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        gpu.make_current()?;
        let (memory, bytes) = Memory::create(gpu, bytes, Sharing::Descriptor)?;
        let descriptor = memory.export()?;
        let mapping = Mapping::of(&memory, bytes)?;
        mapping.fill(0)?;
        Ok(Self { mapping, descriptor: Some(descriptor) })
    }

    /// Where it lies for this GPU.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// What another process imports; `None` once the export has ended.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Closes the descriptor: all ranks have theirs.
    pub fn end_export(&mut self) {
        self.descriptor = None;
    }
}

impl Mapping {
    /// Maps what another rank has exported: `bytes` of memory.
    ///
    /// # Errors
    /// The descriptor is of something else, or this GPU has no access.
    pub fn import(gpu: &Arc<Gpu>, descriptor: &OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        gpu.make_current()?;
        // The handle is given up at the end: the mapping keeps the memory.
        Self::of(&Memory::import(gpu, descriptor)?, bytes)
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.addresses.start
    }

    /// Size: a whole number of the driver's granules.
    pub fn bytes(&self) -> usize {
        self.addresses.bytes
    }

    /// Copies `bytes` to byte `offset`, and waits until they are there.
    #[cfg(test)]
    #[allow(unsafe_code)]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes());
        self.addresses.gpu.make_current().unwrap();
        // SAFETY: the range is the mapping's.
        unsafe { result::memcpy_htod_sync(self.address() + offset as u64, bytes) }.unwrap();
    }

    /// A copy of `len` bytes from `offset` on.
    #[cfg(test)]
    #[allow(unsafe_code)]
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.bytes());
        self.addresses.gpu.make_current().unwrap();
        let mut bytes = vec![0; len];
        // SAFETY: as in `write`.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address() + offset as u64) }.unwrap();
        bytes
    }

    #[allow(unsafe_code)]
    fn of(memory: &Memory, bytes: usize) -> Result<Self, CudaError> {
        let gpu = &memory.gpu;
        let addresses = Addresses::reserve(gpu, bytes)?;
        // SAFETY: the addresses are set aside and nothing is mapped there; the memory has that many bytes, or the
        // driver refuses.
        let mapped = unsafe { sys::cuMemMap(addresses.start, bytes, 0, memory.handle, 0) };
        checked("cuMemMap", mapped.result())?;
        let mapping = Self { addresses };
        let access =
            CUmemAccessDesc { location: location(gpu), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the range is the mapping's, and the pointer is to one live description.
        let set = unsafe { sys::cuMemSetAccess(mapping.address(), bytes, &access, 1) };
        checked("cuMemSetAccess", set.result())?;
        Ok(mapping)
    }

    /// Sets every byte, and waits until that is done.
    #[allow(unsafe_code)]
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the range is the mapping's.
        checked("cuMemsetD8", unsafe { result::memset_d8_sync(self.address(), byte, self.bytes()) })?;
        // The call returns before the memory is set.
        checked("cuCtxSynchronize", result::ctx::synchronize())
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let Addresses { start, bytes, gpu } = &self.addresses;
        // SAFETY: mapped in `of`, and by the type's contract nothing uses it any more.
        let unmapped = gpu.make_current().map(|()| unsafe { sys::cuMemUnmap(*start, *bytes) }.result());
        if let Ok(Err(error)) = unmapped {
            tracing::debug!("cuMemUnmap: {error}");
        }
    }
}

impl Addresses {
    #[allow(unsafe_code)]
    fn reserve(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let mut start = 0;
        // SAFETY: the pointer is to a live integer; alignment 0 is the driver's own, at an address that it picks.
        let reserved = unsafe { sys::cuMemAddressReserve(&mut start, bytes, 0, 0, 0) };
        checked("cuMemAddressReserve", reserved.result())?;
        Ok(Self { start, bytes, gpu: gpu.clone() })
    }
}

impl Drop for Addresses {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: set aside in `reserve`; what was mapped there is unmapped by the owner's drop, which comes before.
        let freed = self.gpu.make_current().map(|()| unsafe { sys::cuMemAddressFree(self.start, self.bytes) }.result());
        if let Ok(Err(error)) = freed {
            tracing::debug!("cuMemAddressFree: {error}");
        }
    }
}

impl Memory {
    /// Takes memory that can be shared, in whole granules; and how many bytes it is.
    #[allow(unsafe_code)]
    fn create(gpu: &Arc<Gpu>, bytes: usize, sharing: Sharing) -> Result<(Self, usize), CudaError> {
        let device = checked("cuDeviceGet", result::device::get(gpu.facts.ordinal as i32))?;
        // SAFETY: the device is one that the driver named.
        let shares = unsafe { result::device::get_attribute(device, sharing.attribute()) };
        if checked("cuDeviceGetAttribute", shares)? == 0 {
            let (ordinal, name) = (gpu.facts.ordinal, &gpu.facts.name);
            return Err(CudaError::Peers(format!("GPU {ordinal} ({name}) does not share memory between processes")));
        }
        let wanted = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sharing.handle_type(),
            location: location(gpu),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let (mut granule, mut handle) = (0, 0);
        let recommended = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the pointers are to a live integer and a live structure.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &wanted, recommended) };
        checked("cuMemGetAllocationGranularity", asked.result())?;
        let bytes = bytes.max(1).next_multiple_of(granule);
        // SAFETY: as above.
        checked("cuMemCreate", unsafe { sys::cuMemCreate(&mut handle, bytes, &wanted, 0) }.result())?;
        Ok((Self { handle, gpu: gpu.clone() }, bytes))
    }

    #[allow(unsafe_code)]
    fn import(gpu: &Arc<Gpu>, descriptor: &OwnedFd) -> Result<Self, CudaError> {
        let mut handle = 0;
        // The driver takes a descriptor by value in the place of a pointer, and leaves it open.
        let named = std::ptr::without_provenance_mut(descriptor.as_raw_fd() as usize);
        let sharing = Sharing::Descriptor.handle_type();
        // SAFETY: the pointer is to a live integer; what the descriptor is of, the driver looks at.
        let imported = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, named, sharing) };
        checked("cuMemImportFromShareableHandle", imported.result())?;
        Ok(Self { handle, gpu: gpu.clone() })
    }

    #[allow(unsafe_code)]
    fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut descriptor: i32 = -1;
        let (place, sharing) = ((&raw mut descriptor).cast(), Sharing::Descriptor.handle_type());
        // SAFETY: a descriptor is an `int`, which the pointer is to; the handle lives as long as `self`.
        let exported = unsafe { sys::cuMemExportToShareableHandle(place, self.handle, sharing, 0) };
        checked("cuMemExportToShareableHandle", exported.result())?;
        // SAFETY: the driver has just opened it, and nobody else has it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // A program that this process starts must not keep the memory. A failure would leave it as the driver opened
        // it.
        let _ = fcntl_setfd(&descriptor, FdFlags::CLOEXEC);
        Ok(descriptor)
    }
}

impl Drop for Memory {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made in `create` or `import`, and nobody else gives it up.
        let released = self.gpu.make_current().map(|()| unsafe { sys::cuMemRelease(self.handle) }.result());
        if let Ok(Err(error)) = released {
            tracing::debug!("cuMemRelease: {error}");
        }
    }
}

fn location(gpu: &Gpu) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.facts.ordinal as i32 }
}
