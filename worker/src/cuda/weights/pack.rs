//! Fills units of the stream with weights: what is read is row-major, what is written is fragments.

use std::ops::Range;

use half::bf16;

use super::layout::{Layout, RowRun};
use super::panel::{LANES, Panel};
use crate::model::format::{MIDDLE, bf16_to_e4m3};
use crate::model::source::Source;
use crate::model::{Tensor, WeightFormat};
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{K_STEP, Product, ROW_TILE};

/// Words (two bf16 each) of a row of a fragment: 16 columns.
const STEP_WORDS: usize = 8;

/// Consecutive bytes of the GPU's weights that one thread writes at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Job {
    /// Whole units of a product, as a range of tiles.
    Tiles {
        /// The layer; 0 for the LM head.
        layer: usize,
        /// The product.
        product: Product,
        /// Its tiles.
        tiles: Range<usize>,
    },
    /// Rows of the embedding, which are copied as they are.
    Embedding {
        /// Token ids.
        rows: Range<usize>,
    },
}

/// A layout and the scratch of one thread that packs.
pub struct Packer<'a> {
    layout: &'a Layout,
    source: &'a dyn Source,
    values: Vec<bf16>,
    /// `[16 rows][columns of a padded leaf]` bf16, two to a word.
    leaf: Vec<u32>,
}

impl Job {
    /// Everything to be packed, in stream order, in jobs of up to `most` bytes (or one unit, or one row); the embedding
    /// comes last.
    pub fn all(layout: &Layout, most: usize) -> Vec<Self> {
        let config = &layout.plan().config;
        let mut jobs = Vec::new();
        let products = (0..config.num_layers).flat_map(|layer| LAYER_PRODUCTS.map(|product| (layer, product)));
        for (layer, product) in products.chain([(0, Product::LmHead)]) {
            let panel = layout.panel(product);
            let mut open: Option<Range<usize>> = None;
            for unit in panel.units(layout.blocks()) {
                match &mut open {
                    Some(tiles) if (unit.end - tiles.start) * panel.tile_bytes() <= most => tiles.end = unit.end,
                    _ => jobs.extend(open.replace(unit).map(|tiles| Self::Tiles { layer, product, tiles })),
                }
            }
            jobs.extend(open.map(|tiles| Self::Tiles { layer, product, tiles }));
        }
        let (held, rows) = (layout.embedding_rows(), (most / (config.hidden_size * 2)).max(1));
        let starts = held.clone().step_by(rows);
        jobs.extend(starts.map(|start| Self::Embedding { rows: start..(start + rows).min(held.end) }));
        jobs
    }

    /// Where it goes: the first byte in the stream, or in the embedding.
    pub fn start(&self, layout: &Layout) -> usize {
        match self {
            Self::Tiles { layer, product, tiles } => {
                layout.start(*layer, *product) + tiles.start * layout.panel(*product).tile_bytes()
            }
            Self::Embedding { rows } => {
                (rows.start - layout.embedding_rows().start) * layout.plan().config.hidden_size * 2
            }
        }
    }

    /// Bytes written.
    pub fn bytes(&self, layout: &Layout) -> usize {
        match self {
            Self::Tiles { product, tiles, .. } => tiles.len() * layout.panel(*product).tile_bytes(),
            Self::Embedding { rows } => rows.len() * layout.plan().config.hidden_size * 2,
        }
    }
}

impl<'a> Packer<'a> {
    /// A packer without scratch yet.
    pub fn new(layout: &'a Layout, source: &'a dyn Source) -> Self {
        Self { layout, source, values: Vec::new(), leaf: Vec::new() }
    }

    /// Does a job: fills `out`, of [`Job::bytes`] bytes. What it held before does not matter.
    pub fn run(&mut self, job: &Job, out: &mut [u32]) {
        assert_eq!(out.len() * 4, job.bytes(self.layout), "room for {job:?}");
        match job {
            Job::Tiles { layer, product, tiles } => {
                let panel = self.layout.panel(*product);
                for unit in panel.units(self.layout.blocks()) {
                    if !tiles.contains(&unit.start) {
                        continue;
                    }
                    let bytes = |tile: usize| (tile - tiles.start) * panel.tile_bytes() / 4;
                    let part = &mut out[bytes(unit.start)..bytes(unit.end)];
                    for tile in unit.clone() {
                        self.tile(panel, *layer, *product, tile, (tile - unit.start, unit.len()), part);
                    }
                }
            }
            Job::Embedding { rows } => {
                let hidden = self.layout.plan().config.hidden_size;
                self.source.read(Tensor::Embedding, rows.clone(), 0..hidden, bytemuck::cast_slice_mut(out));
            }
        }
    }

