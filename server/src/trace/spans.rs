//! The spans of a request, as OpenTelemetry's conventions for HTTP and for generative models name things, and vLLM
//! where they have no name. Never what was asked or answered.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, ArrayValue, KeyValue, any_value::Value},
    trace::v1::{Span, Status, span::SpanKind, status::StatusCode},
};

use super::context::{Context, span_id};

/// Codes of what makes a span an error. Others are the client's mistakes, or its going away.
const SERVER_FAULTS: [&str; 5] =
    ["generation_failed", "internal_error", "deadline_exceeded", "not_ready", "shutting_down"];

/// A request that has ended. Times count from its arrival.
#[derive(Debug)]
pub struct Request<'a> {
    /// Its name in responses and in the log.
    pub id: &'a str,
    /// The id of its key.
    pub key: Option<&'a str>,
    /// The server's own name of what was asked for: a path, or the full name of a method over gRPC.
    pub route: &'static str,
    /// Of its answer, if there was one; 200 of every one over gRPC.
    pub http_status: Option<u16>,
    /// When it came.
    pub arrived: SystemTime,
    /// When nothing was left of it.
    pub total: Duration,
    /// As far as the engine told.
    pub phases: Phases,
    /// Sequences.
    pub choices: u32,
    /// Of its prompts.
    pub prompt_tokens: u64,
    /// Of these, those that were not computed.
    pub cached_tokens: u64,
    /// Of its answers.
    pub completion_tokens: u64,
    /// Tokens that were drafted for it.
    pub drafted_tokens: u64,
    /// Those of them that were accepted.
    pub accepted_tokens: u64,
    /// Why it ended: a finish reason, or the code of an error.
    pub reason: &'a str,
    /// It was not served to its end.
    pub failed: bool,
}

/// When a request came how far, from its arrival. Of several sequences, the first that did, and the last that ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// Handed to the engine.
    pub submitted: Option<Duration>,
    /// Got a slot.
    pub admitted: Option<Duration>,
    /// Had its first token.
    pub computed: Option<Duration>,
    /// Had its last.
    pub ended: Option<Duration>,
}

impl Phases {
    /// Waiting for a slot.
    pub fn queue(&self) -> Option<Duration> {
        Some(self.admitted?.saturating_sub(self.submitted?))
    }

    /// Computing the prompt.
    pub fn prefill(&self) -> Option<Duration> {
        Some(self.computed?.saturating_sub(self.admitted?))
    }

    /// From the first token to the last.
    pub fn decode(&self) -> Option<Duration> {
        Some(self.ended?.saturating_sub(self.computed?))
    }
}

