//! The kernel compiles for every shape in a table, without spills. Needs NVRTC, not a GPU.
//!
//! `just test` and CI install the library and name it; where nobody names it and it is not found, this test says that
//! it was skipped. It compiles for minutes: without [`EVERY_SHAPE_VARIABLE`] only until each kernel was compiled with
//! each property of a model.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::bench::Shape;
use crate::cuda::kernels::blocks::best_blocks;
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, NVRTC_VARIABLE, Resources};
use crate::cuda::kernels::matrix;
use crate::cuda::kernels::variants::{
    Design, LoopMode, VARIANTS, Variant, check_shape, check_wide, matrix_of, variants_of,
};
use crate::cuda::sampler::kernel as sampler;
use crate::cuda::tests::sass::{Found, arrives};
use crate::cuda::weights::heads::for_kernels;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::layout::tests::{group, layout};
use crate::model::format::INT4;
use crate::model::{ModelConfig, WeightFormat};
use crate::plan::{Backend, ModelPlan};

/// Set where all shapes are compiled: by `just gpu`.
const EVERY_SHAPE_VARIABLE: &str = "LOOPLANE_EVERY_SHAPE";
/// Multiprocessors of an H200.
const SMS: usize = 132;
/// Shapes of groups, and how many bytes of registers a rank's kernels of one and of eight columns spill at most: in the
/// choice of tokens and in what waits between steps, once a step.
const GROUPS: [(Shape, usize, [u32; 2]); 7] = [
    (Shape::B8, 2, [0, 80]),
    (Shape::B8, 4, [0, 180]),
    (Shape::B8, 8, [0, 244]),
    (Shape::B8, 16, [24, 244]),
    (Shape::B70, 4, [16, 36]),
    (Shape::B70, 8, [44, 116]),
    (Shape::B70, 16, [48, 124]),
];
/// The same of wide kernels of ranks: in the exchange of embeddings and tokens, and of qkv's sums between leaves.
const WIDE_SPILLS: u32 = 300;
/// Arrives of a narrow kernel that come in front of the data of loads: the epilogue's warps give partial sums back so.
/// Ordinary stores overwrite them, which the barrier orders; it does not order bulk copies.
const PARTIALS_GIVEN_BACK: usize = 4;
/// The same of each product of matrix passes: a stage of B, while the next leaf's fragments of A are on their way.
const STAGE_GIVEN_BACK: usize = 1;
/// Kernels of matrix passes that have rings.
const MATRIX_RINGS: [&str; 6] =
    ["matrix_qkv", "matrix_out", "matrix_gate_up", "matrix_down", "matrix_head", "matrix_attend_spans"];
/// The compiler's warning that it makes products wait for each other.
const SERIALIZED: &str = "wgmma.mma_async instructions are serialized";
/// A kernel of matrix passes, between its tiles; attention of prompts also where positions are masked, between spans of
/// rows beside tiles, and where tiles are cut by spans.
const MATRIX_SPILLS: u32 = 80;
const TILES_SPILLS: u32 = 124;
const CUT_TILES_SPILLS: u32 = 156;
/// Of wide kernels whose weights have few bits: where sums become the residual, twice a layer.
const FEW_BITS_SPILLS: u32 = 64;
/// Of one GPU's kernel of eight columns: where rows of a sequence read its pages together, and between steps. And of
/// models with no more than a head's dimensions, which only tests have.
const TOGETHER_SPILLS: u32 = 112;
const SMALLEST_SPILLS: u32 = 220;

fn fixtures() -> Vec<(String, ModelConfig)> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    // The tiny ones have formats, which are compiled for other shapes.
    let is_shape = |name: &str| !name.starts_with("tiny-");
    let entries = std::fs::read_dir(dir)
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().join("config.json").is_file() && is_shape(&entry.file_name().to_string_lossy()));
    let mut all: Vec<_> = entries
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), ModelConfig::from_dir(&entry.path()).unwrap()))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// A kernel to compile.
struct Job {
    name: String,
    variant: Variant,
    layout: Layout,
    /// Bytes of registers.
    most_spilled: u32,
    /// Of the model and its group: what the source is compiled differently for.
    properties: Vec<String>,
}

