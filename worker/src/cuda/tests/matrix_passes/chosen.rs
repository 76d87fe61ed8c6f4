//! Passes choose the tokens that the sampler draws.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::{matrix_only, shape};
use crate::cuda::Options;
use crate::cuda::kernels::launch::Row;
use crate::cuda::launches::looped_decoder::{Draws, Launcher};
use crate::cuda::tests::gpu::gpu;
use crate::cuda::tests::wide::{Model, decoding_row, load_rows, random};
use crate::model::source::{RandomSource, Source};
use crate::model::{ModelConfig, Tensor};

/// A model whose LM head repeats its first rows, so that a logit is there several times.
pub(in crate::cuda::tests) struct Echo {
    pub(in crate::cuda::tests) of: RandomSource,
    /// Rows of the LM head that differ.
    pub(in crate::cuda::tests) rows: usize,
}

impl Source for Echo {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        if tensor != Tensor::LmHead {
            return self.of.read(tensor, rows, columns, out);
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            let row = row % self.rows;
            self.of.read(tensor, row..row + 1, columns.clone(), out);
        }
    }

    fn scales(&self, _tensor: Tensor, _rows: Range<usize>, _column: usize, out: &mut [f32]) {
        out.fill(1.0);
    }
}

/// Rows of the LM head that differ, where a model has logits several times.
const ECHO_ROWS: usize = 677;

/// A row of a chain: slot, token, position, steps up to its last.
type ChainRow = (u32, u32, u32, u32);

/// Tokens by step of a chain of up to `steps` steps, which is asked to stop behind step `stop`.
fn chain(model: &mut Model, rows: &[ChainRow], steps: u32, stop: Option<usize>, sampled: bool) -> Vec<Vec<u32>> {
    let row = |(column, &(slot, token, position, left)): (usize, &ChainRow)| {
        decoding_row(column, (slot, token, position), left)
    };
    let launched: Vec<Row> = rows.iter().enumerate().map(row).collect();
    let engine = &mut model.decoder.decoder.launcher;
    let launch = engine.launch(&launched, steps, Draws::sampler_if(sampled)).unwrap_or_else(|fault| panic!("{fault}"));
    let mut all: Vec<Vec<u32>> = Vec::new();
    while engine.wait_step(launch, all.len() as u32, &|| false).unwrap_or_else(|fault| panic!("{fault}")) {
        let step = all.len() as u32;
        all.push((0..rows.len()).map(|row| engine.sampled(launch, step, row, None).token).collect());
        if stop == Some(step as usize) {
            engine.stop();
        }
    }
    engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
    all
}

/// Passes choose the tokens that the sampler draws: of any number of rows, those of NaN among them, where the largest
/// logit is there more than once, and in chains that end early.
#[test]
fn passes_choose_the_tokens_that_the_sampler_draws() {
    if !gpu() {
        return;
    }
    const SLOTS: usize = 512;
    // Not whole tiles of the LM head.
    let config = ModelConfig { max_positions: 128, vocab_size: 2041, ..shape(576, (9, 3, 64), 1536) };
    let echo: Arc<dyn Source + Send> =
        Arc::new(Echo { of: RandomSource { config: config.clone(), seed: 3 }, rows: ECHO_ROWS });
    for (source, echoes) in [(random(&config), false), (echo, true)] {
        let decoder = load_rows(&config, source, (SLOTS, SLOTS), false, Options::default());
        let mut model = Model::new(decoder, SLOTS);
        matrix_only(&mut model, true);
        // In front of position 70 nothing has been computed.
        let is_empty = |slot: u32| slot % 7 == 3;
        let row = |slot: u32| match is_empty(slot) {
            true => (slot, 5, 70, 40),
            false => (slot, slot * 13 % 2041, 0, 40),
        };
        for count in [1, 2, 31, 32, 33, 64, 65, 97, 128, 129, 200, 257, 384, 511, 512] {
            let rows: Vec<ChainRow> = (0..count).map(row).collect();
            let [chosen, drawn] = [false, true].map(|sampled| chain(&mut model, &rows, 3, None, sampled));
            assert!(chosen == drawn && chosen.len() == 3, "{count} rows, a head that repeats: {echoes}");
            for (row, token) in chosen.iter().flat_map(|step| rows.iter().zip(step)) {
                assert!(!is_empty(row.0) || *token == 0, "NaN alone: token {token}");
                assert!(!echoes || (*token as usize) < ECHO_ROWS, "not the first of equal logits: {token}");
            }
            let distinct: HashSet<&u32> = chosen.iter().flatten().collect();
            assert!(count < 64 || distinct.len() > 8, "rows differ: {distinct:?}");
        }
        let rows: Vec<ChainRow> = (0..130).map(row).collect();
        let whole = chain(&mut model, &rows, 40, None, true);
        assert_eq!(whole.len(), 40);
        for (stop, sampled) in [(0, false), (1, false), (7, false), (7, true)] {
            let got = chain(&mut model, &rows, 40, Some(stop), sampled);
            assert!(got.len() > stop && got.len() < 40, "{} steps, stopped behind {stop}", got.len());
            assert!(got == whole[..got.len()], "stopped behind step {stop}");
        }
        let mut short = rows.clone();
        short[77].3 = 6;
        for sampled in [false, true] {
            assert!(chain(&mut model, &short, 40, None, sampled) == whole[..6], "the first row that ends ends a chain");
        }
        // What a chain that was stopped leaves behind does not stop the next one.
        assert!(chain(&mut model, &rows, 40, None, false) == whole);
    }
}
