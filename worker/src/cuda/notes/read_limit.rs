//! How fast a GPU's memory can be read: the larger of plain loads and bulk copies.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent_flags};

use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::{CudaError, checked};
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, Program};
use crate::cuda::kernels::module::Module;
use crate::cuda::kernels::sources::HEADERS;

const SOURCE: &str = include_str!("../../../kernels/read_limit.cu");
/// Bytes of a bulk copy, and copies that the kernel has room for.
const CHUNK: usize = 16 << 10;
const SLOTS: u32 = 12;
/// Bulk copies of a block under way: more do not make it faster.
const WINDOW: u32 = 8;
/// Blocks and threads of the plain kernel on a multiprocessor.
const PLAIN: (u32, u32) = (4, 512);

/// Bytes that a rank which loads reads, and how often.
const LOAD_BYTES: usize = 4 << 30;
const LOAD_PASSES: usize = 9;

/// A buffer to read, and the kernels that do.
#[derive(Debug)]
pub struct ReadLimit {
    buffer: DeviceBuffer,
    out: DeviceBuffer,
    plain: sys::CUfunction,
    bulk: sys::CUfunction,
    stream: Stream,
    events: [sys::CUevent; 2],
    sms: u32,
    _module: Module,
}

// SAFETY: functions and events are handles that the driver lets every thread use.
#[allow(unsafe_code)]
unsafe impl Send for ReadLimit {}

/// The kernels as a program.
pub fn program() -> Program<'static> {
    Program { name: "read_limit", source: SOURCE, headers: &HEADERS, defines: Vec::new() }
}

impl ReadLimit {
    /// A buffer of about `bytes`.
    ///
    /// # Errors
    /// The GPU cannot be used, or has not so much memory.
    pub fn new(ordinal: usize, bytes: usize) -> Result<Self, CudaError> {
        let gpu: Arc<Gpu> = Gpu::open(ordinal)?;
        let (binary, _) = Compiler::find()?.build(&program(), &Cache::from_environment())?;
        let module = Module::load(&gpu, &binary.cubin)?;
        let sms = gpu.facts.sms as u32;
        // A whole number of rounds of either kernel.
        let round = (8 * 16 * sms * PLAIN.0 * PLAIN.1) as usize;
        let buffer = DeviceBuffer::zeroed(&gpu, bytes.next_multiple_of(round))?;
        let event = || checked("cuEventCreate", result::event::create(CUevent_flags::CU_EVENT_DEFAULT));
        let reader = Self {
            out: DeviceBuffer::zeroed(&gpu, 4)?,
            plain: module.function("read_plain", 0)?,
            bulk: module.function("read_bulk", SLOTS * CHUNK as u32)?,
            stream: Stream::new(&gpu)?,
            events: [event()?, event()?],
            sms,
            buffer,
            _module: module,
        };
        reader.pass()?;
        Ok(reader)
    }

    /// Bytes a second that a GPU reads, by the median pass. Its memory is free again afterwards.
    ///
    /// # Errors
    /// The GPU cannot be used, or has not so much memory.
    pub fn of(ordinal: usize) -> Result<u64, CudaError> {
        let reader = Self::new(ordinal, LOAD_BYTES)?;
        let mut passes = (0..LOAD_PASSES).map(|_| reader.pass()).collect::<Result<Vec<_>, _>>()?;
        passes.sort_unstable();
        Ok((reader.bytes() as f64 / passes[LOAD_PASSES / 2].as_secs_f64()) as u64)
    }

    /// Bytes of a pass.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Reads the buffer once either way, and says how long the faster took.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn pass(&self) -> Result<Duration, CudaError> {
        let (mut from, mut out) = (self.buffer.address(), self.out.address());
        let (mut quads, mut chunks, mut window) =
            (self.buffer.bytes() as u64 / 16, (self.buffer.bytes() / CHUNK) as u32, WINDOW);
        let pointer = |value: &mut u64| (value as *mut u64).cast::<c_void>();
        let word = |value: &mut u32| (value as *mut u32).cast::<c_void>();
        let plain = self.timed(
            self.plain,
            (self.sms * PLAIN.0, PLAIN.1, 0),
            &mut [pointer(&mut from), pointer(&mut quads), pointer(&mut out)],
        )?;
        let bulk = self.timed(
            self.bulk,
            (self.sms, 32, SLOTS * CHUNK as u32),
            &mut [pointer(&mut from), word(&mut chunks), word(&mut window)],
        )?;
        Ok(plain.min(bulk))
    }

    #[allow(unsafe_code)]
    fn timed(
        &self,
        function: sys::CUfunction,
        (blocks, threads, shared): (u32, u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<Duration, CudaError> {
        self.stream.gpu().make_current()?;
        let [begun, ended] = self.events;
        // SAFETY: events and stream live as long as `self`; the kernel's parameters have its types, and what they point
        // to is a buffer of the size they say.
        unsafe {
            checked("cuEventRecord", result::event::record(begun, self.stream.raw))?;
            let launched =
                result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), shared, self.stream.raw, parameters);
            checked("cuLaunchKernel", launched)?;
            checked("cuEventRecord", result::event::record(ended, self.stream.raw))?;
        }
        self.stream.wait()?;
        // SAFETY: both events were recorded, and the stream has passed them.
        let ms = checked("cuEventElapsedTime", unsafe { result::event::elapsed(begun, ended) })?;
        Ok(Duration::from_secs_f64(f64::from(ms) / 1e3))
    }
}

impl Drop for ReadLimit {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        for event in self.events {
            // SAFETY: made in `new`, and nobody else destroys them.
            if let Err(error) = unsafe { result::event::destroy(event) } {
                tracing::debug!("cuEventDestroy: {error}");
            }
        }
    }
}
