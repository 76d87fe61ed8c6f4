//! What operators are told: counters that the engine and the front end move, and `/metrics` reads.
//!
//! Names are vLLM's where the same thing is meant, with `looplane_` in place of `vllm:`, so that its dashboards and alerts
//! need one substitution. Nothing here waits: counters, gauges and histograms are relaxed atomics, which a scrape reads as
//! they are, so that figures of one scrape may be a step apart.

mod engine;
mod front;
mod histogram;

pub use engine::{Ended, EngineMetrics, StepRun};
pub use front::FrontMetrics;
pub use histogram::{Bounds, Histogram};
