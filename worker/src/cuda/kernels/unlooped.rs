//! `--loop off`: the phases of a step as launches of their own, captured once as a CUDA graph. It exists to be measured
//! against.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys;

use super::launch::Launch;
use super::module::Module;
use crate::cuda::device::gpu::Stream;
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::{CudaError, checked};

/// Steps that one launch runs at most: nothing stops them once they are in the stream.
pub const UNLOOPED_STEPS: u32 = 8;
/// Phases before the layers, of each layer, and after them: names of kernels (unlooped_decoder.cu).
const FIRST: [&str; 1] = ["embed"];
const LAYER: [&str; 6] = ["query_key_value", "attend_pages", "merge", "attention_out", "gate_up", "down"];
const LAST: [&str; 2] = ["head", "choose"];
/// Threads that write down what a run of steps is to compute.
const BEGIN_THREADS: u32 = 64;

/// The launches of a step.
#[derive(Debug)]
pub struct Chain {
    begin: sys::CUfunction,
    /// Kernel, layer and whether one block does, in order.
    phases: Vec<(sys::CUfunction, u32, bool)>,
    overlapped: bool,
    shared_bytes: u32,
    /// State between the launches.
    pass: DeviceBuffer,
    captured: Option<(Launch, Graph)>,
}

/// Launches as the driver keeps them.
#[derive(Debug)]
struct Graph(sys::CUgraphExec);

impl Chain {
    /// The kernels of a module.
    ///
    /// # Errors
    /// One is not there.
    pub fn new(module: &Module, shared_bytes: u32, layers: u32, overlapped: bool) -> Result<Self, CudaError> {
        let phase = |name: &str, layer| Ok((module.function(name, shared_bytes)?, layer, name == "choose"));
        let mut phases = Vec::new();
        for name in FIRST {
            phases.push(phase(name, 0)?);
        }
        for layer in 0..layers {
            for name in LAYER {
                phases.push(phase(name, layer)?);
            }
        }
        for name in LAST {
            phases.push(phase(name, layers)?);
        }
        let pass = DeviceBuffer::zeroed(module.gpu(), module.constant::<u64>("pass_bytes")? as usize)?;
        Ok(Self { begin: module.function("begin", 0)?, phases, overlapped, shared_bytes, pass, captured: None })
    }

    /// Puts the steps of a launch into the stream, on so many blocks and threads.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` points to is as its fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(
        &mut self,
        mut launch: Launch,
        (blocks, threads): (u32, u32),
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let fixed = Launch { stopped: 0, rows: 0, tokens: 0, row_count: 0, steps: 0, epoch: 0, flags: 0, ..launch };
        if self.captured.as_ref().is_none_or(|(of, _)| *of != fixed) {
            self.captured = Some((fixed, self.capture(fixed, (blocks, threads), stream)?));
        }
        let Some((_, graph)) = &self.captured else { unreachable!("captured above") };
        let mut pass = self.pass.address();
        let mut parameters = [(&raw mut launch).cast::<c_void>(), (&raw mut pass).cast::<c_void>()];
        // SAFETY: the kernel takes a `Launch` and an address, which the call copies; the caller vouches for what they
        // point to.
        let begun = unsafe {
            result::launch_kernel(self.begin, (1, 1, 1), (BEGIN_THREADS, 1, 1), 0, stream.raw, &mut parameters)
        };
        checked("cuLaunchKernel", begun)?;
        for _ in 0..launch.steps {
            // SAFETY: the graph was instantiated and lives as long as `self`; its launches read what `launch` points
            // to.
            checked("cuGraphLaunch", unsafe { result::graph::launch(graph.0, stream.raw) })?;
        }
        Ok(())
    }

    /// The launches of a step, as a graph.
    #[allow(unsafe_code)]
    fn capture(&self, fixed: Launch, shape: (u32, u32), stream: &Stream) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; what is put into it until the capture ends is not run.
        checked("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream.raw, mode) })?;
        let put = self.put(fixed, shape, stream);
        // SAFETY: the capture was begun on this stream. It is ended even if a launch was refused.
        let graph = checked("cuStreamEndCapture", unsafe { result::stream::end_capture(stream.raw) });
        put?;
        let graph = graph?;
        // SAFETY: the graph is the one captured; it may go once it is instantiated, and nobody else has it.
        let instantiated = unsafe {
            let instantiated = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            checked("cuGraphDestroy", result::graph::destroy(graph))?;
            instantiated
        };
        Ok(Graph(checked("cuGraphInstantiate", instantiated)?))
    }

    #[allow(unsafe_code)]
    fn put(&self, mut fixed: Launch, (blocks, threads): (u32, u32), stream: &Stream) -> Result<(), CudaError> {
        let mut pass = self.pass.address();
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        for (place, &(function, mut layer, alone)) in self.phases.iter().enumerate() {
            let config = sys::CUlaunchConfig {
                gridDimX: if alone { 1 } else { blocks },
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: self.shared_bytes,
                hStream: stream.raw,
                attrs: &mut overlap,
                // The first has no launch of its graph before it.
                numAttrs: u32::from(self.overlapped && place > 0),
            };
            let mut parameters = [
                (&raw mut fixed).cast::<c_void>(),
                (&raw mut pass).cast::<c_void>(),
                (&raw mut layer).cast::<c_void>(),
            ];
            // SAFETY: the kernels take a `Launch`, an address and a layer, which the call copies.
            let launched =
                unsafe { sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
            checked("cuLaunchKernelEx", launched.result())?;
        }
        Ok(())
    }
}

impl Drop for Graph {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: instantiated in `capture`, and nobody else destroys it.
        if let Err(error) = unsafe { result::graph::exec_destroy(self.0) } {
            tracing::debug!("cuGraphExecDestroy: {error}");
        }
    }
}
