//! `--loop off`: the phases of a step as launches of their own, captured once as a CUDA graph. It exists to be measured
//! against.

use bytemuck::bytes_of;
use cudarc::driver::result;
use cudarc::driver::sys;

use super::function::{Begin, Function};
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
    begin: Function,
    /// Kernel, layer and blocks, in order.
    phases: Vec<(Function, u32, u32)>,
    overlapped: bool,
    /// State between the launches.
    pass: DeviceBuffer,
    captured: Option<(Launch, Graph)>,
}

/// Launches as the driver keeps them.
#[derive(Debug)]
struct Graph(sys::CUgraphExec);

// SAFETY: a graph is a handle that the driver lets one thread at a time use, whichever that is.
#[allow(unsafe_code)]
unsafe impl Send for Graph {}

impl Chain {
    /// The kernels of a module, which `function` loads.
    ///
    /// # Errors
    /// One is not there.
    pub fn new(
        module: &Module,
        function: impl Fn(&str) -> Result<Function, CudaError>,
        (layers, blocks): (u32, u32),
        overlapped: bool,
    ) -> Result<Self, CudaError> {
        let phase = |name: &str, layer| Ok((function(name)?, layer, if name == "choose" { 1 } else { blocks }));
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
        let begin = Function::load(module, "begin", 0)?.with_threads(BEGIN_THREADS);
        Ok(Self { begin, phases, overlapped, pass, captured: None })
    }

    /// Puts the steps of a launch into the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` points to is as its fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&mut self, launch: Launch, stream: &Stream) -> Result<(), CudaError> {
        let fixed = Launch { stopped: 0, rows: 0, tokens: 0, row_count: 0, steps: 0, epoch: 0, flags: 0, ..launch };
        if self.captured.as_ref().is_none_or(|(of, _)| *of != fixed) {
            self.captured = Some((fixed, self.capture(fixed, stream)?));
        }
        let Some((_, graph)) = &self.captured else { unreachable!("captured above") };
        let pass = self.pass.address();
        // SAFETY: the kernel takes a `Launch`, for which the caller vouches, and the address of a pass.
        unsafe { self.begin.launch(stream, 1, Begin::Behind, [bytes_of(&launch), bytes_of(&pass)])? };
        for _ in 0..launch.steps {
            // SAFETY: the graph was instantiated and lives as long as `self`; its launches read what `launch` points
            // to.
            checked("cuGraphLaunch", unsafe { result::graph::launch(graph.0, stream.raw) })?;
        }
        Ok(())
    }

    /// The launches of a step, as a graph.
    #[allow(unsafe_code)]
    fn capture(&self, fixed: Launch, stream: &Stream) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; what is put into it until the capture ends is not run.
        checked("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream.raw, mode) })?;
        let put = self.put(fixed, stream);
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
    fn put(&self, fixed: Launch, stream: &Stream) -> Result<(), CudaError> {
        let pass = self.pass.address();
        for (place, (function, layer, blocks)) in self.phases.iter().enumerate() {
            // The first has no launch of its graph before it.
            let begin = if self.overlapped && place > 0 { Begin::Overlapping } else { Begin::Behind };
            let parameters = [bytes_of(&fixed), bytes_of(&pass), bytes_of(layer)];
            // SAFETY: the kernels take a `Launch`, for which the caller of `launch` vouches, an address and a layer.
            unsafe { function.launch(stream, *blocks, begin, parameters)? };
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
