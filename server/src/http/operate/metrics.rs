//! `/metrics`: everything that is counted, as OpenMetrics text for Prometheus. Answered whatever the engine is doing.

use std::{fmt, sync::Arc};

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text::encode};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::quota::Used;
use crate::engine::EngineState;
use crate::frontend::Frontend;
use crate::keys::Keys;
use crate::metrics::Engines;
use crate::metrics::names::{self, Name};
use crate::reload::Reloaded;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Everything that is counted, with the label `model_name` as vLLM has it.
pub(in crate::http) fn registry(frontend: &Arc<Frontend>, keys: Option<&Arc<Reloaded<Keys>>>) -> Registry {
    let model_name = ("model_name".into(), frontend.model_id.clone().into());
    let mut registry = Registry::with_labels([model_name].into_iter());
    registry.register_collector(Box::new(Engines::new(
        frontend.engine.replicas().iter().map(|replica| replica.metrics.clone()),
    )));
    frontend.metrics.register(&mut registry);
    registry.register_collector(Box::new(Facts(frontend.clone())));
    if let Some(keys) = keys {
        registry.register_collector(Box::new(Used(keys.clone())));
    }
    registry
}

pub(in crate::http) fn scrape(registry: &Registry) -> Response {
    let mut text = String::new();
    match encode(&mut text, registry) {
        Ok(()) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!("the metrics cannot be written: {error}");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// What is asked for at each scrape, not counted: what this is, the engine's state, and the model once it is known.
#[derive(Debug)]
struct Facts(Arc<Frontend>);

/// A fact in labels. A gauge of 1 is what Prometheus' own exporters make of it: clients refuse OpenMetrics' `info`,
/// which the older format does not have (aiperf 0.13 gives all of `/metrics` up).
fn tell<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &'static Name,
    labels: [(&str, &str); N],
) -> fmt::Result {
    ConstGauge::new(1u64).encode(name.begin(encoder)?.encode_family(&labels)?)
}

impl Collector for Facts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        tell(&mut encoder, names::BUILD, [("version", env!("CARGO_PKG_VERSION"))])?;
        let mut states = names::STATE.begin(&mut encoder)?;
        for (number, replica) in self.0.engine.replicas().iter().enumerate() {
            let number = number.to_string();
            let now = word(&self.0.state_of(replica));
            for state in ["ready", "loading", "recovering", "draining", "failed"] {
                let labels = [("engine", number.as_str()), ("state", state)];
                ConstGauge::new(u64::from(state == now)).encode(states.encode_family(&labels)?)?;
            }
        }
        ConstGauge::new(self.0.requests().0).encode(names::IN_PROGRESS.begin(&mut encoder)?)?;
        ConstGauge::new(self.0.uploads.bytes_held()).encode(names::UPLOAD_BYTES.begin(&mut encoder)?)?;
        let Some(model) = self.0.engine.model() else { return Ok(()) };
        let (context, ranks) = (model.max_context.to_string(), model.tensor_parallel.to_string());
        let labels = [
            ("architecture", model.architecture.as_str()),
            ("bit_domain", model.bit_domain.as_str()),
            ("max_context", context.as_str()),
            ("tensor_parallel", ranks.as_str()),
        ];
        tell(&mut encoder, names::MODEL, labels)
    }
}

/// The state in one word, as `/health/ready` says it, too.
pub(in crate::http) fn word(state: &EngineState) -> &'static str {
    match state {
        EngineState::Ready => "ready",
        EngineState::Loading(_) => "loading",
        EngineState::Recovering(_) => "recovering",
        EngineState::Draining => "draining",
        EngineState::Failed(_) => "failed",
    }
}
