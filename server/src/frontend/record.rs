//! What the log, and a trace, say of each request at its end.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use axum::http::HeaderValue;

use crate::{
    drafts::DraftStep,
    engine::{FinishReason, Times},
    keys::Key,
    trace::{self, Phases, Traces},
};

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

/// A request from its arrival to its end. Everything that works for it shares it; the last to drop it writes the line,
/// if the request took a place: all others are answered at once.
#[derive(Debug)]
pub struct Record {
    request_id: RequestId,
    arrived: Instant,
    arrived_at: SystemTime,
    /// The trace that it belongs to, if any, and where its spans go if they are wanted.
    trace: Option<trace::Context>,
    traces: Option<Traces>,
    entered: OnceLock<Entered>,
    /// Of the answer's head; 0 before there is one.
    http_status: AtomicU16,
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    choices: AtomicU32,
    accepted: OnceLock<Duration>,
    first_token: OnceLock<Duration>,
    sequences: Mutex<Sequences>,
    /// Choices that have not ended.
    open_choices: AtomicU32,
    at_length: AtomicBool,
    error: OnceLock<&'static str>,
}

/// How far a request is. Times count from its arrival.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Its name.
    pub id: RequestId,
    /// What it asked for.
    pub route: &'static str,
    /// Up to now, or its end.
    pub total: Duration,
    /// When it came how far, of what is known by now.
    pub phases: Phases,
    /// Sequences.
    pub choices: u32,
    /// Of its prompts.
    pub prompt_tokens: u64,
    /// Of its answers so far.
    pub completion_tokens: u64,
    /// Why it ended, if it did.
    pub reason: Option<&'static str>,
}

/// What asked for a place.
#[derive(Debug)]
struct Entered {
    route: &'static str,
    /// Whose it is. The key itself is not known here.
    key: Option<Arc<Key>>,
}

/// What is known of a request's sequences once they are let go.
#[derive(Debug, Default)]
struct Sequences {
    phases: Phases,
    cached_tokens: u64,
    drafted_tokens: u64,
    accepted_tokens: u64,
}

impl Record {
    /// A request that has just arrived. Its spans go to `traces`, if its trace is recorded.
    pub fn new(request_id: RequestId, trace: Option<trace::Context>, traces: Option<Traces>) -> Self {
        Self {
            request_id,
            arrived: Instant::now(),
            arrived_at: SystemTime::now(),
            traces: traces.filter(|_| trace.as_ref().is_some_and(trace::Context::is_sampled)),
            trace,
            entered: OnceLock::new(),
            http_status: AtomicU16::new(0),
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
            choices: AtomicU32::new(0),
            accepted: OnceLock::new(),
            first_token: OnceLock::new(),
            sequences: Mutex::default(),
            // Until it is accepted, one that will not come to its end.
            open_choices: AtomicU32::new(1),
            at_length: AtomicBool::new(false),
            error: OnceLock::new(),
        }
    }

    /// Its name.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// When it came.
    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// It asks for a place, for what `route` names.
    pub(super) fn enters(&self, route: &'static str, key: Option<Arc<Key>>) {
        let _ = self.entered.set(Entered { route, key });
    }

    /// The head of its answer is made.
    pub fn answered(&self, http_status: u16) {
        self.http_status.store(http_status, Relaxed);
    }

    /// What the client is told of the span that is exported, if one is.
    pub fn exported(&self) -> Option<HeaderValue> {
        self.traces.as_ref().and(self.trace.as_ref()).map(trace::Context::response)
    }

    /// The engine has queued its sequences.
    pub(super) fn accepted(&self, prompt_tokens: u64, choices: u32) {
        self.prompt_tokens.store(prompt_tokens, Relaxed);
        self.choices.store(choices, Relaxed);
        self.open_choices.store(choices, Relaxed);
        let _ = self.accepted.set(self.arrived.elapsed());
        if let Some(key) = self.key() {
            key.spend_prompt(prompt_tokens);
        }
    }

    /// A choice got a token.
    pub(super) fn token(&self) {
        self.completion_tokens.fetch_add(1, Relaxed);
        self.first_token.get_or_init(|| self.arrived.elapsed());
        if let Some(key) = self.key() {
            key.spend_completion(1);
        }
    }

