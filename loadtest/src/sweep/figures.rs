//! What a sweep measured and predicted, and the ratios that follow from it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::figures::server_side::times;
use crate::run::calibrate::TOLERATED_MS;
use crate::sweep::layout::Layout;

/// Where the servers of a sweep compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// A worker for each CPU socket.
    Cpu,
    /// A worker for each GPU.
    Cuda,
}

/// A whole sweep.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sweep {
    /// Version of Looplane.
    pub version: String,
    /// When it began, as `YYYYMMDD-HHMMSS` in UTC.
    pub date: String,
    /// Model id, as the servers name it; none where no server ran.
    pub model: Option<String>,
    /// Where it was computed.
    pub device: Device,
    /// The processor's name, where the bench tells.
    pub processor: Option<String>,
    /// Cores of the machine.
    pub cores: u32,
    /// GPUs of the machine that can be used.
    pub gpus: u32,
    /// Compute threads of each worker, on CPUs.
    pub threads: Option<u32>,
    /// What was set, in words: name and value.
    pub settings: Vec<(String, String)>,
    /// What each size was measured under.
    pub loads: Vec<LoadPoint>,
    /// Ascending.
    pub sizes: Vec<Size>,
    /// What a reader has to know to trust the figures.
    pub notes: Vec<String>,
}

/// One of the loads of a sweep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadPoint {
    pub name: String,
    pub pacing: String,
    /// Requests in flight of a closed loop.
    pub streams: Option<u32>,
}

/// A layout of the server.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Size {
    #[serde(flatten)]
    pub layout: Layout,
    /// Why it was not measured, or not under all loads.
    pub not_measured: Option<String>,
    /// From the start of the server until it could answer.
    pub ready_s: Option<f64>,
    /// By load, those that were measured to their end.
    pub measured: Vec<Level>,
    /// By load, those that can be predicted.
    pub predicted: Vec<Prediction>,
    /// What a step reads, where the bench could tell.
    pub traffic: Option<Traffic>,
}

/// What clients saw of one size under one load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Level {
    /// Which of [`Sweep::loads`].
    pub load: usize,
    pub completed: u64,
    pub failed: u64,
    /// Answers a second.
    pub request_throughput: f64,
    pub output_throughput: f64,
    pub mean_tpot_ms: Option<f64>,
    pub median_ttft_ms: Option<f64>,
    pub p99_ttft_ms: Option<f64>,
    pub p99_itl_ms: Option<f64>,
    pub p99_client_lag_ms: Option<f64>,
    /// Groups of workers that the server lost meanwhile; none where it does not say.
    pub worker_losses: Option<f64>,
    /// Positions that a sequence sees in the mean over its output.
    pub mean_context: f64,
    /// File beside the report that holds all of the run.
    pub file: String,
}

/// What one size would do under one load, by the scaling model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Which of [`Sweep::loads`].
    pub load: usize,
    /// By the scaling model; none where replicas are calculated from one.
    pub step_ms: Option<f64>,
    /// Tokens a second.
    pub output_throughput: f64,
    pub mean_tpot_ms: f64,
    /// Share of the read limit that steps reach, prompts and front end included.
    pub read_share: Option<f64>,
    /// Whether what serving adds to a step was fitted on this size.
    pub fitted: bool,
}

/// Bytes that a group's memory is read by, from its bench.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Weights that stream in a step: of all workers on CPUs, whose memory is one; else of one GPU.
    pub weight_bytes: f64,
    /// K and V of one position of one sequence.
    pub position_bytes: f64,
    /// GB/s (10^9) at which the memory can be read, measured in the same run.
    pub read_gb_s: f64,
}

/// How a row of the report came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    Measured,
    /// Measured, with more workers than cores: what they cost, not what sockets buy.
    Overhead,
    Predicted,
}

