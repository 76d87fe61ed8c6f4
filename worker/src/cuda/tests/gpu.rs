//! The kernel on a GPU: right, and the same bits however it is arranged. Without a GPU these tests say that they were
//! skipped; `just gpu` asks for one by REQUIRE_GPU.

use std::sync::Arc;
use std::time::Duration;

use super::plans::{Request, drive, plans, replies};
use crate::cpu::tests::group::{self as cpu, Arrangement};
use crate::cuda::launch::{ROW_SAMPLE, Row};
use crate::cuda::looped_decoder::Launcher;
use crate::cuda::{CudaDecoder, Gauge, LoopMode, Options, Phase, load_with, probe};
use crate::decoder::{Decoder, Device, Fault, LoadRequest};
use crate::golden;
use crate::model::ModelConfig;
use crate::model::source::RandomSource;
use crate::plan::KvLayout;

/// Set: a machine without a GPU fails the tests.
const REQUIRE_GPU: &str = "LOOPLANE_REQUIRE_GPU";
/// Bound on the relative L2 error of a position's logits against fp32: bf16 keeps 8 bits, and these models are shallow.
const LOGITS_RELATIVE_L2: f64 = 0.03;

fn gpu() -> bool {
    let found = probe(0);
    if let Err(why) = &found {
        assert!(std::env::var_os(REQUIRE_GPU).is_none(), "{why}");
        eprintln!("skipped: {why}");
    }
    found.is_ok()
}

fn request(model: &str) -> LoadRequest {
    LoadRequest {
        model_dir: std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model),
        rank: 0,
        tensor_parallel: 1,
        threads: 1,
        max_slots: 16,
        max_batch_tokens: 64,
        kv_pages: 80,
        kv_bytes_limit: 0,
        wait_limit: Duration::from_secs(20),
        max_context: 2048,
        device: Device::Cuda,
    }
}

fn load(model: &str, options: &Options) -> CudaDecoder {
    load_with(&request(model), &Options { poison: true, ..options.clone() }, &mut |_| ())
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Logits after every token of a sequence in `slot`, computed in passes of `rows` rows.
fn logits(decoder: &mut CudaDecoder, slot: u32, tokens: &[u32], rows: usize) -> Vec<Vec<f32>> {
    let vocab = decoder.loaded().vocab_size;
    let engine = &mut decoder.decoder.launcher;
    engine.enter().unwrap();
    let pages: Vec<u32> =
        (0..KvLayout::pages_for(tokens.len()) as u32).map(|page| 79 - slot * 20 - page * 3 % 20).collect();
    engine.write_pages(slot, 0, &pages).unwrap();
    let mut all = Vec::new();
    for (pass, tokens) in tokens.chunks(rows).enumerate() {
        let first_position = (pass * rows) as u32;
        let row = |(i, token): (usize, &u32)| Row {
            token: *token,
            position: first_position + i as u32,
            slot,
            first_row: 0,
            first_position,
            flags: ROW_SAMPLE,
            last_position: first_position + i as u32,
            reserved: 0,
        };
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        engine.launch(&rows, 1, true).unwrap_or_else(|fault| panic!("{fault}"));
        (0..rows.len()).for_each(|column| engine.keep_logits(column, column).unwrap());
        engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
        let padded = engine.logits(1).len();
        all.extend(engine.logits(rows.len()).chunks_exact(padded).map(|row| row[..vocab].to_vec()));
    }
    all
}

fn largest(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.unwrap().0 as u32
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}

fn check_fixture(name: &str) {
    if !gpu() {
        return;
    }
    let mut decoder = load(name, &Options::default());
    let (mut worst, mut squares, mut count, mut decided, mut steps) = (0.0f64, 0.0, 0, 0, 0);
    for (index, prompt) in golden::read(&request(name).model_dir).iter().enumerate() {
        let got = logits(&mut decoder, 0, &prompt.tokens(), 8);
        let errors = prompt.errors(prompt.ends().map(|end| got[end - 1].as_slice()));
        for error in &errors {
            assert!(error.relative_l2.is_finite(), "{name}, prompt {index}");
            worst = worst.max(error.relative_l2);
            squares += error.relative_l2.powi(2);
        }
        count += errors.len();
        let sure = prompt.decided(&errors);
        for step in &sure {
            let token = largest(&got[prompt.ids.len() - 1 + step]);
            assert_eq!(token, prompt.greedy[*step], "{name} prompt {index} step {step}");
        }
        decided += sure.len();
        steps += prompt.greedy.len();
    }
    let rms = (squares / count as f64).sqrt();
    eprintln!("{name}: relative L2 error {rms:.5} (worst {worst:.5}), {decided} of {steps} greedy steps decided");
    assert!(worst <= LOGITS_RELATIVE_L2, "{name}: relative L2 error {worst}");
}

macro_rules! fixtures {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            check_fixture($name);
        })*
    };
}

