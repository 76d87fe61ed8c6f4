//! Matrix passes on a GPU: every row has the bits that it has alone in narrow passes, whatever the model's shape, the
//! chunks of its prompt and the rows beside it.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::gpu::{BROKEN, by_sequence, gpu, load_rank, request, yields};
use super::plans::{Request, alike, drive, plans, sharing_plans, with_drafts};
use super::wide::{Bits, Model, decoding_row, is_nan, load_rows, random};
use crate::batch::Plan;
use crate::cuda::Options;
use crate::cuda::kernels::launch::Row;
use crate::cuda::launches::looped_decoder::{Draws, Launcher};
use crate::decoder::{Decoder, LoadRequest, Outcome};
use crate::model::source::{RandomSource, Source};
use crate::model::{ModelConfig, Tensor};
use crate::sampling::SamplingParams;

/// Sequences of a test: more than other passes hold.
const SLOTS: usize = 88;
/// Those from here on are never computed: their pages hold NaN.
const FIRST_EMPTY: usize = 72;
const BATCH_TOKENS: usize = 512;
/// Spans are of 1024 positions.
const CONTEXT: usize = 1536;
const VOCAB: usize = 2048;
const CHUNKS: [usize; 20] = [1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300];

pub(super) fn shape(hidden_size: usize, heads: (usize, usize, usize), intermediate: usize) -> ModelConfig {
    let (heads, kv_heads, head_dim) = heads;
    let shape = crate::plan::tests::config(heads, kv_heads, intermediate, VOCAB);
    ModelConfig { hidden_size, head_dim, max_positions: CONTEXT, ..shape }
}

/// SmolLM 135M: 36 row tiles of the hidden state, 3 query heads of a KV head.
pub(super) fn smol() -> ModelConfig {
    ModelConfig { tied_embeddings: true, ..shape(576, (9, 3, 64), 1536) }
}

/// Qwen 2.5 0.5B: 7 query heads of a KV head.
fn qwen_half() -> ModelConfig {
    ModelConfig { tied_embeddings: true, qkv_bias: true, ..shape(896, (14, 2, 64), 4864) }
}

/// Llama 3.2 3B.
fn llama_3b() -> ModelConfig {
    ModelConfig { tied_embeddings: true, ..shape(3072, (24, 8, 128), 8192) }
}

/// Qwen 2.5 1.5B: 6 query heads of a KV head.
fn qwen_1_5b() -> ModelConfig {
    ModelConfig { tied_embeddings: true, qkv_bias: true, ..shape(1536, (12, 2, 128), 8960) }
}

/// Qwen 3 0.6B.
fn qwen3() -> ModelConfig {
    ModelConfig { tied_embeddings: true, qk_norm: true, ..shape(1024, (16, 8, 128), 3072) }
}

fn llama_8b() -> ModelConfig {
    shape(4096, (32, 8, 128), 14_336)
}

/// Everything at once, with a window that reaches over spans, and heads that are padded.
fn features(head_dim: usize, window: usize) -> ModelConfig {
    let shape = shape(512, (16, 2, head_dim), 1000);
    ModelConfig { qkv_bias: true, qk_norm: true, sliding_window: Some(window), ..shape }
}

fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed * 977 + i * 37 + i * i % 101) % VOCAB as u32).collect()
}

fn model(config: &ModelConfig, options: Options) -> Model {
    Model::new(load_rows(config, random(config), (SLOTS, BATCH_TOKENS), false, options), SLOTS)
}

/// From now on whatever can be is a matrix pass; or as the product chooses.
fn matrix_only(model: &mut Model, only: bool) {
    model.decoder.decoder.launcher.matrix_only = only;
}

fn check(config: &ModelConfig) {
    if !gpu() {
        return;
    }
    let mut model = model(config, Options::default());
    let sequence = tokens(5, CONTEXT - 20);
    let expected = model.alone(0, &sequence);
    assert!(!expected.iter().any(is_nan));
    check_chunks(&mut model, &sequence, &expected);
    // A window of one position has no neighbours.
    let sees_others = config.sliding_window != Some(1);
    check_mixed(&mut model, &sequence, &expected, sees_others);
    check_crowds(&mut model, sees_others);
}

