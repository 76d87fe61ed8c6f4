//! Delays and poison change nothing; what must not be does show.

use super::{BATCH_TOKENS, CUT_ROWS, WHOLE_ROWS, features, llama_3b, matrix_only, model, shape, smol, tokens};
use crate::cuda::Options;
use crate::cuda::launches::looped_decoder::Launcher;
use crate::cuda::tests::gpu::{BROKEN, gpu, yields};
use crate::cuda::tests::plans::{Request, plans};
use crate::cuda::tests::wide::{Bits, is_nan, load_rows, random};
use crate::model::ModelConfig;

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

/// What `just sanitize` runs under compute-sanitizer: prompts in tiles of attention, 33 rows that decode, one of them
/// of more than a span, in matrix passes and then in wide ones, tokens that passes choose and some that the sampler
/// does. Of SmolLM some blocks have no tile of gate and up, others none of o and down.
#[test]
fn sanitized() {
    if !gpu() {
        return;
    }
    let defines = vec![("LP_PATIENCE", 1000)];
    let mut requests: Vec<_> = (0..30).map(|i| Request::greedy(&tokens(i, 1 + (i % 9) as usize), 3)).collect();
    requests.extend((0..2).map(|i| Request { logprobs: Some(2), ..Request::greedy(&tokens(90 + i, 150), 4) }));
    requests.push(Request::greedy(&tokens(95, 1090), 3));
    for (config, sets) in [(shape(2048, (32, 8, 64), 8192), WHOLE_ROWS), (smol(), CUT_ROWS)] {
        let config = ModelConfig { num_layers: 2, ..config };
        let run = |matrix_only: bool| {
            let options = Options { poison: true, defines: defines.clone(), ..Options::default() };
            let mut decoder = load_rows(&config, random(&config), (requests.len(), BATCH_TOKENS), false, options);
            let launcher = &mut decoder.decoder.launcher;
            launcher.matrix_only = matrix_only;
            launcher.attend_by(sets);
            assert_eq!(launcher.passes().columns(), 64, "33 rows are a wide pass");
            yields(decoder, plans(&requests, 150, BATCH_TOKENS, 4), requests.len(), true)
        };
        assert!(run(true) == run(false));
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
