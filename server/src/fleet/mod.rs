//! Hosts that join: groups on other machines as replicas of one front end.
//!
//! The border is the engine's seam. On the front end's side [`place`] owns the other end of an [`EngineHandle`] and
//! speaks to the host that has the place; [`listen`] lets hosts in, or says what does not fit. On the host [`host`]
//! takes messages and drives a handle of its own: a group, or a router in front of several. So nothing else learns of
//! the network. [`wire`] translates, [`secrets`] has certificates and the token. [`Played`]
//! is a host without a network.
//!
//! A stream is an epoch. What belongs to it ends with it on both ends: the front end hands its sequences on, prompt and
//! tokens so far, and the host cancels them. What comes late is on a stream that nobody reads.
//!
//! [`EngineHandle`]: crate::engine::EngineHandle

mod first;
mod host;
mod listen;
mod place;
mod played;
mod secrets;
mod session;
#[cfg(test)]
mod tests;
mod wire;

use std::time::Duration;

use looplane_proto::worker::v1::Vocabulary;
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};

pub use host::{HostError, JoinConfig, join};
pub use listen::{Fleet, ListenConfig};
pub use played::Played;
pub use secrets::{FrontSecrets, HostSecrets, TlsFiles};

/// Of the protocol: both ends have the same.
const VERSION: u32 = 1;
/// Each end sends something at least as often.
const BEAT: Duration = Duration::from_secs(1);
/// So many beats without a message, and the other end is given up.
const MOST_SILENT: u32 = 5;
/// A host has so long for its handshake, and for its first message.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of a message: the longest prompt with log-probabilities of all of its tokens stays below.
const MOST_MESSAGE_BYTES: usize = 256 << 20;
/// Bytes of a host's first message.
const MOST_HELLO_BYTES: u32 = 64 << 10;
/// Bytes that may be under way to a receiver: a long prompt crosses in few round trips.
const WINDOW_BYTES: u32 = 4 << 20;

/// What both ends speak over: TLS, or TCP as it is on a loopback address.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Names the texts of the tokens, which grammars are made of; nothing where there are none.
pub fn vocabulary_digest(vocabulary: Option<&Vocabulary>) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    vocabulary.map_or_else(String::new, |vocabulary| hex(&Sha256::digest(vocabulary.encode_to_vec())[..8]))
}

/// An error with its causes: what broke a connection is the last of them.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string);
    let mut words: Vec<String> = Vec::new();
    for cause in causes {
        // Many say their cause themselves.
        if !words.iter().any(|said| said.contains(&cause)) {
            words.push(cause);
        }
    }
    words.join(": ")
}
