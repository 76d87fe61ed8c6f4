//! A rank's shard in memory: every product packed in stream order, in one buffer that the decoder walks from end to
//! end.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;

use super::kernels::product::{E4M3_RAISED, Panel};
use super::kernels::{LANES, LINE, int4_place};
use super::memory::{Buffer, Disjoint, OutOfMemory};
use super::team::Team;
use crate::model::format::{MIDDLE, bf16_to_e4m3};
use crate::model::source::Source;
use crate::model::{LayerTensor, Tensor, WeightFormat};
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{ModelPlan, Product, RankPlan, Runs, Tile};

/// Vectors of a layer that are not streamed; fp32 copies of the bf16 values.
#[derive(Debug)]
pub struct LayerVectors {
    /// `[hidden]`
    pub input_norm: Vec<f32>,
    /// `[hidden]`
    pub mlp_norm: Vec<f32>,
    /// `[(heads + 2 * kv_heads) * head_dim]` of this rank, where the model has it: q, k, v.
    pub bias: Option<Vec<f32>>,
    /// `[head_dim]` each, of q and of k, where the model has it.
    pub head_norms: Option<[Vec<f32>; 2]>,
}

/// A rank's weights.
#[derive(Debug)]
pub struct Weights {
    /// All products of all layers, then the LM head: `[tiles][leaves][pairs of k][16 rows][2]` weights each, of 4 bits
    /// four pairs side by side; where they are in groups, each run of a leaf ends with its scales, `[16 rows]` bf16,
    /// and its zero points, if it has some.
    stream: Buffer<u8>,
    /// Of the products whose rows have some, in order: `[tiles][16 rows]`, times [`E4M3_RAISED`].
    scales: Vec<f32>,
    spans: Vec<Span>,
    head: Span,
    /// By layer.
    pub layers: Vec<LayerVectors>,
    /// `[hidden]`
    pub final_norm: Vec<f32>,
    /// Rows of the embedding of this rank, `[vocab shard, hidden]`; `None` where the LM head is the embedding.
    embedding: Option<Buffer<u16>>,
    vocab: Range<usize>,
    plan: ModelPlan,
}

/// Where a product lies in the stream.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// Its first byte.
    start: usize,
    tiles: usize,
    tile_bytes: usize,
    leaves: usize,
    leaf_pairs: usize,
    runs: Runs,
    format: WeightFormat,
    /// Its first scale.
    first_scale: usize,
}

impl Span {
    /// How many scales it has.
    fn scales(&self) -> usize {
        if self.format.has_row_scales() { self.tiles * LANES } else { 0 }
    }
}

/// A load under way.
struct Packing<'a> {
    source: &'a dyn Source,
    rank: &'a RankPlan,
    team: &'a Team,
    /// Bytes packed.
    done: AtomicU64,
    progress: &'a mut dyn FnMut(u64),
}

impl Packing<'_> {
    /// Runs units on all threads, which say how many bytes they wrote, and tells progress while they run.
    fn for_each(&mut self, units: usize, unit: impl Fn(usize) -> usize + Sync) {
        let Self { team, done, progress, .. } = self;
        let unit = |index: usize| {
            done.fetch_add(unit(index) as u64, Ordering::Relaxed);
        };
        team.for_each_between(units, unit, || progress(done.load(Ordering::Relaxed)));
    }
}

impl Weights {
    /// Reads and packs the shard of `rank`, on all threads. `progress` is told the bytes packed, piece by piece, from
    /// the calling thread.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn load(
        source: &dyn Source,
        plan: &ModelPlan,
        rank: &RankPlan,
        team: &Team,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, OutOfMemory> {
        let (mut stream_bytes, mut scales) = (0, 0);
        let mut span = |product: Product| {
            let (tiles, format) = (product.tiles(plan, rank), product.format(plan));
            let span = Span {
                start: stream_bytes,
                tiles,
                tile_bytes: product.tile_bytes(plan, rank),
                leaves: product.leaves(plan, rank).len(),
                leaf_pairs: product.k(plan).padded / 2,
                runs: product.runs(plan, rank).expect("a load expands weights whose leaves have no runs"),
                format,
                first_scale: scales,
            };
            stream_bytes += tiles * span.tile_bytes;
            scales += span.scales();
            span
        };
        let spans: Vec<_> = (0..plan.config.num_layers).flat_map(|_| LAYER_PRODUCTS).map(&mut span).collect();
        let head = span(Product::LmHead);
        let mut weights = Self {
            stream: Buffer::zeroed(stream_bytes, "the packed weights")?,
            scales: Vec::with_capacity(scales),
            spans,
            head,
            layers: Vec::with_capacity(plan.config.num_layers),
            final_norm: vector(source, Tensor::FinalNorm, 0..plan.config.hidden_size),
            embedding: None,
            vocab: rank.real_vocab(plan),
            plan: plan.clone(),
        };
        let mut packing = Packing { source, rank, team, done: AtomicU64::new(0), progress };
        for layer in 0..plan.config.num_layers {
            weights.layers.push(LayerVectors::read(source, plan, rank, layer));
            for product in LAYER_PRODUCTS {
                weights.pack(&mut packing, layer, product);
            }
        }
        weights.pack(&mut packing, 0, Product::LmHead);
        weights.read_scales(source, rank);
        if !plan.config.tied_embeddings {
            weights.embedding = Some(weights.read_embedding(&mut packing)?);
        }
        Ok(weights)
    }

