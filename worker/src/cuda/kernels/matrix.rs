//! The kernels of matrix passes for one model: a launch for each phase of each layer (kernels/matrix/layout.cuh, of
//! several ranks kernels/matrix/ranks.cuh).

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::cache::Cache;
use super::compile::{Compiler, Resources};
use super::function::{Begin, Function};
use super::items::Bounds;
use super::launch::Launch;
use super::module::Module;
use super::variants::{Variant, Width};
use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::weights::layout::Layout;
use crate::plan::Product;

/// Rows of weights of a tile of a product, and its tokens at most: smaller passes have tiles of all their tokens.
const TILE: u32 = 128;
/// Tokens of a pass at most whose products have too few tiles for all blocks, so that K may be cut.
const MOST_CUT: u32 = 4 * TILE;
/// k16 steps of a product at least whose K is cut although that saves no round: 8B on an H200, 257 to 512 rows: down
/// (896 steps) 4 to 13 % faster, o (256) 9 to 10 % slower.
const LONG: u32 = 512;
/// Leaves of K that a product has at least whose K can be cut.
const QUAD_LEAVES: usize = 4;

/// A phase of a pass: its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Embed,
    Norms,
    QueryKeyValue,
    HeadNorms,
    AttendTiles,
    AttendCutTiles,
    AttendSpans,
    MergeSpans,
    AttentionOut,
    GateUp,
    Down,
    Gather,
    Head,
    HeadChoose,
    Choose,
    QueryKeyValueHalves,
    AttentionOutHalves,
    DownHalves,
    QueryKeyValueQuads,
    AttentionOutQuads,
    DownQuads,
    MeetBegun,
    TellEmbeddings,
    MeetEmbedded,
    JoinOut,
    JoinDown,
    NormsOfJoinedOut,
    NormsOfJoinedDown,
    MeetLogits,
}

impl Phase {
    const ALL: [Self; 29] = [
        Self::Embed,
        Self::Norms,
        Self::QueryKeyValue,
        Self::HeadNorms,
        Self::AttendTiles,
        Self::AttendCutTiles,
        Self::AttendSpans,
        Self::MergeSpans,
        Self::AttentionOut,
        Self::GateUp,
        Self::Down,
        Self::Gather,
        Self::Head,
        Self::HeadChoose,
        Self::Choose,
        Self::QueryKeyValueHalves,
        Self::AttentionOutHalves,
        Self::DownHalves,
        Self::QueryKeyValueQuads,
        Self::AttentionOutQuads,
        Self::DownQuads,
        Self::MeetBegun,
        Self::TellEmbeddings,
        Self::MeetEmbedded,
        Self::JoinOut,
        Self::JoinDown,
        Self::NormsOfJoinedOut,
        Self::NormsOfJoinedDown,
        Self::MeetLogits,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Embed => "matrix_embed",
            Self::Norms => "matrix_norms",
            Self::QueryKeyValue => "matrix_qkv",
            Self::HeadNorms => "matrix_head_norms",
            Self::AttendTiles => "matrix_attend_tiles",
            Self::AttendCutTiles => "matrix_attend_cut_tiles",
            Self::AttendSpans => "matrix_attend_spans",
            Self::MergeSpans => "matrix_merge_spans",
            Self::AttentionOut => "matrix_out",
            Self::GateUp => "matrix_gate_up",
            Self::Down => "matrix_down",
            Self::Gather => "matrix_gather",
            Self::Head => "matrix_head",
            Self::HeadChoose => "matrix_head_choose",
            Self::Choose => "matrix_choose",
            Self::QueryKeyValueHalves => "matrix_qkv_halves",
            Self::AttentionOutHalves => "matrix_out_halves",
            Self::DownHalves => "matrix_down_halves",
            Self::QueryKeyValueQuads => "matrix_qkv_quads",
            Self::AttentionOutQuads => "matrix_out_quads",
            Self::DownQuads => "matrix_down_quads",
            Self::MeetBegun => "matrix_meet_begun",
            Self::TellEmbeddings => "matrix_tell_embeddings",
            Self::MeetEmbedded => "matrix_meet_embedded",
            Self::JoinOut => "matrix_join_out",
            Self::JoinDown => "matrix_join_down",
            Self::NormsOfJoinedOut => "matrix_norms_of_joined_out",
            Self::NormsOfJoinedDown => "matrix_norms_of_joined_down",
            Self::MeetLogits => "matrix_meet_logits",
        }
    }

    /// Whether all that it does is to wait for the other ranks, with one block.
    fn meets(self) -> bool {
        matches!(self, Self::MeetBegun | Self::MeetEmbedded | Self::MeetLogits)
    }

    /// The same by blocks that divide tiles so.
    fn cut(self, cut: Cut) -> Self {
        match (self, cut) {
            (Self::QueryKeyValue, Cut::Halves) => Self::QueryKeyValueHalves,
            (Self::AttentionOut, Cut::Halves) => Self::AttentionOutHalves,
            (Self::Down, Cut::Halves) => Self::DownHalves,
            (Self::QueryKeyValue, Cut::Quads) => Self::QueryKeyValueQuads,
            (Self::AttentionOut, Cut::Quads) => Self::AttentionOutQuads,
            (Self::Down, Cut::Quads) => Self::DownQuads,
            (whole, _) => whole,
        }
    }
}

