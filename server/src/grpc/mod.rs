//! The gRPC interface: inference/v1, the standard health service, and reflection.

use std::{convert::Infallible, sync::Arc, vec};

use axum::{
    Router,
    extract::{Request, State},
    http::{Request as HttpRequest, Response},
    routing::any,
};
use bytes::Bytes;
use futures::stream::{self, Iter};
use http_body_util::StreamBody;
use hyper::body::Frame;
use looplane_proto::inference::v1::{
    AbortRequest, AbortResponse, GetLoadRequest, GetLoadResponse, GetModelRequest, GetModelResponse,
};
use prost::Message;
use tonic::{Status, server::Grpc, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::service_fn;

mod answer;
mod chat;
mod codec;
mod error;
mod request;

use codec::RawRequests;
pub use error::refusal;
use request::{Asked, Named};

use crate::{
    engine::{EngineState, FinishReason, ModelInfo},
    frontend::{Frontend, GenerateError, Generation, Place, Prepared, in_words},
    keys::Key,
    metrics::FrontMetrics,
    request::{FieldError, RequestError, ValidRequest, validate},
    text::Text,
    upload::Upload,
};

/// The inference service.
const SERVICE: &str = "looplane.inference.v1.Inference";

/// Routes of all gRPC services, to be merged with the HTTP ones.
pub fn router(frontend: Arc<Frontend>) -> Router {
    let (reporter, health) = tonic_health::server::health_reporter();
    tokio::spawn(report_health(frontend.clone(), reporter));
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(looplane_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // What details of errors are made of: clients that know no more than reflection says read them, too.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            // worker/v1 is not spoken on this port.
            .with_service_name(SERVICE)
            .with_service_name("grpc.health.v1.Health")
    };
    let inference = Router::new().route(&format!("/{SERVICE}/{{*rest}}"), any(call)).with_state(frontend);
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
        reporter.set_service_status(SERVICE, status).await;
        tokio::select! {
            changed = state.changed() => if changed.is_err() { break },
            () = frontend.draining.cancelled(), if !frontend.draining.is_cancelled() => {}
            () = frontend.closing.cancelled() => break,
        }
    }
    reporter.set_service_status("", ServingStatus::NotServing).await;
    reporter.set_service_status(SERVICE, ServingStatus::NotServing).await;
}

/// A call of the inference service. It is routed here rather than by tonic's generated code, which would read and
/// decode a message before anybody could ask whether there is a place for it.
async fn call(State(frontend): State<Arc<Frontend>>, request: Request) -> Response<tonic::body::Body> {
    let metrics = frontend.metrics.clone();
    let answer = match method(request.uri().path()) {
        "Generate" => generate(frontend, "looplane.inference.v1.Inference/Generate", request, request::generate).await,
        "Chat" => generate(frontend, "looplane.inference.v1.Inference/Chat", request, request::chat).await,
        "Tokenize" => compute(frontend, "looplane.inference.v1.Inference/Tokenize", request, request::tokenize).await,
        "Detokenize" => {
            compute(frontend, "looplane.inference.v1.Inference/Detokenize", request, request::detokenize).await
        }
        "GetModel" => tell(frontend, request, model).await,
        "Abort" => tell(frontend, request, abort).await,
        "GetLoad" => tell(frontend, request, load).await,
        _ => {
            metrics.failed("not_found");
            let message = format!("no method {}; reflection lists what is", request.uri().path());
            Ok(refusal(tonic::Code::Unimplemented, "not_found", message).into_http())
        }
    };
    answer.unwrap_or_else(|error| refused(&metrics, error).into_http())
}

/// The name of a method in a path of the service.
fn method(path: &str) -> &str {
    let of_service = path.strip_prefix('/').and_then(|path| path.strip_prefix(SERVICE));
    of_service.and_then(|rest| rest.strip_prefix('/')).unwrap_or_default()
}

type Answer = Result<Response<tonic::body::Body>, GenerateError>;
/// A body that is here.
type Whole = StreamBody<Iter<vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

/// A call's place, and then its message: so places bound the memory of messages, too.
async fn enter(
    frontend: &Frontend,
    route: &'static str,
    request: Request,
) -> Result<(Place, Upload, HttpRequest<Whole>), GenerateError> {
    let record = request.extensions().get().expect("every request has its record");
    let place = frontend.enter(record, request.extensions().get(), route)?;
    let read = whole(frontend, request).await;
    let (upload, request) = read.inspect_err(|error| place.record.failed(error.code()))?;
    Ok((place, upload, request))
}

/// Answers with a stream.
async fn generate<M: Message + Default + 'static>(
    frontend: Arc<Frontend>,
    route: &'static str,
    request: Request,
    read: fn(M) -> Result<Asked, RequestError>,
) -> Answer {
    let (place, upload, request) = enter(&frontend, route, request).await?;
    let record = place.record.clone();
    let mut codec = Grpc::new(RawRequests::default()).max_decoding_message_size(frontend.uploads.max_bytes());
    let mut once = Some((place, upload));
    let method = service_fn(move |call: tonic::Request<Bytes>| {
        let (frontend, record) = (frontend.clone(), record.clone());
        let (place, upload) = once.take().expect("tonic calls a method once for a request");
        async move {
            let (generation, include_reasoning) =
                admitted(&frontend, place, upload, call, read).await.map_err(|error| {
                    record.failed(error.code());
                    refused(&frontend.metrics, error)
                })?;
            Ok(tonic::Response::new(answer::stream(generation, include_reasoning, &frontend)))
        }
    });
    Ok(codec.server_streaming(method, request).await)
}

