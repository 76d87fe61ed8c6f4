//! What Rust and CUDA both write down: structs, field by field, and how tiles are dealt to blocks. Rust's side becomes
//! assertions that the kernels' compiler checks against the headers. Needs NVRTC, not a GPU.

use std::fmt::Write;
use std::mem::offset_of;

use super::compiles;
use crate::bench::Shape;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::blocks::best_blocks;
use crate::cuda::kernels::cache::{Binary, Cache};
use crate::cuda::kernels::compile::{Compiler, Program};
use crate::cuda::kernels::launch::{Launch, Row};
use crate::cuda::kernels::matrix::Pass;
use crate::cuda::kernels::sources::HEADERS;
use crate::cuda::kernels::variants::{VARIANTS, matrix_of};
use crate::cuda::sampler::kernel as sampler;
use crate::cuda::sampler::launch::{RowLogprobs, RowSampling, SamplerLaunch};
use crate::cuda::weights::heads::for_kernels;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::layout::tests::{PRODUCTS, config, group, llama_8b, llama_70b};
use crate::model::ModelConfig;
use crate::plan::{Backend, ModelPlan, Product};

/// Of a struct: assertions of its size and of where each of the fields is.
macro_rules! mirror {
    ($of:ident { $($field:ident),* $(,)? }) => {{
        // A field that is left out does not compile.
        let whole = |of: $of| { let $of { $($field),* } = of; $(let _ = $field;)* };
        let _ = whole;
        let mut text = format!("static_assert(sizeof({0}) == {1}, \"{0}\");\n", stringify!($of), size_of::<$of>());
        $(text += &field(stringify!($of), stringify!($field), offset_of!($of, $field));)*
        text
    }};
}

fn field(of: &str, field: &str, offset: usize) -> String {
    // NVRTC has no `offsetof`.
    format!("static_assert(__INTADDR__(&(({of}*)0)->{field}) == {offset}, \"{of}.{field}\");\n")
}

fn launch_structs() -> String {
    mirror!(Row { token, position, slot, first_row, first_position, flags, last_position, reserved })
        + &mirror!(Launch {
            weights,
            gamma,
            embedding,
            bias,
            scales,
            qk_norm,
            rope,
            kv,
            k_scale,
            words,
            page_table,
            logits,
            rows,
            fed,
            items,
            stopped,
            tokens,
            control,
            report,
            trace,
            row_count,
            steps,
            epoch,
            page_stride,
            kv_pages,
            flags,
            rank,
            reserved,
            inbox,
        })
}

fn pass_struct() -> String {
    mirror!(Pass {
        tiles,
        attend_tiles,
        attend_spans,
        merges,
        samples,
        stopped,
        next,
        tile_count,
        span_count,
        merge_count,
        sample_count,
        step,
        cut,
        tile_blocks,
        carried,
        blocks,
    })
}

fn sampler_structs() -> String {
    // Two words of Rust's that have names of their own in CUDA.
    let sampling = mirror!(RowSampling {
        temperature,
        top_p,
        min_p,
        top_k,
        seed,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        flags,
        top_logprobs,
        bias_count,
        suppress_count,
        suppress_until,
        bias,
        suppress,
    });
    sampling.replace("->seed)", "->seed_lo)")
        + &field("RowSampling", "seed_hi", offset_of!(RowSampling, seed) + 4)
        + &RowLogprobs::mirror()
        + &mirror!(SamplerLaunch {
            logits,
            processed,
            counts,
            words,
            sampling,
            rows,
            stopped,
            tokens,
            logprobs,
            control,
            stop,
            report,
            row_count,
            tag,
            masks,
            mask_of,
            step,
            rows_before,
        })
}

impl RowLogprobs {
    /// Its fields are its own.
    fn mirror() -> String {
        let [logprob, count, top] = Self::offsets();
        format!("static_assert(sizeof(RowLogprobs) == {}, \"RowLogprobs\");\n", size_of::<Self>())
            + &field("RowLogprobs", "logprob", logprob)
            + &field("RowLogprobs", "count", count)
            + &field("RowLogprobs", "top", top)
    }
}

/// The compiler, if there is one, and where it may put what it makes.
fn compiler() -> Option<(Compiler, tempfile::TempDir)> {
    Some((compiles::compiler()?, tempfile::tempdir().unwrap()))
}

fn built(of: &(Compiler, tempfile::TempDir), program: &Program<'_>) -> Result<Binary, CudaError> {
    of.0.build(program, &Cache::at(of.1.path())).map(|(binary, _)| binary)
}

fn checked_program<'a>(headers: &'a [(&'a str, &'a str)], text: &'a str) -> Program<'a> {
    Program { name: "assertions", source: text, headers, defines: Vec::new() }
}

