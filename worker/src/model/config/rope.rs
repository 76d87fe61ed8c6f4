//! Rotary embedding settings, in both spellings.

use serde_json::Value;

use super::fields::Fields;
use super::{ConfigError, MAX_POSITIONS};

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

/// transformers' default where the file has no `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;

/// Reads both spellings: `rope_parameters`, or `rope_theta` and `rope_scaling`.
pub(super) fn rope(fields: &Fields<'_>) -> Result<Rope, ConfigError> {
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
