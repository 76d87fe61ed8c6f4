//! The gRPC interface: inference/v1, the standard health service, and reflection.

use std::{
    future::{Ready, ready},
    pin::Pin,
    sync::Arc,
};

use axum::{
    Extension, Router,
    extract::{Request, State},
    http::{Request as HttpRequest, Response},
    routing::any,
};
use bytes::Bytes;
use futures::{Stream, StreamExt, future::BoxFuture, stream};
use http_body_util::Full;
use looplane_proto::inference::v1::{
    Delta, FinishReason as ProtoFinish, Finished, GenerateRequest, GenerateResponse, GetModelRequest, GetModelResponse,
    Started, Token, TopLogprob, generate_response::Event,
};
use prost::Message;
use tonic::{
    Status,
    server::{Grpc, ServerStreamingService, UnaryService},
    service::Routes,
};
use tonic_health::{ServingStatus, server::HealthReporter};

mod codec;
mod error;
mod request;

use codec::RawRequests;

use crate::{
    engine::{EngineState, FinishReason, ModelInfo, client_logprob},
    frontend::{ChoiceEvent, Frontend, GenerateError, Generation, Place, Prepared, RequestId},
    metrics::FrontMetrics,
    request::{FieldError, RequestError, ValidRequest, validate},
    text::{Piece, Text},
    upload::Upload,
};

/// Path of the inference service; its methods follow.
const INFERENCE: &str = "/looplane.inference.v1.Inference/";

/// Routes of all gRPC services, to be merged with the HTTP ones.
pub fn router(frontend: Arc<Frontend>) -> Router {
    let (reporter, health) = tonic_health::server::health_reporter();
    tokio::spawn(report_health(frontend.clone(), reporter));
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(looplane_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // worker/v1 is not spoken on this port.
            .with_service_name("looplane.inference.v1.Inference")
            .with_service_name("grpc.health.v1.Health")
    };
    let inference = Router::new().route(&format!("{INFERENCE}{{*rest}}"), any(call)).with_state(frontend);
    Routes::new(health)
        .add_service(reflection().build_v1().expect("the descriptors come from the compiler"))
        .add_service(reflection().build_v1alpha().expect("the descriptors come from the compiler"))
        .prepare()
        .into_axum_router()
        .merge(inference)
}

/// Keeps the health service true to the engine, until either ends.
async fn report_health(frontend: Arc<Frontend>, reporter: HealthReporter) {
    let mut state = frontend.engine.watch_state();
    loop {
        let serving = *state.borrow_and_update() == EngineState::Ready && !frontend.draining.is_cancelled();
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", status).await;
        reporter.set_service_status("looplane.inference.v1.Inference", status).await;
        tokio::select! {
            changed = state.changed() => if changed.is_err() { break },
            () = frontend.draining.cancelled(), if !frontend.draining.is_cancelled() => {}
            () = frontend.closing.cancelled() => break,
        }
    }
    reporter.set_service_status("", ServingStatus::NotServing).await;
    reporter.set_service_status("looplane.inference.v1.Inference", ServingStatus::NotServing).await;
}

