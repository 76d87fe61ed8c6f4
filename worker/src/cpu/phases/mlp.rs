//! The phases of the MLP.

use super::{Pass, Place, UNIT_TILES, ahead, each_block, normalise, unit_of, units};
use crate::cpu::fabric::SLICE;
use crate::cpu::kernels::LANES;
use crate::cpu::kernels::product::MAX_COLUMNS;
use crate::decoder::Fault;
use crate::math::silu;
use crate::plan::Product;

impl Pass<'_> {
    /// mlp_input = RMSNorm(residual)
    pub fn normalise_for_mlp(&mut self, layer: usize) {
        let (rows, weight) = (self.rows(), &self.shard.weights.layers[layer].mlp_norm);
        normalise(self.shard, self.team, weight, &self.x.residual, rows, &mut self.x.mlp_input);
    }

    /// gated = silu(W_gate mlp_input) * (W_up mlp_input). A unit is two pairs of tiles.
    pub fn gate_up(&mut self, layer: usize) {
        let (shard, rows) = (self.shard, self.rows());
        let leaves = shard.plan.intermediate;
        let width = shard.rank.intermediate.len();
        let panel = shard.weights.panel(layer, Product::GateUp);
        let (input, gated) = ((&self.x.mlp_input, &self.x.expansions), self.x.gated.writer());
        input.0.sum(shard.isa, self.team, &panel, rows);
        let unit = |unit: usize| {
            let panel = unit_of(panel, unit);
            let mut out = [0.0; MAX_COLUMNS * SLICE];
            each_block(shard, panel, input, rows, &mut out, |row, values| {
                for (pair, values) in values.chunks_exact(2 * LANES).enumerate() {
                    let (gate, up) = values.split_at(LANES);
                    let products: [f32; LANES] = std::array::from_fn(|i| silu(gate[i]) * up[i]);
                    let mut column = (unit * UNIT_TILES / 2 + pair) * LANES;
                    let mut left = &products[..LANES.min(width - column)];
                    while !left.is_empty() {
                        // A tile may straddle leaves, which are padded.
                        let run = left.len().min(leaves.len - column % leaves.len);
                        // SAFETY: each (row, tile pair) has other columns, and each unit other pairs.
                        unsafe { gated.write(row, leaves.padded_column(column), &left[..run]) };
                        left = &left[run..];
                        column += run;
                    }
                }
            });
        };
        let next = ahead(shard, layer, Product::Down);
        let threads = self.team.threads();
        self.team.for_each_then(units(&panel), unit, |thread| next.of_thread(thread, threads).finish());
    }

    /// Residual += W_down gated, summed over all ranks.
    ///
    /// # Errors
    /// A rank did not arrive in time.
    pub fn add_mlp(&mut self, layer: usize) -> Result<(), Fault> {
        let next = match self.only_samples {
            false => ahead(self.shard, layer + 1, Product::QueryKeyValue),
            true => ahead(self.shard, layer, Product::LmHead),
        };
        let place = Place { step: self.step, layer: Some(layer), what: "MLP sum" };
        self.add_product(layer, Product::Down, place, next)
    }
}
