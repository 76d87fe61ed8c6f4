//! From the format that weights are stored in to the one that is computed with: `--quantization`, and formats that a
//! backend has no kernels for.

pub(crate) mod expanded;
pub(crate) mod quantised;

use super::ModelConfig;
use super::format::WeightFormat;
use super::source::Source;

pub use expanded::Expanded;
pub use quantised::Quantised;

/// A model as it is computed: a checkpoint in bf16 in the format that was asked for; one that has fewer bits as it is
/// stored, if the backend `takes` it so, else in bf16.
pub fn computed(
    stored: &ModelConfig,
    asked: Option<WeightFormat>,
    takes: impl Fn(&ModelConfig) -> bool,
) -> ModelConfig {
    let layer_weights = match stored.layer_weights {
        WeightFormat::Bf16 => asked.unwrap_or_default(),
        fewer_bits => fewer_bits,
    };
    let config = ModelConfig { layer_weights, ..stored.clone() };
    if takes(&config) { config } else { ModelConfig { layer_weights: WeightFormat::Bf16, ..config } }
}

/// What turns `source`, of weights that are `stored` so, into those that are computed with; `None`: nothing.
pub fn converter<'a>(
    source: &'a dyn Source,
    stored: WeightFormat,
    computed: &ModelConfig,
) -> Option<Box<dyn Source + 'a>> {
    match (stored, computed.layer_weights) {
        (from, to) if from == to => None,
        (WeightFormat::Bf16, _) => Some(Box::new(Quantised::new(source, computed))),
        (_, WeightFormat::Bf16) => Some(Box::new(Expanded(source))),
        (from, to) => unreachable!("{from} does not become {to}"),
    }
}

/// What the user should know of the weights that a rank reads in a pass: of a model that is computed in `computed`.
pub fn weights_note(stored: WeightFormat, computed: WeightFormat, pass_bytes: u64) -> String {
    let how = match (stored, computed) {
        (from, to) if from == to => String::new(),
        (WeightFormat::Bf16, WeightFormat::E4m3) => ", quantised at load with a scale a row".into(),
        (WeightFormat::Bf16, _) => ", quantised at load".into(),
        (from, _) => format!(", expanded at load from {from}, which this device does not compute in this model"),
    };
    format!("weights of the layers in {computed}{how}; a pass reads {:.1} MB", pass_bytes as f64 / 1e6)
}
