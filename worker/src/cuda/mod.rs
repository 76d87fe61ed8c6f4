//! The looped decoder on a GPU (Hopper): the host's side of the kernel in `worker/kernels`.
//!
//! [`load`] opens the GPU, compiles the kernel for the model ([`compile`]), packs the weights ([`layout`], [`pack`],
//! [`weights`], [`heads`]) and takes all memory; [`CudaDecoder`] then turns plans into launches ([`looped_decoder`], [`engine`]). The
//! driver is loaded when it is first asked for, so that the same binary runs on machines that have none.

mod blocks;
mod budget;
mod cache;
mod compile;
mod deal;
mod device;
mod engine;
mod error;
mod exchange;
mod fabric;
mod gauge;
mod heads;
mod kernel;
mod launch;
mod layout;
mod load;
mod looped_decoder;
mod mailbox;
mod memory;
mod numa;
mod pack;
mod panel;
mod passes;
mod pools;
mod random;
mod read_limit;
mod roles;
mod sampler;
#[cfg(test)]
mod tests;
mod trace;
mod unlooped;
mod variants;
mod weights;

pub(crate) use blocks::best_blocks;
pub use cache::CACHE_VARIABLE;
pub use compile::{Compiler, NVRTC_VARIABLE};
pub use device::{Facts, probe};
pub use error::CudaError;
pub use exchange::{Exchange, Exchanges, Spread};
pub use fabric::survey;
pub use gauge::{Gauge, Noted};
pub(crate) use layout::Layout;
pub use load::{CudaDecoder, Options, check, load, load_with};
pub use random::NormalSource;
pub use read_limit::ReadLimit;
pub use trace::{Phase, PhaseTime, Trace};
pub use variants::{LoopMode, check_shape};
