//! A stream to a host that has joined, at the front end.

use looplane_proto::fleet::v1::{FrontMessage, HostMessage, front_message};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::DropGuard;
use tonic::{Status, Streaming};

use super::wire::HostStatus;
use crate::engine::{EngineState, ModelInfo};

/// A host that has joined. Dropping it frees its place and closes its connection.
#[derive(Debug)]
pub(super) struct Session {
    /// Its address.
    pub(super) host: String,
    pub(super) model: ModelInfo,
    pub(super) status: HostStatus,
    pub(super) messages: Streaming<HostMessage>,
    // Unbounded as a channel, bounded in content, as the commands are from which its messages come.
    pub(super) to_host: mpsc::UnboundedSender<Result<FrontMessage, Status>>,
    pub(super) _place: OwnedSemaphorePermit,
    pub(super) _connection: DropGuard,
}

impl Session {
    /// Sends a message.
    pub(super) fn send(&self, message: front_message::Message) {
        // A stream that has ended is noticed where it is read.
        let _ = self.to_host.send(Ok(FrontMessage { message: Some(message) }));
    }

    /// Tells it why its stream ends.
    pub(super) fn end(&self, why: String) {
        // Nobody reads it where the connection is gone.
        let _ = self.to_host.send(Err(Status::unavailable(why)));
    }

    /// It says that it goes.
    pub(super) fn is_leaving(&self) -> bool {
        self.status.state == EngineState::Draining
    }
}

/// The host's next message; none ever without a host. Cancel-safe.
pub(super) async fn next(session: &mut Option<Session>) -> Result<Option<HostMessage>, Status> {
    match session {
        Some(session) => session.messages.message().await,
        None => std::future::pending().await,
    }
}
