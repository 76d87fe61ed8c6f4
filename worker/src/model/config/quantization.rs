//! `quantization_config`: how the matrices of the layers are stored. What is not understood is refused by name, because
//! weights that are read wrongly answer without an error.

use serde_json::Value;

use super::ConfigError;
use super::fields::Fields;
use crate::model::storage::{Packing, Storage};

/// Fields that say nothing about how weights are read: who made them and how, and how others compute.
const REMARKS: [&str; 37] = [
    "quantization_status",
    "global_compression_ratio",
    "version",
    "producer",
    "modules_to_save",
    "run_compressed",
    // GPTQ and AWQ, of AutoGPTQ, AutoAWQ, GPTQModel, optimum and transformers.
    "act_group_aware",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_to_fuse",
    "mse",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    // `fp8`, of transformers.
    "activation_scheme",
    "dequantize",
    "expert_dtype",
    "scale_fmt",
    // The older name of `quant_method`'s value in GPTQModel.
    "method",
];
/// Lists of modules that are not quantised, or are. Which are is seen by their tensors.
const LEFT_OUT: [&str; 3] = ["ignore", "ignored_layers", "modules_to_not_convert"];
/// Columns of a group are a multiple of so many: those of one product of a tensor core.
const COLUMNS: usize = 16;
/// Far above any that is published.
const MAX_GROUP: usize = 1 << 16;

/// How the matrices of the layers are stored.
pub(super) fn quantization(fields: &Fields<'_>) -> Result<Storage, ConfigError> {
    let Some(config) = fields.object("quantization_config")? else { return Ok(Storage::Plain) };
    for list in LEFT_OUT {
        let is_name = |name: &Value| name.is_string();
        if config.get(list).is_some_and(|list| !list.as_array().is_some_and(|names| names.iter().all(is_name))) {
            return Err(config.value(list, "a list of names of modules"));
        }
    }
    match config.get("quant_method").and_then(Value::as_str) {
        Some("compressed-tensors") => compressed_tensors(&config),
        Some("fp8") => fp8(&config),
        Some("awq") => awq(&config),
        Some("gptq") => gptq(&config),
        _ => Err(config.unsupported("quant_method", "the methods are compressed-tensors, fp8, awq and gptq")),
    }
}

/// Refuses fields that are neither among `known` nor without bearing.
fn refuse_others(fields: &Fields<'_>, known: &[&str]) -> Result<(), ConfigError> {
    let bears = |field: &&String| {
        let known = known.iter().chain(&REMARKS).chain(&LEFT_OUT).any(|known| known == field);
        !known && fields.get(field).is_some_and(|value| !is_empty(value))
    };
    fields.map.keys().find(bears).map_or(Ok(()), |field| Err(fields.unsupported(field, "the field is not known")))
}

/// Whether a value asks for nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(flag) => !flag,
        _ => false,
    }
}

/// Refuses a field that has another value than `expected`.
fn must_be(fields: &Fields<'_>, field: &str, expected: impl Into<Value>) -> Result<(), ConfigError> {
    let expected = expected.into();
    if fields.get(field) == Some(&expected) {
        return Ok(());
    }
    Err(fields.unsupported(field, format!("it is {expected}")))
}

/// The columns of a group; `None`, -1: a whole row.
fn group_size(fields: &Fields<'_>) -> Result<Option<usize>, ConfigError> {
    if fields.get("group_size").is_some_and(|size| *size == -1) {
        return Ok(None);
    }
    let size = fields.count("group_size", MAX_GROUP)?;
    if size.is_multiple_of(COLUMNS) {
        return Ok(Some(size));
    }
    Err(fields.unsupported("group_size", format!("groups are multiples of {COLUMNS} columns, or a row (-1)")))
}

/// `[rows, columns]` of the blocks that have a scale.
fn block(fields: &Fields<'_>, field: &str, scales: &'static str) -> Result<Storage, ConfigError> {
    let sizes = fields.get(field).and_then(Value::as_array).map(Vec::as_slice);
    let Some([rows, columns]) = sizes else { return Err(fields.value(field, "[rows, columns] of a block")) };
    let of = |size: &Value| {
        let size = usize::try_from(size.as_u64()?).ok()?;
        ((1..=MAX_GROUP).contains(&size) && size.is_multiple_of(COLUMNS)).then_some(size)
    };
    let (Some(rows), Some(columns)) = (of(rows), of(columns)) else {
        return Err(fields.unsupported(field, format!("blocks are multiples of {COLUMNS}, up to {MAX_GROUP}")));
    };
    Ok(Storage::E4m3Blocks { rows, columns, scales })
}

