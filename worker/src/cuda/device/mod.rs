//! The GPU itself: the driver's handles, memory, and the cores that are near it.

pub(super) mod gpu;
pub(super) mod memory;
pub(super) mod numa;