/// One size under one load: what tables and plots show of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub layout: Layout,
    pub how: How,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Over the smallest size that was measured.
    pub speed_up: Option<f64>,
    /// Speed-up over what as many sockets would bring at best.
    pub efficiency: Option<f64>,
    pub tokens_per_s_a_socket: f64,
    pub tokens_per_s_a_user: Option<f64>,
    pub tpot_ms: Option<f64>,
    pub median_ttft_ms: Option<f64>,
    pub p99_ttft_ms: Option<f64>,
    pub read_share: Option<f64>,
    /// By how much the model's tokens a second are off, over what was measured.
    pub model_error: Option<f64>,
    pub model_fitted: bool,
}

/// Which of several layouts of as many sockets is the best under a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Which of [`Sweep::loads`].
    pub load: usize,
    /// Of the most tokens a second.
    pub most: Row,
    /// Of the shortest time between the tokens of a stream.
    pub fastest: Row,
}

impl Device {
    /// Name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// What one worker computes on, in reports.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Cpu => "worker",
            Self::Cuda => "GPU",
        }
    }
}

impl How {
    /// Name in tables and legends.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Overhead => "more workers than cores",
            Self::Predicted => "predicted",
        }
    }

    /// Name in the legend of a small plot.
    pub fn in_short(self) -> &'static str {
        match self {
            Self::Overhead => "more than cores",
            other => other.in_words(),
        }
    }
}

impl Traffic {
    /// Share of the read limit of steps of `step_ms` with so many sequences that see so many positions each.
    pub fn read_share(&self, step_ms: f64, sequences: f64, context: f64) -> f64 {
        (self.weight_bytes + self.position_bytes * sequences * context) / (step_ms * 1e6) / self.read_gb_s
    }
}

impl Size {
    /// What was measured under a load.
    pub fn level(&self, load: usize) -> Option<&Level> {
        self.measured.iter().find(|level| level.load == load)
    }

    /// What is predicted for a load.
    pub fn prediction(&self, load: usize) -> Option<&Prediction> {
        self.predicted.iter().find(|prediction| prediction.load == load)
    }
}

impl Sweep {
    /// Rows of the sizes that were measured under a load or can be predicted, in the order of the sizes.
    pub fn rows(&self, load: usize) -> Vec<Row> {
        let measured =
            self.sizes.iter().filter_map(|size| Some((size.layout.sockets(), size.level(load)?.output_throughput)));
        let base = measured.min_by_key(|(sockets, _)| *sockets).filter(|(_, tokens_per_s)| *tokens_per_s > 0.0);
        let row = |size: &Size| {
            let (level, prediction) = (size.level(load), size.prediction(load));
            let (tokens_per_s, tpot_ms) = match (level, prediction) {
                (Some(level), _) => (level.output_throughput, level.mean_tpot_ms),
                (None, Some(prediction)) => (prediction.output_throughput, Some(prediction.mean_tpot_ms)),
                (None, None) => return None,
            };
            let sockets = size.layout.sockets();
            let speed_up = base.map(|(_, of_base)| tokens_per_s / of_base);
            Some(Row {
                layout: size.layout,
                how: match level {
                    None => How::Predicted,
                    Some(_) if self.is_crowded(sockets) => How::Overhead,
                    Some(_) => How::Measured,
                },
                tokens_per_s,
                speed_up,
                efficiency: base
                    .zip(speed_up)
                    .map(|((of_base, _), speed_up)| speed_up * f64::from(of_base) / f64::from(sockets)),
                tokens_per_s_a_socket: tokens_per_s / f64::from(sockets),
                tokens_per_s_a_user: tpot_ms.map(|ms| 1e3 / ms),
                tpot_ms,
                median_ttft_ms: level.and_then(|level| level.median_ttft_ms),
                p99_ttft_ms: level.and_then(|level| level.p99_ttft_ms),
                read_share: match level {
                    Some(level) => self.read_share(size, level),
                    None => prediction.and_then(|prediction| prediction.read_share),
                },
                model_error: level
                    .zip(prediction)
                    .map(|(level, prediction)| prediction.output_throughput / level.output_throughput - 1.0),
                model_fitted: prediction.is_some_and(|prediction| prediction.fitted),
            })
        };
        self.sizes.iter().filter_map(row).collect()
    }