/// How neighbouring blocks divide a product's tiles (kernels/matrix/product.cuh).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Two blocks have neighbouring tokens, and all of K.
    Pair,
    /// Two such pairs have half of K each.
    Halves,
    /// Four blocks have the same tile, and a quarter of K each.
    Quads,
}

/// A product whose K can be cut: groups of rows of weights, and k16 steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cuttable {
    groups: u32,
    steps: u32,
}

impl Cut {
    /// What takes least time for `rows` tokens, by `blocks` blocks.
    fn of(rows: u32, product: Cuttable, blocks: u32) -> Self {
        let Cuttable { groups, steps } = product;
        let tokens = rows.div_ceil(TILE);
        // Two neighbouring tiles, of the last tokens by themselves two groups.
        let units = groups * (tokens / 2) + if tokens.is_multiple_of(2) { 0 } else { groups.div_ceil(2) };
        // In rounds of half of K.
        let (pairs, halves) = (2 * units.div_ceil(blocks / 2), units.div_ceil(blocks / 4));
        match rows {
            0..=TILE => Self::Quads,
            ..=MOST_CUT if halves < pairs || (halves == pairs && steps >= LONG) => Self::Halves,
            _ => Self::Pair,
        }
    }
}

/// What the source says of itself once it is compiled, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Needs {
    /// Bytes of the memory that launches share.
    memory_bytes: u64,
    /// Dynamic shared memory of a block of a product.
    product_shared: u64,
    /// Its threads.
    product_threads: u64,
    /// Rows of a pass that sample, at most.
    most_samples: u64,
    /// Spans that are merged, at most.
    most_spans: u64,
    /// Rows of half a tile of attention.
    tile_tokens: u64,
    /// Dynamic shared memory of attention of tiles.
    tiles_shared: u64,
    /// The same of attention of spans.
    spans_shared: u64,
}

impl Needs {
    /// Dynamic shared memory of a block.
    fn shared(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Embed | Phase::Norms | Phase::HeadNorms | Phase::MergeSpans | Phase::Gather => 0,
            Phase::Choose | Phase::TellEmbeddings | Phase::JoinOut | Phase::JoinDown => 0,
            Phase::NormsOfJoinedOut | Phase::NormsOfJoinedDown => 0,
            meet if meet.meets() => 0,
            Phase::AttendTiles | Phase::AttendCutTiles => self.tiles_shared,
            Phase::AttendSpans => self.spans_shared,
            _ => self.product_shared,
        }
    }
}

/// The second parameter of the kernels: what a pass is given beside its [`Launch`]. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Pass {
    /// [`Layout::tiles`]; filled in by [`Matrix::launch`].
    pub tiles: u64,
    /// [`super::items::Items`], this and the three after it.
    pub attend_tiles: u64,
    pub attend_spans: u64,
    pub merges: u64,
    pub samples: u64,
    /// u32, of a pass that chooses its tokens: 0, or how many steps the chain has. 0: the pass writes logits.
    pub stopped: u64,
    /// Of a pass that chooses: its rows, which become those of the next step; 0: there is none.
    pub next: u64,
    pub tile_count: u32,
    pub span_count: u32,
    pub merge_count: u32,
    pub sample_count: u32,
    /// Of the chain.
    pub step: u32,
    /// Whether there are tiles that are cut by spans.
    pub cut: u32,
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct Matrix {
    /// Passes that they compute.
    pub width: Width,
    /// What they are given room for.
    pub bounds: Bounds,
    /// Rows of a tile of attention, at most, and how many tiles the blocks of a KV head compute at once.
    pub tiles_of: (usize, usize),
    /// What the compiler said that they take: the most registers of a kernel, and what all spill.
    pub resources: Option<Resources>,
    /// Whether the binary came from the cache.
    pub cached: bool,
    needs: Needs,
    /// Of each phase.
    functions: Vec<Function>,
    tiles: DeviceBuffer,
    /// Blocks of a launch, all at once on the GPU: twos are clusters, and fours wait for each other.
    blocks: u32,
    steps: Steps,
    // The functions are its.
    _module: Module,
}

