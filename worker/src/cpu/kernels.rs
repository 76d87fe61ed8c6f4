//! The arithmetic of a CPU socket, by instruction sets: what a unit of work computes, and in which order it adds.

pub(super) mod attention;
pub(super) mod domain;
pub(super) mod isa;
mod lanes;
pub(super) mod norm;
pub(super) mod product;

#[cfg(test)]
pub(super) use lanes::INT4_RAISED;
pub(super) use lanes::{LANES, LINE, int4_place};
