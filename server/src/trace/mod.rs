//! Traces of requests: whose they are (W3C Trace Context), what they say (spans), and how they leave (OTLP over gRPC).
//!
//! A request's spans are made at its end, of what its record knows: while tokens come nothing is done for them.

mod context;
mod export;
mod spans;

pub use context::{Context, RESPONSE};
pub use export::{Exporting, Otlp, OtlpError, Traces};
pub use spans::{Phases, Request};
