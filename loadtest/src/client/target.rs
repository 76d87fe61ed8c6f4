//! What is measured: a server and the protocol that its address names.

use std::time::Duration;

use bytes::Bytes;

use crate::client::grpc::{GrpcClient, GrpcRequest};
use crate::client::http::{Client, TargetError};
use crate::client::record::{Clock, Failure, RequestRecord};
use crate::load::conduct::Conduct;

const GRPC: &str = "grpc://";

/// Client of one server.
#[derive(Debug)]
pub enum Target {
    /// OpenAI's interface, at `http://HOST:PORT`.
    Http(Box<Client>),
    /// Looplane's own interface, at `grpc://HOST:PORT`.
    Grpc(Box<GrpcClient>),
}

/// A request made ready beforehand, so that nothing but sending it is measured.
pub enum Ready<'a> {
    Http(&'a Client, &'static str, Bytes),
    Grpc(&'a GrpcClient, Box<GrpcRequest>),
}

pub fn is_grpc(address: &str) -> bool {
    address.trim().starts_with(GRPC)
}

impl Target {
    /// A client of the server at `address`, whose requests each end within `timeout`. Opens no connection yet.
    pub fn new(address: &str, api_key: Option<&str>, timeout: Duration) -> Result<Self, TargetError> {
        match address.trim().strip_prefix(GRPC) {
            Some(authority) => GrpcClient::new(authority.trim_end_matches('/'), api_key, timeout)
                .map(|client| Self::Grpc(Box::new(client))),
            None => Client::new(address, api_key, timeout).map(|client| Self::Http(Box::new(client))),
        }
    }

    pub fn base(&self) -> &str {
        match self {
            Self::Http(client) => client.base(),
            Self::Grpc(client) => client.base(),
        }
    }

    /// Where it listens: `HOST:PORT`.
    pub fn address(&self) -> String {
        match self {
            Self::Http(client) => client.address(),
            Self::Grpc(client) => client.address(),
        }
    }

    pub async fn first_model(&self) -> Result<String, Failure> {
        match self {
            Self::Http(client) => client.first_model().await,
            Self::Grpc(client) => client.model().await,
        }
    }
}

impl Ready<'_> {
    /// What a client of this conduct sends instead. Broken bodies are of HTTP: `FaultArgs::check` sees to it.
    pub fn misused(self, conduct: Conduct) -> Self {
        match self {
            Self::Http(client, path, body) => Self::Http(client, path, conduct.body(body)),
            Self::Grpc(..) => self,
        }
    }

    /// Sends the request and reads the streamed answer into `record`, whose `failure` and `ended_ns` are set here.
    pub async fn send(self, clock: Clock, record: &mut RequestRecord) {
        match self {
            Self::Http(client, path, body) => client.stream(path, body, clock, record).await,
            Self::Grpc(client, request) => client.stream(*request, clock, record).await,
        }
    }
}
