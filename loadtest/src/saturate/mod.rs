//! The rate from which on a server falls behind.

pub mod page;
pub mod search;
pub mod step;
