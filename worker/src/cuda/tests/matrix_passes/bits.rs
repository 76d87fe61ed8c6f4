//! Rows have the bits that they have alone in narrow passes.

use super::{
    BATCH_TOKENS, CONTEXT, CUT_ROWS, FIRST_EMPTY, SLOTS, WHOLE_ROWS, features, llama_3b, llama_8b, matrix_only, model,
    qwen_1_5b, qwen_half, qwen3, shape, smol, tokens,
};
use crate::cuda::Options;
use crate::cuda::tests::gpu::{BROKEN, gpu, load_rank, request};
use crate::cuda::tests::wide::{Bits, Model, is_nan, load_rows, random};
use crate::decoder::{Decoder, LoadRequest};
use crate::model::ModelConfig;

const CHUNKS: [usize; 20] = [1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300];

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

/// Prompts of several sequences in one step, their first parts computed before; behind and beside them rows that
/// decode, one of them among NaN.
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
        (1500, 1),
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
        model.decoder.decoder.launcher.attend_by(if ordered { CUT_ROWS } else { WHOLE_ROWS });
        let got = model.step(&rows, &samples, Some(BATCH_TOKENS));
        let attended = model.decoder.decoder.launcher.attended;
        assert_eq!(attended.tile_blocks > 0, ordered, "rows are computed beside tiles");
        assert_eq!(is_nan(&got[0]), sees_others, "a neighbour was to be NaN");
        for ((_, (before, len)), got) in segments.iter().zip(&got[1..]) {
            assert!(*got == expected[before + len - 1], "{len} rows after {before}");
        }
    }
}

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

/// Rows that decode behind up to four spans, and part of a prompt, whose tiles are cut: whole rows behind tiles, and
/// cut ones beside them, among pages of NaN, and with warps held up. Their bits are those of narrow passes.
#[test]
fn rows_far_on_have_their_bits() {
    const FAR: usize = 3600;
    const LENGTHS: [usize; 10] = [3590, 1, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 3135];
    const PART: std::ops::Range<usize> = 3050..3090;
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
        let (slot, prompt) = (all.len() as u32, tokens(50, PART.end));
        rows.extend(PART.map(|position| (slot, prompt[position], position as u32)));
        let samples = vec![true; rows.len()];
        let load = |defines: &[(&'static str, u64)]| {
            let mut model = model(&config, Options { defines: defines.to_vec(), ..Options::default() });
            for (slot, tokens) in (0..).zip(&all) {
                model.prompt(slot, tokens, BATCH_TOKENS, None);
            }
            model.prompt(slot, &prompt[..PART.start], BATCH_TOKENS, None);
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
                let of = model.decoder.decoder.launcher.attended;
                assert!(of.cut == 1 && (of.tile_blocks > 0) == (sets == CUT_ROWS), "{sets} sets: {of:?}");
                // Those of the tile, and rows of several spans.
                assert_eq!(of.merge_count as usize > PART.len(), sets == CUT_ROWS, "{sets} sets: {of:?}");
                for ((row, got), expected) in rows.iter().zip(&got).zip(&expected) {
                    let both_nan = is_nan(got) && is_nan(expected);
                    assert!(got == expected || both_nan, "{defines:?}, {sets} sets, position {}", row.2);
                }
            }
        }
    }
}