fixtures! {
    llama_with_grouped_heads: "llama-gqa",
    llama_with_scaled_rope: "llama31-scaled",
    llama_with_tied_embeddings: "llama-tied",
    llama_with_sixteen_kv_heads: "llama-mha16",
    qwen2_with_bias: "qwen2-bias",
    qwen3_with_head_norms: "qwen3-qknorm",
    mistral_with_a_window: "mistral-window",
}

#[test]
fn passes_and_grids_do_not_touch_a_bit() {
    if !gpu() {
        return;
    }
    let tokens: Vec<u32> = (0..200).map(|i| (i * 37 + 5) % 768).collect();
    for model in ["llama-gqa", "qwen3-qknorm", "mistral-window"] {
        let reference = bits(&logits(&mut load(model, &Options::default()), 0, &tokens, 8));
        for (blocks, rows) in [(None, 1), (None, 3), (Some(132), 8), (Some(64), 8), (Some(64), 1)] {
            let mut decoder = load(model, &Options { blocks, ..Options::default() });
            let got = bits(&logits(&mut decoder, 1, &tokens, rows));
            let first = got.iter().zip(&reference).position(|(got, expected)| got != expected);
            assert_eq!(first, None, "{model} on {blocks:?} blocks, {rows} rows a pass: first position that differs");
        }
    }
}

/// A launch for each phase instead of the loop; with programmatic dependent launches, too.
#[test]
fn launches_of_phases_compute_the_bits_of_the_loop() {
    if !gpu() {
        return;
    }
    let modes = [LoopMode::On, LoopMode::Off, LoopMode::Overlapped];
    let tokens: Vec<u32> = (0..200).map(|i| (i * 37 + 5) % 768).collect();
    for model in ["llama-gqa", "qwen3-qknorm", "mistral-window", "llama-tied"] {
        let gauge = Gauge::new(&modes);
        let mut decoder = load(model, &Options { gauge: Some(gauge.clone()), ..Options::default() });
        let reference = bits(&logits(&mut decoder, 0, &tokens, 8));
        for (mode, rows) in
            [(LoopMode::Off, 8), (LoopMode::Off, 1), (LoopMode::Overlapped, 8), (LoopMode::Overlapped, 1)]
        {
            gauge.set(mode, false);
            let got = bits(&logits(&mut decoder, 1, &tokens, rows));
            let first = got.iter().zip(&reference).position(|(got, expected)| got != expected);
            assert_eq!(first, None, "{model}, loop {mode:?}, {rows} rows a pass: first position that differs");
            // Steps of one launch hand their tokens on.
            let step = |position| {
                let decoding = Row { token: tokens[3], position, slot: 1, flags: ROW_SAMPLE, ..Row::default() };
                Row { first_position: position, last_position: position + 4, ..decoding }
            };
            let runs = [mode, LoopMode::On].map(|mode| {
                gauge.set(mode, false);
                let engine = &mut decoder.decoder.launcher;
                let launch = engine.launch(&[step(200)], 5, false).unwrap_or_else(|fault| panic!("{fault}"));
                engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
                (0..5).map(|step| engine.token(launch, step, 0)).collect::<Vec<_>>()
            });
            assert!(runs[0] == runs[1] && runs[0][4] < 768, "{model}, loop {mode:?}: {runs:?}");
        }
        for mode in modes {
            gauge.set(mode, true);
            logits(&mut decoder, 0, &tokens[..1], 1);
            let engine = &mut decoder.decoder.launcher;
            let row =
                Row { token: 1, position: 1, first_position: 1, last_position: 4, flags: ROW_SAMPLE, ..Row::default() };
            engine.launch(&[row], 3, false).unwrap_or_else(|fault| panic!("{fault}"));
            engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
            let noted = gauge.take().expect("a traced launch notes times");
            eprintln!("{model}, loop {mode:?}: {:?}", noted.phases);
            let known = |phase| noted.phases.iter().any(|time| time.phase == phase && time.us > 0.0 && time.us < 1e4);
            assert!(Phase::ALL.into_iter().skip(1).all(known), "{model}, loop {mode:?}: {:?}", noted.phases);
        }
    }
}

