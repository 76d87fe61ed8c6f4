//! One measurement: its options, and its course from them to the report.

pub mod args;
pub mod run;
