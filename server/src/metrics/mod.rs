//! What operators are told: counters that the engine and the front end move, and `/metrics` reads.
//!
//! `names` has every name, `snapshot` the figures as values. The engine never waits here: what it moves are relaxed
//! atomics, which a scrape reads as they are, so that figures of one scrape may be a step apart. The front end looks a
//! counter up by its labels, once an answer, under a lock that others hold as briefly: to look one up, to add a new
//! label, or to write a scrape.

mod engine;
mod front;
mod histogram;
pub mod names;
mod ranks;
mod series;
mod snapshot;

pub use engine::{Ended, EngineMetrics, StepRun};
pub use front::{FrontMetrics, Spans};
pub use histogram::{Bounds, Histogram};
pub use ranks::{Rank, Ranks};
pub use series::Engines;
pub use snapshot::{RankSnapshot, Snapshot, StepSnapshot, Times};
