//! What a benchmark changes and reads while an engine runs: how phases become launches, and when each of them was
//! where.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::phase::PhaseTime;
use super::roles::Roles;
use super::trace::{STAGES, Trace, unlooped_phases};
use crate::cuda::device::gpu::Gpu;
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::kernel::Kernel;
use crate::cuda::kernels::variants::{LoopMode, Variant, variants_of};
use crate::cuda::weights::layout::Layout;

/// The benchmark's end.
#[derive(Debug, Default)]
pub struct Gauge {
    modes: Vec<LoopMode>,
    now: Mutex<Setting>,
    /// By rank.
    noted: Mutex<BTreeMap<usize, Noted>>,
}

/// How the next launches run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Setting {
    mode: LoopMode,
    traced: bool,
}

/// What a traced launch noted of its last step.
#[derive(Debug, Clone)]
pub struct Noted {
    /// Time of each phase, in all layers.
    pub phases: Vec<PhaseTime>,
    /// Everything, of a looped launch.
    pub trace: Option<Trace>,
}

/// The engine's end: kernels that run in place of its own.
#[derive(Debug)]
pub struct Gauged {
    gauge: Arc<Gauge>,
    kernels: Vec<Kernel>,
    /// `[block][warp][layer][STAGES]` i64 of a looped launch; other launches need less.
    trace: DeviceBuffer,
    rank: usize,
    blocks: usize,
    layers: usize,
    /// Kernel, warps of a block and steps of the traced launch under way.
    noting: Option<(Variant, usize, u32)>,
}

impl Gauge {
    /// For launches in these modes.
    pub fn new(modes: &[LoopMode]) -> Arc<Self> {
        Arc::new(Self { modes: modes.to_vec(), ..Self::default() })
    }

    /// Launches run in `mode` from now on; `traced`: those of more than one step note times, which costs some.
    pub fn set(&self, mode: LoopMode, traced: bool) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = Setting { mode, traced };
    }

    /// What the last traced launch noted, by rank. Nothing, if there was none since this was asked last.
    pub fn take(&self) -> Vec<Noted> {
        std::mem::take(&mut *self.noted.lock().unwrap_or_else(PoisonError::into_inner)).into_values().collect()
    }

    /// The kernels for a model, or a rank of one, that it takes beside those of the engine.
    pub fn variants(&self, layout: &Layout) -> Vec<Variant> {
        let usual = variants_of(layout);
        let settings = || self.modes.iter().flat_map(|mode| [(*mode, false), (*mode, true)]);
        let all =
            usual.iter().flat_map(|variant| settings().filter_map(|(mode, traced)| variant.in_mode(mode, traced)));
        all.filter(|variant| !usual.contains(variant) && variant.check(layout).is_ok()).collect()
    }

    fn setting(&self) -> Setting {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gauged {
    /// With the kernels of [`Gauge::variants`].
    ///
    /// # Errors
    /// The GPU has no memory left for the notes.
    pub fn new(gauge: Arc<Gauge>, gpu: &Arc<Gpu>, layout: &Layout, kernels: Vec<Kernel>) -> Result<Self, CudaError> {
        let (blocks, layers) = (layout.blocks(), layout.plan().config.num_layers);
        let warps = kernels.iter().map(Kernel::warps).max().unwrap_or(0);
        let trace = DeviceBuffer::zeroed(gpu, blocks * warps * (layers + 1) * STAGES * 8)?;
        Ok(Self { gauge, kernels, trace, rank: layout.rank().rank, blocks, layers, noting: None })
    }

    /// The mode that launches run in.
    pub fn mode(&self) -> LoopMode {
        self.gauge.setting().mode
    }

    /// What runs in place of a kernel of the engine, for so many steps, and where it is to note times (0: nowhere).
    /// `None`: that kernel itself runs, as do all whose width the mode does not have.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn instead(&mut self, usual: Variant, steps: u32) -> Result<Option<(&mut Kernel, u64)>, CudaError> {
        let Setting { mode, traced } = self.gauge.setting();
        // A phase's time begins where the step before ended.
        let traced = traced && steps > 1;
        let wanted = usual.in_mode(mode, traced);
        let Some(kernel) = self.kernels.iter_mut().find(|kernel| Some(kernel.variant) == wanted) else {
            return Ok(None);
        };
        if !traced {
            return Ok(Some((kernel, 0)));
        }
        self.trace.fill(0)?;
        self.noting = Some((kernel.variant, kernel.warps(), steps));
        Ok(Some((kernel, self.trace.address())))
    }

    /// Once all launches have ended: hands over what the last one noted.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn collect(&mut self) -> Result<(), CudaError> {
        let Some((variant, warps, steps)) = self.noting.take() else { return Ok(()) };
        let mut values = vec![0i64; self.trace.bytes() / 8];
        self.trace.read(0, &mut values)?;
        let noted = match Roles::of(variant) {
            Some(roles) => {
                let trace = Trace::new(values, self.blocks, warps, self.layers, roles);
                Noted { phases: trace.phases(), trace: Some(trace) }
            }
            None => Noted { phases: unlooped_phases(&values, self.layers, steps), trace: None },
        };
        self.gauge.noted.lock().unwrap_or_else(PoisonError::into_inner).insert(self.rank, noted);
        Ok(())
    }
}
