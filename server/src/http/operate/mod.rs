//! What tells of the server, and changes how it runs.

pub(super) mod info;
pub(super) mod machine;
pub(super) mod metrics;
pub(super) mod openapi;
pub(super) mod page;
pub(super) mod replicas;

// What the rooms of `http` have in common.
use super::*;
