//! Options of what computes: the model, its groups of workers and their bounds. `serve` has them, and hosts that join.

use std::{
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use clap::{Args, ValueEnum};
use looplane_proto::worker::v1::load_request;
use serde::Deserialize;

use super::{error::ConfigError, model};
use crate::{
    drafts::MOST_DRAFTS,
    group::{GroupConfig, Timeouts},
    router::MAX_REPLICAS,
    sched::Limits,
};

/// What computes, and its bounds.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Model directory as Hugging Face lays it out, or the name (ORG/NAME) of one that is in Hugging Face's cache on
    /// this machine [default: the demo model that comes with Looplane]
    #[arg(long, value_name = "DIR", env = "LOOPLANE_MODEL")]
    pub model: Option<PathBuf>,

    /// Tensor parallelism: worker processes that share the model (1, 2, 4, 8 or 16) [default: 1 on a GPU; on CPUs 2, or
    /// 1 where the model's heads cannot be shared by 2]
    #[arg(long, value_name = "N", env = "LOOPLANE_TP")]
    pub tp: Option<u32>,

    /// Where the workers compute
    #[arg(long, value_enum, default_value_t = Device::Auto, env = "LOOPLANE_DEVICE")]
    pub device: Device,

    /// Quantise the matrices of the layers while a checkpoint of more bits is loaded: fp8 halves what a step reads,
    /// int4 quarters it, at a cost in quality that depends on the model. A checkpoint that is stored in fewer bits
    /// needs no option
    #[arg(long, value_enum, value_name = "FORMAT", env = "LOOPLANE_QUANTIZATION")]
    pub quantization: Option<Quantization>,

    /// How a GPU runs the phases of a step: off is there to be measured against; the tokens are the same
    #[arg(long = "loop", value_enum, value_name = "MODE", default_value_t = LoopMode::On, env = "LOOPLANE_LOOP")]
    pub loop_mode: LoopMode,

    /// Groups of --tp workers, each of which has the whole model: a request is computed by the one that is done first
    #[arg(long, value_name = "N", default_value_t = 1, env = "LOOPLANE_REPLICAS")]
    pub replicas: u32,

    /// Compute threads of each worker [default: the machine's cores divided by --tp and --replicas]
    #[arg(long, value_name = "N", env = "LOOPLANE_THREADS")]
    pub threads: Option<u32>,

    /// Sequences computed at one time [default: 512 on a GPU, or as many as its memory allows; 64 on CPUs; at most
    /// --max-batch-tokens]
    #[arg(long, value_name = "N", env = "LOOPLANE_MAX_SLOTS")]
    pub max_slots: Option<u32>,

    /// Most rows (prompt tokens and decoding sequences) of one step; at least --max-slots [default: 2048 on a GPU, 4096
    /// on several, 512 on CPUs, and beside decoding sequences only as many as step times measured at start show to be
    /// worth it]
    #[arg(long, value_name = "N", env = "LOOPLANE_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: Option<u32>,

    /// Bound on the time between two tokens, in milliseconds: beside decoding sequences, a step takes only so many
    /// prompt tokens (at least 32, or 64 rows in all) as keep the time that is expected of it below. Prompts take
    /// longer for it [default: off]
    #[arg(long, value_name = "MS", env = "LOOPLANE_ITL_TARGET_MS")]
    pub itl_target_ms: Option<u32>,

    /// Steps that the workers run on their own before they need a new plan
    #[arg(long, value_name = "N", default_value_t = 16, env = "LOOPLANE_STEPS_PER_PLAN")]
    pub steps_per_plan: u32,

    /// Pages of the KV cache; 0: as many as --max-slots full contexts need, within --kv-memory-mib
    #[arg(long, value_name = "N", default_value_t = 0, env = "LOOPLANE_KV_PAGES")]
    pub kv_pages: u32,

    /// Bound on the KV cache of each worker in MiB, where --kv-pages is 0 [default: 4096 on CPUs, what is left on a
    /// GPU]
    #[arg(long, value_name = "MIB", env = "LOOPLANE_KV_MEMORY_MIB")]
    pub kv_memory_mib: Option<u32>,

    /// Whether prompts that begin as others did take over their KV pages: the tokens are the same
    #[arg(long, value_enum, value_name = "MODE", default_value_t = PrefixCache::On, env = "LOOPLANE_PREFIX_CACHE")]
    pub prefix_cache: PrefixCache,

    /// How tokens are drafted, as JSON with vLLM's keys: {"method": "suffix", "num_speculative_tokens": 7}. Drafts are
    /// what followed the same tokens earlier in the sequence or in answers before; the tokens are the same, several
    /// may come out of a step. The method "ngram" is the same here. "suffix_decoding_corpus_tokens": tokens of finished
    /// answers that are kept to draft from, too, for requests of the same cache_salt. num_speculative_tokens 0: no
    /// drafts
    #[arg(long, value_name = "JSON", env = "LOOPLANE_SPECULATIVE_CONFIG")]
    pub speculative_config: Option<String>,

    /// Bound on prompt and output of one sequence in tokens; 0: the model's own
    #[arg(long, value_name = "N", default_value_t = 0, env = "LOOPLANE_MAX_CONTEXT")]
    pub max_context: u32,

    /// Sequences that may wait for a place; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1024, env = "LOOPLANE_MAX_QUEUED_REQUESTS")]
    pub max_queued_requests: u64,

    /// Prompt tokens that may wait for a place; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1 << 20, env = "LOOPLANE_MAX_QUEUED_TOKENS")]
    pub max_queued_tokens: u64,

    /// A worker that reports nothing for so long counts as hung, and all are started again, if that is also several
    /// times what steps have been taking. A machine that stands still for seconds at a time may need more
    #[arg(long, value_name = "S", default_value_t = 3, env = "LOOPLANE_HANG_LIMIT_SECONDS")]
    pub hang_limit_seconds: u32,

    /// Longest that any step may take, the first one included. A big model on few cores may need more, or a lower
    /// --max-batch-tokens
    #[arg(long, value_name = "S", default_value_t = 120, env = "LOOPLANE_STEP_LIMIT_SECONDS")]
    pub step_limit_seconds: u32,

    /// Time for running requests to end after SIGTERM or Ctrl-C; a second signal ends them at once
    #[arg(long, value_name = "S", default_value_t = 30, env = "LOOPLANE_DRAIN_SECONDS")]
    pub drain_seconds: u32,

    /// Format of all that the server says: lines of text, or a JSON object a line. What is said is filtered by
    /// LOOPLANE_LOG, or else RUST_LOG (such as `warn` or `info,looplane_server=debug`)
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text, env = "LOOPLANE_LOG_FORMAT")]
    pub log: LogFormat,
}

