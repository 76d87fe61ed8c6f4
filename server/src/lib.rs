//! Looplane's front end.
#![forbid(unsafe_code)]

pub mod engine;
pub mod generate;
pub mod request;
pub mod text;
