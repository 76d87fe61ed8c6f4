//! The kernels of a model: one for each width of a pass, out of three sources.

use super::compile::Program;
use super::items::Bounds;
use super::sources::{HEADERS, SOURCES, UNLOOPED_SOURCE};
use crate::cuda::error::CudaError;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::panel::Panel;
use crate::model::{ModelConfig, WeightFormat};
use crate::plan::stream::LAYER_PRODUCTS;

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// The width of its passes, and what one takes: of Llama 3.1 8B at 512 positions on an H200.
    pub width: Width,
    /// How it works.
    pub design: Design,
    /// Launches note times, for whoever measures.
    traced: bool,
}

/// A kernel, as far as the choice of the passes of a step depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width {
    /// Rows of a pass at most.
    pub columns: usize,
    /// What a pass takes, however many of its columns are used. Only ratios count: they differ little between models.
    pub time_us: u32,
    /// What each begun block of [`TOKEN_BLOCK`] rows takes beside: 0 but of matrix passes, which leave out the others.
    pub block_us: u32,
    /// What else a pass has room for; `None`: for whatever its rows are.
    pub bounds: Option<Bounds>,
}

impl Width {
    /// A kernel that computes all its columns in any case.
    pub const fn fixed(columns: usize, time_us: u32) -> Self {
        Self { columns, time_us, block_us: 0, bounds: None }
    }

    /// What a pass of so many rows takes, in microseconds.
    pub fn time(&self, rows: usize) -> u64 {
        u64::from(self.time_us) + u64::from(self.block_us) * rows.div_ceil(TOKEN_BLOCK) as u64
    }
}

/// What it costs that rows of a sequence read its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Ranks of the group.
    pub ranks: usize,
    /// Query heads of a KV head.
    pub queries_per_kv: usize,
    /// Each time that a page is read, all layers and KV heads of it, in the unit of [`Width::time`] / 1000.
    pub page_ns: u64,
}

impl Attention {
    /// Of a model, or one of `ranks` ranks, that streams so many bytes of weights, and has so many in a page.
    ///
    /// 8B on an H200: 64 rows of a sequence at 16 000 positions, which 16 groups read, take 12.3 ms more in a wide pass
    /// than at 500.
    pub fn of(ranks: usize, queries_per_kv: usize, page_bytes: u64, stream_bytes: u64) -> Self {
        const NS_OF_8B: f64 = 3100.0;
        const PAGE_SHARE_OF_8B: f64 = 8_388_608.0 / 15.0e9;
        let share = page_bytes as f64 / stream_bytes.max(1) as f64;
        Self { ranks, queries_per_kv, page_ns: (NS_OF_8B * share / PAGE_SHARE_OF_8B) as u64 }
    }

    /// What a page of a row that is alone of its sequence takes longer than in passes that read spans, in the unit of
    /// `page_ns`. Narrow kernels of larger groups leave the outputs of every page in memory (`kShares`): 8B on four
    /// H200, 8 rows at 2000 and 8100 positions: 1.38 and 2.69 ms, 9 rows in a wide pass 2.00 and 2.51.
    pub fn page_alone_ns(&self, width: &Width) -> u64 {
        let is_narrow = width.bounds.is_none() && (2..=8).contains(&width.columns);
        if is_narrow && self.ranks > 2 { self.page_ns * 37 / 100 } else { 0 }
    }

    /// Rows of a sequence that read a page together, at most, in passes of a width.
    pub fn rows_together(&self, width: &Width) -> usize {
        let columns = match (width.bounds, width.columns) {
            // Tiles, whose spans are computed side by side.
            (Some(_), _) => 1024,
            // `kTogether` in kernels/narrow/shared_memory.cuh: narrow kernels of larger groups read for each row.
            (None, 0..=8) if self.ranks > 2 => return 1,
            // A tile for each of four warps.
            (None, 0..=8) => 32,
            (None, _) => 16,
        };
        (columns / self.queries_per_kv).max(1)
    }
}

