//! What goes wrong beside a load, and what came of it.

pub mod aftermath;
pub mod args;
pub mod half_open;
pub mod kill;
pub mod report;
pub mod run;
#[cfg(test)]
mod tests;
