//! The wire protocols, generated from `proto/`: no logic lives here. Rooms convert at their own edge.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::doc_lazy_continuation, clippy::doc_overindented_list_items)]

/// `looplane.inference.v1`: the public gRPC interface.
pub mod inference {
    pub mod v1 {
        tonic::include_proto!("looplane.inference.v1");
    }
}

/// `looplane.worker.v1`: server to worker, over a Unix socket.
pub mod worker {
    pub mod v1 {
        tonic::include_proto!("looplane.worker.v1");
    }
}

/// `looplane.fleet.v1`: a host that joins to a front end, over mutual TLS.
pub mod fleet {
    // Messages are few and short-lived: a size for all is no loss.
    #[allow(clippy::large_enum_variant)]
    pub mod v1 {
        tonic::include_proto!("looplane.fleet.v1");
    }
}

/// The compiled descriptors of all packages, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
