//! `config.json`, checked: every dimension that the rest of the worker relies on.

mod error;
mod fields;
mod quantization;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::Value;

use fields::{Fields, shown};
use quantization::quantization;
use rope::rope;

use super::format::WeightFormat;
use super::storage::Storage;
use crate::plan::{MAX_LEAVES, ROW_TILE};

pub use error::ConfigError;
pub use rope::{Llama3Scaling, Rope};

/// Model families the decoder computes. All are pre-norm decoders with RMSNorm, rotary embeddings and a SiLU-gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`
    Mistral,
    /// `Qwen2ForCausalLM`: bias on q, k and v.
    Qwen2,
    /// `Qwen3ForCausalLM`: RMSNorm of each head of q and k before rotation.
    Qwen3,
}

/// The checked dimensions of a model. All counts are at least 1.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads of a layer.
    pub num_heads: usize,
    /// Key and value heads of a layer; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; a multiple of 16.
    pub head_dim: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Rows of the embedding and of the LM head.
    pub vocab_size: usize,
    /// Longest sequence, in positions.
    pub max_positions: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// A query sees itself and this many positions less one before it; `None`: all.
    pub sliding_window: Option<usize>,
    /// q, k and v have a bias.
    pub qkv_bias: bool,
    /// Every head of q and k is normalised before rotation.
    pub qk_norm: bool,
    /// The LM head is the embedding.
    pub tied_embeddings: bool,
    /// What the matrices of the layers are in; embedding and LM head are bf16.
    pub layer_weights: WeightFormat,
    /// How the checkpoint stores them.
    pub storage: Storage,
}

// Bounds far above any published model: they keep every product of dimensions in range of a usize, and an absurd file
// from becoming an absurd allocation.
const MAX_HIDDEN: usize = 1 << 17;
const MAX_LAYERS: usize = 1 << 10;
const MAX_HEADS: usize = 1 << 10;
const MAX_HEAD_DIM: usize = 512;
const MAX_INTERMEDIATE: usize = 1 << 20;
/// The sampler's sums hold weights of fewer than 2^22 tokens, padding included.
const MAX_VOCAB: usize = (1 << 22) - MAX_LEAVES * ROW_TILE;
const MAX_POSITIONS: usize = 1 << 24;
/// transformers' default of `MistralConfig.sliding_window` where the file does not have the field (null: no window).
const MISTRAL_DEFAULT_WINDOW: usize = 4096;

impl Architecture {
    /// The name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3].into_iter().find(|a| a.name() == name)
    }
}

impl ModelConfig {
    /// Reads and checks `config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// Names the file, the field and its value.
    pub fn from_dir(dir: &Path) -> Result<Self, ConfigError> {
        Self::with_text(dir).map(|(config, _)| config)
    }

    /// As [`Self::from_dir`], with the bytes of the file.
    ///
    /// # Errors
    /// As [`Self::from_dir`].
    pub fn with_text(dir: &Path) -> Result<(Self, Vec<u8>), ConfigError> {
        let path = dir.join("config.json");
        let text = std::fs::read(&path).map_err(|source| ConfigError::Read { path: path.clone(), source })?;
        Ok((Self::from_json(&text, &path)?, text))
    }

    /// Checks the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// Names the file, the field and its value.
    pub fn from_json(text: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let json_error = |problem: String| ConfigError::Json { path: path.into(), problem };
        let map = match serde_json::from_slice(text).map_err(|e| json_error(e.to_string()))? {
            Value::Object(map) => map,
            other => return Err(json_error(format!("it holds {}", shown(&other)))),
        };
        let fields = Fields { path, prefix: "", map: &map };
        let architecture = architecture(&fields)?;
        refuse_what_is_not_computed(&fields)?;

        let hidden_size = fields.count("hidden_size", MAX_HIDDEN)?;
        let num_heads = fields.count("num_attention_heads", MAX_HEADS)?;
        let num_kv_heads = fields.count_or("num_key_value_heads", MAX_HEADS, num_heads)?;
        if num_heads % num_kv_heads != 0 {
            return Err(fields.value("num_key_value_heads", format!("a divisor of num_attention_heads ({num_heads})")));
        }
        let sliding_window = sliding_window(&fields, architecture)?;
        check_layer_types(&fields, sliding_window.is_some())?;
        let storage = quantization(&fields)?;
        Ok(Self {
            architecture,
            hidden_size,
            num_layers: fields.count("num_hidden_layers", MAX_LAYERS)?,
            num_heads,
            num_kv_heads,
            head_dim: head_dim(&fields, hidden_size, num_heads)?,
            intermediate_size: fields.count("intermediate_size", MAX_INTERMEDIATE)?,
            vocab_size: fields.count("vocab_size", MAX_VOCAB)?,
            max_positions: fields.count("max_position_embeddings", MAX_POSITIONS)?,
            rms_norm_eps: fields.number_or("rms_norm_eps", 1e-12, 0.1, 1e-6)? as f32,
            rope: rope(&fields)?,
            sliding_window,
            qkv_bias: architecture == Architecture::Qwen2,
            qk_norm: architecture == Architecture::Qwen3,
            tied_embeddings: fields.bool_or("tie_word_embeddings", false)?,
            layer_weights: storage.format(),
            storage,
        })
    }

