use proptest::prelude::*;
use serde_json::json;

use super::*;

fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 384, "vocab_size": 768, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    })
}

fn parse(value: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(value.to_string().as_bytes(), Path::new("m/config.json"))
}

fn with(field: &str, value: Value) -> Value {
    let mut base = base();
    base[field] = value;
    base
}

#[test]
fn both_spellings_of_rope_settings_mean_the_same() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let mut old = with("rope_theta", json!(500000.0));
    old["rope_scaling"] = scaling.clone();
    let mut group = scaling.clone();
    group["rope_theta"] = json!(500000.0);
    let new = with("rope_parameters", group);
    let (old, new) = (parse(&old).unwrap(), parse(&new).unwrap());
    assert_eq!(old, new);
    assert_eq!(old.rope.theta, 500000.0);
    assert_eq!(old.rope.llama3.unwrap().original_positions, 64);
    assert_eq!(parse(&base()).unwrap().rope, Rope { theta: 10_000.0, llama3: None });

    let mut both = with("rope_scaling", scaling);
    both["rope_parameters"] = json!({"rope_type": "default"});
    assert!(parse(&both).unwrap_err().to_string().contains("the same as rope_parameters"));
}

#[test]
fn architectures_differ_where_they_should() {
    let mut mistral = with("architectures", json!(["MistralForCausalLM"]));
    assert_eq!(parse(&mistral).unwrap().sliding_window, Some(4096));
    mistral["sliding_window"] = Value::Null;
    assert_eq!(parse(&mistral).unwrap().sliding_window, None);
    mistral["sliding_window"] = json!(32);
    assert_eq!(parse(&mistral).unwrap().sliding_window, Some(32));
    let mut qwen = with("architectures", json!(["Qwen2ForCausalLM"]));
    qwen["sliding_window"] = json!(32768);
    let qwen = parse(&qwen).unwrap();
    assert_eq!((qwen.qkv_bias, qwen.qk_norm, qwen.sliding_window), (true, false, None));
    assert!(parse(&with("architectures", json!(["Qwen3ForCausalLM"]))).unwrap().qk_norm);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (field, value) in [
        ("architectures", json!(["MixtralForCausalLM"])),
        ("hidden_act", json!("gelu")),
        ("use_sliding_window", json!(true)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("num_experts", json!(8)),
        ("quantization_config", json!({"quant_method": "bitsandbytes"})),
        ("partial_rotary_factor", json!(0.5)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
    ] {
        let error = parse(&with(field, value.clone())).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{field}: {error}");
        assert!(error.to_string().contains(field) && error.to_string().contains("m/config.json"), "{error}");
    }
    let error = parse(&with("rope_scaling", json!({"type": "yarn", "factor": 2.0}))).unwrap_err();
    assert!(error.to_string().contains("`rope_scaling.type` is \"yarn\""), "{error}");
}

/// As compressed-tensors writes it, with one field of one of its objects changed.
fn compressed_tensors(place: &str, field: &str, value: Value) -> Value {
    let weights = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel", "dynamic": false,
        "group_size": null, "block_structure": null, "actorder": null, "observer": "minmax", "observer_kwargs": {}});
    let inputs = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "token", "dynamic": true});
    let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
    let mut config = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": null, "quantization_status": "compressed",
        "global_compression_ratio": 1.5, "sparsity_config": {}, "transform_config": {}, "version": "0.12.2"});
    config.pointer_mut(place).unwrap().as_object_mut().unwrap().insert(field.into(), value);
    with("quantization_config", config)
}

#[test]
fn fp8_is_known_by_its_published_fields_and_others_are_refused_by_name() {
    const GROUP: &str = "/config_groups/group_0";
    const WEIGHTS: &str = "/config_groups/group_0/weights";
    let format = |value: &Value| parse(value).map(|config| config.layer_weights);
    for (place, field, value) in [
        ("", "ignore", json!(["lm_head", "re:.*mlp.gate$"])),
        (WEIGHTS, "strategy", json!("tensor")),
        (WEIGHTS, "scale_dtype", json!("torch.bfloat16")),
        (GROUP, "input_activations", json!(null)),
    ] {
        assert_eq!(format(&compressed_tensors(place, field, value)).unwrap(), WeightFormat::E4m3, "{field}");
    }
    for value in [
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}),
        json!({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    ] {
        assert_eq!(format(&with("quantization_config", value)).unwrap(), WeightFormat::E4m3);
    }
    assert_eq!(format(&base()).unwrap(), WeightFormat::Bf16);
    let refused = [
        (compressed_tensors("", "format", json!("pack-quantized")), "format"),
        (compressed_tensors("", "kv_cache_scheme", json!({"num_bits": 8})), "kv_cache_scheme"),
        (compressed_tensors("", "transform_config", json!({"hadamard": 1})), "transform_config"),
        (compressed_tensors("", "sparsity_config", json!({"format": "sparse-24-bitmask"})), "format"),
        (compressed_tensors("", "ignore", json!("lm_head")), "ignore"),
        (compressed_tensors("/config_groups", "group_1", json!({})), "targets"),
        (compressed_tensors(GROUP, "targets", json!(["re:.*q_proj"])), "targets"),
        (compressed_tensors(WEIGHTS, "num_bits", json!(4)), "num_bits"),
        (compressed_tensors(WEIGHTS, "type", json!("int")), "type"),
        (compressed_tensors(WEIGHTS, "strategy", json!("block")), "strategy"),
        (compressed_tensors(WEIGHTS, "group_size", json!(128)), "group_size"),
        (compressed_tensors(WEIGHTS, "actorder", json!("weight")), "actorder"),
        (
            with("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [128, 128]})),
            "weight_block_size",
        ),
        (with("quantization_config", json!({"quant_method": "fp8", "fmt": "e5m2"})), "fmt"),
        (with("quantization_config", json!({"quant_method": "awq", "bits": 4})), "quant_method"),
        (with("quantization_config", json!("fp8")), "quantization_config"),
    ];
    for (config, field) in refused {
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("m/config.json"), "{field}: {error}");
    }
}

