//! What the front end counts: answers by status, errors by code.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Everything that the front end counts.
#[derive(Debug, Clone, Default)]
pub struct FrontMetrics {
    answers: Family<Answer, Counter>,
    errors: Family<Code, Counter>,
    connections: Gauge,
}

/// A connection, counted until it is dropped.
#[derive(Debug)]
pub struct Connected(Gauge);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
    /// The pattern that matched, never the path itself: whoever scans for paths must not be able to add labels.
    handler: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: &'static str,
}

impl FrontMetrics {
    /// Counts the head of an answer; `handler` is one of the server's own patterns.
    pub fn answered(&self, handler: &str, status: u16) {
        self.answers.get_or_create(&Answer { handler: handler.to_owned(), status }).inc();
    }

    /// Counts a connection.
    pub fn connected(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }

    /// Counts an error by the stable code that its client is told.
    pub fn failed(&self, code: &'static str) {
        self.errors.get_or_create(&Code { code }).inc();
    }

    /// Gives everything its name.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Answers by route and HTTP status (of gRPC: 200, whatever the call ended with)";
        registry.register("http_requests", help, self.answers.clone());
        let help = "Requests refused or given up, by the code that the client is told (of gRPC: those that reached a \
                    method of the inference service, had no known key, or named a service that there is not)";
        registry.register("request_errors", help, self.errors.clone());
        registry.register("connections", "Connections that are open now", self.connections.clone());
    }
}