    /// Scales and zero points of a tile's rows at a column.
    fn run_scales(&self, rows: &[RowRun], column: usize) -> RunScales {
        let mut run = RunScales { scales: [1.0; ROW_TILE], zeros: [MIDDLE; ROW_TILE] };
        for of in rows {
            let within = of.at..of.at + of.rows.len();
            self.source.scales(of.tensor, of.rows.clone(), column, &mut run.scales[within.clone()]);
            self.source.zeros(of.tensor, of.rows.clone(), column, &mut run.zeros[within]);
        }
        run
    }

    /// Packs a tile: the `place`-th of a unit of `width` tiles.
    fn tile(
        &mut self,
        panel: Panel,
        layer: usize,
        product: Product,
        tile: usize,
        (place, width): (usize, usize),
        unit: &mut [u32],
    ) {
        let rows = self.layout.rows(layer, product, tile);
        let (k, row_words) = (panel.k, panel.k.padded / 2);
        self.leaf.clear();
        self.leaf.resize(ROW_TILE * row_words, 0);
        for leaf in 0..panel.leaves {
            for run in &rows {
                self.values.resize(run.rows.len() * k.len, bf16::ZERO);
                let columns = k.columns(panel.first_leaf + leaf);
                self.source.read(run.tensor, run.rows.clone(), columns, &mut self.values);
                let padded: &mut [bf16] = bytemuck::cast_slice_mut(&mut self.leaf[run.at * row_words..]);
                for (row, out) in self.values.chunks_exact(k.len).zip(padded.chunks_exact_mut(k.padded)) {
                    out[..k.len].copy_from_slice(row);
                }
            }
            let (runs, words) = (panel.steps() / panel.run_steps(), panel.run_bytes() / 4);
            let out = &mut unit[leaf * runs * width * words..][..runs * width * words];
            for run in 0..runs {
                let (header, fragments) =
                    out[(run * width + place) * words..][..words].split_at_mut(panel.run_header() / 4);
                let first = run * panel.run_steps();
                let scales = panel.format.group().map(|_| {
                    let column = k.columns(panel.first_leaf + leaf).start + first * K_STEP;
                    let scales = self.run_scales(&rows, column);
                    scales.write(panel.format, header);
                    scales
                });
                let zeros = scales.map_or([MIDDLE; ROW_TILE], |scales| scales.zeros);
                let (piece_steps, step_bytes) = (panel.piece_steps(), panel.fragment_bytes());
                for step in 0..panel.run_steps() {
                    let rows = Rows { words: &self.leaf, row_words, first: (first + step) * STEP_WORDS };
                    let piece = &mut fragments[step / piece_steps * (piece_steps * step_bytes / 4)..];
                    let lanes = lanes_of(&mut piece[..piece_steps * step_bytes / 4], piece_steps, step % piece_steps);
                    match panel.format {
                        WeightFormat::Bf16 => write_bf16(&rows, lanes),
                        WeightFormat::E4m3 | WeightFormat::E4m3Groups { .. } => write_e4m3(&rows, lanes),
                        WeightFormat::Int4 { .. } => write_int4(&rows, &zeros, lanes),
                    }
                }
            }
        }
    }
}

/// Scales and zero points of a tile's rows in a run.
struct RunScales {
    scales: [f32; ROW_TILE],
    zeros: [u8; ROW_TILE],
}

impl RunScales {
    /// A run's header: of rows g and g + 8 a word of two bf16 scales, raised as kernels/ops/weights.cuh needs them,
    /// and behind those one of two zero points. Those of the second row are for weights that lie four bits higher.
    fn write(&self, format: WeightFormat, out: &mut [u32]) {
        let [upper, lower] = if let WeightFormat::Int4 { .. } = format { [93, 89] } else { [80, 80] };
        let raised = |row: usize, by: i32| u32::from(bf16::from_f32(self.scales[row] * 2f32.powi(by)).to_bits());
        let (scales, zeros) = out.split_at_mut(ROW_TILE / 2);
        for (g, word) in scales.iter_mut().enumerate() {
            *word = raised(g, upper) | raised(g + ROW_TILE / 2, lower) << 16;
        }
        for (g, word) in zeros.iter_mut().enumerate() {
            *word = u32::from(self.zeros[g]) | u32::from(self.zeros[g + ROW_TILE / 2]) << 20;
        }
    }
}

