//! From a checkpoint to a GPU: several threads pack jobs into pinned buffers, copies overlap with packing.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use half::bf16;

use super::layout::Layout;
use super::pack::{Job, Packer};
use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::error::CudaError;
use crate::model::source::Source;
use crate::model::{LayerTensor, Tensor, WeightFormat};
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{Product, ROW_TILE};
use crate::rope::Rope;

/// Bytes of a job, and of a pinned buffer, unless one unit is larger.
const JOB_BYTES: usize = 8 << 20;
/// Pinned buffers of a thread: one is filled while another is copied.
const BUFFERS: usize = 2;
/// More threads than this only wait for memory.
const MAX_THREADS: usize = 32;
/// Vectors that are multiplied with weights of few bits are so many times what they are; as that is not all that E4M3
/// have been divided by, scales of rows are, too (kernels/ops/weights.cuh).
fn raised(format: WeightFormat) -> f32 {
    match (format, format.group()) {
        (WeightFormat::Bf16, _) => 1.0,
        (_, None) => (1u128 << 80) as f32,
        (_, Some(_)) => (1u64 << 40) as f32,
    }
}
const SCALES_RAISED: f32 = (1u64 << 40) as f32;
/// How often a load tells its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// A rank's weights on a GPU.
#[derive(Debug)]
pub struct Weights {
    /// The stream, as [`Layout`] has it.
    pub stream: DeviceBuffer,
    /// `[rows of the rank's vocabulary shard][hidden]` bf16; empty where the LM head is the embedding.
    pub embedding: DeviceBuffer,
    /// `[2 * layers + 1][hidden]` bf16: before attention and before the MLP of each layer (times [`raised`] of their
    /// weights), then the final norm.
    pub gamma: DeviceBuffer,
    /// `[layers][the rank's rows of q, k, v as packed]` f32; empty where the model has none.
    pub bias: DeviceBuffer,
    /// `[layers][rows of q, k, v, of o, of gate and up, of down, as packed]` f32; empty where weights have no scales.
    pub scales: DeviceBuffer,
    /// `[layers][q, k][head_dim as packed]` f32; empty where the model has none.
    pub qk_norm: DeviceBuffer,
    /// `[positions][head_dim / 2][cosine, sine]` f32.
    pub rope: DeviceBuffer,
}

impl Weights {
    /// Bytes of the angles of `positions` positions.
    pub fn rope_bytes(layout: &Layout, positions: usize) -> usize {
        positions * layout.plan().config.head_dim * 4
    }

    /// Bytes of the norms and biases.
    pub fn vector_bytes(layout: &Layout) -> usize {
        let c = &layout.plan().config;
        let rows = layout.panel(Product::QueryKeyValue).tiles * ROW_TILE;
        let bias = if c.qkv_bias { c.num_layers * rows * 4 } else { 0 };
        let norms = if c.qk_norm { c.num_layers * 2 * c.head_dim * 4 } else { 0 };
        (2 * c.num_layers + 1) * c.hidden_size * 2 + bias + norms + scale_rows(layout) * 4
    }

    /// Reads, packs and copies everything. `progress` is told the bytes packed.
    ///
    /// # Errors
    /// The GPU has not so much memory, or a copy failed.
    pub fn load(
        gpu: &Arc<Gpu>,
        layout: &Layout,
        source: &dyn Source,
        rope: &Rope,
        positions: usize,
        threads: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, CudaError> {
        let c = &layout.plan().config;
        let stream = DeviceBuffer::uninitialised(gpu, layout.bytes())?;
        let embedding = DeviceBuffer::uninitialised(gpu, layout.embedding_bytes())?;
        upload(gpu, layout, source, threads.clamp(1, MAX_THREADS), &stream, &embedding, progress)?;
        let of = |values: &[f32]| DeviceBuffer::of(gpu, values);
        let rope = rope_table(rope, [layout.head_width(), c.head_dim].map(|dim| dim / 2), positions, threads);
        Ok(Self {
            stream,
            embedding,
            gamma: DeviceBuffer::of(gpu, bytemuck::cast_slice::<bf16, u16>(&gamma(layout, source)))?,
            bias: of(&bias(layout, source))?,
            scales: of(&scales(layout, source))?,
            qk_norm: of(&qk_norm(layout, source))?,
            rope: of(rope.as_flattened())?,
        })
    }
}

/// What the threads of an upload share.
struct Upload<'a> {
    layout: &'a Layout,
    source: &'a dyn Source,
    stream: &'a DeviceBuffer,
    embedding: &'a DeviceBuffer,
    jobs: Vec<Job>,
    next: AtomicUsize,
    done: AtomicU64,
    failed: AtomicBool,
    failure: Mutex<Option<CudaError>>,
}

