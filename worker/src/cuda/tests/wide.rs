//! Passes of every width on a GPU: a sequence has the bits that it has alone in narrow passes, whatever is computed
//! beside it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;

use super::gpu::{BROKEN, gpu};
use super::plans::{Request, drive, plans, replies};
use crate::batch;
use crate::cuda::kernels::launch::{ROW_SAMPLE, Row};
use crate::cuda::launches::looped_decoder::{Draws, Launcher};
use crate::cuda::{CudaDecoder, Gauge, LoopMode, Options, Phase, load_with};
use crate::decoder::{Decoder, Device, LoadRequest, Sockets};
use crate::model::conversion::expanded::tests::Grouped;
use crate::model::conversion::quantised::tests::PowersOfTwo;
use crate::model::format::INT4;
use crate::model::source::{RandomSource, Source};
use crate::model::{LayerTensor, ModelConfig, Tensor, WeightFormat};
use crate::plan::KvLayout;
use crate::sampling::SamplingParams;

/// Sequences of a test, as many as the widest pass that samples has rows.
const SLOTS: usize = 64;
/// Those from here on are never computed: their pages hold NaN.
const FIRST_EMPTY: usize = 52;
const CONTEXT: usize = 1536;
const BATCH_TOKENS: usize = 512;
const VOCAB: usize = 2048;
/// Most rows of the narrow kernels.
pub(super) const NARROW: usize = 8;

/// Models that the wide kernel takes, small but for what decides how a layer is dealt to the blocks.
pub(super) fn llama_1b() -> ModelConfig {
    let shape = crate::plan::tests::config(32, 8, 4096, VOCAB);
    ModelConfig { hidden_size: 2048, head_dim: 64, tied_embeddings: true, max_positions: CONTEXT, ..shape }
}

pub(super) fn llama_8b() -> ModelConfig {
    let shape = crate::plan::tests::config(32, 8, 14_336, VOCAB);
    ModelConfig { hidden_size: 4096, head_dim: 128, max_positions: CONTEXT, ..shape }
}

/// Everything that decoders differ in, at once.
pub(super) fn with_features() -> ModelConfig {
    ModelConfig { qkv_bias: true, qk_norm: true, sliding_window: Some(300), ..llama_8b() }
}

/// Llama 3.2 3B's layers: a pair's blocks own unequally much, of ranks pairs, too.
pub(super) fn llama_3b() -> ModelConfig {
    ModelConfig {
        hidden_size: 3072,
        head_dim: 128,
        max_positions: CONTEXT,
        ..crate::plan::tests::config(24, 8, 8192, VOCAB)
    }
}

/// Qwen 3 4B's: pairs that own unequally much, leaves of 10 and of 38 k16 steps, norms of heads.
fn qwen3_4b() -> ModelConfig {
    let shape = crate::plan::tests::config(32, 8, 9728, VOCAB);
    ModelConfig { hidden_size: 2560, head_dim: 128, qk_norm: true, max_positions: CONTEXT, ..shape }
}

/// Mistral Nemo's: leaves of 20 k16 steps, whose last part is shorter.
pub(super) fn mistral_nemo() -> ModelConfig {
    let shape = crate::plan::tests::config(32, 8, 14_336, VOCAB);
    ModelConfig { hidden_size: 5120, head_dim: 128, max_positions: CONTEXT, ..shape }
}

/// Qwen 2.5 7B's: seven query heads a KV head, two passes over gate and up.
pub(super) fn qwen2_7b() -> ModelConfig {
    let shape = crate::plan::tests::config(28, 4, 18_944, VOCAB);
    ModelConfig { hidden_size: 3584, head_dim: 128, qkv_bias: true, max_positions: CONTEXT, ..shape }
}

/// Qwen 2.5 0.5B's: leaves of 7 k16 steps, two leaves of o, blocks without rows of the hidden state.
pub(super) fn qwen2_half_b() -> ModelConfig {
    let shape = crate::plan::tests::config(14, 2, 4864, VOCAB);
    ModelConfig { hidden_size: 896, head_dim: 64, qkv_bias: true, max_positions: CONTEXT, ..shape }
}

/// SmolLM2 135M's: o is not cut, most blocks have no part in o and down, and three KV heads do not divide the blocks.
pub(super) fn smol() -> ModelConfig {
    let shape = crate::plan::tests::config(9, 3, 1536, VOCAB);
    ModelConfig { hidden_size: 576, head_dim: 64, tied_embeddings: true, max_positions: CONTEXT, ..shape }
}