    /// The packed weights of a product. `layer` is not looked at for the LM head.
    pub fn panel(&self, layer: usize, product: Product) -> Panel<'_> {
        let span = self.span(layer, product);
        let data = &self.stream[span.start..span.start + span.tiles * span.tile_bytes];
        let scales = &self.scales[span.first_scale..][..span.scales()];
        Panel::new(data, span.format, scales, span.tiles, (span.leaves, span.leaf_pairs, span.runs))
    }

    /// Whether this rank holds the embedding of a token.
    pub fn owns_token(&self, token: u32) -> bool {
        self.vocab.contains(&(token as usize))
    }

    /// Columns `columns` of the embedding of a token that this rank owns.
    pub fn embed(&self, token: u32, columns: Range<usize>, out: &mut [f32]) {
        let row = token as usize - self.vocab.start;
        let value = |bits: u16| bf16::from_bits(bits).to_f32();
        match &self.embedding {
            Some(rows) => {
                let hidden = self.plan.config.hidden_size;
                let row = &rows[row * hidden..][columns];
                out.iter_mut().zip(row).for_each(|(out, bits)| *out = value(*bits));
            }
            None => {
                let head: &[u16] = bytemuck::cast_slice(self.panel(0, Product::LmHead).data());
                let tile = &head[row / LANES * (self.head.tile_bytes / size_of::<u16>())..];
                for (out, column) in out.iter_mut().zip(columns) {
                    let k = self.plan.hidden.padded_column(column);
                    *out = value(tile[k / 2 * LINE + row % LANES * 2 + k % 2]);
                }
            }
        }
    }

    /// Bytes of all weights in memory.
    pub fn bytes(&self) -> u64 {
        self.stream_bytes() + self.embedding.as_ref().map_or(0, |rows| rows.len()) as u64 * 2
    }

    /// Bytes that stream in one decode step: all layers and the LM head.
    pub fn stream_bytes(&self) -> u64 {
        (self.stream.len() + self.scales.len() * size_of::<f32>()) as u64
    }

    /// Those of the LM head.
    pub fn head_bytes(&self) -> u64 {
        (self.head.tiles * self.head.tile_bytes) as u64
    }

    fn span(&self, layer: usize, product: Product) -> Span {
        let place = LAYER_PRODUCTS.iter().position(|p| *p == product);
        place.map_or(self.head, |place| self.spans[layer * LAYER_PRODUCTS.len() + place])
    }

    /// Packs a product, a tile a unit: so its pages are first touched by threads of the team, near their cores.
    #[allow(unsafe_code)]
    fn pack(&mut self, packing: &mut Packing<'_>, layer: usize, product: Product) {
        let span = self.span(layer, product);
        let (plan, source, rank) = (&self.plan, packing.source, packing.rank);
        let stream = Disjoint::new(&mut self.stream);
        packing.for_each(span.tiles, |index| {
            let tile = product.tile(plan, rank, layer, index);
            let start = span.start + index * span.tile_bytes;
            // SAFETY: each tile is its own range of the stream, and each unit another tile.
            let out = unsafe { stream.part(start..start + span.tile_bytes) };
            let of = (source, plan, rank);
            match span.format {
                WeightFormat::Bf16 => {
                    pack_tile::<u16>(of, product, &tile, |value| value.to_bits(), bytemuck::cast_slice_mut(out));
                }
                WeightFormat::E4m3 => pack_tile(of, product, &tile, bf16_to_e4m3, out),
                WeightFormat::E4m3Groups { .. } | WeightFormat::Int4 { .. } => {
                    pack_groups(of, product, &tile, span.runs, out);
                }
            }
            out.len()
        });
    }

    /// Reads the scales of all products that have some.
    fn read_scales(&mut self, source: &dyn Source, rank: &RankPlan) {
        let products = |layer| LAYER_PRODUCTS.map(|product| (layer, product));
        for (layer, product) in (0..self.plan.config.num_layers).flat_map(products) {
            let span = self.span(layer, product);
            for index in 0..span.scales() / LANES {
                let tile = product.tile(&self.plan, rank, layer, index);
                let mut scales = [1.0; LANES];
                source.scales(tile.tensor, tile.rows.clone(), 0, &mut scales[..tile.rows.len()]);
                self.scales.extend(scales.map(|scale| scale * E4M3_RAISED));
            }
        }
    }

    #[allow(unsafe_code)]
    fn read_embedding(&self, packing: &mut Packing<'_>) -> Result<Buffer<u16>, OutOfMemory> {
        const ROWS: usize = 64;
        let (hidden, vocab) = (self.plan.config.hidden_size, self.vocab.clone());
        let mut rows = Buffer::zeroed(vocab.len() * hidden, "the embedding")?;
        let (out, source) = (Disjoint::<u16>::new(&mut rows), packing.source);
        packing.for_each(vocab.len().div_ceil(ROWS), |unit| {
            let part = unit * ROWS..((unit + 1) * ROWS).min(vocab.len());
            // SAFETY: each unit has other rows.
            let out = unsafe { out.part(part.start * hidden..part.end * hidden) };
            let in_tensor = vocab.start + part.start..vocab.start + part.end;
            source.read(Tensor::Embedding, in_tensor, 0..hidden, bytemuck::cast_slice_mut(out));
            size_of_val(out)
        });
        Ok(rows)
    }
}

