//! A benchmark of a shape too small to measure: what it says is there and adds up.

use clap::Parser;
use serde_json::Value;

use super::*;
use crate::cuda::{Exchange, Spread};
use crate::plan::ModelPlan;
use crate::plan::stream::packed_bytes;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: BenchArgs,
}

fn args(line: &str) -> BenchArgs {
    Command::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).unwrap().args
}

#[test]
fn figures_are_what_the_plan_says_and_agree_with_each_other() {
    for tp in [1, 2] {
        let json = tempfile::NamedTempFile::new().unwrap();
        let options =
            "--shape tiny --device cpu --weights bf16 --threads 1 --read-mib 2 --batch 1,3 --context 70 --steps 10";
        let args = args(&format!("{options} --tp {tp} --json {}", json.path().display()));
        let report = run(&args).unwrap();

        let config = Shape::Tiny.config();
        let plan = ModelPlan::new(&config, tp).unwrap();
        let weights: usize = (0..tp).map(|rank| packed_bytes(&plan, &plan.rank(rank))).sum();
        assert!(report.batches.iter().all(|of| of.weight_bytes == weights as u64));
        // The first batch is warmed up by 2 steps, as is the second, which moves the first sequence on again: batch 1
        // decodes at 74, 75..; batch 3 finds its first sequence 8 steps further in both of its rounds.
        let layout_bytes = |rank| crate::plan::KvLayout::new(&plan, &plan.rank(rank), 1).page_bytes() as u64;
        let position: u64 = (0..tp).map(layout_bytes).sum::<u64>() / crate::plan::PAGE_POSITIONS as u64;
        let seen = |from: u64, steps: u64| (from + 1..=from + steps).sum::<u64>();
        let alone = seen(74, 8) + seen(74 + 16, 2);
        let three = seen(74 + 8, 8) + seen(74 + 18, 2) + 2 * seen(72, 10);
        assert_eq!(report.batches[0].kv_bytes, alone * position / 10);
        assert_eq!(report.batches[1].kv_bytes, three * position / 10);

        for of in &report.batches {
            let bytes = (of.weight_bytes + of.kv_bytes) as f64;
            assert!((of.gb_s / (bytes / of.step_ms / 1e6) - 1.0).abs() < 1e-9);
            assert!((of.share_of_best_read * report.read.best_gb_s / of.gb_s - 1.0).abs() < 1e-9);
            assert!(of.best_step_ms > 0.0 && of.best_step_ms <= of.step_ms);
            assert!(of.share_of_best_read <= of.share_of_median_read && of.share_of_best_read <= of.best_share);
        }
        assert_eq!(report.batches[0].times_batch_1, Some(1.0));
        assert_eq!((report.read.bytes, report.read.passes), (2 << 20, 10));

        let written: Value = serde_json::from_slice(&std::fs::read(json.path()).unwrap()).unwrap();
        assert_eq!(written["batches"][1]["batch"], 3);
        assert_eq!(written["tensor_parallel"], tp);
        for field in ["step_ms", "gb_s", "share_of_median_read", "share_of_best_read", "times_batch_1"] {
            assert!(written["batches"][1][field].as_f64().unwrap() > 0.0, "{field}");
        }
        assert!(written["read"]["best_gb_s"].as_f64().unwrap() >= written["read"]["median_gb_s"].as_f64().unwrap());
        assert!(report.prompt.is_none() && written["prompt"].is_null());
        assert_eq!(report.to_string().lines().count(), 10);
    }
}

/// Which only several GPUs have.
#[test]
fn exchanges_between_ranks_stand_under_the_phases_and_in_json() {
    let spread = |median_us| Spread { median_us, mean_us: median_us + 0.125, most_us: median_us + 2.0 };
    let exchange = |phase, heard, used| Exchange {
        phase,
        push_to_use: spread(heard + used),
        push_to_heard: spread(heard),
        heard_to_use: spread(used),
        word: spread(heard - 0.25),
    };
    let exchanges = Exchanges {
        sums: vec![exchange(Phase::AttentionOut, 1.0, 1.25), exchange(Phase::Down, 1.5, 1.25)],
        nearest_us: 0.75,
        farthest_us: 0.875,
        closure_us: Some(0.0625),
        drift_us: 0.03125,
    };
    let read = Read::new(1 << 30, vec![Duration::from_millis(1)]);
    let time = StepTime { step: Duration::from_millis(2), wait: Duration::ZERO };
    let report = BatchReport::new(1, &[time], 1 << 30, 1 << 20, &read);
    let without = report.to_string();
    assert!(!without.contains("push") && serde_json::to_value(&report).unwrap()["exchanges"].is_null());

    let report = BatchReport { exchanges: Some(exchanges.clone()), ..report };
    let text = report.to_string();
    let told: Vec<_> = text.strip_prefix(&without).unwrap().lines().collect();
    let sums = "o 2.25 (mean 2.38, most 4.25; 1.00 to all heard, 0.75 for a word), down 2.75 (mean 2.88, most 4.75; \
                1.50 to all heard, 1.25 for a word)";
    assert_eq!(told[0], format!("us from the last push of sums to their last use, median of layers: {sums}"));
    let clocks = "a word between ranks takes 0.75 to 0.88 us at least; their clocks agree to 0.06 us among three \
                  ranks, 0.03 between halves of the layers";
    assert_eq!(told[1..], [clocks]);

    let json = serde_json::to_value(&report).unwrap();
    let of = &json["exchanges"]["sums"][1];
    assert_eq!((&of["phase"], &of["push_to_use"]["median_us"]), (&Value::from("down"), &Value::from(2.75)));
    assert_eq!((&of["push_to_heard"]["most_us"], &of["heard_to_use"]["mean_us"]), (&3.5.into(), &1.375.into()));
    for (field, us) in [("nearest_us", 0.75), ("farthest_us", 0.875), ("closure_us", 0.0625), ("drift_us", 0.03125)] {
        assert_eq!(json["exchanges"][field], us);
    }
    // Two ranks cannot be related through a third.
    let pair = BatchReport { exchanges: Some(Exchanges { closure_us: None, ..exchanges }), ..report };
    assert!(pair.to_string().ends_with("their clocks agree to 0.03 us between halves of the layers\n"));
}