pub(super) fn load(
    config: &ModelConfig,
    source: Arc<dyn Source + Send>,
    slots: usize,
    blocks: Option<usize>,
) -> CudaDecoder {
    load_with_options(config, source, slots, false, Options { blocks, ..Options::default() })
}

fn load_with_options(
    config: &ModelConfig,
    source: Arc<dyn Source + Send>,
    slots: usize,
    unlooped: bool,
    options: Options,
) -> CudaDecoder {
    load_rows(config, source, (slots, BATCH_TOKENS), unlooped, options)
}

/// For steps of up to so many rows.
pub(super) fn load_rows(
    config: &ModelConfig,
    source: Arc<dyn Source + Send>,
    (slots, max_batch_tokens): (usize, usize),
    unlooped: bool,
    options: Options,
) -> CudaDecoder {
    let request = LoadRequest {
        model_dir: "random".into(),
        rank: 0,
        tensor_parallel: 1,
        threads: 1,
        max_slots: slots,
        max_batch_tokens,
        kv_pages: slots * KvLayout::pages_for(config.max_positions),
        kv_bytes_limit: 0,
        wait_limit: Duration::from_secs(20),
        max_context: config.max_positions,
        device: Device::Cuda,
        quantization: None,
        unlooped,
        measure_read_limit: false,
        draft_corpus_tokens: 0,
        vocabulary: None,
        others: Sockets::default(),
    };
    let options = Options { random: Some((config.clone(), source)), poison: true, ..options };
    load_with(&request, &options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"))
}

pub(super) fn random(config: &ModelConfig) -> Arc<dyn Source + Send> {
    Arc::new(RandomSource { config: config.clone(), seed: 3 })
}

/// Bits of the logits of a position.
pub(super) type Bits = Vec<u32>;

/// A model whose rows are launched by hand.
pub(super) struct Model {
    pub(super) decoder: CudaDecoder,
    vocab: usize,
}

/// A row that decodes at `column`, alone of its sequence, for `steps` steps: of (slot, token, position).
pub(super) fn decoding_row(column: usize, (slot, token, position): (u32, u32, u32), steps: u32) -> Row {
    Row {
        token,
        position,
        slot,
        first_row: column as u32,
        first_position: position,
        flags: ROW_SAMPLE,
        last_position: position + steps - 1,
        reserved: 0,
    }
}

impl Model {
    pub(super) fn new(mut decoder: CudaDecoder, slots: usize) -> Self {
        let loaded = decoder.loaded();
        let (vocab, slot_pages) = (loaded.vocab_size, KvLayout::pages_for(loaded.max_context) as u32);
        let engine = &mut decoder.decoder.launcher;
        engine.enter().unwrap();
        for slot in 0..slots as u32 {
            // Pages of a sequence lie anywhere.
            let total = slots as u32 * slot_pages;
            let pages: Vec<u32> = (0..slot_pages).map(|page| (slot * slot_pages + page) * 1009 % total).collect();
            engine.write_pages(slot, 0, &pages).unwrap();
        }
        Self { decoder, vocab }
    }

    /// Computes rows (slot, token, position) in one step, those of a slot next to each other, and returns the logits of
    /// the rows that sample. `most`: rows of a pass, or as the product chooses.
    pub(super) fn step(&mut self, rows: &[(u32, u32, u32)], samples: &[bool], most: Option<usize>) -> Vec<Bits> {
        let engine = &mut self.decoder.decoder.launcher;
        let asked = rows.iter().zip(samples);
        let asked = asked.map(|(&(slot, token, position), &sample)| batch::Row { slot, token, position, sample });
        let passes = match most {
            Some(most) => (0..rows.len()).step_by(most).map(|first| first..(first + most).min(rows.len())).collect(),
            None => engine.passes().of(&asked.collect::<Vec<_>>()),
        };
        let mut kept = 0;
        for pass in passes {
            let mut launched: Vec<Row> = Vec::new();
            for (column, (slot, token, position)) in rows[pass.clone()].iter().copied().enumerate() {
                let (first_row, first_position) = match launched.last() {
                    Some(before) if before.slot == slot => (before.first_row, before.first_position),
                    _ => (column as u32, position),
                };
                let flags = if samples[pass.start + column] { ROW_SAMPLE } else { 0 };
                let last_position = position;
                launched.push(Row {
                    token,
                    position,
                    slot,
                    first_row,
                    first_position,
                    flags,
                    last_position,
                    reserved: 0,
                });
            }
            let sampled: Vec<usize> = (0..pass.len()).filter(|column| samples[pass.start + column]).collect();
            engine
                .launch(&launched, 1, Draws::sampler_if(!sampled.is_empty()))
                .unwrap_or_else(|fault| panic!("{fault}"));
            for column in sampled {
                engine.keep_logits(column, kept).unwrap();
                kept += 1;
            }
        }
        engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
        let padded = engine.logits(1).len();
        let bits = |row: &[f32]| row[..self.vocab].iter().map(|logit| logit.to_bits()).collect();
        engine.logits(kept).chunks_exact(padded).map(bits).collect()
    }

    /// Tokens of a launch of several steps, by step.
    pub(super) fn many_steps(&mut self, rows: &[(u32, u32, u32)], steps: u32) -> Vec<Vec<u32>> {
        let row = |(column, &row): (usize, &(u32, u32, u32))| decoding_row(column, row, steps);
        let rows: Vec<Row> = rows.iter().enumerate().map(row).collect();
        let engine = &mut self.decoder.decoder.launcher;
        let launch = engine.launch(&rows, steps, Draws::Decoder).unwrap_or_else(|fault| panic!("{fault}"));
        for step in 0..steps {
            assert!(engine.wait_step(launch, step, &|| false).unwrap_or_else(|fault| panic!("{fault}")), "step {step}");
        }
        engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
        let token = |step, column| engine.sampled(launch, step, column, None).token;
        (0..steps).map(|step| (0..rows.len()).map(|column| token(step, column)).collect()).collect()
    }

    /// Computes a sequence in narrow passes; the logits after every token.
    pub(super) fn alone(&mut self, slot: u32, tokens: &[u32]) -> Vec<Bits> {
        let rows: Vec<_> = (0..).zip(tokens).map(|(position, token)| (slot, *token, position)).collect();
        rows.chunks(NARROW).flat_map(|rows| self.step(rows, &[true; NARROW][..rows.len()], Some(NARROW))).collect()
    }

    /// Computes a prompt in steps of `chunk` rows; the logits after each. `most`: rows of a pass, or as the product
    /// chooses.
    pub(super) fn prompt(&mut self, slot: u32, tokens: &[u32], chunk: usize, most: Option<usize>) -> Vec<Bits> {
        let rows: Vec<_> = (0..).zip(tokens).map(|(position, token)| (slot, *token, position)).collect();
        let last = |rows: &[_]| (1..=rows.len()).map(|row| row == rows.len()).collect::<Vec<_>>();
        rows.chunks(chunk).flat_map(|rows| self.step(rows, &last(rows), most)).collect()
    }
}

fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed * 977 + i * 37 + i * i % 101) % VOCAB as u32).collect()
}