/// How what the server says is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Time, level, place and words.
    Text,
    /// An object a line.
    Json,
}

/// Where the workers compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The best that this machine has.
    Auto,
    /// CPU sockets.
    Cpu,
    /// GPUs.
    Cuda,
}

impl From<Device> for load_request::Device {
    fn from(device: Device) -> Self {
        match device {
            Device::Auto => Self::Auto,
            Device::Cpu => Self::Cpu,
            Device::Cuda => Self::Cuda,
        }
    }
}

/// What matrices of layers become while they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Quantization {
    /// 8 bits (E4M3), with a scale a row.
    Fp8,
    /// 4 bits, with a scale for each 128 columns of a row.
    Int4,
}

/// How a GPU runs the phases of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoopMode {
    /// One launch walks all phases of many steps.
    On,
    /// A launch for each phase of each layer, in a CUDA graph, for passes of up to 8 rows; wider ones have none and
    /// keep their loop.
    Off,
}

/// Whether prompts that begin as others did take over their KV pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefixCache {
    /// Pages that no sequence holds are kept until the memory is needed.
    On,
    /// Every prompt is computed whole.
    Off,
}

/// Tokens that are drafted for a sequence in a step.
const DRAFTS: u32 = 7;
/// Tokens of finished answers that are drafted from, and the most.
const CORPUS_TOKENS: u32 = 1 << 20;
const MOST_CORPUS_TOKENS: u32 = 1 << 26;

/// `--speculative-config`. Both methods look for what followed the same tokens, and take the longest match.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpeculativeConfig {
    #[expect(dead_code, reason = "there is no other drafter")]
    method: SpeculativeMethod,
    num_speculative_tokens: u32,
    #[serde(default = "corpus_tokens")]
    suffix_decoding_corpus_tokens: u32,
}

