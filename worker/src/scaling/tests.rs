//! The calculation against the figures in docs/scaling, and files that are none.

use std::path::Path;

use super::*;

fn figures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/scaling");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}

fn args(figures: Vec<PathBuf>) -> ScalingArgs {
    let shapes = vec![Shape::B8, Shape::B70, Shape::B405];
    let (fitted_gpus, batch, context) = (2, vec![1, 8], 512);
    ScalingArgs { figures, fitted_gpus, shapes, model: None, batch, context, plot: None, json: None }
}

#[test]
fn one_and_two_gpus_predict_four_within_10_percent() {
    let report = run(&args(figures())).unwrap();
    let predicted: Vec<_> = report.compared.iter().filter(|of| !of.fitted && of.shard_of.is_none()).collect();
    for (shape, batch) in
        [Shape::Llama1B, Shape::B8, Shape::B70].into_iter().flat_map(|shape| [1, 8].map(|n| (shape, n)))
    {
        let name = shape.name();
        let of = predicted.iter().find(|of| (of.model.as_str(), of.ranks, of.measured.batch) == (&name, 4, batch));
        let error = of.expect("all three shapes were measured on four GPUs").measured.error(&report.costs);
        assert!(error.abs() < 0.10, "{} at batch {batch}: {error}\n{report}", shape.name());
    }
    assert!([Steps::Fitted, Steps::Larger].iter().all(|of| report.worst(*of).unwrap() < 0.10), "{report}");
    assert!(report.to_string().contains("largest error over shards of larger groups"), "{report}");
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
    assert!(report.uncomputed.is_empty() && !text.contains("is a calculation alone"), "{text}");
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
            r#"{{"model": "{model}", "device": "{device}", "tensor_parallel": 1, "shard_of": null,
            "read": {{"best_gb_s": 1}}, "batches": []}}"#
        )
    };
    assert!(refused(&of("/models/x", "cuda")).starts_with("FILE: /models/x is no shape"));
    assert!(refused(&of("8b", "cpu")).starts_with("FILE: the steps were computed by cpu"));
    assert!(refused(&of("8b", "cuda")).starts_with("0 steps of groups of 1 to 2 GPUs"));
    let missing = run(&args(vec!["/nowhere.json".into()])).unwrap_err().to_string();
    assert_eq!(missing, "cannot read /nowhere.json");
}

/// Once larger groups are measured, they are fitted on as well, and those beyond them are predicted anew.
#[test]
fn larger_groups_can_be_fitted_on() {
    let two = run(&args(figures())).unwrap();
    let four = run(&ScalingArgs { fitted_gpus: 4, ..args(figures()) }).unwrap();
    assert!(four.compared.iter().all(|of| of.fitted == (of.ranks <= 4 && of.shard_of.is_none())));
    assert!(four.to_string().starts_with("Fitted on groups of 1 to 4 GPUs") && four.worst(Steps::Larger).is_none());
    // What was fitted on is met better than what was predicted, and what is predicted is no longer the same.
    let of_four = |report: &Report| {
        let errors = report.compared.iter().filter(|of| of.ranks == 4 && of.shard_of.is_none());
        errors.map(|of| of.measured.error(&report.costs).powi(2)).sum::<f64>()
    };
    assert!(of_four(&four) < of_four(&two), "{four}\n{two}");
    let of_sixteen = |report: &Report| {
        let step = report.predicted.iter().find(|of| (of.model.as_str(), of.ranks, of.batch) == ("70b", 16, 1));
        step.expect("70b is predicted").step_ms
    };
    assert!(of_sixteen(&four) != of_sixteen(&two));
}

/// What a bench of a checkpoint says is read as well, and what it predicts of it is that of the shape with its
/// dimensions.
#[test]
fn a_model_directory_is_predicted_as_the_shape_of_its_dimensions() {
    let folder = tempfile::tempdir().unwrap();
    let json = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": false,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"}"#;
    std::fs::write(folder.path().join("config.json"), json).unwrap();
    let model = folder.path().display().to_string();
    let mut copies = Vec::new();
    for path in figures() {
        let mut run: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        if run["model"] == "8b" {
            run["model"] = model.clone().into();
        }
        copies.push(folder.path().join(path.file_name().unwrap()));
        std::fs::write(copies.last().unwrap(), run.to_string()).unwrap();
    }
    let of_model = ScalingArgs { model: Some(folder.path().into()), batch: vec![4], context: 300, ..args(copies) };
    let report = run(&of_model).unwrap();
    let of_shape = run(&ScalingArgs { batch: vec![4], context: 300, ..args(figures()) }).unwrap();
    let steps = |report: &Report, name: &str| -> Vec<(usize, f64)> {
        report.predicted.iter().filter(|of| of.model == name).map(|of| (of.ranks, of.step_ms)).collect()
    };
    assert_eq!(steps(&report, &model), steps(&of_shape, "8b"));
    assert_eq!(steps(&report, &model).len(), 5);
    assert!(
        of_shape.refused.iter().any(|of| (of.model.as_str(), of.ranks) == ("405b", 4) && of.reason.contains(" GB "))
    );
    let written = report.to_json();
    assert_eq!(written["predicted"][4]["tensor_parallel"], 16);
    assert!(
        written["compared"].as_array().unwrap().iter().any(|of| of["fitted"] == false && of["measured_ms"].is_f64())
    );
}