/// A sequence's length, of any number of pages.
fn length(slot: usize) -> usize {
    1 + (slot * 397 + 60) % (CONTEXT - 1)
}

pub(super) fn is_nan(bits: &Bits) -> bool {
    bits.iter().all(|bits| f32::from_bits(*bits).is_nan())
}

fn check_batches(config: &ModelConfig) {
    if !gpu() {
        return;
    }
    let mut model = Model::new(load(config, random(config), SLOTS, None), SLOTS);
    assert_eq!(model.decoder.decoder.launcher.widest_loop(), SLOTS, "the wide kernel computes this model");
    // Prompts in any passes; then the last token of each again, alone.
    let all: Vec<_> = (0..FIRST_EMPTY).map(|slot| tokens(slot as u32, length(slot))).collect();
    all.iter().enumerate().for_each(|(slot, tokens)| drop(model.prompt(slot as u32, tokens, 512, None)));
    let last = |slot: usize| (slot as u32, all[slot][length(slot) - 1], length(slot) as u32 - 1);
    let expected: Vec<Bits> = (0..FIRST_EMPTY).flat_map(|slot| model.step(&[last(slot)], &[true], Some(1))).collect();
    assert!(!expected.iter().any(is_nan));
    for (round, count) in [2, 3, 8, 9, 17, 31, 32, 33, 48, 63, 64].into_iter().enumerate() {
        // Which run beside each other, and in which column, differs by round; every fifth is one whose pages hold NaN.
        let slots = (0..count).map(|column| match column % 5 {
            4 => FIRST_EMPTY + (column / 5 + round) % (SLOTS - FIRST_EMPTY),
            _ => (column - column / 5 + round * 11) % FIRST_EMPTY,
        });
        let slots: Vec<_> = slots.collect();
        let row = |slot: &usize| match *slot < FIRST_EMPTY {
            true => last(*slot),
            false => (*slot as u32, 7, 100 + *slot as u32 * 20),
        };
        let rows: Vec<_> = slots.iter().map(row).collect();
        for (slot, got) in slots.iter().zip(model.step(&rows, &vec![true; count], None)) {
            match expected.get(*slot) {
                Some(expected) => assert!(got == *expected, "slot {slot} at {} among {count}", length(*slot) - 1),
                None => assert!(is_nan(&got), "a neighbour was to be NaN"),
            }
        }
    }
}

