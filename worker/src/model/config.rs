//! `config.json`, checked: every dimension that the rest of the worker relies on.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::plan::{MAX_LEAVES, ROW_TILE};

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

/// Rotary embedding settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// `llama3` frequency scaling, where the model uses it.
    pub llama3: Option<Llama3Scaling>,
}

/// `rope_type: llama3`: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama3Scaling {
    /// Stretch of the long wavelengths.
    pub factor: f64,
    /// Wavelengths over `original_positions / low_freq_factor` are stretched.
    pub low_freq_factor: f64,
    /// Wavelengths under `original_positions / high_freq_factor` are kept.
    pub high_freq_factor: f64,
    /// Context length before stretching, in positions.
    pub original_positions: usize,
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
}

/// Why a `config.json` is refused: one sentence with file, field and value.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no JSON object.
    #[error("{}: is not a JSON object: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        problem: String,
    },
    /// A field that has no default is not there.
    #[error("{}: field `{field}` is missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
    },
    /// A field has a value that no model of this architecture can have.
    #[error("{}: `{field}` is {value}, but has to be {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// A valid model that Looplane does not compute.
    #[error("{}: `{field}` is {value}, which is not supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What is.
        supported: String,
    },
    /// More context was asked for than the model has.
    #[error(
        "a context of {requested} positions was asked for, but the model has {available} (`max_position_embeddings`)"
    )]
    Context {
        /// Positions asked for.
        requested: usize,
        /// Positions of the model.
        available: usize,
    },
}

// Bounds far above any published model: they keep every product of dimensions in range of a usize, and an absurd file from
// becoming an absurd allocation.
const MAX_HIDDEN: usize = 1 << 17;
const MAX_LAYERS: usize = 1 << 10;
const MAX_HEADS: usize = 1 << 10;
const MAX_HEAD_DIM: usize = 512;
const MAX_INTERMEDIATE: usize = 1 << 20;
/// The sampler's sums hold weights of fewer than 2^22 tokens, padding included.
const MAX_VOCAB: usize = (1 << 22) - MAX_LEAVES * ROW_TILE;
const MAX_POSITIONS: usize = 1 << 24;
/// transformers' default where the file has no `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;
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
        })
    }

    /// Bound on the positions of one sequence: what was asked for, or the model's own for 0.
    ///
    /// # Errors
    /// More than the model's own was asked for.
    pub fn context(&self, requested: usize) -> Result<usize, ConfigError> {
        match requested {
            0 => Ok(self.max_positions),
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
    if fields.get("quantization_config").is_some() {
        return Err(fields.unsupported("quantization_config", "weights are bf16, f16 or f32"));
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

fn rope(fields: &Fields<'_>) -> Result<Rope, ConfigError> {
    let theta = fields.number_or("rope_theta", 1.0, 1e15, DEFAULT_THETA)?;
    let new = fields.object("rope_parameters")?.map(|group| rope_group(&group, theta)).transpose()?;
    let old = fields.object("rope_scaling")?.map(|group| rope_group(&group, theta)).transpose()?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            Err(fields.value("rope_scaling", "the same as rope_parameters where both are given"))
        }
        (Some(rope), _) | (None, Some(rope)) => Ok(rope),
        (None, None) => Ok(Rope { theta, llama3: None }),
    }
}

fn rope_group(group: &Fields<'_>, outer_theta: f64) -> Result<Rope, ConfigError> {
    let theta = group.number_or("rope_theta", 1.0, 1e15, outer_theta)?;
    // Files written before transformers 4.43 say `type`.
    let key = if group.get("rope_type").is_some() { "rope_type" } else { "type" };
    let llama3 = match group.get(key) {
        None => None,
        Some(Value::String(kind)) if kind == "default" => None,
        Some(Value::String(kind)) if kind == "llama3" => {
            let low_freq_factor = group.number("low_freq_factor", 1e-6, 1e6)?;
            let high_freq_factor = group.number("high_freq_factor", 1e-6, 1e6)?;
            if high_freq_factor <= low_freq_factor {
                return Err(group.value("high_freq_factor", format!("over low_freq_factor ({low_freq_factor})")));
            }
            Some(Llama3Scaling {
                factor: group.number("factor", 1.0, 1e6)?,
                low_freq_factor,
                high_freq_factor,
                original_positions: group.count("original_max_position_embeddings", MAX_POSITIONS)?,
            })
        }
        Some(_) => return Err(group.unsupported(key, "the rope types are default and llama3")),
    };
    Ok(Rope { theta, llama3 })
}

/// A JSON object of the file, with the names that messages need.
struct Fields<'a> {
    path: &'a Path,
    prefix: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The field, unless it is absent or null.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    fn object(&self, field: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { path: self.path, prefix: field, map })),
            Some(_) => Err(self.value(field, "an object or null")),
        }
    }

    fn count(&self, field: &str, max: usize) -> Result<usize, ConfigError> {
        let value = self.get(field).ok_or_else(|| self.missing(field))?;
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
        count
            .filter(|n| (1..=max).contains(n))
            .ok_or_else(|| self.value(field, format!("a whole number from 1 to {max}")))
    }

    fn count_or(&self, field: &str, max: usize, default: usize) -> Result<usize, ConfigError> {
        if self.get(field).is_some() { self.count(field, max) } else { Ok(default) }
    }

    fn number(&self, field: &str, min: f64, max: f64) -> Result<f64, ConfigError> {
        let value = self.get(field).ok_or_else(|| self.missing(field))?;
        let number = value.as_f64().filter(|n| (min..=max).contains(n));
        number.ok_or_else(|| self.value(field, format!("a number from {min} to {max}")))
    }

    fn number_or(&self, field: &str, min: f64, max: f64, default: f64) -> Result<f64, ConfigError> {
        if self.get(field).is_some() { self.number(field, min, max) } else { Ok(default) }
    }

    fn bool_or(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.value(field, "true or false")),
        }
    }

    fn named(&self, field: &str) -> String {
        if self.prefix.is_empty() { field.into() } else { format!("{}.{field}", self.prefix) }
    }

    fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { path: self.path.into(), field: self.named(field) }
    }

    fn value(&self, field: &str, expected: impl Into<String>) -> ConfigError {
        let value = shown(self.map.get(field).unwrap_or(&Value::Null));
        ConfigError::Value { path: self.path.into(), field: self.named(field), value, expected: expected.into() }
    }

    fn unsupported(&self, field: &str, supported: impl Into<String>) -> ConfigError {
        let value = shown(self.map.get(field).unwrap_or(&Value::Null));
        ConfigError::Unsupported {
            path: self.path.into(),
            field: self.named(field),
            value,
            supported: supported.into(),
        }
    }
}

/// A value as a message shows it: a hostile file must not fill the log.
fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
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
            ("quantization_config", json!({"quant_method": "fp8"})),
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
                json!(1 << 17), json!(null), json!("x"), json!([]), json!([0]), json!({}), json!({"type": []}), json!(true)];
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
}