/// Writes a tile as lines of `[16 rows][2 k]` of what `bits` makes of the weights; `out` is zeroed, and stays so where
/// rows or columns are padding.
fn pack_tile<T>(
    (source, plan, rank): (&dyn Source, &ModelPlan, &RankPlan),
    product: Product,
    tile: &Tile,
    bits: impl Fn(bf16) -> T,
    out: &mut [T],
) {
    let (k, leaves) = (product.k(plan), product.leaves(plan, rank));
    let (columns, values) = read_tile((source, plan, rank), product, tile);
    for leaf in 0..leaves.len() {
        let out = &mut out[leaf * k.padded * LANES..][..k.padded * LANES];
        // Line by line: what is read is sixteen rows side by side, what is written one run.
        for (pair, line) in out.chunks_exact_mut(LINE).enumerate().take(k.len.div_ceil(2)) {
            let first = leaf * k.len + 2 * pair;
            let width = (k.len - 2 * pair).min(2);
            for (row, out) in values.chunks_exact(columns.len()).zip(line.chunks_exact_mut(2)) {
                out.iter_mut().zip(&row[first..first + width]).for_each(|(out, value)| *out = bits(*value));
            }
        }
    }
}

/// The columns of a product of this rank, and a tile's values in them, row by row.
fn read_tile(
    (source, plan, rank): (&dyn Source, &ModelPlan, &RankPlan),
    product: Product,
    tile: &Tile,
) -> (Range<usize>, Vec<bf16>) {
    let (k, leaves) = (product.k(plan), product.leaves(plan, rank));
    let columns = k.columns(leaves.start).start..k.columns(leaves.end - 1).end;
    let mut values = vec![bf16::ZERO; tile.rows.len() * columns.len()];
    source.read(tile.tensor, tile.rows.clone(), columns.clone(), &mut values);
    (columns, values)
}