/// A prompt in chunks of any size; what narrow passes then find of it in memory.
fn check_chunks(model: &mut Model, sequence: &[u32], expected: &[Bits]) {
    for chunk in CHUNKS {
        let part = if chunk < 16 { &sequence[..220] } else { sequence };
        matrix_only(model, true);
        let got = model.prompt(1, part, chunk, None);
        let ends = (1..=got.len()).map(|chunks| (chunks * chunk).min(part.len()) - 1);
        for (end, got) in ends.zip(got) {
            assert!(got == expected[end], "position {end} in chunks of {chunk}");
        }
        matrix_only(model, false);
        let last = part.len() - 1;
        let again = model.step(&[(1, part[last], last as u32)], &[true], Some(1));
        assert!(again == expected[last..=last], "position {last} after chunks of {chunk}, alone");
    }
}

/// Prompts of several sequences in one step, their first parts computed before; beside them rows that decode, one of
/// them among NaN.
fn check_mixed(model: &mut Model, sequence: &[u32], expected: &[Bits], sees_others: bool) {
    let lengths = [
        (130usize, 40),
        (0, 90),
        (700, 1),
        (64, 10),
        (300, 250),
        (1000, 1),
        (5, 33),
        (1023, 1),
        (1024, 1),
        (1010, 30),
        (1400, 1),
    ];
    for ordered in [false, true] {
        matrix_only(model, true);
        for (slot, (before, _)) in (2..).zip(lengths).filter(|(_, (before, _))| *before > 0) {
            model.prompt(slot, &sequence[..before], 300, None);
        }
        let mut segments: Vec<_> = (2..).zip(lengths).collect();
        if ordered {
            segments.sort_by_key(|(_, (_, len))| *len);
        }
        let (mut rows, mut samples) = (vec![(FIRST_EMPTY as u32, 7, 1100)], vec![true]);
        for (slot, (before, len)) in &segments {
            rows.extend((*before..before + len).map(|position| (*slot, sequence[position], position as u32)));
            samples.extend((1..=*len).map(|row| row == *len));
        }
        model.decoder.decoder.launcher.poison_words().unwrap();
        let got = model.step(&rows, &samples, Some(BATCH_TOKENS));
        assert_eq!(is_nan(&got[0]), sees_others, "a neighbour was to be NaN");
        for ((_, (before, len)), got) in segments.iter().zip(&got[1..]) {
            assert!(*got == expected[before + len - 1], "{len} rows after {before}");
        }
    }
}

/// Sets of warps of a KV head with which rows that decode are items, and with which each of their spans is.
const WHOLE_ROWS: usize = 1;
const CUT_ROWS: usize = 1000;

/// A sequence's length, of any number of pages.
fn length(slot: usize) -> usize {
    1 + (slot * 397 + 60) % (CONTEXT - 12)
}

