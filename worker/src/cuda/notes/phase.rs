//! The phases of a step, as a benchmark tells them apart.

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Rows of the embedding. In the loop of narrow passes the first layer's `QueryKeyValue` waits for it.
    Embed,
    /// Norm, q, k and v, rotation, append to the KV cache.
    QueryKeyValue,
    /// Leaves of attention, and pages out of them.
    Attend,
    /// Pages of a head added up; in wide passes a part of `Attend`.
    Merge,
    /// Product with what attention gave, and residual.
    AttentionOut,
    /// Norm, gate and up, activation.
    GateUp,
    /// Down, and residual.
    Down,
    /// Norm, LM head.
    Head,
    /// The choice of the tokens.
    Choose,
}

/// Time of a phase in a step, in all layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PhaseTime {
    /// Which.
    pub phase: Phase,
    /// In microseconds: in the loop the mean over all consumer warps, of which each is in one phase at a time; else
    /// from the end of the launch before to the end of this.
    pub us: f64,
    /// How much of it warps waited for what other blocks compute, where that is known.
    pub wait_us: Option<f64>,
}

impl Phase {
    /// In the order of a step.
    pub const ALL: [Self; 9] = [
        Self::Embed,
        Self::QueryKeyValue,
        Self::Attend,
        Self::Merge,
        Self::AttentionOut,
        Self::GateUp,
        Self::Down,
        Self::Head,
        Self::Choose,
    ];

    /// What tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::QueryKeyValue => "qkv",
            Self::Attend => "attend",
            Self::Merge => "merge",
            Self::AttentionOut => "o",
            Self::GateUp => "gate/up",
            Self::Down => "down",
            Self::Head => "head",
            Self::Choose => "choose",
        }
    }
}