/// 16 rows by 16 columns of bf16, two to a word: a row has `row_words` words, the columns begin at `first` of them.
struct Rows<'a> {
    words: &'a [u32],
    row_words: usize,
    first: usize,
}

impl Rows<'_> {
    fn row(&self, row: usize) -> &[u32] {
        &self.words[row * self.row_words + self.first..][..STEP_WORDS]
    }
}

/// What each lane has of step `within` of a piece of so many steps, which a lane has side by side.
fn lanes_of(piece: &mut [u32], steps: usize, within: usize) -> impl Iterator<Item = &mut [u32]> {
    let lane = piece.len() / LANES;
    piece.chunks_exact_mut(lane).map(move |of| &mut of[within * lane / steps..][..lane / steps])
}

/// One fragment: lane `4 g + t` holds of rows g and g + 8 the columns 2t, 2t + 1, then 2t + 8, 2t + 9.
fn write_bf16<'a>(rows: &Rows<'_>, lanes: impl Iterator<Item = &'a mut [u32]>) {
    for (lane, out) in lanes.enumerate() {
        let (upper, lower, t) = (rows.row(lane / 4), rows.row(lane / 4 + ROW_TILE / 2), lane % 4);
        out.copy_from_slice(&[upper[t], lower[t], upper[t + 4], lower[t + 4]]);
    }
}

/// The same in E4M3: a word has four columns' worth of a lane in bf16, as kernels/ops/weights.cuh takes them apart.
fn write_e4m3<'a>(rows: &Rows<'_>, lanes: impl Iterator<Item = &'a mut [u32]>) {
    // Of a row g and of row g + 8 at one column: a half word.
    let of = |word: u32, half: u32| u32::from(bf16_to_e4m3(bf16::from_bits((word >> (16 * half)) as u16)));
    let both = |a: u32, b: u32| (a & 0x80) << 8 | (a & 7) << 12 | (a & 0x78) << 4 | (b & 0x80) << 4 | (b & 0x7f);
    let pair = |upper: u32, lower: u32| both(of(upper, 0), of(lower, 0)) | both(of(upper, 1), of(lower, 1)) << 16;
    for (lane, out) in lanes.enumerate() {
        let (upper, lower, t) = (rows.row(lane / 4), rows.row(lane / 4 + ROW_TILE / 2), lane % 4);
        out.copy_from_slice(&[pair(upper[t], lower[t]), pair(upper[t + 4], lower[t + 4])]);
    }
}

