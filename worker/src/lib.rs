//! One socket's worker: reads its tensor-parallel shard of a checkpoint and runs it in a looped decoder.
//!
//! `model` reads the checkpoint, `plan` says what is cut where and in which order it is summed, `batch` turns the server's
//! plans into the rows of each step, `cpu` runs the loop, `control` speaks worker/v1.
#![deny(unsafe_code)]

pub mod batch;
pub mod cpu;
pub mod decoder;
pub mod model;
pub mod plan;
pub mod sampling;

/// Exit code of a worker that ended with a fault.
pub const EXIT_FAULT: u8 = 70;
