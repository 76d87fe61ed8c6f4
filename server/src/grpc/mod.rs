//! The gRPC interface: inference/v1, the standard health service, and reflection.

use std::{pin::Pin, sync::Arc};

use axum::Router;
use futures::{Stream, StreamExt, stream};
use looplane_proto::inference::v1::{
    Delta, FinishReason as ProtoFinish, Finished, GenerateRequest, GenerateResponse, GetModelRequest, GetModelResponse,
    Started, Token, TopLogprob,
    generate_response::Event,
    inference_server::{Inference, InferenceServer},
};
use tonic::{Request, Response, Status, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};
use uuid::Uuid;

mod error;
mod request;

use crate::{
    engine::{EngineState, FinishReason, client_logprob},
    frontend::{ChoiceEvent, Frontend, GenerateError, Generation},
    metrics::FrontMetrics,
    text::Piece,
};

/// The inference service.
#[derive(Debug, Clone)]
struct Service {
    frontend: Arc<Frontend>,
}

/// Routes of all gRPC services, to be merged with the HTTP ones. Messages have at most `max_message_bytes`.
pub fn router(frontend: Arc<Frontend>, max_message_bytes: usize) -> Router {
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
    let inference = InferenceServer::new(Service { frontend }).max_decoding_message_size(max_message_bytes);
    Routes::new(inference)
        .add_service(health)
        .add_service(reflection().build_v1().expect("the descriptors come from the compiler"))
        .add_service(reflection().build_v1alpha().expect("the descriptors come from the compiler"))
        .prepare()
        .into_axum_router()
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

type Responses = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for Service {
    type GenerateStream = Responses;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Responses>, Status> {
        let request = request.into_inner();
        let frontend = &self.frontend;
        let answer = async {
            let permit = frontend.enter()?;
            frontend.check_model(&request.model)?;
            let bytes = prost::Message::encoded_len(&request);
            frontend.admit(request::raw(request)?, bytes, permit).await
        };
        let generation = answer.await.map_err(|error| refused(&frontend.metrics, error))?;
        Ok(Response::new(responses(generation, frontend.model_id.clone(), frontend.metrics.clone())))
    }

    async fn get_model(&self, request: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        let answer = || {
            self.frontend.check_model(&request.get_ref().model)?;
            self.frontend.model()
        };
        let model = answer().map_err(|error| refused(&self.frontend.metrics, error))?;
        Ok(Response::new(GetModelResponse {
            id: self.frontend.model_id.clone(),
            architecture: model.architecture.clone(),
            vocab_size: model.vocab_size,
            max_context: model.max_context,
            tensor_parallel: model.tensor_parallel,
            bit_domain: model.bit_domain.clone(),
        }))
    }
}

/// The call going away drops the stream, and with it the sequence.
fn responses(generation: Generation, model_id: String, metrics: FrontMetrics) -> Responses {
    let Generation { request, choices, permit, .. } = generation;
    let prompt_tokens = request.prompt_tokens() as u32;
    let started = Event::Started(Started {
        request_id: Uuid::new_v4().to_string(),
        model: model_id,
        prompt_tokens,
        seed: request.sampling.seed,
    });
    let choice = choices.into_iter().next().expect("a request has a prompt, and without `n` one choice");
    let with_logprobs = request.logprobs.is_some();
    let events = choice.into_stream().map(move |(_, event)| {
        // Its place is free when the stream ends.
        let _ = &permit;
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
        ChoiceEvent::Finished { reason, completion_tokens } => {
            let reason = match reason {
                FinishReason::Stop => ProtoFinish::Stop,
                FinishReason::Length => ProtoFinish::Length,
            };
            Event::Finished(Finished { reason: reason.into(), prompt_tokens, completion_tokens })
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
