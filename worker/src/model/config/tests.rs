use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::WeightFormat;
use crate::model::storage::Packing;

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
        (compressed_tensors("", "format", json!("pack-quantized")), "num_bits"),
        (compressed_tensors("", "format", json!("int-quantized")), "format"),
        (compressed_tensors("", "kv_cache_scheme", json!({"num_bits": 8})), "kv_cache_scheme"),
        (compressed_tensors("", "transform_config", json!({"hadamard": 1})), "transform_config"),
        (compressed_tensors("", "sparsity_config", json!({"format": "sparse-24-bitmask"})), "format"),
        (compressed_tensors("", "ignore", json!("lm_head")), "ignore"),
        (compressed_tensors("/config_groups", "group_1", json!({})), "targets"),
        (compressed_tensors(GROUP, "targets", json!(["re:.*q_proj"])), "targets"),
        (compressed_tensors(GROUP, "format", json!("pack-quantized")), "format"),
        (compressed_tensors(WEIGHTS, "num_bits", json!(4)), "num_bits"),
        (compressed_tensors(WEIGHTS, "type", json!("int")), "type"),
        (compressed_tensors(WEIGHTS, "strategy", json!("group")), "strategy"),
        (compressed_tensors(WEIGHTS, "strategy", json!("block")), "block_structure"),
        (compressed_tensors(WEIGHTS, "group_size", json!(128)), "group_size"),
        (compressed_tensors(WEIGHTS, "block_structure", json!([128, 128])), "block_structure"),
        (compressed_tensors(WEIGHTS, "actorder", json!("weight")), "actorder"),
        (with("quantization_config", json!({"quant_method": "fp8", "fmt": "e5m2"})), "fmt"),
        (
            with("quantization_config", json!({"quant_method": "fp8", "modules_to_convert": ["x"]})),
            "modules_to_convert",
        ),
        (with("quantization_config", json!({"quant_method": "bitsandbytes"})), "quant_method"),
        (with("quantization_config", json!("fp8")), "quantization_config"),
    ];
    for (config, field) in refused {
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("m/config.json"), "{field}: {error}");
    }
}

#[test]
fn blocks_of_fp8_are_known_and_others_are_refused() {
    let storage = |value: Value| parse(&value).map(|config| (config.storage, config.layer_weights));
    let fp8 = |block: Value| {
        with(
            "quantization_config",
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block,
                "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"], "dequantize": false}),
        )
    };
    let of = |rows, columns, scales, run| {
        (Storage::E4m3Blocks { rows, columns, scales }, WeightFormat::E4m3Groups { columns: run })
    };
    assert_eq!(storage(fp8(json!([128, 128]))).unwrap(), of(128, 128, "weight_scale_inv", 128));
    assert_eq!(storage(fp8(json!([16, 96]))).unwrap(), of(16, 96, "weight_scale_inv", 32));
    let mut compressed = compressed_tensors("/config_groups/group_0/weights", "strategy", json!("block"));
    let weights = "/quantization_config/config_groups/group_0/weights";
    compressed.pointer_mut(weights).unwrap()["block_structure"] = json!([128, 128]);
    assert_eq!(storage(compressed).unwrap(), of(128, 128, "weight_scale", 128));
    for block in [json!([128]), json!([128, 100]), json!([0, 128]), json!(128), json!([128, "128"]), json!([1, 128])] {
        let error = parse(&fp8(block.clone())).unwrap_err().to_string();
        assert!(error.contains(&format!("`quantization_config.weight_block_size` is {block}")), "{error}");
    }
}

/// 4 bits as compressed-tensors writes them, with fields of `weights` changed.
fn pack_quantized(fields: Value) -> Value {
    let mut config = compressed_tensors("", "format", json!("pack-quantized"));
    let weights = config.pointer_mut("/quantization_config/config_groups/group_0/weights").unwrap();
    let base = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128});
    for (field, value) in base.as_object().unwrap().iter().chain(fields.as_object().unwrap()) {
        weights[field] = value.clone();
    }
    config
}

/// 4 bits of a method, with fields changed.
fn words(method: &str, fields: Value) -> Value {
    let mut config = json!({"quant_method": method, "bits": 4, "group_size": 128});
    for (field, value) in fields.as_object().unwrap() {
        config[field] = value.clone();
    }
    with("quantization_config", config)
}

