//! `quantization_config`: how the matrices of the layers are stored. What is not understood is refused by name, because
//! weights that are read wrongly answer without an error.

use serde_json::Value;

use super::ConfigError;
use super::fields::Fields;
use crate::model::WeightFormat;

/// Fields of `quantization_config` that say nothing about how weights are read.
const REMARKS: [&str; 6] =
    ["quantization_status", "global_compression_ratio", "version", "producer", "modules_to_save", "run_compressed"];
/// Lists of modules that are not quantised. Which are is seen by their tensors.
const LEFT_OUT: [&str; 3] = ["ignore", "ignored_layers", "modules_to_not_convert"];

/// How the matrices of the layers are stored.
pub(super) fn quantization(fields: &Fields<'_>) -> Result<WeightFormat, ConfigError> {
    let Some(config) = fields.object("quantization_config")? else { return Ok(WeightFormat::Bf16) };
    for list in LEFT_OUT {
        let is_name = |name: &Value| name.is_string();
        if config.get(list).is_some_and(|list| !list.as_array().is_some_and(|names| names.iter().all(is_name))) {
            return Err(config.value(list, "a list of names of modules"));
        }
    }
    match config.get("quant_method").and_then(Value::as_str) {
        Some("compressed-tensors") => compressed_tensors(&config)?,
        Some("fp8") => fp8(&config)?,
        _ => return Err(config.unsupported("quant_method", "the methods are compressed-tensors and fp8")),
    }
    Ok(WeightFormat::E4m3)
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

/// <https://github.com/vllm-project/compressed-tensors>, format `float-quantized`.
fn compressed_tensors(config: &Fields<'_>) -> Result<(), ConfigError> {
    refuse_others(config, &["quant_method", "format", "config_groups", "kv_cache_scheme", "sparsity_config"])?;
    if config.get("format").is_none_or(|format| format != "float-quantized") {
        return Err(config.unsupported("format", "the format is float-quantized"));
    }
    if config.get("kv_cache_scheme").is_some() {
        return Err(config.unsupported("kv_cache_scheme", "K and V are bf16"));
    }
    if let Some(sparsity) = config.object("sparsity_config")?
        && sparsity.get("format").is_some_and(|format| format != "dense")
    {
        return Err(sparsity.unsupported("format", "weights are dense"));
    }
    let Some(groups) = config.object("config_groups")? else { return Err(config.missing("config_groups")) };
    let within = |map| Fields { path: config.path, prefix: "quantization_config.config_groups", map };
    for (name, group) in groups.map {
        let Some(group) = group.as_object() else { return Err(within(groups.map).value(name, "an object")) };
        let group = within(group);
        refuse_others(&group, &["targets", "weights", "input_activations", "output_activations", "format"])?;
        if group.get("format").is_some_and(|format| format != "float-quantized") {
            return Err(group.unsupported("format", "the format is float-quantized"));
        }
        if group.get("targets") != Some(&serde_json::json!(["Linear"])) {
            return Err(group.unsupported("targets", "all matrices of the layers are stored alike: [\"Linear\"]"));
        }
        let Some(weights) = group.object("weights")? else { return Err(group.missing("weights")) };
        group_weights(&weights)?;
    }
    if groups.map.len() == 1 { Ok(()) } else { Err(config.unsupported("config_groups", "there is one group")) }
}

fn group_weights(weights: &Fields<'_>) -> Result<(), ConfigError> {
    // How the scales were found, and what else leaves the stored values as they are.
    let known = ["num_bits", "type", "symmetric", "strategy", "dynamic", "observer", "observer_kwargs", "scale_dtype"];
    refuse_others(weights, &known)?;
    for (field, expected) in [("num_bits", Value::from(8)), ("type", "float".into()), ("symmetric", true.into())] {
        if weights.get(field) != Some(&expected) {
            return Err(weights.unsupported(field, format!("it is {expected}")));
        }
    }
    let strategy = weights.get("strategy").and_then(Value::as_str);
    if !matches!(strategy, Some("channel" | "tensor")) {
        return Err(weights.unsupported("strategy", "weights have a scale a row (channel) or a tensor (tensor)"));
    }
    Ok(())
}

/// `quant_method: fp8`, as vLLM and transformers write it.
fn fp8(config: &Fields<'_>) -> Result<(), ConfigError> {
    refuse_others(config, &["quant_method", "activation_scheme", "fmt", "weight_block_size", "kv_cache_scheme"])?;
    if config.get("kv_cache_scheme").is_some() {
        return Err(config.unsupported("kv_cache_scheme", "K and V are bf16"));
    }
    if config.get("fmt").is_some_and(|format| format != "e4m3") {
        return Err(config.unsupported("fmt", "8 bits are e4m3"));
    }
    if config.get("weight_block_size").is_some() {
        return Err(config.unsupported("weight_block_size", "weights have a scale a row or a tensor"));
    }
    Ok(())
}
