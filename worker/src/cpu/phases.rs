//! The phases of a layer, each cut into units for the team. [`super::looped_decoder`] puts them in order.
//!
//! Weights stream through units of one head or four row tiles; all rows of the step share a pass over them, in blocks of
//! [`MAX_COLUMNS`]. Where a phase writes a buffer, its units own disjoint parts of it; the join at its end publishes them.
#![allow(unsafe_code)]

use super::ahead::Ahead;
use super::attention::{Page, View, attend};
use super::fabric::{Fabric, Place, SLICE};
use super::inputs::Inputs;
use super::isa::Isa;
use super::lanes::LANES;
use super::memory::{Buffer, Disjoint, OutOfMemory};
use super::norm::{head_norm, rms_norm};
use super::product::{MAX_COLUMNS, Panel, product};
use super::rope::{Rope, rotate};
use super::team::Team;
use super::weights::Weights;
use crate::batch::{Batch, Row};
use crate::decoder::Fault;
use crate::plan::rounding::RoundingPoint;
use crate::plan::tree::tree_sum_rows;
use crate::plan::{KvLayout, MAX_LEAVES, ModelPlan, PAGE_POSITIONS, Product, RankPlan};
use crate::sampling::math::silu;

/// Row tiles of one unit of a product, and of one slice of an exchange.
const UNIT_TILES: usize = SLICE / LANES;

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

/// What a step writes; taken at load for the longest step.
pub struct Activations {
    /// `[rows, hidden]` fp32: the residual stream.
    residual: Buffer<f32>,
    /// `[rows, hidden leaves]`: normalised residual.
    attention_input: Inputs,
    /// `[rows, heads of this rank * head_dim]` fp32
    queries: Buffer<f32>,
    /// `[rows, head leaves of this rank]`: attention's output.
    attended: Inputs,
    /// `[rows, hidden leaves]`: normalised residual.
    mlp_input: Inputs,
    /// `[rows, intermediate leaves of this rank]`: `silu(gate) * up`.
    gated: Inputs,
    /// `[sampled rows, hidden leaves]`: normalised residual.
    head_input: Inputs,
    /// `[rows, head_dim / 2]` (cosine, sine)
    turns: Buffer<[f32; 2]>,
    /// `[sampled rows, vocabulary of this rank]` fp32
    logits: Buffer<f32>,
    /// K and V of all sequences, laid out by [`KvLayout`].
    pool: Buffer<f32>,
}

