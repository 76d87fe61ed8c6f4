//! `config.json`, checked: every dimension that the rest of the worker relies on.

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
