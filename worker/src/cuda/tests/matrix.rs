//! What a matrix kernel may stand on, as properties of the GPU: wgmma has the bits of chains of mma.sync at all widths,
//! the operands of a product may change places, and a weight of a softmax depends on its reference by a power of two
//! alone.

use std::ffi::c_void;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::result;

use super::compiles::compiler;
use super::gpu::gpu;
use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::checked;
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, Program};
use crate::cuda::kernels::module::Module;

const BITS: &str = include_str!("../../../kernels/tests/matrix/bits.cu");
const HEADERS: [(&str, &str); 4] = [
    ("ptx/ptx.cuh", include_str!("../../../kernels/ptx/ptx.cuh")),
    ("ptx/wgmma.cuh", include_str!("../../../kernels/ptx/wgmma.cuh")),
    ("tests/matrix/wgmma.cuh", include_str!("../../../kernels/tests/matrix/wgmma.cuh")),
    ("tests/matrix/fill.cuh", include_str!("../../../kernels/tests/matrix/fill.cuh")),
];
/// Columns of a product.
const COLUMNS: [u32; 5] = [64, 128, 160, 192, 256];
/// How leaves join: one chain over K; ascending; as a binary tree; four ascending, four such sums as a binary tree.
const ORDERS: [(u32, &str); 4] = [(0, "one chain"), (1, "ascending"), (2, "tree"), (3, "quads")];
/// About normal; exponents over 2^±30; few bits, which cancel; products among the subnormals; 90 % zeros and 2^±60; any
/// finite bits.
const KINDS: u32 = 6;
/// The kind whose sums may overflow.
const ANY_BITS: u32 = 5;
/// Blocks of a launch, warps of a block, k16 steps of a leaf, and floats of scratch for a result: as the kernels have
/// them.
const BLOCKS: u32 = 33;
const WARPS: u32 = 4;
const LEAF_STEPS: u32 = 8;
const SCRATCH: u32 = 2 * 6;
/// References that a weight was tried against, and scores of each.
const REFERENCES: u32 = 121;
const GRID: u32 = 4096;

/// What a kernel counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Counts {
    different: u64,
    finite: u64,
}

/// The kernels, loaded.
struct Bits {
    module: Module,
    stream: Stream,
    scratch: DeviceBuffer,
    counts: DeviceBuffer,
}

fn bits() -> Program<'static> {
    Program { name: "bits", source: BITS, headers: &HEADERS, defines: Vec::new() }
}

impl Bits {
    fn load() -> Self {
        let gpu = Gpu::open(0).unwrap();
        let (binary, _) = Compiler::find().unwrap().build(&bits(), &Cache::from_environment()).unwrap();
        let floats = BLOCKS * COLUMNS[4] / 2 * WARPS * 32 * SCRATCH;
        Self {
            module: Module::load(&gpu, &binary.cubin).unwrap(),
            stream: Stream::new(&gpu).unwrap(),
            scratch: DeviceBuffer::zeroed(&gpu, floats as usize * 4).unwrap(),
            counts: DeviceBuffer::zeroed(&gpu, size_of::<Counts>()).unwrap(),
        }
    }

    #[allow(unsafe_code)]
    fn launch(&self, kernel: &str, blocks: u32, threads: u32, shared: u32, parameters: &mut [*mut c_void]) -> Counts {
        self.counts.fill(0).unwrap();
        let function = self.module.function(kernel, shared).unwrap();
        // SAFETY: the kernel's parameters have its types, and what they point to is as large as it assumes.
        let launched = unsafe {
            result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), shared, self.stream.raw, parameters)
        };
        checked("cuLaunchKernel", launched).unwrap();
        self.stream.wait().unwrap();
        let mut counts = [Counts::zeroed()];
        self.counts.read(0, &mut counts).unwrap();
        counts[0]
    }

    /// Results of wgmma that differ from those of mma.sync, of `BLOCKS` blocks of 64 rows.
    fn compare(&self, columns: u32, order: u32, kind: u32, swapped: bool) -> Counts {
        let mut addresses = [self.scratch.address(), self.counts.address()];
        let mut words = [order, kind, 1 + kind * 4 + order, u32::from(swapped)];
        let mut parameters: Vec<_> = addresses.iter_mut().map(|value| (&raw mut *value).cast::<c_void>()).collect();
        parameters.extend(words.iter_mut().map(|value| (&raw mut *value).cast::<c_void>()));
        let shared = LEAF_STEPS * columns * 32;
        self.launch(&format!("bits_{columns}"), BLOCKS, WARPS * 32, shared, &mut parameters)
    }
}

#[test]
fn the_kernels_that_compare_compile() {
    let Some(compiler) = compiler() else { return };
    drop(compiler.build(&bits(), &Cache::from_environment()).unwrap_or_else(|e| panic!("{e}")));
}

#[test]
fn wgmma_has_the_bits_of_chains_of_mma_sync() {
    if !gpu() {
        return;
    }
    let bits = Bits::load();
    for columns in COLUMNS {
        for (order, name) in ORDERS {
            let results = u64::from(BLOCKS * 64 * columns);
            for kind in 0..KINDS {
                let counts = bits.compare(columns, order, kind, false);
                assert_eq!(counts.different, 0, "{columns} columns, {name}, kind {kind}, of {results}");
                // Zeros, infinities and NaN would say little.
                assert!(kind == ANY_BITS || counts.finite * 10 > results * 9, "{columns}, {name}, {kind}: {counts:?}");
            }
            let swapped = bits.compare(columns, order, 0, true).different;
            assert!(
                swapped * 10 > results,
                "two leaves out of order: {columns} columns, {name}: {swapped} of {results}"
            );
            eprintln!("{columns} columns, {name}: {results} results of each kind; {swapped} with two leaves swapped");
        }
    }
}

/// Queries may be A and keys B, or the other way round; weights of leaves with references of their own are the same.
#[test]
fn operands_may_change_places_and_weights_their_reference() {
    if !gpu() {
        return;
    }
    let bits = Bits::load();
    let mut counts = bits.counts.address();
    let address = (&raw mut counts).cast::<c_void>();
    for kind in 0..KINDS {
        let (mut kind_word, mut seed) = (kind, 3u32);
        let words = [&raw mut kind_word, &raw mut seed].map(|word| word.cast::<c_void>());
        let seen = bits.launch("swapped_operands", 512, 256, 0, &mut [address, words[0], words[1]]);
        let results = 512 * 8 * 64;
        assert_eq!(seen.different, 0, "kind {kind}");
        assert!(kind == ANY_BITS || seen.finite * 10 > results * 9, "kind {kind}: {seen:?}");
    }
    let seen = bits.launch("shifted_powers", REFERENCES * GRID / 256, 256, 0, &mut [address]);
    assert_eq!(seen, Counts { different: 0, finite: u64::from(REFERENCES * GRID) });
}
