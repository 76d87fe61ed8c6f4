//! Where values round to bf16, and the hash that names the bit domain.

use sha2::{Digest, Sha256};

use super::{Backend, K_STEP, MAX_LEAVES, ModelPlan, PAGE_POSITIONS, ROW_TILE};

/// A place where an fp32 value is rounded to bf16 (to nearest, ties to even): the inputs of the products. Everything
/// else stays fp32: the residual stream, scores of attention, sums of squares, logits; on CPUs also q, K and V with
/// their pages, and the probabilities of attention, which on a GPU are inputs of tensor-core products too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundingPoint {
    /// The normalised hidden state before q, k, v.
    AttentionInput,
    /// q after rotation.
    Query,
    /// k after rotation, as the KV cache keeps it.
    Key,
    /// v, as the KV cache keeps it.
    Value,
    /// The weight of a position in attention, relative to the largest of its page.
    Probability,
    /// The output of attention before o_proj, normalised by its sum.
    AttentionOutput,
    /// The normalised hidden state before gate and up.
    MlpInput,
    /// `silu(gate) * up` before down_proj.
    MlpProduct,
    /// The normalised hidden state before the LM head.
    LmHeadInput,
}

/// The rounding points of the CPU backend, in the order in which a token passes them.
pub const ROUNDING: [RoundingPoint; 5] = [
    RoundingPoint::AttentionInput,
    RoundingPoint::AttentionOutput,
    RoundingPoint::MlpInput,
    RoundingPoint::MlpProduct,
    RoundingPoint::LmHeadInput,
];

/// The rounding points of the GPU backend, in the order in which a token passes them. All round once.
pub const CUDA_ROUNDING: [RoundingPoint; 9] = [
    RoundingPoint::AttentionInput,
    RoundingPoint::Query,
    RoundingPoint::Key,
    RoundingPoint::Value,
    RoundingPoint::Probability,
    RoundingPoint::AttentionOutput,
    RoundingPoint::MlpInput,
    RoundingPoint::MlpProduct,
    RoundingPoint::LmHeadInput,
];

impl Backend {
    /// Where this backend rounds, and to how many bf16 at each place.
    pub fn rounding(self) -> Vec<(RoundingPoint, usize)> {
        match self {
            Self::Cpu => ROUNDING.map(|point| (point, point.parts())).to_vec(),
            Self::Cuda => CUDA_ROUNDING.map(|point| (point, 1)).to_vec(),
        }
    }
}

impl Backend {
    /// What becomes of the scales of weights in groups. A GPU multiplies each weight and rounds it to bf16. A CPU sums
    /// what a leaf has of a group without its scale, in fp32, and multiplies that sum, once; weights of 4 bits are 128
    /// more in the sum, and 128 and the zero point, times the sum of the inputs, are taken off before.
    fn groups(self) -> &'static str {
        match self {
            Self::Cpu => "sums of groups scaled, 4 bits raised by 128",
            Self::Cuda => "scaled weights rounded to bf16",
        }
    }
}

impl RoundingPoint {
    /// On CPUs: how many bf16 a value becomes. 1: it is rounded. 2: it is split in `high = bf16(x)` and
    /// `low = bf16(x - high)`, which keep 16 bits of its significand; the product adds the terms of both, in the
    /// order of its instruction set.
    ///
    /// Split is what the accuracy of the logits asks for (0.01 relative L2, see the decoder's tests): all that bears on
    /// attention, and the LM head. Gate, up and down are three quarters of the weights and round once.
    pub const fn parts(self) -> usize {
        match self {
            Self::AttentionInput | Self::AttentionOutput | Self::LmHeadInput => 2,
            Self::MlpInput | Self::MlpProduct => 1,
            Self::Query | Self::Key | Self::Value | Self::Probability => panic!("CPUs do not round here"),
        }
    }
}

/// Raised by hand when arithmetic changes in a way that neither a dimension nor a run of the kernels on a few vectors
/// shows.
const ARITHMETIC: u32 = 2;