/// Rows that decode, few and many; then steps of them in a chain.
fn check_crowds(model: &mut Model, sees_others: bool) {
    let all: Vec<_> = (0..FIRST_EMPTY).map(|slot| tokens(slot as u32, length(slot))).collect();
    matrix_only(model, false);
    all.iter().enumerate().for_each(|(slot, tokens)| drop(model.prompt(slot as u32, tokens, BATCH_TOKENS, None)));
    let last = |slot: usize| (slot as u32, all[slot][length(slot) - 1], length(slot) as u32 - 1);
    let expected: Vec<Bits> = (0..FIRST_EMPTY).flat_map(|slot| model.step(&[last(slot)], &[true], Some(1))).collect();
    for (round, count) in [1, 2, 8, 9, 33, 64, 65, 72].into_iter().enumerate() {
        // Which run beside each other, and in which column, differs by round; every fifth is one whose pages hold NaN.
        let slots = (0..count).map(|column| match column % 5 {
            4 => FIRST_EMPTY + (column / 5 + round) % (SLOTS - FIRST_EMPTY),
            _ => (column - column / 5 + round * 11) % FIRST_EMPTY,
        });
        let slots: Vec<_> = slots.collect();
        let row = |slot: &usize| if *slot < FIRST_EMPTY { last(*slot) } else { (*slot as u32, 7, 100 + *slot as u32) };
        let rows: Vec<_> = slots.iter().map(row).collect();
        matrix_only(model, true);
        model.decoder.decoder.launcher.attend_by(if round % 2 == 0 { WHOLE_ROWS } else { CUT_ROWS });
        let got = model.step(&rows, &vec![true; rows.len()], Some(BATCH_TOKENS));
        for (slot, got) in slots.iter().zip(got) {
            match expected.get(*slot) {
                Some(expected) => assert!(got == *expected, "slot {slot} at {} among {count}", length(*slot) - 1),
                None => assert_eq!(is_nan(&got), sees_others, "a neighbour was to be NaN"),
            }
        }
    }
    let rows: Vec<_> = (0..FIRST_EMPTY).map(last).collect();
    let steps = 9;
    let chains = [WHOLE_ROWS, CUT_ROWS].map(|sets| {
        matrix_only(model, true);
        model.decoder.decoder.launcher.attend_by(sets);
        model.many_steps(&rows, steps)
    });
    assert!(chains[0] == chains[1], "rows that are whole, and cut by spans");
    let [chain, _] = chains;
    matrix_only(model, false);
    for (first, rows) in rows.chunks(8).enumerate() {
        let narrow = model.many_steps(rows, steps);
        for (step, tokens) in narrow.iter().enumerate() {
            assert_eq!(chain[step][first * 8..][..rows.len()], *tokens, "rows from {} in step {step}", first * 8);
        }
    }
}

#[test]
fn rows_have_their_bits_smol() {
    check(&smol());
}

#[test]
fn rows_have_their_bits_qwen_half() {
    check(&qwen_half());
}

#[test]
fn rows_have_their_bits_qwen_1_5b() {
    check(&qwen_1_5b());
}

#[test]
fn rows_have_their_bits_3b() {
    check(&llama_3b());
}

#[test]
fn rows_have_their_bits_qwen3() {
    check(&qwen3());
}

/// 16 and 12 query heads of a KV head, of which there are copies.
#[test]
fn rows_have_their_bits_many_queries() {
    for heads in [32, 24] {
        check(&ModelConfig { qkv_bias: true, qk_norm: heads == 24, ..shape(512, (heads, 2, 64), 1000) });
    }
}

/// Leaves of a norm's input that are longer than narrow passes have registers for: eight eights and five of their
/// squares.
#[test]
fn rows_have_their_bits_long_leaves() {
    check(&shape(1008, (9, 3, 64), 1536));
    check(&ModelConfig { qk_norm: true, ..shape(560, (9, 3, 64), 1536) });
}

#[test]
fn rows_have_their_bits_8b() {
    check(&llama_8b());
}

#[test]
fn rows_have_their_bits_bias_norm_and_windows() {
    for (head_dim, window) in [(128, 1100), (64, 300), (32, 1)] {
        check(&features(head_dim, window));
    }
}

#[test]
fn rows_have_their_bits_in_the_fixtures() {
    if !gpu() {
        return;
    }
    const CONTEXT: usize = 1400;
    for name in [
        "llama-gqa",
        "llama-mha16",
        "llama-tied",
        "llama-tied-fp8",
        "llama31-scaled",
        "mistral-window",
        "qwen2-bias",
        "qwen3-qknorm",
    ] {
        let kv_pages = 3 * CONTEXT.div_ceil(64);
        let request = LoadRequest { max_batch_tokens: 320, max_context: CONTEXT, kv_pages, ..request(name) };
        let mut model = Model::new(load_rank(&request, &Options::default()), 3);
        let len = model.decoder.loaded().max_context - 1;
        let sequence: Vec<u32> = tokens(3, len).into_iter().map(|token| token % 768).collect();
        let expected = model.alone(0, &sequence);
        matrix_only(&mut model, true);
        for chunk in [1, 5, 9, 50, 128, 300] {
            let part = if chunk < 9 { &sequence[..len.min(150)] } else { &sequence[..] };
            let got = model.prompt(1, part, chunk, None);
            let ends = (1..=got.len()).map(|chunks| (chunks * chunk).min(part.len()) - 1);
            for (end, got) in ends.zip(got) {
                assert!(got == expected[end], "{name}: position {end} in chunks of {chunk}");
            }
        }
    }
}

