//! A kernel in a module, and how it is launched.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::module::Module;
use crate::cuda::device::gpu::Stream;
use crate::cuda::error::{CudaError, checked};

/// A kernel, and what a block of its launches has. Whoever has one keeps its module.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    handle: sys::CUfunction,
    /// Threads of a block.
    threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    shared_bytes: u32,
}

// SAFETY: a function is a handle that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for Function {}

/// When a launch begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// When all that is in front of it in the stream is over.
    Behind,
    /// While the launch in front of it ends (programmatic dependent launch).
    Overlapping,
    /// As behind, with all its blocks at the same time (cooperative launch).
    Together,
}

impl Function {
    /// Finds a kernel. Its blocks have the threads of its launch bounds, and so much dynamic shared memory, in bytes.
    ///
    /// # Errors
    /// It is not there, or may not have so much.
    pub fn load(module: &Module, name: &str, shared_bytes: u32) -> Result<Self, CudaError> {
        let function = Self { handle: module.function(name, shared_bytes)?, threads: 0, shared_bytes };
        let threads = function.property(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        Ok(function.with_threads(threads))
    }

    /// The same with so many threads a block.
    pub fn with_threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// How many blocks the GPU runs at the same time, of launches of `blocks`: in whole clusters, where the kernel asks
    /// for clusters.
    ///
    /// # Errors
    /// The driver refuses.
    #[allow(unsafe_code)]
    pub fn resident_blocks(&self, blocks: u32) -> Result<u32, CudaError> {
        let width = self.property(Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)?.max(1);
        let cluster = sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: width, y: 1, z: 1 },
        };
        let mut cluster = [attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster)];
        let config = self.config(std::ptr::null_mut(), blocks, &mut cluster);
        let mut clusters = 0;
        // SAFETY: the function's module is loaded; the attribute and the integer live until the call returns.
        let asked = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.handle, &config) };
        checked("cuOccupancyMaxActiveClusters", asked.result())?;
        Ok(clusters.max(0) as u32 * width)
    }

    /// Puts a launch of `blocks` blocks into the stream. `parameters`: the bytes of each of the kernel's parameters.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// The parameters have the types of the kernel's, in its order. What they point to is as the kernel wants it, and
    /// stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch<const N: usize>(
        &self,
        stream: &Stream,
        blocks: u32,
        begin: Begin,
        parameters: [&[u8]; N],
    ) -> Result<(), CudaError> {
        use sys::CUlaunchAttributeID::{
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE as COOPERATIVE,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as OVERLAP,
        };
        let mut attributes = match begin {
            Begin::Behind => None,
            Begin::Overlapping => {
                Some(attribute(OVERLAP, sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 }))
            }
            Begin::Together => Some(attribute(COOPERATIVE, sys::CUlaunchAttributeValue { cooperative: 1 })),
        };
        let config = self.config(stream.raw, blocks, attributes.as_mut_slice());
        let mut parameters = parameters.map(|bytes| bytes.as_ptr().cast_mut().cast::<c_void>());
        // SAFETY: the function's module is loaded, and the configuration's attribute lives until the call returns.
        // The call copies the parameters and does not write them; the caller vouches for what they are.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, self.handle, parameters.as_mut_ptr(), std::ptr::null_mut()) };
        checked("cuLaunchKernelEx", launched.result())
    }

    fn config(
        &self,
        stream: sys::CUstream,
        blocks: u32,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    #[allow(unsafe_code)]
    fn property(&self, property: Attribute) -> Result<u32, CudaError> {
        // SAFETY: its module is loaded.
        let value = unsafe { result::function::get_function_attribute(self.handle, property) };
        Ok(checked("cuFuncGetAttribute", value)? as u32)
    }
}

fn attribute(id: sys::CUlaunchAttributeID, value: sys::CUlaunchAttributeValue) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute { id, pad: [0; 4], value }
}
