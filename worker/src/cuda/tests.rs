//! What needs more than one module: the kernel's source, the ranks of a group, and the loop over a model of its own.

mod compiles;
mod driver;
mod fabric;
mod fed;
mod formats;
mod full_size;
mod gpu;
mod matrix;
mod matrix_passes;
mod mirrors;
mod page_model;
mod plans;
mod ranks;
mod sass;
mod shapes;
mod shards;
mod wide;
