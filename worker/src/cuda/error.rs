//! What can go wrong between the host and a GPU, in sentences that say what to do.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// A GPU cannot be used, or did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error("no NVIDIA driver: libcuda.so.1 is not found; install the driver, or use --device cpu")]
    NoDriver,
    /// There is a driver, but no GPU.
    #[error(
        "GPU {ordinal} is not there: the driver shows {count} (check nvidia-smi and CUDA_VISIBLE_DEVICES), or use \
         --device cpu"
    )]
    NoDevice {
        /// Number asked for.
        ordinal: usize,
        /// GPUs that this process sees.
        count: usize,
    },
    /// The kernels are written for another generation.
    #[error(
        "GPU {ordinal} is an {name} of compute capability {major}.{minor}; the kernels need 9.0 (H100, H200): use \
         --device cpu"
    )]
    Generation {
        /// Its number.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// There is nothing to compile kernels with.
    #[error(
        "NVRTC, which compiles the kernels, is not found: install the CUDA 13 toolkit or the Python package \
         nvidia-cuda-nvrtc, and set LD_LIBRARY_PATH to its folder or LOOPLANE_NVRTC to libnvrtc.so.13"
    )]
    NoCompiler,
    /// The library that LOOPLANE_NVRTC names cannot be used.
    #[error("LOOPLANE_NVRTC={path}: {problem}")]
    Compiler {
        /// As given.
        path: String,
        /// What the loader said.
        problem: String,
    },
    /// NVRTC refused the kernel: a fault of this build.
    #[error("NVRTC {version} does not compile {kernel} ({problem}):\n{log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// NVRTC's version.
        version: String,
        /// Its error.
        problem: String,
        /// Its log, shortened.
        log: String,
    },
    /// The model's dimensions are outside of what the kernels compute.
    #[error("the GPU backend does not compute this model: {0}; use --device cpu")]
    Shape(String),
    /// The GPUs of a group cannot be its members.
    #[error(
        "{0}; choose GPUs that reach each other by CUDA_VISIBLE_DEVICES (nvidia-smi topo -p2p w shows which do), or a \
         smaller --tp"
    )]
    Peers(String),
    /// A kernel does not fit the GPU as it is launched.
    #[error("{kernel}: {problem}")]
    Kernel {
        /// The kernel.
        kernel: String,
        /// What does not fit, with numbers.
        problem: String,
    },
    /// A call of the driver failed.
    #[error("{call}: {error}; {help}")]
    Call {
        /// The call.
        call: &'static str,
        /// Name and description, as the driver has them.
        error: String,
        /// What to do.
        help: &'static str,
    },
}

/// The result of a driver call, with its name.
pub(super) fn checked<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T, CudaError> {
    result.map_err(|error| CudaError::Call { call, error: describe(error), help: help(error.0) })
}

fn describe(error: DriverError) -> String {
    let text = |found: Result<&std::ffi::CStr, DriverError>| found.ok().map(|text| text.to_string_lossy().into_owned());
    let name = text(error.error_name()).unwrap_or_else(|| format!("{:?}", error.0));
    match text(error.error_string()) {
        Some(words) => format!("{name} ({words})"),
        None => name,
    }
}

fn help(code: CUresult) -> &'static str {
    use CUresult as C;
    match code {
        C::CUDA_ERROR_OUT_OF_MEMORY => {
            "another process may use the GPU's memory (see nvidia-smi); lower --kv-memory-mib, or --kv-pages where it \
             is given"
        }
        C::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE => {
            "the GPU must be free: another process may hold some of its multiprocessors (MPS, MIG)"
        }
        C::CUDA_ERROR_NO_DEVICE | C::CUDA_ERROR_DEVICE_UNAVAILABLE | C::CUDA_ERROR_SYSTEM_NOT_READY => {
            "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        }
        C::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | C::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver's library and its kernel module differ: reboot, or reinstall the driver"
        }
        C::CUDA_ERROR_INVALID_SOURCE | C::CUDA_ERROR_NO_BINARY_FOR_GPU | C::CUDA_ERROR_INVALID_IMAGE => {
            "the driver does not load the kernel: update it to one for CUDA 13 (580 or newer)"
        }
        C::CUDA_ERROR_ECC_UNCORRECTABLE | C::CUDA_ERROR_HARDWARE_STACK_ERROR => "the GPU's hardware failed: see dmesg",
        _ => "see dmesg for what the driver logged; the worker has to start again",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_says_what_to_do() {
        let generation = CudaError::Generation { ordinal: 1, name: "NVIDIA A100-SXM4-80GB".into(), major: 8, minor: 0 };
        assert_eq!(
            generation.to_string(),
            "GPU 1 is an NVIDIA A100-SXM4-80GB of compute capability 8.0; the kernels need 9.0 (H100, H200): use \
             --device cpu"
        );
        assert!(CudaError::NoDriver.to_string().contains("--device cpu"));
        assert!(CudaError::NoCompiler.to_string().contains("nvidia-cuda-nvrtc"));
        assert!(help(CUresult::CUDA_ERROR_OUT_OF_MEMORY).contains("--kv-memory-mib"));
    }
}