/// <https://github.com/vllm-project/compressed-tensors>, formats `float-quantized` and `pack-quantized`.
fn compressed_tensors(config: &Fields<'_>) -> Result<Storage, ConfigError> {
    refuse_others(config, &["quant_method", "format", "config_groups", "kv_cache_scheme", "sparsity_config"])?;
    let format = config.get("format").and_then(Value::as_str).unwrap_or_default();
    let read = match format {
        "float-quantized" => float_weights,
        "pack-quantized" => packed_weights,
        _ => return Err(config.unsupported("format", "the formats are float-quantized and pack-quantized")),
    };
    refuse_kv_scheme(config)?;
    if let Some(sparsity) = config.object("sparsity_config")?
        && sparsity.get("format").is_some_and(|format| format != "dense")
    {
        return Err(sparsity.unsupported("format", "weights are dense"));
    }
    let Some(groups) = config.object("config_groups")? else { return Err(config.missing("config_groups")) };
    let within = |map| Fields { path: config.path, prefix: "quantization_config.config_groups", map };
    let mut storage = None;
    for (name, group) in groups.map {
        let Some(group) = group.as_object() else { return Err(within(groups.map).value(name, "an object")) };
        let group = within(group);
        refuse_others(&group, &["targets", "weights", "input_activations", "output_activations", "format"])?;
        if group.get("format").is_some_and(|of_group| of_group != format) {
            return Err(group.unsupported("format", format!("the format is {format}, that of all")));
        }
        if group.get("targets") != Some(&serde_json::json!(["Linear"])) {
            return Err(group.unsupported("targets", "all matrices of the layers are stored alike: [\"Linear\"]"));
        }
        let Some(weights) = group.object("weights")? else { return Err(group.missing("weights")) };
        storage = Some(read(&weights)?);
    }
    storage.filter(|_| groups.map.len() == 1).ok_or_else(|| config.unsupported("config_groups", "there is one group"))
}

/// How the scales were found, and what else leaves the stored values as they are.
const OF_WEIGHTS: [&str; 9] =
    ["num_bits", "type", "symmetric", "strategy", "dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"];

fn float_weights(weights: &Fields<'_>) -> Result<Storage, ConfigError> {
    let strategy = weights.get("strategy").and_then(Value::as_str).unwrap_or_default();
    let with_blocks = [&OF_WEIGHTS[..], &["block_structure"]].concat();
    refuse_others(weights, if strategy == "block" { &with_blocks } else { &OF_WEIGHTS })?;
    must_be(weights, "num_bits", 8)?;
    must_be(weights, "type", "float")?;
    must_be(weights, "symmetric", true)?;
    match strategy {
        "channel" | "tensor" => Ok(Storage::E4m3),
        "block" => block(weights, "block_structure", "weight_scale"),
        _ => Err(weights.unsupported("strategy", "weights have a scale a row (channel), a tensor (tensor) or a block")),
    }
}

fn packed_weights(weights: &Fields<'_>) -> Result<Storage, ConfigError> {
    refuse_others(weights, &[&OF_WEIGHTS[..], &["group_size", "actorder"]].concat())?;
    must_be(weights, "num_bits", 4)?;
    must_be(weights, "type", "int")?;
    let group = match weights.get("strategy").and_then(Value::as_str) {
        Some("group") => Some(group_size(weights)?)
            .filter(Option::is_some)
            .ok_or_else(|| weights.unsupported("group_size", "a row is strategy channel"))?,
        Some("channel") if weights.get("group_size").is_none_or(|size| *size == -1) => None,
        Some("channel") => return Err(weights.unsupported("group_size", "with strategy channel there is none")),
        _ => return Err(weights.unsupported("strategy", "weights have a scale a group (group) or a row (channel)")),
    };
    let ordered = match weights.get("actorder") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::String(order)) if ["weight", "static"].contains(&order.as_str()) => false,
        Some(Value::String(order)) if ["group", "dynamic"].contains(&order.as_str()) => group.is_some(),
        Some(_) => return Err(weights.unsupported("actorder", "it is null, weight, static, group or dynamic")),
    };
    let zeros = !weights.bool_or("symmetric", true)?;
    Ok(Storage::Int4 { packing: Packing::CompressedTensors, group, zeros, ordered })
}

