//! The gRPC interface, on the same port as HTTP.

mod about;
mod chat;
mod generate;
mod refusals;

use std::{collections::HashMap, sync::Arc, time::Duration};

use looplane_proto::inference::v1::{
    AbortRequest, Alternatives, Chat, ChatMessage, ChatRequest, Delta, DetokenizeRequest, FinishReason as Reason,
    Finished, GenerateRequest, GenerateResponse, GetLoadRequest, GetModelRequest, SamplingParams, TokenIds,
    TokenizeRequest, Tool, ToolChoice,
    generate_request::Input,
    generate_response::Event,
    inference_client::InferenceClient,
    sampling_params::Form,
    tokenize_request,
    tool_choice::{Choice, Mode},
};
use looplane_server::{
    engine::{EngineState, FinishReason, GeneratedToken, SequenceEvent, SubmitError, Unwanted},
    listener::{ClientLimits, ServeOptions},
    text::{ChatTemplate, Text},
};
use serde_json::json;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_stream::StreamExt;
use tonic::{Code, Request, Status, Streaming, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_types::StatusExt;

use crate::{
    Server,
    client::{get, post, read},
    engine::{Script, answer, token},
    fixture,
    http2::{Connection, grpc_status},
    options,
    scrape::Scrape,
    spell, tools,
};

/// Of a function, and of an answer.
const SCHEMA: &str = r#"{"type": "object", "properties": {"city": {"type": "string"}}}"#;

async fn channel(server: &Server) -> Channel {
    Channel::from_shared(format!("http://{}", server.address)).unwrap().connect().await.unwrap()
}

fn tokens(ids: &[u32]) -> GenerateRequest {
    GenerateRequest { input: Some(Input::TokenIds(TokenIds { ids: ids.to_vec() })), ..GenerateRequest::default() }
}

fn sampled(sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest { sampling: Some(sampling), ..tokens(&[5]) }
}

fn user(content: &str) -> ChatMessage {
    ChatMessage { role: "user".into(), content: content.into(), ..ChatMessage::default() }
}

fn chat(messages: Vec<ChatMessage>) -> ChatRequest {
    ChatRequest { chat: Some(Chat { messages, ..Chat::default() }), ..ChatRequest::default() }
}

async fn events(stream: Streaming<GenerateResponse>) -> Result<Vec<Event>, Status> {
    let responses: Vec<Result<GenerateResponse, Status>> = stream.collect().await;
    responses.into_iter().map(|response| Ok(response?.event.expect("every response is an event"))).collect()
}

async fn collect(channel: Channel, request: GenerateRequest) -> Result<Vec<Event>, Status> {
    events(InferenceClient::new(channel).generate(request).await?.into_inner()).await
}

async fn collect_chat(channel: Channel, request: ChatRequest) -> Result<Vec<Event>, Status> {
    events(InferenceClient::new(channel).chat(request).await?.into_inner()).await
}

/// What the deltas of a choice add up to, and its end.
fn added_up(events: &[Event], choice: u32) -> (Delta, Finished) {
    let (mut all, mut end) = (Delta::default(), None);
    for event in events {
        match event {
            Event::Delta(delta) if delta.index == choice => {
                assert!(end.is_none(), "nothing follows the end of a choice");
                all.text.push_str(&delta.text);
                all.reasoning.push_str(&delta.reasoning);
                all.tokens.extend(delta.tokens.clone());
                all.generated.extend(&delta.generated);
                for call in &delta.tool_calls {
                    match all.tool_calls.iter_mut().find(|known| known.index == call.index) {
                        Some(known) => known.arguments.push_str(&call.arguments),
                        None => all.tool_calls.push(call.clone()),
                    }
                }
            }
            Event::Finished(finished) if finished.index == choice => end = Some(finished.clone()),
            _ => {}
        }
    }
    (all, end.expect("every choice has an end"))
}

/// Says that this field, and no other, is wrong.
fn wrong_field(status: &Status, field: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let violations = status.get_details_bad_request().expect("a field is wrong").field_violations;
    assert_eq!(violations.iter().map(|of| of.field.as_str()).collect::<Vec<_>>(), [field], "{status}");
    assert!(status.message().starts_with(field), "{status}");
}