impl Matrix {
    /// Compiles (or finds) the kernels for a model of which `max_slots` sequences are computed, with more `#define`s
    /// than their own, and loads them. Launches have up to `blocks` blocks.
    ///
    /// # Errors
    /// They do not compile, do not fit the GPU, or a row may see more than they have room for: `pages` pages.
    pub fn load(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        cache: &Cache,
        layout: &Layout,
        variant: Variant,
        (max_slots, pages, blocks): (usize, usize, usize),
        defines: &[(&'static str, u64)],
    ) -> Result<Self, CudaError> {
        let does_not_fit = |problem: String| {
            Err(CudaError::Kernel { kernel: format!("{} of {} columns", variant.name(), variant.columns()), problem })
        };
        let mut program = variant.program(layout);
        program.defines.extend(defines);
        let (binary, cached) = compiler.build(&program, cache)?;
        let module = Module::load(gpu, &binary.cubin)?;
        let needs: Needs = module.needs(variant.name())?;
        let mut functions = Vec::new();
        for phase in Phase::ALL {
            let (shared, has) = (needs.shared(phase), gpu.facts.shared_bytes as u64);
            if shared > has {
                let name = phase.name();
                return does_not_fit(format!("{name} needs {shared} bytes of shared memory, a block has {has}"));
            }
            functions.push(Function::load(&module, phase.name(), shared as u32)?);
        }
        let threads = functions[Phase::GateUp as usize].threads();
        assert_eq!(u64::from(threads), needs.product_threads, "a product's launch bounds are its threads");
        let spans = Bounds::most_spans(pages);
        if spans as u64 > needs.most_spans {
            let most = needs.most_spans;
            return does_not_fit(format!("a row may see {spans} spans, more than {most}: lower --max-context"));
        }
        let c = &layout.plan().config;
        let blocks = (blocks & !3).max(4) as u32;
        let bounds = Bounds {
            samples: (needs.most_samples as usize).min(max_slots),
            spans: needs.most_spans as usize,
            window: c.sliding_window,
        };
        let resources: Option<Vec<_>> =
            Phase::ALL.into_iter().map(|phase| Resources::of(phase.name(), &binary.log)).collect();
        Ok(Self {
            width: Width { bounds: Some(bounds), ..variant.width },
            bounds,
            tiles_of: (2 * needs.tile_tokens as usize, blocks as usize / layout.rank().kv_heads.len()),
            resources: resources.map(|all| Resources {
                registers: all.iter().map(|of| of.registers).max().unwrap_or(0),
                spilled: all.iter().map(|of| of.spilled).sum(),
                stack: all.iter().map(|of| of.stack).max().unwrap_or(0),
            }),
            cached,
            needs,
            functions,
            tiles: DeviceBuffer::of(gpu, &layout.tiles())?,
            blocks,
            steps: Steps::of(layout, blocks),
            _module: module,
        })
    }

    /// Bytes of [`Launch::words`], which of several ranks are the rank's inbox.
    pub fn memory_bytes(&self) -> u64 {
        self.needs.memory_bytes
    }

    /// Puts a pass into the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// What `launch` and `pass` point to is as their fields say, and stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, launch: Launch, pass: Pass, stream: &Stream) -> Result<(), CudaError> {
        let pass = Pass { tiles: self.tiles.address(), ..pass };
        for (place, (phase, layer)) in self.steps.phases(launch.row_count, &pass).enumerate() {
            let blocks = if phase.meets() { 1 } else { self.blocks };
            // Whatever is in front of a pass has to be over.
            let begin = if place > 0 { Begin::Overlapping } else { Begin::Behind };
            let parameters = [bytes_of(&launch), bytes_of(&pass), bytes_of(&layer)];
            // SAFETY: the kernels take a `Launch`, a `Pass` and a layer; the caller vouches for what they point to.
            unsafe { self.functions[phase as usize].launch(stream, blocks, begin, parameters)? };
        }
        Ok(())
    }
}

/// What decides which launches a pass has, beside its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Steps {
    layers: u32,
    qk_norm: bool,
    /// Blocks of a launch.
    blocks: u32,
    /// q, k and v, o, and down, if K has the leaves to be cut.
    cuts: [Option<Cuttable>; 3],
    /// Whether there are other ranks.
    group: bool,
}

