//! What more sockets buy: the same loads on servers of several layouts, as one report.

mod bench;
mod child;
mod figures;
mod layout;
mod page;
pub(crate) mod plan;
mod predict;
pub(crate) mod run;
mod table;

pub use figures::Sweep;
pub use page::page;
pub use plan::Machine;
pub use predict::{Scaling, predict};
