//! `looplane scaling`: what more GPUs bring, calculated. Reads what `looplane bench` measured, fits the costs of the
//! calculation ([`model`]) on small groups alone, of one and two GPUs where nobody says otherwise, sets it beside every
//! step that was measured, and predicts larger groups.

mod fit;
mod model;
mod report;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Deserialize;

pub use fit::{Measured, fit};
pub use model::{Costs, Cut, MOST_ROWS, Machine};
pub use report::{Compared, Predicted, Refused, Report, Steps, Uncomputed};

use crate::bench::Shape;
use crate::cuda::check_shape;
use crate::model::ModelConfig;

/// Groups that are predicted, where a GPU holds its share of the weights.
const RANKS: [usize; 5] = [1, 2, 4, 8, 16];

/// Predicts how a model decodes on groups of GPUs, from what `looplane bench` measured.
#[derive(Debug, Clone, clap::Args)]
pub struct ScalingArgs {
    /// Figures that `looplane bench --device cuda --json` wrote, of groups of 1 and 2 GPUs at least
    #[arg(required = true, value_name = "FILE")]
    pub figures: Vec<PathBuf>,

    /// Fit on groups of up to so many GPUs; steps of larger ones then test the calculation
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub fitted_gpus: u32,

    /// Shapes to predict
    #[arg(long, value_enum, value_name = "SHAPE,..", value_delimiter = ',', default_value = "llama-1b,8b,70b,405b")]
    pub shapes: Vec<Shape>,

    /// Predict this model in place of --shapes: a directory as Hugging Face lays it out, of which config.json is read
    #[arg(long, value_name = "DIR", conflicts_with = "shapes")]
    pub model: Option<PathBuf>,

    /// Sequences of a step to predict
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_ROWS)))]
    pub batch: Vec<u32>,

    /// Positions that each of them sees
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub context: u32,

    /// Write a picture of measured and predicted steps: SVG
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "batch", "context"])]
    pub plot: Option<PathBuf>,

    /// Write the figures to this file too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Nothing could be predicted.
#[derive(Debug, thiserror::Error)]
pub enum ScalingError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file has no figures.
    #[error("{}: {problem}; files must be what looplane bench --device cuda --json FILE wrote", path.display())]
    Figures {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// config.json is refused, for the reason given.
    #[error("{0}")]
    Config(String),
    /// There is too little to fit.
    #[error(
        "{found} steps of groups of 1 to {most} GPUs were measured, {needed} is the least that costs can be fitted on: \
         measure more shapes, at batch 1 and 8, and on 1 and 2 GPUs at least"
    )]
    TooFew {
        /// Steps.
        found: usize,
        /// How many it takes.
        needed: usize,
        /// GPUs of the largest groups that are fitted on.
        most: usize,
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
/// A file is no figures of the bench, or there are too few of groups that are fitted on.
pub fn run(args: &ScalingArgs) -> Result<Report, ScalingError> {
    let mut compared = Vec::new();
    for path in &args.figures {
        let text = std::fs::read_to_string(path).map_err(|source| ScalingError::Read { path: path.clone(), source })?;
        let steps = steps(&text, args.fitted_gpus as usize)
            .map_err(|problem| ScalingError::Figures { path: path.clone(), problem })?;
        compared.extend(steps);
    }
    let fitted: Vec<Measured> = compared.iter().filter(|of| of.fitted).map(|of| of.measured.clone()).collect();
    if fitted.len() < Costs::COUNT {
        let (found, needed, most) = (fitted.len(), Costs::COUNT, args.fitted_gpus as usize);
        return Err(ScalingError::TooFew { found, needed, most });
    }
    let costs = fit(&fitted);
    let limits = fitted.iter().map(|of| of.machine.read_gb_s).sum::<f64>() / fitted.len() as f64;
    let machine = Machine { read_gb_s: limits, ..Machine::H200 };
    let models = match &args.model {
        Some(dir) => {
            let config = ModelConfig::from_dir(dir).map_err(|error| ScalingError::Config(error.to_string()))?;
            vec![(dir.display().to_string(), config)]
        }
        None => args.shapes.iter().map(|shape| (shape.name(), shape.config())).collect(),
    };
    let (mut predicted, mut refused) = (Vec::new(), Vec::new());
    for ((model, config), ranks) in models.iter().flat_map(|model| RANKS.map(|ranks| (model, ranks))) {
        let cut = Cut::new(config, ranks, machine.sms).map_err(|error| error.to_string());
        let fitting = cut.and_then(|cut| match cut.fits(&machine) {
            true => Ok(cut),
            false => {
                let [bytes, memory] = [cut.bytes(0, 0.0), machine.memory_bytes].map(|bytes| bytes / 1e9);
                Err(format!("a GPU would hold {bytes:.0} GB of weights, and has {memory:.0} GB"))
            }
        });
        match fitting {
            Ok(cut) => predicted.extend(args.batch.iter().map(|&batch| {
                Predicted::new(model.clone(), ranks, &cut, batch, f64::from(args.context), &machine, &costs)
            })),
            Err(reason) => refused.push(Refused { model: model.clone(), ranks, reason }),
        }
    }
    let uncomputed = models.iter().filter_map(|(model, config)| {
        check_shape(config).err().map(|error| Uncomputed { model: model.clone(), reason: error.to_string() })
    });
    compared.sort_by_cached_key(|of| (of.ranks, of.model.clone(), of.shard_of, of.measured.batch));
    Ok(Report {
        costs,
        machine,
        fitted_gpus: args.fitted_gpus as usize,
        context: args.context,
        compared,
        predicted,
        refused,
        uncomputed: uncomputed.collect(),
    })
}

/// Looped steps of at most [`MOST_ROWS`] rows in a file of the bench; those of whole groups of up to `fitted_gpus` are
/// fitted on.
fn steps(text: &str, fitted_gpus: usize) -> Result<Vec<Compared>, String> {
    let run: Run = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let config = match Shape::from_str(&run.model, false) {
        Ok(shape) => shape.config(),
        Err(_) => ModelConfig::from_dir(Path::new(&run.model))
            .map_err(|error| format!("{} is no shape of the bench and no model: {error}", run.model))?,
    };
    if run.device != "cuda" {
        return Err(format!("the steps were computed by {}", run.device));
    }
    let machine = Machine { read_gb_s: run.read.best_gb_s, ..Machine::H200 };
    let cut = Cut::new(&config, run.shard_of.unwrap_or(run.tensor_parallel), machine.sms);
    let cut = cut.map_err(|error| error.to_string())?.of_first(run.tensor_parallel);
    let steps = run.batches.into_iter().filter(|of| of.batch <= MOST_ROWS && of.loop_mode.as_deref() == Some("on"));
    Ok(steps
        .map(|of| Compared {
            model: run.model.clone(),
            ranks: run.tensor_parallel,
            shard_of: run.shard_of,
            fitted: run.tensor_parallel <= fitted_gpus && run.shard_of.is_none(),
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
