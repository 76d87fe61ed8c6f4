//! Statistics in fixed memory.

pub mod bootstrap;
pub mod distribution;
pub mod line;
