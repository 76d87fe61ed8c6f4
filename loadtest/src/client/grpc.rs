//! Streaming client of Looplane's own gRPC service, which fills the same records as [`crate::client::http`] does over
//! HTTP.
//!
//! A connection carries many streams here, and a server bounds how many: requests beyond its bound would wait inside of
//! this client unseen. So a connection gets at most [`STREAMS_A_CONNECTION`], and one more is opened where that is not
//! enough. The time of a chunk is taken when its message has been decoded.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::header::AUTHORIZATION;
use looplane_proto::inference::v1::generate_response::Event;
use looplane_proto::inference::v1::inference_client::InferenceClient;
use looplane_proto::inference::v1::{ChatRequest, FinishReason, GenerateRequest, GetModelRequest};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{ConnectError, Request, Status};

use crate::client::http::TargetError;
use crate::client::record::{Clock, Failure, RequestRecord};
use crate::text::{chain, printable};

/// Most streams on one connection; servers commonly allow 100 or more.
const STREAMS_A_CONNECTION: usize = 100;

/// Client of one server. Cheap to share; requests run in parallel.
#[derive(Debug)]
pub struct GrpcClient {
    base: String,
    endpoint: Endpoint,
    authorization: Option<MetadataValue<Ascii>>,
    connections: Mutex<Vec<Connection>>,
    timeout: Duration,
}

#[derive(Debug, Clone)]
struct Connection {
    channel: Channel,
    streams: Arc<AtomicUsize>,
}

/// What to ask for.
#[derive(Debug, Clone)]
pub enum GrpcRequest {
    Generate(GenerateRequest),
    Chat(ChatRequest),
}

/// The place of one stream on a connection, which is free again when this is dropped.
struct Place(Connection);

impl GrpcClient {
    /// A client of the server at `authority` (`HOST:PORT`), whose requests each end within `timeout`. Opens no
    /// connection yet.
    pub fn new(authority: &str, api_key: Option<&str>, timeout: Duration) -> Result<Self, TargetError> {
        let base = format!("grpc://{authority}");
        let malformed = || TargetError::Form(printable(&base, 200));
        if authority.contains(['/', '@']) {
            return Err(malformed());
        }
        let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|_| malformed())?;
        let endpoint = endpoint.connect_timeout(timeout);
        let authorization = api_key.map(|key| {
            let mut value =
                MetadataValue::try_from(format!("Bearer {key}").as_str()).map_err(|_| TargetError::ApiKey)?;
            value.set_sensitive(true);
            Ok(value)
        });
        Ok(Self { base, endpoint, authorization: authorization.transpose()?, connections: Mutex::default(), timeout })
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    pub fn address(&self) -> String {
        let uri = self.endpoint.uri();
        format!("{}:{}", uri.host().unwrap_or(""), uri.port_u16().unwrap_or(80))
    }

    pub async fn model(&self) -> Result<String, Failure> {
        let place = self.place();
        let request = self.request(GetModelRequest::default());
        let ask = async { place.client().get_model(request).await.map_err(|status| failure_of(&status)) };
        let answer = tokio::time::timeout(self.timeout, ask).await.unwrap_or(Err(Failure::Timeout))?;
        Ok(answer.into_inner().id)
    }

    /// Sends `request` and reads the streamed answer into `record`. What arrived before a failure stays in the record;
    /// its `failure` and `ended_ns` are set here.
    pub async fn stream(&self, request: GrpcRequest, clock: Clock, record: &mut RequestRecord) {
        let outcome = tokio::time::timeout(self.timeout, self.exchange(request, clock, record)).await;
        record.failure = outcome.unwrap_or(Err(Failure::Timeout)).err();
        record.ended_ns = clock.now_ns();
    }

    async fn exchange(&self, request: GrpcRequest, clock: Clock, record: &mut RequestRecord) -> Result<(), Failure> {
        let place = self.place();
        let answer = match request {
            GrpcRequest::Generate(request) => place.client().generate(self.request(request)).await,
            GrpcRequest::Chat(request) => place.client().chat(self.request(request)).await,
        };
        let answer = answer.map_err(|status| failure_of(&status))?;
        let mut messages = answer.into_inner();
        while let Some(message) = messages.message().await.map_err(|status| failure_of(&status))? {
            let now_ns = clock.now_ns();
            match message.event {
                Some(Event::Started(started)) => record.prompt_tokens = Some(started.prompt_tokens.into()),
                Some(Event::Delta(delta)) => {
                    if !delta.text.is_empty() {
                        record.add_chunk(now_ns)?;
                    }
                    record.keep_text(&delta.text)?;
                }
                Some(Event::Finished(finished)) => {
                    record.finish_reason = Some(in_words(finished.reason()).to_owned());
                    record.finished_ns = Some(now_ns);
                    record.completion_tokens = Some(finished.completion_tokens.into());
                    record.cached_tokens = Some(finished.cached_tokens.into());
                }
                None => return Err(Failure::BadMessage),
            }
        }
        if record.finished_ns.is_some() { Ok(()) } else { Err(Failure::Truncated) }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert(AUTHORIZATION.as_str(), authorization.clone());
        }
        request
    }

    /// A place on the first connection that has one, or on a new one.
    fn place(&self) -> Place {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let free =
            connections.iter().find(|connection| connection.streams.load(Ordering::Relaxed) < STREAMS_A_CONNECTION);
        let connection = free.cloned().unwrap_or_else(|| {
            let opened = Connection { channel: self.endpoint.connect_lazy(), streams: Arc::default() };
            connections.push(opened.clone());
            opened
        });
        connection.streams.fetch_add(1, Ordering::Relaxed);
        Place(connection)
    }
}

impl Place {
    fn client(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.0.channel.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The words of OpenAI's interface.
fn in_words(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Unspecified => "unspecified",
    }
}

/// A status that the server sent has no cause on this side; one that stands for a broken connection has.
fn failure_of(status: &Status) -> Failure {
    let Some(cause) = status.source() else {
        return Failure::Grpc { code: status.code(), message: printable(status.message(), 200) };
    };
    let is_connect =
        std::iter::successors(Some(cause), |&error| error.source()).any(|error| error.is::<ConnectError>());
    if is_connect { Failure::Connect(chain(cause)) } else { Failure::ConnectionLost(chain(cause)) }
}

#[cfg(test)]
mod tests;
