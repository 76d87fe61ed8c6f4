//! The looped decoder on a GPU (Hopper): the host's side of the kernel in `worker/kernels`.
//!
//! [`load`] opens the GPU ([`device`]), compiles the kernels for the model ([`kernels`], [`sampler`]), packs the
//! weights ([`weights`]) and takes all memory; [`CudaDecoder`] then turns plans into launches ([`launches`]). Ranks of
//! a group are tied together by [`fabric`]; a benchmark reads [`notes`]. The driver is loaded when it is first asked
//! for, so that the same binary runs on machines that have none.
//!
//! Rooms import downwards only: `load`, `launches`, `notes` and `sampler`, `kernels`, `weights` and `fabric`, `device`,
//! `error`.

mod device;
pub(crate) mod error;
mod fabric;
mod kernels;
mod launches;
mod load;
mod notes;
mod sampler;
#[cfg(test)]
mod tests;
mod weights;

pub use device::gpu::{Facts, probe};
pub use error::CudaError;
pub use fabric::survey;
pub(crate) use kernels::blocks::best_blocks;
pub use kernels::cache::CACHE_VARIABLE;
pub use kernels::compile::{Compiler, NVRTC_VARIABLE};
pub use kernels::variants::{LoopMode, check_shape};
pub use load::{CudaDecoder, Options, check, load, load_with};
pub use notes::exchange::{Exchange, Exchanges, Spread};
pub use notes::gauge::{Gauge, Noted};
pub use notes::phase::{Phase, PhaseTime};
pub use notes::read_limit::ReadLimit;
pub use notes::trace::Trace;
pub(crate) use weights::heads::for_kernels;
pub(crate) use weights::layout::Layout;
pub use weights::random::NormalSource;