#[test]
fn a_row_has_its_bits_among_any_others_64_dimensions() {
    check_batches(&llama_1b());
}

#[test]
fn a_row_has_its_bits_among_any_others_128_dimensions() {
    check_batches(&llama_8b());
}

#[test]
fn a_row_has_its_bits_among_any_others_bias_norm_and_window() {
    check_batches(&with_features());
}

#[test]
fn a_row_has_its_bits_among_any_others_uneven_shares() {
    check_batches(&llama_3b());
    check_batches(&qwen3_4b());
}

#[test]
fn a_row_has_its_bits_among_any_others_odd_leaves() {
    check_batches(&qwen2_7b());
    check_batches(&qwen2_half_b());
}

#[test]
fn a_row_has_its_bits_among_any_others_idle_blocks() {
    check_batches(&smol());
}

fn check_prompts(config: &ModelConfig) {
    if !gpu() {
        return;
    }
    let mut model = Model::new(load(config, random(config), SLOTS, None), SLOTS);
    let sequence = tokens(5, 1100);
    let expected = model.alone(0, &sequence);
    for chunk in [1, 16, 64, 65, 100, 128, 129, 200, 512] {
        let got = model.prompt(1, if chunk == 1 { &sequence[..50] } else { &sequence }, chunk, None);
        let ends = (1..=got.len()).map(|chunks| (chunks * chunk).min(sequence.len()) - 1);
        for (end, got) in ends.zip(got) {
            assert!(got == expected[end], "position {end} in chunks of {chunk}");
        }
    }
    // Prompts of several sequences in one step, their first parts computed before; beside them rows that decode.
    let lengths = [(130usize, 40), (0, 90), (700, 1), (64, 10), (300, 250), (1000, 1), (5, 33)];
    for (slot, (before, _)) in (2..).zip(lengths) {
        if before > 0 {
            model.prompt(slot, &sequence[..before], 512, None);
        }
    }
    let (mut rows, mut samples) = (Vec::new(), Vec::new());
    for (slot, (before, len)) in (2..).zip(lengths) {
        rows.extend((before..before + len).map(|position| (slot, sequence[position], position as u32)));
        samples.extend((1..=len).map(|row| row == len));
    }
    let got = model.step(&rows, &samples, None);
    for ((before, len), got) in lengths.into_iter().zip(got) {
        assert!(got == expected[before + len - 1], "{len} rows after {before}");
    }
}

#[test]
fn a_prompt_has_its_bits_in_any_chunks_64_dimensions() {
    check_prompts(&llama_1b());
}

#[test]
fn a_prompt_has_its_bits_in_any_chunks_128_dimensions() {
    check_prompts(&llama_8b());
}

#[test]
fn a_prompt_has_its_bits_in_any_chunks_bias_norm_and_window() {
    check_prompts(&with_features());
}

/// The narrow kernel on grids that the wide one does not have, and the wide one on any, agree.
#[test]
fn grids_do_not_touch_a_bit() {
    if !gpu() {
        return;
    }
    let config = llama_1b();
    let sequence = tokens(9, 400);
    let mut expected = None;
    for blocks in [128, 132, 127, 78, 64] {
        let mut model = Model::new(load(&config, random(&config), SLOTS, Some(blocks)), SLOTS);
        let wide = model.decoder.decoder.launcher.widest_loop() > NARROW;
        assert!(wide == (blocks != 127), "the wide kernel computes this model on {blocks} blocks");
        let got = (model.alone(0, &sequence), model.prompt(1, &sequence, 133, None));
        assert!(*expected.get_or_insert_with(|| got.clone()) == got, "{blocks} blocks");
    }
}

