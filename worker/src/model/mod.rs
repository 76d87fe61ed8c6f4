//! What a checkpoint is: `config.json` checked into dimensions, and safetensors files read by slice.

pub mod config;

pub use config::ModelConfig;
