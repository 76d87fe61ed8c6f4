//! What needs more than one module: the kernel's source, and the loop over a model of its own.

mod compiles;
mod fabric;
mod full_size;
mod gpu;
mod plans;
mod wide;