#[test]
fn four_bits_are_known_by_their_published_fields() {
    use Packing::{Awq, CompressedTensors, Gptq};
    let int4 = |packing, group, zeros, ordered, columns| {
        (Storage::Int4 { packing, group, zeros, ordered }, WeightFormat::Int4 { columns, zeros })
    };
    let (one, as_they_are) = (Gptq { less_one: true }, Gptq { less_one: false });
    // As Qwen publishes AWQ and GPTQ, AutoGPTQ and GPTQModel write it.
    let qwen_awq = json!({"modules_to_not_convert": null, "version": "gemm", "zero_point": true});
    let autoawq = json!({"backend": "autoawq", "do_fuse": false, "exllama_config": null, "fuse_max_seq_len": null,
        "modules_to_fuse": null, "version": "GEMM", "group_size": 64});
    let qwen_gptq = json!({"batch_size": 1, "cache_block_outputs": true, "damp_percent": 0.01, "dataset": null,
        "desc_act": false, "exllama_config": {"version": 1}, "sym": true, "true_sequential": true, "use_exllama": true,
        "modules_in_block_to_quantize": null, "use_cuda_fp16": false});
    let auto_gptq = json!({"damp_percent": 0.1, "desc_act": true, "static_groups": false, "sym": true,
        "true_sequential": true, "model_name_or_path": null, "model_file_base_name": "model",
        "is_marlin_format": false});
    let gptqmodel = json!({"dynamic": {}, "desc_act": false, "sym": false, "lm_head": false, "pack_dtype": "int32",
        "checkpoint_format": "gptq_v2", "method": "gptq", "format": "gptq_v2",
        "meta": {"quantizer": ["gptqmodel:7.7"]}});
    let of_a_row = json!({"strategy": "channel", "group_size": null});
    for (config, expected) in [
        (pack_quantized(json!({})), int4(CompressedTensors, Some(128), false, false, 128)),
        (pack_quantized(json!({"symmetric": false})), int4(CompressedTensors, Some(128), true, false, 128)),
        (pack_quantized(json!({"actorder": "group"})), int4(CompressedTensors, Some(128), false, true, 128)),
        (pack_quantized(json!({"actorder": "static"})), int4(CompressedTensors, Some(128), false, false, 128)),
        (pack_quantized(json!({"group_size": 48})), int4(CompressedTensors, Some(48), false, false, 16)),
        (pack_quantized(of_a_row), int4(CompressedTensors, None, false, false, 128)),
        (words("awq", qwen_awq), int4(Awq, Some(128), true, false, 128)),
        (words("awq", autoawq), int4(Awq, Some(64), true, false, 64)),
        (words("awq", json!({"zero_point": false, "sym": true})), int4(Awq, Some(128), false, false, 128)),
        (words("gptq", qwen_gptq), int4(one, Some(128), false, false, 128)),
        (words("gptq", auto_gptq), int4(one, Some(128), false, true, 128)),
        (words("gptq", gptqmodel), int4(as_they_are, Some(128), true, false, 128)),
        (words("gptq", json!({"group_size": -1, "desc_act": true})), int4(one, None, false, false, 128)),
    ] {
        let read = parse(&config).map(|config| (config.storage, config.layer_weights));
        assert_eq!(read.unwrap(), expected, "{config}");
    }
}

#[test]
fn four_bits_that_are_not_understood_are_refused_by_name() {
    for (config, field) in [
        (pack_quantized(json!({"num_bits": 8})), "num_bits"),
        (pack_quantized(json!({"type": "float"})), "type"),
        (pack_quantized(json!({"group_size": 24})), "group_size"),
        (pack_quantized(json!({"group_size": -1})), "group_size"),
        (pack_quantized(json!({"group_size": null})), "group_size"),
        (pack_quantized(json!({"strategy": "channel"})), "group_size"),
        (pack_quantized(json!({"strategy": "tensor"})), "strategy"),
        (pack_quantized(json!({"actorder": "random"})), "actorder"),
        (pack_quantized(json!({"block_structure": [128, 128]})), "block_structure"),
        (words("awq", json!({"bits": 8})), "bits"),
        (words("awq", json!({"version": "gemv"})), "version"),
        (words("awq", json!({"format": "marlin"})), "format"),
        (words("awq", json!({"backend": "llm-awq"})), "backend"),
        (words("awq", json!({"desc_act": true})), "desc_act"),
        (words("awq", json!({"group_size": 0})), "group_size"),
        (words("gptq", json!({"bits": 3})), "bits"),
        (words("gptq", json!({"bits": 8})), "bits"),
        (words("gptq", json!({"checkpoint_format": "marlin"})), "checkpoint_format"),
        (words("gptq", json!({"checkpoint_format": 2})), "checkpoint_format"),
        (words("gptq", json!({"lm_head": true})), "lm_head"),
        (words("gptq", json!({"dynamic": {"-:.*down": {}}})), "dynamic"),
        (words("gptq", json!({"is_marlin_format": true})), "is_marlin_format"),
        (words("gptq", json!({"pack_dtype": "int16"})), "pack_dtype"),
        (words("gptq", json!({"group_size": 40})), "group_size"),
        (words("gptq", json!({"sym": 1})), "sym"),
        (words("gptq", json!({"rotation": "hadamard"})), "rotation"),
        (words("gptq", json!({"group_size": null})), "group_size"),
    ] {
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(&format!("{field}`")) && error.contains("m/config.json"), "{field}: {error}");
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
    assert!(config.context(1).unwrap_err().to_string().contains("2 at least"));
}