impl Steps {
    fn of(layout: &Layout, blocks: u32) -> Self {
        let c = &layout.plan().config;
        let cuts = [Product::QueryKeyValue, Product::AttentionOut, Product::Down].map(|product| {
            let panel = layout.panel(product);
            let steps = (panel.leaves * panel.steps()) as u32;
            let cuttable = Cuttable { groups: (panel.tiles as u32).div_ceil(TILE / 16), steps };
            // Ranks have a part of the leaves of o and of down.
            (panel.leaves >= QUAD_LEAVES && panel.leaves == panel.k.count).then_some(cuttable)
        });
        Self { layers: c.num_layers as u32, qk_norm: c.qk_norm, blocks, cuts, group: layout.ranks() > 1 }
    }

    /// The launches of a pass of so many rows: phase and layer. What it has no items for is left out.
    fn phases(&self, rows: u32, pass: &Pass) -> impl Iterator<Item = (Phase, u32)> + use<> {
        let Self { layers, qk_norm, blocks, cuts, group } = *self;
        let (tiles, cut, spans) = (pass.tile_count > 0, pass.cut != 0, pass.span_count > 0);
        let (merges, samples, chooses) = (pass.merge_count > 0, pass.sample_count > 0, pass.stopped != 0);
        let [qkv, out, down] = cuts.map(|product| product.map_or(Cut::Pair, |product| Cut::of(rows, product, blocks)));
        let [after_out, after_down] = match group {
            true => [Phase::NormsOfJoinedOut, Phase::NormsOfJoinedDown],
            false => [Phase::Norms; 2],
        };
        let layer = [
            (after_down, true),
            (Phase::QueryKeyValue.cut(qkv), true),
            (Phase::HeadNorms, qk_norm),
            (Phase::AttendTiles, tiles && !cut),
            (Phase::AttendCutTiles, tiles && cut),
            (Phase::AttendSpans, spans),
            (Phase::MergeSpans, merges),
            (Phase::AttentionOut.cut(out), true),
            (Phase::JoinOut, group),
            (after_out, true),
            (Phase::GateUp, true),
            (Phase::Down.cut(down), true),
            (Phase::JoinDown, group),
        ];
        let embed = [
            (Phase::MeetBegun, group),
            (Phase::TellEmbeddings, group),
            (Phase::MeetEmbedded, group),
            (Phase::Embed, true),
        ];
        let head = [
            (after_down, samples),
            (Phase::Gather, samples),
            (Phase::Head, samples && !chooses),
            (Phase::HeadChoose, samples && chooses),
            (Phase::MeetLogits, samples && group),
            (Phase::Choose, samples && chooses),
        ];
        let of_layer = move |of| {
            layer.map(|(phase, runs)| (if of == 0 && phase == after_down { Phase::Norms } else { phase }, runs, of))
        };
        let of_layers = (0..layers).flat_map(of_layer);
        let all = embed.into_iter().map(|(phase, runs)| (phase, runs, 0)).chain(of_layers);
        let all = all.chain(head.map(|(phase, runs)| (phase, runs, layers)));
        all.filter(|(_, runs, _)| *runs).map(|(phase, _, layer)| (phase, layer))
    }
}