/// Rows of sequences in narrow passes, which read pages together: those of a few pages leave the outputs of pages, of
/// many those of shares; the more blocks the more are many.
#[test]
fn rows_that_read_pages_together_have_their_bits() {
    if !gpu() {
        return;
    }
    const LEN: usize = 50;
    let far = |config| ModelConfig { max_positions: 4300, ..config };
    let runs = [(far(llama_8b()), None), (far(qwen3()), None), (smol(), Some(24)), (qwen_half(), Some(16))];
    for (config, blocks) in runs {
        let decoder = load_rows(&config, random(&config), (8, 512), false, Options { blocks, ..Options::default() });
        let mut model = Model::new(decoder, 8);
        // A page begins among the rows.
        let begin = (config.max_positions - LEN) / 64 * 64 - 10;
        let sequence = tokens(8, begin + LEN);
        (0..4).for_each(|slot| drop(model.prompt(slot, &sequence, 500, None)));
        let row = |slot: usize, position: usize| (slot as u32, sequence[position], position as u32);
        let expected: Vec<Bits> =
            (begin..begin + LEN).flat_map(|at| model.step(&[row(0, at)], &[true], Some(1))).collect();
        for parts in [&[8][..], &[2], &[3, 5], &[1, 7], &[2, 2, 4], &[1, 6, 1], &[1, 1, 1, 1]] {
            // The last: beside rows of few pages.
            for (shift, short) in [(0, 0), (3, 0), (17, 0), (40, 0), (5, 100)] {
                let mut rows: Vec<_> = (0..short.min(8 - parts.iter().sum::<usize>())).map(|at| row(3, at)).collect();
                let few = rows.len();
                for (slot, len) in parts.iter().enumerate().filter(|(slot, _)| few == 0 || *slot < 3) {
                    rows.extend((begin + shift..begin + shift + len).map(|position| row(slot, position)));
                }
                rows.sort_by_key(|(slot, ..)| *slot);
                let got = model.step(&rows, &vec![true; rows.len()], Some(8));
                for ((slot, _, position), got) in rows.iter().zip(got).filter(|(row, _)| row.2 as usize >= begin) {
                    assert!(got == expected[*position as usize - begin], "{parts:?}, slot {slot} at {position}");
                }
            }
        }
    }
}

/// Weights that are packed otherwise, with units of one tile here and there.
#[test]
fn grids_do_not_touch_a_bit() {
    if !gpu() {
        return;
    }
    let sequence = tokens(9, 700);
    for config in [smol(), qwen_half()] {
        let mut expected = None;
        for blocks in [None, Some(132), Some(119), Some(64), Some(7)] {
            // Only with a GPU that is named are matrix passes built for these blocks, too.
            let mut model = model(&config, Options { ordinal: Some(0), blocks, ..Options::default() });
            matrix_only(&mut model, true);
            let got = model.prompt(0, &sequence, 333, None);
            assert!(*expected.get_or_insert_with(|| got.clone()) == got, "{blocks:?} blocks");
        }
    }
}

/// The widest pass, one row more, passes between 512 rows and those, where K is cut in halves by how many tiles there
/// are, and a prompt that is computed again and again: what a race leaves behind differs from time to time.
#[test]
fn passes_of_2048_rows_repeat_their_bits() {
    if !gpu() {
        return;
    }
    const SLOTS: usize = 4;
    let shapes = [qwen3(), smol(), qwen_half(), llama_8b()];
    for config in shapes.map(|config| ModelConfig { max_positions: 4352, ..config }) {
        let decoder = load_rows(&config, random(&config), (SLOTS, 8192), false, Options::default());
        let mut model = Model::new(decoder, SLOTS);
        let sequence = tokens(6, 4200);
        let expected = model.prompt(0, &sequence, 500, None);
        let last = &expected[expected.len() - 1];
        let alone = model.step(&[(0, sequence[4199], 4199)], &[true], Some(1));
        assert!(alone[0] == *last, "the last position, alone");
        for chunk in [700, 1280, 2048, 2049, 4096, 8192] {
            let got = model.prompt(1, &sequence, chunk, None);
            assert_eq!(got.len(), sequence.len().div_ceil(chunk));
            assert!(got[got.len() - 1] == *last, "chunks of {chunk}");
        }
        for repeat in 0..50 {
            assert!(model.prompt(2, &sequence, 2048, None).pop().as_ref() == Some(last), "repeat {repeat}");
        }
    }
}