    /// Whether there are layouts of several replicas.
    pub fn has_replicas(&self) -> bool {
        self.sizes.iter().any(|size| size.layout.replicas > 1)
    }

    /// The best of as many sockets under each load, where there are several layouts of them.
    pub fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        for load in 0..self.loads.len() {
            let rows = self.rows(load);
            // They are in the order of their sockets.
            for of in rows.chunk_by(|a, b| a.layout.sockets() == b.layout.sockets()).filter(|of| of.len() > 1) {
                let most = of.iter().max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s));
                let timed = of.iter().filter_map(|row| Some((row, row.tpot_ms?)));
                let fastest = timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(row, _)| row);
                if let (Some(most), Some(fastest)) = (most, fastest) {
                    choices.push(Choice { load, most: most.clone(), fastest: fastest.clone() });
                }
            }
        }
        choices
    }

    /// The sweep as one JSON object, with `rows`, which follow from the rest: for each load a list of them.
    ///
    /// # Errors
    /// None that its types allow.
    pub fn to_json(&self) -> serde_json::Result<Value> {
        let rows = (0..self.loads.len()).map(|load| self.rows(load)).collect::<Vec<_>>();
        let mut object = serde_json::to_value(self)?;
        object["rows"] = serde_json::to_value(rows)?;
        Ok(object)
    }

    /// Whether so many workers share cores, so that they show what workers cost and not what sockets buy.
    pub fn is_crowded(&self, sockets: u32) -> bool {
        self.threads.is_some_and(|threads| sockets * threads > self.cores)
    }

    /// The largest error of the model over sizes that it was not fitted on, without sign.
    pub fn worst_error(&self) -> Option<f64> {
        let rows = (0..self.loads.len()).flat_map(|load| self.rows(load));
        rows.filter(|row| !row.model_fitted).filter_map(|row| row.model_error).map(f64::abs).reduce(f64::max)
    }

    /// What the rows do not show and a reader has to know, in sentences.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if let Some(worst) = self.worst_error() {
            let percent = 100.0 * worst;
            remarks.push(format!(
                "the model's largest error on sizes that were measured and that it was not fitted on is {percent:.1} %"
            ));
        }
        let levels = || self.sizes.iter().flat_map(|size| size.measured.iter().map(move |level| (size.layout, level)));
        for (layout, level) in levels().filter(|(_, level)| level.failed > 0) {
            let (name, sent) = (&self.loads[level.load].name, level.completed + level.failed);
            remarks.push(format!("{layout}, {name}: {} of {sent} requests failed, see {}", level.failed, level.file));
        }
        for (layout, level) in levels() {
            if let Some(losses) = level.worker_losses.filter(|losses| *losses > 0.0) {
                let (name, losses, file) = (&self.loads[level.load].name, times(losses), &level.file);
                remarks.push(format!(
                    "{layout}, {name}: workers died under this load ({losses}), and its figures hold the wait for new ones, \
                     see {file}"
                ));
            }
        }
        let lag = |(layout, level): (Layout, &Level)| Some((level.p99_client_lag_ms?, layout, level.load));
        let latest = levels().filter_map(lag).max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((late_ms, layout, load)) = latest.filter(|(late_ms, ..)| *late_ms > TOLERATED_MS) {
            let name = &self.loads[load].name;
            remarks.push(format!(
                "the load tester shares the machine with the servers: one in a hundred of its own timers was late by \
                 {late_ms:.1} ms or more at {layout}, {name}, and less elsewhere; so may every time be"
            ));
        }
        remarks.extend(self.notes.iter().cloned());
        remarks
    }

    fn read_share(&self, size: &Size, level: &Level) -> Option<f64> {
        let sequences = f64::from(self.loads.get(level.load)?.streams?);
        Some(size.traffic?.read_share(level.mean_tpot_ms?, sequences, level.mean_context))
    }
}
