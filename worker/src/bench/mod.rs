//! `looplane bench`: how fast a group of ranks decodes, as a share of the read bandwidth measured in the same run.
//!
//! Steps run through the loop as plans make them run: LM head, sampling and appending K and V included. Machines are
//! noisy, so steps of every batch and read passes take turns, in rounds.

mod args;
mod group;
mod report;
mod shape;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use crate::decoder::Device;
pub use args::BenchArgs;
pub use report::{BatchReport, BesideReport, PhaseReport, PromptReport, Read, Report};
pub use shape::Shape;

use crate::cpu::{ReadBandwidth, ReadError};
use crate::cuda::{self, CudaError, Exchanges, Gauge, LoopMode, Noted, Phase, ReadLimit, Trace};
use crate::decoder::{Fault, LoadError};
use crate::model::ModelConfig;
use crate::model::config::ConfigError;
use crate::sampling::SamplingParams;
use group::{Group, Setup, StepTime, Traffic};

/// Steps of one batch between two read passes: on CPUs, and on a GPU, where they are one launch.
const ROUND_STEPS: [u32; 2] = [8, 64];
/// Memory that read bandwidth is measured over where nobody says otherwise, in MiB: on CPUs, and on a GPU.
const READ_MIB: [u32; 2] = [1024, 8192];
/// Read passes at one time.
const ROUND_PASSES: usize = 2;
/// Steps of each batch before the first that counts.
const WARM_UP_STEPS: u32 = 2;
/// Steps of the launch whose last step is looked at phase by phase.
const NOTED_STEPS: u32 = 4;
/// Steps with a prompt beside each batch; the first does not count.
const BESIDE_STEPS: u32 = 9;
/// Times that a prompt is computed; the first does not count.
const PROMPT_RUNS: u32 = 6;
/// Idle threads are asleep after this long, and disturb nobody.
const SETTLE: Duration = Duration::from_millis(10);

/// Nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An option has a value that cannot work.
    #[error("{option} is {value}, but must be {rule}")]
    Value {
        /// With its dashes.
        option: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// config.json is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model was not loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A rank ended.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A rank ended and did not say why.
    #[error("a rank ended without a word")]
    Ended,
    /// The read limit cannot be measured.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The GPU cannot be used, or its read limit not be measured.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The thread that feeds the ranks could not be set up.
    #[error("cannot start the feed of the ranks: {0}")]
    Runtime(std::io::Error),
    /// A file could not be written.
    #[error("{option} {}: {source}", path.display())]
    Write {
        /// That named it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Measures, and writes the report to `--json` if asked to.
///
/// # Errors
/// An option cannot work, or the model is refused.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let threads = args.check()?;
    let on_gpu = args.device == Device::Cuda || (args.device == Device::Auto && cuda::survey(0, args.tp).is_ok());
    let rule = "left out where no GPU computes";
    if let Some(path) = args.trace.as_ref().filter(|_| !on_gpu) {
        return Err(BenchError::Value { option: "--trace", value: path.display().to_string(), rule });
    }
    if let Some(shards) = args.shard_of.filter(|_| !on_gpu) {
        return Err(BenchError::Value { option: "--shard-of", value: shards.to_string(), rule });
    }
    if !on_gpu && args.loop_modes != [LoopMode::On] {
        return Err(BenchError::Value { option: "--loop", value: "off".to_owned(), rule });
    }
    let shape = args.shape.unwrap_or(Shape::B1);
    let (config, random, model) = match &args.model {
        Some(dir) => (ModelConfig::from_dir(dir)?, None, dir.display().to_string()),
        None => {
            let whole = shape.config();
            let layers = args.layers.map_or(whole.num_layers, |layers| whole.num_layers.min(layers as usize));
            let config = ModelConfig { num_layers: layers, ..whole.clone() };
            let name = match layers < whole.num_layers {
                true => format!("{}, {layers} layers", shape.name()),
                false => shape.name(),
            };
            (config.clone(), Some(config), name)
        }
    };
    let modes: Vec<Option<LoopMode>> = match on_gpu {
        true => args.loop_modes.iter().copied().map(Some).collect(),
        false => vec![None],
    };
    let gauge = on_gpu.then(|| Gauge::new(&args.loop_modes));
    // Each batch decodes slot 0; the token that the prompt yields counts too.
    let max_steps = (args.steps + WARM_UP_STEPS + NOTED_STEPS + BESIDE_STEPS)
        .saturating_mul((args.batch.len() * modes.len()) as u32);
    let setup = Setup {
        model_dir: args.model.as_deref().unwrap_or(Path::new("")),
        random,
        on_gpu,
        blocks: args.blocks.map(|blocks| blocks as usize),
        gauge: gauge.clone(),
        ranks: args.tp,
        shards: args.shard_of,
        threads,
        slots: args.batch.iter().copied().max().unwrap_or(1),
        context: args.context,
        max_steps,
        sampling: SamplingParams { temperature: args.temperature, top_p: args.top_p, ..SamplingParams::greedy() },
        logprobs: args.logprobs,
        prompt: args.prompt,
        beside: args.beside,
        weights: args.weights,
    };
    let random_weights = setup.random.is_some();
    let (group, reader) = (Group::load(&setup)?, Reader::new(args, threads, on_gpu)?);
    let (notes, traffic) = (group.notes.clone(), group.traffic.clone());
    let positions = vec![args.context; setup.slots as usize];
    let measured = Bench { args, modes, gauge, group, reader, config, positions };
    let (series, prompt, beside, read) = measured.run(max_steps)?;
    let batches = series.iter().map(|of| {
        let kv_bytes = of.kv_bytes / u64::from(args.steps);
        let report = BatchReport::new(of.batch, &of.times, traffic.weight_bytes, kv_bytes, &read);
        let trace = of.noted.as_ref().and_then(|noted| noted.trace.as_ref());
        let sm_mhz = trace.map(Trace::sm_mhz);
        let mean_context = kv_bytes as f64 / traffic.position_bytes as f64 / f64::from(of.batch);
        let (phases, exchanges) = (of.phases(&traffic, &read), of.exchanges.clone());
        BatchReport { loop_mode: of.mode, sm_mhz, mean_context, phases, exchanges, ..report }
    });
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        model,
        random_weights,
        device: if on_gpu { "cuda" } else { "cpu" },
        processor: if on_gpu { Some(cuda::probe(0)?.name) } else { processor() },
        tensor_parallel: args.tp,
        shard_of: args.shard_of,
        threads,
        notes,
        context: args.context,
        steps: args.steps,
        batches: batches.collect(),
        prompt,
        beside,
        read,
    };
    report.relate();
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).map_err(std::io::Error::from);
        let written = text.and_then(|text| std::fs::write(path, text + "\n"));
        written.map_err(|source| BenchError::Write { option: "--json", path: path.clone(), source })?;
    }
    if let Some(path) = &args.trace {
        let trace = series.iter().find_map(|of| of.noted.as_ref()?.trace.as_ref());
        let trace = trace.expect("a looped series on a GPU, because others are refused");
        let written = std::fs::File::create(path).map(std::io::BufWriter::new).and_then(|mut file| {
            trace.write(&mut file)?;
            std::io::Write::flush(&mut file)
        });
        written.map_err(|source| BenchError::Write { option: "--trace", path: path.clone(), source })?;
    }
    Ok(report)
}