#[test]
fn absurd_numbers_are_refused_with_field_and_value() {
    for field in
        ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "head_dim"]
    {
        for value in [json!(0), json!(-1), json!(1.5), json!(u64::MAX), json!("8"), json!([]), json!(1e300)] {
            let error = parse(&with(field, value.clone())).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains(&value.to_string()), "{error}");
        }
    }
    for (field, value) in [
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(24)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!("1e-5")),
        ("rope_theta", json!(-1)),
        ("max_position_embeddings", json!(0)),
        ("tie_word_embeddings", json!("yes")),
        ("rope_scaling", json!("llama3")),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}),
        ),
    ] {
        let error = parse(&with(field, value)).unwrap_err();
        assert!(matches!(error, ConfigError::Value { .. }), "{field}: {error}");
    }
    let mut no_head_dim = base();
    no_head_dim.as_object_mut().unwrap().remove("head_dim");
    no_head_dim["hidden_size"] = json!(100);
    assert!(parse(&no_head_dim).unwrap_err().to_string().contains("`hidden_size` is 100"));
    let mut no_vocab = base();
    no_vocab.as_object_mut().unwrap().remove("vocab_size");
    assert!(parse(&no_vocab).unwrap_err().to_string().contains("field `vocab_size` is missing"));
}

#[test]
fn the_largest_vocabulary_is_one_that_the_sampler_takes() {
    let config = parse(&with("vocab_size", json!(MAX_VOCAB))).unwrap();
    for tensor_parallel in [1, 16] {
        let plan = crate::plan::ModelPlan::new(&config, 1).unwrap();
        let shape = crate::sampling::SamplerShape {
            vocab_size: config.vocab_size,
            padded_vocab: plan.padded_vocab,
            tensor_parallel,
            rank: 0,
            max_rows: 1,
        };
        // Panics for a shape that it does not take.
        assert!(crate::sampling::Sampler::new(shape).max_words() > 0);
    }
    let error = parse(&with("vocab_size", json!(MAX_VOCAB + 1))).unwrap_err().to_string();
    assert!(error.contains("`vocab_size` is 4194049, but has to be a whole number from 1 to 4194048"), "{error}");
}

#[test]
fn a_file_that_is_no_object_is_refused() {
    for text in ["", "[]", "{", "null", "\u{0}"] {
        let error = ModelConfig::from_json(text.as_bytes(), Path::new("m/config.json")).unwrap_err();
        assert!(matches!(error, ConfigError::Json { .. }), "{error}");
    }
    let long = format!("[\"{}\"]", "x".repeat(100_000));
    let error = ModelConfig::from_json(long.as_bytes(), Path::new("c")).unwrap_err().to_string();
    assert!(error.len() < 300);
}

proptest! {
    // Whatever stands where a number or a name should, the answer is a config or a sentence; and a config can be cut.
    #[test]
    fn strange_values_never_panic(
        picks in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..4),
    ) {
        let mut strange = base();
        strange["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let fields: Vec<String> = strange.as_object().unwrap().keys().cloned().collect();
        let values = [json!(0), json!(1), json!(16), json!(48), json!(-1), json!(0.5), json!(1e308), json!(u64::MAX),
            json!(1 << 17), json!(null), json!("x"), json!([]), json!([0]), json!({}), json!({"type": []}),
            json!(true)];
        for (field, value) in picks {
            strange[field.get(&fields).as_str()] = value.get(&values).clone();
        }
        if let Ok(config) = parse(&strange) {
            for tp in [1, 2, 4, 8, 16] {
                if let Ok(plan) = crate::plan::ModelPlan::new(&config, tp) {
                    prop_assert!(crate::plan::stream::packed_bytes(&plan, &plan.rank(tp - 1)) > 0);
                }
            }
        }
    }

    #[test]
    fn damaged_text_never_panics(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut text = base().to_string().into_bytes();
        for (at, byte) in flips {
            let at = at.index(text.len());
            text[at] = byte;
        }
        // Only that it answers.
        let _ = ModelConfig::from_json(&text, Path::new("c"));
    }
}

#[test]
fn context_is_bounded_by_the_model() {
    let config = parse(&base()).unwrap();
    assert_eq!(config.context(0).unwrap(), 2048);
    assert_eq!(config.context(512).unwrap(), 512);
    assert!(config.context(4096).unwrap_err().to_string().contains("4096"));
}
