//! The calculation against the figures in docs/scaling, and files that are none.

use std::path::Path;

use super::*;

fn figures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/scaling");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}

fn args(figures: Vec<PathBuf>) -> ScalingArgs {
    ScalingArgs { figures, shapes: vec![Shape::B8, Shape::B70, Shape::B405], plot: None }
}

#[test]
fn one_and_two_gpus_predict_four_within_10_percent() {
    let report = run(&args(figures())).unwrap();
    let predicted: Vec<_> = report.compared.iter().filter(|of| !of.is_fitted() && of.shard_of.is_none()).collect();
    for (shape, batch) in
        [Shape::Llama1B, Shape::B8, Shape::B70].into_iter().flat_map(|shape| BATCHES.map(|n| (shape, n)))
    {
        let of = predicted.iter().find(|of| (of.shape, of.ranks, of.measured.batch) == (shape, 4, batch));
        let error = of.expect("all three shapes were measured on four GPUs").measured.error(&report.costs);
        assert!(error.abs() < 0.10, "{} at batch {batch}: {error}\n{report}", shape.name());
    }
    assert!(report.worst(true).unwrap() < 0.10 && report.worst(false).unwrap() < 0.10, "{report}");
    // Nobody's steps are below what their bytes take, and none of the remedies makes one longer.
    for of in &report.predicted {
        assert!(of.floor_ms < of.step_ms * 1.01, "{of:?}");
        assert!(
            [of.even_ms, of.half_exchange_ms, of.free_ranks_ms].iter().all(|ms| *ms <= of.step_ms * 1.001),
            "{of:?}"
        );
    }
    let text = report.to_string();
    assert!(
        text.contains("| 405b | 16 | 8 |") && text.contains("| fitted |") && text.contains("| predicted |"),
        "{text}"
    );
}

#[test]
fn files_that_say_nothing_are_refused_by_name() {
    let refused = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let error = run(&args(vec![file.path().into()])).unwrap_err().to_string();
        error.replace(&file.path().display().to_string(), "FILE")
    };
    assert!(refused("{}").starts_with("FILE: missing field"), "{}", refused("{}"));
    let of = |model, device| {
        format!(
            r#"{{"model": "{model}", "device": "{device}", "tensor_parallel": 1, "shard_of": null, "read": {{"best_gb_s": 1}}, "batches": []}}"#
        )
    };
    assert!(refused(&of("/models/x", "cuda")).starts_with("FILE: /models/x is no shape"));
    assert!(refused(&of("8b", "cpu")).starts_with("FILE: the steps were computed by cpu"));
    assert!(refused(&of("8b", "cuda")).starts_with("0 steps of groups of 1 and 2 GPUs"));
    let missing = run(&args(vec!["/nowhere.json".into()])).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere.json: "), "{missing}");
}