/// How a kernel works. All compute the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Design {
    /// A block owns rows of every product, with all of K.
    Narrow,
    /// Pairs of blocks own rows of qkv, o and down, and halve K.
    Wide,
    /// Launches of phases; a product's tiles are 128 rows by 128 tokens.
    Matrix,
    /// As narrow, a launch for each phase.
    Unlooped {
        /// A launch begins while the one before it ends.
        overlapped: bool,
    },
}

/// How the phases of a step become launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LoopMode {
    /// One launch walks all phases of many steps.
    #[default]
    On,
    /// A launch for each phase of each layer, in a CUDA graph for each step.
    Off,
    /// As off, but a launch begins while the one before it ends (programmatic dependent launch).
    Overlapped,
}

/// All, by columns ascending.
pub const VARIANTS: [Variant; 4] = [narrow(1, 3360), narrow(8, 3630), wide(32, 4540), wide(64, 5480)];
/// Columns of the kernel whose launches may be given rows step by step: `kFed` in kernels/narrow/words.cuh.
pub const FED_COLUMNS: usize = 8;
/// Most rows of a matrix pass: of Llama 3.1 8B more gain nothing.
const MATRIX_COLUMNS: usize = 2048;
/// Rows that matrix passes compute together.
pub const TOKEN_BLOCK: usize = 128;
/// Widest head; narrower ones are padded to this or half of it.
const MAX_HEAD_DIM: usize = 128;
/// Row tiles of q, k and v, o, or down that a block owns in wide passes, for a warp has one, and whose sums it has room
/// for.
const MOST_TILES: usize = 8;

const fn narrow(columns: usize, time_us: u32) -> Variant {
    Variant { width: Width::fixed(columns, time_us), design: Design::Narrow, traced: false }
}

const fn wide(columns: usize, time_us: u32) -> Variant {
    Variant { width: Width::fixed(columns, time_us), design: Design::Wide, traced: false }
}

/// Refuses dimensions that the kernels are not written for.
///
/// # Errors
/// Names the dimension.
pub fn check_shape(config: &ModelConfig) -> Result<(), CudaError> {
    let refuse = |problem: String| Err(CudaError::Shape(problem));
    if !config.hidden_size.is_multiple_of(16) {
        return refuse(format!("hidden_size {} is not a multiple of 16", config.hidden_size));
    }
    if config.head_dim > MAX_HEAD_DIM {
        return refuse(format!("head_dim {} is over {MAX_HEAD_DIM}", config.head_dim));
    }
    Ok(())
}

/// Why the wide kernel does not take a model, or a rank of one, on so many blocks; the same rule as `kWideFits` in
/// kernels/wide/geometry.cuh.
///
/// # Errors
/// The condition that is not met.
pub fn check_wide(layout: &Layout) -> Result<(), String> {
    let [qkv, out, _, down] = LAYER_PRODUCTS.map(|product| layout.panel(product));
    let (blocks, kv_heads) = (layout.blocks(), layout.rank().kv_heads.len());
    if !blocks.is_multiple_of(2) {
        return Err(format!("{blocks} blocks are no pairs"));
    }
    if blocks < kv_heads {
        return Err(format!("{blocks} blocks are fewer than {kv_heads} KV heads"));
    }
    let [most_qkv, most_out] =
        [&qkv, &out].map(|panel| (0..blocks).map(|block| panel.tiles_of(block, blocks).len()).max().unwrap_or(0));
    for (name, most) in [("q, k and v", most_qkv), ("o and down", most_out)] {
        if most > MOST_TILES {
            return Err(format!("one of {blocks} blocks owns {most} row tiles of {name}, over {MOST_TILES}"));
        }
    }
    // What a rank tells of an output: its sum, or, of less than a group, its leaves.
    let told = |panel: &Panel| {
        let group = (panel.k.count / 4).max(1);
        if panel.leaves < group { (panel.leaves, group) } else { (1, 1) }
    };
    let most_told = told(&out).0 * most_out;
    if most_told > MOST_TILES {
        return Err(format!("one of {blocks} blocks tells {most_told} tiles of sums of o, over {MOST_TILES}"));
    }
    if layout.ranks() == 1 {
        return Ok(());
    }
    if out.tiles < blocks {
        return Err(format!("{} row tiles are not one for each of {blocks} blocks", out.tiles));
    }
    match told(&out) == told(&down) {
        true => Ok(()),
        false => Err(format!("ranks have {} leaves of o and {} of down", out.leaves, down.leaves)),
    }
}