#[test]
fn a_prompt_is_timed_to_its_first_token() {
    // More than one chunk, and longer than what the batch decodes at.
    let line = "--shape tiny --device cpu --threads 1 --read-mib 1 --batch 1 --context 5 --steps 2 --prompt 700";
    let report = run(&args(line)).unwrap();
    let prompt = report.prompt.as_ref().unwrap();
    assert_eq!(prompt.tokens, 700);
    assert!(prompt.best_ms > 0.0 && prompt.best_ms <= prompt.ms);
    assert!((prompt.tokens_per_s * prompt.ms / 700e3 - 1.0).abs() < 1e-9);
    // A layer of 256 x (2 x 20 heads of 16 + 3 x 512), and q, k and v of the last, 256 x 24 x 16, twice a token.
    let multiplied = 2 * 256 * (640 + 1536 + 384);
    assert!((prompt.tflop_per_s * 1e12 / prompt.tokens_per_s / f64::from(multiplied) - 1.0).abs() < 1e-9);
    assert!(report.to_string().contains("prompt of 700 tokens"));
}

#[test]
fn steps_with_a_prompt_beside_every_batch_are_timed() {
    // Longer than the context, and a slot more than the largest batch.
    let line = "--shape tiny --device cpu --threads 1 --read-mib 1 --batch 3,1 --context 5 --steps 2 --beside 600";
    let report = run(&args(line)).unwrap();
    let beside: Vec<_> = report.beside.iter().map(|of| (of.batch, of.tokens)).collect();
    assert_eq!(beside, [(3, 600), (1, 600)]);
    for (of, alone) in report.beside.iter().zip(&report.batches) {
        assert!(of.best_step_ms <= of.step_ms && of.best_step_ms > alone.best_step_ms, "601 rows or more");
    }
    assert!(report.to_string().contains("batch 1 beside 600 tokens of a prompt: "));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let refused = |line: &str| run(&args(line)).unwrap_err().to_string();
    let some_shards = "must be 4, 8 or 16, and more than a --tp of at least 2";
    for line in ["--tp 4 --shard-of 4", "--shard-of 16", "--tp 2 --shard-of 6"] {
        assert!(refused(&format!("--shape tiny --device cuda {line}")).ends_with(some_shards), "{line}");
    }
    assert!(refused("--shape tiny --device cpu --tp 2 --shard-of 4").contains("where no GPU computes"));
    assert_eq!(refused("--shape tiny --tp 3"), "--tp is 3, but must be 1, 2, 4, 8 or 16");
    assert!(refused("--device cuda --loop on,off --batch 1,32").starts_with("--batch is 32, but must be at most 8"));
    assert!(refused("--device cuda --loop off --trace /x").contains("--trace"));
    assert!(refused("--shape tiny --device cpu --trace /x").starts_with("--trace is /x"));
    assert!(refused("--shape tiny --device cpu --loop overlapped").contains("where no GPU computes"));
    assert!(refused("--model /nowhere").contains("/nowhere/config.json"));
    let long = refused("--shape tiny --device cpu --threads 1 --context 131072");
    assert!(long.contains("131072"), "{long}");
    let both = Command::try_parse_from(["bench", "--model", "/x", "--shape", "1b"]);
    assert!(both.is_err_and(|error| error.kind() == clap::error::ErrorKind::ArgumentConflict));
}

#[test]
fn a_checkpoint_is_measured_with_its_own_weights() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let model = std::fs::read_dir(dir).unwrap().flatten().find(|entry| entry.path().join("config.json").is_file());
    let model = model.expect("the fixtures hold checkpoints").path();
    let line =
        format!("--model {} --device cpu --threads 1 --read-mib 1 --batch 2 --context 9 --steps 3", model.display());
    let report = run(&args(&line)).unwrap();
    assert!(!report.random_weights && report.batches[0].times_batch_1.is_none());
}

#[test]
fn the_1b_shape_streams_2_08_gb() {
    let plan = ModelPlan::new(&Shape::B1.config(), 1).unwrap();
    assert_eq!(packed_bytes(&plan, &plan.rank(0)) / 10_000_000, 207);
}
