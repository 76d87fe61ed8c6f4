//! What launches need beside the weights: how much of it, whether that fits, and the memory itself.

use std::sync::Arc;

use super::budget::{KvWish, Needs};
use super::engine::MATRIX_STEPS_AHEAD;
use crate::cuda::device::gpu::Gpu;
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::items::Bounds;
use crate::cuda::kernels::kernel::Kernel;
use crate::cuda::kernels::launch::Row;
use crate::cuda::kernels::matrix::Matrix;
use crate::cuda::kernels::sizes::Sizes;
use crate::cuda::kernels::variants::{Attention, FED_COLUMNS};
use crate::cuda::sampler::kernel::SamplerKernel;
use crate::cuda::weights::layout::Layout;
use crate::cuda::weights::upload::Weights;
use crate::decoder::{LoadError, LoadRequest};
use crate::plan::{KvLayout, PAGE_POSITIONS};

/// The GPU memory that only launches use.
#[derive(Debug)]
pub struct Pools {
    /// The KV pool.
    pub kv: DeviceBuffer,
    /// Scales of K, where the model normalises heads.
    pub k_scale: DeviceBuffer,
    /// Exchange words of each kernel.
    pub words: Vec<DeviceBuffer>,
    /// What the launches of a matrix pass share; of several ranks it is in the inbox
    pub matrix: Option<DeviceBuffer>,
    /// `[slot][page]` u32
    pub page_table: DeviceBuffer,
    /// `[most rows of a pass that sample][kernel_vocab]` f32; of several ranks they are in the inbox
    pub logits: Option<DeviceBuffer>,
    /// [`Sizes::rows`] rows
    pub rows: DeviceBuffer,
    /// `[item_words]` u32, as [`crate::cuda::kernels::deal::Deal::of`] and [`Bounds::items`] make them
    pub items: DeviceBuffer,
}

/// Sizes and bytes of everything that is allocated.
#[derive(Debug)]
pub struct Memory {
    /// Counts.
    pub sizes: Sizes,
    /// Bytes.
    pub needs: Needs,
    /// What lies where in the inbox, of several ranks.
    pub inbox: InboxPlan,
    words: Vec<u64>,
    k_scale_page: u64,
    slots: usize,
}

/// What other ranks write to a rank: the same bytes at the same places on every rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InboxPlan {
    /// First byte of each kernel's words, in the order of the kernels.
    pub kernels: Vec<u64>,
    /// First byte of what the launches of a matrix pass share; where there are pairs of passes, of either.
    pub matrix: Vec<u64>,
    /// First byte of the logits.
    pub logits: u64,
    /// All bytes.
    pub bytes: u64,
}

impl InboxPlan {
    /// Inboxes of kernels that need so many bytes each, then `matrix` bytes for each matrix pass of `lanes`, and
    /// `logits` for logits.
    fn new(kernels: impl Iterator<Item = u64>, (lanes, matrix): (u64, u64), logits: u64) -> Self {
        const ALIGN: u64 = 256;
        let mut bytes = 0u64;
        let mut take = |len: u64| {
            let end = (bytes + len).next_multiple_of(ALIGN);
            std::mem::replace(&mut bytes, end)
        };
        let kernels = kernels.map(&mut take).collect();
        let matrix = (0..lanes).map(|_| take(matrix)).collect();
        let logits = take(logits);
        Self { kernels, matrix, logits, bytes }
    }
}

impl Memory {
    /// What a request takes, but for the number of KV pages.
    pub fn plan(
        layout: &Layout,
        request: &LoadRequest,
        max_context: usize,
        kernels: &[Kernel],
        matrix: Option<&Matrix>,
        sampler: &SamplerKernel,
    ) -> Self {
        let c = &layout.plan().config;
        let slot_pages = KvLayout::pages_for(max_context);
        // A window that begins within a page reaches into one more.
        let visible = c.sliding_window.map_or(slot_pages, |window| slot_pages.min(KvLayout::pages_for(window) + 1));
        let words: Vec<u64> = kernels.iter().map(|kernel| kernel.words_bytes(layout, visible)).collect();
        let columns = kernels.iter().map(|kernel| kernel.variant.columns()).max().unwrap_or(1);
        let columns = matrix.map_or(columns, |matrix| columns.max(matrix.bounds.samples));
        // A launch has a row at least.
        let row_words = kernels.iter().filter_map(|kernel| kernel.deal).map(|deal| deal.most_words(1, visible));
        let item_words = request.max_batch_tokens * row_words.max().unwrap_or(0);
        let matrix_words = Bounds::most_words(request.max_batch_tokens, visible) * MATRIX_STEPS_AHEAD as usize;
        let item_words = matrix.map_or(item_words, |_| item_words.max(matrix_words));
        let [kv_page, k_scale_page] = page_bytes(layout);
        let rank = layout.rank();
        let sizes = Sizes {
            rank: request.rank,
            ranks: request.tensor_parallel,
            max_slots: request.max_slots,
            max_batch_tokens: request.max_batch_tokens,
            slot_pages,
            visible_pages: visible,
            kv_pages: 0,
            layers: c.num_layers,
            rows: (request.max_batch_tokens + request.max_slots).max(FED_COLUMNS),
            item_words,
            kernel_vocab: layout.logits(),
            attention: Attention::of(
                layout.ranks(),
                rank.heads.len() / rank.kv_heads.len(),
                kv_page,
                layout.bytes() as u64,
            ),
            wait_limit: request.wait_limit,
        };
        let table = request.max_slots * slot_pages * 4 + sizes.rows * size_of::<Row>() + item_words * 4;
        let logits = (columns * sizes.kernel_vocab * 4) as u64;
        let lanes = if matrix.is_some_and(Matrix::has_pairs) { 2 } else { 1 };
        let matrix = matrix.map_or(0, Matrix::memory_bytes);
        let inbox = match sizes.ranks {
            1 => InboxPlan::default(),
            _ => InboxPlan::new(kernels.iter().map(Kernel::inbox_bytes), (lanes, matrix), logits),
        };
        let needs = Needs {
            weights: layout.bytes() as u64,
            embedding: layout.embedding_bytes() as u64,
            kv_page: kv_page + k_scale_page,
            words: words.iter().sum::<u64>() + inbox.matrix.first().copied().unwrap_or(0),
            logits,
            matrix: lanes * matrix,
            sampler: sampler.bytes(request.max_slots, request.max_batch_tokens),
            rope: Weights::rope_bytes(layout, max_context) as u64,
            workspace: (table + Weights::vector_bytes(layout)) as u64,
        };
        Self { sizes, needs, inbox, words, k_scale_page, slots: request.max_slots }
    }