/// The same in 4 bits: a lane has a word. Its half words hold the two weights of a pair, four bits each of rows g, g +
/// 8, and of both eight columns on.
fn write_int4<'a>(rows: &Rows<'_>, zeros: &[u8; ROW_TILE], lanes: impl Iterator<Item = &'a mut [u32]>) {
    let four = |pair: u32, row: usize| {
        let of = |half: u32| bf16::from_bits((pair >> (16 * half)) as u16).to_f32() as i32 + i32::from(zeros[row]);
        (of(0) as u32 & 15) | (of(1) as u32 & 15) << 16
    };
    for (lane, out) in lanes.enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        let (upper, lower) = (rows.row(g), rows.row(g + ROW_TILE / 2));
        let of = |row: &[u32], place: usize, at: usize| four(row[t + 4 * place], at);
        let pairs = [of(upper, 0, g), of(lower, 0, g + 8), of(upper, 1, g), of(lower, 1, g + 8)];
        out[0] = (0..).zip(pairs).fold(0, |word, (place, pair)| word | pair << (4 * place));
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::super::layout::tests::{config, group, layout};
    use super::*;
    use crate::model::conversion::Expanded;
    use crate::model::conversion::expanded::tests::Grouped;
    use crate::model::format::from_e4m3;
    use crate::model::source::RandomSource;
    use crate::model::{LayerTensor, ModelConfig};

    /// E4M3 fragments are taken apart as kernels/ops/weights.cuh does it: 2^-120 of what fragments of bf16 hold.
    #[test]
    fn kernels_find_every_e4m3_where_its_bf16_was() {
        let values: Vec<bf16> = (0..512).map(|i| from_e4m3((i * 7 % 254) as u8 & 0xfe)).collect();
        for values in values.as_chunks::<256>().0 {
            let rows = Rows { words: bytemuck::cast_slice(values), row_words: STEP_WORDS, first: 0 };
            let (mut plain, mut packed) = ([0u32; 128], [0u32; 64]);
            write_bf16(&rows, lanes_of(&mut plain, 1, 0));
            write_e4m3(&rows, lanes_of(&mut packed, 1, 0));
            let plain: &[bf16] = bytemuck::cast_slice(&plain);
            assert!(from_fragment_of_e4m3(&packed).into_iter().eq(plain.iter().map(small_e4m3)));
        }
    }

    /// What the kernel makes of a word of E4M3: bf16 of the first row and of the second, two of each.
    fn from_word_of_e4m3(word: u32) -> [u32; 2] {
        [(word & 0x8780_8780) | (word >> 8 & 0x0070_0070), word << 4 & 0x87f0_87f0]
    }

    /// What it makes of a fragment, where a fragment of bf16 has its weights.
    fn from_fragment_of_e4m3(fragment: &[u32]) -> Vec<bf16> {
        let pairs = fragment.iter().flat_map(|word| from_word_of_e4m3(*word));
        pairs.flat_map(|pair| [pair, pair >> 16].map(|bits| bf16::from_bits(bits as u16))).collect()
    }

    /// 2^-120 of a weight rounded to E4M3.
    fn small_e4m3(weight: &bf16) -> bf16 {
        bf16::from_f64(from_e4m3(bf16_to_e4m3(*weight)).to_f64() * 2f64.powi(-120))
    }

    /// Groups, packed and taken apart as kernels/ops/weights.cuh does it, are 2^-40 of what bf16 weights with their
    /// scales hold: every run, whose steps are four, two or one.
    #[test]
    fn kernels_find_every_weight_of_a_group_where_its_bf16_was() {
        let int4 = |columns, zeros| WeightFormat::Int4 { columns, zeros };
        let formats = [int4(128, false), int4(32, true), int4(16, false), WeightFormat::E4m3Groups { columns: 64 }];
        for format in formats {
            let dims = ModelConfig { hidden_size: 1024, ..config(4, 2, 512, 768) };
            let grouped = ModelConfig { layer_weights: format, ..dims.clone() };
            let source = Grouped(RandomSource { config: grouped.clone(), seed: 5 });
            let plain = (&layout(&dims, 3), &Expanded(&source) as &dyn Source);
            each_fragment((&layout(&grouped, 3), &source), plain, |header, fragment, expected| {
                for (lane, expected) in expected.chunks(8).enumerate() {
                    let small = |bits: &u16| bf16::from_bits(*bits).to_f64() * 2f64.powi(-40);
                    let expected: Vec<_> = expected.iter().map(small).collect();
                    assert_eq!(operand(format, header, fragment, lane), expected, "{format}");
                }
            });
        }
    }

    /// E4M3 with a scale a row, in runs of two steps, and of one where leaves are no whole eights of them.
    #[test]
    fn kernels_find_every_e4m3_of_a_run_where_its_bf16_was() {
        let dims = ModelConfig { hidden_size: 2048, ..config(4, 2, 768, 768) };
        let e4m3 = ModelConfig { layer_weights: WeightFormat::E4m3, ..dims.clone() };
        let of = layout(&e4m3, 3);
        assert_eq!([Product::GateUp, Product::Down].map(|product| of.panel(product).run_steps()), [2, 1]);
        let source = RandomSource { config: dims.clone(), seed: 5 };
        each_fragment((&of, &source), (&layout(&dims, 3), &source), |_, fragment, expected| {
            let expected = bytemuck::cast_slice::<_, bf16>(expected).iter().map(small_e4m3);
            assert!(from_fragment_of_e4m3(fragment).into_iter().eq(expected));
        });
    }

    /// Of a layer, each step of each run as kernels read it, with the run's header, and the same in bf16.
    fn each_fragment(
        (of, source): (&Layout, &dyn Source),
        (plain, of_plain): (&Layout, &dyn Source),
        mut check: impl FnMut(&[u32], &[u32], &[u16]),
    ) {
        let (bf16s, _) = packed(plain, of_plain, 1 << 20);
        let (stream, _) = packed(of, source, 1 << 20);
        for product in [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down] {
            let panel = of.panel(product);
            let bf16s = &bf16s[plain.start(1, product) / 2..];
            let stream: &[u32] = bytemuck::cast_slice(&stream[of.start(1, product) / 2..][..panel.bytes() / 2]);
            let (runs, mut at) = (panel.leaves * panel.steps() / panel.run_steps(), 0);
            for unit in panel.units(3) {
                let first = unit.start * panel.leaves * panel.steps();
                for (run, place) in (0..runs).flat_map(|run| (0..unit.len()).map(move |place| (run, place))) {
                    let words = &stream[at..][..panel.run_bytes() / 4];
                    at += words.len();
                    let (header, fragments) = words.split_at(panel.run_header() / 4);
                    for i in 0..panel.run_steps() {
                        let step = run * panel.run_steps() + i;
                        let expected = &bf16s[(first + step * unit.len() + place) * 256..][..256];
                        check(header, &step_of(&panel, fragments, i), expected);
                    }
                }
            }
            assert_eq!(at, stream.len());
        }
    }

    /// A step's fragment of a run, lane by lane, as the kernel reads it: of each piece a lane's bytes side by side.
    fn step_of(panel: &Panel, run: &[u32], step: usize) -> Vec<u32> {
        let (lane, steps) = (panel.fragment_bytes() / 4 / LANES, panel.piece_steps());
        let piece = &run[step / steps * (LANES * steps * lane)..][..LANES * steps * lane];
        piece
            .chunks(steps * lane)
            .flat_map(|of_lane| of_lane.chunks(lane).nth(step % steps).unwrap())
            .copied()
            .collect()
    }

    /// Operand A of a lane, as the kernel finds it.
    fn operand(format: WeightFormat, header: &[u32], fragment: &[u32], lane: usize) -> Vec<f64> {
        let bf16_of = |bits: u32| bf16::from_bits(bits as u16).to_f64();
        let g = lane / 4;
        let scales = [bf16_of(header[g]), bf16_of(header[g] >> 16)];
        let rounded = |value: f64| bf16::from_f64(value).to_f64();
        let pairs: Vec<u32> = match format {
            WeightFormat::Int4 { .. } => {
                let (word, next) = (fragment[lane], fragment[lane] >> 8);
                vec![word & 0x000f_000f, word & 0x00f0_00f0, next & 0x000f_000f, next & 0x00f0_00f0]
            }
            _ => fragment[2 * lane..][..2].iter().flat_map(|word| from_word_of_e4m3(*word)).collect(),
        };
        let zero = |row: usize| match format {
            WeightFormat::Int4 { zeros: true, .. } => bf16_of(header[8 + g] >> (16 * row)),
            WeightFormat::Int4 { .. } => 2f64.powi([-130, -126][row]),
            _ => 0.0,
        };
        let of = |(place, pair): (usize, &u32)| {
            let row = place % 2;
            [*pair, pair >> 16].map(|bits| rounded((bf16_of(bits & 0xffff) - zero(row)) * scales[row]))
        };
        pairs.iter().enumerate().flat_map(of).collect()
    }

    fn packed(layout: &Layout, source: &dyn Source, most: usize) -> (Vec<u16>, Vec<u16>) {
        // Whatever is not written shows.
        let mut stream = vec![0x7fc1u16; layout.bytes() / 2];
        let mut embedding = vec![0x7fc1u16; layout.embedding_bytes() / 2];
        let mut packer = Packer::new(layout, source);
        for job in Job::all(layout, most) {
            let mut out = vec![0xdead_beefu32; job.bytes(layout) / 4];
            packer.run(&job, &mut out);
            let to = if matches!(job, Job::Embedding { .. }) { &mut embedding } else { &mut stream };
            to[job.start(layout) / 2..][..out.len() * 2].copy_from_slice(bytemuck::cast_slice(&out));
        }
        (stream, embedding)
    }

    /// Where the fragment of a tile, of a leaf of the rank and a step of it lies, in elements: written down from the
    /// layout's definition, and slow.
    fn fragment(layout: &Layout, layer: usize, product: Product, tile: usize, [leaf, step]: [usize; 2]) -> usize {
        let c = &layout.plan().config;
        let (panel, blocks) = (layout.panel(product), layout.blocks());
        let steps = panel.k.padded / 16;
        let mut start = 0;
        let layers = if product == Product::LmHead { c.num_layers } else { layer };
        for l in 0..=layers {
            for p in [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down] {
                if l < layers || (product != Product::LmHead && precedes(p, product)) {
                    let other = layout.panel(p);
                    start += other.tiles * other.leaves * other.k.padded * 16;
                }
            }
        }
        let (tiles, others) = (panel.tiles, layout.panel(Product::GateUp).tiles);
        let evens_out = layout.plan().tensor_parallel > 1 && product == Product::QueryKeyValue;
        // Tiles of each block: of gate and up twos, if the fullest block has no more of them so; of qkv what gate and
        // up leave of an even share of both, or an even share that is larger first.
        let share = |all: usize, s: usize| (s + 1) * all / blocks - s * all / blocks;
        let shares = |own: &dyn Fn(usize) -> usize| (0..blocks).map(own).collect::<Vec<_>>();
        let (twos, ones) = (shares(&|s| 2 * share(others / 2, s)), shares(&|s| share(others, s)));
        let gate_up = if twos.iter().max() == ones.iter().max() { twos } else { ones };
        let most = *gate_up.iter().max().unwrap();
        let both = |own: &[usize]| own.iter().zip(&gate_up).map(|(own, other)| own + other).max();
        let apart = shares(&|s| ((s + 1) * tiles).div_ceil(blocks) - (s * tiles).div_ceil(blocks));
        let own = if product == Product::GateUp {
            gate_up
        } else if !evens_out {
            shares(&|s| share(tiles, s))
        } else if (tiles + others) / blocks < most {
            apart
        } else {
            let together = shares(&|s| share(tiles + others, s) - gate_up[s]);
            let fewer = apart.iter().max() < together.iter().max() && both(&apart) <= both(&together);
            if fewer { apart } else { together }
        };
        let before = |s: usize| own[..s].iter().sum::<usize>();
        let block = (0..blocks).find(|s| (before(*s)..before(s + 1)).contains(&tile)).unwrap();
        let (first, last) = (before(block), before(block + 1));
        let single = layout.plan().tensor_parallel > 1 && [Product::AttentionOut, Product::Down].contains(&product);
        let most = if single { 1 } else { 2 };
        let unit = first + (tile - first) / most * most;
        let width = (last - unit).min(most);
        start + unit * panel.leaves * steps * 256 + ((leaf * steps + step) * width + (tile - unit)) * 256
    }

    /// Where one weight lies, in elements.
    fn element(layout: &Layout, layer: usize, product: Product, row: usize, column: usize) -> usize {
        let k = layout.panel(product).k;
        let (leaf, within) = (column / k.len, column % k.len);
        let (g, upper) = (row % 16 % 8, row % 16 / 8);
        let (t, odd, high) = (within % 8 / 2, within % 2, within % 16 / 8);
        let fragment = fragment(layout, layer, product, row / 16, [leaf, within / 16]);
        fragment + (g * 4 + t) * 8 + (high * 2 + upper) * 2 + odd
    }

    fn precedes(p: Product, product: Product) -> bool {
        let turn = |q: Product| LAYER_PRODUCTS.iter().position(|other| *other == q);
        turn(p) < turn(product)
    }

    /// Where `index` lies in shard `shard` of equal ones of `len`; `None`: in another.
    fn within(index: usize, len: usize, shard: usize) -> Option<usize> {
        (index / len == shard).then_some(index % len)
    }

    /// The product, packed row and column of a weight in the rank's stream; `None` where other ranks hold it.
    fn place(layout: &Layout, tensor: Tensor, row: usize, column: usize) -> Option<(Product, usize, usize)> {
        let (c, rank, ranks) = (&layout.plan().config, layout.rank().rank, layout.plan().tensor_parallel);
        // Consecutive ranks hold the same KV head where there are more ranks than those.
        let (kv_heads, sharing) = (c.num_kv_heads.div_ceil(ranks), ranks.div_ceil(c.num_kv_heads));
        let (heads, columns) = (c.num_heads / ranks, c.intermediate_size / ranks);
        let group = heads / kv_heads;
        let dim = row % c.head_dim;
        let rotated = || (0..c.head_dim).find(|r| layout.packed_dim(*r) == dim);
        let kv_head = || within(row / c.head_dim, kv_heads, rank / sharing);
        let padded = || {
            let (k, row) = (layout.plan().intermediate, within(row, columns, rank)?);
            Some(row / k.len * k.padded + row % k.len)
        };
        let Tensor::Layer(_, tensor) = tensor else {
            let shard = if ranks == 1 { c.vocab_size } else { c.vocab_size.next_multiple_of(256) / ranks };
            return Some((Product::LmHead, within(row, shard, rank)?, column));
        };
        Some(match tensor {
            LayerTensor::Query => {
                let head = within(row / c.head_dim, heads, rank)?;
                (Product::QueryKeyValue, (head / group * (group + 2) + head % group) * c.head_dim + rotated()?, column)
            }
            LayerTensor::Key => {
                (Product::QueryKeyValue, (kv_head()? * (group + 2) + group) * c.head_dim + rotated()?, column)
            }
            LayerTensor::Value => {
                (Product::QueryKeyValue, (kv_head()? * (group + 2) + group + 1) * c.head_dim + dim, column)
            }
            LayerTensor::AttentionOut => (Product::AttentionOut, row, within(column, heads * c.head_dim, rank)?),
            // Two tiles have 16 rows of each; a row is in the tile that bit 2 says, and bits 3, 1 and 0 say where.
            LayerTensor::Gate | LayerTensor::Up => {
                let (row, up) = (padded()?, usize::from(tensor == LayerTensor::Up) * 8);
                (Product::GateUp, row / 16 * 32 + (row >> 2 & 1) * 16 + (row >> 3 & 1) * 4 + row % 4 + up, column)
            }
            LayerTensor::Down => (Product::Down, row, within(column, columns, rank)?),
            other => panic!("{other:?} is not packed"),
        })
    }

    /// What [`packed`] is to be, by the slow definition, and the rows of the embedding.
    fn expected(layout: &Layout, source: &dyn Source) -> (Vec<u16>, Vec<u16>) {
        use LayerTensor::{AttentionOut, Down, Gate, Key, Query, Up, Value};
        let dims = &layout.plan().config;
        let read = |tensor: Tensor, rows: Range<usize>| {
            let columns = tensor.shape(dims)[1];
            let mut values = vec![bf16::ZERO; rows.len() * columns];
            source.read(tensor, rows, 0..columns, &mut values);
            (columns, bytemuck::cast_vec::<bf16, u16>(values))
        };
        let mut stream = vec![0u16; layout.bytes() / 2];
        let of_layers = (0..2).flat_map(|layer| {
            [Query, Key, Value, AttentionOut, Gate, Up, Down].map(|tensor| (layer, Tensor::Layer(layer, tensor)))
        });
        for (layer, tensor) in of_layers.chain([(0, Tensor::LmHead)]) {
            let (columns, values) = read(tensor, 0..tensor.shape(dims)[0]);
            for (i, value) in values.into_iter().enumerate() {
                if let Some((product, row, column)) = place(layout, tensor, i / columns, i % columns) {
                    stream[element(layout, layer, product, row, column)] = value;
                }
            }
        }
        (stream, read(Tensor::Embedding, layout.embedding_rows()).1)
    }

    #[test]
    fn every_weight_is_where_the_layout_says_and_the_rest_is_zero() {
        // Leaves that need padding, an odd leaf, a vocabulary that is no multiple of 16, one block and more blocks than
        // tiles.
        for (dims, blocks, most, hash) in [
            (ModelConfig { hidden_size: 128, ..config(4, 2, 400, 1000) }, 7, 1 << 16, "746ec42f6ed742ac"),
            (ModelConfig { hidden_size: 48, tied_embeddings: true, ..config(2, 1, 388, 33) }, 3, 1, "63838bdd1d4b0e77"),
            (ModelConfig { hidden_size: 64, head_dim: 16, ..config(8, 8, 96, 64) }, 1, 1 << 30, "0a6c734c29b654a2"),
            (ModelConfig { hidden_size: 64, head_dim: 128, ..config(2, 1, 24, 17) }, 100, 5000, "c73cc12882493aee"),
        ] {
            let layout = layout(&dims, blocks);
            let source = RandomSource { config: dims.clone(), seed: 5 };
            let (stream, embedding) = packed(&layout, &source, most);
            assert!((stream.clone(), embedding.clone()) == expected(&layout, &source), "{dims:?} on {blocks} blocks");
            let digest = Sha256::new().chain_update(bytemuck::cast_slice::<u16, u8>(&stream));
            let digest = digest.chain_update(bytemuck::cast_slice::<u16, u8>(&embedding)).finalize();
            assert_eq!(digest[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>(), hash);
        }
    }

    /// KV heads for each rank and fewer, leaves that need padding, a vocabulary of a part of the last shard and of two
    /// of 16.
    fn dims_of_groups() -> [ModelConfig; 2] {
        [
            ModelConfig { hidden_size: 64, head_dim: 16, ..config(16, 4, 400, 1000) },
            ModelConfig { hidden_size: 48, head_dim: 32, tied_embeddings: true, ..config(32, 16, 96, 17) },
        ]
    }

    #[test]
    fn every_weight_is_in_the_stream_of_its_ranks_and_in_no_other() {
        for dims in dims_of_groups() {
            let source = RandomSource { config: dims.clone(), seed: 6 };
            for layout in [2, 4, 8, 16].into_iter().flat_map(|ranks| group(&dims, ranks, 3)) {
                assert!(
                    packed(&layout, &source, 5000) == expected(&layout, &source),
                    "{:?} of {dims:?}",
                    layout.rank()
                );
            }
        }
    }

    #[test]
    fn fragments_of_a_rank_are_those_of_a_model_on_one_gpu() {
        for dims in dims_of_groups() {
            let source = RandomSource { config: dims.clone(), seed: 7 };
            let whole = layout(&dims, 5);
            let (whole_stream, _) = packed(&whole, &source, 1 << 20);
            for layout in [2, 4, 8, 16].into_iter().flat_map(|ranks| group(&dims, ranks, 3)) {
                let (stream, _) = packed(&layout, &source, 1 << 20);
                for product in LAYER_PRODUCTS.into_iter().chain([Product::LmHead]) {
                    let (panel, whole_tiles) = (layout.panel(product), whole.panel(product).tiles);
                    for (tile, leaf) in
                        (0..panel.tiles).flat_map(|tile| (0..panel.leaves).map(move |leaf| (tile, leaf)))
                    {
                        let rows = layout.rows(1, product, tile);
                        let same = (0..whole_tiles).find(|tile| whole.rows(1, product, *tile) == rows);
                        for step in 0..panel.steps() {
                            let mine = &stream[fragment(&layout, 1, product, tile, [leaf, step])..][..256];
                            match same {
                                Some(tile) => {
                                    let at = fragment(&whole, 1, product, tile, [panel.first_leaf + leaf, step]);
                                    assert!(*mine == whole_stream[at..][..256], "{product:?} {rows:?}");
                                }
                                None => assert!(rows.is_empty() && mine.iter().all(|x| *x == 0)),
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_table_of_tiles_says_where_fragments_lie() {
        let dims = [
            ModelConfig { hidden_size: 128, ..config(4, 2, 400, 1000) },
            ModelConfig { hidden_size: 48, tied_embeddings: true, ..config(2, 1, 388, 33) },
            ModelConfig { hidden_size: 576, ..config(9, 3, 1536, 700) },
            ModelConfig { hidden_size: 896, ..config(14, 2, 4864, 1200) },
            ModelConfig { hidden_size: 3072, head_dim: 128, ..config(24, 8, 8192, 1000) },
        ];
        for (dims, blocks) in dims.iter().flat_map(|dims| [1, 3, 100, 119, 128, 132].map(|blocks| (dims, blocks))) {
            let layout = layout(dims, blocks);
            let mut table = layout.tiles().into_iter();
            for product in LAYER_PRODUCTS.into_iter().chain([Product::LmHead]) {
                let panel = layout.panel(product);
                let start = layout.start(1, product) / 512;
                for (tile, word) in (0..panel.tiles).zip(table.by_ref()) {
                    let at = |step: usize| start + (word >> 1) as usize + step * (1 + (word & 1) as usize);
                    for (leaf, step) in [(0, 0), (0, panel.steps() - 1), (panel.leaves - 1, panel.steps() / 2)] {
                        let expected = fragment(&layout, 1, product, tile, [leaf, step]) / 256;
                        assert_eq!(at(leaf * panel.steps() + step), expected, "{product:?} {tile} on {blocks} blocks");
                    }
                }
            }
            assert_eq!(table.next(), None);
        }
    }

    #[test]
    fn jobs_cover_the_stream_in_order() {
        let dims = config(4, 2, 400, 1000);
        let layout = layout(&dims, 7);
        let jobs = Job::all(&layout, 100_000);
        let mut end = 0;
        let (embedding, stream): (Vec<_>, Vec<_>) = jobs.iter().partition(|job| matches!(job, Job::Embedding { .. }));
        for job in stream {
            assert_eq!(job.start(&layout), end);
            end += job.bytes(&layout);
        }
        assert_eq!(end, layout.bytes());
        assert_eq!(embedding.iter().map(|job| job.bytes(&layout)).sum::<usize>(), 1000 * 256 * 2);
    }
}