impl Activations {
    /// Buffers for steps of up to `max_rows` rows of which `max_samples` are sampled. The KV pool is filled with NaN: what
    /// no sequence has written must not count.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn new(shard: &Shard, max_rows: usize, max_samples: usize, team: &Team) -> Result<Self, OutOfMemory> {
        let (plan, rank) = (&shard.plan, &shard.rank);
        let c = &plan.config;
        let what = "the activations";
        let hidden = plan.hidden.padded_len(plan.hidden.count);
        let heads = plan.heads.padded_len(rank.head_leaves.len());
        let intermediate = plan.intermediate.padded_len(rank.intermediate_leaves.len());
        let pool_len = shard.kv.pool_len().unwrap_or(usize::MAX);
        let mut pool = Buffer::zeroed(pool_len, "the KV cache")?;
        let pages = Disjoint::new(&mut pool);
        const PART: usize = 1 << 20;
        team.for_each(pool_len.div_ceil(PART), |part| {
            // SAFETY: each unit has another part.
            let part = unsafe { pages.part(part * PART..((part + 1) * PART).min(pool_len)) };
            part.fill(f32::NAN);
        });
        Ok(Self {
            residual: Buffer::zeroed(max_rows * c.hidden_size, what)?,
            attention_input: Inputs::zeroed(RoundingPoint::AttentionInput, max_rows, hidden)?,
            queries: Buffer::zeroed(max_rows * rank.heads.len() * c.head_dim, what)?,
            attended: Inputs::zeroed(RoundingPoint::AttentionOutput, max_rows, heads)?,
            mlp_input: Inputs::zeroed(RoundingPoint::MlpInput, max_rows, hidden)?,
            gated: Inputs::zeroed(RoundingPoint::MlpProduct, max_rows, intermediate)?,
            head_input: Inputs::zeroed(RoundingPoint::LmHeadInput, max_samples, hidden)?,
            turns: Buffer::zeroed(max_rows * c.head_dim / 2, what)?,
            logits: Buffer::zeroed(max_samples * rank.vocab.len(), "the logits")?,
            pool,
        })
    }

    /// Bytes that [`Self::new`] takes beside the KV pool.
    pub fn bytes(plan: &ModelPlan, rank: &RankPlan, max_rows: usize, max_samples: usize) -> u64 {
        let c = &plan.config;
        let hidden = plan.hidden.padded_len(plan.hidden.count);
        let heads = plan.heads.padded_len(rank.head_leaves.len());
        let intermediate = plan.intermediate.padded_len(rank.intermediate_leaves.len());
        let rounded = Inputs::row_bytes;
        let row = (c.hidden_size + rank.heads.len() * c.head_dim + c.head_dim) * size_of::<f32>()
            + rounded(RoundingPoint::AttentionInput, hidden)
            + rounded(RoundingPoint::AttentionOutput, heads)
            + rounded(RoundingPoint::MlpInput, hidden)
            + rounded(RoundingPoint::MlpProduct, intermediate);
        let sample = rank.vocab.len() * size_of::<f32>() + rounded(RoundingPoint::LmHeadInput, hidden);
        (max_rows * row) as u64 + (max_samples * sample) as u64
    }

    /// Logits of the sampled rows of the step, `[samples, vocabulary of this rank]`.
    pub fn logits(&mut self, samples: usize, vocab: usize) -> &mut [f32] {
        &mut self.logits[..samples * vocab]
    }
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
}

