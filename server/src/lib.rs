//! Looplane's front end.
#![forbid(unsafe_code)]

pub mod engine;
pub mod group;
pub mod sched;