/// Warps that are held up, here and there for up to 2 ms, in the loop and between its launches.
#[test]
fn delays_change_nothing_but_time() {
    if !gpu() {
        return;
    }
    let tokens: Vec<u32> = (0..90).map(|i| (i * 37 + 5) % 768).collect();
    for model in ["llama-gqa", "mistral-window"] {
        let reference = bits(&logits(&mut load(model, &Options::default()), 0, &tokens, 8));
        for seed in [1, 2] {
            let defines = vec![("LP_DELAYS", seed)];
            let mut decoder = load(model, &Options { defines, ..Options::default() });
            for rows in [8, 1] {
                assert!(
                    bits(&logits(&mut decoder, 1, &tokens, rows)) == reference,
                    "{model}, seed {seed}, {rows} rows"
                );
            }
        }
    }
}

/// What `just sanitize` runs under compute-sanitizer: passes of either width over two pages, and a launch of several steps, with time for tools
/// that make a kernel slow.
#[test]
fn sanitized() {
    if !gpu() {
        return;
    }
    let options = Options { poison: true, defines: vec![("LP_PATIENCE", 1000)], ..Options::default() };
    let request = LoadRequest { wait_limit: Duration::from_secs(600), ..request("llama-gqa") };
    let mut decoder = load_with(&request, &options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    let tokens: Vec<u32> = (0..67).map(|i| (i * 37 + 5) % 768).collect();
    let reference = bits(&logits(&mut decoder, 0, &tokens, 8));
    assert!(bits(&logits(&mut decoder, 1, &tokens[..3], 1)) == reference[..3]);
    let engine = &mut decoder.decoder.launcher;
    let row = Row {
        token: tokens[66],
        position: 66,
        first_position: 66,
        last_position: 68,
        flags: ROW_SAMPLE,
        ..Row::default()
    };
    let launch = engine.launch(&[row], 3, false).unwrap_or_else(|fault| panic!("{fault}"));
    engine.finish().unwrap_or_else(|fault| panic!("{fault}"));
    let last: Vec<f32> = reference[66].iter().map(|bits| f32::from_bits(*bits)).collect();
    assert_eq!(engine.token(launch, 0, 0), largest(&last));
}

/// Tags start again, in passes of either kernel and within what a sequence needs.
#[test]
fn the_wrap_of_the_tags_does_not_touch_a_bit() {
    if !gpu() {
        return;
    }
    let tokens: Vec<u32> = (0..150).map(|i| (i * 37 + 5) % 768).collect();
    let mut decoder = load("llama-gqa", &Options::default());
    let reference = bits(&logits(&mut decoder, 0, &tokens, 8));
    for (rows, before) in [(8, 30), (1, 300), (1, 4)] {
        decoder.decoder.launcher.epoch = u32::MAX - before;
        assert!(bits(&logits(&mut decoder, 1, &tokens, rows)) == reference, "{before} tags before the wrap");
        assert!(decoder.decoder.launcher.epoch < 1000, "the tags have started again");
    }
}

/// Requests that decode together, in launches of many steps or with the host drawing some: each as if it were alone.
#[test]
fn plans_yield_the_tokens_of_teacher_forced_passes() {
    if !gpu() {
        return;
    }
    let mut requests: Vec<_> = (0..6u32)
        .map(|i| {
            let prompt: Vec<u32> = (0..3 + i * 23).map(|j| (i * 131 + j * 17) % 768).collect();
            Request::greedy(&prompt, 40 + i * 5)
        })
        .collect();
    let whole = drive_model("llama-gqa", &requests, 40, true);
    assert_eq!(whole, drive_model("llama-gqa", &requests, 5, false));
    requests[2].logprobs = Some(2);
    assert_eq!(whole, drive_model("llama-gqa", &requests, 64, true));
    let mut decoder = load("llama-gqa", &Options::default());
    for (request, reply) in requests.iter().zip(&whole) {
        let all: Vec<u32> = request.prompt.iter().chain(reply).copied().collect();
        let rows = logits(&mut decoder, 0, &all, 8);
        let forced: Vec<u32> = rows[request.prompt.len() - 1..all.len() - 1].iter().map(|row| largest(row)).collect();
        assert_eq!(*reply, forced);
        assert_eq!(drive_model("llama-gqa", std::slice::from_ref(request), 16, true)[0], *reply, "alone");
    }
}

fn drive_model(model: &str, requests: &[Request], chunk: usize, eager: bool) -> Vec<Vec<u32>> {
    let decoder = load(model, &Options::default());
    let outcomes =
        drive(move |source, sink| Box::new(decoder).run(source, sink), plans(requests, chunk, 64, 16), eager);
    let replies = replies(&outcomes, requests.len());
    assert!(replies.iter().zip(requests).all(|(reply, request)| reply.0.len() == request.max_tokens as usize));
    replies.into_iter().map(|(tokens, _)| tokens).collect()
}

/// Weights of a model larger than the fixtures, in both packings of the LM head, as the CPU backend has them.
#[test]
fn a_larger_random_model_agrees_with_the_cpu_backend() {
    if !gpu() {
        return;
    }
    let shape = ModelConfig {
        hidden_size: 1024,
        head_dim: 128,
        num_layers: 4,
        ..crate::plan::tests::config(16, 4, 2816, 5000)
    };
    let tokens: Vec<u32> = (0..70).map(|i| (i * 377 + 5) % 5000).collect();
    // Heads that are padded, too.
    for (tied_embeddings, head_dim) in [(false, 128), (true, 128), (false, 32), (true, 96)] {
        let config = ModelConfig { tied_embeddings, head_dim, ..shape.clone() };
        let source = RandomSource { config: config.clone(), seed: 3 };
        let random: (ModelConfig, Arc<dyn crate::model::source::Source + Send>) =
            (config.clone(), Arc::new(source.clone()));
        let mut decoder = load("random", &Options { random: Some(random), ..Options::default() });
        let got = logits(&mut decoder, 0, &tokens, 8);
        let arrangement = Arrangement { random: Some(source), ..Arrangement::default() };
        let alone = cpu::run(std::path::Path::new("random"), &arrangement, &[cpu::Request::greedy(&tokens, 1)]);
        let expected: Vec<f32> = alone[0].logits[0].iter().map(|bits| f32::from_bits(*bits)).collect();
        let relative = |(expected, got): (&Vec<f32>, &Vec<f32>)| {
            let pairs = || expected.iter().zip(got).map(|(e, g)| (f64::from(*e), f64::from(*g)));
            (pairs().map(|(e, g)| (e - g).powi(2)).sum::<f64>() / pairs().map(|(e, _)| e * e).sum::<f64>()).sqrt()
        };
        let last = relative((&expected, got.last().unwrap()));
        eprintln!("tied {tied_embeddings}, heads of {head_dim}: relative L2 error {last:.5}");
        assert!(last <= LOGITS_RELATIVE_L2, "{last}");
    }
}

/// Set: this process is the one whose kernel fails.
const CHILD: &str = "LOOPLANE_TEST_KERNEL_FAILS";

/// A row that names another of its sequence in the launch, which is not there: its K and V never come. A failed kernel takes
/// its process's GPU along, so this is a process of its own.
#[test]
fn a_wait_that_fails_is_reported_with_its_place() {
    if !gpu() {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let this = std::env::current_exe().unwrap();
        let name = "cuda::tests::gpu::a_wait_that_fails_is_reported_with_its_place";
        let child = std::process::Command::new(this).args(["--exact", name, "--nocapture"]).env(CHILD, "1").output();
        let child = child.unwrap();
        let told = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success() && told.contains("waited too long for"), "{told}");
        return;
    }
    let mut decoder = load("llama-gqa", &Options::default());
    let engine = &mut decoder.decoder.launcher;
    engine.enter().unwrap();
    engine.write_pages(0, 0, &[3]).unwrap();
    let rows = [
        Row { token: 1, flags: ROW_SAMPLE, ..Row::default() },
        Row { token: 2, slot: 1, position: 5, first_row: 1, first_position: 4, last_position: 5, ..Row::default() },
    ];
    let fault = engine.launch(&rows, 1, false).and_then(|_| engine.finish()).unwrap_err();
    eprintln!("{fault}");
    // The wait for K and V, or one of those that wait for its result: they all begin within microseconds.
    let sites = 12..=18;
    let of_these = |site: &str| sites.clone().any(|number| site.ends_with(&format!("(site {number})")));
    assert!(matches!(&fault, Fault::KernelWait { site, .. } if of_these(site)), "{fault:?}");
    std::mem::forget(decoder);
}
