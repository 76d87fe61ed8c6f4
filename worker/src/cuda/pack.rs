//! Fills units of the stream with weights: what is read is row-major, what is written is fragments.

use std::ops::Range;

use half::bf16;

use super::layout::{FRAGMENT_BYTES, Layout, Panel};
use crate::model::Tensor;
use crate::model::source::Source;
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{Product, ROW_TILE};

/// Words (two bf16 each) of a fragment.
const FRAGMENT_WORDS: usize = FRAGMENT_BYTES / 4;
/// Words of a fragment's row: 16 columns.
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
    /// Everything to be packed, in stream order, in jobs of up to `most` bytes (or one unit, or one row); the embedding comes
    /// last.
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
        if !config.tied_embeddings {
            let rows = (most / (config.hidden_size * 2)).max(1);
            let starts = (0..config.vocab_size).step_by(rows);
            jobs.extend(starts.map(|start| Self::Embedding { rows: start..(start + rows).min(config.vocab_size) }));
        }
        jobs
    }

    /// Where it goes: the first byte in the stream, or in the embedding.
    pub fn start(&self, layout: &Layout) -> usize {
        match self {
            Self::Tiles { layer, product, tiles } => {
                layout.start(*layer, *product) + tiles.start * layout.panel(*product).tile_bytes()
            }
            Self::Embedding { rows } => rows.start * layout.plan().config.hidden_size * 2,
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
        for leaf in 0..k.count {
            for (first, run) in [0, ROW_TILE / 2].into_iter().zip(&rows.runs) {
                self.values.resize(run.len() * k.len, bf16::ZERO);
                if run.is_empty() {
                    continue;
                }
                self.source.read(rows.tensor, run.clone(), k.columns(leaf), &mut self.values);
                let padded: &mut [bf16] = bytemuck::cast_slice_mut(&mut self.leaf[first * row_words..]);
                for (row, out) in self.values.chunks_exact(k.len).zip(padded.chunks_exact_mut(k.padded)) {
                    out[..k.len].copy_from_slice(row);
                }
            }
            let steps = panel.steps();
            let out = &mut unit[leaf * steps * width * FRAGMENT_WORDS..][..steps * width * FRAGMENT_WORDS];
            for step in 0..steps {
                let fragment = &mut out[(step * width + place) * FRAGMENT_WORDS..][..FRAGMENT_WORDS];
                write_fragment(&self.leaf, row_words, step * STEP_WORDS, fragment);
            }
        }
    }
}

