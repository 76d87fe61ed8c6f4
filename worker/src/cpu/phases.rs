//! The phases of a layer, each cut into units for the team. [`super::looped_decoder`] puts them in order.
//! Those of [`attention`] and the [`mlp`] have files of their own; here is what they share, and what comes before and
//! after the layers.
//!
//! Weights stream through units of one head or four row tiles; all rows of the step share a pass over them, in blocks
//! of [`MAX_COLUMNS`] that kernels cut as their registers have room. Where a phase writes a buffer, its units own
//! disjoint parts of it; the join at its end publishes them.
#![allow(unsafe_code)]

mod activations;
mod attention;
mod mlp;

use super::ahead::Ahead;
use super::expansions::Expansions;
use super::fabric::{Fabric, Place, SLICE};
use super::inputs::Inputs;
use super::kernels::LANES;
use super::kernels::isa::Isa;
use super::kernels::norm::rms_norm;
use super::kernels::product::{MAX_COLUMNS, Panel};
use super::memory::Disjoint;
use super::team::Team;
use super::weights::Weights;
use crate::batch::Batch;
use crate::decoder::Fault;
use crate::plan::tree::tree_sum_rows;
use crate::plan::{KvLayout, MAX_LEAVES, ModelPlan, Product, RankPlan};
use crate::rope::Rope;

pub use activations::Activations;

/// Row tiles of one unit of a product (of q, k and v it is a head), and of one slice of an exchange.
pub const UNIT_TILES: usize = SLICE / LANES;

/// What a rank computes with; fixed at load.
pub struct Shard {
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// The cut.
    pub plan: ModelPlan,
    /// This rank's part.
    pub rank: RankPlan,
    /// Its weights.
    pub weights: Weights,
    /// Angles.
    pub rope: Rope,
    /// Its KV pool.
    pub kv: KvLayout,
}

/// One step on its way through the layers.
pub struct Pass<'a> {
    /// Fixed at load.
    pub shard: &'a Shard,
    /// The threads.
    pub team: &'a Team,
    /// The other ranks.
    pub fabric: &'a mut Fabric,
    /// What is written.
    pub x: &'a mut Activations,
    /// Sequences and the rows of the step.
    pub batch: &'a Batch,
    /// Step in the life of the worker.
    pub step: u64,
    /// Whether of all rows only those that are sampled are left.
    pub only_samples: bool,
}