/// Names of the kernels.
#[cfg(test)]
pub fn names() -> [&'static str; Phase::ALL.len()] {
    Phase::ALL.map(Phase::name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameter_is_as_long_as_the_kernels() {
        assert_eq!(size_of::<Pass>(), 7 * 8 + 6 * 4);
        for (place, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, place);
        }
    }

    // Llama 3.1 8B's.
    const QKV: Cuttable = Cuttable { groups: 48, steps: 256 };
    const OUT: Cuttable = Cuttable { groups: 32, steps: 256 };
    const DOWN: Cuttable = Cuttable { groups: 32, steps: 896 };

    #[test]
    fn a_pass_launches_what_it_has_items_for() {
        let steps = |qk_norm, cuts| Steps { layers: 2, qk_norm, blocks: 132, cuts, group: false };
        let of_rows = |rows, pass: &Pass, steps: Steps| -> Vec<_> {
            steps.phases(rows, pass).map(|(phase, layer)| (&phase.name()["matrix_".len()..], layer)).collect()
        };
        let names = |pass: &Pass, qk_norm| of_rows(513, pass, steps(qk_norm, [Some(OUT); 3]));
        let prompt = Pass { tile_count: 3, ..Pass::default() };
        let of = |layer| ["norms", "qkv", "attend_tiles", "out", "norms", "gate_up", "down"].map(|name| (name, layer));
        assert_eq!(names(&prompt, false), [&[("embed", 0)], &of(0)[..], &of(1)].concat());
        let all = Pass { tile_count: 1, span_count: 1, merge_count: 1, sample_count: 1, ..Pass::default() };
        let all = names(&all, true);
        let layer = ["norms", "qkv", "head_norms", "attend_tiles", "attend_spans", "merge_spans", "out", "norms"];
        assert_eq!(all[1..9], layer.map(|name| (name, 0)));
        assert_eq!(all[21..], [("norms", 2), ("gather", 2), ("head", 2)]);
        let chooses = Pass { span_count: 1, sample_count: 1, stopped: 1, ..Pass::default() };
        let end = ["norms", "gather", "head_choose", "choose"].map(|name| (name, 2));
        assert_eq!(names(&chooses, false)[15..], end);
        assert_eq!(names(&Pass { sample_count: 0, ..chooses }, false).len(), 15);
        let cut = names(&Pass { cut: 1, merge_count: 9, ..prompt }, false);
        assert_eq!(cut[3..6], ["attend_cut_tiles", "merge_spans", "out"].map(|name| (name, 0)));
        let few = of_rows(128, &prompt, steps(false, [Some(OUT), None, Some(DOWN)]));
        let quads = ["norms", "qkv_quads", "attend_tiles", "out", "norms", "gate_up", "down_quads"];
        assert_eq!(few[1..8], quads.map(|name| (name, 0)));
        let more = of_rows(256, &prompt, steps(false, [Some(QKV), Some(OUT), None]));
        let halves = ["norms", "qkv", "attend_tiles", "out_halves", "norms", "gate_up", "down"];
        assert_eq!(more[1..8], halves.map(|name| (name, 0)));
    }

    #[test]
    fn k_is_cut_where_blocks_would_idle() {
        let cuts = |product| [1, 128, 129, 257, 385, 512, 513].map(|rows| Cut::of(rows, product, 132));
        use Cut::{Halves, Pair, Quads};
        // 32, 48 and 64 units by 66 pairs or 33 fours: 1, 1, 1 rounds or 1, 2, 2 of half as long.
        assert_eq!(cuts(OUT), [Quads, Quads, Halves, Pair, Pair, Pair, Pair]);
        assert_eq!(cuts(DOWN), [Quads, Quads, Halves, Halves, Halves, Halves, Pair]);
        // 48, 72 and 96 units: 1, 2, 2 rounds or 2, 3, 3.
        assert_eq!(cuts(QKV), [Quads, Quads, Pair, Halves, Halves, Halves, Pair]);
    }

    #[test]
    fn ranks_meet_around_what_they_write_to_each_other() {
        let pass = Pass { span_count: 1, sample_count: 1, ..Pass::default() };
        let steps = Steps { layers: 1, qk_norm: false, blocks: 132, cuts: [None; 3], group: true };
        let names: Vec<_> = steps.phases(8, &pass).map(|(phase, _)| &phase.name()["matrix_".len()..]).collect();
        let embed = ["meet_begun", "tell_embeddings", "meet_embedded", "embed", "norms", "qkv", "attend_spans"];
        let layer = ["out", "join_out", "norms_of_joined_out", "gate_up", "down", "join_down", "norms_of_joined_down"];
        assert_eq!(names, [&embed[..], &layer, &["gather", "head", "meet_logits"]].concat());
        let chooses = steps.phases(8, &Pass { stopped: 1, ..pass }).map(|(phase, _)| phase);
        assert!(chooses.skip(names.len() - 2).eq([Phase::HeadChoose, Phase::MeetLogits, Phase::Choose]));
        assert!(steps.phases(8, &pass).all(|(phase, _)| phase.meets() == phase.name().starts_with("matrix_meet")));
    }
}
