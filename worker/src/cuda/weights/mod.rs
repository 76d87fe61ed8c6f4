//! What is packed and loaded: which weight lies where in the stream of a rank, and how it comes to the GPU.

pub(super) mod heads;
pub(super) mod layout;
pub(super) mod pack;
pub(super) mod panel;
pub(super) mod random;
pub(super) mod upload;
