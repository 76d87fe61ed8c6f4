//! Which passes a published model has on one GPU: the table of docs/shapes.md.

use clap::ValueEnum;

use crate::batch::Row;
use crate::bench::Shape;
use crate::cuda::kernels::blocks::best_blocks;
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, Resources};
use crate::cuda::kernels::items::Bounds;
use crate::cuda::kernels::matrix;
use crate::cuda::kernels::variants::{
    Attention, Design, Variant, Width, check_shape, check_wide, matrix_of, variants_of,
};
use crate::cuda::launches::passes::Passes;
use crate::cuda::load::without_wide;
use crate::cuda::weights::heads::for_kernels;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::layout::tests::{config, group};
use crate::plan::{Backend, ModelPlan};

/// Multiprocessors of an H200.
const SMS: usize = 132;
/// Rows of a step.
const ROWS: [usize; 8] = [1, 8, 16, 32, 64, 128, 512, 2048];
/// What a matrix pass has room for (kernels/matrix/layout.cuh).
const BOUNDS: Bounds = Bounds { samples: 512, spans: 4096, window: None };

/// Bytes of registers that a thread may spill, of ranks of the largest models.
const MOST_SPILLED: u32 = 160;

/// The layout of a shape on one GPU, or why it has none.
fn layout_of(shape: Shape) -> Result<Layout, String> {
    let config = shape.config();
    check_shape(&config).map_err(|error| error.to_string())?;
    let plan = ModelPlan::for_backend(Backend::Cuda, &for_kernels(&config), 1).map_err(|error| error.to_string())?;
    Ok(Layout::new(&plan, 0, best_blocks(&plan, SMS), config.head_dim))
}

/// Of a step of each number of rows its pass: n and w, narrow and wide, with the kernel's columns; m, matrix.
fn paths(layout: &Layout) -> Vec<String> {
    let variants: Vec<Variant> = variants_of(layout).into_iter().chain(matrix_of(layout, ROWS[7])).collect();
    let bounds = |design| if design == Design::Matrix { Some(BOUNDS) } else { None };
    let widths: Vec<Width> = variants.iter().map(|of| Width { bounds: bounds(of.design), ..of.width }).collect();
    let passes = Passes::new(&widths, ROWS[7], Attention { ranks: 1, queries_per_kv: 4, page_ns: 3100 });
    let path = |count: usize| {
        let row = |slot, sample| Row { slot, token: 0, position: 5, sample };
        let prompt: Vec<Row> = (1..=count).map(|of| row(0, of == count)).collect();
        let crowd: Vec<Row> = (0..count as u32).map(|slot| row(slot, true)).collect();
        let one_pass = |rows: &[Row]| passes.of(rows).len() == 1;
        assert!(one_pass(&prompt) && (count > BOUNDS.samples || one_pass(&crowd)), "{count} rows");
        let variant = variants.iter().find(|variant| variant.columns() >= count).expect("a kernel for the pass");
        match variant.design {
            Design::Narrow => format!("n{}", variant.columns()),
            Design::Wide => format!("w{}", variant.columns()),
            Design::Matrix => "m".into(),
            Design::Unlooped { .. } => unreachable!("a benchmark's"),
        }
    };
    ROWS.map(path).to_vec()
}

/// Shape, thread blocks, passes of [`ROWS`], and why not wide ones (w), if there are none.
const TABLE: &str = "
llama-1b           128 n1 n8 w32 w32 w64 m m m
3b                 128 n1 n8 w32 w32 w64 m m m
8b                 128 n1 n8 w32 w32 w64 m m m
70b                128 n1 n8 w32 w32 w64 m m m
405b               128 n1 n8 m m m m m m: one of 128 blocks owns 10 row tiles of q, k and v, over 8
mistral-7b         128 n1 n8 w32 w32 w64 m m m
mistral-nemo-12b   128 n1 n8 w32 w32 w64 m m m
mistral-small-24b  128 n1 n8 w32 w32 w64 m m m
mistral-large-123b 128 n1 n8 w32 w32 w64 m m m
qwen2.5-0.5b       122 n1 n8 w32 w32 w64 m m m
qwen2.5-1.5b       128 n1 n8 w32 w32 w64 m m m
qwen2.5-3b         128 n1 n8 w32 w32 w64 m m m
qwen2.5-7b         120 n1 n8 w32 w32 w64 m m m
qwen2.5-14b        128 n1 n8 w32 w32 w64 m m m
qwen2.5-32b        128 n1 n8 w32 w32 w64 m m m
qwen2.5-72b        128 n1 n8 w32 w32 w64 m m m
qwen3-0.6b         128 n1 n8 w32 w32 w64 m m m
qwen3-1.7b         128 n1 n8 w32 w32 w64 m m m
qwen3-4b           128 n1 n8 w32 w32 w64 m m m
qwen3-8b           128 n1 n8 w32 w32 w64 m m m
qwen3-14b          128 n1 n8 w32 w32 w64 m m m
qwen3-32b          128 n1 n8 w32 w32 w64 m m m
smollm2-135m       120 n1 n8 w32 w32 w64 m m m
smollm2-360m       120 n1 n8 w32 w32 w64 m m m
";