impl Pass<'_> {
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

    /// attention_input = RMSNorm(residual)
    pub fn normalise_for_attention(&mut self, layer: usize) {
        let rows = self.batch.step().rows.len();
        let weight = &self.shard.weights.layers[layer].input_norm;
        normalise(self.shard, self.team, weight, &self.x.residual, rows, |row| row, &mut self.x.attention_input);
    }

    /// mlp_input = RMSNorm(residual)
    pub fn normalise_for_mlp(&mut self, layer: usize) {
        let rows = self.batch.step().rows.len();
        let weight = &self.shard.weights.layers[layer].mlp_norm;
        normalise(self.shard, self.team, weight, &self.x.residual, rows, |row| row, &mut self.x.mlp_input);
    }

    /// q, k, v = W attention_input + bias, heads normalised and rotated; q to the queries, k and v to the sequence's pages. A unit is
    /// a head.
    pub fn query_key_value(&mut self, layer: usize) {
        let (shard, batch) = (self.shard, self.batch);
        let (rows, d) = (&batch.step().rows[..], shard.plan.config.head_dim);
        let (heads, kv_heads) = (shard.rank.heads.len(), shard.rank.kv_heads.len());
        let panel = shard.weights.panel(layer, Product::QueryKeyValue);
        let vectors = &shard.weights.layers[layer];
        let (input, turns) = (&self.x.attention_input, &self.x.turns);
        let queries = Disjoint::new(&mut self.x.queries);
        let pool = Disjoint::new(&mut self.x.pool);
        let head_unit = |head: usize| {
            let panel = panel.tiles(head * d / LANES, d / LANES);
            let mut out = [0.0; MAX_COLUMNS * super::attention::MAX_HEAD_DIM];
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
                // SAFETY: every (row, head) has its own place: rows of a step have different (slot, position), slots have
                // different pages (the batch checks it), and units have different heads.
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
        let next = ahead(shard, layer, Product::AttentionOut);
        let threads = self.team.threads();
        self.team.for_each_then(heads + 2 * kv_heads, head_unit, |thread| next.of_thread(thread, threads).finish());
    }

    /// attended = attention of each row over its sequence's pages. A unit is a row and a KV head with its queries.
    pub fn attend(&mut self, layer: usize) {
        let (shard, batch) = (self.shard, self.batch);
        let (rows, c) = (&batch.step().rows[..], &shard.plan.config);
        let d = c.head_dim;
        let (heads, kv_heads) = (shard.rank.heads.len(), shard.rank.kv_heads.len());
        let group = heads / kv_heads * d;
        let (queries, pool) = (&self.x.queries, &self.x.pool);
        let attended = self.x.attended.writer();
        let unit = |unit: usize| {
            let (kv_head, row) = (unit / rows.len(), unit % rows.len());
            let at = row * heads * d + kv_head * group;
            let pages = batch.slot(rows[row].slot).pages();
            let page = |index: usize| {
                let (k, v) = (
                    shard.kv.k_block(layer, pages[index] as usize, kv_head),
                    shard.kv.v_block(layer, pages[index] as usize, kv_head),
                );
                Page { keys: &pool[k..k + shard.kv.block_len()], values: &pool[v..v + shard.kv.block_len()] }
            };
            let view = View::new(rows[row].position as usize, c.sliding_window);
            attend(shard.isa, d, view, page, &queries[at..at + group], |offset, values| {
                // SAFETY: each unit has another (row, group of heads).
                unsafe { attended.write(row, kv_head * group + offset, values) };
            });
        };
        let next = ahead(shard, layer, Product::AttentionOut);
        let threads = self.team.threads();
        self.team.for_each_then(kv_heads * rows.len(), unit, |thread| next.of_thread(thread, threads).finish());
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

    /// gated = silu(W_gate mlp_input) * (W_up mlp_input). A unit is two pairs of tiles.
    pub fn gate_up(&mut self, layer: usize) {
        let (shard, rows) = (self.shard, self.batch.step().rows.len());
        let leaves = shard.plan.intermediate;
        let width = shard.rank.intermediate.len();
        let panel = shard.weights.panel(layer, Product::GateUp);
        let (input, gated) = (&self.x.mlp_input, self.x.gated.writer());
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
        let last = layer + 1 == self.shard.plan.config.num_layers;
        let next = match last {
            false => ahead(self.shard, layer + 1, Product::QueryKeyValue),
            true if self.batch.step().samples.is_empty() => ahead(self.shard, 0, Product::QueryKeyValue),
            true => ahead(self.shard, layer, Product::LmHead),
        };
        let place = Place { step: self.step, layer: Some(layer), what: "MLP sum" };
        self.add_product(layer, Product::Down, place, next)
    }

    /// Residual += W x over this rank's leaves of K, exchanged and summed as the plan's tree.
    fn add_product(&mut self, layer: usize, which: Product, place: Place, next: Ahead<'_>) -> Result<(), Fault> {
        let (shard, rows) = (self.shard, self.batch.step().rows.len());
        let hidden = shard.plan.config.hidden_size;
        let panel = shard.weights.panel(layer, which);
        let x = if which == Product::Down { &self.x.gated } else { &self.x.attended };
        let residual = Disjoint::new(&mut self.x.residual);
        let partial = |slice: usize, out: &mut [f32]| {
            let panel = unit_of(panel, slice);
            let block = MAX_COLUMNS * panel.tiles * LANES;
            for (index, out) in out.chunks_mut(block).take(rows.div_ceil(MAX_COLUMNS)).enumerate() {
                product(shard.isa, panel, x.columns(index * MAX_COLUMNS, rows), out);
            }
        };
        let add = |slice: usize, of_ranks: &[&[f32]]| {
            let stride = unit_of(panel, slice).tiles * LANES;
            let width = SLICE.min(hidden - slice * SLICE);
            let mut sums = [0.0; MAX_LEAVES * SLICE];
            for row in 0..rows {
                for (sum, of_rank) in sums.chunks_exact_mut(width).zip(of_ranks) {
                    sum.copy_from_slice(&of_rank[row * stride..][..width]);
                }
                tree_sum_rows(&mut sums[..of_ranks.len() * width], width);
                let at = row * hidden + slice * SLICE;
                // SAFETY: each slice is consumed by one thread and has other columns.
                let out = unsafe { residual.part(at..at + width) };
                out.iter_mut().zip(&sums).for_each(|(out, sum)| *out += sum);
            }
        };
        self.fabric.exchange(self.team, place, &next, partial, add)
    }

    /// logits = W_lm RMSNorm(residual) of the rows that are sampled.
    pub fn logits(&mut self) {
        let (shard, samples) = (self.shard, &self.batch.step().samples[..]);
        if samples.is_empty() {
            return;
        }
        let vocab = shard.rank.vocab.len();
        let weight = &shard.weights.final_norm;
        let row_of = |sample: usize| samples[sample];
        normalise(shard, self.team, weight, &self.x.residual, samples.len(), row_of, &mut self.x.head_input);
        let panel = shard.weights.panel(0, Product::LmHead);
        let (input, logits) = (&self.x.head_input, Disjoint::new(&mut self.x.logits));
        let unit = |unit: usize| {
            let panel = unit_of(panel, unit);
            let mut out = [0.0; MAX_COLUMNS * SLICE];
            each_block(shard, panel, input, samples.len(), &mut out, |row, values| {
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

/// Row i of `out` = RMSNorm of row `row_of(i)` of the residual stream, for `rows` rows.
fn normalise(
    shard: &Shard,
    team: &Team,
    weight: &[f32],
    residual: &[f32],
    rows: usize,
    row_of: impl Fn(usize) -> usize + Sync,
    out: &mut Inputs,
) {
    let (hidden, eps) = (shard.plan.config.hidden_size, shard.plan.config.rms_norm_eps);
    let out = out.writer();
    team.for_each(rows, |index| {
        let row = &residual[row_of(index) * hidden..][..hidden];
        // SAFETY: each unit has another row.
        rms_norm(row, weight, eps, shard.plan.hidden, |at, values| unsafe { out.write(index, at, values) });
    });
}

/// Units of a product that is cut by [`UNIT_TILES`].
fn units(panel: &Panel<'_>) -> usize {
    panel.tiles.div_ceil(UNIT_TILES)
}

fn unit_of(panel: Panel<'_>, unit: usize) -> Panel<'_> {
    let first = unit * UNIT_TILES;
    panel.tiles(first, UNIT_TILES.min(panel.tiles - first))
}

/// The weights that stream next, for threads that wait.
fn ahead(shard: &Shard, layer: usize, which: Product) -> Ahead<'_> {
    let panel = shard.weights.panel(layer, which);
    let units = match which {
        Product::QueryKeyValue => shard.rank.heads.len() + 2 * shard.rank.kv_heads.len(),
        _ => units(&panel),
    };
    Ahead::new(panel.data, units)
}

/// Multiplies all rows by a panel, a block at a time in `out`, and hands each row's `tiles * 16` values to `done`.
fn each_block(
    shard: &Shard,
    panel: Panel<'_>,
    x: &Inputs,
    rows: usize,
    out: &mut [f32],
    mut done: impl FnMut(usize, &mut [f32]),
) {
    for first in (0..rows).step_by(MAX_COLUMNS) {
        let columns = x.columns(first, rows);
        product(shard.isa, panel, columns, out);
        for (column, values) in out.chunks_exact_mut(panel.tiles * LANES).take(columns.count).enumerate() {
            done(first + column, values);
        }
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