    /// Bound on the positions of one sequence: what was asked for, or the model's own for 0.
    ///
    /// # Errors
    /// More than the model's own was asked for, or one, which no prompt leaves room for an answer.
    pub fn context(&self, requested: usize) -> Result<usize, ConfigError> {
        match requested {
            0 => Ok(self.max_positions),
            1 => Err(ConfigError::NoRoom),
            n if n <= self.max_positions => Ok(n),
            requested => Err(ConfigError::Context { requested, available: self.max_positions }),
        }
    }
}

fn architecture(fields: &Fields<'_>) -> Result<Architecture, ConfigError> {
    let name = match fields.map.get("architectures") {
        None | Some(Value::Null) => return Err(fields.missing("architectures")),
        Some(Value::Array(names)) => names.first().and_then(Value::as_str),
        Some(_) => None,
    };
    let name = name.ok_or_else(|| fields.value("architectures", "a list with the name of an architecture"))?;
    Architecture::from_name(name).ok_or_else(|| {
        fields.unsupported(
            "architectures",
            "the architectures are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM",
        )
    })
}

fn refuse_what_is_not_computed(fields: &Fields<'_>) -> Result<(), ConfigError> {
    if let Some(act) = fields.get("hidden_act")
        && act != "silu"
    {
        return Err(fields.unsupported("hidden_act", "the activation is silu"));
    }
    for (flag, supported) in [
        ("use_sliding_window", "every layer of a Qwen model attends to the full context"),
        ("attention_bias", "only the q, k and v of Qwen2 have a bias"),
        ("mlp_bias", "the MLP has no bias"),
    ] {
        if fields.bool_or(flag, false)? {
            return Err(fields.unsupported(flag, supported));
        }
    }
    for experts in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if fields.get(experts).is_some_and(|count| *count != 0) {
            return Err(fields.unsupported(experts, "the MLP is dense, there are no experts"));
        }
    }
    if fields.number_or("partial_rotary_factor", 0.0, 1.0, 1.0)? != 1.0 {
        return Err(fields.unsupported("partial_rotary_factor", "rotation covers the whole head"));
    }
    Ok(())
}

fn head_dim(fields: &Fields<'_>, hidden_size: usize, num_heads: usize) -> Result<usize, ConfigError> {
    if fields.get("head_dim").is_none() && !hidden_size.is_multiple_of(num_heads) {
        return Err(fields.value(
            "hidden_size",
            format!("a multiple of num_attention_heads ({num_heads}) where there is no head_dim"),
        ));
    }
    let field = if fields.get("head_dim").is_some() { "head_dim" } else { "hidden_size" };
    let head_dim = fields.count_or("head_dim", MAX_HEAD_DIM, hidden_size / num_heads)?;
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || head_dim % 16 != 0 {
        let expected =
            format!("such that the head dimension, now {head_dim}, is a multiple of 16 up to {MAX_HEAD_DIM}");
        return Err(fields.value(field, expected));
    }
    Ok(head_dim)
}

fn sliding_window(fields: &Fields<'_>, architecture: Architecture) -> Result<Option<usize>, ConfigError> {
    // Qwen files carry a window that `use_sliding_window: false` turns off; Llama has none.
    if architecture != Architecture::Mistral {
        return Ok(None);
    }
    match fields.map.get("sliding_window") {
        None => Ok(Some(MISTRAL_DEFAULT_WINDOW)),
        Some(Value::Null) => Ok(None),
        Some(_) => fields.count("sliding_window", MAX_POSITIONS).map(Some),
    }
}

fn check_layer_types(fields: &Fields<'_>, window: bool) -> Result<(), ConfigError> {
    let Some(types) = fields.get("layer_types") else { return Ok(()) };
    let types = types.as_array().ok_or_else(|| fields.value("layer_types", "a list of names"))?;
    let all = |name: &str| types.iter().all(|t| t == name);
    if all("full_attention") || (window && all("sliding_attention")) {
        return Ok(());
    }
    Err(fields.unsupported("layer_types", "all layers attend alike (full_attention; sliding_attention in Mistral)"))
}
