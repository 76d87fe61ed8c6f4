//! What is compiled and cached: the kernels of a model, and how one is put into a stream.

pub(super) mod blocks;
pub(super) mod cache;
pub(super) mod compile;
pub(super) mod deal;
pub(super) mod function;
pub(super) mod items;
pub(super) mod kernel;
pub(super) mod launch;
pub(super) mod matrix;
pub(super) mod module;
pub(super) mod sizes;
pub(super) mod sources;
pub(super) mod unlooped;
pub(super) mod variants;
