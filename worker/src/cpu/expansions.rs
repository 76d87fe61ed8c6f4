//! Weights of fewer bits as bf16, without their scales, for steps of several rows: each unit is expanded once, to where
//! the next levels of cache are, and all its rows are computed with that.

use std::sync::Mutex;

use super::kernels::LANES;
use super::kernels::isa::Isa;
use super::kernels::product::{Panel, expand, expands};
use super::memory::{Buffer, OutOfMemory};
use super::phases::UNIT_TILES;
use crate::model::WeightFormat;
use crate::plan::stream::LAYER_PRODUCTS;
use crate::plan::{ModelPlan, Product, RankPlan};

/// Room for a unit of each thread of a team. None, where weights are bf16.
#[derive(Debug)]
pub struct Expansions(Box<[Mutex<Buffer<u16>>]>);

impl Expansions {
    /// Room for the largest unit of a rank, for so many threads.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn new(plan: &ModelPlan, rank: &RankPlan, threads: usize) -> Result<Self, OutOfMemory> {
        let room = |_| Buffer::zeroed(unit_len(plan, rank), "expanded weights").map(Mutex::new);
        Ok(Self((0..threads).map(room).collect::<Result<_, _>>()?))
    }

    /// Bytes of that.
    pub fn bytes(plan: &ModelPlan, rank: &RankPlan, threads: usize) -> u64 {
        (threads * unit_len(plan, rank) * size_of::<u16>()) as u64
    }

    /// Runs `run` with a unit of the weights as they are best for so many rows. A thread that runs it does not call
    /// this again.
    pub fn with<R>(&self, isa: Isa, panel: Panel<'_>, rows: usize, run: impl FnOnce(Panel<'_>) -> R) -> R {
        if !expands(isa, panel.format(), rows) {
            return run(panel);
        }
        let free = self.0.iter().find_map(|room| room.try_lock().ok());
        let mut room = free.expect("a free room, because each thread has one");
        run(expand(isa, panel, &mut room))
    }
}

/// Room for the largest unit of fewer bits than bf16, in bf16.
fn unit_len(plan: &ModelPlan, rank: &RankPlan) -> usize {
    let of = |product: Product| {
        let tiles = if product == Product::QueryKeyValue { plan.config.head_dim / LANES } else { UNIT_TILES };
        let is_packed = product.format(plan) != WeightFormat::Bf16;
        if is_packed { tiles * product.expanded_tile_bytes(plan, rank) / size_of::<u16>() } else { 0 }
    };
    LAYER_PRODUCTS.into_iter().map(of).max().unwrap_or(0)
}
