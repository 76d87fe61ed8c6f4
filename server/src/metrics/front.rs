//! What the front end counts: answers by status, errors by code.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::names;

/// Everything that the front end counts.
#[derive(Debug, Clone, Default)]
pub struct FrontMetrics {
    answers: Family<Answer, Counter>,
    errors: Family<Code, Counter>,
    connections: Gauge,
    /// Of traces.
    pub spans: Spans,
}

/// Spans by what became of them.
#[derive(Debug, Clone, Default)]
pub struct Spans(Family<Became, Counter>);

impl Spans {
    /// A collector took so many.
    pub fn exported(&self, spans: usize) {
        self.count("exported", spans);
    }

    /// So many are lost.
    pub fn dropped(&self, spans: usize) {
        self.count("dropped", spans);
    }

    fn count(&self, became: &'static str, spans: usize) {
        self.0.get_or_create(&Became { became }).inc_by(spans as u64);
    }
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

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Became {
    became: &'static str,
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
        names::ANSWERS.register(registry, self.answers.clone());
        names::ERRORS.register(registry, self.errors.clone());
        // Present from the start: a rate needs a value before the first event.
        self.spans.exported(0);
        self.spans.dropped(0);
        names::SPANS.register(registry, self.spans.0.clone());
        names::CONNECTIONS.register(registry, self.connections.clone());
    }
}