async fn admitted<M: Message + Default + 'static>(
    frontend: &Arc<Frontend>,
    place: Place,
    upload: Upload,
    call: tonic::Request<Bytes>,
    read: fn(M) -> Result<Asked, RequestError>,
) -> Result<(Generation, bool), GenerateError> {
    let timeout = request::timeout(call.metadata())?;
    let message = call.into_inner();
    let (bytes, checking) = (message.len(), frontend.clone());
    let prepare = move |model: &ModelInfo, text: &Text| -> Result<_, GenerateError> {
        let Asked { model: name, raw, include_reasoning } = read(decode(message)?)?;
        drop(upload);
        checking.check_model(&name)?;
        let valid = validate(raw, model, text)?;
        Ok((ValidRequest { timeout, ..valid }, include_reasoning))
    };
    let Prepared { prepared: (valid, include_reasoning), model, place } =
        frontend.prepare(place, bytes, prepare).await?;
    Ok((frontend.admit(valid, model, place).await?, include_reasoning))
}

/// Answers with one message that takes work on a text, within the bounds of a request for text.
async fn compute<M: Named, R: Message + 'static>(
    frontend: Arc<Frontend>,
    route: &'static str,
    request: Request,
    work: fn(M, &ModelInfo, &Text) -> Result<R, RequestError>,
) -> Answer {
    let (place, upload, request) = enter(&frontend, route, request).await?;
    let record = place.record.clone();
    let mut codec = Grpc::new(RawRequests::default()).max_decoding_message_size(frontend.uploads.max_bytes());
    let mut once = Some((place, upload));
    let method = service_fn(move |call: tonic::Request<Bytes>| {
        let (frontend, record) = (frontend.clone(), record.clone());
        let (place, upload) = once.take().expect("tonic calls a method once for a request");
        async move {
            let (message, checking) = (call.into_inner(), frontend.clone());
            let bytes = message.len();
            let work = move |model: &ModelInfo, text: &Text| -> Result<_, GenerateError> {
                let message: M = decode(message)?;
                drop(upload);
                checking.check_model(message.model())?;
                Ok(work(message, model, text)?)
            };
            match frontend.prepare(place, bytes, work).await {
                Ok(Prepared { prepared, .. }) => {
                    record.finished(FinishReason::Stop);
                    Ok(tonic::Response::new(prepared))
                }
                Err(error) => {
                    record.failed(error.code());
                    Err(refused(&frontend.metrics, error))
                }
            }
        }
    });
    Ok(codec.unary(method, request).await)
}

/// What is known, for the key of the call.
type Known<M, R> = fn(&Frontend, Option<&Arc<Key>>, M) -> Result<R, GenerateError>;

/// Answers with one message that is at hand, also where all places are taken.
async fn tell<M: Message + Default + 'static, R: Message + 'static>(
    frontend: Arc<Frontend>,
    request: Request,
    known: Known<M, R>,
) -> Answer {
    let key = request.extensions().get::<Arc<Key>>().cloned();
    let (_upload, request) = whole(&frontend, request).await?;
    let method = service_fn(move |call: tonic::Request<Bytes>| {
        let answer = decode(call.into_inner()).map_err(GenerateError::from);
        let answer = answer.and_then(|message| known(&frontend, key.as_ref(), message));
        std::future::ready(answer.map(tonic::Response::new).map_err(|error| refused(&frontend.metrics, error)))
    });
    Ok(Grpc::new(RawRequests::default()).unary(method, request).await)
}

/// The request with its whole body, which the first of the pair accounts for.
async fn whole(frontend: &Frontend, request: Request) -> Result<(Upload, HttpRequest<Whole>), GenerateError> {
    let (parts, body) = request.into_parts();
    let upload = frontend.read(parts.extensions.get(), body).await?;
    let frames: Vec<_> = upload.blocks.iter().map(|block| Ok(Frame::data(block.clone()))).collect();
    let body = StreamBody::new(stream::iter(frames));
    Ok((upload, HttpRequest::from_parts(parts, body)))
}

fn decode<M: Message + Default>(message: Bytes) -> Result<M, RequestError> {
    M::decode(message).map_err(|error| RequestError::field("message", FieldError::Type, error.to_string()))
}

fn model(frontend: &Frontend, _: Option<&Arc<Key>>, asked: GetModelRequest) -> Result<GetModelResponse, GenerateError> {
    frontend.check_model(&asked.model)?;
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

fn abort(frontend: &Frontend, key: Option<&Arc<Key>>, asked: AbortRequest) -> Result<AbortResponse, GenerateError> {
    match frontend.abort(key, &asked.request_id) {
        0 => Err(RequestError::NoSuchRequest { id: asked.request_id }.into()),
        requests => Ok(AbortResponse { requests: requests as u32 }),
    }
}

fn load(frontend: &Frontend, _: Option<&Arc<Key>>, _: GetLoadRequest) -> Result<GetLoadResponse, GenerateError> {
    let (state, load) = (frontend.state(), frontend.engine.load());
    let (requests, max_requests) = frontend.requests();
    Ok(GetLoadResponse {
        ready: state == EngineState::Ready,
        state: in_words(&state),
        requests: requests as u32,
        max_requests: max_requests as u32,
        running: load.running as u32,
        waiting: load.waiting as u32,
        kv_pages_used: load.kv_pages_used as u32,
        kv_pages_cached: load.kv_pages_cached as u32,
        kv_pages: load.kv_pages as u32,
    })
}

/// The status of an error, which is counted.
fn refused(metrics: &FrontMetrics, error: GenerateError) -> Status {
    metrics.failed(error.code());
    error::status(match error {
        GenerateError::Request(error) => request::at_its_path(error).into(),
        error => error,
    })
}
