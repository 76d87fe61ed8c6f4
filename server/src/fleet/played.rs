//! A place whose host is played: for who looks for bytes that harm the front end.

use std::sync::Arc;
use std::time::Duration;

use looplane_proto::fleet::v1::{Answer, Hello, HostMessage, host_message};
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use tonic_prost::ProstDecoder;

use super::listen::{Door, House};
use super::place::Place;
use super::session::Session;
use crate::engine::{Command, EngineHandle, EngineState, SequenceRequest, SequenceStream, Standing, Submission};
use crate::group::Common;

/// A front end's place, with a host that says anything, and no network between them.
pub struct Played {
    place: Place,
    handle: EngineHandle,
    requests: u64,
    /// What the front end says, which nobody reads.
    _to_host: Box<dyn Send>,
}

impl Played {
    /// The first message of a host, as its bytes.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn join(hello: &[u8]) -> Result<Self, String> {
        let common = Arc::new(Common::new(Duration::ZERO));
        let (mut place, handle, to_place) = Place::new(0, common.clone());
        let house = House { common, vocabulary_digest: String::new(), doors: vec![Door::new(to_place)] };
        let hello = Hello::decode(hello).map_err(|error| error.to_string())?;
        let (_, permit, model, status) = house.admit(hello).map_err(|refusal| refusal.to_string())?;
        let (to_host, read_by_nobody) = mpsc::unbounded_channel();
        place.joined(Session {
            host: "played".into(),
            model,
            status,
            messages: Streaming::new_empty(ProstDecoder::<HostMessage>::default(), tonic::body::Body::empty()),
            to_host,
            _place: permit,
            _connection: CancellationToken::new().drop_guard(),
        });
        Ok(Self { place, handle, requests: 0, _to_host: Box::new(read_by_nobody) })
    }

    /// Asks for sequences, which the host says it has queued. Their numbers are those of the front end, from 0 on; none
    /// come where the host is lost.
    pub fn submit(&mut self, requests: Vec<SequenceRequest>) -> Vec<SequenceStream> {
        let (reply, mut answer) = oneshot::channel();
        let submission = Submission::new(requests, Standing::default(), Instant::now(), reply);
        self.place.command(Command::Submit(submission));
        let queued = Answer { submission: self.requests, refused: None };
        self.requests += 1;
        self.place.heard(Ok(Some(HostMessage { message: Some(host_message::Message::Answer(queued)) })));
        answer.try_recv().ok().and_then(Result::ok).unwrap_or_default()
    }

    /// A message of the host, as its bytes.
    ///
    /// # Errors
    /// The host is lost; says why.
    pub fn say(&mut self, message: &[u8]) -> Result<(), String> {
        let message = HostMessage::decode(message).map(Some).map_err(|error| Status::internal(error.to_string()));
        self.place.heard(message);
        match (self.place.has_host(), self.handle.state()) {
            (true, _) => Ok(()),
            (false, EngineState::Loading(why)) => Err(why),
            (false, state) => Err(format!("{state:?}")),
        }
    }

    /// As the front end has it.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}
