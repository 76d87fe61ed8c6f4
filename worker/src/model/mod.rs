//! What a checkpoint is: `config.json` checked into dimensions, and safetensors files read by slice (or weights made up
//! from a seed).

pub mod checkpoint;
pub mod config;
pub mod conversion;
pub mod format;
pub mod source;
pub mod storage;
pub mod tensors;

pub use checkpoint::Checkpoint;
pub use config::ModelConfig;
pub use format::WeightFormat;
pub use storage::Storage;
pub use tensors::{LayerTensor, Tensor};