/// One fragment: lane `4 g + t` holds of rows g and g + 8 the columns 2t, 2t + 1, then 2t + 8, 2t + 9.
fn write_fragment(rows: &[u32], row_words: usize, first: usize, out: &mut [u32]) {
    for (g, lanes) in out.chunks_exact_mut(4 * 4).enumerate() {
        let upper = &rows[g * row_words + first..][..STEP_WORDS];
        let lower = &rows[(g + ROW_TILE / 2) * row_words + first..][..STEP_WORDS];
        for (t, lane) in lanes.chunks_exact_mut(4).enumerate() {
            lane.copy_from_slice(&[upper[t], lower[t], upper[t + 4], lower[t + 4]]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{config, layout};
    use super::*;
    use crate::model::source::RandomSource;
    use crate::model::{LayerTensor, ModelConfig};

    fn packed(layout: &Layout, source: &dyn Source, most: usize) -> (Vec<u16>, Vec<u16>) {
        let config = &layout.plan().config;
        // Whatever is not written shows.
        let mut stream = vec![0x7fc1u16; layout.bytes() / 2];
        let mut embedding = vec![0x7fc1u16; config.vocab_size * config.hidden_size];
        let mut packer = Packer::new(layout, source);
        for job in Job::all(layout, most) {
            let mut out = vec![0xdead_beefu32; job.bytes(layout) / 4];
            packer.run(&job, &mut out);
            let to = if matches!(job, Job::Embedding { .. }) { &mut embedding } else { &mut stream };
            to[job.start(layout) / 2..][..out.len() * 2].copy_from_slice(bytemuck::cast_slice(&out));
        }
        (stream, embedding)
    }

    /// Where one weight lies, in elements: written down from the layout's definition, and slow.
    fn element(layout: &Layout, layer: usize, product: Product, row: usize, column: usize) -> usize {
        let c = &layout.plan().config;
        let (panel, blocks) = (layout.panel(product), layout.blocks());
        let steps = panel.k.padded / 16;
        let mut start = 0;
        let layers = if product == Product::LmHead { c.num_layers } else { layer };
        for l in 0..=layers {
            for p in [Product::QueryKeyValue, Product::AttentionOut, Product::GateUp, Product::Down] {
                if l < layers || (product != Product::LmHead && precedes(p, product)) {
                    let other = layout.panel(p);
                    start += other.tiles * other.k.count * other.k.padded * 16;
                }
            }
        }
        let tile = row / 16;
        let groups = panel.tiles / panel.group;
        let group = tile / panel.group;
        let block = (0..blocks).find(|s| (s * groups / blocks..(s + 1) * groups / blocks).contains(&group)).unwrap();
        let (first, last) = (block * groups / blocks * panel.group, (block + 1) * groups / blocks * panel.group);
        let unit = first + (tile - first) / 2 * 2;
        let width = (last - unit).min(2);
        let (leaf, within) = (column / panel.k.len, column % panel.k.len);
        let fragment = (leaf * steps + within / 16) * width + (tile - unit);
        let (g, upper) = (row % 16 % 8, row % 16 / 8);
        let (t, odd, high) = (within % 8 / 2, within % 2, within % 16 / 8);
        start + unit * panel.k.count * steps * 256 + fragment * 256 + (g * 4 + t) * 8 + (high * 2 + upper) * 2 + odd
    }

    fn precedes(p: Product, product: Product) -> bool {
        let place = |q: Product| LAYER_PRODUCTS.iter().position(|other| *other == q);
        place(p) < place(product)
    }

    /// The packed row of a tensor's row.
    fn packed_row(layout: &Layout, tensor: LayerTensor, row: usize) -> (Product, usize) {
        let c = &layout.plan().config;
        let (head, dim) = (row / c.head_dim, row % c.head_dim);
        let group = c.num_heads / c.num_kv_heads;
        let rotated = (0..c.head_dim).find(|r| layout.packed_dim(*r) == dim).unwrap();
        let k = layout.plan().intermediate;
        let padded = row / k.len * k.padded + row % k.len;
        match tensor {
            LayerTensor::Query => {
                (Product::QueryKeyValue, (head / group * (group + 2) + head % group) * c.head_dim + rotated)
            }
            LayerTensor::Key => (Product::QueryKeyValue, (head * (group + 2) + group) * c.head_dim + rotated),
            LayerTensor::Value => (Product::QueryKeyValue, (head * (group + 2) + group + 1) * c.head_dim + dim),
            LayerTensor::AttentionOut => (Product::AttentionOut, row),
            LayerTensor::Gate => (Product::GateUp, padded / 16 * 32 + padded % 16),
            LayerTensor::Up => (Product::GateUp, padded / 16 * 32 + 16 + padded % 16),
            LayerTensor::Down => (Product::Down, row),
            other => panic!("{other:?} is not packed"),
        }
    }

    #[test]
    fn every_weight_is_where_the_layout_says_and_the_rest_is_zero() {
        // Leaves that need padding, an odd leaf, a vocabulary that is no multiple of 16, one block and more blocks than tiles.
        for (dims, blocks, most) in [
            (ModelConfig { hidden_size: 128, ..config(4, 2, 400, 1000) }, 7, 1 << 16),
            (ModelConfig { hidden_size: 48, tied_embeddings: true, ..config(2, 1, 388, 33) }, 3, 1),
            (ModelConfig { hidden_size: 64, head_dim: 16, ..config(8, 8, 96, 64) }, 1, 1 << 30),
            (ModelConfig { hidden_size: 64, head_dim: 128, ..config(2, 1, 24, 17) }, 100, 5000),
        ] {
            let layout = layout(&dims, blocks);
            let source = RandomSource { config: dims.clone(), seed: 5 };
            let (stream, embedding) = packed(&layout, &source, most);
            let mut expected = vec![0u16; stream.len()];
            let mut place = |tensor: Tensor, put: &dyn Fn(usize, usize) -> usize| {
                let shape = tensor.shape(&dims);
                let mut values = vec![bf16::ZERO; shape[0] * shape[1]];
                source.read(tensor, 0..shape[0], 0..shape[1], &mut values);
                for (i, value) in values.into_iter().enumerate() {
                    expected[put(i / shape[1], i % shape[1])] = value.to_bits();
                }
            };
            use LayerTensor::{AttentionOut, Down, Gate, Key, Query, Up, Value};
            for layer in 0..2 {
                for tensor in [Query, Key, Value, AttentionOut, Gate, Up, Down] {
                    place(Tensor::Layer(layer, tensor), &|row, column| {
                        let (product, row) = packed_row(&layout, tensor, row);
                        element(&layout, layer, product, row, column)
                    });
                }
            }
            place(Tensor::LmHead, &|row, column| element(&layout, 0, Product::LmHead, row, column));
            assert!(stream == expected, "{dims:?} on {blocks} blocks");
            if !dims.tied_embeddings {
                let mut rows = vec![bf16::ZERO; embedding.len()];
                source.read(Tensor::Embedding, 0..dims.vocab_size, 0..dims.hidden_size, &mut rows);
                assert!(embedding == bytemuck::cast_slice::<_, u16>(&rows));
            }
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