/// Requests through the loop: prompts of any size beside rows that decode, more than other passes hold, some of them
/// drawn with everything that the sampler does. Each yields what it yields alone.
#[test]
fn plans_of_a_crowd_yield_what_each_request_yields_alone() {
    if !gpu() {
        return;
    }
    let config = smol();
    const CROWD: u32 = 150;
    let request = |i: u32| {
        let drawn =
            SamplingParams { temperature: 0.7 + i as f32 / 160.0, seed: u64::from(i), ..SamplingParams::greedy() };
        let sampling = match i % 5 {
            0 | 3 => SamplingParams::greedy(),
            1 => drawn,
            2 => SamplingParams { top_p: 0.9, top_k: 30, ..drawn },
            _ => SamplingParams { min_p: 0.05, repetition_penalty: 1.2, frequency_penalty: 0.3, ..drawn },
        };
        let logprobs = [None, None, Some(3)][i as usize % 3];
        Request { sampling, logprobs, ..Request::greedy(&tokens(i, 1 + (i * i % 500) as usize), 12 + i % 20) }
    };
    let run = |requests: &[Request], chunk: usize, steps: u32, eager: bool| {
        let slots = CROWD as usize;
        let decoder = load_rows(&config, random(&config), (slots, BATCH_TOKENS), false, Options::default());
        yields(decoder, plans(requests, chunk, BATCH_TOKENS, steps), requests.len(), eager)
    };
    let greedy: Vec<_> = (0..CROWD).map(|i| Request::greedy(&tokens(i, 1 + (i * 7 % 300) as usize), 20)).collect();
    for requests in [(0..CROWD).map(request).collect::<Vec<_>>(), greedy] {
        let whole = run(&requests, 512, 40, true);
        assert!(whole.iter().zip(&requests).all(|(reply, request)| reply.len() == request.max_tokens as usize));
        for (chunk, steps, eager) in [(41, 3, false), (200, 7, true)] {
            assert!(run(&requests, chunk, steps, eager) == whole, "chunks of {chunk}, plans of {steps} steps");
        }
        for index in [0, 1, 2, 4, 77, 149] {
            assert!(run(&requests[index..=index], 100, 16, true)[0] == whole[index], "request {index} alone");
        }
    }
}

/// Log-probabilities of each step show every bit: in crowds of as many rows as passes have at most that sample.
#[test]
fn rows_of_large_crowds_have_the_bits_that_they_have_alone() {
    if !gpu() {
        return;
    }
    let config = smol();
    let request =
        |i: u32| Request { logprobs: Some(8), ..Request::greedy(&tokens(i, 1 + (i * i % 60) as usize), 6 + i % 5) };
    for crowd in [256, 512] {
        let requests: Vec<_> = (0..crowd).map(request).collect();
        let run = |requests: &[Request], chunk: usize| {
            let decoder = load_rows(&config, random(&config), (requests.len(), 2048), false, Options::default());
            yields(decoder, plans(requests, chunk, 2048, 16), requests.len(), true)
        };
        let whole = run(&requests, 64);
        assert!(whole.iter().zip(&requests).all(|(reply, of)| reply.len() == of.max_tokens as usize));
        for index in [0, 7, 63, 64, 130, crowd as usize - 1] {
            assert!(run(&requests[index..=index], 64)[0] == whole[index], "request {index} of {crowd}, alone");
        }
    }
}