impl Pass<'_> {
    /// How many rows phases compute.
    pub fn rows(&self) -> usize {
        let step = self.batch.step();
        if self.only_samples { step.samples.len() } else { step.rows.len() }
    }

    /// Leaves out the rows that are not sampled, as nobody asks for more of them than K and V of the last layer: the
    /// residual of the others moves to the front.
    pub fn keep_samples(&mut self) {
        let hidden = self.shard.plan.config.hidden_size;
        // They ascend, so none is overwritten before it has moved.
        for (index, &row) in self.batch.step().samples.iter().enumerate().filter(|(index, row)| index != *row) {
            self.x.residual.copy_within(row * hidden..(row + 1) * hidden, index * hidden);
        }
        self.only_samples = true;
    }

    /// Residual = embedding of each row's token: its owner publishes it, all ranks take it from there.
    ///
    /// # Errors
    /// A rank did not arrive in time.
    pub fn embed(&mut self) -> Result<(), Fault> {
        let (shard, rows) = (self.shard, &self.batch.step().rows[..]);
        let (hidden, shard_vocab) = (shard.plan.config.hidden_size, shard.rank.vocab.len());
        let turns = Disjoint::new(&mut self.x.turns);
        let half = shard.plan.config.head_dim / 2;
        self.team.for_each(rows.len(), |row| {
            // SAFETY: each unit has another row.
            let turns = unsafe { turns.part(row * half..(row + 1) * half) };
            shard.rope.turns(rows[row].position, turns);
        });
        let residual = Disjoint::new(&mut self.x.residual);
        let columns = |slice: usize| slice * SLICE..((slice + 1) * SLICE).min(hidden);
        let own = |slice: usize, out: &mut [f32]| {
            for (row, out) in rows.iter().zip(out.chunks_exact_mut(SLICE)) {
                if shard.weights.owns_token(row.token) {
                    shard.weights.embed(row.token, columns(slice), out);
                }
            }
        };
        let take = |slice: usize, of_ranks: &[&[f32]]| {
            let columns = columns(slice);
            for (index, row) in rows.iter().enumerate() {
                // SAFETY: each slice is consumed by one thread and has other columns.
                let out = unsafe { residual.part(index * hidden + columns.start..index * hidden + columns.end) };
                out.copy_from_slice(&of_ranks[row.token as usize / shard_vocab][index * SLICE..][..out.len()]);
            }
        };
        let place = Place { step: self.step, layer: None, what: "embedding" };
        self.fabric.exchange(self.team, place, &ahead(shard, 0, Product::QueryKeyValue), own, take)
    }

    /// Residual += W x over this rank's leaves of K, exchanged and summed as the plan's tree.
    fn add_product(&mut self, layer: usize, which: Product, place: Place, next: Ahead<'_>) -> Result<(), Fault> {
        let (shard, rows) = (self.shard, self.rows());
        let hidden = shard.plan.config.hidden_size;
        let panel = shard.weights.panel(layer, which);
        let x = if which == Product::Down { &self.x.gated } else { &self.x.attended };
        let expansions = &self.x.expansions;
        x.sum(shard.isa, self.team, &panel, rows);
        let residual = Disjoint::new(&mut self.x.residual);
        let partial = |slice: usize, out: &mut [f32]| {
            let panel = unit_of(panel, slice);
            let block = MAX_COLUMNS * panel.row_tiles() * LANES;
            expansions.with(shard.isa, panel, rows, |panel| {
                for (index, out) in out.chunks_mut(block).take(rows.div_ceil(MAX_COLUMNS)).enumerate() {
                    x.product(shard.isa, panel, (index * MAX_COLUMNS, rows), out);
                }
            });
        };
        let add = |slice: usize, of_ranks: &[&[f32]]| {
            let panel = unit_of(panel, slice);
            let stride = panel.row_tiles() * LANES;
            let width = SLICE.min(hidden - slice * SLICE);
            let mut sums = [0.0; MAX_LEAVES * SLICE];
            for row in 0..rows {
                for (sum, of_rank) in sums.chunks_exact_mut(width).zip(of_ranks) {
                    sum.copy_from_slice(&of_rank[row * stride..][..width]);
                }
                tree_sum_rows(&mut sums[..of_ranks.len() * width], width);
                panel.scale(&mut sums[..width]);
                let at = row * hidden + slice * SLICE;
                // SAFETY: each slice is consumed by one thread and has other columns.
                let out = unsafe { residual.part(at..at + width) };
                out.iter_mut().zip(&sums).for_each(|(out, sum)| *out += sum);
            }
        };
        self.fabric.exchange(self.team, place, &next, partial, add)
    }

    /// logits = W_lm RMSNorm(residual) of the rows that are sampled, which are those that are left.
    pub fn logits(&mut self) {
        let (shard, samples) = (self.shard, self.rows());
        if samples == 0 {
            return;
        }
        let vocab = shard.rank.vocab.len();
        normalise(shard, self.team, &shard.weights.final_norm, &self.x.residual, samples, &mut self.x.head_input);
        let panel = shard.weights.panel(0, Product::LmHead);
        let input = (&self.x.head_input, &self.x.expansions);
        let logits = Disjoint::new(&mut self.x.logits);
        let unit = |unit: usize| {
            let panel = unit_of(panel, unit);
            let mut out = [0.0; MAX_COLUMNS * SLICE];
            each_block(shard, panel, input, samples, &mut out, |row, values| {
                let at = row * vocab + unit * SLICE;
                // SAFETY: each (row, unit) has other logits.
                unsafe { logits.part(at..at + values.len()) }.copy_from_slice(values);
            });
        };
        let next = ahead(shard, 0, Product::QueryKeyValue);
        let threads = self.team.threads();
        self.team.for_each_then(units(&panel), unit, |thread| next.of_thread(thread, threads).finish());
    }
}

/// Row i of `out` = RMSNorm of row i of the residual stream, for `rows` rows.
fn normalise(shard: &Shard, team: &Team, weight: &[f32], residual: &[f32], rows: usize, out: &mut Inputs) {
    let (hidden, eps) = (shard.plan.config.hidden_size, shard.plan.config.rms_norm_eps);
    let out = out.writer();
    team.for_each(rows, |row| {
        let values = &residual[row * hidden..][..hidden];
        // SAFETY: each unit has another row.
        rms_norm(values, weight, eps, shard.plan.hidden, |at, values| unsafe { out.write(row, at, values) });
    });
}

/// Units of a product that is cut by [`UNIT_TILES`].
fn units(panel: &Panel<'_>) -> usize {
    panel.row_tiles().div_ceil(UNIT_TILES)
}

fn unit_of(panel: Panel<'_>, unit: usize) -> Panel<'_> {
    let first = unit * UNIT_TILES;
    panel.tiles(first, UNIT_TILES.min(panel.row_tiles() - first))
}

/// The weights that stream next, for threads that wait.
fn ahead(shard: &Shard, layer: usize, which: Product) -> Ahead<'_> {
    let panel = shard.weights.panel(layer, which);
    let units = match which {
        Product::QueryKeyValue => shard.rank.heads.len() + 2 * shard.rank.kv_heads.len(),
        _ => units(&panel),
    };
    Ahead::new(panel.data(), units)
}

/// Multiplies all rows by a panel, a block at a time in `out`, and hands each row's `tiles * 16` values to `done`.
fn each_block(
    shard: &Shard,
    panel: Panel<'_>,
    (x, expansions): (&Inputs, &Expansions),
    rows: usize,
    out: &mut [f32],
    mut done: impl FnMut(usize, &mut [f32]),
) {
    expansions.with(shard.isa, panel, rows, |panel| {
        for first in (0..rows).step_by(MAX_COLUMNS) {
            x.product(shard.isa, panel, (first, rows), out);
            let values = out.chunks_exact_mut(panel.row_tiles() * LANES);
            for (column, values) in values.take(MAX_COLUMNS.min(rows - first)).enumerate() {
                panel.scale(values);
                done(first + column, values);
            }
        }
    });
}