    /// Whose it is.
    pub(super) fn key(&self) -> Option<&Arc<Key>> {
        self.entered.get()?.key.as_ref()
    }

    /// How far it is.
    pub(super) fn progress(&self) -> Progress {
        Progress {
            id: self.request_id.clone(),
            route: self.entered.get().map_or("", |entered| entered.route),
            total: self.arrived.elapsed(),
            phases: self.phases(),
            choices: self.choices.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            completion_tokens: self.completion_tokens.load(Relaxed),
            reason: None,
        }
    }

    /// Why it is over, if it is.
    pub(super) fn ended(&self) -> Progress {
        Progress { reason: Some(self.reason()), ..self.progress() }
    }

    fn phases(&self) -> Phases {
        let phases = self.sequences.lock().unwrap_or_else(PoisonError::into_inner).phases;
        Phases { submitted: phases.submitted.or(self.accepted.get().copied()), ..phases }
    }

    /// A sequence had its first token.
    pub(super) fn computed(&self, times: Times) {
        let mut sequences = self.sequences.lock().unwrap_or_else(PoisonError::into_inner);
        reach(&mut sequences.phases, self.arrived, times);
    }

    /// A sequence was let go; `times` are known if it had a token, `cached_tokens` those of a prompt that count.
    pub(super) fn let_go(&self, times: Option<Times>, cached_tokens: u32, drafts: &[DraftStep]) {
        let mut sequences = self.sequences.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(times) = times {
            reach(&mut sequences.phases, self.arrived, times);
            sequences.phases.ended = Some(self.arrived.elapsed());
        }
        sequences.cached_tokens += u64::from(cached_tokens);
        for DraftStep { drafted, accepted } in drafts {
            sequences.drafted_tokens += u64::from(*drafted);
            sequences.accepted_tokens += u64::from(*accepted);
        }
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

/// Of several sequences the first counts.
fn reach(phases: &mut Phases, arrived: Instant, times: Times) {
    for (known, at) in [
        (&mut phases.submitted, times.submitted),
        (&mut phases.admitted, times.admitted),
        (&mut phases.computed, times.computed),
    ] {
        let after = at.into_std().saturating_duration_since(arrived);
        *known = Some(known.unwrap_or(Duration::MAX).min(after));
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let phases = self.phases();
        let Some(Entered { route, key }) = self.entered.get() else { return };
        let sequences = self.sequences.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Sequences { cached_tokens, drafted_tokens, accepted_tokens, .. } = *sequences;
        let request = trace::Request {
            id: self.request_id.as_str(),
            key: key.as_ref().map(|key| &*key.id),
            route,
            http_status: Some(self.http_status.load(Relaxed)).filter(|status| *status > 0),
            arrived: self.arrived_at,
            total: self.arrived.elapsed(),
            phases,
            choices: self.choices.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            cached_tokens,
            completion_tokens: self.completion_tokens.load(Relaxed),
            drafted_tokens,
            accepted_tokens,
            reason: self.reason(),
            failed: !matches!(self.reason(), "stop" | "length"),
        };
        let milliseconds = |time: Option<Duration>| time.map(|time| time.as_micros() as f64 / 1e3);
        tracing::info!(
            request_id = request.id,
            trace_id = self.trace.as_ref().map(|trace| tracing::field::display(trace.trace_id())),
            key = request.key,
            route,
            status = request.http_status,
            reason = request.reason,
            prompt_tokens = request.prompt_tokens,
            cached_tokens,
            completion_tokens = request.completion_tokens,
            drafted_tokens,
            accepted_tokens,
            prepare_ms = milliseconds(phases.submitted),
            queue_ms = milliseconds(phases.queue()),
            prefill_ms = milliseconds(phases.prefill()),
            decode_ms = milliseconds(phases.decode()),
            first_token_ms = milliseconds(self.first_token.get().copied()),
            total_ms = milliseconds(Some(request.total)),
            "request ended"
        );
        if let (Some(traces), Some(context)) = (&self.traces, &self.trace) {
            traces.ended(&request, context);
        }
    }
}
