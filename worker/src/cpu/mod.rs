//! The looped decoder on a CPU socket: a team of threads that streams packed weights, and a fabric of shared memory to
//! the other ranks.
//!
//! [`load`] packs the shard and takes all memory; [`CpuDecoder`] then runs plans. The loop is [`looped_decoder`]; the
//! arithmetic is in [`kernels`] and [`crate::rope`], the machinery in [`team`] and [`fabric`].

mod ahead;
mod budget;
mod expansions;
mod fabric;
mod inputs;
mod kernels;
mod load;
mod looped_decoder;
mod memory;
mod phases;
mod read_bandwidth;
mod team;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod tolerance;
mod weights;

pub use budget::OVERHEAD_BYTES;
pub use kernels::isa::{ISA_VARIABLE, Isa, IsaError};
pub use load::{CpuDecoder, Options, PIN_VARIABLE, load, load_with};
pub use read_bandwidth::{ReadBandwidth, ReadError};