/// As [`pack_tile`], of weights in groups: run by run, scales and zero points behind the lines. Padding is zero, times
/// whatever scale.
fn pack_groups(
    of: (&dyn Source, &ModelPlan, &RankPlan),
    product: Product,
    tile: &Tile,
    runs: Runs,
    mut out: &mut [u8],
) {
    let (source, plan, rank) = of;
    let (k, format, rows) = (product.k(plan), product.format(plan), tile.rows.len());
    let (columns, values) = read_tile(of, product, tile);
    for leaf in 0..product.leaves(plan, rank).len() {
        let mut pair = 0;
        for run in runs.of(leaf) {
            let (lines, rest) = out.split_at_mut(format.bytes(run.next_multiple_of(format.packed_pairs()) * LINE));
            let (end, rest) = rest.split_at_mut(format.group_bytes(LANES));
            let (mut scales, mut zeros) = ([0.0; LANES], [MIDDLE; LANES]);
            if 2 * pair < k.len {
                let column = columns.start + leaf * k.len + 2 * pair;
                source.scales(tile.tensor, tile.rows.clone(), column, &mut scales[..rows]);
                source.zeros(tile.tensor, tile.rows.clone(), column, &mut zeros[..rows]);
            }
            write_end(&scales, &zeros, end);
            let pack = format.packed_pairs();
            for (lines, first) in lines.chunks_exact_mut(format.bytes(pack * LINE)).zip((pair..).step_by(pack)) {
                for i in 0..pack * LINE {
                    let (line, row, side) = (i / LINE, i % LINE / 2, i % 2);
                    // Past the end of the run there are columns of the next one.
                    let column = 2 * (first + line) + side;
                    let held = row < rows && column < k.len.min(2 * (pair + run));
                    let value = if held { values[row * columns.len() + leaf * k.len + column] } else { bf16::ZERO };
                    match format {
                        WeightFormat::Int4 { .. } => {
                            let (byte, high) = int4_place(line, row, side);
                            let bits = four_bits(value.to_f32() as i8, zeros[row]);
                            lines[byte] |= if high { bits << 4 } else { bits };
                        }
                        _ => lines[2 * row + side] = bf16_to_e4m3(value),
                    }
                }
            }
            (out, pair) = (rest, pair + run);
        }
    }
}

/// Writes what a run ends with: scales, and zero points if there is room: of rows 0 to 7 in the low halves of bytes.
fn write_end(scales: &[f32; LANES], zeros: &[u8; LANES], out: &mut [u8]) {
    let (of_scales, of_zeros) = out.split_at_mut(LANES * 2);
    for (scale, out) in scales.iter().zip(of_scales.chunks_exact_mut(2)) {
        out.copy_from_slice(&bf16::from_f32(*scale).to_le_bytes());
    }
    let (low, high) = zeros.split_at(LANES / 2);
    for ((low, high), out) in low.iter().zip(high).zip(of_zeros) {
        *out = four_bits(0, *low) | four_bits(0, *high) << 4;
    }
}

/// A weight that is `value` more than its zero point.
fn four_bits(value: i8, zero: u8) -> u8 {
    value.cast_unsigned().wrapping_add(zero) & 15
}

impl LayerVectors {
    fn read(source: &dyn Source, plan: &ModelPlan, rank: &RankPlan, layer: usize) -> Self {
        let c = &plan.config;
        let read = |tensor, range| vector(source, Tensor::Layer(layer, tensor), range);
        let heads = rank.heads.start * c.head_dim..rank.heads.end * c.head_dim;
        let kv_heads = rank.kv_heads.start * c.head_dim..rank.kv_heads.end * c.head_dim;
        let bias = || {
            let parts = [
                (LayerTensor::QueryBias, heads),
                (LayerTensor::KeyBias, kv_heads.clone()),
                (LayerTensor::ValueBias, kv_heads),
            ];
            parts.into_iter().flat_map(|(tensor, range)| read(tensor, range)).collect()
        };
        Self {
            input_norm: read(LayerTensor::InputNorm, 0..c.hidden_size),
            mlp_norm: read(LayerTensor::MlpNorm, 0..c.hidden_size),
            bias: c.qkv_bias.then(bias),
            head_norms: c
                .qk_norm
                .then(|| [LayerTensor::QueryNorm, LayerTensor::KeyNorm].map(|norm| read(norm, 0..c.head_dim))),
        }
    }
}