#[test]
fn structs_have_the_same_fields_at_the_same_places() {
    let Some(compiler) = compiler() else { return };
    let includes = "#include \"ptx/ptx.cuh\"\n#include \"layout/launch.cuh\"\n#include \"layout/sampler.cuh\"\n";
    let text = [includes, &launch_structs(), &sampler_structs()].concat();
    built(&compiler, &checked_program(&sampler::HEADERS, &text)).unwrap();
    // Two pointers change places.
    let swapped = text.replace("->gamma)", "->#)").replace("->embedding)", "->gamma)").replace("->#)", "->embedding)");
    let refused = built(&compiler, &checked_program(&sampler::HEADERS, &swapped)).unwrap_err().to_string();
    assert!(refused.contains("Launch.gamma"), "{refused}");
    let includes = ["ptx/ptx.cuh", "layout/shape.cuh", "layout/launch.cuh", "matrix/layout.cuh"];
    let includes = includes.map(|name| format!("#include \"{name}\"\n")).concat();
    let text = format!("{includes}using matrix::Pass;\n{}", pass_struct());
    let layout = group(&llama_8b(), 1, 128).remove(0);
    let defines = matrix_of(&layout, 2048).expect("it has matrix passes").program(&layout).defines;
    built(&compiler, &Program { defines, ..checked_program(&HEADERS, &text) }).unwrap();
}

/// Scripts that launch kernels by themselves write a `Launch` down as so many pointers, numbers and inboxes.
#[test]
fn scripts_pack_as_long_a_launch() {
    let scripts = [
        ("variants.py", include_str!("../../../kernels/tests/variants/variants.py")),
        ("products.py", include_str!("../../../kernels/tests/wide/products.py")),
    ];
    for (name, text) in scripts {
        let (before, _) = text.split_once("Q8I16Q\"").unwrap_or_else(|| panic!("{name} packs no launch"));
        let (_, pointers) = before.rsplit_once("\"<").expect("a format begins with <");
        let pointers: usize = pointers.parse().unwrap();
        assert_eq!(8 * pointers + 8 * 4 + 16 * 8, size_of::<Launch>(), "{name} has {pointers} pointers");
    }
}

/// Where each block's tiles of each product begin, as assertions.
fn dealt(layout: &Layout) -> String {
    let mut text = String::from("#include \"ptx/ptx.cuh\"\n#include \"layout/shape.cuh\"\n");
    for product in PRODUCTS {
        let name = match product {
            Product::QueryKeyValue => "Qkv",
            Product::AttentionOut => "O",
            Product::GateUp => "GateUp",
            Product::Down => "Down",
            Product::LmHead => "Head",
        };
        let (panel, blocks) = (layout.panel(product), layout.blocks());
        for block in 0..=blocks {
            let first = if block < blocks { panel.tiles_of(block, blocks).start } else { panel.tiles };
            let of = format!("{name}::first_tile({block})");
            writeln!(text, "static_assert({of} == {first}, \"{of} is {first}\");").unwrap();
        }
        writeln!(text, "static_assert({name}::bytes == {}ull, \"{name}\");", panel.bytes()).unwrap();
    }
    text
}

#[test]
fn tiles_are_dealt_alike() {
    let Some(compiler) = compiler() else { return };
    let of_shape = |shape: Shape, ranks: usize| {
        let config = for_kernels(&shape.config());
        let plan = ModelPlan::for_backend(Backend::Cuda, &config, ranks).unwrap();
        Layout::new(&plan, ranks - 1, best_blocks(&plan, 132), config.head_dim)
    };
    let small = ModelConfig { head_dim: 64, ..config(16, 4, 400, 1000) };
    let mut layouts = vec![of_shape(Shape::Tiny, 1), of_shape(Shape::B3, 1), of_shape(Shape::B8, 1)];
    layouts.extend([60, 78, 132].map(|blocks| group(&small, 1, blocks).remove(0)));
    for ranks in [2, 4, 8, 16] {
        layouts.extend([group(&llama_8b(), ranks, 128).remove(ranks - 1), group(&llama_70b(), ranks, 132).remove(0)]);
        layouts.push(group(&small, ranks, 7).remove(0));
    }
    for layout in &layouts {
        let text = dealt(layout);
        let program =
            |text| Program { defines: VARIANTS[0].program(layout).defines, ..checked_program(&HEADERS, text) };
        let ranks = layout.ranks();
        built(&compiler, &program(&text)).unwrap_or_else(|e| panic!("{} blocks, {ranks} ranks: {e}", layout.blocks()));
    }
    // A block that begins a tile later.
    let first = layouts[2].panel(Product::GateUp).tiles_of(1, layouts[2].blocks()).start;
    let late = dealt(&layouts[2])
        .replace(&format!("(GateUp::first_tile(1) == {first},"), &format!("(GateUp::first_tile(1) == {},", first + 1));
    let program = Program { defines: VARIANTS[0].program(&layouts[2]).defines, ..checked_program(&HEADERS, &late) };
    let refused = built(&compiler, &program).unwrap_err().to_string();
    assert!(refused.contains("GateUp::first_tile(1)"), "{refused}");
}
