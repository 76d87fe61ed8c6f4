//! What a benchmark notes: when warps and phases were where, and what memory gives at most.

pub(super) mod exchange;
pub(super) mod gauge;
pub(super) mod phase;
pub(super) mod read_limit;
pub(super) mod roles;
pub(super) mod trace;