fn corpus_tokens() -> u32 {
    CORPUS_TOKENS
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SpeculativeMethod {
    Suffix,
    Ngram,
}

/// Checked [`EngineArgs`].
pub(super) struct Engine {
    pub(super) group: GroupConfig,
    /// The model's name in requests where none is given.
    pub(super) model_id: String,
    /// Most tokens that are drafted for a sequence in a step.
    pub(super) drafts: u32,
}

impl EngineArgs {
    /// Checks the options. There may be as few as `least_replicas`. `group_size` says by how many workers the model of
    /// a directory is computed where `--tp` does not.
    ///
    /// # Errors
    /// Names the option to change.
    pub(super) fn check(
        self,
        least_replicas: u32,
        group_size: impl FnOnce(&Path, Device) -> u32,
    ) -> Result<Engine, ConfigError> {
        let value = ConfigError::value;
        let model = model::find(self.model)?;
        let tp = self.tp.unwrap_or_else(|| group_size(&model.dir, self.device));
        if !matches!(tp, 1 | 2 | 4 | 8 | 16) {
            return value("--tp", &tp, "1, 2, 4, 8 or 16");
        }
        let cores = thread::available_parallelism().map_or(1, |count| count.get() as u32);
        if !(least_replicas..=MAX_REPLICAS).contains(&self.replicas) {
            let without_hosts = if least_replicas > 0 { "; 0 only where hosts may join (--join-listen)" } else { "" };
            return value("--replicas", &self.replicas, &format!("{least_replicas} to {MAX_REPLICAS}{without_hosts}"));
        }
        let threads = self.threads.unwrap_or((cores / tp / self.replicas.max(1)).max(1));
        for (option, count) in [
            ("--threads", u64::from(threads)),
            ("--max-slots", self.max_slots.unwrap_or(1).into()),
            ("--max-batch-tokens", self.max_batch_tokens.unwrap_or(1).into()),
            ("--itl-target-ms", self.itl_target_ms.unwrap_or(1).into()),
            ("--steps-per-plan", self.steps_per_plan.into()),
            ("--kv-memory-mib", self.kv_memory_mib.unwrap_or(1).into()),
            ("--max-queued-requests", self.max_queued_requests),
            ("--max-queued-tokens", self.max_queued_tokens),
            ("--hang-limit-seconds", self.hang_limit_seconds.into()),
            ("--step-limit-seconds", self.step_limit_seconds.into()),
        ] {
            if count == 0 {
                return value(option, &0, "at least 1");
            }
        }
        if let (Some(rows), Some(slots)) = (self.max_batch_tokens, self.max_slots)
            && rows < slots
        {
            let rule = format!("at least --max-slots, which is {slots}: raise the one or lower the other");
            return value("--max-batch-tokens", &rows, &rule);
        }
        let (drafts, corpus) = match &self.speculative_config {
            None => (DRAFTS, CORPUS_TOKENS),
            Some(json) => match serde_json::from_str(json) {
                Ok(SpeculativeConfig {
                    num_speculative_tokens: drafts, suffix_decoding_corpus_tokens: corpus, ..
                }) if drafts <= MOST_DRAFTS && corpus <= MOST_CORPUS_TOKENS => {
                    (drafts, if drafts == 0 { 0 } else { corpus })
                }
                _ => {
                    let rule = format!(
                        "{{\"method\": \"suffix\" or \"ngram\", \"num_speculative_tokens\": N, \
                         \"suffix_decoding_corpus_tokens\": M}} with N of at most {MOST_DRAFTS} and M, which may be \
                         left out, of at most {MOST_CORPUS_TOKENS}"
                    );
                    return value("--speculative-config", json, &rule);
                }
            },
        };
        let hang_limit = Duration::from_secs(self.hang_limit_seconds.into());
        let group = GroupConfig {
            replicas: self.replicas,
            threads,
            limits: Limits {
                max_slots: self.max_slots.unwrap_or(0),
                max_batch_tokens: self.max_batch_tokens.unwrap_or(0),
                steps_per_plan: self.steps_per_plan,
                max_waiting_requests: self.max_queued_requests,
                max_waiting_tokens: self.max_queued_tokens,
                drafts,
                prefix_cache: self.prefix_cache == PrefixCache::On,
                ..Limits::default()
            },
            kv_pages: self.kv_pages,
            kv_bytes_limit: u64::from(self.kv_memory_mib.unwrap_or(0)) << 20,
            device: self.device.into(),
            quantization: match self.quantization {
                None => load_request::Quantization::None,
                Some(Quantization::Fp8) => load_request::Quantization::Fp8,
                Some(Quantization::Int4) => load_request::Quantization::Int4,
            },
            unlooped: self.loop_mode == LoopMode::Off,
            draft_corpus_tokens: corpus,
            max_context: self.max_context,
            itl_target: self.itl_target_ms.map(|ms| Duration::from_millis(ms.into())),
            timeouts: Timeouts {
                step_floor: hang_limit,
                pong: Timeouts::default().pong.max(hang_limit),
                answer: Timeouts::default().answer.max(hang_limit / 2),
                step: Duration::from_secs(self.step_limit_seconds.into()),
                drain: Duration::from_secs(self.drain_seconds.into()),
                ..Timeouts::default()
            },
            ..GroupConfig::new(model.dir, tp)
        };
        Ok(Engine { group, model_id: model.id, drafts })
    }
}