/// Why there are no matrix passes of a model, or a rank of one.
///
/// # Errors
/// The condition that is not met.
fn check_matrix(layout: &Layout) -> Result<(), String> {
    let runs = |panel: Panel| panel.leaves * panel.steps() / panel.run_steps();
    let runs = LAYER_PRODUCTS.map(|product| runs(layout.panel(product)));
    match runs.iter().all(|runs| *runs > 1) {
        true => Ok(()),
        false => Err(format!("the rows of products are {runs:?} runs of weights, not all two or more")),
    }
}

/// The variants that compute a model on so many blocks, but for matrix passes.
pub fn variants_of(layout: &Layout) -> Vec<Variant> {
    VARIANTS.into_iter().filter(|variant| variant.check(layout).is_ok()).collect()
}

/// The variant of matrix passes for a model whose steps have up to `most_rows` rows; `None` where passes of the others
/// hold every step, or they do not take the model.
pub fn matrix_of(layout: &Layout, most_rows: usize) -> Option<Variant> {
    let held = variants_of(layout).iter().map(Variant::columns).max();
    let columns = most_rows.next_multiple_of(TOKEN_BLOCK).min(MATRIX_COLUMNS);
    // A line by the times of prompts, 6.1, 12.9 and 47 ms of 128, 512 and 2048 rows. Decoding rows take longer, as they
    // have K and V of their own.
    let width = Width { block_us: 2800, ..Width::fixed(columns, 4000) };
    let variant = Variant { width, design: Design::Matrix, traced: false };
    (held < Some(most_rows) && variant.check(layout).is_ok()).then_some(variant)
}

impl Variant {
    /// Why it does not take a model, or a rank of one.
    ///
    /// # Errors
    /// The condition that is not met.
    pub fn check(&self, layout: &Layout) -> Result<(), String> {
        match self.design {
            Design::Narrow | Design::Unlooped { .. } => Ok(()),
            Design::Wide => check_wide(layout),
            Design::Matrix => check_matrix(layout),
        }
    }

    /// Rows of a launch at most.
    pub fn columns(&self) -> usize {
        self.width.columns
    }

    /// Name of the kernel in its source.
    pub fn name(&self) -> &'static str {
        match self.design {
            Design::Narrow => "looped_decoder",
            Design::Wide => "wide_decoder",
            Design::Matrix => "matrix_decoder",
            Design::Unlooped { .. } => "unlooped_decoder",
        }
    }

    /// The same pass in another mode, noting times or not; `None` where there is none.
    pub fn in_mode(self, mode: LoopMode, traced: bool) -> Option<Self> {
        let design = match (self.design, mode) {
            (Design::Narrow, LoopMode::On) => Design::Narrow,
            (Design::Narrow, mode) => Design::Unlooped { overlapped: mode == LoopMode::Overlapped },
            (Design::Wide, LoopMode::On) => Design::Wide,
            (Design::Wide | Design::Matrix | Design::Unlooped { .. }, _) => return None,
        };
        Some(Self { design, traced, ..self })
    }

    /// Whether it runs a launch for each phase, and if so, whether they overlap.
    pub fn unlooped(&self) -> Option<bool> {
        match self.design {
            Design::Narrow | Design::Wide | Design::Matrix => None,
            Design::Unlooped { overlapped } => Some(overlapped),
        }
    }

    /// The kernel's source with its constants for a rank: its own heads and intermediate columns, the model's hidden
    /// size and vocabulary.
    pub fn program(&self, layout: &Layout) -> Program<'static> {
        let (c, rank) = (&layout.plan().config, layout.rank());
        let mut defines: Vec<(&'static str, usize)> = vec![
            ("LP_LAYERS", c.num_layers),
            ("LP_HIDDEN", c.hidden_size),
            ("LP_RANKS", layout.ranks()),
            ("LP_SHARDS", layout.plan().tensor_parallel),
            ("LP_HEADS", rank.heads.len()),
            ("LP_KV_HEADS", rank.kv_heads.len()),
            ("LP_HEAD_DIM", c.head_dim),
            ("LP_HEAD_WIDTH", layout.head_width()),
            ("LP_INTERMEDIATE", rank.intermediate.len()),
            ("LP_VOCAB", c.vocab_size),
            ("LP_WINDOW", c.sliding_window.unwrap_or(0)),
            ("LP_QKV_BIAS", c.qkv_bias.into()),
            ("LP_QK_NORM", c.qk_norm.into()),
            ("LP_TIED", c.tied_embeddings.into()),
            ("LP_EPS", c.rms_norm_eps.to_bits() as usize),
            ("LP_LAYER_FORMAT", format_number(c.layer_weights)),
            ("LP_GROUP", c.layer_weights.group().unwrap_or(0)),
            ("LP_BLOCKS", layout.blocks()),
            ("LP_COLUMNS", self.columns()),
        ];
        defines.extend(self.traced.then_some(("LP_TRACE", 1)));
        let defines = defines.into_iter().map(|(name, value)| (name, value as u64)).collect();
        let source = match self.design {
            Design::Narrow => SOURCES[0],
            Design::Wide => SOURCES[1],
            Design::Matrix => SOURCES[2],
            Design::Unlooped { .. } => UNLOOPED_SOURCE,
        };
        Program { name: self.name(), source, headers: &HEADERS, defines }
    }
}