impl Job {
    fn of_all_kernels(
        name: &str,
        config: &ModelConfig,
        ranks: usize,
        layout: &Layout,
        most_spilled: impl Fn(&Variant) -> u32,
    ) -> Vec<Self> {
        let properties = vec![
            format!("heads of {}", config.head_dim),
            format!("bias: {}", config.qkv_bias),
            format!("norms of heads: {}", config.qk_norm),
            format!("window: {}", config.sliding_window.is_some()),
            format!("tied: {}", config.tied_embeddings),
            format!("weights: {}", config.layer_weights),
            format!("one of a group: {}", ranks > 1),
        ];
        let job = |variant: Variant| Job {
            name: format!("{name}, {} columns", variant.columns()),
            most_spilled: most_spilled(&variant),
            layout: layout.clone(),
            properties: properties.clone(),
            variant,
        };
        variants_of(layout).into_iter().chain(matrix_of(layout, 2048)).map(job).collect()
    }
}

/// A few of the jobs, which compile each kernel with each property that it has in any of them: again and again the one
/// with the most that are new.
fn covering(mut jobs: Vec<Job>) -> Vec<Job> {
    let (all, mut seen, mut few) = (jobs.len(), HashSet::new(), Vec::new());
    let pairs = |job: &Job| {
        let kernel = (job.variant.columns(), job.variant.design == Design::Matrix);
        job.properties.iter().map(|property| (kernel, property.clone())).collect::<Vec<_>>()
    };
    loop {
        let new = |job: &Job| pairs(job).iter().filter(|pair| !seen.contains(*pair)).count();
        // Of equals the first.
        let most = (0..jobs.len()).rev().max_by_key(|index| new(&jobs[*index]));
        let Some(index) = most.filter(|index| new(&jobs[*index]) > 0) else { break };
        let job = jobs.remove(index);
        seen.extend(pairs(&job));
        few.push(job);
    }
    eprintln!("{} of {all} kernels, which cover all properties; {EVERY_SHAPE_VARIABLE}=1 compiles all", few.len());
    few
}

/// NVRTC; `None`, which is said, where nobody names it and it is not found.
pub(super) fn compiler() -> Option<Compiler> {
    let found = Compiler::find();
    if let Err(missing) = &found {
        assert!(std::env::var_os(NVRTC_VARIABLE).is_none(), "{missing}");
        eprintln!("skipped: {missing}");
    }
    found.ok()
}

/// What `tests/wide/products.py` times.
#[test]
fn products_that_are_timed_alone_compile() {
    let Some(compiler) = compiler() else { return };
    let layout = layout(&ModelConfig { layer_weights: INT4, ..Shape::B8.config() }, 128);
    let wide = VARIANTS.iter().find(|variant| variant.design == Design::Wide).expect("there are wide passes");
    // Gate and up, and down.
    for product in [0, 3] {
        let mut program = wide.program(&layout);
        program.source = include_str!("../../../kernels/tests/wide/products.cu");
        program.defines.push(("LP_PRODUCT", product));
        let (binary, _) = compiler.build(&program, &Cache::from_environment()).unwrap_or_else(|e| panic!("{e}"));
        assert!(!binary.log.contains(SERIALIZED), "product {product}: {}", binary.log);
    }
}

