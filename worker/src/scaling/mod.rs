//! `looplane scaling`: what more GPUs bring, calculated. Reads what `looplane bench` measured, fits the costs of the calculation
//! ([`model`]) on groups of one and two GPUs alone, sets it beside every step that was measured, and predicts larger groups.

mod fit;
mod model;
mod report;

use std::path::PathBuf;

use clap::ValueEnum;
use serde::Deserialize;

pub use fit::{Measured, fit};
pub use model::{Costs, Cut, MOST_ROWS, Machine};
pub use report::{Compared, Predicted, Report};

use crate::bench::Shape;
use crate::plan::PlanError;

/// Groups of up to so many GPUs are fitted on; all others are predicted.
pub const FITTED_RANKS: usize = 2;
/// What is predicted, where a GPU holds its share of the weights: groups, batches, and the context of each.
const RANKS: [usize; 5] = [1, 2, 4, 8, 16];
const BATCHES: [u32; 2] = [1, MOST_ROWS];
const CONTEXT: f64 = 512.0;

/// Predicts how a model decodes on groups of GPUs, from what `looplane bench` measured.
#[derive(Debug, Clone, clap::Args)]
pub struct ScalingArgs {
    /// Figures that `looplane bench --device cuda --json` wrote, of groups of 1 and 2 GPUs at least
    #[arg(required = true, value_name = "FILE")]
    pub figures: Vec<PathBuf>,

    /// Shapes to predict
    #[arg(long, value_enum, value_name = "SHAPE,..", value_delimiter = ',', default_value = "llama-1b,8b,70b,405b")]
    pub shapes: Vec<Shape>,

    /// Write a picture of measured and predicted steps: SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// Nothing could be predicted.
#[derive(Debug, thiserror::Error)]
pub enum ScalingError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file has no figures.
    #[error("{}: {problem}; files must be what looplane bench --device cuda --shape S --json FILE wrote", path.display())]
    Figures {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A model cannot be cut so.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// There is too little to fit.
    #[error(
        "{found} steps of groups of 1 and 2 GPUs were measured, {needed} is the least that costs can be fitted on: measure more shapes, at batch 1 and 8, and on both"
    )]
    TooFew {
        /// Steps.
        found: usize,
        /// How many it takes.
        needed: usize,
    },
}

/// What of a run of the bench is looked at.
#[derive(Debug, Deserialize)]
struct Run {
    model: String,
    device: String,
    tensor_parallel: usize,
    shard_of: Option<usize>,
    read: Read,
    batches: Vec<Batch>,
}

#[derive(Debug, Deserialize)]
struct Read {
    best_gb_s: f64,
}

#[derive(Debug, Deserialize)]
struct Batch {
    batch: u32,
    loop_mode: Option<String>,
    mean_context: f64,
    step_ms: f64,
}

/// Fits, compares and predicts.
///
/// # Errors
/// A file is no figures of the bench, or there are too few of groups of 1 and 2 GPUs.
pub fn run(args: &ScalingArgs) -> Result<Report, ScalingError> {
    let mut compared = Vec::new();
    for path in &args.figures {
        let text = std::fs::read_to_string(path).map_err(|source| ScalingError::Read { path: path.clone(), source })?;
        let steps = steps(&text).map_err(|problem| ScalingError::Figures { path: path.clone(), problem })?;
        compared.extend(steps);
    }
    let fitted: Vec<Measured> = compared.iter().filter(|of| of.is_fitted()).map(|of| of.measured.clone()).collect();
    if fitted.len() < Costs::COUNT {
        return Err(ScalingError::TooFew { found: fitted.len(), needed: Costs::COUNT });
    }
    let costs = fit(&fitted);
    let limits = fitted.iter().map(|of| of.machine.read_gb_s).sum::<f64>() / fitted.len() as f64;
    let machine = Machine { read_gb_s: limits, ..Machine::H200 };
    let mut predicted = Vec::new();
    for (shape, ranks) in args.shapes.iter().flat_map(|shape| RANKS.map(|ranks| (*shape, ranks))) {
        let cut = Cut::new(&shape.config(), ranks, machine.sms)?;
        if !cut.fits(&machine) {
            continue;
        }
        predicted.extend(BATCHES.map(|batch| Predicted::new(shape, ranks, &cut, batch, CONTEXT, &machine, &costs)));
    }
    compared.sort_by_key(|of| (of.ranks, of.shape.name(), of.shard_of, of.measured.batch));
    Ok(Report { costs, machine, compared, predicted })
}

/// Looped steps of at most [`MOST_ROWS`] rows in a file of the bench.
fn steps(text: &str) -> Result<Vec<Compared>, String> {
    let run: Run = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let shape = Shape::from_str(&run.model, false).map_err(|_| format!("{} is no shape of the bench", run.model))?;
    if run.device != "cuda" {
        return Err(format!("the steps were computed by {}", run.device));
    }
    let machine = Machine { read_gb_s: run.read.best_gb_s, ..Machine::H200 };
    let cut = Cut::new(&shape.config(), run.shard_of.unwrap_or(run.tensor_parallel), machine.sms);
    let cut = cut.map_err(|error| error.to_string())?.of_first(run.tensor_parallel);
    let steps = run.batches.into_iter().filter(|of| of.batch <= MOST_ROWS && of.loop_mode.as_deref() == Some("on"));
    Ok(steps
        .map(|of| Compared {
            shape,
            ranks: run.tensor_parallel,
            shard_of: run.shard_of,
            measured: Measured {
                cut: cut.clone(),
                batch: of.batch,
                context: of.mean_context,
                machine,
                step_ms: of.step_ms,
            },
        })
        .collect())
}

#[cfg(test)]
mod tests;
