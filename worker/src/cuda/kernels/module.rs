//! Machine code that a GPU has loaded, and what can be found in it by name.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use crate::cuda::device::gpu::Gpu;
use crate::cuda::error::{CudaError, checked};

/// Machine code in a GPU.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    gpu: Arc<Gpu>,
}

// SAFETY: modules and functions are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for Module {}
impl Module {
    /// Loads machine code.
    ///
    /// # Errors
    /// The driver refuses it.
    #[allow(unsafe_code)]
    pub fn load(gpu: &Arc<Gpu>, cubin: &[u8]) -> Result<Self, CudaError> {
        gpu.make_current()?;
        // SAFETY: the bytes are a whole cubin, as the compiler made it or the cache's checksum says.
        let raw = checked("cuModuleLoadData", unsafe { result::module::load_data(cubin.as_ptr().cast::<c_void>()) })?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    /// A kernel in it that may use `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// It is not there, or may not.
    #[allow(unsafe_code)]
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<sys::CUfunction, CudaError> {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded for as long as `self` lives.
        let function = checked("cuModuleGetFunction", unsafe { result::module::get_function(self.raw, name) })?;
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of a loaded module.
        let set = unsafe { result::function::set_function_attribute(function, most, shared_bytes as i32) };
        checked("cuFuncSetAttribute", set)?;
        Ok(function)
    }

    /// The numbers that a kernel tells of itself.
    ///
    /// # Errors
    /// They are not there.
    pub fn needs<T: Pod>(&self, kernel: &str) -> Result<T, CudaError> {
        self.constant(&format!("{kernel}_needs"))
    }

    /// What it has under a name.
    ///
    /// # Errors
    /// It is not there.
    #[allow(unsafe_code)]
    pub fn constant<T: Pod>(&self, name: &str) -> Result<T, CudaError> {
        let c_name = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded for as long as `self` lives.
        let found = unsafe { result::module::get_global(self.raw, c_name) };
        let (address, bytes) = checked("cuModuleGetGlobal", found)?;
        let mut value = [T::zeroed()];
        assert_eq!(bytes, size_of_val(&value), "the source has so many bytes as {name}");
        // SAFETY: the range is the global's.
        checked("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(&mut value, address) })?;
        let [value] = value;
        Ok(value)
    }

    /// The GPU that it is in.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for Module {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, and nobody else unloads it.
        let unloaded = self.gpu.make_current().map(|()| unsafe { result::module::unload(self.raw) });
        if let Ok(Err(error)) = unloaded {
            tracing::debug!("cuModuleUnload: {error}");
        }
    }
}