/// A call of the inference service. It is routed here rather than by tonic's generated code, which would read and
/// decode a message before anybody could ask whether there is a place for it.
async fn call(
    State(frontend): State<Arc<Frontend>>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Response<tonic::body::Body> {
    let metrics = frontend.metrics.clone();
    let answer = match request.uri().path().strip_prefix(INFERENCE) {
        Some("Generate") => generate(frontend, id, request).await,
        Some("GetModel") => get_model(frontend, request).await,
        _ => Ok(Status::unimplemented(format!("no method {}", request.uri().path())).into_http()),
    };
    answer.unwrap_or_else(|error| refused(&metrics, error).into_http())
}

type Answer = Result<Response<tonic::body::Body>, GenerateError>;

/// The place comes first: it also bounds the memory of messages.
async fn generate(frontend: Arc<Frontend>, id: RequestId, request: Request) -> Answer {
    let place = frontend.enter(&id, request.extensions().get(), "looplane.inference.v1.Inference/Generate")?;
    let record = place.record.clone();
    let (upload, request) = read(&frontend, request).await.inspect_err(|error| record.failed(error.code()))?;
    let mut codec = Grpc::new(RawRequests::default()).max_decoding_message_size(frontend.uploads.max_bytes());
    let method = GenerateMethod { frontend, id, once: Some((place, upload)) };
    Ok(codec.server_streaming(method, request).await)
}

async fn get_model(frontend: Arc<Frontend>, request: Request) -> Answer {
    let (_upload, request) = read(&frontend, request).await?;
    Ok(Grpc::new(RawRequests::default()).unary(GetModelMethod { frontend }, request).await)
}

/// The request with its whole body, which the first of the pair accounts for.
async fn read(frontend: &Frontend, request: Request) -> Result<(Upload, HttpRequest<Full<Bytes>>), GenerateError> {
    let (parts, body) = request.into_parts();
    let upload = frontend.uploads.read(body).await?;
    let request = HttpRequest::from_parts(parts, Full::new(upload.bytes.clone()));
    Ok((upload, request))
}

type Responses = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

struct GenerateMethod {
    frontend: Arc<Frontend>,
    id: RequestId,
    /// For the one call there is.
    once: Option<(Place, Upload)>,
}

impl ServerStreamingService<Bytes> for GenerateMethod {
    type Response = GenerateResponse;
    type ResponseStream = Responses;
    type Future = BoxFuture<'static, Result<tonic::Response<Responses>, Status>>;

    fn call(&mut self, request: tonic::Request<Bytes>) -> Self::Future {
        let (frontend, id) = (self.frontend.clone(), self.id.clone());
        let (place, upload) = self.once.take().expect("tonic calls a method once for a request");
        Box::pin(async move {
            let record = place.record.clone();
            let answer = admitted(&frontend, place, upload, request).await;
            let generation = answer.map_err(|error| {
                record.failed(error.code());
                refused(&frontend.metrics, error)
            })?;
            Ok(tonic::Response::new(responses(generation, &id, &frontend)))
        })
    }
}

async fn admitted(
    frontend: &Arc<Frontend>,
    place: Place,
    upload: Upload,
    call: tonic::Request<Bytes>,
) -> Result<Generation, GenerateError> {
    let timeout = request::timeout(call.metadata())?;
    let message = call.into_inner();
    let (bytes, checking) = (message.len(), frontend.clone());
    let prepare = move |model: &ModelInfo, text: &Text| -> Result<_, GenerateError> {
        let request: GenerateRequest = decode(message)?;
        drop(upload);
        checking.check_model(&request.model)?;
        let valid = validate(request::raw(request)?, model, text)?;
        Ok(ValidRequest { timeout, ..valid })
    };
    let Prepared { prepared, model, place } = frontend.prepare(place, bytes, prepare).await?;
    frontend.admit(prepared, model, place).await
}

struct GetModelMethod {
    frontend: Arc<Frontend>,
}

impl UnaryService<Bytes> for GetModelMethod {
    type Response = GetModelResponse;
    type Future = Ready<Result<tonic::Response<GetModelResponse>, Status>>;

    fn call(&mut self, request: tonic::Request<Bytes>) -> Self::Future {
        let answer = describe(&self.frontend, request.into_inner());
        ready(answer.map(tonic::Response::new).map_err(|error| refused(&self.frontend.metrics, error)))
    }
}

fn describe(frontend: &Frontend, message: Bytes) -> Result<GetModelResponse, GenerateError> {
    let request: GetModelRequest = decode(message)?;
    frontend.check_model(&request.model)?;
    let model = frontend.model()?;
    Ok(GetModelResponse {
        id: frontend.model_id.clone(),
        architecture: model.architecture.clone(),
        vocab_size: model.vocab_size,
        max_context: model.max_context,
        tensor_parallel: model.tensor_parallel,
        bit_domain: model.bit_domain.clone(),
    })
}

fn decode<M: Message + Default>(message: Bytes) -> Result<M, RequestError> {
    M::decode(message).map_err(|error| RequestError::field("message", FieldError::Type, error.to_string()))
}

/// The call going away drops the stream, and with it the sequence.
fn responses(generation: Generation, id: &RequestId, frontend: &Frontend) -> Responses {
    let Generation { request, choices, place, .. } = generation;
    let metrics = frontend.metrics.clone();
    let prompt_tokens = request.prompt_tokens() as u32;
    let started = Event::Started(Started {
        request_id: id.as_str().to_owned(),
        model: frontend.model_id.clone(),
        prompt_tokens,
        seed: request.sampling.seed,
    });
    let choice = choices.into_iter().next().expect("a request has a prompt, and without `n` one choice");
    let with_logprobs = request.logprobs.is_some();
    let events = choice.into_stream().map(move |(_, event)| {
        // Its place is free when the stream ends.
        let _ = &place;
        let event = event.map_err(|error| refused(&metrics, error))?;
        Ok(respond(event, prompt_tokens, with_logprobs))
    });
    Box::pin(stream::iter([Ok(GenerateResponse { event: Some(started) })]).chain(events))
}

/// The status of an error, which is counted.
fn refused(metrics: &FrontMetrics, error: GenerateError) -> Status {
    metrics.failed(error.code());
    error::status(error)
}

fn respond(event: ChoiceEvent, prompt_tokens: u32, with_logprobs: bool) -> GenerateResponse {
    let event = match event {
        ChoiceEvent::Delta(piece) => Event::Delta(delta(piece, with_logprobs)),
        ChoiceEvent::Finished { reason, completion_tokens, cached_tokens, .. } => {
            let reason = match reason {
                FinishReason::Stop => ProtoFinish::Stop,
                FinishReason::Length => ProtoFinish::Length,
            };
            Event::Finished(Finished { reason: reason.into(), prompt_tokens, completion_tokens, cached_tokens })
        }
    };
    GenerateResponse { event: Some(event) }
}

fn delta(piece: Piece, with_logprobs: bool) -> Delta {
    let top = |(id, logprob)| TopLogprob { id, logprob: client_logprob(logprob) };
    let token = |output: crate::text::OutputToken| Token {
        id: output.token.id,
        logprob: output.token.logprob.filter(|_| with_logprobs).map(client_logprob),
        top: output.token.top.into_iter().map(top).collect(),
    };
    Delta { text: piece.text, tokens: piece.tokens.into_iter().map(token).collect() }
}
