//! Dimensions of published models, to measure without a checkpoint.

use clap::ValueEnum;

use crate::model::config::{Architecture, Rope};
use crate::model::{ModelConfig, Storage, WeightFormat};

/// Dimensions of a well-known model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// Two small layers, to try the command out: nothing that memory limits.
    Tiny,
    /// TinyLlama-like: hidden 2048, 16 layers, vocabulary 32000.
    #[value(name = "1b")]
    B1,
    /// Llama 3.2 1B: as 1b, with the vocabulary of 128256 and tied embeddings.
    #[value(name = "llama-1b")]
    Llama1B,
    /// Llama 3.2 3B.
    #[value(name = "3b")]
    B3,
    /// Llama 3.1 8B.
    #[value(name = "8b")]
    B8,
    /// Llama 3.1 70B.
    #[value(name = "70b")]
    B70,
    /// Llama 3.1 405B.
    #[value(name = "405b")]
    B405,
    /// Mistral 7B v0.3.
    #[value(name = "mistral-7b")]
    Mistral7B,
    /// Mistral Nemo 12B.
    #[value(name = "mistral-nemo-12b")]
    MistralNemo,
    /// Mistral Small 24B.
    #[value(name = "mistral-small-24b")]
    MistralSmall,
    /// Mistral Large 2.
    #[value(name = "mistral-large-123b")]
    MistralLarge,
    /// Qwen 2.5 0.5B.
    #[value(name = "qwen2.5-0.5b")]
    Qwen25Half,
    /// Qwen 2.5 1.5B.
    #[value(name = "qwen2.5-1.5b")]
    Qwen25OneHalf,
    /// Qwen 2.5 3B.
    #[value(name = "qwen2.5-3b")]
    Qwen25B3,
    /// Qwen 2.5 7B.
    #[value(name = "qwen2.5-7b")]
    Qwen25B7,
    /// Qwen 2.5 14B.
    #[value(name = "qwen2.5-14b")]
    Qwen25B14,
    /// Qwen 2.5 32B.
    #[value(name = "qwen2.5-32b")]
    Qwen25B32,
    /// Qwen 2.5 72B.
    #[value(name = "qwen2.5-72b")]
    Qwen25B72,
    /// Qwen 3 0.6B.
    #[value(name = "qwen3-0.6b")]
    Qwen3Small,
    /// Qwen 3 1.7B.
    #[value(name = "qwen3-1.7b")]
    Qwen3B2,
    /// Qwen 3 4B.
    #[value(name = "qwen3-4b")]
    Qwen3B4,
    /// Qwen 3 8B.
    #[value(name = "qwen3-8b")]
    Qwen3B8,
    /// Qwen 3 14B.
    #[value(name = "qwen3-14b")]
    Qwen3B14,
    /// Qwen 3 32B.
    #[value(name = "qwen3-32b")]
    Qwen3B32,
    /// SmolLM2 135M.
    #[value(name = "smollm2-135m")]
    SmolLm135M,
    /// SmolLM2 360M.
    #[value(name = "smollm2-360m")]
    SmolLm360M,
}

