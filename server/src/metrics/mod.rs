//! What operators are told: counters that the engine and the front end move, and `/metrics` reads.
//!
//! Names are vLLM's where the same thing is meant, with `looplane_` in place of `vllm:`, so that its dashboards and
//! alerts need one substitution. The engine never waits here: what it moves are relaxed atomics, which a scrape reads
//! as they are, so that figures of one scrape may be a step apart. The front end looks a counter up by its labels, once
//! an answer, under a lock that others hold as briefly: to look one up, to add a new label, or to write a scrape.

mod engine;
mod front;
mod histogram;

pub use engine::{Ended, EngineMetrics, StepRun};
pub use front::FrontMetrics;
pub use histogram::{Bounds, Histogram};
