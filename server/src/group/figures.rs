//! What a replica's steps took, for its last line in the log.

use std::fmt;

use crate::metrics::EngineMetrics;

/// What the steps of the loop took, over all groups of this replica.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Plans sent.
    pub plans: u64,
    /// Steps run.
    pub steps: u64,
    /// Rows (prompt and decode tokens) computed.
    pub rows: u64,
    /// Tokens that readers took.
    pub tokens: u64,
    /// Time in steps on rank 0, in nanoseconds.
    pub step_ns: u64,
    /// Of that, waiting for other ranks, where the backend tells.
    pub wait_ns: Option<u64>,
    /// Groups lost.
    pub losses: u64,
}

impl Figures {
    /// As counted so far.
    pub(super) fn of(metrics: &EngineMetrics) -> Self {
        let (step_ns, wait_ns) = metrics.step_ns();
        Self {
            plans: metrics.plans.get(),
            steps: metrics.steps(),
            rows: metrics.rows(),
            tokens: metrics.generation_tokens.get(),
            step_ns,
            wait_ns,
            losses: metrics.losses.get(),
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plans, steps, rows, tokens, step_ns, wait_ns, losses } = *self;
        write!(f, "{tokens} tokens in {steps} steps ({rows} rows, {plans} plans)")?;
        if steps > 0 && step_ns > 0 {
            let mean_ms = step_ns as f64 / steps as f64 / 1e6;
            write!(f, ", {mean_ms:.3} ms a step on rank 0")?;
            if let Some(wait_ns) = wait_ns {
                let waiting = wait_ns as f64 * 100.0 / step_ns as f64;
                write!(f, ", {waiting:.1} % of it waiting for other ranks")?;
            }
        }
        match losses {
            0 => Ok(()),
            1 => write!(f, "; the workers were lost once"),
            _ => write!(f, "; the workers were lost {losses} times"),
        }
    }
}