impl Request<'_> {
    /// The span of the request, and below it those of its phases that came to their ends.
    pub(super) fn spans(&self, context: &Context, model: &str) -> Vec<Span> {
        let Phases { submitted, admitted, computed, ended } = self.phases;
        let phase = |name: &str, from: Option<Duration>, to: Option<Duration>, attributes: Vec<KeyValue>| {
            let parent_span_id = context.span_bytes();
            Some(Span {
                span_id: span_id().to_be_bytes().into(),
                parent_span_id,
                name: name.into(),
                kind: SpanKind::Internal.into(),
                attributes,
                ..self.span(context, from?, to?)
            })
        };
        let prompt = vec![
            integer("gen_ai.usage.input_tokens", self.prompt_tokens),
            integer("gen_ai.usage.cache_read.input_tokens", self.cached_tokens),
        ];
        let answer = vec![
            integer("gen_ai.usage.output_tokens", self.completion_tokens),
            integer("looplane.usage.drafted_tokens", self.drafted_tokens),
            integer("looplane.usage.accepted_tokens", self.accepted_tokens),
        ];
        let phases = [
            phase("prepare", Some(Duration::ZERO), submitted, Vec::new()),
            phase("queue", submitted, admitted, Vec::new()),
            phase("prefill", admitted, computed, prompt),
            phase("decode", computed, ended, answer),
        ];
        [Some(self.whole(context, model))].into_iter().chain(phases).flatten().collect()
    }

    fn whole(&self, context: &Context, model: &str) -> Span {
        let is_grpc = !self.route.starts_with('/');
        let mut attributes = vec![
            text("gen_ai.request.id", self.id),
            text("gen_ai.provider.name", "looplane"),
            text("gen_ai.request.model", model),
        ];
        if is_grpc {
            attributes.extend([text("rpc.system", "grpc"), text("rpc.method", self.route)]);
        } else {
            attributes.extend([text("http.request.method", "POST"), text("http.route", self.route)]);
        }
        attributes.extend(self.http_status.map(|status| integer("http.response.status_code", status.into())));
        attributes.extend(operation(self.route).map(|operation| text("gen_ai.operation.name", operation)));
        attributes.extend(self.key.map(|key| text("looplane.key", key)));
        if self.phases.submitted.is_some() {
            attributes.extend([
                integer("gen_ai.request.choice.count", self.choices.into()),
                integer("gen_ai.usage.input_tokens", self.prompt_tokens),
                integer("gen_ai.usage.cache_read.input_tokens", self.cached_tokens),
                integer("gen_ai.usage.output_tokens", self.completion_tokens),
            ]);
        }
        let Phases { submitted, computed, .. } = self.phases;
        let times = [
            ("gen_ai.latency.time_to_first_token", computed.and_then(|at| at.checked_sub(submitted?))),
            ("gen_ai.latency.time_in_queue", self.phases.queue()),
            ("gen_ai.latency.time_in_model_prefill", self.phases.prefill()),
            ("gen_ai.latency.time_in_model_decode", self.phases.decode()),
            ("gen_ai.latency.e2e", Some(self.total)),
        ];
        attributes.extend(times.into_iter().filter_map(|(key, time)| Some(seconds(key, time?))));
        let mut status = None;
        if self.failed {
            attributes.push(text("error.type", self.reason));
            let is_fault = SERVER_FAULTS.contains(&self.reason);
            status = is_fault.then(|| Status { message: self.reason.into(), code: StatusCode::Error.into() });
        } else {
            let values = vec![AnyValue { value: Some(Value::StringValue(self.reason.into())) }];
            let reasons = Value::ArrayValue(ArrayValue { values });
            attributes.push(attribute("gen_ai.response.finish_reasons", reasons));
        }
        let name = if is_grpc { self.route.into() } else { format!("POST {}", self.route) };
        Span {
            span_id: context.span_bytes(),
            parent_span_id: context.parent_bytes(),
            name,
            kind: SpanKind::Server.into(),
            attributes,
            status,
            ..self.span(context, Duration::ZERO, self.total)
        }
    }

    /// What all spans have.
    fn span(&self, context: &Context, from: Duration, to: Duration) -> Span {
        let arrived = self.arrived.duration_since(UNIX_EPOCH).unwrap_or_default();
        let nanos = |at: Duration| u64::try_from((arrived + at).as_nanos()).unwrap_or(u64::MAX);
        Span {
            trace_id: context.trace_bytes(),
            trace_state: context.state().into(),
            start_time_unix_nano: nanos(from),
            end_time_unix_nano: nanos(to.max(from)),
            // Sampled, or there would be no span.
            flags: 1,
            ..Span::default()
        }
    }
}

/// The convention's word for what a route does, if it generates.
fn operation(route: &str) -> Option<&'static str> {
    match route {
        "/v1/chat/completions" | "/v1/messages" | "/v1/responses" | "looplane.inference.v1.Inference/Chat" => {
            Some("chat")
        }
        "/v1/completions" | "looplane.inference.v1.Inference/Generate" => Some("text_completion"),
        _ => None,
    }
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.into(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

fn integer(key: &str, value: u64) -> KeyValue {
    attribute(key, Value::IntValue(value.try_into().unwrap_or(i64::MAX)))
}

fn seconds(key: &str, value: Duration) -> KeyValue {
    attribute(key, Value::DoubleValue(value.as_secs_f64()))
}
