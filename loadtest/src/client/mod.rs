//! One request over HTTP or gRPC, from its bytes to its record.

pub mod answer;
pub mod grpc;
pub mod http;
pub mod metrics;
pub mod record;
pub mod sse;
pub mod target;