/// What measures the read limit.
enum Reader {
    Cpu(ReadBandwidth),
    Cuda(ReadLimit),
}

impl Reader {
    fn new(args: &BenchArgs, threads: usize, on_gpu: bool) -> Result<Self, BenchError> {
        let bytes = (args.read_mib.unwrap_or(READ_MIB[usize::from(on_gpu)]) as usize) << 20;
        Ok(match on_gpu {
            false => Self::Cpu(ReadBandwidth::new(args.tp * threads, bytes, false)?),
            true => Self::Cuda(ReadLimit::new(0, bytes)?),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Cpu(reader) => reader.bytes(),
            Self::Cuda(reader) => reader.bytes(),
        }
    }

    fn pass(&mut self) -> Result<Duration, BenchError> {
        Ok(match self {
            Self::Cpu(reader) => reader.pass(),
            Self::Cuda(reader) => reader.pass()?,
        })
    }
}

/// What a run has measured: steps, a prompt, steps with a prompt beside them, and the read limit.
type Measured = (Vec<Series>, Option<PromptReport>, Vec<BesideReport>, Read);

/// A run under way.
struct Bench<'a> {
    args: &'a BenchArgs,
    modes: Vec<Option<LoopMode>>,
    gauge: Option<Arc<Gauge>>,
    group: Group,
    reader: Reader,
    config: ModelConfig,
    /// By slot: the position of the row that is next.
    positions: Vec<u32>,
}

/// The steps of one batch.
struct Series {
    batch: u32,
    mode: Option<LoopMode>,
    times: Vec<StepTime>,
    /// Bytes of K and V that all of them read.
    kv_bytes: u64,
    /// By rank 0.
    noted: Option<Noted>,
    exchanges: Option<Exchanges>,
    /// Bytes of K and V that the step read whose times were noted.
    noted_kv_bytes: u64,
}

impl Series {
    fn phases(&self, traffic: &Traffic, read: &Read) -> Vec<PhaseReport> {
        let times = self.noted.iter().flat_map(|noted| &noted.phases);
        let bytes = |phase| match phase {
            Phase::Attend => self.noted_kv_bytes,
            phase => traffic.phase_bytes.iter().filter(|of| of.0 == phase).map(|of| of.1).sum(),
        };
        times.map(|time| PhaseReport::new(*time, bytes(time.phase), read)).collect()
    }
}

