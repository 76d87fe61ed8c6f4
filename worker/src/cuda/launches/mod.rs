//! Launches and the loop: plans become launches, in memory that was taken at load.

pub(super) mod budget;
pub(super) mod engine;
pub(super) mod looped_decoder;
pub(super) mod mailbox;
pub(super) mod passes;
pub(super) mod pools;