    /// Decides on the KV pages, and says what goes where.
    ///
    /// # Errors
    /// It does not fit.
    pub fn fit(&mut self, request: &LoadRequest, gpu: &Gpu) -> Result<(), LoadError> {
        let (free, _) = gpu.memory()?;
        let wish = KvWish {
            pages: request.kv_pages as u64,
            bytes_limit: request.kv_bytes_limit,
            useful_pages: self.sizes.slot_pages as u64 * self.slots as u64,
        };
        let pages = self.needs.pages(&wish, free)?;
        self.sizes.kv_pages = pages as usize;
        tracing::info!("GPU {}, {}, memory:\n{}", gpu.facts.ordinal, gpu.facts.name, self.needs.table(pages, free));
        if u32::try_from(pages).is_err() {
            return Err(LoadError::Request(format!("{pages} KV pages are more than page numbers can name")));
        }
        Ok(())
    }

    /// Takes the memory.
    ///
    /// # Errors
    /// The GPU has less than it said.
    pub fn pools(&self, gpu: &Arc<Gpu>, poison: bool) -> Result<Pools, CudaError> {
        let pages = self.sizes.kv_pages;
        let pool = DeviceBuffer::uninitialised(gpu, pages * (self.needs.kv_page - self.k_scale_page) as usize)?;
        let k_scale = DeviceBuffer::uninitialised(gpu, pages * self.k_scale_page as usize)?;
        // Positions that a row does not see and columns without a row count for nothing, whatever their memory holds:
        // tests say so with NaN.
        let alone = self.sizes.ranks == 1;
        let matrix = alone.then(|| DeviceBuffer::uninitialised(gpu, self.needs.matrix as usize)).transpose()?;
        let uninitialised = [&pool, &k_scale].into_iter().chain(&matrix);
        uninitialised.into_iter().try_for_each(|buffer| buffer.fill(if poison { 0xff } else { 0 }))?;
        Ok(Pools {
            kv: pool,
            k_scale,
            words: self
                .words
                .iter()
                .map(|bytes| DeviceBuffer::zeroed(gpu, *bytes as usize))
                .collect::<Result<_, _>>()?,
            matrix,
            page_table: DeviceBuffer::zeroed(gpu, self.slots * self.sizes.slot_pages * 4)?,
            logits: alone.then(|| DeviceBuffer::zeroed(gpu, self.needs.logits as usize)).transpose()?,
            rows: DeviceBuffer::zeroed(gpu, self.sizes.rows * size_of::<Row>())?,
            items: DeviceBuffer::zeroed(gpu, self.sizes.item_words * 4)?,
        })
    }
}

/// Bytes of a page in all layers, for the KV heads of the rank: K and V, and the scales of K, where the model
/// normalises heads.
fn page_bytes(layout: &Layout) -> [u64; 2] {
    let c = &layout.plan().config;
    let positions = c.num_layers * layout.rank().kv_heads.len() * PAGE_POSITIONS;
    let scales = if c.qk_norm { positions * 4 } else { 0 };
    [positions * c.head_dim * 2 * 2, scales].map(|bytes| bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::weights::layout::tests::{config, group};
    use crate::model::ModelConfig;

    #[test]
    fn a_page_of_a_rank_holds_its_own_kv_heads() {
        let dims = ModelConfig { qk_norm: true, ..config(16, 4, 384, 768) };
        for (ranks, kv_heads) in [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)] {
            for layout in group(&dims, ranks, 7) {
                // 2 layers; K and V of 64 positions of 64 dimensions in bf16, and a scale for each K.
                assert_eq!(page_bytes(&layout), [2 * kv_heads * 2 * 64 * 64 * 2, 2 * kv_heads * 64 * 4]);
            }
        }
        assert_eq!(page_bytes(&group(&config(16, 4, 384, 768), 2, 7)[1])[1], 0);
    }
}
