//! Looplane's front end: requests in over HTTP and gRPC, sequences out to the engine, text back.
//!
//! `http` and `grpc` read and write, `upload` bounds what they read, `request` says what is valid, `text` knows the
//! model's tokenizer and template, `reply` finds tool calls and thinking in what it writes, `frontend` joins them to
//! the [`engine`] seam, `trace` exports what became of a request, `listener` runs them on a socket. On the other side
//! of the seam `group` feeds the workers of a replica with what `sched` decides, `fleet` passes sequences on to hosts that
//! have joined, and `router` stands in front of several replicas.
#![forbid(unsafe_code)]

pub mod config;
pub mod drafts;
pub mod engine;
pub mod fleet;
pub mod frontend;
mod give_way;
pub mod group;
pub mod grpc;
pub mod http;
pub mod keys;
pub mod listener;
pub mod metrics;
pub mod pem;
pub mod reload;
pub mod reply;
pub mod request;
pub mod router;
pub mod sched;
pub mod text;
pub mod trace;
pub mod upload;
