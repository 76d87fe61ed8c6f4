//! What more sockets buy: the same loads on servers of several sizes, as one report.

pub mod bench;
pub mod child;
pub mod figures;
mod page;
pub mod plan;
mod predict;
pub mod run;
mod table;

pub use figures::Sweep;
pub use page::page;
pub use plan::Machine;
pub use predict::{Scaling, predict};