/// `Format` of kernels/layout/shape.cuh.
fn format_number(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Bf16 => 0,
        WeightFormat::E4m3 => 1,
        WeightFormat::E4m3Groups { .. } => 2,
        WeightFormat::Int4 { zeros: false, .. } => 3,
        WeightFormat::Int4 { zeros: true, .. } => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::best_blocks;
    use super::*;
    use crate::cuda::notes::gauge::Gauge;
    use crate::cuda::weights::heads::for_kernels;
    use crate::cuda::weights::layout::tests::{config, group, layout};
    use crate::plan::Product;

    /// Multiprocessors of an H200.
    const SMS: usize = 132;

    fn refusal(config: &ModelConfig, blocks: Option<usize>) -> Option<String> {
        let layout = layout(&for_kernels(config), 1);
        let blocks = blocks.unwrap_or_else(|| best_blocks(layout.plan(), SMS));
        check_wide(&Layout::new(layout.plan(), 0, blocks, config.head_dim)).err()
    }

    #[test]
    fn wide_passes_take_the_models_they_are_written_for() {
        let of = |hidden_size, heads, kv, head_dim, intermediate, vocab| ModelConfig {
            hidden_size,
            head_dim,
            num_layers: 32,
            ..config(heads, kv, intermediate, vocab)
        };
        let llama_8b = of(4096, 32, 8, 128, 14_336, 128_256);
        let taken = [
            llama_8b.clone(),
            // Qwen 3 8B, Llama 3.2 1B and 3B, Qwen 2.5 0.5B and 7B, SmolLM2 135M, Qwen 3 32B.
            of(4096, 32, 8, 128, 12_288, 151_936),
            of(2048, 32, 8, 64, 8192, 128_256),
            of(3072, 24, 8, 128, 8192, 128_256),
            of(896, 14, 2, 64, 4864, 151_936),
            of(3584, 28, 4, 128, 18_944, 152_064),
            of(576, 9, 3, 64, 1536, 49_152),
            of(5120, 64, 8, 128, 25_600, 151_936),
        ];
        for config in &taken {
            assert_eq!(refusal(config, None), None, "{config:?}");
        }
        assert_eq!(refusal(&llama_8b, Some(132)), None);
        let refused = |config: &ModelConfig, blocks, why: &str| {
            let problem = refusal(config, blocks).expect("wide passes do not take it");
            assert!(problem.contains(why), "{problem}");
        };
        refused(&llama_8b, Some(127), "127 blocks are no pairs");
        refused(&llama_8b, Some(6), "fewer than 8 KV heads");
        refused(&llama_8b, Some(32), "owns 12 row tiles of q, k and v, over 8");
        // Ranks of eight of Llama 3.1 70B on the 114 multiprocessors of an H100 PCIe.
        let rank = group(&of(8192, 64, 8, 128, 28_672, 128_256), 8, 114).swap_remove(0);
        let problem = check_wide(&rank).expect_err("there is no room for two leaves of five tiles");
        assert!(problem.contains("tells 10 tiles of sums of o"), "{problem}");
    }

    #[test]
    fn a_rank_of_a_group_has_kernels_of_all_widths_that_take_it() {
        let of = |hidden_size, heads, intermediate| ModelConfig {
            hidden_size,
            head_dim: 128,
            ..config(heads, 8, intermediate, 128_256)
        };
        let all = &[1, 8, 32, 64][..];
        // Llama 3.1 8B and 70B, Llama 3.2 3B: of 8 ranks one has one leaf of o and two of down, half a group.
        for config in [of(4096, 32, 14_336), of(8192, 64, 28_672), of(3072, 24, 8192)] {
            for layout in [2, 4, 8, 16].into_iter().flat_map(|ranks| group(&config, ranks, 128)) {
                let narrow_alone = config.num_heads == 24 && layout.plan().tensor_parallel >= 8;
                let expected = if narrow_alone { &all[..2] } else { all };
                let columns: Vec<_> = variants_of(&layout).iter().map(Variant::columns).collect();
                assert_eq!(columns, expected, "{:?} ranks", layout.plan().tensor_parallel);
                let added = Gauge::new(&[LoopMode::On, LoopMode::Off, LoopMode::Overlapped]).variants(&layout);
                let columns: Vec<_> = added.iter().map(Variant::columns).collect();
                let wide = if expected.len() > 2 { &[32, 64][..] } else { &[] };
                let narrow = [[1; 5], [8; 5]].concat();
                assert_eq!(columns, [&narrow, wide].concat(), "noting times; of narrow ones two modes more");
            }
        }
    }

    /// Four GPUs with shards for 16 exchange among four, and are otherwise those of 16.
    #[test]
    fn some_ranks_of_a_group_have_its_shards_and_exchange_among_themselves() {
        let config = ModelConfig { hidden_size: 4096, head_dim: 128, ..config(32, 8, 14_336, 128_256) };
        let whole = group(&config, 16, 128).swap_remove(3);
        let some = whole.clone().of_first(4);
        assert_eq!((some.bytes(), some.ranks(), whole.ranks()), (whole.bytes(), 4, 16));
        let [of_some, of_whole] = [&some, &whole].map(|layout| VARIANTS[0].program(layout).defines);
        let changed: Vec<_> = of_some.iter().zip(&of_whole).filter(|(a, b)| a != b).collect();
        assert_eq!(changed, [(&("LP_RANKS", 4), &("LP_RANKS", 16))]);
        assert!(of_some.contains(&("LP_SHARDS", 16)));
    }

    /// The arithmetic of kernels/layout/shape.cuh, written down again.
    #[test]
    fn the_constants_of_a_rank_give_the_panels_that_are_packed() {
        let most_leaves =
            |n: usize| (0..=4).map(|log| 1 << log).filter(|leaves| n.is_multiple_of(*leaves)).max().unwrap();
        let configs = [
            ModelConfig { hidden_size: 4096, head_dim: 128, ..config(32, 8, 14_336, 128_256) },
            ModelConfig { hidden_size: 8192, head_dim: 128, ..config(64, 8, 28_672, 128_256) },
            config(16, 4, 400, 1000),
            config(8, 2, 388, 33),
        ];
        let ranks = |config| [1, 2, 4, 8, 16].into_iter().flat_map(move |ranks| group(config, ranks, 7));
        for layout in configs.iter().flat_map(ranks) {
            let program = VARIANTS[0].program(&layout);
            let of = |name: &str| program.defines.iter().find(|(of, _)| *of == name).unwrap().1 as usize;
            let (ranks, heads, columns, vocab) =
                (of("LP_RANKS"), of("LP_HEADS"), of("LP_INTERMEDIATE"), of("LP_VOCAB"));
            let (hidden, head_tiles) = (of("LP_HIDDEN") / 16, of("LP_HEAD_DIM") / 16);
            let (head_leaves, down_leaves) = (most_leaves(heads * ranks) / ranks, most_leaves(columns * ranks) / ranks);
            let (hidden_leaves, down_steps) = (most_leaves(hidden), (columns / down_leaves).div_ceil(16));
            let head = if ranks == 1 { vocab.div_ceil(16) } else { vocab.div_ceil(256) * 16 / ranks };
            let of_hidden = |tiles| [tiles, hidden_leaves, hidden / hidden_leaves];
            for (product, shape) in [
                (Product::QueryKeyValue, of_hidden((heads + 2 * of("LP_KV_HEADS")) * head_tiles)),
                (Product::AttentionOut, [hidden, head_leaves, heads * head_tiles / head_leaves]),
                (Product::GateUp, of_hidden(2 * down_leaves * down_steps)),
                (Product::Down, [hidden, down_leaves, down_steps]),
                (Product::LmHead, of_hidden(head)),
            ] {
                let panel = layout.panel(product);
                assert_eq!([panel.tiles, panel.leaves, panel.steps()], shape, "{product:?}, {ranks} ranks");
            }
        }
    }

    /// A benchmark's kernels, too, are only those that take the model: others do not compile. On an odd number of
    /// blocks there are no wide ones.
    #[test]
    fn a_benchmark_adds_no_wide_kernel_that_does_not_take_the_model() {
        let config = ModelConfig { hidden_size: 4096, head_dim: 128, ..config(32, 8, 14_336, 128_256) };
        let adds = |blocks| {
            let layout = layout(&for_kernels(&config), blocks);
            let modes = [LoopMode::On, LoopMode::Off, LoopMode::Overlapped];
            let added = Gauge::new(&modes).variants(&layout);
            assert!(added.iter().any(|variant| variant.unlooped().is_some()));
            added.iter().filter(|variant| variant.columns() > 8).count()
        };
        assert_eq!((adds(128), adds(127)), (2, 0), "two that note times, and none on an odd number of blocks");
    }

    #[test]
    fn steps_that_other_passes_do_not_hold_have_matrix_passes() {
        let columns = |layout: &Layout, most_rows| matrix_of(layout, most_rows).map(|variant| variant.columns());
        let llama_8b = ModelConfig { hidden_size: 4096, head_dim: 128, ..config(32, 8, 14_336, 128_256) };
        let [wide, narrow] = [128, 127].map(|blocks| layout(&llama_8b, blocks));
        assert_eq!([64, 65, 500, 2048, 8192].map(|rows| columns(&wide, rows)), [0, 128, 512, 2048, 2048].map(some));
        assert_eq!([8, 9].map(|rows| columns(&narrow, rows)), [0, 128].map(some));
        for rank in [2, 4, 8, 16].map(|ranks| group(&llama_8b, ranks, 128).remove(0)) {
            assert_eq!(columns(&rank, 512), Some(512));
        }
        // One k16 step of down.
        assert_eq!(columns(&group(&config(16, 16, 256, 768), 16, 8)[0], 64), None);
    }

    fn some(columns: usize) -> Option<usize> {
        (columns > 0).then_some(columns)
    }

    #[test]
    fn sources_say_as_many_numbers_of_themselves_as_are_read() {
        for source in SOURCES.into_iter().chain([UNLOOPED_SOURCE]) {
            let matrix = source.contains("matrix_decoder_needs");
            let numbers = if matrix { super::super::matrix::NEEDS } else { super::super::kernel::NEEDS };
            assert!(source.contains(&format!("_decoder_needs[{numbers}] = ")));
        }
    }

    #[test]
    fn wider_variants_take_longer_but_less_a_row() {
        for pair in VARIANTS.windows(2) {
            let [one, next] = [pair[0].width, pair[1].width];
            assert!(one.columns < next.columns && one.time_us < next.time_us);
            assert!(next.time_us as usize * one.columns < one.time_us as usize * next.columns);
        }
    }
}