fn vector(source: &dyn Source, tensor: Tensor, range: Range<usize>) -> Vec<f32> {
    let mut values = vec![bf16::ZERO; range.len()];
    source.read(tensor, 0..1, range, &mut values);
    values.into_iter().map(bf16::to_f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::INT4_RAISED;
    use crate::cpu::kernels::isa::Isa;
    use crate::cpu::kernels::product::expand;
    use crate::cpu::team::Placement;
    use crate::model::ModelConfig;
    use crate::model::conversion::Expanded;
    use crate::model::conversion::expanded::tests::Grouped;
    use crate::model::source::RandomSource;

    /// The weights of a panel that [`expand`] made, as bf16 with their scales.
    fn with_scales(lines: &[u8], format: WeightFormat, leaves: usize, runs: Runs) -> Vec<u16> {
        let at = |bytes: &[u8], i: usize| bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
        let (mut rest, mut out) = (lines, Vec::new());
        for run in (0..leaves).flat_map(|leaf| runs.of(leaf)).cycle() {
            let (lines, ends) = rest.split_at(run * LINE * 2);
            let (end, next) = ends.split_at(format.group_bytes(LANES));
            let zero = |row: usize| match format.has_zeros() {
                true => end[2 * LANES + row % 8] >> (row / 8 * 4) & 15,
                false => MIDDLE,
            };
            out.extend((0..run * LINE).map(|i| {
                let row = i % LINE / 2;
                let number = match format {
                    WeightFormat::Int4 { .. } => at(lines, i) - INT4_RAISED - f32::from(zero(row)),
                    _ => at(lines, i) * E4M3_RAISED,
                };
                bf16::from_f32(number * at(end, row)).to_bits()
            }));
            rest = next;
            if rest.is_empty() {
                break;
            }
        }
        out
    }

    /// Odd shapes: a hidden size that is no multiple of a tile, leaves of 24 and 50 columns, heads of 48.
    #[test]
    fn groups_are_packed_to_the_weights_of_the_model_in_bf16() {
        let shapes = [(16, 384, 256, 64), (4, 800, 208, 48), (2, 512, 72, 16)];
        let int4 = |columns, zeros| WeightFormat::Int4 { columns, zeros };
        let formats = [int4(16, true), int4(128, false), int4(32, true), WeightFormat::E4m3Groups { columns: 128 }];
        for ((heads, intermediate, hidden_size, head_dim), format) in
            shapes.into_iter().flat_map(|shape| formats.map(|format| (shape, format)))
        {
            let plain = ModelConfig {
                hidden_size,
                head_dim,
                num_layers: 1,
                ..crate::plan::tests::config(heads, 2, intermediate, 20)
            };
            let config = ModelConfig { layer_weights: format, ..plain.clone() };
            for tensor_parallel in [1, 2, 4] {
                let Ok(plan) = ModelPlan::new(&config, tensor_parallel) else { continue };
                let plain = ModelPlan::new(&plain, tensor_parallel).unwrap();
                let source = Grouped(RandomSource { config: config.clone(), seed: 11 });
                let team = Team::new(1, Placement::Floating, true).unwrap();
                let load = |source: &dyn Source, plan: &ModelPlan, rank| {
                    Weights::load(source, plan, &plan.rank(rank), &team, &mut |_| ()).unwrap()
                };
                for rank in 0..tensor_parallel {
                    let [stored, plain] = [load(&source, &plan, rank), load(&Expanded(&source), &plain, rank)];
                    for product in LAYER_PRODUCTS {
                        let expected: &[u16] = bytemuck::cast_slice(plain.panel(0, product).data());
                        let panel = stored.panel(0, product);
                        let tile_bytes = product.expanded_tile_bytes(&plan, &plan.rank(rank));
                        let mut lines = vec![0; panel.row_tiles() * tile_bytes / 2];
                        expand(Isa::best(), panel, &mut lines);
                        let runs = product.runs(&plan, &plan.rank(rank)).unwrap();
                        let leaves = product.leaves(&plan, &plan.rank(rank)).len();
                        let expanded = with_scales(bytemuck::cast_slice(&lines), format, leaves, runs);
                        assert_eq!(expanded.len(), expected.len());
                        let differ = expanded.iter().zip(expected).filter(|(is, was)| is != was && **was & 0x7fff != 0);
                        assert_eq!(differ.count(), 0, "{format} {product:?} of rank {rank} of {tensor_parallel}");
                    }
                }
            }
        }
    }

    #[test]
    fn progress_is_told_while_a_product_is_packed() {
        let config = ModelConfig { num_layers: 1, ..crate::plan::tests::config(4, 2, 384, 768) };
        let plan = ModelPlan::new(&config, 1).unwrap();
        for threads in [1, 3] {
            let team = Team::new(threads, Placement::Floating, true).unwrap();
            let source = RandomSource { config: config.clone(), seed: 1 };
            let mut told = vec![0];
            let weights = Weights::load(&source, &plan, &plan.rank(0), &team, &mut |bytes| told.push(bytes)).unwrap();
            assert!(told.is_sorted() && told.last().is_some_and(|bytes| *bytes <= weights.bytes()));
            // With one thread a tile or some rows of the embedding at a time; helpers may leave the leader little.
            let most = told.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
            assert!(threads > 1 || most <= weights.bytes() / 16, "{most} of {} bytes at once", weights.bytes());
        }
    }
}
