//! Options of `looplane bench`.

use std::path::PathBuf;

use super::{BenchError, Shape};
use crate::cuda::LoopMode;
use crate::decoder::Device;
use crate::model::WeightFormat;

/// Rows of a pass that runs a launch for each phase.
const UNLOOPED_BATCH: u32 = 8;

/// Measures how fast a model decodes, and which share of the machine's read bandwidth that is.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// Model directory as Hugging Face lays it out [default: --shape 1b]
    #[arg(long, value_name = "DIR", env = "LOOPLANE_BENCH_MODEL", conflicts_with = "shape")]
    pub model: Option<PathBuf>,

    /// Dimensions to measure without a checkpoint [default: 1b]
    #[arg(long, value_enum, env = "LOOPLANE_BENCH_SHAPE")]
    pub shape: Option<Shape>,

    /// Measure only the first layers of --shape: steps of a model that is too large
    #[arg(long, value_name = "N", requires = "shape", env = "LOOPLANE_BENCH_LAYERS",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub layers: Option<u32>,

    /// What the layers' matrices are; those of a checkpoint that have more bits are quantised [default: as they are]
    #[arg(long, value_enum, env = "LOOPLANE_BENCH_WEIGHTS")]
    pub weights: Option<WeightFormat>,

    /// Where to compute
    #[arg(long, value_enum, default_value_t = Device::Auto, env = "LOOPLANE_BENCH_DEVICE")]
    pub device: Device,

    /// Tensor parallelism: ranks, as threads of this process (1, 2, 4, 8 or 16)
    #[arg(long, value_name = "N", default_value_t = 1, env = "LOOPLANE_BENCH_TP")]
    pub tp: usize,

    /// Cut the model into shards for so many GPUs, of which the --tp of this machine compute the first and exchange
    /// with each other: times the stream of a larger group
    #[arg(long, value_name = "N", env = "LOOPLANE_BENCH_SHARD_OF", conflicts_with = "model")]
    pub shard_of: Option<usize>,

    /// Compute threads of each rank [default: the machine's cores divided by --tp]
    #[arg(long, value_name = "N", env = "LOOPLANE_BENCH_THREADS", value_parser = at_least_1)]
    pub threads: Option<usize>,

    /// Sequences that decode together; several are measured in turns
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8", env = "LOOPLANE_BENCH_BATCH",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch: Vec<u32>,

    /// Tokens of each sequence before the first step
    #[arg(long, value_name = "N", default_value_t = 256, env = "LOOPLANE_BENCH_CONTEXT",
          value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub context: u32,

    /// Steps measured of each batch
    #[arg(long, value_name = "N", default_value_t = 64, env = "LOOPLANE_BENCH_STEPS",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub steps: u32,

    /// Measure the time from a prompt of so many tokens to its first token, too
    #[arg(long, value_name = "N", env = "LOOPLANE_BENCH_PROMPT",
          value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub prompt: Option<u32>,

    /// Measure steps that compute so many tokens of a prompt beside those of each batch, too
    #[arg(long, value_name = "N", env = "LOOPLANE_BENCH_BESIDE",
          value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    pub beside: Option<u32>,

    /// Memory that read bandwidth is measured over, in MiB; must be far above the caches [default: 1024, on a GPU 8192]
    #[arg(long, value_name = "MIB", env = "LOOPLANE_BENCH_READ_MIB",
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub read_mib: Option<u32>,

    /// Thread blocks of the GPU's kernel [default: what suits the model]
    #[arg(long, value_name = "N", env = "LOOPLANE_BENCH_BLOCKS",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub blocks: Option<u32>,

    /// How tokens are drawn: 0 for the most likely one
    #[arg(long, value_name = "T", default_value_t = 0.0, env = "LOOPLANE_BENCH_TEMPERATURE", value_parser = at_least_0)]
    pub temperature: f32,

    /// Share of the probability that is drawn from
    #[arg(long, value_name = "P", default_value_t = 1.0, env = "LOOPLANE_BENCH_TOP_P", value_parser = share)]
    pub top_p: f32,

    /// Log-probabilities of each token, and of this many likely ones
    #[arg(long, value_name = "N", env = "LOOPLANE_BENCH_LOGPROBS",
          value_parser = clap::value_parser!(u32).range(0..=20))]
    pub logprobs: Option<u32>,

    /// How the phases of a step become launches on the GPU; several are measured in turns
    #[arg(
        long = "loop",
        value_enum,
        value_name = "MODE,..",
        value_delimiter = ',',
        default_value = "on",
        env = "LOOPLANE_BENCH_LOOP"
    )]
    pub loop_modes: Vec<LoopMode>,

    /// Write a timeline of what every multiprocessor did in one step of the first batch, looped: JSON for Perfetto or
    /// chrome://tracing
    #[arg(long, value_name = "FILE", env = "LOOPLANE_BENCH_TRACE")]
    pub trace: Option<PathBuf>,

    /// Write the figures to this file too
    #[arg(long, value_name = "FILE", env = "LOOPLANE_BENCH_JSON")]
    pub json: Option<PathBuf>,
}

impl BenchArgs {
    /// Refuses what cannot be measured, and says how many threads a rank has.
    ///
    /// # Errors
    /// Names the option to change.
    pub fn check(&self) -> Result<usize, BenchError> {
        let refuse = |option, value: String, rule| Err(BenchError::Value { option, value, rule });
        if !matches!(self.tp, 1 | 2 | 4 | 8 | 16) {
            return refuse("--tp", self.tp.to_string(), "1, 2, 4, 8 or 16");
        }
        if let Some(shards) = self.shard_of
            && !(self.tp > 1 && shards > self.tp && matches!(shards, 4 | 8 | 16))
        {
            return refuse("--shard-of", shards.to_string(), "4, 8 or 16, and more than a --tp of at least 2");
        }
        if self.loop_modes.iter().any(|mode| *mode != LoopMode::On)
            && let Some(wide) = self.batch.iter().find(|batch| **batch > UNLOOPED_BATCH)
        {
            return refuse("--batch", wide.to_string(), "at most 8 with --loop off or overlapped");
        }
        if self.trace.is_some() && !self.loop_modes.contains(&LoopMode::On) {
            return refuse("--loop", "off".to_owned(), "on (too) for --trace, which shows the loop");
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(self.threads.unwrap_or((cores / self.tp).max(1)))
    }
}

fn at_least_0(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value: &f32| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "must be a number of at least 0".to_owned())
}

fn share(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value: &f32| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "must be a number over 0 and at most 1".to_owned())
}

fn at_least_1(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count >= 1).ok_or_else(|| "must be a number of at least 1".to_owned())
}