/// A prompt whose slot is released before it is whole, as the scheduler does where memory is short: another takes its
/// pages, then it is computed again in other chunks, and both yield what they yield alone.
#[test]
fn a_prompt_that_is_preempted_in_its_middle_yields_the_same() {
    if !gpu() {
        return;
    }
    const CHUNK: usize = 130;
    let config = smol();
    let [cut, other] = [(21, 610), (22, 333)]
        .map(|(seed, len)| Request { logprobs: Some(3), ..Request::greedy(&tokens(seed, len), 20) });
    let run = |plans: Vec<Plan>| {
        let decoder = load_rows(&config, random(&config), (4, BATCH_TOKENS), false, Options::default());
        yields(decoder, plans, 1, true).swap_remove(0)
    };
    let of = |request: &Request, chunk| plans(std::slice::from_ref(request), chunk, BATCH_TOKENS, 16);
    let [whole, others] = [&cut, &other].map(|request| run(of(request, CHUNK)));
    assert!(whole != others);
    for chunks in 1..cut.prompt.len().div_ceil(CHUNK) {
        let release = || Plan { release: vec![0], steps: 1, ..Plan::default() };
        let mut all = of(&cut, CHUNK);
        all.truncate(chunks);
        all.push(release());
        all.extend(of(&other, 64));
        all.push(release());
        all.extend(of(&cut, 77));
        (1..).zip(&mut all).for_each(|(version, plan)| plan.version = version);
        assert!(run(all) == [&others[..], &whole[..]].concat(), "released after {chunks} chunks");
    }
}