impl ModelPlan {
    /// Names everything in the plan that can touch a bit of a result: dimensions, leaves, trees, pages, rounding. Group
    /// size, threads, batch and context limit are not in it: they must not touch one.
    pub fn hash(&self) -> [u8; 32] {
        let c = &self.config;
        let mut hasher = Sha256::new();
        let (order, rounding) = (self.backend.order(), self.backend.rounding());
        // Debug text of plain enums and integers is stable; floats go in by their bits.
        hasher.update(format!("looplane plan {ARITHMETIC} {order} rounding:{rounding:?}\n"));
        hasher.update(format!("tiles:{ROW_TILE},{K_STEP},{MAX_LEAVES},{PAGE_POSITIONS}\n"));
        hasher.update(format!(
            "leaves:{:?},{:?},{:?},{}\n",
            self.hidden, self.heads, self.intermediate, self.padded_vocab
        ));
        hasher.update(format!("model:{:?},{},{}\n", c.architecture, c.hidden_size, c.num_layers));
        hasher.update(format!("heads:{},{},{}\n", c.num_heads, c.num_kv_heads, c.head_dim));
        hasher.update(format!("mlp:{},vocab:{}\n", c.intermediate_size, c.vocab_size));
        hasher.update(format!("eps:{:08x},theta:{:016x}\n", c.rms_norm_eps.to_bits(), c.rope.theta.to_bits()));
        if let Some(l) = &c.rope.llama3 {
            let bits = [l.factor, l.low_freq_factor, l.high_freq_factor].map(f64::to_bits);
            hasher.update(format!("llama3:{bits:x?},{}\n", l.original_positions));
        }
        let flags = [c.qkv_bias, c.qk_norm, c.tied_embeddings];
        hasher.update(format!("window:{:?},flags:{flags:?}\n", c.sliding_window));
        if c.layer_weights.has_row_scales() {
            hasher.update(format!("layers:{}, rows scaled after the root\n", c.layer_weights));
        } else if c.layer_weights.group().is_some() {
            hasher.update(format!("layers:{}, {}\n", c.layer_weights, self.backend.groups()));
        }
        hasher.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Llama3Scaling;
    use crate::model::{ModelConfig, WeightFormat};
    use crate::plan::tests::config;

    fn hash(config: &ModelConfig, tp: usize) -> [u8; 32] {
        ModelPlan::new(config, tp).unwrap().hash()
    }

    #[test]
    fn the_hash_is_the_same_for_every_group_size_and_context() {
        let base = config(16, 4, 384, 768);
        for tp in [2, 4, 8, 16] {
            assert_eq!(hash(&base, tp), hash(&base, 1));
        }
        assert_eq!(hash(&ModelConfig { max_positions: 64, ..base.clone() }, 1), hash(&base, 1));
        let domain = ModelPlan::new(&base, 1).unwrap().bit_domain("cpu", "avx512bf16", "0123abcd");
        let hash = domain.strip_prefix("cpu-avx512bf16-0123abcd-");
        assert!(hash.is_some_and(|hash| hash.len() == 12), "{domain}");
    }

    #[test]
    fn the_hash_of_a_cpu_plan_is_what_it_was_and_a_gpus_is_another() {
        let base = config(16, 4, 384, 768);
        let hex = |plan: &ModelPlan| plan.bit_domain("", "", "").trim_start_matches('-').to_owned();
        assert_eq!(hex(&ModelPlan::new(&base, 1).unwrap()), "5452cf5e2a86");
        let narrow = ModelConfig { hidden_size: 48, ..base };
        let [cpu, cuda] =
            [Backend::Cpu, Backend::Cuda].map(|backend| ModelPlan::for_backend(backend, &narrow, 1).unwrap());
        // One leaf over 48 columns on either: what differs is the rounding.
        assert!(cpu.hidden == cuda.hidden && hex(&cpu) != hex(&cuda));
    }

    #[test]
    fn weights_in_groups_have_hashes_of_their_own_on_either_backend() {
        let base = config(16, 4, 384, 768);
        let hex = |backend, layer_weights| {
            let config = ModelConfig { layer_weights, ..base.clone() };
            let plan = ModelPlan::for_backend(backend, &config, 1).unwrap();
            plan.bit_domain("", "", "").trim_start_matches('-').to_owned()
        };
        let int4 = |columns, zeros| WeightFormat::Int4 { columns, zeros };
        let formats = [int4(128, false), int4(64, false), int4(128, true), WeightFormat::E4m3Groups { columns: 128 }];
        let mut all: Vec<_> = formats.into_iter().map(|format| hex(Backend::Cpu, format)).collect();
        all.extend([hex(Backend::Cpu, WeightFormat::Bf16), hex(Backend::Cpu, WeightFormat::E4m3)]);
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        // A GPU multiplies weights, as it did when CPUs did so too.
        assert_eq!(hex(Backend::Cuda, formats[0]), "020bc1f4f9eb");
    }

    #[test]
    fn the_hash_covers_every_dimension() {
        let base = config(16, 4, 384, 768);
        let mut others: Vec<ModelConfig> = Vec::new();
        let mut change = |edit: &dyn Fn(&mut ModelConfig)| {
            let mut other = base.clone();
            edit(&mut other);
            others.push(other);
        };
        change(&|c| c.architecture = crate::model::config::Architecture::Mistral);
        change(&|c| c.hidden_size = 512);
        change(&|c| c.num_layers = 3);
        change(&|c| c.num_heads = 32);
        change(&|c| c.num_kv_heads = 8);
        change(&|c| c.head_dim = 128);
        change(&|c| c.intermediate_size = 400);
        change(&|c| c.vocab_size = 767);
        change(&|c| c.rms_norm_eps = 1e-6);
        change(&|c| c.rope.theta = 10_000.1);
        let scaling =
            Llama3Scaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 64 };
        change(&|c| c.rope.llama3 = Some(scaling.clone()));
        change(&|c| c.rope.llama3 = Some(Llama3Scaling { original_positions: 65, ..scaling.clone() }));
        change(&|c| c.sliding_window = Some(32));
        change(&|c| c.qkv_bias = true);
        change(&|c| c.qk_norm = true);
        change(&|c| c.tied_embeddings = true);
        change(&|c| c.layer_weights = WeightFormat::E4m3);
        let mut hashes: Vec<_> = others.iter().map(|c| hash(c, 1)).collect();
        hashes.push(hash(&base, 1));
        let count = hashes.len();
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), count);
    }
}