fn upload(
    gpu: &Arc<Gpu>,
    layout: &Layout,
    source: &dyn Source,
    threads: usize,
    stream: &DeviceBuffer,
    embedding: &DeviceBuffer,
    progress: &mut dyn FnMut(u64),
) -> Result<(), CudaError> {
    let jobs = Job::all(layout, JOB_BYTES);
    let room = jobs.iter().map(|job| job.bytes(layout)).max().unwrap_or(0);
    let upload = Upload {
        layout,
        source,
        stream,
        embedding,
        jobs,
        next: AtomicUsize::new(0),
        done: AtomicU64::new(0),
        failed: AtomicBool::new(false),
        failure: Mutex::new(None),
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| upload.work(gpu, room))).collect();
        while !workers.iter().all(|worker| worker.is_finished()) {
            std::thread::sleep(PROGRESS_INTERVAL);
            progress(upload.done.load(Ordering::Relaxed));
        }
    });
    let failure = upload.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

impl Upload<'_> {
    fn work(&self, gpu: &Arc<Gpu>, room: usize) {
        if let Err(error) = self.run_jobs(gpu, room) {
            self.failed.store(true, Ordering::Relaxed);
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    #[allow(unsafe_code)]
    fn run_jobs(&self, gpu: &Arc<Gpu>, room: usize) -> Result<(), CudaError> {
        let lane = || Ok((PinnedBuffer::<u32>::zeroed(gpu, room / 4)?, Stream::new(gpu)?));
        let mut lanes = (0..BUFFERS).map(|_| lane()).collect::<Result<Vec<_>, CudaError>>()?;
        let mut packer = Packer::new(self.layout, self.source);
        for turn in 0.. {
            let Some(job) = self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            if self.failed.load(Ordering::Relaxed) {
                break;
            }
            let (buffer, stream) = &mut lanes[turn % BUFFERS];
            stream.wait()?;
            let words = &mut buffer[..job.bytes(self.layout) / 4];
            packer.run(job, words);
            let to = if matches!(job, Job::Embedding { .. }) { self.embedding } else { self.stream };
            // SAFETY: the buffer is not touched again before its stream was waited for, above, below or, after a
            // failure, by the driver when it takes the pinned memory back.
            unsafe { to.write_async(job.start(self.layout), words, stream)? };
            self.done.fetch_add(job.bytes(self.layout) as u64, Ordering::Relaxed);
        }
        lanes.iter().try_for_each(|(_, stream)| stream.wait())
    }
}

fn vector(source: &dyn Source, tensor: Tensor, len: usize) -> Vec<bf16> {
    let mut values = vec![bf16::ZERO; len];
    source.read(tensor, 0..1, 0..len, &mut values);
    values
}

fn gamma(layout: &Layout, source: &dyn Source) -> Vec<bf16> {
    let c = &layout.plan().config;
    let norms = [LayerTensor::InputNorm, LayerTensor::MlpNorm];
    let layers = (0..c.num_layers).flat_map(|layer| norms.map(|norm| Tensor::Layer(layer, norm)));
    let of = |tensor| vector(source, tensor, c.hidden_size);
    // A power of two: the bits of a model without scales are what they were.
    let raised = raised(c.layer_weights);
    let mut gamma: Vec<bf16> = layers.flat_map(of).map(|value| bf16::from_f32(value.to_f32() * raised)).collect();
    gamma.extend(of(Tensor::FinalNorm));
    gamma
}

/// Biases of q, k and v in the order of the packed rows.
fn bias(layout: &Layout, source: &dyn Source) -> Vec<f32> {
    let c = &layout.plan().config;
    if !c.qkv_bias {
        return Vec::new();
    }
    let mut biases = Vec::new();
    for layer in 0..c.num_layers {
        let kv = c.num_kv_heads * c.head_dim;
        let read = |tensor, len| vector(source, Tensor::Layer(layer, tensor), len);
        let (q, k, v) = (
            read(LayerTensor::QueryBias, c.num_heads * c.head_dim),
            read(LayerTensor::KeyBias, kv),
            read(LayerTensor::ValueBias, kv),
        );
        for tile in 0..layout.panel(Product::QueryKeyValue).tiles {
            for run in layout.rows(layer, Product::QueryKeyValue, tile) {
                let values = match run.tensor {
                    Tensor::Layer(_, LayerTensor::Query) => &q,
                    Tensor::Layer(_, LayerTensor::Key) => &k,
                    _ => &v,
                };
                biases.extend(values[run.rows].iter().map(|value| value.to_f32()));
            }
        }
    }
    biases
}

/// How many rows have scales, of all layers.
fn scale_rows(layout: &Layout) -> usize {
    let of = |product| {
        let panel = layout.panel(product);
        if panel.format.has_row_scales() { panel.tiles * ROW_TILE } else { 0 }
    };
    layout.plan().config.num_layers * LAYER_PRODUCTS.into_iter().map(of).sum::<usize>()
}

/// Scales in the order of the packed rows, times [`SCALES_RAISED`].
fn scales(layout: &Layout, source: &dyn Source) -> Vec<f32> {
    let mut scales = Vec::with_capacity(scale_rows(layout));
    let products = |layer| LAYER_PRODUCTS.map(|product| (layer, product));
    for (layer, product) in (0..layout.plan().config.num_layers).flat_map(products) {
        let panel = layout.panel(product);
        for tile in 0..if panel.format.has_row_scales() { panel.tiles } else { 0 } {
            let mut rows = [1.0; ROW_TILE];
            for run in layout.rows(layer, product, tile) {
                source.scales(run.tensor, run.rows.clone(), 0, &mut rows[run.at..][..run.rows.len()]);
            }
            scales.extend(rows.map(|scale| scale * SCALES_RAISED));
        }
    }
    scales
}

/// Weights of the norms of q and k heads in the order of the packed rows of a head.
fn qk_norm(layout: &Layout, source: &dyn Source) -> Vec<f32> {
    let c = &layout.plan().config;
    if !c.qk_norm {
        return Vec::new();
    }
    let norms = [LayerTensor::QueryNorm, LayerTensor::KeyNorm];
    let all = (0..c.num_layers).flat_map(|layer| norms.map(|norm| Tensor::Layer(layer, norm)));
    all.flat_map(|tensor| {
        let values = vector(source, tensor, c.head_dim);
        (0..c.head_dim).map(move |row| values[layout.packed_dim(row)].to_f32())
    })
    .collect()
}

/// (cosine, sine) of every angle at every position; padding is not turned. `[real, half]`: angles of a head, and with
/// padding.
fn rope_table(rope: &Rope, [real, half]: [usize; 2], positions: usize, threads: usize) -> Vec<[f32; 2]> {
    let mut table = vec![[1.0, 0.0]; positions * half];
    let share = positions.div_ceil(threads.clamp(1, MAX_THREADS)).max(1);
    std::thread::scope(|scope| {
        for (part, rows) in table.chunks_mut(share * half).enumerate() {
            scope.spawn(move || {
                for (row, turns) in rows.chunks_exact_mut(half).enumerate() {
                    rope.turns((part * share + row) as u32, &mut turns[..real]);
                }
            });
        }
    });
    table
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{config, group, layout};
    use super::*;
    use crate::model::ModelConfig;
    use crate::model::source::RandomSource;

    #[test]
    fn vectors_follow_the_packed_rows() {
        let dims = ModelConfig { qkv_bias: true, qk_norm: true, ..config(4, 2, 384, 768) };
        let layout = layout(&dims, 3);
        let source = RandomSource { config: dims.clone(), seed: 1 };
        let (bias, norms, gamma) = (bias(&layout, &source), qk_norm(&layout, &source), gamma(&layout, &source));
        // 2 layers of 8 heads of 64: per KV head two q heads, k, v.
        assert_eq!((bias.len(), norms.len(), gamma.len()), (2 * 8 * 64, 2 * 2 * 64, 5 * 256));
        assert_eq!(Weights::vector_bytes(&layout), bias.len() * 4 + norms.len() * 4 + gamma.len() * 2);
        let of = |tensor, len| vector(&source, Tensor::Layer(1, tensor), len);
        // Layer 1, second KV head, its second query head (head 3), row 8: dimension 32.
        assert_eq!(bias[512 + 4 * 64 + 64 + 8], of(LayerTensor::QueryBias, 256)[3 * 64 + 32].to_f32());
        assert_eq!(bias[512 + 4 * 64 + 2 * 64 + 9], of(LayerTensor::KeyBias, 128)[64 + 33].to_f32());
        assert_eq!(bias[512 + 4 * 64 + 3 * 64 + 9], of(LayerTensor::ValueBias, 128)[64 + 9].to_f32());
        assert_eq!(norms[3 * 64 + 8], of(LayerTensor::KeyNorm, 64)[32].to_f32());
        assert_eq!(gamma[3 * 256 + 5], of(LayerTensor::MlpNorm, 256)[5]);
    }

    #[test]
    fn biases_of_a_rank_are_those_of_its_heads() {
        let dims = ModelConfig { qkv_bias: true, ..config(4, 2, 384, 768) };
        let source = RandomSource { config: dims.clone(), seed: 1 };
        let whole = bias(&layout(&dims, 3), &source);
        // By layer, KV head and place, q, q, k, v: 64 values.
        let head =
            |layer: usize, kv_head: usize, place: usize| &whole[((layer * 2 + kv_head) * 4 + place) * 64..][..64];
        for (ranks, places) in [(2, &[0..4, 0..4][..]), (4, &[0..1, 1..2, 0..1, 1..2])] {
            for (layout, queries) in group(&dims, ranks, 3).iter().zip(places) {
                let kv_head = layout.rank().rank * 2 / ranks;
                let places = || queries.clone().filter(|place| *place < 2).chain([2, 3]);
                let heads = (0..2).flat_map(|layer| places().map(move |place| (layer, place)));
                let expected: Vec<f32> =
                    heads.flat_map(|(layer, place)| head(layer, kv_head, place)).copied().collect();
                assert_eq!(bias(layout, &source), expected);
                assert_eq!(Weights::vector_bytes(layout), expected.len() * 4 + 5 * 256 * 2);
            }
        }
    }

    #[test]
    fn the_table_of_angles_does_not_depend_on_the_threads() {
        let rope = Rope::new(&config(4, 2, 384, 768));
        let table = rope_table(&rope, [32, 32], 100, 1);
        assert_eq!(table, rope_table(&rope, [32, 32], 100, 7));
        let padded = rope_table(&rope, [32, 40], 100, 7);
        assert!(padded[99 * 40..][..32] == table[99 * 32..] && padded[99 * 40 + 32..].iter().all(|t| *t == [1.0, 0.0]));
        let mut turns = [[0.0; 2]; 32];
        rope.turns(99, &mut turns);
        assert_eq!(table[99 * 32..], turns);
    }
}
