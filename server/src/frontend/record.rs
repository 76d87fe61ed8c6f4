//! What the log says of each request, in one line at its end.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{engine::FinishReason, keys::Key};

/// A request's name in responses and in the log: its client's, or one that was drawn.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// As it stands in the header.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RequestId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

/// A request from its arrival to its end. Everything that works for it shares it; the last to drop it writes the line.
#[derive(Debug)]
pub struct Record {
    request_id: RequestId,
    /// Whose it is. The key itself is not known here.
    key: Option<Arc<Key>>,
    route: &'static str,
    arrived: Instant,
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    accepted: OnceLock<Duration>,
    first_token: OnceLock<Duration>,
    /// Choices that have not ended.
    open_choices: AtomicU32,
    at_length: AtomicBool,
    error: OnceLock<&'static str>,
}

impl Record {
    /// A request that has just arrived.
    pub(super) fn new(request_id: &RequestId, key: Option<Arc<Key>>, route: &'static str) -> Self {
        Self {
            request_id: request_id.clone(),
            key,
            route,
            arrived: Instant::now(),
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
            accepted: OnceLock::new(),
            first_token: OnceLock::new(),
            // Until it is accepted, one that will not come to its end.
            open_choices: AtomicU32::new(1),
            at_length: AtomicBool::new(false),
            error: OnceLock::new(),
        }
    }

    /// When it came.
    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// The engine has queued its sequences.
    pub(super) fn accepted(&self, prompt_tokens: u64, choices: u32) {
        self.prompt_tokens.store(prompt_tokens, Relaxed);
        self.open_choices.store(choices, Relaxed);
        let _ = self.accepted.set(self.arrived.elapsed());
        if let Some(key) = &self.key {
            key.spend_prompt(prompt_tokens);
        }
    }

    /// A choice got a token.
    pub(super) fn token(&self) {
        self.completion_tokens.fetch_add(1, Relaxed);
        self.first_token.get_or_init(|| self.arrived.elapsed());
        if let Some(key) = &self.key {
            key.spend_completion(1);
        }
    }

    /// Whose it is.
    pub(super) fn key(&self) -> Option<&Arc<Key>> {
        self.key.as_ref()
    }

    /// A choice came to its end.
    pub fn finished(&self, reason: FinishReason) {
        if reason == FinishReason::Length {
            self.at_length.store(true, Relaxed);
        }
        self.open_choices.fetch_sub(1, Relaxed);
    }

    /// The client is told of an error, by this code. The first counts.
    pub fn failed(&self, code: &'static str) {
        let _ = self.error.set(code);
    }

    /// "length" where that ended any choice.
    fn reason(&self) -> &'static str {
        match self.error.get() {
            Some(code) => code,
            None if self.open_choices.load(Relaxed) > 0 => "client_gone",
            None if self.at_length.load(Relaxed) => "length",
            None => "stop",
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let milliseconds = |time: Option<&Duration>| time.map(|time| time.as_millis() as u64);
        tracing::info!(
            request_id = self.request_id.as_str(),
            key = self.key.as_ref().map(|key| &*key.id),
            route = self.route,
            reason = self.reason(),
            prompt_tokens = self.prompt_tokens.load(Relaxed),
            completion_tokens = self.completion_tokens.load(Relaxed),
            queued_ms = milliseconds(self.accepted.get()),
            first_token_ms = milliseconds(self.first_token.get()),
            total_ms = self.arrived.elapsed().as_millis() as u64,
            "request ended"
        );
    }
}