/// In wide passes, whose words are full of NaN before each.
fn check_delays(config: &ModelConfig, source: &Arc<dyn Source + Send>) {
    if !gpu() {
        return;
    }
    let all: Vec<_> = (0..40).map(|slot| tokens(slot, 1 + (slot as usize * 97) % 330)).collect();
    let last = |slot: usize| (slot as u32, all[slot][all[slot].len() - 1], all[slot].len() as u32 - 1);
    let run = |defines: &[(&'static str, u64)]| {
        let options = Options { defines: defines.to_vec(), ..Options::default() };
        let mut model = Model::new(load_with_options(config, source.clone(), SLOTS, false, options), SLOTS);
        let mut got = Vec::new();
        let poison = |model: &Model| {
            if !defines.is_empty() {
                model.decoder.decoder.launcher.poison_words().unwrap();
            }
        };
        for (slot, tokens) in (0..).zip(&all) {
            poison(&model);
            got.extend(model.prompt(slot, tokens, 200, None));
        }
        let mut sampled = Vec::new();
        for count in [32, 40] {
            let rows: Vec<_> = (0..count).map(last).collect();
            poison(&model);
            got.extend(model.step(&rows, &vec![true; count], None));
            sampled.push(model.many_steps(&rows, 5));
        }
        (got, sampled)
    };
    let expected = run(&[]);
    assert!(!expected.0.iter().any(is_nan));
    for defines in BROKEN {
        assert!(run(defines) == expected, "{defines:?}, {}, hidden {}", config.layer_weights, config.hidden_size);
    }
}

#[test]
fn delays_and_poison_change_nothing_but_time() {
    for config in [llama_1b(), with_features(), qwen2_half_b(), smol()] {
        check_delays(&config, &random(&config));
    }
}

#[test]
fn delays_and_poison_change_nothing_but_time_in_few_bits() {
    let e4m3 = ModelConfig { layer_weights: WeightFormat::E4m3, ..llama_8b() };
    let source: Arc<dyn Source + Send> = Arc::new(PowersOfTwo(RandomSource { config: e4m3.clone(), seed: 3 }));
    check_delays(&e4m3, &source);
    let int4 = ModelConfig { layer_weights: INT4, ..mistral_nemo() };
    let source: Arc<dyn Source + Send> = Arc::new(Grouped(RandomSource { config: int4.clone(), seed: 3 }));
    check_delays(&int4, &source);
}

/// Launches of several steps that note times tell all that is to be told of wide passes.
#[test]
fn wide_passes_tell_the_times_of_their_phases() {
    if !gpu() {
        return;
    }
    let config = llama_8b();
    let gauge = Gauge::new(&[LoopMode::On]);
    let options = Options { gauge: Some(gauge.clone()), ..Options::default() };
    let mut model = Model::new(load_with_options(&config, random(&config), SLOTS, false, options), SLOTS);
    for count in [32, 64] {
        let rows: Vec<_> = (0..count).map(|slot| (slot, 5 + slot, 0)).collect();
        gauge.set(LoopMode::On, false);
        let untraced = model.many_steps(&rows, 4);
        gauge.set(LoopMode::On, true);
        assert!(model.many_steps(&rows, 4) == untraced, "{count} rows that note times");
        let noted = gauge.take().pop().expect("a traced launch notes times");
        eprintln!("{count} rows: {:?}", noted.phases);
        let known: Vec<Phase> =
            noted.phases.iter().filter(|of| of.us > 0.0 && of.us < 1e4).map(|of| of.phase).collect();
        let wide = |phase: &Phase| *phase != Phase::Merge;
        assert_eq!(known, Phase::ALL.into_iter().filter(wide).collect::<Vec<_>>());
        let mut text = Vec::new();
        noted.trace.expect("a looped launch has a timeline").write(&mut text).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let slices = json["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
        let durations: Vec<f64> = slices.map(|event| event["dur"].as_f64().unwrap()).collect();
        assert!(durations.len() > 128 * 4 * 2 && durations.iter().all(|us| (0.0..1e4).contains(us)));
    }
}

/// Repeated steps of wide passes: what a race leaves behind differs from time to time.
#[test]
fn two_hundred_repeats_have_the_same_bits() {
    if !gpu() {
        return;
    }
    let config = llama_8b();
    let mut model = Model::new(load(&config, random(&config), SLOTS, None), SLOTS);
    let prompt = tokens(1, 512);
    let all: Vec<_> = (1..FIRST_EMPTY).map(|slot| tokens(slot as u32, length(slot))).collect();
    (1..).zip(&all).for_each(|(slot, tokens)| drop(model.prompt(slot, tokens, 512, None)));
    let decode: Vec<_> =
        (1..).zip(&all).map(|(slot, tokens)| (slot, tokens[tokens.len() - 1], tokens.len() as u32 - 1)).collect();
    let mut expected = None;
    for repeat in 0..200 {
        let step = model.step(&decode, &vec![true; decode.len()], None);
        let got = (model.prompt(0, &prompt, 512, None), step, model.many_steps(&decode, 3));
        assert!(*expected.get_or_insert_with(|| got.clone()) == got, "repeat {repeat}");
    }
}

/// Tags start again within a prompt and between its passes.
#[test]
fn the_wrap_of_the_tags_does_not_touch_a_bit() {
    if !gpu() {
        return;
    }
    let config = llama_1b();
    let sequence = tokens(4, 900);
    let mut model = Model::new(load(&config, random(&config), SLOTS, None), SLOTS);
    let expected = model.prompt(0, &sequence, 60, None);
    for before in [1, 4, 8, 20] {
        model.decoder.decoder.launcher.epoch = u32::MAX - before;
        assert!(model.prompt(1, &sequence, 60, None) == expected, "{before} tags before the wrap");
        assert!(model.decoder.decoder.launcher.epoch < 1000, "the tags have started again");
    }
}

/// A model whose hidden dimensions of the second and the third leaf have changed places: what it computes is the same,
/// but for the order in which leaves add up.
struct Swapped(RandomSource);

pub(super) fn swapped(config: &ModelConfig) -> Arc<dyn Source + Send> {
    Arc::new(Swapped(RandomSource { config: config.clone(), seed: 3 }))
}

impl Source for Swapped {
    fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        let leaf = self.0.config.hidden_size / 16;
        let other = |place: usize| match place / leaf {
            1 => place + leaf,
            2 => place - leaf,
            _ => place,
        };
        let by_rows = matches!(tensor, Tensor::Layer(_, LayerTensor::AttentionOut | LayerTensor::Down));
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            if by_rows {
                self.0.read(tensor, other(row)..other(row) + 1, columns.clone(), out);
                continue;
            }
            for (column, out) in columns.clone().map(other).zip(out) {
                self.0.read(tensor, row..row + 1, column..column + 1, std::slice::from_mut(out));
            }
        }
    }

    fn scales(&self, _tensor: Tensor, _rows: Range<usize>, _column: usize, out: &mut [f32]) {
        out.fill(1.0);
    }
}

