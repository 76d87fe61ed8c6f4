//! Hands spans to a collector, beside the requests: in batches, from a queue with a bound, each within a limit. What
//! does not go through is counted and forgotten; no request waits for it.

use std::{sync::Arc, time::Duration};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTracePartialSuccess, ExportTraceServiceRequest, trace_service_client::TraceServiceClient,
    },
    common::v1::InstrumentationScope,
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span},
};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use uuid::Uuid;

use super::{
    context::Context,
    spans::{Request, text},
};
use crate::metrics::Spans;

/// Requests whose spans wait for the collector; those of further ones are dropped.
const QUEUE_REQUESTS: usize = 1024;
/// Spans that are sent at one time, or a few more.
const BATCH_SPANS: usize = 512;
/// A batch waits so long for more.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// The collector has so long to take a batch.
const EXPORT_LIMIT: Duration = Duration::from_secs(5);
/// What is left at the server's end has so long.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Where traces go, and under what name.
#[derive(Debug, Clone)]
pub struct Otlp {
    endpoint: Endpoint,
    service: String,
}

/// What the address of a collector must be.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// An address.
    #[error("the address of a collector that takes OTLP over gRPC, such as http://127.0.0.1:4317")]
    Address,
    /// Without TLS.
    #[error("an http:// address: TLS is not spoken to a collector, so run one beside the server that passes on")]
    Tls,
}

impl Otlp {
    /// A collector at `endpoint`, and the server's `service.name` there.
    ///
    /// # Errors
    /// No collector can be there.
    pub fn new(endpoint: &str, service: String) -> Result<Self, OtlpError> {
        let parsed = Endpoint::from_shared(endpoint.to_owned()).map_err(|_| OtlpError::Address)?;
        match (parsed.uri().scheme_str(), parsed.uri().host()) {
            (Some("http"), Some(_)) => Ok(Self { endpoint: parsed.connect_timeout(EXPORT_LIMIT), service }),
            (Some("https"), Some(_)) => Err(OtlpError::Tls),
            _ => Err(OtlpError::Address),
        }
    }

    /// Begins to export what becomes of requests for `model`, and counts in `counts`. The second ends it.
    pub fn start(self, model: String, counts: Spans) -> (Traces, Exporting) {
        let (queue, requests) = mpsc::channel(QUEUE_REQUESTS);
        let stop = CancellationToken::new();
        let resource = Resource {
            attributes: vec![
                text("service.name", &self.service),
                text("service.version", env!("CARGO_PKG_VERSION")),
                text("service.instance.id", &Uuid::new_v4().to_string()),
            ],
            ..Resource::default()
        };
        let client = TraceServiceClient::new(self.endpoint.connect_lazy());
        let exporter = Exporter { client, resource, counts: counts.clone(), is_away: false };
        let task = tokio::spawn(exporter.run(requests, stop.clone()));
        (Traces(Arc::new(Queue { queue, counts, model })), Exporting { stop, task })
    }
}

/// Takes the spans of requests. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Traces(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    queue: mpsc::Sender<Vec<Span>>,
    counts: Spans,
    model: String,
}

impl Traces {
    /// Queues the spans of a request that has ended, if there is room.
    pub fn ended(&self, request: &Request<'_>, context: &Context) {
        let spans = request.spans(context, &self.0.model);
        let count = spans.len();
        if self.0.queue.try_send(spans).is_err() {
            self.0.counts.dropped(count);
        }
    }
}

/// The export under way.
#[derive(Debug)]
pub struct Exporting {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Exporting {
    /// Sends what is left, if the collector takes it at once.
    pub async fn finish(mut self) {
        self.stop.cancel();
        if timeout(FLUSH_LIMIT, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::warn!("the last spans were not exported: the collector did not take them within {FLUSH_LIMIT:?}");
        }
    }
}

struct Exporter {
    client: TraceServiceClient<Channel>,
    resource: Resource,
    counts: Spans,
    /// The last batch did not go through.
    is_away: bool,
}

impl Exporter {
    async fn run(mut self, mut requests: mpsc::Receiver<Vec<Span>>, stop: CancellationToken) {
        while let Some(batch) = next_batch(&mut requests, &stop).await {
            self.export(batch).await;
        }
    }

    async fn export(&mut self, spans: Vec<Span>) {
        let count = spans.len();
        let scope = InstrumentationScope { name: "looplane".into(), ..InstrumentationScope::default() };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
        let resource_spans =
            vec![ResourceSpans { resource: Some(self.resource.clone()), scope_spans, ..ResourceSpans::default() }];
        let exported = self.client.export(ExportTraceServiceRequest { resource_spans });
        let why = match timeout(EXPORT_LIMIT, exported).await {
            Ok(Ok(answer)) => {
                let ExportTracePartialSuccess { rejected_spans, error_message } =
                    answer.into_inner().partial_success.unwrap_or_default();
                let rejected = usize::try_from(rejected_spans).unwrap_or(0).min(count);
                self.counts.exported(count - rejected);
                self.counts.dropped(rejected);
                (rejected > 0).then(|| format!("it refuses {rejected} of {count} spans: {error_message}"))
            }
            Ok(Err(status)) => {
                self.counts.dropped(count);
                Some(format!("{:?}: {}", status.code(), status.message()))
            }
            Err(_) => {
                self.counts.dropped(count);
                Some(format!("it did not answer within {EXPORT_LIMIT:?}"))
            }
        };
        // Once for a collector that stays away.
        match (&why, self.is_away) {
            (Some(why), false) => tracing::warn!("spans are dropped, as the collector does not take them: {why}"),
            (None, true) => tracing::info!("the collector takes spans again"),
            _ => {}
        }
        self.is_away = why.is_some();
    }
}

/// What is there within the delay of a batch, and at the end what is left; `None` once nothing is.
async fn next_batch(requests: &mut mpsc::Receiver<Vec<Span>>, stop: &CancellationToken) -> Option<Vec<Span>> {
    let first = tokio::select! {
        first = requests.recv() => first,
        () = stop.cancelled() => {
            requests.close();
            requests.recv().await
        }
    };
    let mut batch = first?;
    let more = async {
        while batch.len() < BATCH_SPANS {
            let Some(spans) = requests.recv().await else { break };
            batch.extend(spans);
        }
    };
    tokio::select! {
        _ = timeout(BATCH_DELAY, more) => {}
        () = stop.cancelled(), if !stop.is_cancelled() => {}
    }
    Some(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_a_collector_is_refused() {
        let new = |endpoint: &str| Otlp::new(endpoint, "looplane".into());
        assert!(new("http://localhost:4317").is_ok() && new("http://[::1]:4317/").is_ok());
        assert!(matches!(new("https://collector:4317"), Err(OtlpError::Tls)));
        for endpoint in ["", "localhost:4317", "ftp://x", "not an address"] {
            assert!(matches!(new(endpoint), Err(OtlpError::Address)), "{endpoint}");
        }
    }
}