/// Warps of products and of attention are held up at random, those that fetch and those that compute, and their shared
/// memory begins full of NaN: prompts, then crowds that decode.
#[test]
fn delays_and_poison_change_nothing_but_time() {
    if !gpu() {
        return;
    }
    for config in [smol(), features(128, 300)] {
        let all: Vec<_> = (0..70).map(|slot| tokens(slot, 1 + (slot as usize * 97) % 700)).collect();
        let last: Vec<_> = (0..).zip(&all).map(|(slot, of)| (slot, of[of.len() - 1], of.len() as u32 - 1)).collect();
        let run = |defines: &[(&'static str, u64)]| {
            let mut model = model(&config, Options { defines: defines.to_vec(), ..Options::default() });
            matrix_only(&mut model, true);
            let mut got = Vec::new();
            for (slot, tokens) in (0..).zip(&all) {
                got.extend(model.prompt(slot, tokens, 333, None));
            }
            for count in [3, 64, 70] {
                got.extend(model.step(&last[..count], &vec![true; count], None));
            }
            got
        };
        let expected = run(&[]);
        assert!(!expected.iter().any(is_nan));
        for defines in BROKEN {
            assert!(run(defines) == expected, "{defines:?}, hidden {}", config.hidden_size);
        }
    }
}

/// Rows that decode behind up to four spans, whole and cut, beside pages of NaN, and with warps held up: their bits are
/// those of narrow passes.
#[test]
fn rows_far_on_have_their_bits() {
    const FAR: usize = 3600;
    const LENGTHS: [usize; 10] = [3590, 1, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 3135];
    if !gpu() {
        return;
    }
    let windowed = features(128, 2500);
    for config in [smol(), qwen3(), windowed] {
        let config = ModelConfig { num_layers: 2, max_positions: FAR, ..config };
        let all: Vec<_> = (0..).zip(LENGTHS).map(|(slot, len)| tokens(slot, len)).collect();
        let mut rows: Vec<_> =
            (0..).zip(&all).map(|(slot, of)| (slot, of[of.len() - 1], of.len() as u32 - 1)).collect();
        rows.insert(5, (FIRST_EMPTY as u32, 7, 2300));
        let samples = vec![true; rows.len()];
        let load = |defines: &[(&'static str, u64)]| {
            let mut model = model(&config, Options { defines: defines.to_vec(), ..Options::default() });
            for (slot, tokens) in (0..).zip(&all) {
                model.prompt(slot, tokens, BATCH_TOKENS, None);
            }
            model
        };
        let mut calm = load(&[]);
        let narrow = |row: &(u32, u32, u32)| calm.step(&[*row], &[true], Some(1)).concat();
        let expected: Vec<Bits> = rows.iter().map(narrow).collect();
        assert_eq!(expected.iter().filter(|of| is_nan(of)).count(), 1);
        for defines in [&[][..]].into_iter().chain(BROKEN) {
            let mut model = load(defines);
            matrix_only(&mut model, true);
            for sets in [WHOLE_ROWS, CUT_ROWS] {
                model.decoder.decoder.launcher.attend_by(sets);
                let got = model.step(&rows, &samples, Some(BATCH_TOKENS));
                for ((row, got), expected) in rows.iter().zip(&got).zip(&expected) {
                    let both_nan = is_nan(got) && is_nan(expected);
                    assert!(got == expected || both_nan, "{defines:?}, {sets} sets, position {}", row.2);
                }
            }
        }
    }
}

/// What `just sanitize` runs under compute-sanitizer: prompts in tiles of attention, 32 rows that decode, in matrix
/// passes and then in wide ones, tokens that passes choose and some that the sampler does. Of SmolLM some
/// blocks have no tile of gate and up, others none of o and down.
#[test]
fn sanitized() {
    if !gpu() {
        return;
    }
    let defines = vec![("LP_PATIENCE", 1000)];
    let mut requests: Vec<_> = (0..30).map(|i| Request::greedy(&tokens(i, 1 + (i % 9) as usize), 3)).collect();
    requests.extend((0..2).map(|i| Request { logprobs: Some(2), ..Request::greedy(&tokens(90 + i, 150), 4) }));
    for config in [shape(2048, (32, 8, 64), 8192), smol()] {
        let config = ModelConfig { num_layers: 2, ..config };
        let run = |matrix_only: bool| {
            let options = Options { poison: true, defines: defines.clone(), ..Options::default() };
            let mut decoder = load_rows(&config, random(&config), (requests.len(), BATCH_TOKENS), false, options);
            let launcher = &mut decoder.decoder.launcher;
            launcher.matrix_only = matrix_only;
            assert_eq!(launcher.passes().columns(), 64, "32 rows are a wide pass");
            yields(decoder, plans(&requests, 150, BATCH_TOKENS, 4), requests.len(), true)
        };
        assert!(run(true) == run(false));
    }
}

/// Requests that begin behind the pages of another, and one whose pages give way to equal ones, beside rows that
/// decode: each yields what it yields alone.
#[test]
fn sequences_that_share_pages_yield_what_they_yield_alone() {
    if !gpu() {
        return;
    }
    for config in [smol(), llama_3b()] {
        for rows in [40, BATCH_TOKENS] {
            let run = |requests: &[Request], plans| {
                let options = Options { poison: true, ..Options::default() };
                let decoder = load_rows(&config, random(&config), (7, BATCH_TOKENS), false, options);
                yields(decoder, plans, requests.len(), true)
            };
            let requests = alike(7);
            let shared = run(&requests, sharing_plans(&requests, 2, rows));
            for (request, shared) in requests.iter().zip(&shared) {
                let alone = std::slice::from_ref(request);
                assert!(run(alone, plans(alone, 64, 64, 16))[0] == *shared, "{rows} rows");
            }
        }
    }
}

/// Requests whose answers have few tokens to choose from, so that drafts hold at times, alone and in crowds.
#[test]
fn drafts_touch_no_token() {
    if !gpu() {
        return;
    }
    let config = smol();
    let request = |i: u32| {
        let few = (0..2 + i % 5).map(|j| (i * 7 + j * 31, 60.0)).collect();
        let drawn = SamplingParams { temperature: 0.8, seed: u64::from(i), ..SamplingParams::greedy() };
        let sampling = match i % 5 {
            0 => SamplingParams::greedy(),
            1 => SamplingParams { logit_bias: few, ..SamplingParams::greedy() },
            2 => SamplingParams { logit_bias: few, ..drawn },
            3 => SamplingParams { logit_bias: few, top_p: 0.9, top_k: 3, ..drawn },
            _ => SamplingParams { logit_bias: few, frequency_penalty: 0.3, ..drawn },
        };
        let logprobs = [None, None, Some(3)][i as usize % 3];
        let mut request =
            Request { sampling, logprobs, ..Request::greedy(&tokens(i, 1 + (i * i % 300) as usize), 120 + i % 90) };
        if i % 7 == 1 {
            (request.min_tokens, request.stop_tokens) = (30, vec![i * 7]);
        }
        request
    };
    for few in [1, 2, 5, 40] {
        let requests: Vec<Request> = (0..few).map(request).collect();
        let run = |each: u32, steps: u32, eager: bool| {
            let decoder = load_rows(&config, random(&config), (64, BATCH_TOKENS), false, Options::default());
            let plans = with_drafts(plans(&requests, 200, BATCH_TOKENS, steps), each);
            let outcomes = drive(move |source, sink| Box::new(decoder).run(source, sink), plans, eager);
            let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(of).sum::<usize>();
            let (drafted, steps) = (sum(Outcome::rows_drafted), sum(|outcome| usize::from(outcome.ran_step)));
            (by_sequence(outcomes, requests.len()), drafted, steps)
        };
        let (plain, _, all) = run(0, 40, false);
        for (each, steps, eager) in [(7, 40, false), (3, 100, false), (7, 5, true)] {
            let (drafting, drafted, fewer) = run(each, steps, eager);
            println!("{few} sequences, up to {each} drafts each: {fewer} steps for {all}, {drafted} tokens drafted");
            assert!(drafting == plain, "{few} sequences, {each} drafts, plans of {steps}, {eager}");
            assert!(few < 2 || drafted > 100 && (eager || few > 5 || 3 * fewer < 2 * all));
        }
    }
}

/// A model whose LM head repeats its first rows, so that a logit is there several times.
pub(super) struct Echo {
    pub(super) of: RandomSource,
    /// Rows of the LM head that differ.
    pub(super) rows: usize,
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

/// Another order of additions shows, or these tests would not: products of matrix passes with two leaves swapped.
#[test]
fn two_leaves_in_each_others_place_do_touch_bits() {
    if !gpu() {
        return;
    }
    let config = llama_3b();
    let sequence = tokens(2, 200);
    let mut model = model(&config, Options { defines: vec![("LP_SWAP_LEAVES", 1)], ..Options::default() });
    let expected = model.alone(0, &sequence);
    matrix_only(&mut model, true);
    let got = model.prompt(1, &sequence, 200, None).remove(0);
    let values = |bits: &Bits| bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect::<Vec<_>>();
    let (a, b) = (values(&expected[199]), values(&got));
    let error = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.iter().map(|a| a * a).sum::<f64>();
    assert!(error > 0.0 && error.sqrt() < 0.02, "relative L2 difference {}", error.sqrt());
}

/// What a row sees of others shows, too: in kernels of every family one slot reads the pages of the one before it.
#[test]
fn a_row_that_reads_its_neighbours_pages_is_noticed() {
    const READER: u32 = 5;
    if !gpu() {
        return;
    }
    let config = smol();
    let slots = 0..40u32;
    let all: Vec<_> = slots.clone().map(|slot| tokens(slot, 190)).collect();
    // Of each kind of pass the logits of each slot: a prompt in two parts, then few and many rows that decode.
    let run = |defines: &[(&'static str, u64)]| {
        let mut model = model(&config, Options { defines: defines.to_vec(), ..Options::default() });
        matrix_only(&mut model, true);
        let prompts = slots.clone().map(|slot| model.prompt(slot, &all[slot as usize][..189], 150, None));
        let prompts: Vec<Bits> = prompts.map(|parts| parts.concat()).collect();
        let mut decode = |count: u32, matrix: bool| {
            matrix_only(&mut model, matrix);
            let rows: Vec<_> = (0..count).map(|slot| (slot, all[slot as usize][189], 189)).collect();
            model.step(&rows, &vec![true; rows.len()], None)
        };
        [("tiles", prompts), ("spans", decode(40, true)), ("wide", decode(40, false)), ("narrow", decode(8, false))]
    };
    let right = run(&[]);
    let wrong = run(&[("LP_NEIGHBOR", READER.into())]);
    for ((name, right), (_, wrong)) in right.iter().zip(&wrong) {
        for (slot, (right, wrong)) in slots.clone().zip(right.iter().zip(wrong)) {
            assert_eq!(right != wrong, slot == READER, "{name}, slot {slot}");
        }
    }
}