/// A refusal without what is said of the backend around it.
fn told(problem: &str) -> &str {
    let problem = problem.split_once("compute this model: ").map_or(problem, |(_, problem)| problem);
    problem.split_once("; use --device").map_or(problem, |(problem, _)| problem)
}

#[test]
fn every_published_shape_has_the_passes_that_are_written_here() {
    let shapes = Shape::value_variants().iter().filter(|shape| !matches!(shape, Shape::Tiny | Shape::B1));
    let found = shapes.map(|shape| {
        let (passes, problem) = match layout_of(*shape) {
            Ok(layout) => {
                let problem = check_wide(&layout).err().map(|problem| format!(": {problem}"));
                (format!("{} {}", layout.blocks(), paths(&layout).join(" ")), problem.unwrap_or_default())
            }
            Err(problem) => (format!("refused: {}", told(&problem)), String::new()),
        };
        format!("{:18} {passes}{problem}", shape.name())
    });
    let found: Vec<_> = found.collect();
    let expected: Vec<&str> = TABLE.trim().lines().collect();
    assert!(found == expected, "{}", found.join("\n"));
}

/// Other GPUs and parts of GPUs: 60 multiprocessors and more. Every shape has passes for any number of rows; all that
/// fit into a GPU in bf16 have wide ones, but for three, which have them on 80.
#[test]
fn grids_of_any_number_of_multiprocessors_have_passes() {
    let (mut shapes, mut without_wide) = (0, Vec::new());
    for shape in Shape::value_variants() {
        let config = shape.config();
        if check_shape(&config).is_err() {
            continue;
        }
        shapes += 1;
        let plan = ModelPlan::for_backend(Backend::Cuda, &for_kernels(&config), 1).unwrap();
        for sms in 60..=148 {
            let layout = Layout::new(&plan, 0, best_blocks(&plan, sms), config.head_dim);
            assert!((sms - sms / 10..=sms).contains(&layout.blocks()), "{} on {sms}", shape.name());
            assert!(matrix_of(&layout, ROWS[7]).is_some(), "{} on {sms}", shape.name());
            if check_wide(&layout).is_err() && !matches!(shape, Shape::MistralLarge | Shape::B405) {
                without_wide.push((shape.name(), sms));
            }
        }
    }
    let narrow = ["70b", "qwen2.5-72b", "qwen3-32b"];
    let expected = narrow.into_iter().flat_map(|name| (60..80).map(move |sms| (name.to_string(), sms)));
    assert_eq!((shapes, without_wide), (26, expected.collect()));
}

#[test]
fn what_is_slow_says_why_and_how_slow() {
    let plan = ModelPlan::for_backend(Backend::Cuda, &Shape::B8.config(), 1).unwrap();
    let problem = check_wide(&Layout::new(&plan, 0, 127, 128)).expect_err("blocks come in pairs");
    assert_eq!(
        without_wide(&problem, true),
        "steps of 9 to 64 rows are matrix passes, which take 1.2 to 1.4 times as long: the kernel for them does not \
         take this model (127 blocks are no pairs)"
    );
    assert!(without_wide(&problem, false).contains("passes of 8, so 32 of them take 4 times as long as 8:"));
}

/// A KV head of more than eight query heads is computed as copies: a power of two of them where one will do.
#[test]
fn kv_heads_of_many_query_heads_have_copies() {
    let of = |heads, kv_heads| {
        let config = for_kernels(&config(heads, kv_heads, 384, 768));
        (config.num_kv_heads, config.num_heads / config.num_kv_heads)
    };
    assert_eq!([of(32, 8), of(64, 8), of(8, 8)], [(8, 4), (8, 8), (8, 1)]);
    assert_eq!([of(96, 8), of(128, 8)], [(16, 6), (16, 8)], "Mistral Large and Llama 3.1 405B");
    assert_eq!([of(64, 1), of(48, 2)], [(8, 8), (8, 6)]);
    assert_eq!([of(9, 1), of(11, 1), of(72, 2)], [(3, 3), (11, 1), (12, 6)]);
}

/// Of ranks of shapes that one GPU does not take: kernels of all widths, whose registers hold what they need (leaves of
/// 48 and 64 k16 steps do not fit).
#[test]
fn kernels_of_ranks_that_are_named_compile() {
    let Ok(compiler) = Compiler::find() else {
        eprintln!("skipped: no compiler");
        return;
    };
    for shape in [Shape::MistralLarge, Shape::B405] {
        let layout = group(&shape.config(), 16, 128).remove(15);
        let variants: Vec<_> = variants_of(&layout).into_iter().chain(matrix_of(&layout, ROWS[7])).collect();
        assert_eq!(variants.len(), 5, "{}", shape.name());
        for variant in variants {
            let name = format!("{}, {} columns, one of 16 ranks", shape.name(), variant.columns());
            let built = compiler.build(&variant.program(&layout), &Cache::from_environment());
            let (binary, _) = built.unwrap_or_else(|e| panic!("{name}: {e}"));
            let kernels =
                if variant.design == Design::Matrix { matrix::names().to_vec() } else { vec![variant.name()] };
            for kernel in kernels {
                let resources = Resources::of(kernel, &binary.log).expect("the compiler tells them");
                eprintln!("{name}, {kernel}: {resources:?}");
                assert!(resources.spilled <= MOST_SPILLED, "{name}, {kernel}: {resources:?}");
            }
        }
    }
}