impl Bench<'_> {
    fn run(mut self, max_steps: u32) -> Result<Measured, BenchError> {
        for slot in 0..self.positions.len() as u32 {
            self.group.prefill(slot, self.args.context, max_steps + 1)?;
        }
        let mut series: Vec<Series> = Vec::new();
        for (mode, batch) in self.modes.iter().flat_map(|mode| self.args.batch.iter().map(move |batch| (mode, batch))) {
            let (times, noted, exchanges) = (Vec::new(), None, None);
            series.push(Series { batch: *batch, mode: *mode, times, kv_bytes: 0, noted, exchanges, noted_kv_bytes: 0 });
        }
        for of in &series {
            self.decode(of, false, WARM_UP_STEPS)?;
        }
        let mut passes = Vec::new();
        let round = ROUND_STEPS[usize::from(matches!(self.reader, Reader::Cuda(_)))];
        for first in (0..self.args.steps).step_by(round as usize) {
            for of in &mut series {
                self.read(&mut passes)?;
                let (times, kv_bytes) = self.decode(of, false, round.min(self.args.steps - first))?;
                of.times.extend(times);
                of.kv_bytes += kv_bytes;
            }
        }
        self.read(&mut passes)?;
        for of in series.iter_mut().filter(|of| of.mode.is_some()) {
            let (_, kv_bytes) = self.decode(of, true, NOTED_STEPS)?;
            self.group.settle()?;
            of.noted_kv_bytes = kv_bytes / u64::from(NOTED_STEPS);
            let ranks = self.gauge.as_ref().map_or(Vec::new(), |gauge| gauge.take());
            let traces: Vec<&Trace> = ranks.iter().filter_map(|noted| noted.trace.as_ref()).collect();
            of.exchanges = Exchanges::new(&traces);
            of.noted = ranks.into_iter().next();
        }
        if let Some(gauge) = &self.gauge {
            gauge.set(LoopMode::On, false);
        }
        let prompt = self.args.prompt.map(|tokens| self.prompt(tokens)).transpose()?;
        let beside = self.args.beside.map(|tokens| self.beside(tokens)).transpose()?.unwrap_or_default();
        self.group.finish()?;
        Ok((series, prompt, beside, Read::new(self.reader.bytes() as u64, passes)))
    }

    /// Steps of each batch with a prompt beside them, in a slot of its own.
    fn beside(&mut self, tokens: u32) -> Result<Vec<BesideReport>, BenchError> {
        let slot = self.positions.len() as u32;
        let mut reports = Vec::new();
        for &batch in &self.args.batch {
            let mut times = Vec::new();
            for step in 0..BESIDE_STEPS {
                let time = self.group.decode_beside(batch, slot, tokens)?;
                times.extend((step > 0).then_some(time.step));
            }
            reports.push(BesideReport::new(batch, tokens, times));
        }
        Ok(reports)
    }

    /// Computes a prompt in a slot of its own again and again.
    fn prompt(&mut self, tokens: u32) -> Result<PromptReport, BenchError> {
        let slot = self.positions.len() as u32;
        let mut times = Vec::new();
        for run in 0..PROMPT_RUNS {
            std::thread::sleep(SETTLE);
            let begun = Instant::now();
            self.group.prefill(slot, tokens, 1)?;
            times.extend((run > 0).then(|| begun.elapsed()));
            self.group.release(slot)?;
        }
        let c = &self.config;
        let (out, qkv) = (c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim);
        let behind = out + 3 * c.intermediate_size;
        Ok(PromptReport::new(tokens, times, c.hidden_size * (c.num_layers * (qkv + behind) - behind)))
    }

    /// Times of steps, and bytes of K and V that they read; `noted`: their phases are noted.
    fn decode(&mut self, series: &Series, noted: bool, steps: u32) -> Result<(Vec<StepTime>, u64), BenchError> {
        let batch = series.batch;
        if let (Some(gauge), Some(mode)) = (&self.gauge, series.mode) {
            gauge.set(mode, noted);
        }
        let mut times = self.group.decode(batch, steps)?;
        if let Reader::Cuda(_) = self.reader {
            // They are one launch. When the host saw each of its tokens says less than how long all of them took.
            let mean = |of: fn(&StepTime) -> Duration| times.iter().map(of).sum::<Duration>() / steps;
            let mean = StepTime { step: mean(|time| time.step), wait: mean(|time| time.wait) };
            times.fill(mean);
        }
        let window = self.config.sliding_window.map_or(u64::MAX, |window| window as u64);
        let mut seen = 0;
        for position in &mut self.positions[..batch as usize] {
            // A row at position p sees p + 1 positions, its own included.
            seen += (*position..*position + steps).map(|p| (u64::from(p) + 1).min(window)).sum::<u64>();
            *position += steps;
        }
        Ok((times, seen * self.group.traffic.position_bytes))
    }

    fn read(&mut self, passes: &mut Vec<Duration>) -> Result<(), BenchError> {
        std::thread::sleep(SETTLE);
        for _ in 0..ROUND_PASSES {
            passes.push(self.reader.pass()?);
        }
        std::thread::sleep(SETTLE);
        Ok(())
    }
}

/// The processor's name, as Linux tells it.
fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = info.lines().find(|line| line.starts_with("model name"))?;
    Some(name.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests;
