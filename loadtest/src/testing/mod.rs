//! What tests of several rooms share.

pub mod markup;
pub mod records;
pub mod reports;
pub mod runs;
pub mod samples;