/// Another order of additions shows, or these tests would not.
#[test]
fn two_leaves_in_each_others_place_do_touch_bits() {
    if !gpu() {
        return;
    }
    let config = llama_1b();
    let sequence = tokens(2, 100);
    let [plain, swapped] = [random(&config), swapped(&config)].map(|source| {
        let mut model = Model::new(load(&config, source, 1, None), 1);
        (model.prompt(0, &sequence, 100, None), model.step(&[(0, sequence[99], 99)], &[true], Some(1)))
    });
    assert!(plain.0 == plain.1 && swapped.0 == swapped.1, "wide and narrow passes agree on either model");
    let values = |bits: &Bits| bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect::<Vec<_>>();
    let (a, b) = (values(&plain.1[0]), values(&swapped.1[0]));
    let error = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.iter().map(|a| a * a).sum::<f64>();
    assert!(error > 0.0 && error.sqrt() < 0.01, "relative L2 difference {}", error.sqrt());
}

/// Greedy requests of many lengths through the loop: launches of several steps with 64 rows, prompts of any size beside
/// them, and sequences that are taken out and computed again.
#[test]
fn plans_of_many_requests_yield_what_each_yields_alone() {
    if !gpu() {
        return;
    }
    let config = llama_1b();
    let requests: Vec<_> =
        (0..SLOTS).map(|i| Request::greedy(&tokens(i as u32, 1 + i * i % 700), 12 + i as u32 % 20)).collect();
    let drive_plans = |requests: &[Request], chunk: usize, steps: u32, eager: bool, unlooped: bool| {
        let decoder = load_with_options(&config, random(&config), SLOTS, unlooped, Options::default());
        let plans = plans(requests, chunk, 512, steps);
        let outcomes = drive(move |source, sink| Box::new(decoder).run(source, sink), plans, eager);
        let replies = replies(&outcomes, requests.len()).into_iter().map(|(tokens, _)| tokens);
        replies.collect::<Vec<Vec<u32>>>()
    };
    let run = |requests: &[Request], chunk, steps, eager| drive_plans(requests, chunk, steps, eager, false);
    let whole = run(&requests, 512, 40, true);
    assert!(whole.iter().zip(&requests).all(|(reply, request)| reply.len() == request.max_tokens as usize));
    for (chunk, steps, eager) in [(16, 8, true), (37, 3, false), (128, 16, true)] {
        assert!(run(&requests, chunk, steps, eager) == whole, "chunks of {chunk}, plans of {steps} steps");
    }
    // Narrow passes as launches of their phases, wide ones in the loop.
    assert!(drive_plans(&requests, 200, 16, true, true) == whole, "without the loop");
    // Alone; and as if it had been preempted after some tokens.
    for index in [0, 1, 7, 20, 37, 63] {
        assert!(run(&requests[index..=index], 100, 16, true)[0] == whole[index], "request {index} alone");
    }
    let resumed = requests.iter().zip(&whole).enumerate().map(|(index, (request, reply))| {
        let kept = index % request.max_tokens as usize;
        let tokens: Vec<u32> = request.prompt.iter().chain(&reply[..kept]).copied().collect();
        Request::greedy(&tokens, request.max_tokens - kept as u32)
    });
    let resumed: Vec<_> = resumed.collect();
    for (index, reply) in run(&resumed, 200, 16, true).iter().enumerate() {
        assert!(whole[index].ends_with(reply), "request {index} computed again");
    }
}