fn refuse_kv_scheme(config: &Fields<'_>) -> Result<(), ConfigError> {
    match config.get("kv_cache_scheme") {
        None => Ok(()),
        Some(_) => Err(config.unsupported("kv_cache_scheme", "K and V are bf16")),
    }
}

/// `quant_method: fp8`, as vLLM and transformers write it.
fn fp8(config: &Fields<'_>) -> Result<Storage, ConfigError> {
    refuse_others(config, &["quant_method", "fmt", "weight_block_size", "kv_cache_scheme"])?;
    refuse_kv_scheme(config)?;
    if config.get("fmt").is_some_and(|format| format != "e4m3") {
        return Err(config.unsupported("fmt", "8 bits are e4m3"));
    }
    if config.get("weight_block_size").is_none() {
        return Ok(Storage::E4m3);
    }
    block(config, "weight_block_size", "weight_scale_inv")
}

/// What AWQ and GPTQ, as AutoAWQ, AutoGPTQ, GPTQModel and transformers write them, have in common.
const OF_WORDS: [&str; 8] =
    ["quant_method", "bits", "group_size", "format", "checkpoint_format", "pack_dtype", "backend", "desc_act"];

fn refuse_other_words(config: &Fields<'_>, known: &[&str]) -> Result<(), ConfigError> {
    // Those that GPTQModel also writes where they ask for nothing come first: their sentences are better.
    for (field, supported) in [
        ("lm_head", "the LM head is not quantised"),
        ("dynamic", "all matrices are stored alike, or plain"),
        ("is_marlin_format", "words are in the order of AWQ or GPTQ"),
    ] {
        if config.get(field).is_some_and(|value| !is_empty(value)) {
            return Err(config.unsupported(field, supported));
        }
    }
    refuse_others(config, &[&OF_WORDS[..], known].concat())?;
    must_be(config, "bits", 4)?;
    if config.get("pack_dtype").is_some_and(|dtype| dtype != "int32") {
        return Err(config.unsupported("pack_dtype", "it is int32"));
    }
    Ok(())
}

fn awq(config: &Fields<'_>) -> Result<Storage, ConfigError> {
    refuse_other_words(config, &["zero_point", "sym"])?;
    for field in ["version", "format", "checkpoint_format"] {
        let is_gemm = |value: &Value| value.as_str().is_some_and(|value| value.eq_ignore_ascii_case("gemm"));
        if config.get(field).is_some_and(|value| !is_gemm(value)) {
            return Err(config.unsupported(field, "the order of words is gemm"));
        }
    }
    if config.get("backend").is_some_and(|backend| backend == "llm-awq") {
        return Err(config.unsupported("backend", "the order of words is AutoAWQ's gemm"));
    }
    if config.bool_or("desc_act", false)? {
        return Err(config.unsupported("desc_act", "AWQ's columns are in order"));
    }
    let (group, zeros) = (group_size(config)?, config.bool_or("zero_point", true)?);
    Ok(Storage::Int4 { packing: Packing::Awq, group, zeros, ordered: false })
}

fn gptq(config: &Fields<'_>) -> Result<Storage, ConfigError> {
    refuse_other_words(config, &["sym", "modules_in_block_to_quantize"])?;
    let mut less_one = true;
    for field in ["format", "checkpoint_format"] {
        less_one = match config.get(field).and_then(Value::as_str) {
            None if config.get(field).is_none() => less_one,
            Some("gptq") => true,
            Some("gptq_v2") => false,
            _ => return Err(config.unsupported(field, "the formats are gptq and gptq_v2")),
        };
    }
    let (group, zeros) = (group_size(config)?, !config.bool_or("sym", true)?);
    let ordered = config.bool_or("desc_act", false)? && group.is_some();
    Ok(Storage::Int4 { packing: Packing::Gptq { less_one }, group, zeros, ordered })
}
