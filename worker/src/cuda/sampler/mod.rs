//! The sampler, the host's side of `kernels/sampler.cu`: it draws tokens where a row wants more than the largest logit.

pub(super) mod draw;
pub(super) mod kernel;
pub(super) mod launch;
