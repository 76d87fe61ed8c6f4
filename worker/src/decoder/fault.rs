//! Why a model is not loaded, and why a worker ends before its time.

use crate::batch::PlanFault;
use crate::cuda::error::CudaError;
use crate::model::checkpoint::CheckpointError;
use crate::model::config::ConfigError;
use crate::plan::PlanError;

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// config.json is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The weights are refused.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The model cannot be cut for this group.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The request contradicts itself.
    #[error("load: {0}")]
    Request(String),
    /// It does not fit into memory.
    #[error("{what} need {needed} bytes, but {available}")]
    TooLarge {
        /// What does not fit.
        what: &'static str,
        /// Bytes it needs.
        needed: u64,
        /// What there is instead, in words.
        available: String,
    },
    /// The GPU cannot be used, or not for this model.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The machine refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Why a worker ends before its time: reported once, then the process exits with [`crate::EXIT_FAULT`].
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The model was not loaded.
    #[error(transparent)]
    Load(LoadError),
    /// The socket that the server speaks through failed.
    #[error("the worker's socket: {0}")]
    Socket(String),
    /// The server sent a plan that breaks a rule.
    #[error(transparent)]
    Plan(#[from] PlanFault),
    /// The stream of plans broke.
    #[error("the stream of plans broke: {0}")]
    PlanStream(String),
    /// Nobody reads outcomes any more.
    #[error("the server stopped reading outcomes")]
    ServerGone,
    /// The exchange memory of the group could not be mapped.
    #[error("rank {rank}: joining the group: {problem}")]
    Join {
        /// This rank.
        rank: usize,
        /// What failed, for which handle.
        problem: String,
    },
    /// Another rank did not arrive in time.
    #[error(
        "rank {rank} waited {waited_ms} ms for rank {peer} in step {step}, {phase}: expected {expected}, last seen \
         {seen}"
    )]
    WaitLimit {
        /// This rank.
        rank: usize,
        /// The rank waited for.
        peer: usize,
        /// Step in the life of the worker.
        step: u64,
        /// What was being exchanged, such as "layer 3 attention sum".
        phase: String,
        /// The epoch waited for.
        expected: u64,
        /// The epoch last seen.
        seen: u64,
        /// How long.
        waited_ms: u64,
    },
    /// A call of the GPU's driver failed.
    #[error("rank {rank}, step {step}: {error}")]
    Cuda {
        /// This rank.
        rank: usize,
        /// Step in the life of the worker.
        step: u64,
        /// What failed.
        error: CudaError,
    },
    /// A thread of the GPU's kernel waited past its limit.
    #[error(
        "rank {rank}, step {step}: {}block {block}, thread {thread} of the kernel waited too long for {site}: \
         expected {expected}, last seen {seen}",
        missing.map_or(String::new(), |missing| format!("rank {missing} did not speak; "))
    )]
    KernelWait {
        /// This rank.
        rank: usize,
        /// Step in the life of the worker, or one soon after it.
        step: u64,
        /// The rank that was waited for, where it was one: look for what its worker logged.
        missing: Option<u32>,
        /// Thread block.
        block: u32,
        /// Thread in it.
        thread: u32,
        /// What was waited for, with the number that the kernel has for it.
        site: String,
        /// Tag or parity waited for.
        expected: u32,
        /// What was there.
        seen: u32,
    },
    /// The GPU's kernel neither delivers nor fails.
    #[error("rank {rank}, step {step}: the GPU delivered nothing for {waited_ms} ms")]
    KernelTimeout {
        /// This rank.
        rank: usize,
        /// Step in the life of the worker.
        step: u64,
        /// How long.
        waited_ms: u64,
    },
    /// An invariant of the backend broke (a panic in one of its threads).
    #[error("rank {rank}: the decoder broke: {problem}")]
    Broken {
        /// This rank.
        rank: usize,
        /// The panic's message.
        problem: String,
    },
}
