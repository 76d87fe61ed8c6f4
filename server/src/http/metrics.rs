//! `/metrics`: everything that is counted, as OpenMetrics text for Prometheus. Answered whatever the engine is doing.

use std::sync::Arc;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::quota::Used;
use crate::{engine::EngineState, frontend::Frontend, keys::Keys, reload::Reloaded};

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Names everything that is counted; each name begins with `looplane_` and has the label `model_name`, as vLLM's has.
pub(super) fn registry(frontend: &Arc<Frontend>, keys: Option<&Arc<Reloaded<Keys>>>) -> Registry {
    let model_name = ("model_name".into(), frontend.model_id.clone().into());
    let mut registry = Registry::with_prefix_and_labels("looplane", [model_name].into_iter());
    frontend.engine.metrics()[0].register(&mut registry);
    frontend.metrics.register(&mut registry);
    registry.register_collector(Box::new(Facts(frontend.clone())));
    if let Some(keys) = keys {
        registry.register_collector(Box::new(Used(keys.clone())));
    }
    registry
}

pub(super) fn scrape(registry: &Registry) -> Response {
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
    (name, help): (&str, &str),
    labels: [(&str, &str); N],
) -> Result<(), std::fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    ConstGauge::new(1u64).encode(family.encode_family(&labels)?)
}

impl Collector for Facts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        // Help texts of a registry get their full stop from it, those of a collector do not.
        let build = ("build_info", "Which Looplane this is.");
        tell(&mut encoder, build, [("version", env!("CARGO_PKG_VERSION"))])?;
        let help = "1 for the state that the engine is in.";
        let mut states = encoder.encode_descriptor("engine_state", help, None, MetricType::Gauge)?;
        let now = word(&self.0.state());
        for state in ["ready", "loading", "recovering", "draining", "failed"] {
            let label = [("state", state)];
            ConstGauge::new(u64::from(state == now)).encode(states.encode_family(&label)?)?;
        }
        let upload_help = "Bytes that bodies of requests hold now, beyond the first 64 KiB of each.";
        let figures = [
            ("requests_in_progress", "Requests that have a place now.", self.0.requests().0),
            ("upload_bytes", upload_help, self.0.uploads.bytes_held()),
        ];
        for (name, help, figure) in figures {
            ConstGauge::new(figure as u64).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let Some(model) = self.0.engine.model() else { return Ok(()) };
        let (context, ranks) = (model.max_context.to_string(), model.tensor_parallel.to_string());
        let labels = [
            ("architecture", model.architecture.as_str()),
            ("bit_domain", model.bit_domain.as_str()),
            ("max_context", context.as_str()),
            ("tensor_parallel", ranks.as_str()),
        ];
        tell(&mut encoder, ("model_info", "The model that is served."), labels)
    }
}

/// The state in one word, as `/health/ready` says it, too.
pub(super) fn word(state: &EngineState) -> &'static str {
    match state {
        EngineState::Ready => "ready",
        EngineState::Loading(_) => "loading",
        EngineState::Recovering(_) => "recovering",
        EngineState::Draining => "draining",
        EngineState::Failed(_) => "failed",
    }
}