/// Requests that the sampler draws for among 64 rows, greedy ones beside them: tokens and log-probabilities of each
/// alone.
#[test]
fn sampled_requests_yield_among_many_what_each_yields_alone() {
    if !gpu() {
        return;
    }
    let config = llama_1b();
    let request = |i: u32| {
        let drawn =
            SamplingParams { temperature: 0.7 + i as f32 / 80.0, seed: u64::from(i), ..SamplingParams::greedy() };
        let sampling = match i % 5 {
            0 => SamplingParams::greedy(),
            1 => drawn,
            2 => SamplingParams { top_p: 0.9, ..drawn },
            3 => SamplingParams { top_k: 30, frequency_penalty: 0.3, ..drawn },
            _ => SamplingParams { min_p: 0.05, repetition_penalty: 1.2, ..drawn },
        };
        let logprobs = [None, Some(0), Some(4)][i as usize % 3];
        Request { sampling, logprobs, ..Request::greedy(&tokens(i, 1 + (i * i % 300) as usize), 10 + i % 20) }
    };
    let requests: Vec<_> = (0..SLOTS as u32).map(request).collect();
    let run = |requests: &[Request], chunk: usize, steps: u32, eager: bool| {
        let decoder = load(&config, random(&config), SLOTS, None);
        let plans = plans(requests, chunk, 512, steps);
        let outcomes = drive(move |source, sink| Box::new(decoder).run(source, sink), plans, eager);
        let mut replies = vec![Vec::new(); requests.len()];
        for token in outcomes.into_iter().flat_map(|outcome| outcome.tokens) {
            replies[token.sequence as usize].push(token.sampled);
        }
        replies
    };
    let whole = run(&requests, 512, 40, true);
    assert!(whole.iter().zip(&requests).all(|(reply, request)| reply.len() == request.max_tokens as usize));
    assert!(run(&requests, 41, 3, false) == whole, "other chunks and plans");
    for index in [1, 2, 3, 4, 38, 63] {
        assert!(run(&requests[index..=index], 100, 16, true)[0] == whole[index], "request {index} alone");
    }
}
