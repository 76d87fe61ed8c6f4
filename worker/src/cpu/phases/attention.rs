//! The phases of attention: q, k and v, the scores over the pages, and the output product.

use super::{Pass, Place, Shard, ahead, each_block, normalise};
use crate::batch::{Batch, Row};
use crate::cpu::kernels::LANES;
use crate::cpu::kernels::attention::{MAX_HEAD_DIM, Page, View, attend};
use crate::cpu::kernels::norm::head_norm;
use crate::cpu::kernels::product::MAX_COLUMNS;
use crate::cpu::memory::Disjoint;
use crate::decoder::Fault;
use crate::plan::{PAGE_POSITIONS, Product};
use crate::rope::rotate;

impl Pass<'_> {
    /// attention_input = RMSNorm(residual)
    pub fn normalise_for_attention(&mut self, layer: usize) {
        let (rows, weight) = (self.rows(), &self.shard.weights.layers[layer].input_norm);
        normalise(self.shard, self.team, weight, &self.x.residual, rows, &mut self.x.attention_input);
    }

    /// q, k, v = W attention_input + bias, heads normalised and rotated; q to the queries, k and v to the sequence's
    /// pages. A unit is a head.
    pub fn query_key_value(&mut self, layer: usize) {
        let (shard, batch) = (self.shard, self.batch);
        let (rows, d) = (&batch.step().rows[..], shard.plan.config.head_dim);
        let (heads, kv_heads) = (shard.rank.heads.len(), shard.rank.kv_heads.len());
        let panel = shard.weights.panel(layer, Product::QueryKeyValue);
        let vectors = &shard.weights.layers[layer];
        let (input, turns) = ((&self.x.attention_input, &self.x.expansions), &self.x.turns);
        let queries = Disjoint::new(&mut self.x.queries);
        let pool = Disjoint::new(&mut self.x.pool);
        input.0.sum(shard.isa, self.team, &panel, rows.len());
        let head_unit = |head: usize| {
            let panel = panel.tiles(head * d / LANES, d / LANES);
            let mut out = [0.0; MAX_COLUMNS * MAX_HEAD_DIM];
            each_block(shard, panel, input, rows.len(), &mut out, |row, values| {
                if let Some(bias) = &vectors.bias {
                    values.iter_mut().zip(&bias[head * d..]).for_each(|(value, bias)| *value += bias);
                }
                let rotated = head < heads + kv_heads;
                if let (true, Some([of_q, of_k])) = (rotated, &vectors.head_norms) {
                    head_norm(values, if head < heads { of_q } else { of_k }, shard.plan.config.rms_norm_eps);
                }
                if rotated {
                    rotate(values, &turns[row * d / 2..(row + 1) * d / 2]);
                }
                // SAFETY: every (row, head) has its own place: rows of a step have different (slot, position), slots
                // have different pages (the batch checks it), and units have different heads.
                unsafe {
                    if head < heads {
                        let at = (row * heads + head) * d;
                        queries.part(at..at + d).copy_from_slice(values);
                    } else if rotated {
                        append_key(shard, layer, head - heads, batch, &rows[row], values, &pool);
                    } else {
                        let (page, in_page) = place(batch, &rows[row]);
                        let at =
                            shard.kv.v_block(layer, page, head - heads - kv_heads) + shard.kv.v_element(in_page, 0);
                        pool.part(at..at + d).copy_from_slice(values);
                    }
                }
            });
        };
        let ends = layer + 1 == shard.plan.config.num_layers && batch.step().samples.is_empty();
        let next = match ends {
            false => ahead(shard, layer, Product::AttentionOut),
            true => ahead(shard, 0, Product::QueryKeyValue),
        };
        let threads = self.team.threads();
        self.team.for_each_then(heads + 2 * kv_heads, head_unit, |thread| next.of_thread(thread, threads).finish());
    }

    /// attended = attention of each row over its sequence's pages. A unit is a row and a KV head with its queries.
    pub fn attend(&mut self, layer: usize) {
        let (shard, batch, rows) = (self.shard, self.batch, self.rows());
        let c = &shard.plan.config;
        let d = c.head_dim;
        let samples = self.only_samples.then_some(&batch.step().samples[..]);
        let (heads, kv_heads) = (shard.rank.heads.len(), shard.rank.kv_heads.len());
        let group = heads / kv_heads * d;
        let (queries, pool) = (&self.x.queries, &self.x.pool);
        let attended = self.x.attended.writer();
        let unit = |unit: usize| {
            let (kv_head, index) = (unit / rows, unit % rows);
            let row = samples.map_or(index, |samples| samples[index]);
            let at = row * heads * d + kv_head * group;
            let Row { slot, position, .. } = batch.step().rows[row];
            let pages = batch.slot(slot).pages();
            let page = |index: usize| {
                let (k, v) = (
                    shard.kv.k_block(layer, pages[index] as usize, kv_head),
                    shard.kv.v_block(layer, pages[index] as usize, kv_head),
                );
                Page { keys: &pool[k..k + shard.kv.block_len()], values: &pool[v..v + shard.kv.block_len()] }
            };
            let view = View::new(position as usize, c.sliding_window);
            attend(shard.isa, d, view, page, &queries[at..at + group], |offset, values| {
                // SAFETY: each unit has another (row, group of heads).
                unsafe { attended.write(index, kv_head * group + offset, values) };
            });
        };
        let next = ahead(shard, layer, Product::AttentionOut);
        let threads = self.team.threads();
        self.team.for_each_then(kv_heads * rows, unit, |thread| next.of_thread(thread, threads).finish());
    }

    /// Residual += W_o attended, summed over all ranks.
    ///
    /// # Errors
    /// A rank did not arrive in time.
    pub fn add_attention(&mut self, layer: usize) -> Result<(), Fault> {
        let next = ahead(self.shard, layer, Product::GateUp);
        let place = Place { step: self.step, layer: Some(layer), what: "attention sum" };
        self.add_product(layer, Product::AttentionOut, place, next)
    }
}

/// Page and place in it of a row's position.
fn place(batch: &Batch, row: &Row) -> (usize, usize) {
    let position = row.position as usize;
    (batch.slot(row.slot).pages()[position / PAGE_POSITIONS] as usize, position % PAGE_POSITIONS)
}

/// Puts a key into its page.
///
/// # Safety
/// Nobody else uses the place of this (row, head) meanwhile.
unsafe fn append_key(
    shard: &Shard,
    layer: usize,
    kv_head: usize,
    batch: &Batch,
    row: &Row,
    key: &[f32],
    pool: &Disjoint<'_, f32>,
) {
    let (page, in_page) = place(batch, row);
    let block = shard.kv.k_block(layer, page, kv_head);
    for (dim, value) in key.iter().enumerate() {
        let at = block + shard.kv.k_element(in_page, dim);
        // SAFETY: the caller's.
        let place = unsafe { pool.part(at..at + 1) };
        place[0] = *value;
    }
}