/// A negative control: matrix passes that give back what they have asked for.
#[test]
fn slots_that_are_given_back_too_early_are_found() {
    let Some(compiler) = compiler() else { return };
    let matrix = matrix_of(&layout(&Shape::Llama1B.config(), 128), 2048).expect("it has matrix passes");
    let mut program = matrix.program(&layout(&Shape::Llama1B.config(), 128));
    program.defines.push(("LP_RELEASE_EARLY", 1));
    let (binary, _) = compiler.build(&program, &Cache::from_environment()).unwrap_or_else(|e| panic!("{e}"));
    let found = arrives(&binary.cubin);
    for kernel in ["matrix_qkv", "matrix_out", "matrix_gate_up", "matrix_down", "matrix_head"] {
        let noticed = |of: &Found| of.kernel == kernel && of.early.len() > STAGE_GIVEN_BACK;
        assert!(found.iter().any(noticed), "{kernel}: {found:?}");
    }
}

#[test]
fn every_shape_compiles_and_its_resources_are_told() {
    let Some(compiler) = compiler() else { return };
    // Qwen 3 4B: leaves of an odd number of stages and a shorter one.
    let shapes = [Shape::B8, Shape::Qwen3B4, Shape::Llama1B, Shape::B3, Shape::B1, Shape::Tiny];
    let shapes = shapes.into_iter().map(|shape| (shape.name().to_owned(), shape.config()));
    let fp8 = [Shape::Llama1B, Shape::B8].map(|shape| {
        (format!("{} in FP8", shape.name()), ModelConfig { layer_weights: WeightFormat::E4m3, ..shape.config() })
    });
    let of = |shape: Shape, layer_weights: WeightFormat| {
        (format!("{} in {layer_weights}", shape.name()), ModelConfig { layer_weights, ..shape.config() })
    };
    let groups = [
        of(Shape::B8, INT4),
        of(Shape::Qwen3B4, WeightFormat::Int4 { columns: 64, zeros: true }),
        of(Shape::B3, WeightFormat::E4m3Groups { columns: 128 }),
    ];
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let mut jobs = Vec::new();
    for (name, config) in shapes.chain(fp8).chain(groups).chain(fixtures()) {
        if check_shape(&config).is_err() {
            eprintln!("{name}: refused");
            continue;
        }
        let blocks = best_blocks(layout(&for_kernels(&config), 1).plan(), SMS);
        let layout = Layout::new(layout(&for_kernels(&config), 1).plan(), 0, blocks, config.head_dim);
        check_wide(&layout).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let most_spilled = |variant: &Variant| match variant.design {
            Design::Matrix => MATRIX_SPILLS,
            Design::Wide if config.layer_weights != WeightFormat::Bf16 => FEW_BITS_SPILLS,
            _ if variant.columns() == 8 && config.hidden_size <= config.head_dim => SMALLEST_SPILLS,
            _ if variant.columns() == 8 => TOGETHER_SPILLS,
            _ => 0,
        };
        jobs.extend(Job::of_all_kernels(&name, &config, 1, &layout, most_spilled));
    }
    for (shape, ranks, [one, eight]) in GROUPS {
        let config = shape.config();
        let plan = ModelPlan::for_backend(Backend::Cuda, &config, ranks).unwrap();
        let layout = Layout::new(&plan, ranks - 1, best_blocks(&plan, SMS), config.head_dim);
        let most_spilled = |variant: &Variant| match (variant.design, variant.columns()) {
            (Design::Matrix, _) => MATRIX_SPILLS,
            (_, 1) => one,
            (_, 8) => eight,
            _ => WIDE_SPILLS,
        };
        let name = format!("{}, one of {ranks} ranks", shape.name());
        jobs.extend(Job::of_all_kernels(&name, &config, ranks, &layout, most_spilled));
    }
    let jobs = match std::env::var_os(EVERY_SHAPE_VARIABLE) {
        Some(_) => jobs,
        None => covering(jobs),
    };
    // The kernel knows the same rule.
    for blocks in [127, 32] {
        let layout = layout(&Shape::B8.config(), blocks);
        check_wide(&layout).unwrap_err();
        let refused = compiler.build(&VARIANTS[2].program(&layout), &cache).unwrap_err().to_string();
        assert!(refused.contains("wide passes need"), "{blocks} blocks: {refused}");
    }

    let (next, over) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Job { name, variant, layout, most_spilled, .. } = job;
            let begun = Instant::now();
            let (binary, cached) =
                compiler.build(&variant.program(layout), &cache).unwrap_or_else(|e| panic!("{name}: {e}"));
            let seconds = begun.elapsed().as_secs_f64();
            assert!(!cached && binary.cubin.starts_with(b"\x7fELF"), "{name}");
            // wgmma one by one, which only the log tells.
            assert!(!binary.log.contains(SERIALIZED), "{name}: {}", binary.log);
            let found = arrives(&binary.cubin);
            let (rings, given_back) = match variant.design {
                Design::Matrix => (MATRIX_RINGS.to_vec(), STAGE_GIVEN_BACK),
                Design::Narrow => (vec![variant.name()], PARTIALS_GIVEN_BACK),
                _ => (vec![variant.name()], 0),
            };
            for of in &found {
                assert!(of.early.len() <= given_back, "{name} gives back what it has not read: {of:?}");
            }
            for ring in rings {
                let seen = |of: &Found| of.kernel == ring && of.loads > 0 && of.arrives > 0;
                assert!(found.iter().any(seen), "{name}, {ring}: nothing is read and given back");
            }
            let kernels = match variant.design {
                Design::Matrix => matrix::names().to_vec(),
                _ => vec![variant.name()],
            };
            for kernel in kernels {
                let resources = Resources::of(kernel, &binary.log)
                    .unwrap_or_else(|| panic!("{name}: the compiler told no resources: {:?}", binary.log));
                eprintln!("{name}, {kernel}, {} blocks: {resources:?}, {seconds:.1} s", layout.blocks());
                let most = match kernel {
                    "matrix_attend_tiles" => TILES_SPILLS,
                    "matrix_attend_cut_tiles" => CUT_TILES_SPILLS,
                    _ => *most_spilled,
                };
                if resources.spilled > most {
                    over.lock().unwrap().push(format!("{name}, {kernel}: {} bytes", resources.spilled));
                }
            }
            let again = compiler.build(&variant.program(layout), &cache).unwrap();
            assert_eq!(again, (binary, true));
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    let over = over.into_inner().unwrap();
    assert!(over.is_empty(), "registers are spilled: {over:?}");

    // What the benchmark measures with.
    let shape = Shape::Llama1B.config();
    for (mode, traced, ranks) in
        [(LoopMode::On, true, 1), (LoopMode::Off, false, 1), (LoopMode::Off, true, 1), (LoopMode::Off, false, 2)]
    {
        let layout = group(&shape, ranks, 128).remove(0);
        let what = format!("loop {mode:?}, traced {traced}, one of {ranks} ranks");
        let takes = |variant: &Variant| variant.check(&layout).is_ok();
        for variant in VARIANTS.iter().filter_map(|variant| variant.in_mode(mode, traced)).filter(takes) {
            let built = compiler.build(&variant.program(&layout), &cache);
            let (binary, _) = built.unwrap_or_else(|e| panic!("{what}: {e}"));
            let kernel = if mode == LoopMode::On { variant.name() } else { "gate_up" };
            let resources = Resources::of(kernel, &binary.log).unwrap_or_else(|| panic!("{}", binary.log));
            eprintln!("{what}, {} columns, {kernel}: {resources:?}", variant.columns());
        }
    }

    for (vocab, blocks, rows) in [(128_256, SMS, 64), (151_936, SMS, 8), (768, SMS, 64), (40, 8, 1)] {
        let (binary, _) =
            compiler.build(&sampler::program(vocab, blocks, rows), &cache).unwrap_or_else(|e| panic!("{e}"));
        let resources = Resources::of("sampler", &binary.log).unwrap_or_else(|| panic!("{}", binary.log));
        eprintln!("sampler of {rows} rows, {vocab} tokens, {blocks} blocks: {resources:?}");
        assert_eq!(resources.spilled, 0, "{}", binary.log);
    }
}
