//! Records counted into figures.

pub mod read_limit;
pub mod sample;
pub mod server_side;
pub mod slo;
pub mod spread;
pub mod tally;
pub mod timeline;
