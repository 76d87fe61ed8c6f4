//! The tensors of a checkpoint: names and shapes, for each architecture.

use super::ModelConfig;

/// One kind of tensor. `o`: rows of the output, `i`: columns; shapes are `[o, i]` or `[o]`, all bf16 once read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tensor {
    /// `[vocab, hidden]`
    Embedding,
    /// `[hidden]`
    FinalNorm,
    /// `[vocab, hidden]`; the embedding where they are tied.
    LmHead,
    /// A tensor of a decoder layer.
    Layer(usize, LayerTensor),
}

/// The tensors of a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerTensor {
    /// `[hidden]`, before attention.
    InputNorm,
    /// `[heads * head_dim, hidden]`
    Query,
    /// `[kv_heads * head_dim, hidden]`
    Key,
    /// `[kv_heads * head_dim, hidden]`
    Value,
    /// `[heads * head_dim]`, where the architecture has it.
    QueryBias,
    /// `[kv_heads * head_dim]`, where the architecture has it.
    KeyBias,
    /// `[kv_heads * head_dim]`, where the architecture has it.
    ValueBias,
    /// `[head_dim]`, where the architecture has it.
    QueryNorm,
    /// `[head_dim]`, where the architecture has it.
    KeyNorm,
    /// `[hidden, heads * head_dim]`
    AttentionOut,
    /// `[hidden]`, before the MLP.
    MlpNorm,
    /// `[intermediate, hidden]`
    Gate,
    /// `[intermediate, hidden]`
    Up,
    /// `[hidden, intermediate]`
    Down,
}

impl Tensor {
    /// The name in the checkpoint.
    pub fn name(self, config: &ModelConfig) -> String {
        match self {
            Self::LmHead if !config.tied_embeddings => "lm_head.weight".into(),
            Self::Embedding | Self::LmHead => "model.embed_tokens.weight".into(),
            Self::FinalNorm => "model.norm.weight".into(),
            Self::Layer(layer, tensor) => format!("model.layers.{layer}.{}", tensor.suffix()),
        }
    }

    /// The shape in the checkpoint: `[rows, columns]`, or `[len]`.
    pub fn shape(self, config: &ModelConfig) -> Vec<usize> {
        let c = config;
        let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        use LayerTensor::{
            AttentionOut, Down, Gate, InputNorm, Key, KeyBias, KeyNorm, MlpNorm, Query, QueryBias, QueryNorm, Up,
            Value, ValueBias,
        };
        match self {
            Self::Embedding | Self::LmHead => vec![c.vocab_size, c.hidden_size],
            Self::FinalNorm | Self::Layer(_, InputNorm | MlpNorm) => vec![c.hidden_size],
            Self::Layer(_, Query) => vec![q, c.hidden_size],
            Self::Layer(_, Key | Value) => vec![kv, c.hidden_size],
            Self::Layer(_, QueryBias) => vec![q],
            Self::Layer(_, KeyBias | ValueBias) => vec![kv],
            Self::Layer(_, QueryNorm | KeyNorm) => vec![c.head_dim],
            Self::Layer(_, AttentionOut) => vec![c.hidden_size, q],
            Self::Layer(_, Gate | Up) => vec![c.intermediate_size, c.hidden_size],
            Self::Layer(_, Down) => vec![c.hidden_size, c.intermediate_size],
        }
    }

    /// Whether it is a matrix that a layer streams: one of those that formats of fewer bits are for.
    pub fn is_streamed_in_layers(self) -> bool {
        use LayerTensor::{AttentionOut, Down, Gate, Key, Query, Up, Value};
        matches!(self, Self::Layer(_, Query | Key | Value | AttentionOut | Gate | Up | Down))
    }

    /// Every tensor that a model of these dimensions has, each once.
    pub fn all(config: &ModelConfig) -> Vec<Self> {
        let mut all = vec![Self::Embedding, Self::FinalNorm];
        if !config.tied_embeddings {
            all.push(Self::LmHead);
        }
        for layer in 0..config.num_layers {
            all.extend(LayerTensor::of(config).map(|tensor| Self::Layer(layer, tensor)));
        }
        all
    }
}

impl LayerTensor {
    /// The tensors that a layer of this model has.
    pub fn of(config: &ModelConfig) -> impl Iterator<Item = Self> {
        use LayerTensor::{
            AttentionOut, Down, Gate, InputNorm, Key, KeyBias, KeyNorm, MlpNorm, Query, QueryBias, QueryNorm, Up,
            Value, ValueBias,
        };
        let always = [InputNorm, Query, Key, Value, AttentionOut, MlpNorm, Gate, Up, Down];
        let bias = config.qkv_bias.then_some([QueryBias, KeyBias, ValueBias]);
        let norm = config.qk_norm.then_some([QueryNorm, KeyNorm]);
        always.into_iter().chain(bias.into_iter().flatten()).chain(norm.into_iter().flatten())
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::InputNorm => "input_layernorm.weight",
            Self::Query => "self_attn.q_proj.weight",
            Self::Key => "self_attn.k_proj.weight",
            Self::Value => "self_attn.v_proj.weight",
            Self::QueryBias => "self_attn.q_proj.bias",
            Self::KeyBias => "self_attn.k_proj.bias",
            Self::ValueBias => "self_attn.v_proj.bias",
            Self::QueryNorm => "self_attn.q_norm.weight",
            Self::KeyNorm => "self_attn.k_norm.weight",
            Self::AttentionOut => "self_attn.o_proj.weight",
            Self::MlpNorm => "post_attention_layernorm.weight",
            Self::Gate => "mlp.gate_proj.weight",
            Self::Up => "mlp.up_proj.weight",
            Self::Down => "mlp.down_proj.weight",
        }
    }
}
