//! What the product says of itself beside a sweep: `looplane bench` of a size that was measured, and `looplane scaling`
//! of those that were not, each as a process whose figures are read from the file that it writes.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::sweep::child::Child;
use crate::sweep::figures::{Device, Traffic};
use crate::sweep::predict::{MOST_STREAMS, Scaling};

/// Steps of each batch: on CPUs, and on a GPU, where they are a launch.
const STEPS: [u32; 2] = [16, 64];
/// Batches that the scaling model is fitted on: more steps than it has costs, on one size and two.
const FITTED_BATCHES: [u32; 4] = [1, 2, 4, MOST_STREAMS];
/// Most sequences that the bench decodes, as many as servers do at a time unless told otherwise.
const MOST_SEQUENCES: u32 = 64;

/// Where this program runs its own other commands.
#[derive(Debug, Clone)]
pub struct Commands {
    pub looplane: PathBuf,
    pub folder: PathBuf,
    pub model: PathBuf,
    pub device: Device,
    /// Compute threads of each worker, on CPUs.
    pub threads: Option<u32>,
}

/// What `looplane bench --json` wrote, as far as it is looked at.
#[derive(Debug, Deserialize)]
pub struct Bench {
    pub processor: Option<String>,
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
    mean_context: f64,
    weight_bytes: f64,
    kv_bytes: f64,
}

impl Bench {
    /// What a step reads; none where no step was measured.
    pub fn traffic(&self) -> Option<Traffic> {
        let widest = self.batches.iter().max_by_key(|of| of.batch)?;
        Some(Traffic {
            weight_bytes: widest.weight_bytes,
            position_bytes: widest.kv_bytes / (f64::from(widest.batch) * widest.mean_context),
            read_gb_s: self.read.best_gb_s,
        })
    }
}

impl Commands {
    /// The file with the bench's figures of a size.
    pub fn bench_file(&self, tp: u32) -> PathBuf {
        self.folder.join(format!("bench-tp{tp}.json"))
    }

    /// Measures steps of a group of `tp`, of as many sequences as `streams` says, at about `context` positions.
    ///
    /// # Errors
    /// The bench failed, or `stop` was cancelled.
    pub async fn bench(
        &self,
        tp: u32,
        streams: impl Iterator<Item = u32>,
        context: f64,
        stop: &CancellationToken,
    ) -> anyhow::Result<Bench> {
        let on_gpu = self.device == Device::Cuda;
        let mut batches: Vec<u32> = streams.filter(|streams| *streams <= MOST_SEQUENCES).collect();
        batches.extend(if on_gpu { &FITTED_BATCHES[..] } else { &[1] });
        batches.sort_unstable();
        batches.dedup();
        let mut options = vec![
            ("--model", self.model.clone().into_os_string()),
            ("--device", self.device.name().into()),
            ("--tp", tp.to_string().into()),
            ("--batch", list(&batches).into()),
            ("--context", format!("{:.0}", context.max(1.0)).into()),
            ("--steps", STEPS[usize::from(on_gpu)].to_string().into()),
        ];
        options.extend(self.threads.map(|threads| ("--threads", threads.to_string().into())));
        self.run("bench", &self.bench_file(tp), &[], options, stop).await
    }

    /// Predicts steps of groups from what the bench measured of the sizes `measured`.
    ///
    /// # Errors
    /// Nothing can be predicted, or `stop` was cancelled.
    pub async fn scaling(
        &self,
        measured: &[u32],
        streams: &[u32],
        context: f64,
        stop: &CancellationToken,
    ) -> anyhow::Result<Scaling> {
        let figures: Vec<OsString> = measured.iter().map(|tp| self.bench_file(*tp).into_os_string()).collect();
        let options = vec![
            ("--model", self.model.clone().into_os_string()),
            ("--batch", list(streams).into()),
            ("--context", format!("{:.0}", context.max(1.0)).into()),
        ];
        self.run("scaling", &self.folder.join("scaling.json"), &figures, options, stop).await
    }

    /// Runs `command` and reads the figures that it writes to `file`, beside which its log is kept.
    async fn run<T: DeserializeOwned>(
        &self,
        command: &str,
        file: &Path,
        inputs: &[OsString],
        options: Vec<(&'static str, OsString)>,
        stop: &CancellationToken,
    ) -> anyhow::Result<T> {
        let mut arguments = vec![OsString::from(command)];
        arguments.extend(inputs.iter().cloned());
        let options = options.into_iter().chain([("--json", file.into())]);
        arguments.extend(options.flat_map(|(option, value)| [option.into(), value]));
        let name = format!("looplane {command}");
        Child::start(name, &self.looplane, arguments, &file.with_extension("log"))?.finish(stop).await?;
        let figures = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_slice(&figures)
            .with_context(|| format!("{} does not hold the figures that it should", file.display()))
    }
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