impl Shape {
    /// The name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no shape is hidden").get_name().to_owned()
    }

    /// The dimensions. Rotation is not scaled: speed does not depend on it.
    pub fn config(self) -> ModelConfig {
        use Architecture::{Llama, Mistral, Qwen2, Qwen3};
        let (architecture, hidden_size, num_layers, heads, head_dim, intermediate_size, vocab_size, tied_embeddings) =
            match self {
                Self::Tiny => (Llama, 256, 2, (16, 4), 16, 512, 1024, false),
                Self::B1 => (Llama, 2048, 16, (32, 8), 64, 8192, 32_000, false),
                Self::Llama1B => (Llama, 2048, 16, (32, 8), 64, 8192, 128_256, true),
                Self::B3 => (Llama, 3072, 28, (24, 8), 128, 8192, 128_256, true),
                Self::B8 => (Llama, 4096, 32, (32, 8), 128, 14_336, 128_256, false),
                Self::B70 => (Llama, 8192, 80, (64, 8), 128, 28_672, 128_256, false),
                Self::B405 => (Llama, 16_384, 126, (128, 8), 128, 53_248, 128_256, false),
                Self::Mistral7B => (Mistral, 4096, 32, (32, 8), 128, 14_336, 32_768, false),
                Self::MistralNemo => (Mistral, 5120, 40, (32, 8), 128, 14_336, 131_072, false),
                Self::MistralSmall => (Mistral, 5120, 40, (32, 8), 128, 32_768, 131_072, false),
                Self::MistralLarge => (Mistral, 12_288, 88, (96, 8), 128, 28_672, 32_768, false),
                Self::Qwen25Half => (Qwen2, 896, 24, (14, 2), 64, 4864, 151_936, true),
                Self::Qwen25OneHalf => (Qwen2, 1536, 28, (12, 2), 128, 8960, 151_936, true),
                Self::Qwen25B3 => (Qwen2, 2048, 36, (16, 2), 128, 11_008, 151_936, true),
                Self::Qwen25B7 => (Qwen2, 3584, 28, (28, 4), 128, 18_944, 152_064, false),
                Self::Qwen25B14 => (Qwen2, 5120, 48, (40, 8), 128, 13_824, 152_064, false),
                Self::Qwen25B32 => (Qwen2, 5120, 64, (40, 8), 128, 27_648, 152_064, false),
                Self::Qwen25B72 => (Qwen2, 8192, 80, (64, 8), 128, 29_568, 152_064, false),
                Self::Qwen3Small => (Qwen3, 1024, 28, (16, 8), 128, 3072, 151_936, true),
                Self::Qwen3B2 => (Qwen3, 2048, 28, (16, 8), 128, 6144, 151_936, true),
                Self::Qwen3B4 => (Qwen3, 2560, 36, (32, 8), 128, 9728, 151_936, true),
                Self::Qwen3B8 => (Qwen3, 4096, 36, (32, 8), 128, 12_288, 151_936, false),
                Self::Qwen3B14 => (Qwen3, 5120, 40, (40, 8), 128, 17_408, 151_936, false),
                Self::Qwen3B32 => (Qwen3, 5120, 64, (64, 8), 128, 25_600, 151_936, false),
                Self::SmolLm135M => (Llama, 576, 30, (9, 3), 64, 1536, 49_152, true),
                Self::SmolLm360M => (Llama, 960, 32, (15, 5), 64, 2560, 49_152, true),
            };
        ModelConfig {
            architecture,
            hidden_size,
            num_layers,
            num_heads: heads.0,
            num_kv_heads: heads.1,
            head_dim,
            intermediate_size,
            vocab_size,
            max_positions: 131_072,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 500_000.0, llama3: None },
            sliding_window: None,
            qkv_bias: architecture == Qwen2,
            qk_norm: architecture == Qwen3,
            tied_embeddings,
            layer_weights: WeightFormat::Bf16,
            storage: Storage::Plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of the published models, in millions: the tables are right in every dimension or these would not be.
    #[test]
    fn shapes_have_as_many_parameters_as_the_models() {
        for (name, millions) in [
            ("llama-1b", 1236),
            ("3b", 3213),
            ("8b", 8030),
            ("70b", 70_554),
            ("405b", 405_853),
            ("mistral-7b", 7248),
            ("mistral-nemo-12b", 12_248),
            ("mistral-small-24b", 23_572),
            ("mistral-large-123b", 122_610),
            ("qwen2.5-0.5b", 494),
            ("qwen2.5-1.5b", 1544),
            ("qwen2.5-3b", 3086),
            ("qwen2.5-7b", 7616),
            ("qwen2.5-14b", 14_770),
            ("qwen2.5-32b", 32_764),
            ("qwen2.5-72b", 72_706),
            ("qwen3-0.6b", 596),
            ("qwen3-1.7b", 1721),
            ("qwen3-4b", 4022),
            ("qwen3-8b", 8191),
            ("qwen3-14b", 14_768),
            ("qwen3-32b", 32_762),
            ("smollm2-135m", 135),
            ("smollm2-360m", 362),
        ] {
            let c = Shape::from_str(name, false).unwrap().config();
            let (queries, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
            let bias = if c.qkv_bias { queries + 2 * kv } else { 0 };
            let norms = 2 * c.hidden_size + if c.qk_norm { 2 * c.head_dim } else { 0 };
            let layer = c.hidden_size * (2 * queries + 2 * kv + 3 * c.intermediate_size) + bias + norms;
            let ends = if c.tied_embeddings { 1 } else { 2 } * c.vocab_size * c.hidden_size + c.hidden_size;
            assert_eq!((c.num_layers * layer + ends + 500_000) / 1_000_000, millions, "{name}");
        }
    }
}
